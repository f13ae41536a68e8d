r"""A secret order: every sample in one release that nobody but the machine knows, and what that is worth.

A machine with independent noise lets each of its samples draw one of K releases, uniformly, and independently of each
other. Whoever watches does not know in which of the K releases to look. With m the distance by which one sample's
contribution moves a release, in standard deviations of its noise, what a machine shows of a sample against one without
it (its contribution is zero in every release) is post-processing of

    (1 / K) sum_j N(m e_j, I)    against    N(0, I)    in K dimensions,

whatever a server chooses from what it has seen (random allocation, Feldman and Shenfeld 2025,
https://arxiv.org/abs/2502.08202; balls in bins, Chua et al. 2025). The likelihood ratio is the mean of K independent
log-normals, so with S their sum under N(0, I)

    delta(epsilon) = E max(S / K - e^epsilon, 0)               with the sample against without it,
    delta(epsilon) = E max(1 - e^epsilon S / K, 0)             without it against with it,

for which :mod:`~murmurfl.privacy.accounting.likelihood_sums` has upper bounds. Replacing a sample is taking one away
and adding another: each is half of what the un-amplified mu is for, m = mu / 2, and for every e1 + e2 = epsilon

    delta(epsilon) <= delta_with(e1) + e^e1 delta_without(e2).

Formal guarantees
-----------------
Upper bounds on epsilon and delta, for replacement of one sample that takes part in one session and no other, in a
release drawn as above, whose contribution is at most clip_norm / b with b a constant that does not depend on how many
samples share a release. Nobody learns an order, it is never used again, and noise is independent of it and from release
to release. Proof: docs/proofs/secret-order.md.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from .asked import check_count
from .gdp import gdp_delta, gdp_epsilon
from .likelihood_sums import ROUNDING, likelihood_sum

LARGEST_SHIFT = 25.0
"""Beyond it a secret order is worth nothing that shows, and its likelihood ratios leave the range of float64."""

EPSILON_ROUNDING = 1e-9
"""Added to every epsilon, for float64 and for orders that are drawn with 53 bits."""

_LARGEST_EPSILON = 600.0
"""Beyond it e^epsilon leaves the range of float64; delta there is at most what it is here."""
_FOR_RESOLUTION = 2.0**-10
_FOR_RANGE = 2.0**-19
"""Share of delta set aside for computed normals: twice the most :mod:`~murmurfl.privacy.noise.normals` may charge."""
_SPLITS = 129
_BISECTIONS = 60


def zero_out_deltas(shift: float, slots: int, epsilon: float) -> tuple[float, float]:
    """Upper bounds, at ``epsilon``, of both deltas of a sample in a secret one of ``slots`` releases against no sample.

    They bound max over events E of P(E) - e^epsilon Q(E), for P with the sample and Q without it, then the other way
    round. ``shift`` is m: how far its contribution moves a release at most, in standard deviations of the noise.

    Examples
    --------
    >>> [f"{delta:.1e}" for delta in zero_out_deltas(0.5, 100, 0.2)]
    ['1.5e-06', '1.1e-06']
    """
    _check(shift, "shift", slots)
    if shift > LARGEST_SHIFT:
        raise ConfigurationError(f"Expected shift <= {LARGEST_SHIFT:g}, got {shift!r}: no order hides so much.")
    if not epsilon >= 0:
        raise ConfigurationError(f"Expected epsilon >= 0, got {epsilon!r}.")
    with_it, without_it = _deltas(shift, slots, np.array([epsilon]))
    return float(with_it[0]), float(without_it[0])


def allocation_delta(mu: float, slots: int, epsilon: float) -> float:
    """Delta at epsilon of samples in a secret order, for independent noise and replacement of one sample.

    ``mu`` is that of one release that a sample is known to be in, ``slots`` is K. The result is never more than
    :func:`~murmurfl.privacy.gdp_delta`, which holds whoever knows the order.
    """
    known = gdp_delta(mu, epsilon)
    if mu == 0.0:
        return known
    _check(mu, "mu", slots)
    return min(known, _replacement(mu / 2, slots, epsilon)) if mu / 2 <= LARGEST_SHIFT else known


def allocation_epsilon(mu: float, slots: int, delta: float, *, resolution_mu: float = 0.0) -> float:
    """Epsilon at delta of samples in a secret order, for independent noise and replacement of one sample.

    ``mu`` is that of one release that a sample is known to be in, ``slots`` is K. The part ``resolution_mu`` of it
    (:attr:`~murmurfl.privacy.NoisePlan.resolution_mu`) concerns all releases, so no order hides it. The result is never
    more than :func:`~murmurfl.privacy.gdp_epsilon`, which holds whoever knows the order.

    Notes
    -----
    **Formal guarantees.** An upper bound, under the assumptions of the module. It is an (epsilon, delta) and no mu: mus
    are what adds up over sessions, and the un-amplified one always holds.
    Proof: docs/proofs/secret-order.md.

    Examples
    --------
    >>> f"{gdp_epsilon(1.0, 1e-5):.2f} known, {allocation_epsilon(1.0, 100, 1e-5):.2f} secret"
    '4.38 known, 0.37 secret'
    """
    known = gdp_epsilon(mu, delta)
    if known == 0.0:
        return known
    _check(mu, "mu", slots)
    if not 0.0 <= resolution_mu < mu:
        raise ConfigurationError(f"Expected 0 <= resolution_mu < mu = {mu!r}, got {resolution_mu!r}.")
    shift = math.sqrt((mu - resolution_mu) * (mu + resolution_mu)) / 2
    if shift > LARGEST_SHIFT or slots == 1 or known > _LARGEST_EPSILON:
        return known
    # What the normals' resolution and range may show is no Gaussian's shift in a secret place: it composes.
    resolved = gdp_epsilon(resolution_mu, delta * (_FOR_RESOLUTION - _FOR_RANGE)) if resolution_mu else 0.0
    rest = delta * (1.0 - _FOR_RESOLUTION) if resolution_mu else delta
    low, high = 0.0, known
    if _replacement(shift, slots, high) > rest:
        return known
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _replacement(shift, slots, middle) > rest else (low, middle)
    return min(known, high + resolved + EPSILON_ROUNDING)


def _replacement(shift: float, slots: int, epsilon: float) -> float:
    """Delta of replacing a sample: the best split of epsilon between taking it away and adding another."""
    epsilon = min(epsilon, _LARGEST_EPSILON)
    first = np.linspace(0.0, epsilon, _SPLITS)
    with_it, without_it = _deltas(shift, slots, np.concatenate([first, epsilon - first]))
    split = with_it[:_SPLITS] + np.exp(first) * without_it[_SPLITS:]
    return min(float(split.min()), 1.0)


def _deltas(shift: float, slots: int, epsilons: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Upper bounds of both deltas of zeroing a sample out, at each epsilon, float64's errors included."""
    total, epsilons = likelihood_sum(shift, slots), np.minimum(epsilons, _LARGEST_EPSILON)
    with_it = total.above(slots * np.exp(epsilons)) / slots
    without_it = np.exp(epsilons) * total.below(slots * np.exp(-epsilons)) / slots
    charged = 1.0 + ROUNDING
    return np.minimum(with_it * charged, 1.0), np.minimum(without_it * charged, 1.0)


def _check(value: float, name: str, slots: int) -> None:
    if not value > 0:
        raise ConfigurationError(f"Expected {name} > 0, got {value!r}.")
    check_count("slots", slots)
