"""Reproductions: the papers' cells, any other cell, finished runs kept."""

import csv
import json
import math

import pytest
from murmurfl.app.papers import PAPERS, Cell
from murmurfl.app.papers.accuracy import ALONE, AccuracyTable
from murmurfl.app.papers.reproduction import RunKey, plan_runs, run_cells, write_reproduction
from murmurfl.privacy import ConfigurationError
from typer.testing import CliRunner

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
            assert c.paper["isrl-dp"]["accuracy"] == other[c.settings["mu"]]
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
    (machines,) = PAPERS["reshef-levy-2024"].cells_with({"num-clients": 20})
    assert machines.settings["clients-per-round"] == 20
    with pytest.raises(ConfigurationError, match="reshef-levy-2025"):
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
