"""Compiled arithmetic of a block of clients: the same integers as NumPy's, for all rows of a round at once.

It replaces arithmetic only (:class:`~murmurfl.privacy.release.privatizer_block.BlockArithmetic`): normals, admission,
what is carried over and what is recorded stay where they are, and NumPy does what the loops cannot. The loops are
:mod:`.kernels`, which numba compiles, and :mod:`.native` calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from operator import is_

import numpy as np
from numpy.typing import NDArray

from ...clients.adapters.per_sample_gradients import OuterProducts
from ...privacy.ledger.ledger_records import Counts, StreamBlock
from ...privacy.mechanisms import BltNoise, CancellingNoise, DecayNoise, IndependentNoise, Mechanism
from ...privacy.noise import NormalPiece, WordPairs, normal_pieces, row_key, standard_normals
from ...privacy.release.clipping import DenseContributions, StackedContributions, observe_releases
from ...privacy.release.prefix_sums import NoiseStream, ReleaseRule
from ...privacy.release.privatizer_block import RowByRow
from ..runs.experiment import Experiment
from .native import address, are_kept, loops

WORTH_COMPILING = 1 << 28
"""Values of a run's releases from which the loops pay off if they must be compiled, which takes a second or two."""
WORTH_LOADING = 1 << 24
"""Values from which they pay off if their native code is kept."""


def worth_compiling(experiment: Experiment) -> bool:
    """Return True if numba is installed and the run is long enough for compiled loops to pay off."""
    config = experiment.config
    values = experiment.num_rounds * config.asked_per_round * experiment.model.num_parameters
    if values < min(WORTH_COMPILING, WORTH_LOADING) or find_spec("numba") is None:
        return False
    return values >= WORTH_COMPILING or are_kept()


def compiled_rows(*, own_rows: bool = False) -> Callable[[ReleaseRule], CompiledRows]:
    """Return the maker of a block's arithmetic; all that it makes share one memory for rows of noise.

    With ``own_rows`` each client's counts own their memory: remembering a lost release does not keep all others.
    """
    kept = LastNormals()
    return lambda rule: CompiledRows(rule, kept, own_rows=own_rows)


class CompiledRows(RowByRow):
    """Compiled arithmetic of a block, for the mechanisms of :data:`NOISES`.

    Notes
    -----
    Its counts equal those of :class:`~murmurfl.privacy.release.privatizer_block.RowByRow` to the bit.
    """

    def __init__(self, rule: ReleaseRule, kept: LastNormals | None = None, *, own_rows: bool = False) -> None:
        super().__init__(rule)
        self._own_rows = own_rows
        self._last: tuple[list[Counts], Counts, bool] = ([], np.empty(0, np.int64), False)
        # A subclass of a mechanism may override what its noise is made of.
        noise = NOISES.get(type(rule.noise.plan.mechanism)) if rule.noise.plan.noise_std > 0.0 else None
        bound = rule.policy.bound
        possible = not bound.nonnegative and bound.moments is None
        self._noise = None if noise is None or not possible else noise(rule.noise, kept or LastNormals())
        self._pairs = compiled_pairs() if self._noise is not None and rule.policy.noise_quality == "fast" else None

    def noised(
        self, streams: StreamBlock, contributions: StackedContributions, keys: Sequence[bytes], nonces: Sequence[bytes]
    ) -> list[Counts]:
        policy, noise, size = self._rule.policy, self._rule.noise, self._rule.noise.num_parameters
        if self._noise is None:
            return super().noised(streams, contributions, keys, nonces)
        norms, share = contributions.norms(), 1.0 / policy.rows_per_release
        scales = policy.bound.scales(norms)
        if not (np.isfinite(scales).all() and self._noise.begin(streams, keys)):
            return super().noised(streams, contributions, keys, nonces)
        if policy.bound.observed:
            observe_releases(norms.reshape(len(keys), -1), policy.clip_norm)
        noise.plan.grid.marked(np.empty(0), policy.clip_norm * share)  # raises if clipped values do not fit the grid
        factors = scales * (share / noise.plan.grid.spacing)
        source = _source(contributions, factors, policy.rows_per_release, size)
        made: list[Counts] = []
        total, counts = np.zeros(size, np.int64), np.empty((0, size), np.int64)
        drawn = [row_key(key, nonce) for key, nonce in zip(keys, nonces, strict=True)]
        for piece in normal_pieces(drawn, size, policy.noise_quality, self._pairs):
            if not piece.columns.start:
                counts = np.empty((piece.rows.stop - piece.rows.start, size), np.int64)
            self._noise.write(piece, counts)
            source.add(piece, counts, total)
            if piece.columns.stop == size:
                made += [row.copy() for row in counts] if self._own_rows else list(counts)
        self._noise.end(streams, nonces)
        self._last = made, total, bool((streams.release == streams.ack).all())
        return made

    def total(self, counts: Sequence[Counts], places: Sequence[int]) -> Counts:
        made, total, nothing_carried = self._last
        # Otherwise what was carried over was added to the rows since.
        if nothing_carried and len(places) == len(counts) == len(made) and all(map(is_, counts, made)):
            return total
        return super().total(counts, places)


@cache
def compiled_pairs() -> WordPairs | None:
    """Return the loop that makes normals of ``fast`` quality, or None if NumPy's are others on this computer."""
    return loops().make_normals if loops().equals_numpy() else None


class LastNormals:
    """The normals of clients' last releases, in one table: what the next ones remove.

    The oldest go first, and are drawn again from their nonces.
    """

    def __init__(self) -> None:
        self.table: NDArray[np.floating] = np.empty((0, 0), np.float32)
        self._places: dict[bytes, int] = {}
        self._nonces: list[bytes] = []

    def take(self, noise: NoiseStream, streams: StreamBlock, keys: Sequence[bytes]) -> NDArray[np.intp] | None:
        """Return the row of the table that has each client's last normals, and is to hold its next ones.

        None if there is no room for all of them. The rows are nobody's until :meth:`keep`.
        """
        size, dtype = noise.num_parameters, np.float64 if noise.quality == "exact" else np.float32
        most = noise.cache_bytes // (size * np.dtype(dtype).itemsize)
        if len(keys) > most or (self._places and (self.table.shape[1], self.table.dtype) != (size, dtype)):
            return None
        places = np.empty(len(keys), np.intp)
        for row, (key, nonce, release) in enumerate(zip(keys, streams.nonces, streams.release.tolist(), strict=True)):
            place = self._places.pop(key, None)
            if place is None:
                place = self._free(most, size, dtype)
            self._places[key] = places[row] = place
            if release and self._nonces[place] != nonce:
                self.table[place] = standard_normals(row_key(key, nonce), size, noise.quality)
            self._nonces[place] = b""  # until it is kept
        return places

    def keep(self, places: NDArray[np.intp], nonces: Sequence[bytes]) -> None:
        """Note from which nonces the rows are now."""
        for place, nonce in zip(places.tolist(), nonces, strict=True):
            self._nonces[place] = nonce

    def _free(self, most: int, size: int, dtype: type[np.floating]) -> int:
        """Return a row for a client that has none."""
        used = len(self._places)
        if used == most:
            place = self._places.pop(next(iter(self._places)))
            self._nonces[place] = b""  # others have the same nonces
            return place
        if used == len(self.table):
            table = np.empty((min(max(2 * used, 16), most), size), dtype)
            if used:
                table[:used] = self.table
            self.table = table
        self._nonces[used:] = [b""]
        return used


class CompiledNoise(ABC):
    """The noise of a mechanism, for whole blocks of clients: :meth:`begin`, the pieces of all rows, :meth:`end`."""

    def __init__(self, noise: NoiseStream, kept: LastNormals) -> None:
        self._loops = loops()
        self._noise, self._kept = noise, kept

    @abstractmethod
    def begin(self, streams: StreamBlock, keys: Sequence[bytes]) -> bool:
        """Prepare the next release of each client; return False if NumPy must make them."""

    @abstractmethod
    def write(self, piece: NormalPiece, made: Counts) -> None:
        """Write the counts that some columns of some clients add and remove to these clients' counts."""

    def end(self, streams: StreamBlock, nonces: Sequence[bytes]) -> None:
        """Move what the noise is made again from."""
        streams.nonces, streams.noise_state = list(nonces), [()] * len(nonces)

    def _scale(self, streams: StreamBlock) -> float:
        return max(map(self._noise.scale_of, set((streams.release + 1).tolist())))  # one for all releases


class _RemovingLast(CompiledNoise):
    """The noise of a mechanism that removes the last row, or a part of it."""

    _places: NDArray[np.intp]
    _again: NDArray[np.bool_]

    def begin(self, streams: StreamBlock, keys: Sequence[bytes]) -> bool:
        places = self._kept.take(self._noise, streams, keys)
        if places is None:
            return False
        self._places, self._again = places, streams.release > 0
        self._prepare(streams)
        return True

    @abstractmethod
    def _prepare(self, streams: StreamBlock) -> None:
        """Work out the factors of each client."""

    def end(self, streams: StreamBlock, nonces: Sequence[bytes]) -> None:
        self._kept.keep(self._places, nonces)
        super().end(streams, nonces)


class _Cancelling(_RemovingLast):
    def _prepare(self, streams: StreamBlock) -> None:
        sigmas: NDArray[np.float64] = self._noise.plan.mechanism.sigmas * self._scale(streams)  # type: ignore[attr-defined]
        self._factors, self._before = sigmas[streams.release], sigmas[np.maximum(streams.release - 1, 0)]

    def write(self, piece: NormalPiece, made: Counts) -> None:
        rows = piece.rows
        self._loops.cancelling(
            *(piece.normals, *_extent(piece, made), self._factors[rows], self._before[rows]),
            *(self._again[rows], self._kept.table, self._places[rows], made),
        )


class _Decaying(_RemovingLast):
    def _prepare(self, streams: StreamBlock) -> None:
        kind = self._kept.table.dtype.type
        weight: float = self._noise.plan.mechanism.diagonals[1]  # type: ignore[attr-defined]
        self._factor, self._weight = float(kind(self._scale(streams))), float(kind(weight))

    def write(self, piece: NormalPiece, made: Counts) -> None:
        rows = piece.rows
        self._loops.decaying(
            *(piece.normals, *_extent(piece, made), self._factor, self._weight),
            *(self._again[rows], self._kept.table, self._places[rows], made),
        )


class _Independent(CompiledNoise):
    def begin(self, streams: StreamBlock, keys: Sequence[bytes]) -> bool:
        mechanism, scale = self._noise.plan.mechanism, self._scale(streams)
        stds = [scale * mechanism.increment_bound(release) for release in (streams.release + 1).tolist()]  # type: ignore[operator]
        self._factors = np.array(stds)
        return True

    def write(self, piece: NormalPiece, made: Counts) -> None:
        self._loops.independent(piece.normals, *_extent(piece, made), self._factors[piece.rows], made)


class _Buffered(CompiledNoise):
    def begin(self, streams: StreamBlock, keys: Sequence[bytes]) -> bool:
        mechanism, size = self._noise.plan.mechanism, self._noise.num_parameters
        begun = zip(streams.release.tolist(), streams.noise_state, strict=True)
        self._states = [state if release else mechanism.initial_state(size) for release, state in begun]
        self._after: list[NDArray[np.floating]] = []
        self._factor = self._scale(streams)
        return True

    def write(self, piece: NormalPiece, made: Counts) -> None:
        mechanism, kind = self._noise.plan.mechanism, piece.normals.dtype
        omegas, thetas = mechanism.omega.astype(kind), mechanism.theta.astype(kind)  # type: ignore[attr-defined]
        start, columns, size = piece.columns.start, piece.columns.stop - piece.columns.start, made.shape[1]
        values, scale = np.empty(columns, kind), float(kind.type(self._factor))
        for i, row in enumerate(range(piece.rows.start, piece.rows.stop)):
            if not start:
                self._after.append(np.empty((len(omegas), size), kind))
            states = [np.require(state, kind, ["C", "W"]) for state in self._states[row]]
            where = np.array([address(state, kind) for state in states])
            self._loops.buffered(
                *(piece.normals[i], start, columns, size, scale, len(omegas), omegas, thetas),
                *(where, self._after[row], values, made[i]),
            )

    def end(self, streams: StreamBlock, nonces: Sequence[bytes]) -> None:
        super().end(streams, nonces)
        streams.noise_state = [tuple(after) for after in self._after]
        self._states, self._after = [], []


NOISES: dict[type[Mechanism], type[CompiledNoise]] = {
    CancellingNoise: _Cancelling,
    DecayNoise: _Decaying,
    IndependentNoise: _Independent,
    BltNoise: _Buffered,
}
"""The mechanisms whose noise is compiled."""


def _extent(piece: NormalPiece, made: Counts) -> tuple[int, int, int, int, int]:
    """Return the width of normals, the clients, the first of the columns and their number, and all columns."""
    rows, columns = piece.rows, piece.columns
    return piece.normals.shape[1], rows.stop - rows.start, columns.start, columns.stop - columns.start, made.shape[1]


class _Source(ABC):
    """Clipped contributions: equally many samples of each client, client after client."""

    def __init__(self, share: int) -> None:
        self._loops = loops()
        self._share = share

    @abstractmethod
    def add(self, piece: NormalPiece, counts: Counts, total: Counts) -> None:
        """Add the columns of a piece to its clients' counts, shape (clients, d), and these to ``total``."""

    def _samples(self, piece: NormalPiece) -> slice:
        return slice(piece.rows.start * self._share, piece.rows.stop * self._share)


class _OuterSource(_Source):
    def __init__(self, contributions: OuterProducts, factors: NDArray[np.float64], share: int) -> None:
        super().__init__(share)
        self._residuals = np.ascontiguousarray(contributions.residuals * factors[:, None])
        self._features = np.require(contributions.features, np.float64, ["C", "W"])

    def add(self, piece: NormalPiece, counts: Counts, total: Counts) -> None:
        residuals, features = self._residuals[self._samples(piece)], self._features[self._samples(piece)]
        _, *extent = _extent(piece, counts)
        sizes = residuals.shape[1], features, features.shape[1]
        self._loops.add_outer(residuals, *sizes, self._share, *extent, counts, total)


class _DenseSource(_Source):
    def __init__(self, rows: NDArray[np.floating], factors: NDArray[np.float64], share: int) -> None:
        super().__init__(share)
        self._rows, self._factors = rows, factors.astype(rows.dtype)

    def add(self, piece: NormalPiece, counts: Counts, total: Counts) -> None:
        samples = self._samples(piece)
        rows = np.require(self._rows[samples], requirements=["C", "W"])
        _, *extent = _extent(piece, counts)
        self._loops.add_dense(rows, self._factors[samples], self._share, *extent, counts, total)


class _WrittenSource(_Source):
    """Contributions that are written out one at a time, when all columns of a client have their noise."""

    def __init__(self, contributions: StackedContributions, factors: NDArray[np.float64], share: int) -> None:
        super().__init__(share)
        self._contributions, self._factors = contributions, factors.tolist()

    def add(self, piece: NormalPiece, counts: Counts, total: Counts) -> None:
        if piece.columns.stop < counts.shape[1]:
            return
        row, one, nothing = np.empty(counts.shape[1]), np.ones(1), np.zeros(counts.shape[1], np.int64)
        for i, made in enumerate(counts):
            first = (piece.rows.start + i) * self._share
            for sample in range(first, first + self._share):
                self._contributions.write(sample, self._factors[sample], row)
                self._loops.add_dense(row, one, 1, 1, 0, len(made), len(made), made, nothing)
            total += made


def _source(contributions: StackedContributions, factors: NDArray[np.float64], share: int, size: int) -> _Source:
    """Return the contributions of ``size`` values, whose ``factors`` clip them and bring them to the grid."""
    if type(contributions) is OuterProducts:
        return _OuterSource(contributions, factors, share)
    if type(contributions) is DenseContributions:
        rows = contributions.rows
        if rows.dtype in (np.float32, np.float64) and rows.shape[1] == size:  # a loop looks at neither
            return _DenseSource(rows, factors, share)
    return _WrittenSource(contributions, factors, share)
