"""jax_privacy's noise streams, timed in batches on request; started by :mod:`benchmarks.streams`.

Runs in an environment of its own, on one core. The first line of standard input is the streams' parameters, every
further one the name of a stream and a number of rows; the answers are one line of JSON each. A row is what one release
needs: the next key, its normals in float32, and ``multiply_next`` of the streaming C^{-1}, jitted together and waited
for, with key and state carried on.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import jax
import jax.numpy as jnp
from jax_privacy.matrix_factorization import buffered_toeplitz, streaming_matrix, toeplitz

_WARM_UP_ROWS = 10


class Stream:
    """A stream whose state is given back to XLA for reuse, or not: whichever is faster here.

    Parameters
    ----------
    inverse : StreamingMatrix
        C^{-1}.
    size : int
        Values a row.
    """

    def __init__(self, inverse: streaming_matrix.StreamingMatrix, size: int) -> None:
        self._start = lambda: (jax.random.key(1), inverse.init_multiply(jnp.zeros(size, jnp.float32)))

        def step(key: Any, state: Any) -> tuple[Any, Any, Any]:
            key, row_key = jax.random.split(key)
            row, state = inverse.multiply_next(jax.random.normal(row_key, (size,), jnp.float32), state)
            return row, key, state

        trials = {}
        for donated in ((), (0, 1)):
            self._step, self._carried = jax.jit(step, donate_argnums=donated), self._start()
            self.seconds(_WARM_UP_ROWS)
            trials[sum(self.seconds(_WARM_UP_ROWS))] = self._step
        self._step, self._carried = trials[min(trials)], self._start()

    def seconds(self, rows: int) -> list[float]:
        """Return the time of each of the next rows."""
        times = []
        for _ in range(rows):
            start = time.perf_counter()
            row, *self._carried = jax.block_until_ready(self._step(*self._carried))
            times.append(time.perf_counter() - start)
        if row.dtype != jnp.float32:
            raise TypeError(f"Expected float32 rows, got {row.dtype}.")
        return times


def main() -> None:
    """Answer requests until standard input ends."""
    parameters = json.loads(sys.stdin.readline())
    with jax.enable_x64(True):  # as its constructor wants it; the stream itself is to be float32
        blt = buffered_toeplitz.BufferedToeplitz.build(parameters["theta"], parameters["omega"], dtype=jnp.float32)
    inverses = {
        "independent": streaming_matrix.identity(),
        "blt": blt.inverse_as_streaming_matrix(),
        "banded": toeplitz.inverse_as_streaming_matrix(jnp.array(parameters["band"], jnp.float32)),
    }
    streams = {name: Stream(inverse, parameters["size"]) for name, inverse in inverses.items()}
    print(json.dumps({name: importlib.metadata.version(name) for name in ("jax-privacy", "jax")}), flush=True)
    for line in sys.stdin:
        name, rows = json.loads(line)
        print(json.dumps(streams[name].seconds(rows)), flush=True)


if __name__ == "__main__":
    main()
