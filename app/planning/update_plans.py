"""The forecast for noise on a project's own updates (``murmurfl plan --unit machine``), as data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ...clients import UpdatePolicy
from ...clients.adapters.update_policy import update_guarantee
from ...privacy import (
    ConfigurationError,
    Forecast,
    Guarantee,
    StatedNoise,
    Trust,
    forecast_of,
    gdp_epsilon,
    gdp_mu,
    stated_noise,
)
from ..settings.run_config import SECURE, cohort_floor, honest_machines

_EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Epsilons that are shown beside the one asked for."""
_ROUNDS = 10
_NEAR = 0.01


@dataclass(frozen=True)
class UpdateRequest:
    """Updates of machines that a project has, and what is wanted of them.

    Parameters
    ----------
    machines, parameters : int
        M and d.
    mu, delta : float
        Wanted for all data of a machine, over all its updates.
    per_round : int
        m; 0 for all.
    rounds : int
        T.
    clip_norm : float
        S, which does not matter to how much of the model is noise.
    colluders : int
        Machines of a sum that may work with the server; negative for what leaves half honest.
    samples : int
        Of a machine, for what privacy of one sample would leave; 0 where it is not known.
    """

    machines: int
    parameters: int
    mu: float
    delta: float = 1e-5
    per_round: int = 0
    rounds: int = _ROUNDS
    clip_norm: float = 1.0
    trust: Trust = "untrusted-server"
    colluders: int = -1
    samples: int = 0

    def __post_init__(self) -> None:
        if not self.per_round:
            object.__setattr__(self, "per_round", self.machines)
        for name in ("machines", "parameters", "per_round", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"Expected {name} >= 1, got {getattr(self, name)}.")
        if self.per_round > self.machines:
            raise ConfigurationError(f"Expected per_round <= {self.machines} machines, got {self.per_round}.")
        if self.samples < 0:
            raise ConfigurationError(f"Expected samples >= 0, got {self.samples}.")

    @property
    def releases(self) -> int:
        """K: how often a machine is asked, rounded up."""
        return -(-self.rounds * self.per_round // self.machines)

    def policy(self) -> UpdatePolicy:
        """The policy each machine would have."""
        floor, honest = 1, 1
        if self.trust == SECURE:
            floor = cohort_floor(self.per_round, 0)
            honest = honest_machines(self.per_round, floor, self.colluders)
        return UpdatePolicy(
            clip_norm=self.clip_norm,
            mu=self.mu,
            max_participations=self.releases,
            delta=self.delta,
            trust=self.trust,
            min_honest=honest,
            min_cohort=floor,
        )

    def forecast(self) -> Forecast:
        """The forecast of that policy's noise, from the very plan that a machine makes."""
        policy = self.policy().privacy_policy()
        plan = policy.plan(self.parameters)
        stated = StatedNoise(
            noise=float(stated_noise(policy, plan, 1)["noise-in-all"]),
            longest=self.clip_norm,
            releases=self.releases,
            mu=plan.mu,
            delta=self.delta,
            clip_unit="update",
            unit="machine",
            trust=self.trust,
            honest=policy.min_honest,
        )
        found = forecast_of(
            [stated],
            num_parameters=self.parameters,
            machines=self.machines,
            per_round=self.per_round,
            rounds=self.rounds,
            samples=self.samples,
        )
        if found is None:
            raise ConfigurationError("Expected a policy with noise, got one without.")
        return found

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of the updates."""
        plan = self.policy().privacy_policy().plan(self.parameters)
        return update_guarantee(self.policy(), plan.mu, mu_local=plan.mu_local)


def by_epsilon(request: UpdateRequest) -> list[tuple[float, Forecast]]:
    """The forecasts of a request at its own epsilon and at others, the smallest first."""
    asked = gdp_epsilon(request.mu, request.delta)
    wanted = {one: gdp_mu(one, request.delta) for one in _EPSILONS if not math.isclose(one, asked, rel_tol=_NEAR)}
    wanted[asked] = request.mu
    return [(epsilon, replace(request, mu=mu).forecast()) for epsilon, mu in sorted(wanted.items())]
