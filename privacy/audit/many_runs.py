"""The audit of many runs: how well a canary's presence shows in everything a client sends.

Two neighbouring data sets differ in one sample, the canary. The client's whole stream is run many times on each, with
fresh keys, and its noisy prefix sums P_1 .. P_K are put together again from its messages, whatever was acknowledged.
Numbers made from them, called *statistics*, then tell the data sets apart with certain errors, and the errors bound mu
and epsilon from below. All statistics are linear, on the directions in which the canary moves the
prefixes:

``claimed likelihood ratio``
    With Delta P the canary's change of the prefix sums: their projection on (B B^T)^{-1} Delta P, which is C G + Z
    projected on the canary's C Delta G. The best there is against the C that is claimed.
``release k``, ``release k less the one before``
    A prefix sum, or what release k added to it, by itself.
``fitted``
    The projection on (covariance)^{-1} (difference of means), both from the runs: the best there is against whatever
    noise is really there, such as none in one combination. Left out where too few runs would have to settle it.

The first quarter of the runs fits the statistics, the second quarter chooses the canary and the statistic, both
together choose the thresholds, and the other half of the runs is counted. So what is counted was fixed beforehand, and
only the errors of two thresholds (one for mu, one for epsilon) share the confidence.

From errors of a guess to bounds
--------------------------------
Somebody guesses from a transcript whether the canary was there. With alpha the probability of a false alarm and beta
that of a miss, every guess against a mu-GDP mechanism has beta >= Phi(Phi^{-1}(1 - alpha) - mu) (Dong, Roth and Su
2022, definition 2.6), and against an (epsilon, delta)-DP one alpha + e^epsilon beta >= 1 - delta and beta + e^epsilon
alpha >= 1 - delta (Kairouz, Oh and Viswanath 2015, theorem 2.1). Upper bounds on alpha and beta, which counts give
(Clopper and Pearson 1934), therefore are lower bounds on mu and epsilon.

A secret order
--------------
This is the same audit with a canary that is in another release in every run, so it has other
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

Formal guarantees
-----------------
If both errors are at most what is handed in, no mechanism with a smaller mu, or a smaller epsilon at this delta, allows
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtri

from ..accounting.gdp import gdp_epsilon
from ..errors import ConfigurationError, RefusedError
from ..mechanisms import Mechanism
from ..release.ledgered_privatizer import Release
from ..release.policy import PrivacyPolicy, ReleaseRule

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
    """Return the least mu whose trade-off curve allows these probabilities of error; 0 where even mu = 0 does.

    Examples
    --------
    >>> round(float(mu_bound(0.1587, 0.1587)), 2)
    2.0
    """
    return np.maximum(-ndtri(false_alarms) - ndtri(misses), 0.0)


def epsilon_bound(false_alarms: Numbers, misses: Numbers, delta: float) -> NDArray[np.float64]:
    """Return the least epsilon with which (epsilon, delta)-DP allows these probabilities of error, both > 0.

    Examples
    --------
    >>> round(float(epsilon_bound(0.1, 0.2, 0.0)), 3)
    2.079
    """
    false_alarms, misses = np.asarray(false_alarms), np.asarray(misses)
    power, specificity = 1.0 - delta - misses, 1.0 - delta - false_alarms
    return np.log(np.maximum(np.maximum(power / false_alarms, specificity / misses), 1.0))


Answers = Callable[[int, Sequence[int]], Iterable[Release | RefusedError]]
"""Function of the request k, from 1, and one acknowledgement a run that returns the answers: one release a run."""

Streams = Callable[[str | None, range], Answers]
"""Fresh clients for the runs of these numbers, on the data with a canary of this name or, None, without. No two of
all these clients may have keys in common."""

TOGETHER = 250
"""Runs held in memory at a time."""
_RUNS_PER_WEIGHT = 10  # needed to fit a statistic
_RIDGE = 1e-12
_UNNOISED = 1e4
"""A statistic whose means are this many standard deviations apart has no noise in it, only the rounding to the grid."""
BOUNDS = 4
"""Bounds that share the confidence: false alarms and misses, for mu and for epsilon."""
_CHOOSING = 1e-6
"""Significance by which thresholds are chosen, so that one with few errors by luck is not."""


@dataclass(frozen=True)
class AuditResult:
    """The claimed and the measured privacy of clients.

    Notes
    -----
    **Formal guarantees.** With probability at least ``confidence`` over the runs' keys neither measured bound is above
    the true mu or epsilon for replacement of one sample: a smaller claim is refuted, and a larger one not proved. An
    infinite result is no confidence bound.
    """

    claimed_mu: float
    """Mu claimed for exactly the releases that were run; so is ``claimed_epsilon``, at ``delta``."""
    claimed_epsilon: float
    delta: float
    measured_mu: float
    """No mu-GDP with a smaller mu allows what was counted. Infinite where a statistic moved with the canary, but not
    with the noise."""
    measured_epsilon: float
    """No (epsilon, delta)-DP with a smaller epsilon allows what was counted, whatever the noise. Never above the
    logarithm of the number of runs, unless infinite as above."""
    estimated_mu: float
    """The canary's mean move of the statistic over its standard deviation: mu if the noise is Gaussian. No bound."""
    confidence: float
    """Confidence with which both bounds hold together."""
    runs: int
    """Runs on each of the two data sets; half of them were counted."""
    canary: str
    """Canary, and ``statistic``, that told the data sets apart best in the runs that chose."""
    statistic: str

    @property
    def violated(self) -> bool:
        """Whether the claim is refuted, at the stated confidence."""
        return self.measured_mu > self.claimed_mu or self.measured_epsilon > self.claimed_epsilon

    @property
    def epsilon_of_measured_mu(self) -> float:
        """Epsilon at delta of a Gaussian mechanism with the measured mu."""
        return gdp_epsilon(self.measured_mu, self.delta)

    @property
    def largest_measurable_mu(self) -> float:
        """The mu measured if no guess were wrong: above it these runs tell nothing of noise."""
        least = error_bound(0, self.runs - self.runs // 2, (1.0 - self.confidence) / BOUNDS)
        return float(mu_bound(least, least))


def audit_client(
    policy: PrivacyPolicy,
    streams: Streams,
    shifts: Mapping[str, NDArray[np.floating]],
    *,
    runs: int = 2000,
    lost: Sequence[bool] = (),
    confidence: float = 0.95,
    claimed_mu: float | None = None,
) -> AuditResult:
    """Measure the privacy of clients by the best of several canaries and statistics.

    Parameters
    ----------
    shifts : mapping of str to ndarray of shape (releases, parameters)
        For each canary, by how much it moves the prefix sums P_1 .. P_K; not zero. All have the same shape; with fewer
        releases than the policy's cap, the claim is that of so many.
    runs : int
        On each data set; >= 20.
    lost : sequence of bool
        Whether release k never reached the server, for its acknowledgements; the auditor has it all the same.
    claimed_mu : float, optional
        The claim for what the auditor sees; default what the policy claims of so many releases. Under secure
        aggregation the auditor may see releases or sums of them, and each has a claim of its own.

    Notes
    -----
    **Formal guarantees.** With probability at least ``confidence`` over the runs' keys, the measured bounds are not
    above the true mu and epsilon for replacement of one sample, if the keys are as good as random: an honest client
    is accused with probability at most 1 - confidence. An infinite result is no confidence bound: it says that in all
    runs the canary moved a statistic by 10^4 times its spread.
    """
    shapes = {np.shape(shift) for shift in shifts.values()}
    if len(shapes) != 1 or any(not np.any(shift) for shift in shifts.values()):
        raise ConfigurationError(
            f"Expected canaries that move prefix sums of one shape, got shapes {shapes}.", kind="wrong-shape"
        )
    ((releases, parameters),) = shapes
    check_runs(runs, confidence)
    plan = policy.plan(parameters)
    if plan.noise_std == 0.0:
        raise ConfigurationError(
            f"Expected a policy with noise of the client's own, got trust {policy.trust!r} and mechanism "
            f"{policy.mechanism!r}.",
            kind="conflict",
            setting="mechanism",
        )
    directions = _row_space(np.concatenate(list(shifts.values())))
    of_runs = partial(transcripts, streams, runs, releases, directions, lost, policy.release_rule)
    canary, statistic, scores = _best_scores(plan.mechanism, shifts, directions, of_runs, runs)
    # Canary and statistic were chosen by the first half of the runs; only the second half is counted.
    chosen, counted = ([score[part] for score in scores] for part in (slice(runs // 2), slice(runs // 2, None)))
    estimated, significance = separation(*counted), (1.0 - confidence) / BOUNDS
    mu, epsilon = math.inf, math.inf
    if estimated < _UNNOISED:
        mu = measured(mu_bound, chosen, counted, significance)
        epsilon = measured(partial(epsilon_bound, delta=policy.delta), chosen, counted, significance)
    claimed = plan.spent_mu(releases) if claimed_mu is None else claimed_mu
    return AuditResult(
        claimed_mu=claimed,
        claimed_epsilon=gdp_epsilon(claimed, policy.delta),
        delta=policy.delta,
        measured_mu=mu,
        measured_epsilon=epsilon,
        estimated_mu=estimated,
        confidence=confidence,
        runs=runs,
        canary=canary,
        statistic=statistic,
    )


def check_runs(runs: int, confidence: float) -> None:
    """Refuse an audit of too few runs or of an impossible confidence."""
    if runs < 20 or not 0 < confidence < 1:
        raise ConfigurationError(
            f"Expected runs >= 20 and confidence in (0, 1), got {runs} and {confidence}.",
            kind="out-of-range",
            setting="runs",
            got=runs,
        )


def transcripts(
    streams: Streams,
    runs: int,
    releases: int,
    directions: NDArray[np.floating],
    lost: Sequence[bool],
    rule: ReleaseRule,
    canary: str | None,
) -> NDArray[np.float64]:
    """Return the prefix sums of all runs with a canary.

    Or None without, along some directions (:func:`prefix_sums`).
    """
    blocks = [range(start, min(start + TOGETHER, runs)) for start in range(0, runs, TOGETHER)]
    return np.concatenate(
        [prefix_sums(streams(canary, block), len(block), releases, directions, lost, rule) for block in blocks]
    )


def _best_scores(
    mechanism: Mechanism,
    shifts: Mapping[str, NDArray[np.floating]],
    directions: NDArray[np.float64],
    of_runs: Callable[[str | None], NDArray[np.float64]],
    runs: int,
) -> tuple[str, str, list[NDArray[np.float64]]]:
    """Canary and statistic that tell the data sets apart best, and all runs' scores without and with the canary."""
    fit, choose = slice(runs // 4), slice(runs // 4, runs // 2)
    without = of_runs(None)

    def scored() -> Iterator[tuple[str, str, list[NDArray[np.float64]]]]:
        for canary, shift in shifts.items():
            own = _row_space(shift @ directions.T)
            pair = without @ own.T, of_runs(canary) @ own.T
            weights = _statistics(mechanism, shift @ directions.T @ own.T, *(sums[fit] for sums in pair))
            for statistic, weight in weights.items():
                yield canary, statistic, [np.tensordot(sums, weight, 2) for sums in pair]

    return max(scored(), key=lambda found: separation(*(score[choose] for score in found[2])))


def prefix_sums(
    answers: Answers,
    runs: int,
    releases: int,
    directions: NDArray[np.floating] | None = None,
    lost: Sequence[bool] = (),
    rule: ReleaseRule = "acknowledged",
) -> NDArray[np.float64]:
    """Return the noisy prefix sums of some runs, put together again from what was sent: shape (runs, releases, rank).

    Parameters
    ----------
    directions : ndarray of shape (rank, parameters)
        What is kept of a prefix sum: its product with each row; default the whole of it, rank = parameters.
    lost : sequence of bool
        Whether release k is never acknowledged; default none.
    rule : {"acknowledged", "paper"}
        Whether a message is P_k - P_ack or P_k - P_{k-1}.
    """
    if len(lost) not in (0, releases):
        raise ConfigurationError(
            f"Expected one entry of lost for each of {releases} releases, got {len(lost)}.",
            kind="wrong-shape",
            setting="lost",
        )
    sums: list[NDArray[np.floating]] = []
    ack = 0
    for k in range(1, releases + 1):
        messages = []
        for release in answers(k, [ack] * runs):
            if isinstance(release, RefusedError):
                raise ConfigurationError(
                    f"Expected {releases} releases, got a refusal of release {k}: {release}.", kind="refused"
                )
            messages.append(release.values if directions is None else directions @ release.values)
        base = ack if rule == "acknowledged" else k - 1
        sums.append(np.array(messages) + (sums[base - 1] if base else 0.0))
        if not (lost and lost[k - 1]):
            ack = k
    return np.stack(sums, axis=1, dtype=np.float64)


def likelihood_weights(mechanism: Mechanism, shift: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the weights of noisy prefix sums that show a shift of them best: (B B^T)^{-1} shift."""
    decoder = mechanism.decoder(len(shift))
    return np.asarray(np.linalg.solve(decoder @ decoder.T, shift), dtype=np.float64)


def _row_space(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    """Orthonormal rows that span those given."""
    _, values, directions = np.linalg.svd(rows, full_matrices=False)
    return directions[values > 1e-9 * values[0]]


def _statistics(
    mechanism: Mechanism, shift: NDArray[np.float64], without: NDArray[np.float64], present: NDArray[np.float64]
) -> dict[str, NDArray[np.float64]]:
    """Weights of every statistic by its name, each of the shift's shape (releases, rank)."""
    weights = {"claimed likelihood ratio": likelihood_weights(mechanism, shift)}
    rows = np.eye(len(shift))
    for k, (own, step) in enumerate(zip(shift, np.diff(shift, axis=0, prepend=0.0), strict=True)):
        if own.any():
            weights[f"release {k + 1}"] = np.outer(rows[k], own)
        if step.any():
            weights[f"release {k + 1} less the one before"] = np.outer(rows[k] - (rows[k - 1] if k else 0.0), step)
    if 2 * len(without) >= _RUNS_PER_WEIGHT * shift.size:
        groups = [group.reshape(len(group), -1) for group in (without, present)]
        centred = np.concatenate([group - group.mean(axis=0) for group in groups])
        covariance = centred.T @ centred / len(centred)
        covariance += _RIDGE * covariance.trace() / shift.size * np.eye(shift.size)
        difference = groups[1].mean(axis=0) - groups[0].mean(axis=0)
        weights["fitted"] = np.linalg.solve(covariance, difference).reshape(shift.shape)
    return weights


def separation(without: NDArray[np.float64], present: NDArray[np.float64]) -> float:
    """Return the canary's mean less that without it, in standard deviations."""
    spread = math.sqrt((without.var() + present.var()) / 2)
    move = float(present.mean() - without.mean())
    return move / spread if spread > 0 else math.copysign(math.inf, move)


def measured(
    bound: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]],
    chosen: Sequence[NDArray[np.float64]],
    counted: Sequence[NDArray[np.float64]],
    significance: float,
) -> float:
    """Return the bound from the counted runs, at the threshold where it is largest in the choosing runs."""
    candidates = np.concatenate(chosen)
    threshold = candidates[np.argmax(bound(*_errors(chosen, candidates, _CHOOSING)))]
    return float(bound(*_errors(counted, np.array([threshold]), significance))[0])


def _errors(
    scores: Sequence[NDArray[np.float64]], thresholds: NDArray[np.float64], significance: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bounds on false alarms and misses of saying "present" above each threshold."""
    below = [np.searchsorted(np.sort(score), thresholds, side="right") for score in scores]
    return (
        error_bound(len(scores[0]) - below[0], len(scores[0]), significance),
        error_bound(below[1], len(scores[1]), significance),
    )


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
        With ``batch_selection="shuffled"``.
    streams : callable
        Makes the clients of some runs, with the canary (any name) or, None, with its replacement.
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
    if policy.batch_selection != "shuffled" or not np.any(move):
        raise ConfigurationError(
            "Expected a policy with batch_selection 'shuffled' and a canary that moves something, got "
            f"{policy.batch_selection!r}.",
            kind="conflict",
            setting="batch_selection",
            got=policy.batch_selection,
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
        canary="one sample, in a release that only the client knows",
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
