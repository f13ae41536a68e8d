"""`murmurfl federation`, `roster` and `owner`: keys and cards, rosters, permits, a federation set up by commands."""

import hashlib
import json
import os
import re
import shlex
import time
import tomllib
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import parse_config_args
from flwr.common.serde import user_config_to_proto
from murmurfl.app import simulate
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.loopback import toml_document
from murmurfl.app.fleet.federation.coordinator import Federation
from murmurfl.app.fleet.federation.keys_and_cards import Card, cards_of, read_owner_key, roster_of
from murmurfl.app.fleet.federation.member import Member
from murmurfl.app.nodes.node_config import HelperConfig, NodeConfig
from murmurfl.app.nodes.run_admission import RunAdmissionPolicy, RunsTable
from murmurfl.app.runs.result import excluded_clients, write_record
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients.nodes.operators_file import named_values
from murmurfl.clients.nodes.roster_files import read_client_key, read_helper_key, read_roster
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.permits import OwnerKey, read_permit, verified_permit
from murmurfl.privacy.setting import by_key, settings_of
from murmurfl.strategies.rounds.checkpoint import save_checkpoint
from typer.testing import CliRunner

from tests.conftest import shrink_rehearsals
from tests.harness.errors import raises
from tests.harness.schemas import write_samples

NEW = ["new", "ours", "--clients", "2", "--helpers", "1", "--schema", "schema.toml", "--address", "localhost:1"]
MEMBERS = ("client-1", "client-2", "helper-1")


def invoke(*arguments, code=0):
    result = CliRunner().invoke(cli, ["federation", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder in which a federation was made and everybody has joined."""
    shrink_rehearsals(monkeypatch)
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path, [[0.0] * 3] * 4, [0, 1, 0, 1])
    assert "kits" in invoke(*NEW, "--set", "mu=1.5", "--set", "trust.min-cohort=2")
    for name in MEMBERS:
        said = invoke("join", f"ours/kits/{name}.kit")
        assert "which stay here" in said
        assert ("mu = 1.5 if one helper and 2 clients" in said) == ("and mu = 2.122 in the worst" in said)
        assert ("mu = 1.5" in said) == name.startswith("client")
    return tmp_path


def test_making_joining_and_accepting_say_what_was_made_and_who_is_missing(tmp_path, monkeypatch, check_output):
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path, [[0.0] * 3] * 4, [0, 1, 0, 1])
    check_output(invoke(*NEW, "--set", "mu=1.5", "--set", "trust.min-cohort=2"), "new")
    for name in MEMBERS[1:]:
        check_output(invoke("join", f"ours/kits/{name}.kit"), f"join {name}")
    invoke("join", f"ours/kits/{MEMBERS[0]}.kit")
    check_output(invoke("accept", "client-1/client-1.answer"), "accept one")
    check_output(invoke("status", "ours"), "status, others awaited")
    said = invoke("accept", *(f"{name}/{name}.answer" for name in MEMBERS[1:]), "--in", "ours")
    assert Federation.read(tmp_path / "ours" / "federation.json").digest in said
    check_output(said, "accept the others")
    check_output(invoke("status", "ours"), "status")


class Control:
    """A server's runs and nodes as Flower lists them: a killed run and its second try, one that has no result."""

    def __init__(self, *given):
        pass

    def nodes(self):
        return []

    def runs(self):
        places = [{"out-dir": str(Path.cwd()), "run-name": name} for name in ("first", "first", "second", "open")]
        places += [{}, {"out-dir": "ours", "run-name": "first"}]
        return {i: SimpleNamespace(override_config=user_config_to_proto(one)) for i, one in enumerate(places)}


def test_the_coordinators_status_says_what_its_runs_took_of_each_client(here, monkeypatch):
    invoke("accept", *(f"{name}/{name}.answer" for name in MEMBERS), "--in", "ours")
    monkeypatch.setattr("murmurfl.app.fleet.servers.control_api.Control", Control)
    assert "spent" not in invoke("status", "ours")
    result = simulate(num_clients=2, clients_per_round=2, num_rounds=1, batch_size=8, training_samples=100)
    for name, said in (("first", {"client-1": 1.5, "client-2": None}), ("second", {"client-1": 2.0})):
        write_record(result, here / name)
        document = json.loads((here / name / "result.json").read_text())
        document["clients"] = {client: {"mu-guaranteed": mu, "mu-budget": 4.0} for client, mu in said.items()}
        (here / name / "result.json").write_text(json.dumps(document))
    monkeypatch.setenv("COLUMNS", "200")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in invoke("status", "ours").splitlines()]
    found = {row[0]: row[-2:] for row in rows if row}
    assert found["client-1"] == ["2", "mu 2.5 of 4"]
    assert found["client-2"] == ["1", "not stated"], "a client that trusted its server guarantees nothing by itself"
    assert found["helper-1"] == ["", ""]


def test_status_says_of_a_client_that_was_off_at_a_runs_end_that_its_ledger_knows(here, monkeypatch):
    invoke("accept", *(f"{name}/{name}.answer" for name in MEMBERS), "--in", "ours")
    monkeypatch.setattr("murmurfl.app.fleet.servers.control_api.Control", Control)
    monkeypatch.setenv("COLUMNS", "200")
    result = simulate(num_clients=2, clients_per_round=2, num_rounds=1, batch_size=8, training_samples=100)
    for name, said in (("first", ("client-1",)), ("second", ())):
        write_record(result, here / name)
        outcome = json.loads((here / name / "result.json").read_text())
        outcome["clients"] = {client: {"mu-guaranteed": 1.5, "mu-budget": 4.0} for client in said}
        (here / name / "result.json").write_text(json.dumps(outcome))
        asked = {"rounds": {"1": {"client-1": 0, "client-2": None}}, "streams": []}
        (here / name / "clients.json").write_text(json.dumps(asked))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in invoke("status", "ours").splitlines()]
    found = {row[0]: row[-2:] for row in rows if row}
    assert found["client-1"] == ["2", "mu 1.5 of 4: off at the end of 1 run, which its own ledger has"]
    assert found["client-2"] == ["2", "not known: off at the end of 2 runs, which its own ledger has"]


def test_accept_announces_replaced_keys_and_counts_that_it_wrote(here):
    invoke("accept", *(f"{name}/{name}.answer" for name in MEMBERS))
    old = Member.open(here / "client-2").joining().fingerprint
    invoke("renew", "client-2")
    said = invoke("accept", "client-2/client-2.answer")
    new = Member.open(here / "client-2").joining().fingerprint
    assert f"changed   the keys of client 'client-2' are replaced: {old} before, {new} now" in said
    assert "num-clients = 1, was 2" in invoke("leave", "client-2", "--in", "ours")


def test_the_first_line_of_a_join_without_noise_says_so_and_no_terminal_means_no(here):
    quiet = ["--helpers", "0", "--set", "strategy=trusted-mu2", "--set", "trust=trusted-server"]
    invoke("new", "open", *NEW[2:4], *NEW[6:], *quiet)
    said = invoke("join", "open/kits/client-1.kit", "--folder", "quiet", code=1)
    assert said.startswith("NO NOISE: by this kit")
    assert "--accept-no-noise" in said
    assert not (here / "quiet").exists()
    said = invoke("join", "open/kits/client-1.kit", "--folder", "quiet", "--accept-no-noise")
    assert said.startswith("NO NOISE: by this kit")
    assert "mu = 2 (epsilon = 9.998 at delta = 1e-05) towards all but the server" in said
    assert "NO NOISE" not in invoke("join", "ours/kits/client-1.kit", "--folder", "noisy")


def test_a_terminal_asks_for_the_words_and_takes_no_other(here, monkeypatch):
    quiet = ["--helpers", "0", "--set", "strategy=trusted-mu2", "--set", "trust=trusted-server"]
    invoke("new", "open", *NEW[2:4], *NEW[6:], *quiet)
    monkeypatch.setattr("murmurfl.app.commands.federation_command._is_terminal", lambda: True)
    for typed, code in (("yes", 1), ("NO NOISE", 0)):
        arguments = ["federation", "join", "open/kits/client-1.kit", "--folder", "quiet"]
        result = CliRunner().invoke(cli, arguments, input=f"{typed}\n")
        assert result.exit_code == code, result.output
        assert (here / "quiet").exists() == (not code)


def test_a_member_does_not_start_without_a_server_or_a_digest(here):
    said = invoke("start", "client-1", "--digest", "0" * 64, code=1)
    assert "Expected the federation's server at localhost:1" in said
    assert not (here / "client-1" / "ledger.sqlite").exists()
    assert "a coordinator's" in invoke("start", "ours", "--digest", "0" * 64, code=1)
    assert "murmurfl-kit" in invoke("start", ".", code=1)


def test_a_member_that_nobody_asks_on_a_terminal_needs_the_digest_as_an_option(here, monkeypatch):
    invoke("accept", *(f"{name}/{name}.answer" for name in MEMBERS))
    federation = Federation.read(here / "ours" / "federation.json")
    monkeypatch.setattr(Member, "published", lambda self: federation)
    said = invoke("start", "helper-1", code=1)
    assert "Expected --digest with the digest that all operators have read to each other" in said
    assert Member.open(here / "helper-1").pinned is None
    said = invoke("start", "helper-1", "--check", "--digest", federation.digest, code=1)  # there is no server
    assert "roster         ok" in said
    assert Member.open(here / "helper-1").pinned.digest == federation.digest
    shown = " ".join(invoke("status", "helper-1", code=1).split())
    assert federation.digest in shown


def test_leaving_and_renewing_say_what_to_do_next(here):
    invoke("accept", *(f"{name}/{name}.answer" for name in MEMBERS))
    before = json.loads((here / "ours" / "members.json").read_text())
    assert "send it to the coordinator" in invoke("renew", "client-2")
    invoke("accept", "client-2/client-2.answer")
    assert json.loads((here / "ours" / "members.json").read_text())["left"] == [before["members"][1]["node"]]
    assert "it keeps its ledger" in invoke("leave", "client-2", "--in", "ours")
    assert "for a year" in invoke("renew", "ours")
    assert "Expected a member's name" in invoke("leave", "nobody", "--in", "ours", code=1)


def test_only_a_run_that_goes_on_is_asked_to_end(here):
    assert "OUT-DIR/RUN-NAME" in invoke("end", "ours", code=1)
    (here / "run").mkdir()
    (here / "run" / "checkpoint.npz").touch()
    assert "ends after its round" in invoke("end", "run")
    assert (here / "run" / "end").exists()


def test_clients_are_taken_out_of_a_run_and_back_in(tmp_path):
    run = tmp_path / "run"
    assert "OUT-DIR/RUN-NAME" in invoke("exclude", run, "clinic-0", code=1)
    run.mkdir()
    save_checkpoint(run / "checkpoint.npz", {}, {"clients": ["clinic-0", "clinic-1", "clinic-2"]})
    assert "Expected clients of this run, clinic-0, clinic-1, clinic-2, got x." in invoke("exclude", run, "x", code=1)
    assert "excluded  clinic-0, clinic-2: not asked" in invoke("exclude", run, "clinic-2", "clinic-0")
    assert excluded_clients(run) == ["clinic-0", "clinic-2"]
    assert "excluded  clinic-2" in invoke("exclude", run, "clinic-0", "--back")
    assert "excluded  nobody" in invoke("exclude", run, "clinic-2", "--back")
    (run / "checkpoint.npz").write_bytes(b"damaged")
    assert "Expected a readable checkpoint" in invoke("exclude", run, "clinic-0", code=1)


def test_a_check_and_a_status_make_no_ledger_and_say_what_is_not_there(here, monkeypatch):
    invoke("accept", *(f"{name}/{name}.answer" for name in MEMBERS))
    federation = Federation.read(here / "ours" / "federation.json")
    with monkeypatch.context() as patch:
        patch.setattr(Member, "published", lambda self: federation)
        invoke("start", "client-1", "--check", "--digest", federation.digest, code=1)
    file = here / "client-1" / "node.toml"
    file.write_text(file.read_text().replace("num-records = 0", "num-records = 4"))
    shown = " ".join(invoke("status", "client-1", code=1).split())
    assert "Expected the federation's server at localhost:1" in shown
    assert "the first start makes the ledger" in shown
    assert not (here / "client-1" / "ledger.sqlite").exists()
    assert not (here / "client-1" / "ledger.made").exists()
    changed = Federation(federation.terms, ())
    monkeypatch.setattr(Member, "published", lambda self: changed)
    assert f"the server publishes {changed.digest}" in " ".join(invoke("status", "client-1", code=1).split())


CLIENTS, HELPERS = ("clinic-0", "clinic-1", "clinic-2"), ("auditor", "clinic-0-helper")


def murmurfl(*arguments, command="roster", columns=None):
    environment = {"COLUMNS": str(columns)} if columns else {}
    result = CliRunner().invoke(cli, [command, *map(str, arguments)], env=environment)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def make_keys(folder):
    for name in CLIENTS:
        assert murmurfl("key", folder / name, "--client", name).exit_code == 0
    for name in HELPERS:
        made = murmurfl("key", folder / name, "--helper", name, "--record", folder / f"{name}.sqlite")
        assert made.exit_code == 0, made.output
    return [folder / f"{name}.card" for name in (*CLIENTS, *HELPERS)]


@pytest.fixture
def federation(tmp_path):
    """Keys, cards, records and the roster of three clinics and two helpers."""
    made = murmurfl("make", *make_keys(tmp_path), "--out", tmp_path / "roster.json")
    assert made.exit_code == 0, made.output
    return tmp_path


def client_file(folder, name="clinic-1", **changes):
    roster = read_roster(folder / "roster.json", None)
    values = {
        "client": name,
        "ledger": "ledger.sqlite",
        "clip-norm": 2.0,
        "batch-size": 32,
        "mu": 1.0,
        "task": "digits",
        "num-partitions": 4,
        "partition-id": 1,
        "trust": "secure-aggregation",
        "trust.min-honest": 2,
        "trust.min-cohort": 3,
        "roster": "roster.json",
        "roster-digest": roster.digest,
        "signing-key": name,
    }
    values.update(by_key(changes, settings_of(NodeConfig)))
    path = folder / "node.toml"
    path.write_text(toml_document({key: value for key, value in values.items() if value is not None}))
    return path


def helper_file(folder, name="auditor", **changes):
    roster = read_roster(folder / "roster.json", None)
    values = {
        "helper": name,
        "record": f"{name}.sqlite",
        "roster": "roster.json",
        "roster-digest": roster.digest,
        "key": name,
    }
    path = folder / "helper.toml"
    path.write_text(toml_document({**values, **by_key(changes, settings_of(HelperConfig))}))
    return path


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_private_keys_and_records_are_their_owners_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        make_keys(tmp_path)
    finally:
        os.umask(before)
    for name in (*CLIENTS, *HELPERS, *(f"{name}.sqlite" for name in HELPERS)):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600, name


def test_a_card_holds_the_public_half_and_nothing_of_the_private_one(federation):
    key, (name, helper) = read_client_key(federation / "clinic-1"), read_helper_key(federation / "auditor")
    cards = {one: (federation / f"{one}.card").read_text() for one in ("clinic-1", "auditor")}
    assert name == "auditor"
    for secret in (key.secret, helper.sealing_secret, helper.signing_secret):
        assert all(secret.hex() not in text for text in cards.values())
    assert json.loads(cards["clinic-1"]) == {
        "murmurfl-card": 1,
        "client": "clinic-1",
        "signing": key.public.hex(),
    }
    assert Card.read(federation / "auditor.card") == Card.of_helper("auditor", helper)


def test_no_key_and_no_roster_is_ever_overwritten(federation):
    def contents():
        return {path.name: path.read_bytes() for path in federation.iterdir()}

    before = contents()
    cards = [federation / f"{name}.card" for name in (*CLIENTS, *HELPERS)]
    for again in (
        ("key", federation / "clinic-0", "--client", "clinic-0"),
        ("key", federation / "auditor", "--helper", "auditor", "--record", federation / "other.sqlite"),
        ("make", *cards, "--out", federation / "roster.json"),
    ):
        said = murmurfl(*again)
        assert said.exit_code == 1
        assert "Expected nothing at" in said.stderr
        assert contents() == before


def test_a_record_is_made_with_its_key_and_in_no_other_way(federation):
    """A new key beside an old record, an old key with a new record: neither can be had."""
    said = murmurfl("key", federation / "new", "--helper", "auditor", "--record", federation / "auditor.sqlite")
    assert said.exit_code == 1
    assert not (federation / "new").exists()
    said = murmurfl("key", federation / "new", "--helper", "auditor")
    assert "Expected --record with --helper" in said.stderr
    said = murmurfl("key", federation / "new", "--client", "m", "--record", federation / "new.sqlite")
    assert "Expected --record with --helper" in said.stderr


@pytest.mark.parametrize("whose", [(), ("--client", "a", "--helper", "b")])
def test_a_key_is_a_clients_or_a_helpers(tmp_path, whose):
    said = murmurfl("key", tmp_path / "key", *whose)
    assert said.exit_code == 1
    assert "--client or as --helper" in said.stderr


def test_a_roster_is_the_same_in_whatever_order_the_cards_come(federation):
    cards = [Card.read(federation / f"{name}.card") for name in (*CLIENTS, *HELPERS)]
    roster = roster_of(cards)
    assert roster.digest == roster_of(reversed(cards)).digest == read_roster(federation / "roster.json", None).digest
    assert sorted(cards_of(roster), key=lambda card: card.name) == sorted(cards, key=lambda card: card.name)


def test_cards_that_make_no_roster_are_refused(federation):
    client, helper = federation / "clinic-0.card", federation / "auditor.card"
    (federation / "copy.card").write_text(client.read_text().replace("clinic-0", "clinic-9"))
    (federation / "torn.card").write_text(client.read_text()[:-20])
    (federation / "short.card").write_text(client.read_text().replace(Card.read(client).signing.hex(), "ab"))
    for cards, complaint in (
        ((client,), "helper"),
        ((helper,), "Expected a roster of 1 to"),
        ((client, client, helper), "one card for each name, got two for 'clinic-0'"),
        ((client, federation / "copy.card", helper), "every key once"),
        ((client, federation / "torn.card", helper), "Expected a card of `murmurfl roster key` at"),
        ((federation / "short.card", helper), "32 bytes"),
        ((client, federation / "clinic-1", helper), "Expected a card of `murmurfl roster key` at"),
        ((client, federation / "none.card", helper), "No such file"),
    ):
        said = murmurfl("make", *cards, "--out", federation / "another.json")
        assert said.exit_code == 1
        assert complaint in said.stderr, cards
        assert not (federation / "another.json").exists()


def test_show_and_make_say_the_digest_and_show_fits_80_columns(federation):
    roster = read_roster(federation / "roster.json", None)
    said = murmurfl("show", federation / "roster.json", columns=80)
    assert said.exit_code == 0
    assert roster.digest in said.stdout
    path = str(federation / "roster.json")  # as long as it is
    assert max(len(line) for line in said.stdout.splitlines() if path not in line) <= 80
    for card in cards_of(roster):
        assert card.fingerprint in said.stdout
        assert card.name in said.stdout
    document = json.loads(murmurfl("show", federation / "roster.json", "--json").stdout)
    assert document["digest"] == roster.digest
    assert [member["name"] for member in document["members"]] == [*CLIENTS, *HELPERS]
    cards = [federation / f"{name}.card" for name in (*CLIENTS, *HELPERS)]
    said = murmurfl("make", *cards, "--out", federation / "again.json").stdout
    assert roster.digest in said
    assert "by telephone say and not through the server" in said


def test_check_finds_a_clients_file_in_order(federation):
    said = murmurfl("check", client_file(federation))
    assert said.exit_code == 0, said.output
    assert "WRONG" not in said.stdout
    assert said.stdout.count("in order") == 4
    assert "client 'clinic-1' stands in the roster with its own key" in said.stdout
    assert "1 of a sum may work with the server, 2 must not; 0 may be missing from a round" in said.stdout


def test_check_finds_a_helpers_file_in_order(federation):
    said = murmurfl("check", helper_file(federation))
    assert said.exit_code == 0, said.output
    assert "WRONG" not in said.stdout
    assert said.stdout.count("in order") == 3


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"roster_digest": "00" * 32}, "and roster-digest pins 0000"),
        ({"roster": "none.json"}, "No such file"),
        ({"signing_key": "clinic-0"}, "somebody exchanged your card"),
        ({"signing_key": "none"}, "got no file. Make one with `murmurfl roster key`"),
        ({"signing_key": "auditor"}, "Expected a client's key"),
        ({"client": "clinic-9"}, "the roster has no client 'clinic-9', so the node does not start"),
        ({"client": "auditor"}, "the roster has a helper of the name 'auditor', no client"),
        ({"min_cohort": 4}, "the roster has 3 clients, so the node does not start: no sum could ever be opened"),
    ],
)
def test_check_says_what_is_wrong_with_a_clients_file_and_what_that_does(federation, changes, complaint):
    said = murmurfl("check", client_file(federation, **changes))
    assert said.exit_code == 1
    assert complaint in said.stdout
    assert "WRONG" in said.stdout


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"roster_digest": "00" * 32}, "and roster-digest pins 0000"),
        ({"key": "clinic-0-helper"}, "Expected the keys of helper 'auditor'"),
        ({"key": "none"}, "got no file"),
        ({"helper": "clinic-0-helper"}, "Expected the keys of helper 'clinic-0-helper'"),
        ({"record": "none.sqlite"}, "none.sqlite"),
    ],
)
def test_check_says_what_is_wrong_with_a_helpers_file_and_what_that_does(federation, changes, complaint):
    said = murmurfl("check", helper_file(federation, **changes))
    assert said.exit_code == 1
    assert complaint in said.stdout
    assert "o the helper does not start, and no sum is opened" in said.stdout


def test_an_exchanged_card_shows_to_its_owner_though_everybody_has_the_same_digest(federation):
    """Whoever makes the roster put in a key of their own for clinic-1: no digest shows that, and clinic-1 does."""
    (federation / "mine").mkdir()
    assert murmurfl("key", federation / "mine" / "forged", "--client", "clinic-1").exit_code == 0
    cards = [federation / f"{name}.card" for name in (*CLIENTS, *HELPERS) if name != "clinic-1"]
    (federation / "roster.json").unlink()
    forged = federation / "mine" / "forged.card"
    assert murmurfl("make", *cards, forged, "--out", federation / "roster.json").exit_code == 0
    others = murmurfl("check", client_file(federation, "clinic-0"))
    owner = murmurfl("check", client_file(federation, "clinic-1"))
    assert (others.exit_code, owner.exit_code) == (0, 1)
    assert "somebody exchanged your card" in owner.stdout


def test_check_of_a_client_that_sends_single_releases_says_so(federation):
    settled = dict.fromkeys(("trust", "min_honest", "min_cohort", "roster", "roster_digest", "signing_key"))
    said = murmurfl("check", client_file(federation, **settled))
    assert said.exit_code == 1
    assert "sends single releases and needs no roster" in said.stdout


def test_check_knows_the_file_of_a_client_with_a_clientapp_of_its_own(federation):
    values = tomllib.loads(client_file(federation).read_text())
    kept = (
        "client",
        "ledger",
        "clip-norm",
        "mu",
        "trust",
        "trust.min-honest",
        "trust.min-cohort",
        "roster",
        "roster-digest",
    )
    own = {key: values[key] for key in (*kept, "signing-key")} | {"app": "package.module:app", "max-participations": 3}
    path = federation / "own.toml"
    path.write_text(toml_document(own))
    said = murmurfl("check", path)
    assert said.exit_code == 0, said.output
    assert said.stdout.count("in order") == 4
    path.write_text(toml_document({**own, "trust.min-cohort": 4}))
    assert "no sum could ever be opened" in murmurfl("check", path).stdout


def test_a_helpers_configuration_is_checked(federation):
    path = helper_file(federation, reckord="x")
    said = murmurfl(path, "--check", command="helper")
    assert said.exit_code == 1
    assert "Expected known node-config keys, got reckord" in said.stderr
    said = murmurfl(helper_file(federation, key=""), "--check", command="helper")
    assert "Expected key to be set" in said.stderr
    said = murmurfl(helper_file(federation), "--check", command="helper")
    assert said.exit_code == 0, said.output
    assert "Helper auditor: opens sums of releases of the 3 clients of the roster" in " ".join(said.stdout.split())


def test_a_helper_without_its_record_does_not_start_and_none_is_made(federation):
    (federation / "auditor.sqlite").unlink()
    for path in federation.glob("auditor.sqlite*"):
        path.unlink()
    said = murmurfl(helper_file(federation), "--check", command="helper")
    assert said.exit_code == 1
    assert not list(federation.glob("auditor.sqlite*"))


def test_a_card_of_another_format_is_refused_with_its_number(federation):
    card = federation / "clinic-0.card"
    card.write_text(card.read_text().replace('-card": 1', '-card": 2'))
    refused = murmurfl("make", card, federation / "auditor.card", "--out", federation / "other.json")
    assert refused.exit_code == 1
    assert "of format 1, got one of format 2. Use the version of murmurfl that made it." in " ".join(
        refused.output.split()
    )
    assert not (federation / "other.json").exists()


def test_cards_are_written_once(tmp_path):
    card = Card("clinic-0", bytes(32))
    card.write(tmp_path / "card")
    with raises(ConfigurationError, "exists", match="it was left alone"):
        card.write(tmp_path / "card")
    with raises(ConfigurationError, "failed", match="Expected to write a card"):
        card.write(Path(tmp_path / "none" / "card"))


@pytest.mark.parametrize("name", ["clinic\n0", "clinic-0 ", "x" * 201])
@pytest.mark.parametrize("kind", ["client", "helper"])
def test_a_name_that_no_roster_can_have_gets_no_key(kind, name, tmp_path):
    record = ("--record", tmp_path / "r.sqlite") if kind == "helper" else ()
    said = murmurfl("key", tmp_path / "it.key", f"--{kind}", name, *record)
    assert said.exit_code == 1
    assert "Expected names of 1 to" in said.stderr
    assert not list(tmp_path.iterdir())


def test_no_private_key_is_called_as_cards_are_which_people_send_each_other(tmp_path):
    said = murmurfl("key", tmp_path / "clinic.card", "--client", "clinic")
    assert said.exit_code == 1
    assert "Expected a private key's file not to end in .card" in said.stderr
    assert not list(tmp_path.iterdir())


def test_a_digest_may_be_pinned_as_it_was_heard_and_nothing_else_is_one(federation):
    digest = read_roster(federation / "roster.json", None).digest
    said = murmurfl("show", federation / "roster.json").stdout
    heard = " ".join(digest[i : i + 4] for i in range(0, 64, 4))
    assert heard in said
    for same in (heard, digest.upper()):
        assert murmurfl("check", client_file(federation, roster_digest=same)).exit_code == 0
    for other in (digest[:-1], digest + "0", "DIGEST", f"{'0' if digest[0] != '0' else '1'}{digest[1:]}"):
        assert murmurfl("check", client_file(federation, roster_digest=other)).exit_code == 1
        with pytest.raises(ConfigurationError, match=r"roster-digest to be 64|Expected the roster with digest"):
            read_roster(federation / "roster.json", other)


def test_a_clients_file_at_a_helper_and_a_misspelt_key_are_told(federation):
    given = murmurfl(client_file(federation), "--check", command="helper")
    assert "this is a client's file, for `murmurfl node`" in given.stderr
    given = murmurfl(helper_file(federation), "--check", command="node")
    assert "this is a helper's file, for `murmurfl helper`" in given.stderr
    assert "perhaps singing-key for signing-key" in murmurfl("check", client_file(federation, singing_key="x")).stderr


def owner(*arguments):
    result = CliRunner().invoke(cli, ["owner", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def key(tmp_path):
    made = owner("key", tmp_path / "night.key")
    assert made.exit_code == 0, made.output
    return tmp_path / "night.key"


def signed(*arguments):
    made = owner("permit", *arguments)
    assert made.exit_code == 0, made.output
    (text,) = made.stdout.splitlines()
    return text


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_a_key_is_its_owners_alone_says_its_public_half_and_is_never_overwritten(tmp_path):
    before = os.umask(0)
    try:
        said = owner("key", tmp_path / "night.key").output
    finally:
        os.umask(before)
    made, content = read_owner_key(tmp_path / "night.key"), (tmp_path / "night.key").read_bytes()
    assert (tmp_path / "night.key").stat().st_mode & 0o777 == 0o600
    assert made.public.hex() in said
    assert made.secret.hex() not in said
    again = owner("key", tmp_path / "night.key")
    assert again.exit_code == 1
    assert "Expected nothing at" in again.stderr
    assert (tmp_path / "night.key").read_bytes() == content


def test_a_permit_is_one_line_of_a_fresh_session(key):
    public, now = read_owner_key(key).public, time.time()
    first, second = (verified_permit(signed(key), [public]) for _ in range(2))
    assert first.sessions != second.sessions
    assert len(first.sessions) == 1
    assert first.is_for(now)
    assert first.is_for(now - 200), "another clock may be a little behind"
    assert not first.is_for(now + 7 * 24 * 3600 + 5)
    assert first.bundle == ""


def test_a_permit_says_what_it_is_asked_to(key):
    digest = "ab" * 32
    chosen = ("--session", "night", "--mean", "--evaluation", "--bundle", digest, "--days", 0.5)
    permit = verified_permit(signed(key, *chosen, "--from", "2030-01-02T03:04"), [read_owner_key(key).public])
    assert permit.sessions == ("night", "nightmean", "nightevaluation")
    assert permit.bundle == digest
    assert permit.until - permit.not_before == 12 * 3600
    assert time.localtime(permit.not_before)[:5] == (2030, 1, 2, 3, 4)


def test_a_permit_is_renewed_for_the_same_sessions_and_only_by_its_own_key(key):
    old = signed(key, "--session", "night", "--mean", "--bundle", "ab" * 32)
    new = read_permit(signed(key, "--renew", old, "--days", 30))
    assert (new.sessions, new.bundle) == (read_permit(old).sessions, read_permit(old).bundle)
    assert new.until > read_permit(old).until
    # A server may hand over anything as what is to be renewed.
    made_up = OwnerKey.generate().permit(["another"], not_before=0, until=2**40)
    for text in (made_up, old[:-4] + "AAAA", "night"):
        said = owner("permit", key, "--renew", text)
        assert said.exit_code == 1
        assert said.stdout == ""
    assert "Expected --renew alone" in owner("permit", key, "--renew", old, "--session", "other").stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--session", "a b"), "Expected a session of 1 to 64 letters and digits"),
        (("--days", 0), "Expected --days to be a number > 0"),
        (("--from", "tonight"), "Expected --from as YYYY-MM-DDTHH:MM"),
        (("--bundle", "ab"), "Expected a bundle's SHA-256"),
    ],
)
def test_an_impossible_permit_is_refused_with_one_line(key, arguments, complaint):
    said = owner("permit", key, *arguments)
    assert said.exit_code == 1
    assert complaint in said.stderr
    assert said.stdout == ""


def test_a_permit_is_shown_and_a_forged_one_is_called_that(key):
    text = signed(key, "--session", "night")
    said = owner("show", text)
    assert said.exit_code == 0
    for shown in (read_owner_key(key).public.hex(), "night", "any", "UTC"):
        assert shown in said.stdout
    document = json.loads(owner("show", text, "--json").stdout)
    assert document["signed"] is True
    assert document["sessions"] == ["night"]
    forged = OwnerKey.generate().permit(["night"], not_before=0, until=2**40).rsplit(".", 1)[1]
    said = owner("show", f"{text.rsplit('.', 1)[0]}.{forged}")
    assert said.exit_code == 1
    assert "do not use it" in said.stderr
    assert owner("show", "night").exit_code == 1


def test_a_file_that_is_no_key_or_that_others_may_read_is_refused(tmp_path, key):
    (tmp_path / "other").write_text("{}")
    (tmp_path / "other").chmod(0o600)
    (tmp_path / "newer").write_text(key.read_text().replace(": 1", ": 2"))
    (tmp_path / "newer").chmod(0o600)
    key.chmod(0o640)
    for path, complaint in (
        (tmp_path / "other", "got something else"),
        (tmp_path / "newer", "of format 1, got one of format 2"),
        (key, "mode 640"),
        (tmp_path / "no", "no file"),
    ):
        with pytest.raises(ConfigurationError, match=complaint) as refused:
            read_owner_key(path)
        assert refused.value.__cause__ is None or complaint == "no file"


def test_the_hash_of_a_bundle_is_that_of_what_flower_builds(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "server.py").write_text("app = None\n")
    (tmp_path / "app" / "client.py").write_text("app = None\n")
    (tmp_path / "app" / "pyproject.toml").write_text(
        '[project]\nname = "tiny"\nversion = "1.0.0"\nlicense = "Apache-2.0"\n[tool.flwr.app]\npublisher = "tests"\n'
        '[tool.flwr.app.components]\nserverapp = "server:app"\nclientapp = "client:app"\n'
    )
    said = owner("bundle", tmp_path / "app")
    assert said.exit_code == 0, said.output
    assert said.stdout.strip() == hashlib.sha256(build_fab_from_disk(tmp_path / "app")).hexdigest()
    (tmp_path / "app" / "server.py").write_text("app = 1\n")
    assert owner("bundle", tmp_path / "app").stdout != said.stdout
    assert "without pyproject.toml" in owner("bundle", tmp_path).stderr


def test_the_commands_of_the_page_are_followed(tmp_path, monkeypatch):
    """As they stand there, with what a shell makes of them; `flwr run` as Flower reads its run configuration."""
    page = (Path(__file__).parents[3] / "docs" / "deployment.md").read_text()
    section = page.partition("## Which runs a node takes")[2].partition("\n## ")[0]
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)).replace("\\\n", "")
    monkeypatch.chdir(tmp_path)
    read = {"$(murmurfl owner bundle .)": "ab" * 32}
    ran = []
    for line in lines.splitlines():
        for file in tmp_path.glob("*.permit"):
            read[f"$(cat {file.name})"] = file.read_text().strip()
        words = [reduce(lambda word, item: word.replace(*item), read.items(), word) for word in shlex.split(line)]
        ran.append(words[:3])
        if words[0] == "murmurfl":
            said = CliRunner().invoke(cli, words[1:])
            assert said.exit_code == 0, said.output
        else:
            given = [words[i + 1] for i, word in enumerate(words) if word == "-c"]
            permit = RunConfig.from_mapping(parse_config_args(given)).permit
            assert read_permit(permit).bundle == "ab" * 32
    assert [words[-1] for words in ran] == ["key", "permit", "show", ".", "permit"]
    table = tomllib.loads(next(iter(re.findall(r"^```toml\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE))))
    assert RunAdmissionPolicy._of(RunsTable(**named_values(RunsTable, table["runs"]))).hours is not None
