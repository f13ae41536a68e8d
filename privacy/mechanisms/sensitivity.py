r"""How much an encoder C stretches what one sample contributes, for every pattern in which it may return.

A sample that takes part in releases P changes C G by sum_{j in P} c_j u_j^T with ||u_j|| <= 1 and c_j column j of C.
Its square is at most sum_{i, j in P} |<c_i, c_j>|, with equality where no <c_i, c_j> is negative (all u_j alike). So
with the Gram matrix G = C^T C:

* no negative entry: the sensitivity is the square root of the largest sum of G over an allowed pattern, *exact*;
* negative entries: that sum over |G| is an *upper bound*. The plain sum of the columns is then a lower bound, for the
  u_j may be opposite, and is never used.

Patterns are ``separated`` (at most k releases, any two at least s apart) and ``epochs`` (at most k releases, each s
after the one before).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import comb
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

Pattern = Literal["separated", "epochs"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)

Gram = Callable[[NDArray[np.intp]], NDArray[np.float64]]
"""The rows and columns of C^T C that belong to the given releases, counted from 0: shape (releases, releases)."""

_MOST_PATTERNS = 200_000
_NEGATIVE = 1e-12


class Sensitivity(NamedTuple):
    """The largest change of C G by one sample, in units of the change of one release.

    ``value`` is the true one where ``exact``, and an upper bound otherwise; ``method`` says how it was found.
    """

    value: float
    exact: bool
    method: str


def gram_sensitivity(gram: Gram, n: int, num_participations: int, min_separation: int, pattern: Pattern) -> Sensitivity:
    """The sensitivity of any encoder whose C^T C is known, where a sample may come back.

    ``gram`` gives entries of C^T C for the first n releases; ``epochs`` asks for those of one pattern at a time.

    Notes
    -----
    **Formal guarantees.** The value is an upper bound on the L2 change of C G under replacement of one sample with an
    allowed pattern, in units of the change of one release; see the module for when it is exact.
    Proof: docs/proofs/returning-samples.md.
    """
    if pattern == "epochs":
        worst, exact = 0.0, True
        # A pattern that begins later is part of an earlier one only where k participations reach the end.
        later = num_participations * min_separation < n
        for start in range(n if later else min(min_separation, n)):
            block = gram(np.arange(start, n, min_separation)[:num_participations])
            worst, exact = max(worst, float(np.abs(block).sum())), exact and _non_negative(block)
        return Sensitivity(float(np.sqrt(worst)), exact, f"all epoch patterns tried{_why(exact)}")
    whole = gram(np.arange(n))
    exact, whole = _non_negative(whole), np.abs(whole)
    if _count_patterns(n, num_participations, min_separation) <= _MOST_PATTERNS:
        worst = worst_pattern(whole, num_participations, min_separation)
        return Sensitivity(float(np.sqrt(worst)), exact, f"all patterns tried{_why(exact)}")
    worst = pattern_bound(whole, num_participations, min_separation)
    return Sensitivity(float(np.sqrt(worst)), False, f"bound by the best partners of each release{_why(exact)}")


def worst_pattern(gram: NDArray[np.float64], num_participations: int, min_separation: int) -> float:
    """Largest sum of a non-negative ``gram`` over pairs of a separated pattern, by trying every pattern."""
    # Shorter ones too: {2} cannot be extended within three releases two apart.
    n, worst = len(gram), 0.0
    for size in range(1, min(num_participations, (n - 1) // min_separation + 1) + 1):
        stretch = np.arange(size) * (min_separation - 1)
        for compact in combinations(range(n - (size - 1) * (min_separation - 1)), size):
            chosen = np.array(compact) + stretch
            worst = max(worst, float(gram[np.ix_(chosen, chosen)].sum()))
    return worst


def pattern_bound(gram: NDArray[np.float64], num_participations: int, min_separation: int) -> float:
    """An upper bound on :func:`worst_pattern` in O(n^2 k): each release with its best partners, not with common ones.

    With r_i the largest sum of row i of ``gram`` over i and up to k - 1 releases that are separated from i and from
    each other, the sum over a pattern P is sum_{i in P} sum_{j in P} G_ij <= sum_{i in P} r_i, and the right side is
    maximised exactly. Both maxima are of separated selections with non-negative weights: dynamic programming.
    """
    n = len(gram)
    distance = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    partners = np.where(distance >= min_separation, gram, 0.0)
    reach = gram.diagonal() + best_selection(partners, num_participations - 1, min_separation)
    return float(best_selection(reach[None], num_participations, min_separation)[0])


def best_selection(weights: NDArray[np.float64], count: int, separation: int) -> NDArray[np.float64]:
    """For each row, the largest sum of at most ``count`` non-negative weights at least ``separation`` apart."""
    rows, n = weights.shape
    best = np.zeros((rows, n + 1))
    for _ in range(min(count, (n - 1) // separation + 1)):
        longer = np.zeros_like(best)
        for i in range(n):
            longer[:, i + 1] = np.maximum(longer[:, i], weights[:, i] + best[:, max(i + 1 - separation, 0)])
        best = longer
    return best[:, -1]


def _count_patterns(n: int, num_participations: int, min_separation: int) -> int:
    sizes = range(1, min(num_participations, (n - 1) // min_separation + 1) + 1)
    return sum(comb(n - (size - 1) * (min_separation - 1), size) for size in sizes)


def _non_negative(gram: NDArray[np.float64]) -> bool:
    """Whether no entry is negative beyond rounding; the absolute values are taken in any case."""
    return bool(gram.min() >= -_NEGATIVE * gram.max())


def _why(exact: bool) -> str:
    return "" if exact else ", of |C^T C| for it has negative entries"
