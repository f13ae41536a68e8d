"""What a machine with an operator's file is, for the operator's log."""

from __future__ import annotations

from ...clients import PrivateClient
from ...privacy import policy_guarantee, rounded_up
from ...privacy.amplification import amplification_of


def describe(client: PrivateClient) -> str:
    """A machine and what it guarantees, in one sentence for its operator's log."""
    policy, plan = client.machine.policy, client.machine.plan
    name, releases = f"Machine {client.name}", policy.max_participations
    budget = rounded_up(policy.budget_mu or policy.mu)
    if policy.trust == "trusted-server":
        return (
            f"{name} adds NO noise to up to {releases} releases a run: the server is trusted with its gradients. "
            f"Against everybody else it is trusted to keep mu = {rounded_up(policy.mu)} a run; budget of all runs: "
            f"mu = {budget}."
        )
    amplified = amplification_of(policy, plan)
    guarantee = policy_guarantee(policy, plan.mu, mu_local=plan.mu_local, amplified=amplified)
    sums = (
        f" Every sum has at least {policy.min_cohort} releases of the roster's {len(client.masking.roster.machines)} "
        f"machines. Budget of all runs: mu = {budget}, and whatever happens mu = {rounded_up(policy.local_budget)}."
        if client.masking is not None
        else f" Budget of all runs: mu = {budget}."
    )
    each = "the sum of all samples" if policy.order == "all" else f"{policy.batch_size} samples"
    return f"{name}: up to {releases} releases of {each} a run, {guarantee.sentence}{sums}"
