"""One thing of every kind in a folder of somebody's own, with no edit elsewhere: the files of docs/own.

They are copied as a reader would copy them, named in a run configuration, and then run, planned, audited, shown in a
report and reproduced.
"""

import json
import re
import shlex
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.auditing.run_audit import audit_run
from murmurfl.app.commands.main import cli
from murmurfl.app.engines import run_cohort, run_in_process
from murmurfl.app.papers import PAPERS
from murmurfl.app.planning.noise_plans import compare_mechanisms
from murmurfl.app.planning.plan_answers import base_of_run
from murmurfl.app.reports.making import make_report
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.result import write_record
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import MECHANISMS, ConfigurationError
from typer.testing import CliRunner

from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("small_rehearsals")

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "own.md").read_text()
FILES = {name: (DOCS / "own" / name).read_text() for name in re.findall(r"^```{literalinclude} own/(\S+)$", PAGE, re.M)}
RUN, REPORT, PLAN, AUDIT = re.findall(r"^murmurfl (.*)$", PAGE, flags=re.MULTILINE)
KEYS = ("task", "partition", "model", "strategy", "mechanism")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """The reader's folder, which is the current one; nothing of it is left behind."""
    before, path = set(MECHANISMS), tmp_path_factory.mktemp("reader")
    (path / "mine").mkdir()
    for name, text in FILES.items():
        (path / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        patch.chdir(path)
        yield path
    for name in MECHANISMS.keys() - before:
        del MECHANISMS[name]
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]
    prepare.cache_clear()


@pytest.fixture
def settings():
    """The run configuration that the page gives, with all things together."""
    return tomllib.loads(FILES["mine.toml"])


@pytest.fixture
def config(settings):
    return RunConfig.from_mapping({**settings, "checkpoint": False})


def command(line):
    """What a command prints."""
    result = CliRunner().invoke(cli, shlex.split(line), env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_page_has_a_file_for_everything_that_can_be_ones_own(settings):
    assert {Path(name).stem for name in FILES} == {"mine", *KEYS, "features", "paper"}
    assert {key for key, value in settings.items() if str(value).startswith("mine.")} == set(KEYS)


def test_all_of_them_run_together_to_one_model(config):
    together, alone = run_cohort(config), run_in_process(config)
    for one, other in zip(together.parameters, alone.parameters, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    experiment = together.experiment
    assert [len(shard) for shard in experiment.shards] == [45, 90, 135, 180]
    assert experiment.model.names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert type(together.strategy).__name__ == "AveragedSGD"
    assert [progress.report.aggregated for progress in together.progress] == [4] * 5
    assert experiment.policy().mechanism == "half-cancelling"
    assert together.mu == pytest.approx(4.0)


def test_they_learn_what_there_is_to_learn(settings):
    quiet = {**settings, "mechanism": "none", "num-rounds": 50, "passes": 10}
    result = run_cohort(RunConfig.from_mapping(quiet))
    labels = result.experiment.data.test_labels
    assert result.accuracy > max(np.mean(labels == label) for label in (0, 1)) + 0.1


def test_features_of_ones_own_are_made_of_a_tasks_images():
    data = prepare(RunConfig.from_mapping({"features": "mine.features:profiles"})).data
    assert data.num_features == 16
    assert np.linalg.norm(data.train_features, axis=1).max() <= 4.0
    assert run_cohort(RunConfig.from_mapping({"features": "mine.features:profiles", "num-rounds": 3})).accuracy > 0


@pytest.mark.long
def test_they_run_from_the_command_line_and_are_reported(settings, folder):
    command(RUN)
    document = json.loads((folder / "runs" / "ours" / "result.json").read_text())
    assert {key: document["config"][key] for key in settings} == settings
    assert "half-cancelling noise on each client" in document["guarantee"]
    command(REPORT)
    page = (folder / "runs" / "ours" / "report" / "index.html").read_text()
    for name in (*(settings[key] for key in KEYS), document["guarantee"]):
        assert name in page


@pytest.mark.long
def test_a_report_is_made_of_a_record_of_them(config, tmp_path):
    write_record(run_cohort(config), tmp_path / "kept")
    assert "<svg" in make_report([tmp_path / "kept"], tmp_path / "page").read_text()


def test_a_mechanism_of_ones_own_stands_in_the_plan(config):
    assert "half-cancelling" in command(PLAN)
    plans = {made.mark: made for made in compare_mechanisms(base_of_run(config)).mechanisms}
    ours = plans["half-cancelling"]
    assert ours.prefix_last == pytest.approx(ours.noise_std * np.sqrt(1 + 4 / 4))
    # Its noise in a prefix sum grows like a quarter of what independent noise grows like, from more noise at first.
    assert ours.noise_std > plans["independent"].noise_std
    assert ours.prefix_last < plans["independent"].prefix_last


def test_an_audit_measures_them(config):
    assert "The claim stands" in command(AUDIT)
    found = audit_run(config, runs=200)
    assert (found.mechanism, found.releases) == ("half-cancelling", 5)
    assert not found.result.violated
    assert found.result.claimed_mu == pytest.approx(4.0)
    # 200 runs measure mu with a standard deviation of about mu / sqrt(400): four of them are tolerated, 6e-5.
    assert found.result.estimated_mu == pytest.approx(found.canary_mu, rel=4 / np.sqrt(400) + 0.02)


def test_a_paper_of_ones_own_is_reproduced(folder):
    shown = command("reproduce mine.paper:Mine --jobs 1 --seeds 1")
    document = json.loads((folder / "runs" / "mine-2026" / "mine-2026.json").read_text())
    assert [cell["settings"]["mu"] for cell in document["cells"]] == [2.0, 8.0]
    for cell in document["cells"]:
        assert set(cell["algorithms"]) == {"averaged", "noisy SGD"}
        assert cell["algorithms"]["averaged"]["mu"]["mean"] == pytest.approx(cell["settings"]["mu"])
    assert "averaged" in shown
    assert (folder / "runs" / "mine-2026" / "mine-2026.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("task", "digit", "did you mean 'digits'?"),
        ("features", "pixel", "did you mean 'pixels'?"),
        ("partition", "dirichlett", "did you mean 'dirichlet'?"),
        ("model", "soft-max", "did you mean 'softmax'?"),
        ("strategy", "mu3", "did you mean 'mu2'?"),
        ("mechanism", "canceling", "did you mean 'cancelling'?"),
        ("strategy", "mine.strategy:AveragedSGD", "to be a Method or a subclass of it"),
        ("strategy", "mine.strategy:Averagd", "AttributeError"),
        ("mechanism", "mine.strategy:Averaged", "a subclass of Mechanism"),
        ("model", "no.such.module:make_model", "ModuleNotFoundError"),
    ],
)
def test_what_is_unknown_is_refused_with_the_nearest_known_one(key, name, said):
    with pytest.raises(ConfigurationError, match=f"{key}.*{re.escape(repr(name))}") as refused:
        RunConfig.from_mapping({key: name})
    assert said in str(refused.value)


def test_an_unknown_paper_is_refused_with_the_nearest_known_one():
    with raises(ConfigurationError, "unknown-name", "reproduction", match="did you mean 'reshef-levy-2024'"):
        PAPERS["reshef-2024"]
