"""A mistake is known before anything is spent: on made-up records, or, in a simulation, on the server."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from murmurfl.clients import (
    CorrelatedNoiseMod,
    Label,
    LinearEstimator,
    Part,
    Schema,
    UpdatePolicy,
    messages,
    private_client_app,
    trainable_arrays,
)
from murmurfl.clients.adapters import client_model
from murmurfl.clients.adapters.client_model import check_gradients
from murmurfl.privacy import ConfigurationError, SumAssumption, protocol
from murmurfl.strategies import (
    CorrelatedFedAvg,
    FullBatch,
    NodesUnavailableError,
    NothingAggregatedError,
    SecureAggregation,
)
from murmurfl.strategies.rounds.observed import ClippingWatch, TrainingFigures
from sklearn.linear_model import LogisticRegression

from tests.harness.clients import training_config
from tests.harness.errors import raises
from tests.harness.grid import NodesGrid, ask

pytestmark = pytest.mark.usefixtures("no_result_folder")

torch = pytest.importorskip("torch")
CLIENTS, ROUNDS = 4, 3
BOUNDED = Schema(inputs=(Part(shape=(3,), bounds=(-3.0, 3.0)),), label=Label(classes=2))


class SimulatedGrid(NodesGrid):
    """The grid of a simulation, whose server shows what clients raise."""

    simulated = True


class Holding(torch.nn.Module):
    """Computes with references to its weights, as layers of another framework do: its gradient is zero."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.held = [part.detach().clone() for part in self.linear.parameters()]

    def forward(self, inputs):
        return inputs @ self.held[0].T + self.held[1]


def ignoring(output, target):
    return 3 * sum(part.sum() for part in [output - output.detach()])


def without_end(output, target):
    return torch.sqrt(-1 - output.square()).sum()


def linear():
    return torch.nn.Linear(3, 2)


def load(context):
    inputs = np.random.default_rng(context.node_config["partition-id"]).normal(size=(20, 3)).astype(np.float32)
    return inputs, (inputs.sum(axis=1) > 0).astype(np.int64)


MISTAKES = {
    "zero": (Holding, None, "zero for each"),
    "zeros": (lambda: torch.nn.Sequential(*(zeroed() for _ in range(2))), None, "zero for each"),
    "not finite": (linear, without_end, "NaN or infinities for each"),
    "alike": (lambda: Constant(), ignoring, "the same for each"),
}


class Constant(torch.nn.Module):
    """Answers with its bias whatever comes."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(2))

    def forward(self, inputs):
        return self.bias.expand(len(inputs), 2)


def zeroed():
    layer = torch.nn.Linear(3, 3, bias=False)
    torch.nn.init.zeros_(layer.weight)
    return layer


def train(app, arrays, grid=SimulatedGrid, nodes=CLIENTS, kind=FullBatch, **options):
    settings = {"num_clients": CLIENTS, "learning_rate": 0.1, "node_deadline_s": 60.0, "seed": 1, **options}
    strategy = kind(**settings)
    strategy.start(grid(app, nodes), arrays, num_rounds=ROUNDS)
    return strategy


@pytest.mark.parametrize(("make", "loss", "why"), MISTAKES.values(), ids=MISTAKES)
def test_a_gradient_that_says_nothing_is_refused_before_anything_is_spent(make, loss, why):
    with raises(ConfigurationError, "unsupported", "model", match=why):
        private_client_app(make, loss, load, epsilon=4.0, rounds=ROUNDS, schema=BOUNDED)
    app = private_client_app(make, loss, load, epsilon=4.0, rounds=ROUNDS)  # whose schema is inferred later
    grid = SimulatedGrid(app, CLIENTS)
    strategy = FullBatch(num_clients=CLIENTS, learning_rate=0.1, node_deadline_s=60.0)
    with raises(NodesUnavailableError, "refused", match=why):
        strategy.start(grid, trainable_arrays(make()), num_rounds=ROUNDS)
    assert not strategy.history
    assert all(not context.state for context in grid.contexts.values()), "no ledger has an entry"


def test_without_the_check_noise_alone_would_be_released(monkeypatch):
    """The planted bug, for the test above."""
    monkeypatch.setattr(client_model, "check_gradients", lambda *_: None)
    app = private_client_app(Holding, None, load, epsilon=4.0, rounds=ROUNDS, schema=BOUNDED)
    assert train(app, trainable_arrays(Holding())).history[-1].aggregated == CLIENTS


def test_models_that_begin_at_zero_and_adapters_with_a_zero_half_are_taken():
    class Adapter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base = torch.nn.Linear(3, 2).requires_grad_(False)
            self.down, self.up = torch.nn.Linear(3, 1, bias=False), torch.nn.Linear(1, 2, bias=False)
            torch.nn.init.zeros_(self.up.weight)

        def forward(self, inputs):
            return self.base(inputs) + self.up(self.down(inputs))

    private_client_app(Adapter, None, load, epsilon=4.0, rounds=ROUNDS, schema=BOUNDED)
    model = LinearEstimator(LogisticRegression(), num_features=3, classes=(0, 1), num_samples=80)
    private_client_app(model, samples=load, epsilon=4.0, rounds=ROUNDS)


def test_some_gradients_that_are_not_finite_are_said(caplog):
    class Roots:
        shapes = ((3,),)

        def __call__(self, parameters, samples):
            return np.where(samples[0][:, :1] < 0, np.nan, samples[0])

    check_gradients(Roots(), [np.zeros(3)], BOUNDED)
    assert "made-up records are not finite" in caplog.text


def test_any_mistake_in_a_model_ends_a_simulation_at_once_with_its_traceback():
    def wrong(output, target):
        return {}[target]

    app = private_client_app(linear, wrong, load, epsilon=4.0, rounds=ROUNDS)
    with raises(NodesUnavailableError, "refused", match=r"return \{\}\[target\]") as ended:
        train(app, trainable_arrays(linear()))
    assert "start more nodes" not in str(ended.value)


def test_a_mistake_in_samples_ends_a_simulation_at_once_with_its_traceback():
    def broken(context):
        return context.run_config["no such key"]

    app = private_client_app(linear, None, broken, epsilon=4.0, rounds=ROUNDS)
    with raises(NodesUnavailableError, "refused", match="KeyError: 'no such key'"):
        train(app, trainable_arrays(linear()))


def test_partitions_that_are_made_while_a_training_runs_are_counted(caplog):
    class Growing(SimulatedGrid):
        def get_node_ids(self):
            return super().get_node_ids()[: 4 if self.server_round < 1 else 13]

    app = private_client_app(linear, None, load, epsilon=4.0, rounds=ROUNDS)
    train(app, trainable_arrays(linear()), Growing, 13)
    (said,) = [one for one in caplog.messages if "nodes are connected" in one]
    assert "13 nodes are connected, and this training uses 4 of them" in said
    caplog.clear()
    train(
        private_client_app(linear, None, load, epsilon=4.0, rounds=ROUNDS),
        trainable_arrays(linear()),
        nodes=13,
        num_clients=None,
    )
    assert "nodes are connected" not in caplog.text, "the remedy works"


class OwnLoop(FullBatch):
    """A project's own rounds, after Flower's."""

    def start(self, grid, initial_arrays, num_rounds=3):
        arrays = initial_arrays
        for server_round in range(1, num_rounds + 1):
            replies = grid.send_and_receive(self.configure_train(server_round, arrays, ConfigRecord(), grid))
            arrays, metrics = self.aggregate_train(server_round, replies)
            assert isinstance(metrics, MetricRecord)


def test_a_loop_of_its_own_has_a_forecast_and_is_told_what_it_lacks(caplog):
    app = private_client_app(linear, None, load, epsilon=0.1, rounds=ROUNDS)
    strategy = train(app, trainable_arrays(linear()), kind=OwnLoop)
    assert strategy.forecast.verdict == "useless"
    assert "USELESS" in caplog.text
    assert sum("loop of its own" in one for one in caplog.messages) == 1
    assert [report.aggregated for report in strategy.history] == [CLIENTS] * ROUNDS
    caplog.clear()
    app = private_client_app(linear, None, load, epsilon=0.1, rounds=ROUNDS)
    usual = train(app, trainable_arrays(linear()))
    assert usual.forecast == strategy.forecast
    assert "loop of its own" not in caplog.text


def texts(context):
    return [(np.arange(2 + number % 5), number % 2) for number in range(40)]


class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = torch.nn.Embedding(10, 3), torch.nn.Linear(3, 2)

    def forward(self, tokens):
        return self.linear(self.embedding(tokens).mean(1))


class Cropped(torch.utils.data.Dataset):
    """Another record at each reading."""

    draws = 0

    def __len__(self):
        return 8

    def __getitem__(self, number):
        Cropped.draws += 1
        return np.full(3, Cropped.draws, np.float32), number % 2


def test_texts_of_several_lengths_are_said_on_the_server_of_a_simulation(caplog):
    app = private_client_app(Bag, None, texts, epsilon=4.0, rounds=ROUNDS)
    train(app, trainable_arrays(Bag()))
    (said,) = [one for one in caplog.messages if "do not fit their schema" in one and one.startswith("In simulation")]
    assert "of client 0 32 of 40, most with: " in said


@pytest.mark.parametrize(
    "samples",
    [lambda context: Cropped(), lambda context: (np.full((8, 3), Cropped().__getitem__(0)[0][0]), np.arange(8) % 2)],
    ids=["items", "samples"],
)
def test_records_that_change_are_said_on_the_server_of_a_simulation(samples, caplog):
    app = private_client_app(linear, None, samples, epsilon=4.0, rounds=ROUNDS)
    train(app, trainable_arrays(linear()))
    assert sum("gives other records" in one for one in caplog.messages) == 1
    caplog.clear()
    train(private_client_app(linear, None, load, epsilon=4.0, rounds=ROUNDS), trainable_arrays(linear()))
    assert "gives other records" not in caplog.text


def test_a_clip_that_makes_directions_of_gradients_is_no_mistake(caplog):
    watch = ClippingWatch()
    for server_round, ratio in enumerate([21.7, 30.0, 25.0], 1):
        figures = TrainingFigures(rows=10, clipped=10, median_ratio=ratio, largest_ratio=ratio)
        watch.take(server_round, {"0": figures}, of_updates=False)
    assert not caplog.messages
    watch.take(
        4, {"0": TrainingFigures(rows=10, clipped=10, median_ratio=900.0, largest_ratio=900.0)}, of_updates=False
    )
    assert "lower learning_rate" in caplog.text


def outer(message, context, call_next):
    """A mod that knows rounds and nothing else."""
    assert message.content["config"]["server-round"] > 0
    return call_next(message, context)


def without_metrics(message, context, call_next):
    reply = call_next(message, context)
    reply.content.pop("metrics", None)
    return reply


def halving(message, context, call_next):
    reply = call_next(message, context)
    for record in reply.content.array_records.values():
        for name, array in record.items():
            record[name] = Array(array.numpy() / 2)
    return reply


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_mods_that_know_rounds_or_drop_metrics_work(trust):
    sums, nodes, how = {}, CLIENTS, {}
    if trust == "secure-aggregation":
        sums, nodes = {"secure_aggregation": SecureAggregation(min_cohort=3)}, CLIENTS + 2
        how = {"trust": trust, "sums": SumAssumption(2, 3)}
    app = private_client_app(linear, None, load, epsilon=4.0, rounds=ROUNDS, mods=[outer, without_metrics], **how)
    strategy = train(app, trainable_arrays(linear()), nodes=nodes, clients_per_round=CLIENTS, **sums)
    assert [report.aggregated for report in strategy.history] == [CLIENTS] * ROUNDS


def test_a_mod_that_changes_a_release_is_named():
    app = private_client_app(linear, None, load, epsilon=4.0, rounds=ROUNDS, mods=[halving])
    with raises(NothingAggregatedError, "missing", match="fixedclipping_mod"):
        train(app, trainable_arrays(linear()))


def test_a_mod_that_fails_says_nothing_to_a_real_server(monkeypatch):
    def fails(message, context, call_next):
        call_next(message, context)
        raise ValueError("patient 4711")

    app = private_client_app(linear, None, load, epsilon=4.0, rounds=ROUNDS, mods=[fails])
    content = RecordDict({"arrays": trainable_arrays(linear()), "config": ConfigRecord(training_config())})
    assert "4711" in ask(app, content=content).error.reason, "in a simulation it does"
    monkeypatch.setattr(messages, "in_simulation", lambda: False)
    assert ask(app, content=content).error.reason == "internal error; the client's own log says more"


@pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
def test_functions_of_a_projects_own_are_refused_with_what_takes_their_place(kind):
    app = private_client_app(linear, None, load, epsilon=4.0, rounds=ROUNDS)
    with raises(ConfigurationError, "unsupported", kind):
        getattr(app, kind)("ages")
    reply = ask(app, f"{kind}.ages", RecordDict())
    assert reply.error.code == protocol.MALFORMED_REQUEST
    assert "would have no noise" in reply.error.reason


def test_other_config_records_are_no_mistake_and_other_arrays_are_named():
    app = private_client_app(linear, None, load, epsilon=4.0, rounds=ROUNDS)
    records = {"arrays": trainable_arrays(linear()), "config": ConfigRecord(training_config())}
    assert not ask(app, content=RecordDict({**records, "mine": ConfigRecord({"lr": 0.1})})).has_error()
    reply = ask(app, content=RecordDict({**records, "control": trainable_arrays(linear())}))
    assert "leave out other ArrayRecords" in reply.error.reason


def updates(*others):
    app = ClientApp(mods=[CorrelatedNoiseMod(simulation=UpdatePolicy(clip_norm=1.0, mu=1e3, max_participations=5))])

    @app.train()
    def train(message, context):
        (record,) = message.content.array_records.values()
        moved = ArrayRecord({name: Array(array.numpy() + 0.1) for name, array in record.items()})
        found = {f"other-{number}": other(record) for number, other in enumerate(others)}
        return Message(RecordDict({"arrays": moved, "seen": ConfigRecord({"n": 1}), **found}), reply_to=message)

    return app


def test_arrays_beside_the_model_stay_and_two_models_are_named():
    start = ArrayRecord([np.zeros(3)])

    def run(*others):
        strategy = CorrelatedFedAvg(num_clients=CLIENTS, node_deadline_s=60.0, seed=1)
        return strategy.start(SimulatedGrid(updates(*others), CLIENTS), start, num_rounds=1)

    found = run(lambda record: ArrayRecord({"control": Array(np.ones(2))}))
    assert found.arrays["0"].numpy() == pytest.approx(np.full(3, 0.1), abs=0.05)
    with raises(NothingAggregatedError, "missing", match="got 2, of which 2 have its arrays"):
        run(lambda record: record)


def test_a_query_of_a_projects_own_behind_the_mod_is_refused_with_a_remedy():
    app = updates()
    app.query("ages")(lambda message, context: Message(RecordDict(), reply_to=message))
    assert "ask for private statistics" in ask(app, "query.ages", RecordDict()).error.reason


def test_a_mod_before_murmurfls_is_said_to_fail_on_the_greeting():
    policy = UpdatePolicy(clip_norm=1.0, mu=1e3, max_participations=5)
    app = ClientApp(mods=[outer, CorrelatedNoiseMod(simulation=policy)])
    app.train()(lambda message, context: Message(message.content, reply_to=message))
    strategy = CorrelatedFedAvg(num_clients=CLIENTS, node_deadline_s=0.1)
    with raises(NodesUnavailableError, "unsupported", match=r"murmurfl's first in mods=\[...\]"):
        strategy.start(SimulatedGrid(app, CLIENTS), ArrayRecord([np.zeros(3)]), num_rounds=1)


def test_steps_follow_from_simulated_records_without_a_schema(caplog):
    app = private_client_app(linear, None, load, epsilon=4.0, rounds=ROUNDS)
    found = app.steps()
    assert "records of simulated client 0" in caplog.text
    bounded = private_client_app(linear, None, load, epsilon=4.0, rounds=ROUNDS, schema=BOUNDED, clip_norm=1.0)
    assert found["learning_rate"] == pytest.approx(bounded.steps()["learning_rate"], rel=1.0)
    for nothing in (lambda context: 1 / 0, lambda context: (np.zeros((2, 3)), np.zeros(2, dtype=int))):
        app = private_client_app(WithoutBias, None, nothing, epsilon=4.0, rounds=ROUNDS)
        with raises(ConfigurationError, "missing", "schema"):
            app.steps()


class WithoutBias(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2, bias=False)
