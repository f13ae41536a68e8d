"""Training that gives NaN, or far longer contributions than the clip, is counted and shown in a simulation."""

import json
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from murmurfl.app import client_app
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.models.softmax import SoftmaxRegression
from murmurfl.app.reports.making import make_report
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.outcome import Outcome
from murmurfl.app.runs.run_files import write_record
from murmurfl.app.runs.run_summary import summary_lines
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import CorrelatedNoiseMod, UpdatePolicy
from murmurfl.clients import messages as simulation_module
from murmurfl.privacy import MemoryLedger, protocol
from murmurfl.strategies import CorrelatedFedAvg
from typer.testing import CliRunner

BASE = RunConfig(num_clients=4, clients_per_round=4, batch_size=6, num_rounds=3, clip_norm=0.5)
KINDS = {
    "sample": BASE,
    "update": replace(BASE, strategy="online"),
    "contractive": replace(
        BASE, strategy="online", task="synthetic-logistic", partition="own", model="logistic", clip_unit="contractive",
        synthetic_samples=200, synthetic_features=5, learning_rate=0.01,
    ),
    "shuffled": replace(
        BASE, strategy="shuffled", batch_size=8, task="synthetic-logistic", partition="own", model="logistic",
        variant="dp-shuffleg", synthetic_samples=80, synthetic_features=5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_both_engines_count_the_same(name):
    together, alone = (run(KINDS[name]).training for run in (run_cohort, run_in_process))
    assert list(together) == list(alone) == [1, 2, 3]
    for one, other in zip(together.values(), alone.values(), strict=True):
        assert one.rows == other.rows > 0
        assert (one.not_finite, one.clipped) == (other.not_finite, other.clipped)
        assert one.largest_ratio == pytest.approx(other.largest_ratio, rel=1e-5)
        if name in ("sample", "update"):
            assert one.median_ratio == pytest.approx(other.median_ratio, rel=1e-5)
    rows = {"sample": 4 * 6, "update": 4, "contractive": 4 * 6}
    assert together[1].rows == rows.get(name, together[1].rows)


@pytest.fixture
def broken(monkeypatch):
    """Every gradient of the first class's samples is NaN."""
    whole = SoftmaxRegression.__call__

    def gradients(self, parameters, samples):
        rows = np.array(whole(self, parameters, samples))
        rows[np.asarray(samples[1]) == 0] = np.nan
        return rows

    monkeypatch.setattr(SoftmaxRegression, "__call__", gradients)
    monkeypatch.delattr(SoftmaxRegression, "stacked", raising=False)


@pytest.mark.parametrize("run", [run_cohort, run_in_process])
def test_gradients_that_are_nan_are_counted_logged_and_reported(run, broken, tmp_path, caplog):
    config = replace(BASE, clip_norm=5.0)
    shards = prepare(config).shards
    nans = sum(int((shard[: 3 * 6][1] == 0).sum()) for shard in shards)
    with caplog.at_level("WARNING", logger="flwr"):
        result = run(config)
    assert sum(one.not_finite for one in result.training.values()) == nans > 0
    assert caplog.text.count("contributions were not finite and count as zero") == 1, "said once"
    document = write_record(result, tmp_path)
    assert document["training"]["note"] == "simulation only: computed from private data without noise, not private"
    assert document["training"]["not_finite"] == nans
    sentence = f"{nans} of 72 contributions were not finite"
    assert sentence in "\n".join(summary_lines(Outcome.model_validate(document), tmp_path))
    page = make_report([tmp_path], tmp_path / "report").read_text()
    assert sentence in " ".join(page.split())
    assert "not private" in page


def test_a_clip_that_leaves_nothing_is_logged_and_shown(tmp_path, caplog):
    with caplog.at_level("WARNING", logger="flwr"):
        result = run_cohort(replace(BASE, clip_norm=0.001))
    assert "half of the contributions were over" in caplog.text
    assert "times as long as the clip norm" in "\n".join(summary_lines(result.outcome, tmp_path))


def test_an_ordinary_run_warns_of_nothing(tmp_path, caplog):
    with caplog.at_level("WARNING", logger="flwr"):
        result = run_cohort(RunConfig(num_rounds=3))
    assert not caplog.records
    document = write_record(result, tmp_path)
    assert not document["training"]["worrying"]
    assert "contributions" not in "\n".join(summary_lines(Outcome.model_validate(document), tmp_path))
    assert json.loads((tmp_path / "result.json").read_text())["training"]["rows"] == 3 * 80


def test_of_real_machines_nothing_is_counted_and_nothing_said(broken, tmp_path):
    grid = InProcessGrid(client_app.app, 4, BASE.to_mapping())
    result = run_experiment(grid, BASE, deployed=True)
    assert result.training == {}
    assert write_record(result, tmp_path)["training"] is None


def fit(client):
    parameters = client.gradients.initial_parameters(1)
    config = {protocol.VERSION: 1, protocol.SERVER_ROUND: 1, protocol.ACK: 0, protocol.SESSION: "s"}
    return client.fit([*parameters, *parameters], config)[2]


def test_a_reply_has_figures_only_where_a_simulation_is_in_another_process(monkeypatch):
    """On Ray they must travel; in this process they need not, and a real machine's reply never has them."""
    experiment = prepare(BASE)
    ordinary = fit(experiment.client(0, MemoryLedger()))
    with simulation_module.simulated_in_process():
        assert set(fit(experiment.client(0, MemoryLedger()))) == set(ordinary)
    monkeypatch.setattr(simulation_module, "in_simulation", lambda: True)  # as in a worker of Ray's
    there = fit(experiment.client(0, MemoryLedger()))
    assert {name for name in there if name not in ordinary} == {
        f"simulated-training-{name}" for name in ("rows", "not-finite", "clipped", "median-ratio", "largest-ratio")
    }
    assert there["simulated-training-rows"] == 6
    real = experiment.client(0, MemoryLedger())
    monkeypatch.setattr(type(real.machine), "simulated", property(lambda self: False))
    assert set(fit(real)) == set(ordinary)


def project(update):
    app = ClientApp(mods=[CorrelatedNoiseMod(simulation=UpdatePolicy(clip_norm=2.0, mu=1.0, max_participations=9))])

    @app.train()
    def train(message, context):
        (record,) = message.content.array_records.values()
        change = update(int(context.node_config["partition-id"]))
        arrays = {name: Array(array.numpy() + change) for name, array in record.items()}
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "m": MetricRecord({"n": 1})}), reply_to=message)

    return app


def trained(update, rounds=3):
    strategy = CorrelatedFedAvg(num_clients=4, seed=1)
    start = ArrayRecord({"w": Array(np.zeros(4))})
    strategy.start(InProcessGrid(project(update), 4, {}), start, num_rounds=rounds)
    return strategy


def test_updates_far_beyond_the_clip_are_named_in_other_peoples_projects(caplog):
    with caplog.at_level("WARNING", logger="flwr"):
        strategy = trained(lambda machine: 245.0 if machine == 3 else 50.0)
    assert "the update of machine 3 was 245 times the clip" in caplog.text
    assert caplog.text.count("times the clip") == 2, "in one line, once"
    assert [one.largest_ratio for one in strategy.training.values()] == pytest.approx([245.0] * 3)


def test_updates_that_are_nan_are_named_and_others_are_not(caplog):
    with caplog.at_level("WARNING", logger="flwr"):
        trained(lambda machine: np.nan if machine == 1 else 0.1)
    assert "1 of 4 contributions were not finite" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING", logger="flwr"):
        trained(lambda machine: 0.5)
    assert not [record for record in caplog.records if record.funcName != "log_forecast"]


def test_a_diverging_model_is_reported_everywhere(tmp_path, monkeypatch, caplog):
    """0.1 ended such a run with a traceback and without a result."""
    monkeypatch.chdir(tmp_path)
    arguments = ["strategy=trusted-sgd", "num-rounds=3", "learning-rate=1e39"]
    sets = [part for argument in arguments for part in ("--set", argument)]
    with np.errstate(all="ignore"):
        ran = CliRunner().invoke(cli, ["run", "--engine", "cohort", "--name", "far", *sets])
    assert ran.exit_code == 0, ran.output
    document = json.loads((tmp_path / "runs" / "far" / "result.json").read_text())
    assert document["loss"] is None
    assert CliRunner().invoke(cli, ["report", "runs/far"]).exit_code == 0
    assert "not a finite number: the model diverged" in (tmp_path / "runs/far/report/index.html").read_text()


def unscaled(config):
    generator = np.random.Generator(np.random.Philox(9))
    rows, labels = generator.uniform(-1, 1, (160, 3)), generator.integers(0, 3, 160)
    rows[:7] *= 1000 / np.linalg.norm(rows[:7], axis=1, keepdims=True)
    return rows[:120], labels[:120], rows[120:], labels[120:]


def test_samples_far_longer_than_r_are_counted_in_simulations_alone(tmp_path):
    config = replace(BASE, task=f"{__name__}:unscaled", strategy="full-batch", batch_size=8, clip_norm=0.0, mu=50.0)
    for made, expected in (
        (config, "7 training samples are more than twice as long as values from -1 to 1 would be"),
        (replace(config, feature_bound=2.0), "7 training samples are more than twice as long as the declared 2 and"),
    ):
        result = run_cohort(made)
        assert any(words.startswith(expected) for words in result.outcome.warnings)
        document = write_record(result, tmp_path / str(made.feature_bound))
        assert any(expected in line for line in summary_lines(Outcome.model_validate(document), tmp_path))
        assert not any("samples" in words for words in replace(result, deployed=True).outcome.warnings)
    assert not any("long" in words for words in run_cohort(replace(config, feature_bound=600.0)).outcome.warnings)


def test_a_loss_above_that_of_equal_probabilities_is_said():
    wild, mild = (run_cohort(replace(BASE, mechanism="none", learning_rate=step)).outcome for step in (3000.0, 0.01))
    assert wild.loss > np.log(10) > mild.loss
    (words,) = wild.warnings
    assert words.startswith(f"The loss on the test set ends at {wild.loss:.3g}, above log(10) = 2.3,")
    assert mild.warnings == []
