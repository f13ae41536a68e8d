r"""From the errors of a guess to lower bounds on mu and epsilon.

Somebody guesses from a transcript whether the canary was there. With alpha the probability of a false alarm and beta
that of a miss, every guess against a mu-GDP mechanism has beta >= Phi(Phi^{-1}(1 - alpha) - mu) (Dong, Roth and Su
2022, definition 2.6), and against an (epsilon, delta)-DP one alpha + e^epsilon beta >= 1 - delta and beta + e^epsilon
alpha >= 1 - delta (Kairouz, Oh and Viswanath 2015, theorem 2.1). Upper bounds on alpha and beta, which counts give
(Clopper and Pearson 1934), therefore are lower bounds on mu and epsilon.

Formal guarantees
-----------------
If both errors are at most what is handed in, no mechanism with a smaller mu, or a smaller epsilon at this delta, allows
them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtri

Numbers = float | NDArray[np.floating]


def error_bound(errors: int | NDArray[np.integer], trials: int, significance: float) -> NDArray[np.float64]:
    """Upper bound on a probability of error, from a count of errors in independent trials (Clopper and Pearson 1934).

    It is too low with probability at most ``significance``.
    """
    counts = np.asarray(errors)
    certain = counts >= trials
    bounds = betaincinv(counts + 1.0, np.where(certain, 1.0, trials - counts), 1.0 - significance)
    return np.where(certain, 1.0, bounds)


def mu_bound(false_alarms: Numbers, misses: Numbers) -> NDArray[np.float64]:
    """The least mu whose trade-off curve allows these probabilities of error; 0 where even mu = 0 does.

    Examples
    --------
    >>> round(float(mu_bound(0.1587, 0.1587)), 2)
    2.0
    """
    return np.maximum(-ndtri(false_alarms) - ndtri(misses), 0.0)


def epsilon_bound(false_alarms: Numbers, misses: Numbers, delta: float) -> NDArray[np.float64]:
    """The least epsilon with which (epsilon, delta)-DP allows these probabilities of error, both > 0.

    Examples
    --------
    >>> round(float(epsilon_bound(0.1, 0.2, 0.0)), 3)
    2.079
    """
    false_alarms, misses = np.asarray(false_alarms), np.asarray(misses)
    power, specificity = 1.0 - delta - misses, 1.0 - delta - false_alarms
    return np.log(np.maximum(np.maximum(power / false_alarms, specificity / misses), 1.0))
