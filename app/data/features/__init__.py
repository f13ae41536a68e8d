"""Fixed feature maps: computed from one sample alone and learnt from no data, so they cost no privacy."""

from ...settings.registry import Registry
from .feature_map import Features
from .gradients import BlockMeans, OrientedGradients, Pixels, SoftGradients
from .learnt import LEARNT
from .own_features import SUFFIX, FileFeatures, own_features, save_features

__all__ = ["FEATURES", "Features", "save_features"]

_BUILT_IN = (Pixels(), OrientedGradients(), BlockMeans(2), BlockMeans(4), SoftGradients(), *LEARNT)

FEATURES = Registry("features", Features, _BUILT_IN, adapt=own_features, suffix=SUFFIX, of_file=FileFeatures)
"""The built-in maps by name, and a user's own: ``package.module:function``, or the path of a file that
:func:`save_features` wrote.
"""
