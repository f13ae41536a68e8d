"""Excess risk: the table, and the sweep that makes many of its runs at once."""

from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.data import TASKS
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.methods import METHODS
from murmurfl.app.papers import PAPERS, Cell
from murmurfl.app.papers.jiang_2026 import ExcessRiskTable, end_of_grid, standing_still
from murmurfl.app.papers.reproduction import run_cells, write_reproduction
from murmurfl.app.papers.sweep import optimum, run_sweep
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError, gdp_epsilon, gdp_mu
from murmurfl.strategies import proximal
from murmurfl.strategies.shuffled import penalty
from scipy.optimize import minimize

from benchmarks import pages
from tests.app.run_table import SHUFFLED_ALONE as BASE
from tests.harness.errors import raises

rng = np.random.Generator(np.random.Philox(key=81))


def test_the_reproductions_are_the_papers_settings():
    cells = {name: PAPERS[f"jiang-2026-{name}"].cells() for name in ("mean", "ridge", "lasso")}
    tasks = {cell.settings["task"] for group in cells.values() for cell in group}
    assert tasks == {name for name, task in TASKS.items() if task.public}
    for name, group in cells.items():
        assert PAPERS[f"jiang-2026-{name}"].seeds == 10
        for cell in group:
            config = RunConfig.from_mapping({**cell.settings, **cell.algorithms["Interleaved"]})
            epsilons = (1.0, 5.0) if name == "ridge" else (5.0, 10.0)
            assert any(gdp_mu(epsilon, 1e-6) == config.mu for epsilon in epsilons)
            assert (config.num_rounds, config.clip_norm, config.delta) == (50, 10.0, 1e-6)
            assert (len(cell.steps), max(cell.steps), min(cell.steps)) == (18, 0.5, 1e-9)
    assert {(c.settings["strategy.order"], c.settings["strategy.private-share"]) for c in cells["mean"]} == {
        ("RR", 0.5), ("IG", 0.5), ("SO", 0.5), ("RR", 0.25), ("RR", 0.75),
    }  # fmt: skip
    (one,) = PAPERS["jiang-2026-ridge"].cells_with({"task": "crime", "learning-rate": 1e-5})
    assert one.steps == ()


def entry_of(step, grid, epsilon=0.0):
    return {
        "learning-rate": step,
        "epsilon": {"mean": epsilon},
        "grid": [{"step": at, "mean": mean} for at, mean in grid.items()],
    }


def test_a_best_step_at_an_end_of_the_grid_is_found():
    grid = {0.5: 3.0, 1e-3: 2.0, 1e-9: 1.0}
    assert [end_of_grid(entry_of(step, grid)) for step in grid] == ["largest", None, "smallest"]
    assert end_of_grid(entry_of(0.5, {0.5: 1.0})) is None, "one step is no grid"
    cell = {"algorithms": {"private": entry_of(0.5, grid, 4.0), "public": entry_of(0.5, {1e-3: 2.0, 1e-9: 7.0})}}
    assert standing_still(cell) == 7.0
    assert standing_still({"algorithms": {"private": entry_of(0.5, grid, 4.0)}}) is None


def test_the_page_marks_every_best_step_at_an_end_and_says_that_nothing_was_learnt():
    ends = {
        (cell["table"].replace(", RR", ""), label)
        for kind in ("mean", "ridge", "lasso")
        for cell in pages.document(f"jiang-2026-{kind}")["cells"]
        for label, entry in cell["algorithms"].items()
        if ", RR, " in cell["table"] and entry["learning-rate"] in (5e-1, 1e-9)
    }
    assert {label for _, label in ends} == {"Priv-Pub", "Pub-Priv", "DP-ShuffleG"}
    text = pages.excess_risks()
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    labels = lines[0][-5:]
    marked = {
        (name, label)
        for name, *cells in lines[2:]
        for label, shown in zip(labels, cells, strict=True)
        if shown.endswith("†")
    }
    assert marked == ends
    assert "1e-09, the smallest that was tried" in text
    assert "On credit-card the excess risk there is that of standing still, 0.0278, within 0." in text


@pytest.mark.long
def test_a_table_has_the_best_covered_step_and_says_which_was_better_beyond(tmp_path):
    settings = {
        k: v for k, v in BASE.to_mapping().items() if k not in ("strategy", "strategy.variant", "learning-rate", "seed")
    }
    algorithms = {name: {"strategy": "shuffled", "strategy.variant": name} for name in ("interleaved", "public-only")}
    # Without regulariser and with little noise the larger steps are better; 1 / L* is 1 / 36.
    settings |= {
        "mu": 1000.0,
        "noise-quality": "fast",
        "strategy.regularizer": "none",
        "strategy.regularizer-strength": 0.0,
    }
    cells = [Cell("small", settings, algorithms, steps=(0.5, 0.02, 1e-6))]
    document = {"seeds": 2, **run_cells(cells, ExcessRiskTable(), seeds=2, out=tmp_path, workers=1)}
    entry = document["cells"][0]["algorithms"]["interleaved"]
    assert entry["learning-rate"] == 0.02
    assert entry["covered"] is True
    assert [point["covered"] for point in entry["grid"]] == [False, True, True]
    means = [point["mean"] for point in entry["grid"]]
    assert entry["excess"]["mean"] == pytest.approx(means[1], rel=1e-3)
    assert (entry["beyond"] is None) == (means[0] > means[1])
    assert len(entry["curves"]["excess"]["mean"]) == 4
    assert entry["epsilon"]["mean"] == pytest.approx(gdp_epsilon(1000.0, 1e-5))
    (made,) = write_reproduction(document, "small", ExcessRiskTable(), tmp_path)
    assert [row["algorithm"] for row in made.document()["rows"]] == ["interleaved", "public-only"]
    assert "**" in (tmp_path / "small.md").read_text()
    assert (tmp_path / "small.png").stat().st_size > 5000
    again = run_cells(cells, ExcessRiskTable(), seeds=2, out=tmp_path, workers=1)
    assert again["cells"] == document["cells"], "finished runs are not run again"
    other = run_cells(
        [replace(cells[0], steps=(0.5, 0.02))],
        ExcessRiskTable(),
        seeds=1,
        out=tmp_path / "other",
        engine="inprocess",
        workers=1,
    )
    alone = other["cells"][0]["algorithms"]["interleaved"]
    assert [point["step"] for point in alone["grid"]] == [0.02], "silos refuse the other one"
    assert alone["excess"]["runs"][0] == pytest.approx(entry["excess"]["runs"][0], rel=1e-3, abs=1e-4)


drawn = np.random.Generator(np.random.Philox(key=81))
VARIANTS = ("interleaved", "dp-shuffleg", "priv-pub", "pub-priv", "public-only")


@pytest.mark.parametrize(("model", "order"), [("logistic", "IG"), ("ridge", "SO"), ("mean", "RR")])
def test_runs_together_are_the_runs_one_by_one(model, order):
    kind = {"logistic": "l1", "ridge": "l2", "mean": "ball"}[model]
    base = replace(
        BASE, model=model, order=order, regularizer=kind, feature_bound=9.0, clip_norm=3.0, private_share=0.3
    )
    configs = [
        replace(base, variant=variant, mu=mu, learning_rate=rate)
        for variant in VARIANTS
        for mu in (1.0, 3.0)
        for rate in (0.002, 0.006)
    ]
    for config, result in zip(configs, run_sweep(configs), strict=True):
        alone = run_in_process(config)
        assert result["loss"] == pytest.approx(alone.loss, rel=1e-4)
        assert (result["epsilon"], result["accuracy"]) == (pytest.approx(alone.epsilon), alone.accuracy)
        assert result["curves"]["loss"]["values"][-1] == pytest.approx(alone.loss, rel=1e-4)
    losses = [result["loss"] for result in run_sweep([replace(base, seed=2), replace(base, seed=2, mu=9.0)])]
    assert losses[0] != pytest.approx(losses[1], rel=1e-4), "the tolerance would notice other noise"


def test_steps_beyond_the_theorem_are_refused_and_marked():
    too_large = replace(BASE, learning_rate=0.03)  # L* = 12^2 / 4 = 36
    with raises(ConfigurationError, "out-of-range", "learning_rate", match="amplified"):
        run_cohort(too_large)
    covered, beyond, plain = run_sweep([BASE, too_large, replace(too_large, variant="dp-shuffleg")])
    assert covered["epsilon"] == plain["epsilon"] == pytest.approx(gdp_epsilon(2.0, 1e-5))
    assert beyond["epsilon"] is beyond["mu"] is None
    shuffled = METHODS["shuffled"]
    assert not shuffled.covers(too_large, prepare)
    assert shuffled.covers(replace(too_large, accounting="composed"), prepare)
    assert run_cohort(replace(too_large, accounting="composed")).mu == pytest.approx(2.0)
    with raises(ConfigurationError, "mismatch", "configs"):
        run_sweep([BASE, replace(BASE, seed=2)])
    assert not shuffled.sweeps(replace(BASE, num_clients=2))


@pytest.mark.parametrize(("model", "kind"), [("logistic", "l1"), ("ridge", "l2"), ("mean", "ball")])
def test_no_point_is_below_the_optimum(model, kind):
    config = replace(BASE, model=model, regularizer=kind, regularizer_strength=0.3, synthetic_samples=61)
    experiment, least = prepare(config), optimum(config)
    task = experiment.data

    def objective(point):
        loss = experiment.model.evaluate([point], (task.test_features, task.test_labels))[0]
        return loss + float(penalty(kind, point, 0.3))

    found = minimize(objective, np.zeros(5), method="Powell", options={"maxiter": 6000, "ftol": 1e-12})
    best = objective(proximal("ball", found.x, 0.3, 1.0)) if kind == "ball" else found.fun
    assert least <= best + 1e-9
    if kind != "ball":
        assert least == pytest.approx(best, abs=1e-4)
    with raises(ConfigurationError, "unknown-name", "model"):
        optimum(replace(config, model="ridge", regularizer="ball"))
