"""The server: train, evaluate, and leave a report."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from murmurfl.app import record_training
from murmurfl.clients import load_trainable, trainable_arrays
from murmurfl.strategies import FullBatch, PrivateEvaluation, ResultFolder

from .client_app import ROUNDS, make_module
from .task import PUBLIC

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds, test on public data and, with noise, on private ones, and leave a report."""
    clients = context.run_config["num-clients"]
    # What is recorded below has the evaluation in it; the strategy leaves no folder of its own.
    strategy = FullBatch(num_clients=clients, learning_rate=1.0, momentum=0.8, callbacks=[ResultFolder(None)])
    result = strategy.start(grid, trainable_arrays(make_module()), num_rounds=ROUNDS, evaluate_fn=evaluate)
    found = PrivateEvaluation(num_clients=clients).evaluate(grid, result.arrays)
    said = strategy.ask_privacy(grid)  # training and evaluation together
    record_training(context.run_config["out"], strategy, result, said, task="tumours", evaluation=found)
    log(20, "Test accuracy %.3f", result.evaluate_metrics_serverapp[ROUNDS]["accuracy"])


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Accuracy on public test samples."""
    module = make_module()
    load_trainable(module, arrays)
    return MetricRecord({"accuracy": float((module(PUBLIC[0])[:, 0].sign() == PUBLIC[1]).float().mean())})
