"""The arithmetic of DP-mu^2-FL and nothing else: what a computer's speed would allow.

Run with ``python -m benchmarks.bare``. NumPy's own generator, float32 noise as it comes, one sum a round: no
keys, no grid, no ledger, no release rule, no refusals, nothing that could be regenerated, audited or lost. It releases
nothing and protects nobody. The cohort engine is measured beside it, because updates per second alone say as much about
the computer as about the code.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

FEATURES, CLASSES = 784, 10
SIZE = CLASSES * FEATURES + CLASSES
CLIP_NORM = 1.0
NOISE_STD = 10.0
LEARNING_RATE = 1e-3


def measure_here(machines: int, per_round: int, rounds: int) -> dict[str, float]:
    """Updates a second of one pass in this process.

    Parameters
    ----------
    machines, per_round, rounds : int
        M, m and T; one fresh sample a machine and round.
    """
    rng = np.random.default_rng(0)
    features = rng.standard_normal((rounds * per_round, FEATURES))
    labels = rng.integers(0, CLASSES, rounds * per_round)
    samples = rng.permutation(rounds * per_round)  # as scattered in memory as those of sampled machines are
    last_noise = np.zeros((machines, SIZE), dtype=np.float32)
    model, query, last_query, gradient = (np.zeros(SIZE) for _ in range(4))
    started = time.perf_counter()
    for t in range(1, rounds + 1):
        asked = rng.permutation(machines)[:per_round]
        chosen = samples[(t - 1) * per_round : t * per_round]
        batch, truth = features[chosen], labels[chosen]
        residuals = t * _residuals(query, batch, truth) - (t - 1) * _residuals(last_query, batch, truth)
        norms = np.sqrt(np.einsum("ij,ij->i", residuals, residuals) * (np.einsum("ij,ij->i", batch, batch) + 1.0))
        residuals *= np.minimum(1.0, CLIP_NORM / norms)[:, None]
        total = np.empty(SIZE)
        np.dot(residuals.T, batch, out=total[:-CLASSES].reshape(CLASSES, FEATURES))
        total[-CLASSES:] = residuals.sum(axis=0)
        for machine in asked:
            noise = rng.standard_normal(SIZE, dtype=np.float32)
            noise *= np.float32(NOISE_STD)
            total += noise
            total -= last_noise[machine]
            last_noise[machine] = noise
        gradient += total / per_round
        model -= LEARNING_RATE * gradient
        last_query, query = query, query + (model - query) * (2.0 / (t + 2.0))
    seconds = time.perf_counter() - started
    if not np.isfinite(query).all():
        raise RuntimeError("Expected a finite model.")
    updates = rounds * per_round
    return {"updates": updates, "seconds": seconds, "rate": updates / seconds, "parameters": SIZE}


def _residuals(parameters: NDArray[np.float64], batch: NDArray[np.float64], truth: NDArray[Any]) -> NDArray[np.float64]:
    """Softmax minus one-hot label, shape (samples, classes)."""
    scores = batch @ parameters[:-CLASSES].reshape(CLASSES, FEATURES).T
    scores += parameters[-CLASSES:]
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True)
    scores[np.arange(len(truth)), truth] -= 1.0
    return scores


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1_200)
    print(json.dumps(measure_here(100, 50, parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
