"""Every sample at once: full batches in few rounds, and one shot of second moments; a server is trusted, or none.

Full batches' constants were found for the softmax regression on MNIST's 60,000 samples on 100 clients, on held-out
training images. What they depend on is how much noise there is in a mean gradient, so other numbers of clients and
samples are read off the same table at the mu that would have as much noise there. Data that are no images have tables
of their own, without dimension (docs/tuning.md). One shot's were chosen likewise: the class weight 1, a constant of 0.3
times the features' norm where the model has a bias, and for images a ridge of 11 times the noise on a value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...clients.algorithms import MOMENTUM, Scale
from ...clients.full_batch_client import CountedGradients
from ...clients.one_shot_client import LabelledFeatures, OneShotClient
from ...clients.private_client import PrivateClient
from ...privacy.queries.clipped_share import COUNTED_CLIP_NORM
from ...privacy.release.clipping import Moments
from ...privacy.release.policy import PrivacyPolicy
from ...privacy.setting import refusal
from ...strategies.full_batch import FullBatch, TrustedFullBatch
from ...strategies.one_shot import OneShot
from ...strategies.rounds.sampling import most_requests
from ...strategies.rounds.strategy import ReleaseStrategy
from ..models.model import Model, Recipe
from ..settings.registry import registry
from ..settings.run_config import RunConfig, run_keys
from .method import BOUNDING, Method, bounding
from .presets import (
    Hyperparameters,
    ResolvedRun,
    in_unit_range,
    scaled,
    the_task,
    tuned,
    usual_norm,
    usual_squared_norm,
    wanted_mu,
)
from .queries import additive_strength

QUANTILE = frozenset({"clipping.quantile", "clipping.quantile-share"})
"""The keys of a clip that follows the gradients."""


class _Row(NamedTuple):
    """Constants for features of norm 1: mu, T, eta, beta and S."""

    mu: float
    rounds: float
    learning_rate: float
    momentum: float
    clip_norm: float


_TABLE = (
    _Row(0.1, 6, 60.0, 0.6, 0.35),
    _Row(0.25, 8, 100.0, 0.6, 0.35),
    _Row(0.5, 12, 100.0, 0.7, 0.35),
    _Row(1.0, 20, 100.0, 0.7, 0.5),
    _Row(2.0, 30, 100.0, 0.8, 0.5),
    _Row(10.0, 60, 300.0, 0.9, 0.5),
)
_SAMPLES_PER_ROOT_OF_CLIENTS = 6000.0
"""60,000 samples over the root of 100 clients, for which the table was made."""
_TUNED_PARAMETERS = 5890
"""Parameters of the model that the table was made with."""
_FEWEST_TIMES, _MOST_TIMES = 0.25, 16.0
"""The range in which a ratio of parameters changes the number of rounds."""
_FEWEST_ROUNDS = 2.0
_UNCENTRED_ROUNDS = 1.5
"""Pixels have a large mean, which steps go along first: the rest takes more rounds."""
_TWO_CLASSES, _MOST_TRAVEL, _FEWEST_CLASSES = 0.5, 360.0, 2
"""Steps as a share of the table's with two classes: residuals are then opposite, and twice as steep. They travel no
farther than other data's with the least noise, or more epsilon would give a worse model."""


_TRAVEL_OF_A_SAMPLE = 3.0
"""The farthest that features with short steps travel, eta S T / (1 - beta), for each sample: from there on a model
follows single samples."""


class _Scaled(NamedTuple):
    """Constants without dimension for other data: noise, T, S / R, eta S R of all rounds together, and the quantile.

    The noise is the length of what is in the mean of one release with all of mu, over S, for two classes or one number;
    of more classes that of two of them. It does not depend on T: more rounds have more noise each, and shorter steps.
    The quantile is the share of gradients that a clip which follows them leaves whole: to cut many makes the noise
    small, and the model a worse one.
    """

    noise: float
    rounds: float
    clip: float
    travel: float
    quantile: float


_CLASSES = (
    _Scaled(0.002, 200, 0.4, 1500, 0.9),
    _Scaled(0.005, 48, 0.4, 360, 0.9),
    _Scaled(0.01, 48, 0.4, 360, 0.9),
    _Scaled(0.03, 18, 0.2, 170, 0.6),
    _Scaled(0.1, 6, 0.1, 75, 0.3),
    _Scaled(0.3, 6, 0.1, 40, 0.3),
)
"""Settings for classes. Below 0.005 noise costs nothing: more rounds of the same step go along what varies little in
long-tailed columns."""
_NUMBERS = (
    _Scaled(0.01, 48, 0.3, 14.4, 0.9),
    _Scaled(0.03, 48, 0.1, 7.2, 0.6),
    _Scaled(0.1, 12, 0.1, 1.8, 0.3),
    _Scaled(0.3, 6, 0.1, 0.6, 0.3),
    _Scaled(1.0, 6, 0.1, 0.18, 0.3),
)
"""Settings for numbers from -1 to 1. A least-squares loss is as steep as its rows are long, which limits the steps."""
_FARTHEST = 25.0
"""The largest eta S R of classes: fewer rounds than the usual ones cannot travel as far."""
_STEADY = 7.5
"""eta S R of each of many rounds."""
_STEEPEST = 1.5
"""The largest eta R^2 for numbers."""


@dataclass(frozen=True)
class Descent(Hyperparameters):
    """The preset of full batches, with what only they have."""

    momentum: float = 0.0  # beta
    average: str = "last"  # Which model is published
    l2: float = 0.0  # lambda


class FullBatchMethod(Method, algorithm="full-batch"):
    """Full-batch gradient descent with an untrusted server, or one that sees sums alone."""

    sentence = "Full batches: all samples in each of few rounds, fresh noise, momentum; the server is not trusted."
    keys = frozenset({"strategy.momentum", "strategy.average", "strategy.l2", "strategy.shares"}) | QUANTILE | BOUNDING
    sums_suffice = True
    with_trusted_server = "trusted-full-batch"
    samples_return = False
    on_real_nodes = True
    strategy_type = FullBatch

    def check(self, config: RunConfig) -> None:
        super().check(config)
        if config.quantile and config.clipping == "automatic":
            raise refusal("clipping", "clip with a quantile, which is that of gradients that are cut", config.clipping)
        usual = run_keys()["clipping.quantile-share"].default
        if not config.quantile and config.quantile_share != usual:
            raise refusal("clipping.quantile-share", f"{usual} unless there is a quantile", config.quantile_share)

    def usual_rounds(self, config: RunConfig, sizes: Sequence[int], model: Model) -> int:
        """Return the preset's T."""
        if recipe := self._recipe(config, model, sizes):
            return recipe.rounds
        if not has_table(config):
            return round(_scaled(model, self.noise(config, model, sizes)).rounds)
        # Noise is as long as the root of the number of values, and a gradient is not.
        ratio = min(max(_TUNED_PARAMETERS / model.num_parameters, _FEWEST_TIMES), _MOST_TIMES)
        rounds = _row(self.noise_mu(config, sizes) * math.sqrt(ratio)).rounds
        return round(rounds * (_UNCENTRED_ROUNDS if in_unit_range(config) else 1.0))

    @property
    def weighs_classes(self) -> bool:
        return True

    def usual_temperature(self, config: RunConfig, num_rounds: int, model: Model, sizes: Sequence[int]) -> float:
        recipe = self._recipe(config, model, sizes)
        if recipe is None or num_rounds < recipe.fewest_rounds or config.quantile or config.clipping == "automatic":
            return 1.0
        return recipe.temperature

    def rounds_of_a_pass(self, config: RunConfig, sizes: Sequence[int]) -> int:
        """1: every round goes through all samples."""
        return 1

    def settled(self, config: RunConfig, num_rounds: int, model: Model, sizes: Sequence[int]) -> Hyperparameters:
        if recipe := self._recipe(config, model, sizes):
            bound = usual_norm(config, model)
            if model.num_classes == 1:  # whose constant is a feature
                bound = math.hypot(bound, 1.0)
            values = scaled(Scale(recipe.clip, recipe.travel), bound)
            own = {"sampling": "balanced", "momentum": recipe.momentum, "average": recipe.average}
            return Descent(values.clip_norm, min(values.learning_rate, recipe.steepest), math.inf, **own)
        if not has_table(config):
            found, bound = _scaled(model, self.noise(config, model, sizes)), usual_norm(config, model)
            travel = min(found.travel, _FARTHEST * num_rounds, max(_MOST_TRAVEL, _STEADY * num_rounds))
            values = scaled(Scale(found.clip, travel), bound, slower=num_rounds)
            steepest = math.inf if model.num_classes > 1 else _STEEPEST / bound**2
            rate = min(values.learning_rate, steepest)
            return Descent(values.clip_norm, rate, math.inf, sampling="balanced", momentum=MOMENTUM)
        row, squares = _row(self.noise_mu(config, sizes)), usual_squared_norm(config, model)
        rate, clip = row.learning_rate / squares, row.clip_norm * math.sqrt(squares)
        if model.num_classes == _FEWEST_CLASSES:
            most = scaled(Scale(row.clip_norm, _MOST_TRAVEL), math.sqrt(squares), slower=num_rounds).learning_rate
            rate = min(_TWO_CLASSES * rate, most)
        if registry("features")[config.features].short_steps:
            travel = _TRAVEL_OF_A_SAMPLE * sum(sizes)
            rate = min(rate, travel * (1.0 - row.momentum) / (row.clip_norm * num_rounds * squares))
        return Descent(
            clip_norm=clip,
            learning_rate=rate,
            diameter=math.inf,
            sampling="balanced",
            momentum=row.momentum,
        )

    def _recipe(self, config: RunConfig, model: Model, sizes: Sequence[int]) -> Recipe | None:
        """Return the constants that a model brings itself."""
        samples_times_mu = self.noise_mu(config, sizes) * _SAMPLES_PER_ROOT_OF_CLIENTS
        strength = additive_strength(config, samples_times_mu)
        return registry("model")[config.model].recipe(model.num_classes, strength)

    def noise_mu(self, config: RunConfig, sizes: Sequence[int]) -> float:
        """Return the mu at which the table's samples and clients have as much noise in a mean gradient as these."""
        return wanted_mu(config) * sum(sizes) / math.sqrt(len(sizes)) / _SAMPLES_PER_ROOT_OF_CLIENTS

    def noise(self, config: RunConfig, model: Model, sizes: Sequence[int]) -> float:
        """Return the length of the noise in a mean of releases that have all of mu, over the clip norm.

        0 without noise.
        """
        return 2.0 * math.sqrt(model.num_parameters) / (_SAMPLES_PER_ROOT_OF_CLIENTS * self.noise_mu(config, sizes))

    def releases_of(self, config: RunConfig, samples: int, sizes: Sequence[int]) -> tuple[float, str]:
        if config.max_participations:
            return super().releases_of(config, samples, sizes)
        return math.inf, "all samples in every release"

    def policy(self, problem: ResolvedRun, samples: int) -> PrivacyPolicy:
        config = problem.config
        return self.client_policy(
            clip_norm=COUNTED_CLIP_NORM if config.quantile else problem.values.clip_norm,
            batch_size=1,
            max_participations=config.max_participations or _most_asked(problem),
            mu=config.mu,
            delta=config.delta,
            mechanism=self.mechanism(config),
            mechanism_options={"shares": config.shares} if config.shares and not self.trusted else (),
            noise_quality=config.noise_quality,
            trust=config.trust_model,
            **bounding(config, self.keys),
            sums=config.sums,
        )

    def release_size(self, problem: ResolvedRun) -> int:
        return super().release_size(problem) + bool(problem.config.quantile)

    def client(self, *parts: Any, quantile_share: float = 0.0, **options: Any) -> PrivateClient:
        model, *others = parts
        return super().client(CountedGradients(model, quantile_share) if quantile_share else model, *others, **options)

    def client_options(self, problem: ResolvedRun, client: int) -> Mapping[str, Any]:
        return {"quantile_share": problem.config.quantile_share} if problem.config.quantile else {}

    def clients_alike(self) -> bool:
        return type(self).client_options is FullBatchMethod.client_options

    def strategy_options(self, problem: ResolvedRun) -> Mapping[str, Any]:
        config, values = problem.config, problem.values
        names = ("quantile", "quantile_share")
        counted = {name: getattr(config, name) for name in names} | {"first_clip": values.clip_norm}
        counted["relative_steps"] = not has_table(config)
        own = {name: getattr(values, name) for name in ("momentum", "average", "l2")}
        return {**own, **(counted if config.quantile else {})}


class TrustedFullBatchMethod(FullBatchMethod, algorithm="trusted-full-batch"):
    """Full-batch gradient descent with a trusted server."""

    sentence = "Full batches with a server that is trusted with the clients' sums and adds the noise for everybody."
    keys = FullBatchMethod.keys - QUANTILE
    trusted = True
    sums_suffice = False
    with_trusted_server = ""
    strategy_type = TrustedFullBatch

    def noise_mu(self, config: RunConfig, sizes: Sequence[int]) -> float:
        # One noise for everybody.
        return super().noise_mu(config, sizes) * math.sqrt(len(sizes))

    def strategy_options(self, problem: ResolvedRun) -> Mapping[str, Any]:
        return {**super().strategy_options(problem), "shares": problem.config.shares or "uniform"}


def has_table(config: RunConfig) -> bool:
    """Return True if the table is for its data: images, and tables of people that it was tried on."""
    return the_task(config).has_images or tuned(config) is not None


def usual_quantile(problem: ResolvedRun) -> float:
    """Return the quantile of a clip that follows the gradients, for data that have no table.

    With an untrusted server.
    """
    noise = FullBatchMethod().noise(problem.config, problem.model, problem.sizes)
    return round(_scaled(problem.model, noise).quantile, 2)


def _scaled(model: Model, noise: float) -> _Scaled:
    """Return the constants without dimension at any noise: between the rows, and at its ends, by logarithms."""
    rows, of_two = (_CLASSES, math.sqrt(2 / model.num_classes)) if model.num_classes > 1 else (_NUMBERS, 1.0)
    at, known = math.log(max(noise * of_two, rows[0].noise)), [math.log(row.noise) for row in rows]
    between = (np.interp(at, known, np.log(column)) for column in list(zip(*rows, strict=True))[1:])
    return _Scaled(noise, *(math.exp(float(value)) for value in between))


def _row(mu: float) -> _Row:
    """Return the constants at any mu.

    Between the table's rows by logarithms, and below the first as from it to the second.
    """
    at, mus = math.log(min(mu, _TABLE[-1].mu)), [math.log(row.mu) for row in _TABLE]
    below = min(at - mus[0], 0.0)

    def between(values: Sequence[float], *, falls: bool) -> float:
        logarithms = [math.log(value) for value in values]
        slope = (logarithms[1] - logarithms[0]) / (mus[1] - mus[0]) if falls else 0.0
        return math.exp(float(np.interp(at, mus, logarithms)) + slope * below)

    return _Row(
        mu,
        max(between([row.rounds for row in _TABLE], falls=True), _FEWEST_ROUNDS),
        between([row.learning_rate for row in _TABLE], falls=True),
        1.0 - between([1.0 - row.momentum for row in _TABLE], falls=False),
        between([row.clip_norm for row in _TABLE], falls=False),
    )


def _most_asked(problem: ResolvedRun) -> int:
    """Return the most rounds that one client is asked in."""
    config = problem.config
    return most_requests(config.num_clients, config.asked_per_round, problem.num_rounds, problem.values.sampling)


RIDGE, OTHER_RIDGE = 11.0, 2.0
"""The least eigenvalue, in units of the noise on a value of the sum, for images and for other data."""
CONSTANT = 0.3
"""The value appended where the model has a bias, relative to the features' bound."""


class OneShotMethod(Method, algorithm="one-shot"):
    """One release of second moments, and a linear model from their sum."""

    sentence = "One round: noisy second moments of all samples, and ridge regression; the server is not trusted."
    keys = frozenset({"strategy.class-weight", "strategy.ridge"})
    sums_suffice = True
    samples_return = False
    is_iterative = False
    on_real_nodes = True
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

    def releases_of(self, config: RunConfig, samples: int, sizes: Sequence[int]) -> tuple[float, str]:
        return 1, "all samples in one release"

    def release_size(self, problem: ResolvedRun) -> int:
        model = problem.model
        return Moments(model.num_classes).num_values(model.num_features + _has_bias(model))

    def policy(self, problem: ResolvedRun, samples: int) -> PrivacyPolicy:
        config = problem.config
        return self.client_policy(
            clip_norm=problem.values.clip_norm,
            mu=config.mu,
            delta=config.delta,
            mechanism=self.mechanism(config),
            noise_quality=config.noise_quality,
            trust=config.trust_model,
            class_weight=config.class_weight,
            **self.policy_of_model(problem.model),
            sums=config.sums,
        )

    def client_policy(self, **fields: Any) -> PrivacyPolicy:
        once = {"batch_size": 1, "max_participations": 1}
        return super().client_policy(**{**fields, **once})

    def policy_of_model(self, model: Model) -> Mapping[str, Any]:
        return {"classes": model.num_classes}

    def client(self, *parts: Any, **options: Any) -> PrivateClient:
        model, samples, policy, *others = parts
        rows = LabelledFeatures(model.num_features, model.num_classes, _constant(model, policy.clip_norm))
        return OneShotClient(rows, samples, policy, *others, **options)

    def strategy(self, problem: ResolvedRun, common: Mapping[str, Any], *, deployed: bool) -> ReleaseStrategy[Any]:
        without_steps = {name: value for name, value in common.items() if name != "learning_rate"}
        return super().strategy(problem, without_steps, deployed=deployed)

    def strategy_options(self, problem: ResolvedRun) -> Mapping[str, Any]:
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
    """Return the value that clients append to features: the preset's share of the clip."""
    return clip_norm * CONSTANT / math.hypot(1.0, CONSTANT) if _has_bias(model) else 0.0
