"""Server optimisers on the noised average: as Flower's own, kept over a restart, and still where nothing came."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvgM, FedYogi
from murmurfl.clients import CorrelatedNoiseMod, UpdatePolicy
from murmurfl.privacy import ConfigurationError, SumAssumption
from murmurfl.strategies import (
    OPTIMIZERS,
    CheckpointError,
    CorrelatedFedAvg,
    SecureAggregation,
    ServerAdam,
    ServerMomentum,
    ServerYogi,
)
from murmurfl.strategies.correlated_fedavg import AverageState, momentum_step, optimizer_step

from tests.harness.callbacks import AfterRound
from tests.harness.errors import raises
from tests.harness.grid import NodesGrid, Reliable

pytestmark = pytest.mark.usefixtures("no_result_folder")

D = 5
START = ArrayRecord({"w": Array(np.zeros(D))})
CLIENTS, ROUNDS = 4, 6
NEARLY_NO_NOISE = UpdatePolicy(clip_norm=10.0, mu=1e6, max_participations=30)
SUMS = UpdatePolicy(clip_norm=1.0, mu=2.0, max_participations=30, trust="secure-aggregation", sums=SumAssumption(2, 3))


def adding(mods=()):
    """A project whose training adds numbers that depend on the client, the round and the model."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        (record,) = message.content.array_records.values()
        (config,) = message.content.config_records.values()
        partition, server_round = int(context.node_config["partition-id"]), config["server-round"]
        values = record["w"].numpy()
        update = 0.1 * np.sin(np.arange(D) * (partition + 1) + server_round) - 0.2 * values
        content = {"arrays": ArrayRecord({"w": Array(values + update)}), "m": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    return app


def private(policy=NEARLY_NO_NOISE, **options):
    return adding([CorrelatedNoiseMod(simulation=policy, **options)])


def trained(app=None, *, rounds=ROUNDS, nodes=CLIENTS, grid=NodesGrid, lost=0.0, **options):
    options = {"num_clients": CLIENTS, "node_deadline_s": 1.0, "seed": 1, "session": "s", **options}
    strategy = CorrelatedFedAvg(**options)
    strategy.start(grid(app or private(), nodes, lost=lost), START, num_rounds=rounds)
    return strategy


class Oblivious(NodesGrid):
    """Flower's strategies hand one record to every node."""

    def send_and_receive(self, messages, *, timeout=None):
        return list(self.pull_messages(self.push_messages(messages)))


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (ServerMomentum(0.8), FedAvgM(server_momentum=0.8), {}),
        (ServerMomentum(0.5), FedAvgM(server_momentum=0.5, server_learning_rate=0.7), {"learning_rate": 0.7}),
        ("adam", FedAdam(), {}),
        (
            ServerAdam(beta_1=0.5, beta_2=0.9, tau=0.1),
            FedAdam(eta=0.2, beta_1=0.5, beta_2=0.9, tau=0.1),
            {"learning_rate": 0.2},
        ),
        ("yogi", FedYogi(), {}),
        (ServerYogi(beta_1=0.5, tau=0.1), FedYogi(eta=0.2, beta_1=0.5, tau=0.1), {"learning_rate": 0.2}),
    ],
)
def test_without_noise_each_is_flowers_own(ours, theirs, options):
    theirs.min_train_nodes = theirs.min_available_nodes = CLIENTS
    theirs.fraction_evaluate = theirs.min_evaluate_nodes = 0
    result = theirs.start(Oblivious(adding(), CLIENTS), START, num_rounds=ROUNDS)
    (expected,) = result.arrays.to_numpy_ndarrays()
    assert trained(optimizer=ours, **options).state.x == pytest.approx(expected, abs=1e-3)
    assert np.abs(expected).max() > 0.01, "or everything would agree"


def test_the_tolerance_sees_a_moment_that_is_forgotten():
    """The sibling of the test above: optimisers that differ end further apart than it allows."""
    ends = [trained(optimizer=name).state.x for name in (None, *OPTIMIZERS)]
    for i, one in enumerate(ends):
        assert all(np.abs(one - other).max() > 0.01 for other in ends[:i])


def test_nesterov_looks_ahead_along_the_momentum():
    moments = np.array([[1.0, 2.0]])
    update = np.array([0.5, -1.0])
    direction, after = momentum_step(moments, update, momentum=0.5, nesterov=True)
    assert after[0] == pytest.approx([1.0, 0.0])
    assert direction == pytest.approx(update + 0.5 * after[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(name, tmp_path):
    path, options = tmp_path / "checkpoint.npz", {"optimizer": name}
    app = private(UpdatePolicy(clip_norm=1.0, mu=2.0, max_participations=30))
    whole = trained(app, **options)
    grid = NodesGrid(app, CLIENTS)
    same_clients = lambda *_, **__: grid  # noqa: E731 - their ledgers go on
    trained(app, rounds=3, checkpoint=path, grid=same_clients, **options)
    resumed = trained(app, checkpoint=path, grid=same_clients, **options)
    assert (resumed.state.x == whole.state.x).all()
    assert (resumed.state.moments == whole.state.moments).all()
    assert resumed.state.steps == whole.state.steps == ROUNDS
    first = "learning_rate" if name in ("adam", "yogi") else "optimizer"
    with raises(CheckpointError, "mismatch", first, match="optimizer"):
        trained(app, checkpoint=path, optimizer=ServerMomentum(0.1), grid=same_clients)
    with raises(CheckpointError, "mismatch", first, match="optimizer"):
        trained(app, checkpoint=path, grid=same_clients)


class Hollow(Reliable, NodesGrid):
    """Loses all replies until a round."""

    reliable_from = 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_round_from_which_nothing_came_moves_nothing(name):
    seen = []
    look = AfterRound(lambda report, metrics: seen.append(strategy.state))
    strategy = CorrelatedFedAvg(num_clients=CLIENTS, seed=1, session="s", optimizer=name, callbacks=[look])
    strategy.start(Hollow(private(), CLIENTS, lost=1.0), START, num_rounds=4)
    assert [report.aggregated for report in strategy.history] == [0, 0, 0, CLIENTS]
    assert all((state.x == 0).all() and state.steps == 0 for state in seen[:3])
    assert np.abs(strategy.state.x).max() > 1e-3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_under_secure_aggregation_closed_rounds_leave_the_moments_as_they_are(name):
    """Which rounds are closed follows from the seed; a step is taken in all others."""
    sums = {"secure_aggregation": SecureAggregation(min_cohort=3), "optimizer": name, "nodes": CLIENTS + 2}
    strategy = trained(private(SUMS), lost=0.3, rounds=10, **sums)
    closed = sum(bool(report.closed) for report in strategy.history)
    assert 0 < closed < 10
    assert strategy.state.steps == 10 - closed
    assert np.isfinite(strategy.state.x).all()


def test_a_rule_that_steps_in_closed_rounds_would_be_seen():
    """The sibling of the tests above: momentum moves on by itself."""
    state = AverageState(np.zeros(1), np.ones((1, 1)), np.ones(()))
    options = {"clients_per_round": 1, "learning_rate": 1.0}
    moved = optimizer_step(state, np.zeros(1), **options, optimizer=ServerMomentum(0.5))
    assert moved.x == pytest.approx([0.5])


def test_a_step_that_overflows_is_a_typed_error():
    state = AverageState(np.zeros(1), np.zeros((1, 1)))
    with raises(ConfigurationError, "out-of-range", "learning_rate"):
        optimizer_step(
            state, np.full(1, 1e300), clients_per_round=1, learning_rate=1e300, optimizer=ServerMomentum(0.5)
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda: ServerMomentum(1.0),
        lambda: ServerMomentum(-0.1),
        lambda: ServerMomentum(float("nan")),
        lambda: ServerAdam(beta_2=1.0),
        lambda: ServerAdam(tau=0.0),
        lambda: ServerYogi(beta_1=True),
        lambda: CorrelatedFedAvg(num_clients=2, optimizer="adamw"),
        lambda: CorrelatedFedAvg(num_clients=2, optimizer=ServerAdam),
        lambda: CorrelatedFedAvg(num_clients=2, optimizer="adam", learning_rate=0.0),
    ],
)
def test_impossible_optimizers_are_refused(make):
    with pytest.raises(ConfigurationError, match="Expected"):
        make()
