"""Whether a node, a helper or a server does its work: what its health address answers.

200 and ``{"status": "ok"}``, or 503 and one of a few fixed reasons. No name of a machine, a run or a file is said.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from http import HTTPStatus

from .endpoint import Answer
from .journal import Entry, Journal

STARTING = "starting"
CONNECTING = "connecting"
DISCONNECTED = "disconnected"
NO_ANSWER = "supernode-does-not-answer"
NOT_HEARD = "superlink-not-heard"
STOPPED = "stopped"
NOT_RUNNING = "superlink-not-running"
NOT_LISTENING = "superlink-does-not-listen"

REASONS = (STARTING, CONNECTING, DISCONNECTED, NO_ANSWER, NOT_HEARD, STOPPED, NOT_RUNNING, NOT_LISTENING)
"""All that a health address may say of what is wrong."""

_AFTER = {
    "started": STARTING,
    "connecting": CONNECTING,
    "turned-away": CONNECTING,
    "connected": "",
    "contact": "",
    "disconnected": DISCONNECTED,
    "stopped": STOPPED,
}

SILENT_S = 60.0
"""So long a SuperNode's process may not have answered its executor, which asks ten times a second."""
UNHEARD_S = 120.0
"""So long a SuperLink may not have answered its SuperNode, which calls it every half minute at least."""


def health_answer(kind: str, problem: str) -> Answer:
    """What the health address answers.

    Parameters
    ----------
    kind : str
        ``node``, ``helper`` or ``server``.
    problem : str
        One of :data:`REASONS`; empty if all is well.
    """
    said = {"status": "failed" if problem else "ok", "kind": kind, **({"reason": problem} if problem else {})}
    status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
    return Answer(json.dumps(said).encode() + b"\n", "application/json", status)


class NodeHealth:
    """Whether a node or a helper is connected, by its journal.

    Parameters
    ----------
    journal : Journal
        Told from now on.
    clock : callable
        Seconds that only ever grow.
    """

    def __init__(self, journal: Journal, clock: Callable[[], float] = time.monotonic) -> None:
        self._journal = journal
        self._clock = clock
        self._problem = STARTING
        self._since = self._heard = clock()
        journal.listen(self._hear)

    @property
    def connected(self) -> bool:
        """Whether the SuperLink is reached, as far as is known."""
        return not self._problem

    @property
    def problem(self) -> str:
        """What is wrong, one of :data:`REASONS`; empty if nothing is."""
        if self._problem:
            return self._problem
        now = self._clock()
        if now - max(self._since, self._journal.reached_at) > SILENT_S:
            return NO_ANSWER
        return NOT_HEARD if now - self._heard > UNHEARD_S else ""

    def _hear(self, entry: Entry) -> None:
        problem = _AFTER.get(entry.kind, self._problem)
        self._heard = self._clock()
        if self._problem != problem:
            self._problem, self._since = problem, self._heard
