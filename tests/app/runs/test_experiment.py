"""Whole runs on the in-process engine: accuracy one can believe, losses, presets, records."""

import json
import logging
import math
import os
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from murmurfl.app import client_app
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.cohort import CohortClients
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.methods import METHODS
from murmurfl.app.models.linear import SoftmaxRegression
from murmurfl.app.runs import result as folders
from murmurfl.app.runs import result as record
from murmurfl.app.runs.experiment import Experiment, prepare
from murmurfl.app.runs.outcome import Outcome
from murmurfl.app.runs.progress import RoundLine
from murmurfl.app.runs.result import folder_for, write_record
from murmurfl.app.runs.run_guarantees import expected_guarantee
from murmurfl.app.runs.run_summary import summary_lines
from murmurfl.app.runs.training_run import NoReleasesError, run_experiment
from murmurfl.app.server_app import naming, run_folder
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError, Loss, gdp_epsilon, protocol
from murmurfl.privacy.mechanisms import best_decay
from typer.testing import CliRunner

from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("no_forecast")

needs_mnist = pytest.mark.skipif(not os.environ.get("MURMURFL_DATA"), reason="MURMURFL_DATA is not set: no MNIST")


class Uneven(Experiment):
    """An experiment whose clients have two noise plans, the one of the larger mu last."""

    def plans(self):
        plan = super().plans()[0]
        return [replace(plan, loss=Loss.of(mu)) for mu in (0.5, 0.7)]


@pytest.fixture(scope="module")
def default_run():
    return run_in_process(RunConfig())


def test_the_default_run_learns_privately():
    """Five seeds, as the README says: at least 85 % at mu <= 4."""
    results = [run_in_process(RunConfig(seed=seed)) for seed in range(1, 6)]
    assert np.mean([result.accuracy for result in results]) >= 0.85
    assert all(result.mu <= 4.0 for result in results)


def test_mu_spent_by_every_client_is_computed_from_what_it_released(default_run):
    assert len(default_run.statements) == 10
    for statement in default_run.statements.values():
        assert statement["releases"] == 17
        column = math.sqrt(sum(best_decay(17) ** (2 * j) for j in range(17)))
        assert statement["mu-spent"] == pytest.approx(statement["sensitivity"] * column / statement["noise-std"])
        assert statement["mu-spent"] <= statement["mu-guaranteed"] <= 4.0
        assert statement["samples-used"] == 17 * 8


def test_the_record_is_complete_and_plain(default_run, tmp_path):
    document = write_record(default_run, tmp_path)
    assert json.loads((tmp_path / "result.json").read_text()) == document
    for key in ("accuracy", "mu", "epsilon", "delta", "rounds", "num_clients", "releases", "refusals", "lost_replies"):
        assert isinstance(document[key], int | float)
    assert document["epsilon"] == pytest.approx(gdp_epsilon(document["mu"], document["delta"]))
    assert document["releases"] == 170
    assert [entry["round"] for entry in document["per_round"]] == list(range(1, 18))
    assert document["config"]["clip-norm"] > 0
    with np.load(tmp_path / "model.npz") as model:
        assert {name: model[name].shape for name in model.files} == {"weight": (10, 64), "bias": (10,)}
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "clients.json", "model.npz"}
    summary = "\n".join(summary_lines(Outcome.model_validate(document), tmp_path))
    for expected in ("test accuracy", "mu", "epsilon", "at delta = 1e-05", "170 made", "refusals", str(tmp_path)):
        assert expected in summary


def test_the_guarantee_says_what_it_covers(default_run):
    sentence = default_run.outcome.document()["guarantee"]
    for word in ("replacement of one sample", "against the server", "decay", "seeded keys"):
        assert word in sentence
    fast = run_in_process(RunConfig(noise_quality="fast", num_rounds=2, strategy="trusted-mu2"))
    sentence = fast.outcome.document()["guarantee"]
    assert "no guarantee" in sentence
    assert "trusted server" in sentence


BASELINES = ["noisy-sgd", "isrl-dp", "isrl-dp-accelerated", "delayed-momentum"]


@pytest.mark.parametrize(
    ("strategy", "partition"),
    [("mu2", "iid"), *((strategy, "dirichlet") for strategy in ("mu2", "trusted-mu2", *BASELINES))],
)
def test_every_strategy_runs_on_every_partition(strategy, partition):
    config = RunConfig(strategy=strategy, partition=partition, num_rounds=6, batch_size=2, clients_per_round=4)
    result = run_in_process(config)
    assert len(result.strategy.history) == 6
    assert result.mu <= 4.0 + 1e-9
    assert result.epsilon == gdp_epsilon(result.mu, 1e-5)


def test_an_mlp_trains():
    result = run_in_process(RunConfig(model="mlp", num_rounds=1))
    assert len(result.parameters) == 4
    assert np.isfinite(result.loss)


def test_losses_are_carried_over_and_the_papers_rule_collapses():
    """20 % of replies lost at random; mean of three seeds."""

    def accuracy(**changes):
        return np.mean(
            [run_cohort(RunConfig(seed=seed, evaluate_every=1000, **changes)).accuracy for seed in (1, 2, 3)]
        )

    without = accuracy()
    carried = accuracy(lost_replies=0.2)
    assert without - carried < 0.06
    assert carried - accuracy(lost_replies=0.2, release_rule="paper") > 0.1


@pytest.mark.long
@needs_mnist
def test_lost_replies_cost_little_except_under_the_papers_rule():
    """On the cohort engine, whose models are the in-process engine's, losses included, and which takes a tenth."""
    config = RunConfig(
        task="mnist", mu=1.0, num_clients=100, clients_per_round=100, batch_size=6, noise_quality="fast",
        evaluate_every=1000, checkpoint=False,
    )  # fmt: skip
    without = run_cohort(config).accuracy
    carried = run_cohort(replace(config, lost_replies=0.2)).accuracy
    papers = run_cohort(replace(config, lost_replies=0.2, release_rule="paper")).accuracy
    assert without - carried <= 0.02
    assert papers < without - 0.3


def test_the_same_seed_gives_the_same_model_and_another_seed_another():
    first, again, other = (run_in_process(RunConfig(num_rounds=3, seed=seed)) for seed in (1, 1, 2))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first.parameters, again.parameters, strict=True))
    assert any(a.tobytes() != b.tobytes() for a, b in zip(first.parameters, other.parameters, strict=True))


def test_sharing_nodes_keeps_the_model():
    config = RunConfig(num_clients=20, clients_per_round=15, batch_size=4, num_rounds=5)
    parameters = []
    for nodes in (20, 10, 3):
        grid = InProcessGrid(client_app.app, nodes, config.to_mapping())
        parameters.append(run_experiment(grid, config).parameters)
    for other in parameters[1:]:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(parameters[0], other, strict=True))


def test_two_messages_are_never_under_way_to_one_node():
    config = RunConfig(num_clients=7, clients_per_round=7, num_rounds=2)

    class Watching(InProcessGrid):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            nodes = [message.metadata.dst_node_id for message in messages]
            assert len(nodes) == len(set(nodes))
            return super().send_and_receive(messages, timeout=timeout)

    run_experiment(Watching(client_app.app, 3, config.to_mapping()), config)


def test_a_real_node_without_an_operators_configuration_refuses():
    """The simulated ledger and seeded keys exist only where an engine constructs them."""
    assert isinstance(client_app.app, ClientApp)
    context = Context(1, 5, {"partition-id": 0, "num-partitions": 1}, RecordDict(), RunConfig().to_mapping())
    grid = InProcessGrid(client_app.app, 1, {})  # gives this process an identity to write messages with
    assert list(grid.get_node_ids())
    config = ConfigRecord({protocol.ASK: protocol.ASK_HELLO, protocol.VERSION: 1, "simulation": True})
    message = Message(RecordDict({"config": config}), dst_node_id=5, message_type="query")
    message.metadata.__dict__["_message_id"] = "1"
    reply = client_app.app(message, context)
    assert reply.error.code == protocol.NOT_CONFIGURED
    with raises(ConfigurationError, "missing", match="operator"):
        client_app.client_fn(context)


def hyperparameters(config, num_rounds, num_features):
    """The preset's values for softmax regression of a size."""
    method, model = METHODS[config.strategy], SoftmaxRegression(num_features, 10)
    return method.preset(config, num_rounds, model).overridden(config)


def test_the_papers_constants_are_those_of_the_papers():
    """ALGORITHMS 2.3, for MNIST: d = 7850, G = 39.6, L = 392.5, D = 0.1, S = 118.1."""
    base = RunConfig(preset="paper", task="mnist", num_clients=100, clients_per_round=50, batch_size=1, mu=8.0)
    values = hyperparameters(base, 1200, 784)
    assert values.clip_norm == pytest.approx(118.1, abs=0.05)
    assert values.diameter == 0.1
    assert values.schedule == "paper"
    expected = 8 * 0.1 * 50 / (2 * values.clip_norm * 1200 * math.sqrt(2 * 100 * 7850 * (1 + math.log(1200))))
    assert values.learning_rate == pytest.approx(expected)
    full = hyperparameters(replace(base, clients_per_round=100), 600, 784)
    assert full.learning_rate == pytest.approx(8 * 0.1 * 10 / (2 * full.clip_norm * 600 * math.sqrt(7850)))
    assert full.schedule == "uniform"
    trusted = hyperparameters(replace(base, clients_per_round=100, strategy="trusted-mu2"), 600, 784)
    assert trusted.learning_rate == pytest.approx(
        min(8 * 0.1 * 100 / (2 * trusted.clip_norm * 600 * math.sqrt(7850)), 1 / (4 * 392.5 * 600))
    )


def test_the_papers_steps_of_the_baselines_follow_their_noise():
    """Lan 2012: D / (spread sqrt(R)) or D / (spread (R + 2)^1.5), spread^2 = (G^2 / K + d sigma^2) / m."""
    base = RunConfig(preset="paper", task="mnist", num_clients=100, clients_per_round=50, batch_size=75, mu=8.0)
    lipschitz, d = math.sqrt(2 * 785), 7850
    for passes, mu in ((1, 0.5), (5, 0.1)):
        config = replace(base, passes=passes, mu=mu)
        sigma = 2 * lipschitz / 75 / mu * math.sqrt(passes)
        spread = math.sqrt((lipschitz**2 / 75 + d * sigma**2) / 50)
        values = hyperparameters(replace(config, strategy="isrl-dp"), 80, 784)
        assert values.learning_rate == pytest.approx(0.1 / spread / math.sqrt(80))
        assert values.clip_norm == pytest.approx(lipschitz)
        values = hyperparameters(replace(config, strategy="isrl-dp-accelerated"), 80, 784)
        assert values.learning_rate == pytest.approx(0.1 / spread / 82**1.5)
    steep = replace(base, mu=1e6)
    assert hyperparameters(replace(steep, strategy="isrl-dp"), 80, 784).learning_rate == pytest.approx(1 / 785)
    ours = hyperparameters(replace(base, strategy="mu2"), 1200, 784)
    delayed = hyperparameters(replace(base, strategy="delayed-momentum"), 1200, 784)
    assert delayed.clip_norm == pytest.approx(2 * ours.clip_norm)
    assert delayed.learning_rate == pytest.approx(ours.learning_rate / math.sqrt(2))
    full = replace(base, clients_per_round=100, preset="practical", num_rounds=50)
    values = [hyperparameters(replace(full, strategy=s), 50, 784) for s in ("mu2", "delayed-momentum")]
    assert values[0] == values[1], "with every client in every round there is no delay"


def test_every_baseline_learns_and_says_what_it_guarantees():
    for strategy in BASELINES:
        passes = 3 if strategy.startswith("isrl") else 1
        result = run_cohort(RunConfig(strategy=strategy, passes=passes))
        assert result.accuracy > 0.7, strategy
        assert result.mu == pytest.approx(4.0)
        sentence = result.outcome.document()["guarantee"]
        assert ("every sample in up to 3" in sentence) == (passes == 3)
        for statement in result.statements.values():
            assert statement["mu-spent"] <= statement["mu-guaranteed"] * (1 + 1e-9)


def test_what_a_run_sets_wins_over_its_preset():
    experiment = prepare(RunConfig(clip_norm=3.0, learning_rate=0.1, projection_radius=3.5, schedule="harmonic"))
    assert (experiment.values.clip_norm, experiment.values.learning_rate) == (3.0, 0.1)
    assert (experiment.values.diameter, experiment.values.schedule) == (7.0, "harmonic")
    assert experiment.loss().mu == pytest.approx(4.0)


def test_mu_of_the_papers_schedule_is_the_true_one():
    config = RunConfig(preset="paper", clients_per_round=5, batch_size=1, num_rounds=40)
    mu = prepare(config).loss().mu
    cap = 40
    harmonic = sum(1 / k for k in range(1, cap + 1))
    assert mu == pytest.approx(4.0 * math.sqrt(harmonic / (1 + math.log(40))))
    assert mu < 4.0


def test_the_loss_of_a_run_is_the_largest_of_its_clients():
    experiment = Uneven(**{one.name: getattr(prepare(RunConfig()), one.name) for one in fields(Experiment)})
    assert experiment.loss().mu == 0.7


def test_the_noise_of_a_run_is_that_of_its_seed():
    one = prepare(RunConfig(out_dir="/a", run_name="x", checkpoint=False))
    assert one.session == prepare(RunConfig(out_dir="/b", mu=3.0)).session
    assert one.session != prepare(RunConfig(seed=2)).session


@pytest.mark.parametrize("engine", ["cohort", "inprocess"])
def test_a_simulation_that_is_cut_off_leaves_no_checkpoint_and_its_name_free(engine, tmp_path, monkeypatch):
    quick = ["run", "--no-twin", "--engine", engine, "--out", str(tmp_path), "--name", "x", "--set", "num-rounds=2"]
    whole = record.write_record

    def cut_off(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(record, "write_record", cut_off)
    assert CliRunner().invoke(cli, quick).exit_code == 130
    assert not list(tmp_path.rglob("*.npz"))
    monkeypatch.setattr(record, "write_record", whole)
    assert CliRunner().invoke(cli, quick).exit_code == 0
    assert not (tmp_path / "x" / "checkpoint.npz").exists()


def test_a_resumed_run_in_which_nobody_answers_any_more_fails(tmp_path):
    config, checkpoint = RunConfig(num_rounds=6), tmp_path / "checkpoint.npz"
    experiment = prepare(config)
    experiment.strategy(checkpoint=checkpoint).start(
        CohortClients(experiment), experiment.initial_arrays(), num_rounds=3
    )
    with raises(NoReleasesError, "missing", match="bad-acknowledgement"):
        run_experiment(CohortClients(experiment), config, checkpoint=checkpoint)


def test_a_run_resumed_after_its_last_round_is_evaluated(tmp_path):
    config, checkpoint = RunConfig(num_rounds=3), tmp_path / "checkpoint.npz"
    clients = CohortClients(prepare(config))
    whole = run_experiment(clients, config, checkpoint=checkpoint)
    again = run_experiment(clients, config, checkpoint=checkpoint)
    assert again.accuracy == whole.accuracy
    assert len(again.strategy.history) == 3


def test_the_record_of_a_trusted_run_is_json_without_infinities(tmp_path):
    write_record(run_cohort(RunConfig(num_rounds=2, strategy="trusted-mu2")), tmp_path)
    text = (tmp_path / "result.json").read_text()
    assert "Infinity" not in text
    assert json.loads(text)["clients"]["0"]["mu-guaranteed"] is None


def test_fast_noise_is_named_wherever_an_epsilon_is_shown():
    result = run_cohort(RunConfig(num_rounds=2, noise_quality="fast"))
    assert "no guarantee" in str(RoundLine.of(result.progress[-1], "fast"))
    assert "guarantee" not in str(RoundLine.of(result.progress[-1], "exact"))
    assert "no guarantee" in "\n".join(summary_lines(result.outcome, Path("x")))
    assert "no guarantee" in expected_guarantee(result.experiment.config).sentence


def test_a_folder_that_holds_another_run_is_refused(tmp_path):
    config = RunConfig(out_dir=str(tmp_path), run_name="x")
    folder = run_folder(config, 7)
    folder.mkdir()
    (folder / "checkpoint.npz").touch()
    with raises(ConfigurationError, "exists", match="another run"):
        run_folder(config, 8)
    unnamed = RunConfig(out_dir=str(tmp_path))
    assert run_folder(unnamed, 7) != run_folder(unnamed, 8)


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(folders.time, "strftime", lambda *_: "20260102-030405")
    quick = ["run", "--no-twin", "--engine", "cohort", "--out", str(tmp_path), "--set", "num-rounds=2"]
    for _ in range(3):
        assert CliRunner().invoke(cli, quick).exit_code == 0
    name = "full-batch-digits-seed1-20260102-030405"
    assert {path.name for path in tmp_path.iterdir()} == {name, f"{name}-2", f"{name}-3"}
    assert all((path / "result.json").exists() for path in tmp_path.iterdir())
    # What fails leaves none, and a name that was asked for is not changed.
    assert CliRunner().invoke(cli, [*quick, "--set", "task=mnist", "--set", f"data-root={tmp_path}"]).exit_code == 1
    assert CliRunner().invoke(cli, [*quick, "--name", name]).exit_code == 1
    assert len(list(tmp_path.iterdir())) == 3


OUTSIDE = [
    "../evil",
    "/evil",
    "a/b",
    "a\\b",
    "..",
    ".",
    "",
    " ",
    "a ",
    "a\x00b",
    "a\nb",
    "c:evil",
    "x" * 201,
    "\u202eevil",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_runs_name_cannot_leave_its_folder_of_runs(name, tmp_path):
    out = tmp_path / "deep" / "runs"
    for command in ("run", "deploy-demo"):
        if "\x00" not in name:  # no operating system hands such an argument over
            result = CliRunner().invoke(cli, [command, "--out", str(out), "--name", name])
            assert result.exit_code == 1
            assert "Expected a run's name to be the name of a folder" in result.stderr
    if name:  # empty: one made of strategy, task and seed
        with raises(ConfigurationError, "malformed", "run-name"):
            RunConfig.from_mapping({"run-name": name})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["first", "mu=4, digits", "Übung 3", "v0.2..rc", "a b'\"c", "x" * 200])
def test_any_other_name_is_a_folders(name, tmp_path):
    assert run_folder(RunConfig.from_mapping({"run-name": name, "out-dir": str(tmp_path)}), 1) == tmp_path / name
    with folder_for(tmp_path, name, "") as folder:
        assert folder.parent == tmp_path


def test_every_line_of_a_run_names_it_while_it_lasts(caplog):
    log = logging.getLogger("flwr")
    with caplog.at_level("INFO", logger="flwr"):
        with naming("50 % done"):
            log.info("round %d", 3)
            log.info("100 %")
            log.info("")
        log.info("round %d", 4)
    assert caplog.messages == ["[50 % done] round 3", "[50 % done] 100 %", "", "round 4"]
