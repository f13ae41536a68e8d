"""Reproductions: the papers' cells, any other cell, finished runs kept, and a line without noise."""

import csv
import json
import math

import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.papers import PAPERS, Cell
from murmurfl.app.papers.accuracy import ALONE, AccuracyTable
from murmurfl.app.papers.best_accuracy import BestTable
from murmurfl.app.papers.jiang_2026 import ExcessRiskTable
from murmurfl.app.papers.paper import is_without_noise
from murmurfl.app.papers.reproduction import WITHOUT, RunKey, plan_runs, run_cells, with_twins, write_reproduction
from murmurfl.app.papers.sums_on_mnist import TrustTable
from murmurfl.app.papers.tran_cutkosky_2022 import GradientNormTable
from murmurfl.app.papers.zhang_2025 import RegretTable
from murmurfl.app.settings.run_config import NO_NOISE, USUAL_MU
from murmurfl.privacy import ConfigurationError
from typer.testing import CliRunner

from tests.app.run_table import SHUFFLED_ALONE as BASE
from tests.harness.errors import raises

SMALL = {"task": "digits", "preset": "practical", "num-rounds": 2, "num-clients": 10, "clients-per-round": 10}
SMALL |= {"mu": 4.0, "batch-size": 8, "checkpoint": False}


def cell(**settings):
    algorithms = {"mu2": {"strategy": "mu2"}, "noisy-sgd": {"strategy": "noisy-sgd"}}
    return Cell("small", {**SMALL, **settings}, algorithms, {"mu2": {"accuracy": 50.0}})


def test_the_cells_are_those_of_the_papers_tables():
    of_2025 = [c for c in PAPERS["reshef-levy-2025"].cells() if c.settings["preset"] == "paper"]
    assert {(c.settings["mu"], c.settings["clients-per-round"]): c.paper["mu2"]["accuracy"] for c in of_2025} == {
        (4.0, 50): 53.8,
        (8.0, 50): 63.7,
        (12.0, 50): 66.5,
        (8.0, 20): 60.8,
        (8.0, 80): 63.8,
    }
    other = {4.0: 47.6, 8.0: 63.3, 12.0: 66.7}
    for c in of_2025:
        charged = c.algorithms["isrl-dp, every round charged"]
        if c.settings["clients-per-round"] == 50:
            assert c.paper["isrl-dp, every round charged"]["accuracy"] == other[c.settings["mu"]]
        assert "isrl-dp" not in c.paper, "it is another algorithm than the paper's"
        # One sample in P of R rounds, charged for all of them: mu sqrt(P / R) is what is true of that noise.
        rounds = plan_runs([c], 1, "cohort")[RunKey(0, "isrl-dp, every round charged", 1)]
        made = rounds.passes * (60_000 // (rounds.clients_per_round * rounds.batch_size))
        assert charged["mu"] == pytest.approx(c.settings["mu"] * math.sqrt(rounds.passes / made))
    of_2024 = PAPERS["reshef-levy-2024"].cells()
    assert len(of_2024) == 9
    assert all(c.settings["num-clients"] == c.settings["clients-per-round"] for c in of_2024)
    assert next(c for c in of_2024 if c.settings["mu"] == 8.0 and c.settings["num-clients"] == 100).paper == {
        "mu2": {"loss": 2.274, "accuracy": 69.8},
        "trusted-mu2": {"loss": 2.257, "accuracy": 69.6},
    }


def test_settings_make_another_cell_and_known_ones_keep_the_papers_figures():
    (other,) = PAPERS["reshef-levy-2025"].cells_with({"mu": 6.0, "clients-per-round": 30})
    assert (other.settings["mu"], other.settings["clients-per-round"]) == (6.0, 30)
    assert other.settings["preset"] == "paper"
    assert not other.paper
    assert list(other.algorithms) == ["mu2", "noisy-sgd"], "none with a batch or a mu that belongs to another cell"
    (asked_for,) = PAPERS["reshef-levy-2025"].cells_with({"mu": 6.0, "strategy": "isrl-dp", "batch-size": 10})
    assert asked_for.algorithms == {"isrl-dp": {"strategy": "isrl-dp"}}
    (known,) = PAPERS["reshef-levy-2025"].cells_with({"mu": 12.0})
    assert known.paper["mu2"]["accuracy"] == 66.5
    assert "isrl-dp, every round charged" in known.algorithms
    (practical,) = PAPERS["reshef-levy-2025"].cells_with({"preset": "practical", "strategy": "mu2", "mu": 1.0})
    assert list(practical.algorithms) == ["mu2"]
    (clients,) = PAPERS["reshef-levy-2024"].cells_with({"num-clients": 20})
    assert clients.settings["clients-per-round"] == 20
    with raises(ConfigurationError, "unknown-name", "reproduction", match="reshef-levy-2025"):
        PAPERS["reshef-levy"]


@pytest.mark.long
def test_finished_runs_are_not_run_again(tmp_path):
    seen = []
    first = run_cells(
        [cell()],
        AccuracyTable(),
        seeds=2,
        out=tmp_path,
        workers=2,
        on_run=lambda done, total: seen.append((done, total)),
    )
    assert seen[0] == (0, 4)
    assert seen[-1] == (4, 4)
    paths = sorted((tmp_path / "runs").glob("*.json"))
    assert len(paths) == 4
    marked = json.loads(paths[0].read_text())
    paths[0].write_text(json.dumps({**marked, "seconds": 12345.0}))
    seen.clear()
    again = run_cells(
        [cell()], AccuracyTable(), seeds=2, out=tmp_path, on_run=lambda done, total: seen.append((done, total))
    )
    assert seen == [(4, 4)]
    assert 12345.0 in [s for a in again["cells"][0]["algorithms"].values() for s in a["seconds"]["runs"]]
    assert again["cells"][0]["algorithms"]["mu2"]["accuracy"] == first["cells"][0]["algorithms"]["mu2"]["accuracy"]

    document = {"reproduction": "small", **again}
    (table,) = write_reproduction(document, "small", AccuracyTable(), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "small.json").read_text()) == document
    rows = list(csv.DictReader((tmp_path / "out" / "small.csv").open()))
    assert [row["algorithm"] for row in rows] == ["mu2", "noisy-sgd", ALONE]
    assert (tmp_path / "out" / "small.png").read_bytes().startswith(b"\x89PNG")
    for row in table.rows[:2]:
        assert row["runs"] == 2
        assert row["epsilon"] > 0


def test_the_command_prints_one_json_document_and_nothing_else(tmp_path):
    from murmurfl.app.commands.main import cli

    settings = [f"--set={key}={str(value).lower()}" for key, value in SMALL.items()]
    result = CliRunner().invoke(
        cli,
        ["reproduce", "reshef-levy-2025", *settings, "--seeds", "1", "--jobs", "1", "--out", str(tmp_path), "--json"],
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (only,) = document["cells"]
    for entry in only["algorithms"].values():
        for name in ("accuracy", "loss", "mu", "epsilon", "delta", "seconds"):
            assert set(entry[name]) == {"mean", "std", "runs"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["reproduce", "nothing"],
        ["reproduce", "reshef-levy-2025", "--engine", "quantum"],
        ["reproduce", "reshef-levy-2025", "--set", "mu=-1"],
        ["run", "--set", "speed=3"],
        ["run", "--set", "clients-per-round=99"],
        ["run", "--engine", "quantum"],
    ],
)
def test_the_command_refuses_in_one_line(arguments, tmp_path, monkeypatch):
    from murmurfl.app.commands.main import cli

    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("murmurfl: Expected")
    assert len(result.stderr.strip().splitlines()) == 1


DIGITS = {"num-clients": 4, "clients-per-round": 4, "num-rounds": 3, "noise-quality": "fast", "checkpoint": False}
METHODS = {"mu2": {"strategy": "mu2", "mechanism": "blt"}, "noisy SGD": {"strategy": "noisy-sgd"}}
MOMENTUM = {"algorithm 1": {"strategy": "tree-momentum"}, "noisy SGD without sampling": {"strategy": "trusted-sgd"}}
SUMS = {"sums": {"strategy": "mu2", "trust": "secure-aggregation"}, "nobody": {"strategy": "mu2"}}
SHUFFLED = {
    k: v for k, v in BASE.to_mapping().items() if k not in ("strategy", "strategy.variant", "seed", "mu", "epsilon")
}


def both(settings, algorithms, **more):
    """Two cells that differ in mu."""
    return [Cell(f"mu {mu:g}", {**DIGITS, **settings, "mu": mu}, algorithms, **more) for mu in (0.5, 2.0)]


CASES = {
    "accuracy": (AccuracyTable(), both({"mechanism": ""}, METHODS)),
    "best": (BestTable(), both({}, METHODS)),
    "trust": (TrustTable(), both({}, SUMS)),
    "gradient norm": (GradientNormTable(), both({"gradient-norm": True}, MOMENTUM)),
    "regret": (RegretTable(), both({}, {"(i)": {"strategy": "online", "batch-size": 4}})),
    "excess risk": (
        ExcessRiskTable(),
        both(SHUFFLED, {"public": {"strategy": "shuffled", "strategy.variant": "interleaved"}}),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_table_and_picture_shows_it(case, tmp_path, monkeypatch):
    kind, cells = CASES[case]
    document = {"seeds": 1, **run_cells(with_twins(cells), kind, seeds=1, out=tmp_path, workers=1)}
    for cell in document["cells"]:
        assert cell["algorithms"][WITHOUT]["epsilon"]["mean"] is None
    first, *_ = write_reproduction(document, "small", kind, tmp_path)
    assert f"Without noise, and not private: {WITHOUT}" in first.caption
    assert WITHOUT in (tmp_path / "small.md").read_text()
    known = {label for cell in cells for label in cell.algorithms}
    # The same without it is another picture: it is drawn, and not only listed.
    plain = {**document, "cells": [_without(cell, known) for cell in document["cells"]]}
    write_reproduction({**plain, **kind.summary(plain)}, "plain", kind, tmp_path)
    assert (tmp_path / "plain.png").read_bytes() != (tmp_path / "small.png").read_bytes()


def _without(cell, known):
    return {**cell, "algorithms": {label: entry for label, entry in cell["algorithms"].items() if label in known}}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", PAPERS)
def test_every_papers_cells_can_have_one(name):
    """None is impossible, each has the cell's data, and those that differ in mu alone are the same run."""
    paper = PAPERS[name]
    cells = with_twins(paper.cells())
    for before, cell in zip(paper.cells(), cells, strict=True):
        noiseless = [
            label
            for label, options in cell.algorithms.items()
            if {**cell.settings, **options}.get("mechanism") == NO_NOISE
        ]
        assert noiseless, cell.table
        assert before.settings == cell.settings
        assert {label: cell.algorithms[label] for label in before.algorithms} == before.algorithms
    for key, config in plan_runs(cells, 1, "cohort").items():
        if key.algorithm == WITHOUT:
            assert not config.private
            assert config.mu == USUAL_MU


def test_a_cell_with_a_run_without_noise_gets_no_other():
    (cell,) = with_twins([Cell("small", DIGITS, {"a": {"strategy": "mu2", "mechanism": "none"}, **METHODS})])
    assert WITHOUT not in cell.algorithms


def test_an_algorithm_that_cannot_go_without_noise_leaves_it_to_the_next():
    (cell,) = with_twins([Cell("small", {}, {"impossible": {"strategy": "mu2", "strategy.alpha": 0.2}, **METHODS})])
    assert cell.algorithms[WITHOUT] == {"strategy": "mu2", "mechanism": "none", "mu": USUAL_MU}


@pytest.mark.long
def test_the_command_makes_them_where_they_are_asked_for(tmp_path):
    settings = {**DIGITS, "task": "digits"}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={str(value).lower()}")]
    run = ["reproduce", "reshef-levy-2025", *words, "--seeds", "1", "--jobs", "1", "--json", "--out", str(tmp_path)]
    made = {}
    for option in ([], ["--twins"]):
        result = CliRunner().invoke(cli, [*run, *option])
        assert result.exit_code == 0, result.output
        (cell,) = json.loads(result.stdout)["cells"]
        made[bool(option)] = set(cell["algorithms"])
    assert made[True] - made[False] == {WITHOUT}
    assert is_without_noise({"mechanism": "none"})
