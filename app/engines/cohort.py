"""The cohort engine: a strategy and its simulated clients in one process, without messages between them.

The strategy and the clients are the same as on every engine. This engine only skips turning requests and releases into
messages and back, computes the gradients of many clients together, and keeps their ledgers as arrays with a row for
each client.

Long runs compute the values of a block of releases in compiled loops, to the same integers (:mod:`.compiled`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients.simulation.cohort_clients import BlockAnswer, Cohort, PartAnswer, stacked_samples
from ...privacy import protocol
from ...privacy.errors import RefusedError
from ...privacy.ledger.ledger_records import BlockLedger, Ledger
from ...privacy.noise import SimulatedKeys
from ...privacy.release.clipping import observing
from ...privacy.release.ledgered_privatizer import Release
from ...privacy.release.prefix_sums import RowCache
from ...strategies.rounds.client_registry import NumberedNames
from ...strategies.rounds.replies import LARGEST_COUNT, Outcome, Refusal, Reply, RoundRequest, SummedReplies
from ..data.partition import Shards
from ..data.task import Shard
from ..runs.client_statements import GroupedStatements, said_alike
from ..runs.experiment import Experiment, reply_is_lost
from .compiled import compiled_rows, worth_compiling

DEFAULT_ROW_CACHE_MIB = 256.0
"""Memory for noise rows until they are removed again, in MiB; rows beyond it are regenerated."""

_MOST_NAMED = 1 << 16
"""Clients of which a set is kept, which is faster to look into than a range of names."""


class ExperimentKinds:
    """Groups of like clients of an experiment: equal policies, and a method that makes their clients alike."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self.alike = experiment.method.clients_alike()
        self.num_samples: NDArray[np.int64] = np.asarray(experiment.sizes, dtype=np.int64)
        self.ledgers = BlockLedger(len(self.num_samples))
        sizes = np.unique(self.num_samples)
        self._only_kind = int(sizes[0]) if self.alike and len(sizes) == 1 else None

    def rows(self, names: Sequence[str]) -> list[int]:
        return list(map(int, names))

    def kinds(self, names: Sequence[str]) -> Sequence[Hashable | None]:
        """Return numbers of samples, which determine the policy."""
        if self._only_kind is not None:
            return [self._only_kind] * len(names)
        return self.num_samples[self.rows(names)].tolist() if self.alike else [None] * len(names)

    def group_by(self, rows: NDArray[np.integer]) -> list[NDArray[np.int64]]:
        """Columns; clients that agree in all of them make the same statement."""
        return [self.num_samples[rows], *self.ledgers.figures(np.asarray(rows, dtype=np.intp))]

    def batch(self, names: Sequence[str], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Any:
        """Return samples of several clients as one batch."""
        shards, rows = self._experiment.shards, self.rows(names)
        if isinstance(shards, Shards):
            return shards.batch(rows, starts, stops)
        chosen = map(slice, starts.tolist(), stops.tolist())
        return stacked_samples([(shards[row], samples) for row, samples in zip(rows, chosen, strict=True)])

    def samples(self, name: str) -> Shard:
        return self._experiment.shards[int(name)]

    def keys(self, row: int) -> SimulatedKeys:
        return SimulatedKeys(self._experiment.config.seed, str(row))


class CohortClients:
    """An experiment's clients, asked directly.

    ``row_cache_mib`` is the memory for noise rows until they are removed again; other rows are drawn a second time.
    ``ledgers`` are the clients' own, by name, if other sessions use them too. ``clients`` are those to compute here,
    by default all; a request must still name all that are asked, because the products of a round's matrices, and who
    may release, depend on them.

    Secure aggregation needs neither masks nor helpers here: masks cancel exactly, so sums are the same without them,
    and nothing leaves this process.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        row_cache_mib: float = DEFAULT_ROW_CACHE_MIB,
        ledgers: Mapping[str, Ledger] | None = None,
        clients: Sequence[int] | None = None,
    ) -> None:
        self._experiment = experiment
        rows = RowCache(int(row_cache_mib * 2**20))
        kinds = ExperimentKinds(experiment)
        own = kinds.ledgers.ledger if ledgers is None else lambda row: ledgers[str(row)]
        self._kinds = kinds if ledgers is None and kinds.alike else None
        self._here: Collection[str] | None = None
        if clients is not None:
            if isinstance(clients, range) and len(clients) > _MOST_NAMED:
                self._here = NumberedNames(clients)
            else:
                self._here = frozenset(map(str, clients))
        self.cohort = Cohort(
            NumberedNames(experiment.config.num_clients),
            lambda name: experiment.client(int(name), own(int(name)), rows),
            kinds=kinds if ledgers is None else None,
            only=self._here,
        )
        if worth_compiling(experiment):
            self.cohort.arithmetic = compiled_rows(own_rows=experiment.config.lost_replies > 0)
        initial = experiment.model.initial_parameters(experiment.config.seed)
        self._sent: dict[str, int] = {}
        self._layout = [(values.shape, values.dtype, math.prod(values.shape)) for values in initial]

    def names(self) -> Sequence[str]:
        return self.cohort.names()

    @property
    def computed(self) -> Sequence[str]:
        """The clients that are computed here."""
        here = self.names() if self._here is None else self._here
        return here if isinstance(here, Sequence) else sorted(here, key=int)

    def answer(self, request: RoundRequest) -> Iterator[Outcome]:
        """Yield the outcomes of a round's request, without lost replies."""
        self._acknowledge(request, self._sent)
        points = [self._arrays(point) for point in request.points]
        if not all(np.isfinite(values).all() for point in points for values in point):
            here = [name for name in request.acks if self._here is None or name in self._here]
            yield from (Refusal(protocol.MALFORMED_REQUEST) for _ in here)  # as a client that reads messages
            return
        weighed_as = request.entries.get(protocol.WEIGHED_AS, request.server_round)
        asked = (weighed_as, request.session, request.acks, points, request.entries)
        with observing() as observer:
            for answer in self.cohort.answers(*asked):
                if isinstance(answer, BlockAnswer):
                    for part in answer.parts:
                        yield from self._part(request, answer, part)
                else:
                    yield from self._single(request, *answer[0])
        figures = observer.figures()
        if figures is not None:
            yield figures

    def _single(self, request: RoundRequest, name: str, outcome: Release | RefusedError) -> Iterator[Outcome]:
        """Yield the outcome of a client that was asked alone."""
        # A mean of features or an evaluation is the only release of its session, and is never acknowledged.
        of = request.entries.get(protocol.RELEASE_OF, "gradients")
        if self._is_lost(request, name):
            return
        if isinstance(outcome, RefusedError):
            yield Refusal(outcome.code)
            return
        metrics = {**self.cohort.client(name).public_entries(of), protocol.NUM_EXAMPLES: outcome.samples}
        if of == "gradients":
            self._sent[name] = outcome.release
        yield Reply(name, outcome.release, outcome.ack, outcome, metrics)
        if of == "gradients":
            self._acknowledge(request, [name])

    def _part(self, request: RoundRequest, answer: BlockAnswer, part: PartAnswer) -> Iterator[Outcome]:
        """Yield the outcomes of clients that were asked together."""
        for name, refusal in part.refused():
            if not self._is_lost(request, name):
                yield Refusal(refusal.code)
        came = part.released()
        if self._experiment.config.lost_replies:
            came = [(i, name) for i, name in came if not self._is_lost(request, name)]
        if not came:
            return
        streams, metrics = part.releases.streams, answer.client.public_entries("gradients")
        releases = streams.release.tolist()
        if request.sums_suffice:
            yield _summed(part, came, metrics)
        else:
            for i, name in came:
                release = part.release(i)
                entries = {**metrics, protocol.NUM_EXAMPLES: release.samples}
                yield Reply(name, release.release, release.ack, release, entries)
        acknowledged = [(i, releases[i]) for i, name in came if request.aggregated.get(name) == releases[i]]
        if acknowledged:
            part.acknowledge(request.session, acknowledged)
        if len(acknowledged) < len(came):  # a server that sees only sums knows after the round
            known = {i for i, _ in acknowledged}
            self._sent |= {name: releases[i] for i, name in came if i not in known}

    def _is_lost(self, request: RoundRequest, name: str) -> bool:
        config = self._experiment.config
        return reply_is_lost(config.lost_replies, config.seed, request.server_round, name)

    def _acknowledge(self, request: RoundRequest, names: Iterable[str]) -> None:
        """Tell clients which of their releases were aggregated, so that they can forget them.

        Their next requests would. A server that sees only sums knows after the round.
        """
        acks = {name: self._sent[name] for name in names if request.aggregated.get(name) == self._sent[name]}
        for name in acks:
            del self._sent[name]
        if acks:
            self.cohort.acknowledge(request.session, acks)

    def statements(self, session: str, names: Sequence[str] | None = None) -> GroupedStatements:
        """Return what each client has spent."""
        numbers = np.arange(len(self.names())) if names is None else np.fromiter(map(int, names), np.int64, len(names))
        columns = [numbers] if self._kinds is None else self._kinds.group_by(numbers)
        return said_alike(numbers, columns, lambda number: self.cohort.client(str(number)).statement(session))

    def _arrays(self, point: Any) -> list[Any]:
        arrays, start = [], 0
        for shape, dtype, size in self._layout:
            arrays.append(np.asarray(point[start : start + size].reshape(shape), dtype=dtype))
            start += size
        # A point may hold one more array than the model.
        return [*arrays, *([point[start:]] if start < len(point) else [])]


def _summed(part: PartAnswer, came: list[tuple[int, str]], metrics: Mapping[str, Any]) -> SummedReplies:
    """Several releases as their sum."""
    streams, block = part.releases.streams, part.part.block
    places, names = zip(*came, strict=True)
    index, spacing = list(places), block.plan.grid.spacing
    return SummedReplies(
        clients=names,
        releases=tuple(streams.release[index].tolist()),
        acks=tuple(streams.ack[index].tolist()),
        samples=tuple(block.samples_counted(part.rows(places))),
        counts=block.total(part.releases, places),
        spacing=spacing,
        largest=min(math.ceil(block.plan.largest_value / spacing), LARGEST_COUNT),
        metrics=metrics,
    )
