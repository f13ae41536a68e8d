"""Independent noise: C is diagonal, so the noise of the releases adds up in their prefix sums.

With C the identity every release has the same noise. With shares s_1 .. s_K of mu^2 it is C = diag(c_k), c_k^2 = K s_k
over the sum of all shares: a sample that is in every release counts for sqrt(K) all the same, and release k alone is
mu_k-GDP with mu_k^2 in proportion to s_k. What depends on release k with weight a_k has the least noise with
s_k = |a_k| (ALGORITHMS section 8).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from .mechanism import PATTERNS, Draw, Increment, Mechanism, Pattern, Sensitivity, State, best_selection

SHARES = ("uniform", "early", "linear", "late", "average")
"""Names of shares of the budget: the same for all releases; falling to the last; rising with k, and with k^2;
and what an average of iterates with weights 1 .. K has of each gradient, K (K + 1) - k (k - 1)."""


def _shares(name: str, releases: int) -> NDArray[np.float64]:
    """Return the shares of a name, one a release, up to a factor."""
    k = np.arange(1.0, releases + 1)
    if name == "early":
        return k[::-1].copy()
    if name == "average":
        return releases * (releases + 1) - k * (k - 1)
    return k if name == "linear" else k**2


class IndependentNoise(Mechanism):
    """Fresh noise on every release, of the same size or by shares of the budget (ALGORITHMS sections 3 and 8).

    Parameters
    ----------
    shares : {"uniform", "early", "linear", "late", "average"}
        Which part of mu^2 each release gets: the same; K + 1 - k; k; k^2; or K (K + 1) - k (k - 1), the weight that
        release k has in an average of iterates with weights 1 .. K.

    Notes
    -----
    **Formal guarantees.** A sample in one release: mu = Delta / noise_std for the same noise on each, whatever the
    number of releases; in k releases: sqrt(k) times that. With shares, a sample in releases P has
    mu^2 = (Delta / noise_std)^2 times the sum over P of K s_k / (s_1 + .. + s_K); the largest sum of the pattern is
    charged. No state. That no correlated noise leaves less where samples are in every release, and which shares are
    best: docs/proofs/full-batches.md.
    Proof: docs/proofs/returning-samples.md.
    """

    name = "independent"
    owns_output = True
    memory = "nothing"
    is_memoryless = True

    def __init__(self, num_releases: int, shares: str = "uniform") -> None:
        super().__init__(num_releases)
        if shares not in SHARES:
            raise ConfigurationError(
                f"Expected shares one of {SHARES}, got {shares!r}.", kind="unknown-name", setting="shares", got=shares
            )
        self.shares = shares
        self._squares = np.broadcast_to(1.0, (self.num_releases,))
        if shares != "uniform":
            parts = _shares(shares, self.num_releases)
            self._squares = parts * (self.num_releases / parts.sum())
        self._entries = np.sqrt(self._squares) if shares != "uniform" else self._squares

    def materialize(self, n: int | None = None) -> NDArray[np.float64]:
        return np.diag(self._entries[: self._check_n(n)])

    def decoder(self, n: int | None = None) -> NDArray[np.float64]:
        n = self._check_n(n)
        return np.tri(n) / self._entries[:n]

    def initial_state(self, size: int) -> State:
        return ()

    def increment(self, state: State, release: int, normals: NDArray[np.floating], scale: float = 1.0) -> Increment:
        std = scale * self.increment_bound(release)
        if normals.dtype == np.float64:
            return Increment(normals * std, None, ())
        added = normals.astype(np.float64)  # first: converting and multiplying in one goes in small pieces
        added *= std
        return Increment(added, None, ())

    def state_after(self, release: int, draw: Draw, scale: float = 1.0) -> State:
        return ()

    def memory_bytes(self, size: int) -> int:
        return 0

    def rounded_std(self) -> tuple[float, float]:
        if self.shares == "uniform":
            return 1.0, 1.0
        stds = 1.0 / self._entries
        return float(np.sqrt(np.mean(stds**2))), float(stds.max())

    def largest_entry(self) -> float:
        return 1.0 if self.shares == "uniform" else float(self._entries.max())

    def increment_bound(self, release: int) -> float:
        """Return the standard deviation of release k's own noise, which bounds it in units of the largest normal."""
        return float(1.0 / self._entries[self._check_release(release) - 1])

    def row_std(self, release: int) -> float:
        release = self._check_release(release)
        return math.sqrt(release if self.shares == "uniform" else np.sum(1.0 / self._squares[:release]))

    def row_std_range(self) -> tuple[float, float]:
        return self.row_std(1), self.row_std(self.num_releases)

    def sensitivity_bound(
        self,
        num_participations: int = 1,
        min_separation: int = 1,
        *,
        n: int | None = None,
        pattern: Pattern = "separated",
    ) -> Sensitivity:
        known = num_participations > 1 and min_separation >= 1 and pattern in PATTERNS
        if self.shares == "uniform" or not known:
            return super().sensitivity_bound(num_participations, min_separation, n=n, pattern=pattern)
        # The columns of C do not overlap, so a pattern's square is the sum of its columns'.
        squares = self._squares[: self._check_n(n)]
        if pattern == "epochs":
            starts = range(len(squares))
            worst = max(float(squares[start::min_separation][:num_participations].sum()) for start in starts)
        else:
            worst = float(best_selection(squares[None], num_participations, min_separation)[0])
        return Sensitivity(math.sqrt(worst), True, "sums of columns' squares")

    def _sensitivity(self, n: int, num_participations: int, min_separation: int) -> float | None:
        if self.shares != "uniform":
            return None
        return math.sqrt(min(num_participations, (n - 1) // min_separation + 1))
