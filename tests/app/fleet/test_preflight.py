"""What ``--check`` finds out before a node starts: a line each, nothing spent, and a connection is tried for real."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.commands.node_command import Serving
from murmurfl.app.engines.loopback import free_port, toml_document
from murmurfl.app.fleet.federation.keys_and_cards import make_client, make_helper, make_node_key, roster_of
from murmurfl.app.fleet.preflight import (
    NAMES,
    Check,
    _data,
    _data_files,
    _disk,
    check_helper,
    check_node,
    connection_checks,
    worst,
)
from murmurfl.app.nodes.connection import Connection
from murmurfl.app.nodes.diagnosis import CAUSES, Diagnosis
from murmurfl.app.nodes.ledger_views import DAY_S
from murmurfl.app.nodes.node_config import HelperConfig, NodeConfig
from murmurfl.clients import UpdateNode, UpdatePolicy
from murmurfl.clients.nodes.client_file import SampleNode
from murmurfl.clients.nodes.roster_files import write_roster
from murmurfl.privacy import ConfigurationError, RefusedError, SQLiteLedger, protocol
from murmurfl.privacy.files import exposure, write_private
from typer.testing import CliRunner

from tests.harness.errors import raises
from tests.harness.schemas import write_samples, write_schema

FEATURES = 5
FILE = {"client": "clinic", "ledger": "ledger.sqlite"}
FILE |= {"clip-norm": 1.0, "batch-size": 2, "mu": 1.0, "max-participations": 6}
NOW = 1_800_000_000.0


class Node:
    """An operator's folder."""

    def __init__(self, folder, budget_mu=2.0, samples=40, **changes):
        self.folder, self.config = folder, folder / "node.toml"
        generator = np.random.Generator(np.random.Philox(key=1))
        features, labels = generator.random((samples, FEATURES)), generator.integers(2, size=samples)
        self.own = write_samples(folder, features, labels)
        (folder / "samples.npz").chmod(0o600)
        SQLiteLedger.create(folder / "ledger.sqlite", budget_mu=budget_mu, delta=1e-5)
        self.config.write_text(toml_document({**FILE, **self.own, **changes}))
        self.config.chmod(0o600)

    def release(self, session, times=1):
        privatizer = NodeConfig.read(self.config).make_client().privatizer
        for _ in range(times):
            privatizer.release(
                session, 0, lambda chosen: np.zeros((chosen.stop - chosen.start, privatizer.num_parameters))
            )

    def bytes(self):
        return {path.name: path.read_bytes() for path in self.folder.iterdir()}

    def checked(self, given=None, **options):
        found = check_node(self.config, given or {}, **options)
        return found, {check.name: check for check in found.checks}


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_a_check_alters_nothing_and_says_what_was_not_tried(node):
    node.release("first")
    before = node.bytes()
    found, checks = node.checked()
    assert node.bytes() == before
    assert found.state == "ok"
    assert found.description.startswith("Client clinic: up to 6 releases")
    states = {name: check.state for name, check in checks.items()}
    tried = dict.fromkeys(["configuration", "records", "budget", "disk", "data"], "ok")
    assert states == tried | dict.fromkeys(NAMES, "not tried")
    assert "No SuperLink is named" in checks["connection"].sentence
    node.release("first")
    assert node.bytes() != before, "a release would have been seen"


def test_the_check_says_when_the_budget_ends(node):
    _, checks = node.checked(run_every_days=7.0, clock=lambda: NOW)
    assert checks["budget"].sentence == (
        "The budget allows 4 more runs of mu = 1 and up to 6 releases, unused data allow 20 more releases of 2; at a "
        "run in 7 days that lasts until about 2027-02-05."
    )
    assert node.checked()[1]["budget"].sentence.endswith("on how often runs are made, which --run-every DAYS says.")


def test_the_pace_of_the_ledgers_own_runs_is_the_default(node):
    for session in ("first", "second", "third"):
        node.release(session)
    found, checks = node.checked(run_every_days=None)
    assert found.allowance.runs == 1
    assert found.allowance.open_releases == 5
    assert 0 < found.allowance.every_days * DAY_S < 60
    assert "the newest run may make 5 more releases" in checks["budget"].sentence


def test_a_spent_budget_fails_the_check_unless_a_run_is_open(tmp_path):
    node = Node(tmp_path, budget_mu=1.0)
    node.release("first", 5)
    assert node.checked()[1]["budget"].state == "warning"
    node.release("first")
    found, checks = node.checked()
    assert checks["budget"].state == found.state == "failed"
    assert "new data get a ledger of their own" in checks["budget"].sentence


def test_samples_that_are_used_up_end_it_before_the_budget(tmp_path):
    node = Node(tmp_path, samples=13)
    node.release("first", 6)
    found, checks = node.checked()
    assert (found.allowance.runs, found.allowance.releases, checks["budget"].state) == (0, 0, "failed")


def test_the_check_allows_exactly_the_runs_that_the_client_takes(tmp_path):
    node = Node(tmp_path, budget_mu=1.7, **{"max-participations": 1})
    assert node.checked()[0].allowance.runs == 2
    node.release("first")
    node.release("second")
    assert node.checked()[0].allowance.runs == 0
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="budget"):
        node.release("third")


def test_every_step_of_a_connection_is_told_apart(node, tmp_path):
    make_node_key(tmp_path / "key")
    connection = Connection("127.0.0.1:1", tmp_path / "samples.npz", tmp_path / "key")
    failed = {}
    for cause in set(CAUSES) - {"reached", "ended", "session-open"}:
        found = connection_checks(connection, trying=lambda c, cause=cause: Diagnosis(cause, "Expected."))
        assert {check.name for check in found} == set(NAMES)
        failed[cause] = [check.name for check in found if check.state == "failed"]
        assert len(failed[cause]) == 1
    assert failed["certificate-name"] == ["certificate"]
    assert failed["key-not-registered"] == ["key"]
    assert failed["clock"] == ["clock"]
    assert failed["refused"] == ["connection"]


def test_expiring_certificates_drifting_clocks_and_open_keys_warn(node, tmp_path):
    make_node_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o644)
    connection = Connection("127.0.0.1:1", tmp_path / "samples.npz", tmp_path / "key")
    seen = Diagnosis("reached", "There.", ahead_s=4.6, certificate_ends=NOW + 29.5 * DAY_S)
    found = connection_checks(connection, trying=lambda c: seen, clock=lambda: NOW)
    assert [check.state for check in found] == ["ok", "warning", "warning", "warning", "ok"]
    assert "for 29 more days: ask the server's operator" in found[1].sentence
    assert "5 s ahead of" in found[2].sentence
    assert "chmod 600" in found[3].sentence
    (tmp_path / "key").chmod(0o600)
    seen = Diagnosis("reached", "There.", ahead_s=-0.5, certificate_ends=NOW + 31 * DAY_S)
    assert [c.state for c in connection_checks(connection, trying=lambda c: seen, clock=lambda: NOW)] == ["ok"] * 5
    seen = replace(seen, takes_commands=True)
    (*others, commands) = connection_checks(connection, trying=lambda c: seen, clock=lambda: NOW)
    assert [check.state for check in others] == ["ok"] * 4
    assert (commands.name, commands.state) == ("commands", "warning")
    assert "`murmurfl server --owners`" in commands.sentence


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("mode", "state", "command"),
    [
        (0o600, "ok", ""),
        (0o400, "ok", ""),
        (0o640, "warning", "may read"),
        (0o604, "warning", "may read"),
        (0o644, "warning", "may read"),
        (0o620, "failed", "may change"),
        (0o666, "failed", "may change"),
    ],
)
def test_readable_data_warn_and_writable_data_fail(node, mode, state, command):
    samples = node.folder / "samples.npz"
    samples.chmod(mode)
    found, checks = node.checked()
    assert checks["data"].state == found.state == state
    assert checks["configuration"].state == "ok"
    assert command in checks["data"].sentence
    assert (f"got {samples} with mode {mode:o}" in checks["data"].sentence) == (state != "ok")
    assert (f"`chmod 600 {samples}`" in checks["data"].sentence) == (state != "ok")


def test_data_that_the_group_reads_of_somebody_else_are_in_order(node, monkeypatch):
    samples = node.folder / "samples.npz"
    samples.chmod(0o640)
    monkeypatch.setattr("murmurfl.privacy.files.os.geteuid", lambda: samples.stat().st_uid + 1)
    assert exposure(samples, "a data file") == ("", "")
    samples.chmod(0o644)
    assert f"`chmod 640 {samples}`" in exposure(samples, "a data file")[1]


def test_a_folder_in_which_anybody_may_put_other_data_is_a_failure(node):
    data = node.folder / "data"
    data.mkdir()
    (node.folder / "samples.npz").rename(data / "samples.npz")
    (node.folder / "samples.npz").symlink_to(data / "samples.npz")
    assert node.checked()[1]["data"].state == "ok"
    data.chmod(0o777)
    assert node.checked()[1]["data"].state == "failed"
    data.chmod(0o1777)
    assert node.checked()[1]["data"].state == "ok"


def test_a_schema_is_read_by_everybody_and_changed_by_its_operator_alone(node):
    (node.folder / "schema.toml").chmod(0o644)
    assert node.checked()[1]["data"].state == "ok"
    (node.folder / "schema.toml").chmod(0o664)
    check = node.checked()[1]["data"]
    assert check.state == "failed"
    assert "schema.toml" in check.sentence


@pytest.mark.parametrize(("wrong", "state"), [(0, "ok"), (4, "ok"), (5, "warning"), (39, "warning"), (40, "failed")])
def test_how_many_records_fit_their_schema_is_said_to_the_operator(run, node, wrong, state):
    with np.load(node.folder / "samples.npz") as file:
        features, labels = file["features"], file["labels"]
    labels[:wrong] = 7
    np.savez(node.folder / "samples.npz", features=features, labels=labels)
    found, checks = node.checked()
    assert checks["records"].state == found.state == state
    assert checks["records"].sentence.startswith(f"{40 - wrong} of 40 records fit the schema")
    assert (f"({wrong} with label: a label that is none of the classes)" in checks["records"].sentence) == (wrong > 0)
    assert checks["configuration"].state == "ok", "the node would start all the same"
    document = run("node", node.config, "--check", "--json")
    assert document.exit_code == (state == "failed")
    assert {"check": "records", "state": state, "sentence": checks["records"].sentence} in json.loads(document.stdout)[
        "checks"
    ]


def test_rows_behind_the_operators_number_are_left_out_and_it_is_said(tmp_path):
    assert (
        "Rows behind them are left out: 10." in Node(tmp_path, **{"num-records": 30}).checked()[1]["records"].sentence
    )


def test_records_of_owners_are_counted_one_by_one_too(tmp_path):
    node = Node(tmp_path)
    with np.load(tmp_path / "samples.npz") as file:
        features, labels = file["features"], file["labels"]
    labels[:5] = 7
    np.savez(tmp_path / "samples.npz", features=features, labels=labels, owners=np.arange(40) % 8)
    write_schema(tmp_path / "schema.toml", (FEATURES,), owner="owners")
    owned = {**FILE, **node.own, "num-records": 16, "samples-per-owner": 3}
    node.config.write_text(toml_document(owned))
    _, checks = node.checked()
    assert checks["configuration"].state == "ok", checks["configuration"].sentence
    assert checks["records"].state == "warning"
    assert checks["records"].sentence.startswith("35 of 40 records fit")


def test_data_are_looked_at_where_the_client_cannot_be_made(node):
    (node.folder / "samples.npz").write_bytes(b"none")
    (node.folder / "samples.npz").chmod(0o666)
    checks = node.checked()[1]
    assert checks["configuration"].state == checks["data"].state == "failed"


def test_of_a_built_in_data_set_there_is_nothing_to_look_at(node):
    node.config.write_text(toml_document({**FILE, "task": "digits", "num-partitions": 4, "partition-id": 0}))
    assert not {"data", "records"} & node.checked()[1].keys()


def test_files_of_an_own_app_are_those_that_its_file_names(tmp_path):
    for name in ("a.npz", "b.csv", "c.csv"):
        (tmp_path / name).touch(mode=0o600)
    place = {"client": "clinic", "ledger": "l", "app": "project:app"}
    tables = {"run_config": {"rows": str(tmp_path / "b.csv"), "epochs": 2, "device": "cpu"}}
    tables["node_config"] = {"long": "x" * 5000, "none": "\0", "folder": str(tmp_path), "c": str(tmp_path / "c.csv")}
    of_samples = SampleNode(
        **place, **tables, schema="s", num_records=4, method="full-batch", clip_norm=1.0, max_participations=1, mu=1.0
    )
    assert [file.name for file in _data_files(of_samples)] == ["b.csv", "c.csv"]
    of_file = replace(of_samples, samples=str(tmp_path / "a.npz"))
    assert [file.name for file in _data_files(of_file)] == ["a.npz", "b.csv", "c.csv"]
    policy = UpdatePolicy(clip_norm=1.0, mu=1.0, max_participations=2, releases_per_pass=2)
    of_updates = UpdateNode(**place, **tables, updates=policy, data_files=(str(tmp_path / "a.npz"), "missing"))
    assert [file.name for file in _data_files(of_updates)] == ["a.npz", "b.csv", "c.csv"]
    assert [check.state for check in _data(of_updates)] == ["ok"]
    (tmp_path / "b.csv").chmod(0o644)
    (tmp_path / "c.csv").chmod(0o646)
    (tmp_path / "a.npz").chmod(0o660)
    (check,) = _data(of_updates)
    assert check.state == "failed"
    assert [name in check.sentence for name in ("a.npz", "b.csv", "c.csv")] == [True, False, True]


def test_a_folder_without_room_or_rights_is_a_failure(tmp_path):
    assert _disk([tmp_path / "ledger"], 1000).state == "ok"
    full = _disk([tmp_path / "ledger"], 10**15)
    assert full.state == "failed"
    assert full.sentence.endswith("make room.")
    forbidden = _disk([Path("/proc/ledger")], 1000)
    assert forbidden.state == "failed"
    assert "Expected to write to /proc" in forbidden.sentence
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(
        Serving, "start_log", lambda serving, **options: None
    )  # it would take over the tests' own logging
    return lambda *arguments: CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_the_command_prints_a_line_a_check_and_fails_where_one_failed(run, node):
    passed = run("node", node.config, "--check")
    assert passed.exit_code == 0
    assert "configuration  ok         Configuration, data and ledger are in order." in passed.stdout
    assert passed.stderr == ""
    away = run("node", node.config, "--check", "--superlink", f"127.0.0.1:{free_port()}", "--insecure")
    assert away.exit_code == 1
    assert "connection     failed     Expected a SuperLink at" in away.stdout
    assert "key            not tried  The connection comes first." in away.stdout
    assert away.stderr.strip() == "murmurfl: Expected every check to pass, got failures of connection: see above."
    node.config.write_text(toml_document({**FILE, "mu": -1.0}))
    wrong = run("node", node.config, "--check")
    assert (wrong.exit_code, wrong.stdout.count("Expected"), wrong.stderr.count("Expected")) == (1, 0, 1)


def test_json_has_the_same_checks_and_the_figures(run, node):
    given = run("node", node.config, "--check", "--json", "--run-every", "7")
    document = json.loads(given.stdout)
    assert (document["state"], document["left"]["runs"], document["left"]["releases"]) == ("ok", 4, 20)
    assert {check["check"] for check in document["checks"]} >= {"configuration", "budget", "disk", "connection"}


def test_a_client_that_cannot_be_made_leaves_the_connection_to_be_tried(node):
    with np.load(node.folder / "samples.npz") as file:
        features = file["features"]
    np.savez(node.folder / "samples.npz", features=features)
    found, checks = node.checked({"superlink": f"127.0.0.1:{free_port()}", "insecure": True})
    assert checks["configuration"].state == checks["connection"].state == "failed"
    assert "the arrays features, labels" in checks["configuration"].sentence
    assert found.document(NOW)["left"] is None


def test_which_runs_are_taken_is_said_where_the_file_says_so(tmp_path):
    node = Node(tmp_path)
    node.config.write_text(node.config.read_text() + '[runs]\nhours = "22:00-06:00"\n')
    checks = node.checked()[1]
    assert checks["runs"].state == "ok"
    assert "22:00" in checks["runs"].sentence
    node.config.write_text(node.config.read_text().replace("22:00-06:00", "always"))
    assert node.checked()[1]["configuration"].state == "failed"


def test_options_of_a_check_are_refused_without_one(run, node):
    assert run("node", node.config, "--json").exit_code == 1
    assert run("node", node.config, "--check", "--run-every", "0").exit_code == 1


def write_helper(tmp_path):
    """A helper's files but for its operator's, and what that one says."""
    cards = [make_client(tmp_path / f"{name}.key", name).card for name in ("clinic-0", "clinic-1")]
    cards.append(make_helper(tmp_path / "auditor.key", "auditor", tmp_path / "openings.sqlite").card)
    roster = roster_of(cards)
    write_roster(tmp_path / "roster.json", roster)
    values = {"helper": "auditor", "record": "openings.sqlite", "roster": "roster.json", "key": "auditor.key"}
    return {**values, "roster-digest": roster.digest}


def test_a_helper_keeps_to_the_bounds_of_its_operators_file(tmp_path):
    values, bounds = (
        write_helper(tmp_path),
        {"max-model-size": 7, "min-cohort": 5, "max-sessions-per-day": 3, "max-sums-per-day": 9},
    )
    config = tmp_path / "helper.toml"
    write_private(config, toml_document({**values, **bounds}))
    opener = HelperConfig.read(config).opener()
    assert [getattr(opener, name.replace("-", "_")) for name in bounds] == [*bounds.values()]
    for name in bounds:
        with pytest.raises(ConfigurationError, match=f"Expected {name} "):
            replace(HelperConfig.read(config), **{name.replace("-", "_"): 0})


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("largest-model", "max-model-size"),
        ("sessions-a-day", "max-sessions-per-day"),
        ("sets-a-day", "max-sums-per-day"),
    ],
)
def test_a_helpers_key_of_before_is_refused_with_the_new_one(before, now, tmp_path):
    config = tmp_path / "helper.toml"
    write_private(config, toml_document({**write_helper(tmp_path), before: 3}))
    with raises(ConfigurationError, "unknown-name", before) as caught:
        HelperConfig.read(config)
    assert repr(now) in str(caught.value)


def test_a_helper_is_checked_the_same_way_and_its_record_is_as_it_was(run, tmp_path):
    values = write_helper(tmp_path)
    config = tmp_path / "helper.toml"
    config.write_text(toml_document(values))
    config.chmod(0o600)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    found = check_helper(config, {})
    assert [(one.name, one.state) for one in found.checks[:3]] == [
        *(("configuration", "ok"), ("roster", "ok"), ("disk", "ok")),
    ]
    assert "stands in the roster with its own key" in found.checks[1].sentence
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert "are in order" in run("helper", config, "--check").stdout
    config.write_text(toml_document({**values, "roster-digest": "00"}))
    assert check_helper(config, {}).state == "failed"


def test_a_state_is_one_of_a_few():
    with raises(ConfigurationError, "unknown-name", "state", match="not tried"):
        Check("disk", "perhaps", "Who knows.")
    assert worst([Check("a", "ok", ""), Check("b", "warning", "")]) == "warning"
