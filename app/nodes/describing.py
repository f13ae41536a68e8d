"""A real machine or helper in one sentence, for its operator's log: what it releases, and what that guarantees."""

from __future__ import annotations

import math

from ...clients import PrivateClient, UpdateNode
from ...clients.adapters.update_policy import update_guarantee
from ...privacy import Opener, SQLiteLedger, policy_guarantee, rounded_up
from ...privacy.accounting.amplification import amplification_of
from ...privacy.accounting.guarantee import RECORDS
from .helper_config import HelperConfig


def describe(client: PrivateClient) -> str:
    """Describe a machine and its guarantee in one sentence."""
    policy, plan = client.machine.policy, client.machine.plan
    name, releases = f"Machine {client.name}", policy.max_participations
    budget = rounded_up(policy.budget)
    mean = None if client.centred is None else client.centred.machine
    evaluated = None if client.evaluated is None else client.evaluated.machine
    beside = client.beside
    # Whether an owner has more samples depends on data: the sentence does not.
    most = policy.samples_per_owner
    kept = f" Of each owner the first {most} samples are used, and any others left out." if most else ""
    if policy.trust == "trusted-server":
        mu = math.hypot(policy.mu, *(machine.policy.mu for machine in beside))
        also = "" if mean is None else ", and to the mean of its features before them"
        also += "" if evaluated is None else ", and to how good a model is on its samples after them"
        return (
            f"{name} adds NO noise to up to {releases} releases a run{also}: the server is trusted with its gradients. "
            f"Against everybody else it is trusted to keep mu = {rounded_up(mu)} a run; budget of all runs: "
            f"mu = {budget}.{kept}"
        )
    mu = math.hypot(plan.mu, *(machine.plan.mu for machine in beside)) if beside else plan.mu
    mu_local = math.hypot(plan.mu_local, *(machine.plan.mu_local for machine in beside)) if beside else plan.mu_local
    notes = []
    if mean is not None:
        notes.append(f"Of it mu = {rounded_up(mean.plan.mu)} is for the mean of its features, which it releases first.")
    if evaluated is not None:
        share = rounded_up(evaluated.plan.mu)
        notes.append(f"Of it mu = {share} is for a private evaluation of the model, which it releases last.")
    if client.record_kind:
        notes.append(RECORDS[client.record_kind])
    amplified = amplification_of(policy, plan)
    guarantee = policy_guarantee(policy, mu, mu_local=mu_local, amplified=amplified, notes=notes)
    sums = (
        f" Every sum has at least {policy.min_cohort} releases of the roster's {len(client.masking.roster.machines)} "
        f"machines. Budget of all runs: mu = {budget}, and whatever happens mu = {rounded_up(policy.local_budget)}."
        if client.masking is not None
        else f" Budget of all runs: mu = {budget}."
    )
    rows, counted = ("owners", "places of owners") if most else ("samples", "samples")
    each = f"the sum of all {rows}" if policy.order == "all" else f"{policy.batch_size} {counted}"
    return f"{name}: up to {releases} releases of {each} a run, {guarantee.sentence}{sums}{kept}"


def describe_own(node: UpdateNode) -> str:
    """Describe a machine with its own ClientApp and its guarantee in one sentence."""
    policy = node.policy(SQLiteLedger(node.ledger))
    budget = rounded_up(policy.budget_mu or policy.mu)
    return (
        f"Machine {node.machine}: up to {policy.max_participations} releases of the updates of {node.app} a run, "
        f"{update_guarantee(policy, policy.mu).sentence} Budget of all runs: mu = {budget}."
    )


def describe_helper(config: HelperConfig, opener: Opener) -> str:
    """Describe a helper in one sentence."""
    roster = opener.roster
    others = len(roster.helpers) - 1
    beside = f"beside {others} other helper{'s' * (others != 1)}" if others else "as the only helper"
    return (
        f"Helper {config.helper}: opens sums of releases of the {len(roster.machines)} machines of the roster with "
        f"digest {roster.digest}, {beside}, by the record at {config.record}."
    )
