"""Features of colour images that have seen no data: patch filters and scattering, whitened by procedural images.

Their weights are a small file next to this one, made by ``python -m murmurfl.app.papers.strokes FOLDER colour.npz``
from random ellipses and rectangles (:mod:`murmurfl.app.papers.strokes.procedural_images`), and read only with their
checksum.

An image of any size is cut to its middle square and resized to 32 x 32. Patches of 6 x 6 pixels, each less its mean and
divided by its standard deviation, are whitened and compared with 400 filters (Coates, Lee and Ng 2011), which are
whitened patches of procedural images; what exceeds a threshold, of either sign, is averaged over the quarters of the
image. Scattering is that of luminance and two opponent colours. The filters are closed under mirroring, and each
average is added to that of the mirrored filter on the other side, so an image and its mirror image have the same
features. The square roots of both parts are standardised, and whitened to the first 384, 96 or 24 directions: a
record's norm is all that noise is compared with, and few directions have more of it in each.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .feature_map import OfImages, kept, unit_rows
from .learnt import SHA256, joined, morlet, read_weights, restored

WEIGHTS = "colour.npz"
SIDE, PATCH, THRESHOLD = 32, 6, 0.5
"""Pixels of an image's side and of a patch's, and how much of a filter's answer counts for nothing."""
_CONTRAST = 10.0
"""Variance that is added to a patch's, for pixels from 0 to 255."""
_DIRECTIONS = 8
_AT_A_TIME = 32
_OPPONENT = np.array([[1 / 3, 1 / 3, 1 / 3], [0.5, -0.5, 0.0], [0.25, 0.25, -0.5]], np.float32)
_COLOURS, _PLANES = 3, 3
LEAST_SIDE = 8
DIRECTIONS = 384
"""Directions that the weights are whitened to, those of the largest variance first."""


def squared(images: NDArray[np.uint8], white: int = 255, side: int = SIDE) -> NDArray[np.float32]:
    """Return the middle square of each image, resized: shape (samples, side, side, 3), from 0 to 255.

    Parameters
    ----------
    images : ndarray of shape (samples, height, width) or (samples, height, width, 3)
    white : int
        Largest possible value of a pixel.
    """
    height, width = images.shape[1:3]
    least = min(height, width)
    top, left = (height - least) // 2, (width - least) // 2
    square = images[:, top : top + least, left : left + least]
    values = square.astype(np.float32) * np.float32(255 / white)
    values = values[..., None] if values.ndim == _PLANES else values
    if least != side:
        matrix = _resizing(least, side)
        values = np.einsum("ai,nijc->najc", matrix, values, optimize=True)
        values = np.einsum("bj,najc->nabc", matrix, values, optimize=True)
    return np.ascontiguousarray(np.broadcast_to(values, (*values.shape[:3], _COLOURS)))


@lru_cache
def _resizing(side: int, wanted: int) -> NDArray[np.float32]:
    """Linear interpolation along one side as a matrix of shape (wanted, side), means where images shrink."""
    scale = side / wanted
    places = (np.arange(wanted) - (wanted - 1) / 2) * scale + (side - 1) / 2
    places = np.clip(places, 0, side - 1)
    reach = max(scale, 1.0)
    weights = np.maximum(1 - np.abs(np.arange(side) - places[:, None]) / reach, 0)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def normal_patches(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return each patch of images less its mean, over its standard deviation: (samples x places, 108)."""
    windows = np.lib.stride_tricks.sliding_window_view(values, (PATCH, PATCH), axis=(1, 2))
    patches = windows.transpose(0, 1, 2, 4, 5, 3).reshape(-1, PATCH * PATCH * _COLOURS)
    patches = patches - patches.mean(axis=1, keepdims=True)
    spread = np.einsum("ij,ij->i", patches, patches)[:, None] / patches.shape[1]
    return np.asarray(patches / np.sqrt(spread + np.float32(_CONTRAST)), dtype=np.float32)


def mirrored_patches(patches: NDArray[Any]) -> NDArray[Any]:
    """Return patches, or filters of patches, as rows of 108 values, mirrored left to right."""
    return patches.reshape(-1, PATCH, PATCH, _COLOURS)[:, :, ::-1].reshape(patches.shape)


def patch_averages(
    values: NDArray[np.float32], centre: NDArray[np.float32], filters: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the averages of patches' answers over halves of an image's height: (samples, 2 x 2 x filters).

    ``filters`` has shape (108, filters); filter i + half is the mirror image of filter i.
    """
    places = SIDE - PATCH + 1
    answers = (normal_patches(values) - centre) @ filters
    answers = answers.reshape(len(values), places, places, -1)
    parts = [np.maximum(answers - THRESHOLD, 0), np.maximum(-answers - THRESHOLD, 0)]
    both = np.concatenate([_quarters(part) for part in parts], axis=1)
    return _mirror_sums(both, len(filters[0]), np.roll(np.arange(len(filters[0])), len(filters[0]) // 2))


def _quarters(maps: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return averages of maps over four quarters of the image: (samples, 1, 2, 2, maps)."""
    count, side, _, channels = maps.shape
    half = side // 2
    rows = np.stack([maps[:, :half].mean(axis=1), maps[:, side - half :].mean(axis=1)], axis=1)
    columns = [rows[:, :, :half].mean(axis=2), rows[:, :, side - half :].mean(axis=2)]
    return np.stack(columns, axis=2).reshape(count, 1, 2, 2, channels)


def _mirror_sums(quarters: NDArray[np.float32], channels: int, mirror: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the left averages plus the right ones of each channel's mirror: (samples, signs x 2 x channels)."""
    sums = quarters[..., 0, :] + quarters[..., 1, :][..., mirror]
    return sums.reshape(len(sums), -1, channels).reshape(len(sums), -1)


@lru_cache
def _wavelets(scale: int) -> NDArray[np.float32]:
    """Return real and imaginary parts of eight wavelets: shape (size x size, 16)."""
    half = 3 * scale
    angles = np.pi * np.arange(_DIRECTIONS) / _DIRECTIONS
    bank = np.stack([morlet(half, 0.8 * scale, angle, 0.75 * np.pi / scale) for angle in angles])
    return np.concatenate([bank.real, bank.imag]).reshape(2 * _DIRECTIONS, -1).T.astype(np.float32)


def _modulus(maps: NDArray[np.float32], scale: int) -> NDArray[np.float32]:
    """Return the strength of each wavelet on maps of (n, side, side, channels): (n, side, side, channels x 8)."""
    half = 3 * scale
    count, side, _, channels = maps.shape
    padded = np.pad(maps, ((0, 0), (half, half), (half, half), (0, 0)), mode="reflect")
    size = 2 * half + 1
    windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(1, 2))
    answers = windows.reshape(-1, size * size) @ _wavelets(scale)
    real, imaginary = answers[:, :_DIRECTIONS], answers[:, _DIRECTIONS:]
    return np.sqrt(real**2 + imaginary**2).reshape(count, side, side, channels * _DIRECTIONS)


def _halved(maps: NDArray[np.float32]) -> NDArray[np.float32]:
    count, side, _, channels = maps.shape
    return maps.reshape(count, side // 2, 2, side // 2, 2, channels).mean(axis=(2, 4), dtype=np.float32)


def scattering_averages(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return averages of the scattering of luminance and two opponent colours over halves of an image's height."""
    planes = np.asarray((values / np.float32(255)) @ _OPPONENT.T, dtype=np.float32)
    fine = _modulus(planes, 1)
    halves = _halved(planes)
    coarse, coarser, again = _modulus(halves, 1), _modulus(halves, 2), _modulus(_halved(fine), 1)
    parts = []
    for maps, depth in ((planes, 0), (fine, 1), (coarse, 1), (coarser, 1), (again, 2)):
        channels = maps.shape[-1]
        parts.append(_mirror_sums(_quarters(maps), channels, _mirrored_directions(channels, depth)))
    return np.concatenate(parts, axis=1)


@lru_cache
def _mirrored_directions(channels: int, depth: int) -> NDArray[np.int64]:
    """Return which channel each becomes when the image is mirrored: direction j becomes -j, modulo a half turn."""
    places = np.arange(channels).reshape(-1, *(_DIRECTIONS,) * depth)
    mirror = -np.arange(_DIRECTIONS) % _DIRECTIONS
    for axis in range(1, depth + 1):
        places = np.take(places, mirror, axis=axis)
    return places.ravel()


def rooted(averages: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return signed square roots."""
    return np.asarray(np.sign(averages) * np.sqrt(np.abs(averages)), dtype=np.float32)


def parts_of(values: NDArray[np.float32], weights: Mapping[str, NDArray[Any]]) -> list[NDArray[np.float32]]:
    """Return both parts of images of shape (samples, 32, 32, 3) before they are standardised."""
    filters = restored(weights["filters"], weights["filters_step"]).T
    filters = np.concatenate([filters, mirrored_patches(filters.T).T], axis=1)
    centre = weights["patch_centre"].astype(np.float32)
    parts: list[list[NDArray[np.float32]]] = [[], []]
    for start in range(0, len(values), _AT_A_TIME):
        some = values[start : start + _AT_A_TIME]
        parts[0].append(rooted(patch_averages(some, centre, filters)))
        parts[1].append(rooted(scattering_averages(some)))
    return [np.concatenate(part) for part in parts]


def standardised(
    parts: list[NDArray[np.float32]], centre: NDArray[np.float32], spread: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return both parts, standardised and each scaled to unit norm, side by side."""
    first = parts[0].shape[1]
    columns = (slice(0, first), slice(first, None))
    made = [unit_rows((part - centre[own]) / spread[own]) for part, own in zip(parts, columns, strict=True)]
    return np.concatenate(made, axis=1)


def colour_features(images: NDArray[np.uint8], white: int = 255, directions: int = DIRECTIONS) -> NDArray[np.float32]:
    """Return features of colour or grey images of one size, each row of norm 1 and of its own image alone.

    Of the 384 whitened directions the first ``directions`` are kept, before a row is scaled; a constant is the last of
    the ``directions`` + 1 values.
    """
    weights = read_weights(WEIGHTS)
    axes = restored(weights["axes"], weights["axes_step"])[:directions]
    out = [np.empty((0, len(axes) + 1), np.float32)]
    for start in range(0, len(images), _AT_A_TIME):
        values = squared(images[start : start + _AT_A_TIME], white)
        rows = standardised(parts_of(values, weights), weights["centre"], weights["spread"])
        out.append(joined([(rows - weights["mean"]) @ axes.T]))
    return np.concatenate(out)


class Colour(OfImages):
    """Scattering and patch filters of colour images (:func:`colour_features`), in ``directions`` directions.

    Row i depends on image i alone and on weights that were made from no data; its L2 norm is 1.
    """

    norm_bound = 1.0
    least_side = LEAST_SIDE
    centring = "private"
    reads_colour = True
    any_size = True
    short_steps = True

    def __init__(self, directions: int = DIRECTIONS) -> None:
        whole = directions == DIRECTIONS
        self.name = "colour" if whole else f"colour-{directions}"
        what = "patch filters and scattering of colour or grey images from 8 x 8, whitened by made-up ones"
        self.sentence = f"{what if whole else 'the first of colour, for more noise'}: {directions + 1} values"
        self._directions = directions

    def __call__(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        def make(images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
            return colour_features(images, white, self._directions)

        return kept([self.name, SHA256[WEIGHTS]], images, white, make)


COLOURS = (Colour(), Colour(96), Colour(24))
_MOST_STRENGTH = {24: 60.0, 96: 180.0}


def usual_colours(samples: int, num_classes: int, mu: float) -> str:
    """Return the features of colour images that learn most under noise.

    Parameters
    ----------
    samples : int
        Number of images of all clients together.
    mu : float
        Gaussian differential privacy of their sum, whoever adds its noise.

    Notes
    -----
    The constants were chosen on 1,000 photographs of CIFAR-10 that are in no table. All arguments are public.

    Examples
    --------
    >>> usual_colours(1_600, 10, 0.72), usual_colours(1_600, 10, 0.14), usual_colours(50_000, 10, 0.72)
    ('colour-96', 'colour-24', 'colour')
    """
    strength = samples * mu / num_classes
    return next((f"colour-{few}" for few, most in _MOST_STRENGTH.items() if strength < most), "colour")
