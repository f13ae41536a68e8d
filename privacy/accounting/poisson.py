r"""Poisson batches: each sample in each round with a probability, secretly, and what that is worth.

In each of T rounds a sample's row is in the sum with probability q, independently of everything else, and nobody but
who adds the noise sees a sum without it. Whoever sees the noisy sums does not know in which of them to look. With m the
most by which one row moves a sum, in standard deviations of the noise, what the rounds show of a sample, against
another one in its place, is post-processing of T independent draws of

    (1 - q) N(0, 1) + q N(m, 1)    against    (1 - q) N(0, 1) + q N(-m, 1),

whatever the points are that the gradients are taken at (docs/proofs/secret-order.md). The second is the mirror image of
the first, so both directions have one delta.

m is *half* of what replacing a sample moves: the un-amplified mu of all rounds is 2 m sqrt(T), and q = 1 is that
Gaussian mechanism exactly. Accountants whose noise multiplier is in units of the clip have sigma / S = 1 / m.

Sums of losses
--------------
The loss L = log P / Q of one round increases in x, and its law under P is put on the points k h of a grid:

* The mass of a cell goes to its two ends such that its masses under P and under Q stay. For the likelihood ratio under
  Q that is a split of the mean, so expectations of convex functions of it grow (Jensen), and so do those of products of
  independent ones: all deltas.
* What lies above the last point is *lost*: it counts as delta whole. What lies below the first is raised to it.

Losses of independent rounds add up, so T rounds are made by doubling: sums of every pair of points. All terms are
positive, so nothing cancels and no transform is used. The grid becomes coarser as the sum becomes wider.

Formal guarantees
-----------------
Upper bounds on epsilon and delta for replacement of one sample, against everybody but who adds the noise, of all sums
of T rounds together, if each sample is in each with probability q, independently of samples, rounds and noise, if
nobody else learns which batches it was in or how many samples a batch had, and if noise is independent of that and from
round to round. For exact arithmetic; float64 stays below :data:`ROUNDING`, which is charged.
Proof: docs/proofs/secret-order.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_UP, Context
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from ..errors import ConfigurationError
from ..release.policy import PrivacyPolicy
from .amplification import Amplification
from .gdp import check_count, gdp_delta, gdp_epsilon
from .loss import Curve

ROUNDING = 1e-6
"""The charge for float64, relative to a delta: each mass of a round errs by less than 1e-11 of itself, and products of
10,000 of them by as many times that."""

MOST_ROUNDS = 10_000
"""Rounds beyond which nothing is said to be amplified."""

LARGEST_SHIFT = 12.0
"""Beyond it batches hide nothing that shows, and likelihood ratios leave the range of float64."""

_LARGEST_EPSILON = 300.0
_FINENESS = 1.0 / 50.0
"""Width of a cell, in standard deviations of the sum's loss."""
_MOST_POINTS = 8_000
_REACH = 9.0
"""Standard deviations of the noise beyond which a round's loss is lost: 1e-19 of it."""
_TRIMMED = 1e-20
_BISECTIONS = 60
_SMALLEST_DELTA = 1e-300
_MU_STEP = 1.25
_MU_TOLERANCE = 1e-3
_FOR_RESOLUTION = 2.0**-10
_FOR_RANGE = 2.0**-19
"""Shares of delta set aside for computed normals, as for a secret order (:mod:`.amplification`)."""


@dataclass(frozen=True)
class LossSum:
    """The law of a sum of privacy losses under P: a mass on each of the points ``(first + i) spacing``.

    ``lost`` is the mass that counts as an infinite loss.
    """

    first: int
    spacing: float
    masses: NDArray[np.float64]
    lost: float

    @property
    def losses(self) -> NDArray[np.float64]:
        """The points of the grid."""
        return np.asarray((self.first + np.arange(len(self.masses))) * self.spacing, np.float64)

    def delta(self, epsilon: float) -> float:
        """Return an upper bound of E max(1 - e^(epsilon - L), 0) under P, up to :data:`ROUNDING`."""
        above = self.losses - epsilon
        first = int(np.searchsorted(above, 0.0, side="right"))
        return float(self.masses[first:] @ -np.expm1(-above[first:])) + self.lost


@lru_cache(maxsize=64)
def loss_sum(shift: float, rate: float, rounds: int) -> LossSum:
    """Return the law of the loss of ``rounds`` Poisson batches; 0 < ``shift`` <= 12, 0 < ``rate`` <= 1."""
    one = _single(shift, rate)
    total = one
    for bit in bin(rounds)[3:]:
        total = _added(total, total)
        if bit == "1":
            total = _added(*_alike(total, one))
    return total


def _loss(x: NDArray[np.float64], shift: float, rate: float) -> NDArray[np.float64]:
    """Return log P / Q at points >= 0."""
    away = math.log1p(-rate) if rate < 1 else -math.inf
    up, down = math.log(rate) + shift * x - shift**2 / 2, math.log(rate) - shift * x - shift**2 / 2
    return np.asarray(np.logaddexp(away, up) - np.logaddexp(away, down), np.float64)


def _single(shift: float, rate: float) -> LossSum:
    """One round: the masses of every cell under P and Q are known, and so are the points where losses are k h."""
    x = np.linspace(-_REACH, shift + _REACH, 4001)
    density = (1 - rate) * np.exp(-(x**2) / 2) + rate * np.exp(-((x - shift) ** 2) / 2)
    losses = np.sign(x) * _loss(np.abs(x), shift, rate)
    spread = math.sqrt(float(density @ losses**2 / density.sum()))
    farthest = float(_loss(np.array([shift + _REACH]), shift, rate)[0])
    spacing = max(_FINENESS * spread, 2 * farthest / _MOST_POINTS)
    half = math.ceil(farthest / spacing)
    # Where P / Q = e^(k h), for k >= 0: with y = e^(m x) a quadratic equation, without cancellation. The rest mirrors.
    growth = np.expm1(np.arange(half + 1) * spacing)
    outside, inside = 1 - rate, rate * math.exp(-(shift**2) / 2)
    y = (outside * growth + np.sqrt((outside * growth) ** 2 + 4 * inside**2 * (growth + 1))) / (2 * inside)
    right = np.log(y) / shift
    right[0] = 0.0
    edges = np.concatenate([-right[:0:-1], right])
    near = _between(edges)
    with_it, without = (1 - rate) * near, rate * _between(edges - shift)
    p = with_it + without
    q = p[::-1]  # the mirror image
    points = np.arange(-half, half + 1) * spacing
    # a on the lower end and p - a on the upper one: a e^-L + (p - a) e^-(L + h) = q.
    lower = np.clip((q * np.exp(points[1:]) - p) / math.expm1(spacing), 0.0, p)
    masses = np.zeros(len(points))
    masses[:-1] += lower
    masses[1:] += p - lower
    ends = ndtr(np.array([-edges[-1], edges[0]])), ndtr(np.array([shift - edges[-1], edges[0] - shift]))
    above, below = (1 - rate) * ends[0] + rate * ends[1]
    masses[0] += below
    return _narrowed(LossSum(-half, spacing, masses, float(above)))


def _between(edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability of a standard normal between neighbouring edges, each from the nearer tail."""
    return np.where(edges[:-1] > 0, ndtr(-edges[:-1]) - ndtr(-edges[1:]), ndtr(edges[1:]) - ndtr(edges[:-1]))


def _added(one: LossSum, other: LossSum) -> LossSum:
    """Return the sum of two independent losses on one grid."""
    masses = np.convolve(one.masses, other.masses)
    return _narrowed(LossSum(one.first + other.first, one.spacing, masses, one.lost + other.lost))


def _narrowed(total: LossSum) -> LossSum:
    """Cut tails that do not show, the upper one as lost, and double the spacing while it is finer than needed."""
    masses, first, lost = total.masses.copy(), total.first, total.lost
    high = len(masses) - int(np.searchsorted(np.cumsum(masses[::-1]), _TRIMMED, side="right"))
    lost += float(masses[high:].sum())
    low = min(int(np.searchsorted(np.cumsum(masses), _TRIMMED, side="right")), high - 1)
    masses[low] += masses[:low].sum()
    kept = LossSum(first + low, total.spacing, masses[low:high], lost)
    return _coarser(kept) if _is_fine(kept) or len(kept.masses) > _MOST_POINTS else kept


def _is_fine(total: LossSum) -> bool:
    whole = float(total.masses.sum())
    mean = float(total.masses @ total.losses) / whole
    spread = math.sqrt(max(float(total.masses @ (total.losses - mean) ** 2) / whole, 0.0))
    return 2 * total.spacing <= _FINENESS * spread


def _coarser(total: LossSum) -> LossSum:
    """Return the same law with twice the spacing: the mass of an odd point goes to both neighbours, as a cell's."""
    masses, first = total.masses, total.first
    if first % 2:
        masses, first = np.concatenate([[0.0], masses]), first - 1
    if len(masses) % 2 == 0:
        masses = np.append(masses, 0.0)
    upper = 1.0 / (1.0 + math.exp(-total.spacing))
    made = masses[::2].copy()
    made[:-1] += (1.0 - upper) * masses[1::2]
    made[1:] += upper * masses[1::2]
    return _narrowed(LossSum(first // 2, 2 * total.spacing, made, total.lost))


def _alike(total: LossSum, one: LossSum) -> tuple[LossSum, LossSum]:
    """Return both on the coarser grid of the two."""
    while one.spacing < total.spacing * (1 - 1e-9):
        one = _coarser(one)
    while total.spacing < one.spacing * (1 - 1e-9):
        total = _coarser(total)
    return total, one


def poisson_delta(mu: float, rate: float, rounds: int, epsilon: float) -> float:
    """Delta at epsilon of Poisson batches, for replacement of one sample.

    ``mu`` is that of all ``rounds`` together where everybody knows the batches, ``rate`` is q. The result is never more
    than :func:`~murmurfl.privacy.gdp_delta`, which holds whoever knows them.

    Examples
    --------
    >>> bool(0 < poisson_delta(mu=10.0, rate=0.05, rounds=400, epsilon=1.0) < poisson_delta(10.0, 1.0, 400, 1.0))
    True
    """
    known = gdp_delta(mu, epsilon)
    if mu == 0.0:
        return known
    _check(mu, rate, rounds)
    shift = mu / (2 * math.sqrt(rounds))
    return known if _is_known(shift, rate, rounds) else min(known, _delta(shift, rate, rounds, epsilon))


def poisson_epsilon(mu: float, rate: float, rounds: int, delta: float, *, resolution_mu: float = 0.0) -> float:
    """Epsilon at delta of Poisson batches, for replacement of one sample.

    ``mu`` is that of all ``rounds`` together where everybody knows the batches, ``rate`` is q. The part
    ``resolution_mu`` of it (:attr:`~murmurfl.privacy.NoisePlan.resolution_mu`) concerns every sum as it is, so no batch
    hides it. The result is never more than :func:`~murmurfl.privacy.gdp_epsilon`.

    Notes
    -----
    **Formal guarantees.** An upper bound, under the assumptions of the module. It is an (epsilon, delta) and no mu: mus
    are what adds up over sessions, and the un-amplified one always holds.
    Proof: docs/proofs/secret-order.md.

    Examples
    --------
    >>> f"{gdp_epsilon(10.0, 1e-5):.1f} known, {poisson_epsilon(10.0, 0.05, 400, 1e-5):.2f} secret"
    '91.8 known, 1.99 secret'
    """
    known = gdp_epsilon(mu, delta)
    if known == 0.0:
        return known
    _check(mu, rate, rounds)
    if not 0.0 <= resolution_mu < mu:
        raise ConfigurationError(
            f"Expected 0 <= resolution_mu < mu = {mu!r}, got {resolution_mu!r}.",
            kind="out-of-range",
            setting="resolution_mu",
            got=resolution_mu,
        )
    shift = math.sqrt((mu - resolution_mu) * (mu + resolution_mu)) / (2 * math.sqrt(rounds))
    if _is_known(shift, rate, rounds):
        return known
    resolved = gdp_epsilon(resolution_mu, delta * (_FOR_RESOLUTION - _FOR_RANGE)) if resolution_mu else 0.0
    rest = delta * (1.0 - _FOR_RESOLUTION) if resolution_mu else delta
    low, high = 0.0, min(known, _LARGEST_EPSILON)
    if _delta(shift, rate, rounds, high) > rest:
        return known
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _delta(shift, rate, rounds, middle) > rest else (low, middle)
    return min(known, high + resolved)


def poisson_profile(mu: float, rate: float, rounds: int) -> Curve:
    """Return the privacy profile of Poisson batches, for replacement of one sample.

    Notes
    -----
    **Formal guarantees.** An upper bound on delta at every epsilon, under the assumptions of the module; the mu that it
    has as well holds for everybody who knows the batches. Proof: docs/proofs/secret-order.md.

    Examples
    --------
    >>> round(poisson_profile(10.0, 0.05, 400).epsilon(1e-5), 2)
    1.99
    """
    _check(mu, rate, rounds)
    return Curve(partial(poisson_delta, mu, rate, rounds), mu)


@lru_cache(maxsize=256)
def poisson_mu(epsilon: float, rate: float, rounds: int, delta: float) -> float:
    """Return the largest mu of three digits that has at most an epsilon with Poisson batches.

    The inverse of :func:`poisson_epsilon`, for noise without resolution.

    Notes
    -----
    **Formal guarantees.** :func:`poisson_delta` of the mu at epsilon is at most delta.
    Proof: docs/proofs/secret-order.md.

    Examples
    --------
    >>> poisson_mu(2.0, 0.05, 400, 1e-5)
    10.0
    """

    def excess(mu: float) -> float:
        return math.log(max(poisson_delta(mu, rate, rounds, epsilon), _SMALLEST_DELTA) / delta)

    low = high = 1.0
    while excess(low) > 0:
        low, high = low / _MU_STEP, low
    while excess(high) <= 0:
        low, high = high, high * _MU_STEP
    digits = Context(prec=3, rounding=ROUND_UP)
    from scipy.optimize import root_scalar  # here: it takes a third of a second to import

    root = root_scalar(excess, bracket=(low, high), method="brentq", xtol=_MU_TOLERANCE * low, rtol=_MU_TOLERANCE).root
    # The root is only a hint, however precise: the mu that is returned has been asked for its own delta.
    found = digits.create_decimal(float(root))
    while excess(float(found)) > 0:
        found = digits.next_minus(found)
    while excess(float(digits.next_plus(found))) <= 0:
        found = digits.next_plus(found)
    return float(found)


def sampling_amplification(
    policy: PrivacyPolicy, num_parameters: int, *, rounds: int, noise_std: float, rounding: float, resolution_mu: float
) -> Amplification:
    """Return the epsilon of a policy's Poisson batches, under a trusted server's noise.

    Parameters
    ----------
    num_parameters : int
        d.
    rounds : int
        T, the most rounds of which anything is published.
    noise_std : float
        Standard deviation of the noise on the sum of a round, the same in each.
    rounding : float
        What the server's own rounding of a sum adds to its sensitivity.
    resolution_mu : float
        What of mu is charged for the resolution of the normals.

    Notes
    -----
    **Formal guarantees.** The epsilon bounds what all that is published shows for replacement of one sample, as long as
    nobody but the server learns which batches it was in. Proof: docs/proofs/secret-order.md.
    """
    charge = policy.plan(num_parameters).sensitivity - policy.sensitivity + rounding
    length = policy.sensitivity * policy.bound.longest / policy.bound.distance + charge
    rounds = min(policy.max_participations, rounds)
    mu = math.hypot(2 * length / noise_std * math.sqrt(rounds), resolution_mu)
    epsilon = poisson_epsilon(mu, policy.sampling_rate, rounds, policy.delta, resolution_mu=resolution_mu)
    return Amplification(epsilon, rounds, proved=True, rate=policy.sampling_rate)


def _delta(shift: float, rate: float, rounds: int, epsilon: float) -> float:
    """Delta at epsilon >= 0, float64's errors included."""
    return min(loss_sum(shift, rate, rounds).delta(min(epsilon, _LARGEST_EPSILON)) * (1.0 + ROUNDING), 1.0)


def _is_known(shift: float, rate: float, rounds: int) -> bool:
    """Return True if batches hide nothing that is worked out."""
    return rate == 1.0 or shift > LARGEST_SHIFT or rounds > MOST_ROUNDS


def _check(mu: float, rate: float, rounds: int) -> None:
    check_count("rounds", rounds)
    if not 0.0 < rate <= 1.0:
        raise ConfigurationError(
            f"Expected 0 < rate <= 1, got {rate!r}.", kind="out-of-range", setting="rate", got=rate
        )
    if not mu > 0:
        raise ConfigurationError(f"Expected mu > 0, got {mu!r}.", kind="out-of-range", setting="mu", got=mu)
