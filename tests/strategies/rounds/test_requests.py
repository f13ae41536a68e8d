"""The messages of a round: each machine's own, of what is equal for all of them."""

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType
from flwr.supercore.task_identity import TaskIdentity
from murmurfl.privacy import protocol
from murmurfl.strategies.rounds import replies as requests
from murmurfl.strategies.rounds.replies import RoundRequest, request_messages

from tests.harness.records import shown

NODES = {"0": 1000, "1": 1001, "2": 1002}


def messages(config=None):
    # `Message(...)` takes its sender from here; a SuperLink would have set it.
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    points = {key: ArrayRecord({"w": Array(np.full(2, 0.5))}) for key in (protocol.ARRAYS, protocol.PREVIOUS_ARRAYS)}
    request = RoundRequest(3, "session", {"2": 1, "0": 0}, {}, (), {protocol.CENTRE: b"1234"})
    return request_messages(config or ConfigRecord({"lr": 0.1}), request, points, NODES)


def test_every_machine_is_asked_with_its_own_name_and_acknowledgement():
    asked = messages()
    assert [message.metadata.dst_node_id for message in asked] == [1002, 1000]
    for message, name, ack in zip(asked, ("2", "0"), (1, 0), strict=True):
        assert dict(message.content[protocol.CONFIG]) == {
            "lr": 0.1,
            protocol.CENTRE: b"1234",
            protocol.VERSION: protocol.PROTOCOL_VERSION,
            protocol.SERVER_ROUND: 3,
            protocol.SESSION: "session",
            protocol.MACHINE: name,
            protocol.ACK: ack,
        }
        assert list(message.content) == [protocol.ARRAYS, protocol.PREVIOUS_ARRAYS, protocol.CONFIG]


def test_messages_are_as_flower_makes_them():
    for message in messages():
        made = Message(message.content, message.metadata.dst_node_id, MessageType.TRAIN)
        made.metadata.created_at = message.metadata.created_at  # one clock for a round
        assert vars(message).keys() == vars(made).keys()
        assert message.metadata == made.metadata
        assert message.content == made.content
        assert not message.has_error()


def test_where_flower_keeps_a_messages_parts_elsewhere_it_makes_them_itself(monkeypatch):
    expected = [shown(message.content) for message in messages()]
    monkeypatch.setattr(requests, "_alike", lambda *_: None)
    assert [shown(message.content) for message in messages()] == expected


def test_the_callers_entries_do_not_stand_in_for_the_protocols():
    asked = messages(ConfigRecord({protocol.MACHINE: "9", protocol.ACK: 9, protocol.SESSION: "other"}))
    assert [message.content[protocol.CONFIG][protocol.MACHINE] for message in asked] == ["2", "0"]
    assert [message.content[protocol.CONFIG][protocol.ACK] for message in asked] == [1, 0]
    assert {message.content[protocol.CONFIG][protocol.SESSION] for message in asked} == {"session"}


def test_entries_of_one_machines_message_are_not_anothers():
    first, second = messages()
    before = shown(second.content)
    first.content[protocol.CONFIG][protocol.SERVER_ROUND] = 99
    del first.content[protocol.PREVIOUS_ARRAYS]
    assert shown(second.content) == before
