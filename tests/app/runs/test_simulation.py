"""`simulate`: a training from Python, refused in one line where it is none; what it needs comes when it is called."""

import html
import logging
import os
import re
import subprocess
import sys
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app import RunConfig, RunResult, simulate
from murmurfl.app.engines import run_cohort
from murmurfl.privacy import ConfigurationError, gdp_mu

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
    with pytest.raises(ConfigurationError, match="got both"):
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
    with pytest.raises(ConfigurationError, match=r"'cohort' or 'inprocess', got 'ray'\. .*murmurfl run"):
        simulate(engine="ray")
    with pytest.raises(ConfigurationError, match=r"got 'cohrt'\.$"):
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
    assert output.split() == []


def test_result_is_told_in_ten_lines_and_as_a_table_with_a_picture():
    result = simulate(num_rounds=2, epsilon=2.0, task="digits")
    text = repr(result)
    assert len(text.splitlines()) <= 10
    assert max(map(len, text.splitlines())) < 500
    assert str(result.guarantee) in text
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
