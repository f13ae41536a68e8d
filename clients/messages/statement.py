"""What a machine says of itself when it is asked: the entries of an answer to a query."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...privacy import LedgeredMachine, PrivacyPolicy, PrivacyStatement, protocol
from ...privacy.accounting.stated_noise import stated_noise


def statement_entries(machine: LedgeredMachine, session: str, beside: Sequence[LedgeredMachine] = ()) -> dict[str, Any]:
    """What a machine has spent in a session and what it guarantees, as plain values; independent of its data.

    Parameters
    ----------
    machine : LedgeredMachine
    session : str
    beside : sequence of LedgeredMachine
        What release the mean of the features that the session's releases are made around, and an evaluation of the
        model, in sessions of their own: a training is all of them, and the figures are of all together.
    """
    statement = machine.statement(session)
    for other in beside:
        statement = _with_release(statement, other)
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
        **_of_owners(machine.policy),
        **stated_noise(machine.policy, machine.plan, machine.num_samples),
        **{name: value for name, value in sums.items() if value is not None},
    }


def _of_owners(policy: PrivacyPolicy) -> dict[str, str | int]:
    """That the unit is an owner, and how many samples of one are used at most; empty where it is a sample."""
    return {"unit": policy.unit, "samples-per-owner": policy.samples_per_owner} if policy.samples_per_owner else {}


def _with_release(statement: PrivacyStatement, other: LedgeredMachine) -> PrivacyStatement:
    """A session's statement, with what the one release of another session adds to it."""
    # The mean takes every sample, so that none are used before it. An evaluation comes last: it is counted from the
    # first release on, as what is reserved for it.
    spent = other.plan.mu if statement.samples_used else 0.0
    local = None if statement.mu_local is None else math.hypot(statement.mu_local, other.plan.mu_local)
    return replace(
        statement,
        mu_spent=math.hypot(statement.mu_spent, spent),
        mu_guaranteed=math.hypot(statement.mu_guaranteed, other.plan.mu),
        mu_local=local,
    )
