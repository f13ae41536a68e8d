"""The network, the table, and how one bank trains: nothing here knows of privacy."""

from functools import cache

import numpy as np
import torch
from flwr.app import Context
from sklearn.metrics import roc_auc_score
from torch import nn

TEST_ROWS, FEATURES = 6000, 31


def make_net() -> nn.Module:
    """Two hidden layers: 1,586 parameters."""
    layers = [nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 2)]
    return nn.Sequential(*layers)


@cache
def customers(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of 30,000 customers and whether they default next month, always in the same order.

    Scaled by constants that are known without the table: its own means and deviations would be a release of their own.
    """
    table = np.loadtxt(path, delimiter=",", skiprows=1, quotechar='"')
    table = table[np.random.default_rng(7).permutation(len(table))]
    limit, sex, education, marriage, age = table[:, 1:6].T
    behind, billed, paid = table[:, 6:12], table[:, 12:18], table[:, 18:24]  # of six months
    person = [np.log10(limit / 1e5), sex - 1.5, (age - 35) / 10]
    groups = [education == 1, education == 2, education == 3, marriage == 1]
    months = [behind.clip(-2, 4) / 2, behind > 0, (billed / limit[:, None]).clip(-0.5, 1.5), np.log10(1 + paid) / 2 - 1]
    features = np.column_stack([*person, *groups, *months])
    return torch.tensor(features, dtype=torch.float32), torch.tensor(table[:, -1], dtype=torch.int64)


def load_data(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the customers of one bank."""
    number, banks = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    features, defaults = customers(str(context.run_config["data"]))
    own = slice(TEST_ROWS + number, None, banks)
    return features[own], defaults[own]


def train(net: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Train for one epoch on all of a bank's customers; the last loss."""
    features, defaults = data
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loss = torch.zeros(())
    for start in range(0, len(defaults), 32):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(features[start : start + 32]), defaults[start : start + 32])
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def test(net: nn.Module, path: str) -> dict[str, float]:
    """Accuracy and AUC on customers that no bank has."""
    features, defaults = (part[:TEST_ROWS] for part in customers(path))
    scores = net(features)
    accuracy = (scores.argmax(1) == defaults).float().mean()
    return {"accuracy": float(accuracy), "auc": float(roc_auc_score(defaults, scores[:, 1] - scores[:, 0]))}
