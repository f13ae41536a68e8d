"""The in-process grid: nodes have records and clients of their own, and keep the clients between messages."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from murmurfl.app.client_app import client_fn
from murmurfl.app.engines import inprocess
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.start import run_in_process
from murmurfl.app.runs.experiment import Experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import ContextLedger
from murmurfl.clients.messages import kept_by_node, simulated_in_process
from murmurfl.privacy import MemoryLedger

from tests.harness.records import changed_in_every_way, shown

CONFIG = RunConfig(num_clients=4, clients_per_round=2, num_rounds=6, sampling="balanced")


def content():
    return RecordDict(
        {
            "arrays": ArrayRecord({"w": Array(np.ones(2)), "b": Array(np.zeros(1))}),
            "config": ConfigRecord({"client": "0", "list": [1, 2]}),
            "metrics": MetricRecord({"a": 1.5, "many": [1, 2]}),
        }
    )


def what_nodes_see(nodes=3):
    """What nodes get that change whatever they get, of a strategy that hands the same records to all of them."""
    app, seen, shared = ClientApp(), [], content()

    @app.train()
    def train(message, context):
        seen.append(shown(message.content))
        changed_in_every_way(message.content)
        return Message(RecordDict(), reply_to=message)

    grid = InProcessGrid(app, nodes, {})
    list(grid.send_and_receive([Message(shared, node, MessageType.TRAIN) for node in grid.get_node_ids()]))
    return [*seen, shown(shared)]


def test_a_nodes_changed_records_reach_nobody_else():
    assert what_nodes_see() == [shown(content())] * 4


@pytest.mark.parametrize("bug", [lambda record: record, lambda record: record.copy()])
def test_records_that_are_shared_or_copied_in_part_would_be_caught(bug, monkeypatch):
    monkeypatch.setattr(inprocess, "_own_record", bug)
    assert what_nodes_see() != [shown(content())] * 4


def test_replies_say_which_message_they_answer_and_have_names_of_their_own():
    app = ClientApp()

    @app.train()
    def train(message, context):
        assert (message.metadata.group_id, message.metadata.dst_node_id) == ("7", context.node_id)
        return Message(RecordDict(), reply_to=message)

    grid = InProcessGrid(app, 3, {})
    nodes = [*grid.get_node_ids(), 5]  # the last is none
    asked = [Message(content(), node, MessageType.TRAIN, group_id="7") for node in nodes]
    identifiers = list(grid.push_messages(asked))
    replies = list(grid.pull_messages(identifiers))
    assert [reply.metadata.reply_to_message_id for reply in replies] == identifiers
    assert [reply.metadata.src_node_id for reply in replies] == nodes
    assert [reply.has_error() for reply in replies] == [False, False, False, True]
    assert len({*identifiers, *(reply.metadata.message_id for reply in replies)}) == 8


def test_a_client_is_made_once_and_kept(monkeypatch):
    made, client = Counter(), Experiment.client

    def counted(self, client_id, ledger, rows=None, **options):
        made[client_id] += 1
        assert isinstance(ledger, MemoryLedger)
        return client(self, client_id, ledger, rows, **options)

    monkeypatch.setattr(Experiment, "client", counted)
    first, second = run_in_process(CONFIG), run_in_process(CONFIG)
    assert set(made.values()) == {2}  # once a run: another run's clients are others
    for one, other in zip(first.parameters, second.parameters, strict=True):
        assert (one == other).all()


@pytest.mark.parametrize("mechanism", ["cancelling", "decay", "independent", "tree"])
def test_clients_that_are_made_anew_for_every_message_give_the_same_model(mechanism, monkeypatch):
    config = replace(CONFIG, mechanism=mechanism, lost_replies=0.3, num_rounds=8)
    kept = run_in_process(config)
    monkeypatch.setattr(inprocess, "simulated_in_process", lambda kept: simulated_in_process())
    for one, other in zip(kept.parameters, run_in_process(config).parameters, strict=True):
        assert (one == other).all()


def test_only_a_node_of_this_process_keeps_clients():
    context = Context(1, 1000, {"partition-id": 0, "num-partitions": 4}, RecordDict(), CONFIG.to_mapping())
    kept = {}
    with simulated_in_process(kept):
        assert kept_by_node(context) is kept
        assert client_fn(context) is client_fn(context)
    with simulated_in_process():
        assert kept_by_node(context) is None
        one, other = client_fn(context), client_fn(context)
        assert one is not other
        assert isinstance(one.privatizer._ledger, ContextLedger)
    assert kept_by_node(context) is None
