"""Shuffled gradients in the app: data, optima, the sweep over step sizes, and its reproductions."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.config import PUBLIC_TASKS, RunConfig
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.guarantees import result_guarantee
from murmurfl.app.models.models import make_model
from murmurfl.app.presets import SHUFFLED, regularization
from murmurfl.app.record import result_document, summary_lines, write_record
from murmurfl.app.tasks.loading import load_task
from murmurfl.app.tasks.public import PAPER_SIZES
from murmurfl.privacy import ConfigurationError
from murmurfl.strategies import private_rounds, proximal
from murmurfl.strategies.shuffled import penalty

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

needs_data = pytest.mark.skipif(
    not (Path(os.environ.get("MURMURFL_DATA", "/nowhere")) / "compas").is_dir(), reason="no data root in MURMURFL_DATA"
)


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
        assert "nothing is spent" in result_guarantee(result).sentence
    else:
        assert result.mu == pytest.approx(2.0)
        assert statement["mu-spent"] == pytest.approx(2.0)
        assert f"{expected} epochs" in result_guarantee(result).sentence
        named = "amplification by iteration" if variant == "interleaved" else "plain composition"
        assert named in result_guarantee(result).sentence
    assert statement["public-steps"] == (15 if variant == "interleaved" else 0)


def test_ridge_and_mean_gradients_are_those_of_their_losses():
    features, labels, point = rng.normal(size=(6, 4)), rng.normal(size=6), rng.normal(size=4)
    for name in ("ridge", "mean"):
        model = make_model(name, 4, 1, 3.0)
        rows = model([point], (features, labels))
        for i in range(6):
            one = features[i : i + 1], labels[i : i + 1]
            slope = [
                (model.evaluate([point + h], one)[0] - model.evaluate([point - h], one)[0]) / 2e-6
                for h in 1e-6 * np.eye(4)
            ]
            assert rows[i] == pytest.approx(slope, abs=1e-5)
        assert math.isnan(model.evaluate([point], (features, labels))[1])
        # Clipped steps at the largest step the declaration allows move no two points apart.
        far = point + rng.normal(size=4)
        for clip in (0.1, 1.0, 10.0):
            moved = []
            for x in (point, far):
                gradient = model([x], (features[:1], labels[:1]))[0]
                moved.append(x - 2 / model.smoothness * gradient * min(1, clip / np.linalg.norm(gradient)))
            assert np.linalg.norm(moved[0] - moved[1]) <= np.linalg.norm(point - far) * (1 + 1e-12)


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


@needs_data
@pytest.mark.parametrize("task", PUBLIC_TASKS)
def test_the_papers_data_have_the_papers_sizes_and_the_declared_bounds(task):
    data = load_task(RunConfig(strategy="shuffled", task=task, model=PUBLIC_TASKS[task]))
    assert data.train_features.shape == data.public_features.shape == PAPER_SIZES[task]
    norms = np.linalg.norm(np.concatenate([data.train_features, data.public_features]).astype(float), axis=1)
    assert (norms <= SHUFFLED[task].feature_bound * (1 + 1e-6)).mean() > 0.98
    assert (data.test_labels == data.train_labels).all()
    if task == "credit-card":
        assert (data.train_labels.mean(), data.public_labels.mean()) == (0.5, 0.05)
    assert regularization(RunConfig(strategy="shuffled", task=task, model=PUBLIC_TASKS[task])) == (
        SHUFFLED[task].regularizer,
        SHUFFLED[task].strength,
    )
