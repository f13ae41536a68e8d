"""Features learnt from random characters, and scattering whitened by them: each alone, and joined.

They have seen no data, so they cost no privacy. Each part is scaled to unit norm, loses the random characters' mean,
and is scaled again; parts stand side by side with a constant 0.3 as the bias. Rows have norm one, so that a sample's
gradient is no longer than its error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .feature_map import OfImages, in_unit_range, kept, unit_rows
from .frozen_net import SHA256, frozen_net, read_weights, restored
from .scattering import whitened_scattering

SIDE = 28
_BOX = 20


def framed(images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
    """Images of 28 x 28 pixels as they are; others resized to 20 pixels on the longer side, in the middle of 28 x 28.

    Parameters
    ----------
    white : int
        Largest possible value of a pixel.

    Returns
    -------
    ndarray of shape (samples, 28, 28), float32
        From 0 to 1. Row i depends on image i alone.
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
    """Linear interpolation along one side, as a matrix of shape (28, side); means where images shrink.

    A pixel of the result is a tent, as wide as a pixel of the coarser of the two images.
    """
    scale = longer / _BOX
    places = (np.arange(SIDE) - (SIDE - 1) / 2) * scale + (side - 1) / 2
    reach = max(scale, 1.0)
    weights = np.maximum(1 - np.abs(np.arange(side) - places[:, None]) / reach, 0) / reach
    return weights.astype(np.float32)


_CONSTANT = 0.3
_FLOOR = 0.005

Part = Callable[[NDArray[np.float32]], NDArray[np.float32]]


def stroke_net(values: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    """Output of a net that has learnt random characters, less its mean over them, of unit norm.

    Parameters
    ----------
    values : ndarray of shape (samples, 28, 28)
        Pixels from 0 to 1.
    name : str
        Of the weights file.

    Notes
    -----
    Row i depends on image i alone.
    """
    arrays = read_weights(name)
    layers = range(sum(key.startswith("weight") for key in arrays))
    weights = [restored(arrays[f"weight{layer}"], arrays[f"step{layer}"]) for layer in layers]
    answers = unit_rows(frozen_net(values, weights, [arrays[f"bias{layer}"] for layer in layers]))
    return unit_rows(answers - arrays["centre"])


def whitened(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Whitened scattering (:func:`~.scattering.whitened_scattering`), by the file's weights."""
    return whitened_scattering(values, read_weights("scattering.npz"), _FLOOR)


def joined(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Parts side by side, scaled to unit norm, then with 0.3 beside them, scaled again."""
    rows = unit_rows(np.concatenate(parts, axis=1))
    return unit_rows(np.concatenate([rows, np.full((len(rows), 1), _CONSTANT, np.float32)], axis=1))


class Learnt(OfImages):
    """Parts that were learnt from random characters, joined (:func:`joined`).

    Parameters
    ----------
    files : sequence of str
        Weights of the parts.

    Notes
    -----
    Row i depends on image i alone and on weights learnt from no data; its L2 norm is 1.
    """

    norm_bound = 1.0
    constant = True
    least_side = 4

    def __init__(self, name: str, sentence: str, files: Sequence[str]) -> None:
        self.name, self.sentence, self._files = name, sentence, tuple(files)

    def __call__(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        recipe = [self.name, *(SHA256[file] for file in self._files)]
        return kept(recipe, images, white, self._made)

    def _made(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        out = [self._rows(framed(images[start : start + _BLOCK], white)) for start in range(0, len(images), _BLOCK)]
        return np.concatenate(out) if out else self._rows(np.zeros((1, 28, 28), np.float32))[:0]

    def _rows(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return joined([whitened(values) if "scattering" in file else stroke_net(values, file) for file in self._files])


_BLOCK = 4096
_NETS = ("strokes-1.npz", "strokes-2.npz")

LEARNT = (
    Learnt("scattering", "a scattering transform, whitened by random characters: 513 values", ["scattering.npz"]),
    Learnt("strokes", "two frozen nets that have learnt to tell random characters apart: 513 values", _NETS),
    Learnt("scattering+strokes", "both of these joined, the most accurate: 1,025 values", ["scattering.npz", *_NETS]),
)
