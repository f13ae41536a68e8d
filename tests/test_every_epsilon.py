"""No output shows an epsilon without delta, unit, relation, trust and mechanism: every command and page is walked."""

import csv
import json
import logging
import re
from pathlib import Path

import pytest
import typer
from murmurfl.app import client_app, server_app
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.loopback import toml_document
from murmurfl.app.fleet.deployment import ledger_line
from murmurfl.app.nodes.node_config import configured_client
from murmurfl.app.papers import reproduction as reproduce
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import SQLiteLedger, read_ledger
from typer.testing import CliRunner

from benchmarks import pages

SHOWN = re.compile(r"(?:epsilon|ε)\b[^\n.|]{0,30}?\d", re.IGNORECASE)
SAID = re.compile(
    r"(?:epsilon|ε)[^;]*? at delta = \S+, for replacement of (?:one sample|all samples) of one client, "
    r"against (?:the server and everybody else|everybody but the trusted server)"
    r"(?: if one helper and \d+ clients? of each sum are honest(?:, and [^;]*?(?:in the worst case|are not))?)?"
    r"; [^;]*(?:noise|released)[^;]*; ",
    re.IGNORECASE,
)
RUN = ["run", "--engine", "cohort", "--set", "num-rounds=2", "--set", "mu=1"]


def shows_and_says(text):
    """Whether a text shows an epsilon, and whether it says what it is true of."""
    return bool(SHOWN.search(text)), bool(SAID.search(" ".join(text.split())))


def unexplained(document, said=False):
    """The keys of a JSON document with an epsilon and no sentence beside or above it."""
    if isinstance(document, list):
        return [key for entry in document for key in unexplained(entry, said)]
    if not isinstance(document, dict):
        return []
    said = said or any(isinstance(value, str) and SAID.search(value) for value in document.values())
    told = document.get("guarantee")
    said = said or (isinstance(told, dict) and bool(SAID.search(told["sentence"])))
    found = [key for key, value in document.items() if "epsilon" in key and value is not None and not said]
    return found + [key for value in document.values() for key in unexplained(value, said)]


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A ledger with a node's file, a finished run, and a reproduction that was made before."""
    monkeypatch.chdir(tmp_path)
    configured_client.cache_clear()
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=4.0, delta=1e-5)
    node = {
        "client": "clinic",
        "ledger": "ledger.sqlite",
        "clip-norm": 2.0,
        "batch-size": 32,
        "mu": 2.0,
        "task": "digits",
        "num-partitions": 4,
        "partition-id": 1,
        "max-participations": 4,
    }
    (tmp_path / "node.toml").write_text(toml_document(node))
    (tmp_path / "node.toml").chmod(0o600)
    (tmp_path / "patients.csv").write_text("age,ill\n" + "".join(f"{20 + i},{i % 2}\n" for i in range(60)))
    stored = pages.document("reshef-levy-2024")
    monkeypatch.setattr(reproduce, "run_cells", lambda *_, **__: {k: stored[k] for k in ("cells",)} | _told(stored))
    assert invoke(*RUN, "--name", "made").exit_code == 0
    return tmp_path


def _told(document):
    return {"guarantee": reproduce.table_caption(document)}


def invoke(*arguments):
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


FEW = ["--clients", 4, "--set", "strategy=full-batch", "--set", "num-rounds=3"]
SHOWING = {
    "run": [*RUN, "--name", "x"],
    "list": ["list"],
    "report": ["report", "runs/made"],
    "reproduce": ["reproduce", "reshef-levy-2024"],
    "audit": ["audit", "--runs", "20", "--set", "num-rounds=2"],
    "plan": ["plan", "--clients", 5, "--samples", 20, "--rounds", 4, "--batch", 5, "--epsilon", 2],
    "ledger show": ["ledger", "show", "ledger.sqlite"],
    "ledger create": ["ledger", "create", "new.sqlite", "--epsilon", 2, "--delta", 1e-5],
    "node": ["node", "node.toml", "--check"],
    "statistics": ["statistics", "patients.csv", "--epsilon", 2],
    "fit": ["fit", "patients.csv", "--epsilon", 2, *FEW],
    "try": ["try", "tests.harness.apps.logistic", "--clients", 3, "--rounds", 4],
    "search": ["search", "--learning-rate", "1,2", "--set", "strategy=full-batch", "--set", "num-rounds=2"],
}
SUMMED = ["--set", "trust=secure-aggregation", "--set", "mu=1", "--set", "num-rounds=2"]
SUMS = {
    "run": ["run", "--engine", "cohort", "--name", "sums", *SUMMED],
    "report": ["report", "runs/sums"],
    "audit": ["audit", "--runs", "20", *SUMMED],
    "plan": ["plan", *SUMMED],
    "statistics": ["statistics", "patients.csv", "--clients", 4, "--trust", "secure-aggregation"],
    "fit": ["fit", "patients.csv", "--epsilon", 2, "--trust", "secure-aggregation", *FEW],
}
"""Under secure aggregation an epsilon needs the other one beside it, and what it rests on."""
SECRET = ["--set", "batch-selection=shuffled", "--set", "passes=1", "--set", "mu=1", "--set", "num-rounds=2"]
SECRETS = {
    "run": ["run", "--set", "trust=untrusted-server", "--set", "num-clients=10", "--set", "partition=iid", *SECRET],
    "audit": ["audit", "--runs", "20", *SECRET],
}
"""In a secret order there is a second epsilon: proved with independent noise, and else an estimate."""
BOTH = re.compile(r"clients of each sum are honest, and mu = \S+, epsilon = \S+ in the worst case; ")
AS_JSON = ("fit", "statistics", "list", "reproduce", "audit", "plan", "search", "ledger show")
SILENT = (
    "ledger accept-rollback",
    "ledger new-mark",
    "ledger set-local-budget",
    "ledger rotate-key",
    "helper",
    "server",
)
ABOUT_KEYS = (  # who takes part, who may ask, what a record is and what a model says of one: no figure follows
    *("roster key", "roster make", "roster show", "roster check"),
    *("owner key", "owner permit", "owner public", "owner login", "owner show", "owner bundle"),
    *(
        "federation accept",
        "federation leave",
        "federation renew",
        "federation end",
        "federation exclude",
    ),
    "schema",
    "predict",
    "personalise",
    "curves",
)
NAMING = ("keys", "names")  # what there is, before there is any figure
# The first starts a federation: below, by the lines it prints. `new` and `join` say what a run takes and if whom one
# trusts: tests/app/commands/test_federation_command.py. The last shows mu, and epsilon as `node --check`.
IN_PARTS = ("deploy-demo", "federation new", "federation join", "federation start", "federation status")


def test_every_command_is_walked():
    def leaves(command, name=()):
        if not hasattr(command, "commands"):
            return [" ".join(name)]
        return [leaf for key, child in command.commands.items() for leaf in leaves(child, (*name, key))]

    assert set(leaves(typer.main.get_command(cli))) == {*SHOWING, *SILENT, *ABOUT_KEYS, *NAMING, *IN_PARTS}


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_what_a_plan_says_of_the_updates_of_a_project(trust):
    asked = ["plan", "--unit", "client", "--clients", 20, "--parameters", 50, "--epsilon", 2, "--trust", trust]
    assert shows_and_says(invoke(*asked).output) == (True, True)
    assert not unexplained(json.loads(invoke(*asked, "--json").stdout))


@pytest.mark.long
def test_what_commands_say_of_sums(world):
    for name, arguments in SUMS.items():
        text = invoke(*arguments).output
        if name == "report":
            text = Path("runs/sums/report/index.html").read_text()
        assert shows_and_says(text) == (True, True), (name, text)
        assert BOTH.search(" ".join(text.split())), name
    assert not unexplained(json.loads(Path("runs/sums/result.json").read_text()))
    for name in ("audit", "plan", "statistics", "fit"):
        assert not unexplained(json.loads(invoke(*SUMS[name], "--json").stdout)), name


@pytest.mark.more_cases
@pytest.mark.parametrize(("strategy", "proved"), [("noisy-sgd", True), ("mu2", False)])
def test_what_commands_say_of_a_secret_order(world, strategy, proved):
    for name, arguments in SECRETS.items():
        extra = ["--set", f"strategy={strategy}", *(["--name", "secret"] if name == "run" else ["--json"])]
        text = invoke(*arguments, *extra).output
        document = json.loads(Path("runs/secret/result.json").read_text() if name == "run" else text)
        assert not unexplained(document), name
        told = document["privacy" if name == "run" else "guarantee"]
        assert told["epsilon"] == pytest.approx(4.377, abs=0.01), "the one that holds whoever knows the order"
        assert told["amplified_proved"] is proved, name
        assert 0 < told["epsilon_amplified"] < told["epsilon"]
        assert ("an estimate of epsilon is" in told["sentence"]) is not proved
        assert told["sentence"].endswith("no guarantee. Simulated with seeded keys.") is not proved
    assert json.loads(Path("runs/secret/result.json").read_text())["epsilon"] == pytest.approx(4.377, abs=0.01)


@pytest.mark.long
def test_what_a_plan_says_of_a_secret_order(world):
    given = ["plan", "--clients", 5, "--samples", 20, "--batch", 5, "--mu", 1, "--batch-selection", "shuffled"]
    document = json.loads(invoke(*given, "--json").stdout)
    assert not unexplained(document)
    found = {made["name"]: made for made in document["mechanisms"]}
    assert [one for one, made in found.items() if made["amplified_proved"]] == ["independent"]
    assert found["tree dyadic"]["epsilon_amplified"] is None
    text = invoke(*given).output
    assert shows_and_says(text) == (True, True)
    assert text.count("estimated") == sum(made["amplified_proved"] is False for made in found.values())
    assert "An estimate guarantees nothing" in " ".join(text.split())


@pytest.mark.long
def test_what_commands_print_and_write(world):
    for name, arguments in SHOWING.items():
        text = invoke(*arguments).output
        if name == "report":
            text = Path("runs/made/report/index.html").read_text()
        assert shows_and_says(text) == (True, True), (name, text)
    assert not unexplained(json.loads(Path("runs/x/result.json").read_text()))
    for name in AS_JSON:
        document = json.loads(invoke(*SHOWING[name], "--json").stdout)
        assert "epsilon" in json.dumps(document)
        assert not unexplained(document), name
    (folder,) = Path("runs").glob("reshef-levy-2024")
    assert shows_and_says((folder / "reshef-levy-2024.md").read_text())[1]
    for row in csv.DictReader((folder / "reshef-levy-2024.csv").open()):
        assert SAID.search(row["guarantee"])
    ledger = read_ledger("ledger.sqlite")
    assert shows_and_says(ledger_line("clinic", ledger))[1] or ledger.spent.mu == 0
    for name in SILENT:
        assert not SHOWN.search(CliRunner().invoke(cli, [*name.split(), "ledger.sqlite", "--yes"]).output)
    for name in NAMING:
        assert not SHOWN.search(invoke(name).output)


def test_what_flowers_log_says(tmp_path, caplog):
    config = RunConfig(num_rounds=2, out_dir=str(tmp_path), run_name="x")
    grid = InProcessGrid(client_app.app, config.num_clients, config.to_mapping())
    caplog.set_level(logging.INFO, logger="flwr")
    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        server_app._run(grid, config, tmp_path / "x", deployed=False)
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    lines = caplog.text.splitlines()
    first = next(i for i, line in enumerate(lines) if SHOWN.search(line))
    assert SAID.search(lines[first]), "the sentence comes before the first figure"
    assert any("round 2/2" in line and "epsilon" in line for line in lines)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("page", pages.BLOCKS)
def test_tables_of_the_pages(page):
    for name, write in pages.BLOCKS[page].items():
        text = write()
        shows, says = shows_and_says(text)
        has_column = re.search(r"\| (?:epsilon|ε) \|", text)
        assert says or not (shows or has_column), name


@pytest.mark.parametrize(
    "text",
    [
        "epsilon = 3.1",
        "ε = 3.1 at δ = 1e-5",
        "epsilon = 3.1 at delta = 1e-05, for one sample, against the server and everybody else; tree noise; x",
        "epsilon = 3.1 at delta = 1e-05, for replacement of one sample of one client, against nobody; noise; x",
        "epsilon = 3.1 at delta = 1e-05, for replacement of one sample of one client, against the server and "
        "everybody else.",
    ],
)
def test_an_epsilon_with_a_part_missing_would_be_noticed(text):
    assert shows_and_says(text) == (True, False)
    assert unexplained({"epsilon": 3.1, "guarantee": text}) == ["epsilon"]
