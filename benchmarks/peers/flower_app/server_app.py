"""The Flower ServerApp: FedAvg without evaluation; the result as JSON where the run configuration says."""

from __future__ import annotations

import json
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


def count_replies(replies: list[RecordDict], weighted_by: str) -> MetricRecord:  # noqa: ARG001 - FedAvg's interface
    """Metrics of a round: how many replies were averaged."""
    return MetricRecord({"replies": len(replies)})


def wait_for_workers(grid: Grid, clients: int) -> None:
    """Ask every node once, so that the workers' start is not part of the training."""
    while len(nodes := list(grid.get_node_ids())) < clients:
        time.sleep(0.1)
    replies = list(grid.send_and_receive([Message(RecordDict(), node, MessageType.QUERY) for node in nodes]))
    errors = [reply.error.reason for reply in replies if reply.has_error()]
    if errors or len(replies) < clients:
        raise RuntimeError(f"Expected {clients} nodes to answer, got {len(replies)} replies, with errors {errors[:1]}.")


def mean_loss(arrays: ArrayRecord, path: str) -> float:
    """Mean cross-entropy on the test data."""
    weight, bias = arrays.to_numpy_ndarrays()
    with np.load(path) as data:
        scores = np.asarray(data["test_features"] @ weight.T + bias, dtype=np.float64)
        labels = data["test_labels"]
    scores -= scores.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(labels)), labels]))


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train and write the result."""
    config = context.run_config
    clients, per_round, path = int(config["clients"]), int(config["per-round"]), str(config["data-path"])
    with np.load(path) as data:
        num_features, num_classes = data["features"].shape[-1], int(data["labels"].max()) + 1
    shapes = ((num_classes, num_features), (num_classes,))
    start = ArrayRecord([np.zeros(shape, dtype=np.float32) for shape in shapes])
    strategy = FedAvg(
        fraction_train=per_round / clients,
        min_train_nodes=per_round,
        min_available_nodes=clients,
        fraction_evaluate=0.0,
        train_metrics_aggr_fn=count_replies,
    )
    wait_for_workers(grid, clients)
    started = time.perf_counter()
    result = strategy.start(grid, start, num_rounds=int(config["rounds"]))
    seconds = time.perf_counter() - started
    replies = (metrics["replies"] for metrics in result.train_metrics_clientapp.values())
    document = {
        "seconds": seconds,
        "client_updates": sum(int(number) for number in replies),  # type: ignore[arg-type]
        "final_loss": mean_loss(result.arrays, path),
        "version": version("flwr"),
    }
    Path(str(config["result-path"])).write_text(json.dumps(document) + "\n", encoding="utf-8")
