"""What a second policy of a machine must have in common with the policy of everything else that it releases."""

from __future__ import annotations

from ...privacy import ConfigurationError, PrivacyPolicy

_IN_COMMON = ("budget_mu", "delta", "noise_quality", "trust", "min_honest", "min_cohort", "budget_local_mu")


def check_beside(own: PrivacyPolicy, policy: PrivacyPolicy, *, beside: str, release: str) -> None:
    """Refuse a policy of everything else with which a release of all samples cannot share samples or a budget.

    Parameters
    ----------
    own : PrivacyPolicy
        Of the release that takes every sample once.
    policy : PrivacyPolicy
        Of everything else.
    beside : str
        What the release is for, as in "beside centring".
    release : str
        What it is called, as in "the mean of features".

    Raises
    ------
    ConfigurationError

    Notes
    -----
    What a secret order is worth is counted for samples that show nowhere else, so that one is refused here.
    """
    short = release.split(" of ")[0]
    if policy.order == "in-turn" and policy.sample_participations == 1:
        raise ConfigurationError(
            f"Expected order 'again' beside {beside}, got 'in-turn': {short} takes every sample, and none would be "
            "left that no session has used."
        )
    if policy.order == "secret":
        raise ConfigurationError(
            f"Expected another order than 'secret' beside {beside}, got it: what a secret order is worth is counted "
            f"for samples that show nowhere else, and {short} is of all of them."
        )
    for name in _IN_COMMON:
        ours, theirs = getattr(own, name), getattr(policy, name)
        if ours != theirs:
            raise ConfigurationError(
                f"Expected one {name} for {release} and for everything else on this machine, got {ours!r} and "
                f"{theirs!r}."
            )
    if own.adds_noise != policy.adds_noise:
        raise ConfigurationError(
            f"Expected noise on {release} and on everything else, or on neither, got mechanism {own.mechanism!r} and "
            f"{policy.mechanism!r}."
        )
