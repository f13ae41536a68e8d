"""Fixed feature maps: computed from one sample alone and learnt from no data, so they cost no privacy."""

import numpy as np
from numpy.typing import NDArray

from ....clients.records.encoders import register_encoder
from ...settings.registry import Registry
from .colour import COLOURS, squared
from .feature_map import Features
from .gradients import BlockMeans, OrientedGradients, Pixels, SoftGradients
from .learnt import LEARNT
from .own_features import SUFFIX, FileFeatures, own_features, save_features

__all__ = ["FEATURES", "Features", "save_features"]

_BUILT_IN = (Pixels(), OrientedGradients(), BlockMeans(2), BlockMeans(4), SoftGradients(), *LEARNT, *COLOURS)

FEATURES = Registry("features", Features, _BUILT_IN, adapt=own_features, suffix=SUFFIX, of_file=FileFeatures)
"""The built-in maps by name, and a user's own: ``package.module:function``, or the path of a file that
:func:`save_features` wrote.
"""

_SIDE = 32
"""Pixels of the side that images of a column are resized to for maps that need one size, unless a map has its own."""


def register_images(name: str) -> int:
    """Let columns of images be encoded by the features of this name; return how many values these have.

    Notes
    -----
    An image is cut, resized and encoded by itself. A map of one's own runs code of one's own: it is named here by
    whoever calls this, and by no schema.
    """
    features: Features = FEATURES[name]
    side = features.side or _SIDE

    def encode(image: NDArray[np.uint8]) -> NDArray[np.float32]:
        alone = image[None]
        if not features.any_size:
            alone = np.rint(squared(alone, side=side)).astype(np.uint8)
        row = features.of_any(alone, 255)[0]
        return row if features.norm_bound is None else row / np.float32(max(features.norm_bound, 1.0))

    width = len(encode(np.zeros((side, side, 3), np.uint8)))
    register_encoder("image", name, encode, width)
    return width


for one in COLOURS:
    register_images(one.name)
