"""FedAvg's arguments: those that say how many machines are honoured, every other is refused by its name."""

import importlib
import inspect
import pkgutil

import flwr.server.strategy as legacy
import flwr.serverapp.strategy as message_api
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from murmurfl.clients import NoisySGDClient
from murmurfl.privacy import ConfigurationError, PrivacyPolicy
from murmurfl.strategies import (
    CorrelatedFedAvg,
    FullBatch,
    Mu2,
    NodesUnavailableError,
    NoisySGD,
    OnlineFedSGD,
    SecureAggregation,
    TrustedMu2,
    sample_machines,
)
from murmurfl.strategies.rounds.options import UnexpectedArgumentError

from tests.harness.grid import NodesGrid
from tests.harness.machines import normal_samples, simulated_app
from tests.harness.models import Data

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
    assert "depends on a machine's data" in said
    assert ("evaluate_on_machines=True" in said) == (strategy == "CorrelatedFedAvg")


def test_what_asks_for_nothing_is_let_through():
    CorrelatedFedAvg(fraction_evaluate=0.0, min_evaluate_nodes=0, train_metrics_aggr_fn=None, initial_parameters=None)
    refusal("CorrelatedFedAvg", fraction_evaluate=False)
    refusal("CorrelatedFedAvg", weighted_by_key="")


# How many machines.


def app():
    return simulated_app(NoisySGDClient, Data([(D,)]), lambda name: normal_samples(name, 9, D), mechanism="independent")


def trained(nodes, strategy=NoisySGD, grid=NodesGrid, rounds=2, **given):
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
def test_the_numbers_of_machines_are_those_of_fedavg(nodes, given, expected):
    strategy = trained(nodes, **given)
    assert (strategy.num_clients, strategy.clients_per_round) == expected
    assert [report.aggregated for report in strategy.history] == [expected[1]] * 2


def test_a_share_asks_as_many_as_it_says():
    """0.29 * 100 is below 29 in floating point."""
    assert CorrelatedFedAvg(num_clients=100, fraction_train=0.29).clients_per_round == 29


def test_without_num_clients_the_same_machines_are_asked_as_with_it():
    left_out, given = trained(6, fraction_train=0.5), trained(6, num_clients=6, clients_per_round=3)
    assert (left_out.state.w == given.state.w).all()
    assert list(left_out.participation) == sample_machines(list("012345"), 3, 1, 2)


def test_a_training_does_not_begin_without_the_machines_it_waits_for():
    for given in ({"min_available_nodes": 4}, {"fraction_train": 0.1, "min_train_nodes": 4}):
        with pytest.raises(NodesUnavailableError, match="Expected 4 machines"):
            trained(3, node_deadline_s=0.05, **given)
    with pytest.raises(NodesUnavailableError, match="Expected 2 machines"):
        trained(1, node_deadline_s=0.05)


def test_machines_that_are_about_to_say_who_they_are_are_waited_for():
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

    assert trained(4, grid=Slow, node_deadline_s=5.0).num_clients == 4


def test_a_resumed_training_has_the_machines_it_began_with(tmp_path):
    path, grid = tmp_path / "checkpoint.npz", NodesGrid(app(), 6)
    given = {"fraction_train": 0.5, "checkpoint": path, "session": None}
    begun = trained(0, rounds=2, grid=lambda *_: grid, **given)
    grid.contexts |= {9000: NodesGrid(app(), 9).contexts.pop(1008)}  # one more since
    resumed = trained(0, rounds=4, grid=lambda *_: grid, **given)
    assert (resumed.num_clients, resumed.clients_per_round) == (begun.num_clients, begun.clients_per_round) == (6, 3)
    assert resumed.machines.names == begun.machines.names


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
def test_impossible_numbers_of_machines_are_refused(given):
    with pytest.raises(ConfigurationError, match="Expected"):
        CorrelatedFedAvg(**given)


def test_sums_larger_than_a_round_are_refused():
    with pytest.raises(ConfigurationError, match="min_cohort of at most clients_per_round = 2"):
        CorrelatedFedAvg(num_clients=4, fraction_train=0.5, secure_aggregation=SecureAggregation(min_cohort=3))
