"""What the server does: Flower's own pattern, with another strategy."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from murmurfl.strategies import CorrelatedFedAvg, FullBatch, SecureAggregation

from .client_app import MODEL, ROUNDS, SUMS
from .task import split

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds and test on public samples."""
    config = context.run_config
    machines, privacy = config["num-clients"], config["privacy"]
    public = split(config["seed"])[1]

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": MODEL.fitted(arrays).score(*public)})

    if privacy == "none":
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=machines)
    elif privacy == "machine":
        strategy = CorrelatedFedAvg(num_clients=machines)
    else:
        summed = privacy == "secure-aggregation"
        strategy = FullBatch(
            num_clients=machines,
            clients_per_round=machines,
            learning_rate=0.6,
            momentum=0.8,
            secure_aggregation=SecureAggregation(SUMS["min_cohort"], SUMS["helpers"]) if summed else None,
        )
    result = strategy.start(grid, MODEL.initial_arrays(), num_rounds=ROUNDS, evaluate_fn=evaluate)
    log(20, "Test accuracy %.3f", result.evaluate_metrics_serverapp[ROUNDS]["accuracy"])
