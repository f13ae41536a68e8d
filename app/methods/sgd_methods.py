"""The baselines: noisy SGD, and ISRL-DP plain and accelerated. Every release has fresh noise and stands alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...clients import IsrlDpClient, NoisySGDClient
from ...strategies import IsrlDp, NoisySGD
from ..models.model import Model
from ..settings.run_config import RunConfig
from .method import BOUNDING, Method
from .presets import PaperConstants, sgd_preset
from .problem import Hyperparameters, Problem


class NoisySgdMethod(Method):
    """Noisy SGD, the baseline of reshef-levy-2025."""

    name = "noisy-sgd"
    sentence = "Noisy SGD: fresh noise in every release, the server is not trusted."
    keys = Method.keys | {"diameter", "secret-order"} | BOUNDING
    mechanisms = ("independent",)
    default_mechanism = "independent"
    # SGD has nothing to carry over: a lost gradient belongs to a model that is gone.
    release_rule = "paper"
    presets = ("practical", "paper")
    sums_suffice = True
    on_real_nodes = True
    client_type = NoisySGDClient
    strategy_type = NoisySGD

    def preset(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        if config.preset != "paper":
            return sgd_preset(config, num_rounds, model)
        constants = PaperConstants.of(model)
        variance = constants.sgd_variance(config, model) / config.asked_per_round
        eta = constants.diameter / math.sqrt(num_rounds * (constants.lipschitz**2 + variance))
        return Hyperparameters(constants.lipschitz, eta, constants.diameter, "uniform", "balanced")


class IsrlDpMethod(NoisySgdMethod):
    """ISRL-DP minibatch SGD (Lowy and Razaviyayn 2023), the "other work" of reshef-levy-2025."""

    name = "isrl-dp"
    sentence = "ISRL-DP minibatch SGD: fresh noise, an average of the iterates, the server is not trusted."
    keys = NoisySgdMethod.keys - {"secret-order"}
    sums_suffice = False
    on_real_nodes = False
    client_type = IsrlDpClient
    strategy_type = IsrlDp
    variant = "minibatch"

    def strategy_options(self, problem: Problem) -> Mapping[str, Any]:
        return {**super().strategy_options(problem), "variant": self.variant}

    def preset(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        if config.preset != "paper":
            return sgd_preset(config, num_rounds, model)
        constants, spread = PaperConstants.of(model), _spread(config, model)
        eta = min(constants.diameter / (spread * math.sqrt(num_rounds)), 1 / (2 * constants.smoothness))
        return Hyperparameters(constants.lipschitz, eta, constants.diameter, "uniform", "balanced")


class AcceleratedIsrlDpMethod(IsrlDpMethod):
    """ISRL-DP with the accelerated steps of AC-SA."""

    name = "isrl-dp-accelerated"
    sentence = "ISRL-DP with accelerated steps (AC-SA), the server is not trusted."
    variant = "accelerated"

    def preset(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        if config.preset != "paper":
            return sgd_preset(config, num_rounds, model, accelerated=True)
        constants, spread = PaperConstants.of(model), _spread(config, model)
        eta = min(constants.diameter / (spread * (num_rounds + 2) ** 1.5), 1 / (4 * constants.smoothness))
        return Hyperparameters(constants.lipschitz, eta, constants.diameter, "uniform", "balanced")


def _spread(config: RunConfig, model: Model) -> float:
    """Lan 2012 (corollary 1), with the variance of a mean over m machines and the step of AC-SA growing with r."""
    constants = PaperConstants.of(model)
    noise = constants.sgd_variance(config, model, config.passes)
    return math.sqrt((constants.lipschitz**2 / config.batch_size + noise) / config.asked_per_round)
