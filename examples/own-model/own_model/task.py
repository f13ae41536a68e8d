"""The data: scikit-learn's 569 breast tumours, 30 measurements each."""

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer

TEST_SAMPLES = 119


@cache
def tumours() -> tuple[torch.Tensor, torch.Tensor]:
    """Measurements and labels (+1 benign, -1 malignant), always in the same order.

    Scaled by mean and deviation of the public test samples: those of everybody's data would be a release of its own.
    """
    data = load_breast_cancer()
    order = np.random.default_rng(7).permutation(len(data.target))
    values = data.data[order]
    public = values[:TEST_SAMPLES]
    scaled = (values - public.mean(axis=0)) / public.std(axis=0)
    features = torch.tensor(scaled / np.sqrt(scaled.shape[1]), dtype=torch.float32)
    return features, torch.tensor(2.0 * data.target[order] - 1.0, dtype=torch.float32)


class Tumours:
    """One machine's samples: a length, and a batch for a slice."""

    def __init__(self, partition_id: int, num_partitions: int) -> None:
        self.features, self.labels = (part[TEST_SAMPLES + partition_id :: num_partitions] for part in tumours())

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, samples: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return self.features[samples], self.labels[samples]
