"""The same run without noise: what it is made of, when it is made, and that it is marked as not private."""

import json
import logging

import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.runs import simulate as module
from murmurfl.app.runs.outcome import Twin
from murmurfl.app.runs.result import write_record
from murmurfl.app.runs.run_summary import closing_lines
from murmurfl.app.runs.simulate import NOTE, add_without_noise, configs_without_noise, without_noise
from murmurfl.app.settings.run_config import NO_NOISE, RunConfig
from murmurfl.privacy import ConfigurationError
from typer.testing import CliRunner


@pytest.mark.parametrize(
    "settings",
    [
        {"num-rounds": 4},
        pytest.param({"strategy": "trusted-mu2", "num-rounds": 4}, marks=pytest.mark.long),
        {"strategy": "full-batch", "num-rounds": 3, "trust": "secure-aggregation", "epsilon": 1.0},
        pytest.param({"strategy": "one-shot", "features": "soft-gradients", "mu": 0.5}, marks=pytest.mark.long),
        pytest.param({"strategy": "auto", "epsilon": 0.5, "noise-quality": "fast"}, marks=pytest.mark.long),
        pytest.param({"mechanism": "blt", "secret-order": True, "mu": 1.0}, marks=pytest.mark.long),
    ],
)
def test_a_run_without_noise_is_no_worse_and_has_no_noise(settings):
    outcome = run_cohort(RunConfig.from_mapping(settings)).outcome
    for config in configs_without_noise(outcome):
        assert config.mechanism == NO_NOISE
        assert (config.seed, config.task, config.strategy) == (1, "digits", outcome.config["strategy"])
    made = without_noise(outcome)
    assert made.note == NOTE
    assert made.accuracy > outcome.accuracy
    assert logging.root.manager.disable == logging.NOTSET


def test_steps_and_clips_that_were_set_stay():
    outcome = run_cohort(RunConfig(num_rounds=2, learning_rate=0.25, clip_norm=0.5)).outcome
    first, *_ = configs_without_noise(outcome)
    assert (first.learning_rate, first.clip_norm, first.num_rounds) == (0.25, 0.5, 2)
    chosen, *_ = configs_without_noise(run_cohort(RunConfig(num_rounds=2)).outcome)
    assert (chosen.learning_rate, chosen.clip_norm) == (0.0, 0.0)


SMALL = {"task": "synthetic", "synthetic-samples": 400, "synthetic-features": 5, "num-rounds": 3}


@pytest.mark.parametrize("strategy", ["full-batch", "online", "mu2"])
def test_it_is_made_with_the_runs_own_steps_too_and_the_better_counts(strategy):
    """Also where a run has an infinite ball, or none: nobody said so when such steps were refused."""
    batch = {} if strategy == "full-batch" else {"batch-size": 8}
    outcome = run_cohort(RunConfig.from_mapping({**SMALL, "strategy": strategy, **batch})).outcome
    preset, own, *_ = configs_without_noise(outcome)
    assert (preset.learning_rate, own.learning_rate) == (0.0, outcome.config["learning-rate"])
    ended = [run_cohort(config).outcome.accuracy for config in (preset, own)]
    assert without_noise(outcome).accuracy >= max(ended)


def test_steps_that_are_the_same_are_tried_once_and_other_rounds_only_if_need_be(monkeypatch):
    outcome = run_cohort(RunConfig.from_mapping({**SMALL, "strategy": "online", "batch-size": 8})).outcome
    made = []
    monkeypatch.setattr(module, "run_cohort", lambda config: made.append(config) or run_cohort(config))
    without_noise(outcome.model_copy(update={"accuracy": 0.0}))
    assert [config.num_rounds for config in made] == [3]
    made.clear()
    without_noise(outcome.model_copy(update={"accuracy": 1.0}))
    assert [config.num_rounds for config in made] == [3, 0]


def test_a_twin_that_ends_below_the_private_run_says_what_that_means():
    outcome, said = run_cohort(RunConfig(num_rounds=2)).outcome, "Without noise it ends below the private run"
    for accuracy, lower in ((outcome.accuracy, False), (outcome.accuracy - 0.01, True)):
        twin = Twin(note=NOTE, accuracy=accuracy, rounds=2, seconds=0.0)
        lines = closing_lines(outcome.model_copy(update={"without_noise": twin}))
        assert any(line.strip().startswith(said) for line in lines) == lower


def test_it_is_put_into_the_files_once(tmp_path, pictures):
    write_record(run_cohort(RunConfig(num_rounds=2)), tmp_path / "run")
    before = json.loads((tmp_path / "run" / "result.json").read_text())
    picture = (tmp_path / "run" / "accuracy.png").read_bytes()
    outcome = add_without_noise(tmp_path / "run")
    document = outcome.document()
    assert {name for name in document if document[name] != before[name]} == {"without_noise"}
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == document
    assert (tmp_path / "run" / "accuracy.png").read_bytes() != picture
    assert add_without_noise(tmp_path / "run") == outcome


def test_a_run_without_noise_has_no_other(tmp_path):
    write_record(run_cohort(RunConfig(num_rounds=1, mechanism="none")), tmp_path / "run")
    assert add_without_noise(tmp_path / "run").without_noise is None


def test_real_machines_have_no_run_without_noise():
    outcome = run_cohort(RunConfig(num_rounds=1)).outcome.model_copy(update={"engine": "real-nodes"})
    with pytest.raises(ConfigurationError, match="their data are in no one place"):
        without_noise(outcome)


def test_another_programs_run_has_none_of_ours(tmp_path):
    document = {**run_cohort(RunConfig(num_rounds=1)).outcome.document(), "config": {"strategy": "x:Y"}, "engine": None}
    (tmp_path / "result.json").write_text(json.dumps(document))
    with pytest.raises(ConfigurationError, match="one of another program"):
        add_without_noise(tmp_path)


@pytest.mark.parametrize(("option", "made"), [((), True), (("--no-twin",), False)])
def test_the_command_makes_it_where_it_takes_a_moment_or_is_asked_to(option, made, tmp_path):
    run = ["run", "--engine", "cohort", "--set", "num-rounds=1", "--out", str(tmp_path), "--name", "x", *option]
    printed = CliRunner().invoke(cli, run).stdout
    assert ("beside it  without noise" in printed) == made
    document = json.loads((tmp_path / "x" / "result.json").read_text())
    assert (document["without_noise"] is not None) == made
