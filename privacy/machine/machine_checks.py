"""What a machine's policy, ledger and data must be before it releases anything."""

from __future__ import annotations

import math
from dataclasses import replace

from ..accounting.noise_plan import NoisePlan
from ..errors import ConfigurationError
from ..ledger import Ledger
from .admission import ROUNDING
from .data_digest import RowBytes
from .policy import NO_NOISE, PrivacyPolicy
from .record_owners import Owners
from .row_bound import MOST_ROWS


def check_real(policy: PrivacyPolicy, ledger: Ledger, data: RowBytes | Owners | None, roster: str) -> None:
    """Refuse on a real machine what only a simulation may do."""
    if not ledger.durable:
        raise ConfigurationError(
            f"Expected a durable ledger on a real machine, got {type(ledger).__name__}: what it forgets when the "
            "process ends would be spent again."
        )
    if policy.noise_quality != "exact":
        raise ConfigurationError(
            f"Expected noise_quality 'exact' on a real machine, got {policy.noise_quality!r}: 'fast' noise is for "
            "simulation only."
        )
    if policy.mechanism == NO_NOISE:
        raise ConfigurationError(
            f"Expected a noise mechanism on a real machine, got {policy.mechanism!r}: runs without noise are for "
            "simulation only."
        )
    if data is None:
        raise ConfigurationError(
            "Expected `data` on a real machine, got none: the ledger must know the rows it was used with. Pass "
            "data=row_bytes(samples)."
        )
    if policy.samples_per_owner and not (isinstance(data, Owners) and data.marks is not None):
        raise ConfigurationError(
            "Expected the owners' places on a real machine to follow from their names, got rows in an order of their "
            "own: group them by Owners.of, and pass data=samples.owners."
        )
    if policy.trust == "secure-aggregation" and not roster:
        raise ConfigurationError(
            "Expected `roster` on a real machine under secure aggregation, got none: a session must not go on under "
            "another roster. Pass roster=masking.roster.digest."
        )


def with_ledgers_budget(policy: PrivacyPolicy, ledger: Ledger) -> PrivacyPolicy:
    """The policy, with the budget for what holds whatever happens that its ledger has, if it says nothing of it.

    Notes
    -----
    **Formal guarantees.** Only a missing budget is filled in: what all sessions release stays within the ledger's
    budget_local_mu, whatever happens.
    """
    if policy.trust != "secure-aggregation" or policy.budget_local_mu is not None or ledger.budget_local_mu is None:
        return policy
    return replace(policy, budget_local_mu=ledger.budget_local_mu)


def check_local_budget(policy: PrivacyPolicy, plan: NoisePlan, ledger: Ledger) -> None:
    """Refuse a policy not one session of which the budget for what holds whatever happens would allow."""
    if policy.trust == "secure-aggregation" and plan.mu_local > policy.local_budget * (1 + ROUNDING):
        raise ConfigurationError(
            f"Expected a budget_local_mu of at least {plan.mu_local * (1 + ROUNDING):.5g}, which one session with mu = "
            f"{policy.mu:g} and {policy.min_honest} honest machines takes of it, got {policy.local_budget:g}: not one "
            f"would be opened. Lower mu or min_honest.{ledger.local_hint}"
        )


def check_ledger(policy: PrivacyPolicy, ledger: Ledger) -> None:
    """Refuse a policy with another budget or delta than its ledger's, and one that its ledger cannot keep."""
    summed = policy.trust == "secure-aggregation"
    for name in ("budget_mu", "delta", *(("budget_local_mu",) if summed else ())):
        fixed, ours = getattr(ledger, name), getattr(policy, name)
        if fixed is not None and not math.isclose(fixed, ours, rel_tol=ROUNDING):
            raise ConfigurationError(
                f"Expected {name} = {fixed!r}, with which the ledger was made, got {ours!r} in the policy: "
                "everything on this machine's data shares one budget. Put the ledger's into the configuration."
            )


def check_samples(policy: PrivacyPolicy, num_samples: int) -> None:
    """Refuse a policy that needs more samples than the machine has."""
    if policy.sums_samples:
        if not 1 <= num_samples <= MOST_ROWS:
            raise ConfigurationError(
                f"Expected 1 to {MOST_ROWS} samples with order {policy.order!r}, got {num_samples}: counts of their "
                "sum would not be exact."
            )
        return
    releases, name, why = policy.max_participations, "max_participations", "each is used once"
    if policy.sample_participations > 1:
        releases, name, why = policy.min_separation, "min_separation", "so many are gone through"
    if policy.batch_size * releases > num_samples:
        raise ConfigurationError(
            f"Expected batch_size x {name} <= the machine's {num_samples} samples ({why}), got "
            f"{policy.batch_size} x {releases} = {policy.batch_size * releases}."
        )
