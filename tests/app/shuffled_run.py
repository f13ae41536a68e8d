"""A small run of shuffled gradients, with private and public samples: what tests of it begin with."""

from murmurfl.app.settings.run_config import RunConfig

BASE = RunConfig(
    strategy="shuffled",
    task="synthetic-logistic",
    model="logistic",
    num_clients=1,
    clients_per_round=1,
    num_rounds=4,
    synthetic_samples=60,
    synthetic_features=5,
    public_samples=30,
    regularizer="l1",
    regularizer_strength=0.02,
    learning_rate=0.005,
    checkpoint=False,
    mu=2.0,
)
