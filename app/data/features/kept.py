"""Features that are kept in a folder of the user's, where the user asks for it, so that many runs make them once.

The environment variable ``MURMURFL_KEPT_FEATURES`` names the folder; without it nothing is written. What lies there is
as private as the images: it is made from them, without noise. Files are for their owner alone.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ....privacy import ConfigurationError

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
