"""Private centring of whole runs: on every engine the same, within one mu, and a model that others can use."""

import json
import math

import jsonschema
import numpy as np
import pytest
from murmurfl.app.auditing.run_audit import audit_run
from murmurfl.app.engines.cohort import CohortClients
from murmurfl.app.methods import METHODS
from murmurfl.app.planning.plan_answers import base_of_run
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.outcome import result_schema
from murmurfl.app.runs.result import write_record
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError, centred, compose_gdp, gdp_epsilon

from tests.app.plain import simulate
from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("no_forecast")

SETTINGS = {"features": "soft-gradients", "num_clients": 4, "clients_per_round": 4, "mu": 3.0}
FULL = {**SETTINGS, "strategy": "full-batch", "num_rounds": 3}


@pytest.fixture(scope="module")
def full():
    return simulate(**FULL)


def test_soft_gradients_are_centred_by_default_and_others_on_request(full):
    assert full.experiment.is_centred
    assert not prepare(RunConfig(features="soft-gradients", centring="none")).is_centred
    assert not prepare(RunConfig()).is_centred
    assert prepare(RunConfig(centring="private")).is_centred
    assert full.experiment.model.names == ["weight"]  # the constant is the bias
    assert full.experiment.model.shapes == [(10, full.answers["mean"].answer.size + 1)]


def test_it_pays(full):
    plain = simulate(**FULL, centring="none")
    assert full.mu == plain.mu
    assert full.accuracy > plain.accuracy + 0.02


def test_mu_is_that_of_both_sessions_and_exactly_what_is_printed(full):
    experiment = full.experiment
    mean, rest = experiment.query("mean").mu, experiment.plans()[0].mu
    assert mean == pytest.approx(3.0 * math.sqrt(0.05), rel=1e-12)
    assert full.mu == pytest.approx(compose_gdp([mean, rest]), rel=1e-12) == pytest.approx(3.0, rel=1e-12)
    assert full.epsilon == pytest.approx(gdp_epsilon(3.0, 1e-5), rel=1e-9)
    assert {entry["mu-guaranteed"] for entry in full.statements.values()} == {full.mu}
    sentence = full.guarantee.sentence
    assert sentence.startswith("mu = 3 Gaussian DP")
    assert "Of it mu = 0.6709, 5 % of mu^2, is for the mean of the features, which is released first." in sentence


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
@pytest.mark.parametrize("strategy", ["mu2", "full-batch"])
def test_engines_agree_to_the_last_bit(strategy, trust):
    settings = {**SETTINGS, "strategy": strategy, "trust": trust, "num_rounds": 2}
    runs = [simulate(**settings, engine=engine) for engine in ("cohort", "inprocess")]
    assert np.array_equal(runs[0].answers["mean"].answer, runs[1].answers["mean"].answer)
    if strategy == "full-batch":
        assert all(np.array_equal(*parts) for parts in zip(*(run.parameters for run in runs), strict=True))
    assert runs[0].parameters[0] == pytest.approx(runs[1].parameters[0], abs=1e-6)
    assert runs[0].mu == runs[1].mu == pytest.approx(3.0)
    assert runs[0].mu_local == runs[1].mu_local
    if trust == "secure-aggregation":
        assert 3.0 < runs[0].mu_local <= 3.0 * math.sqrt(2) * (1 + 1e-9)


def test_every_method_either_takes_it_or_refuses_it_by_name():
    own = {"online": "takes samples as they come", "shuffled": "takes samples as they come", "auto": None}
    for name, method in METHODS.items():
        if own.get(name):
            assert not method.centres
            with raises(ConfigurationError, "conflict", "centring", match=f"strategy = '{name}', which {own[name]}"):
                RunConfig(**{**SETTINGS, "strategy": name, "centring": "private"})
        elif name not in own:
            experiment = prepare(RunConfig(**SETTINGS, strategy=name, batch_size=RunConfig().batch_size))
            assert experiment.is_centred
            assert experiment.policy().batch_selection != "once"
            assert experiment.loss().mu == pytest.approx(3.0, rel=1e-9)
    assert not prepare(RunConfig(**{**SETTINGS, "strategy": "noisy-sgd", "batch_selection": "shuffled"})).is_centred


@pytest.mark.parametrize("strategy", ["delayed-momentum", "isrl-dp", "trusted-mu2", "trusted-full-batch"])
def test_other_methods_train_around_it_and_stay_within_mu(strategy):
    result = simulate(**SETTINGS, strategy=strategy, num_rounds=2)
    assert result.answers["mean"].report.aggregated == 4
    assert result.mu == pytest.approx(3.0, rel=1e-9)
    assert all(report.aggregated == 4 for report in result.strategy.history)


def test_settings_that_contradict_it_are_refused():
    with raises(ConfigurationError, "conflict", "centring", match="batch-selection"):
        RunConfig(strategy="noisy-sgd", batch_selection="shuffled", centring="private")
    with raises(
        ConfigurationError, "conflict", "centring.share", match=r"centring.share.*0\.05 without centring = 'private'"
    ):
        RunConfig(centring_share=0.1)
    with raises(ConfigurationError, "unknown-name", "centring"):
        RunConfig(centring="yes")


def test_without_noise_nothing_is_promised_and_the_mean_is_the_mean():
    result = simulate(**FULL, mechanism="none")
    assert math.isinf(result.mu)
    assert "mean of the features" not in result.guarantee.sentence
    features = np.concatenate([shard[:][0] for shard in result.experiment.shards])
    assert result.answers["mean"].answer == pytest.approx(features.mean(axis=0), abs=1e-4)


def test_lost_clients_are_missing_in_the_mean_and_nowhere_else():
    result = simulate(**{**FULL, "num_clients": 10, "clients_per_round": 10, "lost_replies": 0.3, "seed": 3})
    assert 0 < result.answers["mean"].report.aggregated < 10
    assert result.answers["mean"].report.samples < 1438
    assert result.accuracy > 0.85


def test_a_server_asks_for_what_its_clients_do_not_have_in_vain():
    """Clients without centring under a run with it: nothing is released, and it is said why."""
    config = RunConfig(**FULL)
    clients = CohortClients(prepare(RunConfig(**FULL, centring="none")))
    with raises(ConfigurationError, "missing", match="clients refused with not-configured"):
        run_experiment(clients, config)
    assert all(entry["samples-used"] == 0 for entry in clients.statements("s").values())


def test_who_has_the_files_can_use_the_model(full, tmp_path):
    document = write_record(full, tmp_path)
    schema, written = result_schema(), json.loads((tmp_path / "result.json").read_text())
    jsonschema.validate(written["centring"], schema["properties"]["centring"])
    assert document["config"]["centring"] == "private"
    mean = document["centring"]
    assert (mean["asked"], mean["aggregated"], mean["share"], mean["constant"]) == (4, 4, 0.05, 0.3)
    assert mean["mu"] == full.experiment.query("mean").mu
    assert mean["samples"] == sum(full.experiment.sizes)
    with np.load(tmp_path / "model.npz") as model:
        assert set(model.files) == {"weight", "centring.centre", "centring.constant"}
        inputs = centred(
            full.experiment.data.test_features, model["centring.centre"], float(model["centring.constant"])
        )
        guesses = (inputs @ model["weight"].T).argmax(axis=1)
    assert (guesses == full.experiment.data.test_labels).mean() == full.accuracy
    plain = write_record(simulate(num_rounds=1), tmp_path / "plain")
    assert plain["centring"] is None
    assert plain["config"]["centring"] == "none"


def test_gradient_norms_are_of_what_the_model_is_trained_on(full):
    result = simulate(**FULL, gradient_norm=True)
    assert np.isfinite(result.gradient_norms["values"]).all()
    assert result.accuracy == full.accuracy


def test_an_audit_says_how_what_follows_the_mean_is_audited():
    with raises(ConfigurationError, "conflict", match=r"--set centring=none --set mu=2\.9240"):
        audit_run(RunConfig(**SETTINGS, num_rounds=2), runs=3)
    base = base_of_run(RunConfig(**SETTINGS))
    assert base.policy.mu == pytest.approx(3.0 * math.sqrt(0.95))
    assert gdp_epsilon(base.policy.mu, 1e-5) == base.settings["epsilon"]
