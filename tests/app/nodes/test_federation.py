"""Members and coordinators by themselves: what each refuses, and that nothing but public halves leaves a member.

The page with real processes is in tests/deployment/test_federation_page.py.
"""

import json
import os
import shutil

import pytest
from murmurfl.app.nodes.federation.coordinator import (
    SETTINGS,
    Coordinator,
    Federation,
    Joining,
    Kit,
    Terms,
    new_federation,
)
from murmurfl.app.nodes.federation.keys_and_cards import Card
from murmurfl.app.nodes.federation.member import Member, join
from murmurfl.app.nodes.preflight import check_operators_file
from murmurfl.privacy import ConfigurationError, MachineKey, read_ledger

from tests.harness.schemas import write_samples

FEATURES = 4
PLACES = ("machine-1", "machine-2", "machine-3", "helper-1", "helper-2")


@pytest.fixture
def coordinator(tmp_path):
    write_samples(tmp_path, [[0.0] * FEATURES] * 4, [0, 1, 0, 1])
    return made(tmp_path / "ours", tmp_path / "schema.toml")


def made(folder, schema, **settings):
    return new_federation(folder, machines=3, helpers=2, schema=schema, address="localhost:8000", settings=settings)


@pytest.fixture
def members(coordinator, tmp_path):
    kits = {name: Kit.read(coordinator.folder / "kits" / f"{name}.kit") for name in PLACES}
    return {name: join(kit, tmp_path / name) for name, kit in kits.items()}


def accepted(coordinator, members):
    return coordinator.accept([Joining.read(member.answer) for member in members.values()])


def test_all_who_joined_stand_in_the_roster_and_pin_one_digest(coordinator, members):
    assert coordinator.awaited == PLACES
    federation = accepted(coordinator, members).federation
    assert set(federation.roster.machines) == {"machine-1", "machine-2", "machine-3"}
    assert federation.roster.helper_names == ("helper-1", "helper-2")
    assert Coordinator.open(coordinator.folder).awaited == ()
    published = coordinator.folder / "published" / f"{federation.terms.digest}.json"
    assert Federation.read(published).digest == federation.digest
    for member in members.values():
        member.pin(federation, federation.digest.upper())
        assert member.pinned.digest == federation.digest
    findings = list(check_operators_file(members["helper-1"].file))
    assert all(found.right for found in findings)


def test_the_operators_file_is_complete_but_for_data_and_budgets(coordinator, members):
    member = members["machine-1"]
    federation = accepted(coordinator, members).federation
    member.pin(federation, federation.digest)
    with pytest.raises(ConfigurationError, match="rows"):
        member.make_ledger()
    fill(member, budget=0.0)
    with pytest.raises(ConfigurationError, match="Expected budget-mu and budget-local-mu"):
        member.make_ledger()
    fill(member, budget=4.0)
    assert member.make_ledger()
    summary = read_ledger(member.folder / "ledger.sqlite")
    assert (summary.budget_mu, summary.budget_local_mu) == (4.0, 6.0)
    assert not member.make_ledger()


def fill(member, budget):
    text = member.file.read_text()
    for name, value in {"rows": 40, "budget-mu": budget, "budget-local-mu": 1.5 * budget}.items():
        text = "\n".join(f"{name} = {value}" if line.startswith(f"{name} =") else line for line in text.split("\n"))
    member.file.write_text(text)


def test_a_ledger_that_was_made_and_is_gone_is_never_made_again(coordinator, members):
    member = members["machine-1"]
    federation = accepted(coordinator, members).federation
    member.pin(federation, federation.digest)
    fill(member, budget=4.0)
    member.make_ledger()
    (member.folder / "ledger.sqlite").unlink()
    with pytest.raises(ConfigurationError, match="the data are retired"):
        member.make_ledger()


def test_a_digest_that_the_operator_did_not_compare_changes_nothing(coordinator, members):
    member = members["machine-1"]
    before = {path: path.read_bytes() for path in member.folder.iterdir()}
    with pytest.raises(ConfigurationError, match="which this operator compared"):
        member.pin(accepted(coordinator, members).federation, "0" * 64)
    assert {path: path.read_bytes() for path in member.folder.iterdir()} == before


def test_an_exchanged_key_is_noticed_by_its_owner_and_by_the_digest(coordinator, members):
    honest = accepted(coordinator, members).federation
    answer = Joining.read(members["machine-1"].answer)
    false = Joining(answer.federation, answer.terms, answer.node, Card.of_machine("machine-1", MachineKey.generate()))
    planted = coordinator.accept([false, *(Joining.read(members[name].answer) for name in PLACES[1:])]).federation
    with pytest.raises(ConfigurationError, match="somebody exchanged it"):
        members["machine-1"].pin(planted, planted.digest)
    assert planted.digest != honest.digest
    members["machine-2"].pin(planted, planted.digest)  # alone it cannot tell: that is what the digest is compared for


def test_a_member_that_was_left_out_or_has_another_kit_does_not_start(coordinator, members, tmp_path):
    some = {name: member for name, member in members.items() if name != "machine-3"}
    federation = accepted(coordinator, some).federation
    with pytest.raises(ConfigurationError, match="a roster without it"):
        members["machine-3"].pin(federation, federation.digest)
    other = made(tmp_path / "other", tmp_path / "schema.toml", mu=9.0)
    with pytest.raises(ConfigurationError, match="terms of this member's kit"):
        members["machine-1"].check(other.federation)
    with pytest.raises(ConfigurationError, match="Expected an answer to the terms"):
        other.accept([Joining.read(members["machine-1"].answer)])


@pytest.mark.parametrize(
    "settings",
    [
        {"samples": "/etc/passwd"},
        {"roster-digest": "0" * 64},
        {"model": "package.module:Model"},
        {"clip-norm": "wide"},
        {"clip-norm": -1.0},
        {"min-cohort": 1, "min-honest": 2},
        {"strategy": "nobody's"},
        {"mechanism": "none"},
    ],
)
def test_a_kit_proposes_settings_and_no_path_no_code_and_nothing_impossible(settings, coordinator):
    document = json.loads((coordinator.folder / "kits" / "machine-1.kit").read_text())
    document["terms"]["settings"] |= settings
    with pytest.raises(ConfigurationError):
        Terms.from_document(document["terms"])


def test_code_that_is_installed_here_is_not_run_because_a_kit_names_it(coordinator):
    """Refused for being a name of code, before anything of that name is looked for."""
    document = json.loads((coordinator.folder / "kits" / "machine-1.kit").read_text())
    document["terms"]["settings"]["model"] = "json:loads"
    with pytest.raises(ConfigurationError, match="and built-in names, got 'model'"):
        Terms.from_document(document["terms"])


def test_no_setting_that_a_federation_may_propose_is_a_file():
    from murmurfl.app.nodes.node_config import NodeConfig

    known = NodeConfig.settings()
    assert set(SETTINGS) <= set(known)
    assert not any(known[name].file for name in SETTINGS)


@pytest.mark.parametrize("change", [lambda d: d.pop("terms"), lambda d: d.update(role="owner"), lambda d: d.clear()])
def test_what_is_no_kit_is_refused_and_makes_no_folder(change, coordinator, tmp_path):
    document = json.loads((coordinator.folder / "kits" / "machine-1.kit").read_text())
    change(document)
    (tmp_path / "bad.kit").write_text(json.dumps(document))
    with pytest.raises(ConfigurationError):
        join(Kit.read(tmp_path / "bad.kit"), tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_joining_again_and_two_answers_of_one_name_are_refused(coordinator, members):
    with pytest.raises(ConfigurationError, match="federation renew"):
        join(members["machine-1"].kit, members["machine-1"].folder)
    answer = Joining.read(members["machine-1"].answer)
    with pytest.raises(ConfigurationError, match="one answer of each member"):
        coordinator.accept([answer, answer])


def test_a_copied_node_key_is_refused(coordinator, members):
    first, second = (Joining.read(members[name].answer) for name in ("machine-1", "machine-2"))
    with pytest.raises(ConfigurationError, match="a node key of its own"):
        coordinator.accept([first, Joining(second.federation, second.terms, first.node, second.card)])


def test_renewed_keys_are_new_and_a_helper_has_a_new_record(coordinator, members):
    grown = accepted(coordinator, members)
    digest = grown.federation.digest
    for name in ("machine-1", "helper-1"):
        member, answer = members[name], Joining.read(members[name].answer)
        record = member.folder / "openings.sqlite"
        before = record.read_bytes() if record.exists() else b""
        old = member.renew()
        assert all(path.exists() for path in old)
        assert member.pinned is None
        now = Joining.read(member.answer)
        assert now.card != answer.card
        assert now.node != answer.node
        assert not before or record.read_bytes() != before
        grown = grown.accept([now])
        assert answer.node in grown.left  # its node is unregistered
        assert grown.federation.digest != digest
        member.pin(grown.federation, grown.federation.digest)


def test_who_leaves_is_in_no_roster_and_too_few_make_none(coordinator, members):
    grown = accepted(coordinator, members)
    left = grown.leave("machine-3")
    assert "machine-3" not in left.federation.roster.machines
    assert Joining.read(members["machine-3"].answer).node in left.left
    with pytest.raises(ConfigurationError, match="Expected a member's name"):
        left.leave("machine-3")
    assert left.leave("helper-1").leave("helper-2").federation.roster is None
    again = left.accept([Joining.read(members["machine-3"].answer)])
    assert again.left == ()
    assert again.federation.digest == grown.federation.digest


def test_a_renewed_certificate_keeps_authority_and_key(coordinator):
    folder = coordinator.folder
    before = {name: (folder / name).read_bytes() for name in ("ca.crt", "server.key", "server.pem")}
    coordinator.renew_certificate()
    after = {name: (folder / name).read_bytes() for name in before}
    assert [name for name in before if before[name] != after[name]] == ["server.pem"]


def test_an_impossible_federation_leaves_no_folder(tmp_path, coordinator):
    for settings in ({"mu": -1.0}, {"min-cohort": 0}):
        with pytest.raises(ConfigurationError):
            made(tmp_path / "bad", tmp_path / "schema.toml", **settings)
        assert not (tmp_path / "bad").exists()
    with pytest.raises(ConfigurationError, match="Expected to make the folder"):
        made(coordinator.folder, tmp_path / "schema.toml")


CERTIFICATES = {"ca.crt", "server.pem"}
"""Public, and read by processes of other users."""


@pytest.fixture
def careless(request):
    """A user with a umask that lets everybody do everything; asked for before all else."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_every_file_is_its_owners_alone_whatever_the_umask(careless, coordinator, members):
    accepted(coordinator, members)
    places = [coordinator.folder, *(member.folder for member in members.values())]
    found = [place for folder in places for place in (folder, *folder.rglob("*"))]
    assert {"members.json", "published", "run.settings", "member.kit", "roster.key"} <= {path.name for path in found}
    for path in found:
        if path.suffix not in (".pub", ".card") and path.name not in CERTIFICATES:
            assert path.stat().st_mode & 0o077 == 0, path


def test_a_member_opens_only_its_own_folder(coordinator, tmp_path):
    with pytest.raises(ConfigurationError, match="murmurfl-kit"):
        Member.open(tmp_path)
    with pytest.raises(ConfigurationError, match="a coordinator's folder"):
        Coordinator.open(tmp_path)
    shutil.rmtree(coordinator.folder / "published")
