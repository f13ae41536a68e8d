"""Whole trainings over a grid: lemma 4.1, losses, liars, stragglers, checkpoints."""

import json
import math
import time
from io import BytesIO

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result
from murmurfl.clients import (
    DelayedMomentumClient,
    FullBatchClient,
    IsrlDpClient,
    Mu2Client,
    NoisySGDClient,
    numpy_client_app,
)
from murmurfl.privacy import ConfigurationError, PrivacyPolicy, SimulatedKeys, protocol
from murmurfl.strategies import (
    AnytimeMu2,
    CheckpointError,
    CorrelatedMomentum,
    DelayedMomentum,
    FullBatch,
    IsrlDp,
    Mu2,
    NodesUnavailableError,
    NoisySGD,
    NothingAggregatedError,
    ReducedTreeMomentum,
    TreeMomentum,
    TrustedFullBatch,
    TrustedMu2,
)
from murmurfl.strategies.rounds.client_registry import Awaited

from tests.harness.callbacks import AfterRound
from tests.harness.clients import noise_of, normal_samples, simulated_app
from tests.harness.errors import raises
from tests.harness.grid import NodesGrid, Reliable, context_of
from tests.harness.models import Data

pytestmark = pytest.mark.usefixtures("no_result_folder")

SHAPES = [(2, 3), (4,)]
D = 10
START = ArrayRecord([np.zeros(shape) for shape in SHAPES])


def app(data, *, kind=Mu2Client, **changes):
    """Contributions are the data, whatever the query point, so sums can be written down."""
    return simulated_app(kind, Data(SHAPES), data, **changes)


def zeros(name, samples=30):
    return np.zeros((samples, D))


def some(name, samples=30):
    return normal_samples(name, samples, D) / 4


def mu2(num_clients=6, clients_per_round=3, **options):
    options = {"learning_rate": 0.05, "diameter": 4.0, "seed": 1, "session": "s", "node_deadline_s": 1.0, **options}
    return Mu2(num_clients=num_clients, clients_per_round=clients_per_round, **options)


def last_noise(name, strategy):
    """y_k of a client's last aggregated release, from its key alone."""
    return noise_of(name, strategy.acks.get(name, 0), PrivacyPolicy(1.0, 1, 30, 2.0), D)


@pytest.mark.parametrize("m", [2, 3, 6])
@pytest.mark.parametrize("lost", [0.0, 0.3])
def test_noise_on_q_is_the_sum_of_the_clients_last_noises_over_m(m, lost):
    """Lemma 4.1 of reshef-levy-2025, on a real run whose data are zero; with losses, for what was acknowledged."""
    strategy = mu2(clients_per_round=m)
    strategy.start(NodesGrid(app(zeros), 6, lost=lost), START, num_rounds=12)
    expected = sum(last_noise(str(i), strategy) for i in range(6))
    assert (strategy.state.release_sum == expected).all(), "to the last bit"
    assert np.linalg.norm(expected) > 0
    if lost:
        assert sum(report.lost for report in strategy.history) > 0


def test_with_the_papers_release_rule_a_loss_leaves_noise_for_ever():
    strategy = mu2(clients_per_round=6)
    grid = NodesGrid(app(zeros, release_rule="paper"), 6, lost=0.3)
    strategy.start(grid, START, num_rounds=12)
    residue = strategy.state.release_sum - sum(last_noise(str(i), strategy) for i in range(6))
    assert np.linalg.norm(residue) > PrivacyPolicy(1.0, 1, 30, 2.0).plan(D).noise_std


def test_carried_over_contributions_make_q_what_it_would_have_been():
    """A loss is only a delay: once every client is heard again, the sum of releases is exactly the lossless one."""

    class LoseUntil(Reliable, NodesGrid):
        reliable_from = 11

    runs = []
    for grid in (NodesGrid(app(some), 6), LoseUntil(app(some), 6, lost=0.4, seed=5)):
        # Contributions must not depend on the query points for the two runs to be comparable: `Linear` sees to it.
        strategy = mu2(clients_per_round=6)
        strategy.start(grid, START, num_rounds=12)
        runs.append(strategy)
    assert (runs[0].state.release_sum == runs[1].state.release_sum).all()
    assert sum(report.lost for report in runs[1].history) > 5


def test_mu_computed_from_a_runs_releases_is_the_configured_mu():
    strategy = mu2(num_clients=4, clients_per_round=4)
    grid = NodesGrid(app(lambda name: some(name, 10)), 4)
    strategy.start(grid, START, num_rounds=10)
    statements = strategy.ask_privacy(grid)
    assert list(statements) == ["0", "1", "2", "3"]
    for statement in statements.values():
        assert statement["releases"] == 10
        assert statement["mu-spent"] == pytest.approx(2.0, rel=1e-9)
        assert statement["mu-guaranteed"] == pytest.approx(2.0, rel=1e-9)
        # From first principles: the noise this client says it used, ten releases, one sample in the first.
        assert statement["sensitivity"] * math.sqrt(10) / (statement["noise-std"] * math.sqrt(10)) == pytest.approx(
            2.0, rel=1e-9
        )


def test_clients_that_have_made_all_their_releases_are_not_asked_for_more():
    grid = NodesGrid(app(lambda name: some(name, 3 + int(name))), 4)
    with raises(
        ConfigurationError,
        "exhausted",
        "num_rounds",
        match="3 rounds, got 8: client 0 says that it can make 3 releases",
    ):
        mu2(num_clients=4, clients_per_round=4).start(grid, START, num_rounds=8)
    strategy = mu2(num_clients=4, clients_per_round=4, allow_exhaustion=True)
    strategy.start(grid, START, num_rounds=8)
    assert [report.aggregated for report in strategy.history] == [4, 4, 4, 3, 2, 1, 0, 0]
    assert [report.asked for report in strategy.history] == [4, 4, 4, 3, 2, 1, 0, 0]
    assert [report.finished for report in strategy.history] == [0, 0, 1, 2, 3, 4, 4, 4]
    assert [strategy.leaving.left(t) for t in range(1, 9)] == [4, 4, 4, 3, 2, 1, 0, 0]
    assert sum(report.refusals for report in strategy.history) == 0


def test_refusals_are_counted_and_harmless():
    strategy = mu2(num_clients=4, clients_per_round=4, allow_exhaustion=True)
    grid = NodesGrid(app(lambda name: some(name, 3 + int(name))), 4)
    strategy.start(grid, START, num_rounds=8, simulated=True)  # whose clients are not asked how long they last
    assert [report.aggregated for report in strategy.history] == [4, 4, 4, 3, 2, 1, 0, 0]
    assert [report.refusals for report in strategy.history] == [0, 0, 0, 1, 2, 3, 4, 4]
    assert strategy.history[-1].refused == {"cap-reached": 4}


def tampered(tamper):
    """A grid whose replies a test changes, or adds to."""
    grid = NodesGrid(app(zeros), 6)
    grid.tamper = tamper
    return grid


def replace_first(change):
    def tamper(replies):
        change(replies[0].content)
        return replies

    return tamper


def first_array(values):
    def change(content):
        name = next(iter(content["arrays"]))
        content["arrays"][name] = Array(values)

    return change


def raw_bytes(content):
    next(iter(content["arrays"].values())).data = b"no array"


def without(key):
    def change(content):
        del content[key]

    return change


def entry(record, key, value):
    def change(content):
        content[record][key] = value

    return change


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "change",
    [
        first_array(np.full((2, 3), np.nan)),
        first_array(np.full((2, 3), np.inf)),
        first_array(np.full((2, 3), 1e200)),
        first_array(np.zeros((3, 2))),
        first_array(np.zeros((2, 3), dtype=np.int64)),
        raw_bytes,
        without("arrays"),
        without("metrics"),
        without("config"),
        entry("config", protocol.CLIENT, "5"),
        entry("config", protocol.CLIENT, "nobody"),
        entry("metrics", protocol.VERSION, 77),
        entry("metrics", protocol.RELEASE, 1.5),
    ],
)
def test_a_malformed_reply_is_dropped_and_the_round_goes_on(change):
    strategy = mu2(clients_per_round=6)
    grid = tampered(replace_first(change))
    strategy.start(grid, START, num_rounds=3)
    assert [report.malformed for report in strategy.history] == [1, 1, 1]
    assert [report.aggregated for report in strategy.history] == [5, 5, 5]
    assert "0" not in strategy.acks
    assert (strategy.state.release_sum == sum(last_noise(str(i), strategy) for i in range(6))).all()


def test_a_late_original_beside_its_carry_over_counts_once():
    """A reply comes a round late, beside the next one, which contains it; a trusted server's noise rests on this."""
    held = []

    def delay(replies):
        late, held[:] = list(held), [replies[0]]
        return [*replies[1:], *late]

    def duplicate(replies):
        return [*replies, *replies]

    for tamper in (delay, duplicate):
        held.clear()
        strategy = mu2(clients_per_round=6)
        strategy.start(tampered(tamper), START, num_rounds=5)
        assert sum(report.late for report in strategy.history) > 0 or tamper is delay
        total = sum(last_noise(str(i), strategy) for i in range(6))
        assert (strategy.state.release_sum == total).all()
        assert all(report.aggregated <= 6 for report in strategy.history)


@pytest.mark.parametrize(("code", "refused", "lost"), [(2, {"error-2": 1}, 0), (5, {}, 1)])
def test_error_replies_of_strangers_are_counted_and_a_killed_client_has_refused_nothing(code, refused, lost):
    def fail(replies):
        message = Message(RecordDict(), dst_node_id=1, message_type="train")
        return [*replies[1:], Message(Error(code, "node unavailable"), reply_to=message)]

    strategy = mu2(clients_per_round=6)
    strategy.start(tampered(fail), START, num_rounds=2)
    assert strategy.history[0].refused == refused
    assert strategy.history[0].lost == lost


def test_too_few_nodes_end_in_a_clear_error_and_not_in_waiting():
    with raises(NodesUnavailableError, "unreachable", match=r"Expected 6 clients within 0\.3 s, got 4"):
        mu2(node_deadline_s=0.3).start(NodesGrid(app(zeros), 4), START, num_rounds=2)


def test_nodes_that_refuse_to_say_hello_are_named_in_the_error():
    def not_configured(context):
        raise ValueError("secret")

    with raises(NodesUnavailableError, "refused", match="6 answered with internal-error"):
        mu2(node_deadline_s=0.3).start(NodesGrid(numpy_client_app(not_configured), 6), START, num_rounds=2)


def test_a_node_that_leaves_is_lost_and_one_that_returns_is_known_again():
    grid = NodesGrid(app(zeros), 6)

    def leave_and_return(report, metrics):
        if report.server_round == 2:
            gone.update({k: grid.contexts.pop(k) for k in list(grid.contexts)[:2]})
        if report.server_round == 6:
            # As after a restart: the same clients on other node ids.
            for k, context in gone.items():
                context.node_id = k + 500
                grid.contexts[k + 500] = context

    gone = {}
    strategy = mu2(clients_per_round=4, num_clients=6, callbacks=[AfterRound(leave_and_return)])
    strategy.start(grid, START, num_rounds=12)
    away = strategy.history[2:6]
    assert sum(report.lost for report in away) > 0
    assert sum(report.lost for report in strategy.history[6:]) == 0
    assert (strategy.state.release_sum == sum(last_noise(str(i), strategy) for i in range(6))).all()


class Silent(NodesGrid):
    """A grid on which some nodes never answer."""

    silent: frozenset[int] = frozenset()

    def push_messages(self, messages):
        messages = list(messages)
        heard = [m for m in messages if m.metadata.dst_node_id not in self.silent]
        ids = iter(super().push_messages(heard))
        return [next(ids) if m in heard else "never" for m in messages]


def test_a_node_that_never_answers_holds_up_nobody():
    grid = Silent(app(zeros), 7)
    grid.silent = frozenset(list(grid.get_node_ids())[-1:])
    strategy = mu2(clients_per_round=6, num_clients=6, node_deadline_s=30.0)
    started = time.monotonic()
    strategy.start(grid, START, num_rounds=5)
    assert time.monotonic() - started < 15.0, "not the deadline"
    assert all(report.aggregated == 6 for report in strategy.history)


def test_a_second_node_with_a_known_name_does_not_end_the_training():
    grid = NodesGrid(app(zeros), 6)

    def impostor(report, metrics):
        if report.server_round == 2:
            grid.contexts[99] = context_of(99)

    strategy = mu2(clients_per_round=6, num_clients=6, callbacks=[AfterRound(impostor)])
    strategy.start(grid, START, num_rounds=5)
    assert all(report.aggregated == 6 for report in strategy.history)


def with_a_double(nodes):
    """Nodes of which the first two have one name."""
    grid = NodesGrid(app(zeros), nodes)
    first, second = list(grid.contexts.values())[:2]
    second.node_config["partition-id"] = first.node_config["partition-id"]
    return grid


def test_the_first_of_two_nodes_keeps_their_name(caplog):
    strategy = mu2(clients_per_round=6)
    grid = with_a_double(7)
    strategy.start(grid, START, num_rounds=2)
    assert [report.aggregated for report in strategy.history] == [6, 6]
    assert strategy.clients.node_map()["0"] == min(grid.get_node_ids())
    assert caplog.text.count("Client '0' is reported by two nodes") == 1


def test_a_name_goes_to_the_other_node_when_the_first_is_gone():
    grid = with_a_double(7)
    first, second = sorted(grid.get_node_ids())[:2]
    strategy = mu2(clients_per_round=6, callbacks=[AfterRound(lambda *_: grid.contexts.pop(first, None))])
    strategy.start(grid, START, num_rounds=2)
    assert strategy.clients.node_map()["0"] == second


def test_names_that_are_missing_for_a_double_are_reported_as_such():
    with raises(NodesUnavailableError, "unreachable", match="1 reported by several nodes, of which one is asked: '0'"):
        mu2(node_deadline_s=0.05).start(with_a_double(6), START, num_rounds=1)


class Greedy(NodesGrid):
    """The last node says that it is all clients."""

    def handle(self, message, identifier):
        reply = super().handle(message, identifier)
        if message.metadata.dst_node_id == max(self.contexts) and message.metadata.message_type == "query":
            reply.content["config"][protocol.CLIENTS] = [str(i) for i in range(6)]
        return reply


def test_a_node_with_every_clients_name_is_dropped_and_the_run_goes_on(caplog):
    strategy = mu2(clients_per_round=6)
    grid = Greedy(app(zeros), 7)
    grid.contexts = dict(reversed(grid.contexts.items()))  # and it is met first
    strategy.start(grid, START, num_rounds=2)
    assert [report.aggregated for report in strategy.history] == [6, 6]
    assert max(grid.contexts) not in strategy.clients.node_map().values()
    assert "says that it is 6 clients and is not asked" in caplog.text
    with raises(NodesUnavailableError, "unreachable", match="1 answered with more names than one"):
        mu2(node_deadline_s=0.05).start(Greedy(app(zeros), 6), START, num_rounds=1)


def test_in_a_simulation_a_node_may_be_several_clients():
    strategy = mu2(clients_per_round=6)
    strategy.clients.several_on_a_node = True
    strategy.clients.meet(Greedy(app(zeros), 1), Awaited(6))
    assert set(strategy.clients.node_map()) == {str(i) for i in range(6)}


@pytest.mark.parametrize("names", [[], [""], ["x" * 1000], [7], "", 1.5])
def test_a_node_without_a_sensible_name_is_not_met(names):
    class Nameless(NodesGrid):
        def handle(self, message, identifier):
            reply = super().handle(message, identifier)
            entries = dict(reply.content["config"])
            del reply.content["config"]
            reply.content["config"] = ConfigRecord({**entries, protocol.CLIENTS: names})
            return reply

    with raises(NodesUnavailableError, "unreachable", match="does not understand"):
        mu2(1, 1, node_deadline_s=0.05).start(Nameless(app(zeros), 1), START, num_rounds=1)


def test_bytes_that_are_an_archive_are_malformed_and_nothing_worse():
    archive = BytesIO()
    np.savez(archive, a=np.zeros(2))

    def change(content):
        next(iter(content["arrays"].values())).data = archive.getvalue()

    strategy = mu2(clients_per_round=6)
    strategy.start(tampered(replace_first(change)), START, num_rounds=2)
    assert [report.malformed for report in strategy.history] == [1, 1]


def test_a_reply_larger_than_any_release_is_malformed():
    plan = PrivacyPolicy(1.0, 1, 30, 2.0).plan(D)
    grid = tampered(replace_first(first_array(np.full((2, 3), 2 * plan.largest_value))))
    strategy = mu2(clients_per_round=6, largest_value=plan.largest_value)
    strategy.start(grid, START, num_rounds=2)
    assert [report.malformed for report in strategy.history] == [1, 1]
    assert np.abs(strategy.state.release_sum).max() < 6 * plan.largest_value


def test_a_strategy_trains_once():
    strategy = mu2()
    strategy.start(NodesGrid(app(zeros), 6), START, num_rounds=2)
    with raises(ConfigurationError, "wrong-order", match="new strategy"):
        strategy.start(NodesGrid(app(zeros), 6), START, num_rounds=2)
    with raises(ConfigurationError, "wrong-order", match="Expected round 3"):
        strategy.aggregate_train(1, [])


@pytest.mark.parametrize("other", ["smaller", "permuted", "another start"])
def test_a_checkpoint_of_another_model_is_refused(other, tmp_path):
    path = tmp_path / "checkpoint.npz"
    mu2(checkpoint=path).start(NodesGrid(app(zeros), 6), START, num_rounds=2)
    values = START.to_numpy_ndarrays()
    arrays = {
        "smaller": values[:1],
        "permuted": values[::-1],
        "another start": [value + 1 for value in values],
    }[other]
    with raises(CheckpointError, "mismatch", "start" if other == "another start" else "layout"):
        mu2(checkpoint=path).start(NodesGrid(app(zeros), 6), ArrayRecord(arrays), num_rounds=3)


def test_every_damaged_checkpoint_is_a_typed_error(tmp_path):
    path = tmp_path / "checkpoint.npz"
    mu2(checkpoint=path).start(NodesGrid(app(zeros), 6), START, num_rounds=2)
    whole = path.read_bytes()
    for position in range(0, len(whole), 37):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 64]) + whole[position + 1 :])
        try:
            mu2(checkpoint=path)._ensure_state(START)
            strategy = mu2(checkpoint=path)
            strategy._ensure_state(START)
            strategy._resume(Result())
        except CheckpointError:
            continue


class Interrupted(Exception):
    pass


MOMENTUM = {
    "tree": (TreeMomentum, {}),
    "reduced tree": (ReducedTreeMomentum, {"smoothness": 1.0}),
    "blt": (CorrelatedMomentum, {"mechanism": "blt"}),
    "sqrt_toeplitz": (CorrelatedMomentum, {"mechanism": "sqrt_toeplitz"}),
}
ALL = {"batch_selection": "full_batch", "release_rule": "paper", "mechanism": "independent"}
TREE = {"trust": "trusted-server", "release_rule": "paper", "mechanism": "independent"}


def make(kind, checkpoint, callbacks=()):
    options = {"checkpoint": checkpoint, "callbacks": callbacks}
    if kind == "trusted":
        policy = PrivacyPolicy(1.0, 1, 30, 2.0, trust="trusted-server")
        return TrustedMu2(
            num_clients=6, clients_per_round=3, learning_rate=0.05, policy=policy, num_rounds=12, seed=1, session="s",
            noise_keys=SimulatedKeys(9, "server"), **options,
        )  # fmt: skip
    options |= {"num_clients": 6, "clients_per_round": 3, "learning_rate": 0.05, "seed": 1, "session": "s"}
    if kind == "sgd":
        return NoisySGD(**options)
    if kind == "anytime":
        return AnytimeMu2(window=5, **options)
    if kind == "full batch":
        return FullBatch(momentum=0.6, average="linear", **options)
    if kind == "trusted full batch":
        policy = PrivacyPolicy(1.0, 1, 30, 2.0, **ALL, trust="trusted-server")
        return TrustedFullBatch(policy=policy, num_rounds=12, noise_keys=SimulatedKeys(9, "server"), **options)
    if kind == "delayed":
        return DelayedMomentum(**options)
    if kind == "accelerated":
        return IsrlDp(variant="accelerated", **options)
    if kind in MOMENTUM:
        policy = PrivacyPolicy(1.0, 1, 30, 2.0, **TREE)
        options |= {"clients_per_round": 6, "num_rounds": 12, "noise_keys": SimulatedKeys(9, "server")}
        strategy, own = MOMENTUM[kind]
        return strategy(**options, **own, alpha=0.3, policy=policy)
    return mu2(**options)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        ("mu2", "uniform"),
        *(
            (kind, "balanced")
            for kind in ("mu2", "anytime", "trusted", "sgd", "full batch", "trusted full batch", "delayed")
        ),
        *((kind, "balanced") for kind in ("accelerated", *MOMENTUM)),
    ],
)
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(kind, sampling, tmp_path):
    changes = {
        "trusted": {"trust": "trusted-server"},
        "sgd": {"kind": NoisySGDClient, "mechanism": "independent"},
        "full batch": {"kind": FullBatchClient, **ALL},
        "trusted full batch": {"kind": FullBatchClient, **ALL, "trust": "trusted-server"},
        "delayed": {"kind": DelayedMomentumClient},
        "accelerated": {"kind": IsrlDpClient, "mechanism": "independent"},
        **{key: {"kind": NoisySGDClient, **TREE} for key in MOMENTUM},
    }
    client_app = app(some, **changes.get(kind, {}))

    def build(checkpoint, *callbacks):
        strategy = make(kind, checkpoint, callbacks)
        strategy.sampler.sampling = sampling
        return strategy

    def interrupt(report, metrics):
        if report.server_round in (4, 7):
            raise Interrupted

    whole = build(None)
    expected = whole.start(NodesGrid(client_app, 6), START, num_rounds=12)

    grid, checkpoint = NodesGrid(client_app, 6), tmp_path / "state" / "checkpoint.npz"
    for _ in range(2):
        with pytest.raises(Interrupted):
            build(checkpoint, AfterRound(interrupt)).start(grid, START, num_rounds=12)
    resumed = build(checkpoint)
    result = resumed.start(grid, START, num_rounds=12)
    assert [report.server_round for report in resumed.history] == list(range(1, 13))
    assert resumed.history == whole.history
    assert resumed.acks == whole.acks
    for mine, theirs in zip(result.arrays.to_numpy_ndarrays(), expected.arrays.to_numpy_ndarrays(), strict=True):
        assert mine.tobytes() == theirs.tobytes()
    for name, value in vars(whole.state).items():
        assert value.tobytes() == getattr(resumed.state, name).tobytes(), name


def test_a_checkpoint_of_another_training_or_a_damaged_one_is_refused(tmp_path):
    checkpoint = tmp_path / "checkpoint.npz"
    mu2(checkpoint=checkpoint).start(NodesGrid(app(some), 6), START, num_rounds=2)
    assert checkpoint.stat().st_mode & 0o077 == 0, "a trusted server's checkpoint is private data"
    with raises(CheckpointError, "mismatch", "learning_rate"):
        mu2(checkpoint=checkpoint, learning_rate=0.1).start(NodesGrid(app(some), 6), START, num_rounds=4)
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    with raises(CheckpointError, "unreadable"):
        mu2(checkpoint=checkpoint).start(NodesGrid(app(some), 6), START, num_rounds=4)


@pytest.mark.parametrize("version", [0, 2, None])
def test_a_checkpoint_of_another_format_is_refused_and_left_alone(tmp_path, version):
    checkpoint = tmp_path / "checkpoint.npz"
    mu2(checkpoint=checkpoint).start(NodesGrid(app(some), 6), START, num_rounds=2)
    with np.load(checkpoint) as file:
        entries = dict(file)
    header = json.loads(str(entries.pop("header")))
    np.savez(checkpoint, **entries, header=np.array(json.dumps({**header, "format": version})))
    before = checkpoint.read_bytes()
    with raises(CheckpointError, "other-format", match="1 at .* got one of format .* Go on with the version") as caught:
        mu2(checkpoint=checkpoint).start(NodesGrid(app(some), 6), START, num_rounds=4)
    assert "data that were never used before" in str(caught.value)
    assert checkpoint.read_bytes() == before


def test_the_result_behaves_as_flowers_does():
    seen = []

    def evaluate(server_round, arrays):
        seen.append(server_round)
        return MetricRecord({"norm": float(np.linalg.norm(arrays["0"].numpy()))})

    result = mu2().start(NodesGrid(app(some), 6), START, num_rounds=4, evaluate_fn=evaluate)
    assert seen == [0, 1, 2, 3, 4]
    assert list(result.evaluate_metrics_serverapp) == seen
    assert list(result.train_metrics_clientapp) == [1, 2, 3, 4]
    assert result.train_metrics_clientapp[1]["asked"] == 3
    assert [array.numpy().shape for array in result.arrays.values()] == SHAPES


def test_a_trusted_server_drops_clients_that_state_another_sensitivity():
    policy = PrivacyPolicy(1.0, 1, 30, 2.0, trust="trusted-server")
    strategy = TrustedMu2(
        num_clients=6, clients_per_round=6, learning_rate=0.05, policy=policy, num_rounds=5, seed=1, node_deadline_s=1.0
    )
    with raises(NothingAggregatedError, "missing", match="2 rounds: 12 replies were malformed"):
        strategy.start(NodesGrid(app(some, trust="trusted-server", clip_norm=2.0), 6), START, num_rounds=2)
    assert strategy.history[0].malformed == 6
    assert strategy.history[0].aggregated == 0
