"""The cohort engine: a strategy and its simulated machines in one process, without messages between them.

The strategy is the same object as on every engine, and the machines are the same clients. This engine only leaves out
that requests and releases become messages and back, and computes the gradients of many machines together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...clients import Cohort
from ...privacy import Ledger, MemoryLedger, RefusedError, RowCache, protocol
from ...privacy.training import observing
from ...strategies import Outcome, Refusal, Reply, RoundRequest
from ..experiment import Experiment
from ..network import reply_is_lost

DEFAULT_ROW_CACHE_MIB = 256.0
"""Noise rows kept for taking back out, in MiB; beyond it they are regenerated."""


class CohortMachines:
    """An experiment's machines, asked directly.

    Parameters
    ----------
    experiment : Experiment
    row_cache_mib : float
        Most memory for keeping noise rows until they are taken back out, in MiB; what does not fit is regenerated,
        which costs a second drawing of the row.
    ledgers : mapping, optional
        The machines' ledgers by name, where other sessions use them too; new ones by default.
    machines : sequence of int, optional
        Only these of the experiment's machines; all by default.

    Notes
    -----
    Under secure aggregation there are no masks and no helpers: masks cancel exactly, so sums are the same without them,
    and nothing leaves this process.

    **Formal guarantees.** Those of each machine, in simulation (:class:`~murmurfl.clients.PrivateClient`).
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        row_cache_mib: float = DEFAULT_ROW_CACHE_MIB,
        ledgers: Mapping[str, Ledger] | None = None,
        machines: Sequence[int] | None = None,
    ) -> None:
        self._experiment = experiment
        rows = RowCache(int(row_cache_mib * 2**20))
        self.cohort = Cohort(
            [str(i) for i in (range(experiment.config.num_clients) if machines is None else machines)],
            lambda name: experiment.client(int(name), MemoryLedger() if ledgers is None else ledgers[name], rows),
        )
        initial = experiment.model.initial_parameters(experiment.config.seed)
        self._sent: dict[str, int] = {}
        self._layout = [(values.shape, values.dtype, math.prod(values.shape)) for values in initial]

    def names(self) -> list[str]:
        """All machines."""
        return self.cohort.names()

    def answer(self, request: RoundRequest) -> Iterator[Outcome]:
        """What came back of a round's request; lost replies are missing."""
        self._acknowledge(request, self._sent)
        points = [self._arrays(point) for point in request.points]
        if not all(np.isfinite(values).all() for point in points for values in point):
            yield from (Refusal(protocol.MALFORMED_REQUEST) for _ in request.acks)  # as a client that reads messages
            return
        with observing() as observer:
            yield from self._outcomes(request, points)
        figures = observer.figures()
        if figures is not None:
            yield figures

    def _outcomes(self, request: RoundRequest, points: list[Any]) -> Iterator[Outcome]:
        config = self._experiment.config
        # A mean of features, or an evaluation, is another release of another session: the only one, never acknowledged.
        of = request.entries.get(protocol.RELEASE_OF, "gradients")
        acknowledged = of == "gradients"
        asked = (request.server_round, request.session, request.acks, points, request.entries)
        for name, outcome in self.cohort.releases(*asked):
            lost = reply_is_lost(config.lost_replies, config.seed, request.server_round, name)
            if isinstance(outcome, RefusedError):
                if not lost:
                    yield Refusal(outcome.code)
            elif not lost:
                metrics = {**self.cohort.client(name).public_entries(of), protocol.NUM_EXAMPLES: outcome.samples}
                if acknowledged:
                    self._sent[name] = outcome.release
                yield Reply(name, outcome.release, outcome.ack, outcome, metrics)
                if acknowledged:
                    self._acknowledge(request, [name])

    def _acknowledge(self, request: RoundRequest, names: Iterable[str]) -> None:
        """Tell machines which of their releases were aggregated, so that they can forget them.

        Their next requests would. A server that sees only sums knows after the round.
        """
        for name in list(names):
            if request.aggregated.get(name) == self._sent[name]:
                self.cohort.client(name).machine.acknowledge(request.session, self._sent.pop(name))

    def statements(self, session: str) -> dict[str, dict[str, Any]]:
        """What each machine has spent."""
        return {name: self.cohort.client(name).statement(session) for name in self.names()}

    def _arrays(self, point: Any) -> list[Any]:
        arrays, start = [], 0
        for shape, dtype, size in self._layout:
            arrays.append(np.asarray(point[start : start + size].reshape(shape), dtype=dtype))
            start += size
        # A point may say more than a model: one more array.
        return [*arrays, *([point[start:]] if start < len(point) else [])]
