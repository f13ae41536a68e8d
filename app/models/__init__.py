"""Models: per-sample gradients, loss and accuracy."""

from __future__ import annotations

from functools import lru_cache

from ..settings.registry import Registry
from .linear import LINEAR, Softmax
from .model import Model, ModelKind
from .torch_networks import NETWORKS, own_model

__all__ = ["MODELS", "make_model"]

MODELS = Registry("model", ModelKind, (Softmax(), *NETWORKS, *LINEAR), adapt=own_model)
"""The built-in models by name, and a user's own as ``package.module:make_model``."""


@lru_cache(maxsize=8)
def make_model(
    name: str,
    num_features: int,
    num_classes: int,
    feature_bound: float = 0.0,
    *,
    constant: bool = False,
    augmentations: int = 0,
) -> Model:
    """Return the model of a run configuration, cached: every message of a simulation asks for it.

    With a ``constant`` among the features it has no bias. Its gradients are means over ``augmentations`` of a sample; 0
    stands for the model's own number. Raises ConfigurationError if the name is unknown or the model does not fit the
    data.
    """
    kind = MODELS[name]
    made = (kind.make_biasless if constant else kind.make)(num_features, num_classes, feature_bound)
    return made.with_augmentations(augmentations or kind.augmentations)
