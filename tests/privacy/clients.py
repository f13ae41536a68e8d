"""Clients for the tests of privacy/, on a ledger that lasts as long as the test."""

import numpy as np
import pytest
from murmurfl.privacy import (
    PrivacyPolicy,
    Privatizer,
    RefusedError,
    SimulatedKeys,
    row_bytes,
)

from tests.harness.clients import DurableLedger

D = 6


DATA = np.random.Generator(np.random.Philox(key=3)).normal(size=(200, D))


MECHANISMS = [
    {"mechanism": "cancelling", "schedule": "uniform"},
    {"mechanism": "cancelling", "schedule": "harmonic"},
    {"mechanism": "cancelling", "schedule": "paper"},
    {"mechanism": "independent"},
    {"mechanism": "decay"},
    {"mechanism": "sqrt_toeplitz"},
    {"mechanism": "sqrt_normalised"},
    {"mechanism": "bisr", "bands": 4},
    {"mechanism": "banded", "bands": 4},
    {"mechanism": "blt"},
    {"mechanism": "tree"},
    {"mechanism": "tree", "decoder": "dyadic"},
    {"mechanism": "optimal"},
]


MECHANISM_OPTIONS = ("bands", "buffers", "decay", "decoder", "workload")


mechanisms = pytest.mark.parametrize("options", MECHANISMS, ids=lambda options: "-".join(map(str, options.values())))


def client(ledger=None, keys=None, num_samples=200, **changes):
    changes["mechanism_options"] = {k: changes.pop(k) for k in list(changes) if k in MECHANISM_OPTIONS}
    policy = PrivacyPolicy(**{"clip_norm": 1.0, "batch_size": 2, "max_participations": 20, "mu": 2.0, **changes})
    keys = SimulatedKeys(1, "m") if keys is None else keys
    ledger = DurableLedger() if ledger is None else ledger
    return Privatizer(policy, D, num_samples, ledger, keys, data=row_bytes(DATA))


def contribution(samples):
    return DATA[samples]


def zero(samples):
    return np.zeros((samples.stop - samples.start, D))


def refused(code, subject, session, ack):
    before = subject.statement(session)
    with pytest.raises(RefusedError) as refusal:
        subject.release(session, ack, contribution)
    assert refusal.value.code == code
    assert subject.statement(session) == before
