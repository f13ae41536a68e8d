"""Features without weights: pixels, their means over blocks, and histograms of their gradients."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ....privacy.errors import ConfigurationError
from ...settings.registry import registry
from ...settings.run_config import RunConfig
from .feature_map import Features, OfImages, in_unit_range, unit_rows

_BLOCK = 5000
_MNIST_SHAPE = (28, 28)

ORIENTED_GRADIENTS_NORM = 4.0
"""L2 norm of every sample's oriented gradients, unless all are zero."""


def oriented_gradients(
    images: NDArray[np.uint8], *, orientations: int = 8, cell: int = 4, norm: float = ORIENTED_GRADIENTS_NORM
) -> NDArray[np.float32]:
    """Histograms of oriented gradients: how much edge of each direction there is in each cell of an image.

    After Dalal and Triggs (2005), without block normalisation, each row scaled to ``norm``, a constant. Images have
    shape (samples, height, width), height and width multiples of ``cell``; an edge is shared between its two nearest of
    ``orientations`` directions over the full turn. Features have shape (samples, height / cell x width / cell x
    orientations): 392 for 28 x 28 images and the defaults. Row i depends on image i alone; a blank image gives zeros.
    """
    samples, height, width = images.shape
    rows, columns = height // cell, width // cell
    features = np.empty((samples, rows * columns * orientations), dtype=np.float32)
    for start in range(0, samples, _BLOCK):
        block = images[start : start + _BLOCK].astype(np.float32) / 255
        padded = np.pad(block, ((0, 0), (1, 1), (1, 1)))
        horizontal = padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]
        vertical = padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]
        magnitude = np.hypot(horizontal, vertical)
        position = np.arctan2(vertical, horizontal) * np.float32(orientations / (2 * np.pi)) % orientations
        lower = np.floor(position)
        share = position - lower
        lower = lower.astype(np.int64) % orientations
        histogram = np.zeros((len(block), rows, columns, orientations), dtype=np.float32)
        for direction in range(orientations):
            weight = np.where(lower == direction, 1 - share, 0) + np.where(
                (lower + 1) % orientations == direction, share, 0
            )
            votes = (magnitude * weight).reshape(len(block), rows, cell, columns, cell)
            histogram[..., direction] = votes.sum(axis=(2, 4))
        flat = histogram.reshape(len(block), -1)
        norms = np.linalg.norm(flat, axis=1, keepdims=True)
        features[start : start + _BLOCK] = flat * (norm / np.where(norms > 0, norms, 1))
    return features


class OfMnist(Features):
    """A map for images of MNIST's size."""

    def check(self, config: RunConfig) -> None:
        if registry("task")[config.task].image_shape != _MNIST_SHAPE:
            raise ConfigurationError(
                f"Expected features to be 'pixels' unless the images are MNIST's, got {config.features!r}.",
                kind="conflict",
                setting="features",
                got=config.features,
            )


class OrientedGradients(OfMnist):
    """Histograms of oriented gradients (:func:`oriented_gradients`)."""

    name = "oriented-gradients"
    sentence = "histograms of oriented gradients of MNIST's images, 392 values"
    norm_bound = ORIENTED_GRADIENTS_NORM
    nonnegative = True

    def __call__(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        return oriented_gradients(images)


def pooled(images: NDArray[np.uint8], block: int) -> NDArray[np.float32]:
    """Means over square blocks of ``block`` pixels a side, which divides the image's; from 0 to 1."""
    side = images.shape[1] // block
    blocks = images.reshape(len(images), side, block, side, block).mean(axis=(2, 4), dtype=np.float32)
    return (blocks / np.float32(255)).reshape(len(images), side * side)


class Pixels(Features):
    """The task's own values: of images, their pixels in [0, 1]."""

    name = "pixels"
    sentence = "the values as they are; of images, their pixels in [0, 1]"
    nonnegative = True
    reads_colour = True

    def __call__(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        return in_unit_range(images, white).reshape(len(images), -1)


class BlockMeans(OfMnist):
    """Means over square blocks of ``block`` pixels a side (:func:`pooled`)."""

    nonnegative = True

    def __init__(self, block: int) -> None:
        self.name = f"means-{block}x{block}"
        self.sentence = f"means over blocks of {block} x {block} pixels of MNIST's images"
        self._block = block

    def __call__(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        return pooled(images, self._block)


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
    """Soft histograms of gradients, of shape (samples, rows x columns x 12).

    The grid has one point every 4 pixels (every 2, or each, on images of less than 16, or 8, pixels), blurred by half
    of that: 7 x 7 x 12 = 588 features of 28 x 28 pixels, 4 x 4 x 12 = 192 of 8 x 8. Row i depends on image i alone; for
    any image no value is below zero and the L2 norm of a row is 1, or 0 if blank.
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
    """Return the gradient's magnitude at every pixel, shared between its two nearest directions; the border is zero."""
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
