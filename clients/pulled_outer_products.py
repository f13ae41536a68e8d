"""Per-sample gradients of a linear layer with a penalty on its weights, which need not be written out either."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..privacy.contributions import DenseContributions
from .outer_products import OuterProducts

_CANCELLING = 4.0
"""Of two parts that are together more than twice as long as their sum, one takes much of the other away."""
_ROUNDING = 2.0**-50
_AT_A_TIME = 64


class PulledOuterProducts(OuterProducts):
    """The same with one matrix V added to every sample's: [r x^T + V, r], as a penalty on the weights has it.

    Parameters
    ----------
    residuals, features, bias
        See :class:`OuterProducts`.
    pull : ndarray of shape (classes, features), float64
        V: the same for every sample.

    Notes
    -----
    Norms are at most 2^-41 too small, and sums as precise as clipping and adding up need them
    (:mod:`~murmurfl.privacy.row_bound`), whatever V a server chooses: where r x^T and V cancel, and little but rounding
    is left, a row is written out before it is measured and added up.
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
