"""A mechanism of one's own: each release takes out half of the noise the last one added.

Increment k is z_k - z_{k-1} / 2, so C^{-1} has ones on its diagonal and -1/2 below it, C is Toeplitz with 2^{-(i - j)},
and row k of B Z is z_k + (z_1 + ... + z_{k-1}) / 2.
"""

import math

import numpy as np
from murmurfl.privacy import Mechanism, register_mechanism
from murmurfl.privacy.mechanisms import Draw, Increment, State

LEFT = 0.5


@register_mechanism
class LeakyNoise(Mechanism):
    """Half of the noise stays: between ``independent`` (all) and ``cancelling`` (none).

    Notes
    -----
    **Formal guarantees.** That of C: ``register_mechanism`` has held the stream against it. Sensitivities, for samples
    that come back too, are computed from C by the base class.
    """

    name = "leaky"
    memory = "last"  # the state is made again from the nonce of the last release

    def materialize(self, n: int | None = None) -> np.ndarray:
        """C."""
        rows = np.arange(self._check_n(n))
        return np.tril(LEFT ** np.abs(rows[:, None] - rows))

    def decoder(self, n: int | None = None) -> np.ndarray:
        """B, with B C the lower triangle of ones."""
        n = self._check_n(n)
        return LEFT * np.eye(n) + LEFT * np.tri(n)

    def initial_state(self, size: int) -> State:
        """Before the first release there is nothing to take out."""
        return ()

    def increment(self, state: State, release: int, normals: np.ndarray, scale: float = 1.0) -> Increment:
        """The noise of one release."""
        self._check_release(release)
        row = scale * np.asarray(normals, dtype=np.float64)
        return Increment(row, LEFT * state[0] if state else None, (row,))

    def state_after(self, release: int, draw: Draw, scale: float = 1.0) -> State:
        """The last row again."""
        return (scale * np.asarray(draw(range(release, release + 1))[0], dtype=np.float64),)

    def row_std(self, release: int) -> float:
        """The norm of a row of B."""
        return math.sqrt(1.0 + (self._check_release(release) - 1) * LEFT**2)

    def memory_bytes(self, size: int) -> int:
        """A nonce."""
        return 16
