"""What the server does: Flower's own pattern, with another strategy."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from murmurfl.strategies import CorrelatedFedAvg, FullBatch, ResultFolder, SecureAggregation

from .client_app import MODEL, PLAIN_ROUNDS, ROUNDS, SUMS
from .task import split

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds and test on public samples."""
    config = context.run_config
    clients, privacy, rounds = config["num-clients"], config["privacy"], ROUNDS
    public = split(config["seed"])[1]

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": MODEL.fitted(arrays).score(*public)})

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
            learning_rate=0.6,
            momentum=0.8,
            secure_aggregation=SecureAggregation(SUMS["sums"].min_cohort, SUMS["helpers"]) if summed else None,
            callbacks=[folder],
        )
    result = strategy.start(grid, MODEL.initial_arrays(), num_rounds=rounds, evaluate_fn=evaluate)
    log(20, "Test accuracy %.3f", result.evaluate_metrics_serverapp[rounds]["accuracy"])
