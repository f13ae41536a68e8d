"""The interface of features: a fixed map from one image to numbers, and a folder that may keep them.

The environment variable ``MURMURFL_KEPT_FEATURES`` names the folder, so that many runs make features once; without it
nothing is written. Kept features are as private as the images, from which they are made without noise. Only their owner
can read the files.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ....privacy.errors import ConfigurationError
from ...settings.registry import Named, registry
from ...settings.run_config import RunConfig

FloatT = TypeVar("FloatT", bound=np.floating)


class Features(Named, ABC):
    """A map from images to features.

    Attributes
    ----------
    norm_bound : float, optional
        Largest possible L2 norm of a row, for any image; None for features in [0, 1].
    nonnegative : bool
        Whether no value is below zero, for any image.
    centring : str
        Meaning of an empty run-config key ``centring``: ``private`` if removing their mean is best.
    reads_colour : bool
        Whether colour images, of shape (samples, height, width, 3), are read as they are; others get luminance.
    any_size : bool
        Whether images of every size have equally many features.
    side : int
        Pixels of the side that images in files are resized to, unless they may have any size; 0 for the usual 32.
    short_steps : bool
        Whether classes overlap so much that the steps of full batches are bounded by the number of samples: longer ones
        follow single samples where there is little noise.
    """

    norm_bound: float | None = None
    nonnegative: bool = False
    centring: str = "none"
    reads_colour: bool = False
    any_size: bool = False
    side: int = 0
    short_steps: bool = False

    def of_any(self, images: NDArray[np.uint8], white: int = 255) -> NDArray[np.float32]:
        """Return the features of grey or colour images; row i depends on image i alone."""
        return self(images if self.reads_colour else luminance(images), white)

    @abstractmethod
    def __call__(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        """Return the features of images.

        Parameters
        ----------
        white : int
            Largest possible value of a pixel.

        Notes
        -----
        Row i depends on image i alone; every guarantee for one sample needs this.
        """


class OfImages(Features):
    """A map for images whose height and width are at least ``least_side`` pixels."""

    least_side: int = 1

    def check(self, config: RunConfig) -> None:
        task = registry("task")[config.task]
        if not task.has_images:
            raise ConfigurationError(
                f"Expected features to be 'pixels' for a task without images, got {config.features!r}.",
                kind="conflict",
                setting="features",
                got=config.features,
            )
        if task.image_shape is not None and min(task.image_shape) < self.least_side:
            height, width = task.image_shape
            raise ConfigurationError(
                f"Expected images of at least {self.least_side} x {self.least_side} pixels for features = "
                f"{config.features!r}, got {height} x {width}.",
                kind="out-of-range",
                setting="features",
            )


_LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)


def luminance(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the brightness of colour images (Rec. 601); grey ones stay as they are."""
    grey = images.ndim == len(("sample", "row", "column"))
    return images if grey else np.rint(images.astype(np.float32) @ _LUMINANCE).astype(np.uint8)


def in_unit_range(images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
    """Pixels from 0 to 1."""
    return np.asarray(images / np.float32(white), dtype=np.float32)


def unit_rows(rows: NDArray[FloatT]) -> NDArray[FloatT]:
    """Rows scaled to L2 norm 1, each by its own norm; a row of zeros stays zero."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(norms > 0, norms, 1), dtype=rows.dtype)


KEPT_VARIABLE = "MURMURFL_KEPT_FEATURES"


def kept(
    recipe: Sequence[str],
    images: NDArray[np.uint8],
    white: int,
    make: Callable[[NDArray[np.uint8], int], NDArray[np.float32]],
) -> NDArray[np.float32]:
    """Features from the user's folder; if they are not there, ``make`` makes them, and they are put there.

    The digest of images and ``recipe`` (the map's name, the checksums of its weights) names the file. Writers may race:
    each writes its own file and moves it into place.
    """
    folder = os.environ.get(KEPT_VARIABLE, "")
    if not folder:
        return make(images, white)
    path = Path(folder).expanduser() / f"{_digest(recipe, images, white)}.npy"
    with suppress(OSError, ValueError, EOFError):  # missing or incomplete: made again
        rows = np.load(path, allow_pickle=False)
        if rows.dtype == np.float32 and rows.ndim == 2 and len(rows) == len(images):
            return rows
    rows = make(images, white)
    try:
        _write(path, rows)
    except OSError as error:
        raise ConfigurationError(
            f"Expected {KEPT_VARIABLE} to name a folder that can be written to, got {folder!r}: {error}.",
            kind="failed",
            setting=KEPT_VARIABLE,
        ) from error
    return rows


def _digest(recipe: Sequence[str], images: NDArray[np.uint8], white: int) -> str:
    digest = hashlib.sha256(repr([*recipe, images.shape, str(images.dtype), white]).encode())
    digest.update(np.ascontiguousarray(images).data)
    return digest.hexdigest()


def _write(path: Path, rows: NDArray[np.float32]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Of mode 0600
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            np.save(file, rows, allow_pickle=False)
        except BaseException:
            Path(file.name).unlink()
            raise
    Path(file.name).replace(path)
