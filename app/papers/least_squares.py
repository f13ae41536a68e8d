"""A stream of exact measurements of one linear rule: a problem on which the theorems' rates can be seen.

A theorem bounds the worst convex problem, and most problems are easier. Here the curvatures lie evenly on a logarithmic
scale and the rule is equally long in all of them. So whatever step a theorem prescribes, some direction is just being
learnt, and the excess risk falls as slowly as the bound of plain gradient descent, 1 / (step x rounds).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ...privacy.noise import derived_seed
from ..data.task import Dataset, Task
from ..settings.run_config import RunConfig

_OCTAVES = 5.0
_INSIDE = 1 - 1e-6
"""Factor that keeps rows within the unit ball in float32."""
RULE_NORM = 0.8
"""Distance of the rule from the start, 0."""
SMOOTHNESS = 2.0
"""L: a sample's loss is (<w, a> - y)^2 with ||a|| = 1."""


def curvatures(features: int) -> NDArray[np.float64]:
    """Return the second moments of the features, which add up to 1: over five octaves, evenly by logarithm."""
    moments = 2.0 ** (-_OCTAVES * np.arange(features) / (features - 1))
    return moments / moments.sum()


def starting_excess(features: int) -> float:
    """Return the excess risk of the start; the least risk is 0 where all clients have one rule."""
    return float(curvatures(features).sum()) * RULE_NORM**2 / features


def starting_gradient(features: int) -> float:
    """Return the norm of the risk's gradient at the start."""
    return float(np.linalg.norm(SMOOTHNESS * curvatures(features))) * RULE_NORM / math.sqrt(features)


class LeastSquares(Task):
    """Rows a with independent signs and ||a|| = 1, labels <rule, a> without error.

    A client's own rule differs from the mean of all by a vector of squared length ``task.alpha``, and the test set has
    the rows' exact second moments: its loss at w is the excess risk of w.
    """

    name = "least-squares"
    sentence = "exact measurements of a linear rule, with curvatures of five octaves"
    keys = frozenset({"task.samples", "task.features", "task.alpha"})
    reads = frozenset({"num_clients", "synthetic_samples", "synthetic_features", "synthetic_alpha", "seed"})
    partitions = ("own",)
    models = ("ridge",)
    feature_bound = 1.0

    def load(self, config: RunConfig, root: str) -> Dataset:
        """Load the samples of all clients; ``task.features`` is a power of 2."""
        from scipy.linalg import hadamard

        clients, features = config.num_clients, config.synthetic_features
        each = config.synthetic_samples // clients
        generator = np.random.Generator(np.random.Philox(key=derived_seed("least squares", config.seed)))
        scale = np.sqrt(curvatures(features)) * _INSIDE
        rows = generator.choice((-1.0, 1.0), size=(clients, each, features)) * scale
        own = generator.choice((-1.0, 1.0), size=(clients, features)) * math.sqrt(config.synthetic_alpha / features)
        rule = np.full(features, RULE_NORM / math.sqrt(features))
        labels = np.einsum("ijk,ik->ij", rows, rule + own - own.mean(axis=0))
        test = hadamard(features) * scale
        return Dataset(
            rows.reshape(-1, features).astype(np.float32),
            labels.ravel(),  # type: ignore[arg-type] - real numbers, as in the tasks of jiang-2026
            test.astype(np.float32),
            test @ rule,  # type: ignore[arg-type]
            1,
            np.repeat(np.arange(clients), each),
        )
