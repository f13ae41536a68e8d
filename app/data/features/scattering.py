"""The scattering transform of 28 x 28 pixels (Mallat 2012) with J = 2 and L = 8, as in Tramer and Boneh (2021),
whitened.

Morlet wavelets of two sizes and eight directions, the modulus, the smaller wavelets once more on its result, and a
Gaussian over everything give 81 maps of 7 x 7. The coefficients are strongly correlated, and noise that is the same in
every direction drowns most of them. So they are whitened by the covariance of random characters, which no data affect:
every direction is then about as long as any other.

Every convolution is one product of matrices: a window of rows, as it lies in memory, times the filters laid out along a
row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .feature_map import FloatT, unit_rows
from .frozen_net import restored

SIDE = 28
MAPS, POINTS = 81, 7
"""The output: 81 maps of 7 x 7."""

_DIRECTIONS = 8
_SLANT = 0.5
_HALF = SIDE // 2
_SCATTERED_AT_A_TIME = 64


def morlet(half: int, width: float, direction: float, frequency: float) -> NDArray[np.complex128]:
    """A wave under a Gaussian, with mean zero.

    Parameters
    ----------
    half : int
        Pixels to either side of the middle.
    width : float
        Of the Gaussian, in pixels, along the wave; across it is twice as long.
    direction, frequency : float
        In radians, and radians a pixel.
    """
    rows, columns = np.mgrid[-half : half + 1, -half : half + 1].astype(np.float64)
    along = columns * np.cos(direction) + rows * np.sin(direction)
    across = rows * np.cos(direction) - columns * np.sin(direction)
    window = np.exp(-(along**2 + (_SLANT * across) ** 2) / (2 * width**2))
    wave = np.exp(1j * frequency * along)
    return window * (wave - (window * wave).sum() / window.sum()) / window.sum()


@lru_cache
def _filters(side: int, half: int, scale: int, stride: int, dtype: type) -> NDArray[np.floating]:
    """Eight wavelets along a row: a matrix from windows of 2 half + 1 rows of ``side`` pixels to (part, direction,
    column).
    """
    angles = np.pi * np.arange(_DIRECTIONS) / _DIRECTIONS
    bank = np.stack([morlet(half, 0.8 * scale, angle, 0.75 * np.pi / scale) for angle in angles])
    columns = np.arange(0, side, stride)
    matrix = np.zeros((2 * half + 1, side, 2, _DIRECTIONS, len(columns)))
    for place, column in enumerate(columns):
        first, last = max(column - half, 0), min(column + half + 1, side)
        part = bank[:, :, first - column + half : last - column + half]  # within the image
        matrix[:, first:last, 0, :, place] = np.moveaxis(part.real, 0, -1)
        matrix[:, first:last, 1, :, place] = np.moveaxis(part.imag, 0, -1)
    return matrix.reshape((2 * half + 1) * side, -1).astype(dtype)


@lru_cache
def _low_pass(side: int, dtype: type) -> NDArray[np.floating]:
    """Gaussian blur and sampling along one side, of shape (7, side); zero beyond the edge."""
    stride = side // POINTS
    places = stride // 2 + stride * np.arange(POINTS)
    away = np.arange(side) - places[:, None]
    half, width = 3 * stride // 2, 0.8 * stride
    weights = np.where(np.abs(away) <= half, np.exp(-(away**2) / (2 * width**2)), 0)
    whole = np.exp(-(np.arange(-half, half + 1) ** 2) / (2 * width**2)).sum()
    return (weights / whole).astype(dtype)


def _modulus(maps: NDArray[np.floating], half: int, scale: int, stride: int = 1) -> NDArray[np.floating]:
    """Strength of each wavelet at each point of maps of shape (n, side, side): (n, rows, directions, columns)."""
    count, side = maps.shape[:2]
    padded = np.pad(maps, ((0, 0), (half, half), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1, axis=1)[:, ::stride]
    windows = windows.swapaxes(2, 3).reshape(-1, (2 * half + 1) * side)
    answers = windows @ _filters(side, half, scale, stride, maps.dtype.type)
    answers = answers.reshape(count, -1, 2, _DIRECTIONS, len(range(0, side, stride)))
    return np.sqrt(answers[:, :, 0] ** 2 + answers[:, :, 1] ** 2)


def _smoothed(maps: NDArray[np.floating]) -> NDArray[np.floating]:
    """Maps of shape (n, rows, any, columns) as (n, any, 7, 7)."""
    count, rows, others, columns = maps.shape
    low = _low_pass(rows, maps.dtype.type) @ maps.reshape(count, rows, others * columns)
    return (low.reshape(count, POINTS, others, columns) @ _low_pass(columns, maps.dtype.type).T).swapaxes(1, 2)


def _scattered(images: NDArray[np.floating]) -> NDArray[np.floating]:
    fine = _modulus(images, half=3, scale=1)
    coarse = _modulus(images, half=6, scale=2, stride=2)
    count = len(images)
    halved = fine.reshape(count, _HALF, 2, _DIRECTIONS, _HALF, 2).mean(axis=(2, 5)).swapaxes(1, 2)
    again = _modulus(halved.reshape(-1, _HALF, _HALF), half=3, scale=1)
    parts = (
        _smoothed(images[:, :, None]),
        _smoothed(fine),
        _smoothed(coarse),
        _smoothed(again).reshape(count, -1, POINTS, POINTS),
    )
    return np.concatenate(parts, axis=1)


def scattering(values: NDArray[np.floating]) -> NDArray[np.floating]:
    """The scattering coefficients of images, not whitened; row i depends on image i alone.

    Parameters
    ----------
    values : ndarray of shape (samples, 28, 28)
        Pixels from 0 to 1; float32 or float64, like all arithmetic.
    """
    parts = [
        _scattered(values[start : start + _SCATTERED_AT_A_TIME])
        for start in range(0, len(values), _SCATTERED_AT_A_TIME)
    ]
    return np.concatenate(parts) if parts else np.empty((0, MAPS, POINTS, POINTS), values.dtype)


ROUGHNESS = 0.05
"""Share of the largest map's size that is added to every map's before its coefficients are divided by it."""

_WHITENED_AT_A_TIME = 1024


def balanced(coefficients: NDArray[FloatT], gains: NDArray[FloatT]) -> NDArray[FloatT]:
    """Coefficients of (samples, maps, 7, 7), each map times its gain, scaled to unit norm: (samples, maps, 49)."""
    rows = np.asarray(coefficients * gains[:, None, None], dtype=coefficients.dtype).reshape(len(coefficients), -1)
    return unit_rows(rows).reshape(len(rows), len(gains), POINTS * POINTS)


def projected(
    rows: NDArray[np.floating], maps: NDArray[np.floating], places: NDArray[np.floating]
) -> NDArray[np.floating]:
    """Projection onto the main directions of maps and places: (samples, directions of maps x directions of places)."""
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
        Share of the largest variance that is added to each, so that the smallest are not blown up.

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
    for start in range(0, len(values), _WHITENED_AT_A_TIME):
        rows = balanced(scattering(values[start : start + _WHITENED_AT_A_TIME]), gains)
        whitened = (projected(rows, maps, places) @ axes.T - centre) / lengths
        out[start : start + _WHITENED_AT_A_TIME] = unit_rows(whitened)
    return out
