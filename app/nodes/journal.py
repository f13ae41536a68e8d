"""What happens on a node, one entry each: what its log, its health and its metrics are made from.

No fact of an entry depends on anybody's data: names, numbers of releases, fixed reasons, times. Whoever shows an entry,
on a terminal or to a monitor, may show all of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flwr.app import Context, Message, MessageType

from ...privacy import ConfigurationError, protocol
from .own_app import Answers

logger = logging.getLogger(__name__)

Fact = str | int | float

FACTS: dict[str, frozenset[str]] = {
    "started": frozenset({"kind", "name"}),
    "stopped": frozenset(),
    "connecting": frozenset({"superlink"}),
    "connected": frozenset({"superlink"}),
    "disconnected": frozenset({"superlink", "cause", "retry_s"}),
    "released": frozenset({"run", "session", "round", "release", "samples"}),
    "repeated": frozenset({"run", "session", "round", "release"}),
    "opened": frozenset({"run", "session", "round", "releases"}),
    "answered": frozenset({"run"}),
    "refused": frozenset({"run", "reason", "session", "round"}),
}
"""Every kind of entry, and the facts that it may have."""


@dataclass(frozen=True)
class Entry:
    """One thing that happened.

    Parameters
    ----------
    kind : str
        One of :data:`FACTS`.
    at : float
        When, in seconds since 1970.
    facts : mapping of str to str, int or float
        Those of its kind; none depends on data.
    """

    kind: str
    at: float
    facts: Mapping[str, Fact]

    def __post_init__(self) -> None:
        unknown = set(self.facts) - FACTS.get(self.kind, frozenset())
        if self.kind not in FACTS or unknown:
            raise ConfigurationError(
                f"Expected an entry of a known kind with its own facts, got {self.kind!r} with {sorted(self.facts)}."
            )


Listener = Callable[[Entry], None]


class Journal:
    """Tells those who listen what happens, in the order in which it does.

    A listener that fails is logged and changes nothing else: no release is lost, and none is made again, because
    somebody looked on.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._listeners: list[Listener] = []
        self.asked_at = 0.0
        """When the request came that was answered last, or is being answered, in seconds since 1970."""
        self.reached_at = 0.0
        """When the SuperNode's process last answered, on the monotonic clock. No entry: it is asked all the time."""

    def arrived(self) -> None:
        """Take note of when a request came: what is made of it later must not say how long the answer took."""
        self.asked_at = self._clock()

    def reached(self) -> None:
        """Take note of an answer of the SuperNode's process."""
        self.reached_at = time.monotonic()

    def listen(self, listener: Listener) -> None:
        """Have a listener told from now on; it is called in the thread in which things happen, and must be quick."""
        self._listeners.append(listener)

    def note(self, event: str, /, **facts: Fact) -> None:
        """Tell everybody who listens.

        Parameters
        ----------
        event : str
            One of :data:`FACTS`.
        **facts
            Those of its kind.

        Raises
        ------
        ConfigurationError
            If a fact is not one of its kind.
        """
        entry = Entry(event, self._clock(), facts)
        for listener in self._listeners:
            try:
                listener(entry)
            except Exception:
                logger.exception("What happened could not be shown to everybody.")


def noting(app: Answers, journal: Journal) -> Answers:
    """An app whose answers are noted in a journal: each of them once, after it was made and before it leaves.

    Parameters
    ----------
    app : callable
    journal : Journal

    Notes
    -----
    **Formal guarantees.** Changes no answer. What is noted is what leaves the machine but for the values of a release,
    and those of the request.
    """

    def answer(message: Message, context: Context) -> Message:
        journal.arrived()
        reply = app(message, context)
        try:
            event, facts = _entry(message, reply)
            journal.note(event, **facts)
        except Exception:
            logger.exception("An answer could not be noted.")
        return reply

    return answer


def _entry(message: Message, reply: Message) -> tuple[str, dict[str, Fact]]:
    asked = _request(message)
    run: dict[str, Fact] = {"run": message.metadata.run_id}
    if reply.has_error():
        reason = protocol.REFUSAL_NAMES.get(reply.error.code, f"error-{reply.error.code}")
        return "refused", {**run, **asked, "reason": reason}
    made = reply.content.metric_records.get(protocol.METRICS, {})
    release = made.get(protocol.RELEASE)
    if message.metadata.message_type == MessageType.TRAIN and isinstance(release, int):
        samples = made.get(protocol.NUM_EXAMPLES)
        counted: dict[str, Fact] = {"samples": int(samples)} if isinstance(samples, int | float) else {}
        return "released", {**run, **asked, **counted, "release": release}
    return "answered", run


def _request(message: Message) -> dict[str, Fact]:
    """What a request says of itself: a name and a number, as far as they are a name and a number."""
    if message.has_error():
        return {}
    for config in message.content.config_records.values():
        session, number = config.get(protocol.SESSION), config.get(protocol.SERVER_ROUND)
        if isinstance(session, str) and isinstance(number, int):
            shown = "".join(c if c.isprintable() else " " for c in session[: protocol.LONGEST_SESSION_NAME])
            return {"session": shown, "round": number}
    return {}
