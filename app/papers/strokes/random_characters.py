"""Random characters: a class is a drawing of one to three strokes, an image of it the drawing by an unsteady hand.

No photograph, digit or letter is used. Only public knowledge of how images were prepared is: 28 x 28 pixels, the
writing within 20 x 20, its centre of mass in the middle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....privacy.noise import derived_seed

SIDE = 28
"""Pixels of an image's side."""

_BOX = 19.0  # side of the square for the pen's middle; with its width, 20 pixels
_MOST_STROKES = 3
_STROKES = (0.5, 0.35, 0.15)  # probabilities of one, two and three
_POINTS = 5  # of a stroke
_STEPS = 8  # dots of ink between two points
_SHARPNESS = 1.5  # of the soft minimum that stands for the distance to the nearest dot
_EDGE = 0.7  # pixels over which ink fades
_FAR = 1e3


def keyed(*parts: object) -> np.random.Generator:
    """Return a generator determined by printable parts."""
    return np.random.Generator(np.random.Philox(key=derived_seed("strokes", *parts)))


@dataclass(frozen=True)
class Alphabet:
    """The strokes of random characters."""

    points: NDArray[np.float64]  # of each stroke
    strokes: NDArray[np.int64]  # number of strokes of each character

    def __len__(self) -> int:
        return len(self.strokes)

    @classmethod
    def random(cls, classes: int, generator: np.random.Generator) -> Alphabet:
        """Characters whose strokes are walks that mostly keep turning one way: lines, hooks, arcs and loops."""
        strokes = 1 + generator.choice(_MOST_STROKES, size=classes, p=_STROKES)
        shape = (classes, _MOST_STROKES)
        start = generator.uniform(-0.8, 0.8, (*shape, 1, 2))
        heading = generator.uniform(0, 2 * np.pi, (*shape, 1))
        turn = 0.9 * generator.standard_normal((*shape, 1)) + 0.5 * generator.standard_normal((*shape, _POINTS - 1))
        step = generator.uniform(0.25, 0.8, (*shape, 1, 1))
        angles = heading + np.cumsum(turn, axis=-1)
        walk = np.cumsum(step * np.stack([np.cos(angles), np.sin(angles)], axis=-1), axis=-2)
        return cls(np.concatenate([start, start + walk], axis=-2), strokes)


def drawn(
    alphabet: Alphabet, classes: NDArray[np.int64], generator: np.random.Generator, dtype: type = np.float32
) -> NDArray[np.floating]:
    """Images of characters, each by another unsteady hand.

    Parameters
    ----------
    classes : ndarray of shape (images,), int64
        Which characters.
    generator : Generator
        The hand.
    dtype : type
        Of the arithmetic.

    Returns
    -------
    ndarray of shape (images, 28, 28)
        From 0, paper, to 1, ink.
    """
    points = alphabet.points[classes]
    points = points + 0.085 * generator.standard_normal(points.shape)
    inked = np.arange(_MOST_STROKES) < alphabet.strokes[classes][:, None]
    dots = _splines(points)
    inked = np.repeat(inked, dots.shape[2], axis=1)
    dots = _warped(_slanted(dots.reshape(len(classes), -1, 2), generator), generator)
    width = generator.uniform(0.55, 1.4, (len(classes), 1))  # half of the pen's, in pixels
    placed = _placed(dots, inked, width, generator)
    return _inked(placed.astype(dtype), width.astype(dtype))


def _splines(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Dots along the Catmull-Rom curves through points, of shape (..., points, 2)."""
    before, after = 2 * points[..., :1, :] - points[..., 1:2, :], 2 * points[..., -1:, :] - points[..., -2:-1, :]
    all_points = np.concatenate([before, points, after], axis=-2)
    along = np.arange(_STEPS) / _STEPS
    powers = np.stack([np.ones_like(along), along, along**2, along**3])
    basis = 0.5 * np.array([[0, 2, 0, 0], [-1, 0, 1, 0], [2, -5, 4, -1], [-1, 3, -3, 1]])
    weights = powers.T @ basis  # (steps, four neighbours)
    pieces = np.stack([all_points[..., i : i + _POINTS - 1, :] for i in range(4)], axis=-2)
    curve = np.einsum("tj,...pjc->...ptc", weights, pieces)
    return curve.reshape(*curve.shape[:-3], -1, 2)


def _slanted(dots: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    """Dots turned, sheared and stretched, each image differently."""
    turn, shear, stretch = generator.standard_normal((3, len(dots))) * np.array([[0.16], [0.22], [0.16]])
    cos, sin, stretch = np.cos(turn), np.sin(turn), np.exp(stretch)
    rows = np.array([[cos * stretch, shear * cos - sin], [sin * stretch, cos + shear * sin]])
    return np.einsum("jib,bni->bnj", rows, dots)


def _warped(dots: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    """Dots moved along one slow wave for each coordinate."""
    images = len(dots)
    waves = 1.35 * generator.standard_normal((images, 2, 2))
    phases = generator.uniform(0, 2 * np.pi, (images, 1, 2))
    heights = 0.1 * generator.standard_normal((images, 1, 2))
    return dots + heights * np.sin(dots @ waves + phases)


def _placed(
    dots: NDArray[np.float64], inked: NDArray[np.bool_], width: NDArray[np.float64], generator: np.random.Generator
) -> NDArray[np.float64]:
    """Dots in pixels: as large as the box allows, centre of mass near the image's; dots without ink are far away."""
    mask = inked[..., None]
    low, high = np.where(mask, dots, _FAR).min(1, keepdims=True), np.where(mask, dots, -_FAR).max(1, keepdims=True)
    extent = np.maximum((high - low).max(-1, keepdims=True), 0.05)
    dots = (dots - (low + high) / 2) / extent * (_BOX - 2 * width[..., None])
    centre = (dots * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True)
    shift = (SIDE - 1) / 2 + 0.4 * generator.standard_normal((len(dots), 1, 2))
    return np.where(mask, dots - centre + shift, _FAR)


def _inked(dots: NDArray[np.floating], width: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return the ink of each pixel, from a pen of some width along dots.

    The distance to the nearest dot is a soft minimum over all dots. Its exponentials factor into rows and columns: two
    small matrices an image, and one product.
    """
    pixels = np.arange(SIDE, dtype=dots.dtype)
    near = np.exp(-_SHARPNESS * (pixels[None, :, None, None] - dots[:, None]) ** 2)  # (images, pixels, dots, 2)
    columns, rows = np.ascontiguousarray(near[..., 0]), np.ascontiguousarray(near[..., 1])
    closeness = rows @ columns.transpose(0, 2, 1)
    squared = -np.log(np.maximum(closeness, 1e-30)) / _SHARPNESS + 0.35
    distance = np.sqrt(np.maximum(squared, 0))
    return np.clip((width[..., None] - distance) / _EDGE + 0.5, 0, 1).astype(dots.dtype)
