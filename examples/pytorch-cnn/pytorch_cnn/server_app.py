"""What the server does: Flower's own pattern, with another strategy, and a report."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from murmurfl.clients import load_trainable, trainable_arrays
from murmurfl.strategies import CorrelatedFedAvg, FullBatch, ResultFolder, SecureAggregation

from .client_app import PLAIN_ROUNDS, ROUNDS, SUMS
from .task import Net, mnist, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds and test on MNIST's test images."""
    config = context.run_config
    clients, root, privacy = config["num-clients"], str(config["data-root"]), config["privacy"]

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": test(load_trainable(Net(), arrays), root)})

    mnist(root, train=True)  # downloaded here, before clients look for it
    torch.manual_seed(1)
    arrays, rounds = trainable_arrays(Net()), ROUNDS
    folder = ResultFolder(config["out"])
    if privacy == "none":
        strategy, rounds = FedAvg(fraction_evaluate=0.0, min_available_nodes=clients), PLAIN_ROUNDS
    elif privacy == "client":
        strategy, rounds = CorrelatedFedAvg(num_clients=clients, callbacks=[folder]), PLAIN_ROUNDS
    else:
        summed = privacy == "secure-aggregation"
        strategy = FullBatch(
            num_clients=clients,
            clients_per_round=clients,
            learning_rate=1.5,
            momentum=0.8,
            node_deadline_s=600.0,  # a hundred virtual nodes take their time on a busy computer
            secure_aggregation=SecureAggregation(SUMS["sums"].min_cohort, SUMS["helpers"]) if summed else None,
            callbacks=[folder],
        )
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, evaluate_fn=evaluate)
    log(20, "Test accuracy %.3f", result.evaluate_metrics_serverapp[rounds]["accuracy"])
