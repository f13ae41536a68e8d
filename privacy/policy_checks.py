"""What of a policy does not go together, part by part (:class:`~murmurfl.privacy.PrivacyPolicy`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .asked import check_count, check_positive
from .errors import ConfigurationError
from .mechanisms import noise_stands_alone
from .moments import Moments
from .planning import MOST_SUMMED
from .words import NO_NOISE

if TYPE_CHECKING:
    from .policy import PrivacyPolicy


def check_sums(policy: PrivacyPolicy) -> None:
    """Refuse numbers of machines that make no sense, and releases that helpers could not tell apart."""
    for name in ("min_honest", "min_cohort"):
        check_count(name, getattr(policy, name))
    if policy.trust != "secure-aggregation":
        if (policy.min_honest, policy.min_cohort, policy.budget_local_mu) != (1, 1, None):
            raise ConfigurationError(
                "Expected min_honest, min_cohort and budget_local_mu only with trust 'secure-aggregation', got "
                f"{policy.min_honest}, {policy.min_cohort} and {policy.budget_local_mu!r} with {policy.trust!r}."
            )
        return
    if not policy.min_honest <= policy.min_cohort <= MOST_SUMMED:
        raise ConfigurationError(
            f"Expected min_honest <= min_cohort <= {MOST_SUMMED}, got {policy.min_honest} and {policy.min_cohort}: "
            "min_cohort is the honest machines of a sum and those that may work with the server."
        )
    alone = noise_stands_alone(policy.mechanism) or policy.mechanism == NO_NOISE
    if policy.release_rule == "paper" and not alone:
        raise ConfigurationError(
            "Expected release_rule 'acknowledged' under secure aggregation, or the mechanism 'independent', got "
            f"{policy.release_rule!r} with {policy.mechanism!r}: a helper opens a correlated release only if it is "
            "built on the last one that was opened."
        )
    shares = dict(policy.mechanism_options).get("shares", "uniform")
    if shares != "uniform":
        raise ConfigurationError(
            f"Expected shares 'uniform' under secure aggregation, got {shares!r}: machines of one sum may have "
            "made different numbers of releases, and each counts on the others' noise being as large as its own."
        )
    if policy.budget_local_mu is not None:
        check_positive("budget_local_mu", policy.budget_local_mu)


def check_moments(policy: PrivacyPolicy) -> None:
    """Refuse moments of no classes, and sums of them that are not over all samples."""
    if policy.clip_unit != "moments":
        if (policy.classes, policy.class_weight) != (0, 1.0):
            raise ConfigurationError(
                "Expected classes and class_weight only with clip_unit 'moments', got "
                f"{policy.classes} and {policy.class_weight} with {policy.clip_unit!r}."
            )
        return
    Moments(policy.classes, policy.class_weight)
    if policy.order != "all":
        raise ConfigurationError(f"Expected order 'all' with clip_unit 'moments', got {policy.order!r}.")


def check_owners(policy: PrivacyPolicy) -> None:
    """Refuse owners where a row of the machine's data is not what is clipped.

    An owner's samples are made one row, so it takes rows that are clipped as gradients are.
    """
    held = policy.samples_per_owner
    if isinstance(held, bool) or not isinstance(held, int) or held < 0:
        raise ConfigurationError(f"Expected samples_per_owner to be an integer >= 0, got {held!r}.")
    if held and policy.clip_unit != "sample":
        raise ConfigurationError(
            f"Expected clip_unit 'sample' with samples_per_owner, got {policy.clip_unit!r}: what is clipped is one row "
            "of gradients an owner."
        )
