"""Tree-aggregated momentum over a grid: algorithm 1 without noise, its noise, and what keeps its count true."""

from functools import partial

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError
from murmurfl.strategies import TreeMomentum, node_sum, tree_momentum_start, tree_momentum_step
from murmurfl.strategies.momentum_tree import MomentumTree
from murmurfl.strategies.tree_momentum import tree_momentum

from tests.harness import momentum as harness
from tests.harness.errors import raises
from tests.harness.grid import NodesGrid
from tests.harness.momentum import BATCHES, CLIENTS, IMPOSSIBLE, ROUNDS, START, D, app, data, grid, policy
from tests.harness.rules import begun, stepped

strategy = partial(harness.strategy, TreeMomentum)


def test_the_streamed_tree_is_plain_normalised_momentum():
    rng, alpha = np.random.default_rng(1), 0.2
    state, w, momentum = tree_momentum_start(np.ones(D), 70), np.ones(D), np.zeros(D)
    for t in range(1, 71):
        gradient = rng.normal(size=D)
        node = node_sum(state, gradient, t, alpha)
        state = tree_momentum_step(state, node, node, t, alpha=alpha, learning_rate=0.1)
        momentum = (1 - alpha) * momentum + alpha * gradient
        w = w - 0.1 * momentum / np.linalg.norm(momentum)
        assert state.w == pytest.approx(w, abs=1e-12)
    assert state.noisy.shape == (7, D), "floor(log2 T) + 1 nodes are all there is"


def test_nodes_and_momenta_are_those_of_the_materialised_tree():
    tree, rng = MomentumTree(45, 9, 0.15), np.random.default_rng(2)
    gradients, noise = rng.normal(size=(45, D)), rng.normal(size=(45, D))
    nodes = tree.materialize() @ gradients
    momenta = tree.decoder() @ (nodes + noise)
    state = tree_momentum_start(np.zeros(D), 45)
    for t in range(1, 46):
        node = node_sum(state, gradients[t - 1], t, tree.alpha)
        assert node == pytest.approx(nodes[t - 1], abs=1e-12)
        state = tree_momentum_step(state, node, node + noise[t - 1], t, alpha=tree.alpha, learning_rate=1.0)
        assert tree_momentum(state.noisy, t, tree.alpha) == pytest.approx(momenta[t - 1], abs=1e-12)


def test_with_next_to_no_noise_a_run_is_algorithm_1_written_out():
    subject = strategy(policy=policy(mu=1e6))
    subject.start(grid(), START, num_rounds=ROUNDS)
    w, momentum = np.ones(D), np.zeros(D)
    for t in range(ROUNDS):
        gradient = w - np.mean([data(str(i))[t % BATCHES] for i in range(CLIENTS)], axis=0)
        momentum = 0.7 * momentum + 0.3 * gradient
        w = w - 0.05 * momentum / np.linalg.norm(momentum)
    assert subject.state.w == pytest.approx(w, abs=1e-3)
    assert np.linalg.norm(w - 1) > 0.3


def test_the_noise_on_every_node_has_the_size_the_tree_asks_for():
    """20 rounds x 4,000 values of a step on nothing: each standard deviation within 5 standard errors (6e-7 x 20)."""
    size, subject = 4000, strategy()
    stds, state = subject.aggregator.stream.noise_stds(size), begun(subject, np.zeros(size))
    change = subject.aggregator.policy.plan(size).sensitivity / CLIENTS
    expected = MomentumTree(ROUNDS, BATCHES, 0.3).noise_stds(
        change, 2.0, rounding=subject.aggregator.stream.noise_grid(size).charge(size)
    )
    assert stds == pytest.approx(expected, rel=1e-9)
    seen = []
    for t in range(1, ROUNDS + 1):
        state = stepped(subject, state, np.zeros(size), t)
        height = (t & -t).bit_length() - 1
        seen.append(state.noisy[height])
        assert (state.sums[height] == 0).all()
        assert state.noisy[height].std() == pytest.approx(stds[t - 1], rel=5 / np.sqrt(2 * size))
    assert np.abs(np.corrcoef(seen) - np.eye(ROUNDS)).max() < 5.5 / np.sqrt(size), "fresh on every node"
    with raises(ConfigurationError, "exhausted", "num_rounds"):
        stepped(subject, state, np.zeros(size), ROUNDS + 1)


def test_a_client_out_of_step_is_left_out():
    """After a lost reply a client is still in step, for it did release; after a request that it missed it is not."""
    subject = strategy()
    subject.start(grid(lost=0.3), START, num_rounds=ROUNDS)
    assert sum(report.lost for report in subject.history) > 0
    assert sum(report.malformed for report in subject.history) == 0

    class Deaf(NodesGrid):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            if any(message.content["config"].get("server-round") == 3 for message in messages):
                messages = messages[1:]
            return super().send_and_receive(messages, timeout=timeout)

    subject = strategy()
    subject.start(Deaf(app(), CLIENTS), START, num_rounds=6)
    assert [report.aggregated for report in subject.history] == [3, 3, 2, 2, 2, 2]
    assert [report.malformed for report in subject.history] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("changes", IMPOSSIBLE)
def test_impossible_servers_are_refused(changes):
    with pytest.raises(ConfigurationError, match="Expected"):
        strategy(**changes)
