"""The conversion between Renyi-DP and epsilon that jiang-2026 uses, beside our own (:mod:`.gdp`)."""

from __future__ import annotations

import math

from ..errors import ConfigurationError
from .gdp import gdp_epsilon


def rdp_epsilon(mu: float, delta: float) -> float:
    """The paper's conversion: epsilon at delta of (a, a mu^2 / 2)-RDP for all orders a, by its best order.

    Notes
    -----
    **Formal guarantees.** An upper bound (Mironov 2017, proposition 3) for whatever has this RDP curve. A mu-GDP
    mechanism has it and a smaller epsilon, :func:`~murmurfl.privacy.gdp_epsilon`.
    """
    gdp_epsilon(mu, delta)  # the checks of both arguments
    return mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))


def rdp_mu(epsilon: float, delta: float) -> float:
    """The mu whose RDP curve the paper's conversion turns into epsilon at delta.

    Notes
    -----
    **Formal guarantees.** Whatever is mu-GDP for the result, and so has this RDP curve, is (epsilon, delta)-DP for the
    same neighbouring relation: the inverse of :func:`rdp_epsilon` up to rounding.
    """
    if not (math.isfinite(epsilon) and epsilon > 0 and 0 < delta < 1):
        raise ConfigurationError(f"Expected epsilon > 0 and delta between 0 and 1, got {epsilon!r} and {delta!r}.")
    logarithm = math.log(1 / delta)
    return math.sqrt(2 * logarithm + 2 * epsilon) - math.sqrt(2 * logarithm)
