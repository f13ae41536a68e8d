"""Shuffled gradients in the app: optima, the sweep over step sizes, and its reproductions."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.runs.outcome import Outcome
from murmurfl.app.runs.result import write_record
from murmurfl.app.runs.run_summary import summary_lines
from murmurfl.privacy import ConfigurationError
from murmurfl.strategies import private_rounds, proximal
from murmurfl.strategies.shuffled import penalty

from tests.app.shuffled_run import BASE

rng = np.random.Generator(np.random.Philox(key=81))
CRIME = {
    "task": "crime",
    "model": "ridge",
    "synthetic_samples": 6000,  # the defaults: this task reads none
    "synthetic_features": 784,
    "public_samples": 0,
    "data_root": "/nowhere",
}
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
    document = result.outcome.document()
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


def test_what_does_not_fit_is_refused():
    for changes, match in (
        ({"private_share": 0.0}, "private-share"),
        ({"public_samples": 0, "variant": "priv-pub"}, "public-samples"),
        ({"public_samples": 5}, "public samples"),
        ({"public_samples": 600}, "public-samples"),
        ({"mechanism": "blt"}, "mechanism"),
        ({"strategy": "mu2"}, "which does not read it"),
        ({"task": "crime"}, "synthetic-samples"),
        ({**CRIME, "model": "logistic"}, "'ridge'"),
        ({**CRIME, "public_samples": 30}, "public-samples"),
        (CRIME, "communities"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            run_cohort(replace(BASE, **changes))


def test_a_run_without_an_accuracy_has_a_record_and_a_summary(tmp_path, pictures):
    result = run_cohort(replace(BASE, model="mean", regularizer="none"))
    document = write_record(result, tmp_path)
    assert document["accuracy"] is None
    assert any("none; loss" in line for line in summary_lines(Outcome.model_validate(document), tmp_path))
    assert (tmp_path / "accuracy.png").stat().st_size > 5000
