"""The scattering transform of Mallat (2012) with J = 2 and L = 8, as in Tramer and Boneh (2021), of 28 x 28 pixels.

Morlet wavelets of two sizes and eight directions, the modulus, the smaller wavelets once more on what they left, and a
Gaussian over everything: 81 maps of 7 x 7. The coefficients are strongly correlated, and noise that is the same in
every direction drowns most of them; so they are whitened, by a covariance that no data had a part in
(:mod:`.whitened`).

Every convolution here is one product of matrices: a window of rows, as it lies in memory, times the filters laid out
along a row.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

SIDE = 28
MAPS, POINTS = 81, 7
"""What comes out: 81 maps of 7 x 7."""

_DIRECTIONS = 8
_SLANT = 0.5
_HALF = SIDE // 2
_BLOCK = 64


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
    """Eight wavelets along a row: windows of 2 half + 1 rows of ``side`` pixels to (part, direction, column)."""
    angles = np.pi * np.arange(_DIRECTIONS) / _DIRECTIONS
    bank = np.stack([morlet(half, 0.8 * scale, angle, 0.75 * np.pi / scale) for angle in angles])
    columns = np.arange(0, side, stride)
    matrix = np.zeros((2 * half + 1, side, 2, _DIRECTIONS, len(columns)))
    for place, column in enumerate(columns):
        first, last = max(column - half, 0), min(column + half + 1, side)
        part = bank[:, :, first - column + half : last - column + half]  # what lies within the image
        matrix[:, first:last, 0, :, place] = np.moveaxis(part.real, 0, -1)
        matrix[:, first:last, 1, :, place] = np.moveaxis(part.imag, 0, -1)
    return matrix.reshape((2 * half + 1) * side, -1).astype(dtype)


@lru_cache
def _low_pass(side: int, dtype: type) -> NDArray[np.floating]:
    """The Gaussian and the sampling along one side, of shape (7, side); there is nothing beyond the edge."""
    stride = side // POINTS
    places = stride // 2 + stride * np.arange(POINTS)
    away = np.arange(side) - places[:, None]
    half, width = 3 * stride // 2, 0.8 * stride
    weights = np.where(np.abs(away) <= half, np.exp(-(away**2) / (2 * width**2)), 0)
    whole = np.exp(-(np.arange(-half, half + 1) ** 2) / (2 * width**2)).sum()
    return (weights / whole).astype(dtype)


def _modulus(maps: NDArray[np.floating], half: int, scale: int, stride: int = 1) -> NDArray[np.floating]:
    """How strong each wavelet is at each point of maps of shape (n, side, side): (n, rows, directions, columns)."""
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
    """The scattering coefficients of images, not whitened.

    Parameters
    ----------
    values : ndarray of shape (samples, 28, 28)
        Pixels from 0 to 1; float32 or float64, and so is all arithmetic.

    Notes
    -----
    Row i depends on image i alone.
    """
    parts = [_scattered(values[start : start + _BLOCK]) for start in range(0, len(values), _BLOCK)]
    return np.concatenate(parts) if parts else np.empty((0, MAPS, POINTS, POINTS), values.dtype)
