"""A perceptron in plain NumPy, whose gradients nobody else can see."""

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from tests.harness.apps import partition, two_classes

app = ClientApp()


@app.train()
def train(message, context):
    (weights,) = message.content["arrays"].to_numpy_ndarrays()
    (features, labels), _ = partition(*two_classes(), context)
    weights = weights.copy()
    for _ in range(20):
        weights -= (
            message.content["config"]["lr"]
            * features.T
            @ (1 / (1 + np.exp(-features @ weights)) - labels)
            / len(labels)
        )
    metrics = MetricRecord({"num-examples": len(labels)})
    return Message(RecordDict({"arrays": ArrayRecord([weights]), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    (weights,) = message.content["arrays"].to_numpy_ndarrays()
    _, (features, labels) = partition(*two_classes(), context)
    metrics = MetricRecord(
        {"accuracy": float(((features @ weights > 0) == labels).mean()), "num-examples": len(labels)}
    )
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


server = ServerApp()


@server.main()
def main(grid, context):
    config = ConfigRecord({"lr": 0.5})
    FedAvg(fraction_train=1.0).start(grid, ArrayRecord([np.zeros(8)]), num_rounds=3, train_config=config)
