"""The model, the data, and how one client trains: nothing here knows of privacy."""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import nn

TEST_SAMPLES = 297


class Net(nn.Module):
    """A convolution, a pooling and a linear layer: 410 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, kernel_size=3), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Linear(4 * 3 * 3, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).flatten(1))


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 images of 8 x 8 pixels and their labels, always in the same order; comes with scikit-learn."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(7))
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    return images[order], torch.tensor(data.target)[order]


def load_data(partition_id: int, num_partitions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One client's share of the training data."""
    images, labels = digits()
    train = slice(TEST_SAMPLES + partition_id, None, num_partitions)
    return images[train], labels[train]


def train(net: Net, data: tuple[torch.Tensor, torch.Tensor], epochs: int, lr: float) -> float:
    """Train on all of a client's data; the last loss."""
    images, labels = data
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    loss = torch.zeros(())
    for _ in range(epochs):
        for start in range(0, len(labels), 8):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images[start : start + 8]), labels[start : start + 8])
            loss.backward()
            optimizer.step()
    return loss.item()


@torch.no_grad()
def test(net: Net) -> tuple[float, float]:
    """Loss and accuracy on public test images that no client trains on."""
    images, labels = (part[:TEST_SAMPLES] for part in digits())
    outputs = net(images)
    accuracy = (outputs.argmax(1) == labels).float().mean()
    return float(nn.functional.cross_entropy(outputs, labels)), float(accuracy)
