"""Locally private online federated learning (zhang-2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...clients import OnlineClient
from ...strategies import OnlineFedSGD
from ..config import RunConfig
from ..models import Model
from .base import Method
from .problem import Hyperparameters, Problem

_LENGTH = 12.0
"""Of the synthetic(alpha, beta) task with 100 features, whose samples have norms around 10."""


class OnlineMethod(Method):
    """Online federated SGD: local steps on samples as they come."""

    name = "online"
    sentence = "Locally private online learning: machines take local steps, the server is not trusted."
    keys = Method.keys | {"clip-unit", "global-learning-rate", "release-rule"}
    clip_units = ("update", "contractive")
    local_steps = True
    has_regret = True
    on_real_nodes = True
    client_type = OnlineClient
    strategy_type = OnlineFedSGD

    def preset(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        # A convex loss of a margin has gradients no longer than its features, and then every step is short by itself.
        bounded = math.isfinite(getattr(model, "gradient_bound", math.inf))
        if bounded and getattr(model, "clips_contractively", False):
            return Hyperparameters(clip_norm=_LENGTH, learning_rate=0.01)
        return Hyperparameters(clip_norm=1.0, learning_rate=0.05)

    def strategy_options(self, problem: Problem) -> Mapping[str, Any]:
        config = problem.config
        return {"local_steps": config.batch_size, "global_learning_rate": config.global_learning_rate}
