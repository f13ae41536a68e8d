"""Online learning in the app: models, data, regrets, and its reproductions."""

import json

import numpy as np
import pytest
import torch
from murmurfl.app.config import RunConfig
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.experiment import prepare
from murmurfl.app.models import make_model
from murmurfl.app.observers.online_losses import OnlineLosses
from murmurfl.app.papers.cells import DEFAULT_SEEDS, REPRODUCTIONS, Cell
from murmurfl.app.papers.curves import curve_statistics, run_curves
from murmurfl.app.papers.reproduce import run_cells, table_rows, write_reproduction
from murmurfl.app.record import result_document
from murmurfl.app.tasks.loading import load_dataset, load_shards
from murmurfl.clients import TorchGradients
from murmurfl.privacy import ConfigurationError, gdp_epsilon, gdp_mu

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


def test_logistic_gradients_are_those_of_the_loss_on_bounded_features():
    model = make_model("logistic", 7, 2, 3.0)
    generator = np.random.Generator(np.random.Philox(key=41))
    weight, features = generator.normal(size=7), 3 * generator.normal(size=(20, 7))
    labels = generator.integers(2, size=20)
    bounded = features * np.minimum(1, 3.0 / np.linalg.norm(features, axis=1, keepdims=True))
    signs = 2 * labels - 1

    def loss(w):
        return np.log1p(np.exp(-signs * (bounded @ w)))

    rows = model([weight], (features, labels))
    for i in range(7):
        step = np.zeros(7)
        step[i] = 1e-6
        assert rows[:, i] == pytest.approx((loss(weight + step) - loss(weight - step)) / 2e-6, abs=1e-6)
    assert model.at_points(np.tile(weight, (20, 1)), (features, labels)) == pytest.approx(rows)
    value, gradient = model.loss_and_gradient(weight, (features, labels))
    assert (value, gradient) == (pytest.approx(loss(weight).mean()), pytest.approx(rows.mean(axis=0)))
    assert model.evaluate([weight], (features, labels))[0] == pytest.approx(loss(weight).mean())
    assert (np.linalg.norm(rows, axis=1) <= model.gradient_bound).all()
    assert np.linalg.norm(model([1e150 * weight], (features, labels)), axis=1).max() <= 3.0
    assert (model([weight], (np.full((1, 7), np.inf), labels[:1])) == 0).all()
    with pytest.raises(ConfigurationError, match="two classes"):
        make_model("logistic", 7, 10, 3.0)
    with pytest.raises(ConfigurationError, match="feature-bound"):
        make_model("logistic", 7, 2, -1.0)


def test_the_papers_cnn_has_the_papers_layers():
    model = make_model("cnn", 784, 10)
    assert [shape for shape in model.shapes if len(shape) > 1] == [
        (32, 1, 3, 3), (32, 32, 3, 3), (64, 800), (32, 64), (10, 32),
    ]  # fmt: skip
    assert model.num_parameters == 63_242
    generator = np.random.Generator(np.random.Philox(key=42))
    batch = generator.random((3, 784), dtype=np.float32), np.array([1, 5, 9])
    parameters = model.initial_parameters(1)
    flat = np.concatenate([values.ravel() for values in parameters])
    together = model.at_points(np.tile(flat, (3, 1)), batch)
    assert together == pytest.approx(model(parameters, batch), abs=1e-6)
    assert model.logits(parameters, batch[0]).shape == (3, 10)
    with pytest.raises(ConfigurationError, match="square"):
        make_model("cnn", 783, 10)


@pytest.mark.parametrize("side", [10, 13, 28])
def test_the_cnns_scores_are_its_modules(side):
    model = make_model("cnn", side * side, 10)
    parameters = [values * 3 for values in model.initial_parameters(5)]
    images = np.random.Generator(np.random.Philox(key=44)).standard_normal((230, side * side), dtype=np.float32)
    named = dict(zip(model.names, map(torch.as_tensor, parameters), strict=True))
    expected = torch.func.functional_call(model.module, named, (torch.as_tensor(images),)).detach().numpy()
    assert np.ptp(expected) > 1
    assert model.logits(parameters, images) == pytest.approx(expected, rel=1e-5, abs=1e-4)  # of values around 50


@pytest.mark.parametrize("side", [10, 13, 28])
def test_the_cnns_closed_form_is_what_pytorch_derives(side):
    model = make_model("cnn", side * side, 10)
    reference = TorchGradients(model.module, torch.nn.functional.cross_entropy)
    generator = np.random.Generator(np.random.Philox(key=43))
    images = generator.random((4, side, side), dtype=np.float32)
    images[:, : side // 2] = 0.0  # black and white areas: many values of a pooling window are the same
    images[:, -side // 4 :] = 1.0
    batch = images.reshape(4, -1), np.array([0, 3, 3, 9])
    starts = [model.initial_parameters(seed) for seed in range(4)]
    points = np.stack([np.concatenate([values.ravel() for values in start]) for start in starts]).astype(np.float64)
    rows = model.at_points(points, batch)
    assert rows == pytest.approx(reference.at_points(points, batch), abs=1e-6)
    assert model(starts[2], batch)[2] == pytest.approx(rows[2], abs=1e-6)
    # A sample that is not finite spoils its own row and no other.
    batch[0][1, 5] = np.nan
    again = model.at_points(points, batch)
    assert not np.isfinite(again[1]).all()
    assert np.array_equal(again[[0, 2, 3]], rows[[0, 2, 3]])


def test_every_machine_of_the_synthetic_data_has_its_own_rule():
    task = load_dataset(config(synthetic_samples=4000))
    shards = load_shards(config(synthetic_samples=4000), task)
    assert [len(shard) for shard in shards] == [1000] * 4
    assert task.num_classes == 2
    centres = np.array([shard[:][0].mean(axis=0) for shard in shards])
    spread = np.array([shard[:][0].std(axis=0) for shard in shards])
    assert spread == pytest.approx(np.tile(np.arange(1, 13) ** -0.6, (4, 1)), rel=0.15)
    assert np.linalg.norm(centres[0] - centres[1]) > 1
    other = load_dataset(config(synthetic_samples=4000, seed=2))
    assert not np.allclose(other.train_features[:5], task.train_features[:5])
    pooled = load_shards(config(synthetic_samples=4000, partition="iid"), task)
    assert not np.allclose(pooled[0][:][0].mean(axis=0), centres[0], atol=0.5)
    with pytest.raises(ConfigurationError, match="'own' or 'iid'"):
        config(partition="dirichlet")
    with pytest.raises(ConfigurationError, match="'own'"):
        prepare(RunConfig(partition="own"))


def test_half_of_the_digits_are_spread_and_half_go_by_label():
    settings = RunConfig(strategy="online", partition="half-by-label", batch_size=5)
    task = load_dataset(settings)
    shards = load_shards(settings, task)
    for digit, shard in enumerate(shards):
        labels = shard[:][1]
        share = (labels == digit).mean()
        assert 0.4 < share < 0.7
        assert len(np.unique(labels)) >= 9
    assert sum(len(shard) for shard in shards) == len(task.train_labels)
    with pytest.raises(ConfigurationError, match="one a class"):
        load_shards(RunConfig(strategy="online", partition="half-by-label", num_clients=5, clients_per_round=5), task)


def test_regret_is_against_the_best_of_each_round_and_the_best_of_all():
    experiment = prepare(config())
    model, shards = experiment.model, experiment.shards
    losses = OnlineLosses(model, shards, 5, 20, "test")
    generator = np.random.Generator(np.random.Philox(key=43))
    points = generator.normal(size=(20, 12))
    for r, point in enumerate(points):
        losses.record(r, [point])
    losses.record(20, [points[0]])
    document = losses.document()
    rounds = [
        tuple(np.concatenate(c) for c in zip(*(s[5 * r : 5 * r + 5] for s in shards), strict=True)) for r in range(20)
    ]
    own = [model.evaluate([point], batch)[0] for point, batch in zip(points, rounds, strict=True)]
    assert document["rounds"] == list(range(1, 21))
    assert document["cumulative-loss"] == pytest.approx(5 * np.cumsum(own))
    # No fixed point and no guess for a round beats the optima that were subtracted.
    best = min(np.sum([model.evaluate([c * p], batch)[0] for batch in rounds]) for p in points for c in (0.1, 1, 5))
    assert document["cumulative-loss"][-1] - document["static-regret"][-1] <= 5 * best + 1e-6
    assert document["dynamic-regret"][-1] >= document["static-regret"][-1]
    assert document["dynamic-regret"][-1] <= document["cumulative-loss"][-1] + 1e-9
    del losses.losses[3]
    assert losses.document() is None


def test_more_noise_means_more_regret_and_every_mechanism_says_what_it_guarantees():
    results = {
        name: run_cohort(config(mechanism=name, mu=0.1, evaluate_every=5))
        for name in ("none", "tree", "sqrt_toeplitz", "blt", "independent")
    }
    regrets = {name: result.online["static-regret"][-1] for name, result in results.items()}
    assert regrets["none"] < min(value for name, value in regrets.items() if name != "none")
    for name, result in results.items():
        document = result_document(result)
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
    logistic, cnn = REPRODUCTIONS["zhang-2025-logistic"](), REPRODUCTIONS["zhang-2025-cnn"]()
    assert DEFAULT_SEEDS["zhang-2025-logistic"] == DEFAULT_SEEDS["zhang-2025-cnn"] == 10
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
    document = {"seeds": 2, **run_cells(cells, seeds=2, out=tmp_path, jobs=1)}
    write_reproduction(document, "small", tmp_path)
    rows = {row["algorithm"]: row for row in table_rows(document)}
    assert rows["noiseless"]["epsilon"] is None
    assert rows["blt"]["epsilon"] == pytest.approx(gdp_epsilon(2.0, 1e-5))
    assert rows["blt"]["step"] == 0.01
    curve = document["cells"][0]["algorithms"]["blt"]["curves"]
    assert curve["accuracy"]["rounds"] == [5, 10, 15, 20]
    assert len(curve["static-regret"]["mean"]) == 20
    assert "| small | noiseless | 0.01 |" in (tmp_path / "small.md").read_text()
    assert (tmp_path / "small.png").stat().st_size > 10_000
    one = run_curves(result_document(run_cohort(config(evaluate_every=5, mechanism="blt"))))
    assert curve_statistics([one, one])["accuracy"]["std"] == pytest.approx([0.0] * 4)
