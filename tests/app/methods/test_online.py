"""Online learning in the app: what noise costs, and its reproductions."""

import json

import pytest
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.papers import PAPERS, Cell
from murmurfl.app.papers.reproduction import run_cells, write_reproduction
from murmurfl.app.papers.zhang_2025 import RegretTable
from murmurfl.app.reports.table import curve_statistics
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import gdp_epsilon, gdp_mu

LOGISTIC = {
    "strategy": "online", "task": "synthetic-logistic", "partition": "own", "model": "logistic", "num-clients": 4,
    "clients-per-round": 4, "batch-size": 5, "synthetic-samples": 400, "synthetic-features": 12,
    "clip-unit": "contractive", "learning-rate": 0.01, "checkpoint": False, "mu": 2.0,
}  # fmt: skip


def config(**changes):
    return RunConfig.from_mapping({**LOGISTIC, **{key.replace("_", "-"): value for key, value in changes.items()}})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MURMURFL_CACHE", str(tmp_path / "cache"))


def test_more_noise_means_more_regret_and_every_mechanism_says_what_it_guarantees():
    results = {
        name: run_cohort(config(mechanism=name, mu=0.1, evaluate_every=5))
        for name in ("none", "tree", "sqrt_toeplitz", "blt", "independent")
    }
    regrets = {name: result.online["static-regret"][-1] for name, result in results.items()}
    assert regrets["none"] < min(value for name, value in regrets.items() if name != "none")
    for name, result in results.items():
        document = result.outcome.document()
        json.dumps(document, allow_nan=False)
        sentence = result.guarantee.sentence
        if name == "none":
            assert document["mu"] is None
            assert document["epsilon"] is None
            assert sentence.startswith("Nothing is guaranteed, epsilon is infinite at delta")
        else:
            assert document["epsilon"] == pytest.approx(gdp_epsilon(0.1, 1e-5))
            assert f"{name} noise" in sentence
            assert "contractive sensitivity" in sentence


def test_the_reproductions_are_the_papers_settings():
    papers = PAPERS["zhang-2025-logistic"], PAPERS["zhang-2025-cnn"]
    assert [paper.seeds for paper in papers] == [10, 10]
    logistic, cnn = (paper.cells() for paper in papers)
    for cell, epsilon in zip(logistic, (2.0, 0.5), strict=True):
        run = RunConfig.from_mapping({**cell.settings, **cell.algorithms["blt"]})
        assert (run.num_clients, run.batch_size, run.num_rounds, run.synthetic_features) == (20, 5, 1000, 100)
        assert gdp_epsilon(run.mu, run.delta) == pytest.approx(epsilon)
        assert run.clip_unit == "contractive"
        assert {o["mechanism"] for o in cell.algorithms.values()} >= {"tree", "optimal", "sqrt_toeplitz", "none"}
    assert [cell.settings["batch-size"] for cell in cnn] == [5, 5, 10, 10]
    for ours, papers in (cnn[:2], cnn[2:]):
        assert ours.settings["mu"] == pytest.approx(gdp_mu(2.0, 1e-3))
        assert papers.settings["mu"] == pytest.approx(ours.settings["batch-size"] * gdp_mu(2.0, 1e-3))


@pytest.mark.long
def test_curves_have_means_and_bands_and_a_noiseless_run_no_epsilon(tmp_path):
    algorithms = {
        "noiseless": {"strategy": "online", "mechanism": "none"},
        "blt": {"strategy": "online", "mechanism": "blt"},
    }
    settings = {**{key: value for key, value in LOGISTIC.items() if key != "strategy"}, "preset": "practical"}
    cells = [Cell("small", {**settings, "evaluate-every": 5}, algorithms)]
    document = {"seeds": 2, **run_cells(cells, RegretTable(), seeds=2, out=tmp_path, workers=1)}
    (table,) = write_reproduction(document, "small", RegretTable(), tmp_path)
    rows = {row["algorithm"]: row for row in table.rows}
    assert rows["noiseless"]["epsilon"] is None
    assert rows["blt"]["epsilon"] == pytest.approx(gdp_epsilon(2.0, 1e-5))
    assert rows["blt"]["step"] == 0.01
    curve = document["cells"][0]["algorithms"]["blt"]["curves"]
    assert curve["accuracy"]["rounds"] == [5, 10, 15, 20]
    assert len(curve["static-regret"]["mean"]) == 20
    assert "| small | noiseless | 0.01 |" in (tmp_path / "small.md").read_text()
    assert (tmp_path / "small.png").stat().st_size > 10_000
    one = RegretTable().curves(run_cohort(config(evaluate_every=5, mechanism="blt")).outcome.document())
    assert curve_statistics([one, one])["accuracy"]["std"] == pytest.approx([0.0] * 4)
