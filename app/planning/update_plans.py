"""What noise on a project's own updates would leave of its model (``murmurfl plan --unit machine``), and the lines."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

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
from ...privacy.accounting.noise_forecast import rounded_count, shortest
from ..reports.table import Column, Table
from ..settings.trust_settings import SECURE, cohort_floor, honest_machines

EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""What is shown beside the epsilon that was asked for."""
_ROUNDS = 10
_NEAR = 0.01
_ROUNDING = 1e-6


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
    trust : {"untrusted-server", "secure-aggregation"}
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
        """What the noise of that policy would leave, from the very plan that a machine makes."""
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
        """What the updates would guarantee."""
        plan = self.policy().privacy_policy().plan(self.parameters)
        return update_guarantee(self.policy(), plan.mu, mu_local=plan.mu_local)


@dataclass(frozen=True)
class UpdatePlan:
    """A request worked out.

    Parameters
    ----------
    request : UpdateRequest
    forecast : Forecast
    rows : list of dict
        Of the table: the same for other epsilons.
    """

    request: UpdateRequest
    forecast: Forecast
    rows: list[dict[str, Any]]

    def document(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "request": asdict(self.request),
            "forecast": self.forecast.document(),
            "guarantee": self.request.guarantee.document(),
            "table": self.rows,
        }

    def lines(self) -> list[str]:
        """What people read above the table."""
        policy = self.request.policy()
        sums = f", trust={policy.trust!r}, min_honest={policy.min_honest}, min_cohort={policy.min_cohort}"
        given = (
            f"clip_norm={policy.clip_norm:g}, {self._wanted}, max_participations={policy.max_participations}"
            f"{sums if policy.trust == SECURE else ''}"
        )
        return [
            self.forecast.sentence,
            self.forecast.basis,
            *self.forecast.advice(),
            f"Guarantee: {self.request.guarantee.sentence}",
            "Run it:",
            f"    CorrelatedNoiseMod(simulation=UpdatePolicy({given}))",
        ]

    @property
    def _wanted(self) -> str:
        """Mu, or the epsilon that it was asked for by, as it is typed: down, so that no more is spent."""
        epsilon = gdp_epsilon(self.request.mu, self.request.delta)
        if math.isclose(epsilon, round(epsilon, 2), rel_tol=_ROUNDING):
            return f"epsilon={round(epsilon, 2):g}"
        return f"mu={math.floor(self.request.mu * 1e6) / 1e6}"

    def table(self) -> Table:
        """The noise over a typical update by epsilon, and how many machines would do."""
        return Table("Updates, all data of a machine protected", _COLUMNS, self.rows, self.request.guarantee.sentence)


_COLUMNS = (
    Column("epsilon", "for all data of a machine", form=".4g", label=True),
    Column("noise / longest", "noise in the average over the longest it can be", "longest", shortest),
    Column("noise / typical", "the same over a typical one, an estimate", "typical", shortest),
    Column("model", "what to expect of it", "verdict"),
    Column("machines needed", "for a useful one", "machines_needed", rounded_count),
    Column("under sums", "secure aggregation, half honest: noise over a typical one", "summed", shortest, missing=""),
    Column("one sample protected", "per-sample gradients: likewise", "sample", shortest),
)


def update_plan(request: UpdateRequest) -> UpdatePlan:
    """What is to be expected of a request.

    Parameters
    ----------
    request : UpdateRequest

    Raises
    ------
    ConfigurationError
        If no noise can do what is asked for.

    Notes
    -----
    The noise is that of the policy, and what it leaves an estimate.
    """
    forecast = request.forecast()
    asked = gdp_epsilon(request.mu, request.delta)
    wanted = {one: gdp_mu(one, request.delta) for one in EPSILONS if not math.isclose(one, asked, rel_tol=_NEAR)}
    wanted[asked] = request.mu
    rows = [
        {"epsilon": epsilon, **_figures(replace(request, mu=mu).forecast())} for epsilon, mu in sorted(wanted.items())
    ]
    return UpdatePlan(request, forecast, rows)


def _figures(forecast: Forecast) -> dict[str, Any]:
    summed = forecast.summed()
    return {
        "longest": forecast.ratio,
        "typical": forecast.typical_ratio,
        "verdict": forecast.verdict,
        "machines_needed": forecast.machines_needed,
        "summed": None if summed is None else summed.typical_ratio,
        "sample": forecast.per_sample(),
    }
