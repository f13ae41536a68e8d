"""What a node with a large model has in memory while it answers, in vectors of d float64."""

import tracemalloc

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, Metadata, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from murmurfl.app.nodes.executor import pulled_message
from murmurfl.app.nodes.node_app import machine_of
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.app.nodes.supernode import repeating_the_last_answer
from murmurfl.privacy import SQLiteLedger, protocol
from murmurfl.privacy.ledger import sqlite as ledger_page

from tests.harness.schemas import write_samples

CLASSES, FEATURES, BATCH, ROUNDS = 10, 9_999, 2, 6
D = CLASSES * (FEATURES + 1)
MOST = 10.0


def node(folder, **own):
    draw = np.random.Generator(np.random.Philox(key=1))
    rows = draw.random((BATCH * ROUNDS, FEATURES), dtype=np.float32)
    own |= write_samples(folder, rows, np.arange(len(rows)) % CLASSES, classes=CLASSES)
    SQLiteLedger.create(folder / "ledger.db", budget_mu=1.0, delta=1e-5)
    config = NodeConfig(
        "node", str(folder / "ledger.db"), clip_norm=1.0, batch_size=BATCH, mu=1.0, max_participations=ROUNDS, **own
    )
    answers, _ = machine_of(config)
    repeat = repeating_the_last_answer()
    return lambda message: repeat(message, Context(1, 1, {}, RecordDict(), {}), answers)


def request(server_round, ack):
    draw = np.random.Generator(np.random.Philox(key=server_round)).random
    points = [ArrayRecord([draw((CLASSES, FEATURES)), draw(CLASSES)]) for _ in range(2)]
    asked = {protocol.VERSION: 1, protocol.SERVER_ROUND: server_round, protocol.SESSION: "s", protocol.ACK: ack}
    content = {protocol.ARRAYS: points[0], protocol.PREVIOUS_ARRAYS: points[1], protocol.CONFIG: ConfigRecord(asked)}
    message = Message(RecordDict(content), metadata=Metadata(1, "", 1, 2, "", "", 0.0, 60.0, "train", 1, None))
    return get_object_tree(message), {name: made.deflate() for name, made in get_all_nested_objects(message).items()}


def peaks(answer, acks):
    """The most that is held in each round, in vectors, from the message's pieces to those of the reply."""
    found = []
    for server_round, ack in enumerate(acks, start=1):
        tree, contents = request(server_round, ack)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0] if server_round == 1 else before  # noqa: F821 - the first round's
        held = sum(map(len, contents.values()))
        message = pulled_message(tree, contents.pop)
        reply = answer(message)
        assert not reply.has_error(), reply.error
        del message
        with no_object_id_recompute():
            assert sum(len(made.deflate()) for made in get_all_nested_objects(reply).values()) > 8 * D
        # The contents were there before, as a SuperNode has them in its own process.
        found.append((tracemalloc.get_traced_memory()[1] - before + held) / (8 * D))
        del reply
    return found


@pytest.fixture
def traced(monkeypatch):
    monkeypatch.setattr(ledger_page, "LARGE_BYTES", 1 << 17)  # as for a larger model
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("acks", [range(4), [0] * 6, [0, 0, 0, 2, 2]], ids=["kept", "lost", "some lost"])
def test_a_round_takes_at_most_ten_vectors(tmp_path, acks):
    found = peaks(node(tmp_path), acks)
    assert max(found) < MOST
    assert found[-1] < max(found[:-1]) + 1.5, "and no more from round to round"


@pytest.mark.usefixtures("traced")
def test_a_ledger_that_reads_all_it_has_would_be_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_page, "LARGE_BYTES", 1 << 30)
    assert max(peaks(node(tmp_path), [0] * 6)) > MOST
