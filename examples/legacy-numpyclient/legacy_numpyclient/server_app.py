"""The server. Before, on Flower's legacy interface:

    def server_fn(context):
        strategy = FedAvg(initial_parameters=ndarrays_to_parameters(initial_model()), on_fit_config_fn=...)
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=10))

    app = ServerApp(server_fn=server_fn)

Flower's legacy strategies speak messages that carry no acknowledgements; the eight lines of ``main`` take their place.
"""

from logging import INFO

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from murmurfl.strategies import CorrelatedFedAvg

from .task import initial_model, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds and test on public data."""
    config = context.run_config
    rounds = config["num-server-rounds"]
    strategy = CorrelatedFedAvg(num_clients=config["num-clients"])
    settings = ConfigRecord({"lr": config["lr"]})  # before: on_fit_config_fn
    start = ArrayRecord(initial_model())
    result = strategy.start(grid, start, num_rounds=rounds, train_config=settings, evaluate_fn=evaluate)
    log(INFO, "Test accuracy %.3f", result.evaluate_metrics_serverapp[rounds]["accuracy"])


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Accuracy of the global model."""
    return MetricRecord({"accuracy": test(arrays.to_numpy_ndarrays())})
