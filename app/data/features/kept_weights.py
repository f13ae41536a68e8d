"""The weights that learnt features rest on: small files beside this one, and nobody's data in them.

They were made from random characters by ``python -m murmurfl.app.data.strokes`` and are read only with the checksum
below. Flower takes no such files into a bundle. Whoever runs one has an installed murmurfl with the same files: there
they are looked for, and the checksum says that they are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....privacy import ConfigurationError

FOLDER = Path(__file__).parent / "weights"
WEIGHTS_VARIABLE = "MURMURFL_WEIGHTS"
"""Environment variable that names a folder with the same files; an engine sets it for the bundle that it starts."""
_WITHIN_PACKAGE = Path("app", "tasks", "features", "weights")

SHA256 = MappingProxyType(
    {
        "scattering.npz": "a2f1d782705d99e5d5b9f478a21b5d93e89af4da65cc6dfaf6426ec8271ec24e",
        "strokes-1.npz": "3a11a3e4f9be7bad6c2f80bb04474e69096f0c28daf7a75e554a6da731643701",
        "strokes-2.npz": "e35d492e88ee790d6c29e7f31443508fc403e1ecac924134056b7548ccd5cd4c",
    }
)
"""Of each file's bytes."""


@lru_cache
def read_weights(name: str) -> Mapping[str, NDArray[Any]]:
    """The arrays of a weights file.

    Parameters
    ----------
    name : str
        One of :data:`SHA256`.

    Raises
    ------
    ConfigurationError
        If it is nowhere, or not the file that this version of murmurfl has.

    Notes
    -----
    Arrays and nothing else: no code can be in such a file.
    """
    path = next((folder / name for folder in _folders() if (folder / name).is_file()), None)
    if path is None:
        raise ConfigurationError(
            f"Expected the weights {name} in an installed murmurfl, got none: Flower's bundle does not carry them. "
            f"Install murmurfl here, name a folder that has them in {WEIGHTS_VARIABLE}, or take features = "
            "'soft-gradients', which need none."
        )
    return unpacked_weights(path.read_bytes(), SHA256[name], str(path))


def unpacked_weights(content: bytes, expected: str, where: str) -> Mapping[str, NDArray[Any]]:
    """The arrays in the bytes of a weights file, once its checksum is right."""
    digest = hashlib.sha256(content).hexdigest()
    if digest != expected:
        raise ConfigurationError(
            f"Expected {where} to have the SHA-256 {expected}, got {digest}: install murmurfl again."
        )
    with np.load(BytesIO(content), allow_pickle=False) as arrays:
        return MappingProxyType({key: arrays[key] for key in arrays.files})


def _folders() -> Iterator[Path]:
    """Where the files may lie: beside this one, where it is said, in an installed package, in that one's checkout."""
    yield FOLDER
    if named := os.environ.get(WEIGHTS_VARIABLE):
        yield Path(named).expanduser()
    package = __name__.partition(".")[0]
    for entry in sys.path:
        yield Path(entry) / package / _WITHIN_PACKAGE
    try:
        url = json.loads(distribution(package).read_text("direct_url.json") or "{}").get("url", "")
    except PackageNotFoundError:
        return
    if url.startswith("file://"):
        yield Path(url.removeprefix("file://")) / _WITHIN_PACKAGE


def quantised(weight: NDArray[np.floating]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Weights as integers from -127 to 127, and what each unit's are multiples of; units lie along the first axis."""
    units = weight.reshape(len(weight), -1)
    step = np.maximum(np.abs(units).max(axis=1), np.finfo(np.float32).tiny) / 127
    shape = (-1, *(1,) * (weight.ndim - 1))
    return np.round(weight / step.reshape(shape)).astype(np.int8), step.astype(np.float32)


def restored(whole: NDArray[np.int8], step: NDArray[np.float32]) -> NDArray[np.float32]:
    """Weights from :func:`quantised`."""
    return whole.astype(np.float32) * step.reshape(-1, *(1,) * (whole.ndim - 1))
