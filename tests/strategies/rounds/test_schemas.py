"""A server knows what machines take for a record: it leaves out those of another schema, or says that they differ."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from murmurfl.clients import FullBatchClient, Label, Part, Schema
from murmurfl.privacy import protocol
from murmurfl.strategies import FullBatch, NodesUnavailableError
from murmurfl.strategies.rounds.known_machines import introduction

from tests.harness.grid import NodesGrid
from tests.harness.machines import Labelled, simulated_app

OURS = Schema(inputs=(Part(shape=(3,), bounds=(0, 1)),), label=Label(classes=2))
THEIRS = Schema(inputs=(Part(shape=(3,), bounds=(0, 2)),), label=Label(classes=2))


class Gradients:
    shapes = ((3,),)

    def __call__(self, parameters, samples):
        return np.ones((len(samples[1]), 3))


def app(others=()):
    def data(name):
        samples = Labelled(np.ones((4, 3)), np.zeros(4))
        samples.schema = THEIRS if int(name) in others else OURS
        samples.record_kind = "row"
        return samples

    standing = {"order": "all", "mechanism": "independent", "release_rule": "paper", "max_participations": 2}
    return simulated_app(FullBatchClient, Gradients(), data, **standing)


def trained(others, machines, **options):
    strategy = FullBatch(
        num_clients=machines, clients_per_round=machines, learning_rate=0.1, node_deadline_s=0.5, seed=1, **options
    )
    strategy.start(NodesGrid(app(others), 4), initial_arrays=arrays(), num_rounds=1)
    return strategy


def arrays():
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({"w": Array(np.zeros(3))})


def test_machines_of_another_schema_are_not_asked(caplog):
    strategy = trained([2], 3, schema=OURS.digest)
    assert list(strategy.machines.names) == ["0", "1", "3"]
    assert "another schema of records than this training's and is not asked" in caplog.text


def test_a_training_without_enough_machines_of_its_schema_says_why():
    with pytest.raises(NodesUnavailableError, match="another schema of records"):
        trained([1, 2, 3], 3, schema=OURS.digest)


def test_without_a_schema_of_its_own_a_server_says_that_machines_differ(caplog):
    trained([2], 4)
    assert caplog.text.count("Machines state 2 schemas of records") == 1
    caplog.clear()
    trained([], 4)
    assert "schemas of records" not in caplog.text


@pytest.mark.parametrize("said", ["", "x" * 32, "0" * 31, "0" * 33, 5, ["0" * 32], "'; drop table"])
def test_what_is_no_digest_is_no_schema(said):
    entries = {protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.MACHINES: "a", protocol.SCHEMA: said}
    if isinstance(said, list):
        entries[protocol.SCHEMA] = said
    reply = Message(RecordDict({protocol.CONFIG: ConfigRecord(entries)}), dst_node_id=1, message_type="query")
    assert introduction(reply, "").schema == ""
    entries[protocol.SCHEMA] = OURS.digest
    reply = Message(RecordDict({protocol.CONFIG: ConfigRecord(entries)}), dst_node_id=1, message_type="query")
    assert introduction(reply, "").schema == OURS.digest
