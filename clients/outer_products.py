"""Per-sample gradients of a linear layer, which are outer products and need not be written out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..privacy.contributions import squared_lengths

LEAST_SQUARES = 1e-300
"""Sums of squares below this have lost digits."""


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
        """Whether the layer has one."""
        return self._bias

    def norms(self) -> NDArray[np.float64]:
        """||[r x^T, r]|| = ||r|| sqrt(||x||^2 + 1), and ||r x^T|| = ||r|| ||x||."""
        with np.errstate(all="ignore"):
            squares = _told(self._features) + (1.0 if self._bias else 0.0)
            return np.sqrt(_told(self._residuals) * squares)

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        """Write ``scale`` times a row."""
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


def _told(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The squared length of every row; NaN of one so short that it cannot be told, which a long factor would show."""
    squares = squared_lengths(rows)
    if squares.min(initial=1.0) < LEAST_SQUARES:
        squares[(squares < LEAST_SQUARES) & rows.any(axis=1)] = np.nan
    return squares
