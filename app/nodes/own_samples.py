"""Samples of a machine's operator: one .npz file, in its order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...privacy import ConfigurationError


@dataclass(frozen=True)
class OwnSamples:
    """Samples of the operator's own file, in its order."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, samples: slice, /) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        return self.features[samples], self.labels[samples]

    @classmethod
    def read(cls, path: Path, num_classes: int) -> OwnSamples:
        try:
            with np.load(path, allow_pickle=False) as file:
                features, labels = file["features"], file["labels"]
        except (OSError, KeyError, ValueError) as error:
            raise ConfigurationError(
                f"Expected an .npz with the arrays `features` and `labels` at {path}, got: {error}."
            ) from error
        if features.ndim < 2 or features.dtype.kind not in "fiu" or labels.shape != (len(features),) or not len(labels):
            raise ConfigurationError(
                f"Expected in {path} numeric features, one row a sample, and one label a sample, got shapes "
                f"{features.shape} and {labels.shape}."
            )
        if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= num_classes:
            raise ConfigurationError(f"Expected the labels in {path} to be integers from 0 to {num_classes - 1}.")
        flat = features.reshape(len(features), math.prod(features.shape[1:]))
        return cls(flat.astype(np.float32), labels.astype(np.int64))
