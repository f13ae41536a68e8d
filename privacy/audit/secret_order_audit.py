r"""The audit of a secret order: how well a sample shows in all releases together when nobody says which one it is in.

It is the audit of many runs (:mod:`.many_runs`) with a canary that is in another release in every run, so it has other
statistics. All come from likelihood ratios by the noise that is claimed:

``any release moved``
    With L_j that of "release j moved from the other to the canary" against "none moved": the mean of L_1 .. L_K.
``either in any release``
    The mean over j of "the canary is in release j" over that of "its other is in release j": what there is to see where
    the order is independent and nothing else is in the way.
``release j moved``
    L_j alone, for an order that is the same in every run: one that follows from what anybody knows.

The mean of the runs without the canary stands for all other samples. In an independent order these are somewhere else
in every run, which hides the canary further. In a *permutation* with a fixed number of samples a release they are not:
the canary leaves a hole that the others fill, so everything shows as if it had moved from one value to its opposite in
one release, twice as far as an independent order is claimed for. Others that are all the canary's opposite show that
best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..accounting.gdp import gdp_epsilon
from ..errors import ConfigurationError
from ..machine.policy import PrivacyPolicy
from ..mechanisms import Mechanism
from .bounds import epsilon_bound, mu_bound
from .many_runs import BOUNDS, AuditResult, Streams, check_runs, likelihood_weights, measured, separation, transcripts


def audit_secret_order(
    policy: PrivacyPolicy,
    streams: Streams,
    move: NDArray[np.floating],
    *,
    claimed_epsilon: float | None = None,
    claimed_mu: float | None = None,
    runs: int = 2000,
    confidence: float = 0.95,
) -> AuditResult:
    """Measure what a secret order leaves of a canary.

    Parameters
    ----------
    policy : PrivacyPolicy
        With ``order="secret"``.
    streams : callable
        Makes the machines of some runs, with the canary (any name) or, None, with its replacement.
    move : ndarray of shape (parameters,)
        By how much the canary moves the release that it is in; not zero.
    claimed_epsilon : float, optional
        What is claimed at the policy's delta; default epsilon of ``claimed_mu``, against whoever knows the order.
    claimed_mu : float, optional
        The claim without the secret, for what the auditor sees; default the policy's. No order may show more.
    runs : int
        On each data set; >= 20.

    Notes
    -----
    **Formal guarantees.** With probability at least ``confidence`` over the runs' keys, the measured bounds are not
    above the true mu and epsilon for replacement of one sample. What is claimed: docs/proofs/secret-order.md.
    """
    if policy.order != "secret" or not np.any(move):
        raise ConfigurationError(
            f"Expected a policy with order 'secret' and a canary that moves something, got {policy.order!r}."
        )
    check_runs(runs, confidence)
    plan = policy.plan(len(move))
    length = float(np.linalg.norm(move))
    direction = (move / np.linalg.norm(move))[None, :]
    of_runs = partial(transcripts, streams, runs, policy.max_participations, direction, (), policy.release_rule)
    pair = [of_runs(None)[:, :, 0], of_runs("canary")[:, :, 0]]
    base = pair[0][: runs // 4].mean(axis=0)
    choose, count = slice(runs // 4, runs // 2), slice(runs // 2, None)
    bound, significance = partial(epsilon_bound, delta=policy.delta), (1.0 - confidence) / BOUNDS
    best, statistic = -math.inf, ""
    chosen: list[NDArray[np.float64]] = []
    counted: list[NDArray[np.float64]] = []
    ratios = partial(_log_ratios, plan.mechanism, plan.noise_std)
    for name, scores in _scores(ratios, [sums - base for sums in pair], length):
        parts = [score[choose] for score in scores]
        found = measured(bound, parts, parts, significance)
        if found > best:
            best, statistic = found, name
            chosen, counted = parts, [score[count] for score in scores]
    claimed_mu = plan.mu if claimed_mu is None else claimed_mu
    return AuditResult(
        claimed_mu=claimed_mu,
        claimed_epsilon=gdp_epsilon(claimed_mu, policy.delta) if claimed_epsilon is None else claimed_epsilon,
        delta=policy.delta,
        measured_mu=measured(mu_bound, chosen, counted, significance),
        measured_epsilon=measured(bound, chosen, counted, significance),
        estimated_mu=separation(*counted),
        confidence=confidence,
        runs=runs,
        canary="one sample, in a release that only the machine knows",
        statistic=statistic,
    )


def _log_ratios(
    mechanism: Mechanism, noise_std: float, sums: NDArray[np.float64], length: float
) -> NDArray[np.float64]:
    """Log likelihood ratios of a move of each release against none, shape (runs, releases)."""
    releases = sums.shape[1]
    shifts = length * np.tri(releases)  # a move of release j is in all prefix sums from the j-th on
    weights = likelihood_weights(mechanism, shifts) / noise_std**2
    return sums @ weights - np.sum(weights * shifts, axis=0) / 2


def _scores(
    ratios: Callable[[NDArray[np.float64], float], NDArray[np.float64]], pair: list[NDArray[np.float64]], length: float
) -> Iterator[tuple[str, list[NDArray[np.float64]]]]:
    """Yield every statistic's name with its values in the runs without the canary and with it."""
    moved = [ratios(sums, length) for sums in pair]
    yield "any release moved", [_log_mean_exp(found) for found in moved]
    # The mean without the canary contains its replacement, a K-th of it in every release.
    releases = pair[0].shape[1]
    centre = -length / 2 * np.arange(1, releases + 1) / releases
    halves = [[ratios(sums + centre, sign * length / 2) for sign in (1, -1)] for sums in pair]
    yield "either in any release", [_log_mean_exp(plus) - _log_mean_exp(minus) for plus, minus in halves]
    for release in range(releases):
        yield f"release {release + 1} moved", [found[:, release] for found in moved]


def _log_mean_exp(values: NDArray[np.float64]) -> NDArray[np.float64]:
    largest = values.max(axis=1)
    return largest + np.log(np.mean(np.exp(values - largest[:, None]), axis=1))
