"""A node's journal: one entry for each event; log, health and metrics are made from it.

No fact of an entry depends on anybody's data: names, numbers of releases, fixed reasons, times. A terminal or a monitor
may show all of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flwr.app import ConfigRecord, Context, Message, MessageType

from ....clients.messages import Answers
from ....privacy import ConfigurationError, protocol

logger = logging.getLogger(__name__)

Fact = str | int | float

_SESSIONS_KNOWN = 64
_DIGITS = 10
_LONGEST_WHY = 300

FACTS: dict[str, frozenset[str]] = {
    "started": frozenset({"kind", "name"}),
    "stopped": frozenset(),
    "connecting": frozenset({"superlink"}),
    "connected": frozenset({"superlink"}),
    "contact": frozenset({"superlink"}),
    "turned-away": frozenset({"superlink"}),
    "disconnected": frozenset({"superlink", "cause", "retry_s"}),
    "released": frozenset({"run", "session", "round", "release", "samples", "of"}),
    "repeated": frozenset({"run", "session", "round", "release", "samples", "of"}),
    "opened": frozenset({"run", "session", "round", "releases"}),
    "answered": frozenset({"run"}),
    "refused": frozenset({"run", "reason", "why", "session", "round"}),
    "run-ended": frozenset({"run", "end", "why"}),
    "round": frozenset(
        {"round", "planned", "rounds", "asked", "aggregated", "lost", "late", "malformed", "refused", "seconds"}
    ),
}
"""Every kind of entry, and the facts that it may have.

``connected``: the SuperLink has accepted the node. ``contact``: it has answered since, at most one every few seconds.
``turned-away``: it did not accept the node. ``disconnected`` without ``retry_s``: the SuperNode lost it and retries by
itself. ``of`` names a side release: the ``mean`` of features, or an ``evaluation``. ``why`` is the fixed text of a
refusal. ``round`` is a server's: one round has ended, or several since the last entry (``rounds``).
"""


@dataclass(frozen=True)
class Entry:
    """One event."""

    kind: str  # one of :data:`FACTS`
    at: float  # when, in seconds since 1970
    facts: Mapping[str, Fact]  # those of its kind; none depends on data

    def __post_init__(self) -> None:
        unknown = set(self.facts) - FACTS.get(self.kind, frozenset())
        if self.kind not in FACTS or unknown:
            raise ConfigurationError(
                f"Expected an entry of a known kind with its own facts, got {self.kind!r} with {sorted(self.facts)}."
            )


Listener = Callable[[Entry], None]


class Journal:
    """Tells listeners what happens, in order.

    A listener that fails is logged and changes nothing else: no release is lost or repeated because somebody looked on.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._listeners: list[Listener] = []
        self._one_at_a_time = threading.RLock()
        self.asked_at = 0.0
        """When the last request came, in seconds since 1970."""
        self.reached_at = 0.0
        """When the SuperNode's process last answered, in monotonic seconds; too often for entries."""

    def arrived(self) -> None:
        """Note when a request came: what is made of it later must not tell how long the answer took."""
        self.asked_at = self._clock()

    def reached(self) -> None:
        """Note an answer of the SuperNode's process."""
        self.reached_at = time.monotonic()

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` for every entry from now on, in the thread of the event; it must be quick."""
        self._listeners.append(listener)

    def note(self, event: str, /, **facts: Fact) -> None:
        """Tell all listeners.

        Parameters
        ----------
        event : str
            One of :data:`FACTS`.
        **facts
            Facts of this kind.

        Raises
        ------
        ConfigurationError
            If a fact is not one of its kind.
        """
        with self._one_at_a_time:
            entry = Entry(event, self._clock(), facts)
            for listener in self._listeners:
                try:
                    listener(entry)
                except Exception:
                    logger.exception("What happened could not be shown to everybody.")


def noting(app: Answers, journal: Journal) -> Answers:
    """Return an app that notes each answer in a journal, once, after it was made and before it leaves.

    Notes
    -----
    Changes no answer. An entry has what leaves the machine, without the values of a release or of the request.
    """
    made: dict[tuple[str, str], int] = {}

    def answer(message: Message, context: Context) -> Message:
        journal.arrived()
        asked = _asked(message)  # before the app, which may change the message
        reply = app(message, context)
        try:
            event, facts = _entry(message, reply, asked)
            if event == "released" and _is_repeated(facts, made):
                event = "repeated"
            journal.note(event, **facts)
        except Exception:
            logger.exception("An answer could not be noted.")
        return reply

    return answer


def _is_repeated(facts: Mapping[str, Fact], made: dict[tuple[str, str], int]) -> bool:
    """Whether a release has left before; ``made`` has the last number of each session."""
    name, number = (str(facts.get("session", "")), str(facts.get("of", ""))), int(facts["release"])
    repeated = number <= made.get(name, 0)
    made[name] = max(number, made.pop(name, 0))  # the last ones last
    while len(made) > _SESSIONS_KNOWN:
        del made[next(iter(made))]
    return repeated


def _entry(message: Message, reply: Message, asked: Mapping[str, Fact]) -> tuple[str, dict[str, Fact]]:
    run: dict[str, Fact] = {"run": message.metadata.run_id}
    if reply.has_error():
        name = protocol.REFUSAL_NAMES.get(reply.error.code)
        # The text of a refusal of murmurfl is fixed, and the server gets it. No other text is repeated.
        why: dict[str, Fact] = {} if name is None else {"why": _shown(reply.error.reason or "", _LONGEST_WHY)}
        return "refused", {**run, **_named(asked), "reason": name or f"error-{reply.error.code}", **why}
    opened = reply.content.config_records.get(protocol.CONFIG, {})
    if protocol.OPENING in opened and protocol.SET_DIGEST in opened and protocol.WOULD_OPEN not in opened:
        return "opened", {**run, **_named(asked), "releases": asked.get("releases", 0)}
    made = reply.content.metric_records.get(protocol.METRICS, {})
    release = made.get(protocol.RELEASE)
    if message.metadata.message_type.split(".")[0] == MessageType.TRAIN and isinstance(release, int):
        samples = made.get(protocol.NUM_EXAMPLES)
        counted: dict[str, Fact] = {"samples": int(samples)} if isinstance(samples, int | float) else {}
        part: dict[str, Fact] = {"of": asked["of"]} if "of" in asked else {}
        return "released", {**run, **_named(asked), **counted, **part, "release": release}
    return "answered", run


def _named(asked: Mapping[str, Fact]) -> dict[str, Fact]:
    return {name: value for name, value in asked.items() if name in ("session", "round")}


def _asked(message: Message) -> dict[str, Fact]:
    """Name and numbers in a request, as far as they are a name and numbers."""
    if message.has_error():
        return {}
    for config in _spoken(message):
        session, number = config.get(protocol.SESSION), config.get(protocol.SERVER_ROUND)
        headers, opening = config.get(protocol.HEADER), config.get(protocol.OPENING)
        of = config.get(protocol.RELEASE_OF)
        if not isinstance(session, str):
            continue
        asked: dict[str, Fact] = {"session": _shown(session, protocol.LONGEST_SESSION_NAME)}
        if isinstance(opening, str) and opening.isascii() and opening.isdigit():
            number = int(opening[:_DIGITS])
        if isinstance(number, int):
            asked["round"] = number
        if isinstance(headers, list):
            asked["releases"] = len(headers)
        if of in (protocol.OF_MEAN, protocol.OF_STATISTICS, protocol.OF_EVALUATION):
            asked["of"] = str(of)
        return asked
    return {}


def _spoken(message: Message) -> list[ConfigRecord]:
    """Records that speak the protocol, which are the only ones that a machine reads.

    Another record put first could have a release noted as one of another session, or as a repeated one.
    """
    records = list(message.content.config_records.values())
    spoken = [record for record in records if protocol.VERSION in record]
    first = message.content.config_records.get(protocol.CONFIG)
    return sorted(spoken, key=lambda record: record is not first) or records


def _shown(text: str, longest: int) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:longest])
