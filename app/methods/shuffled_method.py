"""Shuffled gradients on machines, with public samples (jiang-2026, where a machine is a silo)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients import ShuffledClient
from ...clients.adapters.per_sample_gradients import gradients_at
from ...privacy import ConfigurationError, PrivacyPolicy, ShuffledPolicy, epoch_words
from ...privacy.setting import refusal
from ...strategies import PublicEpochs, Regularizer, ShuffledAvg, private_rounds
from ...strategies.shuffled import penalty
from ..data.loading import public_shard
from ..models.model import Model
from ..settings.registry import registry
from ..settings.run_config import RunConfig
from .method import Method
from .presets import SGD, the_task, usual_norm, usual_smoothness
from .problem import Hyperparameters, Problem

_ROUNDING = 1e-12
_TRAVEL = 30.0
"""eta L of all steps of an epoch together."""


def regularization(config: RunConfig) -> tuple[Regularizer, float]:
    """Psi and its lambda or radius: the configuration's, or the task's."""
    task = the_task(config)
    kind = config.regularizer or task.regularizer
    strength = task.regularizer_strength if kind == task.regularizer else 0.0
    return kind, config.regularizer_strength or strength  # type: ignore[return-value]


class ShuffledMethod(Method):
    """Shuffled gradient methods whose intermediate iterates stay on the machine."""

    name = "shuffled"
    sentence = "Shuffled gradients: noise on every step of an epoch on the machine, public samples on either side."
    keys = frozenset(
        {
            *("variant", "order", "private-share", "public-samples"),
            *("regularizer", "regularizer-strength", "accounting"),
        }
    )
    mechanisms = ()
    default_mechanism = "independent"
    uses_public = True
    centres = False
    evaluates = False
    client_type = ShuffledClient
    strategy_type = ShuffledAvg

    def check(self, config: RunConfig) -> None:
        super().check(config)
        if the_task(config).public and config.public_samples:
            raise refusal("public_samples", "0 for a task with public samples of its own", config.public_samples)

    def settled(self, config: RunConfig, num_rounds: int, model: Model, sizes: Sequence[int]) -> Hyperparameters:
        """Clip and step in units of R; no longer a step than the paper's theorem covers."""
        share = min(_TRAVEL / max(sizes), 1.0)
        return Hyperparameters(SGD.clip * usual_norm(config, model), share / usual_smoothness(config, model))

    def rounds_of_a_pass(self, config: RunConfig, sizes: Sequence[int]) -> int:
        return 1  # an epoch

    def asked_rounds(self, config: RunConfig, num_rounds: int) -> range:
        return private_rounds(config.variant, num_rounds, config.private_share)  # type: ignore[arg-type]

    def releases_of(self, config: RunConfig, samples: int, fewest: int) -> tuple[float, str]:
        # An epoch takes all samples, and they return.
        return config.max_participations or math.inf, f"max-participations = {config.max_participations}"

    def policy(self, problem: Problem, samples: int) -> ShuffledPolicy:
        config, private = problem.config, samples
        if config.variant == "interleaved":
            private = max(round(config.private_share * samples), 1)
        asked = self.asked_rounds(config, problem.num_rounds)
        return ShuffledPolicy(
            clip_norm=problem.values.clip_norm,
            batch_size=samples,
            max_participations=config.max_participations or max(len(asked), 1),
            mu=config.mu,
            delta=config.delta,
            private_steps=private,
            public_steps=samples - private,
            accounting=config.accounting,  # type: ignore[arg-type]
            noise_quality=config.noise_quality,  # type: ignore[arg-type]
            mechanism=self.mechanism(config),
        )

    def client_options(self, problem: Problem, machine: int) -> Mapping[str, Any]:
        policy = self.policy(problem, problem.sizes[machine])
        return {
            "learning_rate": problem.values.learning_rate,
            "public": public_shard(problem.data, machine * policy.public_steps),
            "order": problem.config.order,
            "order_seed": problem.order_seed(machine),
        }

    def strategy_options(self, problem: Problem) -> Mapping[str, Any]:
        config, steps, model = problem.config, max(problem.sizes), problem.model
        rounds, epochs = self.asked_rounds(config, problem.num_rounds), None
        if len(rounds) < problem.num_rounds:
            shard = public_shard(problem.data, 0)
            if shard is None or len(shard) < steps:
                raise ConfigurationError(
                    f"Expected {steps} public samples, an epoch of a silo, for variant {config.variant!r}, got "
                    f"{0 if shard is None else len(shard)}: set public-samples, or use a task that has them."
                )
            public = shard
            epochs = PublicEpochs(
                lambda point, i: gradients_at(model, point[None], public[i : i + 1])[0], steps, problem.values.clip_norm
            )
        kind, strength = regularization(config)
        return {
            "steps_per_epoch": steps,
            "regularizer": kind,
            "strength": strength,
            "rounds": rounds,
            "public": epochs,
        }

    def brief_words(self, policy: PrivacyPolicy) -> str:
        return epoch_words(policy.accounting_used) if isinstance(policy, ShuffledPolicy) else policy.words

    def objective(self, problem: Problem, parameters: Sequence[NDArray[Any]], loss: float) -> float:
        kind, strength = regularization(problem.config)
        return loss + sum(float(penalty(kind, np.ravel(part), strength)) for part in parameters)

    def sweeps(self, config: RunConfig) -> bool:
        alone = config.num_clients == 1 and not config.lost_replies and config.max_participations == 0
        return alone and registry("model")[config.model].sweeps(config)

    def covers(self, config: RunConfig, prepare: Callable[[RunConfig], Problem]) -> bool:
        """Amplification needs eta <= 1 / L*, plain composition nothing."""
        if config.variant != "interleaved" or config.accounting != "amplified" or not config.private:
            return True
        problem = prepare(config)
        smoothness = float(getattr(problem.model, "smoothness", math.inf))
        return problem.values.learning_rate * smoothness <= 1.0 + _ROUNDING
