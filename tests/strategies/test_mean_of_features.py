"""The round before a training: the mean of everybody's features, whoever is missing, and a server that is killed."""

import math
import runpy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord
from murmurfl.clients import Centring, ContextLedger, FullBatchClient
from murmurfl.privacy import (
    ConfigurationError,
    PrivacyPolicy,
    SimulatedKeys,
    SystemKeys,
    centred,
    centring_policy,
    divided_mu,
    protocol,
)
from murmurfl.strategies import CheckpointError, FullBatch, MeanOfFeatures

from tests.harness.clients import Labelled
from tests.harness.errors import raises
from tests.harness.grid import KilledError, NodesGrid, TamperedNodes, killing

pytestmark = pytest.mark.usefixtures("no_result_folder")

K, CLIENTS, MU = 4, 5, 2.0
MEAN_MU, REST_MU = divided_mu(MU, 0.05)
SIZES = {str(i): 20 + 10 * i for i in range(CLIENTS)}


def samples_of(name):
    rows = np.abs(np.random.Generator(np.random.Philox(key=int(name))).normal(size=(SIZES[name], K)))
    return Labelled((rows / np.linalg.norm(rows, axis=1)[:, None]).astype(np.float32), np.arange(SIZES[name]) % 2)


ALL = np.concatenate([samples_of(name).features for name in SIZES])


class Model:
    """Least squares without a minimum to reach: its gradients are its inputs."""

    shapes = ((K + 1,),)

    def __call__(self, parameters, samples):
        return (np.asarray(parameters[0]) @ samples[0].T - samples[1])[:, None] * samples[0]


def mean_policy(**changes):
    return centring_policy(1.0, nonnegative=True, mu=MEAN_MU, budget_mu=MU, **changes)


def client_of(name, state, *, centring=True, mechanism="", **trust):
    rest = {"batch_selection": "full_batch", "release_rule": "paper", "mechanism": mechanism or "independent", **trust}
    policy = PrivacyPolicy(1.0, 1, 3, REST_MU, MU, **rest)
    own = {"queries": [Centring(mean_policy(mechanism=mechanism, **trust), K)]} if centring else {}
    ledger, keys = ContextLedger(state, name), SimulatedKeys(3, name)
    return FullBatchClient(Model(), samples_of(name), policy, ledger, keys, name=name, **own)


def nodes_of(*, deaf=(), forged=lambda reply: reply, **changes):
    return TamperedNodes(partial(client_of, **changes), CLIENTS, deaf=deaf, forged=forged)


def mean_of(**options):
    options = {"seed": 1, "session": "mean", "node_deadline_s": 0.5, **options}
    return MeanOfFeatures(num_features=K, num_clients=CLIENTS, **options)


def noise_bound(clients):
    """Five standard deviations of a mean's noise: by chance once in a million and a half values."""
    samples = sum(SIZES[str(i)] for i in clients)
    return 5 * mean_policy().plan(K).noise_std * math.sqrt(len(clients)) / samples


def test_it_is_the_mean_over_all_samples_with_everybody_s_noise():
    strategy = mean_of()
    centre = strategy.collect(nodes_of())
    assert centre.dtype == np.float32
    assert centre == pytest.approx(ALL.mean(axis=0), abs=noise_bound(range(CLIENTS)))
    assert not np.allclose(centre, ALL.mean(axis=0), atol=1e-6)
    (report,) = strategy.history
    assert (report.asked, report.aggregated, report.samples) == (CLIENTS, CLIENTS, len(ALL))
    assert mean_of().collect(nodes_of(mechanism="none")) == pytest.approx(ALL.mean(axis=0), abs=1e-4)


def test_clients_that_are_lost_are_in_neither_the_sum_nor_the_number():
    strategy = mean_of()
    centre = strategy.collect(nodes_of(deaf=(0, 4), mechanism="none"))
    heard = np.concatenate([samples_of(str(i)).features for i in (1, 2, 3)])
    assert centre == pytest.approx(heard.mean(axis=0), abs=1e-4)
    assert strategy.history[0].samples == len(heard)


def test_a_reply_without_its_sample_number_is_dropped():
    def forged(reply):
        if reply.metadata.src_node_id == NodesGrid.first_node + 2:
            reply.content[protocol.METRICS] = MetricRecord({**reply.content[protocol.METRICS], "num-examples": 0})
        return reply

    strategy = mean_of()
    strategy.collect(nodes_of(forged=forged))
    assert strategy.history[0].malformed == 1


def test_a_reply_that_no_centre_could_hold_is_dropped():
    """A centre is of float32 values: one client's 1e50 would make it infinite, and end the training around it."""

    def forged(reply):
        if reply.metadata.src_node_id == NodesGrid.first_node:
            reply.content[protocol.ARRAYS] = ArrayRecord({"0": Array(np.full(K, 1e50))})
        return reply

    strategy, others = mean_of(), list(SIZES)[1:]
    centre = strategy.collect(nodes_of(forged=forged))
    assert (strategy.history[0].malformed, strategy.history[0].aggregated) == (1, CLIENTS - 1)
    expected = np.concatenate([samples_of(name).features for name in others]).mean(axis=0)
    assert centre == pytest.approx(expected, abs=noise_bound(others))


def test_a_training_goes_on_around_it_and_clients_see_nothing_else():
    grid = nodes_of(mechanism="none")
    centre = mean_of().collect(grid)
    strategy = FullBatch(
        num_clients=CLIENTS,
        clients_per_round=CLIENTS,
        learning_rate=1.0,
        public_inputs={"centre": centre},
        session="rest",
        allow_exhaustion=True,
    )
    start = np.full(K + 1, 0.1)
    strategy.start(grid, ArrayRecord([start]), num_rounds=1)
    labels = np.concatenate([samples_of(name).labels for name in SIZES])
    gradients = Model()([start], (centred(ALL, centre, 0.3), labels))
    lengths = np.linalg.norm(gradients, axis=1)
    expected = (gradients * np.minimum(1, 1 / lengths)[:, None]).mean(axis=0)
    assert strategy.state.w == pytest.approx(start - expected, abs=1e-4)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ({"centring": False}, "clients refused with not-configured"),
        ({"deaf": range(CLIENTS)}, "5 replies were lost"),
        ({"forged": lambda reply: Message(Error(protocol.INTERNAL_ERROR, "x"), reply_to=reply)}, "internal-error"),
    ],
)
def test_nothing_at_all_ends_a_training_before_it_begins_with_what_was_said(nodes, words):
    with raises(ConfigurationError, "missing", match=words):
        mean_of().collect(nodes_of(**nodes))


# A server that is killed.


def test_a_server_killed_after_the_round_restores_the_mean(tmp_path):
    path, grid = tmp_path / "mean.npz", nodes_of()
    centre = mean_of(session=None, checkpoint=path).collect(grid)
    again = mean_of(session=None, checkpoint=path)
    assert np.array_equal(again.collect(nodes_of(deaf=range(CLIENTS))), centre)
    assert again.session
    with raises(CheckpointError, "mismatch", "layout", match="num_features"):
        MeanOfFeatures(num_features=K + 1, num_clients=CLIENTS, seed=1, checkpoint=path).collect(grid)


def test_a_server_killed_in_the_round_keeps_its_session(tmp_path, caplog):
    path, grid = tmp_path / "mean.npz", nodes_of(forged=killing)
    first = mean_of(session=None, checkpoint=path)
    with pytest.raises(KilledError):
        first.collect(grid)
    assert path.exists()
    second = mean_of(session=None, checkpoint=path)
    second_grid = nodes_of()
    second_grid.contexts = grid.contexts  # the clients' ledgers are as they were
    # No client of a test repeats its last answer, as real nodes do: what was released is lost, and spent once.
    assert not second.collect(second_grid).any()
    assert second.session == first.session
    assert second.history[0].refused == {"cap-reached": CLIENTS}
    assert "used as they lie" in caplog.text


def test_an_empty_round_is_asked_again(tmp_path):
    path, grid = tmp_path / "mean.npz", nodes_of()
    with raises(ConfigurationError, "missing", match="not-configured"):
        mean_of(session=None, checkpoint=path).collect(nodes_of(centring=False))
    assert mean_of(session=None, checkpoint=path).collect(grid).any()


def test_a_training_around_another_centre_is_another_training(tmp_path):
    def strategy(centre):
        options = {"num_clients": CLIENTS, "clients_per_round": CLIENTS, "learning_rate": 1.0, "seed": 1}
        return FullBatch(
            **options, public_inputs={"centre": centre}, allow_exhaustion=True, checkpoint=tmp_path / "c.npz"
        )

    grid, start = nodes_of(), ArrayRecord([np.zeros(K + 1)])
    strategy(np.full(K, 0.5)).start(grid, start, num_rounds=1)
    with raises(CheckpointError, "mismatch", "entries"):
        strategy(np.full(K, 0.6)).start(grid, start, num_rounds=1)
    strategy(np.full(K, 0.5)).start(grid, start, num_rounds=2)


@pytest.mark.parametrize("centre", [np.array([math.nan] * K), np.full(K, 1e39), np.zeros((2, 2)), np.zeros(0)])
def test_a_centre_that_clients_would_refuse_is_not_sent(centre):
    with raises(ConfigurationError, "wrong-shape", "public_inputs"):
        FullBatch(num_clients=2, clients_per_round=2, learning_rate=1.0, public_inputs={"centre": centre})


def test_a_public_input_that_no_query_gives_is_refused():
    with raises(ConfigurationError, "unknown-name", "public_inputs"):
        FullBatch(num_clients=2, clients_per_round=2, learning_rate=1.0, public_inputs={"median": np.zeros(2)})


def test_options_that_make_no_sense_are_refused():
    for features in (0, True, 1.5):
        with raises(ConfigurationError, "out-of-range", "num_features"):
            MeanOfFeatures(num_features=features, num_clients=2)
    with raises(ConfigurationError, "unsupported", match="makes one"):
        MeanOfFeatures(num_features=2, num_clients=2, public_inputs={"centre": np.zeros(2)})


# With a trusted server.


def trusted(**options):
    options = {"policy": mean_policy(trust="trusted-server"), "noise_keys": SimulatedKeys(1, "server"), **options}
    return MeanOfFeatures(num_features=K, num_clients=CLIENTS, seed=1, **{"session": "mean", **options})


def test_a_trusted_server_adds_the_noise_of_one_client_for_all():
    strategy = trusted()
    centre = strategy.collect(nodes_of(trust="trusted-server"))
    std = strategy.aggregator.stream.noise_std(K)
    assert math.sqrt(2) / MEAN_MU < std < 1.01 * math.sqrt(2) / MEAN_MU
    normals = strategy.aggregator.stream.fresh_normals(1, K)
    assert centre == pytest.approx(ALL.mean(axis=0) + std * normals / len(ALL), abs=1e-4)
    assert strategy.aggregator.guaranteed_mu(K) == MEAN_MU
    with raises(ConfigurationError, "conflict", "policy", match="centring_policy"):
        trusted(
            policy=PrivacyPolicy(
                1.0, 1, 3, 1.0, trust="trusted-server", batch_selection="full_batch", mechanism="independent"
            )
        )


def test_a_trusted_server_drops_oversized_contributions():
    def forged(reply):
        if reply.metadata.src_node_id == NodesGrid.first_node:
            values = np.full(K, 2.0**8)
            reply.content[protocol.ARRAYS] = ArrayRecord({"0": Array(values)})
        return reply

    strategy = trusted()
    strategy.collect(nodes_of(trust="trusted-server", forged=forged))
    assert (strategy.history[0].malformed, strategy.history[0].aggregated) == (1, CLIENTS - 1)


def test_a_trusted_server_that_was_killed_after_the_round_publishes_the_same_centre(tmp_path):
    path, grid = tmp_path / "mean.npz", nodes_of(trust="trusted-server")
    centre = trusted(noise_keys=None, session=None, checkpoint=path).collect(grid)
    again = trusted(noise_keys=None, session=None, checkpoint=path).collect(nodes_of(deaf=range(CLIENTS)))
    assert np.array_equal(again, centre)
    assert not np.array_equal(
        trusted(noise_keys=SystemKeys.generate()).collect(nodes_of(trust="trusted-server")), centre
    )


def test_the_example_of_the_documents_trains():
    """docs/own/centred_app.py, over a grid of three nodes."""
    names = runpy.run_path(Path(__file__).parents[2] / "docs" / "own" / "centred_app.py")
    centre, result = names["train"](NodesGrid(names["app"], 3))
    expected = np.concatenate([names["Samples"](str(i)).features for i in range(3)]).mean(axis=0)
    assert centre == pytest.approx(expected, abs=5 * math.sqrt(2 * 3) / names["mean_mu"] / 1500)
    assert np.linalg.norm(result.arrays.to_numpy_ndarrays()[0]) > 0
