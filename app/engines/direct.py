"""Simulated clients of one process that answer a strategy without messages, and keep nothing else.

The cohort engine (:mod:`.cohort`) does the same for a whole run, where replies may be lost and many clients share
ledgers, rows of noise and blocks of arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients.messages import GRADIENTS
from ...clients.simulation.cohort_clients import Cohort
from ...privacy import protocol
from ...privacy.errors import RefusedError
from ...strategies.rounds.replies import Outcome, Refusal, Reply, RoundRequest


class DirectClients:
    """Simulated clients that a strategy asks without messages.

    Sums need no masks here: nothing is sent, and masks cancel exactly.

    Parameters
    ----------
    num_clients : int
        M. The clients' names are the numbers below it.
    client : callable
        Makes the client with a name.
    shapes : sequence of tuple, optional
        The shapes of the model's arrays, into which the points of a request are cut; empty where requests have none.
    """

    def __init__(self, num_clients: int, client: Callable[[str], Any], shapes: Sequence[tuple[int, ...]] = ()) -> None:
        self._cohort = Cohort([str(number) for number in range(num_clients)], client)
        self._shapes = shapes

    def names(self) -> Sequence[str]:
        """Return the names of all clients."""
        return self._cohort.names()

    def answer(self, request: RoundRequest) -> Iterator[Outcome]:
        """Yield the outcomes of a round's request."""
        points = [self._arrays(point) for point in request.points] if self._shapes else ()
        weighed_as = request.entries.get(protocol.WEIGHED_AS, request.server_round)
        asked = (weighed_as, request.session, request.acks, points, request.entries)
        for name, outcome in self._cohort.releases(*asked):
            if isinstance(outcome, RefusedError):
                yield Refusal(outcome.code)
                continue
            entries = self._cohort.client(name).public_entries(GRADIENTS)
            metrics = {**entries, protocol.NUM_EXAMPLES: outcome.samples}
            yield Reply(name, outcome.release, outcome.ack, outcome, metrics)

    def statements(self, session: str, names: Sequence[str] | None = None) -> Mapping[str, Mapping[str, Any]]:
        """Return what each client has spent."""
        chosen = self.names() if names is None else names
        return {name: self._cohort.client(name).statement(session) for name in chosen}

    def _arrays(self, point: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        """Return a point as the model's arrays; a point may hold one more array than the model."""
        ends = np.cumsum([math.prod(shape) for shape in self._shapes])
        *parts, rest = np.split(point, ends)
        arrays = [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        return [*arrays, rest] if rest.size else arrays
