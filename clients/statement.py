"""What a machine says of itself when it is asked: the entries of an answer to a query."""

from __future__ import annotations

from typing import Any

from ..privacy import LedgeredMachine, protocol


def statement_entries(machine: LedgeredMachine, session: str) -> dict[str, Any]:
    """What a machine has spent in a session and what it guarantees, as plain values; independent of its data."""
    statement = machine.statement(session)
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
        **{name: value for name, value in sums.items() if value is not None},
    }
