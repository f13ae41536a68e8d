"""A small convolutional net with fixed weights, in NumPy: it needs no PyTorch, and no image sees another.

Convolutions of 3 x 3 that keep an image's size, each cut at zero and but for the last pooled by 2 x 2; a dense layer,
cut at zero. Images lie pixel by pixel in memory, so that each layer is one product of matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_BLOCK = 128


def frozen_net(
    values: NDArray[np.float32], weights: Sequence[NDArray[np.float32]], biases: Sequence[NDArray[np.float32]]
) -> NDArray[np.float32]:
    """What the net gives for images.

    Parameters
    ----------
    values : ndarray of shape (samples, side, side)
        Pixels from 0 to 1.
    weights : sequence of ndarray
        Of convolutions, of shape (out, in, 3, 3), and of the dense layer, (features, pixels x channels).
    biases : sequence of ndarray
        Of each layer, with its normalisation worked in: running means that nothing here changes.

    Returns
    -------
    ndarray of shape (samples, features)

    Notes
    -----
    Row i depends on image i alone.
    """
    last = len(weights) - 2
    kernels = [weight.transpose(2, 3, 1, 0).reshape(-1, len(weight)) for weight in weights[:-1]]
    out = np.empty((len(values), len(weights[-1])), dtype=np.float32)
    for start in range(0, len(values), _BLOCK):
        maps = values[start : start + _BLOCK, :, :, None]
        for layer, kernel in enumerate(kernels):
            maps = np.maximum(_patches(maps) @ kernel + biases[layer], 0)
            if layer < last:
                maps = _pooled(maps)
        dense = maps.reshape(len(maps), -1) @ weights[-1].T + biases[-1]
        out[start : start + _BLOCK] = np.maximum(dense, 0)
    return out


def _patches(maps: NDArray[np.float32]) -> NDArray[np.float32]:
    """The 3 x 3 pixels around each one, of shape (images, height, width, 9 x channels)."""
    images, height, width, channels = maps.shape
    padded = np.pad(maps, ((0, 0), (1, 1), (1, 1), (0, 0)))
    patches = np.empty((images, height, width, 9, channels), dtype=maps.dtype)
    for place in range(9):
        down, across = divmod(place, 3)
        patches[..., place, :] = padded[:, down : down + height, across : across + width]
    return patches.reshape(images, height, width, -1)


def _pooled(maps: NDArray[np.float32]) -> NDArray[np.float32]:
    """The largest of each 2 x 2 pixels."""
    columns = np.maximum(maps[:, :, ::2], maps[:, :, 1::2])
    return np.maximum(columns[:, ::2], columns[:, 1::2])
