"""Secure aggregation on the engines: nodes, helpers, memory, and clients that send any bytes."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from murmurfl.app import client_app
from murmurfl.app.engines.cohort import CohortClients
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.start import num_nodes, run_in_process
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.progress import participant_names
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import Mu2Client, NoisySGDClient, OnlineClient
from murmurfl.privacy import ConfigurationError, MemoryLedger, protocol
from murmurfl.privacy.sums import opening_rule as opening
from murmurfl.privacy.sums.masking import Masking
from murmurfl.strategies import WrongSumError

from tests.app.engines.test_engines import same_bits
from tests.app.run_table import SECURE as BASE
from tests.harness.clients import training_config
from tests.harness.errors import raises


def test_masks_that_do_not_come_off_leave_no_model(monkeypatch):
    """The planted bug: helpers add up the masks of all but some of every set."""
    whole = opening.add_mask
    calls = []

    def forgets(total, seed, **options):
        calls.append(1)
        if len(calls) % 5:
            whole(total, seed, **options)

    monkeypatch.setattr(opening, "add_mask", forgets)
    with raises((WrongSumError, ConfigurationError), "missing", match=r"its sum is wrong|more than 2 clients lie"):
        run_in_process(replace(BASE, lost_replies=0.0))


def on_nodes(config, nodes):
    return run_experiment(InProcessGrid(client_app.app, nodes, config.to_mapping()), config, engine="inprocess")


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_fewer_nodes_than_participants_give_the_same_model(nodes):
    assert same_bits(on_nodes(BASE, nodes).parameters, run_in_process(BASE).parameters)


def test_participants_are_clients_first_and_then_helpers():
    assert participant_names(BASE) == [*map(str, range(6)), "helper-0", "helper-1"]
    assert num_nodes(BASE) == 8
    plain = replace(BASE, trust="", min_cohort=0, colluders=-1)
    assert participant_names(plain) == [*map(str, range(6))]
    assert prepare(BASE).roster.helper_names == ("helper-0", "helper-1")


def ask(config, nodes, node, content, kind=MessageType.QUERY):
    grid = InProcessGrid(client_app.app, nodes, config.to_mapping())
    message = Message(content, dst_node_id=list(grid.get_node_ids())[node], message_type=kind)
    (reply,) = grid.send_and_receive([message])
    return reply


def hello():
    entries = {protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.ASK: protocol.ASK_HELLO}
    return RecordDict({protocol.CONFIG: ConfigRecord(entries)})


def test_a_node_says_whom_it_hosts():
    config = ask(BASE, 3, 0, hello()).content["config"]
    assert (config[protocol.CLIENTS], config[protocol.HELPERS]) == (["0", "3"], ["helper-0"])
    assert ask(BASE, 8, 7, hello()).content["config"][protocol.CLIENTS] == []
    assert protocol.HELPERS not in ask(BASE, 8, 0, hello()).content["config"]
    roster = ask(BASE, 8, 7, hello()).content["config"][protocol.ROSTER]
    assert prepare(BASE).roster == type(prepare(BASE).roster).from_json(roster)


@pytest.mark.parametrize("config", [BASE, replace(BASE, trust="", min_cohort=0, colluders=-1)])
def test_a_node_opens_for_the_helpers_it_hosts_and_no_other(config):
    entries = {**training_config(), protocol.HELPER: "helper-1"}
    content = RecordDict({protocol.CONFIG: ConfigRecord(entries)})
    for node in (0, 5):
        reply = ask(config, 6, node, content, protocol.QUERY_OPEN)
        assert reply.error.code == protocol.MALFORMED_REQUEST
        assert reply.error.reason == "malformed request: this node does not host that helper"


def test_a_helper_of_a_simulation_refuses_by_its_own_rule():
    entries = {**training_config(), protocol.HELPER: "helper-0", protocol.OPENING: "1"}
    entries |= {protocol.HEADER: [], protocol.SEALS: [], protocol.SIGNATURE: []}
    reply = ask(BASE, 8, 6, RecordDict({protocol.CONFIG: ConfigRecord(entries)}), protocol.QUERY_OPEN)
    assert reply.error.code == protocol.OPENING_REFUSED


def test_a_real_node_of_the_app_opens_nothing():
    message = Message(RecordDict(), dst_node_id=5, message_type=protocol.QUERY_OPEN)
    reply = client_app.not_a_helper(message, None)  # type: ignore[arg-type]
    assert reply.error.code == protocol.OPENING_REFUSED


def test_a_client_that_answers_messages_has_masks_and_one_of_the_cohort_sends_none():
    experiment = prepare(BASE)
    assert experiment.client(0, MemoryLedger(), masked=True).masking is not None
    bare = experiment.client(0, MemoryLedger())
    with raises(ConfigurationError, "missing", "masking", match="without masks"):
        bare.fit([], {})


def test_an_engine_that_forgets_the_masks_gets_no_release(monkeypatch):
    """The planted bug: clients of an engine with messages are made as those of one without."""
    whole = type(prepare(BASE)).client
    monkeypatch.setattr(
        type(prepare(BASE)), "client", lambda self, client, ledger, rows=None, **_: whole(self, client, ledger, rows)
    )
    result = run_in_process_quietly(replace(BASE, num_rounds=2))
    assert "not-configured" in str(result)


def run_in_process_quietly(config):
    try:
        return run_in_process(config)
    except ConfigurationError as error:
        return error


def test_memory_of_what_was_sent_is_given_up_once_its_sum_was_opened():
    experiment = prepare(replace(BASE, lost_replies=0.0, num_rounds=3, clients_per_round=6, min_cohort=6))
    clients = CohortClients(experiment)
    strategy = experiment.strategy()
    strategy.start(clients, experiment.initial_arrays(), num_rounds=3)
    pending = {
        release
        for name in clients.names()
        for release in clients.cohort.client(name).privatizer._ledger.stream(strategy.session).pending
    }
    assert pending <= {3}, "those of the last round are acknowledged when they are asked again"


@pytest.mark.parametrize("kind", [Mu2Client, OnlineClient, NoisySGDClient])
def test_the_methods_that_serve_sums_have_clients_that_do(kind):
    assert vars(kind)["summable"]


# Twenty clients, two of which send any bytes in any round: digits, in process, over real masks and helpers.

DIGITS = RunConfig(
    num_clients=20,
    clients_per_round=20,
    min_cohort=12,
    colluders=1,
    trust="secure-aggregation",
    strategy="full-batch",
    batch_size=8,
    num_rounds=40,
    mu=4.0,
    evaluate_every=40,
    give_up_after=3,
    checkpoint=False,
)


@pytest.fixture(scope="module")
def without_culprits():
    return run_in_process(DIGITS).accuracy


STREAM = replace(DIGITS, strategy="mu2", batch_size=1, num_rounds=60)


def two_lie(when, monkeypatch):
    whole, counts = Masking.mask, np.random.Generator(np.random.Philox(key=5))
    lies = {"always": lambda k: True, "from round 20": lambda k: k >= 20, "every fifth": lambda k: not k % 5}[when]

    def mask(self, release, session, policy):
        masked = whole(self, release, session, policy)
        if self.name in ("3", "17") and lies(release.release):
            masked.counts[:] = counts.integers(0, 2**64, size=masked.counts.shape, dtype=np.uint64)
        return masked

    monkeypatch.setattr(Masking, "mask", mask)


@pytest.mark.long
@pytest.mark.parametrize("when", ["always", "from round 20", "every fifth"])
def test_two_of_twenty_that_send_any_bytes_cost_two_points_at_most(when, without_culprits, monkeypatch):
    two_lie(when, monkeypatch)
    result = run_in_process(DIGITS)
    assert result.outcome.ended == ""
    assert 0 < result.outcome.skipped_rounds <= 16
    assert result.outcome.skipped_noise == 1.0, "releases that stand alone leave no noise behind"
    assert result.accuracy >= without_culprits - 0.02
    assert result.mu == DIGITS.mu


@pytest.mark.long
@pytest.mark.parametrize(("when", "cost"), [("always", 0.02), ("every fifth", 0.06)])
def test_streams_lose_rounds_and_no_noise_by_two_that_send_any_bytes(when, cost, monkeypatch):
    """Those who also behave cost more: while they are looked for, others' noise stands still in the sum."""
    without = run_in_process(STREAM).accuracy
    two_lie(when, monkeypatch)
    result = run_in_process(STREAM)
    assert result.outcome.ended == ""
    assert result.outcome.skipped_noise == pytest.approx(1.0)
    assert result.accuracy >= without - cost
