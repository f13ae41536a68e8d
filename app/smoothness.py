"""How smooth a model's loss is, from what is public: the model and the bound on a sample's features.

What it is for is a bound on steps (:mod:`.presets`). It is computed from constants alone, never from samples: a step
that depended on the longest sample of a machine would say something about that sample.
"""

from __future__ import annotations

from .config import RunConfig
from .models.models import LogisticRegression, MeanEstimation, NonconvexLogistic, RidgeRegression
from .tasks.features import ORIENTED_GRADIENTS_NORM


def squared_norm_bound(config: RunConfig, num_features: int, feature_bound: float) -> float:
    """The most that ||x||^2 can be for the features x of a sample, by how they are made.

    Parameters
    ----------
    config : RunConfig
    num_features : int
        Values of one sample, without the bias.
    feature_bound : float
        R of the task, for features that are not in [0, 1].
    """
    if config.features == "oriented-gradients":
        return ORIENTED_GRADIENTS_NORM**2
    if config.task == "synthetic-logistic":
        return feature_bound**2
    return float(num_features)  # pixels and their means are in [0, 1]


def smoothness(config: RunConfig, num_features: int, feature_bound: float) -> float:
    """L: the gradient of one sample's loss changes by at most L times what the parameters change by.

    Parameters
    ----------
    config : RunConfig
    num_features : int
        Values of one sample, without the bias.
    feature_bound : float
        R of the linear models, which scale longer features down to it.

    Notes
    -----
    Softmax regression has L = (||x||^2 + 1) / 2, for the Hessian of the loss in the scores has no eigenvalue above 1/2
    and the bias is one more feature that is always 1. The linear models declare their own. ``mlp`` and ``cnn`` are not
    smooth in this sense; they get the softmax regression's L on the same features, which is a rule of thumb and no
    bound.
    """
    if config.model == "mean":
        return MeanEstimation.smoothness
    linear = {"logistic": LogisticRegression, "nonconvex-logistic": NonconvexLogistic, "ridge": RidgeRegression}
    if config.model in linear:
        return linear[config.model](num_features, feature_bound).smoothness
    return (squared_norm_bound(config, num_features, feature_bound) + 1) / 2
