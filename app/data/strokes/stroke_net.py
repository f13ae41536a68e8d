"""The net that learns to tell random characters apart, in PyTorch: three convolutions, one dense layer, one of classes.

Its arrays are functions' arguments: no generator of PyTorch's is drawn from, so a seed alone settles where it starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .random_characters import SIDE

if TYPE_CHECKING:
    import torch

_MOMENTUM = 0.1  # of the running means of batch normalisation
_EPSILON = 1e-5


@dataclass
class StrokeNet:
    """Convolutions of 3 x 3, each normalised and cut at zero, the first two pooled by 2 x 2; a dense layer likewise.

    Parameters
    ----------
    channels : tuple of int
        Of the convolutions.
    width : int
        Of the dense layer: how many features the net gives.
    classes : int
    dtype : torch.dtype
    """

    channels: tuple[int, ...]
    width: int
    classes: int
    dtype: torch.dtype
    weights: list[torch.Tensor] = field(default_factory=list)
    """Of each layer, the last one's with a bias beside it."""
    gains: list[torch.Tensor] = field(default_factory=list)
    shifts: list[torch.Tensor] = field(default_factory=list)
    means: list[torch.Tensor] = field(default_factory=list)
    """Running, of what each normalised layer gets; only after training are they used."""
    variances: list[torch.Tensor] = field(default_factory=list)

    def start(self, generator: np.random.Generator) -> StrokeNet:
        """Weights drawn uniformly, as wide as one over the square root of what a unit adds up."""
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
        """What descent moves."""
        return [*self.weights, *self.gains, *self.shifts]

    def __call__(self, images: torch.Tensor, training: bool) -> torch.Tensor:
        """A score for each class, of images of shape (images, 1, 28, 28)."""
        import torch
        from torch.nn import functional

        values = images
        for layer in range(len(self.channels)):
            values = functional.conv2d(values, self.weights[layer], padding=1)
            # One channel lies the same either way, and the first convolution answers in the slower one.
            values = values.contiguous(memory_format=torch.channels_last)
            values = functional.relu(self._normalised(values, layer, training), inplace=True)
            if layer < 2:
                values = functional.max_pool2d(values, 2)
        dense = len(self.channels)
        values = values.permute(0, 2, 3, 1).flatten(1)  # as they lie in memory: pixel by pixel
        values = functional.linear(values, self.weights[dense])
        values = functional.relu(self._normalised(values, dense, training))
        return functional.linear(values, self.weights[-1], self.shifts[-1])

    def _normalised(self, values: torch.Tensor, layer: int, training: bool) -> torch.Tensor:
        from torch.nn import functional

        running, gain = (self.means[layer], self.variances[layer]), (self.gains[layer], self.shifts[layer])
        return functional.batch_norm(values, *running, *gain, training, _MOMENTUM, _EPSILON)

    def frozen(self) -> list[NDArray[np.float64]]:
        """The layers without that of the classes: weights and bias of each, with its normalisation worked in.

        Notes
        -----
        Normalisation by running means is a fixed scale and shift, so every row of what comes out depends on its own
        image alone.
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
