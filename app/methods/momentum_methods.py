"""Private momentum with a trusted server (tran-cutkosky-2022), and DP-SGD beside it: all machines in every round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...clients import NoisySGDClient
from ...privacy import NO_NOISE
from ...strategies import MOMENTUM_MECHANISMS, CorrelatedMomentum, ReducedTreeMomentum, TreeMomentum
from ..models.model import Model
from ..settings.registry import known_mechanism
from ..settings.run_config import RunConfig
from .method import BOUNDING, Method
from .presets import SGD, PaperConstants, sgd_preset, tuned, usual_norm
from .problem import Hyperparameters, Problem

_PATH = 30.0
"""The length of all normalised steps together, and so the furthest that w can come, for pixels."""
_SCORES = 300.0
"""How far they move the scores of the longest row, where no constants were chosen."""


class TreeMomentumMethod(Method):
    """Tree-aggregated momentum with normalised steps (algorithm 1)."""

    name = "tree-momentum"
    sentence = "Tree-aggregated momentum with normalised steps; the server is trusted."
    keys = Method.keys | {"alpha"} | BOUNDING
    trusted = True
    mechanisms = ()
    release_rule = "paper"
    presets = ("practical", "paper")
    everybody = True
    client_type = NoisySGDClient
    strategy_type = TreeMomentum

    def mechanism(self, config: RunConfig) -> str:
        # The machines add no noise; the mechanism that may be set is the server's.
        return NO_NOISE if not config.private else "independent"

    def preset(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        if config.preset == "paper":  # theorem 6
            epoch = max(num_rounds // config.passes, 1)
            eta = 1 / math.sqrt(epoch * num_rounds)
            return Hyperparameters(PaperConstants.of(model).lipschitz, eta, math.inf)
        return self._practical(config, num_rounds, model)

    def _practical(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        chosen = tuned(config)
        if chosen is None:
            bound = usual_norm(config, model)
            return Hyperparameters(SGD.clip * bound, _SCORES / (bound * num_rounds), math.inf)
        return Hyperparameters(chosen.sgd_clip_norm, _PATH / num_rounds, chosen.diameter)

    def strategy_options(self, problem: Problem) -> Mapping[str, Any]:
        return {"alpha": problem.config.alpha}

    def server_noise(self, config: RunConfig) -> str:
        return "tree"


class ReducedTreeMomentumMethod(TreeMomentumMethod):
    """Momentum of less sensitivity (algorithm 2)."""

    name = "reduced-tree-momentum"
    sentence = "Tree-aggregated momentum of less sensitivity, for smooth losses; the server is trusted."
    # Automatic clipping moves two gradients further apart than they were; it may not.
    keys = TreeMomentumMethod.keys - BOUNDING
    may_lose = False
    strategy_type = ReducedTreeMomentum

    def strategy_options(self, problem: Problem) -> Mapping[str, Any]:
        smoothness = float(getattr(problem.model, "smoothness", math.inf))
        return {**super().strategy_options(problem), "smoothness": smoothness}


class CorrelatedMomentumMethod(TreeMomentumMethod):
    """Momentum with any correlated noise."""

    name = "correlated-momentum"
    sentence = "Momentum with correlated noise of the server, normalised steps; the server is trusted."
    mechanisms = MOMENTUM_MECHANISMS
    default_server_mechanism = "blt"
    strategy_type = CorrelatedMomentum

    def strategy_options(self, problem: Problem) -> Mapping[str, Any]:
        config, options = problem.config, dict(problem.config.mechanism_options)
        mechanism = self.server_noise(config) if config.private else "independent"
        if mechanism == "blt" and config.passes > 1:
            separation = self.policy(problem, max(problem.sizes)).min_separation
            options |= {"num_participations": config.passes, "min_separation": separation}
        return {**super().strategy_options(problem), "mechanism": mechanism, "mechanism_options": options}

    def server_noise(self, config: RunConfig) -> str:
        return known_mechanism(config.mechanism) or self.default_server_mechanism


class TrustedSgdMethod(TreeMomentumMethod):
    """DP-SGD with a trusted server, to compare with."""

    name = "trusted-sgd"
    sentence = "DP-SGD with fresh noise of the server, to compare with; the server is trusted."
    keys = Method.keys | BOUNDING
    strategy_type = CorrelatedMomentum

    def _practical(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        return sgd_preset(config, num_rounds, model)

    def strategy_options(self, problem: Problem) -> Mapping[str, Any]:
        return {"alpha": 1.0, "normalised": False}

    def server_noise(self, config: RunConfig) -> str:
        return "fresh"
