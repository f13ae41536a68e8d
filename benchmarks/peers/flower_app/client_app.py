"""The Flower ClientApp: one SGD step on one sample; Flower's LocalDpMod clips the update and adds the noise.

FedAvg has no learning rate at the server, so the clients' step has it, and clip norm and noise of an update are those
of a gradient times it: the averaged model is the same.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.clientapp.typing import ClientAppCallable
from numpy.typing import NDArray

# LocalDpMod's noise has standard deviation sensitivity sqrt(2 ln(1.25 / delta)) / epsilon; only that matters here.
_EPSILON, _DELTA = 1.0, 1e-5

app = ClientApp()


def local_dp(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """LocalDpMod with the run configuration's clip norm and noise."""
    learning_rate = float(context.run_config["learning-rate"])
    noise_std = learning_rate * float(context.run_config["noise-std"])
    mod = LocalDpMod(
        clipping_norm=learning_rate * float(context.run_config["clip-norm"]),
        sensitivity=noise_std * _EPSILON / math.sqrt(2 * math.log(1.25 / _DELTA)),
        epsilon=_EPSILON,
        delta=_DELTA,
    )
    return mod(message, context, call_next)


@lru_cache(maxsize=1)
def training_data(path: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Features and labels of all clients; a worker reads them once."""
    with np.load(path) as data:
        return data["features"], data["labels"]


@app.query()
def hello(message: Message, context: Context) -> Message:
    """Answer once the worker is up and has the data."""
    training_data(str(context.run_config["data-path"]))
    return Message(RecordDict(), reply_to=message)


@app.train(mods=[local_dp])
def train(message: Message, context: Context) -> Message:
    """One step from the model that came, on the sample whose turn it is."""
    features, labels = training_data(str(context.run_config["data-path"]))
    client = int(context.node_config["partition-id"])
    server_round = int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
    sample = (server_round - 1) % labels.shape[1]
    x, label = features[client, sample], labels[client, sample]
    weight, bias = message.content.array_records["arrays"].to_numpy_ndarrays()
    scores = weight @ x + bias
    residual = np.exp(scores - scores.max())
    residual /= residual.sum()
    residual[label] -= 1
    step = np.float32(context.run_config["learning-rate"]) * residual
    arrays = ArrayRecord([weight - np.outer(step, x), bias - step])
    reply = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
    return Message(reply, reply_to=message)
