"""What the server does: Flower's own pattern, with another strategy, and a report."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from murmurfl.clients import load_trainable, trainable_arrays
from murmurfl.strategies import CorrelatedFedAvg, FullBatch, ResultFolder, SecureAggregation

from .client_app import HELPERS, PLAIN_ROUNDS, ROUNDS, SUMS
from .task import make_net, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds and test on public customers."""
    config = context.run_config
    banks, privacy = config["num-clients"], config["privacy"]

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord(test(load_trainable(make_net(), arrays), str(config["data"])))

    torch.manual_seed(1)
    arrays, rounds = trainable_arrays(make_net()), ROUNDS
    folder = ResultFolder(config["out"])
    if privacy == "none":
        strategy, rounds = FedAvg(fraction_evaluate=0.0, min_available_nodes=banks), PLAIN_ROUNDS
    elif privacy == "client":
        strategy, rounds = CorrelatedFedAvg(num_clients=banks, callbacks=[folder]), PLAIN_ROUNDS
    else:
        summed = privacy == "secure-aggregation"
        strategy = FullBatch(
            num_clients=banks,
            clients_per_round=banks,
            learning_rate=1.0,
            momentum=0.9,
            secure_aggregation=SecureAggregation(SUMS["sums"].min_cohort, HELPERS) if summed else None,
            callbacks=[folder],
        )
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, evaluate_fn=evaluate)
    found = result.evaluate_metrics_serverapp[rounds]
    log(20, "Test AUC %.3f", found["auc"])
    log(20, "Test accuracy %.3f", found["accuracy"])
