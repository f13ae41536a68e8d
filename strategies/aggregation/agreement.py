"""Agreement with helpers on the set of a round: who is in it, and whether all would open it.

Nothing is opened or recorded while a server asks. A set that one helper has promised is that set or none.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from ...privacy import protocol
from ...privacy.sums.masking import MaskedRelease, MaskedReleaseError, checked_header
from ...privacy.sums.opening_rule import Verdict
from ..rounds.replies import STATEMENT_TIMEOUT_S, Outcome, Reply, RoundReport, exchange, read_outcome
from ..sums.secure_aggregation import Helpers, HelpersDisagreeError, HelperUnavailableError, SecureAggregation
from ..sums.summation import CohortSet, CohortSum
from .plain import RoundContext

logger = logging.getLogger("flwr")

_BOUND = (protocol.VIEW_OPENED, protocol.VIEW_LOCKED, protocol.VIEW_VOID)  # no other set can take its place
_MOST_VIEWS = 4  # of a round: one names all that a helper disputes


class CohortAgreement:
    """Agreement of a server with helpers before a set is opened, with the patience that it has for each.

    Parameters
    ----------
    option : SecureAggregation
        The fewest releases of a set, and how often a helper or a client is asked again.
    helpers : Helpers
        The helpers of the training.
    """

    def __init__(self, option: SecureAggregation, helpers: Helpers) -> None:
        self.helpers = helpers
        self.warned: set[tuple[str, str]] = set()
        """Clients whose release was left out of a set, and why; each is logged once."""
        self._option = option
        self._unreached = 0
        self._aborted_rounds = 0  # in a row that were closed because of what a helper said of their set
        self._sealings: Counter[str] = Counter()  # by client, how often it was asked to seal a release anew
        self._disputed: dict[str, set[str]] = {}  # by helper, the clients that not all helpers dispute

    def hold(self, cohort: CohortSum, report: RoundReport, asked: Iterable[str]) -> CohortSet:
        """Take the releases of a round as the set to be opened, without clients that want more than there are."""
        wanting = cohort.wanting_more()
        if len(cohort.releases) - len(wanting) >= self._option.min_cohort:  # else it is closed, and says how many came
            report = _without(cohort, report, wanting)
            report = replace(report, unopened=report.unopened + len(wanting))
            for name in wanting:
                self._warn(name, "it wants more releases in a sum than came")
        return CohortSet(
            server_round=report.server_round,
            releases=cohort.releases,
            terms=cohort.terms,
            total=cohort.counts,
            sealed=cohort.sealed,
            ids={name: header.release_id for name, header in cohort.headers.items()},
            report=asdict(report),
            asked=tuple(asked),
            recovered=tuple(sorted(cohort.recovered.intersection(cohort.releases))),
        )

    def fewest_releases(self, held: CohortSet) -> int:
        """Return the fewest releases with which a set is opened: the larger of what its clients and the server ask."""
        return max(held.min_cohort, self._option.min_cohort)

    def too_few(self, held: CohortSet) -> str:
        """Return why a set is too small to be opened, or an empty string."""
        needed = self.fewest_releases(held)
        return f"{len(held.releases)} of at least {needed} releases" if len(held.releases) < needed else ""

    def ping(self, grid: Grid | None, held: CohortSet) -> str:
        """Return why a helper is unreachable, or an empty string; raise after ``patience`` such rounds."""
        problem = self.helpers.probe(grid) if held.sealed and grid is not None else ""
        self._unreached = self._unreached + 1 if problem else 0
        if self._unreached >= self._option.patience:
            raise HelperUnavailableError(
                f"Expected all helpers within reach, but in {self._unreached} rounds in a row, the last of them round "
                f"{held.server_round}, {problem}. No sum was opened, and clients carry over what they released. Start "
                "the helper again and resume from the checkpoint."
            )
        return problem

    def agree(self, context: RoundContext, held: CohortSet, cohort: CohortSum) -> tuple[CohortSet, str]:
        """Ask helpers whether they would open a set, and leave out clients that they dispute.

        Clients are asked for their releases under fresh masks, once a round, where that ends a dispute. Nothing is
        opened or recorded for it. Returns the set that is left, and why the round is to be closed, or an empty string.
        """
        fresh: set[str] = set()
        for _ in range(_MOST_VIEWS):
            if not held.sealed or context.grid is None:
                return held, ""
            verdicts, silent, refusing = self._views(context, context.grid, held)
            if silent:
                return held, self._abort(f"{_named(silent)} did not say whether it would open it")
            if not refusing:
                self._aborted_rounds = 0
                return held, ""
            disputed = {client for view in verdicts.values() for client in view.disputed}
            again = self._seal_again(context, held, cohort, disputed - fresh)
            fresh |= disputed
            if not disputed:
                return held, self._abort(f"{_named(refusing)} would not open it")
            held = self._undisputed(held, cohort, verdicts, refusing, disputed - again)
            if problem := self.too_few(held):
                return held, problem
        return held, self._abort("helpers dispute one client after another")

    def agree_again(self, context: RoundContext, held: CohortSet) -> str:
        """Ask helpers whether they would open a set from a checkpoint, which cannot be changed.

        It may be open at some helper already, or locked; then no other can take its place. Returns why the round is to
        be closed, or an empty string.
        """
        if not held.sealed or context.grid is None:
            return ""
        verdicts, silent, refusing = self._views(context, context.grid, held)
        if silent or any(view.would_open in _BOUND for view in verdicts.values()):
            return ""
        if not refusing:
            self._aborted_rounds = 0
            return ""
        problem = f"{_named(refusing)} would not open it"
        return problem if any(view.disputed for view in verdicts.values()) else self._abort(problem)

    def lock(self, context: RoundContext, held: CohortSet) -> str:
        """Have helpers promise to open a set, which must be saved: no other can take its place any more.

        Returns why the round is to be closed, or an empty string.
        """
        if not held.sealed or context.grid is None:
            return ""
        views = self.helpers.views(context.grid, context.session, held, context.timeout, ask=protocol.ASK_LOCK)
        if all(view is not None and view.would_open == protocol.VIEW_NO for view in views.values()):
            return self._abort(f"{_named(views)} would not promise to open it")
        return ""  # where one did, it is opened, or void at who does not

    def _views(
        self, context: RoundContext, grid: Grid, held: CohortSet
    ) -> tuple[dict[str, Verdict], list[str], list[str]]:
        """Ask helpers about a set; return what they say, who says nothing, and who would not open it."""
        views = self.helpers.views(grid, context.session, held, context.timeout)
        verdicts = {name: view for name, view in views.items() if view is not None}
        refusing = [name for name, view in verdicts.items() if view.would_open != protocol.VIEW_YES]
        return verdicts, [name for name, view in views.items() if view is None], refusing

    def _undisputed(
        self,
        held: CohortSet,
        cohort: CohortSum,
        verdicts: Mapping[str, Verdict],
        refusing: Sequence[str],
        disputed: set[str],
    ) -> CohortSet:
        """Return the set without clients that helpers dispute."""
        self._note(verdicts, disputed)
        report = _without(cohort, RoundReport(**held.report), sorted(disputed))
        for name in sorted(disputed):
            self._warn(name, f"{_named(refusing)} cannot open its seal, or has not opened what it builds on")
        return self.hold(cohort, replace(report, malformed=report.malformed + len(disputed)), held.asked)

    def _seal_again(
        self, context: RoundContext, held: CohortSet, cohort: CohortSum, disputed: Iterable[str]
    ) -> set[str]:
        """Have clients seal disputed releases anew, each a few times in a training; returns whose were replaced."""
        names = [name for name in sorted(disputed) if self._sealings[name] < self._option.patience]
        if not names or cohort.terms[0] == "nothing":  # releases that stand alone are not kept
            return set()
        self._sealings.update(names)
        found = set()
        for reply in _sealed_anew(context, held, names):
            if not isinstance(reply, Reply) or not isinstance(reply.contents, MaskedRelease):
                continue
            with suppress(MaskedReleaseError):
                # The very header that was signed before: release, name and what it is built on.
                header = checked_header(reply.contents.sealed, self.helpers.roster)
                if reply.client in set(names) - found and header == cohort.headers[reply.client]:
                    cohort.remove([reply.client])
                    cohort.add(reply)
                    found.add(reply.client)
        return found

    def _note(self, verdicts: Mapping[str, Verdict], left_out: Iterable[str]) -> None:
        """Count who is left out for what some helpers dispute; raise if one does so of more than are taken to lie."""
        by_all = set.intersection(*(set(view.disputed) for view in verdicts.values())) if len(verdicts) > 1 else set()
        for name, view in verdicts.items():
            found = self._disputed.setdefault(name, set())
            found |= set(view.disputed).intersection(left_out) - by_all
            if len(found) > self._option.max_byzantine:
                raise HelpersDisagreeError(
                    f"Expected helpers to dispute the seals of at most {self._option.max_byzantine} clients, got "
                    f"{len(found)} of helper {name!r} alone ({', '.join(map(repr, sorted(found)))}). None of them is "
                    "left out for it: have its operator look at its log, then resume from the checkpoint."
                )

    def _abort(self, problem: str) -> str:
        """Return why a round is closed because of a helper; raise after ``patience`` such rounds in a row."""
        self._aborted_rounds += 1
        if self._aborted_rounds >= self._option.patience:
            raise HelperUnavailableError(
                f"Expected helpers to say that they would open a set, or whose releases not, got none such in "
                f"{self._aborted_rounds} rounds in a row: {problem}. No sum was opened. Have its operator look at its "
                "log, then resume from the checkpoint."
            )
        return problem

    def _warn(self, client: str, problem: str) -> None:
        if (client, problem) not in self.warned:
            self.warned.add((client, problem))
            logger.warning("Client %r is left out of a round, and its release carried over: %s.", client, problem)


def _without(cohort: CohortSum, report: RoundReport, clients: Sequence[str]) -> RoundReport:
    """Take clients out of a round's sum; returns the report less these."""
    samples = cohort.remove(clients)
    return replace(report, aggregated=report.aggregated - len(clients), samples=report.samples - samples)


def _sealed_anew(context: RoundContext, held: CohortSet, names: Iterable[str]) -> Iterable[Outcome]:
    """Ask clients for their releases of this round once more, under fresh masks; return their answers."""
    if context.grid is None:
        return []
    nodes = {name: context.nodes[name] for name in names if name in context.nodes}
    asked = {protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.SESSION: context.session}
    messages = []
    for name, node_id in nodes.items():
        own = {protocol.CLIENT: name, protocol.ASK: protocol.ASK_SEAL, protocol.ACK: context.acks.get(name, 0)}
        own[protocol.RELEASE] = held.releases[name]
        content = RecordDict({protocol.CONFIG: ConfigRecord({**context.entries, **asked, **own})})
        messages.append(Message(content, dst_node_id=node_id, message_type=MessageType.TRAIN))
    replies = exchange(context.grid, messages, min(context.timeout, STATEMENT_TIMEOUT_S))
    return [read_outcome(reply, context.layout, nodes, masked=True) for reply in replies]


def _named(helpers: Iterable[str]) -> str:
    return " and ".join(f"helper {name!r}" for name in helpers)
