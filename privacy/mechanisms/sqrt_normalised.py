r"""The square root of the prefix sum with columns of norm 1 (the field's "normalized square root").

Henzinger, Kalinin and Upadhyay 2025, arXiv 2509.14334. C = S D, with S the Toeplitz matrix of (1 - x)^{-1/2}
(``sqrt_toeplitz``) and D = diag(1 / |s_j|), s_j column j of S, which is the shorter the later it begins. Noise is
paid for by the longest column, so lengthening the others costs nothing and lets the decoder B = A C^{-1} lean on
later releases less.

C is not Toeplitz: where samples return, its sensitivity is found by trying patterns (:mod:`.sensitivity`). C^T C has
no negative entry.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .optimal import HistoryMechanism
from .sensitivity import Gram
from .toeplitz import by_lag, one_minus_x

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
        """The first n rows of some columns of C, counted from 0."""
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
