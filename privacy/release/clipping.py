"""Bounds in L2 on the rows that a release is made of, one by one, and on how many of them are added up.

A bound says how far apart two rows can be, which is what replacing one sample changes of their sum:

    ``clip``         a row longer than S is cut to S; two of them are at most 2 S apart.
    ``automatic``    a row g becomes S g / (||g|| + gamma), which is shorter than S: 2 S.
    ``nonnegative``  negative entries become zero, then ``clip``. Two rows without negative entries have no negative
                     product, so they are at most sqrt(2) S apart.
    ``moments``      features longer than S are cut to S, and rows are made of them and of a class
                     (:class:`Moments`).

The client enforces every one of them, whatever the rows are; nothing is refused.

Sums of many rows are made in blocks. The rows of a block are added up in float64, in any order, and the sum of the
block is rounded to the grid. A sample is in one block, so replacing it moves one rounding, and the float64 errors of
two sums of at most ``BLOCK_ROWS`` rows (:data:`SUMMING_ERROR`).

Second moments
--------------
All that a linear model needs of a sample as one row, so that one release is enough. A sample is its features x, no
longer than S, and its class c of C. Its row is

    the upper triangle of x x^T, off the diagonal times sqrt(2);    a S (x outer u_c),

with u_1 .. u_C the corners of a regular simplex around zero in C - 1 dimensions, each of length 1; a sample without a
class has none. The sum of the rows is X^T X and a S X^T U, from which least squares on the classes is solved. Only
differences between classes are sent: a value added to all classes alike would change no prediction.

Two rows are at most S^2 sqrt(2 + 2 a^2 + a^4 / 2) apart, for a^2 <= 2. The client itself makes rows from features and
class, so this structure is there whatever it is handed.

What clipping did
-----------------
A training whose gradients are NaN, or hundreds of times as long as the clip, learns nothing, and nobody is told: a row
that is not finite counts as zero, and a long row is scaled down. These figures would tell, but they are computed from
private data without noise. So nothing is counted unless somebody is :func:`observing`: a simulation, which marks the
figures as not private, or a real client for its own log, which the figures never leave.

Formal guarantees
-----------------
Whatever the rows are, two bounded ones are no further apart than the list above says, and one that is not finite counts
as zero. What :func:`observing` counts has no noise and guarantees nothing: on a real client it leaves for nothing but
the client's own log. Proof: docs/proofs/sensitivities.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ConfigurationError

# Rounding of the norm and of the scaling is a few units in the last place of float64; this margin swallows it, so the
# bound below is true of the numbers, not only of the reals behind them.
_MARGIN = 1.0 - 2.0**-40
LEAST_STABILITY = 1e-100
"""The smallest gamma of automatic clipping. Squares of entries below 1e-154 are lost, so the norm of so short a row may
come out as zero; beside this that is nothing, and a smaller gamma alone would make a row of any length of it."""


LEAST_CLIP = 1e-150
"""The smallest clip norm. Squares below 1e-308 lose their last places, and so do factors that bring a long row down to
so short a bound: the row would stay longer than it."""


def clip_per_sample(contributions: ArrayLike, clip_norm: float) -> NDArray[np.float64]:
    """Scale every row, shape (samples, parameters), down to an L2 norm of at most ``clip_norm``; computed in float64.

    A row with any NaN or infinity becomes zero, and a zero row stays zero.

    Notes
    -----
    **Formal guarantees.** Whatever the input, each returned row has L2 norm <= S in exact arithmetic, so replacing one
    sample changes a sum of rows by at most 2 S. A non-finite row is made zero, not dropped: the number of rows, and
    with it any mean, does not depend on the data.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> clip_per_sample([[3.0, 4.0], [0.3, 0.4]], clip_norm=1.0).round(3).tolist()
    [[0.6, 0.8], [0.3, 0.4]]
    """
    return _clipped(contributions, clip_norm, observed=False)


def clip_contributions(contributions: ArrayLike, clip_norm: float) -> NDArray[np.float64]:
    """Clip rows as :func:`clip_per_sample` for a release; a simulation may observe it (:func:`observing`).

    Notes
    -----
    **Formal guarantees.** Each returned row has L2 norm <= S, so replacing one sample changes a sum of rows by at most
    2 S; a row that is not finite is made zero.
    Proof: docs/proofs/sensitivities.md.
    """
    return _clipped(contributions, clip_norm, observed=True)


def _check_clip(clip_norm: float) -> None:
    if not LEAST_CLIP <= clip_norm < math.inf:
        raise ConfigurationError(
            f"Expected a finite clip_norm >= {LEAST_CLIP:g}, got {clip_norm!r}: no bound so short can be kept.",
            kind="out-of-range",
            setting="clip_norm",
            got=clip_norm,
        )


def _clipped(contributions: ArrayLike, clip_norm: float, *, observed: bool) -> NDArray[np.float64]:
    _check_clip(clip_norm)
    rows = np.array(contributions, dtype=np.float64, order="C")
    if rows.ndim != 2:
        raise ConfigurationError(
            f"Expected contributions of shape (samples, parameters), got shape {rows.shape}.", kind="wrong-shape"
        )
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
    unit_norms = np.sqrt(squared_lengths(rows))
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

    Norms must be true up to a relative error of 2^-40.9. With a ``stability`` gamma >= ``LEAST_STABILITY`` every row g
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
        """Return the L2 norm of every row, shape (samples,); NaN or infinite where it cannot be told."""
        ...

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        """Write ``scale`` times a row to ``out``, shape (d,)."""
        ...


_RUN = 8192
"""Squares that are added up in any order, before the sums of such runs are."""


def squared_lengths(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the squared L2 norm of every row, shape (samples,), too small by at most 2^-39.9 of itself.

    Notes
    -----
    **Formal guarantees.** A row's norm depends on that row alone, to the last bit, whichever rows stand beside it: no
    record changes how another is scaled. Squares are added up in runs of 8192, in whatever order NumPy takes, and the
    sums of runs in pairs: of up to 2^40 parameters a norm is less than 2^-40.9 of itself too small.
    Proof: docs/proofs/sensitivities.md.
    """
    count, size = rows.shape
    rows = np.ascontiguousarray(rows)  # columns first would be added up in another order, which one row alone never is
    if count == 1:  # a single row would be added up in another order than one among several
        rows = np.broadcast_to(rows, (2, size))
    whole = size - size % _RUN
    if not whole:  # the only run
        return np.einsum("ij,ij->i", rows, rows, dtype=np.float64)[:count]
    head = rows[:, :whole].reshape(len(rows), whole // _RUN, _RUN)
    sums = [
        np.einsum("ijk,ijk->ij", head, head, dtype=np.float64),
        np.einsum("ij,ij->i", rows[:, whole:], rows[:, whole:], dtype=np.float64)[:, None],
    ]
    total = np.concatenate(sums, axis=1)[:count]
    with np.errstate(all="ignore"):
        while (half := total.shape[1] // 2) > 0:
            total = np.concatenate([total[:, :half] + total[:, half : 2 * half], total[:, 2 * half :]], axis=1)
    return total[:, 0]


class DenseContributions:
    """Contributions that are written out, one row a sample."""

    def __init__(self, rows: NDArray[np.floating]) -> None:
        self.rows = rows

    def norms(self) -> NDArray[np.float64]:
        with np.errstate(all="ignore"):
            return np.sqrt(squared_lengths(self.rows))

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        np.multiply(self.rows[row], scale, out=out)

    def scaled_sum(self, scales: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of rows, each times its scale; one matrix product."""
        return scales @ np.asarray(self.rows, dtype=np.float64)


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
    """The bound S = ``clip_norm`` of each row in L2, and what becomes of rows that are longer.

    Notes
    -----
    **Formal guarantees.** Whatever the rows are, two bounded ones are at most :attr:`distance` apart in L2. A row that
    is not finite becomes zero and still counts.
    Proof: docs/proofs/sensitivities.md.
    """

    clip_norm: float
    nonnegative: bool = False
    """Whether negative entries become zero first."""
    stability: float | None = None
    """gamma of ``automatic``, at least ``LEAST_STABILITY``; None for ``clip``."""
    observed: bool = True
    """Whether a simulation may see what clipping did."""
    moments: Moments | None = None
    """Makes rows here from features and marks of a class, k + C values a sample: what is bounded is the features."""

    def __post_init__(self) -> None:
        _check_clip(self.clip_norm)
        if self.stability is not None and not self.stability >= LEAST_STABILITY:
            raise ConfigurationError(
                f"Expected clip_stability >= {LEAST_STABILITY:g}, got {self.stability!r}: the norm of a row as short "
                "as that is lost to rounding, and the row would become longer than the clip.",
                kind="out-of-range",
                setting="clip_stability",
                got=self.stability,
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
        """Return the values per sample that make releases of ``num_parameters`` values."""
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
            norms = np.sqrt(squared_lengths(np.asarray(rows, dtype=np.float64)))
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
        """Return the sum of the bounded rows of at most ``BLOCK_ROWS`` samples, in float64.

        Weights lie between 0 and 1.

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
        clipped_sum = getattr(rows, "clipped_sum", None)
        if clipped_sum is not None and not self.nonnegative:
            total, norms = clipped_sum(self.scales, weights)
            if self.observed:
                observe(norms, self.clip_norm)
            return total
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
    """Yield the blocks of samples that are rounded together: the same ones for all callers.

    Notes
    -----
    **Formal guarantees.** A record is in one block, so replacing it moves one rounding.
    """
    for start in range(samples.start, samples.stop, rows):
        yield slice(start, min(start + rows, samples.stop))


MOST_CLASS_WEIGHT = math.sqrt(2.0)


@dataclass(frozen=True)
class Moments:
    """The second moments of samples with C = ``classes`` >= 2 classes.

    ``class_weight`` is a, above 0 and at most sqrt(2): how much of the release is about classes. More of it makes them
    clearer, and all of the noise larger.

    Notes
    -----
    **Formal guarantees.** For any two samples with features of at most S, and any classes or none, their rows are at
    most :meth:`distance` apart in L2. With r = ||x||, r' = ||x'|| and t = <x, x'>, and S = 1: the first parts differ by
    r^4 + r'^4 - 2 t^2 in squares. The second by a^2 (r^2 + r'^2 - 2 t) if the classes are the same, by a^2 (r^2 + r'^2
    + 2 t / (C - 1)) if they are not, and by no more than a^2 (r^2 + r'^2) if one has none. Over t, -2 t^2 + 2 |t| a^2
    is at most a^4 / 2.
    Proof: docs/proofs/sensitivities.md.
    """

    classes: int
    class_weight: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.classes, bool) or not isinstance(self.classes, int) or self.classes < 2:
            raise ConfigurationError(
                f"Expected classes to be an integer >= 2, got {self.classes!r}.",
                kind="out-of-range",
                setting="classes",
                got=self.classes,
            )
        weight = self.class_weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= MOST_CLASS_WEIGHT:
            raise ConfigurationError(
                f"Expected class_weight > 0 and at most sqrt(2), got {weight!r}.",
                kind="out-of-range",
                setting="class_weight",
                got=weight,
            )

    def distance(self, clip_norm: float) -> float:
        """Return the L2 distance that two rows can be apart at most, with features of at most ``clip_norm``."""
        squared = self.class_weight**2
        return math.nextafter(clip_norm**2 * math.sqrt(2.0 + 2.0 * squared + squared**2 / 2.0), math.inf)

    def longest(self, clip_norm: float) -> float:
        """Return the L2 norm of a row at most."""
        return clip_norm**2 * math.sqrt(1.0 + self.class_weight**2)

    def num_values(self, num_features: int) -> int:
        """Values of a row, d = k (k + 1) / 2 + k (C - 1)."""
        return num_features * (num_features + 1) // 2 + num_features * (self.classes - 1)

    def num_features(self, num_values: int) -> int:
        """Return the number of features, k, of samples whose rows have ``num_values`` values."""
        half = self.classes - 0.5
        features = round(math.sqrt(half**2 + 2.0 * num_values) - half)
        if features < 1 or self.num_values(features) != num_values:
            raise ConfigurationError(
                f"Expected k (k + 1) / 2 + k (C - 1) values for k features and C = {self.classes} classes, got "
                f"{num_values}.",
                kind="wrong-shape",
                setting="num_values",
            )
        return features

    def sum(
        self,
        features: NDArray[np.float64],
        marks: NDArray[np.floating],
        clip_norm: float,
        weights: NDArray[np.float64] | None = None,
    ) -> NDArray[np.float64]:
        """Return the sum of the rows of some samples, shape (d,), without a row being written.

        ``features``, shape (samples, k), are of at most ``clip_norm`` each; ``marks``, shape (samples, C), are 1 at the
        class and 0 elsewhere, and a sample with any other marks has no class.
        """
        weighted = features if weights is None else features * weights[:, None]
        products = (features.T @ weighted)[_upper(features.shape[1])]
        products *= _factors(features.shape[1])
        corners = _one_class(marks) @ _simplex(self.classes)
        by_class = weighted.T @ corners
        by_class *= self.class_weight * clip_norm
        return np.concatenate([products, by_class.ravel()])

    def read(self, total: NDArray[np.float64], clip_norm: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """X^T X, shape (k, k), and X^T (Y - 1 / C), shape (k, C), from a sum of rows with whatever noise is in it."""
        features = self.num_features(len(total))
        split = features * (features + 1) // 2
        half = np.zeros((features, features))
        half[_upper(features)] = total[:split] / _factors(features)
        gram = half + half.T
        gram[np.diag_indices(features)] /= 2.0
        corners = total[split:].reshape(features, self.classes - 1) / (self.class_weight * clip_norm)
        return gram, corners @ _simplex(self.classes).T * ((self.classes - 1) / self.classes)


def _one_class(marks: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the marks of rows with exactly one class, a single 1; zeros for all other rows."""
    chosen = np.asarray(marks) == 1.0
    clear = (chosen.sum(axis=1) == 1) & ((np.asarray(marks) == 0.0) | chosen).all(axis=1)
    return (chosen & clear[:, None]).astype(np.float64)


@lru_cache(maxsize=8)
def _upper(features: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    return np.triu_indices(features)


@lru_cache(maxsize=8)
def _factors(features: int) -> NDArray[np.float64]:
    """Return the factors of products: an entry off the diagonal stands for two of x x^T."""
    rows, columns = _upper(features)
    return np.where(rows == columns, 1.0, math.sqrt(2.0))


@lru_cache(maxsize=32)
def _simplex(classes: int) -> NDArray[np.float64]:
    """Return the corners, shape (C, C - 1): each of length 1, each pair with the product -1 / (C - 1)."""
    corners = np.zeros((classes, classes - 1))
    for i in range(classes - 1):
        # Corner i is settled but for its last coordinate, those after it have the same one there.
        corners[i, i] = math.sqrt(1.0 - corners[i, :i] @ corners[i, :i])
        corners[i + 1 :, i] = (-1.0 / (classes - 1) - corners[i + 1, :i] @ corners[i, :i]) / corners[i, i]
    return corners


NOT_PRIVATE = "simulation only: computed from private data without noise, not private"
FAR_BEYOND = 10.0
"""A median of so many clip norms is worth a warning: clipping leaves next to nothing of such contributions."""
_PREFIX = "simulated-training-"
_LARGEST_RATIO = 1e300


@dataclass(frozen=True)
class TrainingFigures:
    """Figures of rows that were clipped: per-sample gradients, local steps, or whole updates. Not private.

    Of ``rows`` in all, ``not_finite`` have a NaN or an infinity and count as zero, ``clipped`` are longer than the clip
    norm. Ratios are lengths over the clip norm: the median over releases of the median of a release's finite rows, and
    the largest.
    """

    rows: int = 0
    not_finite: int = 0
    clipped: int = 0
    median_ratio: float = 0.0
    largest_ratio: float = 0.0

    @property
    def worrying(self) -> bool:
        """Whether the figures are worth a warning to whoever started the run."""
        return self.not_finite > 0 or self.median_ratio > FAR_BEYOND

    @property
    def sentence(self) -> str:
        """The figures in words."""
        finite = max(self.rows - self.not_finite, 1)
        return (
            f"{self.not_finite:,} of {self.rows:,} contributions were not finite and count as zero, "
            f"{100 * self.clipped / finite:.0f} % of the others were clipped; they were {times(self.median_ratio)} "
            f"as long as the clip norm in the median, {times(self.largest_ratio)} at most."
        )

    def document(self) -> dict[str, Any]:
        """Plain values, marked as not private."""
        return {"note": NOT_PRIVATE, **self._values()}

    def entries(self) -> dict[str, int | float]:
        """Return the figures as entries of a simulated client's reply."""
        return {f"{_PREFIX}{name.replace('_', '-')}": value for name, value in self._values().items()}

    def _values(self) -> dict[str, int | float]:
        return {f.name: getattr(self, f.name) for f in fields(TrainingFigures)}

    @classmethod
    def read(cls, entries: Mapping[str, Any]) -> TrainingFigures | None:
        """Return the figures among a reply's entries; None if one is missing."""
        values = {f.name: entries.get(f"{_PREFIX}{f.name.replace('_', '-')}") for f in fields(cls)}
        numbers = [v for v in values.values() if isinstance(v, int | float) and math.isfinite(v) and v >= 0]
        return cls(**values) if len(numbers) == len(values) else None  # type: ignore[arg-type]

    @classmethod
    def together(cls, figures: Iterable[TrainingFigures]) -> TrainingFigures:
        """Return the figures of several releases, or of several rounds, as one."""
        figures = list(figures)
        medians = [one.median_ratio for one in figures]
        return cls(
            sum(one.rows for one in figures),
            sum(one.not_finite for one in figures),
            sum(one.clipped for one in figures),
            float(np.median(medians)) if len(medians) > 1 else sum(medians, 0.0),
            max((one.largest_ratio for one in figures), default=0.0),
        )


@dataclass(frozen=True, eq=False)
class ObservedFigures(TrainingFigures):
    """Figures with the median of each release, so that those of several processes can be united exactly."""

    medians: NDArray[np.float64] = field(default_factory=lambda: np.empty(0), repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainingFigures) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(tuple(self._values().items()))

    @classmethod
    def united(cls, figures: Sequence[ObservedFigures]) -> ObservedFigures:
        """Unite the figures of several processes, as one process would have counted them."""
        medians = np.concatenate([one.medians for one in figures]) if figures else np.empty(0)
        return cls(
            sum(one.rows for one in figures),
            sum(one.not_finite for one in figures),
            sum(one.clipped for one in figures),
            _median(medians),
            max((one.largest_ratio for one in figures), default=0.0),
            medians,
        )


def _median(medians: NDArray[np.float64]) -> float:
    if not len(medians):
        return 0.0
    ordered, half = np.sort(medians), len(medians) // 2  # in a tenth of numpy.median's time, for a few of them
    middle = ordered[half] if len(medians) % 2 else (ordered[half - 1] + ordered[half]) / 2.0
    return min(float(middle), _LARGEST_RATIO)


def times(ratio: float) -> str:
    """Return a ratio for people, such as ``0.71 times`` or ``4,646 times``."""
    return f"{ratio:.3g} times" if ratio < 1000 or ratio >= 1e9 else f"{ratio:,.0f} times"


class TrainingObserver:
    """Collects the lengths of rows over their clip norm while :func:`observing`."""

    def __init__(self) -> None:
        self.clients: dict[str, TrainingFigures] = {}
        """The norms that clients of this process hand over."""
        self._ratios: list[NDArray[np.float64]] = []  # of shape (releases, rows)

    def add(self, norms: NDArray[np.float64], clip_norm: float) -> None:
        """Take note of the norms of rows that are clipped together; NaN for a row that is not finite."""
        self._ratios.append(norms[None] / clip_norm)

    def add_each(self, norms: NDArray[np.float64], clip_norm: float) -> None:
        """Take note of the norms of each of several releases, shape (releases, rows)."""
        self._ratios.append(norms / clip_norm)

    def figures(self) -> ObservedFigures | None:
        """Return the figures since the last call; None if nothing was observed."""
        ratios, self._ratios = self._ratios, []
        if not ratios:
            return None
        if len(ratios) == 1 and ratios[0].size == 1:  # a client's message with one row in it
            return _of_one_row(float(ratios[0][0, 0]))
        rows = np.concatenate([block.ravel() for block in ratios])
        finite = rows[~np.isnan(rows)]
        width = ratios[0].shape[1]
        if len(finite) == len(rows) and width and all(block.shape[1] == width for block in ratios):
            medians = rows if width == 1 else np.median(rows.reshape(-1, width), axis=1)
        else:
            known = [one[~np.isnan(one)] for block in ratios for one in block]
            medians = np.array([np.median(one) for one in known if len(one)])
        return ObservedFigures(
            len(rows),
            len(rows) - len(finite),
            int((finite > 1.0).sum()),
            _median(medians),
            min(float(finite.max(initial=0.0)), _LARGEST_RATIO),
            medians,
        )


def _of_one_row(ratio: float) -> ObservedFigures:
    """Return the figures of a single row, in a hundredth of the arrays' time."""
    if math.isnan(ratio):
        return ObservedFigures(1, 1)
    bounded = min(ratio, _LARGEST_RATIO)
    return ObservedFigures(1, 0, int(ratio > 1.0), bounded, max(bounded, 0.0), np.array([ratio]))


_observer: ContextVar[TrainingObserver | None] = ContextVar("murmurfl_training_observer", default=None)


@contextmanager
def observing() -> Iterator[TrainingObserver]:
    """Count what is clipped inside; the figures are not private and must not leave a real client."""
    before, observer = _observer.get(), TrainingObserver()
    _observer.set(observer)
    try:
        yield observer
    finally:
        _observer.set(before)


def observer_around() -> TrainingObserver | None:
    """Return the observer in this process; None if nobody is :func:`observing`."""
    return _observer.get()


def observe(norms: NDArray[np.float64], clip_norm: float) -> None:
    """Hand the norms of rows that are clipped, shape (rows,), to the observer, if there is one."""
    observer = _observer.get()
    if observer is not None:
        observer.add(norms, clip_norm)


def observe_releases(norms: NDArray[np.float64], clip_norm: float) -> None:
    """Hand the norms of several releases, shape (releases, rows), to the observer, if there is one."""
    observer = _observer.get()
    if observer is not None and len(norms):
        observer.add_each(norms, clip_norm)
