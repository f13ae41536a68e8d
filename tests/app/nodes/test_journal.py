"""What is noted of a node's answers: names and numbers, and nothing that depends on data."""

import logging

import pytest
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from murmurfl.app.nodes.journal import Entry, Journal, noting
from murmurfl.privacy import ConfigurationError, protocol


def _request() -> Message:
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    config = ConfigRecord({protocol.SESSION: "s\x1b[31m", protocol.SERVER_ROUND: 3})
    message = Message(RecordDict({protocol.CONFIG: config}), dst_node_id=1, message_type=MessageType.TRAIN)
    message.metadata.__dict__["_message_id"] = "m"
    return message


def _noted(answer: Error | dict[str, int | float]) -> list[Entry]:
    journal = Journal(clock=lambda: 5.0)
    entries: list[Entry] = []
    journal.listen(entries.append)

    def app(message: Message, context: Context) -> Message:
        if isinstance(answer, dict):
            return Message(RecordDict({protocol.METRICS: MetricRecord(dict(answer))}), reply_to=message)
        return Message(answer, reply_to=message)

    noting(app, journal)(_request(), Context(1, 1, {}, RecordDict(), {}))
    return entries


def test_a_release_is_noted_with_its_number_and_without_control_characters() -> None:
    (entry,) = _noted({protocol.RELEASE: 2, protocol.NUM_EXAMPLES: 8, "secret": 1.5})
    assert entry.kind == "released"
    assert entry.at == 5.0
    assert dict(entry.facts) == {"run": 1, "session": "s [31m", "round": 3, "release": 2, "samples": 8}


def test_a_refusal_is_noted_by_its_name_and_never_by_its_text() -> None:
    (entry,) = _noted(Error(protocol.CAP_REACHED, "whatever somebody wrote"))
    assert entry.kind == "refused"
    assert dict(entry.facts) == {"run": 1, "session": "s [31m", "round": 3, "reason": "cap-reached"}


def test_an_entry_has_the_facts_of_its_kind_only() -> None:
    with pytest.raises(ConfigurationError, match="known kind"):
        Journal().note("released", loss=1.0)
    with pytest.raises(ConfigurationError, match="known kind"):
        Journal().note("gossip")


def test_a_listener_that_fails_changes_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal()
    heard: list[Entry] = []

    def fails(entry: Entry) -> None:
        raise OSError("no space left")

    journal.listen(fails)
    journal.listen(heard.append)
    with caplog.at_level(logging.ERROR):
        reply = noting(lambda message, context: Message(RecordDict(), reply_to=message), journal)(
            _request(), Context(1, 1, {}, RecordDict(), {})
        )
    assert not reply.has_error()
    assert [entry.kind for entry in heard] == ["answered"]
    assert "could not be shown" in caplog.text
