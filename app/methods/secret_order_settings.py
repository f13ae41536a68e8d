"""A secret order as a run has it: what it goes together with, and what it is worth for all of its machines."""

from __future__ import annotations

from collections.abc import Iterable

from ...privacy import PrivacyPolicy
from ...privacy.accounting.amplification import Amplification, amplification_of_all
from ...privacy.setting import refusal
from ..settings.run_config import RunConfig


def check_secret_order(config: RunConfig) -> None:
    """Refuse samples that return under a secret order."""
    if config.secret_order and config.passes > 1:
        raise refusal("passes", "1 with secret-order = true: each sample is in one release", config.passes)


def worth_of_order(policies: Iterable[PrivacyPolicy], num_parameters: int) -> Amplification | None:
    """What the secret order of several machines is worth, of the one for which it is worth least; None without one.

    Parameters
    ----------
    num_parameters : int
        Values of a release.

    Notes
    -----
    **Formal guarantees.** The epsilon bounds what every machine's releases show for replacement of one sample, as long
    as the orders stay secret.
    """
    known = list(dict.fromkeys(policies))
    if not all(policy.order == "secret" and policy.adds_noise for policy in known):
        return None
    return amplification_of_all([(policy, policy.plan(num_parameters)) for policy in known])
