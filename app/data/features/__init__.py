"""Fixed feature maps: computed from one sample alone and learnt from no data, so they cost no privacy."""

from ...settings.registry import Registry
from .feature_map import Features
from .features_file import SUFFIX, FileFeatures, save_features
from .learnt import LEARNT
from .oriented_gradients import OrientedGradients
from .own_features import own_features
from .pixels import BlockMeans, Pixels
from .soft_gradients import SoftGradients

__all__ = ["FEATURES", "Features", "save_features"]

_BUILT_IN = (Pixels(), OrientedGradients(), BlockMeans(2), BlockMeans(4), SoftGradients(), *LEARNT)

FEATURES = Registry("features", Features, _BUILT_IN, adapt=own_features, suffix=SUFFIX, of_file=FileFeatures)
"""The built-in maps by name, and a user's own: ``package.module:function``, or the path of a file that
:func:`save_features` wrote.
"""
