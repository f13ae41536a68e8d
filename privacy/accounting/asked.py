"""Checks of numbers that somebody asks for: a privacy level as mu or as epsilon, and values above zero."""

from __future__ import annotations

import math
from typing import Any

from ..errors import ConfigurationError
from .gdp import gdp_mu


def asked_mu(mu: float, epsilon: float | None, delta: float) -> float:
    """The mu that is asked for: given as itself (0: not given) or as an epsilon at ``delta``, never both.

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
    """Raise unless a value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"Expected {name} > 0 and finite, got {value!r}.")


def check_count(name: str, value: Any) -> None:
    """Raise unless a value is an integer above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"Expected {name} to be an integer >= 1, got {value!r}.")
