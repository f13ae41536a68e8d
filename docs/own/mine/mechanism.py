"""A mechanism of our own."""

import math

import numpy as np
from murmurfl.privacy import Mechanism
from murmurfl.privacy.mechanisms import Increment


class HalfCancelling(Mechanism):
    """Each release takes out half of the noise the last one added."""

    name = "half-cancelling"
    memory = "last"

    def materialize(self, n=None):
        rows = np.arange(self._check_n(n))
        return np.tril(0.5 ** np.abs(rows[:, None] - rows))

    def decoder(self, n=None):
        n = self._check_n(n)
        return 0.5 * np.eye(n) + 0.5 * np.tri(n)

    def initial_state(self, size):
        return ()

    def increment(self, state, release, normals, scale=1.0):
        row = scale * np.asarray(normals, dtype=np.float64)
        return Increment(row, 0.5 * state[0] if state else None, (row,))

    def state_after(self, release, draw, scale=1.0):
        return (scale * np.asarray(draw(range(release, release + 1))[0], dtype=np.float64),)

    def row_std(self, release):
        return math.sqrt(1.0 + (release - 1) / 4)

    def memory_bytes(self, size):
        return 16
