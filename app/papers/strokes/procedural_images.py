"""Procedural images: ellipses and rectangles that cover each other, in random colours, with stripes and shades.

"Dead leaves" (Lee, Mumford and Huang 2001) have much of the statistics of photographs: edges, occlusion and sizes that
follow a power law. No photograph is used, here or for the constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...data.features.colour import (
    SIDE,
    mirrored_patches,
    normal_patches,
    parts_of,
    standardised,
)
from ...data.features.feature_map import unit_rows
from ...data.features.learnt import quantised
from .random_characters import keyed

_SHAPES, _SMALLEST, _LARGEST, _POWER = 35, 1.5, 24.0, 1.5
_BLOCK = 250


def procedural_images(count: int, generator: np.random.Generator) -> NDArray[np.uint8]:
    """Return made-up images of shape (count, 32, 32, 3)."""
    blocks = [_leaves(min(_BLOCK, count - start), generator) for start in range(0, count, _BLOCK)]
    return np.concatenate(blocks)


def _leaves(count: int, generator: np.random.Generator) -> NDArray[np.uint8]:
    rows, columns = np.mgrid[:SIDE, :SIDE].astype(np.float32)
    images = np.zeros((count, SIDE, SIDE, 3), np.float32)
    grey = generator.uniform(0.1, 0.9, (count, 1))
    usual = np.clip(grey + generator.normal(0.0, 0.12, (count, 3)), 0, 1)
    spread = generator.uniform(0.05, 0.5, (count, 1))
    for shape in range(_SHAPES + 1):
        colour = usual + spread * (
            0.8 * generator.standard_normal((count, 1)) + 0.3 * generator.standard_normal((count, 3))
        )
        tail = generator.uniform(0, 1, count) * (1 - (_SMALLEST / _LARGEST) ** _POWER)
        radius = _SMALLEST * (1 - tail) ** (-1 / _POWER)
        if not shape:
            radius[:] = 1e3  # the background
        middle = generator.uniform(-4, SIDE + 4, (2, count))
        turn, flatness = generator.uniform(0, np.pi, count), generator.uniform(0.4, 1, count)
        right, down = (grid - at[:, None, None] for grid, at in zip((columns, rows), middle, strict=True))
        cosine, sine = (part[:, None, None] for part in (np.cos(turn), np.sin(turn)))
        along = (right * cosine + down * sine) / radius[:, None, None]
        across = (down * cosine - right * sine) / (radius * flatness)[:, None, None]
        box = (generator.uniform(size=count) < 0.35)[:, None, None]
        distance = np.where(box, np.maximum(np.abs(along), np.abs(across)), np.hypot(along, across))
        cover = np.clip((1 - distance) * radius[:, None, None] + 0.5, 0, 1)[..., None].astype(np.float32)
        shade = _shade(right, down, generator)[..., None]
        shaded = (np.clip(colour, 0, 1)[:, None, None] + shade).astype(np.float32)
        images = np.asarray(images * (1 - cover) + cover * shaded, dtype=np.float32)
    images = _blurred(images, generator.uniform(0, 0.315, (count, 1, 1, 1)).astype(np.float32))
    images += generator.standard_normal(images.shape) * generator.uniform(0, 0.03, (count, 1, 1, 1))
    return np.rint(np.clip(255 * images, 0, 255)).astype(np.uint8)


def _shade(
    right: NDArray[np.float32], down: NDArray[np.float32], generator: np.random.Generator
) -> NDArray[np.floating]:
    """Return stripes and a slope of brightness in one shape of each image."""
    count = len(right)
    frequency, phase = generator.uniform(0.2, 1.6, count), generator.uniform(0, 2 * np.pi, count)
    strength, turn = generator.choice([0, 0, 0.05, 0.12, 0.2], count), generator.uniform(0, np.pi, count)
    frequency, phase, strength, turn = (one[:, None, None] for one in (frequency, phase, strength, turn))
    stripes = strength * np.sin(frequency * (right * np.cos(turn) + down * np.sin(turn)) + phase)
    slopes = generator.normal(0, 0.012, (2, count))[..., None, None]
    return stripes + np.clip(slopes[0] * right + slopes[1] * down, -0.4, 0.4)


def _blurred(images: NDArray[np.float32], amount: NDArray[np.float32]) -> NDArray[np.float32]:
    for axis in (1, 2):
        padded = np.pad(images, [(1, 1) if axis == one else (0, 0) for one in range(4)], mode="edge")
        before, at, after = (np.take(padded, np.arange(SIDE) + shift, axis=axis) for shift in range(3))
        images = np.asarray((1 - 2 * amount) * at + amount * (before + after), dtype=np.float32)
    return images


_IMAGES, _PATCHES, _PAIRS, _DIRECTIONS = 6000, 200_000, 200, 384
_ROUGHNESS, _POWER_OF_WHITENING, _FLOOR, _LEAST_SPREAD = 0.1, 0.7, 0.01, 1e-3


def colour_arrays(count: int = _IMAGES) -> dict[str, NDArray[Any]]:
    """Return the weights of the features ``colour``, from procedural images alone."""
    images = procedural_images(count, keyed("procedural images")).astype(np.float32)
    arrays = _filters(images, keyed("patches"))
    parts = parts_of(images, arrays)
    whole = np.concatenate(parts, axis=1)
    spread = np.concatenate([part.std(axis=0) + _LEAST_SPREAD * part.std() for part in parts])
    arrays |= {"centre": whole.mean(axis=0), "spread": spread.astype(np.float32)}
    rows = standardised(parts, arrays["centre"], arrays["spread"])
    mean = rows.mean(axis=0)
    variances, directions = np.linalg.eigh(np.cov((rows - mean).astype(np.float64).T))
    variances, directions = variances[::-1][:_DIRECTIONS], directions[:, ::-1][:, :_DIRECTIONS]
    axes = directions / (variances + _FLOOR * variances[0]) ** (_POWER_OF_WHITENING / 2)
    whole_axes, step = quantised(axes.T)
    return {**arrays, "mean": mean, "axes": whole_axes, "axes_step": step}


def _filters(images: NDArray[np.float32], generator: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Return filters, whitened patches of images, one of each pair of mirror images."""
    each = _PATCHES // len(images)
    found = []
    for start in range(0, len(images), _BLOCK):
        patches = normal_patches(images[start : start + _BLOCK])
        found.append(patches[generator.choice(len(patches), each * len(images[start : start + _BLOCK]), replace=False)])
    patches = np.concatenate(found)
    both = np.concatenate([patches, mirrored_patches(patches)])
    centre = both.mean(axis=0)
    variances, axes = np.linalg.eigh(np.cov((both - centre).astype(np.float64).T))
    whitening = (axes / np.sqrt(variances + _ROUGHNESS)) @ axes.T
    whitened = (patches - centre) @ whitening
    lengths = np.linalg.norm(whitened, axis=1)
    marked = whitened[lengths > np.median(lengths) / 2]  # not of flat ground
    chosen = unit_rows(marked[generator.choice(len(marked), _PAIRS, replace=False)])
    filters, step = quantised(chosen @ whitening)
    return {"patch_centre": centre.astype(np.float32), "filters": filters, "filters_step": step}
