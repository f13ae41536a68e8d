"""A problem whose model machines evaluate privately: what comes after the training, and what is left for it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients import Evaluation
from ...privacy import ConfigurationError, NoisePlan, SimulatedKeys, divided_mu
from ...strategies import PrivateEvaluation, TrustedPrivateEvaluation
from .centred import CentredProblem
from .centring_settings import is_centred
from ..settings.run_config import RunConfig
from .evaluation_settings import is_evaluated, make_evaluation, trained_samples
from ..methods import Problem
from ..methods.presets import plan_or_largest_mu
from .permitted_run import EVALUATION, session_options
from ..data.shards import shard_sizes


def trained_config(config: RunConfig) -> RunConfig:
    """A run configuration with the mu that is left for the training, after the mean of the features and evaluation."""
    shares = config.centring_share if is_centred(config) else 0.0
    shares += config.private_evaluation
    return replace(config, mu=divided_mu(config.mu, shares)[1]) if shares else config


@dataclass(frozen=True)
class EvaluatedProblem(CentredProblem):
    """A problem, with an evaluation where machines release one; the base of an experiment."""

    @cached_property
    def is_evaluated(self) -> bool:
        """Whether machines say privately, after the training, how good the model is."""
        return is_evaluated(self.config)

    @cached_property
    def trained(self) -> Problem:
        """What the method is about: the training alone, with what mu^2 is left for it."""
        if not self.is_centred and not self.is_evaluated:
            return self
        return Problem(trained_config(self.config), self.data, self.shards, self.model, self.num_rounds, self.values)

    @property
    def uses_beside(self) -> int:
        """In how many releases beside the training's a sample is that is trained on."""
        return self.is_centred + (self.is_evaluated and not self.config.held_out)

    def evaluation(self, machine: int | None = None) -> Evaluation | None:
        """The evaluation of a simulated machine; None without. ``machine`` None for the one with the most samples."""
        config = self.config
        if not self.is_evaluated:
            return None
        samples = max(shard_sizes(self.shards)) if machine is None else len(self.shards[machine])
        return make_evaluation(
            self.policy(machine),
            self.model,
            mu=config.mu,
            share=config.private_evaluation,
            bins=config.score_bins,
            held_out=samples - trained_samples(config, samples),
        )

    @cached_property
    def evaluation_plan(self) -> NoisePlan | None:
        """The noise of the evaluation; None without one."""
        own = self.evaluation()
        return None if own is None else plan_or_largest_mu(own.policy, own.rows.width)

    @property
    def evaluation_mu(self) -> float:
        """Mu of the evaluation; 0 without one."""
        own = self.evaluation()
        if own is None or self.evaluation_plan is None:
            return 0.0
        server = self.evaluation_strategy()
        if isinstance(server, TrustedPrivateEvaluation):
            return server.trust.guaranteed_mu(own.rows.width)
        return self.evaluation_plan.mu

    def evaluation_strategy(
        self,
        *,
        deployed: bool = False,
        checkpoint: Path | None = None,
        centre: NDArray[np.float32] | None = None,
    ) -> PrivateEvaluation:
        """The server's half of the evaluation, which comes after the training.

        Raises
        ------
        ConfigurationError
            Without one.
        """
        own, plan = self.evaluation(), self.evaluation_plan
        if own is None or plan is None:
            raise ConfigurationError("Expected private-evaluation > 0 for an evaluation, got a run without.")
        config = self.config
        common: dict[str, Any] = {
            "num_clients": config.num_clients,
            "bins": own.bins,
            "scores_share": own.scores_share,
            "seed": config.seed,
            **session_options(config, self.evaluation_session, EVALUATION, deployed=deployed),
            "largest_value": plan.largest_value,
            "node_deadline_s": config.node_deadline_s,
            "checkpoint": checkpoint,
            **({} if centre is None else {"centre": centre}),
            **self.summation(deployed=deployed),
        }
        if own.policy.trust != "trusted-server":
            return PrivateEvaluation(**common)
        keys = None if deployed else SimulatedKeys(config.seed, "server, evaluation")
        return TrustedPrivateEvaluation(policy=own.policy, noise_keys=keys, **common)

    @property
    def evaluation_session(self) -> str:
        """The name of the evaluation's session in simulation; it depends on the seed alone."""
        return hashlib.sha256(f"evaluation, seed {self.config.seed}".encode()).hexdigest()[:32]
