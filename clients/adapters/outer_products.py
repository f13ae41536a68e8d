"""Per-sample gradients of a linear layer, which are outer products and need not be written out."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ...privacy.machine.clipping import DenseContributions, squared_lengths

LEAST_SQUARES = 1e-300
"""Sums of squares below this have lost digits."""
_CANCELLING = 4.0
"""Two parts cancel where the square of their lengths' sum is more than this times that of their sum's length."""
_ROUNDING = 2.0**-50
_AT_A_TIME = 64


class OuterProducts:
    """Per-sample gradients of a linear layer, [r x^T, r] for a sample's r and x, not written out.

    Parameters
    ----------
    residuals : ndarray of shape (samples, classes), float64
    features : ndarray of shape (samples, features), float64
    bias : bool
        Whether the layer has one; without it the gradients are r x^T.
    """

    def __init__(self, residuals: NDArray[np.float64], features: NDArray[np.float64], *, bias: bool = True) -> None:
        self._residuals = residuals
        self._bias = bias
        self._features = features
        self._split = residuals.shape[1] * features.shape[1]
        self._shape = (residuals.shape[1], features.shape[1])

    @property
    def residuals(self) -> NDArray[np.float64]:
        """A row r for each sample."""
        return self._residuals

    @property
    def features(self) -> NDArray[np.float64]:
        """A row x for each sample."""
        return self._features

    @property
    def bias(self) -> bool:
        """Whether the layer has a bias."""
        return self._bias

    def norms(self) -> NDArray[np.float64]:
        """||[r x^T, r]|| = ||r|| sqrt(||x||^2 + 1), and ||r x^T|| = ||r|| ||x||."""
        with np.errstate(all="ignore"):
            squares = _told(self._features) + (1.0 if self._bias else 0.0)
            return np.sqrt(_told(self._residuals) * squares)

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        """Write ``scale`` times a row to ``out``."""
        residual = self._residuals[row : row + 1].T * scale
        # A matrix product of inner size one: the same products as broadcasting makes, in half the time.
        np.dot(residual, self._features[row : row + 1], out=out[: self._split].reshape(self._shape))
        if self._bias:
            out[self._split :] = residual[:, 0]

    def scaled_sum(self, scales: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum of rows, each times its scale; one matrix product."""
        residuals = self._residuals * scales[:, None]
        weight = (residuals.T @ self._features).ravel()
        return np.concatenate([weight, residuals.sum(axis=0)]) if self._bias else weight


class PulledOuterProducts(OuterProducts):
    """Outer products with one matrix V added to each, [r x^T + V, r]: gradients with a penalty on the weights.

    Parameters
    ----------
    residuals, features, bias
        See :class:`OuterProducts`.
    pull : ndarray of shape (classes, features), float64
        V: the same for every sample.

    Notes
    -----
    Norms are at most 2^-41 too small, and sums as precise as clipping and adding up need them
    (:mod:`~murmurfl.privacy.machine.clipping`), whatever V a server chooses: where r x^T and V cancel, and little but
    rounding is left, a row is written out before it is measured and added up.
    """

    def __init__(
        self,
        residuals: NDArray[np.float64],
        features: NDArray[np.float64],
        pull: NDArray[np.float64],
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(residuals, features, bias=bias)
        self._pull = pull
        with np.errstate(all="ignore"):
            own, of_pull = super().norms(), float(np.sqrt((pull * pull).sum()))
            crossed = np.einsum("ij,ij->i", residuals, features @ pull.T)
            squares = own * own + 2.0 * crossed + of_pull * of_pull
            parts = own + of_pull
            self._cancels = ~(_CANCELLING * squares >= parts * parts)  # where either is NaN, too
            # Products are summed in any order, so each may be wrong by as many roundings as there are.
            self._norms = np.sqrt(np.maximum(squares, 0.0)) * (1.0 + _ROUNDING * self._features.shape[1])
        for rows in self._written_ones():
            self._norms[rows] = DenseContributions(self._written(rows)).norms()

    def norms(self) -> NDArray[np.float64]:
        """The root of ||[r x^T, r]||^2 + 2 r^T V x + ||V||^2."""
        return self._norms

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        super().write(row, 1.0, out)
        out[: self._split] += self._pull.ravel()
        out *= scale

    def scaled_sum(self, scales: NDArray[np.float64]) -> NDArray[np.float64]:
        apart = ~self._cancels  # left out, and not times zero: a feature may be NaN where a residual is zero
        total = OuterProducts(self._residuals[apart], self._features[apart], bias=self._bias).scaled_sum(scales[apart])
        total[: self._split] += scales[apart].sum() * self._pull.ravel()
        for rows in self._written_ones():
            total += scales[rows] @ self._written(rows)
        return total

    def _written_ones(self) -> Iterator[NDArray[np.intp]]:
        """The numbers of rows whose parts cancel, a few at a time."""
        numbers = np.flatnonzero(self._cancels)
        for start in range(0, len(numbers), _AT_A_TIME):
            yield numbers[start : start + _AT_A_TIME]

    def _written(self, rows: NDArray[np.intp]) -> NDArray[np.float64]:
        found = np.empty((len(rows), self._split + (self._residuals.shape[1] if self._bias else 0)))
        with np.errstate(all="ignore"):
            for row, out in zip(rows, found, strict=True):
                self.write(int(row), 1.0, out)
        return found


def _told(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The squared length of every row; NaN for one so short that rounding hides it, which a long factor would show."""
    squares = squared_lengths(rows)
    if squares.min(initial=math.inf) < LEAST_SQUARES:
        squares[(squares < LEAST_SQUARES) & rows.any(axis=1)] = np.nan
    return squares
