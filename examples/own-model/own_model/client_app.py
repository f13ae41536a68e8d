"""A machine: a PyTorch module, a loss and a data set; nothing about messages."""

import torch
from flwr.app import Context
from flwr.client import Client
from murmurfl.clients import Mu2Client, PrivateClient, TorchGradients, numpy_client_app, simulated_machine
from murmurfl.privacy import PrivacyPolicy

from . import mechanism  # noqa: F401 - makes the mechanism "leaky" known
from .task import Tumours

BATCH_SIZE, ROUNDS = 5, 9


def make_module() -> torch.nn.Module:
    """The model: a linear score."""
    return torch.nn.Linear(30, 1)


def squared_hinge(score: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """The loss of a batch of one."""
    return torch.relu(1.0 - label * score[:, 0]).square().mean()


class GradientClient(PrivateClient):
    """A client of one's own: the clipped gradient at the one point that the strategy of strategy.py sends."""

    def point_weights(self, server_round: int) -> tuple[float]:
        """The gradient, times 1."""
        return (1.0,)


def client_fn(context: Context) -> Client:
    """The machine a message is for."""
    gradients = TorchGradients(make_module(), squared_hinge)
    samples = Tumours(context.node_config["partition-id"], context.node_config["num-partitions"])
    own = context.run_config["strategy"] == "momentum"
    policy = PrivacyPolicy(
        clip_norm=1.0,
        batch_size=BATCH_SIZE,
        max_participations=ROUNDS,
        mu=4.0,
        mechanism="leaky" if own else "cancelling",
    )
    kind = GradientClient if own else Mu2Client
    return kind(gradients, samples, policy, **simulated_machine(context)).to_client()


app = numpy_client_app(client_fn)
