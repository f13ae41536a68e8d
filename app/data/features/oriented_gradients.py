"""Histograms of oriented gradients of MNIST's images."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ....privacy import ConfigurationError
from ...settings.registry import registry
from ...settings.run_config import RunConfig
from .feature_map import Features

_BLOCK = 5000
_MNIST_SHAPE = (28, 28)

ORIENTED_GRADIENTS_NORM = 4.0
"""L2 norm of every sample's oriented gradients, unless all are zero."""


def oriented_gradients(
    images: NDArray[np.uint8], *, orientations: int = 8, cell: int = 4, norm: float = ORIENTED_GRADIENTS_NORM
) -> NDArray[np.float32]:
    """Histograms of oriented gradients: how much edge of each direction there is in each cell of an image.

    Parameters
    ----------
    images : ndarray of shape (samples, height, width), uint8
        height and width multiples of ``cell``.
    orientations : int
        Directions, over the full turn; an edge is shared between its two nearest.
    cell : int
        Side of a cell, in pixels.
    norm : float
        L2 norm that every sample's features are scaled to; a constant, so scaling reveals nothing about other samples.

    Returns
    -------
    ndarray of shape (samples, height / cell x width / cell x orientations), float32
        For 28 x 28 images and the defaults 7 x 7 x 8 = 392 features. A blank image gives zeros.

    Notes
    -----
    After Dalal and Triggs (2005), without block normalisation. Row i depends on image i alone.
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
                f"Expected features to be 'pixels' unless the images are MNIST's, got {config.features!r}."
            )


class OrientedGradients(OfMnist):
    """Histograms of oriented gradients (:func:`oriented_gradients`)."""

    name = "oriented-gradients"
    sentence = "histograms of oriented gradients of MNIST's images, 392 values"
    norm_bound = ORIENTED_GRADIENTS_NORM
    nonnegative = True

    def __call__(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        return oriented_gradients(images)
