"""The journal has an entry for each event and the log a line, and neither says anything of data."""

import io
import json
import logging
import re
import sys
import threading
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.supercore import log as flower_log
from flwr.supercore.task_identity import TaskIdentity
from murmurfl.app.nodes.journal import (
    FACTS,
    LONGEST_LINE,
    Entry,
    EntryWriter,
    Journal,
    LogSettings,
    flower_line,
    moment,
    noting,
    plain,
    start_log,
)
from murmurfl.clients import helper_app
from murmurfl.privacy import ConfigurationError, LedgerError, protocol
from murmurfl.privacy.errors import OF_DATA, PUBLIC, InvalidRecordError

from tests.harness.clients import DurableRecord
from tests.harness.errors import raises
from tests.harness.grid import ask_real_node
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
def test_a_release_is_noted_under_the_clients_session(versions: int) -> None:
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
    with raises(ConfigurationError, "unknown-name", "kind"):
        Journal().note("released", loss=1.0)
    with raises(ConfigurationError, "unknown-name", "kind"):
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


ROOT = Path(__file__).parents[3]
SECRET = "patient 4711"
NOON = 1795400659.125
UNSAID = {"contact", "turned-away"}
"""What comes every few seconds is for monitors; why a node was turned away is in the line of the disconnection."""
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (DEBUG|INFO|WARNING|ERROR|CRITICAL) +\S.*")


@pytest.fixture
def log_of():
    """Starts a log; what it says so far is the return value of what it returns."""
    root, names = (
        logging.getLogger(),
        ("flwr", "uvicorn", "uvicorn.error", "uvicorn.access", "httpx", "httpcore", "asyncio"),
    )
    loggers = [logging.getLogger(name) for name in names]
    before = root.handlers[:], root.level, sys.excepthook, threading.excepthook
    settled = [(logger, logger.handlers[:], logger.propagate, logger.level) for logger in loggers]

    def start(**settings):
        stream = io.StringIO()
        start_log(LogSettings(**settings), stream)
        return lambda: stream.getvalue().splitlines()

    yield start
    logging.captureWarnings(capture=False)
    root.handlers[:], root.level, sys.excepthook, threading.excepthook = before
    for logger, handlers, propagate, level in settled:
        logger.handlers[:], logger.propagate, logger.level = handlers, propagate, level
    logging.Logger.manager._clear_cache()


def some_facts(kind):
    values = {"retry_s": 4.0, "samples": 8, "release": 2, "round": 3, "run": 2**64 - 1, "rounds": 1}
    return {name: values.get(name, f"\x1b[31m{name}\n{{x}}") for name in sorted(FACTS[kind])}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("kind", sorted(FACTS))
def test_every_entry_is_one_line_or_one_object(kind, log_of):
    for as_json in (False, True):
        said = log_of(as_json=as_json, verbose=True)
        EntryWriter()(Entry(kind, NOON, some_facts(kind)))
        lines = said()
        assert len(lines) == (kind not in UNSAID)
        for line in lines:
            assert line.isprintable()
            if not as_json:
                assert LINE.fullmatch(line)
                assert line.startswith("2026-11-23T02:24:19Z ")
                continue
            told = json.loads(line)
            assert (told.pop("time"), told.pop("event")) == ("2026-11-23T02:24:19.125Z", kind)
            assert told.pop("level") in ("debug", "info", "warning")
            assert told.keys() == FACTS[kind], "all that is known, and nothing else"


def test_json_logs_have_run_ids_as_text(log_of):
    said = log_of(as_json=True)
    EntryWriter()(Entry("released", NOON, {"run": 2**64 - 1, "release": 1}))
    assert json.loads(said()[0])["run"] == str(2**64 - 1)


def test_what_people_read_of_a_night(log_of):
    said, journal = log_of(), Journal(clock=lambda: NOON)
    journal.listen(EntryWriter())
    asked = {"run": 12, "session": "s", "round": 3}
    journal.note("connected", superlink="a:1")
    journal.note("released", **asked, release=2, samples=8)
    journal.note("released", **asked, release=1, of="mean")
    journal.note("refused", **asked, reason="cap-reached", why="the cap is reached")
    journal.note("opened", **asked, releases=5)
    journal.note("disconnected", superlink="a:1", cause="refused", retry_s=4.0)
    assert [line.removeprefix("2026-11-23T02:24:19Z ") for line in said()] == [
        "INFO     Connected to a:1.",
        'INFO     Released: run 12, session "s", round 3, release 2, 8 samples.',
        'INFO     Released: run 12, session "s", round 3, release 1 of its mean.',
        'WARNING  Refused: cap-reached (the cap is reached); run 12, session "s", round 3.',
        'INFO     Opened a sum: run 12, session "s", round 3, 5 releases.',
        "WARNING  Disconnected from a:1: refused; tried again in 4 s.",
    ]


def test_the_documentation_shows_lines_as_they_are(log_of):
    said, writer = log_of(), EntryWriter()
    asked = {"run": 12, "session": "c63a3aaf", "round": 1}
    superlink = {"superlink": "fl.example.org:8000"}
    for kind, facts in [
        ("connected", superlink),
        ("released", {**asked, "release": 1, "samples": 16}),
        ("repeated", {**asked, "run": 13, "release": 1, "samples": 16}),
        ("opened", {**asked, "releases": 5}),
        ("refused", {**asked, "round": 11, "reason": "cap-reached", "why": "the cap is reached"}),
        ("disconnected", {**superlink, "cause": "refused"}),
    ]:
        writer(Entry(kind, NOON, facts))
    page = (ROOT / "docs" / "operations.md").read_text()
    assert [line for line in said() if f"`{line.split('Z ', 1)[1]}`" not in page] == []


def test_a_lasting_failure_is_logged_once_an_hour(log_of):
    def night(said, now):
        writer = EntryWriter(clock=lambda: now[0])
        for cause, seconds in [("refused", 15.0)] * 300 + [("clock", 15.0)]:
            writer(Entry("connecting", NOON, {"superlink": "a:1"}))
            writer(Entry("disconnected", NOON, {"superlink": "a:1", "cause": cause, "retry_s": 15.0}))
            now[0] += seconds
        writer(Entry("connected", NOON, {"superlink": "a:1"}))
        writer(Entry("disconnected", NOON, {"superlink": "a:1", "cause": "clock"}))
        return [line.split(None, 2)[2].split(":1")[0] + line[-24:] * ("Dis" in line) for line in said()]

    told = night(log_of(), [0.0])
    assert [line.split()[0] for line in told] == ["Connecting", *["Disconnected"] * 3, "Connected", "Disconnected"]
    assert len(night(log_of(verbose=True), [0.0])) == 2 * 301 + 2


def test_a_text_of_a_server_cannot_make_a_line_or_move_a_cursor():
    hostile = "\x1b[2J\x1b]0;title\x07one\r\n2026-01-01T00:00:00Z INFO Connected\x85\u2028\u202e\x00two\x9b31m"
    shown = plain(hostile)
    assert shown.isprintable()
    assert shown.startswith("one")
    assert "[2J" not in shown
    assert len(plain("x" * 10**6)) <= LONGEST_LINE + 4


def test_flowers_own_logger_has_no_other_way_out(log_of, capsys):
    said = log_of(sees_samples=False)
    flower_log(logging.WARNING, "\x1b[93mround \n lost\x1b[0m")
    flower_log(logging.INFO, "of no interest while all is well, and yet this client's own")
    assert [line.split(None, 1)[1] for line in said()] == [
        "WARNING  round   lost",
        "INFO     of no interest while all is well, and yet this client's own",
    ]
    assert capsys.readouterr() == ("", "")


def test_flowers_lines_are_shown_from_warnings_or_verbose(log_of):
    for verbose in (False, True):
        said = log_of(verbose=verbose, as_json=True)
        flower_line(logging.INFO, "Received successfully")
        flower_line(logging.ERROR, "\x1b[91mExit Code: 305")
        flower_line(logging.ERROR, " \t")
        told = [json.loads(line) for line in said()]
        assert [line["message"] for line in told] == ["Received successfully"] * verbose + ["Exit Code: 305"]
        assert {line["event"] for line in told} == {"flower"}


def fail(error):
    try:
        raise error
    except type(error):
        logging.getLogger("flwr").exception("This client failed to answer.", extra=PUBLIC)


@pytest.mark.parametrize("as_json", [False, True])
def test_an_exceptions_text_needs_log_details_unless_ours(as_json, log_of):
    said = log_of(as_json=as_json)
    fail(ValueError(f"could not convert {SECRET}"))
    fail(LedgerError("Expected room on a disk that works."))
    hidden, own = said()
    assert SECRET not in hidden
    assert "ValueError at" in hidden, "where it was is code, not data"
    assert "test_journal.py:" in hidden
    assert "LedgerError: Expected room on a disk that works. at" in own
    said = log_of(as_json=as_json, details=True)
    fail(ValueError(f"could not convert {SECRET}"))
    assert SECRET in said()[0]


def test_details_show_what_an_error_of_murmurfls_was_raised_from(log_of):
    def failed():
        try:
            try:
                raise ValueError(SECRET)
            except ValueError as error:
                raise LedgerError("Expected the ClientApp to answer.") from error
        except LedgerError:
            logging.getLogger("flwr").exception("This client failed to answer.", extra=PUBLIC)

    said = log_of()
    failed()
    assert SECRET not in said()[0]
    assert "because of ValueError at " in said()[0]
    said = log_of(details=True)
    failed()
    assert f"because of ValueError: {SECRET} at " in said()[0]


def data_dependent_lines():
    logging.getLogger("murmurfl.privacy.release.prefix_sums").error("counts as zero", extra=OF_DATA)
    logging.getLogger("py.warnings").warning("overflow encountered in exp")  # as Python hands them on


def test_lines_that_are_there_only_because_of_the_data_are_details(log_of):
    said = log_of()
    data_dependent_lines()
    assert not said()
    said = log_of(details=True)
    data_dependent_lines()
    assert len(said()) == 2


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", ["flwr", "murmurfl.clients.records.client_records", "murmurfl", "uvicorn"])
@pytest.mark.parametrize(
    ("file", "heard"),
    [
        ("privacy/release/prefix_sums.py", False),
        ("clients/records/client_records.py", False),
        ("clients/adapters/noise_mod.py", False),
        ("clients/adapters/anything_new.py", False),
        ("app/data/table_task.py", False),
        ("clients/messages.py", True),
        ("strategies/rounds/strategy.py", True),
        ("app/nodes/supernode.py", True),
    ],
)
def test_a_new_line_of_code_that_sees_samples_is_a_detail(name, file, heard, log_of):
    def said(extra, **settings):
        lines = log_of(**settings)
        record = logging.getLogger(name).makeRecord(name, 40, str(ROOT / file), 1, "new", (), None, extra=extra)
        logging.getLogger(name).handle(record)
        return bool(lines())

    assert said({}) is heard
    assert said(PUBLIC)
    assert not said(OF_DATA)
    assert said({}, details=True)
    assert said({}, sees_samples=False)


def test_what_other_packages_log_is_a_detail_where_samples_are(log_of):
    for settings, heard in (({}, False), ({"details": True}, True), ({"sees_samples": False}, True)):
        said = log_of(**settings)
        logging.getLogger("sklearn").error("of a sample")
        logging.getLogger("projects.own.app").error("of a sample")
        assert len(said()) == 2 * heard


@pytest.mark.parametrize("name", ["flwr", "uvicorn.error", "asyncio"])
def test_a_projects_own_file_is_a_detail_whoevers_logger_it_uses(name, log_of):
    """Most Flower apps log by Flower's ``log``: the name is Flower's, and the file is the project's."""
    said = log_of()
    for file in ("/home/her/project/client_app.py", ""):
        record = logging.getLogger(name).makeRecord(name, 40, file, 1, "loss of a sample", (), None)
        logging.getLogger(name).handle(record)
    assert not said()
    flower_log(logging.ERROR, "from this file")
    own = logging.getLogger("pytest").makeRecord("pytest", 40, pytest.__file__, 1, "it may see samples", (), None)
    logging.getLogger("pytest").handle(own)
    assert not said()


def test_an_invalid_records_text_is_a_detail(log_of):
    said = log_of()
    fail(InvalidRecordError(f"age: {SECRET}"))
    assert SECRET not in said()[0]


def test_two_clients_with_other_samples_log_the_same(log_of):
    """One of them fails on its samples, and its gradients overflow; the sibling shows that details would tell."""
    logs = {}
    for details in (False, True):
        for broken in (False, True):
            said, journal = log_of(details=details), Journal(clock=lambda: NOON)
            journal.listen(EntryWriter())
            if broken:
                data_dependent_lines()
            journal.note("released", session="s", round=1, release=1, samples=8)
            logs[details, broken] = said()
    assert logs[False, True] == logs[False, False]
    assert logs[True, True] != logs[True, False]


def test_what_clients_say_beside_the_journal_is_not_said_twice(log_of):
    from murmurfl.clients import messages as answers

    said = log_of()
    answers.logger.info("Refused a request: %s.", "the cap is reached", extra=PUBLIC)
    assert not said()
    said = log_of(verbose=True)
    answers.logger.info("Refused a request: %s.", "the cap is reached", extra=PUBLIC)
    assert len(said()) == 1


def test_an_error_that_nobody_expected_is_a_line_too(log_of):
    said = log_of(as_json=True)
    thread = threading.Thread(target=lambda: (_ for _ in ()).throw(ValueError(SECRET)))
    thread.start()
    thread.join()
    try:
        raise ValueError(SECRET)
    except ValueError:
        sys.excepthook(*sys.exc_info())
    told = [json.loads(line) for line in said()]
    assert [line["level"] for line in told] == ["critical"] * 2
    assert SECRET not in str(told)


def test_a_log_that_cannot_be_written_holds_up_nothing(log_of, capsys):
    tried = []

    class Full(io.StringIO):
        def write(self, text):
            tried.append(text)
            raise OSError(28, "No space left on device")

    log_of()
    start_log(LogSettings(), Full())
    logging.getLogger("flwr").warning("nobody reads this", extra=PUBLIC)
    assert tried
    assert capsys.readouterr().err == ""  # where the disk is full a traceback a line would not help


def test_a_moment_is_in_utc():
    assert moment(0.999) == "1970-01-01T00:00:00Z"
    assert moment(0.999, milliseconds=True) == "1970-01-01T00:00:00.999Z"
