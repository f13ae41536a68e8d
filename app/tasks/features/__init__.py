"""Fixed feature maps: computed from one sample alone, and learnt from no data, so they cost no privacy."""

from ...registry import Registry
from .base import Features
from .oriented_gradients import ORIENTED_GRADIENTS_NORM, OrientedGradients, oriented_gradients
from .own import FunctionFeatures, own_features
from .pixels import BlockMeans, Pixels, pooled
from .soft_gradients import SoftGradients, soft_gradients

__all__ = [
    "FEATURES",
    "ORIENTED_GRADIENTS_NORM",
    "BlockMeans",
    "Features",
    "FunctionFeatures",
    "OrientedGradients",
    "Pixels",
    "SoftGradients",
    "oriented_gradients",
    "own_features",
    "pooled",
    "soft_gradients",
]

_BUILT_IN = (Pixels(), OrientedGradients(), BlockMeans(2), BlockMeans(4), SoftGradients())

FEATURES = Registry("features", Features, _BUILT_IN, adapt=own_features)
"""The built-in maps by name, and a user's own as ``package.module:function``."""
