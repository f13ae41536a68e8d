"""`reproduce --twins`: a line without noise in every table and picture, whatever the kind."""

import json

import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.papers import PAPERS, Cell
from murmurfl.app.papers.accuracy import AccuracyTable
from murmurfl.app.papers.best_accuracy import BestTable
from murmurfl.app.papers.jiang_2026 import ExcessRiskTable
from murmurfl.app.papers.paper import is_without_noise
from murmurfl.app.papers.reproduction import WITHOUT, plan_runs, run_cells, with_twins, write_reproduction
from murmurfl.app.papers.sums_on_mnist import TrustTable
from murmurfl.app.papers.tran_cutkosky_2022 import GradientNormTable
from murmurfl.app.papers.zhang_2025 import RegretTable
from murmurfl.app.settings.run_config import NO_NOISE, RunConfig
from typer.testing import CliRunner

from tests.app.shuffled_run import BASE

DIGITS = {"num-clients": 4, "clients-per-round": 4, "num-rounds": 3, "noise-quality": "fast", "checkpoint": False}
METHODS = {"mu2": {"strategy": "mu2", "mechanism": "blt"}, "noisy SGD": {"strategy": "noisy-sgd"}}
MOMENTUM = {"algorithm 1": {"strategy": "tree-momentum"}, "DP-SGD": {"strategy": "trusted-sgd"}}
SUMS = {"sums": {"strategy": "mu2", "trust": "secure-aggregation"}, "nobody": {"strategy": "mu2"}}
SHUFFLED = {k: v for k, v in BASE.to_mapping().items() if k not in ("strategy", "variant", "seed", "mu", "epsilon")}


def both(settings, algorithms, **more):
    """Two cells that differ in mu."""
    return [Cell(f"mu {mu:g}", {**DIGITS, **settings, "mu": mu}, algorithms, **more) for mu in (0.5, 2.0)]


CASES = {
    "accuracy": (AccuracyTable(), both({"mechanism": ""}, METHODS)),
    "best": (BestTable(), both({}, METHODS)),
    "trust": (TrustTable(), both({}, SUMS)),
    "gradient norm": (GradientNormTable(), both({"gradient-norm": True}, MOMENTUM)),
    "regret": (RegretTable(), both({}, {"(i)": {"strategy": "online", "batch-size": 4}})),
    "excess risk": (ExcessRiskTable(), both(SHUFFLED, {"public": {"strategy": "shuffled", "variant": "interleaved"}})),
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
            assert config.mu == RunConfig.mu


def test_a_cell_with_a_run_without_noise_gets_no_other():
    (cell,) = with_twins([Cell("small", DIGITS, {"a": {"strategy": "mu2", "mechanism": "none"}, **METHODS})])
    assert WITHOUT not in cell.algorithms


def test_an_algorithm_that_cannot_go_without_noise_leaves_it_to_the_next():
    (cell,) = with_twins([Cell("small", {}, {"impossible": {"strategy": "mu2", "alpha": 0.2}, **METHODS})])
    assert cell.algorithms[WITHOUT] == {"strategy": "mu2", "mechanism": "none", "mu": RunConfig.mu}


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
