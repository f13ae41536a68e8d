"""Trusted trainings that are cut off at any point, and the exact mu of everything they published.

Published values are v + W z with z independent standard normals. With one-hot rows in place of the normals, what a
strategy publishes on data that are zero *is* W: every pair of key and nonce is a column of its own, so noise that was
drawn a second time under another key shows as another column. Then mu = |W^+ v| for the change v of one sample.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord
from murmurfl.privacy import PrivacyPolicy, protocol
from murmurfl.privacy.mechanisms import optimal as history
from murmurfl.strategies import (
    CorrelatedMomentum,
    ReducedTreeMomentum,
    Reply,
    TreeMomentum,
    TrustedMu2,
    correlated_momentum,
    mu2,
    reduced_tree_momentum,
    tree_momentum,
)
from murmurfl.strategies.aggregation import streams
from murmurfl.strategies.rounds import loop as rounds
from murmurfl.strategies.rounds.checkpoint import TrustedCheckpoint

from tests.harness.rules import begun, stepped

CLIENTS, BATCHES, PASSES, D = 2, 5, 4, 200
ROUNDS = BATCHES * PASSES
CLAIM = 1.0
POINTS = ("noise drawn", "checkpoint written", "mark moved", "seen")
"""Where a server may die in a round: before its checkpoint, before the mark, before anybody sees the model, after."""

KINDS = ("trusted-mu2", "tree", "reduced tree", "sqrt_toeplitz", "banded", "blt", "optimal")


class Killed(Exception):
    """The server's process is gone."""


def policy(kind="tree", **changes):
    """The clients' policy; for momentum, samples return every epoch."""
    options = {"clip_norm": 1.0, "batch_size": 1, "max_participations": ROUNDS, "mu": CLAIM, "trust": "trusted-server"}
    if kind != "trusted-mu2":
        options |= {"mechanism": "independent", "release_rule": "paper"}
        options |= {"sample_participations": PASSES, "min_separation": BATCHES}
    return PrivacyPolicy(**{**options, **changes})


def strategy(kind, checkpoint, **changes):
    """A server with real keys, as a deployed run has them."""
    options = {
        "num_clients": CLIENTS,
        "clients_per_round": CLIENTS,
        "learning_rate": 0.05,
        "policy": policy(kind),
        "num_rounds": ROUNDS,
        "checkpoint": checkpoint,
        "seed": 1,
        **changes,
    }
    if kind == "trusted-mu2":
        return TrustedMu2(**options)
    options = {"alpha": 0.3, **options}
    if kind == "tree":
        return TreeMomentum(**options)
    if kind == "reduced tree":
        return ReducedTreeMomentum(**{"smoothness": 0.03, **options})
    return CorrelatedMomentum(mechanism=kind, **options)


@dataclass
class Clients:
    """Clients that answer every round: with nothing, or with contributions that depend on name and round alone."""

    policy: PrivacyPolicy
    size: int = D
    empty: bool = True
    seen: list[tuple[int, bytes]] = field(default_factory=list)
    """Which models were published: round and bytes, those of query points and of evaluations."""
    sessions: list[str] = field(default_factory=list)

    def names(self):
        return [str(i) for i in range(CLIENTS)]

    def contribution(self, name, k):
        rng = np.random.Generator(np.random.Philox(key=[int(name), k]))
        values = rng.normal(size=self.size) / 20
        grid = self.policy.plan(self.size).grid
        return grid.values(grid.counts(values))

    def answer(self, request):
        self.seen.append((request.server_round - 1, request.points[0].tobytes()))
        self.sessions.append(request.session)
        for name, ack in request.acks.items():
            k = request.server_round  # a node gives the same answer to a round that is asked again
            first = k if self.policy.release_rule == "paper" else ack + 1
            values = np.zeros(self.size)
            if not self.empty:
                values = sum(self.contribution(name, j) for j in range(first, k + 1))
            yield Reply(name, k, ack, values, {protocol.SENSITIVITY: self.policy.plan(self.size).sensitivity})

    def statements(self, session):
        return {}


def first_step(subject, size):
    """The state after a first round in which nothing came, with the noise of a trusted server in it."""
    subject.aggregator.shape(size, size)
    nothing, state = np.zeros(size), begun(subject, np.zeros(size))
    return stepped(subject, state, subject.aggregator.stream.released(nothing, 1), 1)


class Columns:
    """One-hot rows in place of normals: a column for every key that is drawn under."""

    def __init__(self, monkeypatch):
        self.numbers = {}
        self.of_model = {}
        """The noise in what a step published, by the model it made."""

        def one(key, size, quality):
            row = np.zeros(size)
            row[self.numbers.setdefault(key, len(self.numbers))] = 1.0
            return row

        monkeypatch.setattr(history, "_BLOCK", 8)  # so that mechanisms make their state again within these rounds
        monkeypatch.setattr(streams, "standard_normals", one)
        monkeypatch.setattr(
            streams, "standard_normal_rows", lambda keys, *rest: np.array([one(k, *rest) for k in keys])
        )
        for module in (tree_momentum, correlated_momentum, reduced_tree_momentum):
            monkeypatch.setattr(module, "normalised_step", self._normalised(module.normalised_step))

        mu2_step_itself, sum_with_noise = mu2.mu2_step, streams.Sum.noisy

        def noisy_sum(stream, total, server_round):
            published = sum_with_noise(stream, total, server_round)
            self.last = published - total
            return published

        def mu2_step(state, release_sum, server_round, *, clients_per_round, **options):
            options["clients_per_round"] = clients_per_round
            after = mu2_step_itself(state, release_sum, server_round, **options)
            self.of_model[after.x.tobytes()] = self.last / clients_per_round
            return after

        monkeypatch.setattr(streams.Sum, "noisy", noisy_sum)
        monkeypatch.setattr(mu2, "mu2_step", mu2_step)

    def _normalised(self, step):
        def normalised_step(w, momentum, learning_rate):
            after = step(w, momentum, learning_rate)
            self.of_model[after.tobytes()] = momentum
            return after

        return normalised_step


class Deaths:
    """Kills the server once at each of the points it is told, in its round."""

    def __init__(self, monkeypatch, plan=()):
        self.plan = list(plan)
        self.saved_round = 0
        save, saved = rounds.save_checkpoint, TrustedCheckpoint.saved

        def dying_save(path, identity, state):
            self.saved_round = state["server_round"]
            self.at("noise drawn", self.saved_round)
            save(path, identity, state)
            self.at("checkpoint written", self.saved_round)

        def dying_mark(files, mark):
            saved(files, mark)
            self.at("mark moved", mark.server_round)

        monkeypatch.setattr(rounds, "save_checkpoint", dying_save)
        monkeypatch.setattr(TrustedCheckpoint, "saved", dying_mark)

    def at(self, point, server_round):
        if (point, server_round) in self.plan:
            self.plan.remove((point, server_round))
            raise Killed


def deaths_in(interruptions):
    """So many deaths, spread over the rounds, at each of the points in turn."""
    dying = np.linspace(0, ROUNDS, interruptions + 2)[1:-1].astype(int).tolist()
    return [(POINTS[-1 - i % len(POINTS)], server_round) for i, server_round in enumerate(dying)]


def run(build, clients, deaths, num_rounds=ROUNDS):
    """Run a training to its end, starting it again after every death: its last server and the number of restarts."""

    def look(server_round, arrays):
        clients.seen.append((server_round, arrays["0"].numpy().tobytes()))
        deaths.at("seen", server_round)

    restarts = 0
    while True:
        subject = build()
        try:
            subject.start(clients, ArrayRecord([np.zeros(clients.size)]), num_rounds=num_rounds, evaluate_fn=look)
        except Killed:
            restarts += 1
            continue
        return subject, restarts


def published_noise(kind, checkpoint, columns, deaths):
    """The rounds and the matrix W of everything a training published, and its last server."""
    clients = Clients(policy(kind))
    subject, _ = run(lambda: strategy(kind, checkpoint), clients, deaths)
    published = [(number, model) for number, model in dict.fromkeys(clients.seen) if number]
    weights = np.array([columns.of_model[model] for _, model in published])
    return [number for number, _ in published], weights[:, : len(columns.numbers)], subject


def exact_mu(kind, subject, numbers, weights):
    """The largest |W^+ v| over all changes v that one sample can make in what was published."""
    lower = np.array([[0.3 * 0.7 ** (t - s) if s <= t else 0.0 for s in range(ROUNDS)] for t in range(ROUNDS)])
    change = subject.aggregator.policy.plan(D).sensitivity / CLIENTS
    shifts = []
    if kind == "trusted-mu2":
        shifts = [change * (np.arange(ROUNDS) >= place) for place in range(ROUNDS)]
    elif kind == "reduced tree":
        shifts = [lower @ gradient for gradient in _reduced_gradients(subject.aggregator.stream.changes(D))]
    else:
        for place, signs in itertools.product(range(BATCHES), itertools.product((1, -1), repeat=PASSES - 1)):
            gradient = np.zeros(ROUNDS)
            gradient[place::BATCHES] = (1, *signs)
            shifts.append(lower @ gradient * change)
    vectors = np.array(shifts, dtype=float)[:, np.array(numbers) - 1].T
    explained, *_ = np.linalg.lstsq(weights, vectors, rcond=1e-9)
    missed = np.abs(weights @ explained - vectors).max()
    return math.inf if missed > 1e-4 else float(np.linalg.norm(explained, axis=0).max())


def _reduced_gradients(changes):
    """The extreme changes by a sample: A_t, D_t and R_t as long as they may be, along one line, in either direction."""
    for place in range(BATCHES):
        for signs in itertools.product((1, -1), repeat=2 * PASSES - 1):
            moved, residual = signs[: PASSES - 1], signs[PASSES - 1 :]
            anchored = changes.anchored + changes.moved * np.concatenate([[0], np.cumsum(moved)])
            gradient = np.zeros(ROUNDS)
            # A gradient is no longer than the clip, whatever its parts are.
            gradient[place::BATCHES] = np.clip(
                anchored + changes.residual[place] * np.array(residual), -changes.anchored, changes.anchored
            )
            yield gradient
