"""The model, the data, and how one client trains: nothing here knows of privacy."""

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

TEST_SAMPLES = 119


class Net(nn.Module):
    """A logistic regression on ten measurements: 10 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(10, 1, bias=False)
        nn.init.zeros_(self.score.weight)

    def forward(self, measurements: torch.Tensor) -> torch.Tensor:
        return self.score(measurements)[:, 0]


@cache
def tumours() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ten worst measurements of 569 tumours, and whether each is benign; comes with scikit-learn.

    Scaled by mean and deviation of the public test samples: those of everybody's data would be a release of its own.
    """
    data = load_breast_cancer()
    order = np.random.default_rng(7).permutation(len(data.target))
    values, benign = data.data[order, 20:], data.target[order]
    public = values[:TEST_SAMPLES]
    scaled = (values - public.mean(axis=0)) / public.std(axis=0) / np.sqrt(10)
    return torch.tensor(scaled, dtype=torch.float32), torch.tensor(benign, dtype=torch.float32)


def load_data(partition_id: int, num_partitions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tumours that one client knows."""
    measurements, benign = tumours()
    train = slice(TEST_SAMPLES + partition_id, None, num_partitions)
    return measurements[train], benign[train]


def train(net: Net, data: tuple[torch.Tensor, torch.Tensor], epochs: int, lr: float) -> float:
    """Train on all of a client's data; the last loss."""
    measurements, benign = data
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    loss = torch.zeros(())
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(net(measurements), benign)
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def test(net: Net) -> tuple[float, float]:
    """Loss and accuracy on public test samples that no client trains on."""
    measurements, benign = (part[:TEST_SAMPLES] for part in tumours())
    scores = net(measurements)
    accuracy = ((scores > 0) == (benign > 0)).float().mean()
    return float(nn.functional.binary_cross_entropy_with_logits(scores, benign)), float(accuracy)
