"""Nodes for the tests of ledgers on disk: clients with real keys, and what their folder holds."""

import multiprocessing

import numpy as np
from murmurfl.privacy import (
    PrivacyPolicy,
    Privatizer,
    SQLiteLedger,
    row_bytes,
)

D = 6


DATA = np.random.Generator(np.random.Philox(key=5)).normal(size=(200, D))


fork = multiprocessing.get_context("fork")


def client(ledger, keys=None, **changes):
    settings = {"clip_norm": 1.0, "batch_size": 2, "max_participations": 20, "mu": 1.0, "budget_mu": 2.0, **changes}
    keys = ledger.keys() if keys is None else keys
    roster = "r" * 64 if "trust" in settings else ""
    return Privatizer(PrivacyPolicy(**settings), D, 200, ledger, keys, data=row_bytes(range(200)), roster=roster)


def contribution(samples):
    return DATA[samples]


def zero(samples):
    return np.zeros((samples.stop - samples.start, D))


def run(path, releases, session="s", first=1):
    subject = client(SQLiteLedger(path))
    return [subject.release(session, k - 1, contribution) for k in range(first, first + releases)]


def folder(path):
    return {file.name: file.read_bytes() for file in path.parent.iterdir()}


def stream_of(path, session="s"):
    with SQLiteLedger(path).exclusive() as page:
        return page.stream(session)
