"""Correlated noise around somebody else's ClientApp: what leaves, what it costs, and what becomes of lost replies."""

import logging
import math
import sys

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from murmurfl.clients import CorrelatedNoiseMod, UpdateNode, UpdatePolicy
from murmurfl.clients.adapters.noise_mod import report_dropped_metrics
from murmurfl.clients.adapters.update_policy import update_guarantee
from murmurfl.privacy import (
    MECHANISMS,
    ConfigurationError,
    PrivacyPolicy,
    RefusedError,
    SQLiteLedger,
    gdp_epsilon,
    protocol,
    read_ledger,
    rounded_up,
)
from murmurfl.privacy.audit import audit_client
from murmurfl.privacy.release.prefix_sums import Release
from murmurfl.strategies import CheckpointError, CorrelatedFedAvg, NodesUnavailableError, NothingAggregatedError

from tests.harness.clients import concatenated, noise_of, training_config
from tests.harness.errors import raises
from tests.harness.grid import NodesGrid, Reliable, ask_real_node
from tests.harness.grid import ask as ask_one

pytestmark = pytest.mark.usefixtures("no_result_folder")

SECRET = "patient 4711 has blood group AB"
SHAPES = {"block.0/weight": (2, 3), "block.0/bias": (), "head.weight": (3,)}
D = 10
START = ArrayRecord({name: Array(np.zeros(shape)) for name, shape in SHAPES.items()})
CLIENTS, ROUNDS = 4, 12


def policy(**changes):
    """Each sample is in one release and noise cancels itself, so what is left of the noise can be written down."""
    changes = {"mechanism": "cancelling", "releases_per_pass": 30, **changes}
    return UpdatePolicy(**{"clip_norm": 1.0, "mu": 2.0, "max_participations": 30, **changes})


def adding(update, mods=None, **options):
    """A foreign project: its training adds ``update(partition, round)`` to the model, and it says far too much."""
    app = ClientApp(mods=[CorrelatedNoiseMod(**options)] if mods is None else mods)

    @app.train()
    def train(message, context):
        (record,) = message.content.array_records.values()
        (config,) = message.content.config_records.values()
        values = update(int(context.node_config["partition-id"]), config["server-round"])
        arrays = {name: array.numpy() + values for name, array in record.items()}
        metrics = MetricRecord({"train-loss": 0.25, "num-examples": 317})
        return Message(
            RecordDict({"arrays": ArrayRecord({k: Array(np.asarray(v)) for k, v in arrays.items()}), "m": metrics}),
            reply_to=message,
        )

    return app


def train(app, *, lost=0.0, seed=2, sampler=1, rounds=ROUNDS, start=START, clients=CLIENTS, grid=NodesGrid, **options):
    options = {"node_deadline_s": 1.0, "seed": sampler, "session": "s", **options}
    strategy = CorrelatedFedAvg(num_clients=clients, **options)
    return strategy, strategy.start(grid(app, clients, lost=lost, seed=seed), start, num_rounds=rounds)


def last_noise(name, k):
    """y_k, from the client's key alone."""
    return noise_of(name, k, policy().privacy_policy(), D, seed=0)


def residue(strategy):
    """The noise that is in the model beside the last noise of each client."""
    return strategy.state.x - sum(last_noise(name, k) for name, k in strategy.acks.items()) / CLIENTS


def nothing(partition, server_round):
    return 0.0


@pytest.mark.parametrize("lost", [0.0, 0.3])
def test_no_noise_stays_in_the_model_but_each_clients_last(lost):
    strategy, _ = train(adding(nothing, simulation=policy()), lost=lost)
    assert (residue(strategy) == 0.0).all(), "to the last bit"
    assert np.linalg.norm(strategy.state.x) > 0
    assert (sum(report.lost for report in strategy.history) > 0) == (lost > 0)


class NeverMindsLosses(UpdatePolicy):
    """Subtracts the noise of the release before, whether that arrived or not."""

    def privacy_policy(self):
        from dataclasses import replace

        return replace(super().privacy_policy(), release_rule="paper")


def test_a_mod_that_takes_every_reply_for_received_leaves_noise_for_ever():
    bug = NeverMindsLosses(**vars(policy()))
    strategy, _ = train(adding(nothing, simulation=bug), lost=0.3)
    assert np.linalg.norm(residue(strategy)) > policy().privacy_policy().plan(D).noise_std / CLIENTS
    strategy, _ = train(adding(nothing, simulation=bug))
    assert (residue(strategy) == 0.0).all(), "without losses there is no difference"


def test_what_a_lost_reply_carried_comes_with_the_next():
    class LoseUntil(Reliable, NodesGrid):
        reliable_from = 10

    def update(partition, server_round):
        return 0.05 * partition + 0.01 * server_round

    models = []
    for lost in (0.0, 0.4):
        strategy, _ = train(adding(update, simulation=policy()), lost=lost, seed=5, grid=LoseUntil)
        models.append(strategy.state.x)
    assert sum(report.lost for report in strategy.history) > 5
    # Updates are differences of float64 models, so each is what it should be up to rounding and the grid.
    grid = policy().privacy_policy().plan(D).grid
    assert models[0] == pytest.approx(models[1], abs=2 * ROUNDS * grid.spacing)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("name", "releases_per_pass"), [*((name, 5) for name in MECHANISMS), ("independent", 1), ("blt", 1), ("tree", 12)]
)
def test_every_mechanism_adds_up_to_the_updates_and_one_row_of_noise(name, releases_per_pass):
    """The mean of 4 x 10 values is off by more than 5 of its standard deviations in less than one of 10^6 seeds."""
    chosen = policy(mechanism=name, releases_per_pass=releases_per_pass, max_participations=ROUNDS, mu=50.0)
    strategy, _ = train(adding(lambda *_: 0.1, simulation=chosen), lost=0.2)
    plan = chosen.privacy_policy().plan(D)
    std = plan.noise_std * plan.mechanism.row_std_range()[1] / math.sqrt(CLIENTS * D)
    arrived = np.mean(list(strategy.acks.values()))
    assert strategy.state.x.mean() == pytest.approx(0.1 * arrived, abs=5 * std)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("releases_per_pass", [1, 2, 3, 6, 9])
def test_the_noise_is_enough_for_the_worst_data_by_enumeration(name, releases_per_pass):
    """All signs of the changes of a sample, or a client, in the releases it takes part in, against C itself."""
    releases = 6
    chosen = policy(mechanism=name, releases_per_pass=releases_per_pass, max_participations=releases)
    private = chosen.privacy_policy()
    plan = private.plan(D)
    encoder = plan.mechanism.materialize(releases)
    worst = 0.0
    for first in range(min(releases_per_pass, releases)):
        columns = encoder[:, first::releases_per_pass]
        signs = np.array(np.meshgrid(*[[-1.0, 1.0]] * columns.shape[1])).reshape(columns.shape[1], -1)
        worst = max(worst, float(np.linalg.norm(columns @ signs, axis=0).max()))
    mu = 2.0 * chosen.clip_norm * worst / plan.noise_std
    assert mu <= 2.0 * (1 + 1e-9)
    assert plan.mu == pytest.approx(2.0)


def test_by_default_everything_may_be_in_every_release():
    """The noise is independent then: K releases, each moved by 2 S, cost sqrt(K) 2 S / sigma."""
    chosen = UpdatePolicy(clip_norm=0.5, mu=1.0, max_participations=16)
    plan = chosen.privacy_policy().plan(D)
    assert (chosen.unit, plan.mechanism.name) == ("client", "independent")
    assert plan.noise_std == pytest.approx(4 * 2 * 0.5, rel=1e-3)
    fresh = UpdatePolicy(clip_norm=0.5, mu=1.0, max_participations=16, releases_per_pass=16)
    assert (fresh.unit, fresh.privacy_policy().mechanism) == ("sample", "blt")


def request(arrays=START, **config):
    return RecordDict({"arrays": arrays, "config": ConfigRecord(training_config(**config))})


def ask(app, kind="train", content=None, grid=None):
    return ask_one(app, kind, request() if content is None else content, grid=grid)


def test_nothing_leaves_but_the_release():
    reply = ask(adding(lambda *_: 0.1, simulation=policy()))
    assert {key: sorted(record) for key, record in reply.content.items()} == {
        "arrays": sorted(SHAPES),
        "metrics": sorted(
            [
                "protocol-version",
                "release",
                "ack",
                "sensitivity",
                "mu-guaranteed",
                "delta",
                "client-level",
                "num-examples",
            ]
        ),
        "config": ["client"],
    }
    assert reply.content["metrics"]["num-examples"] == 1


def test_an_update_is_clipped_as_a_whole():
    plan = policy(clip_norm=0.5, mu=1e4).privacy_policy().plan(D)
    assert plan.noise_std * plan.mechanism.row_std_range()[1] < 1e-3
    reply = ask(adding(lambda *_: 7.0, simulation=policy(clip_norm=0.5, mu=1e4)))
    update = concatenated(array.numpy() for array in reply.content["arrays"].values())
    assert update == pytest.approx(np.full(D, 0.5 / math.sqrt(D)), abs=1e-2)


def test_an_update_that_is_not_finite_counts_as_none():
    quiet = policy(mu=1e4)
    reply = ask(adding(lambda *_: math.nan, simulation=quiet))
    assert max(np.abs(array.numpy()).max() for array in reply.content["arrays"].values()) < 1e-2


def failing(error, **options):
    app = ClientApp(mods=[CorrelatedNoiseMod(**options)])

    @app.train()
    @app.evaluate()
    @app.query()
    def fail(message, context):
        if isinstance(error, Error):
            return Message(error, reply_to=message)
        raise error

    return app


class PanicError(BaseException):
    """What an extension written in Rust raises when it panics."""


FAILURES = [
    ValueError(SECRET),
    PanicError(SECRET),
    RefusedError(protocol.BUDGET_EXHAUSTED, SECRET),
    ConfigurationError(SECRET),
    SystemExit(SECRET),
    Error(7, SECRET),
]


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_an_exception_of_the_project_says_nothing(error, kind, monkeypatch):
    monkeypatch.setattr("murmurfl.clients.messages.in_simulation", lambda: False)  # whose text a server gets
    reply = ask(failing(error, simulation=policy(allow_evaluation=True)), kind)
    assert reply.error.code == protocol.INTERNAL_ERROR
    assert SECRET not in reply.error.reason


def test_evaluations_and_queries_are_refused_unless_the_client_allows_them():
    app = adding(nothing, simulation=policy())
    called = []

    @app.evaluate()
    def evaluate(message, context):
        called.append(1)
        metrics = MetricRecord({"loss": 0.5, "num-examples": 12})
        return Message(RecordDict({"metrics": metrics, "model": START}), reply_to=message)

    @app.query()
    def query(message, context):
        called.append(2)
        return Message(RecordDict(), reply_to=message)

    assert ask(app, "evaluate").error.code == protocol.EVALUATION_BLOCKED
    assert ask(app, "query").error.code == protocol.MALFORMED_REQUEST
    assert not called
    app._mods[0].simulation = policy(allow_evaluation=True)
    reply = ask(app, "evaluate")
    assert dict(reply.content["metrics"]) == {"loss": 0.5, "num-examples": 12, "not-private": 1}
    assert not reply.content.array_records, "a model is not a metric"


def test_a_strategy_collects_evaluations_only_where_they_are_marked(caplog):
    def app(allowed):
        app = adding(nothing, simulation=policy(allow_evaluation=allowed))

        @app.evaluate()
        def evaluate(message, context):
            loss = float(context.node_config["partition-id"])
            return Message(RecordDict({"metrics": MetricRecord({"loss": loss, "num-examples": 9})}), reply_to=message)

        return app

    _, result = train(app(True), rounds=2, evaluate_on_clients=True)
    assert {r: metrics["loss"] for r, metrics in result.evaluate_metrics_clientapp.items()} == {1: 1.5, 2: 1.5}
    assert "no epsilon covers them" in caplog.text
    assert "NOT covered" in caplog.text
    caplog.clear()
    with raises(ConfigurationError, "mismatch", "evaluate_on_clients", match=f"got {CLIENTS} that do not"):
        train(app(False), rounds=2, evaluate_on_clients=True)
    assert "NOT covered" not in caplog.text


def test_flowers_own_fedavg_gets_refusals_and_no_update():
    grid = NodesGrid(adding(nothing, simulation=policy()), 2)
    reply = ask(adding(nothing, simulation=policy()), content=RecordDict({"arrays": START}))
    assert reply.error.code == protocol.PROTOCOL_MISMATCH
    assert "CorrelatedFedAvg" in reply.error.reason
    result = FedAvg(fraction_evaluate=0.0).start(grid, START, num_rounds=1)
    assert not result.train_metrics_clientapp.get(1)


def test_a_project_without_the_mod_is_never_asked_for_an_update():
    app = ClientApp()
    asked = []

    @app.train()
    def train_without(message, context):
        asked.append(dict(message.content.array_records))
        return Message(RecordDict({"arrays": START}), reply_to=message)

    # At once: not one of the nodes that are there would ever be a client.
    with raises(NodesUnavailableError, "unsupported", match=r"app = ClientApp\(mods=\[CorrelatedNoiseMod\("):
        train(app, node_deadline_s=600.0)
    assert not any(asked), "clients that are not known as private get no model"


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("content", "code"),
    [
        (request(**{protocol.VERSION: 99}), protocol.PROTOCOL_MISMATCH),
        (request(**{protocol.ACK: 1}), protocol.BAD_ACKNOWLEDGEMENT),
        (request(**{protocol.ACK: -1}), protocol.MALFORMED_REQUEST),
        (request(**{protocol.SESSION: "../s"}), protocol.MALFORMED_REQUEST),
        (request(**{protocol.CLIENT: "9"}), protocol.MALFORMED_REQUEST),
        (request(ArrayRecord({"a": Array(np.array([math.nan]))})), protocol.MALFORMED_REQUEST),
        (request(ArrayRecord({"a": Array(np.array([1j]))})), protocol.MALFORMED_REQUEST),
        (request(ArrayRecord({"a": Array(np.array([1]))})), protocol.MALFORMED_REQUEST),
        (request(ArrayRecord({"a": Array("bfloat16", (2,), "numpy.ndarray", b"abcd")})), protocol.MALFORMED_REQUEST),
        (RecordDict({**request(), "more": ArrayRecord([np.zeros(2)])}), protocol.MALFORMED_REQUEST),
        (RecordDict({**request(), "more": request()["config"]}), protocol.MALFORMED_REQUEST),
    ],
)
def test_a_request_that_is_none_is_refused_before_anything_is_trained(content, code):
    def never(partition, server_round):
        raise AssertionError("trained")

    reply = ask(adding(never, simulation=policy()), content=content)
    assert reply.error.code == code


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"block.0/weight": np.zeros((2, 3))},
        {name: np.zeros(3) for name in SHAPES},
        {name: np.zeros(shape, dtype=np.int64) for name, shape in SHAPES.items()},
    ],
)
def test_another_models_reply_is_named_in_the_log_only(arrays, caplog):
    app = ClientApp(mods=[CorrelatedNoiseMod(simulation=policy())])

    @app.train()
    def train_other(message, context):
        return Message(RecordDict({"x": ArrayRecord({k: Array(v) for k, v in arrays.items()})}), reply_to=message)

    reply = ask(app)
    assert reply.error.code == protocol.NOT_CONFIGURED
    assert "Expected the ClientApp to reply with the arrays it was sent" in caplog.text


@pytest.mark.parametrize("forget", ["replace", "clear"])
def test_a_project_that_throws_the_ledger_away_is_refused(forget, caplog):
    app = ClientApp(mods=[CorrelatedNoiseMod(simulation=policy())])

    @app.train()
    def train_and_forget(message, context):
        if message.content["config"]["server-round"] == 2:
            if forget == "replace":
                context.state = RecordDict()
            else:
                context.state.clear()
        context.state["own"] = RecordDict({"metrics": MetricRecord({"a": 1.0})})["metrics"]
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    grid = NodesGrid(app, 1)
    for server_round in (1, 2):
        content = request(**{protocol.SERVER_ROUND: server_round, protocol.ACK: server_round - 1})
        reply = ask(app, content=content, grid=grid)
        assert reply.has_error() == (server_round == 2)
    assert reply.error.code == protocol.NOT_CONFIGURED
    assert "context.state" in caplog.text


def test_training_holds_no_ledger_lock(node, tmp_path):
    """While a client trains it answers another request, which takes the part of the data that the first would have."""
    path = tmp_path / "node.toml"
    path.write_text(path.read_text() + "releases-per-pass = 3\n")
    app = ClientApp(mods=[CorrelatedNoiseMod()])
    parts, inner = [], []

    @app.train()
    def train_slowly(message, context):
        parts.append(message.content["config"]["part"])
        if len(parts) == 1:
            inner.append(ask_real_node(app, request(), **node))
            parts.append("first again")
        arrays = {name: Array(array.numpy() + 1e6) for name, array in message.content["arrays"].items()}
        return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)

    outer = ask_real_node(app, request(), **node)
    assert parts == [0, 0, "first again"]
    assert inner[0].content["metrics"]["release"] == 1
    assert outer.content["metrics"]["release"] == 2, "released all the same, of nothing"
    session = read_ledger(tmp_path / "ledger.sqlite").sessions[0]
    assert session.releases == 2


class Mixed(torch.nn.Module):
    """An integer counter, a mask, and a layer in half precision."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.register_buffer("batches", torch.tensor(0))
        self.small = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
        self.register_buffer("mask", torch.tensor([True, False]))


def test_integer_arrays_stay_as_they_are_and_others_keep_their_dtype():
    torch.manual_seed(1)
    module = Mixed()
    with torch.no_grad():
        module.batches += 3
    seen = []
    app = ClientApp(mods=[CorrelatedNoiseMod(simulation=policy())])

    @app.train()
    def train_module(message, context):
        own = Mixed()
        own.load_state_dict(message.content["arrays"].to_torch_state_dict())
        seen.append({name: values.dtype for name, values in own.state_dict().items()})
        assert own.batches == 3
        with torch.no_grad():
            own.small += 1.0
            own.batches += 100
            own.mask[:] = True
        return Message(RecordDict({"arrays": ArrayRecord(own.state_dict())}), reply_to=message)

    _, result = train(app, start=ArrayRecord(module.state_dict()), rounds=3)
    final, start = result.arrays.to_torch_state_dict(), module.state_dict()
    assert list(final) == list(start)
    assert {name: values.dtype for name, values in final.items()} == seen[0]
    assert final["batches"] == 3
    assert final["mask"].tolist() == [True, False]
    assert not torch.equal(final["small"], start["small"])
    assert final["small"].dtype == torch.float16


@pytest.mark.parametrize("norm", [torch.nn.BatchNorm1d(2), torch.nn.InstanceNorm1d(2, track_running_stats=True)])
def test_running_statistics_are_refused_before_anything_is_spent(norm):
    """Noise would make a variance negative, and every prediction NaN; frozen layers have them as well."""
    app, asked = ClientApp(mods=[CorrelatedNoiseMod(simulation=policy())]), []

    @app.train()
    def never(message, context):
        asked.append(message)

    for module in (torch.nn.Sequential(torch.nn.Linear(3, 2), norm), torch.nn.Sequential(norm).eval()):
        with raises(ConfigurationError, "unsupported", "module"):
            train(app, start=ArrayRecord(module.state_dict()), rounds=1)
    assert not asked
    app = adding(nothing, simulation=policy())
    for module in (torch.nn.BatchNorm1d(2, track_running_stats=False), torch.nn.GroupNorm(1, 2)):
        _, result = train(app, start=ArrayRecord(module.state_dict()), rounds=1)
        assert np.isfinite(result.arrays["weight"].numpy()).all()


def test_a_process_says_once_that_a_trainings_metrics_stay_on_the_client(node, caplog):
    """Workers make the app anew for every message. The line is the same where a training fails, as the data may cause.

    A mod is called twice, and then another one, as if the worker had imported the app again.
    """

    def fails(partition, server_round):
        raise ValueError(SECRET)

    said = []
    for number, update in enumerate((nothing, nothing, fails)):
        app = adding(update, simulation=policy())
        if number != 1:  # as in a new process
            report_dropped_metrics.cache_clear()
        caplog.clear()
        with caplog.at_level("INFO", logger="flwr"):
            for server_round in (1, 2):
                content = request(**{protocol.SERVER_ROUND: server_round, protocol.SESSION: f"s{len(said)}"})
                ask_real_node(app, content, **node)
        said.append([record for record in caplog.records if "stay on the client" in record.getMessage()])
    assert [len(lines) for lines in said] == [1, 0, 1]
    assert said[0][0].getMessage() == said[2][0].getMessage()
    assert "train-loss" not in said[0][0].getMessage()
    assert all(record.public for lines in said for record in lines)


def test_the_message_about_other_arrays_names_those_that_came(caplog):
    app = ClientApp(mods=[CorrelatedNoiseMod(simulation=policy())])

    @app.train()
    def other_names(message, context):
        arrays = ArrayRecord({f"other.{k}": Array(np.zeros(2)) for k in range(10)})
        return Message(RecordDict({"arrays": arrays}), reply_to=message)

    assert ask(app).error.code == protocol.NOT_CONFIGURED
    assert "'other.0'" in caplog.text
    assert "2 more" in caplog.text


def test_a_model_in_bfloat16_travels_in_float32():
    """Flower cannot carry bfloat16, so the project casts. The update is the difference of the models that were sent."""
    app = ClientApp(mods=[CorrelatedNoiseMod(simulation=policy(mu=1e4))])

    @app.train()
    def train_in_bfloat16(message, context):
        own = torch.nn.Linear(3, 2).bfloat16()
        own.load_state_dict(message.content["arrays"].to_torch_state_dict())
        with torch.no_grad():
            own.bias += 0.25
        state = {name: values.float() for name, values in own.state_dict().items()}
        return Message(RecordDict({"arrays": ArrayRecord(state)}), reply_to=message)

    start = ArrayRecord({"weight": Array(np.ones((2, 3), np.float32)), "bias": Array(np.ones(2, np.float32))})
    with pytest.raises(TypeError):
        ArrayRecord(torch.nn.Linear(3, 2).bfloat16().state_dict())
    _, result = train(app, start=start, rounds=1)
    assert result.arrays["bias"].numpy() == pytest.approx(np.full(2, 1.25), abs=0.02)
    assert result.arrays["weight"].numpy() == pytest.approx(np.ones((2, 3)), abs=0.02)


def test_other_record_keys_and_the_projects_own_settings():
    app = ClientApp(mods=[CorrelatedNoiseMod(simulation=policy())])
    seen = []

    @app.train()
    def train_under_other_keys(message, context):
        seen.append((message.content["settings"]["lr"], message.content["settings"]["server-round"]))
        return Message(RecordDict({"whatever": message.content["the/model"]}), reply_to=message)

    strategy = CorrelatedFedAvg(num_clients=2, arrayrecord_key="the/model", configrecord_key="settings")
    strategy.start(NodesGrid(app, 2), START, num_rounds=2, train_config=ConfigRecord({"lr": 0.5}))
    assert seen == [(0.5, 1), (0.5, 1), (0.5, 2), (0.5, 2)]
    assert [report.aggregated for report in strategy.history] == [2, 2]


def test_which_part_of_the_data_comes_next_is_the_clients_own_count():
    """In each session every part comes once before any comes again, whatever rounds a server claims."""
    app = ClientApp(
        mods=[CorrelatedNoiseMod(simulation=policy(releases_per_pass=3, max_participations=5, budget_mu=9.0))]
    )
    parts = []

    @app.train()
    def note_the_part(message, context):
        parts.append(message.content["config"]["part"])
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    grid = NodesGrid(app, 1)
    for session in "sstststtst":
        content = request(**{protocol.SESSION: session, protocol.PART: 1, protocol.SERVER_ROUND: 1})
        assert not ask(app, content=content, grid=grid).has_error()
    assert [part for part, session in zip(parts, "sstststtst", strict=True) if session == "s"] == [0, 1, 2, 0, 1]
    assert [part for part, session in zip(parts, "sstststtst", strict=True) if session == "t"] == [0, 1, 2, 0, 1]


def test_the_log_says_in_every_round_what_is_guaranteed(caplog):
    train(adding(nothing, simulation=policy(mu=1.0, releases_per_pass=1)), rounds=2)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    lines = [line for line in told if "of at most 30" in line]
    assert len(lines) == 1  # of many clients of a simulation one says it
    stated = "epsilon = 4.378 at delta = 1e-05, for replacement of all samples of one client, against the server"
    assert all(stated in line and "Simulated with seeded keys." in line for line in lines)
    rounds = [line for line in caplog.messages if "4 of 4 updates aggregated" in line]
    assert len(rounds) == 2
    assert all(stated in line and "which a server cannot check" in line for line in rounds)
    caplog.clear()
    train(adding(nothing, simulation=policy()), rounds=1)
    assert "for replacement of one sample of one client" in caplog.text
    assert "as the client's operator declared" in caplog.text


def test_the_cap_and_what_was_spent():
    app = adding(nothing, simulation=policy(max_participations=3, releases_per_pass=1))
    grid = NodesGrid(app, 2)
    strategy = CorrelatedFedAvg(num_clients=2, seed=1, allow_exhaustion=True)
    strategy.start(grid, START, num_rounds=5)
    assert [report.asked for report in strategy.history] == [2, 2, 2, 0, 0]  # they said that they make three
    assert sum(report.refusals for report in strategy.history) == 0
    statements = strategy.ask_privacy(grid)
    assert list(statements) == ["0", "1"]
    assert {s["unit"] for s in statements.values()} == {"client"}
    for statement in statements.values():
        assert (statement["releases"], statement["mu-guaranteed"]) == (3, pytest.approx(2.0))
        assert statement["mu-spent"] == pytest.approx(2.0)
    second = CorrelatedFedAvg(num_clients=2, seed=1)
    with raises(NothingAggregatedError, "missing", match="refused with budget-exhausted"):
        second.start(grid, START, num_rounds=1)
    assert second.history[0].refused == {"budget-exhausted": 2}


@pytest.mark.parametrize(("asked", "possible"), [(2, 3), (1, 5)])
def test_more_rounds_than_the_clients_caps_allow_are_refused_before_the_first(asked, possible):
    """If one of two clients is asked, the sampler decides which: with seed 4 it asks 1 0 1 1 0 1."""
    app = adding(nothing, simulation=policy(max_participations=3, releases_per_pass=1))
    options = {"clients": 2, "clients_per_round": asked, "sampler": 4}
    with raises(
        ConfigurationError,
        "exhausted",
        "num_rounds",
        match=f"at most {possible} rounds, got {possible + 1}: client . says",
    ):
        train(app, rounds=possible + 1, **options)
    strategy, _ = train(app, rounds=possible, lost=0.3, **options)  # a lost reply is a release
    assert sum(report.refusals for report in strategy.history) == 0
    assert sum(report.lost for report in strategy.history) > 0


def test_a_run_goes_on_from_its_checkpoint_and_not_with_other_buffers(tmp_path):
    def update(partition, server_round):
        return 0.01 * server_round

    options = {"num_clients": 2, "seed": 1, "session": "s", "checkpoint": tmp_path / "c"}
    start = ArrayRecord({**START, "count": Array(np.array(3))})
    whole = CorrelatedFedAvg(**{**options, "checkpoint": None})
    whole.start(NodesGrid(adding_floats(update), 2), start, num_rounds=4)
    grid = NodesGrid(adding_floats(update), 2)
    CorrelatedFedAvg(**options).start(grid, start, num_rounds=2)
    resumed = CorrelatedFedAvg(**options)
    resumed.start(grid, start, num_rounds=4)
    assert (resumed.state.x == whole.state.x).all()
    with raises(CheckpointError, "mismatch", "fixed"):
        CorrelatedFedAvg(**options).start(grid, ArrayRecord({**START, "count": Array(np.array(4))}), num_rounds=5)


def adding_floats(update):
    app = ClientApp(mods=[CorrelatedNoiseMod(simulation=policy())])

    @app.train()
    def train_floats(message, context):
        values = update(0, message.content["config"]["server-round"])
        arrays = {
            name: Array(np.asarray(array.numpy() + (values if array.dtype == "float64" else 0)))
            for name, array in message.content["arrays"].items()
        }
        return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)

    return app


# A real node: not a simulation, so the operator's file decides.


@pytest.fixture
def node(tmp_path):
    """An operator's file and its ledger; budget for two sessions."""
    path = tmp_path / "node.toml"
    path.write_text(
        'client = "clinic-0"\nledger = "ledger.sqlite"\nclip-norm = 1.0\nmu = 1.0\nmax-participations = 3\n'
    )
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=math.sqrt(2), delta=1e-6)
    return {"murmurfl-config": str(path), "partition-id": 0}


def test_on_a_real_node_the_operators_file_decides(node, tmp_path, caplog):
    lenient = policy(mu=1000.0, clip_norm=1000.0)
    app = adding(lambda *_: 0.1, simulation=lenient)
    for release in (1, 2, 3):
        reply = ask_real_node(app, request(**{protocol.ACK: release - 1}), **node)
        assert reply.content["config"]["client"] == "clinic-0"
        assert reply.content["metrics"]["release"] == release
        assert (reply.content["metrics"]["mu-guaranteed"], reply.content["metrics"]["delta"]) == (1.0, 1e-6)
    assert f"epsilon = {rounded_up(gdp_epsilon(1.0, 1e-6))} at delta = 1e-06" in caplog.text
    assert "Simulated" not in caplog.text
    assert caplog.text.count("Client clinic-0: By itself, over all its releases, its noise is") == 1
    assert ask_real_node(app, request(**{protocol.ACK: 3}), **node).error.code == protocol.CAP_REACHED
    assert not ask_real_node(app, request(**{protocol.SESSION: "t"}), **node).has_error()
    assert ask_real_node(app, request(**{protocol.SESSION: "u"}), **node).error.code == protocol.BUDGET_EXHAUSTED
    summary = read_ledger(tmp_path / "ledger.sqlite")
    assert [session.releases for session in summary.sessions] == [3, 1]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_on_a_real_node_a_failure_looks_like_any_other_release(error, node, caplog):
    reply = ask_real_node(failing(error), request(), **node)
    assert not reply.has_error()
    assert sorted(reply.content["arrays"]) == sorted(SHAPES)
    assert "counts as zero" in caplog.text
    assert SECRET not in str(reply.content)


NO_MODELS = {
    "no arrays": lambda arrays: {},
    "two models": lambda arrays: {"a": arrays, "b": arrays},
    "arrays under other names": lambda arrays: {"a": ArrayRecord([np.zeros(3)])},
    "another shape": lambda arrays: {"a": ArrayRecord({name: Array(np.zeros(7)) for name in arrays})},
    "integers": lambda arrays: {"a": ArrayRecord({k: Array(v.numpy().astype(int)) for k, v in arrays.items()})},
    "bytes that are no array": lambda arrays: {
        "a": ArrayRecord({k: Array(v.dtype, v.shape, v.stype, b"") for k, v in arrays.items()})
    },
    "no message": None,
}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("content", NO_MODELS.values(), ids=NO_MODELS)
def test_a_nodes_malformed_answer_counts_as_a_zero_update(content, node, tmp_path, caplog, hushed_noise):
    """Whether training gives a model may depend on the data, and a refusal would tell it without being charged."""
    path = tmp_path / "node.toml"
    path.write_text(path.read_text().replace("mu = 1.0", "mu = 8.0"))
    (tmp_path / "ledger.sqlite").unlink()
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=8.0, delta=1e-6)
    app = ClientApp(mods=[CorrelatedNoiseMod()])

    @app.train()
    def train_to_something_else(message, context):
        if content is None:
            return None
        return Message(RecordDict(content(message.content["arrays"])), reply_to=message)

    reply = ask_real_node(app, request(), **node)
    assert not reply.has_error()
    assert sorted(reply.content["arrays"]) == sorted(SHAPES)
    assert max(np.abs(array.numpy()).max() for array in reply.content["arrays"].values()) < 1e-2, "noise alone"
    assert "counts as zero" in caplog.text
    (session,) = read_ledger(tmp_path / "ledger.sqlite").sessions
    assert session.releases == 1, "and is paid for"


def test_without_an_operators_file_a_real_node_refuses(monkeypatch, caplog):
    monkeypatch.delenv("MURMURFL_NODE_CONFIG", raising=False)
    reply = ask_real_node(adding(nothing, simulation=policy()), request())
    assert reply.error.code == protocol.NOT_CONFIGURED
    assert "operator's file" in caplog.text


def test_without_a_ledger_a_real_node_refuses(node, tmp_path):
    (tmp_path / "ledger.sqlite").unlink()
    assert ask_real_node(adding(nothing), request(), **node).error.code == protocol.LEDGER_UNUSABLE


def test_in_simulation_a_mod_without_a_policy_refuses(caplog):
    assert ask(adding(nothing)).error.code == protocol.NOT_CONFIGURED
    assert "Expected a policy for simulated clients" in caplog.text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("budget-mu = 9.0", "expected keys among"),
        ('mechanism = "loud"', "mechanism to be a known name"),
        ("releases-per-pass = 0", "releases-per-pass to be an integer"),
        ('allow-evaluation = "yes"', "allow-evaluation"),
        ("mechanism = ", "valid TOML"),
    ],
)
def test_an_operators_file_is_read_strictly(node, tmp_path, line, words):
    path = tmp_path / "node.toml"
    path.write_text(path.read_text() + line)
    with pytest.raises(ConfigurationError, match=words):
        UpdateNode.read(path)


def test_an_operators_file_is_the_operators(node, tmp_path):
    path = tmp_path / "node.toml"
    path.chmod(0o666)
    if sys.platform != "win32":
        with raises(ConfigurationError, "insecure", match="chmod"):
            UpdateNode.read(path)
    path.chmod(0o600)
    path.write_text(path.read_text().replace("mu = 1.0", "mu = 3.0"))
    with raises(ConfigurationError, "out-of-range", "mu"):
        UpdateNode.read(path).policy(SQLiteLedger(tmp_path / "ledger.sqlite"))
    with raises(ConfigurationError, "unreadable", match="node configuration"):
        UpdateNode.read(tmp_path / "none.toml")
    path.write_text('client = "a"\n')
    with raises(ConfigurationError, "missing", "ledger", match="ledger, clip-norm, mu or epsilon, max-participations"):
        UpdateNode.read(path)


# The audit: the whole path from a ClientApp's update to the reply, on two clients all of whose data differ.

AUDITED = 3


def streams(chosen):
    direction = np.array([0.6, 0.8])
    grid_of_counts = chosen.privacy_policy().plan(2).grid

    def start(canary, runs):
        sign = -1.0 if canary is None else 1.0
        model = ArrayRecord({"w": Array(np.zeros(2))})
        app = ClientApp()

        @app.train()
        def train_along(message, context):
            return Message(RecordDict({"a": ArrayRecord({"w": Array(sign * direction)})}), reply_to=message)

        grid = NodesGrid(app, len(runs))
        mods = [CorrelatedNoiseMod(simulation=chosen, seed=run + (0 if canary else 10**6)) for run in runs]

        def answers(k, acks):
            for mod, node, ack in zip(mods, grid.get_node_ids(), acks, strict=True):
                app._registered_funcs["train.default"] = lambda m, c, mod=mod: mod(m, c, train_along)
                content = request(model, **{protocol.ACK: ack})
                (reply,) = grid.send_and_receive([Message(content, dst_node_id=node, message_type="train")])
                metrics = reply.content["metrics"]
                counts = grid_of_counts.counts(reply.content["arrays"]["w"].numpy())
                yield Release(counts, grid_of_counts.spacing, int(metrics["release"]), int(metrics["ack"]))

        return answers

    return start


def audit(clients, claimed, runs):
    moved = 2.0 * np.array([0.6, 0.8]) * np.arange(1, AUDITED + 1)[:, None]
    return audit_client(
        claimed.privacy_policy(), streams(clients), {"all data": moved}, runs=runs, lost=(False, True, False)
    )


def small(mu=1.0):
    return UpdatePolicy(clip_norm=1.0, mu=mu, max_participations=AUDITED, delta=0.05)


@pytest.fixture
def quiet(caplog):
    """For tests with thousands of clients, each of which writes a line to its log."""
    caplog.set_level(logging.ERROR, logger="flwr")


@pytest.mark.long
@pytest.mark.usefixtures("quiet")
def test_a_client_all_of_whose_data_is_replaced_is_not_measured_above_its_claim():
    """Confidence 95 %: an honest client is accused in at most one of 20 seeds; the seeds are fixed."""
    result = audit(small(), small(), runs=600)
    assert not result.violated
    assert result.estimated_mu == pytest.approx(1.0, abs=0.2)
    assert result.measured_mu > 0.4


@pytest.mark.long
@pytest.mark.usefixtures("quiet")
def test_noise_for_a_single_participation_is_caught():
    """The planted bug: noise for fresh data where all data are in every release."""
    assumed = UpdatePolicy(clip_norm=1.0, mu=1.0, max_participations=AUDITED, delta=0.05, releases_per_pass=AUDITED)
    result = audit(assumed, small(), runs=200)
    assert result.violated


@pytest.mark.parametrize(
    ("releases_per_pass", "words"),
    [(1, "every sample in up to 30 releases"), (30, ""), (31, ""), (29, "every sample in up to 2 releases")],
)
def test_the_guarantee_of_an_update_says_in_how_many_releases_a_sample_is(releases_per_pass, words):
    sentence = update_guarantee(policy(releases_per_pass=releases_per_pass), 2.0).sentence
    assert words in sentence
    assert bool(words) == ("in up to" in sentence)


def test_policies_of_the_mod_are_ordinary_policies():
    private = policy(releases_per_pass=10, mechanism="").privacy_policy()
    assert isinstance(private, PrivacyPolicy)
    assert (private.sample_participations, private.min_separation, private.clip_unit) == (3, 10, "update")
    assert policy(releases_per_pass=10**6).privacy_policy().plan(D).noise_std == pytest.approx(
        PrivacyPolicy(1.0, 1, 30, 2.0, clip_unit="update").plan(D).noise_std
    ), "a return that does not come is not charged"
    with raises(ConfigurationError, "wrong-type", "simulation"):
        CorrelatedNoiseMod(private)
    with raises(ConfigurationError, "out-of-range", "max_participations"):
        policy(max_participations=0)


def test_evaluations_are_logged_as_flower_logs_them(caplog):
    """Word for word: the lines of Flower's own FedAvg for the same evaluations."""
    wanted = ("Initial global", "[ROUND", "Global evaluation", "\t└──> MetricRecord")

    def evaluate(server_round, arrays):
        return MetricRecord({"accuracy": server_round / 4})

    def lines(strategy, grid):
        caplog.clear()
        with caplog.at_level("INFO", logger="flwr"):
            strategy.start(grid, START, num_rounds=2, evaluate_fn=evaluate)
        return [record.getMessage() for record in caplog.records if record.getMessage().startswith(wanted)]

    grid = NodesGrid(adding(nothing, simulation=policy()), 2)
    ours = lines(CorrelatedFedAvg(num_clients=2, seed=1), grid)

    class Skips(FedAvg):  # which does not train: the lines are all that is wanted
        def configure_train(self, *_):
            return []

        def configure_evaluate(self, *_):
            return []

        def aggregate_train(self, *_):
            return None, None

        def aggregate_evaluate(self, *_):
            return None

    assert ours == lines(Skips(min_available_nodes=2), grid)
    assert len(ours) == 7


def test_an_evaluation_that_clients_do_not_allow_is_said_once(caplog):
    """By client 0; if none allows it, it is said before anything is spent."""
    mods = [CorrelatedNoiseMod(simulation=policy(allow_evaluation=allowed)) for allowed in (False, True)]

    def each(message, context, call_next):
        return mods[min(int(context.node_config["partition-id"]), 1)](message, context, call_next)

    app = adding(nothing, mods=[each])

    @app.evaluate()
    def evaluate(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"loss": 1.0})}), reply_to=message)

    with caplog.at_level("WARNING", logger="flwr"):
        _, result = train(app, rounds=3, evaluate_on_clients=True)
    assert list(result.evaluate_metrics_clientapp) == [1, 2, 3]
    assert caplog.text.count(f"1 of {CLIENTS} clients do not evaluate (0).") == 1
    assert caplog.text.count(f"Round 1: {CLIENTS - 1} of {CLIENTS} clients evaluated the model") == 1
