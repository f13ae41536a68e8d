"""What a policy's secret order is worth: an epsilon where it is proved, an estimate, and called one, where it is not.

For independent noise :mod:`.allocation` has an upper bound on epsilon. For correlated noise whose C is lower triangular
without negative entries, a machine shows of a sample, against one without it, no more than the mixture of the columns
of C against nothing (arXiv 2410.06266, for an adaptive server). The delta of that pair is only known by drawing from
it, so it is an estimate and no guarantee. For other noise nothing is said.

The un-amplified mu holds whatever becomes of the order, and is what ledgers and budgets count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..machine.policy import PrivacyPolicy
from ..mechanisms import noise_stands_alone
from ..noise.noise_keys import derived_seed
from .allocation import allocation_epsilon
from .gdp import gdp_epsilon
from .noise_plan import NoisePlan

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
    """What a secret order makes of a guarantee: an epsilon at the policy's delta, for replacement of one sample.

    ``slots`` are the releases that a sample may be in. Epsilon is an upper bound where it is ``proved``; if not it is
    an estimate with a standard ``error``, and guarantees nothing.

    Notes
    -----
    **Formal guarantees.** Where ``proved``, an upper bound on epsilon for replacement of one sample that takes part in
    one session, in a release that nobody learns (assumptions: :mod:`.allocation`). Where not,
    nothing is claimed.
    """

    epsilon: float
    slots: int
    proved: bool
    error: float = 0.0


def amplification_of(policy: PrivacyPolicy, plan: NoisePlan) -> Amplification | None:
    """What a policy's secret order is worth; None if it has none, or nothing is known of it.

    Notes
    -----
    **Formal guarantees.** The epsilon bounds what all releases of one session show for replacement of one sample, as
    long as the order stays secret (:mod:`murmurfl.privacy.accounting.allocation`); under secure aggregation also on
    what mu rests on there. Proof: docs/proofs/secret-order.md.
    """
    return amplification_of_all([(policy, plan)])


def amplification_of_all(machines: Sequence[tuple[PrivacyPolicy, NoisePlan]]) -> Amplification | None:
    """What the secret orders of several machines are worth, for all of them; None if one has none.

    Their policies may differ in their caps only.

    Notes
    -----
    **Formal guarantees.** The epsilon bounds what every machine's releases show for replacement of one sample, as long
    as the orders stay secret: it is for the fewest releases and the largest move of any of them, and more releases hide
    no less (their mean likelihood ratio varies less).
    Proof: docs/proofs/secret-order.md.
    """
    if not machines or not all(_is_hidden(*machine) for machine in machines):
        return None
    policy, plan = min(machines, key=lambda machine: machine[0].max_participations)
    slots, known = policy.max_participations, max(plan.epsilon(policy.delta) for policy, plan in machines)
    shift, hint = max(zero_out_shift(*machine) for machine in machines), max(plan.resolution_mu for _, plan in machines)
    if all(noise_stands_alone(policy.mechanism) for policy, _ in machines):
        # With the range and the resolution of computed normals, which no order hides.
        epsilon = allocation_epsilon(math.hypot(2 * shift, hint), slots, policy.delta, resolution_mu=hint)
        return Amplification(min(known, epsilon), slots, proved=True)
    columns = _columns(plan)
    if columns is None or plan.sums:
        return None
    epsilon, error = _estimate(columns.tobytes(), slots, shift, policy.delta)
    return Amplification(min(known, epsilon), slots, proved=False, error=error)


def _is_hidden(policy: PrivacyPolicy, plan: NoisePlan) -> bool:
    """Whether a policy has a secret order of which anything is known."""
    # A release that stands alone hides in a sum behind h noises; of one that builds on others nothing is worked out.
    return policy.order == "secret" and math.isfinite(plan.mu) and (plan.sums is None or plan.sums.stands_alone)


def zero_out_shift(policy: PrivacyPolicy, plan: NoisePlan) -> float:
    """How far one sample moves what a machine shows, against zero in its place, in standard deviations of the noise.

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
