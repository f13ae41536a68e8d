"""The example of a model of one's own: short, private for each sample, and with a report."""

import json
from pathlib import Path

import jsonschema
import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.runs.outcome import result_schema
from murmurfl.privacy import gdp_mu
from typer.testing import CliRunner

from tests.harness.packages import EXAMPLES, accuracy


def test_own_model_leaves_a_report(run_example, tmp_path, monkeypatch):
    """94 % +- 2 % from run to run; the larger class alone is 59 %."""
    monkeypatch.chdir(tmp_path)
    lines = run_example("own-model")
    assert accuracy(lines) > 0.85
    report = CliRunner().invoke(cli, ["report", "runs/own-model"])
    assert report.exit_code == 0, report.output
    page = Path("runs/own-model/report/index.html").read_text()
    assert "epsilon = 4 at delta = 1e-05, for replacement of one sample of one client" in page
    assert "counted by clients with noise" in page
    document = json.loads(Path("runs/own-model/result.json").read_text())
    jsonschema.Draft202012Validator(result_schema()).validate(document)
    assert document["forecast"]["verdict"] == "useful"
    evaluated = document["private_evaluation"]
    assert (evaluated["samples"], evaluated["held_out"]) == (450, False)
    # Four standard deviations of the noise, and what 119 and 450 samples may differ by.
    assert evaluated["accuracy"] == pytest.approx(accuracy(lines), abs=4 * evaluated["noise_std"] + 0.06)
    assert document["mu"] == pytest.approx(gdp_mu(4.0, 1e-5)), "training and evaluation together"


def test_own_model_is_as_short_as_promised():
    """All of its Python, docstrings and blank lines too."""
    files = (EXAMPLES / "own-model" / "own_model").glob("*.py")
    assert sum(len(file.read_text().splitlines()) for file in files) < 80


@pytest.mark.parametrize("name", ["client_app.py", "task.py"])
def test_a_client_says_nothing_of_messages_or_noise(name):
    text = (EXAMPLES / "own-model" / "own_model" / name).read_text().lower()
    assert not any(word in text.partition('"""\n')[2] for word in ("message", "noise", "recorddict"))
