"""A helper as a Flower node: what it answers, what it refuses, and that nothing else leaves it."""

import logging

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from murmurfl.clients import ContextOpeningRecord, answer_helper, helper_app
from murmurfl.privacy import (
    HelperKey,
    MemoryOpeningRecord,
    Opener,
    Opening,
    OpeningRecordError,
    Roster,
    SQLiteOpeningRecord,
    is_opening,
    protocol,
    set_digest,
)
from murmurfl.privacy.sums.opening_rule import SignedOpening

from tests.harness.clients import DurableRecord
from tests.harness.errors import raises
from tests.harness.grid import ask, ask_real_node
from tests.harness.masked_releases import ATTACKS, CLIENTS, ROSTER, SEED, D, mask_of, opener_of, round_of

pytestmark = pytest.mark.usefixtures("quick_disk")
REFUSAL = "this helper does not open this set of releases; its own log says why"
SECRET = "patient 4711 has blood group AB"


def app_of(record=None, helper="left"):
    return helper_app(opener_of(record or DurableRecord(), helper))


def request(opening="1", releases=None, session="s", helper="left", **changes):
    """A request to open a set; an entry that is None is left out."""
    releases = round_of() if releases is None else releases
    entries = {
        protocol.VERSION: protocol.PROTOCOL_VERSION,
        protocol.SESSION: session,
        protocol.OPENING: opening,
        protocol.HELPER: helper,
        protocol.HEADER: [one.header for one in releases],
        protocol.SIGNATURE: [one.signature for one in releases],
        protocol.SEALS: [seal for one in releases for seal in one.seals],
        **changes,
    }
    config = ConfigRecord({key: value for key, value in entries.items() if value is not None})
    return RecordDict({protocol.CONFIG: config})


def hello(**changes):
    entries = {protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.ASK: protocol.ASK_HELLO, **changes}
    return RecordDict({protocol.CONFIG: ConfigRecord(entries)})


def opened(app, content, kind=protocol.QUERY_OPEN):
    """A helper's answer as a server reads it."""
    reply = ask_real_node(app, content, kind)
    assert not reply.has_error(), reply.error
    config, (name,) = reply.content[protocol.CONFIG], reply.content[protocol.ARRAYS]
    assert name == "total"
    total = reply.content[protocol.ARRAYS][name].numpy()
    fields = (config[key] for key in (protocol.HELPER, protocol.OPENING, protocol.SET_DIGEST))
    return Opening(*fields, total, config[protocol.SIGNATURE])


def test_a_helper_says_whether_it_would_open_a_set_and_opens_nothing():
    record = DurableRecord()
    releases = round_of()
    whether = request(releases=releases, ask=protocol.ASK_WHETHER)
    for _ in range(2):
        said = ask_real_node(app_of(record), whether, "query").content
        config = said[protocol.CONFIG]
        assert (config[protocol.WOULD_OPEN], config[protocol.DISPUTED]) == ("yes", [])
        assert not said.array_records, "no sum"
        assert record.set_digest("s", "1") is None
    opened(app_of(record), request(releases=releases))
    assert ask_real_node(app_of(record), whether, "query").content[protocol.CONFIG][protocol.WOULD_OPEN] == "opened"


def test_a_helper_promises_a_set_and_declares_void_what_another_opened():
    record, releases = DurableRecord(), round_of()
    config = ask_real_node(app_of(record), request(releases=releases, ask=protocol.ASK_LOCK), "query").content["config"]
    assert config[protocol.WOULD_OPEN] == "locked"
    assert error_of(app_of(record), request(releases=releases[:5]))[0] == protocol.OPENING_REFUSED
    seen = SignedOpening.of(opened(app_of(helper="right"), request(releases=releases, helper="right")))
    shown = {
        "ask": protocol.ASK_VOID,
        protocol.OPENED_BY: "right",
        protocol.OPENED_TOTAL: seen.total_digest,
        protocol.OPENED_SIGNATURE: seen.signature,
    }
    for wrong in (None, 7, "left", b"x"):
        for key in (protocol.OPENED_BY, protocol.OPENED_TOTAL, protocol.OPENED_SIGNATURE):
            content = request(releases=releases, **{**shown, key: wrong})
            assert error_of(app_of(record), content, "query") == (protocol.OPENING_REFUSED, REFUSAL)
    said = ask_real_node(app_of(record), request(releases=releases, **shown), "query").content
    assert said["config"][protocol.WOULD_OPEN] == "void"
    assert not said.array_records, "no sum"
    assert error_of(app_of(record), request(releases=releases)) == (protocol.OPENING_REFUSED, REFUSAL)
    opened(app_of(record), request("2", round_of(release=2, ack=1)))


def error_of(app, content, kind=protocol.QUERY_OPEN):
    reply = ask_real_node(app, content, kind)
    assert reply.has_error()
    assert not reply.has_content()
    return reply.error.code, reply.error.reason


@pytest.mark.parametrize("kind", ["query", "train"])
def test_a_hello_is_answered_with_its_name_and_its_roster(kind):
    reply = ask_real_node(app_of(), hello(), kind)
    (config,) = reply.content.values()
    assert set(config) == {protocol.VERSION, protocol.HELPERS, protocol.ROSTER}
    assert config[protocol.HELPERS] == "left"
    assert Roster.from_json(config[protocol.ROSTER]) == ROSTER


@pytest.mark.parametrize("kind", [protocol.QUERY_OPEN, "train"])
def test_a_set_is_opened_by_a_message(kind):
    releases = round_of()
    asked = {} if kind == protocol.QUERY_OPEN else {protocol.ASK: protocol.ASK_OPEN}
    answer = opened(app_of(), request(releases=releases, **asked), kind)
    assert answer.total.dtype == np.uint64
    assert (answer.total == sum((mask_of(one, "left") for one in releases), np.zeros(D, np.uint64))).all()
    assert answer.set_digest == set_digest("s", "1", releases)
    assert is_opening(ROSTER.helpers[0], "s", answer)


def test_nothing_leaves_but_the_sum_and_what_it_is_about():
    reply = ask_real_node(app_of(), request(), protocol.QUERY_OPEN)
    assert set(reply.content) == {protocol.ARRAYS, protocol.CONFIG}
    assert set(reply.content[protocol.CONFIG]) == {
        protocol.VERSION,
        protocol.HELPER,
        protocol.OPENING,
        protocol.SET_DIGEST,
        protocol.SIGNATURE,
    }


def test_each_helper_opens_what_was_sealed_for_it():
    releases = round_of()
    for helper, entry in zip(("left", "right"), ROSTER.helpers, strict=True):
        answer = opened(app_of(helper=helper), request(releases=releases, helper=helper))
        assert (answer.total == sum((mask_of(one, helper) for one in releases), np.zeros(D, np.uint64))).all()
        assert is_opening(entry, "s", answer)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_with_the_one_text(name):
    attack, app = ATTACKS[name], app_of()
    for opening, releases in attack.before:
        opened(app, request(opening, releases))
    refusal = error_of(app, request(attack.opening, attack.releases, attack.session))
    assert refusal == (protocol.OPENING_REFUSED, REFUSAL)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "changes",
    [
        {"helper": "right"},
        {"helper": None},
        {"session": None},
        {"opening": None},
        {"opening": 1},
        {"session": b"s"},
        {protocol.HEADER: None},
        {protocol.SEALS: None},
        {protocol.SIGNATURE: None},
        {protocol.HEADER: b"x"},
        {protocol.HEADER: ["x"] * 6},
        {protocol.SEALS: [1] * 12},
        {protocol.SIGNATURE: [b"x"] * 5},
        {protocol.SIGNATURE: [b"x"] * 7},
        {protocol.SEALS: [b"x"] * 11},
        {protocol.SEALS: [b"x"] * 6},
        {protocol.HEADER: [], protocol.SEALS: [], protocol.SIGNATURE: []},
    ],
    ids=str,
)
def test_a_request_that_is_none_is_refused_with_the_same_text(changes, caplog):
    assert error_of(app_of(), request(**changes)) == (protocol.OPENING_REFUSED, REFUSAL)
    assert "Refused to open" in caplog.text


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("kind", ["query", "train", "evaluate", protocol.QUERY_OPEN])
@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_protocol_version_is_refused_by_name(kind, version):
    content = request(**{protocol.VERSION: version})
    code, reason = error_of(app_of(), content, kind)
    assert code == protocol.PROTOCOL_MISMATCH
    assert f"protocol version {protocol.PROTOCOL_VERSION}" in reason


def test_everything_else_is_refused():
    others = [
        ("train", request()),
        ("query", request()),
        ("evaluate", request()),
        ("query", hello(**{protocol.ASK: protocol.ASK_PRIVACY})),
        ("query", hello(**{protocol.ASK: 7})),
    ]
    app = app_of()
    refusals = {error_of(app, content, kind) for kind, content in others}
    assert refusals == {
        (
            protocol.MALFORMED_REQUEST,
            "malformed request: a helper says who it is and opens sets of releases, and does nothing else",
        )
    }
    empty = [{}, {protocol.CONFIG: MetricRecord({"x": 1})}, {protocol.ARRAYS: ArrayRecord()}]
    for content in map(RecordDict, empty):
        for kind in ("query", "train", "evaluate", protocol.QUERY_OPEN):
            assert error_of(app, content, kind)[0] == protocol.PROTOCOL_MISMATCH
    opened(app, request())


def test_no_text_of_an_exception_leaves(monkeypatch, caplog):
    app = app_of()

    def fails(*arguments):
        raise RuntimeError(SECRET)

    monkeypatch.setattr(Opener, "open", fails)
    code, reason = error_of(app, request())
    assert code == protocol.INTERNAL_ERROR
    assert SECRET not in reason
    assert SECRET in caplog.text


def test_a_record_that_cannot_be_used_is_said_in_fixed_words(tmp_path, caplog):
    path = tmp_path / "opened.db"
    app = app_of(SQLiteOpeningRecord.create(path, helper=HelperKey.simulated(SEED, "left").entry("left")))
    path.unlink()
    refusal = error_of(app, request())
    assert refusal == (protocol.LEDGER_UNUSABLE, "this helper's opening record cannot be used")
    assert str(path) in caplog.text


def test_a_real_helper_insists_on_a_record_that_lasts():
    with raises(OpeningRecordError, "unsupported", match="outlives this process"):
        helper_app(opener_of(MemoryOpeningRecord()))


def test_a_real_helper_started_again_goes_on_where_it_was(tmp_path):
    path = tmp_path / "opened.db"
    SQLiteOpeningRecord.create(path, helper=HelperKey.simulated(SEED, "left").entry("left"))
    first, second = round_of(), round_of(release=2, ack=1)
    before = opened(app_of(SQLiteOpeningRecord(path)), request("1", first))
    after = opened(app_of(SQLiteOpeningRecord(path)), request("1", first))
    assert (before.total == after.total).all()
    assert before.signature == after.signature
    assert error_of(app_of(SQLiteOpeningRecord(path)), request("1", first[:5])) == (protocol.OPENING_REFUSED, REFUSAL)
    opened(app_of(SQLiteOpeningRecord(path)), request("2", second))


def test_seeds_do_not_stand_in_the_log(caplog):
    with caplog.at_level(logging.DEBUG):
        opened(app_of(), request())
        error_of(app_of(), request(releases=round_of("ab")))
    releases = round_of()
    assert not any(seal.hex() in caplog.text for one in releases for seal in one.seals)
    assert "secret" not in caplog.text


# Simulated helpers, whose record is in `context.state`.


def simulated(state, helper="left"):
    return Opener(helper, HelperKey.simulated(SEED, helper), ROSTER, ContextOpeningRecord(state, helper))


def answered(state, content, helper="left"):
    """A new opener for each message, as under Ray, where only ``context.state`` is kept."""
    return ask(lambda message, context: answer_helper(simulated(state, helper), message), protocol.QUERY_OPEN, content)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_simulated_helper_keeps_the_same_rule(name):
    attack, state = ATTACKS[name], RecordDict()
    for opening, releases in attack.before:
        assert not answered(state, request(opening, releases)).has_error()
    reply = answered(state, request(attack.opening, attack.releases, attack.session))
    assert (reply.error.code, reply.error.reason) == (protocol.OPENING_REFUSED, REFUSAL)


def test_simulated_helpers_of_one_node_have_records_of_their_own():
    state, releases = RecordDict(), round_of()
    for helper in ("left", "right"):
        for _ in range(2):
            reply = answered(state, request(releases=releases, helper=helper), helper)
            assert not reply.has_error()
    with raises(OpeningRecordError, "mismatch", match="the record of helper 'right', got that of 'left'"):
        ContextOpeningRecord(state, "left").check_helper(ROSTER.helpers[1])


def test_a_simulated_record_keeps_sessions_apart_and_no_more_than_it_needs():
    state = RecordDict()
    for k in range(1, 6):
        for session in ("s", "t"):
            releases = round_of(release=k, ack=k - 1, session=session)
            assert not answered(state, request(str(k), releases, session)).has_error()
    assert len(state) == 2
    for record in state.values():
        assert {len(record[key]) for key in ("clients", "releases", "ids")} == {len(CLIENTS)}
        assert len(record["openings"]) == 5


def test_a_damaged_simulated_record_is_refused():
    state = RecordDict()
    answered(state, request())
    (key,) = state
    state[key] = ConfigRecord({"terms": "null"})
    reply = answered(state, request())
    assert reply.error.code == protocol.LEDGER_UNUSABLE
