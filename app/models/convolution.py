"""Per-sample gradients of the small convolutional network in closed form, each sample with parameters of its own.

In online federated learning every machine has its own iterate. Samples then share no weights, and a batched convolution
becomes a grouped one, for which libraries have no fast path: ``torch.func.vmap`` takes 2 to 3 times as long as this
file, which takes one sample after the other and keeps intermediate values in the processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

Values = NDArray[np.float32]

_KERNEL = 3
_POOL = 2
_SLOTS = [(i, j) for i in range(_POOL) for j in range(_POOL)]


class PooledConvolution:
    """A 3 x 3 convolution of one image, then 2 x 2 max-pooling and ReLU; keeps what its gradient needs.

    Position (i, j) of the convolution is at i x side + j, as in the image. The values between the rows are computed and
    never used: that costs a few products, and memory is read in long runs instead of many short ones.

    Parameters
    ----------
    channels : int
        Channels of the image.
    side : int
        Its height and width; an odd last row or column of the convolution is dropped, as pooling does.
    filters : int
    """

    def __init__(self, channels: int, side: int, filters: int) -> None:
        self.pooled = (side - _KERNEL + 1) // _POOL
        width = _POOL * self.pooled
        self._side, self._length = side, (width - 1) * side + width
        self._image = np.empty((channels, side * side), np.float32)
        channel, value = self._image.strides
        self._moved = as_strided(
            self._image, (channels, _KERNEL, _KERNEL, self._length), (channel, side * value, value, value)
        )
        self._patches = np.empty(self._moved.shape, np.float32)
        self._matrix = self._patches.reshape(channels * _KERNEL**2, self._length)
        self._flat = np.empty((filters, self._length), np.float32)
        self._spread = np.zeros_like(self._flat)
        self._windows, self._targets = self._in_windows(self._flat), self._in_windows(self._spread)
        self._largest = np.empty((filters, self.pooled, self.pooled), np.float32)

    def _in_windows(self, values: Values) -> list[Values]:
        """The four values behind each pooled one, every one of shape (filters, pooled, pooled); views."""
        channel, value = values.strides
        shape = (len(values), self.pooled, self.pooled)
        strides = (channel, _POOL * self._side * value, _POOL * value)
        return [as_strided(values[:, i * self._side + j :], shape, strides) for i, j in _SLOTS]

    def forward(self, image: Values, weight: Values, bias: Values) -> Values:
        """Shape (filters, pooled, pooled), from an image of shape (channels, side, side) and contiguous weights."""
        self._image[:] = image.reshape(self._image.shape)
        np.copyto(self._patches, self._moved)
        np.matmul(weight.reshape(len(weight), -1), self._matrix, out=self._flat)
        first, second, third, fourth = self._windows
        self._largest = np.maximum(np.maximum(first, second), np.maximum(third, fourth))
        return np.maximum(self._largest + bias[:, None, None], 0.0)

    def backward(self, slopes: Values, output: Values, to_weight: Values, to_bias: Values) -> None:
        """From the loss's derivative by the output: writes those by weight and bias."""
        slopes = np.where(output > 0.0, slopes, 0.0)
        to_bias[:] = slopes.sum(axis=(1, 2))
        untaken = np.ones(slopes.shape, bool)
        for target, values in zip(self._targets, self._windows, strict=True):
            chosen = (values == self._largest) & untaken
            np.multiply(slopes, chosen, out=target)
            untaken ^= chosen
        np.matmul(self._spread, self._matrix.T, out=to_weight.reshape(len(to_weight), -1))

    def to_image(self, weight: Values) -> Values:
        """The loss's derivative by the image, shape (channels, side, side), after :meth:`backward`."""
        moved = (weight.reshape(len(weight), -1).T @ self._spread).reshape(self._patches.shape)
        total = np.zeros_like(self._image)
        for i in range(_KERNEL):
            for j in range(_KERNEL):
                start = i * self._side + j
                total[:, start : start + self._length] += moved[:, i, j]
        return total.reshape(-1, self._side, self._side)


class ConvolutionalGradients:
    """Gradients of the cross-entropy of two pooled convolutions and three dense layers, ReLU between all.

    Parameters
    ----------
    shapes : sequence of tuple of int
        Weight and bias of each of the five layers, as a PyTorch module has them.
    side : int
        Height and width of the grey images.

    Notes
    -----
    In float32. Where several values of a pooling window are largest, the first one's derivative is taken, as PyTorch
    does. Its work space is its own: not for two threads at once.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], side: int) -> None:
        self._shapes = list(shapes)
        self._ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
        self._first = PooledConvolution(1, side, shapes[0][0])
        self._second = PooledConvolution(shapes[0][0], self._first.pooled, shapes[2][0])
        self._image = (1, side, side)

    def __call__(self, point: Values, features: Values, label: int, out: NDArray[np.floating]) -> None:
        """Write the gradient of one sample at ``point``, shape (d,), to ``out``, shape (d,)."""
        gradient = np.empty(len(point), np.float32)
        parameters, slots = self._arrays(point), self._arrays(gradient)
        dense = range(4, len(parameters), 2)
        image = np.ascontiguousarray(features, np.float32).reshape(self._image)
        first = self._first.forward(image, parameters[0], parameters[1])
        second = self._second.forward(first, parameters[2], parameters[3])
        inputs: list[Values] = [second.reshape(-1)]
        for i in dense:
            values = parameters[i] @ inputs[-1] + parameters[i + 1]
            inputs.append(np.maximum(values, 0.0) if i + 2 < len(parameters) else values)
        slopes = np.exp(inputs[-1] - inputs[-1].max())
        slopes /= slopes.sum()
        slopes[label] -= 1.0
        for i, values in zip(reversed(dense), reversed(inputs[:-1]), strict=True):
            np.multiply(slopes[:, None], values, out=slots[i])
            slots[i + 1][:] = slopes
            slopes = slopes @ parameters[i]
            if i > 4:
                slopes = np.where(values > 0.0, slopes, 0.0)
        self._second.backward(slopes.reshape(second.shape), second, slots[2], slots[3])
        self._first.backward(self._second.to_image(parameters[2]), first, slots[0], slots[1])
        out[:] = gradient

    def _arrays(self, values: Any) -> list[Any]:
        starts = [0, *self._ends[:-1]]
        return [
            values[start:end].reshape(shape) for start, end, shape in zip(starts, self._ends, self._shapes, strict=True)
        ]
