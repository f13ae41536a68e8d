"""Scattering coefficients, whitened: every direction of random characters is about as long as any other."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from .feature_map import FloatT, unit_rows
from .frozen_net import restored
from .scattering import POINTS, scattering

ROUGHNESS = 0.05
"""Of the largest map's size, added to every map's before its coefficients are divided by it."""

_BLOCK = 1024


def balanced(coefficients: NDArray[FloatT], gains: NDArray[FloatT]) -> NDArray[FloatT]:
    """Coefficients of (samples, maps, 7, 7), each map times its gain, a sample's norm one: (samples, maps, 49)."""
    rows = np.asarray(coefficients * gains[:, None, None], dtype=coefficients.dtype).reshape(len(coefficients), -1)
    return unit_rows(rows).reshape(len(rows), len(gains), POINTS * POINTS)


def projected(
    rows: NDArray[np.floating], maps: NDArray[np.floating], places: NDArray[np.floating]
) -> NDArray[np.floating]:
    """Onto the main directions of maps and places: (samples, directions of maps x directions of places)."""
    return ((maps.T @ rows) @ places).reshape(len(rows), -1)


def whitened_scattering(
    values: NDArray[np.float32], weights: Mapping[str, NDArray[np.generic]], floor: float
) -> NDArray[np.float32]:
    """Whitened scattering coefficients of unit norm.

    Parameters
    ----------
    values : ndarray of shape (samples, 28, 28)
        Pixels from 0 to 1.
    weights : mapping
        As in the file ``scattering.npz``.
    floor : float
        Share of the largest variance that is added to every one, so that the smallest are not blown up.

    Notes
    -----
    Row i depends on image i alone: mean and covariance are those of random characters.
    """
    gains, maps, places, variances, centre = (
        np.asarray(weights[name], dtype=np.float32) for name in ("gains", "maps", "places", "variances", "centre")
    )
    axes = restored(np.asarray(weights["axes"], dtype=np.int8), np.asarray(weights["axes_step"], dtype=np.float32))
    lengths = np.sqrt(variances + floor * variances[0])
    out = np.empty((len(values), len(axes)), dtype=np.float32)
    for start in range(0, len(values), _BLOCK):
        rows = balanced(scattering(values[start : start + _BLOCK]), gains)
        whitened = (projected(rows, maps, places) @ axes.T - centre) / lengths
        out[start : start + _BLOCK] = unit_rows(whitened)
    return out
