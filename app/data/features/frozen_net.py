"""A small convolutional net with fixed weights, in NumPy: no PyTorch is needed, and no image affects another.

Convolutions of 3 x 3 keep an image's size, each cut at zero and all but the last pooled by 2 x 2; then a dense layer,
cut at zero. Images lie pixel by pixel in memory, so each layer is one product of matrices.

The weights of learnt features are small files beside this one, without anybody's data: ``python -m
murmurfl.app.data.strokes`` made them from random characters, and they are read only with the checksum below. Flower
leaves them out of a bundle; whoever runs one has an installed murmurfl with the same files, where they are looked up.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
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
"""Environment variable of a folder with the same files; an engine sets it for the bundle that it starts."""
_WITHIN_PACKAGE = Path(*FOLDER.parts[-4:])

SHA256 = MappingProxyType(
    {
        "scattering.npz": "a2f1d782705d99e5d5b9f478a21b5d93e89af4da65cc6dfaf6426ec8271ec24e",
        "strokes-1.npz": "3a11a3e4f9be7bad6c2f80bb04474e69096f0c28daf7a75e554a6da731643701",
        "strokes-2.npz": "e35d492e88ee790d6c29e7f31443508fc403e1ecac924134056b7548ccd5cd4c",
    }
)
"""Checksum of each file."""


@lru_cache
def read_weights(name: str) -> Mapping[str, NDArray[Any]]:
    """The arrays of a weights file, one of :data:`SHA256`.

    Raises
    ------
    ConfigurationError
        If it is nowhere, or not this version's file.

    Notes
    -----
    Such a file can hold arrays only, and no code.
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
    """Possible folders of the files: beside this one, the named one, an installed package's, its checkout's."""
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
    """Weights as integers from -127 to 127 and each unit's step; units lie along the first axis."""
    units = weight.reshape(len(weight), -1)
    step = np.maximum(np.abs(units).max(axis=1), np.finfo(np.float32).tiny) / 127
    shape = (-1, *(1,) * (weight.ndim - 1))
    return np.round(weight / step.reshape(shape)).astype(np.int8), step.astype(np.float32)


def restored(whole: NDArray[np.int8], step: NDArray[np.float32]) -> NDArray[np.float32]:
    """Weights from the result of :func:`quantised`."""
    return whole.astype(np.float32) * step.reshape(-1, *(1,) * (whole.ndim - 1))


_BLOCK = 128


def frozen_net(
    values: NDArray[np.float32], weights: Sequence[NDArray[np.float32]], biases: Sequence[NDArray[np.float32]]
) -> NDArray[np.float32]:
    """The net's output for images; row i depends on image i alone.

    Parameters
    ----------
    values : ndarray of shape (samples, side, side)
        Pixels from 0 to 1.
    weights : sequence of ndarray
        Of convolutions, of shape (out, in, 3, 3), and of the dense layer, (features, pixels x channels).
    biases : sequence of ndarray
        Of each layer, with its normalisation by fixed means folded in.
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
