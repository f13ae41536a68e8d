"""Clipped contributions of a block of machines on their grid, as int64 counts on a device.

How much of a row clipping leaves is decided by :meth:`murmurfl.privacy.machine.row_bound.RowBound.scales`, from norms
that the device computes: one number a sample comes here and goes back. The device multiplies, rounds and adds up. A
machine one of whose rows has no finite norm goes the careful way, on this side: the same code as everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....privacy.machine.clipping_figures import observe_releases
from ....privacy.machine.row_bound import RowBound
from ....privacy.noise.grid import MARK, Grid
from .device_contributions import DeviceContributions

if TYPE_CHECKING:
    import torch
else:
    from .late_torch import torch

_MARK = int(MARK)
_ROUNDER = 1.5 * 2.0**52


def clipped_counts(stack: DeviceContributions, bound: RowBound, grid: Grid, rows_per_release: int) -> torch.Tensor:
    """The mean of each machine's bounded rows on the grid, each row rounded by itself.

    Parameters
    ----------
    stack : DeviceContributions
        Rows of machine after machine.
    bound : RowBound
    grid : Grid
    rows_per_release : int
        b, rows of a machine.

    Returns
    -------
    int64 tensor of shape (machines, d)

    Notes
    -----
    Rows are bounded as by :meth:`murmurfl.privacy.machine.row_bound.RowBound.rows`: float64 products and roundings are
    IEEE 754's on a device too, and norms are sums in another order, of at most 2^26 squares.
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
    """:meth:`~murmurfl.privacy.noise.grid.Grid.marked` of bounded float64 values: the same integers, in place."""
    return scaled.add_(_ROUNDER).view(torch.int64)


def _careful_counts(
    stack: DeviceContributions, bound: RowBound, grid: Grid, machine: int, rows_per_release: int, size: int
) -> torch.Tensor:
    """One machine's contribution by the code of every machine, from rows that come from the device."""
    rows = np.empty((rows_per_release, size))
    with np.errstate(all="ignore"):
        for j, row in enumerate(rows):
            stack.write(machine * rows_per_release + j, 1.0, row)
    share = 1.0 / rows_per_release
    return torch.from_numpy(grid.counts(bound.rows(rows), scale=share, bound=bound.clip_norm).sum(axis=0))
