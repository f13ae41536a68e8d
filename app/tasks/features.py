"""Fixed feature maps: computed from one sample alone, so they cost no privacy.

A user's own is a function, ``features = package.module:function``. It takes images of shape (samples, height, width),
float32 in [0, 1], and returns an array of shape (samples, k), each row made from its own image alone. An attribute
``norm_bound`` of the function, if it has one, says how long a row can be (L2); steps are bounded by it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy import ConfigurationError
from ..config import RunConfig
from ..registry import Registry, registry

_BLOCK = 5000
_MNIST_SHAPE = (28, 28)

ORIENTED_GRADIENTS_NORM = 4.0
"""L2 norm of every sample's oriented gradients, unless it has none at all."""


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
        L2 norm every sample's features are scaled to; a constant, so the scaling says nothing about other samples.

    Returns
    -------
    ndarray of shape (samples, height / cell x width / cell x orientations), float32
        For 28 x 28 images and the defaults 7 x 7 x 8 = 392 features. A blank image gives zeros.

    Notes
    -----
    After Dalal and Triggs (2005), without block normalisation. **Formal guarantees.** Row i depends on image i alone.
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


def pooled(images: NDArray[np.uint8], block: int) -> NDArray[np.float32]:
    """Means over square blocks of pixels, from 0 to 1: a fixed map, which costs no privacy.

    Parameters
    ----------
    images : ndarray of shape (samples, side, side), uint8
    block : int
        Pixels of a block's side; it divides the image's.
    """
    side = images.shape[1] // block
    blocks = images.reshape(len(images), side, block, side, block).mean(axis=(2, 4), dtype=np.float32)
    return (blocks / np.float32(255)).reshape(len(images), side * side)


class Features(ABC):
    """A map from images to features.

    Attributes
    ----------
    name, sentence : str
    keys : frozenset of str
        Hyphenated run-config keys that this map reads and others need not.
    norm_bound : float, optional
        The most that a row's L2 norm can be, whatever the image; None for features in [0, 1].
    """

    name: str = ""
    sentence: str = ""
    keys: frozenset[str] = frozenset()
    norm_bound: float | None = None

    def check(self, config: RunConfig) -> None:  # noqa: B027 - pixels refuse nothing
        """Refuse a run configuration whose task these features cannot be made for."""

    @abstractmethod
    def __call__(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        """The features of images.

        Parameters
        ----------
        images : ndarray of shape (samples, height, width), uint8
        white : int
            The largest value that a pixel can have.

        Returns
        -------
        ndarray of shape (samples, k), float32

        Notes
        -----
        **Formal guarantees.** Row i depends on image i alone; every guarantee for one sample rests on it.
        """


class Pixels(Features):
    """The task's own values: of images, their pixels in [0, 1]."""

    name = "pixels"
    sentence = "the values as they are; of images, their pixels in [0, 1]"

    def __call__(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        return _in_unit_range(images, white).reshape(len(images), -1)


class _OfMnist(Features):
    """A map for images as large as MNIST's."""

    def check(self, config: RunConfig) -> None:
        if registry("task")[config.task].image_shape != _MNIST_SHAPE:
            raise ConfigurationError(
                f"Expected features to be 'pixels' unless the images are MNIST's, got {config.features!r}."
            )


class OrientedGradients(_OfMnist):
    """Histograms of oriented gradients (:func:`oriented_gradients`)."""

    name = "oriented-gradients"
    sentence = "histograms of oriented gradients of MNIST's images, 392 values"
    norm_bound = ORIENTED_GRADIENTS_NORM

    def __call__(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        return oriented_gradients(images)


class BlockMeans(_OfMnist):
    """Means over square blocks of pixels (:func:`pooled`).

    Parameters
    ----------
    block : int
        Pixels of a block's side.
    """

    def __init__(self, block: int) -> None:
        self.name = f"means-{block}x{block}"
        self.sentence = f"means over blocks of {block} x {block} pixels of MNIST's images"
        self._block = block

    def __call__(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        return pooled(images, self._block)


class FunctionFeatures(Features):
    """A function of the user's.

    Parameters
    ----------
    function : callable
    name : str
        As the run configuration has it.

    Notes
    -----
    **Formal guarantees.** That row i depends on image i alone is the function's own promise. It is tried on a few
    images, which finds a normalisation over all of them and proves nothing.
    """

    def __init__(self, function: Callable[[NDArray[np.float32]], Any], name: str) -> None:
        self.name = name
        self.sentence = "features of your own"
        self.norm_bound = getattr(function, "norm_bound", None)
        self._function = function

    def check(self, config: RunConfig) -> None:
        if not registry("task")[config.task].has_images:
            raise ConfigurationError(
                f"Expected features to be 'pixels' for a task without images, got {config.features!r}."
            )

    def __call__(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        values = _in_unit_range(images, white)
        rows = self._rows(values)
        for i in range(min(_ROWS_ALONE, len(values))):
            alone = self._rows(values[i : i + 1])[0]
            if alone.shape != rows[i].shape or not np.allclose(alone, rows[i], rtol=1e-3, atol=1e-4, equal_nan=True):
                raise ConfigurationError(
                    f"Expected features = {self.name!r} to make each row from its own image alone, got another row "
                    "for an image among others than for the same one by itself: privacy is counted sample by sample."
                )
        return rows

    def _rows(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        try:
            rows = np.asarray(self._function(values.copy()))
        except Exception as error:  # the user's own code
            raise ConfigurationError(
                f"Expected features = {self.name!r} to give an array, got {type(error).__name__}: {error}."
            ) from error
        if rows.ndim != 2 or len(rows) != len(values) or rows.dtype.kind not in "fiub" or not rows.shape[1]:
            raise ConfigurationError(
                f"Expected features = {self.name!r} to give numbers of shape ({len(values)}, k), one row an image, got "
                f"{rows.dtype} of shape {rows.shape}."
            )
        return np.asarray(rows, dtype=np.float32)


_ROWS_ALONE = 3
"""How many images a user's function gets once more, one by one: a normalisation over all of them shows at once."""


def _in_unit_range(images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
    return np.asarray(images / np.float32(white), dtype=np.float32)


def own_features(found: Any, name: str) -> Features:
    """The map that a user's object is.

    Parameters
    ----------
    found : Any
        What ``name`` names, and no Features.
    name : str

    Raises
    ------
    ConfigurationError
        If it is no function.
    """
    if isinstance(found, type) or not callable(found):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        raise ConfigurationError(f"Expected features = {name!r} to be a function of images, got {kind}.")
    return FunctionFeatures(found, name)


FEATURES = Registry(
    "features", Features, (Pixels(), OrientedGradients(), BlockMeans(2), BlockMeans(4)), adapt=own_features
)
"""The built-in maps by name, and a user's own as ``package.module:function``."""
