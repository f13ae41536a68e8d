"""The project's own strategy, a subclass as before: the base and the names of two methods changed."""

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from murmurfl.strategies import CorrelatedFedAvg

from .task import Arrays, test


# Before: class AveragedModels(FedAvg)
class AveragedModels(CorrelatedFedAvg):
    """Says how clients train in a round, and keeps a running mean of the models, which is better than the last one."""

    def __init__(self, *, lr: float, memory: float, **options: Any) -> None:
        super().__init__(**options)
        self.lr = lr
        self.memory = memory
        self.mean: Arrays = []

    # Before: configure_fit(server_round, parameters, client_manager), with a FitIns for each client
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Learning rate and epochs of the round, in the config that `fit` gets."""
        settings = ConfigRecord({**config, "lr": self.lr * 0.98**server_round, "epochs": 2})
        return super().configure_train(server_round, arrays, settings, grid)

    # Before: aggregate_fit(server_round, results, failures)
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the noised average as it comes; the mean is made of it, and costs no privacy."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        model = arrays.to_numpy_ndarrays()
        means = zip(self.mean or model, model, strict=True)
        self.mean = [self.memory * old + (1 - self.memory) * new for old, new in means]
        return arrays, metrics

    def evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Accuracy of the mean, on public data."""
        return MetricRecord({"accuracy": test(self.mean or arrays.to_numpy_ndarrays())})
