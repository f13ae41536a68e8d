"""A refusal of a mu that is too large says how large it may be."""

from __future__ import annotations

import math
from dataclasses import replace

from ...privacy import NO_NOISE, ConfigurationError, NoisePlan, PrivacyPolicy

_HALVINGS = 200
_BISECTIONS = 30


def plan_or_largest_mu(policy: PrivacyPolicy, num_parameters: int) -> NoisePlan:
    """A policy's plan; if its mu alone is too large for one, the refusal names the largest that is not.

    Parameters
    ----------
    policy : PrivacyPolicy
    num_parameters : int
        d.

    Raises
    ------
    ConfigurationError
        If there is no plan.

    Notes
    -----
    **Formal guarantees.** The plan is the policy's own: its releases are mu-GDP for replacement of one sample, and a mu
    that has no plan is refused and not made smaller.
    """
    try:
        return policy.plan(num_parameters)
    except ConfigurationError as error:
        largest = _largest_mu(policy, num_parameters)
        if largest is None:
            raise
        raise ConfigurationError(
            f"{error} Here mu may be at most {largest:.2g}; for a run without any noise, set mechanism={NO_NOISE}."
        ) from error


def _largest_mu(policy: PrivacyPolicy, num_parameters: int) -> float | None:
    """The largest mu below the policy's that has a plan, rounded down to two digits; None if no smaller one has."""

    def possible(mu: float) -> bool:
        try:
            replace(policy, mu=mu, budget_mu=None).plan(num_parameters)
        except ConfigurationError:
            return False
        return True

    low = next((mu for k in range(1, _HALVINGS) if possible(mu := policy.mu * 0.5**k)), None)
    if low is None:
        return None
    high = 2 * low
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    step = 10.0 ** (math.floor(math.log10(low)) - 1)
    return math.floor(low / step) * step
