"""Clients are known by names and schemas; a server waits for them, and not where it is pointless."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from murmurfl.clients import (
    CorrelatedNoiseMod,
    FullBatchClient,
    Label,
    Part,
    Schema,
    UpdatePolicy,
    numpy_client_app,
    private_client_app,
    trainable_arrays,
)
from murmurfl.privacy import ConfigurationError, SQLiteLedger, SumAssumption, protocol
from murmurfl.strategies import (
    CorrelatedFedAvg,
    FullBatch,
    Mu2,
    NodesUnavailableError,
    NothingAggregatedError,
    SecureAggregation,
)
from murmurfl.strategies.rounds import client_registry as clients
from murmurfl.strategies.rounds.client_registry import Attending, Needed, introduction, pointless, shortage
from murmurfl.strategies.rounds.observed import no_progress
from murmurfl.strategies.rounds.replies import RoundReport

from tests.harness.clients import Labelled, simulated_app, training_config
from tests.harness.errors import raises
from tests.harness.grid import NodesGrid, ask_real_node

pytestmark = pytest.mark.usefixtures("no_result_folder")

START = ArrayRecord({"w": Array(np.zeros(3))})
SUMS = {"trust": "secure-aggregation", "sums": SumAssumption(2, 2)}
FOR_EVER = 600.0


def policy(**changes):
    return UpdatePolicy(clip_norm=1.0, mu=2.0, max_participations=5, **changes)


def project(*mods):
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        (record,) = message.content.array_records.values()
        arrays = ArrayRecord({name: Array(array.numpy() + 0.1) for name, array in record.items()})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    return app


def with_mod(**changes):
    return project(CorrelatedNoiseMod(simulation=policy(**changes)))


class Legacy(NumPyClient):
    def fit(self, parameters, config):
        return [values + 0.1 for values in parameters], 1, {}


def client_fn(context):
    return Legacy().to_client()


def start(app, nodes, *, rounds=2, secure=False, **options):
    """A training that would wait for ever."""
    sums = {"secure_aggregation": SecureAggregation(min_cohort=2)} if secure else {}
    strategy = CorrelatedFedAvg(**{"num_clients": 4, "node_deadline_s": FOR_EVER, "seed": 1, **sums, **options})
    started = time.monotonic()
    try:
        strategy.start(NodesGrid(app, nodes), START, num_rounds=rounds)
    finally:
        assert time.monotonic() - started < 20.0
    return strategy


@pytest.fixture
def simulation(monkeypatch):
    """The grid of these tests counts as Flower's simulation, whose nodes are all there already."""
    for place in ("client_registry", "loop"):
        monkeypatch.setattr(f"murmurfl.strategies.rounds.{place}.is_simulation", lambda grid: True)
    monkeypatch.setattr(clients, "_ALL_MADE_WITHIN_S", 0.0)


@pytest.mark.usefixtures("simulation")
def test_a_simulation_with_too_few_nodes_ends_at_once_and_names_the_number():
    with raises(
        NodesUnavailableError, "conflict", "num-supernodes", match=r'of 10 clients, got 2 nodes .*"num-supernodes=10"'
    ):
        start(with_mod(), 2, num_clients=10)
    with raises(
        NodesUnavailableError,
        "conflict",
        "num-supernodes",
        match=r'6 nodes, for 4 clients and 2 helpers, got 4 .*supernodes=6"',
    ):
        start(with_mod(**SUMS), 4, secure=True)
    with raises(NodesUnavailableError, "conflict", "num-supernodes", match=r'of 5 clients, got 3 .*supernodes=5"'):
        start(with_mod(), 3, num_clients=None, min_available_nodes=5)
    assert start(with_mod(), 4).history[-1].aggregated == 4
    assert start(with_mod(**SUMS), 6, secure=True).history[-1].aggregated == 4


def test_simulated_nodes_are_waited_for_as_they_start(monkeypatch):
    """The sibling of the test above: a server that counted at its first look would end every run."""
    monkeypatch.setattr("murmurfl.strategies.rounds.client_registry.is_simulation", lambda grid: True)

    class Growing(NodesGrid):
        looks = 0

        def get_node_ids(self):
            self.looks += 1
            return super().get_node_ids()[: 2 * (self.looks - 1)]  # none at first

    def run(made_within):
        monkeypatch.setattr(clients, "_ALL_MADE_WITHIN_S", made_within)
        strategy = CorrelatedFedAvg(num_clients=6, node_deadline_s=FOR_EVER, seed=1)
        strategy.start(Growing(with_mod(), 6), START, num_rounds=1)
        return strategy.history[-1].aggregated

    assert run(5.0) == 6
    with raises(NodesUnavailableError, "conflict", "num-supernodes", match="got 2 nodes"):
        run(0.0)


def test_a_grid_that_hands_over_each_answer_twice_counts_each_once():
    class Repeating(NodesGrid):
        def pull_messages(self, message_ids):
            return [reply for reply in super().pull_messages(message_ids) for _ in range(2)]

    strategy = CorrelatedFedAvg(num_clients=4, node_deadline_s=FOR_EVER, seed=1)
    strategy.start(Repeating(with_mod(), 4), START, num_rounds=2)
    assert [(report.asked, report.aggregated) for report in strategy.history] == [(4, 4), (4, 4)]


@pytest.mark.parametrize("simulated", [True, False])
@pytest.mark.parametrize("kind", [CorrelatedFedAvg, Mu2])
def test_a_foreign_client_is_named_with_the_line_to_write(simulated, kind, request):
    if simulated:
        request.getfixturevalue("simulation")
    expected = {CorrelatedFedAvg: r"Write app = ClientApp\(mods=\[CorrelatedNoiseMod\(", Mu2: "private_client_app"}
    rate = {} if kind is CorrelatedFedAvg else {"learning_rate": 0.1}
    for app, said in ((project(), expected[kind]), (ClientApp(client_fn), r"legacy ClientApp\(client_fn\) on 4 of 4")):
        strategy = kind(num_clients=4, node_deadline_s=FOR_EVER, **rate)
        with raises(NodesUnavailableError, "unsupported", match=said):
            strategy.start(NodesGrid(app, 4), START, num_rounds=1)


def test_a_client_of_the_legacy_kind_is_told_of_the_adapter():
    with raises(
        NodesUnavailableError, "unsupported", match=r"app = numpy_client_app\(client_fn, mods=\[CorrelatedNoiseMod"
    ):
        start(ClientApp(client_fn), 4)
    assert start(numpy_client_app(client_fn, mods=[CorrelatedNoiseMod(simulation=policy())]), 4).history


@pytest.mark.usefixtures("simulation")
def test_a_legacy_client_behind_the_mod_ends_with_advice():
    with raises(
        NothingAggregatedError, "missing", match=r"legacy-client-app .* write app = numpy_client_app\(client_fn"
    ):
        start(ClientApp(client_fn, mods=[CorrelatedNoiseMod(simulation=policy())]), 4, rounds=5)


def test_on_real_nodes_one_that_does_not_know_murmurfl_ends_nothing():
    """Others may come, and this one may be mended: the deadline decides."""

    mod = CorrelatedNoiseMod(simulation=policy())

    def not_everywhere(message, context, call_next):
        if context.node_config["partition-id"] == 0:
            raise KeyError("arrays")
        return mod(message, context, call_next)

    assert start(project(not_everywhere), 5).history[0].aggregated == 4
    with raises(NodesUnavailableError, "unsupported", match="1 of 4 nodes whose ClientApp does not"):
        start(project(not_everywhere), 4, node_deadline_s=0.1)


@pytest.mark.usefixtures("simulation")
def test_a_mod_without_masks_and_a_strategy_with_them_are_told_at_once():
    with raises(
        NodesUnavailableError, "conflict", "trust", match=r"Expected 2 helpers, got 0: .*trust='secure-aggregation'"
    ):
        start(with_mod(), 6, secure=True)
    with raises(
        ConfigurationError,
        "mismatch",
        "trust",
        match=r"4 with trust='secure-aggregation', whose masks this server cannot",
    ):
        start(with_mod(**SUMS), 6)
    with raises(
        NodesUnavailableError, "conflict", "secure_aggregation", match=r"2 of the nodes are helpers.*SecureAggregation"
    ):
        start(with_mod(**SUMS), 6, num_clients=6)
    with raises(NodesUnavailableError, "refused", match=r"not configured to answer\nExpected a policy for simulated"):
        start(project(CorrelatedNoiseMod()), 4)


@pytest.mark.parametrize("simulated", [True, False])
def test_nodes_that_are_all_not_configured_end_the_wait(simulated, request):
    """A module of another width passes the making of an app without a schema, and is refused on every node.

    Of simulated clients the server has the reason, of real ones their own logs.
    """
    reason = "for one sample like" if simulated else "4 answered with not-configured.*own log"
    if simulated:
        request.getfixturevalue("simulation")
    app = private_client_app(
        torch.nn.Linear(5, 2), samples=lambda context: (np.ones((8, 3)), np.arange(8) % 2), mu=2.0, rounds=2
    )
    strategy, started = FullBatch(num_clients=4, learning_rate=0.1, node_deadline_s=FOR_EVER), time.monotonic()
    with raises(NodesUnavailableError, "refused", match=reason) as ended:
        strategy.start(NodesGrid(app, 4), trainable_arrays(torch.nn.Linear(5, 2)), num_rounds=2)
    assert time.monotonic() - started < 20.0
    assert "start more nodes" not in str(ended.value)
    assert ("for one sample like" in str(ended.value)) == simulated


@pytest.mark.parametrize(("nodes", "num_clients", "lines"), [(6, 4, 1), (4, 4, 0), (6, None, 0)])
def test_a_training_that_leaves_nodes_unused_says_how_many(nodes, num_clients, lines, caplog):
    with caplog.at_level("INFO", logger="flwr"):
        start(with_mod(), nodes, num_clients=num_clients)
    said = [message for message in caplog.messages if "nodes are connected" in message]
    assert len(said) == lines
    assert all("6 nodes are connected, and this training uses 4 of them" in message for message in said)


def test_helpers_are_not_unused_nodes(caplog):
    start(with_mod(**SUMS), 6, secure=True)
    assert "nodes are connected" not in caplog.text


def test_nodes_that_are_not_configured_are_counted_once(monkeypatch):
    """They are greeted again from time to time, and other nodes may still come."""
    monkeypatch.setattr(clients, "_GREET_AGAIN_S", 0.0)

    def partly(message, context, call_next):
        return (CorrelatedNoiseMod() if context.node_config["partition-id"] < 2 else mod)(message, context, call_next)

    mod = CorrelatedNoiseMod(simulation=policy())
    with raises(NodesUnavailableError, "unreachable", match=r"within 1 s, got 2; 2 answered with not-configured"):
        start(project(partly), 4, num_clients=5, node_deadline_s=1.0)
    with raises(NodesUnavailableError, "refused", match=r"got 2; 2 answered with not-configured"):
        start(project(partly), 4, node_deadline_s=0.5)


@pytest.mark.usefixtures("simulation")
def test_a_numpy_client_without_the_mod_is_named():
    with raises(NodesUnavailableError, "unsupported", match=r"no mod of murmurfl's around it.*CorrelatedNoiseMod\("):
        start(numpy_client_app(client_fn), 4)


def test_a_whole_state_dict_is_answered_with_trainable_arrays():
    whole = ArrayRecord({"weight": Array(np.zeros(3)), "num_batches_tracked": Array(np.zeros(1, dtype=np.int64))})
    strategy = FullBatch(num_clients=4, learning_rate=0.1, node_deadline_s=FOR_EVER)
    with raises(ConfigurationError, "wrong-type", match=r"int64 in 'num_batches_tracked'.*trainable_arrays\(module\)"):
        strategy.start(NodesGrid(with_mod(), 4), whole, num_rounds=1)


@pytest.mark.usefixtures("simulation")
def test_a_mod_under_a_strategy_of_another_kind_is_not_said_to_be_missing():
    with raises(NodesUnavailableError, "unsupported", match=r"it is none of this strategy's.*private_client_app"):
        FullBatch(num_clients=4, learning_rate=0.1, node_deadline_s=FOR_EVER).start(
            NodesGrid(with_mod(), 4), START, num_rounds=1
        )


def test_unexpected_answers_point_to_the_nodes_logs():
    seen = Attending(**{**SIMULATED, "clients": [], "others": "; 4 answered with not-configured"})
    assert "say in their own logs what is wrong" in str(shortage(Needed(4), seen, 1.0))
    assert "logs" not in str(shortage(Needed(4), Attending(**{**SIMULATED, "clients": []}), 1.0))


SIMULATED = {"nodes": 4, "silent": 0, "clients": ["0", "1", "2", "3"], "simulated": True}


@pytest.mark.parametrize(
    ("seen", "sure"),
    [
        ({}, False),
        ({"silent": 1, "clients": ["0", "1", "2"]}, False),
        ({"silent": 4, "clients": []}, False),
        ({"nodes": 3, "silent": 3, "clients": []}, True),
        ({"silent": 3, "clients": [], "strangers": {"without": 1}}, True),
        ({"nodes": 5, "strangers": {"without": 1}}, False),
        ({"clients": ["0", "1", "2"], "others": "; 1 answered with not-configured"}, True),
        ({"nodes": 3, "silent": 3, "clients": [], "simulated": False}, False),
        ({"clients": [], "strangers": {"without": 4}, "simulated": False}, True),
        ({"silent": 1, "clients": [], "strangers": {"without": 3}, "simulated": False}, False),
        ({"nodes": 5, "clients": ["0"], "strangers": {"without": 4}, "simulated": False}, False),
        ({"nodes": 2, "clients": [], "strangers": {"without": 2}, "simulated": False}, False),
        ({"clients": [], "unconfigured": 4, "simulated": False}, True),
        ({"clients": [], "strangers": {"without": 2}, "unconfigured": 2, "simulated": False}, True),
        ({"silent": 1, "clients": [], "unconfigured": 4, "simulated": False}, False),
        ({"nodes": 3, "clients": [], "unconfigured": 3, "simulated": False}, False),
        ({"clients": ["0"], "unconfigured": 4, "simulated": False}, True),
        ({"clients": ["0"], "unconfigured": 2, "simulated": False}, False),
        ({"clients": ["0"], "silent": 1, "unconfigured": 3, "simulated": False}, False),
        ({"clients": ["0"] * 4, "unconfigured": 3, "simulated": False}, False),
    ],
)
def test_waiting_ends_early_only_where_it_is_certain_to_be_in_vain(seen, sure):
    assert bool(pointless(Needed(4), Attending(**{**SIMULATED, **seen}))) == sure


def report(aggregated=0, **counts):
    return RoundReport(server_round=1, asked=4, aggregated=aggregated, **counts)


REFUSED = report(refused={"cap-reached": 4})


@pytest.mark.parametrize(
    ("history", "hopeless"),
    [
        ([REFUSED] * 3, True),
        ([REFUSED] * 2, False),
        ([report(refused={"internal-error": 2}, malformed=2)] * 3, True),
        ([report(4), REFUSED, REFUSED, REFUSED], False),
        ([REFUSED, report(lost=4), REFUSED], False),
        ([report(unopened=4, closed="refused by helper '0'")] * 3, False),
        ([RoundReport(server_round=1)] * 3, False),
    ],
)
def test_a_training_is_given_up_when_clients_do_nothing_but_refuse(history, hopeless):
    assert no_progress(history, patience=3) == hopeless


def test_a_server_that_may_be_real_shows_no_traceback():
    """The sibling of the test below: whatever came with a fixed text, only the text is shown."""
    app = ClientApp(mods=[CorrelatedNoiseMod(simulation=policy())])

    @app.train()
    def train(message, context):
        raise ValueError("patient 4711")

    with raises(NothingAggregatedError, "missing") as raised:
        start(app, 4, rounds=5)
    assert "4711" not in str(raised.value)
    assert "Traceback" not in str(raised.value)


@pytest.mark.usefixtures("simulation")
def test_a_project_that_fails_on_every_client_ends_the_run_after_one_round():
    app = ClientApp(mods=[CorrelatedNoiseMod(simulation=policy())])

    @app.train()
    def train(message, context):
        raise ValueError("patient 4711")

    with raises(NothingAggregatedError, "missing", match="1 round: clients refused with internal-error") as raised:
        start(app, 4, rounds=5)
    assert 'raise ValueError("patient 4711")' in str(raised.value), "a simulation stops with the traceback"


def test_a_model_without_numbers_is_refused_with_what_can_be_trained():
    for arrays in ({"booster": Array(np.frombuffer(b"{}", dtype=np.uint8))}, {}):
        with raises(ConfigurationError, "wrong-type", match=r"Trees.*LogisticRegression.*leaf values"):
            CorrelatedFedAvg().start(NodesGrid(with_mod(), 4), ArrayRecord(arrays), num_rounds=1)


def test_on_a_real_node_a_legacy_client_is_an_update_of_zero(tmp_path):
    """Its failure looks like any other there; only its own log names the adapter."""
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=8.0, delta=1e-5)
    file = tmp_path / "node.toml"
    file.write_text('client = "a"\nledger = "ledger.sqlite"\nclip-norm = 1.0\nmu = 2.0\nmax-participations = 3\n')
    app = ClientApp(client_fn, mods=[CorrelatedNoiseMod()])
    content = RecordDict({protocol.ARRAYS: START, protocol.CONFIG: ConfigRecord(training_config())})
    reply = ask_real_node(app, content, **{"murmurfl-config": str(file)})
    assert not reply.has_error()
    assert reply.content["metrics"]["release"] == 1


OURS = Schema(inputs=(Part(shape=(3,), bounds=(0, 1)),), label=Label(classes=2))
THEIRS = Schema(inputs=(Part(shape=(3,), bounds=(0, 2)),), label=Label(classes=2))


class Gradients:
    shapes = ((3,),)

    def __call__(self, parameters, samples):
        return np.ones((len(samples[1]), 3))


def app(others=()):
    def data(name):
        samples = Labelled(np.ones((4, 3)), np.zeros(4))
        samples.schema = THEIRS if int(name) in others else OURS
        samples.record_kind = "row"
        return samples

    standing = {
        "batch_selection": "full_batch",
        "mechanism": "independent",
        "release_rule": "paper",
        "max_participations": 2,
    }
    return simulated_app(FullBatchClient, Gradients(), data, **standing)


def trained(others, clients, **options):
    strategy = FullBatch(
        num_clients=clients, clients_per_round=clients, learning_rate=0.1, node_deadline_s=0.5, seed=1, **options
    )
    strategy.start(NodesGrid(app(others), 4), initial_arrays=arrays(), num_rounds=1)
    return strategy


def arrays():
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({"w": Array(np.zeros(3))})


def test_clients_of_another_schema_are_not_asked(caplog):
    strategy = trained([2], 3, schema=OURS.digest)
    assert list(strategy.clients.names) == ["0", "1", "3"]
    assert "another schema of records than this training's and is not asked" in caplog.text


def test_a_training_without_enough_clients_of_its_schema_says_why():
    with raises(NodesUnavailableError, "unreachable", match="another schema of records"):
        trained([1, 2, 3], 3, schema=OURS.digest)


def test_without_a_schema_of_its_own_a_server_says_that_clients_differ(caplog):
    trained([2], 4)
    assert caplog.text.count("Clients state 2 schemas of records") == 1
    caplog.clear()
    trained([], 4)
    assert "schemas of records" not in caplog.text


@pytest.mark.parametrize("said", ["", "x" * 32, "0" * 31, "0" * 33, 5, ["0" * 32], "'; drop table"])
def test_what_is_no_digest_is_no_schema(said):
    entries = {protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.CLIENTS: "a", protocol.SCHEMA: said}
    if isinstance(said, list):
        entries[protocol.SCHEMA] = said
    reply = Message(RecordDict({protocol.CONFIG: ConfigRecord(entries)}), dst_node_id=1, message_type="query")
    assert introduction(reply, "").schema == ""
    entries[protocol.SCHEMA] = OURS.digest
    reply = Message(RecordDict({protocol.CONFIG: ConfigRecord(entries)}), dst_node_id=1, message_type="query")
    assert introduction(reply, "").schema == OURS.digest


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\nb", "a\u202eb"])
def test_a_name_that_cannot_be_printed_is_none(name):
    """Names stand in logs, errors, files and pages."""
    config = ConfigRecord({protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.CLIENTS: name})
    asked = Message(RecordDict(), dst_node_id=1, message_type="query")
    assert introduction(Message(RecordDict({protocol.CONFIG: config}), reply_to=asked), "") is None
