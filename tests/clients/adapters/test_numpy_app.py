"""The bridge from NumPyClient to Message-API strategies: Flower's own FedAvg works, errors say nothing."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.client import NumPyClient
from flwr.serverapp.strategy import FedAvg
from murmurfl.clients import CorrelatedNoiseMod, UpdatePolicy, numpy_client_app
from murmurfl.privacy import LedgerError, RefusedError, protocol
from murmurfl.strategies import CorrelatedFedAvg

from tests.harness.grid import NodesGrid
from tests.harness.grid import ask as ask_node

SECRET = "patient 4711 has blood group AB"


class Averager(NumPyClient):
    def __init__(self, node):
        self.node = node

    def fit(self, parameters, config):
        return [values + self.node for values in parameters], self.node + 1, {"level": 0.5, "note": "hello"}

    def evaluate(self, parameters, config):
        return float(parameters[0].sum()), 3, {"accuracy": 0.25}

    def get_properties(self, config):
        return {"node": self.node}


class Leaky(NumPyClient):
    def fit(self, parameters, config):
        raise ValueError(SECRET)

    def evaluate(self, parameters, config):
        raise RefusedError(protocol.BUDGET_EXHAUSTED, "the budget is gone")

    def get_properties(self, config):
        raise LedgerError(SECRET)


def make_client(context):
    return Averager(int(context.node_config["partition-id"])).to_client()


def test_flowers_own_fedavg_averages_a_legacy_client():
    grid = NodesGrid(numpy_client_app(make_client), 3)
    strategy = FedAvg(min_available_nodes=3, min_train_nodes=3, min_evaluate_nodes=3)
    result = strategy.start(grid, ArrayRecord([np.zeros((2, 2)), np.ones(3)]), num_rounds=1)
    weights = np.array([1, 2, 3]) / 6
    assert result.arrays.to_numpy_ndarrays()[0] == pytest.approx(np.full((2, 2), weights @ [0, 1, 2]))
    assert result.train_metrics_clientapp[1]["level"] == pytest.approx(0.5)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx(0.25)


def test_arrays_keep_their_names():
    """A model with names, such as a state dict, can so go through a legacy client and a mod that compares names."""
    names = ["layer.weight", "layer.bias"]
    record = ArrayRecord({name: Array(np.zeros(2)) for name in names})
    app = numpy_client_app(make_client)
    assert list(ask(app, "train", RecordDict({"arrays": record})).content["arrays"]) == names
    assert list(ask(app, "train").content["arrays"]) == ["0"]
    policy = UpdatePolicy(clip_norm=1.0, mu=1e3, max_participations=1)
    private = numpy_client_app(make_client, mods=[CorrelatedNoiseMod(simulation=policy)])
    strategy = CorrelatedFedAvg(num_clients=2)
    result = strategy.start(NodesGrid(private, 2), record, num_rounds=1)
    assert list(result.arrays) == names
    # Machine 0 adds nothing, machine 1 adds 1 to every value, clipped to length 1.
    assert result.arrays["layer.bias"].numpy() == pytest.approx(np.full(2, 0.25), abs=0.05)


def ask(app, message_type, content=None):
    return ask_node(
        app, message_type, RecordDict({"arrays": ArrayRecord([np.zeros(2)])}) if content is None else content
    )


def test_queries_reach_get_properties():
    content = RecordDict({"config": ConfigRecord({"a": 1})})
    assert ask(numpy_client_app(make_client), "query", content).content["config"]["node"] == 0


def test_an_exception_never_leaves_the_machine():
    reply = ask(numpy_client_app(lambda context: Leaky()), "train")
    assert reply.has_error()
    assert reply.error.code == protocol.INTERNAL_ERROR
    assert SECRET not in reply.error.reason


def test_a_refusal_leaves_with_its_own_text():
    reply = ask(numpy_client_app(lambda context: Leaky()), "evaluate")
    assert (reply.error.code, reply.error.reason) == (protocol.BUDGET_EXHAUSTED, "the budget is gone")


def test_a_ledger_that_cannot_be_used_is_named_without_its_text():
    reply = ask(numpy_client_app(lambda context: Leaky()), "query", RecordDict({"config": ConfigRecord({"a": 1})}))
    assert protocol.REFUSAL_NAMES[reply.error.code] == "ledger-unusable"
    assert SECRET not in reply.error.reason


def test_bytes_that_are_no_array_are_a_malformed_request():
    record = ArrayRecord([np.zeros(2)])
    record["0"].data = b"\x93NUMPY nonsense"
    reply = ask(numpy_client_app(make_client), "train", RecordDict({"arrays": record}))
    assert reply.error.code == protocol.MALFORMED_REQUEST


def test_a_client_fn_that_returns_no_client_is_not_configured():
    assert ask(numpy_client_app(lambda context: "no client"), "train").error.code == protocol.NOT_CONFIGURED
