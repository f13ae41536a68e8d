"""Progress of a run: the line of a round, and the trackers that it is logged to."""

import importlib.util
import math
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.runs import progress as trackers
from murmurfl.app.runs.progress import EPSILON, RoundLine, TrackerError, check_trackers, tracking
from murmurfl.app.runs.run_guarantees import expected_guarantee
from murmurfl.app.settings.run_config import TRACKERS, RunConfig
from murmurfl.privacy import ConfigurationError, gdp_epsilon
from murmurfl.privacy.errors import install_command
from typer.testing import CliRunner

from tests.harness.errors import raises

FULL = RoundLine(7, 120, 0.873, 0.4375, "4.38", False, 9, 10, 3725.0)


@pytest.mark.parametrize(
    "line",
    [
        FULL,
        RoundLine(1, 3, None, 2.5, "infinite", False, 0, 0, 0.0),
        RoundLine(12, 17, None, None, "24.4", True, 10, 10, 59.0),
        RoundLine(1, 17, 0.1, 2.5, "24.39", True, 10, 10, None),
        RoundLine(1, 17, 0.1, 2.5, "24.39", False, 10, 10, None, "77.34"),
        RoundLine(1, 17, None, None, "24.39", True, 0, 10, 5.0, "infinite"),
    ],
)
def test_a_line_is_read_back_as_what_it_says(line):
    assert RoundLine.read(str(line)) == line


def test_a_line_says_rounds_accuracy_loss_epsilon_replies_and_time_left():
    assert str(FULL) == (
        "round   7/120  accuracy  87.3 %  loss 0.4375  epsilon 4.38 (whole run)  replies 9/10  left 1:02:05"
    )


@pytest.mark.parametrize("text", ["", "round 1/2", "Round 3: 1 of 2 replies aggregated", f"{FULL} and more"])
def test_other_lines_of_a_log_are_not_taken_for_progress(text):
    assert RoundLine.read(text) is None


def test_a_long_run_without_evaluations_says_a_few_lines_only():
    lines = [RoundLine(t, 1000, None, None, "1", False, 1, 1, 0.0) for t in range(1, 1001)]
    assert sum(line.wanted for line in lines) == 20
    assert lines[-1].wanted
    assert RoundLine(3, 1000, None, 1.0, "1", False, 1, 1, 0.0).wanted


def test_time_left_is_rounded_up():
    assert str(RoundLine(1, 2, None, None, "1", False, 1, 1, math.nextafter(1.0, 2.0))).endswith("left 0:00:02")


def test_time_left_leaves_out_the_first_round_which_waits_for_the_clients(monkeypatch):
    clock = iter([100.0, 130.0, 131.0, 132.0, 133.0, 134.0])  # the start of the run, then the end of every round
    monkeypatch.setattr("murmurfl.app.runs.training_run.time.perf_counter", lambda: next(clock))
    progress = run_cohort(RunConfig(num_rounds=4, evaluate_every=4)).progress
    assert [entry.seconds_left for entry in progress] == [None, 2.0, 1.0, 0.0]
    assert "left" not in str(RoundLine.of(progress[0], "exact"))


ARGUMENTS = ["run", "--engine", "cohort", "--no-twin", "--set", "num-rounds=2", "--set", "mu=1", "--name", "x"]
SENTENCE = "for replacement of one sample of one client, against the server and everybody else"


class Calls(list):
    """A fake module: remembers every call of everything in it."""

    def named(self, name):
        return [arguments for called, arguments in self if called == name]

    def method(self, name, result=None):
        def call(*arguments, **options):
            self.append((name, (*arguments, options)))
            return result

        return call


@pytest.fixture
def fake(monkeypatch):
    """Fakes of all three, in place of those that may be installed."""
    calls = Calls()
    writer = SimpleNamespace(**{n: calls.method(f"tensorboard.{n}") for n in ("add_text", "add_scalar", "close")})
    run = SimpleNamespace(info=SimpleNamespace(run_id="7"))
    names = ("log_param", "log_metric", "set_tag", "set_terminated")
    client = SimpleNamespace(
        get_experiment_by_name=calls.method("mlflow.get"),
        create_experiment=calls.method("mlflow.create", "1"),
        create_run=calls.method("mlflow.create_run", run),
        **{name: calls.method(f"mlflow.{name}") for name in names},
    )
    started = SimpleNamespace(log=calls.method("wandb.log"), finish=calls.method("wandb.finish"), summary={})
    modules = {
        "torch.utils.tensorboard": {"SummaryWriter": calls.method("tensorboard.writer", writer)},
        "mlflow": {"MlflowClient": calls.method("mlflow.client", client)},
        "wandb": {"init": calls.method("wandb.init", started), "Settings": calls.method("wandb.settings", "settings")},
    }
    for name, parts in modules.items():
        module = ModuleType(name)
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, name, module)
    for variable in ("MLFLOW_TRACKING_URI", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    calls.summary = started.summary
    return calls


def murmurfl(*arguments):
    return CliRunner().invoke(cli, [*map(str, arguments)])


def test_nothing_is_logged_unless_it_is_asked_for(fake, tmp_path):
    assert murmurfl(*ARGUMENTS, "--out", tmp_path).exit_code == 0
    assert not fake


def test_a_run_is_logged_to_all_of_them_with_its_guarantee(fake, tmp_path):
    result = murmurfl(*ARGUMENTS, "--set", "track=tensorboard, mlflow,wandb", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    epsilon = gdp_epsilon(1.0, 1e-5)
    scalars = {(name, step): value for name, value, step, _ in fake.named("tensorboard.add_scalar")}
    assert scalars[EPSILON, 2] == pytest.approx(epsilon)
    assert scalars["replies/aggregated", 1] == 50
    metrics = {(name, options["step"]): value for _, name, value, options in fake.named("mlflow.log_metric")}
    assert metrics == scalars
    logged = {options["step"]: values for values, options in fake.named("wandb.log")}
    assert {(name, step): value for step, values in logged.items() for name, value in values.items()} == scalars
    texts = [text for name, text, *_ in fake.named("tensorboard.add_text") if name == "guarantee"]
    tags = [options["tags"]["guarantee"] for *_, options in fake.named("mlflow.create_run")]
    notes = [options["notes"] for (options,) in fake.named("wandb.init")]
    for sentence in (*texts, *tags, *notes, fake.summary["guarantee"]):
        assert SENTENCE in sentence
    assert fake.named("mlflow.set_terminated")[0][1] == "FINISHED"
    assert fake.named("wandb.finish")[0][0]["exit_code"] == 0


def test_everything_stays_on_this_client_by_default(fake, tmp_path):
    murmurfl(*ARGUMENTS, "--set", "track=tensorboard,mlflow,wandb", "--out", tmp_path)
    assert fake.named("wandb.init")[0][0]["mode"] == "offline"
    assert fake.named("mlflow.client")[0][0]["tracking_uri"] == f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert fake.named("tensorboard.writer")[0][0] == str(tmp_path / "x" / "tensorboard")
    told = fake.named("wandb.settings")[0][0]
    assert told["x_disable_meta"]
    assert told["disable_git"]


def test_paths_of_this_client_are_not_logged(fake, tmp_path):
    murmurfl(*ARGUMENTS, "--set", "track=mlflow,wandb", "--out", tmp_path)
    keys = {key for _, key, *_ in fake.named("mlflow.log_param")}
    assert "mu" in keys
    assert not keys & {"out-dir", "data-root"}
    assert not {"out-dir", "data-root"} & set(fake.named("wandb.init")[0][0]["config"])


def test_a_run_that_fails_is_closed_as_failed(fake, tmp_path):
    config = RunConfig(track="mlflow,wandb")
    with pytest.raises(RuntimeError), tracking(config, tmp_path, expected_guarantee(config)):
        raise RuntimeError
    assert fake.named("mlflow.set_terminated")[0][1] == "FAILED"
    assert fake.named("wandb.finish")[0][0]["exit_code"] == 1


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_named_before_anything_starts(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, trackers._TRACKERS[name].module, None)
    with raises(TrackerError, "not-installed", "track", match=re.escape(install_command(name))):
        check_trackers(RunConfig(track=name))
    for engine in ("cohort", "ray"):
        result = murmurfl("run", "--engine", engine, "--set", f"track={name}", "--out", tmp_path, "--name", "x")
        assert result.exit_code == 1
        assert result.stderr.startswith("murmurfl: Expected the package of track")
    assert not list(tmp_path.iterdir())


def test_an_unknown_tracker_is_refused():
    with raises(
        ConfigurationError, "unknown-name", "track", match="Expected track to be names among tensorboard, mlflow, wandb"
    ):
        RunConfig(track="tensorboard,excel")


@pytest.mark.parametrize("name", TRACKERS)
def test_with_the_real_package_where_it_is_installed(name, tmp_path, monkeypatch):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    for variable in ("MLFLOW_TRACKING_URI", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    result = murmurfl(*ARGUMENTS, "--set", f"track={name}", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    if name == "tensorboard":
        assert list((tmp_path / "x" / "tensorboard").iterdir())
    elif name == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
        (run,) = client.search_runs([client.get_experiment_by_name("murmurfl").experiment_id])
        assert SENTENCE in run.data.tags["guarantee"]
        assert run.data.metrics[EPSILON] == pytest.approx(gdp_epsilon(1.0, 1e-5))
    else:
        assert list((tmp_path / "x" / "wandb").glob("offline-run-*"))
