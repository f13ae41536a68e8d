"""When an ended SuperNode is started again, and why its SuperLink is not reached."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from flwr.common.constant import MAX_RETRY_DELAY

from ..watching.journal import Entry, Journal
from .connection import Connection
from .diagnosis import Diagnosis, diagnose

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 15.0
SETTLED_S = 60.0
_SAY_AGAIN_S = 3600.0


class Reconnecting:
    """Reports why a connection fails, and how long to wait before the next try.

    Parameters
    ----------
    journal : Journal
        Receives every end, and reports every contact.
    trying : callable
        As :func:`~murmurfl.app.nodes.connections.diagnosis.diagnose`.
    clock : callable
        Monotonic seconds.
    """

    def __init__(
        self,
        connection: Connection,
        journal: Journal,
        *,
        trying: Callable[..., Diagnosis] = diagnose,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection, self._journal, self._trying, self._clock = connection, journal, trying, clock
        self._pause, self._started_at, self._turned_away = FIRST_PAUSE_S, clock(), False
        self._said: tuple[str, float] | None = None
        self._looking = threading.Lock()
        journal.listen(self._heard)

    def starts(self) -> None:
        """Note that a SuperNode is about to start."""
        self._started_at, self._turned_away = self._clock(), False
        self._journal.note("connecting", superlink=self._connection.superlink)

    def ended(self) -> float:
        """Note and log why a SuperNode ended; return the seconds to wait before the next start.

        The wait doubles each time, until a SuperNode has lasted for a minute.
        """
        ended_at = self._clock()
        pause = FIRST_PAUSE_S if ended_at - self._started_at > SETTLED_S else self._pause
        self._pause = min(2 * pause, LONGEST_PAUSE_S)
        found = self._trying(self._connection, refused=self._turned_away)
        cause = "ended" if found.cause == "reached" else found.cause
        self._journal.note("disconnected", superlink=self._connection.superlink, cause=cause, retry_s=pause)
        sentence = (
            "The SuperNode ended though its SuperLink is there: what it said before says why."
            if cause == "ended"
            else found.sentence
        )
        self._say(cause, sentence, f"tried again in {pause:.0f} s")
        return max(pause - (self._clock() - ended_at), 0.0)

    def _heard(self, entry: Entry) -> None:
        if entry.kind == "connected":
            self._said = None
        elif entry.kind == "turned-away":
            self._turned_away = True
        elif entry.kind == "disconnected" and "retry_s" not in entry.facts:
            # Flower's SuperNode retries by itself, and knows less of the cause.
            threading.Thread(target=self._look, daemon=True, name="murmurfl-reconnecting").start()

    def _look(self) -> None:
        if not self._looking.acquire(blocking=False):
            return
        try:
            found = self._trying(self._connection)
            if found.cause != "reached":
                self._say(found.cause, found.sentence, f"tried again at least every {MAX_RETRY_DELAY} s")
        finally:
            self._looking.release()

    def _say(self, cause: str, sentence: str, when: str) -> None:
        """Log one line; repeat it for the same cause only after an hour."""
        now = self._clock()
        if self._said is None or self._said[0] != cause or now - self._said[1] >= _SAY_AGAIN_S:
            self._said = (cause, now)
            logger.warning("%s (%s; %s.)", sentence, cause, when)
