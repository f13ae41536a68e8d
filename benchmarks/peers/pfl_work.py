"""Locally private softmax regression in pfl (Apple's private federated learning simulator): one timed run.

A script for an environment that has pfl and PyTorch and not this project; :mod:`benchmarks.peers.run` makes one. It
prints one line of JSON. The model is a PyTorch one, users train by pfl's own SGD (one step of rate 1 on one sample, so
an update is a negative gradient), and pfl's Gaussian mechanism, applied to every user's update, clips it and adds the
noise. The server's SGD step has the learning rate.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism


class SoftmaxRegression(torch.nn.Module):
    """A linear layer with bias and a cross-entropy loss, with the methods pfl asks for; starts at zero."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(num_features, num_classes)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Scores."""
        return self.linear(features)

    def loss(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return what users minimise."""
        return torch.nn.functional.cross_entropy(self(features), labels)

    @torch.no_grad()
    def metrics(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, Weighted]:
        """Return what pfl evaluates: users do so in the first round only."""
        return {"loss": Weighted(self.loss(features, labels).item() * len(labels), len(labels))}


class Users:
    """Makes a user's data set for a round: its next sample, over and over.

    Parameters
    ----------
    features : tensor of shape (users, samples, features)
    labels : tensor of shape (users, samples)
    """

    def __init__(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        self._features = features
        self._labels = labels
        self._used = [0] * len(labels)

    def __call__(self, user: int) -> PyTorchTensorDataset:
        sample = self._used[user] % self._labels.shape[1]
        self._used[user] += 1
        chosen = slice(sample, sample + 1)
        return PyTorchTensorDataset((self._features[user, chosen], self._labels[user, chosen]), user_id=str(user))


class UpdateCounter(TrainingProcessCallback):
    """Counts the users whose updates pfl has aggregated."""

    def __init__(self) -> None:
        self.updates = 0

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Add a round's; never stop."""
        self.updates += int(aggregate_metrics.to_simple_dict()["Train population | number of devices"])
        return False, Metrics()


def train(arguments: argparse.Namespace) -> dict[str, float | int | str]:
    """Train as the arguments say; what to print."""
    np.random.seed(arguments.seed)  # noqa: NPY002 - pfl draws its users' seeds from it
    torch.manual_seed(arguments.seed)
    with np.load(arguments.data) as data:
        features, labels, test_features, test_labels = (
            torch.from_numpy(data[name]) for name in ("features", "labels", "test_features", "test_labels")
        )
    module = SoftmaxRegression(features.shape[-1], int(labels.max()) + 1)
    model = PyTorchModel(
        model=module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=arguments.learning_rate),
    )
    users = FederatedDataset(
        Users(features, labels), get_user_sampler("minimize_reuse", list(range(arguments.clients)))
    )
    backend = SimulatedBackend(
        training_data=users,
        val_data=users,
        postprocessors=[
            WeightByUser(),
            GaussianMechanism(arguments.clip_norm, arguments.noise_std / arguments.clip_norm),
        ],
    )
    counter = UpdateCounter()
    started, used = time.perf_counter(), time.process_time()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=arguments.rounds,
            evaluation_frequency=arguments.rounds,
            train_cohort_size=arguments.per_round,
            val_cohort_size=None,
        ),
        backend=backend,
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=None, local_num_steps=1, local_learning_rate=1.0, local_batch_size=1
        ),
        callbacks=[counter],
        send_metrics_to_platform=False,
    )
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - used
    with torch.no_grad():
        final_loss = module.loss(test_features, test_labels).item()
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "client_updates": counter.updates,
        "final_loss": final_loss,
        "version": version("pfl"),
    }


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="npz with features, labels, test_features and test_labels")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--per-round", type=int, required=True)
    parser.add_argument("--clip-norm", type=float, required=True)
    parser.add_argument("--noise-std", type=float, required=True, help="of every coordinate of a user's gradient")
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    # pfl copies tensors in a way PyTorch advises against, once a user.
    warnings.filterwarnings("ignore", message="To copy construct from a tensor")
    print(json.dumps(train(parser.parse_args())))


if __name__ == "__main__":
    main()
