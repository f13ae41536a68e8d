"""Members and coordinators by themselves: what each refuses, and that nothing but public halves leaves a member.

The page with real processes is in tests/deployment/test_federation_page.py.
"""

import json
import os
import re
import shutil
import socket
from dataclasses import replace

import numpy as np
import pytest
from cryptography import x509
from flwr.common.config import parse_config_args
from murmurfl.app import load_model
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.fleet.federation.coordinator import (
    LARGEST_DOCUMENT,
    MOST_MEMBERS,
    Coordinator,
    Federation,
    Invitation,
    JoinRequest,
    Terms,
    looks_of,
    new_federation,
    write_document,
)
from murmurfl.app.fleet.federation.keys_and_cards import Card
from murmurfl.app.fleet.federation.member import Member, join, without_noise
from murmurfl.app.fleet.federation.proposal import SETTINGS, with_counts
from murmurfl.app.fleet.preflight import check_operators_file
from murmurfl.app.fleet.servers.gate import SuperLinkOptions
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.outcome import Outcome
from murmurfl.app.runs.run_summary import summary_lines
from murmurfl.app.server_app import _run
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import Column, Label, Schema, numpy_client_app
from murmurfl.clients.records.drafting import document as schema_text
from murmurfl.privacy import ClientKey, ConfigurationError, protocol, read_ledger

from tests.harness.errors import raises
from tests.harness.schemas import write_samples, write_table

FEATURES = 4
PLACES = ("client-1", "client-2", "client-3", "helper-1", "helper-2")


@pytest.fixture
def coordinator(tmp_path):
    write_samples(tmp_path, [[0.0] * FEATURES] * 4, [0, 1, 0, 1])
    return made(tmp_path / "ours", tmp_path / "schema.toml")


def made(folder, schema, *, helpers=2, **settings):
    """A federation whose method is named: to choose one takes seconds."""
    settings = {"strategy": "full-batch", "num-rounds": 4, **settings}
    whole = {"clients": 3, "helpers": helpers, "schema": schema, "address": "localhost:8000", "num_records": 40}
    return new_federation(folder, **whole, settings=settings)


@pytest.fixture
def members(coordinator, tmp_path):
    kits = {name: Invitation.read(coordinator.folder / "kits" / f"{name}.kit") for name in PLACES}
    return {name: join(kit, tmp_path / name) for name, kit in kits.items()}


def accepted(coordinator, members):
    return coordinator.accept([JoinRequest.read(member.answer) for member in members.values()])


def test_all_who_joined_stand_in_the_roster_and_pin_one_digest(coordinator, members):
    assert coordinator.awaited == PLACES
    federation = accepted(coordinator, members).federation
    assert set(federation.roster.clients) == {"client-1", "client-2", "client-3"}
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
    member = members["client-1"]
    federation = accepted(coordinator, members).federation
    member.pin(federation, federation.digest)
    with raises(ConfigurationError, "conflict", "num-records"):
        member.make_ledger()
    fill(member, budget=0.0)
    with raises(ConfigurationError, "missing", match="Expected budget-mu and budget-local-mu"):
        member.make_ledger()
    fill(member, budget=4.0)
    assert member.make_ledger()
    summary = read_ledger(member.folder / "ledger.sqlite")
    assert summary.budget.mus == (4.0, 6.0)
    assert not member.make_ledger()


def fill(member, budget):
    text = member.file.read_text()
    for name, value in {"num-records": 40, "budget-mu": budget, "budget-local-mu": 1.5 * budget}.items():
        text = "\n".join(f"{name} = {value}" if line.startswith(f"{name} =") else line for line in text.split("\n"))
    member.file.write_text(text)


def test_a_ledger_that_was_made_and_is_gone_is_never_made_again(coordinator, members):
    member = members["client-1"]
    federation = accepted(coordinator, members).federation
    member.pin(federation, federation.digest)
    fill(member, budget=4.0)
    member.make_ledger()
    (member.folder / "ledger.sqlite").unlink()
    with raises(ConfigurationError, "not-found", "ledger"):
        member.make_ledger()


def test_a_digest_that_the_operator_did_not_compare_changes_nothing(coordinator, members):
    member = members["client-1"]
    before = {path: path.read_bytes() for path in member.folder.iterdir()}
    with raises(ConfigurationError, "mismatch", "digest"):
        member.pin(accepted(coordinator, members).federation, "0" * 64)
    assert {path: path.read_bytes() for path in member.folder.iterdir()} == before


def test_an_exchanged_key_is_noticed_by_its_owner_and_by_the_digest(coordinator, members):
    honest = accepted(coordinator, members).federation
    answer = JoinRequest.read(members["client-1"].answer)
    false = JoinRequest(answer.federation, answer.terms, answer.node, Card.of_client("client-1", ClientKey.generate()))
    planted = coordinator.accept([false, *(JoinRequest.read(members[name].answer) for name in PLACES[1:])]).federation
    with raises(ConfigurationError, "mismatch", match="somebody exchanged it"):
        members["client-1"].pin(planted, planted.digest)
    assert planted.digest != honest.digest
    members["client-2"].pin(planted, planted.digest)  # alone it cannot tell: that is what the digest is compared for


def test_a_member_that_was_left_out_or_has_another_kit_does_not_start(coordinator, members, tmp_path):
    some = {name: member for name, member in members.items() if name != "client-3"}
    federation = accepted(coordinator, some).federation
    with raises(ConfigurationError, "missing", match="a document without it"):
        members["client-3"].pin(federation, federation.digest)
    other = made(tmp_path / "other", tmp_path / "schema.toml", mu=9.0)
    with raises(ConfigurationError, "mismatch", match="terms of this member's kit"):
        members["client-1"].check(other.federation)
    with raises(ConfigurationError, "mismatch", "answers"):
        other.accept([JoinRequest.read(members["client-1"].answer)])


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "settings",
    [
        {"samples": "/etc/passwd"},
        {"roster-digest": "0" * 64},
        {"model": "package.module:Model"},
        {"clip-norm": "wide"},
        {"clip-norm": -1.0},
        {"trust.min-cohort": 1, "trust.min-honest": 2},
        {"strategy": "nobody's"},
        {"mechanism": "none"},
    ],
)
def test_a_kit_proposes_settings_and_no_path_no_code_and_nothing_impossible(settings, coordinator):
    document = json.loads((coordinator.folder / "kits" / "client-1.kit").read_text())
    document["terms"]["settings"] |= settings
    with pytest.raises(ConfigurationError):
        Terms.from_document(document["terms"])


def test_code_that_is_installed_here_is_not_run_because_a_kit_names_it(coordinator):
    """Refused for being a name of code, before anything of that name is looked for."""
    document = json.loads((coordinator.folder / "kits" / "client-1.kit").read_text())
    document["terms"]["settings"]["model"] = "json:loads"
    with raises(ConfigurationError, "unknown-name", "settings", match="and built-in names, got 'model'"):
        Terms.from_document(document["terms"])


def test_no_setting_that_a_federation_may_propose_is_a_file():
    known = NodeConfig.settings()
    assert set(SETTINGS) <= set(known)
    assert not any(known[name].file for name in SETTINGS)


@pytest.mark.parametrize("change", [lambda d: d.pop("terms"), lambda d: d.update(role="owner"), lambda d: d.clear()])
def test_what_is_no_kit_is_refused_and_makes_no_folder(change, coordinator, tmp_path):
    document = json.loads((coordinator.folder / "kits" / "client-1.kit").read_text())
    change(document)
    (tmp_path / "bad.kit").write_text(json.dumps(document))
    with pytest.raises(ConfigurationError):
        join(Invitation.read(tmp_path / "bad.kit"), tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_joining_again_and_two_answers_of_one_name_are_refused(coordinator, members):
    with raises(ConfigurationError, "exists", match="federation renew"):
        join(members["client-1"].kit, members["client-1"].folder)
    answer = JoinRequest.read(members["client-1"].answer)
    with raises(ConfigurationError, "duplicate", "answers"):
        coordinator.accept([answer, answer])


def test_a_copied_node_key_is_refused(coordinator, members):
    first, second = (JoinRequest.read(members[name].answer) for name in ("client-1", "client-2"))
    with raises(ConfigurationError, "duplicate", "members"):
        coordinator.accept([first, JoinRequest(second.federation, second.terms, first.node, second.card)])


def test_renewed_keys_are_new_and_a_helper_has_a_new_record(coordinator, members):
    grown = accepted(coordinator, members)
    digest = grown.federation.digest
    for name in ("client-1", "helper-1"):
        member, answer = members[name], JoinRequest.read(members[name].answer)
        record = member.folder / "openings.sqlite"
        before = record.read_bytes() if record.exists() else b""
        old = member.renew()
        assert all(path.exists() for path in old)
        assert member.pinned is None
        now = JoinRequest.read(member.answer)
        assert now.card != answer.card
        assert now.node != answer.node
        assert not before or record.read_bytes() != before
        grown = grown.accept([now])
        assert answer.node in grown.left  # its node is unregistered
        assert grown.federation.digest != digest
        member.pin(grown.federation, grown.federation.digest)


def test_who_leaves_is_in_no_roster_and_too_few_make_none(coordinator, members):
    grown = accepted(coordinator, members)
    before = grown.federation.digest
    left = grown.leave("client-3")
    assert left.federation.digest != before
    assert "client-3" not in left.federation.roster.clients
    assert JoinRequest.read(members["client-3"].answer).node in left.left
    with raises(ConfigurationError, "unknown-name", "name"):
        left.leave("client-3")
    assert left.leave("helper-1").leave("helper-2").federation.roster is None


def test_a_member_that_left_comes_back_with_new_keys_only(coordinator, members):
    """Flower's server registers no key twice: the one that left would hold up its registration for ever."""
    left = accepted(coordinator, members).leave("client-3")
    before = {path: path.read_bytes() for path in coordinator.folder.rglob("*") if path.is_file()}
    with raises(ConfigurationError, "duplicate", "answers"):
        left.accept([JoinRequest.read(members[name].answer) for name in ("client-2", "client-3")])
    assert {path: path.read_bytes() for path in coordinator.folder.rglob("*") if path.is_file()} == before
    gone = JoinRequest.read(members["client-3"].answer).node
    members["client-3"].renew()
    again = left.accept([JoinRequest.read(members["client-3"].answer)])
    assert "client-3" in again.federation.roster.clients
    assert again.left == (gone,)


def test_without_helpers_the_digest_covers_every_key_and_a_new_key_is_announced(coordinator, tmp_path):
    plain = made(tmp_path / "plain", tmp_path / "schema.toml", helpers=0)
    for place in ("mine", "thiefs"):
        (tmp_path / place).mkdir()
    kits = {name: Invitation.read(plain.folder / "kits" / f"{name}.kit") for name in PLACES[:3]}
    mine = {name: join(kit, tmp_path / "mine" / name) for name, kit in kits.items()}
    honest = accepted(plain, mine)
    digest = honest.federation.digest
    assert honest.changes == ()
    mine["client-1"].pin(honest.federation, digest)
    thief = join(kits["client-2"], tmp_path / "thiefs" / "client-2")
    planted = honest.accept([JoinRequest.read(thief.answer)])
    assert planted.federation.digest != digest
    (said,) = planted.changes
    assert "client-2" in said
    assert mine["client-2"].joining().fingerprint in said
    assert thief.joining().fingerprint in said
    assert "compare the digest again" in said
    with raises(ConfigurationError, "mismatch", match="somebody exchanged it"):
        mine["client-2"].pin(planted.federation, planted.federation.digest)


@pytest.mark.parametrize("exchanged", ["node", "card"])
def test_each_of_a_members_keys_is_in_the_digest_and_in_its_fingerprint(exchanged, coordinator, members):
    grown, own = accepted(coordinator, members), JoinRequest.read(members["client-1"].answer)
    members["client-1"].renew()
    other = JoinRequest.read(members["client-1"].answer)
    mixed = replace(own, **{exchanged: getattr(other, exchanged)})
    assert mixed.fingerprint not in (own.fingerprint, other.fingerprint)
    before = grown.federation.digest
    assert grown.accept([mixed]).federation.digest != before


def test_the_document_of_the_largest_federation_is_short_enough_to_be_read(coordinator, members):
    largest = max(len(json.dumps(JoinRequest.read(member.answer).document, indent=1)) for member in members.values())
    longest_names = 2 * protocol.LONGEST_CLIENT_NAME
    assert (largest + longest_names + 20) * MOST_MEMBERS < LARGEST_DOCUMENT - (1 << 20)


def test_run_settings_name_the_schema_and_the_method_that_members_have(coordinator, members):
    """A ServerApp reads them as they stand: it needs no module of anybody's, and no table."""
    config = run_config(coordinator)
    assert config.task == str(coordinator.folder / "schema.toml")
    assert (config.num_clients, config.num_rounds, config.training_samples) == (3, 4, 120)
    node = NodeConfig.from_mapping(coordinator.federation.terms.node_values("client-1", "0" * 64))
    experiment = prepare(config, deployed=True)
    assert (node.strategy, node.model, node.mu) == (config.strategy, config.model, config.mu)
    assert node.max_participations == experiment.num_rounds
    assert node.private_evaluation == config.private_evaluation > 0
    assert node.sums == config.sums
    assert experiment.evaluate(experiment.initial_arrays()) is None
    with raises(ConfigurationError, "conflict", "task"):
        prepare(config)


def run_config(coordinator):
    """The run settings as `flwr run -c` reads them."""
    return RunConfig.from_mapping(parse_config_args([(coordinator.folder / "run.settings").read_text()]))


class Clients(InProcessGrid):
    """The nodes of members that have started, without processes."""

    def __init__(self, members):
        clients = [NodeConfig.read(member.file).make_client() for member in members]
        super().__init__(
            numpy_client_app(lambda context: clients[context.node_config["partition-id"]]), len(clients), {}
        )


def ready(coordinator, folder, write, count):
    """Members whose operators have joined, pinned and made a ledger, with tables of so many rows."""
    members = []
    for number, name in enumerate(PLACES[:3], 1):
        members.append(join(Invitation.read(coordinator.folder / "kits" / f"{name}.kit"), folder / name))
        write(number, folder / name)
        text = members[-1].file.read_text()
        for line in ('samples = "patients.csv"', f"num-records = {count}", "budget-mu = 6.0"):
            text = re.sub(rf"(?m)^{line.split()[0]} = .*$", line, text)
        members[-1].file.write_text(text)
    digest = accepted(coordinator, dict(zip(PLACES, members, strict=False))).federation.digest
    for member in members:
        member.pin(coordinator.federation, digest)
        assert member.make_ledger()
    return members


def rows_of(number, count):
    """Rows of a client: a label by the sign of their first value, which is never near 0."""
    random = np.random.Generator(np.random.Philox(key=number))
    rows = random.uniform(-1, 1, (count, FEATURES))
    rows[:, 0] = np.copysign(np.abs(rows[:, 0]) / 2 + 0.5, rows[:, 0])
    return rows, (rows[:, 0] > 0).astype(int)


def test_run_settings_train_the_members_tables_on_a_server_that_knows_the_schema_alone(tmp_path):
    """Keys and noise are the operating system's: in 20 runs all 400 rows were right, the evaluation had 0.98 to 1."""
    write_table(tmp_path, *rows_of(0, 4))
    plain = made(tmp_path / "plain", tmp_path / "schema.toml", helpers=0, mu=6.0, **{"num-rounds": 8})
    members = ready(plain, tmp_path, lambda number, folder: write_table(folder, *rows_of(number, 100)), 100)
    _run(Clients(members), run_config(plain), tmp_path / "first", deployed=True)
    outcome = Outcome.read(tmp_path / "first")
    assert (outcome.mu, outcome.rounds, outcome.aggregated) == (pytest.approx(6.0), 8, 24)
    assert (outcome.accuracy, outcome.loss) == (None, None), "the server has no records"
    assert outcome.private_evaluation.accuracy > 0.7
    assert "none: the server has no records" in "\n".join(summary_lines(outcome, tmp_path))
    rows, labels = rows_of(9, 400)
    names = [f"x{i}" for i in range(FEATURES)]
    found = load_model(tmp_path / "first").predict([dict(zip(names, row, strict=True)) for row in rows.tolist()])
    assert np.mean(found == labels) > 0.9
    card = (tmp_path / "first" / "model" / "CARD.md").read_text()
    assert str(tmp_path) not in card
    assert "the guarantee holds" in card


def test_a_federation_for_numbers_has_an_additive_model_or_is_refused_with_what_trains_on_them(tmp_path):
    """Noise is the operating system's: in 12 runs the R2 on rows of nobody was 0.993 to 0.996."""
    schema = Schema(
        columns={"x": Column(kind="number", bounds=(-1, 1))}, label=Label(column="y", bounds=(0, 99)), reviewed=True
    )
    (tmp_path / "schema.toml").write_text(schema_text(schema))
    with raises(ConfigurationError, "unsupported", "schema", match="murmurfl fit"):
        made(tmp_path / "bad", tmp_path / "schema.toml", model="ridge")
    assert not (tmp_path / "bad").exists()
    plain = made(tmp_path / "plain", tmp_path / "schema.toml", helpers=0, mu=6.0, **{"num-rounds": 24})

    def table(number, folder):
        xs = np.random.Generator(np.random.Philox(key=number)).uniform(-1, 1, 300)
        (folder / "patients.csv").write_text("\n".join(["x,y", *(f"{x},{abs(x) * 30:.3f}" for x in xs)]) + "\n")
        (folder / "patients.csv").chmod(0o600)

    members = ready(plain, tmp_path, table, 300)
    config = RunConfig.from_mapping({**run_config(plain).to_mapping(), "training-samples": 900})
    _run(Clients(members), config, tmp_path / "first", deployed=True)
    new = np.linspace(-1, 1, 101)
    found = load_model(tmp_path / "first").predict([{"x": float(x)} for x in new])
    truth = np.abs(new) * 30
    assert 1 - np.mean((found - truth) ** 2) / np.var(truth) > 0.9


def test_what_an_operator_writes_into_run_settings_survives_accept_and_leave(coordinator, tmp_path):
    """Without sums: with them, two clients would be fewer than min-cohort."""
    plain = made(tmp_path / "plain", tmp_path / "schema.toml", helpers=0)
    kits = {name: Invitation.read(plain.folder / "kits" / f"{name}.kit") for name in PLACES[:3]}
    (tmp_path / "theirs").mkdir()
    members = {name: join(kit, tmp_path / "theirs" / name) for name, kit in kits.items()}
    path = plain.folder / "run.settings"
    text = path.read_text().replace("clients-per-round=3", "clients-per-round=2")
    path.write_text(
        "# agreed on the telephone\n" + text.replace("num-rounds=4", "num-rounds=3") + "strategy.momentum=0.5\n"
    )
    some = accepted(plain, {name: members[name] for name in PLACES[:2]})
    assert run_config(some).num_clients == 2
    assert any("num-clients = 2, was 3" in line for line in some.changes)
    grown = some.accept([JoinRequest.read(members["client-3"].answer)]).leave("client-1")
    config = run_config(grown)
    assert (config.num_clients, config.clients_per_round, config.training_samples) == (2, 2, 80)
    assert (config.num_rounds, config.momentum) == (3, 0.5)
    assert path.read_text().startswith("# agreed on the telephone\n")
    path.unlink()
    assert "is not there" in grown.leave("client-2").changes[-1]


def test_counts_that_an_operator_changed_or_took_out_stay_so():
    before, now = (
        {"num-clients": 5, "clients-per-round": 5, "trust.helpers": 2},
        {"num-clients": 4, "clients-per-round": 4},
    )
    text, said = with_counts(
        'num-clients=5\nclients-per-round=3\ntrust.helpers=2\nrun-name="num-clients=5"\n', before, now
    )
    assert text == 'num-clients=4\nclients-per-round=3\nrun-name="num-clients=5"\n'
    assert said == [
        "num-clients = 4, was 5",
        "clients-per-round = 3 stays, as you set it; by the members it would be 4",
        "trust.helpers is gone",
    ]
    assert with_counts("clients-per-round=5\n", before, now)[0] == "clients-per-round=4\n"
    assert with_counts("", {}, {"trust.helpers": 1})[0].strip() == "trust.helpers=1"


@pytest.mark.parametrize("key", ["task", "num-clients", "training-samples"])
def test_settings_that_schema_and_members_decide_are_not_proposed(key, coordinator, tmp_path):
    with raises(ConfigurationError, "conflict", "settings"):
        made(tmp_path / "other", tmp_path / "schema.toml", **{key: 7})


@pytest.mark.parametrize(
    "setting", [{"batch-selection": "shuffled"}, {"samples-per-owner": 2}, {"features": "strokes"}]
)
def test_a_setting_that_clients_would_not_get_is_refused(setting, coordinator, tmp_path):
    """The run would expect of them what their files do not say."""
    with raises(ConfigurationError, "unknown-name", "settings"):
        made(tmp_path / "other", tmp_path / "schema.toml", **setting)


@pytest.mark.parametrize("strategy", ["mu2", "trusted-mu2", "full-batch", "noisy-sgd", "one-shot"])
def test_members_get_all_that_a_method_needs_of_them(strategy, coordinator, tmp_path):
    rounds = 1 if strategy == "one-shot" else 4
    settings = {"strategy": strategy, "num-rounds": rounds, "clipping": "" if strategy == "one-shot" else "automatic"}
    plain = made(tmp_path / "other", tmp_path / "schema.toml", helpers=0, **settings)
    terms = plain.federation.terms
    node = NodeConfig.from_mapping(terms.node_values("client-1", "0" * 64))
    ours, config = prepare(run_config(plain), deployed=True), run_config(plain)
    theirs, expected = node.proposed_policy(terms.records), ours.policy()
    for name in ("clipping", "clip_unit", "batch_size", "max_participations", "mechanism", "trust"):
        assert getattr(theirs, name) == getattr(expected, name), name
    assert (theirs.clip_norm, theirs.mu) == pytest.approx((expected.clip_norm, expected.mu), rel=1e-5)
    assert node.private_evaluation == config.private_evaluation


def test_a_schema_that_was_changed_since_is_refused_by_its_name(coordinator):
    path = coordinator.folder / "schema.toml"
    path.write_text(path.read_text().replace("10", "11"))
    with raises(ConfigurationError, "mismatch", "schema"):
        run_config(coordinator)


QUIET = {"strategy": "trusted-mu2", "trust": "trusted-server", "clip-norm": 1.0, "batch-size": 4, "mu": 2.0}
LOUD = {"strategy": "mu2", "clip-norm": 1.0, "batch-size": 4, "delta": 1e-5, "max-participations": 4}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({**QUIET, "max-participations": 4, "delta": 1e-5}, "NO NOISE"),
        ({"strategy": "trusted-mu2", "clip-norm": 1.0, "batch-size": 4, "mu": 2.0, "delta": 1e-5}, "NO NOISE"),
        ({**LOUD, "mu": 7.0}, "HARDLY ANY NOISE"),
        ({**LOUD, "mu": 6.0}, ""),
        ({**LOUD, "mu": 2.0}, ""),
    ],
)
def test_a_kit_without_noise_is_joined_on_its_operators_word_alone(settings, expected, coordinator, tmp_path):
    """Also one that names a method of a trusted server and nothing else: the policy decides, no name of a setting."""
    plain = made(tmp_path / "plain", tmp_path / "schema.toml", helpers=0)
    document = json.loads((plain.folder / "kits" / "client-1.kit").read_text())
    document["terms"]["settings"] = settings
    (tmp_path / "quiet.kit").write_text(json.dumps(document))
    kit = Invitation.read(tmp_path / "quiet.kit")
    assert without_noise(kit).startswith(expected)
    assert bool(without_noise(kit)) == bool(expected)
    if expected:
        with raises(ConfigurationError, "conflict", "accept_no_noise"):
            join(kit, tmp_path / "joined")
        assert not (tmp_path / "joined").exists()
    join(kit, tmp_path / "joined", accept_no_noise=bool(expected))
    helper = Invitation("helper-1", "helper", kit.terms)
    assert not without_noise(helper)


@pytest.mark.parametrize("name", ["m\u0430chine-1", "client-\uff11", "Ma\u0308rz", "-x", "a b", ""])
def test_names_with_letters_of_other_alphabets_are_refused(name, coordinator):
    kit = Invitation.read(coordinator.folder / "kits" / "client-1.kit")
    with pytest.raises(ConfigurationError):
        Invitation(name, kit.role, kit.terms)


@pytest.mark.parametrize("name", ["Client-2", "client_2", "c1ient-2", "cllent-2"])
def test_a_name_that_is_easily_taken_for_another_members_is_refused(name, coordinator, members, tmp_path):
    grown = accepted(coordinator, members)
    like = join(Invitation(name, "client", members["client-1"].terms), tmp_path / "like")
    with raises(ConfigurationError, "duplicate", "name"):
        grown.accept([JoinRequest.read(like.answer)])


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("host", "listens"),
    [
        ("[::1]", "::1"),
        ("[::]", "::"),
        ("[2001:db8::7]", "::"),
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("10.1.2.3", "0.0.0.0"),
        ("no-such-host.invalid", "0.0.0.0"),
    ],
)
def test_a_server_listens_where_its_members_reach_it(host, listens, coordinator, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    terms = replace(coordinator.federation.terms, address=f"{host}:{port}")
    moved = replace(coordinator, folder=tmp_path / "moved")
    moved.folder.mkdir()
    write_document(moved.folder / "federation.json", Federation(terms, ()).document)
    options = SuperLinkOptions.read(moved.server_options())
    assert (options.host, options.port) == (listens, port)
    kind = socket.AF_INET6 if ":" in listens else socket.AF_INET
    if kind == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("this computer has no IPv6")
    with socket.create_server((options.host, port), family=kind) as server:
        reached = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(listens, listens)
        with socket.create_connection((reached, port), 5.0) as client:
            assert client.getpeername()[0] == reached
        assert options.nearby == (f"[{reached}]:{port}" if ":" in reached else f"{reached}:{port}")
        assert server.getsockname()[0] == listens


def test_a_certificate_is_for_the_address_by_which_this_computer_calls_itself(coordinator):
    (certificate,) = x509.load_pem_x509_certificates((coordinator.folder / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(one) for one in names.get_values_for_type(x509.IPAddress)} >= {"127.0.0.1", "::1"}


def test_a_renewed_certificate_keeps_authority_and_key(coordinator):
    folder = coordinator.folder
    before = {name: (folder / name).read_bytes() for name in ("ca.crt", "server.key", "server.pem")}
    coordinator.renew_certificate()
    after = {name: (folder / name).read_bytes() for name in before}
    assert [name for name in before if before[name] != after[name]] == ["server.pem"]


def test_an_impossible_federation_leaves_no_folder(tmp_path, coordinator):
    for settings in ({"mu": -1.0}, {"trust.min-cohort": 4}, {"trust.min-honest": 3}, {"mechanism": "none"}):
        with pytest.raises(ConfigurationError):
            made(tmp_path / "bad", tmp_path / "schema.toml", **settings)
        assert not (tmp_path / "bad").exists()
    with raises(ConfigurationError, "exists"):
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
    with raises(ConfigurationError, "unreadable", match="murmurfl-kit"):
        Member.open(tmp_path)
    with raises(ConfigurationError, "not-found", "folder"):
        Coordinator.open(tmp_path)
    shutil.rmtree(coordinator.folder / "published")


def test_a_kit_whose_sums_hide_a_client_without_noise_of_its_own_says_so(coordinator):
    """Whoever runs all helpers and the other clients of a sum sees what the client itself added, and that is all."""
    kit = Invitation.read(coordinator.folder / "kits" / "client-1.kit")
    assert not without_noise(kit)
    settings = {**kit.terms.settings, "trust.min-honest": 500, "trust.min-cohort": 502}
    words = without_noise(replace(kit, terms=replace(kit.terms, settings=settings)))
    assert words.startswith("HARDLY ANY NOISE")
    assert "If no helper is honest, or fewer than 500 clients" in words


def test_no_answer_makes_the_document_longer_than_members_read(coordinator, members):
    document = JoinRequest.read(members["client-1"].answer).document
    signing = {**document["card"], "signing": "00" * 10**6}
    huge = ({"federation": "x" * 10**6}, {"node": f"{document['node']} {'x' * 10**6}"}, {"card": signing})
    for changed in huge:
        write_document(members["client-1"].answer, {**document, **changed})
        with pytest.raises(ConfigurationError, match="Expected"):
            JoinRequest.read(members["client-1"].answer)


def test_whoever_got_a_clients_kit_cannot_become_a_helper(coordinator, members):
    own = JoinRequest.read(members["helper-1"].answer)
    answer = replace(own, card=replace(own.card, name="client-1"))
    with raises(ConfigurationError, "mismatch", "answers", match="'client-1' to answer as the client"):
        coordinator.accept([answer])


@pytest.mark.parametrize(("one", "other"), [("rnercy", "mercy"), ("vvest", "west"), ("n0rth", "north")])
def test_letters_that_are_read_as_others_look_like_them(one, other):
    assert looks_of(one) == looks_of(other)


@pytest.mark.parametrize("name", ["cIient-1", "client--1", "client-1-"])
def test_names_that_look_like_a_members_are_refused(name, coordinator, members):
    own = JoinRequest.read(members["client-2"].answer)
    with raises(ConfigurationError, "duplicate", "name"):
        coordinator.accept([replace(own, card=replace(own.card, name=name))])
