"""Training that gives NaN, or far longer contributions than the clip, is counted and shown in a simulation."""

import errno
import json
import logging
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.superlink.grid import HttpGrid, InMemoryGrid
from murmurfl.app import client_app, server_app
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.methods import METHODS
from murmurfl.app.models.linear import SoftmaxRegression
from murmurfl.app.nodes.node_config import node_strategies
from murmurfl.app.planning.deciding import noise_to_signal_of
from murmurfl.app.reports.making import make_report
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.outcome import CHECKPOINT_NAME, FAILURE_NAME, Outcome
from murmurfl.app.runs.result import (
    END_NAME,
    EXCLUDED_NAME,
    RecordError,
    ask_to_end,
    exclude_clients,
    excluded_clients,
    write_failure,
    write_record,
)
from murmurfl.app.runs.run_summary import short_lines, summary_lines
from murmurfl.app.runs.training_run import NoReleasesError, run_experiment
from murmurfl.app.server_app import is_deployed, run_folder
from murmurfl.app.settings.layers import with_defaults
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import CorrelatedNoiseMod, UpdatePolicy
from murmurfl.clients import messages as simulation_module
from murmurfl.privacy import ConfigurationError, MemoryLedger, RefusedError, SimulatedKeys, SystemKeys, protocol
from murmurfl.privacy.accounting.noise_forecast import kept_share
from murmurfl.strategies import CorrelatedFedAvg, Mu2
from murmurfl.strategies.rounds.client_registry import Awaited, NodesUnavailableError
from typer.testing import CliRunner

from benchmarks.small_trainings import RATIOS, SAMPLES, UPDATES, UpdateTraining
from tests.app.plain import SET, simulate
from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("no_forecast", "no_result_folder")

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


@pytest.mark.long
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


def test_of_real_clients_nothing_is_counted_and_nothing_said(broken, tmp_path):
    grid = InProcessGrid(client_app.app, 4, BASE.to_mapping())
    result = run_experiment(grid, BASE, deployed=True)
    assert result.training == {}
    assert write_record(result, tmp_path)["training"] is None


def fit(client):
    parameters = client.gradients.initial_parameters(1)
    config = {protocol.VERSION: 1, protocol.SERVER_ROUND: 1, protocol.ACK: 0, protocol.SESSION: "s"}
    return client.fit([*parameters, *parameters], config)[2]


def test_a_reply_has_figures_only_where_a_simulation_is_in_another_process(monkeypatch):
    """On Ray they must travel; in this process they need not, and a real client's reply never has them."""
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
    monkeypatch.setattr(type(real.privatizer), "simulated", property(lambda self: False))
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
        strategy = trained(lambda client: 245.0 if client == 3 else 50.0)
    assert "the update of client 3 was 245 times the clip" in caplog.text
    assert caplog.text.count("times the clip") == 2, "in one line, once"
    assert [one.largest_ratio for one in strategy.training.values()] == pytest.approx([245.0] * 3)


def test_updates_that_are_nan_are_named_and_others_are_not(caplog):
    with caplog.at_level("WARNING", logger="flwr"):
        trained(lambda client: np.nan if client == 1 else 0.1)
    assert "1 of 4 contributions were not finite" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING", logger="flwr"):
        trained(lambda client: 0.5)
    assert not [record for record in caplog.records if record.funcName != "log_forecast"]


def test_a_diverging_model_is_reported_everywhere(tmp_path, monkeypatch, caplog):
    """0.1 ended such a run with a traceback and without a result."""
    monkeypatch.chdir(tmp_path)
    arguments = ["strategy=trusted-sgd", "num-rounds=3", "learning-rate=1e39"]
    sets = [part for argument in arguments for part in ("--set", argument)]
    with np.errstate(all="ignore"):
        ran = CliRunner().invoke(cli, ["run", "--no-twin", "--name", "far", *SET, *sets])
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
    assert short_lines(wild, Path("runs"))[-1] == words


CONFIG = RunConfig(num_clients=2, clients_per_round=2, batch_size=32, num_rounds=4)


def refusing(code, hello=None):
    """Clients that answer a hello, or not, and refuse everything else."""
    app = ClientApp()

    def refuse(message, context):
        return Message(Error(code, "no"), reply_to=message)

    @app.query()
    def query(message, context):
        if message.content["config"][protocol.ASK] != protocol.ASK_HELLO or hello is None:
            return refuse(message, context)
        names = {protocol.CLIENTS: str(context.node_config["partition-id"]), protocol.VERSION: hello}
        return Message(RecordDict({protocol.CONFIG: ConfigRecord(names)}), reply_to=message)

    app.train()(refuse)
    return app


def grid_of(app, config=CONFIG):
    return InProcessGrid(app, config.num_clients, config.to_mapping())


def test_each_training_has_its_own_session_and_guarantee():
    first, second = (run_experiment(grid_of(client_app.app), CONFIG, deployed=True) for _ in range(2))
    assert first.strategy.session != second.strategy.session
    assert first.mu == max(statement["mu-guaranteed"] for statement in first.statements.values())
    assert "Real clients: the figure is what 2 of 2 clients say" in first.guarantee.sentence


def test_an_unknown_grid_counts_as_real_clients():
    """Seeded keys and sessions must not depend on recognising every way to reach a real node."""

    class SomeNewGrid(Grid):
        pass

    for kind in (HttpGrid, InProcessGrid, SomeNewGrid):
        assert is_deployed(kind.__new__(kind) if not kind.__abstractmethods__ else object())
    assert not is_deployed(InMemoryGrid.__new__(InMemoryGrid))


def test_only_simulated_nodes_may_have_several_names():
    for deployed in (False, True):
        strategy = run_experiment(grid_of(client_app.app), CONFIG, deployed=deployed).strategy
        assert strategy.clients.several_on_a_node == (not deployed)


@pytest.mark.parametrize("strategy", ["trusted-mu2", "tree-momentum"])
def test_a_trusted_servers_noise_on_real_clients_is_not_seeded(strategy):
    """No fixed or short seed: the key is 32 bytes of the operating system, another one every time."""
    experiment = prepare(RunConfig(strategy=strategy, num_rounds=2))
    assert isinstance(experiment.strategy().aggregator.stream.keys, SimulatedKeys)
    keys = [experiment.strategy(deployed=True).aggregator.stream.keys for _ in range(2)]
    assert all(isinstance(key, SystemKeys) for key in keys)
    assert keys[0].secret_key != keys[1].secret_key


def test_clients_that_all_refuse_end_the_run_after_as_many_rounds_as_configured():
    app = refusing(protocol.BUDGET_EXHAUSTED, hello=protocol.PROTOCOL_VERSION)
    reports = []
    with raises(NoReleasesError, "missing", match="3 rounds in a row.*round 3: clients refused with budget-exh"):
        run_experiment(grid_of(app), CONFIG, deployed=True, on_progress=reports.append)
    with raises(NoReleasesError, "missing", match="none in 3 rounds in a row"):
        run_experiment(grid_of(app), CONFIG)
    with raises(ConfigurationError, "missing", match="none in 4 rounds"):
        run_experiment(grid_of(app), replace(CONFIG, give_up_after=0))  # goes to its end


def test_another_version_is_named_whoever_notices_it():
    config = RunConfig(num_clients=2, clients_per_round=2, batch_size=32, num_rounds=4, node_deadline_s=0.5)
    expected = (
        r"2 answered with protocol-mismatch \(they speak version 2 of murmurfl's protocol, this server version 1\)"
    )
    with raises(NodesUnavailableError, "unreachable", match=expected):
        run_experiment(grid_of(refusing(1, hello=2)), config, deployed=True)

    older = ClientApp()

    @older.query()
    def query(message, context):
        reason = "this client speaks murmurfl's protocol version 2, the request states version 1"
        return Message(Error(protocol.PROTOCOL_MISMATCH, reason), reply_to=message)

    with raises(NodesUnavailableError, "unreachable", match=expected):
        run_experiment(grid_of(older), config, deployed=True)


def test_what_a_node_says_of_itself_does_not_reach_the_servers_words():
    config = RunConfig(num_clients=2, clients_per_round=2, batch_size=32, num_rounds=4, node_deadline_s=0.5)
    app = ClientApp()

    @app.query()
    def query(message, context):
        return Message(Error(protocol.PROTOCOL_MISMATCH, "\x1b[31mrm -rf\nprotocol version eleven"), reply_to=message)

    with pytest.raises(NodesUnavailableError) as caught:
        run_experiment(grid_of(app), config, deployed=True)
    assert "rm" not in str(caught.value)


def test_missing_clients_are_named():
    strategy = Mu2(num_clients=2, clients_per_round=2, learning_rate=0.1, node_deadline_s=0.0)
    strategy.clients.restore(["clinic-0", "clinic-1"])
    grid = grid_of(client_app.app)
    grid.get_node_ids = list
    with raises(NodesUnavailableError, "unreachable", match=r"got 0 \(missing: clinic-0, clinic-1\)"):
        strategy.clients.meet(grid, Awaited(2))


def test_a_real_run_resumes_its_checkpoint_but_no_finished_run(tmp_path):
    config = RunConfig(out_dir=str(tmp_path), run_name="run")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / CHECKPOINT_NAME).touch()
    assert run_folder(config, 1, deployed=True) == folder
    with pytest.raises(ConfigurationError):
        run_folder(config, 1)
    (folder / "result.json").touch()
    with pytest.raises(ConfigurationError):
        run_folder(config, 1, deployed=True)


def test_a_failure_leaves_its_reason_until_the_run_is_taken_up_and_ends(tmp_path):
    error = ConfigurationError("Expected this, got that.", kind="out-of-range", setting="mu", got=0.0)
    write_failure(error, tmp_path)
    assert json.loads((tmp_path / FAILURE_NAME).read_text()) == {
        "reason": "Expected this, got that.",
        "kind": "out-of-range",
        "setting": "mu",
        "checkpoint": None,
    }
    write_record(run_experiment(grid_of(client_app.app), CONFIG), tmp_path)
    assert not (tmp_path / FAILURE_NAME).exists()


@pytest.mark.parametrize("failure", [RuntimeError("a bug"), KeyError("x"), KeyboardInterrupt()], ids=repr)
def test_a_run_on_real_clients_leaves_its_reason_whatever_ended_it(tmp_path, monkeypatch, failure):
    """Others look for it where the result would be; murmurfl's own errors were the only ones that left one."""

    def fail(*_):
        raise failure

    monkeypatch.setattr(server_app, "_run", fail)
    settings = RunConfig(out_dir=str(tmp_path), run_name="run").to_mapping()
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=settings)
    with pytest.raises(type(failure)):
        server_app.main(InProcessGrid(None, 1, {}), context)  # type: ignore[arg-type]
    reason = json.loads((tmp_path / "run" / FAILURE_NAME).read_text())["reason"]
    assert reason == f"{type(failure).__name__}: {failure}"


@pytest.mark.parametrize(("stated", "words"), [({}, "no version"), ({protocol.VERSION: 2}, "version 2")])
def test_a_client_answers_not_even_a_hello_of_another_version(stated, words):
    client = prepare(CONFIG).client(0, MemoryLedger())
    with raises(
        RefusedError,
        "refused",
        code=protocol.PROTOCOL_MISMATCH,
        match=f"protocol version 1, the request states {words}",
    ) as caught:
        client.get_properties({protocol.ASK: protocol.ASK_HELLO, **stated})
    assert caught.value.code == protocol.PROTOCOL_MISMATCH


def test_a_training_that_is_asked_to_end_completes_with_its_model_so_far(tmp_path):
    checkpoint = tmp_path / CHECKPOINT_NAME

    def ask(progress):
        if progress.report.server_round == 1:
            ask_to_end(tmp_path)  # during the second round, as far as the server is concerned

    result = run_experiment(grid_of(client_app.app), CONFIG, deployed=True, checkpoint=checkpoint, on_progress=ask)
    whole = run_experiment(grid_of(client_app.app), CONFIG, deployed=True)
    assert [len(run.progress) for run in (result, whole)] == [2, 4]
    assert result.progress[-1].accuracy is not None
    assert result.mu == whole.mu  # what the caps allow, whatever was asked
    write_record(result, tmp_path)
    assert not (tmp_path / END_NAME).exists()
    with raises(ConfigurationError, "not-found", "folder"):
        ask_to_end(tmp_path)


def test_excluded_client_is_not_asked_and_a_resume_keeps_the_sessions_numbers(tmp_path, caplog):
    checkpoint, grid = tmp_path / CHECKPOINT_NAME, grid_of(client_app.app)

    def take_out(progress):
        if progress.report.server_round == 1:
            assert exclude_clients(tmp_path, ["1"]) == ["1"]
            with raises(ConfigurationError, "unknown-name", "exclude", match="0, 1, .*got nobody"):
                exclude_clients(tmp_path, ["nobody"])
        elif progress.report.server_round == 2:
            ask_to_end(tmp_path)

    clients = CONFIG.num_clients
    first = run_experiment(grid, CONFIG, deployed=True, checkpoint=checkpoint, on_progress=take_out)
    assert [one.report.aggregated for one in first.progress] == [clients, clients - 1, clients - 1]
    (tmp_path / END_NAME).unlink()
    # A federation that a member has left has other numbers in its settings.
    settings = replace(CONFIG, num_clients=clients - 1, clients_per_round=clients - 1, quorum=0.5)
    again = run_experiment(grid, settings, deployed=True, checkpoint=checkpoint)
    assert f"has num-clients = {clients} and clients-per-round = {clients}, which stay" in caplog.text
    assert [one.report.aggregated for one in again.progress] == [clients - 1]
    assert again.strategy.clients_per_round == clients
    assert exclude_clients(tmp_path, ["1"], back=True) == []


class StatesMore(InProcessGrid):
    """The first client states a larger mu than the run configuration expects."""

    def pull_messages(self, message_ids):
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            config = None if reply.has_error() else reply.content.config_records.get(protocol.CONFIG)
            if config is not None and config.get(protocol.CLIENTS) == "0" and "mu-guaranteed" in config:
                config["mu-guaranteed"] = 7.0
        return replies


def test_guarantee_counts_what_a_client_stated_that_is_gone_at_the_end():
    grid = StatesMore(client_app.app, CONFIG.num_clients, CONFIG.to_mapping())
    config = replace(CONFIG, node_deadline_s=0.1)

    def leave(progress):
        if progress.report.server_round == 1:
            grid._contexts.pop(min(grid._contexts))

    result = run_experiment(grid, config, deployed=True, on_progress=leave)
    assert len(result.progress) == result.experiment.num_rounds
    assert set(result.statements) == {"1"}
    assert result.mu == 7.0


def test_guarantee_counts_what_a_client_stated_that_is_gone_when_the_training_resumes(tmp_path):
    grid = StatesMore(client_app.app, CONFIG.num_clients, CONFIG.to_mapping())
    config, checkpoint = replace(CONFIG, node_deadline_s=0.1), tmp_path / CHECKPOINT_NAME

    def killed(progress):
        if progress.report.server_round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(grid, config, deployed=True, checkpoint=checkpoint, on_progress=killed)
    grid._contexts.pop(min(grid._contexts))
    result = run_experiment(grid, config, deployed=True, checkpoint=checkpoint)
    assert set(result.statements) == {"1"}
    assert result.mu == 7.0, "releases of rounds 1 and 2 are in the model"


def test_exclusions_that_cannot_be_read_exclude_nobody(tmp_path, caplog):
    assert excluded_clients(tmp_path) == []
    for text in ("", "{}", "[1]", "\\xff"):
        (tmp_path / EXCLUDED_NAME).write_text(text)
        caplog.clear()
        assert excluded_clients(tmp_path) == []
        assert "expected a JSON list of names" in caplog.text


def test_only_a_run_that_goes_on_can_be_asked_to_end(tmp_path):
    with raises(ConfigurationError, "not-found", "folder"):
        ask_to_end(tmp_path)


def test_a_cap_above_the_rounds_changes_no_round():
    below, above = (replace(CONFIG, max_participations=cap) for cap in (4, 9))
    assert [prepare(config).num_rounds for config in (below, above)] == [4, 4]
    assert prepare(above).policy().max_participations == 9
    assert prepare(above).loss().mu == pytest.approx(prepare(below).loss().mu, rel=1e-3)


def test_real_clients_bound_batch_and_cap_by_what_they_state_and_not_by_a_simulated_partition():
    many = replace(CONFIG, num_clients=1000, batch_size=6400)
    with raises(ConfigurationError, "out-of-range", "batch-size", match="batch-size <= "):
        prepare(many)
    assert prepare(many, deployed=True).policy().batch_size == 6400
    large = replace(CONFIG, max_participations=10_000)
    with raises(ConfigurationError, "out-of-range", "batch-size", match="batch-size x max-participations <= "):
        prepare(large)
    assert prepare(large, deployed=True).policy().max_participations == 10_000
    # The clients of this grid state what they have: a round more than their samples last for is refused by that.
    small = replace(CONFIG, num_rounds=30)
    with raises(ConfigurationError, "exhausted", "num_rounds", match="says that it"):
        run_experiment(grid_of(client_app.app, CONFIG), small, deployed=True)


@pytest.mark.parametrize("strategy", [name for name in node_strategies() if METHODS[name].is_iterative])
def test_rounds_of_real_clients_are_never_those_of_a_simulated_partition(strategy, monkeypatch):
    config = RunConfig.from_mapping({"strategy": strategy, "num-clients": 2, "clients-per-round": 2})
    assert prepare(config).num_rounds >= 1
    with raises(ConfigurationError, "missing", "num-rounds"):
        prepare(config, deployed=True)
    monkeypatch.setattr(METHODS[strategy].__class__, "usual_rounds", lambda *_: pytest.fail("asked for sizes"))
    assert prepare(replace(config, num_rounds=2), deployed=True).num_rounds == 2


def test_a_method_of_one_round_needs_no_rounds_on_real_clients():
    config = RunConfig.from_mapping({"strategy": "one-shot", "num-clients": 2, "clients-per-round": 2})
    assert prepare(config, deployed=True).num_rounds == 1


FULL, _, DEFAULT, DELAYED, _ = SAMPLES
OFF = 0.25
"""How far what is kept may be from the forecast, of murmurfl's own runs."""


def test_a_default_run_with_a_small_mu_is_called_useless_and_is(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    document = write_record(simulate(with_defaults({"mu": 0.05})), tmp_path / "small")
    assert "THIS MODEL IS LIKELY TO BE USELESS" in caplog.text
    assert "useless: noise " in " ".join(summary_lines(Outcome.model_validate(document), tmp_path))
    assert document["forecast"]["verdict"] == "useless"
    assert document["forecast"]["warning"]
    assert document["accuracy"] < 0.3


def test_a_run_without_noise_has_no_forecast():
    assert simulate(num_rounds=2, mechanism="none").forecast is None


@pytest.mark.parametrize("strategy", ["mu2", "delayed-momentum", "trusted-mu2"])
def test_the_forecast_of_dependent_releases_is_noise_to_signal(strategy):
    made = simulate(with_defaults({"strategy": strategy, "mu": 1.0, "num-clients": 10, "clients-per-round": 10}))
    assert made.forecast.ratio == pytest.approx(noise_to_signal_of(made.experiment), rel=1e-6)


@pytest.mark.parametrize("strategy", ["full-batch", "trusted-full-batch", "noisy-sgd"])
def test_where_releases_stand_alone_it_is_that_of_all_rounds_together(strategy):
    """The noise of one round over one gradient, and sqrt(T) less over T of them."""
    made = simulate(with_defaults({"strategy": strategy, "mu": 1.0, "num-clients": 10, "clients-per-round": 10}))
    one = noise_to_signal_of(made.experiment)
    assert made.forecast.ratio == pytest.approx(one / np.sqrt(made.experiment.num_rounds), rel=0.02)


def test_sums_of_a_run_have_less_noise():
    settings = {"strategy": "full-batch", "mu": 0.5, "num-clients": 10, "clients-per-round": 10, "num-rounds": 6}
    alone = simulate(settings).forecast
    summed = simulate({**settings, "trust": "secure-aggregation"}).forecast
    assert summed.ratio == pytest.approx(alone.ratio / np.sqrt(5), rel=0.01)
    assert alone.summed().ratio == pytest.approx(summed.ratio, rel=0.01)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    ("training", "ratio"),
    [(FULL, 0.3), (FULL, 3.0), (FULL, 12.0), (DEFAULT, 3.0), (DELAYED, 0.3), (DELAYED, 12.0)],
    ids=lambda given: getattr(given, "name", given),
)
def test_what_runs_keep_is_what_was_forecast(training, ratio):
    outcome = training.at(ratio)
    assert outcome.forecast.typical_ratio == pytest.approx(ratio, rel=0.06)
    assert outcome.kept == pytest.approx(kept_share(ratio), abs=OFF)
    assert outcome.forecast.verdict == ("useful" if ratio < 1 else "noisy" if ratio < 5 else "useless")


def test_a_forecast_that_forgot_the_number_of_clients_would_be_noticed():
    """Ten clients: sqrt(10) times the noise that there is, or less of it."""
    outcome = FULL.at(3.0)
    for wrong in (3.0 * np.sqrt(10), 3.0 / np.sqrt(10)):
        assert abs(outcome.kept - kept_share(wrong)) > OFF


def test_a_small_projects_forecast_comes_true():
    training = UpdateTraining("digits", clients=5, rounds=4, learning_rate=0.2)
    useful, useless = training.at(0.3), training.at(20.0)
    assert (useful.forecast.verdict, useless.forecast.verdict) == ("useful", "useless")
    assert useful.kept > 0.9
    assert useless.kept < 0.3


@pytest.mark.long
@pytest.mark.parametrize("training", [UPDATES[1], UPDATES[3], UPDATES[4]], ids=lambda training: training.name)
def test_projects_keep_what_was_forecast(training):
    """Updates of very different kinds, so with a wider bound; more noise never keeps more, and the signs are right."""
    kept = [np.mean([training.at(ratio, seed).kept for seed in (1, 2, 3)]) for ratio in RATIOS]
    assert all(more > less - 0.15 for more, less in pairwise(kept))
    assert all(abs(one - kept_share(ratio)) < 0.35 for one, ratio in zip(kept[:3], RATIOS[:3], strict=True))
    assert kept[0] > 0.8
    assert kept[-1] < 0.4


def test_a_full_disk_is_said_where_the_result_would_be(tmp_path, monkeypatch):
    def fails(*arguments, **arrays):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez", fails)
    with raises(RecordError, "failed", match=r"No space left on device.*Make room on the disk of .*df .*same run-name"):
        write_record(run_cohort(RunConfig(num_rounds=1)), tmp_path / "run")
