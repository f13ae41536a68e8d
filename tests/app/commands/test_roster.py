"""``murmurfl roster``: keys that are made once, one roster of everybody's cards, what a wrong key or digest does."""

import json
import os
import tomllib
from pathlib import Path

import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.loopback import toml_document
from murmurfl.app.nodes.federation.keys_and_cards import Card, cards_of, roster_of
from murmurfl.clients.nodes.roster_files import read_helper_key, read_machine_key, read_roster
from murmurfl.privacy import ConfigurationError
from typer.testing import CliRunner

MACHINES, HELPERS = ("clinic-0", "clinic-1", "clinic-2"), ("auditor", "clinic-0-helper")


def murmurfl(*arguments, command="roster", columns=None):
    environment = {"COLUMNS": str(columns)} if columns else {}
    result = CliRunner().invoke(cli, [command, *map(str, arguments)], env=environment)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def make_keys(folder):
    for name in MACHINES:
        assert murmurfl("key", folder / name, "--machine", name).exit_code == 0
    for name in HELPERS:
        made = murmurfl("key", folder / name, "--helper", name, "--record", folder / f"{name}.sqlite")
        assert made.exit_code == 0, made.output
    return [folder / f"{name}.card" for name in (*MACHINES, *HELPERS)]


@pytest.fixture
def federation(tmp_path):
    """Keys, cards, records and the roster of three clinics and two helpers."""
    made = murmurfl("make", *make_keys(tmp_path), "--out", tmp_path / "roster.json")
    assert made.exit_code == 0, made.output
    return tmp_path


def machine_file(folder, name="clinic-1", **changes):
    roster = read_roster(folder / "roster.json", None)
    values = {
        "machine": name,
        "ledger": "ledger.sqlite",
        "clip-norm": 2.0,
        "batch-size": 32,
        "mu": 1.0,
        "task": "digits",
        "num-partitions": 4,
        "partition-id": 1,
        "trust": "secure-aggregation",
        "min-honest": 2,
        "min-cohort": 3,
        "roster": "roster.json",
        "roster-digest": roster.digest,
        "signing-key": name,
    }
    values.update({key.replace("_", "-"): value for key, value in changes.items()})
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
    path.write_text(toml_document({**values, **{key.replace("_", "-"): value for key, value in changes.items()}}))
    return path


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_private_keys_and_records_are_their_owners_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        make_keys(tmp_path)
    finally:
        os.umask(before)
    for name in (*MACHINES, *HELPERS, *(f"{name}.sqlite" for name in HELPERS)):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600, name


def test_a_card_holds_the_public_half_and_nothing_of_the_private_one(federation):
    key, (name, helper) = read_machine_key(federation / "clinic-1"), read_helper_key(federation / "auditor")
    cards = {one: (federation / f"{one}.card").read_text() for one in ("clinic-1", "auditor")}
    assert name == "auditor"
    for secret in (key.secret, helper.sealing_secret, helper.signing_secret):
        assert all(secret.hex() not in text for text in cards.values())
    assert json.loads(cards["clinic-1"]) == {
        "murmurfl-card": 1,
        "machine": "clinic-1",
        "signing": key.public.hex(),
    }
    assert Card.read(federation / "auditor.card") == Card.of_helper("auditor", helper)


def test_no_key_and_no_roster_is_ever_overwritten(federation):
    def contents():
        return {path.name: path.read_bytes() for path in federation.iterdir()}

    before = contents()
    cards = [federation / f"{name}.card" for name in (*MACHINES, *HELPERS)]
    for again in (
        ("key", federation / "clinic-0", "--machine", "clinic-0"),
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
    said = murmurfl("key", federation / "new", "--machine", "m", "--record", federation / "new.sqlite")
    assert "Expected --record with --helper" in said.stderr


@pytest.mark.parametrize("whose", [(), ("--machine", "a", "--helper", "b")])
def test_a_key_is_a_machines_or_a_helpers(tmp_path, whose):
    said = murmurfl("key", tmp_path / "key", *whose)
    assert said.exit_code == 1
    assert "--machine or as --helper" in said.stderr


def test_a_roster_is_the_same_in_whatever_order_the_cards_come(federation):
    cards = [Card.read(federation / f"{name}.card") for name in (*MACHINES, *HELPERS)]
    roster = roster_of(cards)
    assert roster.digest == roster_of(reversed(cards)).digest == read_roster(federation / "roster.json", None).digest
    assert sorted(cards_of(roster), key=lambda card: card.name) == sorted(cards, key=lambda card: card.name)


def test_cards_that_make_no_roster_are_refused(federation):
    machine, helper = federation / "clinic-0.card", federation / "auditor.card"
    (federation / "copy.card").write_text(machine.read_text().replace("clinic-0", "clinic-9"))
    (federation / "torn.card").write_text(machine.read_text()[:-20])
    (federation / "short.card").write_text(machine.read_text().replace(Card.read(machine).signing.hex(), "ab"))
    for cards, complaint in (
        ((machine,), "helper"),
        ((helper,), "Expected a roster of 1 to"),
        ((machine, machine, helper), "one card for each name, got two for 'clinic-0'"),
        ((machine, federation / "copy.card", helper), "every key once"),
        ((machine, federation / "torn.card", helper), "Expected a card of `murmurfl roster key` at"),
        ((federation / "short.card", helper), "32 bytes"),
        ((machine, federation / "clinic-1", helper), "Expected a card of `murmurfl roster key` at"),
        ((machine, federation / "none.card", helper), "No such file"),
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
    assert [member["name"] for member in document["members"]] == [*MACHINES, *HELPERS]
    cards = [federation / f"{name}.card" for name in (*MACHINES, *HELPERS)]
    said = murmurfl("make", *cards, "--out", federation / "again.json").stdout
    assert roster.digest in said
    assert "by telephone say and not through the server" in said


def test_check_finds_a_machines_file_in_order(federation):
    said = murmurfl("check", machine_file(federation))
    assert said.exit_code == 0, said.output
    assert "WRONG" not in said.stdout
    assert said.stdout.count("in order") == 4
    assert "machine 'clinic-1' stands in the roster with its own key" in said.stdout
    assert "1 of a sum may work with the server, 2 must not; 0 may be missing from a round" in said.stdout


def test_check_finds_a_helpers_file_in_order(federation):
    said = murmurfl("check", helper_file(federation))
    assert said.exit_code == 0, said.output
    assert "WRONG" not in said.stdout
    assert said.stdout.count("in order") == 3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"roster_digest": "00" * 32}, "and roster-digest pins 0000"),
        ({"roster": "none.json"}, "No such file"),
        ({"signing_key": "clinic-0"}, "somebody exchanged your card"),
        ({"signing_key": "none"}, "got no file. Make one with `murmurfl roster key`"),
        ({"signing_key": "auditor"}, "Expected a machine's key"),
        ({"machine": "clinic-9"}, "the roster has no machine 'clinic-9', so the node does not start"),
        ({"machine": "auditor"}, "the roster has a helper of the name 'auditor', no machine"),
        ({"min_cohort": 4}, "the roster has 3 machines, so the node does not start: no sum could ever be opened"),
    ],
)
def test_check_says_what_is_wrong_with_a_machines_file_and_what_that_does(federation, changes, complaint):
    said = murmurfl("check", machine_file(federation, **changes))
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
    assert murmurfl("key", federation / "mine" / "forged", "--machine", "clinic-1").exit_code == 0
    cards = [federation / f"{name}.card" for name in (*MACHINES, *HELPERS) if name != "clinic-1"]
    (federation / "roster.json").unlink()
    forged = federation / "mine" / "forged.card"
    assert murmurfl("make", *cards, forged, "--out", federation / "roster.json").exit_code == 0
    others = murmurfl("check", machine_file(federation, "clinic-0"))
    owner = murmurfl("check", machine_file(federation, "clinic-1"))
    assert (others.exit_code, owner.exit_code) == (0, 1)
    assert "somebody exchanged your card" in owner.stdout


def test_check_of_a_machine_that_sends_single_releases_says_so(federation):
    settled = dict.fromkeys(("trust", "min_honest", "min_cohort", "roster", "roster_digest", "signing_key"))
    said = murmurfl("check", machine_file(federation, **settled))
    assert said.exit_code == 1
    assert "sends single releases and needs no roster" in said.stdout


def test_check_knows_the_file_of_a_machine_with_a_clientapp_of_its_own(federation):
    values = tomllib.loads(machine_file(federation).read_text())
    kept = ("machine", "ledger", "clip-norm", "mu", "trust", "min-honest", "min-cohort", "roster", "roster-digest")
    own = {key: values[key] for key in (*kept, "signing-key")} | {"app": "package.module:app", "max-participations": 3}
    path = federation / "own.toml"
    path.write_text(toml_document(own))
    said = murmurfl("check", path)
    assert said.exit_code == 0, said.output
    assert said.stdout.count("in order") == 4
    path.write_text(toml_document({**own, "min-cohort": 4}))
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
    assert "Helper auditor: opens sums of releases of the 3 machines of the roster" in " ".join(said.stdout.split())


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
    with pytest.raises(ConfigurationError, match="it was left alone"):
        card.write(tmp_path / "card")
    with pytest.raises(ConfigurationError, match="Expected to write a card"):
        card.write(Path(tmp_path / "none" / "card"))


@pytest.mark.parametrize("name", ["clinic\n0", "clinic-0 ", "x" * 201])
@pytest.mark.parametrize("kind", ["machine", "helper"])
def test_a_name_that_no_roster_can_have_gets_no_key(kind, name, tmp_path):
    record = ("--record", tmp_path / "r.sqlite") if kind == "helper" else ()
    said = murmurfl("key", tmp_path / "it.key", f"--{kind}", name, *record)
    assert said.exit_code == 1
    assert "Expected names of 1 to" in said.stderr
    assert not list(tmp_path.iterdir())


def test_no_private_key_is_called_as_cards_are_which_people_send_each_other(tmp_path):
    said = murmurfl("key", tmp_path / "clinic.card", "--machine", "clinic")
    assert said.exit_code == 1
    assert "Expected a private key's file not to end in .card" in said.stderr
    assert not list(tmp_path.iterdir())


def test_a_digest_may_be_pinned_as_it_was_heard_and_nothing_else_is_one(federation):
    digest = read_roster(federation / "roster.json", None).digest
    said = murmurfl("show", federation / "roster.json").stdout
    heard = " ".join(digest[i : i + 4] for i in range(0, 64, 4))
    assert heard in said
    for same in (heard, digest.upper()):
        assert murmurfl("check", machine_file(federation, roster_digest=same)).exit_code == 0
    for other in (digest[:-1], digest + "0", "DIGEST", f"{'0' if digest[0] != '0' else '1'}{digest[1:]}"):
        assert murmurfl("check", machine_file(federation, roster_digest=other)).exit_code == 1
        with pytest.raises(ConfigurationError, match=r"roster-digest to be 64|Expected the roster with digest"):
            read_roster(federation / "roster.json", other)


def test_a_machines_file_at_a_helper_and_a_misspelt_key_are_told(federation):
    given = murmurfl(machine_file(federation), "--check", command="helper")
    assert "this is a machine's file, for `murmurfl node`" in given.stderr
    given = murmurfl(helper_file(federation), "--check", command="node")
    assert "this is a helper's file, for `murmurfl helper`" in given.stderr
    assert "perhaps singing-key for signing-key" in murmurfl("check", machine_file(federation, singing_key="x")).stderr
