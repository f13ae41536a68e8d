"""Shuffled gradients in the app: optima, the sweep over step sizes, and its reproductions."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.config import PUBLIC_TASKS, RunConfig
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.experiment import prepare
from murmurfl.app.papers.cells import DEFAULT_SEEDS, REPRODUCTIONS, Cell
from murmurfl.app.papers.reproduce import cells_of, run_cells, table_rows, write_reproduction
from murmurfl.app.papers.sweep import can_sweep, is_covered, optimum, run_sweep
from murmurfl.app.record import result_document, write_record
from murmurfl.app.summary import summary_lines
from murmurfl.privacy import ConfigurationError, gdp_epsilon, gdp_mu
from murmurfl.strategies import private_rounds, proximal
from murmurfl.strategies.shuffled import penalty
from scipy.optimize import minimize

rng = np.random.Generator(np.random.Philox(key=81))

BASE = RunConfig(
    strategy="shuffled",
    task="synthetic-logistic",
    model="logistic",
    num_clients=1,
    clients_per_round=1,
    num_rounds=4,
    synthetic_samples=60,
    synthetic_features=5,
    public_samples=30,
    regularizer="l1",
    regularizer_strength=0.02,
    learning_rate=0.005,
    checkpoint=False,
    mu=2.0,
)
VARIANTS = ("interleaved", "dp-shuffleg", "priv-pub", "pub-priv", "public-only")


@pytest.mark.parametrize("kind", ["none", "l2", "l1", "ball"])
def test_the_proximal_step_minimises_what_it_says(kind):
    point, strength, weight = rng.normal(size=4), 0.7, 0.3

    def value(z):
        if kind == "ball" and np.linalg.norm(z) > strength * (1 + 1e-9):
            return math.inf
        return weight * float(penalty(kind, z, strength)) + float(np.sum((z - point) ** 2)) / 2

    found = proximal(kind, point, strength, weight)
    assert all(value(found) <= value(found + 1e-3 * rng.normal(size=4)) + 1e-12 for _ in range(300))
    both = proximal(kind, np.stack([point, 2 * point]), strength, np.array([[weight], [weight]]))
    assert both[0] == pytest.approx(found)


def test_the_epochs_of_each_variant_are_the_papers():
    rounds = {variant: list(private_rounds(variant, 10, 0.3)) for variant in VARIANTS}
    assert rounds["interleaved"] == rounds["dp-shuffleg"] == list(range(1, 11))
    assert rounds["priv-pub"] == [1, 2, 3]
    assert rounds["pub-priv"] == [8, 9, 10]
    assert rounds["public-only"] == []
    with pytest.raises(ConfigurationError, match="variant"):
        private_rounds("all", 10, 0.5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_epochs_that_touch_private_samples_are_asked_for_and_recorded(variant):
    result = run_cohort(replace(BASE, variant=variant))
    statement = result.statements["0"]
    expected = len(private_rounds(variant, 4, 0.5))
    assert statement["releases"] == expected == sum(report.asked for report in result.strategy.history)
    document = result_document(result)
    json.dumps(document, allow_nan=False)
    if variant == "public-only":
        assert (result.mu, result.epsilon) == (0.0, 0.0)
        assert "nothing is spent" in result.guarantee.sentence
    else:
        assert result.mu == pytest.approx(2.0)
        assert statement["mu-spent"] == pytest.approx(2.0)
        assert f"{expected} epochs" in result.guarantee.sentence
        named = "amplification by iteration" if variant == "interleaved" else "plain composition"
        assert named in result.guarantee.sentence
    assert statement["public-steps"] == (15 if variant == "interleaved" else 0)


@pytest.mark.parametrize("order", ["IG", "SO", "RR"])
@pytest.mark.parametrize("model", ["logistic", "ridge", "mean"])
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


def test_a_step_beyond_the_theorem_is_refused_by_silos_and_marked_by_the_sweep():
    too_large = replace(BASE, learning_rate=0.03)  # L* = 12^2 / 4 = 36
    with pytest.raises(ConfigurationError, match="amplified"):
        run_cohort(too_large)
    covered, beyond, plain = run_sweep([BASE, too_large, replace(too_large, variant="dp-shuffleg")])
    assert covered["epsilon"] == plain["epsilon"] == pytest.approx(gdp_epsilon(2.0, 1e-5))
    assert beyond["epsilon"] is beyond["mu"] is None
    assert not is_covered(too_large)
    assert is_covered(replace(too_large, accounting="composed"))
    assert run_cohort(replace(too_large, accounting="composed")).mu == pytest.approx(2.0)
    with pytest.raises(ConfigurationError, match="differ in"):
        run_sweep([BASE, replace(BASE, seed=2)])
    assert not can_sweep(replace(BASE, num_clients=2))


@pytest.mark.parametrize(("model", "kind"), [("logistic", "l1"), ("ridge", "l2"), ("mean", "ball")])
def test_no_point_is_below_the_optimum(model, kind):
    config = replace(BASE, model=model, regularizer=kind, regularizer_strength=0.3, synthetic_samples=61)
    experiment, least = prepare(config), optimum(config)
    task = experiment.task

    def objective(point):
        loss = experiment.model.evaluate([point], (task.test_features, task.test_labels))[0]
        return loss + float(penalty(kind, point, 0.3))

    found = minimize(objective, np.zeros(5), method="Powell", options={"maxiter": 6000, "ftol": 1e-12})
    best = objective(proximal("ball", found.x, 0.3, 1.0)) if kind == "ball" else found.fun
    assert least <= best + 1e-9
    if kind != "ball":
        assert least == pytest.approx(best, abs=1e-4)
    with pytest.raises(ConfigurationError, match="paper's problems"):
        optimum(replace(config, model="ridge", regularizer="ball"))


def test_what_does_not_fit_is_refused():
    for changes, match in (
        ({"private_share": 0.0}, "private-share"),
        ({"public_samples": 0, "variant": "priv-pub"}, "public-samples"),
        ({"public_samples": 5}, "public samples"),
        ({"public_samples": 600}, "public-samples"),
        ({"mechanism": "blt"}, "mechanism"),
        ({"strategy": "mu2"}, "public-samples"),
        ({"task": "crime"}, "'ridge'"),
        ({"task": "crime", "model": "ridge"}, "public-samples"),
        ({"task": "crime", "model": "ridge", "public_samples": 0, "data_root": "/nowhere"}, "communities"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            run_cohort(replace(BASE, **changes))


def test_a_run_without_an_accuracy_has_a_record_and_a_summary(tmp_path):
    result = run_cohort(replace(BASE, model="mean", regularizer="none"))
    document = write_record(result, tmp_path)
    assert document["accuracy"] is None
    assert any("none; loss" in line for line in summary_lines(document, tmp_path))
    assert (tmp_path / "accuracy.png").stat().st_size > 5000


def test_the_reproductions_are_the_papers_settings():
    cells = {name: REPRODUCTIONS[f"jiang-2026-{name}"]() for name in ("mean", "ridge", "lasso")}
    tasks = {cell.settings["task"] for group in cells.values() for cell in group}
    assert tasks == set(PUBLIC_TASKS)
    for name, group in cells.items():
        assert DEFAULT_SEEDS[f"jiang-2026-{name}"] == 10
        for cell in group:
            config = RunConfig.from_mapping({**cell.settings, **cell.algorithms["Interleaved"]})
            epsilons = (1.0, 5.0) if name == "ridge" else (5.0, 10.0)
            assert any(gdp_mu(epsilon, 1e-6) == config.mu for epsilon in epsilons)
            assert (config.num_rounds, config.clip_norm, config.delta) == (50, 10.0, 1e-6)
            assert (len(cell.steps), max(cell.steps), min(cell.steps)) == (18, 0.5, 1e-9)
    assert {(c.settings["order"], c.settings["private-share"]) for c in cells["mean"]} == {
        ("RR", 0.5), ("IG", 0.5), ("SO", 0.5), ("RR", 0.25), ("RR", 0.75),
    }  # fmt: skip
    (one,) = cells_of("jiang-2026-ridge", {"task": "crime", "learning-rate": 1e-5})
    assert one.steps == ()


@pytest.mark.long
def test_a_table_has_the_best_covered_step_and_says_which_was_better_beyond(tmp_path):
    settings = {k: v for k, v in BASE.to_mapping().items() if k not in ("strategy", "variant", "learning-rate", "seed")}
    algorithms = {name: {"strategy": "shuffled", "variant": name} for name in ("interleaved", "public-only")}
    # Without regulariser and with little noise the larger steps are better; 1 / L* is 1 / 36.
    settings |= {"mu": 1000.0, "noise-quality": "fast", "regularizer": "none", "regularizer-strength": 0.0}
    cells = [Cell("small", settings, algorithms, steps=(0.5, 0.02, 1e-6))]
    document = {"seeds": 2, **run_cells(cells, seeds=2, out=tmp_path, jobs=1)}
    entry = document["cells"][0]["algorithms"]["interleaved"]
    assert entry["learning-rate"] == 0.02
    assert entry["covered"] is True
    assert [point["covered"] for point in entry["grid"]] == [False, True, True]
    means = [point["mean"] for point in entry["grid"]]
    assert entry["excess"]["mean"] == pytest.approx(means[1], rel=1e-3)
    assert (entry["beyond"] is None) == (means[0] > means[1])
    assert len(entry["curves"]["excess"]["mean"]) == 4
    assert entry["epsilon"]["mean"] == pytest.approx(gdp_epsilon(1000.0, 1e-5))
    write_reproduction(document, "small", tmp_path)
    rows = table_rows(document)
    assert [row["algorithm"] for row in rows] == ["interleaved", "public-only"]
    assert "**" in (tmp_path / "small.md").read_text()
    assert (tmp_path / "small.png").stat().st_size > 5000
    again = run_cells(cells, seeds=2, out=tmp_path, jobs=1)
    assert again["cells"] == document["cells"], "finished runs are not run again"
    other = run_cells(
        [replace(cells[0], steps=(0.5, 0.02))], seeds=1, out=tmp_path / "other", engine="inprocess", jobs=1
    )
    alone = other["cells"][0]["algorithms"]["interleaved"]
    assert [point["step"] for point in alone["grid"]] == [0.02], "silos refuse the other one"
    assert alone["excess"]["runs"][0] == pytest.approx(entry["excess"]["runs"][0], rel=1e-3, abs=1e-4)
