"""The data, and the model as scikit-learn has it."""

import numpy as np
from flwr.app import Context
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression

PUBLIC_SAMPLES = 119
Data = tuple[np.ndarray, np.ndarray]


def make_model() -> LogisticRegression:
    """Return the model, with scikit-learn's own settings."""
    return LogisticRegression()


def split(seed: int) -> tuple[Data, Data]:
    """569 breast tumours of 30 measurements each: 450 of the clients', and 119 public ones that the server tests on.

    Features are scaled by mean and deviation of the public samples: those of private ones would be a release too.
    """
    data = load_breast_cancer()
    order = np.random.default_rng(seed).permutation(len(data.target))
    values, labels = data.data[order], data.target[order]
    public = values[:PUBLIC_SAMPLES]
    features = (values - public.mean(axis=0)) / public.std(axis=0)
    return (features[PUBLIC_SAMPLES:], labels[PUBLIC_SAMPLES:]), (features[:PUBLIC_SAMPLES], labels[:PUBLIC_SAMPLES])


def load_data(context: Context) -> Data:
    """One client's share of the private samples."""
    number, clients = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    features, labels = split(int(context.run_config["seed"]))[0]
    return features[number::clients], labels[number::clients]
