"""A client of secure aggregation by its operator's file: what must be set, what is pinned, what it says of itself."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.loopback import toml_document
from murmurfl.app.fleet.deployment import demo_config, ledger_line, node_settings
from murmurfl.app.nodes.journal import Journal, noting
from murmurfl.app.nodes.node_app import answers_of
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.app.runs.experiment import prepare
from murmurfl.clients.nodes.roster_files import write_client_key, write_roster
from murmurfl.privacy import ConfigurationError, SQLiteLedger, gdp_epsilon, protocol, read_ledger, rounded_up
from murmurfl.privacy.setting import by_key, settings_of
from murmurfl.privacy.sums.roster import ClientKey, HelperKey, Roster
from typer.testing import CliRunner

from tests.harness.errors import raises

SUMS = {"trust": "secure-aggregation", "trust.min-honest": 4, "trust.min-cohort": 5}
BASE = {
    "client": "clinic",
    "ledger": "ledger.sqlite",
    "clip-norm": 2.0,
    "batch-size": 32,
    "mu": 1.0,
    "task": "digits",
    "num-partitions": 6,
    "partition-id": 1,
}


@pytest.fixture
def operator(tmp_path):
    """An operator's folder with ledger, key and roster; makes the file from changes to it."""
    key = ClientKey.generate()
    clients = {"clinic": key.public, **{f"other-{i}": ClientKey.generate().public for i in range(5)}}
    roster = Roster(clients, (HelperKey.generate().entry("auditor"), HelperKey.generate().entry("ward")))
    write_client_key(tmp_path / "signing.key", key)
    write_roster(tmp_path / "roster.json", roster)
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=2.0, budget_local_mu=5.0, delta=1e-5)
    pinned = {"roster": "roster.json", "roster-digest": roster.digest, "signing-key": "signing.key"}

    def write(**changes):
        settled = {**BASE, **SUMS, **pinned}
        settled |= by_key(changes, settings_of(NodeConfig))
        path = tmp_path / "node.toml"
        path.write_text(toml_document({name: value for name, value in settled.items() if value is not None}))
        path.chmod(0o600)
        return path

    write.roster = roster
    return write


@pytest.mark.parametrize("missing", ["min_honest", "min_cohort", "roster", "roster_digest", "signing_key"])
def test_every_key_of_secure_aggregation_must_be_set(operator, missing):
    (name,) = by_key({missing: None}, settings_of(NodeConfig))
    with pytest.raises(ConfigurationError, match=f"Expected {name} to be set, with trust = 'secure-aggregation'"):
        NodeConfig.read(operator(**{missing: None}))


@pytest.mark.parametrize("left", ["min_honest", "min_cohort", "roster", "roster_digest", "signing_key"])
def test_none_of_them_may_be_set_without_it(operator, left):
    unset = dict.fromkeys(
        ["trust", *(n for n in ("min_honest", "min_cohort", "roster", "roster_digest", "signing_key") if n != left)]
    )
    with raises(ConfigurationError, "missing", NodeConfig.key_of(left)):
        NodeConfig.read(operator(**unset))


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"trust": "nobody"}, "Expected trust to be a known name"),
        ({"strategy": "trusted-mu2"}, "Expected trust to be one of 'trusted-server' with strategy 'trusted-mu2'"),
        ({"min_honest": 6}, "Expected trust.min-honest <= trust.min-cohort <= 2048, got 6 and 5"),
        ({"min_cohort": 7}, "at most the roster's 6 clients"),
        ({"min_cohort": -1}, "trust.min-cohort"),
        ({"budget_local_mu": -1.0}, "Expected budget-local-mu to be a number >= 0"),
        ({"roster_digest": "00" * 32}, "Expected the roster with digest 0000"),
        ({"roster": "none.json"}, "none.json"),
        ({"signing_key": "roster.json"}, "Expected a client's key"),
        ({"client": "somebody"}, "Expected client 'somebody' in the roster"),
        ({"client": "other-1"}, "Expected the key of client 'other-1' to be the one in the roster"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_released(operator, changes, complaint):
    path = operator(**changes)
    with pytest.raises(ConfigurationError) as caught:
        NodeConfig.read(path).make_client()
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_check_says_both_figures_and_what_the_better_one_rests_on(operator):
    said = " ".join(CliRunner().invoke(cli, ["node", str(operator()), "--check"]).stdout.split())
    for mu in (1.0, 2.0):  # h = 4
        assert f"mu = {rounded_up(mu)}" in said
        assert f"epsilon = {rounded_up(gdp_epsilon(mu, 1e-5))}" in said
    assert "if one helper and 4 clients of each sum are honest" in said
    assert "worst case" in said
    assert "Every sum has at least 5 releases of the roster's 6 clients" in said
    assert "Budget of all runs: mu = 2, and in the worst case mu = 5." in said


def test_a_key_others_may_read_is_no_key(operator, tmp_path):
    (tmp_path / "signing.key").chmod(0o640)
    with raises(ConfigurationError, "insecure", match="only its owner can read"):
        NodeConfig.read(operator()).make_client()


def test_what_leaves_is_masked_whatever_the_server_asks(operator):
    """Neither its words for trust and cohort nor a roster of its own reach the client."""
    answers, description = answers_of(NodeConfig.read(operator()))
    grid = InProcessGrid(answers, 1, {})
    config = {protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.SERVER_ROUND: 1, protocol.SESSION: "s1"}
    weaker = {
        "trust": "untrusted-server",
        "trust.min-cohort": 1,
        "trust.min-honest": 1,
        "roster": "{}",
        "roster-digest": "00",
    }
    point = ArrayRecord([np.zeros((10, 64)), np.zeros(10)])
    records = {protocol.ARRAYS: point, protocol.PREVIOUS_ARRAYS: point}
    content = RecordDict({**records, protocol.CONFIG: ConfigRecord({**config, protocol.ACK: 0, **weaker})})
    message = Message(content, dst_node_id=grid.get_node_ids()[0], message_type=MessageType.TRAIN)
    (reply,) = grid.send_and_receive([message])
    seals, header = (reply.content[protocol.CONFIG][name] for name in (protocol.SEALS, protocol.HEADER))
    assert len(seals) == 2
    assert b'"min_cohort":5' in header
    assert operator.roster.digest.encode() in header
    arrays = [array.numpy() for array in reply.content[protocol.ARRAYS].values()]
    assert all(array.dtype == np.uint64 for array in arrays)
    # Counts are below 2^52, masked ones uniform: all 650 of them below 2^63 once in 10^195 runs.
    assert max(array.max() for array in arrays) > 2**63
    assert "Client clinic" in description


def test_a_node_that_was_started_again_mends_what_a_skipped_sum_lost(operator):
    """Told so, and only then; the noise is in its ledger."""
    point = ArrayRecord([np.zeros((10, 64)), np.zeros(10)])
    for number, said in ((1, {}), (2, {protocol.SKIPPED: 0}), (3, {protocol.SKIPPED: 1}), (4, {})):
        answers, _ = answers_of(NodeConfig.read(operator()))
        grid = InProcessGrid(answers, 1, {})
        config = {protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.SERVER_ROUND: number, protocol.SESSION: "s1"}
        records = {protocol.ARRAYS: point, protocol.PREVIOUS_ARRAYS: point}
        content = RecordDict({**records, protocol.CONFIG: ConfigRecord({**config, protocol.ACK: number - 1, **said})})
        (reply,) = grid.send_and_receive(
            [Message(content, dst_node_id=grid.get_node_ids()[0], message_type=MessageType.TRAIN)]
        )
        assert reply.content[protocol.METRICS].get(protocol.RECOVERED, 0) == (number == 3)


def test_a_masked_release_is_noted_by_number_and_public_size(operator):
    journal, entries = Journal(), []
    journal.listen(entries.append)
    answers, _ = answers_of(NodeConfig.read(operator()))
    grid = InProcessGrid(noting(answers, journal), 1, {})
    config = {protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.SERVER_ROUND: 4, protocol.SESSION: "s1"}
    point = ArrayRecord([np.zeros((10, 64)), np.zeros(10)])
    records = {protocol.ARRAYS: point, protocol.PREVIOUS_ARRAYS: point}
    content = RecordDict({**records, protocol.CONFIG: ConfigRecord({**config, protocol.ACK: 0})})
    (node,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive([Message(content, dst_node_id=node, message_type=MessageType.TRAIN)])
    assert not reply.has_error()
    (entry,) = entries
    run = entry.facts["run"]
    assert (entry.kind, dict(entry.facts)) == (
        "released",
        {"run": run, "session": "s1", "round": 4, "release": 1, "samples": 32},
    )


def test_the_demonstrations_nodes_are_told_what_its_run_expects(tmp_path):
    config = demo_config({"trust": "secure-aggregation"}, tmp_path, "x")
    assert (config.num_clients, config.clients_per_round, config.summing.helpers) == (6, 6, 2)
    experiment = prepare(config)
    settings = [node_settings(experiment, client) for client in range(6)]
    policy = experiment.policy(0)
    for client in settings:
        told = {
            "trust": "secure-aggregation",
            "trust.min-honest": policy.sums.min_honest,
            "trust.min-cohort": policy.sums.min_cohort,
        }
        assert {name: client[name] for name in told} == told
        assert client["budget-local-mu"] == policy.budget.worst_case.mu
    assert len({client["max-participations"] for client in settings}) == 1


def test_a_line_about_a_ledger_shows_both_figures(operator, tmp_path):
    client = NodeConfig.read(operator()).make_client()
    client.privatizer.release("s1", 0, lambda samples: np.zeros((samples.stop - samples.start, 650)))
    said = ledger_line("clinic", read_ledger(tmp_path / "ledger.sqlite"))
    assert "1 releases, mu 1 of 2 spent, 2 of 5 in the worst case: mu = 1 Gaussian DP" in said
    assert "and mu = 2, epsilon" in said
