"""Fixed feature maps: computed from one sample alone, and learnt from no data, so they cost no privacy."""

from ...registry import Registry
from .base import Features
from .oriented_gradients import OrientedGradients
from .own import own_features
from .pixels import BlockMeans, Pixels
from .soft_gradients import SoftGradients

__all__ = ["FEATURES", "Features"]

_BUILT_IN = (Pixels(), OrientedGradients(), BlockMeans(2), BlockMeans(4), SoftGradients())

FEATURES = Registry("features", Features, _BUILT_IN, adapt=own_features)
"""The built-in maps by name, and a user's own as ``package.module:function``."""
