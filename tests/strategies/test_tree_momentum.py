"""Tree-aggregated momentum over a grid: algorithm 1 without noise, its noise, and what keeps its count true."""

import numpy as np
import pytest
from flwr.app import ArrayRecord
from murmurfl.app.config import RunConfig
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.experiment import prepare
from murmurfl.app.network import LossyGrid
from murmurfl.clients import ContextLedger, NoisySGDClient, numpy_client_app
from murmurfl.privacy import ConfigurationError, PrivacyPolicy, SimulatedKeys
from murmurfl.privacy.momentum_tree import MomentumTree
from murmurfl.strategies import TreeMomentum, node_sum, tree_momentum_start, tree_momentum_step
from murmurfl.strategies.tree_momentum import tree_momentum

MACHINES, BATCHES, PASSES, D = 3, 5, 4, 6
ROUNDS = BATCHES * PASSES


class Quadratic:
    shapes = [(D,)]  # noqa: RUF012

    def __call__(self, parameters, samples):
        return np.asarray(parameters[0], dtype=np.float64) - samples


def data(name):
    return np.random.Generator(np.random.Philox(key=int(name))).normal(size=(BATCHES, D))


def policy(**changes):
    options = {
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
    return PrivacyPolicy(**{**options, **changes})


def app():
    def client_fn(context):
        name = str(context.node_config["partition-id"])
        ledger, keys = ContextLedger(context.state, name), SimulatedKeys(3, name)
        return NoisySGDClient(Quadratic(), data(name), policy(), ledger, keys, name=name)

    return numpy_client_app(client_fn)


def grid(lost=0.0):
    return LossyGrid(InProcessGrid(app(), MACHINES, {}), lost, seed=2)


def strategy(**changes):
    options = {
        "num_clients": MACHINES,
        "clients_per_round": MACHINES,
        "learning_rate": 0.05,
        "alpha": 0.3,
        "policy": policy(),
        "num_rounds": ROUNDS,
        "noise_keys": SimulatedKeys(5, "server"),
        "session": "s",
        "node_deadline_s": 1.0,
    }
    return TreeMomentum(**{**options, **changes})


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
    subject.start(grid(), ArrayRecord([np.ones(D)]), num_rounds=ROUNDS)
    w, momentum = np.ones(D), np.zeros(D)
    for t in range(ROUNDS):
        gradient = w - np.mean([data(str(i))[t % BATCHES] for i in range(MACHINES)], axis=0)
        momentum = 0.7 * momentum + 0.3 * gradient
        w = w - 0.05 * momentum / np.linalg.norm(momentum)
    assert subject.state.w == pytest.approx(w, abs=1e-3)
    assert np.linalg.norm(w - 1) > 0.3


def test_the_noise_on_every_node_has_the_size_the_tree_asks_for():
    """20 rounds x 4,000 values of a step on nothing: each standard deviation within 5 standard errors (6e-7 x 20)."""
    size, subject = 4000, strategy()
    stds, state = subject.noise_stds(size), subject.initial_state(np.zeros(size))
    change = subject.policy.plan(size).sensitivity / MACHINES
    expected = MomentumTree(ROUNDS, BATCHES, 0.3).noise_stds(
        change, 2.0, rounding=subject.noise_grid(size).charge(size)
    )
    assert stds == pytest.approx(expected, rel=1e-9)
    seen = []
    for t in range(1, ROUNDS + 1):
        state = subject.step(state, np.zeros(size), t)
        height = (t & -t).bit_length() - 1
        seen.append(state.noisy[height])
        assert (state.sums[height] == 0).all()
        assert state.noisy[height].std() == pytest.approx(stds[t - 1], rel=5 / np.sqrt(2 * size))
    assert np.abs(np.corrcoef(seen) - np.eye(ROUNDS)).max() < 5.5 / np.sqrt(size), "fresh on every node"
    with pytest.raises(ConfigurationError, match="calibrated"):
        subject.step(state, np.zeros(size), ROUNDS + 1)


def test_a_machine_out_of_step_is_left_out():
    """A lost reply leaves a machine in step, for it did release; a request it missed does not."""
    subject = strategy()
    subject.start(grid(lost=0.3), ArrayRecord([np.ones(D)]), num_rounds=ROUNDS)
    assert sum(report.lost for report in subject.history) > 0
    assert sum(report.malformed for report in subject.history) == 0

    class Deaf(InProcessGrid):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            if any(message.content["config"].get("server-round") == 3 for message in messages):
                messages = messages[1:]
            return super().send_and_receive(messages, timeout=timeout)

    subject = strategy()
    subject.start(Deaf(app(), MACHINES, {}), ArrayRecord([np.ones(D)]), num_rounds=6)
    assert [report.aggregated for report in subject.history] == [3, 3, 2, 2, 2, 2]
    assert [report.malformed for report in subject.history] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_clients": 4},
        {"alpha": 0.0},
        {"learning_rate": 0.0},
        {"policy": policy(release_rule="acknowledged")},
        {"policy": policy(trust="untrusted-server")},
        {"num_rounds": 0},
    ],
)
def test_impossible_servers_are_refused(changes):
    with pytest.raises(ConfigurationError, match="Expected"):
        strategy(**changes)


def test_the_app_runs_it_over_many_passes_with_one_epoch_for_all_machines():
    config = RunConfig(strategy="tree-momentum", passes=5, checkpoint=False)
    experiment = prepare(config)
    policies = {experiment.policy(i) for i in range(10)}
    assert len(policies) == 1
    assert len({len(shard) // config.batch_size for shard in experiment.shards}) == 2, "though shards differ"
    result = run_cohort(config)
    assert result.accuracy > 0.8
    assert result.mu == config.mu
    assert result.strategy._keys.simulated
    assert not experiment.strategy(deployed=True)._keys.simulated, "on real machines noise is the operating system's"
    assert all(statement["releases"] == experiment.num_rounds for statement in result.statements.values())
    with pytest.raises(ConfigurationError, match="clients-per-round"):
        RunConfig(strategy="tree-momentum", clients_per_round=5)
