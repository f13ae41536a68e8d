"""A secret order: every sample in one release that nobody but the client knows, and what that is worth.

A client with independent noise lets each of its samples draw one of K releases, uniformly, and independently of each
other. Whoever watches does not know in which of the K releases to look. With m the distance by which one sample's
contribution moves a release, in standard deviations of its noise, what a client shows of a sample against one without
it (its contribution is zero in every release) is post-processing of

    (1 / K) sum_j N(m e_j, I)    against    N(0, I)    in K dimensions,

whatever a server chooses from what it has seen (random allocation, Feldman and Shenfeld 2025,
https://arxiv.org/abs/2502.08202; balls in bins, Chua et al. 2025). The likelihood ratio is the mean of K independent
log-normals, so with S their sum under N(0, I)

    delta(epsilon) = E max(S / K - e^epsilon, 0)               with the sample against without it,
    delta(epsilon) = E max(1 - e^epsilon S / K, 0)             without it against with it,

for which there are upper bounds below. Replacing a sample is taking one away
and adding another: each is half of what the un-amplified mu is for, m = mu / 2, and for every e1 + e2 = epsilon

    delta(epsilon) <= delta_with(e1) + e^e1 delta_without(e2).

For independent noise this is an upper bound on epsilon. For correlated noise whose C is lower triangular
without negative entries, a client shows of a sample, against one without it, no more than the mixture of the columns
of C against nothing (arXiv 2410.06266, for an adaptive server). The delta of that pair is only known by drawing from
it, so it is an estimate and no guarantee. For other noise nothing is said.

The un-amplified mu holds whatever becomes of the order, and is what ledgers and budgets count.

Sums of likelihood ratios
-------------------------
With x a standard normal, W = exp(m x - m^2 / 2) is the likelihood ratio of N(m, 1) against N(0, 1): a log-normal of
mean 1. A secret order hides behind the sum of K of them : its (epsilon, delta) are expectations of *convex* functions
of that sum, max(S - c, 0) and max(c - S, 0). So rounding here never makes an expectation of a convex function smaller:

* A value between two points of a grid is split between both such that its mean stays (Jensen). Split W's make larger
  expectations one by one, and so does a sum of independent ones.
* A value beyond the last point T is cut to T. That makes max(c - S, 0) larger, and max(S - c, 0) smaller by
  E max(S - T, 0) at most, which is kept as what was *lost* and is to be added again.

Sums are made by doubling: S_2n from S_n and S_n, every pair of points. All terms are positive, so nothing cancels;
no transform is used. A grid is as fine as the sum is narrow where its mass is, and coarser towards its tails, where it
behaves like a single W.

Formal guarantees
-----------------
Of epsilon and delta: upper bounds on epsilon and delta, for replacement of one sample that takes part in one session
and no other, in a release drawn as above, whose contribution is at most clip_norm / b with b a constant that does not
depend on how many samples share a release. Nobody learns an order, it is never used again, and noise is independent of
it and from release to release. Proof: docs/proofs/secret-order.md.

Of sums of likelihood ratios: upper bounds, for exact arithmetic. In float64 a mass has a relative error of a few units
in the last place for each of the steps it goes through, and a point one of a few units; both together stay below
:data:`ROUNDING`, which whoever uses the figures has to charge. Proof: docs/proofs/secret-order.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_UP, Context
from functools import cached_property, lru_cache, partial

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from ..errors import ConfigurationError
from ..mechanisms import noise_is_memoryless
from ..noise import derived_seed
from ..release.policy import PrivacyPolicy
from .gdp import check_count, gdp_delta, gdp_epsilon, gdp_mu
from .loss import Curve
from .noise_plan import NoisePlan

ROUNDING = 1e-7
"""The charge for float64, relative to a delta: a million operations' worth of units in the last place."""

_FINENESS = 1.0 / 40.0
# How many standard deviations of x a grid reaches, and of the log of the sum.
_REACH = 8.5
_ROWS_TOGETHER = 128


@dataclass(frozen=True)
class LikelihoodSum:
    """The distribution of a sum of likelihood ratios: a mass on each point of a grid, ascending from 0.

    ``lost`` is the most that E max(S - c, 0) may exceed what the points say, for any c. Expectations of max(S - c, 0),
    with ``lost`` added, and of max(c - S, 0) are upper bounds, up to :data:`ROUNDING`.
    """

    points: NDArray[np.float64]
    masses: NDArray[np.float64]
    lost: float

    def above(self, limits: NDArray[np.float64]) -> NDArray[np.float64]:
        """Upper bounds of E max(S - c, 0), one for each limit c."""
        first = np.searchsorted(self.points, limits, side="right")
        masses, parts = self._from_above
        return np.maximum(parts[first] - limits * masses[first], 0.0) + self.lost

    def below(self, limits: NDArray[np.float64]) -> NDArray[np.float64]:
        """Upper bounds of E max(c - S, 0), one for each limit c."""
        first = np.searchsorted(self.points, limits, side="right")
        masses, parts = self._from_below
        return np.maximum(limits * masses[first] - parts[first], 0.0)

    @cached_property
    def _from_above(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mass, and mean times mass, of the points from each on; the smallest are added up first."""
        return _running(self.masses[::-1])[::-1], _running((self.masses * self.points)[::-1])[::-1]

    @cached_property
    def _from_below(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mass, and mean times mass, of the points before each."""
        return _running(self.masses), _running(self.masses * self.points)


def _running(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(values)])


@lru_cache(maxsize=32)
def likelihood_sum(shift: float, count: int) -> LikelihoodSum:
    """Return the sum of ``count`` likelihood ratios of N(shift, 1) against N(0, 1) under the latter.

    0 < ``shift`` <= 25.
    """
    one = _single(shift, _grid(shift, 1))
    total, n = one, 1
    for bit in bin(count)[3:]:
        n *= 2
        total = _added(total, total, _grid(shift, n))
        if bit == "1":
            n += 1
            total = _added(total, one, _grid(shift, n))
    return total


def _grid(shift: float, count: int) -> NDArray[np.float64]:
    """Zero, and points whose logarithms are close together where a sum of so many has its mass."""
    spread = math.expm1(shift * shift) / count  # the variance of the mean
    width = min(shift, math.sqrt(spread))
    centre = math.log(count) - 0.5 * math.log1p(spread)
    lowest = math.log(count) - shift * shift / 2 - _REACH * shift
    highest = max(shift * (shift + _REACH) - shift * shift / 2, math.log(count) + _REACH * width)
    up = _steps(highest - centre, width, shift)
    down = -_steps(centre - lowest, width, shift)[:0:-1]
    return np.concatenate([[0.0], np.exp(centre + np.concatenate([down, up]))])


def _steps(reach: float, narrow: float, wide: float) -> NDArray[np.float64]:
    """Distances from 0 to beyond ``reach``: steps grow from those for a narrow bulk to those for a wide tail."""
    steps = [0.0]
    while steps[-1] < reach:
        steps.append(steps[-1] + _FINENESS * min(max(steps[-1], narrow), wide))
    return np.array(steps)


def _single(shift: float, points: NDArray[np.float64]) -> LikelihoodSum:
    """One likelihood ratio: the mass and the mean of every cell are known."""
    edges = np.concatenate([[-np.inf], np.log(points[1:]) / shift + shift / 2, [np.inf]])
    mass, part = _between(edges), _between(edges - shift)  # part: mass times mean
    masses = np.zeros_like(points)
    masses[-1] = mass[-1]
    inner = mass[:-1]
    means = np.divide(part[:-1], inner, out=points[:-1].copy(), where=inner > 0)
    upper = np.clip((means - points[:-1]) / np.diff(points), 0.0, 1.0)
    masses[:-1] += inner * (1.0 - upper)
    masses[1:] += inner * upper
    return LikelihoodSum(points, masses, float(part[-1]))


def _between(edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability of a standard normal between neighbouring edges, each from the nearer tail."""
    return np.where(edges[:-1] > 0, ndtr(-edges[:-1]) - ndtr(-edges[1:]), ndtr(edges[1:]) - ndtr(edges[:-1]))


def _added(one: LikelihoodSum, other: LikelihoodSum, points: NDArray[np.float64]) -> LikelihoodSum:
    """Return the sum of two independent sums, split onto the points of another grid."""
    masses, lost, last = np.zeros_like(points), one.lost + other.lost, points[-1]
    for start in range(0, len(one.points), _ROWS_TOGETHER):
        rows = slice(start, start + _ROWS_TOGETHER)
        columns = slice(start if one is other else 0, None)  # of two alike a pair is twice its other order
        sums = np.add.outer(one.points[rows], other.points[columns]).ravel()
        weights = np.multiply.outer(one.masses[rows], other.masses[columns])
        if one is other:
            weights *= 2.0 - np.eye(*weights.shape)
            weights *= np.tri(*weights.shape[::-1]).T
        weights = weights.ravel()
        lost += float(weights @ np.maximum(sums - last, 0.0))
        np.minimum(sums, last, out=sums)
        cells = np.minimum(np.searchsorted(points, sums, side="right"), len(points) - 1) - 1
        upper = weights * (sums - points[cells]) / (points[cells + 1] - points[cells])
        masses += np.bincount(cells, weights - upper, len(points))
        masses += np.bincount(cells + 1, upper, len(points))
    return LikelihoodSum(points, masses, lost)


LARGEST_SHIFT = 25.0
"""Beyond it a secret order is worth nothing that shows, and its likelihood ratios leave the range of float64."""

EPSILON_ROUNDING = 1e-9
"""Added to every epsilon, for float64 and for orders that are drawn with 53 bits."""

_LARGEST_EPSILON = 600.0
"""Beyond it e^epsilon leaves the range of float64; delta there is at most what it is here."""
_FOR_RESOLUTION = 2.0**-10
_FOR_RANGE = 2.0**-19
"""Share of delta set aside for computed normals: twice the most :mod:`~murmurfl.privacy.noise` may charge."""
_BOUND_SPLITS = 129
_BOUND_BISECTIONS = 60
_SMALLEST_DELTA = 1e-300
_MU_STEP = 1.1
_MU_TOLERANCE = 1e-3


def zero_out_deltas(shift: float, slots: int, epsilon: float) -> tuple[float, float]:
    """Bound both deltas at ``epsilon`` from above: a sample in one secret release of ``slots``, against no sample.

    They bound max over events E of P(E) - e^epsilon Q(E), for P with the sample and Q without it, then the other way
    round. ``shift`` is m: how far its contribution moves a release at most, in standard deviations of the noise.

    Examples
    --------
    >>> [f"{delta:.1e}" for delta in zero_out_deltas(0.5, 100, 0.2)]
    ['1.5e-06', '1.1e-06']
    """
    _check(shift, "shift", slots)
    if shift > LARGEST_SHIFT:
        raise ConfigurationError(
            f"Expected shift <= {LARGEST_SHIFT:g}, got {shift!r}: no order hides so much.",
            kind="out-of-range",
            setting="shift",
            got=shift,
        )
    if not epsilon >= 0:
        raise ConfigurationError(
            f"Expected epsilon >= 0, got {epsilon!r}.", kind="out-of-range", setting="epsilon", got=epsilon
        )
    with_it, without_it = _deltas(shift, slots, np.array([epsilon]))
    return float(with_it[0]), float(without_it[0])


def allocation_delta(mu: float, slots: int, epsilon: float) -> float:
    """Delta at epsilon of samples in a secret order, for independent noise and replacement of one sample.

    ``mu`` is that of one release that a sample is known to be in, ``slots`` is K. The result is never more than
    :func:`~murmurfl.privacy.gdp_delta`, which holds whoever knows the order.

    Examples
    --------
    >>> bool(0 < allocation_delta(mu=1.0, slots=100, epsilon=1.0) < allocation_delta(mu=1.0, slots=1, epsilon=1.0))
    True
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
        raise ConfigurationError(
            f"Expected 0 <= resolution_mu < mu = {mu!r}, got {resolution_mu!r}.",
            kind="out-of-range",
            setting="resolution_mu",
            got=resolution_mu,
        )
    shift = math.sqrt((mu - resolution_mu) * (mu + resolution_mu)) / 2
    if shift > LARGEST_SHIFT or slots == 1 or known > _LARGEST_EPSILON:
        return known
    # What the normals' resolution and range may show is no Gaussian's shift in a secret place: it composes.
    resolved = gdp_epsilon(resolution_mu, delta * (_FOR_RESOLUTION - _FOR_RANGE)) if resolution_mu else 0.0
    rest = delta * (1.0 - _FOR_RESOLUTION) if resolution_mu else delta
    low, high = 0.0, known
    if _replacement(shift, slots, high) > rest:
        return known
    for _ in range(_BOUND_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _replacement(shift, slots, middle) > rest else (low, middle)
    return min(known, high + resolved + EPSILON_ROUNDING)


def allocation_profile(mu: float, slots: int) -> Curve:
    """Return the privacy profile of samples in a secret order, for independent noise and replacement of one sample.

    Notes
    -----
    **Formal guarantees.** An upper bound on delta at every epsilon, under the assumptions of the module; the mu that it
    has as well holds for everybody who knows the order. Proof: docs/proofs/secret-order.md.

    Examples
    --------
    >>> round(allocation_profile(1.0, 100).epsilon(1e-5), 2)
    0.37
    """
    check_count("slots", slots)
    return Curve(partial(allocation_delta, mu, slots), mu)


@lru_cache(maxsize=64)
def allocation_mu(epsilon: float, slots: int, delta: float) -> float:
    """Return the largest mu of three digits that has at most an epsilon in a secret order.

    The inverse of :func:`allocation_epsilon`, for noise without resolution: whoever uses the mu asks that function, or
    :func:`amplification_of`, for the epsilon of the noise that is added.

    Notes
    -----
    **Formal guarantees.** :func:`allocation_delta` of the mu at epsilon is at most delta.
    Proof: docs/proofs/secret-order.md.

    Examples
    --------
    >>> allocation_mu(0.37, 100, 1e-5)
    1.0
    """

    def excess(mu: float) -> float:
        return math.log(max(allocation_delta(mu, slots, epsilon), _SMALLEST_DELTA) / delta)

    # The mean of K likelihood ratios has about the spread of one Gaussian whose mu is the epsilon's.
    low = high = 2.0 * math.sqrt(math.log1p(slots * (gdp_mu(epsilon, delta) / 2) ** 2))
    while excess(low) > 0:
        low, high = low / _MU_STEP, low
    while excess(high) <= 0:
        low, high = high, high * _MU_STEP
    digits = Context(prec=3, rounding=ROUND_UP)
    from scipy.optimize import root_scalar  # here: it takes a third of a second to import

    root = root_scalar(excess, bracket=(low, high), method="brentq", xtol=_MU_TOLERANCE * low, rtol=_MU_TOLERANCE).root
    found = digits.create_decimal(float(root))
    # The root is only a hint, however precise: the mu that is returned has been asked for its own delta,
    # and the next one has a larger delta than is allowed.
    while excess(float(found)) > 0:
        found = digits.next_minus(found)
    while excess(float(digits.next_plus(found))) <= 0:
        found = digits.next_plus(found)
    return float(found)


def _replacement(shift: float, slots: int, epsilon: float) -> float:
    """Delta of replacing a sample: the best split of epsilon between taking it away and adding another."""
    epsilon = min(epsilon, _LARGEST_EPSILON)
    first = np.linspace(0.0, epsilon, _BOUND_SPLITS)
    with_it, without_it = _deltas(shift, slots, np.concatenate([first, epsilon - first]))
    split = with_it[:_BOUND_SPLITS] + np.exp(first) * without_it[_BOUND_SPLITS:]
    return min(float(split.min()), 1.0)


def _deltas(shift: float, slots: int, epsilons: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bound both deltas of zeroing a sample out at each epsilon, float64's errors included."""
    total, epsilons = likelihood_sum(shift, slots), np.minimum(epsilons, _LARGEST_EPSILON)
    with_it = total.above(slots * np.exp(epsilons)) / slots
    without_it = np.exp(epsilons) * total.below(slots * np.exp(-epsilons)) / slots
    charged = 1.0 + ROUNDING
    return np.minimum(with_it * charged, 1.0), np.minimum(without_it * charged, 1.0)


def _check(value: float, name: str, slots: int) -> None:
    if not value > 0:
        raise ConfigurationError(f"Expected {name} > 0, got {value!r}.", kind="out-of-range", setting=name, got=value)
    check_count("slots", slots)


MOST_ESTIMATED = 512
"""Releases of a session beyond which no estimate is made: it would take too long."""

_DRAWS = 64_000
_MOST_PRODUCTS = 4e9
_BATCHES = 8
_SPLITS = 129
_BISECTIONS = 40
_TILTS = 5
_FAR = 4.0
_AWAYS = 10
_AWAY = 9.0
"""Deviations to which draws go; away from all shifts further, because that delta counts e^epsilon-fold."""


@dataclass(frozen=True)
class Amplification:
    """Guarantee under a secret order: an epsilon at the policy's delta, for replacement of one sample.

    ``slots`` are the releases that a sample may be in: in one of them, or where there is a ``rate`` in each with that
    probability. Epsilon is an upper bound where it is ``proved``; if not it is an estimate with a standard ``error``,
    and guarantees nothing.

    Notes
    -----
    **Formal guarantees.** Where ``proved``, an upper bound on epsilon for replacement of one sample that takes part in
    one session, in releases that nobody learns, but under a trusted server that server (assumptions: module
    description, and :mod:`~murmurfl.privacy.accounting.poisson` where there is a rate). Where not, nothing is claimed.

    Examples
    --------
    >>> from murmurfl.privacy import PrivacyPolicy, amplification_of
    >>> policy = PrivacyPolicy(
    ...     clip_norm=1.0, batch_size=2, max_participations=20, mu=1.0, mechanism="independent", release_rule="paper",
    ...     batch_selection="shuffled",
    ... )
    >>> found = amplification_of(policy, policy.plan(3))
    >>> found.slots, found.proved, found.epsilon < policy.plan(3).epsilon(policy.delta)
    (20, True, True)
    """

    epsilon: float
    slots: int
    proved: bool
    error: float = 0.0
    rate: float = 0.0


def amplification_of(policy: PrivacyPolicy, plan: NoisePlan) -> Amplification | None:
    """Return the epsilon under a policy's secret order; None without one, or if nothing is known of it.

    Notes
    -----
    **Formal guarantees.** The epsilon bounds what all releases of one session show for replacement of one sample, as
    long as the order stays secret (:mod:`murmurfl.privacy.accounting.amplification`); under secure aggregation also on
    what mu rests on there. Proof: docs/proofs/secret-order.md.

    Examples
    --------
    >>> from murmurfl.privacy import PrivacyPolicy
    >>> settings = {"clip_norm": 1.0, "batch_size": 2, "max_participations": 20, "mu": 1.0, "mechanism": "independent"}
    >>> shuffled = PrivacyPolicy(**settings, release_rule="paper", batch_selection="shuffled")
    >>> amplification_of(shuffled, shuffled.plan(3)).epsilon < shuffled.plan(3).epsilon(shuffled.delta)
    True
    >>> once = PrivacyPolicy(**settings, release_rule="paper")
    >>> amplification_of(once, once.plan(3)) is None
    True
    """
    return amplification_of_all([(policy, plan)])


def amplification_of_all(clients: Sequence[tuple[PrivacyPolicy, NoisePlan]]) -> Amplification | None:
    """Return one epsilon for the secret orders of several clients; None if one has none.

    Their policies may differ in their caps only.

    Notes
    -----
    **Formal guarantees.** The epsilon bounds what every client's releases show for replacement of one sample, as long
    as the orders stay secret: it is for the fewest releases and the largest move of any of them, and more releases hide
    no less (their mean likelihood ratio varies less).
    Proof: docs/proofs/secret-order.md.
    """
    if not clients or not all(_is_hidden(*client) for client in clients):
        return None
    policy, plan = min(clients, key=lambda client: client[0].max_participations)
    slots, known = policy.max_participations, max(plan.epsilon(policy.delta) for policy, plan in clients)
    shift, hint = max(zero_out_shift(*client) for client in clients), max(plan.resolution_mu for _, plan in clients)
    if all(noise_is_memoryless(policy.mechanism) for policy, _ in clients):
        # With the range and the resolution of computed normals, which no order hides.
        epsilon = allocation_epsilon(math.hypot(2 * shift, hint), slots, policy.delta, resolution_mu=hint)
        return Amplification(min(known, epsilon), slots, proved=True)
    columns = _columns(plan)
    if columns is None or plan.sums:
        return None
    epsilon, error = _estimate(columns.tobytes(), slots, shift, policy.delta)
    return Amplification(min(known, epsilon), slots, proved=False, error=error)


def _is_hidden(policy: PrivacyPolicy, plan: NoisePlan) -> bool:
    """Return True if a policy has a secret order of which anything is known."""
    # A release that stands alone hides in a sum behind h noises; of one that builds on others nothing is worked out.
    return (
        policy.batch_selection == "shuffled"
        and math.isfinite(plan.mu)
        and (plan.sums is None or plan.sums.is_memoryless)
    )


def zero_out_shift(policy: PrivacyPolicy, plan: NoisePlan) -> float:
    """Return how far a sample, against zero in its place, moves a client's releases, in standard deviations of noise.

    Notes
    -----
    **Formal guarantees.** An upper bound. What counts is how long a bounded row is at most, and not how far apart two
    can be; rounding to the grid is charged as it is for two.
    Proof: docs/proofs/secret-order.md.
    """
    charge = plan.sensitivity - policy.sensitivity  # of the grid
    length = policy.sensitivity * policy.bound.longest / policy.bound.distance
    return (length + charge) * plan.summed_sensitivity() / plan.noise_std


def _columns(plan: NoisePlan) -> NDArray[np.float64] | None:
    """C with its longest column of length 1, if it is lower triangular without negative entries."""
    mechanism = plan.mechanism
    if mechanism.num_releases > MOST_ESTIMATED:
        return None
    encoder = mechanism.materialize()
    square = encoder.shape[0] == encoder.shape[1]
    if not square or encoder.min() < 0 or np.abs(np.triu(encoder, 1)).max(initial=0.0) > 0:
        return None
    return np.ascontiguousarray(encoder / mechanism.sensitivity())


@lru_cache(maxsize=64)
def _estimate(columns: bytes, slots: int, shift: float, delta: float) -> tuple[float, float]:
    """Estimated epsilon of replacing a sample whose shift is one of the columns, and its standard error."""
    shifts = shift * np.frombuffer(columns).reshape(slots, slots)
    draws = max(int(min(_DRAWS, _MOST_PRODUCTS / slots**2)) // _BATCHES, 100)
    seed = derived_seed("secret order", columns.hex(), shift)
    generator = np.random.Generator(np.random.Philox(key=seed))
    batches = [_drawn(shifts, draws, generator) for _ in range(_BATCHES)]
    most = gdp_epsilon(2 * shift, delta)
    whole = _Curve(*(np.concatenate(parts) for parts in zip(*batches, strict=True))).epsilon(delta, most)
    each = [_Curve(*batch).epsilon(delta, most) for batch in batches]
    return whole, float(np.std(each, ddof=1) / math.sqrt(_BATCHES))


def _drawn(
    shifts: NDArray[np.float64], draws: int, generator: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Losses log P/Q of draws, and the weights of these under P, the mixture of shifts, and under Q, N(0, I).

    A loss of interest is rare under both. So most draws are from the mixture with its shifts made longer, and from
    normals that are moved away from all shifts; weights take that out again.
    """
    slots = shifts.shape[1]
    length = float(np.linalg.norm(shifts, axis=0).max())
    tilts = np.linspace(1.0, 1.0 + _FAR / length, _TILTS)
    away = -shifts.mean(axis=1)
    aways = np.linspace(0.0, _AWAY / max(float(np.linalg.norm(away)), 1e-12), _AWAYS)
    means = np.zeros((draws, shifts.shape[0]))
    kind, slot = generator.integers(_TILTS + _AWAYS, size=draws), generator.integers(slots, size=draws)
    tilted = kind < _TILTS
    means[tilted] = tilts[kind[tilted], None] * shifts.T[slot[tilted]]
    means[~tilted] = aways[kind[~tilted] - _TILTS, None] * away
    values = generator.standard_normal(means.shape) + means
    products, squares = values @ shifts, np.sum(shifts**2, axis=0)
    losses = _log_mean_exp(products - squares / 2)
    logs = [_log_mean_exp(tilt * products - tilt**2 * squares / 2) for tilt in tilts]
    along, square = values @ away, float(away @ away)
    logs += [step * along - step**2 * square / 2 for step in aways]
    proposal = _log_mean_exp(np.stack(logs, axis=1))
    return losses, np.exp(losses - proposal), np.exp(-proposal)


def _log_mean_exp(values: NDArray[np.float64]) -> NDArray[np.float64]:
    largest = values.max(axis=1, keepdims=True)
    return largest[:, 0] + np.log(np.mean(np.exp(values - largest), axis=1))


class _Curve:
    """Both deltas of a pair as functions of epsilon, from weighted draws of its loss."""

    def __init__(self, losses: NDArray[np.float64], with_it: NDArray[np.float64], without: NDArray[np.float64]) -> None:
        order = np.argsort(losses)
        self._losses, count = losses[order], len(losses)
        zero = np.zeros(1)
        self._below = [np.concatenate([zero, np.cumsum(part[order])]) / count for part in (with_it, without)]
        backwards = [np.concatenate([zero, np.cumsum(part[order][::-1])]) / count for part in (with_it, without)]
        self._above = [part[::-1] for part in backwards]

    def delta(self, epsilon: float) -> float:
        """Delta of replacing a sample: the best split of epsilon between taking one away and adding another."""
        first = np.linspace(0.0, epsilon, _SPLITS)
        at = np.searchsorted(self._losses, first, side="right")
        with_it = self._above[0][at] - np.exp(first) * self._above[1][at]
        rest = epsilon - first
        at = np.searchsorted(self._losses, -rest, side="left")
        without = self._below[1][at] - np.exp(rest) * self._below[0][at]
        return float(np.min(with_it + np.exp(first) * without))

    def epsilon(self, delta: float, most: float) -> float:
        low, high = 0.0, most
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.delta(middle) > delta else (low, middle)
        return high
