r"""The audit of one run: many canaries, each there or not by a coin of its own (Steinke, Nasr and Jagielski 2023).

m samples of a client are canaries; a coin decides for each which of two values it has. The client runs once. From
what it sent somebody guesses r of the coins and abstains on the others. Against an epsilon-DP client no more of the
guesses are right than among r coins of bias e^epsilon / (1 + e^epsilon) each; delta adds a little (theorem 5.2
there, with f(v) the probability that a binomial of r and that bias is at least v):

    P[at least v of r guesses are right] <= f(v) + 2 m delta max_i (f(v - i) - f(v)) / i.

**The neighbouring relation.** The theorem asks for (epsilon, delta)-DP under a change of one coin. There the paper adds
or removes a sample; here a coin chooses between two values of a sample that is there either way, which is replacement
of one sample, what our mu is for: no factor comes in between. A canary of S in one direction against -S uses all of the
sensitivity 2 S; against a zero sample it would use half.

Weaker than many runs for one client (a coin is guessed from its own noise only), but it needs one run: for trainings
too long to repeat. With delta near 1 / m or above the bound says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from ..errors import ConfigurationError
from ..mechanisms import Mechanism
from .many_runs import likelihood_weights

_HALVINGS = 6  # guesses are tried on all canaries, on half of them, on a quarter, ...
_BISECTIONS = 40


@dataclass(frozen=True)
class OneRunResult:
    """The outcome of one run: m canaries, r guesses, v of them correct, and the lower bound on epsilon that follows.

    Notes
    -----
    **Formal guarantees.** With probability at least ``confidence`` over the coins and the run the measured epsilon is
    not above the true one for replacement of one sample.
    """

    measured_epsilon: float
    delta: float
    confidence: float
    canaries: int
    guesses: int
    correct: int


def audit_one_run(
    scores: NDArray[np.floating], present: NDArray[np.bool_], delta: float, *, confidence: float = 0.95
) -> OneRunResult:
    """Return a lower bound on epsilon from guesses of many coins in one run.

    Parameters
    ----------
    scores : ndarray of shape (m,)
        Made from the run's output alone: the guess is its sign, and the surest are the largest in magnitude.
    present : ndarray of shape (m,), bool
        The coins: fair, independent, and unknown to whoever made the scores.
    confidence : float
        With which the bound holds; several numbers of guesses are tried and share it.

    Notes
    -----
    **Formal guarantees.** With probability at least ``confidence`` over the coins and the run, the bound is not above
    the epsilon of the client at delta, for replacement of one sample (module description).
    """
    if np.shape(scores) != np.shape(present) or np.ndim(scores) != 1 or not len(scores):
        raise ConfigurationError(
            f"Expected a score for every coin, got {np.shape(scores)} for {np.shape(present)}.",
            kind="wrong-shape",
            setting="scores",
        )
    surest_first = np.argsort(-np.abs(scores), kind="stable")
    right = ((scores > 0) == present)[surest_first]
    numbers = sorted({max(len(scores) >> halving, 1) for halving in range(_HALVINGS)})
    significance = (1.0 - confidence) / len(numbers)
    results = []
    for guesses in numbers:
        correct = int(right[:guesses].sum())
        epsilon = one_run_epsilon(len(scores), guesses, correct, delta, confidence=1.0 - significance)
        results.append(OneRunResult(epsilon, delta, confidence, len(scores), guesses, correct))
    return max(results, key=lambda result: result.measured_epsilon)


def canary_scores(
    mechanism: Mechanism,
    prefixes: NDArray[np.floating],
    releases: NDArray[np.integer],
) -> NDArray[np.float64]:
    """Return the likelihood ratio of each canary's coin against the C that is claimed.

    Positive where "along" is likelier.

    Parameters
    ----------
    prefixes : ndarray of shape (releases, m)
        The noisy prefix sums of the run, each multiplied with every canary's direction: orthogonal ones, so that a
        canary's column holds no other's.
    releases : ndarray of shape (m,)
        The release, from 1, that each canary takes part in, with a contribution along its direction or its opposite.
    """
    steps = np.tri(len(prefixes))  # column j: what a contribution to release j + 1 adds to the prefix sums
    weights = likelihood_weights(mechanism, steps)
    return np.einsum("km,km->m", weights[:, releases - 1], prefixes)


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, *, confidence: float = 0.95) -> float:
    """Return the largest epsilon that v of r right guesses of m coins refute; 0 where none is refuted.

    Notes
    -----
    **Formal guarantees.** A mechanism whose epsilon at delta, for replacement of one sample, is smaller than the result
    allows so many right guesses with probability at most 1 - ``confidence`` over the coins.

    Examples
    --------
    >>> round(one_run_epsilon(100, 100, 100, 0.0), 2)
    3.49
    """
    significance = 1.0 - confidence
    if one_run_p_value(canaries, guesses, correct, 0.0, delta) > significance:
        return 0.0
    low, high = 0.0, 1.0
    while one_run_p_value(canaries, guesses, correct, high, delta) <= significance:
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if one_run_p_value(canaries, guesses, correct, middle, delta) <= significance:
            low = middle
        else:
            high = middle
    return low


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return the greatest chance of at least v right ones of r guesses, m coins.

    By (epsilon, delta)-DP (theorem 5.2).
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ConfigurationError(
            f"Expected 0 <= correct <= guesses <= canaries, got {correct}, {guesses} and {canaries}.",
            kind="out-of-range",
            setting="correct",
        )
    bias = 1.0 / (1.0 + np.exp(-epsilon))
    p_value = binom.sf(correct - 1, guesses, bias)
    if correct:
        # f(v - i) - f(v) is the sum of the i probabilities below v; beyond i = v it grows no more.
        steps = np.arange(1, correct + 1)
        p_value += 2 * canaries * delta * np.max(np.cumsum(binom.pmf(correct - steps, guesses, bias)) / steps)
    return min(float(p_value), 1.0)
