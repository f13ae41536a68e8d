"""Soft histograms of gradients: how much edge of each direction there is around each point of a grid.

The gradient's magnitude at a pixel goes to the two nearest of 12 directions over the full turn, linearly; the map of
each direction is blurred by a Gaussian and sampled on a grid; then the square root, and a norm of one. Unlike the
histograms of :mod:`.oriented_gradients`, nothing jumps when an edge moves by a pixel or turns by a degree, and the root
keeps a few strong edges from drowning the rest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .feature_map import OfImages, in_unit_range, unit_rows

ORIENTATIONS = 12
_FEWEST_POINTS = 4
_STRIDES = (4, 2, 1)
_VALUES_AT_A_TIME = 1 << 23


def stride_for(side: int) -> int:
    """Pixels between two points of the grid: 4, or less if that leaves fewer than four points a side."""
    return next((stride for stride in _STRIDES if side // stride >= _FEWEST_POINTS), _STRIDES[-1])


def sampled_blur(side: int, stride: int) -> NDArray[np.float32]:
    """Blur and sampling along one side of an image, as one matrix of shape (points, side).

    The Gaussian's width is half a stride; a point's weights add up to one with those beyond the image's edge, which is
    blank. The points lie symmetrically, with half a stride or more to either edge.
    """
    points = side // stride
    first = (side - 1 - stride * (points - 1)) / 2
    places = first + stride * np.arange(points)
    around = np.arange(-2 * stride, side + 2 * stride)
    weights = np.exp(-(((around - places[:, None]) * 2 / stride) ** 2) / 2)
    weights /= weights.sum(axis=1, keepdims=True)
    return weights[:, 2 * stride : 2 * stride + side].astype(np.float32)


def soft_gradients(images: NDArray[np.uint8], white: int = 255) -> NDArray[np.float32]:
    """Soft histograms of gradients.

    Parameters
    ----------
    images : ndarray of shape (samples, height, width), uint8
        Of at least 4 x 4 pixels.
    white : int
        Largest possible value of a pixel.

    Returns
    -------
    ndarray of shape (samples, rows x columns x 12), float32
        On a grid of one point every 4 pixels (every 2, or each, on images of less than 16, or 8, pixels), blurred by
        half of that: 7 x 7 x 12 = 588 features of 28 x 28 pixels, 4 x 4 x 12 = 192 of 8 x 8.

    Notes
    -----
    Row i depends on image i alone. For any image, no value is below zero and the L2 norm of a row is 1, or 0 if blank.
    """
    samples, height, width = images.shape
    stride = stride_for(min(height, width))
    down, across = sampled_blur(height, stride), sampled_blur(width, stride)
    features = np.empty((samples, len(down) * len(across) * ORIENTATIONS), dtype=np.float32)
    block = max(1, _VALUES_AT_A_TIME // (height * width * ORIENTATIONS))
    for start in range(0, samples, block):
        maps = _directions(in_unit_range(images[start : start + block], white))
        rows = down @ maps.reshape(len(maps), height, width * ORIENTATIONS)
        pooled = across @ rows.reshape(len(maps), len(down), width, ORIENTATIONS)
        features[start : start + block] = unit_rows(np.sqrt(pooled.reshape(len(maps), -1)))
    return features


def _directions(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The gradient's magnitude at every pixel, shared between its two nearest directions; blank all around."""
    padded = np.pad(values, ((0, 0), (1, 1), (1, 1)))
    horizontal = (padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]).ravel()
    vertical = (padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]).ravel()
    edges = np.flatnonzero((horizontal != 0) | (vertical != 0))  # most of a drawing is blank
    horizontal, vertical = horizontal[edges], vertical[edges]
    magnitude = np.sqrt(horizontal**2 + vertical**2)
    position = np.arctan2(vertical, horizontal) * np.float32(ORIENTATIONS / (2 * np.pi))
    lower = np.floor(position)
    upper_part = magnitude * (position - lower)
    direction = lower.astype(np.int64) % ORIENTATIONS
    maps = np.zeros(values.size * ORIENTATIONS, dtype=np.float32)
    maps[edges * ORIENTATIONS + direction] = magnitude - upper_part
    maps[edges * ORIENTATIONS + (direction + 1) % ORIENTATIONS] = upper_part
    return maps.reshape(*values.shape, ORIENTATIONS)


class SoftGradients(OfImages):
    """Soft histograms of gradients (:func:`soft_gradients`)."""

    name = "soft-gradients"
    sentence = (
        "soft histograms of gradients, of images of any size from 4 x 4: 588 values of 28 x 28 pixels, 192 of 8 x 8"
    )
    norm_bound = 1.0
    nonnegative = True
    centring = "private"
    least_side = 4

    def __call__(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        return soft_gradients(images, white)
