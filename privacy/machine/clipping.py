"""How the rows that a release is made of are bounded in L2, one by one, and how many of them are added up.

A bound says how far apart two rows can be, which is what replacing one sample changes of their sum:

    ``clip``         a row longer than S is cut to S; two of them are at most 2 S apart.
    ``automatic``    a row g becomes S g / (||g|| + gamma), which is shorter than S: 2 S.
    ``nonnegative``  negative entries become zero, then ``clip``. Two rows without negative entries have no negative
                     product, so they are at most sqrt(2) S apart.
    ``moments``      features longer than S are cut to S, and rows are made of them and of a class
                     (:mod:`.second_moments`).

The machine enforces every one of them, whatever the rows are; nothing is refused.

Sums of many rows are made in blocks. The rows of a block are added up in float64, in any order, and the sum of the
block is rounded to the grid. A sample is in one block, so replacing it moves one rounding, and the float64 errors of
two sums of at most ``BLOCK_ROWS`` rows (:data:`SUMMING_ERROR`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ConfigurationError
from .clipping_figures import observe
from .second_moments import Moments

# Rounding of the norm and of the scaling is a few units in the last place of float64; this margin swallows it, so the
# bound below is true of the numbers, not only of the reals behind them.
_MARGIN = 1.0 - 2.0**-40
LEAST_STABILITY = 1e-100
"""The smallest gamma of automatic clipping. Squares of entries below 1e-154 are lost, so the norm of so short a row may
come out as zero; beside this that is nothing, and a smaller gamma alone would make a row of any length of it."""


def clip_per_sample(contributions: ArrayLike, clip_norm: float) -> NDArray[np.float64]:
    """Scale every row, shape (samples, parameters), down to an L2 norm of at most ``clip_norm``; computed in float64.

    A row with any NaN or infinity becomes zero, and a zero row stays zero.

    Notes
    -----
    **Formal guarantees.** Whatever the input, each returned row has L2 norm <= S in exact arithmetic (for up to 2^26
    parameters, because NumPy adds up squares in runs of 8192), so replacing one sample changes a sum of rows by at most
    2 S. A non-finite row is made zero, not dropped: the number of rows, and
    with it any mean, does not depend on the data.
    Proof: docs/proofs/sensitivities.md.
    """
    return _clipped(contributions, clip_norm, observed=False)


def clip_contributions(contributions: ArrayLike, clip_norm: float) -> NDArray[np.float64]:
    """Clip rows as :func:`clip_per_sample` for a release; a simulation may observe it (:mod:`.clipping_figures`).

    Notes
    -----
    **Formal guarantees.** Each returned row has L2 norm <= S, so replacing one sample changes a sum of rows by at most
    2 S; a row that is not finite is made zero.
    Proof: docs/proofs/sensitivities.md.
    """
    return _clipped(contributions, clip_norm, observed=True)


def _clipped(contributions: ArrayLike, clip_norm: float, *, observed: bool) -> NDArray[np.float64]:
    if not (math.isfinite(clip_norm) and clip_norm > 0):
        raise ConfigurationError(f"Expected clip_norm > 0 and finite, got {clip_norm!r}.")
    rows = np.array(contributions, dtype=np.float64)
    if rows.ndim != 2:
        raise ConfigurationError(f"Expected contributions of shape (samples, parameters), got shape {rows.shape}.")
    if rows.size == 0:
        return rows
    largest = np.maximum.reduce(np.abs(rows), axis=1)
    finite = np.isfinite(largest)  # a NaN or an infinity among the entries is the largest of them
    rows[~finite] = 0.0
    largest[~finite] = 0.0
    # Dividing by the largest entry first keeps the square of a huge but finite entry from overflowing; of such a row
    # only, so that none changes another's bits.
    scale_free = np.float64(1.0)
    extreme = (largest > 1e150) | (largest < 1e-150)
    if extreme.any():
        scale_free = np.where(extreme & (largest > 0), largest, 1.0)
        rows /= scale_free[:, None]
    unit_norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    bound = clip_norm * _MARGIN
    with np.errstate(over="ignore"):  # with an infinite bound nothing is clipped
        if observed:
            observe(np.where(finite, unit_norms * scale_free, np.nan), clip_norm)
        within = unit_norms <= bound / scale_free
        scales = np.where(within, scale_free, bound / np.where(within, 1.0, unit_norms))
    if not (scales == 1.0).all():
        rows *= scales[:, None]
    return rows


def bounded_scales(
    norms: NDArray[np.float64], clip_norm: float | NDArray[np.float64], stability: float | None = None
) -> NDArray[np.float64]:
    """Factors that bring rows of given L2 norms down to at most ``clip_norm``; NaN for a norm that is not finite.

    Norms must be true up to a relative error of 2^-41. With a ``stability`` gamma >= ``LEAST_STABILITY`` every row g
    becomes S g / (||g|| + gamma), which is automatic clipping (Bu, Wang, Zha and Karypis 2022).

    Notes
    -----
    **Formal guarantees.** A row times its scale has norm at most S.
    """
    bound = clip_norm * _MARGIN
    with np.errstate(all="ignore"):
        if stability is not None:
            return np.where(np.isfinite(norms), bound / (norms + stability), np.nan)
        return np.where(norms <= bound, 1.0, np.where(np.isfinite(norms), bound / norms, np.nan))


class StackedContributions(Protocol):
    """Per-sample contributions of many samples, which can be clipped without being written out."""

    def norms(self) -> NDArray[np.float64]:
        """The L2 norm of every row, shape (samples,); NaN or infinite where it cannot be told."""
        ...

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        """Write ``scale`` times a row to ``out``, shape (d,)."""
        ...


def squared_lengths(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    """The squared L2 norm of every row, shape (samples,).

    Notes
    -----
    **Formal guarantees.** A row's norm depends on that row alone, to the last bit, whichever rows stand beside it: no
    record changes how another is scaled.
    """
    count, size = rows.shape
    if count == 1:  # a single row of many values would be added up in another order than one among several
        rows = np.broadcast_to(rows, (2, size))
    return np.einsum("ij,ij->i", rows, rows, dtype=np.float64)[:count]


class DenseContributions:
    """Contributions that are written out, one row a sample."""

    def __init__(self, rows: NDArray[np.floating]) -> None:
        self._rows = rows

    def norms(self) -> NDArray[np.float64]:
        with np.errstate(all="ignore"):
            return np.sqrt(squared_lengths(self._rows))

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        np.multiply(self._rows[row], scale, out=out)

    def scaled_sum(self, scales: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum of rows, each times its scale; one matrix product."""
        return scales @ np.asarray(self._rows, dtype=np.float64)


class ChosenContributions:
    """Some rows of other contributions."""

    def __init__(self, contributions: StackedContributions, rows: NDArray[np.intp]) -> None:
        self._contributions, self._rows = contributions, rows

    def norms(self) -> NDArray[np.float64]:
        return self._contributions.norms()[self._rows]

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        self._contributions.write(int(self._rows[row]), scale, out)


class FittingContributions:
    """Rows of which only those that ``fits`` marks count; the others are zero."""

    def __init__(self, contributions: StackedContributions, fits: NDArray[np.bool_]) -> None:
        self._contributions, self._fits = contributions, fits

    def norms(self) -> NDArray[np.float64]:
        return np.where(self._fits, self._contributions.norms(), 0.0)

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        if self._fits[row]:
            self._contributions.write(row, scale, out)
        else:
            out[:] = 0.0


Clipping = Literal["clip", "automatic"]
CLIPPINGS: tuple[Clipping, ...] = get_args(Clipping)

BLOCK_ROWS = 1024
"""Rows that are added up before they are rounded."""
SUMMING_ERROR = 2.0**-30
"""The most that float64 errors of a block's sum add to the sensitivity, relative to it. A sum of m numbers, in any
order, is wrong by at most (m - 1) u sum |x_i| with u = 2^-53, and each of them by a few u more; over all coordinates,
with rows of at most S, by less than (m + 4) m u S = 2^-33 S (m = 1024), twice for two sums. Sums of products, as those
of moments are, have as much in them (docs/proofs/sensitivities.md, 2b and 2c)."""
MOST_ROWS = 2**20
"""Rows of one release: counts of their sum stay exact."""

_ROOT_OF_TWO = math.nextafter(math.sqrt(2.0), 2.0)


@dataclass(frozen=True)
class RowBound:
    """The bound of each row.

    Parameters
    ----------
    clip_norm : float
        S, the L2 bound.
    nonnegative : bool
        Whether negative entries become zero first.
    stability : float, optional
        gamma of ``automatic``, at least ``LEAST_STABILITY``; None for ``clip``.
    observed : bool
        Whether a simulation may see what clipping did.
    moments : Moments, optional
        Makes rows here from features and marks of a class, k + C values a sample: what is bounded is the features.

    Notes
    -----
    **Formal guarantees.** Whatever the rows are, two bounded ones are at most :attr:`distance` apart in L2. A row that
    is not finite becomes zero and still counts.
    Proof: docs/proofs/sensitivities.md.
    """

    clip_norm: float
    nonnegative: bool = False
    stability: float | None = None
    observed: bool = True
    moments: Moments | None = None

    def __post_init__(self) -> None:
        if self.stability is not None and not self.stability >= LEAST_STABILITY:
            raise ConfigurationError(
                f"Expected clip_stability >= {LEAST_STABILITY:g}, got {self.stability!r}: the norm of a row as short "
                "as that is lost to rounding, and the row would become longer than the clip."
            )

    @property
    def distance(self) -> float:
        """The L2 distance that two bounded rows can be apart at most."""
        if self.moments is not None:
            return self.moments.distance(self.clip_norm)
        return (_ROOT_OF_TWO if self.nonnegative else 2.0) * self.clip_norm

    @property
    def longest(self) -> float:
        """The L2 norm of a bounded row at most."""
        return self.clip_norm if self.moments is None else self.moments.longest(self.clip_norm)

    def width(self, num_parameters: int) -> int:
        """The values that each sample must give, where a release has ``num_parameters``."""
        if self.moments is None:
            return num_parameters
        return self.moments.num_features(num_parameters) + self.moments.classes

    def rows(self, rows: NDArray[np.floating]) -> NDArray[np.float64]:
        """Bounded rows, written out, shape (samples, parameters); with moments the bounded features."""
        clip = clip_contributions if self.observed else clip_per_sample
        if self.nonnegative:
            # NaN stays NaN here, and its row becomes zero below.
            return clip(np.maximum(np.asarray(rows, dtype=np.float64), 0.0), self.clip_norm)
        clipped = clip(rows, self.clip_norm)
        if self.stability is None:
            return clipped
        with np.errstate(all="ignore"):
            norms = np.linalg.norm(np.asarray(rows, dtype=np.float64), axis=1)
            beyond = np.where(np.isfinite(norms), norms / (norms + self.stability), 1.0)
            within = bounded_scales(norms, self.clip_norm, self.stability)
        return clipped * np.where(norms <= self.clip_norm, within, beyond)[:, None]

    def scales(self, norms: NDArray[np.float64]) -> NDArray[np.float64]:
        """Factors that bound rows of given L2 norms; NaN for a norm that is not finite. Not for ``nonnegative``."""
        return bounded_scales(norms, self.clip_norm, self.stability)

    def total(
        self,
        rows: StackedContributions | NDArray[np.floating],
        num_parameters: int,
        weights: NDArray[np.float64] | None = None,
    ) -> NDArray[np.float64]:
        """The sum of the bounded rows of at most ``BLOCK_ROWS`` samples, in float64; weights lie between 0 and 1.

        For moments ``rows`` is an ndarray of shape (samples, k + C).

        Notes
        -----
        **Formal guarantees.** Replacing one row moves it by at most :attr:`distance` (1 + ``SUMMING_ERROR``).
        """
        if self.moments is not None:
            split = self.moments.num_features(num_parameters)
            features, marks = np.asarray(rows)[:, :split], np.asarray(rows)[:, split:]
            return self.moments.sum(self.rows(features), marks, self.clip_norm, weights)
        if isinstance(rows, np.ndarray):
            bounded = self.rows(rows)
            return bounded.sum(axis=0) if weights is None else weights @ bounded
        scaled_sum = getattr(rows, "scaled_sum", None)
        norms = rows.norms()
        if scaled_sum is not None and not self.nonnegative:
            scales = self.scales(norms)
            if np.isfinite(scales).all():
                if self.observed:
                    observe(norms, self.clip_norm)
                return scaled_sum(scales if weights is None else scales * weights)
        # Not in closed form, or a row that is not finite, or too large to square: the careful way, row by row.
        total, row = np.zeros(num_parameters), np.empty(num_parameters)
        for i in range(len(norms)):
            with np.errstate(all="ignore"):
                rows.write(i, 1.0, row)
            total += self.rows(row[None])[0] * (1.0 if weights is None else weights[i])
        return total


def blocks(samples: slice, rows: int = BLOCK_ROWS) -> Iterator[slice]:
    """The blocks of samples that are rounded together: the same ones for all callers.

    Notes
    -----
    **Formal guarantees.** A record is in one block, so replacing it moves one rounding.
    """
    for start in range(samples.start, samples.stop, rows):
        yield slice(start, min(start + rows, samples.stop))
