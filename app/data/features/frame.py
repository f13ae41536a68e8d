"""Images of any size as features learnt on characters of 28 x 28 pixels see them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .feature_map import in_unit_range

SIDE = 28
_BOX = 20


def framed(images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
    """Images of 28 x 28 pixels as they are; others resized to 20 pixels on the longer side, in the middle of 28 x 28.

    Parameters
    ----------
    images : ndarray of shape (samples, height, width), uint8
    white : int
        The largest value that a pixel can have.

    Returns
    -------
    ndarray of shape (samples, 28, 28), float32
        From 0 to 1.

    Notes
    -----
    Row i depends on image i alone: nothing is looked at to place it.
    """
    values = in_unit_range(images, white)
    height, width = images.shape[1:]
    if (height, width) == (SIDE, SIDE):
        return values
    longer = max(height, width)
    down, across = _resizing(height, longer), _resizing(width, longer)
    return np.asarray(down @ values @ across.T, dtype=np.float32)


@lru_cache
def _resizing(side: int, longer: int) -> NDArray[np.float32]:
    """Linear interpolation along one side, as a matrix of shape (28, side); where images shrink, means.

    A pixel of the result is a tent, as wide as a pixel of the coarser of the two images.
    """
    scale = longer / _BOX
    places = (np.arange(SIDE) - (SIDE - 1) / 2) * scale + (side - 1) / 2
    reach = max(scale, 1.0)
    weights = np.maximum(1 - np.abs(np.arange(side) - places[:, None]) / reach, 0) / reach
    return weights.astype(np.float32)
