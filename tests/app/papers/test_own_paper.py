"""A paper of the user's own, with a kind of table of its own, from a folder of its own and with no edit elsewhere."""

import csv
import json
import subprocess
import sys

import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.papers import PAPERS, Cell, Paper
from murmurfl.app.papers.accuracy import AccuracyTable
from murmurfl.app.papers.reproduction import plan_runs, plan_validation
from murmurfl.privacy import ConfigurationError
from typer.testing import CliRunner

from tests.harness.errors import raises

OWN = """
from murmurfl.app.papers import Cell, Paper, TableKind
from murmurfl.app.papers.accuracy import AccuracyTable
from murmurfl.app.reports.table import Column, Table

SMALL = {"num-rounds": 2, "num-clients": 4, "clients-per-round": 4, "checkpoint": False, "noise-quality": "fast"}
ALGORITHMS = {"ours": {"strategy": "mu2"}, "theirs": {"strategy": "noisy-sgd"}}


class Falls(TableKind):
    name = "falls"
    sentence = "by how much the loss fell"
    curves_needed = frozenset({"losses"})

    def curves(self, document):
        return {"losses": {"rounds": [1, 2], "values": [entry["loss"] for entry in document["per_round"]]}}

    def entry(self, best, trials, choice):
        first, last = (sum(run["curves"]["losses"]["values"][i] for run in best.runs) for i in (0, -1))
        return {"fall": (first - last) / len(best.runs), "step": best.config.learning_rate, "steps": len(trials)}

    def table(self, document, title=""):
        columns = (Column("of", "whose loss", label=True), Column("fall of the loss", "first less last", "fall", ".3f"))
        rows = [
            {"of": label, "fall": entry["fall"], "epsilon": entry["epsilon"]["mean"]}
            for cell in document["cells"]
            for label, entry in cell["algorithms"].items()
        ]
        return Table(title, columns, rows, document["guarantee"], draw=lambda path: path.write_bytes(b"a picture"))


class Mine(Paper):
    name = "mine-2026"
    sentence = "what we found"
    seeds = 2
    table = Falls()

    def cells(self):
        return [Cell("small", {**SMALL, "mu": 2.0}, ALGORITHMS, steps=(0.05, 0.001))]


class Known(Mine):
    name = "known-2026"
    seeds = 1
    table = AccuracyTable()

    def cells(self):
        return [Cell("small", {**SMALL, "mu": 2.0}, ALGORITHMS, {"ours": {"accuracy": 50.0}})]


PAPER = Mine()
OTHER = "no paper"
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of an importable module with the papers."""
    (tmp_path / "papers_of_ours.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "papers_of_ours", raising=False)
    return "papers_of_ours"


def command(*arguments):
    return CliRunner().invoke(cli, ["reproduce", *arguments], env={"COLUMNS": "160"})


@pytest.mark.long
def test_an_own_paper_with_an_own_kind_of_table_is_reproduced(module, tmp_path):
    result = command(f"{module}:PAPER", "--jobs", "1")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "runs" / "mine-2026"
    document = json.loads((folder / "mine-2026.json").read_text())
    assert (document["reproduction"], document["seeds"]) == ("mine-2026", 2)
    ours = document["cells"][0]["algorithms"]["ours"]
    assert (len(ours["loss"]["runs"]), ours["steps"], ours["step"] in (0.05, 0.001)) == (2, 2, True)
    shown = f"{ours['fall']:.3f}"
    assert shown in result.stdout
    assert "fall of the loss" in result.stdout
    assert document["guarantee"] in " ".join(result.stdout.split())
    assert "2 runs of each" in result.stdout
    assert f"| ours | {shown} |" in (folder / "mine-2026.md").read_text()
    rows = list(csv.DictReader((folder / "mine-2026.csv").open()))
    assert float(rows[0]["fall"]) == ours["fall"]
    assert rows[0]["guarantee"] == document["guarantee"]
    assert (folder / "mine-2026.png").read_bytes() == b"a picture"
    # Of the steps the one of less loss is the result, and all runs were kept: two steps, two seeds, two algorithms.
    assert len(list((folder / "runs").glob("*.json"))) == 8
    assert json.loads(command(f"{module}:Mine", "--json").stdout) == document, "the class, and no run made again"


@pytest.mark.long
def test_an_own_paper_has_the_known_kinds_and_settings(module, tmp_path):
    result = command(f"{module}:Known", "--set", "mu=3", "--jobs", "1", "--out", "here")
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "here" / "known-2026.json").read_text())
    (cell,) = document["cells"]
    assert cell["settings"]["mu"] == 3.0
    assert cell["table"] == "as set"
    assert (tmp_path / "here" / "known-2026.png").read_bytes().startswith(b"\x89PNG")
    assert "| as set | 4 of 4 | 8 | 3 | ours |" in (tmp_path / "here" / "known-2026.md").read_text()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine", "known:"),
        ("zhang-2025-logistics", "did you mean 'zhang-2025-logistic'?"),
        ("papers_of_ours:OTHER", "to be a Paper or a subclass of it, got str"),
        ("papers_of_ours:NONE", "AttributeError"),
        ("no.such.module:PAPER", "ModuleNotFoundError"),
    ],
)
def test_what_is_no_paper_is_refused_in_one_line(module, name, said):
    result = command(name)
    assert result.exit_code == 1
    assert result.stderr.startswith("murmurfl: Expected reproduction")
    assert said in " ".join(result.stderr.split())


class _Everybody(Paper):
    name, sentence, table, everybody_is_asked = "everybody", "", AccuracyTable(), True

    def cells(self):
        algorithms = {"a": {"strategy": "tree-momentum", "strategy.alpha": 0.1}, "b": {"strategy": "trusted-sgd"}}
        return [Cell("t", {"num-clients": 3, "clients-per-round": 3}, algorithms, grids={"a": (0.1,)})]


def test_a_setting_that_some_algorithms_read_is_theirs_alone():
    (cell,) = _Everybody().cells_with({"strategy.alpha": 0.4})
    assert cell.algorithms["a"]["strategy.alpha"] == 0.4
    assert "strategy.alpha" not in cell.settings
    assert "strategy.alpha" not in cell.algorithms["b"]
    (alone,) = _Everybody().cells_with({"strategy.alpha": 0.4, "strategy": "trusted-sgd"})
    assert alone.settings["strategy.alpha"] == 0.4, "asked for where nothing reads it: for the configuration to refuse"


def test_whether_everybody_is_asked_is_the_papers_to_say():
    assert _Everybody().cells_with({"num-clients": 7})[0].settings["clients-per-round"] == 7
    assert PAPERS["reshef-levy-2025"].cells_with({"num-clients": 70})[0].settings["clients-per-round"] == 50


def test_a_step_is_not_chosen_on_the_test_set():
    with raises(ConfigurationError, "missing", "validation-samples"):
        plan_validation(_Everybody().cells(), AccuracyTable())
    cells = [Cell("t", {}, {"a": {"strategy": "mu2"}}, grids={"a": (0.1,)}, validation={"validation-samples": 100})]
    (config,) = plan_validation(cells, AccuracyTable()).values()
    assert (config.learning_rate, config.validation_samples) == (0.1, 100)


def test_a_table_of_gradient_norms_is_refused_where_none_are_computed():
    paper = PAPERS["tran-cutkosky-2022"]
    with raises(ConfigurationError, "mismatch", "gradient-norm"):
        plan_runs(paper.cells_with({"gradient-norm": False}), 1, "cohort", paper.table)


def test_the_papers_are_named_before_anything_heavy_is_imported():
    code = """
import sys, murmurfl.app.papers
print(sorted({"torch", "matplotlib", "murmurfl.app.runs.experiment"} & set(sys.modules)))
import murmurfl.app.papers.reproduction, murmurfl.app.reports.making
print(sorted({"torch"} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["[]", "[]"]
