"""Clients for tests: requests as a server makes them, data, ledgers and keys, and the noise that must have come."""

import numpy as np
import pytest
from murmurfl.clients import ContextLedger, numpy_client_app
from murmurfl.privacy import (
    MemoryLedger,
    MemoryOpeningRecord,
    PrivacyPolicy,
    SimulatedKeys,
    SystemKeys,
    protocol,
    row_key,
    standard_normals,
)
from murmurfl.strategies import CorrelatedFedAvg, FullBatch, Mu2, NoisySGD


class DurableLedger(MemoryLedger):
    """Stands in for a ledger on disk: the tests keep it as long as it must last."""

    durable = True


class DurableRecord(MemoryOpeningRecord):
    """Stands in for an opening record on disk, likewise."""

    durable = True


class FixedNonces(SystemKeys):
    """Real keys with nonces that repeat, for tests that compare two runs."""

    def __init__(self):
        super().__init__(bytes(32))

    def nonce(self, session, release):
        return release.to_bytes(16, "little")


class Labelled:
    """Features and labels."""

    def __init__(self, features, labels):
        self.features, self.labels = features, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, chosen):
        return self.features[chosen], self.labels[chosen]


def normal_samples(name, count, size):
    """Samples that depend on a client's name alone."""
    return np.random.Generator(np.random.Philox(key=int(name))).normal(size=(count, size))


def training_config(server_round=1, ack=0, session="s", **entries):
    """The config of a training request; an entry that is None is left out."""
    config = {
        protocol.VERSION: protocol.PROTOCOL_VERSION,
        protocol.SERVER_ROUND: server_round,
        protocol.SESSION: session,
        protocol.ACK: ack,
        **entries,
    }
    return {key: value for key, value in config.items() if value is not None}


def point_request(point, release=1, session="s"):
    """What asks for a client's next release at one query point, if all before it were aggregated."""
    return [np.asarray(point, dtype=np.float64)], training_config(release, release - 1, session)


def simulated_app(kind, gradients, data, **changes):
    """Simulated clients of a kind of client as an app; ``data(name)`` gives a client's samples."""

    def client_fn(context):
        name = str(context.node_config["partition-id"])
        samples = data(name)
        policy = {"clip_norm": 1.0, "batch_size": 1, "max_participations": len(samples), "mu": 2.0, **changes}
        ledger, keys = ContextLedger(context.state, name), SimulatedKeys(3, name)
        return kind(gradients, samples, PrivacyPolicy(**policy), ledger, keys, name=name)

    return numpy_client_app(client_fn)


def noise_of(name, k, policy, size, seed=3):
    """The noise in the sum of a client's releases 1 to k in session "s", from its key alone; 0 before the first."""
    plan, keys = policy.plan(size), SimulatedKeys(seed, name)
    nonces = [keys.nonce("s", release) for release in range(1, k + 1)]
    return plan.grid.values(stream_noise(plan, size, keys.secret_key, nonces))


def stream_noise(plan, size, key, nonces):
    """The counts of noise in the sum of a stream's releases, from the key and the nonces of all of them.

    It is made by the mechanism alone, release by release; of ``cancelling`` it is the last row.
    """
    mechanism, grid, total = plan.mechanism, plan.grid, np.zeros(size, np.int64)

    def normals(release):
        return standard_normals(row_key(key, nonces[release - 1]), mechanism.draws(release) * size, "exact")

    def drawn(releases):
        return np.array([normals(release) for release in releases])

    state = mechanism.initial_state(size)
    for release in range(1, len(nonces) + 1):
        made = mechanism.increment(state, release, normals(release), plan.noise_std)
        if mechanism.removes_last or made.removed is None:
            total += grid.counts(made.added)
            total -= 0 if made.removed is None else grid.counts(made.removed)
        else:
            total += grid.counts(made.added - made.removed)
        again = made.state is None and release < len(nonces)
        state = mechanism.state_after(release, drawn, plan.noise_std) if again else made.state
    return total


def concatenated(arrays):
    """Arrays as one vector."""
    return np.concatenate([np.asarray(values).ravel() for values in arrays])


each_method = pytest.mark.parametrize(
    ("method", "strategy", "options"),
    [
        ("mu2", Mu2, {"learning_rate": 0.1}),
        ("noisy-sgd", NoisySGD, {"learning_rate": 0.1}),
        ("fedavg", CorrelatedFedAvg, {}),
        ("full-batch", FullBatch, {"learning_rate": 0.1}),
    ],
)
