"""Servers of private momentum and their clients, for the tests of each of its strategies."""

import numpy as np
from flwr.app import ArrayRecord
from murmurfl.clients import NoisySGDClient
from murmurfl.privacy import PrivacyPolicy, SimulatedKeys

from tests.harness.clients import normal_samples, simulated_app
from tests.harness.grid import NodesGrid
from tests.harness.models import Quadratic

CLIENTS, BATCHES, PASSES, D = 3, 5, 4, 6
ROUNDS = BATCHES * PASSES
START = ArrayRecord([np.ones(D)])
POLICY = {
    "clip_norm": 100.0,
    "batch_size": 1,
    "max_participations": ROUNDS,
    "mu": 2.0,
    "mechanism": "independent",
    "sample_participations": PASSES,
    "min_separation": BATCHES,
    "release_rule": "paper",
    "trust": "trusted-server",
}


def policy(**changes):
    """Of the clients: every sample returns once an epoch."""
    return PrivacyPolicy(**{**POLICY, **changes})


def data(name):
    return normal_samples(name, BATCHES, D)


def app():
    return simulated_app(NoisySGDClient, Quadratic(D), data, **POLICY)


def grid(**changes):
    return NodesGrid(app(), CLIENTS, **changes)


def strategy(kind, **changes):
    """A server of a kind of momentum, with seeded keys."""
    options = {
        "num_clients": CLIENTS,
        "clients_per_round": CLIENTS,
        "learning_rate": 0.05,
        "alpha": 0.3,
        "policy": policy(),
        "num_rounds": ROUNDS,
        "noise_keys": SimulatedKeys(5, "server"),
        "session": "s",
        "node_deadline_s": 1.0,
    }
    return kind(**{**options, **changes})


IMPOSSIBLE = [
    {"num_clients": 4},
    {"alpha": 0.0},
    {"learning_rate": 0.0},
    {"policy": policy(release_rule="acknowledged")},
    {"policy": policy(trust="untrusted-server")},
    {"num_rounds": 0},
]
"""Options with which no server of private momentum can be made."""
