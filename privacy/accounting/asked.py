"""What somebody asks for in numbers: privacy as a mu or as an epsilon, and values that are above zero."""

from __future__ import annotations

import math
from typing import Any

from ..errors import ConfigurationError
from .gdp import gdp_mu


def asked_mu(mu: float, epsilon: float | None, delta: float) -> float:
    """The Gaussian-DP parameter that is asked for, in one of two ways.

    Parameters
    ----------
    mu : float
        As itself; 0 where it is not given.
    epsilon : float, optional
        As the epsilon of (epsilon, delta)-DP.
    delta : float
        What ``epsilon`` is stated at; not looked at beside a mu.

    Raises
    ------
    ConfigurationError
        If both are given, or neither, or the one that is given is not a number above 0.

    Notes
    -----
    **Formal guarantees.** Where an epsilon is asked for, what is mu-GDP for the result is (epsilon, delta)-DP for the
    same neighbouring relation, and no larger mu implies that (:func:`~murmurfl.privacy.gdp_mu`).
    """
    if epsilon is None:
        if mu == 0 and not isinstance(mu, bool):
            raise ConfigurationError(
                f"Expected mu or epsilon, a number > 0, got mu = {mu!r} and epsilon = {epsilon!r}: either says how "
                "private it is to be."
            )
        check_positive("mu", mu)
        return float(mu)
    if mu != 0:
        raise ConfigurationError(
            f"Expected mu or epsilon, got both: mu = {mu!r}, epsilon = {epsilon!r}. Leave one out: at a delta either "
            "settles the other."
        )
    check_positive("epsilon", epsilon)
    return gdp_mu(epsilon, delta)


def check_positive(name: str, value: Any) -> None:
    """Refuse what is not a finite number above 0.

    Raises
    ------
    ConfigurationError
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"Expected {name} > 0 and finite, got {value!r}.")


def check_count(name: str, value: Any) -> None:
    """Refuse what is not an integer above 0.

    Raises
    ------
    ConfigurationError
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"Expected {name} to be an integer >= 1, got {value!r}.")
