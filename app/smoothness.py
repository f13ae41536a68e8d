"""How smooth a model's loss is, from what is public: the model and the bound on a sample's features.

What it is for is a bound on steps (:mod:`.presets`). It is computed from constants alone, never from samples: a step
that depended on the longest sample of a machine would say something about that sample.
"""

from __future__ import annotations

from .config import RunConfig
from .registry import registry


def smoothness(config: RunConfig, num_features: int, feature_bound: float) -> float:
    """L of a run's model, by :meth:`murmurfl.app.models.base.ModelKind.smoothness`.

    Parameters
    ----------
    config : RunConfig
    num_features : int
        Values of one sample, without the bias.
    feature_bound : float
        R of the linear models, which scale longer features down to it.
    """
    task, model = registry("task")[config.task], registry("model")[config.model]
    squared_norm = task.squared_norm_bound(config.features, num_features, feature_bound)
    return model.smoothness(num_features, squared_norm, feature_bound)
