"""Digits, two classes of them; two clients have every second one."""

import numpy as np
import torch
from murmurfl.clients import private_client_app
from sklearn.datasets import load_digits


def make_module():
    module = torch.nn.Linear(64, 2)
    torch.nn.init.zeros_(module.weight)
    torch.nn.init.zeros_(module.bias)
    return module


def load(context):
    data = load_digits(n_class=2)
    own = slice(context.node_config["partition-id"], None, context.node_config["num-partitions"])
    assert context.run_config["local"] == "the operator's"
    return (data.data[own] / 16).astype(np.float32), data.target[own]


app = private_client_app(make_module, samples=load, mu=1e3, rounds=99, clip_norm=1e3)
updates = private_client_app(make_module, samples=load, mu=1e3, rounds=99, clip_norm=1e3, method="fedavg")
