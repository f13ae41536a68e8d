"""What a machine says of itself when it is asked: the entries of an answer to a query."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ..privacy import LedgeredMachine, PrivacyStatement, protocol
from ..privacy.stated_noise import stated_noise


def statement_entries(machine: LedgeredMachine, session: str, mean: LedgeredMachine | None = None) -> dict[str, Any]:
    """What a machine has spent in a session and what it guarantees, as plain values; independent of its data.

    Parameters
    ----------
    machine : LedgeredMachine
    session : str
    mean : LedgeredMachine, optional
        What releases the mean of the features that the session's releases are made around, in a session of its own:
        a training is both, and the figures are of both together.
    """
    statement = machine.statement(session)
    if mean is not None:
        statement = _with_mean(statement, mean)
    sums = {
        protocol.MU_LOCAL: statement.mu_local,
        protocol.MIN_HONEST: statement.min_honest,
        protocol.MIN_COHORT: statement.min_cohort,
    }
    return {
        "releases": statement.releases,
        "mu-spent": statement.mu_spent,
        "mu-guaranteed": statement.mu_guaranteed,
        "mu-budget": statement.mu_budget,
        "samples-used": statement.samples_used,
        "max-participations": statement.max_participations,
        protocol.RELEASES_LEFT: statement.releases_left,
        "delta": machine.policy.delta,
        "mechanism": machine.policy.mechanism,
        "trust": machine.policy.trust,
        "noise-quality": machine.policy.noise_quality,
        "noise-std": machine.plan.noise_std,
        "sensitivity": machine.plan.sensitivity,
        **stated_noise(machine.policy, machine.plan, machine.num_samples),
        **{name: value for name, value in sums.items() if value is not None},
    }


def _with_mean(statement: PrivacyStatement, mean: LedgeredMachine) -> PrivacyStatement:
    """A session's statement, with what one release of the mean adds to it."""
    # A release takes every sample, so that none are used before the first.
    spent = mean.plan.mu if statement.samples_used else 0.0
    local = None if statement.mu_local is None else math.hypot(statement.mu_local, mean.plan.mu_local)
    return replace(
        statement,
        mu_spent=math.hypot(statement.mu_spent, spent),
        mu_guaranteed=math.hypot(statement.mu_guaranteed, mean.plan.mu),
        mu_local=local,
    )
