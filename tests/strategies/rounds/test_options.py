"""Options of strategies: typed, checked, refused where Flower's have no meaning here; and permits of sessions."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import flwr.server.strategy as legacy
import flwr.serverapp.strategy as message_api
import murmurfl.clients
import murmurfl.strategies
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from murmurfl.clients import CorrelatedNoiseMod, NoisySGDClient, PrivateClient, UpdatePolicy
from murmurfl.privacy import ConfigurationError, PrivacyPolicy, protocol
from murmurfl.privacy.permits import OwnerKey
from murmurfl.privacy.queries.mean_of_features import MeanRows
from murmurfl.privacy.queries.statistics import CountedColumn
from murmurfl.strategies import (
    Callback,
    CheckpointError,
    CorrelatedFedAvg,
    FullBatch,
    MeanOfFeatures,
    Mu2,
    NodesUnavailableError,
    NoisySGD,
    OnlineFedSGD,
    PrivateEvaluation,
    QueryRound,
    QueryState,
    ReleaseStrategy,
    RoundOptions,
    SecureAggregation,
    TrustedMu2,
    sample_clients,
)
from murmurfl.strategies.rounds import loop as rounds
from murmurfl.strategies.rounds.options import UnexpectedArgumentError

from tests.harness.clients import normal_samples, simulated_app
from tests.harness.errors import raises
from tests.harness.grid import NodesGrid
from tests.harness.models import Data
from tests.harness.secure import HELPERS, SecureGrid, build, clients, same, trained
from tests.strategies.sums.test_secure_resume import in_round

pytestmark = pytest.mark.usefixtures("no_result_folder")

ROOT = Path(__file__).parents[3]


def kinds_of(module, base):
    """The concrete subclasses of a class that a package exports."""
    kinds = [getattr(module, name) for name in module.__all__]
    kinds = [one for one in kinds if isinstance(one, type) and issubclass(one, base) and one is not base]
    return [one for one in kinds if not inspect.isabstract(one)]


def maker(kind):
    """The place, among a class and its bases, of the class whose constructor it has."""
    return next(i for i, base in enumerate(kind.__mro__) if "__init__" in vars(base))


TEXT = """
from murmurfl.clients import Mu2Client, NoisySGDClient, OnlineClient, ShuffledClient
from murmurfl.privacy import PrivacyPolicy, ShuffledPolicy
from murmurfl.strategies import *
from murmurfl.strategies import TreeMomentum

def strategies(policy: PrivacyPolicy) -> None:
    Mu2(num_clients=4, clients_per_round=2, learning_rate=0.1, diameter=1.0, seed=1, allow_exhaustion=True)
    CorrelatedFedAvg(num_clients=4, session="s")
    CorrelatedFedAvg(fraction_train=0.5, min_available_nodes=10, optimizer="adam")
    TrustedMu2(num_clients=4, clients_per_round=2, learning_rate=0.1, policy=policy, num_rounds=3, sampling="balanced")
    TreeMomentum(num_clients=4, clients_per_round=4, learning_rate=0.1, alpha=0.1, policy=policy, num_rounds=3)
    Mu2(num_clients=4, clients_per_round=2, learning_rate=0.1, diametre=1.0)  # misspelt
    NoisySGD(num_clients=4, clients_per_round=2, learning_rate=0.1, sed=1)  # misspelt
    DelayedMomentum(num_clients=4, clients_per_round=2, learning_rate=0.1, run_dri=True)  # misspelt
    IsrlDp(num_clients=4, clients_per_round=2, learning_rate=0.1, varient="minibatch")  # misspelt
    OnlineFedSGD(num_clients=4, clients_per_round=2, learning_rate=0.1, local_steps=1, sesion="s")  # misspelt
    ShuffledAvg(num_clients=4, clients_per_round=2, learning_rate=0.1, steps_per_epoch=1, sesion="s")  # misspelt
    CorrelatedFedAvg(num_clients=4, sesion="s")  # misspelt
    TrustedMu2(num_clients=4, clients_per_round=2, learning_rate=0.1, policy=policy, num_round=3)  # misspelt, missing
    TreeMomentum(num_clients=4, clients_per_round=4, learning_rate=0.1, alfa=0.1, policy=policy, num_rounds=3)  # both
    CorrelatedMomentum(num_clients=4, clients_per_round=4, learning_rate=1.0, alpha=1.0, policy=policy)  # missing
    Mu2(clients_per_round=2)  # missing
    Mu2(num_clients=4, clients_per_round=2, learning_rate=0.1, sampling="uniformly")  # another type

def clients(gradients, samples, ledger, keys, policy: PrivacyPolicy, shuffled: ShuffledPolicy) -> None:
    Mu2Client(gradients, samples, policy, ledger, keys, name="1", rows=None)
    OnlineClient(gradients, samples, policy, ledger, keys, name="1", learning_rate=0.1)
    NoisySGDClient(gradients, samples, policy, ledger, keys, nam="1")  # misspelt
    OnlineClient(gradients, samples, policy, ledger, keys, name="1", learning_rat=0.1)  # misspelt
    ShuffledClient(gradients, samples, shuffled, ledger, keys, name="1", learning_rate=0.1, oder="RR")  # misspelt
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """The lines of the text that a type checker complains about."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "murmurfl").mkdir()
    for package in ("clients", "privacy", "strategies"):
        (folder / "murmurfl" / package).symlink_to(ROOT / package)
    (folder / "text.py").write_text(TEXT)
    command = [Path(sys.executable).parent / "basedpyright", "--outputjson", "--pythonpath", sys.executable, "text.py"]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    report = json.loads(found.stdout)
    wrong = [entry for entry in report["generalDiagnostics"] if entry["severity"] == "error"]
    return {TEXT.splitlines()[entry["range"]["start"]["line"]] for entry in wrong}


@pytest.mark.more_cases
def test_a_type_checker_complains_about_every_wrong_option_and_about_nothing_else(errors):
    wrong = {line for line in TEXT.splitlines() if "#" in line}
    assert len(wrong) == 15
    assert errors == wrong


STRATEGIES = kinds_of(murmurfl.strategies, ReleaseStrategy)
REQUIRED = {
    "learning_rate": 0.1,
    "alpha": 0.5,
    "local_steps": 1,
    "steps_per_epoch": 1,
    "clip_norm": 1.0,
    "num_rounds": 1,
    "num_features": 2,
    "columns": [CountedColumn("age", bounds=(0.0, 9.0))],
    "query": MeanRows(2),
    "policy": PrivacyPolicy(
        clip_norm=1.0,
        batch_size=1,
        max_participations=1,
        mu=1.0,
        trust="trusted-server",
        batch_selection="full_batch",
        release_rule="paper",
    ),
}
SHARED = {
    "num_clients": 3,
    "clients_per_round": 2,
    "fraction_train": 0.5,
    "min_train_nodes": 3,
    "min_available_nodes": 2,
    "quorum": 0.5,
    "over_selection": 1.5,
    "excluded": ("3",),
    "seed": 7,
    "sampling": "balanced",
    "session": "other",
    "node_deadline_s": 3.0,
    "checkpoint": Path("a.npz"),
    "largest_value": 9.0,
    "evaluate_every": 2,
    "allow_exhaustion": True,
    "secure_aggregation": SecureAggregation(min_cohort=2),
    "public_inputs": {"centre": np.ones(2)},
    "permit": "a permit",
    "schema": "a digest",
    "callbacks": [Callback()],
}


def test_every_constructor_lists_its_parameters_and_documents_each():
    for kind in [*STRATEGIES, *kinds_of(murmurfl.clients, PrivateClient)]:
        parameters, constructor = inspect.signature(kind).parameters, inspect.unwrap(kind.__init__)
        assert "__signature__" not in vars(kind).keys() | vars(constructor).keys(), (
            f"{kind.__name__}: nothing is forged"
        )
        assert list(parameters) == list(inspect.signature(constructor).parameters)[1:]
        kinds = {one.kind for one in parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, kind.__name__
        assert not [one for one in parameters.values() if one.annotation in (one.empty, "Any")], kind.__name__
        pages = [inspect.getdoc(base) or "" for base in kind.__mro__[: maker(kind) + 1]]
        documented = {name for page in pages for name in re.findall(r"^(\w+) : ", page, re.MULTILINE)}
        assert parameters.keys() <= documented, kind.__name__


NOT_OF_QUERIES = {
    *("clients_per_round", "fraction_train", "min_train_nodes", "quorum", "over_selection", "sampling"),
    *("evaluate_every", "allow_exhaustion", "public_inputs"),
}


def test_what_all_strategies_take_is_handed_on_by_each(monkeypatch):
    def keep(self, options, rule, *, aggregator=None):
        self.options, self.entries = options, {}

    monkeypatch.setattr(ReleaseStrategy, "__init__", keep)
    shared = {one.name: one for one in fields(RoundOptions)}
    assert SHARED.keys() == shared.keys()
    for kind in STRATEGIES:
        parameters = inspect.signature(kind).parameters
        # A query is asked once, of everybody: nothing is sampled, and nobody waits for a part.
        left_out = NOT_OF_QUERIES if issubclass(kind, QueryRound) else set()
        assert shared.keys() - left_out <= parameters.keys(), kind.__name__
        for name in shared.keys() & parameters.keys():
            assert parameters[name].annotation == shared[name].type, name
            assert parameters[name].default == shared[name].default, name
        required = {name for name, one in parameters.items() if one.default is inspect.Parameter.empty}
        for name in SHARED.keys() & parameters.keys():
            value = SHARED[name]
            made = kind(**{one: REQUIRED[one] for one in required}, **{name: value})
            assert getattr(made.options, name) is value, (kind.__name__, name)


D = 3
START = ArrayRecord({"w": Array(np.zeros(D))})
TRUSTED = PrivacyPolicy(clip_norm=1.0, batch_size=1, max_participations=9, mu=1.0, trust="trusted-server")
MAKE = {
    "CorrelatedFedAvg": lambda **given: CorrelatedFedAvg(**given),
    "Mu2": lambda **given: Mu2(learning_rate=0.1, **given),
    "NoisySGD": lambda **given: NoisySGD(learning_rate=0.1, **given),
    "FullBatch": lambda **given: FullBatch(learning_rate=0.1, **given),
    "OnlineFedSGD": lambda **given: OnlineFedSGD(learning_rate=0.1, local_steps=1, **given),
    "TrustedMu2": lambda **given: TrustedMu2(learning_rate=0.1, policy=TRUSTED, num_rounds=4, **given),
}
HONOURED = {"fraction_train", "min_train_nodes", "min_available_nodes"}


def strategies_of(module):
    """Flower's own strategy classes, deprecated ones that it no longer exports as well."""
    classes = set()
    for found in pkgutil.iter_modules(module.__path__):
        inside = importlib.import_module(f"{module.__name__}.{found.name}")
        classes |= {
            kind
            for _, kind in inspect.getmembers(inside, inspect.isclass)
            if issubclass(kind, module.Strategy) and not inspect.isabstract(kind)
        }
    return classes


def arguments_of_flower():
    """The name of every argument of any strategy of Flower."""
    kinds = strategies_of(message_api) | strategies_of(legacy)
    parameters = [parameter for kind in kinds for parameter in inspect.signature(kind).parameters.values()]
    return {one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}


def refusal(made, **given):
    with pytest.raises(ConfigurationError) as raised:
        MAKE[made](num_clients=4, **given)
    assert isinstance(raised.value, TypeError)
    assert isinstance(raised.value, UnexpectedArgumentError)
    return str(raised.value)


def test_flowers_strategy_arguments_are_taken_or_refused_by_name():
    flowers = arguments_of_flower()
    assert {"weighted_by_key", "proximal_mu", "eta", "on_fit_config_fn", "fraction_fit"} <= flowers
    taken = {*HONOURED, "arrayrecord_key", "configrecord_key"}
    for name in flowers - taken:
        said = refusal("CorrelatedFedAvg", **{name: 0.25})
        assert said.startswith(f"Expected no {name} for CorrelatedFedAvg, got 0.25: "), said
        assert len(said) > 70, "and says what takes its place"


def test_an_argument_nobody_knows_is_refused_by_its_name_too():
    """The sibling of the test above: it would see an argument that has no text of its own."""
    said = refusal("CorrelatedFedAvg", fraction_of_new_flower=0.25)
    assert said == "Expected an argument that CorrelatedFedAvg has, got 'fraction_of_new_flower'."
    assert refusal("Mu2", diametre=1.0).endswith("got 'diametre'; did you mean 'diameter'?")
    assert refusal("Mu2", sesion="s").endswith("did you mean 'session'?"), "of a base as well"


@pytest.mark.parametrize("strategy", MAKE)
def test_every_strategy_refuses_with_its_own_name_and_what_takes_its_place(strategy):
    said = refusal(strategy, fraction_evaluate=0.5, weighted_by_key="num-examples", evaluate_metrics_aggr_fn=max)
    for name in ("fraction_evaluate", "weighted_by_key", "evaluate_metrics_aggr_fn"):
        assert f"Expected no {name} for {strategy}, got " in said
    assert "evaluate_fn" in said
    assert "PrivateEvaluation" in said
    assert "depends on a client's data" in said
    assert ("evaluate_on_clients=True" in said) == (strategy == "CorrelatedFedAvg")


def test_what_asks_for_nothing_is_let_through():
    CorrelatedFedAvg(fraction_evaluate=0.0, min_evaluate_nodes=0, train_metrics_aggr_fn=None, initial_parameters=None)
    refusal("CorrelatedFedAvg", fraction_evaluate=False)
    refusal("CorrelatedFedAvg", weighted_by_key="")


# How many clients.


def app():
    return simulated_app(NoisySGDClient, Data([(D,)]), lambda name: normal_samples(name, 9, D), mechanism="independent")


def trained_on(nodes, strategy=NoisySGD, grid=NodesGrid, rounds=2, **given):
    given = {"node_deadline_s": 0.5, "seed": 1, "session": "s", **given}
    made = strategy(learning_rate=0.1, **given)
    made.start(grid(app(), nodes), START, num_rounds=rounds)
    return made


@pytest.mark.parametrize(
    ("nodes", "given", "expected"),
    [
        (5, {}, (5, 5)),
        (5, {"fraction_train": 0.6}, (5, 3)),
        (5, {"fraction_train": 0.2}, (5, 2)),  # FedAvg's own min_train_nodes
        (5, {"fraction_train": 0.2, "min_train_nodes": 1}, (5, 1)),
        (5, {"fraction_train": 0.2, "min_train_nodes": 4}, (5, 4)),
        (5, {"min_available_nodes": 3}, (5, 5)),
        (5, {"clients_per_round": 3}, (5, 3)),
        (6, {"num_clients": 4, "fraction_train": 0.5, "min_available_nodes": 2}, (4, 2)),
        (1, {"min_available_nodes": 1}, (1, 1)),
    ],
)
def test_the_numbers_of_clients_are_those_of_fedavg(nodes, given, expected):
    strategy = trained_on(nodes, **given)
    assert (strategy.num_clients, strategy.clients_per_round) == expected
    assert [report.aggregated for report in strategy.history] == [expected[1]] * 2


def test_a_share_asks_as_many_as_it_says():
    """0.29 * 100 is below 29 in floating point."""
    assert CorrelatedFedAvg(num_clients=100, fraction_train=0.29).clients_per_round == 29


def test_without_num_clients_the_same_clients_are_asked_as_with_it():
    left_out, given = trained_on(6, fraction_train=0.5), trained_on(6, num_clients=6, clients_per_round=3)
    assert (left_out.state.w == given.state.w).all()
    assert list(left_out.participation) == sample_clients(list("012345"), 3, 1, 2)


def test_a_training_does_not_begin_without_the_clients_it_waits_for():
    for given in ({"min_available_nodes": 4}, {"fraction_train": 0.1, "min_train_nodes": 4}):
        with raises(NodesUnavailableError, "unreachable", match="Expected 4 clients"):
            trained_on(3, node_deadline_s=0.05, **given)
    with raises(NodesUnavailableError, "unreachable", match="Expected 2 clients"):
        trained_on(1, node_deadline_s=0.05)


def test_clients_that_are_about_to_say_who_they_are_are_waited_for():
    class Slow(NodesGrid):
        """The last node answers at the third look."""

        looks = 0

        def pull_messages(self, message_ids):
            self.looks += 1
            last = max(self.contexts)
            replies = super().pull_messages(message_ids)
            late = [reply for reply in replies if reply.metadata.src_node_id == last and self.looks < 3]
            self._replies.update({reply.metadata.reply_to_message_id: reply for reply in late})
            return [reply for reply in replies if reply not in late]

    assert trained_on(4, grid=Slow, node_deadline_s=5.0).num_clients == 4


def test_a_resumed_training_has_the_clients_it_began_with(tmp_path):
    path, grid = tmp_path / "checkpoint.npz", NodesGrid(app(), 6)
    given = {"fraction_train": 0.5, "checkpoint": path, "session": None}
    begun = trained_on(0, rounds=2, grid=lambda *_: grid, **given)
    grid.contexts |= {9000: NodesGrid(app(), 9).contexts.pop(1008)}  # one more since
    resumed = trained_on(0, rounds=4, grid=lambda *_: grid, **given)
    assert (resumed.num_clients, resumed.clients_per_round) == (begun.num_clients, begun.clients_per_round) == (6, 3)
    assert resumed.clients.names == begun.clients.names


@pytest.mark.parametrize(
    "given",
    [
        {"fraction_train": 0.0},
        {"fraction_train": 1.1},
        {"fraction_train": "half"},
        {"min_train_nodes": 0},
        {"min_available_nodes": 1.5},
        {"num_clients": 0},
        {"num_clients": True},
        {"num_clients": 2, "clients_per_round": 3},
        {"num_clients": 2, "min_available_nodes": 3},
        {"num_clients": 2, "fraction_train": 0.5, "min_train_nodes": 3},
        {"num_clients": 4, "clients_per_round": 2, "fraction_train": 0.5},
    ],
)
def test_impossible_numbers_of_clients_are_refused(given):
    with pytest.raises(ConfigurationError, match="Expected"):
        CorrelatedFedAvg(**given)


def test_sums_larger_than_a_round_are_refused():
    with raises(ConfigurationError, "out-of-range", "min_cohort", match="min_cohort of at most clients_per_round = 2"):
        CorrelatedFedAvg(num_clients=4, fraction_train=0.5, secure_aggregation=SecureAggregation(min_cohort=3))


OWNER = OwnerKey(bytes(range(32)))
NOW = int(time.time())


def permit(*sessions, begins=-60, ends=6 * 3600):
    return OWNER.permit(sessions or ["s"], not_before=NOW + begins, until=NOW + ends)


class Watching:
    """Keeps the kind and the entries of every message that is sent."""

    def push_messages(self, messages):
        messages = list(messages)
        self.sent = [*getattr(self, "sent", []), *((m.metadata.message_type, _entries(m)) for m in messages)]
        return super().push_messages(messages)

    def carried(self):
        return {(kind, entries.get(protocol.PERMIT)) for kind, entries in self.sent}


def _entries(message):
    return {key: value for record in message.content.config_records.values() for key, value in record.items()}


class WatchedSecureGrid(Watching, SecureGrid):
    pass


class WatchedGrid(Watching, NodesGrid):
    pass


def test_every_message_carries_it_greetings_questions_and_openings_too():
    grid, plain, text = WatchedSecureGrid(clients()), WatchedSecureGrid(clients()), permit()
    strategy = trained(build(secure={}, permit=text), grid, rounds=2)
    strategy.ask_privacy(grid)
    assert grid.carried() == {("train", text), ("query", text), (protocol.QUERY_OPEN, text)}
    assert {entries.get(protocol.ASK) for _, entries in grid.sent} == {
        None,
        "hello",
        "privacy",
        "whether",
        "lock",
        "open",
    }
    without = trained(build(secure={}), plain, rounds=2)
    assert {carried for _, carried in plain.carried()} == {None}
    assert same(strategy, without), "it is no part of what is trained"
    assert strategy.settings() == {**without.settings(), "session": None}


def test_the_other_kinds_of_rounds_carry_it_as_well():
    text = permit()
    mod = CorrelatedNoiseMod(
        simulation=UpdatePolicy(clip_norm=1.0, mu=4.0, max_participations=5, allow_evaluation=True)
    )
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message, context):
        (record,) = message.content.array_records.values()
        return Message(RecordDict({"arrays": record, "metrics": MetricRecord({"loss": 0.5})}), reply_to=message)

    app.evaluate()(train)
    grid = WatchedGrid(app, 2)
    model = ArrayRecord([np.zeros(3)])
    strategy = CorrelatedFedAvg(num_clients=2, permit=text, evaluate_on_clients=True)
    strategy.start(grid, model, num_rounds=1)
    assert strategy.session == "s"
    assert grid.carried() == {("train", text), ("evaluate", text)}
    asked = []
    for strategy in (
        MeanOfFeatures(num_features=2, num_clients=2, permit=text, node_deadline_s=0.05),
        PrivateEvaluation(num_clients=2, permit=text, node_deadline_s=0.05),
    ):
        strategy.state, strategy.clients.names = QueryState(np.zeros(3), np.zeros(3)), ["0", "1"]
        asked.append(strategy._plan_round(1, None).entries)
    assert [entries[protocol.PERMIT] for entries in asked] == [text, text]
    assert [entries[protocol.RELEASE_OF] for entries in asked] == ["mean", "evaluation"]


def test_a_training_uses_the_permits_sessions_only():
    two = permit("first", "second")
    assert rounds.session_of(None, None) != rounds.session_of(None, None)
    assert build(session=None, permit=two).session == "first"
    assert build(session="second", permit=two).session == "second"
    with raises(ConfigurationError, "not-permitted", "permit", match="'third', got one for first, second"):
        build(session="third", permit=two)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("night.permit", "Expected a permit, one line that begins with murmurfl-permit-1"),
        (permit()[:-10] + "?", "got one whose text was changed or cut"),
        (permit(begins=-600, ends=-300), r"that has not ended, got one until .* --renew"),
    ],
)
def test_what_no_client_would_believe_is_refused_before_any_is_asked(text, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        Mu2(num_clients=2, clients_per_round=2, learning_rate=0.1, permit=text)


class Killed(BaseException):
    """What a kill -9 is to a test."""


class Dying(Watching, NodesGrid):
    """The server is killed when it has the replies of a round."""

    dies_in = 3

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = super().send_and_receive(messages, timeout=timeout)
        if _entries(messages[0]).get(protocol.SERVER_ROUND) == self.dies_in:
            raise Killed
        return replies


@pytest.mark.parametrize("first", [None, permit("s")])
def test_a_training_continues_with_renewed_and_new_permits(tmp_path, first):
    made, checkpoint, renewed = clients(masked=False), tmp_path / "checkpoint.npz", permit("s", ends=7 * 3600)
    grid = Dying(made.app, 6)
    own = {"allow_exhaustion": True, "session": None}  # without a permit its session has a name that nobody chose

    def strategy(**options):
        return build(checkpoint=checkpoint, **{**own, **options})

    begun = strategy(permit=first)
    session = begun.session
    with pytest.raises(Killed):
        trained(begun, grid)
    grid.dies_in = 0
    with raises(
        ConfigurationError,
        "not-permitted",
        "permit",
        match=f"Expected a permit for session '{session}', got one for other.*sign",
    ):
        trained(strategy(permit=permit("other")), grid)
    resumed = trained(strategy(permit=permit(session, ends=7 * 3600) if first is None else renewed), grid)
    assert (resumed.session, len(resumed.history)) == (session, 6)
    assert {entries[protocol.SESSION] for kind, entries in grid.sent if kind == "train"} == {session}


def test_a_checkpoint_is_of_its_settings_still(tmp_path):
    """The sibling: a renewed permit is no way around what a checkpoint must agree on."""
    grid, checkpoint = NodesGrid(clients(masked=False).app, 6), tmp_path / "checkpoint.npz"
    trained(build(checkpoint=checkpoint, allow_exhaustion=True, permit=permit()), grid, rounds=1)
    with raises(CheckpointError, "mismatch", "learning_rate"):
        trained(
            build(checkpoint=checkpoint, allow_exhaustion=True, permit=permit(ends=7 * 3600), learning_rate=0.5), grid
        )


def test_a_set_that_may_be_open_is_opened_under_a_renewed_permit(tmp_path):
    """The server is killed after one helper has opened it: the same set under another permit, and the same model."""
    checkpoint, grid = tmp_path / "checkpoint.npz", WatchedSecureGrid(clients())

    def killed(message):
        raise Killed

    in_round(grid, "answers", HELPERS[0], killed)
    with pytest.raises(Killed):
        trained(build(secure={}, checkpoint=checkpoint, permit=permit()), grid, rounds=4)
    grid.seen = lambda kind, helper, message: message
    grid.sent = []
    renewed = permit(ends=7 * 3600)
    resumed = trained(build(secure={}, checkpoint=checkpoint, permit=renewed), grid, rounds=4)
    assert {text for _, text in grid.carried()} == {renewed}
    assert same(resumed, trained(build(secure={}), SecureGrid(clients()), rounds=4))


@pytest.mark.parametrize(
    ("before", "now"), [("wait_for", "quorum"), ("ask", "over_selection"), ("run_dry", "allow_exhaustion")]
)
def test_options_under_their_names_of_before_are_refused_with_the_new_one(before, now):
    with raises(ConfigurationError, "unsupported", match=f"no {before} for Mu2, got 1: it is called {now}"):
        Mu2(learning_rate=0.1, **{before: 1})
