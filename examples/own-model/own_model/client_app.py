"""A client: a PyTorch module, a loss and samples; nothing about messages, and nothing about noise."""

import torch
from flwr.app import Context
from murmurfl.clients import EvaluationShare, private_client_app

from .task import PRIVATE

ROUNDS = 10


def make_module() -> torch.nn.Module:
    """Return the model: a linear score."""
    return torch.nn.Linear(30, 1)


def squared_hinge(score: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return the loss."""
    return torch.relu(1.0 - label * score[:, 0]).square().mean()


def samples(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """One client's share of the private samples."""
    number, clients = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    return PRIVATE[0][number::clients], PRIVATE[1][number::clients]


EVALUATION = EvaluationShare(0.2, held_out=0)  # a fifth of mu^2: clients say how good the model is on their samples
app = private_client_app(make_module, squared_hinge, samples, epsilon=4.0, rounds=ROUNDS, evaluation=EVALUATION)
