"""Trainings in this process: simulate(), and the same run without noise."""

import html
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app import RunResult
from murmurfl.app.commands.main import cli
from murmurfl.app.engines import run_cohort
from murmurfl.app.runs import simulate as module
from murmurfl.app.runs.outcome import Twin
from murmurfl.app.runs.result import write_record
from murmurfl.app.runs.run_summary import closing_lines
from murmurfl.app.runs.simulate import NOTE, add_without_noise, configs_without_noise, without_noise
from murmurfl.app.settings.run_config import NO_NOISE, RunConfig
from murmurfl.privacy import ConfigurationError, gdp_mu
from typer.testing import CliRunner

from tests.app.plain import simulate
from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("no_forecast")

ROOT = Path(__file__).resolve().parents[3]


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one.parameters, other.parameters, strict=True))


def test_it_is_the_engine_s_run():
    config, seen = RunConfig(num_rounds=3, mu=2.0), []
    result = simulate(config, on_progress=seen.append)
    assert isinstance(result, RunResult)
    assert same(result, run_cohort(config))
    assert same(result, simulate({"num-rounds": 3, "mu": 2.0}))
    assert same(result, simulate(num_rounds=3, mu=2.0))
    assert same(result, simulate(config, engine="inprocess"))
    assert [progress.report.server_round for progress in seen] == [1, 2, 3]
    assert result.guarantee.mu == result.mu == 2.0
    assert result.engine == "cohort"


def test_settings_win_over_the_configuration_also_of_mu_and_epsilon():
    config = RunConfig(num_rounds=2, mu=2.0)
    assert simulate(config, num_rounds=1).experiment.num_rounds == 1
    assert simulate(config, epsilon=3.0).mu == gdp_mu(3.0, 1e-5)
    assert simulate({"epsilon": 3.0, "num-rounds": 1}, mu=1.0).mu == 1.0
    with raises(ConfigurationError, "conflict", "mu"):
        simulate(mu=1.0, epsilon=3.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_round": 3}, "got 'num-round'; did you mean 'num-rounds'?"),
        ({"num_rounds": 2.5}, "num-rounds to be an integer"),
        ({"mu": [1.0]}, "mu to be a finite number"),
        ({"strategy": "mu22"}, "did you mean 'mu2'?"),
    ],
)
def test_what_is_wrong_is_named(settings, words):
    with pytest.raises(ConfigurationError, match=r"Expected") as error:
        simulate(**settings)
    assert words in str(error.value)


def test_ray_is_refused_with_what_to_use_instead():
    with raises(ConfigurationError, "unknown-name", "engine", match=r"'ray'\. .*murmurfl run"):
        simulate(engine="ray")
    with raises(ConfigurationError, "unknown-name", "engine", got="cohrt"):
        simulate(engine="cohrt")


def test_the_processes_of_a_run_import_no_engine():
    code = """
import sys
from murmurfl.app import client_app, server_app
import murmurfl.app
assert {"RunConfig", "RunResult", "simulate"} <= set(dir(murmurfl.app))
loaded = {name for name in sys.modules if name.startswith("murmurfl.app.")}
print(*sorted(name for name in loaded if name.split(".")[2] in ("engines", "commands", "simulation", "papers")))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert set(output.split()) <= {"murmurfl.app.engines", "murmurfl.app.engines.direct"}


def test_result_is_told_in_ten_lines_and_as_a_table_with_a_picture():
    result = simulate(num_rounds=2, epsilon=2.0, task="digits")
    text = repr(result)
    assert text.startswith("REHEARSAL")
    assert len(text.splitlines()) <= 20
    assert max(map(len, text.splitlines())) <= 100
    assert str(result.guarantee) in " ".join(text.split())
    page = result._repr_html_()
    assert str(result.guarantee) in html.unescape(page)
    assert "<table>" in page
    (picture,) = re.findall(r'src="data:image/png;base64,(.*?)"', page)
    assert b64decode(picture).startswith(b"\x89PNG")


@pytest.mark.parametrize("engine", ["cohort", "inprocess"])
def test_log_has_warnings_alone_unless_everything_is_asked_for(engine, caplog):
    logger = logging.getLogger("flwr")
    before = logger.level
    simulate(num_rounds=2, mu=50.0, engine=engine)
    assert not [record for record in caplog.records if record.levelno < logging.WARNING]
    assert logger.level == before
    with caplog.at_level("INFO", logger="flwr"):
        simulate(num_rounds=2, mu=50.0, engine=engine, verbose=True)
    assert [record for record in caplog.records if record.levelno == logging.INFO]


def test_notebook_has_a_bar(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    result = simulate(num_rounds=2)
    last = capsys.readouterr().out.split("\r")[-1]
    assert last == f"{'█' * 24}  round 2/2  accuracy {100 * result.accuracy:.1f} %  \n"


def test_a_terminal_has_a_bar_and_a_file_has_none(monkeypatch, capsys):
    simulate(num_rounds=2)
    assert not capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    simulate(num_rounds=2)
    assert "round 2/2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "settings",
    [
        {"num-rounds": 4},
        pytest.param({"strategy": "trusted-mu2", "num-rounds": 4}, marks=pytest.mark.long),
        {"strategy": "full-batch", "num-rounds": 3, "trust": "secure-aggregation", "epsilon": 1.0},
        pytest.param({"strategy": "one-shot", "features": "soft-gradients", "mu": 0.5}, marks=pytest.mark.long),
        pytest.param({"strategy": "auto", "epsilon": 0.5, "noise-quality": "fast"}, marks=pytest.mark.long),
        pytest.param({"mechanism": "blt", "batch-selection": "shuffled", "mu": 1.0}, marks=pytest.mark.long),
    ],
)
def test_a_run_without_noise_is_no_worse_and_has_no_noise(settings):
    outcome = run_cohort(RunConfig.from_mapping(settings)).outcome
    for config in configs_without_noise(outcome):
        assert config.mechanism.kind == NO_NOISE
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


SMALL = {"task": "synthetic", "task.samples": 400, "task.features": 5, "num-rounds": 3}


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


def test_it_is_put_into_the_files_once(tmp_path):
    write_record(run_cohort(RunConfig(num_rounds=2)), tmp_path / "run")
    before = json.loads((tmp_path / "run" / "result.json").read_text())
    outcome = add_without_noise(tmp_path / "run")
    document = outcome.document()
    assert {name for name in document if document[name] != before[name]} == {"without_noise"}
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == document
    assert add_without_noise(tmp_path / "run") == outcome


def test_a_run_without_noise_has_no_other(tmp_path):
    write_record(run_cohort(RunConfig(num_rounds=1, mechanism="none")), tmp_path / "run")
    assert add_without_noise(tmp_path / "run").without_noise is None


def test_real_clients_have_no_run_without_noise():
    outcome = run_cohort(RunConfig(num_rounds=1)).outcome.model_copy(update={"engine": "real-nodes"})
    with raises(ConfigurationError, "unsupported", match="their data are in no one place"):
        without_noise(outcome)


def test_another_programs_run_has_none_of_ours(tmp_path):
    document = {**run_cohort(RunConfig(num_rounds=1)).outcome.document(), "config": {"strategy": "x:Y"}, "engine": None}
    (tmp_path / "result.json").write_text(json.dumps(document))
    with raises(ConfigurationError, "unsupported", match="one of another program"):
        add_without_noise(tmp_path)


@pytest.mark.parametrize(("option", "made"), [((), True), (("--no-twin",), False)])
def test_the_command_makes_it_and_one_client_alone_unless_nothing_is_to_be_compared(option, made, tmp_path):
    run = ["run", "--engine", "cohort", "--set", "num-rounds=1", "--out", str(tmp_path), "--name", "x", *option]
    printed = CliRunner().invoke(cli, run).stdout
    assert ("without noise " in printed) == ("one client alone" in printed) == made
    document = json.loads((tmp_path / "x" / "result.json").read_text())
    assert (document["without_noise"] is not None) == (document["alone"] is not None) == made


def test_a_shown_result_is_as_wide_as_the_terminal(monkeypatch):
    result = simulate(RunConfig(num_rounds=2, checkpoint=False))
    assert 80 < max(map(len, repr(result).splitlines())) <= 100
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((72, 20)))
    assert 60 < max(map(len, repr(result).splitlines())) <= 72
