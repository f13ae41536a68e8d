"""Stationary points: gradient norms, rates fitted to them, steps chosen on seeds of their own, and the reproduction."""

import json
import math
import os

import numpy as np
import pytest
from murmurfl.app.config import RunConfig
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.models.models import make_model
from murmurfl.app.papers.cells import REPRODUCTIONS, VALIDATION_SEEDS, Cell
from murmurfl.app.papers.reproduce import markdown_table, plan_runs, run_cells, table_rows, write_reproduction
from murmurfl.app.papers.stationary import fitted_slope, slope_table
from murmurfl.app.tasks.features import pooled
from murmurfl.app.tasks.loading import load_task
from murmurfl.privacy import ConfigurationError, gdp_mu

needs_mnist = pytest.mark.skipif(not os.environ.get("MURMURFL_DATA"), reason="MURMURFL_DATA is not set: no MNIST")

SMALL = {
    "task": "synthetic-logistic",
    "partition": "iid",
    "preset": "practical",
    "model": "nonconvex-logistic",
    "feature-bound": 1.0,
    "synthetic-features": 6,
    "synthetic-samples": 400,
    "num-clients": 1,
    "clients-per-round": 1,
    "batch-size": 20,
    "passes": 3,
    "clip-norm": 1.1,
    "evaluate-every": 5,
    "gradient-norm": True,
    "noise-quality": "fast",
    "checkpoint": False,
}


def samples(count=40, features=7):
    rng = np.random.default_rng(1)
    return rng.normal(size=(count, features)), rng.integers(2, size=count)


def test_the_regularised_loss_has_the_gradient_and_the_bounds_it_declares():
    model, batch, rng = make_model("nonconvex-logistic", 7, 2, 1.5), samples(), np.random.default_rng(2)
    steepest = longest = 0.0
    for _ in range(200):
        w, direction = rng.normal(size=(2, 7)) * rng.choice([0.1, 1.0, 5.0])
        gradients = model([w], batch)
        assert model.mean_gradient([w], batch) == pytest.approx(gradients.mean(axis=0), abs=1e-12)
        ahead, behind = (model.evaluate([w + sign * 1e-5 * direction], batch)[0] for sign in (1, -1))
        assert (ahead - behind) / 2e-5 == pytest.approx(gradients.mean(axis=0) @ direction, abs=1e-5)
        longest = max(longest, np.linalg.norm(gradients, axis=1).max())
        moved = np.linalg.norm(model([w + 1e-4 * direction], batch) - gradients, axis=1).max()
        steepest = max(steepest, moved / (1e-4 * np.linalg.norm(direction)))
        assert model.at_points(np.tile(w, (40, 1)), batch) == pytest.approx(gradients)
    assert 0.5 * model.gradient_bound < longest <= model.gradient_bound
    assert 0.3 * model.smoothness < steepest <= model.smoothness
    assert not model.clips_contractively, "amplification and contractive clipping are for convex losses"


@pytest.mark.parametrize(("name", "features"), [("mlp", 6), ("cnn", 196)])
def test_a_networks_mean_gradient_is_the_mean_of_its_samples(name, features):
    model = make_model(name, features, 10)
    rng = np.random.default_rng(3)
    batch = rng.random(size=(150, features)).astype(np.float32), rng.integers(10, size=150)
    parameters = model.initial_parameters(1)
    assert model.mean_gradient(parameters, batch) == pytest.approx(model(parameters, batch).mean(axis=0), abs=1e-6)


def test_a_run_tells_the_gradient_norm_of_its_training_loss_where_it_was_asked_for():
    config = RunConfig.from_mapping({**SMALL, "strategy": "reduced-tree-momentum"})
    result = run_cohort(config)
    task, model = result.experiment.task, result.experiment.model
    last = np.linalg.norm(model.mean_gradient(result.parameters, (task.train_features, task.train_labels)))
    assert result.gradient_norms["rounds"][-1] == result.experiment.num_rounds == 60
    assert result.gradient_norms["values"][-1] == pytest.approx(last)
    assert run_cohort(RunConfig(num_rounds=2, checkpoint=False)).gradient_norms is None


def test_training_samples_are_the_same_ones_in_every_run_and_never_test_samples():
    whole, fewer = load_task(RunConfig()), load_task(RunConfig(training_samples=300, seed=4))
    assert len(fewer.train_labels) == 300
    assert (fewer.test_features == whole.test_features).all()
    assert (load_task(RunConfig(training_samples=300)).train_features == fewer.train_features).all()
    assert {row.tobytes() for row in fewer.train_features} <= {row.tobytes() for row in whole.train_features}
    with pytest.raises(ConfigurationError, match="training-samples"):
        load_task(RunConfig(training_samples=5000))


def test_pooled_features_are_means_over_blocks():
    images = np.random.default_rng(5).integers(256, size=(3, 28, 28), dtype=np.uint8)
    features = pooled(images, 4)
    assert features.shape == (3, 49)
    assert features[1, 7 * 2 + 5] == pytest.approx(images[1, 8:12, 20:24].mean() / 255)
    assert pooled(images, 2)[2, 14 * 3 + 1] == pytest.approx(images[2, 6:8, 2:4].mean() / 255)


@needs_mnist
def test_parity_has_two_classes():
    task = load_task(RunConfig(task="mnist-parity", features="means-4x4", model="nonconvex-logistic"))
    assert task.num_classes == 2
    assert set(task.train_labels.tolist()) == {0, 1}
    assert task.num_features == 49


def test_a_slope_is_that_of_the_line_and_its_error_that_of_the_noise():
    """500 fits to noise of standard deviation 0.2: errors of three standard errors in about 0.5 % of 13 degrees.

    More than 3 % of them would be a false alarm in less than one case in 10^6; an error stated half as large is seen.
    """
    x = np.repeat(np.log([0.5, 1, 2, 4, 8]), 3)
    exact = fitted_slope(x, 1.0 - 0.5 * x)
    assert exact["slope"] == pytest.approx(-0.5)
    assert exact["standard_error"] < 1e-9
    rng, wrong, halved = np.random.default_rng(6), 0, 0
    for _ in range(500):
        fit = fitted_slope(x, 1.0 - 0.5 * x + 0.2 * rng.normal(size=len(x)))
        ratio = abs(fit["slope"] + 0.5) / fit["standard_error"]
        wrong, halved = wrong + (ratio > 3), halved + (ratio > 1.5)
    assert wrong < 15
    assert halved > 15


def cells():
    def cell(epsilon):
        grids = {"algorithm 1": (0.02, 0.2), "DP-SGD": (0.3,)}
        algorithms = {"algorithm 1": {"strategy": "tree-momentum"}, "DP-SGD": {"strategy": "trusted-sgd"}}
        settings = {**SMALL, "mu": gdp_mu(epsilon, 1e-5), "training-samples": 300}
        return Cell(f"epsilon = {epsilon:g}", settings, algorithms, grids=grids)

    return [cell(epsilon) for epsilon in (1.0, 4.0, 16.0)]


@pytest.mark.long
def test_steps_are_chosen_on_seeds_of_their_own_and_runs_are_kept(tmp_path):
    seen = []
    made = run_cells(cells(), seeds=2, out=tmp_path, jobs=1, on_run=lambda done, total: seen.append((done, total)))
    assert (seen[0], seen[-1]) == ((0, 21), (21, 21)), "9 validation runs, 12 of the table"
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert not set(VALIDATION_SEEDS) & {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
    for cell in made["cells"]:
        for label, entry in cell["algorithms"].items():
            tried = entry["validation"]
            assert len(tried) == len(cells()[0].grids[label])
            assert entry["settings"]["learning-rate"] == tried[0]["step"]
            assert tried[0]["gradient_norm"] == min(step["gradient_norm"] for step in tried)
            assert tried[0]["gradient_norm"] not in entry["gradient_norm"]["runs"]
            assert len(entry["gradient_norm"]["runs"]) == 2
    assert {(line["algorithm"], line["against"]) for line in made["slopes"]} == {
        ("algorithm 1", "epsilon"),
        ("DP-SGD", "epsilon"),
    }
    seen.clear()
    again = run_cells(cells(), seeds=2, out=tmp_path, jobs=1, on_run=lambda done, total: seen.append((done, total)))
    assert seen == [(9, 21), (21, 21)]
    assert again == made

    document = {"reproduction": "small", "seeds": 2, **made}
    write_reproduction(document, "small", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "small.json").read_text()) == document
    assert (tmp_path / "out" / "small.png").read_bytes().startswith(b"\x89PNG")
    rows = table_rows(document)
    assert len(markdown_table(rows).splitlines()) == 2 + len(rows) == 8
    assert all(row["epsilon"] > 0 for row in rows)
    assert len(slope_table(document).splitlines()) == 4


def test_the_reproduction_has_the_algorithms_of_the_paper_at_equal_terms():
    made = REPRODUCTIONS["tran-cutkosky-2022"]()
    for cell in made:
        if not cell.grids:
            assert list(cell.algorithms) == ["algorithm 1, theorem 6"]
            continue
        assert set(cell.algorithms) == set(cell.grids) == {
            "algorithm 1", "algorithm 2", "sqrt_toeplitz", "blt", "DP-SGD",
        }  # fmt: skip
        assert len({len(grid) for grid in cell.grids.values()}) == 1, "as many steps for each"
    configs = plan_runs(made, 1, "cohort").values()
    assert all(config.gradient_norm and config.passes > 1 for config in configs)
    logistic = [config for config in configs if config.model == "nonconvex-logistic"]
    model = make_model("nonconvex-logistic", 49, 2, logistic[0].feature_bound)
    assert all(config.clip_norm >= model.gradient_bound for config in logistic), "nothing is clipped"


def test_theorem_6_has_its_own_numbers():
    """T = eps N^2 / (log2 T sqrt(d ln 1/delta)), alpha = eps N / (T log2 T sqrt(...)) = 1 / N, eta = 1 / sqrt(N T)."""
    (cell,) = (c for c in REPRODUCTIONS["tran-cutkosky-2022"]() if "theorem 6" in c.table and "N = 500" in c.table)
    n, t = 500, cell.settings["num-rounds"]
    spread = math.sqrt(49 * math.log(1e5))
    assert t == pytest.approx(2 * n**2 / (math.log2(t) * spread), rel=1e-3)
    assert cell.settings["alpha"] == pytest.approx(1 / n, rel=1e-3)
    assert cell.settings["learning-rate"] == pytest.approx(1 / math.sqrt(n * t))
    assert cell.settings["batch-size"] == 1
    assert cell.settings["passes"] * n >= t
