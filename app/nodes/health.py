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
STOPPED = "stopped"
NOT_RUNNING = "superlink-not-running"
NOT_LISTENING = "superlink-does-not-listen"

REASONS = (STARTING, CONNECTING, DISCONNECTED, NO_ANSWER, STOPPED, NOT_RUNNING, NOT_LISTENING)
"""All that a health address may say of what is wrong."""

SILENT_S = 60.0
"""For so long a SuperNode's process may not have answered its executor, which asks ten times a second."""


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
        self._since = clock()
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
        heard = max(self._since, self._journal.reached_at)
        return NO_ANSWER if self._clock() - heard > SILENT_S else ""

    def _hear(self, entry: Entry) -> None:
        after = {"connecting": CONNECTING, "disconnected": DISCONNECTED, "stopped": STOPPED, "started": STARTING}
        self._problem = after.get(entry.kind, "")  # whatever else happens was asked for by a SuperLink that is reached
        self._since = self._clock()
