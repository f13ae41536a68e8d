"""What is noted of a node's answers: names and numbers, and nothing that depends on data."""

import logging
import threading

import pytest
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from murmurfl.app.nodes.watching.journal import Entry, Journal, noting
from murmurfl.clients import helper_app
from murmurfl.privacy import ConfigurationError, protocol

from tests.harness.grid import ask_real_node
from tests.harness.machines import DurableRecord
from tests.harness.masked_releases import opener_of, round_of


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


def test_a_refusal_is_noted_with_fixed_texts_only() -> None:
    (entry,) = _noted(Error(protocol.CAP_REACHED, "the cap is\nreached" + "x" * 999))
    assert entry.kind == "refused"
    why = "the cap is reached" + "x" * 282
    assert dict(entry.facts) == {"run": 1, "session": "s [31m", "round": 3, "reason": "cap-reached", "why": why}
    (entry,) = _noted(Error(7, "what somebody else wrote"))
    assert dict(entry.facts) == {"run": 1, "session": "s [31m", "round": 3, "reason": "error-7"}


@pytest.mark.parametrize("versions", [1, 2])
def test_a_release_is_noted_under_the_machines_session(versions: int) -> None:
    message, journal, entries = _request(), Journal(), list[Entry]()
    beside = ConfigRecord({protocol.SESSION: "another", protocol.SERVER_ROUND: 9})
    if versions == 2:  # who reads the record of this name reads no other; all others refuse
        beside[protocol.VERSION] = protocol.PROTOCOL_VERSION
    real = ConfigRecord(
        {protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.SESSION: "read", protocol.SERVER_ROUND: 3}
    )
    message.content = RecordDict({"a": beside, protocol.CONFIG: real})
    journal.listen(entries.append)
    made = RecordDict({protocol.METRICS: MetricRecord({protocol.RELEASE: 1})})
    answer = noting(lambda message, context: Message(made, reply_to=message), journal)
    answer(message, Context(1, 1, {}, RecordDict(), {}))
    assert [(entry.facts["session"], entry.facts["round"]) for entry in entries] == [("read", 3)]


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


@pytest.mark.parametrize("kind", [protocol.QUERY_OPEN, "train"])
def test_an_opened_sum_is_noted_with_its_size(kind: str) -> None:
    journal, entries = Journal(), []
    journal.listen(entries.append)
    releases = round_of()
    config = {
        protocol.VERSION: protocol.PROTOCOL_VERSION,
        protocol.SESSION: "s",
        protocol.OPENING: "7",
        protocol.ASK: protocol.ASK_OPEN,
        protocol.HELPER: "left",
        protocol.HEADER: [one.header for one in releases],
        protocol.SIGNATURE: [one.signature for one in releases],
        protocol.SEALS: [seal for one in releases for seal in one.seals],
    }
    app = noting(helper_app(opener_of(DurableRecord(), "left")), journal)
    whether = ConfigRecord({**config, protocol.ASK: protocol.ASK_WHETHER})
    ask_real_node(app, RecordDict({protocol.CONFIG: whether}), "query")
    assert [entry.kind for entry in entries] == ["answered"], "it has not opened anything"
    entries.clear()
    ask_real_node(app, RecordDict({protocol.CONFIG: ConfigRecord(config)}), kind)
    ask_real_node(app, RecordDict({protocol.CONFIG: ConfigRecord({**config, protocol.SESSION: "t"})}), kind)
    ask_real_node(app, RecordDict({protocol.CONFIG: ConfigRecord({protocol.ASK: "x"})}), kind)
    run = entries[0].facts["run"]
    assert all(entry.facts["why"] for entry in entries[1:])
    assert [(entry.kind, {name: v for name, v in entry.facts.items() if name != "why"}) for entry in entries] == [
        ("opened", {"run": run, "session": "s", "round": 7, "releases": len(releases)}),
        ("refused", {"run": run, "session": "t", "round": 7, "reason": "opening-refused"}),
        ("refused", {"run": run, "reason": "protocol-mismatch"}),
    ]


def test_a_repeated_release_is_noted_and_sessions_count_anew() -> None:
    journal, entries = Journal(), []
    journal.listen(entries.append)
    answers = [("a", 1), ("a", 1), ("b", 1), ("a", 2), ("a", 2), ("b", 1)]
    numbers = iter([number for _, number in answers])

    def app(message: Message, context: Context) -> Message:
        return Message(
            RecordDict({protocol.METRICS: MetricRecord({protocol.RELEASE: next(numbers)})}), reply_to=message
        )

    noted = noting(app, journal)
    for session, _ in answers:
        content = RecordDict({protocol.CONFIG: ConfigRecord({protocol.SESSION: session})})
        ask_real_node(noted, content, "train")
    kinds = ["released", "repeated", "released", "released", "repeated", "repeated"]
    assert [entry.kind for entry in entries] == kinds


def test_what_an_app_does_to_its_request_changes_nothing_that_is_noted() -> None:
    journal, entries = Journal(), []
    journal.listen(entries.append)

    def app(message: Message, context: Context) -> Message:
        message.content[protocol.CONFIG] = ConfigRecord({protocol.SESSION: "patient 4711"})
        return Message(Error(0, "patient 4711"), reply_to=message)  # as Flower reports what an app has raised

    ask_real_node(noting(app, journal), RecordDict({protocol.CONFIG: ConfigRecord({protocol.SESSION: "s"})}), "train")
    assert "4711" not in str(entries)


def test_entries_of_several_threads_come_to_every_listener_in_one_order() -> None:
    journal, first, second = Journal(), [], []
    journal.listen(lambda entry: first.append(entry.facts["name"]))
    journal.listen(lambda entry: second.append(entry.facts["name"]))

    def note(name: str) -> None:
        for i in range(50):
            journal.note("started", name=f"{name}{i}")

    threads = [threading.Thread(target=note, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(first) == 150
    assert first == second
