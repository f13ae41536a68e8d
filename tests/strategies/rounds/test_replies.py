"""Requests as messages, and which replies and statements are believed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType
from flwr.supercore.task_identity import TaskIdentity
from murmurfl.privacy import Release, protocol
from murmurfl.strategies import Reply
from murmurfl.strategies.aggregation.plain import Plain
from murmurfl.strategies.rounds import replies as requests
from murmurfl.strategies.rounds.replies import RoundRequest, SummedReplies, is_statement, request_messages
from murmurfl.strategies.rounds.validation import ReplyValidator
from murmurfl.strategies.sums.summation import ReleaseSum

from tests.harness.records import shown

NODES = {"0": 1000, "1": 1001, "2": 1002}


def messages(config=None):
    # `Message(...)` takes its sender from here; a SuperLink would have set it.
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    points = {key: ArrayRecord({"w": Array(np.full(2, 0.5))}) for key in (protocol.ARRAYS, protocol.PREVIOUS_ARRAYS)}
    request = RoundRequest(3, "session", {"2": 1, "0": 0}, {}, (), {protocol.CENTRE: b"1234"})
    return request_messages(config or ConfigRecord({"lr": 0.1}), request, points, NODES)


def test_every_client_is_asked_with_its_own_name_and_acknowledgement():
    asked = messages()
    assert [message.metadata.dst_node_id for message in asked] == [1002, 1000]
    for message, name, ack in zip(asked, ("2", "0"), (1, 0), strict=True):
        assert dict(message.content[protocol.CONFIG]) == {
            "lr": 0.1,
            protocol.CENTRE: b"1234",
            protocol.VERSION: protocol.PROTOCOL_VERSION,
            protocol.SERVER_ROUND: 3,
            protocol.SESSION: "session",
            protocol.CLIENT: name,
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
    asked = messages(ConfigRecord({protocol.CLIENT: "9", protocol.ACK: 9, protocol.SESSION: "other"}))
    assert [message.content[protocol.CONFIG][protocol.CLIENT] for message in asked] == ["2", "0"]
    assert [message.content[protocol.CONFIG][protocol.ACK] for message in asked] == [1, 0]
    assert {message.content[protocol.CONFIG][protocol.SESSION] for message in asked} == {"session"}


def test_entries_of_one_clients_message_are_not_anothers():
    first, second = messages()
    before = shown(second.content)
    first.content[protocol.CONFIG][protocol.SERVER_ROUND] = 99
    del first.content[protocol.PREVIOUS_ARRAYS]
    assert shown(second.content) == before


SIZE = 5


def reply(contents):
    return Reply("0", 1, 0, contents, {})


def releases(count, spacings):
    generator = np.random.Generator(np.random.Philox(key=8))
    for i in range(count):
        counts = generator.integers(-(2**25), 2**25, size=SIZE)
        yield Release(counts, spacings[i % len(spacings)], 1, 0)


@pytest.mark.parametrize("spacings", [(2.0**-20,), (2.0**-20, 2.0**-3)])
def test_the_sum_of_releases_is_that_of_what_they_would_send(spacings):
    total, sent, expected = ReleaseSum(SIZE), ReleaseSum(SIZE), np.zeros(SIZE)
    for i, release in enumerate(releases(1500, spacings)):
        total.add(reply(release if i % 5 else release.values))  # some were sent, some were not
        sent.add(reply(release.values))
        expected += release.values
        assert (reply(release).values == release.values).all()
    assert (total.total() == expected).all()
    assert (sent.total() == expected).all()


def test_as_many_large_counts_as_are_added_together_do_not_overflow():
    total = ReleaseSum(SIZE)
    largest = np.full(SIZE, 2**53 - 1)
    for _ in range(2048):
        total.add(reply(Release(largest, 1.0, 1, 0)))
    assert total.total() == pytest.approx(2048.0 * (2.0**53 - 1), rel=1e-12)


def test_releases_that_were_added_up_where_they_were_made_are_the_same_sum():
    made = list(releases(7, (2.0**-20,)))
    one_by_one, together = ReleaseSum(SIZE), ReleaseSum(SIZE)
    for release in made:
        one_by_one.add(reply(release))
    for part in (made[:3], made[3:]):
        counts, ones = np.sum([release.counts for release in part], axis=0), (1,) * len(part)
        together.add_sum(
            SummedReplies(tuple(map(str, range(len(part)))), ones, (0,) * len(part), ones, counts, 2.0**-20)
        )
    assert (together.total() == one_by_one.total()).all()


PLAIN = {
    "releases": 3,
    "mu-spent": 0.5,
    "mu-guaranteed": 1.0,
    "mu-budget": math.inf,
    "samples-used": 24,
    "max-participations": 10,
    "mechanism": "cancelling",
}
SUMS = {"mu-local": 2.0, "min-honest": 4, "min-cohort": 5}


def test_a_statement_has_all_its_figures_and_under_sums_what_they_rest_on():
    assert is_statement(PLAIN)
    assert is_statement(PLAIN | SUMS)
    assert is_statement(PLAIN | SUMS | {"mu-local": math.inf})


@pytest.mark.parametrize("name", [*SUMS, "mu-guaranteed"])
@pytest.mark.parametrize("value", ["many", None, math.nan, -1, [3], True])
def test_one_client_cannot_spoil_a_runs_figures_with_something_that_is_none(name, value):
    """It would end the run that has just been made, or put an impossible figure into its sentence."""
    assert not is_statement(PLAIN | SUMS | {name: value})


@pytest.mark.parametrize("change", [{"min-honest": 0}, {"min-cohort": 0}, {"min-honest": 2.5}, {"min-honest": 5000}])
def test_numbers_of_clients_are_whole_and_possible(change):
    assert not is_statement(PLAIN | SUMS | change)


@pytest.mark.parametrize(("release", "accepted", "counts"), [(3, True, True), (4, True, False), (3, False, False)])
def test_a_reply_beyond_its_clients_cap_or_that_the_rule_refuses_is_malformed(release, accepted, counts):
    said = []
    validator = ReplyValidator(
        Plain(),
        {},
        acknowledges=True,
        comes_too_late=lambda name: False,
        check_reply=lambda reply: accepted,
        say_malformed=lambda name, problem: said.append(name),
    )
    total = ReleaseSum(2)
    statements = {"0": {"max-participations": 3}}
    tally = validator.add_valid([Reply("0", release, 0, np.array([1.0, 2.0]), {})], total, statements, {})
    assert (tally.malformed, len(said)) == (int(not counts), int(not counts))
    assert tally.aggregated == ({"0": release} if counts else {})
    assert total.total().tolist() == ([1.0, 2.0] if counts else [0.0, 0.0])
