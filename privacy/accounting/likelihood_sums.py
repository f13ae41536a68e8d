r"""Sums of independent likelihood ratios of a shifted normal, as a distribution that is never too narrow.

With x a standard normal, W = exp(m x - m^2 / 2) is the likelihood ratio of N(m, 1) against N(0, 1): a log-normal of
mean 1. A secret order hides behind the sum of K of them (:mod:`~murmurfl.privacy.accounting.allocation`): its
(epsilon, delta) are expectations of *convex* functions of that sum, max(S - c, 0) and max(c - S, 0). So rounding here
never makes an expectation of a convex function smaller:

* A value between two points of a grid is split between both such that its mean stays (Jensen). Split W's make larger
  expectations one by one, and so does a sum of independent ones.
* A value beyond the last point T is cut to T. That makes max(c - S, 0) larger, and max(S - c, 0) smaller by
  E max(S - T, 0) at most, which is kept as what was *lost* and is to be added again.

Sums are made by doubling: S_2n from S_n and S_n, every pair of points. All terms are positive, so nothing cancels;
no transform is used. A grid is as fine as the sum is narrow where its mass is, and coarser towards its tails, where it
behaves like a single W.

Formal guarantees
-----------------
Upper bounds, for exact arithmetic. In float64 a mass has a relative error of a few units in the last place for each of
the steps it goes through, and a point one of a few units; both together stay below :data:`ROUNDING`, which whoever
uses the figures has to charge.
Proof: docs/proofs/secret-order.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

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
    """The sum of ``count`` likelihood ratios of N(shift, 1) against N(0, 1) under the latter; 0 < ``shift`` <= 25."""
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
    """The probability of a standard normal between neighbouring edges, each from the nearer tail."""
    return np.where(edges[:-1] > 0, ndtr(-edges[:-1]) - ndtr(-edges[1:]), ndtr(edges[1:]) - ndtr(edges[:-1]))


def _added(one: LikelihoodSum, other: LikelihoodSum, points: NDArray[np.float64]) -> LikelihoodSum:
    """The sum of two independent sums, split onto the points of another grid."""
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
