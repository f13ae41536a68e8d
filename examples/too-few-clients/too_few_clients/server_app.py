"""What the server does: Flower's own pattern, with another strategy."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from murmurfl.strategies import CorrelatedFedAvg, SecureAggregation

from .task import Net, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds and test on public data."""
    config = context.run_config
    torch.manual_seed(1)
    arrays = ArrayRecord(Net().state_dict())
    sums = SecureAggregation(min_cohort=90, helpers=2) if config["trust"] == "secure-aggregation" else None
    strategy = CorrelatedFedAvg(num_clients=config["num-clients"], secure_aggregation=sums)
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": config["lr"]}),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=evaluate,
    )
    accuracy = result.evaluate_metrics_serverapp[config["num-server-rounds"]]["accuracy"]
    log(20, "Test accuracy %.3f", accuracy)


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Loss and accuracy of the global model."""
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test(net)
    return MetricRecord({"loss": loss, "accuracy": accuracy})
