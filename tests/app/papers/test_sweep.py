"""Runs of shuffled gradients that are made together, and the optimum that their risk is measured from."""

from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.methods import METHODS
from murmurfl.app.papers.sweep import optimum, run_sweep
from murmurfl.app.runs.experiment import prepare
from murmurfl.privacy import ConfigurationError, gdp_epsilon
from murmurfl.strategies import proximal
from murmurfl.strategies.shuffled import penalty
from scipy.optimize import minimize

from tests.app.shuffled_run import BASE

rng = np.random.Generator(np.random.Philox(key=81))
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
    with pytest.raises(ConfigurationError, match="amplified"):
        run_cohort(too_large)
    covered, beyond, plain = run_sweep([BASE, too_large, replace(too_large, variant="dp-shuffleg")])
    assert covered["epsilon"] == plain["epsilon"] == pytest.approx(gdp_epsilon(2.0, 1e-5))
    assert beyond["epsilon"] is beyond["mu"] is None
    shuffled = METHODS["shuffled"]
    assert not shuffled.covers(too_large, prepare)
    assert shuffled.covers(replace(too_large, accounting="composed"), prepare)
    assert run_cohort(replace(too_large, accounting="composed")).mu == pytest.approx(2.0)
    with pytest.raises(ConfigurationError, match="differ in"):
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
    with pytest.raises(ConfigurationError, match="paper's problems"):
        optimum(replace(config, model="ridge", regularizer="ball"))
