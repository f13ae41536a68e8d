"""``murmurfl federation`` as it is typed, but for what needs a server: that is in tests/deployment."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.common.serde import user_config_to_proto
from murmurfl.app import simulate
from murmurfl.app.commands.main import cli
from murmurfl.app.nodes.federation.coordinator import Federation
from murmurfl.app.nodes.federation.member import Member
from murmurfl.app.runs.result import write_record
from typer.testing import CliRunner

from tests.harness.schemas import write_samples

NEW = ["new", "ours", "--machines", "2", "--helpers", "1", "--schema", "schema.toml", "--address", "localhost:1"]
MEMBERS = ("machine-1", "machine-2", "helper-1")


def invoke(*arguments, code=0):
    result = CliRunner().invoke(cli, ["federation", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder in which a federation was made and everybody has joined."""
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path, [[0.0] * 3] * 4, [0, 1, 0, 1])
    assert "kits" in invoke(*NEW, "--set", "mu=1.5", "--set", "min-cohort=2")
    for name in MEMBERS:
        said = invoke("join", f"ours/kits/{name}.kit")
        assert "which stay here" in said
        assert ("mu = 1.5 if one helper and 2 machines" in said) == ("and mu = 2.122 whatever" in said)
        assert ("mu = 1.5" in said) == name.startswith("machine")
    return tmp_path


def test_accepting_says_the_digest_and_who_is_missing(here):
    assert "none yet" in invoke("accept", "machine-1/machine-1.answer")
    assert "awaited" in invoke("status", "ours")
    said = invoke("accept", *(f"{name}/{name}.answer" for name in MEMBERS[1:]), "--in", "ours")
    digest = Federation.read(here / "ours" / "federation.json").digest
    assert f"digest    {digest}" in said
    assert "awaited" not in invoke("status", "ours")


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


def test_the_coordinators_status_says_what_its_runs_took_of_each_machine(here, monkeypatch):
    invoke("accept", *(f"{name}/{name}.answer" for name in MEMBERS), "--in", "ours")
    monkeypatch.setattr("murmurfl.app.nodes.servers.control_api.Control", Control)
    assert "spent" not in invoke("status", "ours")
    result = simulate(num_clients=2, clients_per_round=2, num_rounds=1, batch_size=8, training_samples=100)
    for name, said in (("first", {"machine-1": 1.5, "machine-2": None}), ("second", {"machine-1": 2.0})):
        write_record(result, here / name)
        document = json.loads((here / name / "result.json").read_text())
        document["machines"] = {machine: {"mu-guaranteed": mu, "mu-budget": 4.0} for machine, mu in said.items()}
        (here / name / "result.json").write_text(json.dumps(document))
    monkeypatch.setenv("COLUMNS", "200")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in invoke("status", "ours").splitlines()]
    found = {row[0]: row[-2:] for row in rows if row}
    assert found["machine-1"] == ["2", "mu 2.5 of 4"]
    assert found["machine-2"] == ["1", ""], "a machine that trusted its server guarantees nothing by itself"
    assert found["helper-1"] == ["", ""]


def test_a_member_does_not_start_without_a_server_or_a_digest(here):
    said = invoke("start", "machine-1", "--digest", "0" * 64, code=1)
    assert "Expected the federation's server at localhost:1" in said
    assert not (here / "machine-1" / "ledger.sqlite").exists()
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
    assert "send it to the coordinator" in invoke("renew", "machine-2")
    invoke("accept", "machine-2/machine-2.answer")
    assert json.loads((here / "ours" / "members.json").read_text())["left"] == [before["members"][1]["node"]]
    assert "it keeps its ledger" in invoke("leave", "machine-2", "--in", "ours")
    assert "for a year" in invoke("renew", "ours")
    assert "Expected a member's name" in invoke("leave", "nobody", "--in", "ours", code=1)


def test_only_a_run_that_goes_on_is_asked_to_end(here):
    assert "OUT-DIR/RUN-NAME" in invoke("end", "ours", code=1)
    (here / "run").mkdir()
    (here / "run" / "checkpoint.npz").touch()
    assert "ends after its round" in invoke("end", "run")
    assert (here / "run" / "end").exists()


def test_a_check_and_a_status_make_no_ledger_and_say_what_is_not_there(here, monkeypatch):
    invoke("accept", *(f"{name}/{name}.answer" for name in MEMBERS))
    federation = Federation.read(here / "ours" / "federation.json")
    with monkeypatch.context() as patch:
        patch.setattr(Member, "published", lambda self: federation)
        invoke("start", "machine-1", "--check", "--digest", federation.digest, code=1)
    file = here / "machine-1" / "node.toml"
    file.write_text(file.read_text().replace("rows = 0", "rows = 4"))
    shown = " ".join(invoke("status", "machine-1", code=1).split())
    assert "Expected the federation's server at localhost:1" in shown
    assert "the first start makes the ledger" in shown
    assert not (here / "machine-1" / "ledger.sqlite").exists()
    assert not (here / "machine-1" / "ledger.made").exists()
    changed = Federation(federation.terms, None)
    monkeypatch.setattr(Member, "published", lambda self: changed)
    assert f"the server publishes {changed.digest}" in " ".join(invoke("status", "machine-1", code=1).split())
