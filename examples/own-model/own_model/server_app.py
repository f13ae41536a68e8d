"""The server."""

from logging import INFO

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from murmurfl.strategies import Mu2

from .client_app import ROUNDS, make_module
from .strategy import HeavyBall
from .task import TEST_SAMPLES, tumours

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds and test on public data."""
    num_clients = context.run_config["num-clients"]
    machines = {"num_clients": num_clients, "clients_per_round": num_clients}
    if context.run_config["strategy"] == "momentum":
        strategy = HeavyBall(learning_rate=1.0, **machines)
    else:
        strategy = Mu2(learning_rate=1.0, **machines)
    module = make_module()
    torch.nn.init.zeros_(module.weight)
    torch.nn.init.zeros_(module.bias)
    result = strategy.start(grid, ArrayRecord(module.state_dict()), num_rounds=ROUNDS, evaluate_fn=evaluate)
    log(INFO, "Test accuracy %.3f", result.evaluate_metrics_serverapp[ROUNDS]["accuracy"])
    for name, statement in strategy.ask_privacy(grid).items():
        log(INFO, "Machine %s: %d releases, mu = %.3g of all it may make", name, *map(statement.get, ASKED))


ASKED = ("releases", "mu-guaranteed")


@torch.no_grad()
def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Accuracy on public test samples."""
    module = make_module()
    module.load_state_dict(arrays.to_torch_state_dict())
    features, labels = (part[:TEST_SAMPLES] for part in tumours())
    return MetricRecord({"accuracy": float((module(features)[:, 0].sign() == labels).float().mean())})
