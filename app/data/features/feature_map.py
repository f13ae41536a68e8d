"""What features are: a fixed map from one image to numbers, kept in a folder where the user asks for it.

Features that are kept in a folder of the user's, where the user asks for it, so that many runs make them once. The
environment variable ``MURMURFL_KEPT_FEATURES`` names the folder; without it nothing is written. What lies there is as
private as the images: it is made from them, without noise. Files are for their owner alone.
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

from ....privacy import ConfigurationError
from ...settings.registry import registry
from ...settings.run_config import RunConfig

FloatT = TypeVar("FloatT", bound=np.floating)


class Features(ABC):
    """A map from images to features.

    Attributes
    ----------
    name, sentence : str
    keys : frozenset of str
        Hyphenated run-config keys that this map reads and others need not.
    norm_bound : float, optional
        The most that a row's L2 norm can be, whatever the image; None for features in [0, 1].
    nonnegative : bool
        Whether no value is below zero, whatever the image.
    centring : str
        What an empty run-config key ``centring`` stands for: ``private`` where their mean is best taken out.
    """

    name: str = ""
    sentence: str = ""
    keys: frozenset[str] = frozenset()
    norm_bound: float | None = None
    nonnegative: bool = False
    centring: str = "none"

    def check(self, config: RunConfig) -> None:  # noqa: B027 - pixels refuse nothing
        """Refuse a run configuration whose task these features cannot be made for."""

    @abstractmethod
    def __call__(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        """The features of images.

        Parameters
        ----------
        white : int
            The largest value that a pixel can have.

        Notes
        -----
        Row i depends on image i alone; every guarantee for one sample rests on it.
        """


class OfImages(Features):
    """A map for images of any size from some least one.

    Attributes
    ----------
    least_side : int
        Pixels that height and width must have at least.
    """

    least_side: int = 1

    def check(self, config: RunConfig) -> None:
        task = registry("task")[config.task]
        if not task.has_images:
            raise ConfigurationError(
                f"Expected features to be 'pixels' for a task without images, got {config.features!r}."
            )
        if task.image_shape is not None and min(task.image_shape) < self.least_side:
            height, width = task.image_shape
            raise ConfigurationError(
                f"Expected images of at least {self.least_side} x {self.least_side} pixels for features = "
                f"{config.features!r}, got {height} x {width}."
            )


def in_unit_range(images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
    """Pixels from 0 to 1."""
    return np.asarray(images / np.float32(white), dtype=np.float32)


def unit_rows(rows: NDArray[FloatT]) -> NDArray[FloatT]:
    """Rows of L2 norm 1, each scaled by its own norm; a row of zeros stays one."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(norms > 0, norms, 1), dtype=rows.dtype)


KEPT_VARIABLE = "MURMURFL_KEPT_FEATURES"


def kept(
    recipe: Sequence[str],
    images: NDArray[np.uint8],
    white: int,
    make: Callable[[NDArray[np.uint8], int], NDArray[np.float32]],
) -> NDArray[np.float32]:
    """Features from the user's folder, or made, and then laid there; only made if no folder is named.

    Parameters
    ----------
    recipe : sequence of str
        What settles the map: its name, the checksums of its weights.
    images, white
        As features get them.
    make : callable
        The map.

    Raises
    ------
    ConfigurationError
        If the folder cannot be written to.

    Notes
    -----
    The same rows as ``make`` gives: a file is found by the digest of recipe and images. Writers may race: each writes a
    file of its own and moves it into its place.
    """
    folder = os.environ.get(KEPT_VARIABLE, "")
    if not folder:
        return make(images, white)
    path = Path(folder).expanduser() / f"{_digest(recipe, images, white)}.npy"
    with suppress(OSError, ValueError, EOFError):  # not there, or half of it: it is made again
        rows = np.load(path, allow_pickle=False)
        if rows.dtype == np.float32 and rows.ndim == 2 and len(rows) == len(images):
            return rows
    rows = make(images, white)
    try:
        _write(path, rows)
    except OSError as error:
        raise ConfigurationError(
            f"Expected {KEPT_VARIABLE} to name a folder that can be written to, got {folder!r}: {error}."
        ) from error
    return rows


def _digest(recipe: Sequence[str], images: NDArray[np.uint8], white: int) -> str:
    digest = hashlib.sha256(repr([*recipe, images.shape, str(images.dtype), white]).encode())
    digest.update(np.ascontiguousarray(images).data)
    return digest.hexdigest()


def _write(path: Path, rows: NDArray[np.float32]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        dir=path.parent, suffix=".part", delete=False
    ) as file:  # 0600, as mkstemp makes it
        try:
            np.save(file, rows, allow_pickle=False)
        except BaseException:
            Path(file.name).unlink()
            raise
    Path(file.name).replace(path)
