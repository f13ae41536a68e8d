"""Independent noise: C is the identity, so the noise of the releases adds up in their prefix sums like sqrt(k)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .base import Draw, Increment, Mechanism, State


class IndependentNoise(Mechanism):
    """Fresh noise of the same size on every release (noisy SGD; ALGORITHMS section 3, ``independent``).

    Parameters
    ----------
    num_releases : int
        Most releases of one stream.

    Notes
    -----
    **Formal guarantees.** A sample in one release: mu = Delta / noise_std, whatever the number of releases; in k
    releases: sqrt(k) times that. No state.
    Proof: docs/proofs/returning-samples.md.
    """

    name = "independent"
    hands_over = True
    memory = "nothing"

    def materialize(self, n: int | None = None) -> NDArray[np.float64]:
        return np.eye(self._check_n(n))

    def decoder(self, n: int | None = None) -> NDArray[np.float64]:
        n = self._check_n(n)
        return np.tri(n)

    def initial_state(self, size: int) -> State:
        return ()

    def increment(self, state: State, release: int, normals: NDArray[np.floating], scale: float = 1.0) -> Increment:
        self._check_release(release)
        return Increment(np.multiply(normals, scale, dtype=np.float64), None, ())

    def state_after(self, release: int, draw: Draw, scale: float = 1.0) -> State:
        return ()

    def memory_bytes(self, size: int) -> int:
        return 0

    def rounded_std(self) -> tuple[float, float]:
        return 1.0, 1.0

    def largest_entry(self) -> float:
        return 1.0

    def increment_bound(self, release: int) -> float:
        return 1.0

    def row_std(self, release: int) -> float:
        return math.sqrt(self._check_release(release))

    def _sensitivity(self, n: int, num_participations: int, min_separation: int) -> float:
        return math.sqrt(min(num_participations, (n - 1) // min_separation + 1))
