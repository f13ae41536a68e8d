"""Contributions of many samples, clipped and written one row at a time."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class StackedContributions(Protocol):
    """Per-sample contributions of many samples, which can be clipped without being written out."""

    def norms(self) -> NDArray[np.float64]:
        """The L2 norm of every row, shape (samples,); NaN or infinite where it cannot be told."""
        ...

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        """Write ``scale`` times a row to ``out``, shape (d,)."""
        ...


def squared_lengths(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    """The squared L2 norm of every row, shape (samples,): of each by itself, whichever others stand beside it."""
    count, size = rows.shape
    if count == 1:  # a single row of many values would be added up in another order than one among several
        rows = np.broadcast_to(rows, (2, size))
    return np.einsum("ij,ij->i", rows, rows, dtype=np.float64)[:count]


class DenseContributions:
    """Contributions that are written out, one row a sample.

    Parameters
    ----------
    rows : ndarray of shape (samples, d)
    """

    def __init__(self, rows: NDArray[np.floating]) -> None:
        self._rows = rows

    def norms(self) -> NDArray[np.float64]:
        with np.errstate(all="ignore"):
            return np.sqrt(squared_lengths(self._rows))

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        np.multiply(self._rows[row], scale, out=out)


class ChosenContributions:
    """Some of the rows of others.

    Parameters
    ----------
    contributions : StackedContributions
    rows : ndarray of int
    """

    def __init__(self, contributions: StackedContributions, rows: NDArray[np.intp]) -> None:
        self._contributions, self._rows = contributions, rows

    def norms(self) -> NDArray[np.float64]:
        return self._contributions.norms()[self._rows]

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        self._contributions.write(int(self._rows[row]), scale, out)


class FittingContributions:
    """Rows of which some count as zero.

    Parameters
    ----------
    contributions : StackedContributions
    fits : ndarray of shape (samples,), bool
        Which ones count.
    """

    def __init__(self, contributions: StackedContributions, fits: NDArray[np.bool_]) -> None:
        self._contributions, self._fits = contributions, fits

    def norms(self) -> NDArray[np.float64]:
        return np.where(self._fits, self._contributions.norms(), 0.0)

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        if self._fits[row]:
            self._contributions.write(row, scale, out)
        else:
            out[:] = 0.0
