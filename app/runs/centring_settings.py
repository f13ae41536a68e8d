"""Private centring as a run has it: whether it is wanted, what bounds its release, and how mu is divided.

What it is stands in :mod:`murmurfl.privacy.side.centring_query`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...clients import Centring
from ...privacy import CENTRING_SHARE, PrivacyPolicy, centring_policy, divided_mu
from ...privacy.machine.tables import NONE as NONE
from ...privacy.machine.tables import PRIVATE as PRIVATE
from ...privacy.setting import refusal
from ..settings.registry import registry
from ..settings.run_keys import RunKeys

KEPT = ("delta", "noise_quality", "trust", "min_honest", "min_cohort", "budget_local_mu")
"""What the mean's release has in common with everything else on a machine."""


def is_centred(config: RunKeys) -> bool:
    """Whether machines release the mean of their features first: as set, or as the features have it by themselves."""
    if config.centring:
        return config.centring == PRIVATE
    if config.samples_per_owner:  # the mean is one of samples
        return False
    return without_being_asked(config.strategy, config.features, secret_order=config.secret_order)


def without_being_asked(strategy: str, features: str, *, secret_order: bool) -> bool:
    """Whether features have centring by themselves, with a method that can have it."""
    wanted = registry("features")[features].centring == PRIVATE
    return wanted and registry("strategy")[strategy].centres and not secret_order


def check_centring(config: RunKeys) -> None:
    """Refuse centring where a method cannot have it, and its share where there is none.

    Raises
    ------
    ConfigurationError
    """
    method = registry("strategy")[config.strategy]
    if config.centring == PRIVATE and not method.centres:
        able = ", ".join(name for name, one in registry("strategy").items() if one.centres)
        raise refusal(
            "centring",
            f"'none' or empty with strategy = {config.strategy!r}, which takes samples as they come or has public ones "
            f"beside them (strategies with centring: {able})",
            config.centring,
        )
    if config.centring == PRIVATE and config.secret_order:
        raise refusal("centring", "'none' or empty with secret-order = true: the mean shows every sample", PRIVATE)
    if config.centring == PRIVATE and config.samples_per_owner:
        raise refusal("centring", "'none' or empty with samples-per-owner: the mean is one of samples", PRIVATE)
    if config.centring_share != CENTRING_SHARE and not is_centred(config):
        raise refusal("centring_share", f"{CENTRING_SHARE} without centring = {PRIVATE!r}", config.centring_share)


def features_bound(task: str, features: str, num_features: int, feature_bound: float) -> tuple[float, bool]:
    """How long a row of a task's features can be, and whether it has no negative values, by how they are made.

    Parameters
    ----------
    task, features : str
        Their names.
    num_features : int
        Values of one sample.
    feature_bound : float
        R of the run, for features that are bounded by nothing else.

    Notes
    -----
    Machines enforce both on every row. It is public, never taken from data.
    """
    the_task = registry("task")[task]
    bound = math.sqrt(the_task.squared_norm_bound(features, num_features, feature_bound))
    return bound, registry("features")[features].nonnegative and the_task.has_images


def make_centring(
    policy: PrivacyPolicy, bound: tuple[float, bool], num_features: int, *, mu: float, share: float
) -> Centring:
    """A machine's centring beside a policy of everything else, with its share of mu^2.

    Parameters
    ----------
    policy : PrivacyPolicy
        Of everything else.
    bound : tuple of float and bool
        What :func:`features_bound` says.
    num_features : int
        Values of one sample.
    mu : float
        Of a training, the mean and everything else together.
    share : float

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy (:func:`~murmurfl.privacy.centring_policy`) the release of the
    mean is mu-GDP for replacement of one sample; it stands alone and takes every sample.
    """
    kept: dict[str, Any] = {name: getattr(policy, name) for name in KEPT}
    length, nonnegative = bound
    mean = centring_policy(
        length,
        nonnegative=nonnegative,
        mu=divided_mu(mu, share)[0],
        mechanism=policy.mechanism,
        budget_mu=policy.budget_mu,
        **kept,
    )
    return Centring(mean, num_features)


def beside_mean(policy: PrivacyPolicy, budget_mu: float) -> PrivacyPolicy:
    """A policy of everything else, where the mean takes every sample first: samples are taken again, within a budget.

    Notes
    -----
    **Formal guarantees.** A sample is in two sessions then, the mean's and one other, which the budget counts together:
    everything is budget_mu-GDP for replacement of one sample.
    """
    once = policy.order == "in-turn" and policy.sample_participations == 1
    return replace(policy, budget_mu=budget_mu, order="again" if once else policy.order)
