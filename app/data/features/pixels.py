"""Pixels as they are, and their means over blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .feature_map import Features, in_unit_range
from .oriented_gradients import OfMnist


def pooled(images: NDArray[np.uint8], block: int) -> NDArray[np.float32]:
    """Means over square blocks of pixels, from 0 to 1: a fixed map, which costs no privacy.

    Parameters
    ----------
    block : int
        Pixels of a block's side; it divides the image's.
    """
    side = images.shape[1] // block
    blocks = images.reshape(len(images), side, block, side, block).mean(axis=(2, 4), dtype=np.float32)
    return (blocks / np.float32(255)).reshape(len(images), side * side)


class Pixels(Features):
    """The task's own values: of images, their pixels in [0, 1]."""

    name = "pixels"
    sentence = "the values as they are; of images, their pixels in [0, 1]"
    nonnegative = True

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
