"""Private evaluation of whole runs: on every engine the same, within one mu, in every form of a result."""

import json
import math

import jsonschema
import numpy as np
import pytest
from murmurfl.app.auditing.run_audit import audit_run
from murmurfl.app.engines.cohort import CohortClients
from murmurfl.app.methods import METHODS
from murmurfl.app.planning.plan_answers import base_of_run
from murmurfl.app.reports.making import make_report
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.outcome import Outcome, result_schema
from murmurfl.app.runs.result import write_record
from murmurfl.app.runs.run_summary import summary_lines
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError, compose_gdp, gdp_epsilon

from tests.app.plain import simulate
from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("no_forecast")

SETTINGS = {"num_clients": 4, "clients_per_round": 4, "mu": 3.0, "private_evaluation": 0.05}
FULL = {**SETTINGS, "strategy": "full-batch", "num_rounds": 2}


@pytest.fixture(scope="module")
def full():
    return simulate(**FULL)


def right(result, held_out):
    """What the clients would count without noise, and of how many samples."""
    experiment, hits, count = result.experiment, 0, 0
    for shard, trained in zip(experiment.shards, experiment.sizes, strict=True):
        features, labels = shard[trained:] if held_out else shard[:]
        scores = np.asarray(experiment.model.logits(result.parameters, features))
        hits, count = hits + int((scores.argmax(axis=1) == labels).sum()), count + len(labels)
    return hits, count


def test_it_is_the_count_of_right_predictions_on_what_nobody_trained_on(full):
    """Five standard deviations: by chance once in a million and a half."""
    hits, count = right(full, held_out=True)
    found = full.evaluation
    assert (found.samples, found.clients, found.held_out) == (count, 4, True)
    assert count == sum(len(shard) // 10 for shard in full.experiment.shards)
    assert 0 < abs(found.right - hits) < 5 * found.right_std
    assert sum(full.experiment.sizes) + count == sum(map(len, full.experiment.shards))
    assert full.strategy.history[0].samples == sum(full.experiment.sizes)


def test_without_noise_it_is_exact_and_nothing_is_promised():
    result = simulate(**FULL, mechanism="none", held_out=0.0)
    hits, count = right(result, held_out=False)
    assert result.evaluation.accuracy == pytest.approx(hits / count, abs=1e-6)
    assert math.isinf(result.mu)
    assert "evaluation" not in result.guarantee.sentence


def test_mu_is_that_of_both_sessions_and_exactly_what_is_printed(full):
    experiment = full.experiment
    own, rest = experiment.query("evaluation").mu, experiment.plans()[0].mu
    assert own == pytest.approx(3.0 * math.sqrt(0.05), rel=1e-12)
    assert full.mu == pytest.approx(compose_gdp([own, rest]), rel=1e-12) == pytest.approx(3.0, rel=1e-12)
    assert full.epsilon == pytest.approx(gdp_epsilon(3.0, 1e-5), rel=1e-9)
    stated = [entry["mu-guaranteed"] for entry in full.statements.values()]
    assert stated == pytest.approx([full.mu] * 4, rel=1e-12)
    assert (
        "Of it mu = 0.6709, 5 % of mu^2, is for a private evaluation of the model, released last."
        in full.guarantee.sentence
    )


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_engines_agree_to_the_last_bit(trust):
    runs = [simulate(**FULL, trust=trust, engine=engine) for engine in ("cohort", "inprocess")]
    assert runs[0].evaluation.document == runs[1].evaluation.document
    assert runs[0].mu == runs[1].mu == pytest.approx(3.0)
    if trust == "secure-aggregation":
        assert 3.0 < runs[0].mu_local == runs[1].mu_local <= 3.0 * math.sqrt(2) * (1 + 1e-9)
        alone = simulate(**FULL).evaluation.right_std
        assert runs[0].evaluation.right_std == pytest.approx(alone / math.sqrt(2), rel=1e-2)


def test_beside_a_mean_of_the_features_three_parts_make_one_mu():
    result = simulate(**{**FULL, "features": "soft-gradients"}, trust="secure-aggregation")
    experiment = result.experiment
    parts = [experiment.query("mean").mu, experiment.query("evaluation").mu, experiment.plans()[0].mu]
    assert compose_gdp(parts) == pytest.approx(3.0, rel=1e-9) == pytest.approx(result.mu, rel=1e-9)
    assert [entry["mu-guaranteed"] for entry in result.statements.values()] == pytest.approx([3.0] * 4, rel=1e-9)
    assert result.evaluation.clients == 4
    assert result.answers["mean"].report.samples == sum(experiment.sizes)  # what is set aside is not in it either


def test_every_method_either_takes_it_or_refuses_it_by_name():
    for name, method in METHODS.items():
        settings = {**SETTINGS, "strategy": name}
        if not method.evaluates:
            with raises(ConfigurationError, "conflict", "evaluation.share", match=f"strategy = '{name}', whose epochs"):
                RunConfig(**settings)
        elif name != "auto":
            experiment = prepare(RunConfig(**settings))
            assert experiment.policy().batch_selection != "once"
            assert experiment.loss().mu == pytest.approx(3.0, rel=1e-9)
            assert experiment.query("evaluation").of_client(0).policy.budget_mu == 3.0


@pytest.mark.parametrize("strategy", ["trusted-full-batch", "one-shot", "mu2"])
def test_methods_are_evaluated_and_stay_within_mu(strategy):
    result = simulate(**SETTINGS, strategy=strategy, **({} if strategy == "one-shot" else {"num_rounds": 2}))
    hits, _ = right(result, held_out=True)
    assert abs(result.evaluation.right - hits) < 5 * result.evaluation.right_std
    assert result.mu == pytest.approx(3.0, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["delayed-momentum", "isrl-dp", "noisy-sgd", "online", "trusted-mu2", "auto"])
def test_all_other_methods_are_evaluated_too(strategy):
    result = simulate(**SETTINGS, strategy=strategy, **({} if strategy == "auto" else {"num_rounds": 2}))
    assert result.evaluation.clients == 4
    assert result.mu == pytest.approx(3.0, rel=1e-9)


def test_two_classes_have_an_area():
    settings = {**FULL, "mu": 5.0, "private_evaluation": 0.5, "task": "synthetic-logistic"}
    result = simulate(**settings, score_bins=8, held_out=0.4)
    low, high = result.evaluation.auc_interval
    assert low < result.auc < high
    assert result.auc == pytest.approx(result.evaluation.auc, abs=0.02)


def test_settings_that_contradict_it_are_refused():
    for settings, words in (
        ({"held_out": 0.2}, "held-out"),
        ({"score_bins": 4}, "score-bins"),
        ({"private_evaluation": 0.5, "strategy": "noisy-sgd", "batch_selection": "shuffled"}, "batch-selection"),
        ({"private_evaluation": 0.97, "features": "soft-gradients"}, "centring.share leaves"),
        ({"private_evaluation": 1.0}, "evaluation.share"),
        ({"private_evaluation": -0.1}, "evaluation.share"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            RunConfig(**settings)
    with raises(ConfigurationError, "conflict", "evaluation.score-bins", match="an AUC is of two"):
        prepare(RunConfig(**FULL, score_bins=4))
    with raises(ConfigurationError, "conflict", match=r"evaluation\.share = 0 to audit"):
        audit_run(RunConfig(**{**SETTINGS, "num_rounds": 1}), runs=2)


def test_a_plan_is_of_what_is_left_for_the_training():
    config = RunConfig(**SETTINGS)
    base = base_of_run(config)
    assert base.policy.mu == pytest.approx(3.0 * math.sqrt(0.95), rel=1e-12)
    assert base.samples == max(prepare(config).sizes)


def test_lost_clients_are_missing_and_others_keep_their_model():
    lost = simulate(**{**FULL, "num_clients": 10, "clients_per_round": 10, "lost_replies": 0.3, "seed": 3})
    assert 0 < lost.evaluation.clients < 10
    config = RunConfig(**FULL)
    clients = CohortClients(prepare(RunConfig(**{**FULL, "private_evaluation": 0.0})))
    result = run_experiment(clients, config)
    assert result.evaluation is None
    assert "not-configured" in result.answers["evaluation"].failure
    assert result.accuracy > 0.5


def test_who_has_the_files_knows_it_and_how_sure_it_is(full, tmp_path):
    write_record(full, tmp_path)
    written = json.loads((tmp_path / "result.json").read_text())["private_evaluation"]
    jsonschema.validate(written, result_schema()["properties"]["private_evaluation"])
    assert written["accuracy"] == full.evaluation.accuracy
    assert (written["mu"], written["share"], written["failure"]) == (full.experiment.query("evaluation").mu, 0.05, None)
    low, high = written["interval"]
    assert low < written["noise_interval"][0] < written["accuracy"] < written["noise_interval"][1] <= high
    line = next(line for line in summary_lines(Outcome.read(tmp_path), tmp_path) if "private accuracy" in line)
    assert f"{100 * written['accuracy']:.1f} % ({100 * low:.1f} to {100 * high:.1f})" in line
    assert "held-out samples, 5 % of mu^2" in line
    plain = write_record(simulate(num_rounds=1), tmp_path / "plain")
    assert plain["private_evaluation"] is None


@pytest.mark.long
def test_a_report_has_it(full, tmp_path):
    write_record(full, tmp_path / "run")
    make_report([tmp_path / "run"], tmp_path / "report")
    assert "counted by clients with noise" in (tmp_path / "report" / "index.html").read_text()


def test_a_result_without_one_that_was_asked_for_says_why(tmp_path):
    config = RunConfig(**FULL)
    clients = CohortClients(prepare(RunConfig(**{**FULL, "private_evaluation": 0.0})))
    document = write_record(run_experiment(clients, config), tmp_path)
    jsonschema.validate(document["private_evaluation"], result_schema()["properties"]["private_evaluation"])
    assert document["private_evaluation"]["accuracy"] is None
    assert "not-configured" in document["private_evaluation"]["failure"]
    assert any("none: no client answered" in line for line in summary_lines(Outcome.read(tmp_path), tmp_path))
