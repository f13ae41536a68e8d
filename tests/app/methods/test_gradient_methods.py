"""Methods of one round's gradients and local steps in simulation: momentum, online, shuffled."""

import json
import math
from dataclasses import replace
from decimal import Decimal, localcontext

import numpy as np
import pytest
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.papers import PAPERS, Cell
from murmurfl.app.papers.reproduction import run_cells, write_reproduction
from murmurfl.app.papers.zhang_2025 import RegretTable, lemma_mu
from murmurfl.app.reports.table import curve_statistics
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.outcome import Outcome
from murmurfl.app.runs.result import write_record
from murmurfl.app.runs.run_summary import plot_accuracy, summary_lines
from murmurfl.app.settings.run_config import RunConfig, run_keys
from murmurfl.privacy import ConfigurationError, gdp_epsilon, gdp_mu, rounded_up
from murmurfl.privacy.setting import by_key
from murmurfl.strategies import private_rounds, proximal
from murmurfl.strategies.shuffled import penalty

from benchmarks import pages
from tests.app.run_table import SHUFFLED_ALONE as BASE
from tests.harness.errors import raises


def test_tree_momentum_runs_over_many_passes_with_one_epoch_for_all_clients():
    config = RunConfig(strategy="tree-momentum", passes=5, checkpoint=False)
    experiment = prepare(config)
    policies = {experiment.policy(i) for i in range(10)}
    assert len(policies) == 1
    assert len({len(shard) // config.batch_size for shard in experiment.shards}) == 2, "though shards differ"
    result = run_cohort(config)
    assert result.accuracy > 0.8
    assert result.mu == config.mu
    assert result.strategy.aggregator.stream.keys.simulated
    assert not experiment.strategy(deployed=True).aggregator.stream.keys.simulated, (
        "on real clients noise is the operating system's"
    )
    assert all(statement["releases"] == experiment.num_rounds for statement in result.statements.values())
    with raises(ConfigurationError, "conflict", "clients-per-round"):
        RunConfig(strategy="tree-momentum", clients_per_round=5)


def test_reduced_tree_momentum_takes_the_smoothness_from_the_model():
    config = RunConfig(
        strategy="reduced-tree-momentum",
        task="synthetic-logistic",
        partition="iid",
        model="nonconvex-logistic",
        feature_bound=1.0,
        synthetic_samples=400,
        synthetic_features=8,
        num_clients=2,
        clients_per_round=2,
        batch_size=20,
        passes=5,
        clip_norm=1.1,
        learning_rate=0.1,
        checkpoint=False,
    )
    result = run_cohort(config)
    assert result.strategy.aggregator.stream.smoothness == result.experiment.model.smoothness
    assert result.mu == config.mu
    unknown = prepare(RunConfig(strategy="reduced-tree-momentum", passes=2)).strategy()
    assert math.isinf(unknown.aggregator.stream.smoothness), "softmax regression does not declare any"
    with raises(ConfigurationError, "conflict", "lost-replies"):
        RunConfig(strategy="reduced-tree-momentum", lost_replies=0.1)


def test_correlated_momentum_and_dp_sgd_run_with_clients_that_add_no_noise():
    base = {"passes": 5, "checkpoint": False}
    for settings in ({"strategy": "correlated-momentum"}, {"strategy": "trusted-sgd"}):
        result = run_cohort(RunConfig(**base, **settings))
        assert result.accuracy > 0.8
        assert result.mu == 4.0
        assert math.isinf(result.experiment.plans()[0].mu), "the clients add no noise"
    with raises(ConfigurationError, "conflict", "mechanism"):
        RunConfig(strategy="correlated-momentum", mechanism="tree")
    with raises(ConfigurationError, "conflict", "mechanism"):
        RunConfig(strategy="trusted-sgd", mechanism="blt")


LOGISTIC = {
    "strategy": "online", "task": "synthetic-logistic", "partition": "own", "model": "logistic", "num-clients": 4,
    "clients-per-round": 4, "batch-size": 5, "task.samples": 400, "task.features": 12,
    "clip-unit": "contractive", "learning-rate": 0.01, "checkpoint": False, "mu": 2.0,
}  # fmt: skip


def config(**changes):
    return RunConfig.from_mapping({**LOGISTIC, **by_key(changes, run_keys())})


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
        assert run.mu == lemma_mu(epsilon, run.delta)
        assert gdp_epsilon(run.mu, run.delta) < epsilon, "the lemma's conversion is not tight"
        assert run.clip_unit == "contractive"
        assert {o["mechanism"] for o in cell.algorithms.values()} >= {"tree", "optimal", "sqrt_toeplitz", "none"}
    assert [cell.settings["batch-size"] for cell in cnn] == [5, 5, 10, 10]
    for ours, papers in (cnn[:2], cnn[2:]):
        assert ours.settings["mu"] == pytest.approx(gdp_mu(2.0, 1e-3))
        assert papers.settings["mu"] == pytest.approx(ours.settings["batch-size"] * lemma_mu(2.0, 1e-3))


@pytest.mark.parametrize(("epsilon", "mu"), [(2.0, 0.504), (0.5, 0.132)])
def test_zhangs_noise_is_that_of_lemma_iv_8_in_exact_arithmetic(epsilon, mu):
    """Equations (14) to (16) with sixty digits, for B_g = 12, tau = 5 and a longest column of 3 / 2."""
    with localcontext() as context:
        context.prec = 60
        logarithm, bound, steps, column = -Decimal("0.001").ln(), Decimal(12), Decimal(5), Decimal("1.5")
        rho = ((Decimal(epsilon) + logarithm).sqrt() - logarithm.sqrt()) ** 2  # (14)
        sensitivity = column * 2 * bound / steps  # (15)
        variance = sensitivity**2 / (2 * rho)  # (16)
        assert abs(variance / (2 * bound**2 * column**2 / (steps**2 * rho)) - 1) < Decimal("1e-55"), "the lemma's V_i^2"
        exact = sensitivity / variance.sqrt()  # what the Gaussian mechanism guarantees
        assert abs(Decimal(lemma_mu(epsilon, 1e-3)) / exact - 1) < Decimal("1e-14")
    assert round(lemma_mu(epsilon, 1e-3), 3) == mu


def test_zhangs_noise_guarantees_less_undivided_and_the_record_says_how_it_differs():
    guaranteed = [gdp_epsilon(steps * lemma_mu(2.0, 1e-3), 1e-3) for steps in (5, 10)]
    assert [f"{epsilon:.1f}" for epsilon in guaranteed] == ["10.3", "27.5"]
    text = (pages.ROOT / "docs" / "results.md").read_text()
    cells = [cell for cell in pages.document("zhang-2025-cnn")["cells"] if "less noise" in cell["table"]]
    for cell, steps in zip(cells, (5, 10), strict=True):
        less = cell["settings"]["mu"] / (steps * lemma_mu(2.0, 1e-3))
        assert f"{less:.2f} times less noise than the paper's" in cell["table"]
        assert f"is {less:.2f} times smaller" in text
    assert "guarantees {} and {}".format(*(rounded_up(epsilon) for epsilon in guaranteed)) in text.replace("\n", " ")


def test_the_page_says_that_dynamic_regret_is_nearly_the_cumulative_loss():
    text = pages.regrets()
    for cell in pages.document("zhang-2025-logistic")["cells"]:
        curves = cell["algorithms"]["noiseless"]["curves"]
        loss, regret = (curves[name]["mean"][-1] for name in ("cumulative-loss", "dynamic-regret"))
        assert 0.999 < regret / loss < 1
        assert f"cumulative loss: {regret:,.2f} of {loss:,.2f} (noiseless)" in text


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
    with raises(ConfigurationError, "out-of-range", "variant"):
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
        ({"task": "crime"}, "task.samples"),
        ({**CRIME, "model": "logistic"}, "'ridge'"),
        ({**CRIME, "public_samples": 30}, "public-samples"),
        (CRIME, "communities"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            run_cohort(replace(BASE, **changes))


def test_a_run_without_an_accuracy_has_a_record_and_a_summary(tmp_path):
    result = run_cohort(replace(BASE, model="mean", regularizer="none"))
    document = write_record(result, tmp_path)
    assert document["accuracy"] is None
    assert any("none; loss" in line for line in summary_lines(Outcome.model_validate(document), tmp_path))
    plot_accuracy(Outcome.model_validate(document), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 5000
