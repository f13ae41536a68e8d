"""Toeplitz encoders: every column of C is the first one moved down, so C, C^{-1} and B are one sequence each.

With c(x) the generating function of C's first column, C^{-1} is that of 1 / c(x) and B = A C^{-1} that of
1 / ((1 - x) c(x)). All columns here are non-negative and do not increase. Then

* of all patterns of at most k participations at least s releases apart, columns 0, s, 2s, ... are the worst (Kalinin
  and Lampert 2024, theorem 2), which gives the exact sensitivity in O(n);
* every root of c lies on or outside the unit circle (Enestroem and Kakeya): rounding errors of a stream that is made
  by recurrence do not grow.

=================  ===========================================================  =====================================
mechanism          first column of C                                            source
=================  ===========================================================  =====================================
``sqrt_toeplitz``  h_0 = 1, h_r = (1 - 1/(2r)) h_{r-1}: (1 - x)^{-1/2}, B = C   Fichtenberger, Henzinger, Upadhyay
                                                                               2023; zhang-2025 (iii)
``banded``         the best with only the first ``bands`` entries not zero,     Choquette-Choo et al. 2023; McKenna
                   or h cut to them                                             2024; Kalinin and Lampert 2024
=================  ===========================================================  =====================================

C^{-1} with few diagonals
-------------------------
Row k of C^{-1} Z is z_k + r_1 z_{k-1} + ... + r_{p-1} z_{k-p+1}. So a stream needs the nonces of the last p - 1
releases, 16 bytes each, and draws p rows for a release whose predecessors' rows it no longer has. (``banded`` is the
other way round: there C has few diagonals, and C^{-1} has all.)

With r_1, ..., r_{p-1} <= 0 and a_j = -r_j, the first column of C is c_0 = 1 and
c_n = a_1 c_{n-1} + ... + a_{p-1} c_{n-p+1}: non-negative. For n >= p, c_n - c_{n-1} is the same sum of
c_{n-j} - c_{n-1-j}, so C's column never rises if its first p entries do not. Both mechanisms here are so.

===========  ============================================  ====================================================
mechanism    C^{-1}                                        source
===========  ============================================  ====================================================
``decay``    r_1 = -lambda: C = Toeplitz(lambda^j)         lambda-cancelling noise, arXiv 2601.22334
``bisr``     (1 - x)^{1/2}, the first ``bands`` of it      Kalinin, McKenna, Upadhyay and Lampert 2025,
                                                           arXiv 2505.12128
===========  ============================================  ====================================================

Columns of norm 1
-----------------
The square root with columns of norm 1 is the field's "normalized square root": Henzinger, Kalinin and Upadhyay 2025,
arXiv 2509.14334. C = S D, with S the Toeplitz matrix of (1 - x)^{-1/2} (``sqrt_toeplitz``) and D = diag(1 / |s_j|), s_j
column j of S, which is the shorter the later it begins. Noise is paid for by the longest column, so lengthening the
others costs nothing and lets the decoder B = A C^{-1} lean on later releases less.

C is not Toeplitz: where samples return, its sensitivity is found by trying patterns (:mod:`.mechanism`). C^T C has
no negative entry.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import cached_property
from numbers import Integral
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from ..noise import NONCE_BYTES
from .mechanism import Draw, Gram, Increment, Mechanism, Memory, State
from .optimal import WORKLOADS, Arrays, HistoryMechanism, Workload, cached

BLOCK = 1 << 14
"""Values handled at a time: what a block of them is made from stays in the second-level cache."""

_AHEAD = 32
_COLUMNS_AHEAD = 1 << 11

_WORST_EXCESS = 1.1


class ToeplitzMechanism(Mechanism):
    """A mechanism with a Toeplitz C whose first column is non-negative and does not increase.

    A subclass gives the first columns of C and C^{-1}.

    Notes
    -----
    **Formal guarantees.** mu = Delta x ``sensitivity(...)`` / noise_std for replacement of one sample that keeps to the
    declared pattern; exact for every pattern, provided the first column is as said above.
    Proof: docs/proofs/returning-samples.md.
    """

    @cached_property
    def encoder_column(self) -> NDArray[np.float64]:
        """First column of C: c_0 = 1, then num_releases - 1 entries from 0 to 1 that do not increase."""
        return self._encoder_column()

    @cached_property
    def inverse_column(self) -> NDArray[np.float64]:
        """First column of C^{-1}, num_releases entries."""
        return self._inverse_column()

    @cached_property
    def decoder_column(self) -> NDArray[np.float64]:
        """First column of B, num_releases entries."""
        return np.cumsum(self.inverse_column)

    @abstractmethod
    def _encoder_column(self) -> NDArray[np.float64]: ...

    @abstractmethod
    def _inverse_column(self) -> NDArray[np.float64]: ...

    def identity(self) -> bytes:
        return self.encoder_column.tobytes()

    def materialize(self, n: int | None = None) -> NDArray[np.float64]:
        return _lower_triangle(self.encoder_column[: self._check_n(n)])

    def decoder(self, n: int | None = None) -> NDArray[np.float64]:
        return _lower_triangle(self.decoder_column[: self._check_n(n)])

    def inverse(self, n: int | None = None) -> NDArray[np.float64]:
        return _lower_triangle(self.inverse_column[: self._check_n(n)])

    def row_std(self, release: int) -> float:
        return self._row_stds[self._check_release(release) - 1]

    def row_std_range(self) -> tuple[float, float]:
        return self._row_stds[0], self._row_stds[-1]

    def increment_bound(self, release: int) -> float:
        return self._increment_bounds[self._check_release(release) - 1]

    @cached_property
    def _row_stds(self) -> list[float]:
        return np.sqrt(np.cumsum(self.decoder_column**2)).tolist()

    @cached_property
    def _increment_bounds(self) -> list[float]:
        return np.cumsum(np.abs(self.inverse_column)).tolist()

    def _sensitivity(self, n: int, num_participations: int, min_separation: int) -> float:
        # Row i of the sum of columns 0, s, 2s, ... is c_i + c_{i-s} + ..., at most k terms.
        separation = min(min_separation, n)
        rows = -(-n // separation)
        terms = np.zeros((rows, separation))
        terms.flat[:n] = self.encoder_column[:n]
        sums = np.cumsum(terms, axis=0)
        if num_participations < rows:
            sums[num_participations:] -= sums[:-num_participations].copy()
        return float(np.linalg.norm(sums.flat[:n]))


class SqrtToeplitzNoise(ToeplitzMechanism, HistoryMechanism):
    """The square root of the prefix sum: C = B (ALGORITHMS section 3, ``sqrt_toeplitz``).

    Notes
    -----
    **Formal guarantees.** mu = Delta x ``sensitivity(...)`` / noise_std for replacement of one sample that keeps to the
    declared pattern; exact for every pattern. State: the nonces of all releases.
    Proof: docs/proofs/returning-samples.md.
    """

    name = "sqrt_toeplitz"

    def entries(self, rows: range, columns: range) -> NDArray[np.float64]:
        return by_lag(self.inverse_column, rows, columns)

    def _encoder_column(self) -> NDArray[np.float64]:
        return one_minus_x(-0.5, self.num_releases)

    def _inverse_column(self) -> NDArray[np.float64]:
        return one_minus_x(0.5, self.num_releases)

    @cached_property
    def decoder_column(self) -> NDArray[np.float64]:
        return self.encoder_column


class BandedNoise(ToeplitzMechanism):
    r"""Noise whose releases are correlated over a band (ALGORITHMS section 3, ``banded``).

    Row k of C^{-1} Z is y_k = z_k - \sum_{j=1}^{bands-1} c_j y_{k-j}: the stream keeps its last bands - 1 increments.

    Parameters
    ----------
    bands : int, optional
        Diagonals of C, >= 1; more than num_releases are the same as num_releases. Default: chosen (below).
    min_separation : int, optional
        In place of ``bands``: as many as there are releases between two participations of one sample, so that its
        columns do not overlap.
    optimised : bool
        Whether the entries in the band are optimised (:func:`optimise_band`) or those of ``sqrt_toeplitz``, cut.

    Notes
    -----
    With neither ``bands`` nor ``min_separation``, samples are assumed to participate once. The error then falls and the
    memory grows with every further band, and the default is the smallest power of two for which the root mean square
    error of the last release, with h cut to the band, is within 10 % of that with all of h: about half of num_releases.
    Where that is too much memory, ``blt`` comes closer with three rows.

    Optimised entries, at the same privacy, take 14 % off the standard deviation of the last prefix sum for 16 bands of
    1000 releases, 5 % for 400 of 2000 (9.62 to 9.17 at Delta = mu = 1 with 5 participations), nothing for all bands.

    **Formal guarantees.** mu = Delta x ``sensitivity(...)`` / noise_std for replacement of one sample that keeps to the
    declared pattern; exact for every pattern. With at most k participations at least ``bands`` apart, the sensitivity
    is at most sqrt(k) times that of one. State: bands - 1 rows, which must be kept, and with more than 64 bands up to
    31 sums of them, so that they are read once in 32 releases.
    Proof: docs/proofs/returning-samples.md.
    """

    name = "banded"
    memory = "state"

    def __init__(
        self,
        num_releases: int,
        *,
        bands: int | None = None,
        min_separation: int | None = None,
        optimised: bool = True,
    ) -> None:
        super().__init__(num_releases)
        if bands is not None and min_separation is not None:
            raise ConfigurationError(
                f"Expected bands or min_separation, not both, got bands {bands!r}, min_separation {min_separation!r}.",
                kind="conflict",
                setting="bands",
            )
        if bands is not None:
            bands = positive_integer("bands", bands)
        elif min_separation is not None:
            bands = positive_integer("min_separation", min_separation)
        else:
            bands = _bands_of_one_participation(self.num_releases)
        self.bands: int = min(bands, self.num_releases)
        self.band: NDArray[np.float64] = (
            optimise_band(self.num_releases, self.bands) if optimised else one_minus_x(-0.5, self.bands)
        )
        """The entries of C's first column that are not zero: c_0 = 1, c_1, ..., c_{bands-1}."""
        self._weights: list[float] = self.band[1:].tolist()
        # With many bands, the weight of earlier rows in so many releases is worked out at once.
        self._ahead = _AHEAD if self.bands > 2 * _AHEAD else 0

    def initial_state(self, size: int) -> State:
        return ()

    def increment(self, state: State, release: int, normals: NDArray[np.floating], scale: float = 1.0) -> Increment:
        done = self._check_release(release) - 1
        kept = min(done, self.bands - 1)
        rows, sums, recent = state[:kept], state[kept:], kept
        if self._ahead:
            recent = min(kept, done % self._ahead)
            if recent == 0 and rows:
                sums = self._sums_ahead(rows, min(self._ahead, self.num_releases - done))
        added = np.empty_like(normals)
        scratch = np.empty(min(BLOCK, normals.size), normals.dtype)
        for start in range(0, normals.size, BLOCK):
            values = slice(start, start + BLOCK)
            block = np.multiply(normals[values], scale, out=added[values])
            term = scratch[: block.size]
            for weight, row in zip(self._weights, rows[:recent], strict=False):
                block -= np.multiply(row[values], weight, out=term)
            if sums:
                block -= sums[0][values]
        return Increment(added, None, (*(added, *rows)[: self.bands - 1], *sums[1:]))

    def _sums_ahead(self, rows: State, count: int) -> State:
        """Return what ``rows``, latest first, add to each of the next ``count`` releases, in one pass over the rows."""
        size, dtype = rows[0].size, rows[0].dtype
        weights = np.zeros((count, len(rows)))
        for j in range(count):
            lags = self._weights[j : j + len(rows)]
            weights[j, : len(lags)] = lags
        weights = weights.astype(dtype)
        sums = tuple(np.empty(size, dtype) for _ in range(count))
        for start in range(0, size, _COLUMNS_AHEAD):
            values = slice(start, start + _COLUMNS_AHEAD)
            for total, part in zip(sums, weights @ np.stack([row[values] for row in rows]), strict=True):
                total[values] = part
        return sums

    def memory_bytes(self, size: int) -> int:
        return (self.bands - 1 + max(self._ahead - 1, 0)) * size * np.dtype(np.float64).itemsize

    def _encoder_column(self) -> NDArray[np.float64]:
        return np.concatenate((self.band, np.zeros(self.num_releases - self.bands)))

    def _inverse_column(self) -> NDArray[np.float64]:
        return _reciprocal(self.band, self.num_releases)


def optimise_band(num_releases: int, bands: int) -> NDArray[np.float64]:
    r"""Find the banded Toeplitz column of least error, shape (bands,), positive and decreasing, with c_0 = 1.

    Minimises \|c\|^2 \|b\|^2 with b the first column of B: the variance of the last prefix sum, which is the largest,
    at a fixed mu, for any number of participations at least ``bands`` releases apart. By L-BFGS over the logits of
    c_j / c_{j-1}, from ``sqrt_toeplitz`` cut to the band; kept in the cache (:mod:`.optimal`). Whatever the result, the
    sensitivity derived from it is exact: the optimiser affects the error only.
    """
    if not 1 <= bands <= num_releases:
        raise ConfigurationError(
            f"Expected 1 <= bands <= num_releases = {num_releases}, got {bands}.",
            kind="out-of-range",
            setting="bands",
            got=bands,
        )
    if bands == 1:
        return np.ones(1)

    def column(logits: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate(([1.0], np.cumprod(1.0 / (1.0 + np.exp(-logits)))))

    def loss(logits: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        c = column(logits)
        inverse = _reciprocal(c, num_releases)
        b = np.cumsum(inverse)
        squared_sensitivity, squared_error = c @ c, b @ b
        # b changes by -(b * inverse * change of c), with * the product of generating functions.
        correlation = _product(b[::-1], _product(b, inverse, num_releases), num_releases)[::-1]
        by_column = 2.0 * c / squared_sensitivity - 2.0 * correlation[:bands] / squared_error
        # c_j holds the ratios up to j, and the logit of ratio r moves it by c_j (1 - r).
        by_logit = np.cumsum((by_column * c)[:0:-1])[::-1] * (1.0 - c[1:] / c[:-1])
        return math.log(squared_sensitivity * squared_error), by_logit

    def compute() -> Arrays:
        from scipy.optimize import minimize  # here: it takes a third of a second to import

        lags = np.arange(1, bands)
        start = np.log(2.0 * lags - 1.0)  # the logit of 1 - 1/(2r)
        found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxcor": 20, "maxiter": 500})
        return {"column": column(found.x)}

    def check(arrays: Arrays) -> bool:
        c = arrays["column"]
        return c.shape == (bands,) and c[0] == 1.0 and bool((np.diff(c) <= 0.0).all()) and c[-1] >= 0.0

    return cached("optimise_band", {"num_releases": num_releases, "bands": bands}, compute, check)["column"]


def positive_integer(name: str, value: int) -> int:
    """Return the option ``name`` as an integer >= 1; raise if it is none."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ConfigurationError(
            f"Expected {name} to be an integer >= 1, got {value!r}.", kind="out-of-range", setting=name, got=value
        )
    return int(value)


def _bands_of_one_participation(num_releases: int) -> int:
    """Return the smallest power of two (at most num_releases) with an error within 10 % of the full square root's."""
    full = one_minus_x(-0.5, num_releases)
    largest = _WORST_EXCESS * float(full @ full)
    bands = 1
    while bands < num_releases:
        b = np.cumsum(_reciprocal(full[:bands], num_releases))
        if np.linalg.norm(full[:bands]) * np.linalg.norm(b) <= largest:
            return bands
        bands *= 2
    return num_releases


def one_minus_x(power: float, n: int) -> NDArray[np.float64]:
    """Return the first n coefficients of (1 - x)^power."""
    ratios = np.ones(n)
    ratios[1:] -= (1.0 + power) / np.arange(1, n)
    return np.cumprod(ratios, dtype=np.float64)


def _product(a: NDArray[np.float64], b: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """Return the first n coefficients of the product of two power series."""
    length = 1 << (len(a) + len(b) - 1).bit_length()
    return np.fft.irfft(np.fft.rfft(a, length) * np.fft.rfft(b, length), length)[:n]


def _reciprocal(series: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """Return the first n coefficients of 1 / series, whose first coefficient is 1, by Newton's iteration."""
    inverse = np.ones(1)
    while len(inverse) < n:
        length = min(2 * len(inverse), n)
        residual = -_product(series[:length], inverse, length)
        residual[0] += 2.0
        inverse = _product(inverse, residual, length)
    return inverse


def _lower_triangle(column: NDArray[np.float64]) -> NDArray[np.float64]:
    return by_lag(column, range(len(column)), range(len(column)))


def by_lag(column: NDArray[np.float64], rows: range, columns: range) -> NDArray[np.float64]:
    """Entries of the lower-triangular Toeplitz matrix with a first column."""
    lags = np.subtract.outer(rows, columns)
    return np.where(lags >= 0, column[np.maximum(lags, 0)], 0.0)


_COLUMNS = 256


class SqrtNormalisedNoise(HistoryMechanism):
    """The square root of the prefix sum with columns of norm 1 (ALGORITHMS section 3).

    The length of columns depends on ``num_releases``.

    Notes
    -----
    Closer to ``optimal`` than ``sqrt_toeplitz``, with nothing to find: 2.991, 3.110 and 2.956 Delta / mu of noise in a
    prefix sum of 1024.

    **Formal guarantees.** Columns have norm 1, so for one participation mu = Delta / noise_std; where samples return,
    mu = Delta x ``sensitivity(...)`` / noise_std, exact or an upper bound, as :meth:`sensitivity_bound` says. State:
    the nonces of all releases.
    Proof: docs/proofs/sensitivities.md, docs/proofs/returning-samples.md.
    """

    name = "sqrt_normalised"

    def materialize(self, n: int | None = None) -> NDArray[np.float64]:
        return self._columns(np.arange(self._check_n(n)), self._check_n(n))

    def decoder(self, n: int | None = None) -> NDArray[np.float64]:
        return np.cumsum(self.inverse(n), axis=0)

    def inverse(self, n: int | None = None) -> NDArray[np.float64]:
        releases = range(1, self._check_n(n) + 1)
        return self.entries(releases, releases)

    def entries(self, rows: range, columns: range) -> NDArray[np.float64]:
        # C^{-1} = D^{-1} S^{-1}: row k of S^{-1} times the norm of column k of S.
        return self._norms[np.array(rows) - 1, None] * by_lag(self._inverse, rows, columns)

    def row_std(self, release: int) -> float:
        return self._row_stds[self._check_release(release) - 1]

    def increment_bound(self, release: int) -> float:
        return float(self._norms[release - 1] * np.abs(self._inverse[: self._check_release(release)]).sum())

    @cached_property
    def _root(self) -> NDArray[np.float64]:
        return one_minus_x(-0.5, self.num_releases)

    @cached_property
    def _inverse(self) -> NDArray[np.float64]:
        return one_minus_x(0.5, self.num_releases)

    @cached_property
    def _norms(self) -> NDArray[np.float64]:
        """The norms of the columns of S."""
        return np.sqrt(np.cumsum(self._root**2))[::-1].copy()

    @cached_property
    def _row_stds(self) -> list[float]:
        releases, squares = range(1, self.num_releases + 1), np.zeros(self.num_releases)
        for first in range(1, self.num_releases + 1, _COLUMNS):
            columns = range(first, min(first + _COLUMNS, self.num_releases + 1))
            squares += (np.cumsum(self.entries(releases, columns), axis=0) ** 2).sum(axis=1)
        return np.sqrt(squares).tolist()

    def _columns(self, chosen: NDArray[np.intp], n: int) -> NDArray[np.float64]:
        """Return the first n rows of some columns of C, counted from 0."""
        lags = np.subtract.outer(np.arange(n), chosen)
        return np.where(lags >= 0, self._root[np.maximum(lags, 0)], 0.0) / self._norms[chosen]

    def _sensitivity(self, n: int, num_participations: int, min_separation: int) -> float | None:
        if num_participations > 1:
            return None
        # Of the first n rows, column j has the norm of n - j entries of S's column over that of all.
        return float((self._norms[self.num_releases - n :] / self._norms[:n]).max())

    def _gram(self, n: int) -> Gram:
        def of_columns(chosen: NDArray[np.intp]) -> NDArray[np.float64]:
            columns = self._columns(chosen, n)
            return columns.T @ columns

        return of_columns

    def largest_entry(self) -> float:
        # The diagonal's last: the last column is a single one.
        return 1.0


class RecentNoise(ToeplitzMechanism):
    """A mechanism with a C^{-1} of few diagonals, which a subclass gives as :attr:`diagonals`.

    A state is the last rows of Z, times the noise's standard deviation, the latest first.

    Notes
    -----
    **Formal guarantees.** mu = Delta x ``sensitivity(...)`` / noise_std for replacement of one sample that keeps to the
    declared pattern; exact for every pattern.
    Proof: docs/proofs/returning-samples.md.
    """

    memory: ClassVar[Memory] = "recent"
    diagonals: NDArray[np.float64]
    """r_0 = 1, r_1, ..., r_{p-1}: the first column of C^{-1}, as far as it is not zero."""

    @property
    def remembered(self) -> int:
        return max(1, min(len(self.diagonals), self.num_releases) - 1)

    def initial_state(self, size: int) -> State:
        return ()

    def increment(self, state: State, release: int, normals: NDArray[np.floating], scale: float = 1.0) -> Increment:
        self._check_release(release)
        row = np.multiply(normals, scale)
        added = np.empty_like(row)
        scratch = np.empty(min(BLOCK, row.size), row.dtype)
        for start in range(0, row.size, BLOCK):
            values = slice(start, start + BLOCK)
            block = added[values]
            block[:] = row[values]
            term = scratch[: block.size]
            for weight, earlier in zip(self.diagonals[1:].tolist(), state, strict=False):
                block += np.multiply(earlier[values], weight, out=term)
        return Increment(added, None, (row, *state)[: self.remembered])

    def state_after(self, release: int, draw: Draw, scale: float = 1.0) -> State:
        first = max(1, self._check_release(release) - self.remembered + 1)
        return tuple(np.multiply(normals, scale) for normals in draw(range(first, release + 1))[::-1])

    def memory_bytes(self, size: int) -> int:
        return NONCE_BYTES * self.remembered

    def _inverse_column(self) -> NDArray[np.float64]:
        column = np.zeros(max(self.num_releases, len(self.diagonals)))
        column[: len(self.diagonals)] = self.diagonals
        return column[: self.num_releases]

    def _encoder_column(self) -> NDArray[np.float64]:
        from scipy.signal import lfilter  # here, because it brings half of SciPy: a second of every worker's start

        # By the recurrence: a transform would leave errors of the size of the first entry in the last one.
        impulse = np.zeros(self.num_releases)
        impulse[0] = 1.0
        return np.asarray(lfilter([1.0], self.diagonals, impulse))


class DecayNoise(RecentNoise):
    """Each release adds fresh noise and takes out a part of that of the release before (ALGORITHMS section 2.2).

    Parameters
    ----------
    decay : float, optional
        lambda, from 0 (independent noise) to 1 (``cancelling`` with schedule ``uniform``). Default: the best one
        (:func:`best_decay`).
    workload : {"mu2", "prefix-sum"}
        Whose error is least, where ``decay`` is not given: of the sums of prefix sums, by which DP-mu^2-FL moves its
        model, or of prefix sums.

    Notes
    -----
    For ``mu2`` the best lambda is about 1 - 2.2 / K, takes 13 to 14 % off the noise of ``cancelling`` with schedule
    ``uniform``, root mean square over the releases, for K = 16 to 256, and is within 1.2 % of ``optimal``. The last
    sum of prefix sums by itself has 4 % more noise than with ``cancelling``.

    **Formal guarantees.** mu = Delta x ``sensitivity(...)`` / noise_std for replacement of one sample that keeps to the
    declared pattern; exact for every pattern, for any lambda. For one participation the sensitivity is
    sqrt(1 + lambda^2 + ... + lambda^(2 K - 2)). State: the last row of Z, made again from its nonce.
    Proof: docs/proofs/sensitivities.md, docs/proofs/returning-samples.md.
    """

    name = "decay"
    owns_output = True
    memory = "last"

    def __init__(self, num_releases: int, *, decay: float | None = None, workload: Workload = "mu2") -> None:
        super().__init__(num_releases)
        if workload not in WORKLOADS:
            raise ConfigurationError(
                f"Expected workload one of {WORKLOADS}, got {workload!r}.",
                kind="unknown-name",
                setting="workload",
                got=workload,
            )
        if decay is None:
            decay = best_decay(self.num_releases, workload)
        elif isinstance(decay, bool) or not isinstance(decay, int | float) or not 0.0 <= decay <= 1.0:
            raise ConfigurationError(
                f"Expected decay from 0 to 1, got {decay!r}.", kind="out-of-range", setting="decay", got=decay
            )
        self.decay = float(decay)
        """lambda."""
        self.diagonals = np.array([1.0, -self.decay])

    def identity(self) -> bytes:
        return repr(self.decay).encode()  # the options may not say it

    @property
    def recovers(self) -> int:
        return int(np.count_nonzero(self.decay ** np.arange(1, self.num_releases + 1) >= 0.5))

    def _encoder_column(self) -> NDArray[np.float64]:
        ratios = np.full(self.num_releases, self.decay)
        ratios[0] = 1.0
        return np.cumprod(ratios, dtype=np.float64)


class BisrNoise(RecentNoise):
    r"""The inverse square root with few diagonals, "banded inverse square root" (ALGORITHMS section 3, ``bisr``).

    C^{-1} has r_0 = 1, r_j = (1 - 3 / (2 j)) r_{j-1} for j < ``bands``, which is the first ``bands`` diagonals of
    ``sqrt_toeplitz``'s; more than num_releases are the same as num_releases.

    Notes
    -----
    For streams in which samples return many times, and whose clients have no room for rows of noise. In one pass few
    bands are weak: at 1024 releases 16 of them have 5.10 Delta / mu of noise in a prefix sum where ``sqrt_toeplitz``
    has 3.11.

    **Formal guarantees.** mu = Delta x ``sensitivity(...)`` / noise_std for replacement of one sample that keeps to the
    declared pattern; exact for every pattern. State: the last ``bands`` - 1 rows of Z, made again from their nonces.
    Proof: docs/proofs/sensitivities.md, docs/proofs/returning-samples.md.
    """

    name = "bisr"
    owns_output = True

    def __init__(self, num_releases: int, *, bands: int = 16) -> None:
        super().__init__(num_releases)
        self.bands = min(positive_integer("bands", bands), self.num_releases)
        self.diagonals = one_minus_x(0.5, self.bands)

    def identity(self) -> bytes:
        return b""


def best_decay(num_releases: int, workload: Workload = "mu2") -> float:
    r"""Return the lambda of least error at a fixed mu, where a sample takes part once; its arguments alone decide it.

    Minimises sensitivity^2 times the squared error summed over the releases: with a = 1 - lambda, B's column is 1, a,
    a, ..., and that of the sums of prefix sums is 1 + j a. Tried are 0, 1 and every 1 - a with two digits of a; the
    error is within 0.1 % of the least. Only sums and products are used, so that every client finds the same digits:
    clients that share a sum must have one noise. The sensitivity is derived from whatever lambda is in use: the choice
    affects the error only.
    """
    n = positive_integer("num_releases", num_releases)
    steps = [(digits, 10**places) for places in range(2, len(str(n)) + 3) for digits in range(10, 100)]
    decays = np.array([0.0, *((whole - digits) / whole for digits, whole in steps), 1.0])
    a = 1.0 - decays
    if workload == "mu2":  # the sums over j < K of (K - j) (1 + j a)^2
        errors = n * (n + 1) / 2 + a * ((n - 1) * n * (n + 1) / 3 + a * (n * n * (n * n - 1) / 12))
    else:
        errors = n + a * a * (n * (n - 1) / 2)
    return float(decays[int(np.argmin(errors * _geometric_sum(decays * decays, n)))])


def _geometric_sum(ratios: NDArray[np.float64], terms: int) -> NDArray[np.float64]:
    """1 + r + ... + r^(terms-1), by doubling: a power's last digit may differ between mathematical libraries."""
    total, power = np.zeros_like(ratios), np.ones_like(ratios)
    for bit in f"{terms:b}":
        total, power = total * (1.0 + power), power * power
        if bit == "1":
            total, power = total + power, power * ratios
    return total
