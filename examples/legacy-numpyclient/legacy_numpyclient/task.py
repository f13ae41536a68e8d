"""The data, the model and its training, in NumPy."""

from functools import cache

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

Arrays = list[NDArray[np.float64]]
Data = tuple[NDArray[np.float64], NDArray[np.int64]]

TEST_SAMPLES = 297


def initial_model() -> Arrays:
    """Weights and biases of a softmax regression."""
    return [np.zeros((64, 10)), np.zeros(10)]


@cache
def digits() -> Data:
    """1,797 images of 64 pixels and their labels, always in the same order."""
    data = load_digits()
    order = np.random.default_rng(7).permutation(len(data.target))
    return data.data[order] / 16, data.target[order]


def load_data(partition_id: int, num_partitions: int) -> Data:
    """One client's share of the training data."""
    features, labels = digits()
    return features[TEST_SAMPLES + partition_id :: num_partitions], labels[
        TEST_SAMPLES + partition_id :: num_partitions
    ]


def train(model: Arrays, data: Data, lr: float) -> Arrays:
    """One step of gradient descent for every four samples."""
    weights, biases = (values.copy() for values in model)
    features, labels = data
    for start in range(0, len(labels), 4):
        x, y = features[start : start + 4], labels[start : start + 4]
        error = (probabilities([weights, biases], x) - np.eye(10)[y]) / len(y)
        weights -= lr * x.T @ error
        biases -= lr * error.sum(axis=0)
    return [weights, biases]


def probabilities(model: Arrays, features: NDArray[np.float64]) -> NDArray[np.float64]:
    """Class probabilities, one row a sample."""
    scores = features @ model[0] + model[1]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def test(model: Arrays) -> float:
    """Accuracy on public test images that no client trains on."""
    features, labels = (part[:TEST_SAMPLES] for part in digits())
    return float((probabilities(model, features).argmax(axis=1) == labels).mean())
