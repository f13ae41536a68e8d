"""The cohort engine: a strategy and its simulated clients in one process, without messages between them.

The strategy and the clients are the same as on every engine. This engine only skips turning requests and releases into
messages and back, computes the gradients of many clients together, and keeps their ledgers as arrays with a row for
each client.

Long runs have compiled loops for the values of a block of releases: the same integers as NumPy's, in one pass over each
row where NumPy takes nine. They replace arithmetic only
(:class:`~murmurfl.privacy.release.privatizer_block.BlockArithmetic`): normals, admission, what is carried over and what
is recorded stay where they are, and NumPy does what the loop cannot, row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients.adapters.per_sample_gradients import OuterProducts
from ...clients.simulation.cohort_clients import BlockAnswer, Cohort, PartAnswer, stacked_samples
from ...privacy import protocol
from ...privacy.errors import RefusedError
from ...privacy.ledger.ledger_records import BlockLedger, Counts, Ledger, StreamBlock
from ...privacy.mechanisms import CancellingNoise
from ...privacy.noise import (
    KEY_BYTES,
    MARK,
    NoiseQuality,
    SimulatedKeys,
    each_normal_row,
    row_key,
    standard_normal_rows,
)
from ...privacy.release.clipping import StackedContributions, observe_releases, observing
from ...privacy.release.ledgered_privatizer import Release
from ...privacy.release.prefix_sums import ReleaseRule, RowCache, StreamState
from ...privacy.release.privatizer_block import RowByRow
from ...strategies.rounds.client_registry import NumberedNames
from ...strategies.rounds.replies import LARGEST_COUNT, Outcome, Refusal, Reply, RoundRequest, SummedReplies
from ..data.partition import Shards
from ..data.task import Shard
from ..runs.client_statements import GroupedStatements, said_alike
from ..runs.experiment import Experiment, reply_is_lost

DEFAULT_ROW_CACHE_MIB = 256.0
"""Memory for noise rows until they are removed again, in MiB; rows beyond it are regenerated."""


class ExperimentKinds:
    """Groups of like clients of an experiment: equal policies, and a method that makes their clients alike."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self.alike = experiment.method.clients_alike()
        self.num_samples: NDArray[np.int64] = np.asarray(experiment.sizes, dtype=np.int64)
        self.ledgers = BlockLedger(len(self.num_samples))
        sizes = np.unique(self.num_samples)
        self._only_kind = int(sizes[0]) if self.alike and len(sizes) == 1 else None

    def row(self, name: str) -> int:
        return int(name)

    def kind(self, name: str) -> Hashable | None:
        """Return the number of samples, which determines the policy."""
        if self._only_kind is not None:
            return self._only_kind
        return int(self.num_samples[int(name)]) if self.alike else None

    def group_by(self, rows: NDArray[np.integer]) -> list[NDArray[np.int64]]:
        """Columns; clients that agree in all of them make the same statement."""
        return [self.num_samples[rows], *self.ledgers.figures(np.asarray(rows, dtype=np.intp))]

    def batch(self, chosen: Sequence[tuple[str, slice]]) -> Any:
        """Return samples of several clients as one batch."""
        shards = self._experiment.shards
        if isinstance(shards, Shards):
            return shards.batch([int(name) for name, _ in chosen], [samples for _, samples in chosen])
        return stacked_samples([(shards[int(name)], samples) for name, samples in chosen])

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
            self._here = NumberedNames(clients) if isinstance(clients, range) else frozenset(map(str, clients))
        self.cohort = Cohort(
            NumberedNames(experiment.config.num_clients),
            lambda name: experiment.client(int(name), own(int(name)), rows),
            kinds=kinds if ledgers is None else None,
            only=self._here,
        )
        if worth_compiling(experiment):
            self.cohort.arithmetic = compiled_rows(experiment.policy().noise_quality)
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
        came = list(part.released())
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
    places, spacing = [i for i, _ in came], block.plan.grid.spacing
    return SummedReplies(
        clients=tuple(name for _, name in came),
        releases=tuple(streams.release[places].tolist()),
        acks=tuple(streams.ack[places].tolist()),
        samples=tuple(block.samples_counted([part.part.rows[part.releases.rows[i]] for i in places])),
        counts=block.total(part.releases, places),
        spacing=spacing,
        largest=min(math.ceil(block.plan.largest_value / spacing), LARGEST_COUNT),
        metrics=metrics,
    )


WORTH_COMPILING = 1 << 28
"""Values of a run's releases from which compiling, which takes a second or two, pays off."""


def worth_compiling(experiment: Experiment) -> bool:
    """Return True if numba is installed and the run is long enough for compiling to pay off."""
    config = experiment.config
    values = experiment.num_rounds * config.asked_per_round * experiment.model.num_parameters
    return values >= WORTH_COMPILING and find_spec("numba") is not None


def compiled_rows(quality: NoiseQuality) -> Callable[[ReleaseRule], CompiledRows]:
    """Return the maker of a block's arithmetic, compiled already for normals of this quality."""
    dense, outer = _loops()
    for normals in standard_normal_rows([bytes(KEY_BYTES)], 2, quality):
        for again in (False, True):
            dense(np.zeros(2), normals, 1.0, again, *np.zeros((3, 2), np.int64))
            outer(np.zeros(1), np.zeros(1), True, normals, 1.0, again, *np.zeros((3, 2), np.int64))
    return CompiledRows


class CompiledRows(RowByRow):
    """Compiled arithmetic of a block, for cancelling noise and one gradient a client.

    Notes
    -----
    Its counts equal those of :class:`~murmurfl.privacy.release.privatizer_block.RowByRow` to the bit.
    """

    def __init__(self, rule: ReleaseRule) -> None:
        super().__init__(rule)
        self._last: tuple[list[Counts], Counts, bool] = ([], np.empty(0, np.int64), False)

    def noised(
        self, streams: StreamBlock, contributions: StackedContributions, keys: Sequence[bytes], nonces: Sequence[bytes]
    ) -> list[Counts]:
        policy, noise = self._rule.policy, self._rule.noise
        # A subclass may override what a noise row is made of.
        simple = type(noise.plan.mechanism) is CancellingNoise and noise.plan.noise_std > 0.0
        if not simple or policy.rows_per_release != 1 or policy.bound.nonnegative:
            return super().noised(streams, contributions, keys, nonces)
        norms = contributions.norms()
        scales = policy.bound.scales(norms)
        if not np.isfinite(scales).all():
            return super().noised(streams, contributions, keys, nonces)
        if policy.bound.observed:
            observe_releases(norms[:, None], policy.clip_norm)
        noise.plan.grid.marked(np.empty(0), policy.clip_norm)  # raises if clipped values do not fit the grid
        made: list[Counts] = []
        total = np.zeros(noise.num_parameters, np.int64)
        write = _writer(contributions, scales * (1.0 / noise.plan.grid.spacing), noise.num_parameters)
        drawn = [row_key(key, nonce) for key, nonce in zip(keys, nonces, strict=True)]
        normals = each_normal_row(drawn, noise.num_parameters, policy.noise_quality)
        past = zip(streams.release.tolist(), streams.nonces, streams.noise_state, strict=True)
        for row, (before, key, nonce, values) in enumerate(zip(past, keys, nonces, normals, strict=True)):
            factor, last = noise.last_row(StreamState(*before), key)
            counts = np.empty(noise.num_parameters, np.int64)
            write(row, values, factor, last is not None, noise.kept(key, nonce, last), counts, total)
            made.append(counts)
        streams.nonces, streams.noise_state = list(nonces), [()] * len(made)
        self._last = made, total, (streams.release == streams.ack).all()
        return made

    def total(self, counts: Sequence[Counts], places: Sequence[int]) -> Counts:
        made, total, nothing_carried = self._last
        # Otherwise what was carried over was added to the rows since.
        if nothing_carried and len(places) == len(counts) == len(made) and all(map(is_, counts, made)):
            return total
        return super().total(counts, places)


Write = Callable[[int, NDArray[np.floating], float, bool, Counts, Counts, Counts], None]
"""Writes one row: its number, normals, their factor, whether there is a last row, that row, an output, and a sum."""


def _writer(contributions: StackedContributions, factors: NDArray[np.float64], size: int) -> Write:
    """Return a function that writes one client's counts and replaces its last noise row."""
    dense, outer = _loops()
    if type(contributions) is OuterProducts:
        residuals = contributions.residuals * factors[:, None]
        features, bias = contributions.features, contributions.bias

        def write_outer(row: int, *noise_and_counts: Any) -> None:
            outer(residuals[row], features[row], bias, *noise_and_counts)

        return write_outer
    scratch = np.empty(size)

    def write_dense(row: int, *noise_and_counts: Any) -> None:
        contributions.write(row, float(factors[row]), scratch)
        dense(scratch, *noise_and_counts)

    return write_dense


@cache
def _loops() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the compiled loops, without ``fastmath``: everything is rounded as in NumPy."""
    from numba import njit

    mark = MARK  # noise rows are kept as NumPy keeps them, so that either can continue after the other

    @njit
    def dense(values, normals, factor, again, last, made, total):
        for i in range(values.size):
            added = np.int64(np.rint(np.float64(normals[i]) * factor)) + mark
            made[i] = np.int64(np.rint(values[i])) + added - (last[i] if again else mark)
            last[i] = added
            total[i] += made[i]

    @njit
    def outer(residuals, features, bias, normals, factor, again, last, made, total):
        size = features.size
        for c in range(residuals.size):
            start = c * size
            for j in range(size):
                i = start + j
                added = np.int64(np.rint(np.float64(normals[i]) * factor)) + mark
                made[i] = np.int64(np.rint(residuals[c] * features[j])) + added - (last[i] if again else mark)
                last[i] = added
                total[i] += made[i]
        if bias:
            start = residuals.size * size
            for c in range(residuals.size):
                i = start + c
                added = np.int64(np.rint(np.float64(normals[i]) * factor)) + mark
                made[i] = np.int64(np.rint(residuals[c])) + added - (last[i] if again else mark)
                last[i] = added
                total[i] += made[i]

    return dense, outer
