"""Locally private online federated learning (zhang-2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...clients import OnlineClient
from ...strategies import OnlineFedSGD
from ..models.model import Model
from ..settings.registry import registry
from ..settings.run_config import RunConfig
from .method import Method
from .presets import SGD, usual_norm, usual_smoothness
from .problem import Hyperparameters, Problem

_CLIP, _TRAVEL = 0.1, 7.5
"""Of whole updates: S / R, since gradients along the steps hardly agree, and eta L tau."""


class OnlineMethod(Method):
    """Online federated SGD: local steps on samples as they come."""

    name = "online"
    sentence = "Locally private online learning: machines take local steps, the server is not trusted."
    keys = Method.keys | {"clip-unit", "global-learning-rate", "release-rule"}
    clip_units = ("update", "contractive")
    local_steps = True
    has_regret = True
    centres = False
    sums_suffice = True
    on_real_nodes = True
    client_type = OnlineClient
    strategy_type = OnlineFedSGD

    def preset(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        kind, bound = registry("model")[config.model], usual_norm(config, model)
        longest = 1 / usual_smoothness(config, model)
        if config.clip_unit == "contractive":
            return Hyperparameters(SGD.clip * bound, longest)
        # Beyond 1 / L steps on scores still lead somewhere, and those on squares nowhere.
        eta = _TRAVEL / config.batch_size * longest
        return Hyperparameters(_CLIP * bound, eta if kind.scores else min(eta, longest))

    def strategy_options(self, problem: Problem) -> Mapping[str, Any]:
        config = problem.config
        return {"local_steps": config.batch_size, "global_learning_rate": config.global_learning_rate}
