"""DP-mu^2-FL: with an untrusted server, with a trusted one, and beside them delayed momentum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...privacy.setting import refusal
from ...strategies.baselines import DelayedMomentum
from ...strategies.mu2 import AnytimeMu2, Mu2, TrustedMu2
from ...strategies.rounds.strategy import ReleaseStrategy
from ..models.model import Model
from ..settings.run_config import RunConfig
from .method import BOUNDING, Method
from .presets import (
    Hyperparameters,
    PaperConstants,
    ResolvedRun,
    image_network_recipe,
    largest_step,
    mu2_scaled,
    tuned,
    typical_norm,
    usual_norm,
    wanted_mu,
)

ANYTIME_CLIP, ANYTIME_RATE = 0.3, 0.5
"""Defaults for anytime steps: S / R, and eta R d^(1/8). Steps of all sizes from half to twice that do about as well."""

_OF_NETWORKS = 70.0
"""eta S T^2 of a network for images, at any mu."""

_FEW_ROUNDS = 8
"""Number of rounds up to which anytime steps are for rows as they usually are; more arrive from wherever R is."""


_CORRELATED = frozenset(
    {"strategy.projection-radius", "mechanism.schedule", "strategy.release-rule", "batch-selection"}
)
_ANYTIME = frozenset({"strategy.steps", "strategy.window"})


class Mu2Method(Method, algorithm="mu2"):
    """DP-mu^2-FL with an untrusted server (reshef-levy-2025)."""

    sentence = "DP-mu^2-FL: the clients' noise cancels itself, the server is not trusted and runs mu^2-SGD."
    keys = Method.keys | _CORRELATED | _ANYTIME | BOUNDING
    presets = ("practical", "paper")
    sums_suffice = True
    with_trusted_server = "trusted-mu2"
    on_real_nodes = True
    strategy_type = Mu2

    def preset(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        if config.preset == "paper":
            constants = PaperConstants.of(model)
            clip_norm = constants.lipschitz + 2 * constants.smoothness * constants.diameter
            eta = self.paper_step(config, num_rounds, model, clip_norm)
            schedule = "uniform" if config.asked_per_round == config.num_clients else "paper"
            return Hyperparameters(clip_norm, eta, constants.diameter, schedule, "balanced")
        if config.steps == "anytime":
            norm = (typical_norm if num_rounds <= _FEW_ROUNDS else usual_norm)(config, model)
            eta = ANYTIME_RATE / (norm * model.num_parameters**0.125)
            return Hyperparameters(ANYTIME_CLIP * norm, eta, math.inf)
        # w moves by eta times a momentum that grows with t: eta = mu2_rate x mu^mu2_power / T^2.
        if recipe := image_network_recipe(config, model, self.noise_mu(config)):
            eta = _OF_NETWORKS / (recipe.clip * num_rounds**2)
            return Hyperparameters(recipe.clip, eta, math.inf)
        chosen = tuned(config)
        if chosen is None:
            return mu2_scaled(config, num_rounds, model)
        eta = chosen.mu2_rate * self.noise_mu(config) ** chosen.mu2_power / num_rounds**2
        eta = min(eta, largest_step(config, chosen.mu2_most, num_rounds, model))
        return Hyperparameters(chosen.mu2_clip_norm, eta, chosen.diameter)

    def check(self, config: RunConfig) -> None:
        super().check(config)
        if config.steps != "anytime" and config.window:
            raise refusal("strategy.window", "0 without strategy.steps = 'anytime'", config.window)
        if config.steps == "anytime" and config.preset == "paper":
            raise refusal("strategy.steps", "'constant' with preset = 'paper'", config.steps)
        if config.steps == "anytime" and self.strategy_type is not Mu2:
            raise refusal("strategy.steps", "'constant' with a strategy of your own", config.steps)

    def strategy(self, problem: ResolvedRun, common: Mapping[str, Any], *, deployed: bool) -> ReleaseStrategy[Any]:
        if problem.config.steps != "anytime":
            return super().strategy(problem, common, deployed=deployed)
        return AnytimeMu2(**common, **self.strategy_options(problem), window=problem.config.window)

    def mechanism(self, config: RunConfig) -> str:
        # The papers' noise, where their constants or one of its schedules are asked for by name.
        papers = config.preset == "paper" or config.schedule
        return "cancelling" if papers and not config.mechanism.kind else super().mechanism(config)

    def noise_mu(self, config: RunConfig) -> float:
        """Return the mu that the noise of a sum of releases would give each client for itself.

        What a tuned step is for.
        """
        return wanted_mu(config)

    def paper_step(self, config: RunConfig, num_rounds: int, model: Model, clip_norm: float) -> float:
        """Return the papers' eta, the smaller one of what noise and what smoothness allows."""
        constants = PaperConstants.of(model)
        clients, asked = config.num_clients, config.asked_per_round
        common = wanted_mu(config) * constants.diameter / (2 * clip_norm * num_rounds)
        if asked == clients:
            eta = common * math.sqrt(clients) / math.sqrt(model.num_parameters)
            return min(eta, 1 / (4 * constants.smoothness * num_rounds))
        eta = common * asked / math.sqrt(2 * clients * model.num_parameters * (1 + math.log(num_rounds)))
        return min(eta, 1 / (8 * constants.smoothness * num_rounds))


class TrustedMu2Method(Mu2Method, algorithm="trusted-mu2"):
    """DP-mu^2-FL with a trusted server (reshef-levy-2024)."""

    sentence = "DP-mu^2-FL with a server that is trusted with the clients' gradients and adds the noise for everybody."
    keys = Method.keys | {"strategy.projection-radius", "strategy.release-rule"} | BOUNDING
    trusted = True
    sums_suffice = False
    with_trusted_server = ""
    samples_return = False
    strategy_type = TrustedMu2

    def noise_mu(self, config: RunConfig) -> float:
        # One noise for everybody, which hides a sample that is one of m times as many.
        return wanted_mu(config) * math.sqrt(config.asked_per_round)

    def paper_step(self, config: RunConfig, num_rounds: int, model: Model, clip_norm: float) -> float:
        constants = PaperConstants.of(model)
        common = wanted_mu(config) * constants.diameter / (2 * clip_norm * num_rounds)
        eta = common * config.asked_per_round / math.sqrt(model.num_parameters)
        return min(eta, 1 / (4 * constants.smoothness * num_rounds))


class DelayedMomentumMethod(Mu2Method, algorithm="delayed-momentum"):
    """Delayed momentum (reshef-levy-2025, appendix G)."""

    sentence = "Delayed momentum: clients keep momenta of their own, which are averaged over those that are asked."
    keys = Method.keys | {"strategy.projection-radius", "mechanism.schedule"} | BOUNDING
    sums_suffice = False
    with_trusted_server = ""
    on_real_nodes = False
    strategy_type = DelayedMomentum

    def preset(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        # Appendix G: everything is tau = M / m times as large, averaged over m of M.
        values, delay = super().preset(config, num_rounds, model), config.num_clients / config.asked_per_round
        return replace(
            values, clip_norm=values.clip_norm * delay, learning_rate=values.learning_rate / math.sqrt(delay)
        )
