"""A small convolutional network for images, and augmentations of an image whose gradients are averaged.

Both are public and fixed: the network follows from the size of the images and the number of classes, and the k-th
augmentation from k. Averages are taken before a gradient is clipped, so the bound of a sample's row does not change
(docs/proofs/sensitivities.md, step 2l).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from ...privacy.errors import ConfigurationError

if TYPE_CHECKING:
    import torch


class ImageShape(NamedTuple):
    """Channels and side of square images, whose rows have a pixel's channels next to each other."""

    channels: int
    side: int

    @classmethod
    def of(cls, num_features: int, *, least: int = 1, setting: str = "model") -> ImageShape:
        """Return the shape of grey or colour images with so many values.

        Raises
        ------
        ConfigurationError
            If no square image of at least ``least`` pixels a side has so many values.
        """
        for channels in (1, 3):
            side = math.isqrt(num_features // channels)
            if channels * side * side == num_features and side >= least:
                return cls(channels, side)
        raise ConfigurationError(
            f"Expected pixels of square images, grey or in colour, of at least {least} x {least}, got {num_features} "
            "values a sample. Set features = 'pixels' and a task with such images.",
            kind="conflict",
            setting=setting,
            got=num_features,
        )


_SHIFTS = (
    *((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0), (1, 1), (-1, -1), (1, -1), (-1, 1)),
    *((0, 2), (2, 0), (0, -2), (-2, 0), (2, 2), (-2, -2), (2, -2), (-2, 2)),
)
"""Shifts of rows and columns in pixels: the image itself, then the nearest ones."""


def augmented(rows: torch.Tensor, number: int) -> torch.Tensor:
    """Return the first augmentations of each image, one image after the other, shape (samples x number, values).

    Parameters
    ----------
    rows : Tensor of shape (samples, values)
        Square images, as :class:`ImageShape` describes them.
    number : int
        K, from 1 to 17. Grey images are moved by up to two pixels. Colour images are also mirrored, every second one.

    Notes
    -----
    Pixels at the edge are repeated. The first augmentation is the image itself. The augmentations of an image depend on
    the image alone.
    """
    import torch

    channels, side = ImageShape.of(rows.shape[1])
    images = rows.reshape(-1, side, side, channels)
    mirrored = channels > 1
    views = []
    for place in range(number):
        down, right = _SHIFTS[place // 2 if mirrored else place]
        moved = _moved(_moved(images, 1, down), 2, right)
        views.append(moved.flip(2) if mirrored and place % 2 else moved)
    return torch.stack(views, dim=1).reshape(-1, rows.shape[1])


def _moved(images: torch.Tensor, axis: int, pixels: int) -> torch.Tensor:
    """Return images moved along an axis; pixels at the edge are repeated."""
    import torch

    if not pixels:
        return images
    side, edge = images.shape[axis], 0 if pixels > 0 else images.shape[axis] - 1
    filled = images.narrow(axis, edge, 1).repeat_interleave(abs(pixels), axis)
    kept = images.narrow(axis, max(-pixels, 0), side - abs(pixels))
    return torch.cat((filled, kept) if pixels > 0 else (kept, filled), axis)


LEAST_SIDE = 8
"""Pixels of the smallest side of images for :func:`group_norm_network`."""
_FILTERS = (16, 32)
_GROUPS = 4
_POOLED = 4
_USUAL_SIDE = 14
_LEAST_SQUARES = 1e-6
"""Sum of squares below which a filter is not scaled to length 1."""


def group_norm_network(num_features: int, num_classes: int) -> torch.nn.Module:
    """Make a convolutional network of some thousand parameters for square images of at least 8 x 8 pixels from 0 to 1.

    Two convolutions of 16 and 32 filters with standardised weights (Qiao et al. 2019), each followed by group norm (Wu
    and He 2018) and ReLU, then means over 4 x 4 areas and a linear layer, which starts at zero. The first convolution's
    stride grows with the images, so that about 14 x 14 values are left.

    Raises
    ------
    ConfigurationError
        If no such images have ``num_features`` values.

    Examples
    --------
    >>> sum(values.numel() for values in group_norm_network(784, 10).parameters())
    10282
    """
    import torch
    from torch import nn

    shape = ImageShape.of(num_features, least=LEAST_SIDE)
    stride = max(round(shape.side / _USUAL_SIDE), 1)
    first, second = _FILTERS

    class Pixels(nn.Module):
        """Rows of pixels from 0 to 1 as images from -1 to 1, with channels first."""

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            images = rows.reshape(-1, shape.side, shape.side, shape.channels)
            return 2.0 * images.permute(0, 3, 1, 2) - 1.0

    class StandardisedConvolution(nn.Conv2d):
        """Convolution whose filters have mean 0 and length 1."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - PyTorch's name
            weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
            squares = weight.square().sum(dim=(1, 2, 3), keepdim=True)
            weight = weight * torch.rsqrt(squares + _LEAST_SQUARES)
            return nn.functional.conv2d(input, weight, self.bias, self.stride, self.padding)

    head = nn.Linear(second * _POOLED**2, num_classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(
        Pixels(),
        StandardisedConvolution(shape.channels, first, 2 * stride + 1, stride, stride),
        nn.GroupNorm(_GROUPS, first),
        nn.ReLU(),
        StandardisedConvolution(first, second, 3, 2, 1),
        nn.GroupNorm(_GROUPS, second),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(_POOLED),
        nn.Flatten(),
        head,
    )
