"""A message comes from the SuperNode in pieces, and is in memory once."""

import tracemalloc

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from murmurfl.app.nodes.executor import pulled_message

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
