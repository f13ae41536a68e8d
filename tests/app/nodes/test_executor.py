"""A node's executor asks less often the longer nothing comes, and holds a large model once."""

import tracemalloc

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, Metadata, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from murmurfl.app.nodes.executor import pause_s, pulled_message
from murmurfl.app.nodes.node_app import answers_of
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.app.nodes.supernode import repeating_the_last_answer
from murmurfl.privacy import SQLiteLedger, protocol
from murmurfl.privacy.ledger import sqlite as ledger_page

from tests.harness.schemas import write_samples


def test_a_node_asks_often_while_messages_come_and_seldom_when_none_does():
    assert pause_s(0.0) == pause_s(5.0) == 0.1
    assert pause_s(3600.0) == 1.0


@pytest.mark.parametrize("idle_s", [5.0, 20.0, 60.0, 600.0])
def test_a_message_waits_at_most_a_fiftieth_of_the_time_before_it(idle_s):
    assert pause_s(idle_s) <= idle_s / 50


VALUES = 2_000_000  # of an array: four chunks


def message_of(content):
    metadata = Metadata(1, "", 1, 2, "", "", 0.0, 60.0, "train", 1, None)
    return Message(content, metadata=metadata)


def travelling(message):
    """A message's tree, and the contents of its objects by id, as a SuperNode has them."""
    return get_object_tree(message), {name: made.deflate() for name, made in get_all_nested_objects(message).items()}


def two_points(seed=1, size=50):
    draw = np.random.Generator(np.random.Philox(key=seed)).random
    records = {name: ArrayRecord([draw((2, size)), draw(size)]) for name in ("arrays", "previous-arrays")}
    return RecordDict({**records, "config": ConfigRecord({"ack": 1}), "metrics": MetricRecord({"loss": 0.5})})


@pytest.mark.parametrize(
    "content",
    [
        two_points(),
        RecordDict(),
        RecordDict({"config": ConfigRecord({"ask": "hello"})}),
        RecordDict({"arrays": ArrayRecord([np.zeros(VALUES), np.zeros(VALUES), np.zeros(0)])}),  # equal chunks
    ],
    ids=["two points", "empty", "no arrays", "the same chunks again and again"],
)
def test_a_message_arrives_as_it_was_sent(content):
    tree, contents = travelling(message_of(content))

    arrived = pulled_message(tree, contents.__getitem__)

    assert arrived.object_id == tree.object_id
    assert arrived.content == content


def test_an_array_that_is_in_two_records_is_pulled_once():
    point = ArrayRecord([np.arange(5.0)])
    tree, contents = travelling(message_of(RecordDict({"arrays": point, "previous-arrays": point.copy()})))
    asked = []

    def pull(name):
        asked.append(name)
        return contents[name]

    assert pulled_message(tree, pull).content["previous-arrays"] == point
    assert sorted(asked) == sorted(set(asked))


def test_what_is_no_message_is_an_error():
    tree, contents = travelling(two_points())

    with pytest.raises(TypeError, match="Expected the objects of a message, got those of a RecordDict"):
        pulled_message(tree, contents.__getitem__)


def test_an_error_of_the_network_goes_through():
    def pull(name):
        raise ConnectionError(name)

    with pytest.raises(ConnectionError):
        pulled_message(travelling(message_of(two_points()))[0], pull)


def peak_of(take, tree, contents):
    """Most memory while a message is pulled, in multiples of one array; contents are made when they are asked for."""
    tracemalloc.start()
    try:
        take(tree, lambda name: bytes(bytearray(contents[name])))
        return tracemalloc.get_traced_memory()[1] / (8 * VALUES)
    finally:
        tracemalloc.stop()


def test_chunks_are_forgotten_once_their_array_is_put_together():
    # Two arrays: one is finished, of the other there are chunks, the buffer they are joined in, and the result. Flower
    # has the chunks of both.
    tree, contents = travelling(message_of(two_points(size=VALUES // 2)))

    def all_at_once(tree, pull):
        pull_and_inflate_object_from_tree(tree, pull, lambda name: None, return_type=Message)

    arrays = 1.5  # of one record, in units of its larger one
    ours, theirs = peak_of(pulled_message, tree, contents), peak_of(all_at_once, tree, contents)

    assert ours < 2 * arrays + 2.4
    assert theirs > 4 * arrays  # what is measured is there to be measured


CLASSES, FEATURES, BATCH, ROUNDS = 10, 9_999, 2, 6
D = CLASSES * (FEATURES + 1)
MOST = 10.0


def node(folder, **own):
    draw = np.random.Generator(np.random.Philox(key=1))
    rows = draw.random((BATCH * ROUNDS, FEATURES), dtype=np.float32)
    made = write_samples(folder, rows, np.arange(len(rows)) % CLASSES, classes=CLASSES)
    own |= {name.replace("-", "_"): value for name, value in made.items()}
    SQLiteLedger.create(folder / "ledger.db", budget_mu=1.0, delta=1e-5)
    place = {"client": "node", "ledger": str(folder / "ledger.db")}
    config = NodeConfig(**place, clip_norm=1.0, batch_size=BATCH, mu=1.0, max_participations=ROUNDS, **own)
    answers, _ = answers_of(config)
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
