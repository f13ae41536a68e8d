"""The default run: what it sets, when, what it comes to, and what its summary ends with."""

import statistics

import numpy as np
import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.methods.method import AUTO
from murmurfl.app.runs.outcome import Outcome
from murmurfl.app.runs.run_summary import closing_lines, short_lines, warning_lines
from murmurfl.app.runs.simulate import simulate
from murmurfl.app.settings.layers import DEFAULT_RUN, with_defaults
from murmurfl.app.settings.registry import registry
from murmurfl.app.settings.run_config import SECURE, RunConfig, run_keys
from murmurfl.privacy.setting import by_key
from typer.testing import CliRunner


def run_with(**settings):
    return run_cohort(RunConfig.from_mapping(with_defaults(by_key(settings, run_keys()))))


def accuracy_on_own_mixes(result):
    """Return the accuracy on the test set in the proportions of each client's own classes; their mean."""
    data, classes = result.experiment.data, range(result.experiment.data.num_classes)
    right = np.asarray(result.predict(data.test_features)) == data.test_labels
    of_class = np.array([right[data.test_labels == one].mean() for one in classes])
    labels = [np.asarray(shard[:][1], dtype=int) for shard in result.experiment.shards]
    return np.mean([of_class @ np.bincount(own, minlength=len(classes)) / len(own) for own in labels])


@pytest.mark.more_cases
def test_the_default_run_is_worth_federating_for():
    """Five seeds: 96.2 % on average, a seed differs by 1.0 points, so the mean by 0.5; alone 37.3 and 93.5 %."""
    results = [run_with(seed=seed) for seed in range(1, 6)]
    assert statistics.fmean(result.accuracy for result in results) >= 0.95
    for result in results:
        assert result.epsilon <= 4
        assert result.epsilon_local <= 29.8
        assert result.guarantee.trust == "secure-aggregation"
        assert result.experiment.config.noise_quality == "exact"
    assert statistics.fmean(result.alone.accuracy for result in results) <= 0.42
    together = statistics.fmean(map(accuracy_on_own_mixes, results))
    assert together >= statistics.fmean(result.alone.own_mix for result in results) + 0.01


def test_the_first_seed_of_the_default_run_is_worth_federating_for():
    """Its accuracy is 96.4 %; seeds differ by 1.0 points."""
    result = run_with()
    assert result.accuracy >= 0.93
    assert result.guarantee.trust == "secure-aggregation"
    assert result.epsilon <= 4


def test_a_server_that_sees_every_release_costs_accuracy_and_the_last_line_says_so(tmp_path):
    result = run_with(trust="untrusted-server")
    twin = {"note": "", "accuracy": 0.99, "rounds": 1, "seconds": 0.0}
    outcome = Outcome.model_validate({**result.outcome.document(), "without_noise": twin, "alone": None})
    assert "secure aggregation (trust=secure-aggregation) needs far less noise" in short_lines(outcome, tmp_path)[-1]


@pytest.mark.parametrize(
    "changes",
    [{"seed": 2}, {"num-clients": 20}, {"lost-replies": 0.1}, {"epsilon": 2.0}, {"mu": 1.0}, {"partition": "iid"}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_setting_changes_nothing_but_itself(changes):
    started = with_defaults(changes)
    gone = {"epsilon"} if "mu" in changes else {"partition.alpha"} if "partition" in changes else set()
    assert started == {name: value for name, value in DEFAULT_RUN.items() if name not in gone} | changes
    config = RunConfig.from_mapping(started)
    assert config.clients_per_round == config.num_clients


def test_every_strategy_runs_on_the_default_federation():
    for name, method in registry("strategy").items():
        if name == AUTO or method.uses_public:
            continue
        settings = {"strategy": name} | ({} if method.sums_samples else {"batch-size": 4})
        config = RunConfig.from_mapping(with_defaults(settings))
        assert config.num_clients == DEFAULT_RUN["num-clients"]
        assert config.secure == (SECURE in method.trusts)


def test_another_task_has_clients_and_features_of_its_own():
    config = RunConfig.from_mapping(with_defaults({"task": "mnist"}))
    plain = RunConfig()
    assert (config.strategy, config.trust_model) == (DEFAULT_RUN["strategy"], DEFAULT_RUN["trust"])
    assert (config.num_clients, config.features, config.partition) == (
        plain.num_clients,
        plain.features,
        plain.partition,
    )


def test_the_papers_preset_starts_from_the_keys_defaults():
    assert with_defaults({"preset": "paper"}) == {"preset": "paper"}


def test_simulate_starts_from_the_default_run_and_a_whole_configuration_does_not():
    assert simulate(num_rounds=1).experiment.config.strategy == DEFAULT_RUN["strategy"]
    assert simulate(RunConfig(num_rounds=1)).experiment.config.strategy == RunConfig().strategy


@pytest.mark.more_cases
def test_the_summary_ends_with_mus_meaning_and_what_to_compare_with(tmp_path):
    folder = ["--out", str(tmp_path)]
    printed = CliRunner().invoke(cli, ["run", *folder, "--name", "x"]).stdout.splitlines()
    guarantee, means = (line.strip() for line in printed[-2:])
    assert len(printed) <= 15
    assert "\n".join(printed).count("epsilon = 4 ") == 1, "the guarantee stands once"
    assert guarantee.startswith("mu = 0.925 Gaussian DP, epsilon = 4 at delta = 1e-05, for replacement of one sample")
    assert means.startswith("The best guess whether one sample")
    (compared,) = (line for line in printed if line.strip().startswith("compare"))
    assert float(compared.partition("without noise ")[2].partition(" %")[0]) > 98
    assert "not private" in compared
    (mixes,) = (line for line in printed if line.strip().startswith("own mix"))
    assert "in each client's classes, worst to best" in mixes


def test_of_several_warnings_the_gravest_alone_is_said(tmp_path):
    outcome = run_cohort(RunConfig(num_rounds=1)).outcome
    better, worse = (
        {"note": "", "accuracy": outcome.accuracy + sign * 0.01, "rounds": 1, "seconds": 0.0} for sign in (1, -1)
    )
    both = Outcome.model_validate({**outcome.document(), "without_noise": worse, "alone": {**better, "clients": 1}})
    lines = short_lines(both, tmp_path)
    assert "the settings do not fit" in lines[-1]
    assert len(warning_lines(both)) >= 2
    assert not any("One client alone does better" in line for line in lines)


@pytest.mark.parametrize(("trust", "short"), [("", True), ("secure-aggregation", False)])
def test_what_a_meaning_rests_on_is_not_left_out(trust, short, tmp_path):
    outcome = run_cohort(RunConfig(num_rounds=1, trust=trust)).outcome
    text = " ".join(short_lines(outcome, tmp_path))
    assert ("(a coin: 50 %)" in text) == short
    assert ("of each sum are honest; if not, at most" in text) != short


def test_without_noise_there_is_nothing_to_say():
    assert closing_lines(run_with(mechanism="none", num_rounds=1).outcome) == []


def test_a_run_that_was_not_made_without_noise_says_nothing_of_it():
    document = run_cohort(RunConfig(num_rounds=1)).outcome.document()
    lines = closing_lines(Outcome.model_validate(document))
    assert "right at most 97.8 % of the time" in lines[1]
    assert len(lines) == 2
