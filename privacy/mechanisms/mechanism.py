"""Correlated-noise mechanisms: a causal factorisation A = B C, and the rows of B Z.

A client's contributions g_1 .. g_K (rows of G) are released as prefix sums: A is the K x K lower triangle of ones.
Releasing C G + Z with Z standard normal is a Gaussian mechanism, and multiplying by B turns it into A G + B Z: the
prefix sums with noise of covariance B B^T. Row k may use only noise drawn up to release k (causal). Everything in
murmurfl that adds noise over time is this with another C (ALGORITHMS section 3):

==================  =======================================  ================================================
mechanism           C                                        row k of B Z
==================  =======================================  ================================================
``independent``     the identity                             z_1 + ... + z_k
``cancelling``      diag(1 / sigma) A                        sigma_k z_k
``tree``            sums over dyadic intervals               the estimates of the intervals that make up 1 .. k
``decay``           Toeplitz, lambda^j                       z_k + (1 - lambda) (z_1 + ... + z_{k-1})
``sqrt_toeplitz``   Toeplitz, (1 - x)^{-1/2}                 the same Toeplitz: B = C
``sqrt_normalised`` the same, with columns of norm 1         A C^{-1}
``bisr``            Toeplitz, C^{-1} with few diagonals      A C^{-1}
``banded``          Toeplitz with few diagonals              A C^{-1}
``blt``             Toeplitz, a sum of few exponentials      A C^{-1}
``optimal``         the least ||A C^{-1}||_F                 A C^{-1}
==================  =======================================  ================================================

What a client adds to contribution k is the *increment*, row k of B Z minus row k - 1 (row k of C^{-1} Z where C is
square); the increments up to k sum to row k.

Sensitivity
-----------
A sample that takes part in releases P changes C G by sum_{j in P} c_j u_j^T with ||u_j|| <= 1 and c_j column j of C.
Its square is at most sum_{i, j in P} |<c_i, c_j>|, with equality where no <c_i, c_j> is negative (all u_j alike). So
with the Gram matrix G = C^T C:

* no negative entry: the sensitivity is the square root of the largest sum of G over an allowed pattern, *exact*;
* negative entries: that sum over |G| is an *upper bound*. The plain sum of the columns is then a lower bound, for the
  u_j may be opposite, and is never used.

Patterns are ``separated`` (at most k releases, any two at least s apart) and ``epochs`` (at most k releases, each s
after the one before).

Formal guarantees
-----------------
With noise of standard deviation ``noise_std`` in front of Z, the whole adaptively chosen stream is mu-GDP with
mu = (change of one contribution) x sensitivity / noise_std, for replacement of one sample (Denisov et al. 2022,
theorem 2.1: Gaussian noise and lower-triangular C make adaptivity free). It holds for any prefix of the stream and any
post-processing, such as differences of prefixes.
Proof: docs/proofs/release-rule.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import combinations
from math import comb
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import MOST_COUNTED, ConfigurationError

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
    """Compute the sensitivity of any encoder whose C^T C is known, where a sample may come back.

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
    """Return an upper bound on :func:`worst_pattern` in O(n^2 k): each release has its own best partners.

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
    """Return the largest sum of at most ``count`` non-negative weights at least ``separation`` apart, for each row."""
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
    """Return True if no entry is negative beyond rounding; the absolute values are taken in any case."""
    return bool(gram.min() >= -_NEGATIVE * gram.max())


def _why(exact: bool) -> str:
    return "" if exact else ", of |C^T C| for it has negative entries"


State = tuple[NDArray[np.floating], ...]
"""Arrays of the parameters' size, from which the next increment is made."""

Memory = Literal["nothing", "last", "recent", "all", "state"]
"""Memory of a stream between releases, from which its state is restored after a restart.

``nothing``
    No state.
``last``
    The nonce of the last release, from whose normals the state is made again.
``recent``
    The nonces of the last releases, as many as :attr:`Mechanism.remembered`.
``all``
    The nonces of all releases, 16 bytes each; the state is made again from all their normals.
``state``
    The arrays of the state.
"""

Draw = Callable[[range], NDArray[np.floating]]
"""The normals of earlier releases, one row a release: shape (releases, draws x size)."""


# Releases of which C is written out where a bound would do as well.
_SMALL = 512


class Increment(NamedTuple):
    """Noise of one release: ``added`` minus ``removed``.

    The two are kept apart for a mechanism that removes the whole of what it added last
    (:attr:`Mechanism.removes_last`): there each is rounded to the grid by itself, so what one release adds and the next
    removes is the same integers, and cancels to the last bit. For all other mechanisms the difference is rounded.
    """

    added: NDArray[np.floating]
    removed: NDArray[np.floating] | None
    state: State | None
    """The state after the release; None where only :meth:`Mechanism.state_after` can tell."""


class Mechanism(ABC):
    """A correlated-noise mechanism for at most ``num_releases`` releases of one stream, K >= 1.

    Examples
    --------
    >>> from murmurfl.privacy import MECHANISMS
    >>> mechanism = MECHANISMS["independent"](num_releases=3)
    >>> mechanism.materialize().tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """

    name: ClassVar[str]
    memory: ClassVar[Memory]

    removes_last: ClassVar[bool] = False
    """Whether a release removes, to the last bit, what the last one added. Whoever still has that need not make it
    again, and asks for an increment with an empty state instead, of which only what is added counts."""

    owns_output: ClassVar[bool] = False
    """Whether nobody else needs the arrays of an increment any more: then they are rounded in place. A subclass
    does not inherit it, because it may share its arrays."""

    is_memoryless: ClassVar[bool] = False
    """Whether the noise of a release tells nothing of another release's: C is diagonal (:func:`check_mechanism` sees to
    it). A subclass does not inherit it (:func:`noise_is_memoryless`), because it may add noise otherwise."""

    def __init__(self, num_releases: int) -> None:
        whole = not isinstance(num_releases, bool) and int(num_releases) == num_releases
        if not (whole and 1 <= num_releases <= MOST_COUNTED):
            raise ConfigurationError(
                f"Expected num_releases to be an integer >= 1 and <= {MOST_COUNTED}, got {num_releases!r}.",
                kind="out-of-range",
                setting="num_releases",
                got=num_releases,
            )
        self.num_releases = int(num_releases)

    @abstractmethod
    def materialize(self, n: int | None = None) -> NDArray[np.float64]:
        """Return the encoder C for the first n releases, by default all: shape (n, n), or (nodes, n) for trees."""

    @abstractmethod
    def decoder(self, n: int | None = None) -> NDArray[np.float64]:
        """Return the causal B with B C = A, the lower triangle of ones: shape (n, n), or (n, nodes) for trees."""

    def inverse(self, n: int | None = None) -> NDArray[np.float64]:
        """Return the matrix from Z to the increments: row k of B minus row k - 1, which is C^{-1} where C is square."""
        return np.diff(self.decoder(n), axis=0, prepend=0.0)

    def identity(self) -> bytes:
        """Return bytes of what C depends on beside the options, such as factors that an optimiser found.

        A stream goes on only under the C it was begun with.
        """
        return b""

    @property
    def recovers(self) -> int:
        """The most contributions of a release that was thrown away and whose noise the next may take out at no more mu.

        It may with m of them where no entry of C is negative or more than twice the one m columns to its left, on and
        below the diagonal (docs/proofs/secure-aggregation.md); 0 where it may not.
        """
        return 0

    @property
    def remembered(self) -> int:
        """The number of last releases that a state is made again from, where :attr:`memory` is ``recent``; >= 1."""
        return 1

    def draws(self, release: int) -> int:
        """Return the number of rows of Z first used by a release: 1, but for trees."""
        return 1

    @abstractmethod
    def initial_state(self, size: int) -> State:
        """Return the state before the first release, for increments of ``size`` values."""

    @abstractmethod
    def increment(self, state: State, release: int, normals: NDArray[np.floating], scale: float = 1.0) -> Increment:
        """Return the noise of one release and the state after it: a pure function, linear in the noise.

        Parameters
        ----------
        state : State
            The state after release - 1; not changed. Arrays that are returned stay as they are, too: they may be part
            of each other, and of a state that is kept.
        release : int
            k, from 1.
        normals : ndarray of shape (draws x size,)
            The rows of Z first used by release k, one after the other.
        scale : float
            Standard deviation in front of Z, the same for all releases of a stream; the state is in its units.
        """

    def state_after(self, release: int, draw: Draw, scale: float = 1.0) -> State:
        """Make the state after ``release`` (>= 1) again, to the last bit, from the normals ``draw`` gives.

        A mechanism whose memory is its ``state`` cannot do this and is never asked.
        """
        raise ConfigurationError(
            f"Expected a mechanism that regenerates its state, got {self.name!r}: keep its state.",
            kind="unsupported",
            setting="mechanism",
            got=self.name,
        )

    @abstractmethod
    def memory_bytes(self, size: int) -> int:
        """Return the most bytes a stream of increments of ``size`` values must remember between releases."""

    @abstractmethod
    def row_std(self, release: int) -> float:
        """Return the standard deviation of a value of row ``release`` of B Z: the norm of row ``release`` of B."""

    def row_std_range(self) -> tuple[float, float]:
        """Return the smallest and the largest :meth:`row_std`."""
        stds = [self.row_std(release) for release in range(1, self.num_releases + 1)]
        return min(stds), max(stds)

    def rounded_std(self) -> tuple[float, float]:
        """Root mean square and largest standard deviation of a value of the rows that are rounded to the grid.

        These are the rows of B Z where the whole of what was added is removed (:attr:`removes_last`), and increments
        where it is not. For many releases it is a bound, because an increment is the difference of two rows.
        """
        stds = np.array([self.row_std(release) for release in range(1, self.num_releases + 1)])
        if not self.removes_last:
            if self.num_releases > _SMALL:
                return 2.0 * float(stds.max()), 2.0 * float(stds.max())
            stds = np.linalg.norm(self.inverse(), axis=1)
        return float(np.sqrt(np.mean(stds**2))), float(stds.max())

    def largest_entry(self) -> float:
        """Return the largest magnitude of C's entries, or a bound: how far one contribution may move one row of C G."""
        column = self.sensitivity()
        return min(column, float(np.abs(self.materialize()).max())) if self.num_releases <= _SMALL else column

    def increment_bound(self, release: int) -> float | None:
        """Return the largest magnitude added or removed, in units of the largest normal; None if not known."""
        return None

    def noise_std(self, sensitivity: float, mu: float, **pattern: Any) -> float:
        """Return the standard deviation to put in front of Z so that the stream of all releases is mu-GDP.

        ``sensitivity`` is Delta, the L2 change of one contribution when one sample is replaced; ``pattern`` a sample's
        participations, as :meth:`sensitivity` takes them, by default one. No mechanism returns less than Delta times
        the sensitivity of the pattern over mu.
        """
        return sensitivity * self.sensitivity(**pattern) / mu

    def sensitivity(
        self,
        num_participations: int = 1,
        min_separation: int = 1,
        *,
        n: int | None = None,
        pattern: Pattern = "separated",
    ) -> float:
        """Return the value of :meth:`sensitivity_bound`: how much C stretches one sample's contributions."""
        return self.sensitivity_bound(num_participations, min_separation, n=n, pattern=pattern).value

    def sensitivity_bound(
        self,
        num_participations: int = 1,
        min_separation: int = 1,
        *,
        n: int | None = None,
        pattern: Pattern = "separated",
    ) -> Sensitivity:
        """Return how much C stretches one sample's contributions, and whether that is exact (module description).

        It is in units of the change of one release, for noise of standard deviation 1.

        Parameters
        ----------
        num_participations : int
            Most releases one sample takes part in.
        min_separation : int
            Distance, in releases of this client, between two of them.
        n : int, optional
            Count only the first n releases.
        pattern : {"separated", "epochs"}
            Whether participations are at least, or exactly, min_separation apart.

        Notes
        -----
        **Formal guarantees.** mu = Delta x value / noise_std is valid for replacement of one sample whose
        participations obey the declared pattern. Nothing is promised for a sample that breaks it.
        Proof: docs/proofs/returning-samples.md.
        """
        n = self._check_n(n)
        if num_participations < 1 or min_separation < 1 or pattern not in PATTERNS:
            raise ConfigurationError(
                f"Expected num_participations >= 1, min_separation >= 1 and a pattern of {PATTERNS}, got "
                f"{num_participations}, {min_separation}, {pattern!r}.",
                kind="out-of-range",
                setting="num_participations",
                got=num_participations,
            )
        value = self._sensitivity(n, num_participations, min_separation)
        if value is not None:
            return Sensitivity(value, True, "formula")
        if num_participations == 1:
            return Sensitivity(float(np.linalg.norm(self.materialize(n), axis=0).max()), True, "largest column")
        return gram_sensitivity(self._gram(n), n, num_participations, min_separation, pattern)

    def _sensitivity(self, n: int, num_participations: int, min_separation: int) -> float | None:
        """Return the exact sensitivity of a pattern for which a formula is proved; None where there is none."""
        return None

    def _gram(self, n: int) -> Gram:
        """Entries of C^T C for the first n releases."""
        encoder = self.materialize(n)
        gram = encoder.T @ encoder
        return lambda releases: gram[np.ix_(releases, releases)]

    def _check_n(self, n: int | None) -> int:
        if n is None:
            return self.num_releases
        if not 1 <= n <= self.num_releases:
            raise ConfigurationError(f"Expected 1 <= n <= {self.num_releases} releases, got {n}.", kind="out-of-range")
        return n

    def _check_release(self, release: int) -> int:
        if not 1 <= release <= self.num_releases:
            raise ConfigurationError(
                f"Expected a release from 1 to {self.num_releases}, got {release}.",
                kind="out-of-range",
                setting="release",
                got=release,
            )
        return release


_TOLERANCE = 1e-9


def check_mechanism(mechanism: Mechanism) -> None:
    """Raise if a mechanism's stream, sensitivity, deviations or bounds contradict its C and B.

    All of its ``num_releases`` releases are made, so few are enough. A mechanism that passes releases, for so many
    releases, A G + B Z with B C = A and causal C and B, so its sensitivity is C's (:meth:`Mechanism.sensitivity`).
    Proof: docs/proofs/returning-samples.md.

    Examples
    --------
    >>> from murmurfl.privacy import MECHANISMS
    >>> check_mechanism(MECHANISMS["independent"](num_releases=4))
    """
    n, name = mechanism.num_releases, mechanism.name
    encoder, decoder = mechanism.materialize(n), mechanism.decoder(n)
    counts = [mechanism.draws(k) for k in range(1, n + 1)]
    drawn = np.cumsum(counts)
    _expect(encoder.shape == (drawn[-1], n) and decoder.shape == (n, drawn[-1]), name, "C and B of matching shapes")
    _expect(np.allclose(decoder @ encoder, np.tri(n), atol=_TOLERANCE), name, "B C to be the lower triangle of ones")
    for k in range(n):
        _expect(not decoder[k, drawn[k] :].any(), name, "B to use no noise of later releases")
        first = 0 if k == 0 else drawn[k - 1]
        _expect(not encoder[first : drawn[k], k + 1 :].any(), name, "C to look at no later release")
    if vars(type(mechanism)).get("is_memoryless", False):
        diagonal = encoder.shape == (n, n) and np.array_equal(encoder, np.diag(np.diag(encoder)))
        _expect(diagonal, name, "a diagonal C, for it says that its releases stand alone")
    _check_sensitivity(mechanism, encoder.T @ encoder)
    # One value a row of Z: the increments then are rows of the inverse.
    rows = np.split(np.eye(drawn[-1]), drawn[:-1])
    inverse, size = mechanism.inverse(n), int(drawn[-1])
    state, last = mechanism.initial_state(size), None
    for k in range(1, n + 1):
        increment = mechanism.increment(state, k, rows[k - 1].ravel(), 2.0)
        removed = 0.0 if increment.removed is None else increment.removed
        if mechanism.removes_last:
            whole = increment.removed is None if last is None else np.array_equal(removed, last)
            _expect(whole, name, f"increment {k} to remove what the last one added, to the last bit")
            alone = mechanism.increment((), k, rows[k - 1].ravel(), 2.0)
            _expect(np.array_equal(alone.added, increment.added), name, "an increment with an empty state, for a cache")
        last = increment.added.copy()
        _expect(np.allclose(increment.added - removed, 2.0 * inverse[k - 1], atol=_TOLERANCE), name, f"increment {k}")
        bound, parts = mechanism.increment_bound(k), (increment.added, removed)
        largest = max(float(np.abs(part).sum()) for part in parts) / 2.0
        _expect(bound is None or largest <= bound * (1 + _TOLERANCE), name, f"increment {k} within its bound")
        _expect(
            bool(np.isclose(mechanism.row_std(k), np.linalg.norm(decoder[k - 1]), rtol=1e-6)), name, f"row_std({k})"
        )
        state = _state(mechanism, increment.state, k, rows)


def _check_sensitivity(mechanism: Mechanism, gram: NDArray[np.float64]) -> None:
    """Check a mechanism's own formula against equal changes, which are possible ones."""
    n = len(gram)
    for participations in range(1, n + 1):
        for separation in range(1, n + 1):
            chains = [np.arange(start, n, separation)[:participations] for start in range(n)]
            least = {
                "epochs": max(float(gram[np.ix_(chosen, chosen)].sum()) for chosen in chains),
                "separated": worst_pattern(gram, participations, separation),
            }
            for pattern in PATTERNS:
                claimed = mechanism.sensitivity(participations, separation, pattern=pattern)
                enough = claimed**2 >= least[pattern] * (1 - _TOLERANCE)
                _expect(enough, mechanism.name, f"sensitivity({participations}, {separation}, {pattern!r})")


def _state(mechanism: Mechanism, kept: State | None, release: int, rows: list[NDArray[np.float64]]) -> State:
    if mechanism.memory == "state":
        _expect(kept is not None, mechanism.name, "a state to keep")
        return kept or ()
    again = mechanism.state_after(release, lambda chosen: np.stack([rows[k - 1].ravel() for k in chosen]), 2.0)
    same = kept is None or (
        len(kept) == len(again) and all(np.array_equal(a, b) for a, b in zip(kept, again, strict=True))
    )
    _expect(same, mechanism.name, f"the state after release {release} to be made again to the last bit")
    return again


def _expect(holds: bool, name: str, expected: str) -> None:
    if not holds:
        raise ConfigurationError(
            f"Expected of mechanism {name!r}: {expected}; its matrices and its stream differ.", kind="mismatch"
        )
