"""One shot: one release of second moments of every machine, and ridge regression from their sum.

The constants were chosen on held-out training images (docs/tuning.md): the class weight 1, a constant of 0.3 times the
features' norm where the model has a bias, and for images a ridge of 11 times the noise on a value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...clients import OneShotClient, PrivateClient
from ...clients.one_shot_client import LabelledFeatures
from ...privacy import PrivacyPolicy
from ...privacy.machine.clipping import Moments
from ...privacy.setting import refusal
from ...strategies import OneShot, ReleaseStrategy
from ..models.model import Model
from ..settings.registry import registry
from ..settings.run_config import RunConfig
from .method import Method
from .presets import the_task, usual_squared_norm
from .problem import Hyperparameters, Problem

RIDGE, OTHER_RIDGE = 11.0, 2.0
"""The least eigenvalue, in units of the noise on a value of the sum, for images and for other data."""
CONSTANT = 0.3
"""The value appended where the model has a bias, relative to the features' bound."""


class OneShotMethod(Method):
    """One release of second moments, and a linear model from their sum."""

    name = "one-shot"
    sentence = "One round: noisy second moments of all samples, and ridge regression; the server is not trusted."
    keys = frozenset({"class-weight", "ridge"})
    mechanisms = ("independent",)
    default_mechanism = "independent"
    clip_units = ("moments",)
    release_rule = "paper"
    sums_suffice = True
    sums_samples = True
    samples_return = False
    takes_steps = False
    on_real_nodes = True
    client_type = OneShotClient
    strategy_type = OneShot

    def check(self, config: RunConfig) -> None:
        super().check(config)
        if config.num_rounds > 1:
            raise refusal("num_rounds", "0 or 1 with this strategy", config.num_rounds)
        if config.learning_rate:
            raise refusal("learning_rate", "0 with this strategy: it takes no steps", config.learning_rate)
        models = registry("model")
        if not models[config.model].scores:
            able = " or ".join(repr(name) for name, kind in models.items() if kind.scores)
            raise refusal("model", f"{able} with this strategy, which makes linear scores", config.model)

    def preset(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        squares = usual_squared_norm(config, model) - _has_bias(model)  # what it counts for the bias
        with_constant = math.hypot(1.0, CONSTANT) if _has_bias(model) else 1.0
        return Hyperparameters(math.sqrt(squares) * with_constant, 1.0, math.inf, sampling="balanced")

    def rounds_of_a_pass(self, config: RunConfig, sizes: Sequence[int]) -> int:
        return 1

    def releases_of(self, config: RunConfig, samples: int, fewest: int) -> tuple[float, str]:
        return 1, "all samples in one release"

    def release_size(self, problem: Problem) -> int:
        model = problem.model
        return Moments(model.num_classes).num_values(model.num_features + _has_bias(model))

    def policy(self, problem: Problem, samples: int) -> PrivacyPolicy:
        config = problem.config
        return self.machine_policy(
            clip_norm=problem.values.clip_norm,
            mu=config.mu,
            delta=config.delta,
            mechanism=self.mechanism(config),
            noise_quality=config.noise_quality,
            trust=config.trust_model,
            class_weight=config.class_weight,
            **self.policy_of_model(problem.model),
            min_honest=config.min_honest,
            min_cohort=config.cohort_floor,
        )

    def machine_policy(self, **fields: Any) -> PrivacyPolicy:
        once = {"order": "all", "batch_size": 1, "max_participations": 1}
        return super().machine_policy(**{**fields, **once})

    def policy_of_model(self, model: Model) -> Mapping[str, Any]:
        return {"classes": model.num_classes}

    def client(self, *parts: Any, **options: Any) -> PrivateClient:
        model, samples, policy, *others = parts
        rows = LabelledFeatures(model.num_features, model.num_classes, _constant(model, policy.clip_norm))
        return OneShotClient(rows, samples, policy, *others, **options)

    def strategy(self, problem: Problem, common: Mapping[str, Any], *, deployed: bool) -> ReleaseStrategy[Any]:
        without_steps = {name: value for name, value in common.items() if name != "learning_rate"}
        return super().strategy(problem, without_steps, deployed=deployed)

    def strategy_options(self, problem: Problem) -> Mapping[str, Any]:
        clip_norm = problem.values.clip_norm
        return {
            "clip_norm": clip_norm,
            "class_weight": problem.config.class_weight,
            "noise_std": max(plan.noise_std for plan in self.plans(problem)),
            "ridge": problem.config.ridge or (RIDGE if the_task(problem.config).has_images else OTHER_RIDGE),
            "constant": _constant(problem.model, clip_norm),
        }


def _has_bias(model: Model) -> bool:
    return "bias" in model.names


def _constant(model: Model, clip_norm: float) -> float:
    """The value that machines append to features: the preset's share of the clip."""
    return clip_norm * CONSTANT / math.hypot(1.0, CONSTANT) if _has_bias(model) else 0.0
