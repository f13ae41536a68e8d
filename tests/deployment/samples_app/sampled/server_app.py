"""Three rounds, and how good the model is then."""

import json
from pathlib import Path

import numpy as np
import torch
from flwr.app import MetricRecord
from flwr.serverapp import ServerApp
from murmurfl.clients import load_trainable, trainable_arrays
from murmurfl.strategies import CorrelatedFedAvg, FullBatch, PrivateEvaluation, SecureAggregation
from sklearn.datasets import load_digits

from .client_app import make_module

app = ServerApp()


def accuracy(server_round, arrays):
    data = load_digits(n_class=2)
    scores = load_trainable(make_module(), arrays)(torch.tensor(data.data / 16, dtype=torch.float32))
    return MetricRecord({"accuracy": float(np.mean(scores.argmax(1).numpy() == data.target))})


@app.main()
def main(grid, context):
    options = {"num_clients": 2, "node_deadline_s": 120.0, "learning_rate": 1.0}
    if context.run_config["secure"]:
        sums = SecureAggregation(min_cohort=2, helpers=2)
        strategy = CorrelatedFedAvg(secure_aggregation=sums, **options)
    else:
        strategy = FullBatch(clients_per_round=2, **options)
    result = strategy.start(grid, trainable_arrays(make_module()), num_rounds=3, timeout=120.0, evaluate_fn=accuracy)
    said = {
        "accuracy": result.evaluate_metrics_serverapp[3]["accuracy"],
        "aggregated": [report.aggregated for report in strategy.history],
        "stated": strategy.ask_privacy(grid),
    }
    if not context.run_config["secure"]:
        measured = PrivateEvaluation(num_clients=2, node_deadline_s=120.0).evaluate(grid, result.arrays)
        said |= {"privately": measured.accuracy, "samples": measured.samples}
    Path(context.run_config["folder"], "said.json").write_text(json.dumps(said))
