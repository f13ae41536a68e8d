"""The server: a main function in the place of server_fn."""

from logging import INFO

from flwr.app import ArrayRecord, Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from murmurfl.strategies import SecureAggregation

from .strategy import AveragedModels
from .task import initial_model

# Before: app = ServerApp(server_fn=server_fn), with ServerAppComponents(strategy=..., config=ServerConfig(...))
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds and test on public data."""
    config = context.run_config
    rounds = config["num-server-rounds"]
    sums = SecureAggregation(min_cohort=95, helpers=2)
    strategy = AveragedModels(lr=config["lr"], memory=0.8, num_clients=config["num-clients"], secure_aggregation=sums)
    start = ArrayRecord(initial_model())  # before: ndarrays_to_parameters
    result = strategy.start(grid, start, num_rounds=rounds, evaluate_fn=strategy.evaluate)
    log(INFO, "Test accuracy %.3f", result.evaluate_metrics_serverapp[rounds]["accuracy"])
