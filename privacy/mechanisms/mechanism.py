r"""What a correlated-noise mechanism is: a causal factorisation A = B C, and the rows of B Z.

A machine's contributions g_1 .. g_K (rows of G) are released as prefix sums: A is the K x K lower triangle of ones.
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

What a machine adds to contribution k is the *increment*, row k of B Z minus row k - 1 (row k of C^{-1} Z where C is
square); the increments up to k sum to row k.

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
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from .sensitivity import PATTERNS, Gram, Pattern, Sensitivity, gram_sensitivity

State = tuple[NDArray[np.floating], ...]
"""Arrays of the parameters' size, from which the next increment is made."""

Memory = Literal["nothing", "last", "recent", "all", "state"]
"""What a stream remembers between releases, so that its state is there again after a restart.

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
    """A correlated-noise mechanism for at most ``num_releases`` releases of one stream, K >= 1."""

    name: ClassVar[str]
    memory: ClassVar[Memory]

    removes_last: ClassVar[bool] = False
    """Whether a release removes, to the last bit, what the last one added. Whoever still has that need not make it
    again, and asks for an increment with an empty state instead, of which only what is added counts."""

    hands_over: ClassVar[bool] = False
    """Whether nobody else needs the arrays of an increment any more: then they are rounded in place. A subclass
    does not inherit it, because it may share its arrays."""

    stands_alone: ClassVar[bool] = False
    """Whether the noise of a release tells nothing of another release's: C is diagonal (:func:`check_mechanism` sees to
    it). A subclass does not inherit it (:func:`noise_stands_alone`), because it may add noise otherwise."""

    def __init__(self, num_releases: int) -> None:
        if isinstance(num_releases, bool) or int(num_releases) != num_releases or num_releases < 1:
            raise ConfigurationError(f"Expected num_releases to be an integer >= 1, got {num_releases!r}.")
        self.num_releases = int(num_releases)

    @abstractmethod
    def materialize(self, n: int | None = None) -> NDArray[np.float64]:
        """The encoder C for the first n releases, by default all: shape (n, n), or (nodes, n) for trees."""

    @abstractmethod
    def decoder(self, n: int | None = None) -> NDArray[np.float64]:
        """The causal B with B C = A, the lower triangle of ones: shape (n, n), or (n, nodes) for trees."""

    def inverse(self, n: int | None = None) -> NDArray[np.float64]:
        """The matrix from Z to the increments: row k of B minus row k - 1, which is C^{-1} where C is square."""
        return np.diff(self.decoder(n), axis=0, prepend=0.0)

    def identity(self) -> bytes:
        """The bytes of what C depends on beside the options: factors an optimiser found, and another version may not.

        A stream goes on only under the C it was begun with.
        """
        return b""

    @property
    def mends(self) -> bool:
        """Whether a release may take out the noise of one before it that was thrown away, at no more mu.

        It may where no entry of C is negative or more than twice the one to its left, on and below the diagonal
        (docs/proofs/secure-aggregation.md).
        """
        return False

    @property
    def remembered(self) -> int:
        """The number of last releases that a state is made again from, where :attr:`memory` is ``recent``; >= 1."""
        return 1

    def draws(self, release: int) -> int:
        """The number of rows of Z first used by a release: 1, but for trees."""
        return 1

    @abstractmethod
    def initial_state(self, size: int) -> State:
        """The state before the first release, for increments of ``size`` values."""

    @abstractmethod
    def increment(self, state: State, release: int, normals: NDArray[np.floating], scale: float = 1.0) -> Increment:
        """The noise of one release and the state after it: a pure function, linear in the noise.

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
        raise ConfigurationError(f"Expected a mechanism that regenerates its state, got {self.name!r}: keep its state.")

    @abstractmethod
    def memory_bytes(self, size: int) -> int:
        """The most bytes a stream of increments of ``size`` values must remember between releases."""

    @abstractmethod
    def row_std(self, release: int) -> float:
        """Standard deviation of a value of row ``release`` of B Z: the norm of row ``release`` of B."""

    def row_std_range(self) -> tuple[float, float]:
        """The smallest and the largest :meth:`row_std`."""
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
        """The largest magnitude of C's entries, or a bound: how far one contribution may move one row of C G."""
        column = self.sensitivity()
        return min(column, float(np.abs(self.materialize()).max())) if self.num_releases <= _SMALL else column

    def increment_bound(self, release: int) -> float | None:
        """The largest magnitude added or removed, in units of the largest normal; None if not known."""
        return None

    def noise_std(self, sensitivity: float, mu: float, **pattern: Any) -> float:
        """Standard deviation to put in front of Z so that the stream of all releases is mu-GDP.

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
        """The value of :meth:`sensitivity_bound`: how much C stretches one sample's contributions."""
        return self.sensitivity_bound(num_participations, min_separation, n=n, pattern=pattern).value

    def sensitivity_bound(
        self,
        num_participations: int = 1,
        min_separation: int = 1,
        *,
        n: int | None = None,
        pattern: Pattern = "separated",
    ) -> Sensitivity:
        """How much C stretches one sample's contributions, and whether that is exact (:mod:`.sensitivity`).

        It is in units of the change of one release, for noise of standard deviation 1.

        Parameters
        ----------
        num_participations : int
            Most releases one sample takes part in.
        min_separation : int
            Distance, in releases of this machine, between two of them.
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
                f"{num_participations}, {min_separation}, {pattern!r}."
            )
        value = self._sensitivity(n, num_participations, min_separation)
        if value is not None:
            return Sensitivity(value, True, "formula")
        if num_participations == 1:
            return Sensitivity(float(np.linalg.norm(self.materialize(n), axis=0).max()), True, "largest column")
        return gram_sensitivity(self._gram(n), n, num_participations, min_separation, pattern)

    def _sensitivity(self, n: int, num_participations: int, min_separation: int) -> float | None:
        """The exact sensitivity of a pattern for which a formula is proved; None where there is none."""
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
            raise ConfigurationError(f"Expected 1 <= n <= {self.num_releases} releases, got {n}.")
        return n

    def _check_release(self, release: int) -> int:
        if not 1 <= release <= self.num_releases:
            raise ConfigurationError(f"Expected a release from 1 to {self.num_releases}, got {release}.")
        return release
