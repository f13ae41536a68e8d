"""Features learnt from random characters: frozen nets, and scattering whitened by them; each alone, and joined.

They have seen no data, so they cost no privacy. The weights are small files beside this one: ``python -m
murmurfl.app.papers.strokes`` made them, and they are read only with the checksum below. Flower leaves them out of a
bundle; whoever runs one has an installed murmurfl with the same files, where they are looked up.

Each part is scaled to unit norm, loses the random characters' mean, and is scaled again; parts stand side by side with
a constant 0.3 as the bias. Rows have norm one, so that a sample's gradient is no longer than its error.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....privacy.errors import ConfigurationError
from .feature_map import FloatT, OfImages, in_unit_range, kept, unit_rows

SIDE = 28
"""Pixels of an image's side."""

FOLDER = Path(__file__).parent / "weights"
WEIGHTS_VARIABLE = "MURMURFL_WEIGHTS"
"""Environment variable of a folder with the same files; an engine sets it for the bundle that it starts."""
_WITHIN_PACKAGE = Path(*FOLDER.parts[-4:])

SHA256 = MappingProxyType(
    {
        "colour.npz": "395c60d1771e24bce7f6427c02f637a51cbace76d7505d370b464b91c7e4082c",
        "scattering.npz": "a2f1d782705d99e5d5b9f478a21b5d93e89af4da65cc6dfaf6426ec8271ec24e",
        "strokes-1.npz": "3a11a3e4f9be7bad6c2f80bb04474e69096f0c28daf7a75e554a6da731643701",
        "strokes-2.npz": "e35d492e88ee790d6c29e7f31443508fc403e1ecac924134056b7548ccd5cd4c",
    }
)
"""Checksum of each file."""


@lru_cache
def read_weights(name: str) -> Mapping[str, NDArray[Any]]:
    """Read the arrays of a weights file, one of :data:`SHA256`; it can hold arrays only, and no code.

    Raises ConfigurationError if it is nowhere, or not this version's file.
    """
    path = next((folder / name for folder in _folders() if (folder / name).is_file()), None)
    if path is None:
        raise ConfigurationError(
            f"Expected the weights {name} in an installed murmurfl, got none: Flower's bundle does not carry them. "
            f"Install murmurfl here, name a folder that has them in {WEIGHTS_VARIABLE}, or take features = "
            "'soft-gradients', which need none.",
            kind="not-found",
        )
    return unpacked_weights(path.read_bytes(), SHA256[name], str(path))


def unpacked_weights(content: bytes, expected: str, where: str) -> Mapping[str, NDArray[Any]]:
    """Return the arrays in the bytes of a weights file whose checksum is right."""
    digest = hashlib.sha256(content).hexdigest()
    if digest != expected:
        raise ConfigurationError(
            f"Expected {where} to have the SHA-256 {expected}, got {digest}: install murmurfl again.", kind="damaged"
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


_IMAGES_AT_A_TIME = 128


def frozen_net(
    values: NDArray[np.float32], weights: Sequence[NDArray[np.float32]], biases: Sequence[NDArray[np.float32]]
) -> NDArray[np.float32]:
    """Return the net's output for pixels from 0 to 1, shape (samples, side, side); row i depends on image i alone.

    Weights are those of convolutions, of shape (out, in, 3, 3), and of the dense layer, (features, pixels x channels);
    biases have each layer's normalisation by fixed means folded in. A convolution keeps an image's size and is cut at
    zero, and all but the last are pooled by 2 x 2. Images lie pixel by pixel in memory, so each layer is one product of
    matrices.
    """
    last = len(weights) - 2
    kernels = [weight.transpose(2, 3, 1, 0).reshape(-1, len(weight)) for weight in weights[:-1]]
    out = np.empty((len(values), len(weights[-1])), dtype=np.float32)
    for start in range(0, len(values), _IMAGES_AT_A_TIME):
        maps = values[start : start + _IMAGES_AT_A_TIME, :, :, None]
        for layer, kernel in enumerate(kernels):
            maps = np.maximum(_patches(maps) @ kernel + biases[layer], 0)
            if layer < last:
                maps = _pooled(maps)
        dense = maps.reshape(len(maps), -1) @ weights[-1].T + biases[-1]
        out[start : start + _IMAGES_AT_A_TIME] = np.maximum(dense, 0)
    return out


def _patches(maps: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the 3 x 3 pixels around each one, of shape (images, height, width, 9 x channels)."""
    images, height, width, channels = maps.shape
    padded = np.pad(maps, ((0, 0), (1, 1), (1, 1), (0, 0)))
    patches = np.empty((images, height, width, 9, channels), dtype=maps.dtype)
    for place in range(9):
        down, across = divmod(place, 3)
        patches[..., place, :] = padded[:, down : down + height, across : across + width]
    return patches.reshape(images, height, width, -1)


def _pooled(maps: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the largest of each 2 x 2 pixels."""
    columns = np.maximum(maps[:, :, ::2], maps[:, :, 1::2])
    return np.maximum(columns[:, ::2], columns[:, 1::2])


MAPS, POINTS = 81, 7
"""The output: 81 maps of 7 x 7."""

_DIRECTIONS = 8
_SLANT = 0.5
_HALF = SIDE // 2
_SCATTERED_AT_A_TIME = 64


def morlet(half: int, width: float, direction: float, frequency: float) -> NDArray[np.complex128]:
    """Return a wave under a Gaussian, with mean zero and ``half`` pixels to either side of the middle.

    ``width`` is the Gaussian's along the wave, in pixels; across it is twice as long. ``direction`` is in radians,
    ``frequency`` in radians a pixel.
    """
    rows, columns = np.mgrid[-half : half + 1, -half : half + 1].astype(np.float64)
    along = columns * np.cos(direction) + rows * np.sin(direction)
    across = rows * np.cos(direction) - columns * np.sin(direction)
    window = np.exp(-(along**2 + (_SLANT * across) ** 2) / (2 * width**2))
    wave = np.exp(1j * frequency * along)
    return window * (wave - (window * wave).sum() / window.sum()) / window.sum()


@lru_cache
def _filters(side: int, half: int, scale: int, stride: int, dtype: type) -> NDArray[np.floating]:
    """Return eight wavelets along a row, a matrix.

    It maps windows of 2 half + 1 rows of ``side`` pixels to (part, direction, column).
    """
    angles = np.pi * np.arange(_DIRECTIONS) / _DIRECTIONS
    bank = np.stack([morlet(half, 0.8 * scale, angle, 0.75 * np.pi / scale) for angle in angles])
    columns = np.arange(0, side, stride)
    matrix = np.zeros((2 * half + 1, side, 2, _DIRECTIONS, len(columns)))
    for place, column in enumerate(columns):
        first, last = max(column - half, 0), min(column + half + 1, side)
        part = bank[:, :, first - column + half : last - column + half]  # within the image
        matrix[:, first:last, 0, :, place] = np.moveaxis(part.real, 0, -1)
        matrix[:, first:last, 1, :, place] = np.moveaxis(part.imag, 0, -1)
    return matrix.reshape((2 * half + 1) * side, -1).astype(dtype)


@lru_cache
def _low_pass(side: int, dtype: type) -> NDArray[np.floating]:
    """Gaussian blur and sampling along one side, of shape (7, side); zero beyond the edge."""
    stride = side // POINTS
    places = stride // 2 + stride * np.arange(POINTS)
    away = np.arange(side) - places[:, None]
    half, width = 3 * stride // 2, 0.8 * stride
    weights = np.where(np.abs(away) <= half, np.exp(-(away**2) / (2 * width**2)), 0)
    whole = np.exp(-(np.arange(-half, half + 1) ** 2) / (2 * width**2)).sum()
    return (weights / whole).astype(dtype)


def _modulus(maps: NDArray[np.floating], half: int, scale: int, stride: int = 1) -> NDArray[np.floating]:
    """Strength of each wavelet at each point of maps of shape (n, side, side): (n, rows, directions, columns)."""
    count, side = maps.shape[:2]
    padded = np.pad(maps, ((0, 0), (half, half), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1, axis=1)[:, ::stride]
    windows = windows.swapaxes(2, 3).reshape(-1, (2 * half + 1) * side)
    answers = windows @ _filters(side, half, scale, stride, maps.dtype.type)
    answers = answers.reshape(count, -1, 2, _DIRECTIONS, len(range(0, side, stride)))
    return np.sqrt(answers[:, :, 0] ** 2 + answers[:, :, 1] ** 2)


def _smoothed(maps: NDArray[np.floating]) -> NDArray[np.floating]:
    """Smooth maps of shape (n, rows, any, columns) to shape (n, any, 7, 7)."""
    count, rows, others, columns = maps.shape
    low = _low_pass(rows, maps.dtype.type) @ maps.reshape(count, rows, others * columns)
    return (low.reshape(count, POINTS, others, columns) @ _low_pass(columns, maps.dtype.type).T).swapaxes(1, 2)


def _scattered(images: NDArray[np.floating]) -> NDArray[np.floating]:
    fine = _modulus(images, half=3, scale=1)
    coarse = _modulus(images, half=6, scale=2, stride=2)
    count = len(images)
    halved = fine.reshape(count, _HALF, 2, _DIRECTIONS, _HALF, 2).mean(axis=(2, 5)).swapaxes(1, 2)
    again = _modulus(halved.reshape(-1, _HALF, _HALF), half=3, scale=1)
    parts = (
        _smoothed(images[:, :, None]),
        _smoothed(fine),
        _smoothed(coarse),
        _smoothed(again).reshape(count, -1, POINTS, POINTS),
    )
    return np.concatenate(parts, axis=1)


def scattering(values: NDArray[np.floating]) -> NDArray[np.floating]:
    """Scattering coefficients of pixels from 0 to 1 of shape (samples, 28, 28); row i depends on image i alone.

    Arithmetic is in the type of the pixels, float32 or float64.
    """
    parts = [
        _scattered(values[start : start + _SCATTERED_AT_A_TIME])
        for start in range(0, len(values), _SCATTERED_AT_A_TIME)
    ]
    return np.concatenate(parts) if parts else np.empty((0, MAPS, POINTS, POINTS), values.dtype)


ROUGHNESS = 0.05
"""Share of the largest map's size that is added to every map's before its coefficients are divided by it."""

_WHITENED_AT_A_TIME = 1024


def balanced(coefficients: NDArray[FloatT], gains: NDArray[FloatT]) -> NDArray[FloatT]:
    """Coefficients of (samples, maps, 7, 7), each map times its gain, scaled to unit norm: (samples, maps, 49)."""
    rows = np.asarray(coefficients * gains[:, None, None], dtype=coefficients.dtype).reshape(len(coefficients), -1)
    return unit_rows(rows).reshape(len(rows), len(gains), POINTS * POINTS)


def projected(
    rows: NDArray[np.floating], maps: NDArray[np.floating], places: NDArray[np.floating]
) -> NDArray[np.floating]:
    """Projection onto the main directions of maps and places: (samples, directions of maps x directions of places)."""
    return ((maps.T @ rows) @ places).reshape(len(rows), -1)


def whitened_scattering(
    values: NDArray[np.float32], weights: Mapping[str, NDArray[np.generic]], floor: float
) -> NDArray[np.float32]:
    """Whitened scattering coefficients of unit norm, of pixels from 0 to 1 of shape (samples, 28, 28).

    ``floor`` is the share of the largest variance that is added to each, so that the smallest are not blown up. Row i
    depends on image i alone: mean and covariance are those of random characters.
    """
    gains, maps, places, variances, centre = (
        np.asarray(weights[name], dtype=np.float32) for name in ("gains", "maps", "places", "variances", "centre")
    )
    axes = restored(np.asarray(weights["axes"], dtype=np.int8), np.asarray(weights["axes_step"], dtype=np.float32))
    lengths = np.sqrt(variances + floor * variances[0])
    out = np.empty((len(values), len(axes)), dtype=np.float32)
    for start in range(0, len(values), _WHITENED_AT_A_TIME):
        rows = balanced(scattering(values[start : start + _WHITENED_AT_A_TIME]), gains)
        whitened = (projected(rows, maps, places) @ axes.T - centre) / lengths
        out[start : start + _WHITENED_AT_A_TIME] = unit_rows(whitened)
    return out


_BOX = 20


def framed(images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
    """Pixels from 0 to 1, of shape (samples, 28, 28); row i depends on image i alone.

    Images of 28 x 28 pixels stay as they are; others are resized to 20 pixels on the longer side, in the middle.
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
    """Output of the net of a weights file, less its mean over random characters, of unit norm.

    Values are pixels from 0 to 1 of shape (samples, 28, 28). Row i depends on image i alone.
    """
    arrays = read_weights(name)
    layers = range(sum(key.startswith("weight") for key in arrays))
    weights = [restored(arrays[f"weight{layer}"], arrays[f"step{layer}"]) for layer in layers]
    answers = unit_rows(frozen_net(values, weights, [arrays[f"bias{layer}"] for layer in layers]))
    return unit_rows(answers - arrays["centre"])


def whitened(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Whitened scattering (:func:`whitened_scattering`), by the file's weights."""
    return whitened_scattering(values, read_weights("scattering.npz"), _FLOOR)


def joined(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Parts side by side, scaled to unit norm, then with 0.3 beside them, scaled again."""
    rows = unit_rows(np.concatenate(parts, axis=1))
    return unit_rows(np.concatenate([rows, np.full((len(rows), 1), _CONSTANT, np.float32)], axis=1))


class Learnt(OfImages):
    """Parts that were learnt from random characters, joined (:func:`joined`).

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
        out = [
            self._rows(framed(images[start : start + _AT_A_TIME], white)) for start in range(0, len(images), _AT_A_TIME)
        ]
        return np.concatenate(out) if out else self._rows(np.zeros((1, 28, 28), np.float32))[:0]

    def _rows(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return joined([whitened(values) if "scattering" in file else stroke_net(values, file) for file in self._files])


_AT_A_TIME = 4096
_NETS = ("strokes-1.npz", "strokes-2.npz")

LEARNT = (
    Learnt("scattering", "a scattering transform, whitened by random characters: 513 values", ["scattering.npz"]),
    Learnt("strokes", "two frozen nets that have learnt to tell random characters apart: 513 values", _NETS),
    Learnt("scattering+strokes", "both of these joined, the most accurate: 1,025 values", ["scattering.npz", *_NETS]),
)
