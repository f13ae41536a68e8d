"""Synthetic data: nothing to download, and of any size."""

from __future__ import annotations

import numpy as np

from ...privacy import ConfigurationError, derived_seed
from ..settings.run_config import RunConfig
from .task import SYNTHETIC_FEATURE_BOUND, Dataset, Task

_TEST = 1000
_BLOCK = 10_000
_LOGISTIC_TEST = 5000


class Synthetic(Task):
    """Ten Gaussian clouds, by default with MNIST's number of features, for benchmarks."""

    name = "synthetic"
    sentence = "ten Gaussian clouds of any size, for benchmarks"
    keys = frozenset({"synthetic-samples", "synthetic-features"})
    reads = frozenset({"synthetic_samples", "synthetic_features"})

    def load(self, config: RunConfig, root: str) -> Dataset:
        samples, num_features = config.synthetic_samples, config.synthetic_features
        generator = np.random.Generator(np.random.Philox(key=derived_seed("synthetic")))
        centres = generator.random((10, num_features), dtype=np.float32)
        labels = generator.integers(10, size=samples + _TEST)
        features = np.empty((len(labels), num_features), dtype=np.float32)
        for start in range(0, len(labels), _BLOCK):
            block = features[start : start + _BLOCK]
            generator.standard_normal(out=block, dtype=np.float32)
            block *= np.float32(0.5)
            block += centres[labels[start : start + _BLOCK]]
            np.clip(block, 0, 1, out=block)
        return Dataset(features[:samples], labels[:samples], features[samples:], labels[samples:], 10)


class SyntheticLogistic(Task):
    """synthetic(alpha, beta) of Li et al. 2020 (section 5.1 there), with two classes as zhang-2025 uses it.

    Machine i has its own linear rule, of entries N(u_i, 1) with u_i ~ N(0, alpha), and its own features,
    N(v_i, diag(j^-1.2)) with the entries of v_i from N(B_i, 1) and B_i ~ N(0, beta). Alpha and beta are variances.
    """

    name = "synthetic-logistic"
    sentence = "synthetic(alpha, beta) of Li et al. 2020 in two classes; every machine has a rule of its own"
    keys = frozenset({"synthetic-samples", "synthetic-features", "synthetic-alpha", "synthetic-beta", "feature-bound"})
    reads = frozenset(
        {"num_clients", "synthetic_samples", "synthetic_features", "synthetic_alpha", "synthetic_beta", "seed"}
    )
    partitions = ("own", "iid")
    feature_bound = SYNTHETIC_FEATURE_BOUND

    def load(self, config: RunConfig, root: str) -> Dataset:
        machines, samples, num_features = config.num_clients, config.synthetic_samples, config.synthetic_features
        generator = np.random.Generator(np.random.Philox(key=derived_seed("synthetic(alpha, beta)", config.seed)))
        each = samples // machines
        if each < 1:
            raise ConfigurationError(f"Expected synthetic-samples >= num-clients = {machines}, got {samples}.")
        held_out = max(_LOGISTIC_TEST // machines, 1)
        spreads = config.synthetic_alpha**0.5, config.synthetic_beta**0.5
        deviations = np.arange(1, num_features + 1) ** -0.6
        features = np.empty((machines, each + held_out, num_features), np.float32)
        labels = np.empty((machines, each + held_out), np.int64)
        for i in range(machines):
            model_mean, feature_mean = generator.normal(0.0, spreads)
            weights = generator.normal(model_mean, 1.0, size=(2, num_features))
            offsets = generator.normal(model_mean, 1.0, size=2)
            centre = generator.normal(feature_mean, 1.0, size=num_features)
            rows = centre + deviations * generator.standard_normal((each + held_out, num_features))
            features[i], labels[i] = rows, (rows @ weights.T + offsets).argmax(axis=1)
        return Dataset(
            features[:, :each].reshape(-1, num_features),
            labels[:, :each].ravel(),
            features[:, each:].reshape(-1, num_features),
            labels[:, each:].ravel(),
            2,
            np.repeat(np.arange(machines), each),
        )
