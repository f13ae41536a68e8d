"""The network, the data, and how one client trains: nothing here knows of privacy."""

from functools import cache
from pathlib import Path

import torch
from flwr.app import Context
from torch import nn
from torchvision.datasets import MNIST

PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081  # what everybody uses for MNIST: constants, and not those of private images


class Net(nn.Module):
    """Two convolutions and a linear layer: 9,274 parameters. Group norm, because batch norm mixes samples."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, kernel_size=5, stride=2, padding=2),
            nn.GroupNorm(2, 8),
            nn.GELU(),
            nn.Conv2d(8, 16, kernel_size=3, stride=2, padding=1),
            nn.GroupNorm(4, 16),
            nn.GELU(),
        )
        self.classifier = nn.Linear(16 * 7 * 7, 10)
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).flatten(1))


@cache
def mnist(root: str, *, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Images as bytes and their labels; the training images always in the same order."""
    data = MNIST(Path(root).expanduser(), train=train, download=True)
    order = torch.randperm(len(data.targets), generator=torch.Generator().manual_seed(7))
    return data.data[order, None], data.targets[order]


def pixels(images: torch.Tensor) -> torch.Tensor:
    """Bytes as the network takes them."""
    return (images / 255 - PIXEL_MEAN) / PIXEL_STD


def load_data(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """One client's share of the training images."""
    number, clients = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    images, labels = mnist(str(context.run_config["data-root"]), train=True)
    return pixels(images[number::clients]), labels[number::clients]


def train(net: Net, data: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Train for one epoch on all of a client's images; the last loss."""
    images, labels = data
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    loss = torch.zeros(())
    for start in range(0, len(labels), 32):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(images[start : start + 32]), labels[start : start + 32])
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def test(net: Net, root: str) -> float:
    """Accuracy on MNIST's 10,000 test images, which no client has."""
    images, labels = mnist(root, train=False)
    return float((net(pixels(images)).argmax(1) == labels).float().mean())
