"""Secure aggregation: a strategy's option, its helpers, and the errors that end a run.

Clients hide their releases under masks, and helpers hand over the sum of a whole cohort's masks
(docs/secure-aggregation.md). Update rules are given the sum of a round's releases, as ever.

Nobody is asked to open before all helpers have answered a greeting, so a helper that is down costs a round and no more.
Then each says whether it would open the set, and promises it. Once one has promised, it is that set or none: others
would be refused. What one has opened and another will not answer is declared void there, and the round is skipped.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from ...privacy import protocol
from ...privacy.accounting.loss import MOST_SUMMED
from ...privacy.errors import ConfigurationError, MurmurflError
from ...privacy.protocol import read_array
from ...privacy.sums.masking import Header
from ...privacy.sums.opening_rule import Opening, SignedOpening, Verdict, is_opening, is_view, set_digest
from ...privacy.sums.roster import MOST_HELPERS, Roster, is_signed, name_proof
from ..rounds.client_registry import Awaited, ClientRegistry, Handshake, hello, introduction
from ..rounds.replies import exchange
from .summation import CohortSet

logger = logging.getLogger("flwr")

_DIGEST_DIGITS = 64
MOST_BYZANTINE = 3


@dataclass(frozen=True)
class SecureAggregation:
    """The option that releases come under masks, of which the server has only sums opened.

    Parameters
    ----------
    min_cohort : int
        The fewest releases of a round that are opened; with fewer the round is closed, and everything is carried over.
        Clients and helpers have such a number of their own, which decides.
    helpers : int
        Helpers of the roster.
    patience : int
        Rounds in a row in which a helper may be out of reach, and times that one sum is asked for, before the run ends.
    roster : str
        Digest of the one roster to work with, 64 hexadecimal digits; default whichever all helpers have.
    max_byzantine : int
        The most clients that are taken to lie. After a wrong sum suspects take turns in being left out
        (:mod:`~murmurfl.strategies.sums.exclusion_policy`); if no so many clients can be what is wrong, the run pauses.
    max_failed_aggregations : int
        Wrong sums after which the training ends with the model it has. Nothing of a wrong sum enters the model.
    max_noise : float
        Likewise, how many times the variance of its noise the sum of all may have. Wrong sums of streams leave noise
        that only clients with ``cancelling`` or ``decay`` mend.

    Raises
    ------
    ConfigurationError
        If a number or the digest is impossible.

    Notes
    -----
    Helpers open only what their own rule allows, by what clients signed, whatever is asked here.

    Examples
    --------
    >>> SecureAggregation(min_cohort=8, helpers=2).max_byzantine
    2
    """

    min_cohort: int
    helpers: int = 2
    patience: int = 3
    roster: str = ""
    max_byzantine: int = 2
    max_failed_aggregations: int = 16
    max_noise: float = 4.0

    def __post_init__(self) -> None:
        limits = {"min_cohort": MOST_SUMMED, "helpers": MOST_HELPERS, "max_byzantine": MOST_BYZANTINE}
        for name in ("min_cohort", "helpers", "patience", "max_byzantine", "max_failed_aggregations"):
            most = limits.get(name)
            value = getattr(self, name)
            right = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not right or (most is not None and value > most):
                limit = "" if most is None else f" and <= {most}"
                raise ConfigurationError(
                    f"Expected {name} to be an integer >= 1{limit}, got {value!r}.",
                    kind="out-of-range",
                    setting=name,
                    got=value,
                )
        if isinstance(self.max_noise, bool) or not isinstance(self.max_noise, int | float) or not self.max_noise > 1:
            raise ConfigurationError(
                f"Expected max_noise > 1, got {self.max_noise!r}.",
                kind="out-of-range",
                setting="max_noise",
                got=self.max_noise,
            )
        digits = isinstance(self.roster, str) and set(self.roster) <= set("0123456789abcdef")
        if not digits or len(self.roster) not in (0, _DIGEST_DIGITS):
            raise ConfigurationError(
                f"Expected roster to be a digest of {_DIGEST_DIGITS} hexadecimal digits, got {self.roster!r}: "
                "`murmurfl roster show` prints it.",
                kind="malformed",
                setting="roster",
                got=self.roster,
            )

    @property
    def settled(self) -> dict[str, Any]:
        """Settings that a checkpoint must agree on, plain values; what follows from wrong sums may change."""
        return {"min_cohort": self.min_cohort, "helpers": self.helpers, "roster": self.roster}


class OpeningError(MurmurflError):
    """A sum of masked releases cannot be opened; the checkpoint holds its set.

    Examples
    --------
    >>> from murmurfl.strategies import HelperUnavailableError, HelpersDisagreeError, WrongSumError
    >>> [error.kind for error in (HelperUnavailableError, HelpersDisagreeError, WrongSumError)]
    ['unreachable', 'mismatch', 'mismatch']
    >>> all(issubclass(error, OpeningError) for error in (HelperUnavailableError, HelpersDisagreeError, WrongSumError))
    True
    """

    kind = "unreachable"


class HelperUnavailableError(OpeningError):
    """A helper is out of reach or gives no valid answer, and the server's patience is at its end.

    Examples
    --------
    >>> from murmurfl.strategies import OpeningError
    >>> try:
    ...     raise HelperUnavailableError("Helper 'left' did not answer for 60 s.")
    ... except OpeningError as error:
    ...     error.kind
    'unreachable'
    """


class HelpersDisagreeError(OpeningError):
    """A helper refuses a set that another helper may have opened, and will not declare it void.

    Examples
    --------
    >>> from murmurfl.strategies import OpeningError
    >>> try:
    ...     raise HelpersDisagreeError("Helper 'left' does not declare the set void.")
    ... except OpeningError as error:
    ...     error.kind
    'mismatch'
    """

    kind = "mismatch"


class SkippedSumError(OpeningError):
    """A set is opened or void at every helper, and its sum cannot be used; the round is over all the same."""

    closed = ""
    """Text in its round's report."""


class WrongSumError(SkippedSumError):
    """Unmasked values are no sum of releases, whichever clients are left out: a helper may not do what it says.

    Examples
    --------
    >>> from murmurfl.strategies import OpeningError
    >>> try:
    ...     raise WrongSumError("The sum of round 3 is no sum of releases.")
    ... except OpeningError as error:
    ...     error.kind, error.closed
    ('mismatch', 'its sum is wrong and was skipped')
    """

    kind = "mismatch"

    closed = "its sum is wrong and was skipped"


class HalfOpenError(SkippedSumError):
    """A helper has opened a set that another one does not answer, which has declared it void."""

    closed = "a helper did not answer, and it was skipped"


@lru_cache(maxsize=MOST_HELPERS)
def read_roster(text: str) -> Roster | None:
    """Read the roster in a JSON text; None if there is none."""
    try:
        return Roster.from_document(json.loads(text))
    except (ConfigurationError, ValueError, RecursionError):
        return None


def same_roster(text: str, roster: Roster) -> bool:
    """Return True if a JSON text has the same roster."""
    found = read_roster(text)
    return found is not None and found.digest == roster.digest


def common_roster(sent: Mapping[str, str], option: SecureAggregation) -> Roster:
    """Return the one roster that all helpers have, from each one's JSON text by name; refuse if there is none."""
    rosters = {name: read_roster(text) for name, text in sent.items()}
    wanted = {name: one for name, one in rosters.items() if one is not None and option.roster in ("", one.digest)}
    if option.roster:
        for name, one in rosters.items():
            if name not in wanted:
                raise ConfigurationError(
                    f"Expected helpers with the roster {option.roster}, got helper {name!r} with "
                    f"{'none' if one is None else one.digest}: give it the same roster file, or take its digest out.",
                    kind="mismatch",
                )
    digests = {name: "none" if one is None else one.digest for name, one in rosters.items()}
    first = next(iter(wanted.values()), None)
    if first is None or len(set(digests.values())) > 1:
        listed = ", ".join(f"{name!r} has {digest}" for name, digest in sorted(digests.items()))
        raise ConfigurationError(
            f"Expected one roster at all helpers, got several: {listed}. Give all of them the same roster file; with "
            "SecureAggregation(roster=...) the server insists on the right one.",
            kind="mismatch",
        )
    if len(first.helpers) != option.helpers or set(first.helper_names) != set(sent):
        raise ConfigurationError(
            f"Expected {option.helpers} helpers, those of their roster ({', '.join(map(repr, first.helper_names))}), "
            f"got {', '.join(map(repr, sorted(sent)))}: set helpers to as many as the roster has, and start each once.",
            kind="mismatch",
            setting="helpers",
        )
    return first


_GREETING_TIMEOUT_S = 20.0
_OPENING_TIMEOUT_S = 600.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0


class Helpers:
    """The helpers of a training, as its server knows them; each opens by its own rule, whatever it is asked."""

    def __init__(self, option: SecureAggregation, directory: ClientRegistry, message_type: str) -> None:
        self.option = option
        self._directory = directory
        self._message_type = message_type
        self._roster: Roster | None = None
        self._nonces: dict[str, str] = {}
        self._shown: dict[tuple[str, Handshake, str], bool] = {}
        directory.shows = self._shows

    @property
    def roster(self) -> Roster:
        """The one roster of all helpers, once they were met."""
        if self._roster is None:
            raise ConfigurationError("Expected helpers that were met before they are needed.", kind="wrong-order")
        return self._roster

    @property
    def met(self) -> bool:
        """Whether all helpers were there once."""
        return self._roster is not None

    def meet(self, grid: Grid, awaited: Awaited) -> None:
        """Wait for clients and, the first time, for all helpers; learn the roster."""
        if self._roster is not None:
            self._directory.meet(grid, awaited)
            return
        self._directory.meet(grid, awaited, self.option.helpers, self._check_number)
        found = {name: roster for name, (_, roster) in self._directory.helpers().items()}
        self._roster = common_roster(found, self.option)
        logger.info("Helpers: %s; roster %s.", ", ".join(map(repr, self.roster.helper_names)), self.roster.digest)

    def _shows(self, name: str, met: Handshake) -> bool | None:
        """Whether a node signed its nonce by the key that the roster, or until it is known its own, has for a name."""
        roster = self._roster or (read_roster(met.roster) if met.helpers else None)
        if roster is None:
            return None
        if (asked := (name, met, roster.digest)) not in self._shown:
            keys = {**roster.clients, **{one.name: one.signing for one in roster.helpers}}
            proof = name_proof(name, roster.digest, met.nonce)
            proved = name in keys and proof is not None and is_signed(keys[name], met.signature, proof)
            self._shown[asked] = proved
        return self._shown[asked]

    def _check_number(self) -> None:
        """Refuse to wait for more or fewer helpers than a roster has."""
        for name, (_, text) in self._directory.helpers().items():
            known = read_roster(text)
            if known is not None and len(known.helpers) != self.option.helpers:
                raise ConfigurationError(
                    f"Expected helpers with a roster of {self.option.helpers} helpers, got {name!r} with one of "
                    f"{len(known.helpers)}: set helpers to as many as the roster has.",
                    kind="mismatch",
                    setting="helpers",
                    got=name,
                )

    def probe(self, grid: Grid, names: Iterable[str] | None = None) -> str:
        """Wait for helpers (default all) to answer a greeting; returns why one does not, or an empty string."""
        waiting = list(self.roster.helper_names if names is None else names)
        problems: dict[str, str] = {}
        deadline = time.monotonic() + self._directory.deadline_s
        pause = _FIRST_PAUSE_S
        while True:
            self._directory.refresh(grid)
            left = max(deadline - time.monotonic(), 0.0)
            answers = self._ask_each(grid, waiting, self._hello, min(_GREETING_TIMEOUT_S, max(left, 1.0)))
            for name, reply in answers.items():
                handshake = None if reply is None else introduction(reply, self._nonces[name])
                if handshake is None or name not in handshake.helpers:
                    continue
                if not same_roster(handshake.roster, self.roster):
                    problems[name] = "has another roster"
                elif not self._directory.several_on_a_node and not self._shows(name, handshake):
                    problems[name] = "does not sign with its key in the roster"
                else:
                    problems[name] = ""
            waiting = [name for name in waiting if problems.get(name) != ""]
            left = deadline - time.monotonic()
            if not waiting:
                return ""
            if left <= 0:
                return " and ".join(f"helper {name!r} {problems.get(name, 'does not answer')}" for name in waiting)
            self._directory.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def views(
        self, grid: Grid, session: str, cohort: CohortSet, timeout: float, *, ask: str = protocol.ASK_WHETHER
    ) -> dict[str, Verdict | None]:
        """Ask each helper about a set before it opens it; None without an answer that counts.

        Asked for a lock, a helper that says yes has promised to open this set: it must be saved before.
        """
        request = _OpeningRequest(session, cohort, self.roster, self._message_type, self._directory.entries)
        return self._views(grid, request, self.roster.helper_names, timeout, {protocol.ASK: ask})

    def _views(
        self, grid: Grid, request: _OpeningRequest, names: Iterable[str], timeout: float, asked: Mapping[str, Any]
    ) -> dict[str, Verdict | None]:
        def question(name: str, node_id: int) -> Message:
            return request.question(name, node_id, asked)

        replies = self._ask_each(grid, names, question, min(timeout, _OPENING_TIMEOUT_S))
        return {name: request.read_view(name, reply) for name, reply in replies.items()}

    def open(self, grid: Grid, session: str, cohort: CohortSet, timeout: float) -> NDArray[np.uint64]:
        """Open a set: return its sum without masks, modulo 2^64.

        The set must be saved: once asked for it may be opened, and nothing else in its place.

        Raises
        ------
        HelperUnavailableError
            If after all patience an answer is still missing.
        HalfOpenError
            If one has opened it, and all that gave no answer which counts have declared it void.
        HelpersDisagreeError
            If one of these has not.
        """
        request = _OpeningRequest(session, cohort, self.roster, self._message_type, self._directory.entries)
        unmasked = cohort.total.copy()
        missing = list(self.roster.helper_names)
        problems: dict[str, str] = {}
        opened: SignedOpening | None = None
        for attempt in range(self.option.patience):
            if attempt and (problem := self.probe(grid, missing)):
                logger.warning("Round %d: %s. The same set is asked for again.", cohort.server_round, problem)
                continue
            replies = self._ask_each(grid, missing, request.message, min(timeout, _OPENING_TIMEOUT_S))
            for name, reply in replies.items():
                answer, problem = request.read(name, reply)
                if answer is not None:
                    unmasked -= answer.total
                    missing.remove(name)
                    opened = SignedOpening.of(answer)
                else:
                    problems[name] = problem
                    logger.warning("Round %d: helper %r %s.", cohort.server_round, name, problem)
            if not missing:
                return unmasked
        why = " and ".join(f"helper {name!r} {problems.get(name, _OpeningRequest.SILENT)}" for name in missing)
        if opened is not None and all(problems.get(name) not in (None, _OpeningRequest.SILENT) for name in missing):
            self._declare_void(grid, request, opened, missing, timeout)
            raise HalfOpenError(
                f"Expected all helpers to open the set of round {cohort.server_round}, asked {self.option.patience} "
                f"times, but {why}, after helper {opened.helper!r} has opened it. It is void there: have its operator "
                "look at its log."
            )
        raise HelperUnavailableError(
            f"Expected all helpers to open the set of round {cohort.server_round}, asked {self.option.patience} times, "
            f"but {why}. It may be open at others, so no round can take its place. Start the helper again and resume "
            "from the checkpoint, which holds the set."
        )

    def _declare_void(
        self, grid: Grid, request: _OpeningRequest, opened: SignedOpening, names: list[str], timeout: float
    ) -> None:
        """Have helpers record that they never answer a set which another has opened."""
        seen = {protocol.OPENED_BY: opened.helper, protocol.OPENED_TOTAL: opened.total_digest}
        asked = {protocol.ASK: protocol.ASK_VOID, **seen, protocol.OPENED_SIGNATURE: opened.signature}
        views = self._views(grid, request, names, timeout, asked)
        kept = [
            name
            for name, view in views.items()
            if view is None or view.would_open not in (protocol.VIEW_VOID, protocol.VIEW_OPENED)
        ]
        if kept:
            raise HelpersDisagreeError(
                f"Expected all helpers to open a set that helper {opened.helper!r} has opened, or to declare it void, "
                f"got neither of {_listed(kept)}. Its opening record is not the one it had: its log says more. The "
                "checkpoint holds the set; a helper that lost its record needs a new key, and the training a new "
                "session."
            )

    def _hello(self, name: str, node_id: int) -> Message:
        self._nonces[name] = secrets.token_hex(16)
        return hello(node_id, self._message_type, self._directory.entries, self._nonces[name])

    def _ask_each(
        self, grid: Grid, names: Iterable[str], message: Callable[[str, int], Message], timeout: float
    ) -> dict[str, Message | None]:
        """Each helper's answer, or None; never two messages at a time to one node, for an error names no helper."""
        nodes = {name: node_id for name, (node_id, _) in self._directory.helpers().items()}
        answers: dict[str, Message | None] = dict.fromkeys(names)
        for wave in _waves({name: nodes[name] for name in answers if name in nodes}):
            for reply in exchange(grid, [message(name, node_id) for node_id, name in wave.items()], timeout):
                name = wave.get(reply.metadata.src_node_id)
                if name is not None:
                    answers[name] = reply
        return answers


class _OpeningRequest:
    """The request to open one set, and which answers count."""

    SILENT = "does not answer"

    def __init__(
        self, session: str, cohort: CohortSet, roster: Roster, queries: str, entries: Mapping[str, str]
    ) -> None:
        self._session, self._cohort = session, cohort
        # A ClientApp hands its mods, where a simulation's helpers may be, messages of the kinds that it knows itself.
        self._queries = queries
        self._message_type = protocol.QUERY_OPEN if queries == MessageType.QUERY else queries
        self._entries = {entry.name: entry for entry in roster.helpers}
        self._digest = set_digest(session, cohort.opening, cohort.sealed)
        self._shared = {
            **entries,
            protocol.VERSION: protocol.PROTOCOL_VERSION,
            protocol.ASK: protocol.ASK_OPEN,
            protocol.SESSION: session,
            protocol.OPENING: cohort.opening,
            protocol.HEADER: [one.header for one in cohort.sealed],
            protocol.SIGNATURE: [one.signature for one in cohort.sealed],
            protocol.SEALS: [seal for one in cohort.sealed for seal in one.seals],
        }

    def message(self, name: str, node_id: int) -> Message:
        config = ConfigRecord({**self._shared, protocol.HELPER: name})
        return Message(RecordDict({protocol.CONFIG: config}), dst_node_id=node_id, message_type=self._message_type)

    def question(self, name: str, node_id: int, asked: Mapping[str, Any]) -> Message:
        """Return the message that asks a helper about the set, and not to open it."""
        config = ConfigRecord({**self._shared, protocol.HELPER: name, **asked})
        return Message(RecordDict({protocol.CONFIG: config}), dst_node_id=node_id, message_type=self._queries)

    def read_view(self, name: str, reply: Message | None) -> Verdict | None:
        """Return what a helper signed for this set, or None."""
        config = None if reply is None or reply.has_error() else reply.content.get(protocol.CONFIG, None)
        if not isinstance(config, ConfigRecord):
            return None
        would, disputed, signature = (
            config.get(key) for key in (protocol.WOULD_OPEN, protocol.DISPUTED, protocol.SIGNATURE)
        )
        known = {Header.from_bytes(one.header).client for one in self._cohort.sealed}
        if would not in protocol.VIEWS or not isinstance(disputed, list) or not isinstance(signature, bytes):
            return None
        if not known.issuperset(disputed):
            return None
        view = Verdict(name, self._cohort.opening, self._digest, str(would), tuple(map(str, disputed)), signature)
        return view if is_view(self._entries[name], self._session, view) else None

    def read(self, name: str, reply: Message | None) -> tuple[Opening | None, str]:
        """Read a helper's answer; None and what is wrong with it if it does not count."""
        if reply is None:
            return None, self.SILENT
        if reply.has_error():
            code = reply.error.code
            return None, f"answers with {protocol.REFUSAL_NAMES.get(code, f'error {code}')}"
        answer = _answer(reply)
        if answer is None or answer.total.shape != self._cohort.total.shape:
            return None, "gives an answer that this server does not understand"
        expected = (name, self._cohort.opening, self._digest)
        if (answer.helper, answer.opening, answer.set_digest) != expected:
            return None, "gives an answer about another set"
        if not is_opening(self._entries[name], self._session, answer):
            return None, "gives an answer that is not signed with its key in the roster"
        return answer, ""


def _answer(reply: Message) -> Opening | None:
    config, arrays = reply.content.get(protocol.CONFIG, None), reply.content.get(protocol.ARRAYS, None)
    if not isinstance(config, ConfigRecord) or not isinstance(arrays, ArrayRecord) or len(arrays) != 1:
        return None
    helper, opening, digest, signature = (
        config.get(key) for key in (protocol.HELPER, protocol.OPENING, protocol.SET_DIGEST, protocol.SIGNATURE)
    )
    if not (isinstance(helper, str) and isinstance(opening, str) and isinstance(digest, str)):
        return None
    (array,) = arrays.values()
    try:
        total = read_array(array.dtype, array.shape, array.data)
    except (TypeError, ValueError):
        return None
    if not isinstance(signature, bytes) or total.dtype != np.dtype(np.uint64):
        return None
    return Opening(helper, opening, digest, total, signature)


def _waves(nodes: Mapping[str, int]) -> Iterator[dict[int, str]]:
    """Return the helpers by their nodes, in groups that have every node once: in a simulation some share one."""
    left = dict(nodes)
    while left:
        wave: dict[int, str] = {}
        for name, node_id in left.items():
            wave.setdefault(node_id, name)
        yield wave
        left = {name: node_id for name, node_id in left.items() if wave[node_id] != name}


def _listed(names: Iterable[str]) -> str:
    return " and ".join(f"helper {name!r}" for name in names)
