"""Secure aggregation from round to round: the releases that were opened, and the set that is next."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid as FlowerGrid

from ...privacy import MECHANISMS, ConfigurationError, Grid, make_mechanism, protocol
from ...privacy.accounting.noise_forecast import Forecast, lasting_noise
from ...privacy.machine.policy import MOST_SUMMED
from ...privacy.sums.masking import MaskedRelease, MaskedReleaseError, checked_header
from ...privacy.sums.opening_rule import View
from ..rounds.known_machines import Awaited, MachineDirectory
from ..rounds.replies import STATEMENT_TIMEOUT_S, Outcome, Reply, RoundReport, Vector, exchange, read_outcome
from ..sums.secure_aggregation import (
    Helpers,
    HelpersDisagreeError,
    HelperUnavailableError,
    SecureAggregation,
    SkippedSumError,
    WrongSumError,
)
from ..sums.summation import CohortSet, CohortSum, Screen, Summation, Terms
from ..sums.suspects import Suspects
from .plain import Aggregator, Closed, Opened, RoundContext, RoundOutcome, Skipped

logger = logging.getLogger("flwr")

_LARGEST_COUNT = 2.0**52  # of an honest release
_BOUND = (protocol.VIEW_OPENED, protocol.VIEW_LOCKED, protocol.VIEW_VOID)  # no other set can take its place
_MOST_VIEWS = 4  # of a round: one names all that a helper disputes
_MOST_RELEASES = 2048  # for which a mechanism's matrix is made, to say what skipped sums left behind


class Masked(Aggregator):
    """The trust of machines that release under masks.

    Each helper opens by its own rule. The state kept here lets an honest server ask for what they open, and for the
    same set again after it was killed.
    """

    masked: ClassVar[bool] = True

    def __init__(self, option: SecureAggregation, helpers: Helpers, largest_value: float) -> None:
        self.option = option
        self.helpers = helpers
        self.pending_cohort: CohortSet | None = None
        """The set to be opened, until its round is over."""
        self._most = 0  # until it is settled
        self._largest_value = largest_value
        self._ids: dict[str, str] = {}
        self._terms: Terms | None = None
        self._warned: set[tuple[str, str]] = set()
        self._unreached = 0
        self.suspects = Suspects(option.max_byzantine)
        self._lost: dict[str, list[list[int]]] = {}  # of each machine in a skipped sum, intervals of lost noise
        self._skipped: dict[str, int] = {}  # machines whose last sum was skipped, and after which release noise is lost
        self._pause = ""
        self._aborted_rounds = 0  # in a row that were closed because of what a helper said of their set
        self._sealings: Counter[str] = Counter()  # by machine, how often it was asked to seal a release anew
        self._disputed: dict[str, set[str]] = {}  # by helper, the machines that not all helpers dispute
        self.fewest_releases = option.min_cohort

    def settings(self) -> dict[str, Any]:
        return {"secure_aggregation": self.option.settled}

    def wait_for_clients(self, machines: MachineDirectory, grid: FlowerGrid, awaited: Awaited) -> None:
        """Wait for machines, and the first time for the helpers."""
        self.helpers.meet(grid, awaited)

    def settle(self, asked: int, needed: int) -> None:
        if self.option.min_cohort > asked:
            raise ConfigurationError(
                f"Expected min_cohort of at most clients_per_round = {asked}, got {self.option.min_cohort}: no round "
                "could ever be opened.",
                kind="out-of-range",
                setting="min_cohort",
                got=self.option.min_cohort,
            )
        if asked > MOST_SUMMED:
            raise ConfigurationError(
                f"Expected rounds that ask at most {MOST_SUMMED} machines under secure aggregation, got {asked}: "
                "larger sums could wrap around. Lower clients_per_round or over_selection.",
                kind="out-of-range",
                setting="clients_per_round",
                got=asked,
            )
        self._most = asked
        if self.option.min_cohort > needed:
            raise ConfigurationError(
                f"Expected rounds that wait for at least min_cohort = {self.option.min_cohort} machines, got "
                f"{needed}: raise quorum, or lower min_cohort.",
                kind="out-of-range",
                setting="quorum",
                got=needed,
            )

    @property
    def pending(self) -> bool:
        return self.pending_cohort is not None

    def log_forecast(self, forecast: Forecast) -> None:
        if not forecast.alone:
            logger.info(
                "A wrong sum is skipped, and machines mend the noise where their mechanism can. After %d the training "
                "ends with the model it has.",
                self.option.max_failed_aggregations,
            )

    def screened(self, outcomes: Iterable[Outcome], context: RoundContext, size: int) -> Iterator[Outcome]:
        """Return the outcomes of a round, with None for replies that cannot stand in its sum (:class:`.Screen`)."""
        roster = None if context.grid is None else self.helpers.roster
        known = {"opened": self._ids, "terms": self._terms, "is_late": context.is_late, "warned": self._warned}
        left_out = self.suspects.left_out
        return Screen(context.session, size, self._most, roster, **known, left_out=left_out).screened(outcomes)

    def summation(self, size: int) -> CohortSum:
        return CohortSum(size)

    def aggregate(
        self, summation: Summation, releases: Mapping[str, int], report: RoundReport, context: RoundContext
    ) -> RoundOutcome:
        if not isinstance(summation, CohortSum):
            raise ConfigurationError(
                f"Expected the sum of a cohort, got {type(summation).__name__}.", kind="wrong-type"
            )
        return self._open_cohort(self._hold(summation, report, context.asked), context, summation)

    def open_pending(self, context: RoundContext) -> RoundOutcome:
        """Open the very set that an interrupted server had saved, and for which it may have asked helpers."""
        if context.grid is None:
            raise ConfigurationError(
                "Expected the nodes of the interrupted training, got machines without messages.", kind="mismatch"
            )
        if self.pending_cohort is None:
            raise ConfigurationError("Expected a set of releases before it is opened.", kind="wrong-order")
        self.helpers.meet(context.grid, Awaited(0))
        return self._open_cohort(self.pending_cohort, context, None)

    # A set is saved before helpers are asked, locked at every helper, and then opened: a commit in two phases.

    def _open_cohort(self, held: CohortSet, context: RoundContext, cohort: CohortSum | None) -> RoundOutcome:
        """Have a set opened; ``cohort`` has its releases, None if the set is from a checkpoint."""
        closed = self._prepare(held, context, cohort)
        held = self.pending_cohort or held
        outcome = self._closed(held, closed) if closed else self._commit(held, context)
        self.pending_cohort = None
        return outcome

    def _prepare(self, held: CohortSet, context: RoundContext, cohort: CohortSum | None) -> str:
        """Agree with helpers on the set to open, save it and lock it; return why the round is closed, or ""."""
        closed = self._too_few(held)
        if not closed and cohort is not None:  # else it may be open at a helper already
            if held.sealed:
                # Before any helper is asked: once it may be open, there must never be another one in its place.
                context.save()
            closed = self.ping_helpers(context.grid, held)
        if not closed:
            closed = self.agree(context, cohort)
        if self.pending_cohort is not held and self.pending_cohort is not None and not closed:
            context.save()  # as above: what was saved before is never opened
        return closed or self.lock(context)

    def _commit(self, held: CohortSet, context: RoundContext) -> RoundOutcome:
        """Open a set that is locked."""
        report = RoundReport(**held.report)
        try:
            total = self.open(held, context)
        except SkippedSumError as error:
            skipped = replace(report, aggregated=0, samples=0, skipped=report.aggregated, closed=error.closed)
            self._skip(held, context.acks, skipped, [*context.askable, *sorted(self.excluded)], error)
            self._opened(held)
            return Skipped(skipped, held.asked, held.releases)
        self._take(held, context.acks)
        self.suspects.lets_in = self._residual_noise_free
        self.suspects.correct()
        self._opened(held)
        return Opened(report, held.asked, total, held.releases, stands_alone=held.terms[0] != "last-opened")

    def _closed(self, held: CohortSet, why: str) -> Closed:
        """Note a round of which nothing was opened."""
        report = RoundReport(**held.report)
        report = replace(report, aggregated=0, samples=0, unopened=report.aggregated + report.unopened, closed=why)
        if self._too_few(held):
            self.suspects.too_few()
        logger.warning("Round %d is closed: %s. Machines carry over what they released.", held.server_round, why)
        return Closed(report, held.asked)

    def _hold(self, cohort: CohortSum, report: RoundReport, asked: Iterable[str]) -> CohortSet:
        """Take the releases of a round as the set to be opened, without machines that want more than there are."""
        wanting = cohort.wanting_more()
        if len(cohort.releases) - len(wanting) >= self.option.min_cohort:  # else it is closed, and says how many came
            report = self._without(cohort, report, wanting)
            report = replace(report, unopened=report.unopened + len(wanting))
            for name in wanting:
                self._warn(name, "it wants more releases in a sum than came")
        held = self.pending_cohort = CohortSet(
            server_round=report.server_round,
            releases=cohort.releases,
            terms=cohort.terms,
            min_cohort=cohort.min_cohort,
            total=cohort.counts,
            sealed=cohort.sealed,
            ids={name: header.release_id for name, header in cohort.headers.items()},
            report=asdict(report),
            asked=tuple(asked),
            mended=tuple(sorted(cohort.mended.intersection(cohort.releases))),
        )
        return held

    @staticmethod
    def _without(cohort: CohortSum, report: RoundReport, machines: Sequence[str]) -> RoundReport:
        """Take machines out of a round's sum; returns the report less these."""
        samples = cohort.remove(machines)
        return replace(report, aggregated=report.aggregated - len(machines), samples=report.samples - samples)

    def _warn(self, machine: str, problem: str) -> None:
        if (machine, problem) not in self._warned:
            self._warned.add((machine, problem))
            logger.warning("Machine %r is left out of a round, and its release carried over: %s.", machine, problem)

    def _too_few(self, held: CohortSet) -> str:
        """Why a set is too small to be opened, or an empty string."""
        needed = max(held.min_cohort, self.option.min_cohort)
        return f"{len(held.releases)} of at least {needed} releases" if len(held.releases) < needed else ""

    def ping_helpers(self, grid: FlowerGrid | None, held: CohortSet) -> str:
        """Why a helper cannot be asked now, or an empty string; raises where patience is at its end."""
        problem = self.helpers.greet(grid) if held.sealed and grid is not None else ""
        self._unreached = self._unreached + 1 if problem else 0
        if self._unreached >= self.option.patience:
            raise HelperUnavailableError(
                f"Expected all helpers within reach, but in {self._unreached} rounds in a row, the last of them round "
                f"{held.server_round}, {problem}. No sum was opened, and machines carry over what they released. Start "
                "the helper again and resume from the checkpoint."
            )
        return problem

    def agree(self, context: RoundContext, cohort: CohortSum | None) -> str:
        """Ask helpers whether they would open the held set, and leave out machines that they dispute; changes it.

        Machines are asked for their releases under fresh masks, once a round, where that ends a dispute. Nothing is
        opened or recorded for it. Returns why the round is to be closed, or an empty string. ``cohort`` is None for a
        set from a checkpoint, which cannot be changed, and may be open at some helper already, or locked.
        """
        fresh: set[str] = set()
        for _ in range(_MOST_VIEWS):
            held = self.pending_cohort
            if held is None or not held.sealed or context.grid is None:
                return ""
            views = self.helpers.views(context.grid, context.session, held, context.timeout)
            said = {name: view for name, view in views.items() if view is not None}
            if cohort is None and any(view.would_open in _BOUND for view in said.values()):
                return ""
            if silent := [name for name, view in views.items() if view is None]:
                return (
                    ""
                    if cohort is None
                    else self._abort_round(f"{_named(silent)} did not say whether it would open it")
                )
            if refusing := [name for name, view in said.items() if view.would_open != protocol.VIEW_YES]:
                disputed = {machine for view in said.values() for machine in view.disputed}
                again = set() if cohort is None else self._seal_again(context, cohort, disputed - fresh)
                fresh |= disputed
                if not disputed:
                    return self._abort_round(f"{_named(refusing)} would not open it")
                if cohort is None:
                    return f"{_named(refusing)} would not open it"
                disputed -= again
                self._note(said, disputed)
                report = self._without(cohort, RoundReport(**held.report), sorted(disputed))
                for name in sorted(disputed):
                    self._warn(name, f"{_named(refusing)} cannot open its seal, or has not opened what it builds on")
                self._hold(cohort, replace(report, malformed=report.malformed + len(disputed)), held.asked)
                if self._too_few(self.pending_cohort or held):
                    return self._too_few(self.pending_cohort or held)
            else:
                self._aborted_rounds = 0
                return ""
        return self._abort_round("helpers dispute one machine after another")

    def _seal_again(self, context: RoundContext, cohort: CohortSum, disputed: Iterable[str]) -> set[str]:
        """Have machines seal disputed releases anew, each a few times in a training; returns whose were replaced."""
        names = [name for name in sorted(disputed) if self._sealings[name] < self.option.patience]
        if not names or cohort.terms[0] == "nothing":  # releases that stand alone are not kept
            return set()
        self._sealings.update(names)
        found = set()
        for reply in self._sealed_anew(context, names):
            if not isinstance(reply, Reply) or not isinstance(reply.contents, MaskedRelease):
                continue
            with suppress(MaskedReleaseError):
                # The very header that was signed before: release, name and what it is built on.
                header = checked_header(reply.contents.sealed, self.helpers.roster)
                if reply.machine in set(names) - found and header == cohort.headers[reply.machine]:
                    cohort.remove([reply.machine])
                    cohort.add(reply)
                    found.add(reply.machine)
        return found

    def _sealed_anew(self, context: RoundContext, names: Iterable[str]) -> Iterable[Outcome]:
        """Ask machines for their releases of this round once more, under fresh masks; return their answers."""
        if context.grid is None or self.pending_cohort is None:
            return []
        nodes = {name: context.nodes[name] for name in names if name in context.nodes}
        asked = {protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.SESSION: context.session}
        messages = []
        for name, node_id in nodes.items():
            own = {protocol.MACHINE: name, protocol.ASK: protocol.ASK_SEAL, protocol.ACK: context.acks.get(name, 0)}
            own[protocol.RELEASE] = self.pending_cohort.releases[name]
            content = RecordDict({protocol.CONFIG: ConfigRecord({**context.entries, **asked, **own})})
            messages.append(Message(content, dst_node_id=node_id, message_type=MessageType.TRAIN))
        replies = exchange(context.grid, messages, min(context.timeout, STATEMENT_TIMEOUT_S))
        return [read_outcome(reply, context.layout, nodes, masked=True) for reply in replies]

    def lock(self, context: RoundContext) -> str:
        """Have helpers promise to open the held set, which must be saved: no other can take its place any more.

        Returns why the round is to be closed, or an empty string.
        """
        held = self.pending_cohort
        if held is None or not held.sealed or context.grid is None:
            return ""
        views = self.helpers.views(context.grid, context.session, held, context.timeout, ask=protocol.ASK_LOCK)
        if all(view is not None and view.would_open == protocol.VIEW_NO for view in views.values()):
            return self._abort_round(f"{_named(views)} would not promise to open it")
        return ""  # where one did, it is opened, or void at who does not

    def _abort_round(self, problem: str) -> str:
        """A round that is closed because of a helper; raises where patience is at its end."""
        self._aborted_rounds += 1
        if self._aborted_rounds >= self.option.patience:
            raise HelperUnavailableError(
                f"Expected helpers to say that they would open a set, or whose releases not, got none such in "
                f"{self._aborted_rounds} rounds in a row: {problem}. No sum was opened. Have its operator look at its "
                "log, then resume from the checkpoint."
            )
        return problem

    def _note(self, said: Mapping[str, View], left_out: Iterable[str]) -> None:
        """Count who is left out for what some helpers dispute; raise if one does so of more than are taken to lie."""
        by_all = set.intersection(*(set(view.disputed) for view in said.values())) if len(said) > 1 else set()
        for name, view in said.items():
            found = self._disputed.setdefault(name, set())
            found |= set(view.disputed).intersection(left_out) - by_all
            if len(found) > self.option.max_byzantine:
                raise HelpersDisagreeError(
                    f"Expected helpers to dispute the seals of at most {self.option.max_byzantine} machines, got "
                    f"{len(found)} of helper {name!r} alone ({', '.join(map(repr, sorted(found)))}). None of them is "
                    "left out for it: have its operator look at its log, then resume from the checkpoint."
                )

    def open(self, held: CohortSet, context: RoundContext) -> Vector:
        """The sum of a set, shape (d,).

        Raises
        ------
        SkippedSumError
            If it is no sum of releases, or void at a helper; the round is over all the same.
        """
        unmasked = held.total
        if held.sealed and context.grid is not None:
            unmasked = self.helpers.open(context.grid, context.session, held, context.timeout)
        counts, spacing = unmasked.view(np.int64), held.terms[2]
        # A wrong mask makes counts uniform over all 2^64.
        most = len(held.releases) * min(self._largest_value / spacing, _LARGEST_COUNT)
        found = max(int(counts.max(initial=0)), -int(counts.min(initial=0)))
        if found > most:
            raise WrongSumError(
                f"Expected the sum of {len(held.releases)} releases to stay below {most * spacing:g}, got "
                f"{found * spacing:g}: a machine or a helper did not mask as it says. Which, nobody can tell."
            )
        return Grid(spacing).values(counts)

    def _opened(self, held: CohortSet) -> None:
        """Note that a set was opened, right or wrong: machines build on it from now on."""
        self._ids.update(held.ids)
        self._terms = held.terms

    @property
    def excluded(self) -> Collection[str]:
        return self.suspects.left_out

    @property
    def _residual_noise_free(self) -> bool:
        """Whether skipped sums have left no noise behind, but for what liars say."""
        return sum(map(bool, self._lost.values())) <= self.option.max_byzantine

    @property
    def skipped(self) -> Collection[str]:
        """The machines whose last sum was skipped."""
        return self._skipped.keys()

    def _take(self, held: CohortSet, acks: Mapping[str, int]) -> None:
        """Note that a sum of releases built on ``acks`` enters the model."""
        for name in held.releases:
            self._noise_begins(held, name, acks)
            self._skipped.pop(name, None)

    def _noise_begins(self, held: CohortSet, name: str, acks: Mapping[str, int]) -> int:
        """After which release the noise in one of a set begins; what was skipped before and is not mended is lost."""
        ack = acks.get(name, 0)
        begins = self._skipped.get(name, ack)
        if begins == ack or name in held.mended:
            return begins
        lost = self._lost[name]
        if lost and lost[-1][1] == begins:
            lost[-1][1] = ack
        else:
            lost.append([begins, ack])
        return ack

    def _skip(
        self,
        held: CohortSet,
        acks: Mapping[str, int],
        report: RoundReport,
        names: Sequence[str],
        why: SkippedSumError,
    ) -> None:
        """Note a sum of which nothing enters the model, and if it was wrong choose whom the next rounds leave out.

        Helpers have recorded the set, so its releases are never opened again, and what machines say from now on is
        built on them: of a stream, their part is missing from the sum of all. So is its noise, unless a machine's next
        release mends that.
        """
        for name in held.releases:
            self._lost.setdefault(name, [])
            self._skipped[name] = self._noise_begins(held, name, acks)
        if not isinstance(why, WrongSumError):
            logger.warning("Round %d is skipped. %s", held.server_round, why)
            return
        self.suspects.lets_in = self._residual_noise_free
        needed = max(held.min_cohort, self.option.min_cohort)
        room = len(names) - needed - max(report.asked - len(held.releases), 0)
        if self.suspects.wrong(held.releases, names, room):
            left = ", ".join(map(repr, self.suspects.left_out)) or f"nobody, since sums need {needed} releases"
            logger.warning(
                "Round %d is skipped. %s Left out of the next rounds, in turns and without blame: %s.",
                *(held.server_round, why, left),
            )
        elif held.sealed:
            listed = " or ".join(f"helper {name!r}" for name in self.helpers.roster.helper_names)
            self._pause = (
                f"Expected wrong sums to end once suspects were left out, got another in round {held.server_round}: "
                f"either more than {self.option.max_byzantine} machines lie, or {listed} does. Have their operators "
                "look, then resume from the checkpoint: the round is recorded as skipped, and the next one will be "
                "asked."
            )

    def skipped_noise(self, statements: Mapping[str, Mapping[str, Any]], acks: Mapping[str, int]) -> float | None:
        """Variance of the noise in the sum of all sums over that of one in which no sum was wrong, by statements.

        None without any, or where machines state no mechanism that is known.
        """
        if not self._lost:
            return None
        if self._terms is not None and self._terms[0] == "nothing":
            return 1.0
        said = {(one.get("mechanism"), one.get("max-participations")) for one in statements.values()}
        mechanism, releases = said.pop() if len(said) == 1 else (None, None)
        if mechanism not in MECHANISMS or not isinstance(releases, int):
            return None
        if not max(acks.values(), default=1) <= releases <= _MOST_RELEASES:
            return None
        used = {name: self._skipped.get(name, last) for name, last in acks.items()}
        streams = [(last, self._lost.get(name, [])) for name, last in used.items() if last]
        return lasting_noise(make_mechanism(str(mechanism), releases), streams) if streams else 1.0

    def check_pause(self) -> None:
        """Raise if a person must look before the next round; a run that is resumed goes on."""
        if self._pause:
            raise WrongSumError(self._pause)

    def should_stop(self, history: Sequence[RoundReport], noise: float | None) -> str:
        """Why the training ends now with the model it has, or an empty string."""
        skipped = sum(bool(report.skipped) for report in history)
        if skipped >= self.option.max_failed_aggregations:
            return f"{skipped} sums were skipped, as many as max_failed_aggregations allows"
        if noise is not None and noise > self.option.max_noise and any(report.aggregated for report in history):
            return (
                f"sums that were skipped left {noise:.3g} times the variance of the noise in the sum of all, which "
                f"machines with cancelling or decay would mend, and max_noise is {self.option.max_noise:g}"
            )
        return ""

    def state(self) -> dict[str, Any]:
        terms = None if self._terms is None else list(self._terms)
        skips = {"lost": self._lost, "skipped": self._skipped, "suspects": self.suspects.plain()}
        opened = {"ids": self._ids, "terms": terms, **skips}
        kept: dict[str, Any] = {"opened": opened, "held": None}
        if self.pending_cohort is not None:
            kept |= {"held": self.pending_cohort.plain(), "held.total": self.pending_cohort.total}
        return kept

    def restore(self, saved: Mapping[str, Any], machines: Iterable[str]) -> None:
        self._ids = {str(name): str(one) for name, one in saved["opened"]["ids"].items()}
        terms = saved["opened"]["terms"]
        self._terms = None if terms is None else (str(terms[0]), str(terms[1]), float(terms[2]))
        if "suspects" in saved["opened"]:  # else it is older
            self.suspects.restore(saved["opened"]["suspects"])
            self._lost = {str(name): list(found) for name, found in saved["opened"].get("lost", {}).items()}
            self._skipped = {str(name): int(base) for name, base in saved["opened"].get("skipped", {}).items()}
        held = saved["held"]
        self.pending_cohort = None if held is None else CohortSet.from_plain(held, saved["held.total"])


def _named(helpers: Iterable[str]) -> str:
    return " and ".join(f"helper {name!r}" for name in helpers)
