"""Clipped contributions of a block of machines on their grid, as int64 counts on a device.

:meth:`murmurfl.privacy.machine.clipping.RowBound.scales` decides how much clipping leaves of a row, from norms that the
device computes: one number a sample comes to this side and goes back. The device multiplies, rounds and adds up. A
machine with a row without a finite norm is computed on this side, by the same code as everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ....clients.adapters.per_sample_gradients import LEAST_SQUARES
from ....privacy.machine.clipping import RowBound
from ....privacy.machine.clipping_figures import observe_releases
from ....privacy.noise.grid import MARK, Grid

if TYPE_CHECKING:
    import torch
else:
    from .late_torch import torch


class DeviceContributions(ABC):
    """Contributions of many samples, stacked on a device."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where they are."""

    @abstractmethod
    def squared_norms(self) -> torch.Tensor:
        """Squared L2 norms of the rows, shape (samples,), float64; not finite if unknown."""

    @abstractmethod
    def scaled(self, rows: slice, factors: torch.Tensor) -> torch.Tensor:
        """Some rows, each times its factor: shape (rows, d), float64, in memory of their own."""

    @abstractmethod
    def chosen(self, rows: NDArray[np.intp]) -> DeviceContributions:
        """Some of the rows."""

    def norms(self) -> NDArray[np.float64]:
        """L2 norms of the rows, on this side."""
        with np.errstate(all="ignore"):
            return np.sqrt(self.squared_norms().cpu().numpy())

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        """Write ``scale`` times a row to this side, for the few rows with careful treatment."""
        factor = torch.full((1,), scale, dtype=torch.float64, device=self.device)
        out[:] = self.scaled(slice(row, row + 1), factor)[0].cpu().numpy()


class DeviceOuterProducts(DeviceContributions):
    """Gradients of a linear layer, [r x^T, r] for a sample's r and x, without the second r if the layer has no bias.

    See :class:`~murmurfl.clients.adapters.per_sample_gradients.OuterProducts`.
    """

    def __init__(self, residuals: torch.Tensor, features: torch.Tensor, *, bias: bool) -> None:
        self._residuals, self._features, self._bias = residuals, features, bias

    @property
    def device(self) -> torch.device:
        return self._residuals.device

    def squared_norms(self) -> torch.Tensor:
        return _told(self._residuals) * (_told(self._features) + (1.0 if self._bias else 0.0))

    def chosen(self, rows: NDArray[np.intp]) -> DeviceOuterProducts:
        index = torch.from_numpy(rows).to(self.device)
        return DeviceOuterProducts(self._residuals[index], self._features[index], bias=self._bias)

    def scaled(self, rows: slice, factors: torch.Tensor) -> torch.Tensor:
        residuals, features = self._residuals[rows] * factors[:, None], self._features[rows]
        count, classes, width = len(residuals), residuals.shape[1], features.shape[1]
        split = classes * width
        made = residuals.new_empty((count, split + (classes if self._bias else 0)))
        torch.mul(residuals[:, :, None], features[:, None, :], out=made[:, :split].view(count, classes, width))
        if self._bias:
            made[:, split:] = residuals
        return made


class DeviceRows(DeviceContributions):
    """Contributions as plain rows."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    @property
    def device(self) -> torch.device:
        return self._rows.device

    def squared_norms(self) -> torch.Tensor:
        return self._rows.square().sum(dim=1)

    def chosen(self, rows: NDArray[np.intp]) -> DeviceRows:
        return DeviceRows(self._rows[torch.from_numpy(rows).to(self.device)])

    def scaled(self, rows: slice, factors: torch.Tensor) -> torch.Tensor:
        return self._rows[rows] * factors[:, None]


def _told(rows: torch.Tensor) -> torch.Tensor:
    """Squared lengths of the rows; NaN for one too short to be exact, since a long factor would amplify its error."""
    squares = rows.square().sum(dim=1)
    return squares.masked_fill((squares < LEAST_SQUARES) & rows.any(dim=1), torch.nan)


_MARK = int(MARK)
_ROUNDER = 1.5 * 2.0**52


def clipped_counts(stack: DeviceContributions, bound: RowBound, grid: Grid, rows_per_release: int) -> torch.Tensor:
    """The mean of each machine's bounded rows on the grid, each row rounded by itself.

    Parameters
    ----------
    stack : DeviceContributions
        Rows of one machine after the other.
    rows_per_release : int
        b, rows of a machine.

    Notes
    -----
    Rows are bounded as by :meth:`murmurfl.privacy.machine.clipping.RowBound.rows`: float64 products and roundings
    follow IEEE 754 on a device too; norms are sums of at most 2^26 squares in another order.
    """
    norms = stack.norms()
    share = 1.0 / rows_per_release
    grid.rounded(np.empty(0), bound.clip_norm * share)  # refuses a grid on which the bound does not fit
    scales = np.full(norms.shape, np.nan) if bound.nonnegative else bound.scales(norms)
    machines = scales.reshape(-1, rows_per_release)
    plain = np.isfinite(machines).all(axis=1)
    if bound.observed:
        observe_releases(norms.reshape(machines.shape)[plain], bound.clip_norm)
    factors = np.where(np.isfinite(machines), machines * (share / grid.spacing), 0.0)
    sent = torch.from_numpy(np.ascontiguousarray(factors.T)).to(stack.device)
    total = marked(stack.scaled(slice(0, None, rows_per_release), sent[0])).sub_(_MARK)
    for j in range(1, rows_per_release):
        total += marked(stack.scaled(slice(j, None, rows_per_release), sent[j])).sub_(_MARK)
    for i in np.flatnonzero(~plain).tolist():
        total[i] = _careful_counts(stack, bound, grid, i, rows_per_release, total.shape[1]).to(stack.device)
    return total


def marked(scaled: torch.Tensor) -> torch.Tensor:
    """:meth:`~murmurfl.privacy.noise.grid.Grid.marked` of bounded float64 values, in place."""
    return scaled.add_(_ROUNDER).view(torch.int64)


def _careful_counts(
    stack: DeviceContributions, bound: RowBound, grid: Grid, machine: int, rows_per_release: int, size: int
) -> torch.Tensor:
    """One machine's contribution by the code of every machine, on this side."""
    rows = np.empty((rows_per_release, size))
    with np.errstate(all="ignore"):
        for j, row in enumerate(rows):
            stack.write(machine * rows_per_release + j, 1.0, row)
    share = 1.0 / rows_per_release
    return torch.from_numpy(grid.counts(bound.rows(rows), scale=share, bound=bound.clip_norm).sum(axis=0))
