"""Gaussian differential privacy: the exact curve between mu and (epsilon, delta).

A mechanism is mu-GDP when telling two neighbouring inputs apart from its output is no easier than telling N(0, 1)
from N(mu, 1) (Dong, Roth and Su, 2022, https://arxiv.org/abs/1905.02383). Everything in murmurfl that adds Gaussian
noise to an adaptively chosen stream is exactly mu-GDP for some mu, and

    delta(epsilon) = Phi(-epsilon / mu + mu / 2) - exp(epsilon) Phi(-epsilon / mu - mu / 2)

turns it into (epsilon, delta) without loss. ``rho^2 / 2``-zCDP in reshef-levy-2024 and -2025 is mu = rho here.

Formal guarantees
-----------------
These functions are arithmetic on a mu that somebody else vouches for; the neighbouring relation is the one for which
that mu was computed. Results are rounded towards the safe side where a root is searched for: the returned epsilon
never has ``gdp_delta(mu, epsilon) > delta``, and the returned mu never has ``gdp_epsilon(mu, delta) > epsilon``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from scipy.special import log_ndtr, ndtr

from ..errors import MOST_COUNTED, ConfigurationError

_BISECTIONS = 200


def _not_negative(name: str, value: float) -> float:
    value = float(value)
    if not value >= 0:  # nor NaN
        raise ConfigurationError(f"Expected {name} >= 0, got {value!r}.", kind="out-of-range", setting=name, got=value)
    return value


def _checked_delta(delta: float) -> float:
    delta = float(delta)
    if not 0 < delta < 1:
        raise ConfigurationError(
            f"Expected delta > 0 and < 1, got {delta!r}.", kind="out-of-range", setting="delta", got=delta
        )
    return delta


def _bisected(low: float, high: float, is_below: Callable[[float], bool]) -> tuple[float, float]:
    """Return the ends of an interval around a root, as close together as float64 has them."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low, high


def gdp_delta(mu: float, epsilon: float) -> float:
    """Smallest delta for which mu-GDP implies (epsilon, delta)-DP.

    Notes
    -----
    Dong, Roth and Su (2022), corollary 2.13; Balle and Wang (2018), theorem 8.

    Examples
    --------
    >>> round(gdp_delta(1.0, 1.0), 6)
    0.126937
    """
    mu, epsilon = _not_negative("mu", mu), _not_negative("epsilon", epsilon)
    if mu == 0.0 or math.isinf(epsilon):
        return 0.0
    if math.isinf(mu):
        return 1.0
    upper = float(ndtr(-epsilon / mu + mu / 2))
    lower = math.exp(min(epsilon + float(log_ndtr(-epsilon / mu - mu / 2)), 0.0))
    return min(max(upper - lower, 0.0), 1.0)


def gdp_epsilon(mu: float, delta: float) -> float:
    """Smallest epsilon for which mu-GDP implies (epsilon, delta)-DP; infinite for infinite mu.

    Choose delta well below one over the number of samples.

    Examples
    --------
    >>> round(gdp_epsilon(1.0, 1e-5), 3)
    4.377
    """
    return _epsilon(_not_negative("mu", mu), _checked_delta(delta))


@lru_cache(maxsize=4096)
def _epsilon(mu: float, delta: float) -> float:
    """Answer :func:`gdp_epsilon`; a run asks for the same figure in every round."""
    if math.isinf(mu):
        return math.inf
    if gdp_delta(mu, 0.0) <= delta:
        return 0.0
    # mu^2/2 + mu sqrt(2 ln(1/delta)) is the looser zCDP conversion, hence an upper end for the search.
    upper = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1e-9
    return _bisected(0.0, upper, lambda epsilon: gdp_delta(mu, epsilon) > delta)[1]


def gdp_mu(epsilon: float, delta: float) -> float:
    """Largest mu for which mu-GDP implies (epsilon, delta)-DP: how much a budget allows.

    Examples
    --------
    >>> round(gdp_mu(4.377, 1e-5), 3)
    1.0
    """
    epsilon, delta = _not_negative("epsilon", epsilon), _checked_delta(delta)
    if math.isinf(epsilon):
        raise ConfigurationError(
            "Expected a finite epsilon, got inf: an infinite budget has no mu.", kind="out-of-range", setting="epsilon"
        )
    low, high = 0.0, 1.0
    while gdp_delta(high, epsilon) <= delta:
        low, high = high, high * 2
    return _bisected(low, high, lambda mu: gdp_delta(mu, epsilon) <= delta)[0]


def gdp_best_guess(mu: float) -> float:
    """Return how often the best attacker guesses which of two equally likely neighbouring inputs was used: Phi(mu / 2).

    It runs from one half, which is chance, to 1.

    Notes
    -----
    **Formal guarantees.** Of a mu-GDP mechanism nobody guesses better, whatever else they know and compute, other
    samples included: telling N(0, 1) from N(mu, 1), each with probability one half, succeeds with at most
    (1 + TV) / 2 = Phi(mu / 2), where TV = 2 Phi(mu / 2) - 1 is their total variation distance. It is true of the
    neighbouring relation that mu was computed for.

    Examples
    --------
    >>> round(gdp_best_guess(1.0), 4)
    0.6915
    """
    return float(ndtr(_not_negative("mu", mu) / 2))


def compose_gdp(mus: Iterable[float]) -> float:
    """Return the mu of several adaptively composed mu-GDP mechanisms: the root of the sum of squares, 0 for none.

    All must be for the same neighbouring relation (Dong, Roth and Su 2022, corollary 3.3).

    Examples
    --------
    >>> compose_gdp([3.0, 4.0])
    5.0
    """
    return math.sqrt(math.fsum(_not_negative("mu", mu) ** 2 for mu in mus))


def rdp_epsilon(mu: float, delta: float) -> float:
    """Return the papers' conversion: epsilon at delta of (a, a mu^2 / 2)-RDP for all orders a, at its best order.

    Notes
    -----
    **Formal guarantees.** An upper bound (Mironov 2017, proposition 3) for whatever has this RDP curve. A mu-GDP
    mechanism has it and a smaller epsilon, :func:`~murmurfl.privacy.gdp_epsilon`.

    Examples
    --------
    >>> round(rdp_epsilon(mu=1.0, delta=1e-5), 3)
    5.299
    """
    gdp_epsilon(mu, delta)  # the checks of both arguments
    return mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))


def rdp_mu(epsilon: float, delta: float) -> float:
    """Return the mu whose RDP curve :func:`rdp_epsilon` turns into epsilon at delta.

    Notes
    -----
    **Formal guarantees.** Whatever is mu-GDP for the result, and so has this RDP curve, is (epsilon, delta)-DP for the
    same neighbouring relation: the inverse of :func:`rdp_epsilon` up to rounding.

    Examples
    --------
    >>> round(rdp_mu(epsilon=2.0, delta=1e-5), 3)
    0.4
    """
    if not (math.isfinite(epsilon) and epsilon > 0 and 0 < delta < 1):
        raise ConfigurationError(
            f"Expected epsilon > 0 and delta between 0 and 1, got {epsilon!r} and {delta!r}.",
            kind="out-of-range",
            setting="epsilon",
            got=epsilon,
        )
    logarithm = math.log(1 / delta)
    return math.sqrt(2 * logarithm + 2 * epsilon) - math.sqrt(2 * logarithm)


def asked_mu(mu: float, epsilon: float | None, delta: float) -> float:
    """Return the mu that is asked for: given as itself (0: not given) or as an epsilon at ``delta``, never both.

    Notes
    -----
    **Formal guarantees.** Where an epsilon is asked for, what is mu-GDP for the result is (epsilon, delta)-DP for the
    same neighbouring relation, and no larger mu implies that (:func:`~murmurfl.privacy.gdp_mu`).
    """
    if epsilon is None:
        if mu == 0 and not isinstance(mu, bool):
            raise ConfigurationError(
                f"Expected mu or epsilon, a number > 0, got mu = {mu!r} and epsilon = {epsilon!r}: either says how "
                "private it is to be.",
                kind="out-of-range",
                setting="mu",
            )
        check_positive("mu", mu)
        return float(mu)
    if mu != 0:
        raise ConfigurationError(
            f"Expected mu or epsilon, got both: mu = {mu!r}, epsilon = {epsilon!r}. Leave one out: at a delta either "
            "settles the other.",
            kind="conflict",
            setting="mu",
        )
    check_positive("epsilon", epsilon)
    return gdp_mu(epsilon, delta)


def check_positive(name: str, value: Any) -> None:
    """Raise unless a value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ConfigurationError(
            f"Expected {name} > 0 and finite, got {value!r}.", kind="out-of-range", setting=name, got=value
        )


def check_count(name: str, value: Any) -> None:
    """Raise unless a value is an integer from 1 to ``MOST_COUNTED``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_COUNTED:
        raise ConfigurationError(
            f"Expected {name} to be an integer >= 1 and <= {MOST_COUNTED}, got {value!r}.",
            kind="out-of-range",
            setting=name,
            got=value,
        )
