"""The server: a strategy of murmurfl over whoever is connected."""

from logging import INFO

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from murmurfl.privacy import Guarantee
from murmurfl.strategies import Mu2

from .clinics import public_samples

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the softmax model the clinics' files name, and test on public data."""
    config = context.run_config
    rounds, num_clients = config["num-server-rounds"], config["num-clients"]
    strategy = Mu2(num_clients=num_clients, clients_per_round=num_clients, learning_rate=config["learning-rate"])
    start = ArrayRecord([np.zeros((2, 30)), np.zeros(2)])
    result = strategy.start(grid, start, num_rounds=rounds, timeout=120.0, evaluate_fn=evaluate)
    log(INFO, "Test accuracy %.3f", result.evaluate_metrics_serverapp[rounds]["accuracy"])
    for name, stated in strategy.ask_privacy(grid).items():
        mechanism = f"{stated['mechanism']} noise on each client, by its own account"
        guarantee = Guarantee(stated["mu-guaranteed"], stated["delta"], mechanism)
        log(INFO, "%s: %d of %d releases. %s", name, stated["releases"], stated["max-participations"], guarantee)


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Accuracy on public samples."""
    weights, biases = arrays.to_numpy_ndarrays()
    features, labels = public_samples()
    return MetricRecord({"accuracy": float(((features @ weights.T + biases).argmax(axis=1) == labels).mean())})
