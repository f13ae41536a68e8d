"""The methods of a ``private_client_app``, each with its strategy."""

import pytest
from murmurfl.strategies import CorrelatedFedAvg, FullBatch, Mu2, NoisySGD

each_method = pytest.mark.parametrize(
    ("method", "strategy", "options"),
    [
        ("mu2", Mu2, {"learning_rate": 0.1}),
        ("noisy-sgd", NoisySGD, {"learning_rate": 0.1}),
        ("fedavg", CorrelatedFedAvg, {}),
        ("full-batch", FullBatch, {"learning_rate": 0.1}),
    ],
)
