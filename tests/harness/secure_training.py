"""Whole trainings under masks for tests, and the same ones without."""

import numpy as np
import pytest
from flwr.app import ArrayRecord
from murmurfl.clients import OnlineClient
from murmurfl.privacy import protocol
from murmurfl.strategies import Mu2, NothingAggregatedError, OnlineFedSGD, SecureAggregation

from tests.harness.grid import NodesGrid
from tests.harness.machines import normal_samples
from tests.harness.secure import Machines, state_bytes

SHAPES = [(2, 3), (4,)]
D = 10
START = ArrayRecord([np.zeros(shape) for shape in SHAPES])
ROUNDS = 6
ONE_POINT = {"kind": OnlineClient, "options": {"learning_rate": 0.1}, "clip_unit": "update"}


def some(name, samples=30):
    return normal_samples(name, samples, D) / 4


def machines(**changes):
    """Six machines with samples of their own."""
    return Machines(some, SHAPES, **changes)


def build(kind=Mu2, *, secure=None, **options):
    """A strategy of six machines; ``secure`` holds what differs from sums of at least three releases."""
    common = {"num_clients": 6, "clients_per_round": 4, "learning_rate": 0.05, "seed": 1, "session": "s"}
    own = {OnlineFedSGD: {"local_steps": 1}}.get(kind, {})
    if secure is not None:
        secure = SecureAggregation(**{"min_cohort": 3, **secure})
    return kind(**{**common, **own, "node_deadline_s": 0.05, **options}, secure_aggregation=secure)


def trained(strategy, grid, rounds=ROUNDS):
    strategy.start(grid, START, num_rounds=rounds)
    return strategy


def trained_in_vain(strategy, grid, rounds=ROUNDS):
    """The same where nothing is ever aggregated, which ends a training with an error."""
    with pytest.raises(NothingAggregatedError, match=rf"got none in {len(strategy.history) or rounds} round"):
        trained(strategy, grid, rounds)
    return strategy


class Plain(NodesGrid):
    """The same releases without masks; what comes back of rounds that are ``closed`` elsewhere is lost here."""

    closed = ()
    rounds = 0

    def tamper(self, replies):
        if replies and protocol.METRICS not in replies[0].content:  # answers to a query
            return replies
        self.rounds += 1
        return [] if self.rounds in self.closed else replies


def plain_run(strategy=Mu2, *, lost=0.0, seed=2, closed=(), **changes):
    """A training with the very same releases and no masks."""
    grid = Plain(machines(masked=False, **changes).app, 6, lost=lost, seed=seed)
    grid.closed = closed
    return trained(build(strategy, run_dry=True), grid)  # not asked first: their policies are of masked releases


def closed_rounds(strategy):
    return [report.server_round for report in strategy.history if report.closed]


def same(strategy, plain):
    """Whether two trainings ended in the same state, to the last bit."""
    return state_bytes(strategy) == state_bytes(plain) and strategy.acks == plain.acks
