"""What one mu costs under each trust model: noise on a machine and at the server, and what holds whatever happens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...privacy import ConfigurationError, Guarantee, NoisePlan, Trust, gdp_epsilon, rounded_up
from ..reports.table import Column, Table
from ..settings.trust_settings import SECURE
from .request import PlanRequest


@dataclass(frozen=True)
class TrustPlan:
    """One trust model with one mechanism; errors are standard deviations of one value, in units of the clip norm.

    Parameters
    ----------
    trust : {"untrusted-server", "secure-aggregation", "trusted-server"}
    assumes : str
        What mu rests on, in words.
    mu_local, epsilon_local : float or None
        What holds against the server whatever happens; None where nothing does.
    noise_std : float
        In front of the mechanism's rows, on each machine; 0 under a trusted server.
    server_prefix_rmse : float
        Noise of the prefix sums of the server's averages. A trusted server is counted as one machine that adds noise
        for all of them.
    """

    trust: Trust
    assumes: str
    mu_local: float | None
    epsilon_local: float | None
    noise_std: float
    server_prefix_rmse: float


def prefix_errors(plan: NoisePlan) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Standard deviations of a machine's prefix sums, release by release."""
    releases = range(1, plan.mechanism.num_releases + 1)
    return np.array([plan.mechanism.row_std(release) for release in releases]) * plan.noise_std


def rms(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.mean(values**2)))


def compared_trusts(request: PlanRequest, mechanism: str, options: dict[str, str]) -> list[TrustPlan]:
    """The trust models with a mechanism; one whose noise cannot be planned is left out.

    Parameters
    ----------
    request : PlanRequest
        Whose own trust model does not matter; its h does, where it has one.
    mechanism : str
    options : dict
        The mechanism's.

    Notes
    -----
    Each row's mu is the request's, under what the row assumes: for ``secure-aggregation`` what the machines' policy
    plans, for a trusted server the same noise once in the place of once a machine.
    """
    made: list[TrustPlan] = []
    for trust in ("untrusted-server", SECURE):
        asked = request.trusting(trust)
        try:
            plan = asked.policy(mechanism, options).plan(asked.parameters)
        except ConfigurationError:
            continue
        error = math.sqrt(asked.machines) / asked.per_round * rms(prefix_errors(plan))
        local = plan.mu_local if math.isfinite(plan.mu_local) else None
        epsilon = None if local is None else gdp_epsilon(local, asked.delta)
        made.append(TrustPlan(trust, _assumed(asked), local, epsilon, plan.noise_std, error))
    if made and made[0].trust == "untrusted-server":
        once = made[0].server_prefix_rmse / math.sqrt(request.machines)
        made.append(TrustPlan("trusted-server", "the server is honest", None, None, 0.0, once))
    return made


def _assumed(request: PlanRequest) -> str:
    if not request.secure:
        return "nothing"
    return f"1 helper and {request.min_honest} of {request.min_cohort} machines of each sum are honest"


_COLUMNS = (
    Column("trust", "the run-config key", "trust", label=True),
    Column("mu rests on", "what is assumed", "assumes"),
    Column("mu whatever happens", "against the server", "mu_local", rounded_up, missing="none"),
    Column("epsilon then", "of that mu", "epsilon_local", rounded_up, missing="none"),
    Column("noise std", "on each machine, in front of the mechanism's rows", "noise_std", ".4g"),
    Column("at the server", "noise of the prefix sums of the server's averages", "server_prefix_rmse", ".4g"),
)


def trust_table(rows: list[TrustPlan], mechanism: str, guarantee: Guarantee) -> Table:
    """What each trust model costs for the same mu."""
    return Table(
        f"The same mu, by who is trusted ({mechanism})", _COLUMNS, [vars(row) for row in rows], guarantee.sentence
    )
