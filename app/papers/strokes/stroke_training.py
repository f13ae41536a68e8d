"""Train nets on random characters, and whiten scattering coefficients by them.

A net in PyTorch, of three convolutions, a dense layer and one of classes, learns to tell random characters apart in a
fixed number of steps, each on newly drawn images. No generator of PyTorch is used: a seed alone determines the start.

Scattering coefficients are whitened by their covariance over random characters. The 81 x 49 coefficients are first
projected onto the main directions of the maps and then of the places, and the covariance of the rest is decomposed: a
smaller file that loses next to nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...data.features.feature_map import unit_rows
from ...data.features.learnt import ROUGHNESS, balanced, frozen_net, projected, quantised, restored, scattering
from .random_characters import SIDE, Alphabet, drawn, keyed

if TYPE_CHECKING:
    import torch

_MOMENTUM = 0.1  # of batch normalisation's running means
_EPSILON = 1e-5


@dataclass
class StrokeNet:
    """Convolutions of 3 x 3, each normalised and cut at zero, the first two pooled by 2 x 2; a dense layer likewise."""

    channels: tuple[int, ...]  # of the convolutions
    width: int  # of the dense layer: the net's features
    classes: int
    dtype: torch.dtype
    weights: list[torch.Tensor] = field(default_factory=list)
    gains: list[torch.Tensor] = field(default_factory=list)
    shifts: list[torch.Tensor] = field(default_factory=list)
    # Running, of each normalised layer's input; used after training only
    means: list[torch.Tensor] = field(default_factory=list)
    variances: list[torch.Tensor] = field(default_factory=list)

    def start(self, generator: np.random.Generator) -> StrokeNet:
        """Draw weights uniformly, within one over the square root of a unit's inputs."""
        import torch

        before = (1, *self.channels[:-1])
        flat = self.channels[-1] * (SIDE // 4) ** 2
        shapes = [(out, into, 3, 3) for out, into in zip(self.channels, before, strict=True)]
        for shape in [*shapes, (self.width, flat), (self.classes, self.width)]:
            bound = 1 / math.sqrt(math.prod(shape[1:]))
            tensor = torch.tensor(generator.uniform(-bound, bound, shape), dtype=self.dtype)
            self.weights.append(tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor)
        for units in (*self.channels, self.width):
            self.gains.append(torch.ones(units, dtype=self.dtype))
            self.shifts.append(torch.zeros(units, dtype=self.dtype))
            self.means.append(torch.zeros(units, dtype=self.dtype))
            self.variances.append(torch.ones(units, dtype=self.dtype))
        self.shifts.append(torch.zeros(self.classes, dtype=self.dtype))
        for tensor in self.learnt():
            tensor.requires_grad_(True)
        return self

    def learnt(self) -> list[torch.Tensor]:
        """Return the trained arrays."""
        return [*self.weights, *self.gains, *self.shifts]

    def __call__(self, images: torch.Tensor, training: bool) -> torch.Tensor:
        """Return a score for each class, for images of shape (images, 1, 28, 28)."""
        import torch
        from torch.nn import functional

        values = images
        for layer in range(len(self.channels)):
            values = functional.conv2d(values, self.weights[layer], padding=1)
            # The first convolution, of one channel, returns the slower memory format.
            values = values.contiguous(memory_format=torch.channels_last)
            values = functional.relu(self._normalised(values, layer, training), inplace=True)
            if layer < 2:
                values = functional.max_pool2d(values, 2)
        dense = len(self.channels)
        values = values.permute(0, 2, 3, 1).flatten(1)  # pixel by pixel, as in memory
        values = functional.linear(values, self.weights[dense])
        values = functional.relu(self._normalised(values, dense, training))
        return functional.linear(values, self.weights[-1], self.shifts[-1])

    def _normalised(self, values: torch.Tensor, layer: int, training: bool) -> torch.Tensor:
        from torch.nn import functional

        running, gain = (self.means[layer], self.variances[layer]), (self.gains[layer], self.shifts[layer])
        return functional.batch_norm(values, *running, *gain, training, _MOMENTUM, _EPSILON)

    def frozen(self) -> list[NDArray[np.float64]]:
        """Weights and bias of all layers but the classes', with normalisation folded in.

        Normalisation by running means is a fixed scale and shift, so every output row depends on its own image alone.
        """
        arrays = []
        for layer in range(len(self.gains)):
            weight, gain, shift, mean, variance = (
                part[layer].detach().double().contiguous().numpy()
                for part in (self.weights, self.gains, self.shifts, self.means, self.variances)
            )
            scale = gain / np.sqrt(variance + _EPSILON)
            arrays += [weight * scale.reshape(-1, *(1,) * (weight.ndim - 1)), shift - mean * scale]
        return arrays


logger = logging.getLogger(__name__)

_WARM_UP = 100
_LAST_RATE = 0.02
_DECAY = 1e-3
_SMOOTHING = 0.05
_SAID_EVERY = 500


@dataclass(frozen=True)
class PretrainConfig:
    """Everything that determines a net's weights."""

    seed: int  # of alphabet, images and first weights
    classes: int = 3000
    steps: int = 15000
    batch: int = 128
    rate: float = 2e-3  # of the first steps; it falls linearly
    channels: tuple[int, ...] = (16, 32, 64)
    width: int = 256  # features of the net
    exact: bool = False  # float64 throughout; else products in bfloat16, faster but different between computers


def pretrain(lesson: PretrainConfig) -> list[NDArray[np.float64]]:
    """Train a net; return its frozen layers (:meth:`StrokeNet.frozen`)."""
    import torch

    torch.set_num_threads(1)
    dtype = torch.float64 if lesson.exact else torch.float32
    alphabet = Alphabet.random(lesson.classes, keyed("alphabet", lesson.seed))
    net = StrokeNet(lesson.channels, lesson.width, lesson.classes, dtype).start(keyed("weights", lesson.seed))
    optimizer = torch.optim.AdamW(net.learnt(), lesson.rate, weight_decay=_DECAY, fused=True)
    hand, right = keyed("images", lesson.seed), 0.0
    for step in range(lesson.steps):
        optimizer.param_groups[0]["lr"] = lesson.rate * _share(step, lesson.steps)
        classes = hand.integers(lesson.classes, size=lesson.batch)
        images = drawn(alphabet, classes, hand, np.float64 if lesson.exact else np.float32)
        labels = torch.from_numpy(classes)
        pixels = torch.from_numpy(images)[:, None].contiguous(memory_format=torch.channels_last)
        with nullcontext() if lesson.exact else torch.autocast("cpu", torch.bfloat16):
            scores = net(pixels, training=True)
        loss = torch.nn.functional.cross_entropy(scores.to(dtype), labels, label_smoothing=_SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right += float((scores.argmax(1) == labels).double().mean())
        if (step + 1) % _SAID_EVERY == 0:
            logger.info("step %d of %d: %.1f %% right", step + 1, lesson.steps, 100 * right / _SAID_EVERY)
            right = 0.0
    return net.frozen()


def _share(step: int, steps: int) -> float:
    """Return the learning rate's factor in a step."""
    return min(1, (step + 1) / _WARM_UP) * max(_LAST_RATE, 1 - step / steps)


CLASSES, IMAGES = 4000, 12000
MAP_DIRECTIONS, PLACE_DIRECTIONS, KEPT = 32, 24, 512
_AT_A_TIME = 500


def whitening(
    images: int = IMAGES, directions: tuple[int, int] = (MAP_DIRECTIONS, PLACE_DIRECTIONS), kept: int = KEPT
) -> dict[str, NDArray[np.float64]]:
    """Arrays for :func:`~murmurfl.app.data.features.learnt.whitened_scattering`, in float64.

    Parameters
    ----------
    images : int
        Random characters whose covariance is taken.
    directions : tuple of int
        Of the maps and of the places.
    kept : int
        Features, those with the largest variance.
    """
    hand = keyed("whitening")
    alphabet, parts = Alphabet.random(CLASSES, hand), []
    for _ in range(0, images, _AT_A_TIME):
        classes = hand.integers(CLASSES, size=min(_AT_A_TIME, images))
        parts.append(scattering(drawn(alphabet, classes, hand, np.float64)))
    coefficients = np.concatenate(parts)
    size = np.sqrt((coefficients**2).mean(axis=(0, 2, 3)))
    gains = 1 / (size + ROUGHNESS * size.max())
    rows = balanced(coefficients, gains)
    centred = rows - rows.mean(axis=0)
    maps = _main(np.einsum("ncp,ndp->cd", centred, centred, optimize=True), directions[0])[1]
    places = _main(np.einsum("ncp,ncq->pq", centred, centred, optimize=True), directions[1])[1]
    inner = projected(rows, maps, places)
    centre = inner.mean(axis=0)
    variances, axes = _main((inner - centre).T @ (inner - centre) / len(inner), kept)
    projections = {"gains": gains, "maps": maps, "places": places}
    return {**projections, "axes": axes.T, "variances": variances, "centre": centre @ axes}


def _main(covariance: NDArray[np.float64], count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the largest eigenvalues and their eigenvectors as columns, each with a positive largest entry."""
    values, vectors = np.linalg.eigh(covariance)
    values, vectors = values[::-1][:count], vectors[:, ::-1][:, :count]
    largest = vectors[np.abs(vectors).argmax(axis=0), np.arange(count)]
    return values, vectors * np.sign(largest)


_CENTRED_ON = (4000, 12000)
"""Classes and images for a net's mean, from an alphabet that no net has learnt."""


def net_arrays(layers: Sequence[NDArray[np.float64]]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a frozen net's file: weights in eight bits, and its mean over random characters."""
    arrays: dict[str, NDArray[Any]] = {}
    for layer, (weight, bias) in enumerate(zip(layers[::2], layers[1::2], strict=True)):
        arrays[f"weight{layer}"], arrays[f"step{layer}"] = quantised(weight)
        arrays[f"bias{layer}"] = bias.astype(np.float32)
    count = len(layers) // 2
    weights = [restored(arrays[f"weight{layer}"], arrays[f"step{layer}"]) for layer in range(count)]
    answers = frozen_net(_characters(), weights, [arrays[f"bias{layer}"] for layer in range(count)])
    arrays["centre"] = unit_rows(answers).mean(axis=0, dtype=np.float64).astype(np.float32)
    return arrays


def whitening_arrays() -> dict[str, NDArray[Any]]:
    """Return the arrays of the whitening's file: its large matrix in eight bits."""
    found = whitening()
    axes, step = quantised(found.pop("axes"))
    small = {name: values.astype(np.float32) for name, values in found.items()}
    return {**small, "axes": axes, "axes_step": step}


def packed(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the bytes of a weights file."""
    file = BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _characters() -> NDArray[np.float32]:
    classes, images = _CENTRED_ON
    hand = keyed("centre")
    alphabet = Alphabet.random(classes, hand)
    parts = [drawn(alphabet, hand.integers(classes, size=500), hand) for _ in range(0, images, 500)]
    return np.concatenate(parts).astype(np.float32)
