"""A problem whose samples are seen from a private mean: what comes before the training, and what is left for it."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...clients import Centring
from ...privacy import ConfigurationError, NoisePlan, PrivacyPolicy, SimulatedKeys, centred
from ...privacy.sums.roster import Roster
from ...strategies import MeanOfFeatures, SecureAggregation, TrustedMeanOfFeatures
from .centring_settings import features_bound, is_centred, make_centring
from ..methods import Problem
from ..methods.presets import plan_or_largest_mu
from ..methods.presets import feature_bound
from .permitted_run import MEAN, session_options
from ..settings.trust_settings import SECURE, helper_names

_FOR_EVER = 2**31
"""Rounds in which helpers are waited for, where that is never given up."""


@dataclass(frozen=True)
class CentredProblem(Problem):
    """A problem, with the mean of the features where machines release it first; the base of an experiment."""

    @abstractmethod
    def policy(self, machine: int | None = None) -> PrivacyPolicy:
        """The policy of everything but the mean that an engine gives a simulated machine."""

    @cached_property
    def roster(self) -> Roster:
        """The machines and helpers of a simulation under secure aggregation; their keys are the seed's.

        Raises
        ------
        ConfigurationError
            Under another trust model.

        Notes
        -----
        Whoever knows the seed knows every key. Real machines have rosters of their own.
        """
        if not self.config.secure:
            raise ConfigurationError(f"Expected trust = {SECURE!r} for a roster, got {self.config.trust_model!r}.")
        machines = tuple(str(machine) for machine in range(self.config.num_clients))
        return Roster.simulated(self.config.seed, machines, helper_names(self.config.helpers))

    @cached_property
    def is_centred(self) -> bool:
        """Whether machines release the mean of their features first."""
        return is_centred(self.config)

    @cached_property
    def centring(self) -> Centring | None:
        """The centring of every simulated machine, the same for all; None without."""
        if not self.is_centred:
            return None
        config, num_features = self.config, self.model.num_features - 1
        bound = features_bound(config.task, config.features, num_features, feature_bound(config))
        return make_centring(self.policy(), bound, num_features, mu=config.mu, share=config.centring_share)

    @cached_property
    def mean_plan(self) -> NoisePlan | None:
        """The noise of the mean of the features; None without centring."""
        if self.centring is None:
            return None
        return plan_or_largest_mu(self.centring.policy, self.centring.num_features)

    @property
    def mean_mu(self) -> float:
        """Mu of the mean of the features; 0 without centring."""
        if self.mean_plan is None or self.centring is None:
            return 0.0
        server = self.mean_strategy()
        if isinstance(server, TrustedMeanOfFeatures):
            return server.trust.guaranteed_mu(self.centring.num_features)
        return self.mean_plan.mu

    @property
    def mean_session(self) -> str:
        """The name of the mean's session in simulation; it depends on the seed alone."""
        return hashlib.sha256(f"mean, seed {self.config.seed}".encode()).hexdigest()[:32]

    def mean_strategy(self, *, deployed: bool = False, checkpoint: Path | None = None) -> MeanOfFeatures:
        """The server's half of the mean of the features, which comes before the training.

        Raises
        ------
        ConfigurationError
            Without centring.
        """
        if self.centring is None or self.mean_plan is None:
            raise ConfigurationError("Expected centring = 'private' for a mean of features, got a run without.")
        config, policy = self.config, self.centring.policy
        common: dict[str, Any] = {
            "num_features": self.centring.num_features,
            "num_clients": config.num_clients,
            "seed": config.seed,
            **session_options(config, self.mean_session, MEAN, deployed=deployed),
            "largest_value": self.mean_plan.largest_value,
            "node_deadline_s": config.node_deadline_s,
            "checkpoint": checkpoint,
            **self.summation(deployed=deployed),
        }
        if policy.trust != "trusted-server":
            return MeanOfFeatures(**common)
        keys = None if deployed else SimulatedKeys(config.seed, "server, mean")
        return TrustedMeanOfFeatures(policy=policy, noise_keys=keys, **common)

    def seen_from(self, centre: NDArray[np.float32]) -> Self:
        """The same, with what is evaluated on as machines see it; their own samples stay as they are.

        Raises
        ------
        ConfigurationError
            Without centring.
        """
        if self.centring is None:
            raise ConfigurationError("Expected centring = 'private' for a centre, got a run without.")
        seen = partial(centred, centre=centre, constant=self.centring.constant)
        data = replace(self.data, test_features=seen(self.data.test_features))
        if self.config.gradient_norm:  # which a simulation computes from all samples
            data = replace(data, train_features=seen(data.train_features))
        return replace(self, data=data)

    def summation(self, *, deployed: bool) -> dict[str, SecureAggregation]:
        """What a strategy is told of secure aggregation, if anything."""
        config = self.config
        if not config.secure:
            return {}
        told = SecureAggregation(
            min_cohort=config.cohort_floor,
            helpers=config.helpers,
            patience=config.give_up_after or _FOR_EVER,
            roster="" if deployed else self.roster.digest,
        )
        return {"secure_aggregation": told}
