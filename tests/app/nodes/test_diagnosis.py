"""Why a SuperLink is not reached: one cause, said once; the next try comes later each time."""

import logging
import re
import subprocess
import threading
import time
from email.utils import formatdate
from pathlib import Path

import httpx
import pytest
from murmurfl.app.engines.loopback import free_port
from murmurfl.app.fleet.federation.keys_and_cards import make_node_key
from murmurfl.app.nodes.connection import Connection, presented_by, printable
from murmurfl.app.nodes.diagnosis import CAUSES, Diagnosis, FleetApi, Reconnecting, diagnose, passing_key
from murmurfl.app.nodes.journal import Journal
from murmurfl.privacy import ConfigurationError

from tests.harness.errors import raises
from tests.harness.loopback_servers import DAY, Authority, http_answer, serving

NOT_FOUND = http_answer(404)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


def cause_at(address, authority=None, **options):
    roots = None if authority is None else authority.path
    diagnosis = diagnose(Connection(address, roots, insecure=authority is None), 2.0, **options)
    assert diagnosis.sentence.startswith("Expected ")
    assert ", got " in diagnosis.sentence
    assert diagnosis.sentence.endswith(".")
    assert diagnosis.sentence.isprintable()
    return diagnosis.cause, diagnosis.sentence


def test_a_name_that_nobody_knows_is_told(authority):
    assert cause_at("no-such-name.invalid:8000", authority)[0] == "name-not-found"


def test_a_port_on_which_nobody_listens_is_told(authority):
    cause, sentence = cause_at(f"127.0.0.1:{free_port()}", authority)
    assert cause == "refused"
    assert "have the SuperLink started" in sentence


def test_an_address_without_a_way_to_it_is_told(authority):
    assert cause_at("255.255.255.255:8000", authority)[0] == "unreachable"


def test_a_server_that_never_answers_is_told_in_time(authority):
    with serving(None, authority.context()) as address:
        found = diagnose(Connection(address, authority.path), 0.2)
    assert found.cause == "timed-out"
    assert "none within 0.2 s" in found.sentence


def test_a_server_without_tls_is_told(authority):
    with serving(http_answer(400)) as address:
        assert cause_at(address, authority)[0] == "no-tls"


def test_a_server_that_wants_tls_is_told(authority):
    with serving(NOT_FOUND, authority.context()) as address:
        assert cause_at(address)[0] == "wants-tls"


def test_a_certificate_of_another_authority_is_told_with_its_name(authority, tmp_path):
    other = Authority(tmp_path, name="somebody else")
    with serving(NOT_FOUND, other.context()) as address:
        cause, sentence = cause_at(address, authority)
    assert cause == "certificate-unknown"
    assert "somebody else" in sentence
    assert str(authority.path) in sentence


def test_a_certificate_for_another_name_is_told_with_that_name(authority):
    with serving(NOT_FOUND, authority.context("fl.example.org")) as address:
        cause, sentence = cause_at(address, authority)
        assert cause == "certificate-name"
        assert "a certificate for 127.0.0.1 at" in sentence
        assert "got one for fl.example.org" in sentence
        _, port = address.split(":")
        assert cause_at(f"localhost:{port}", authority)[0] == "certificate-name"


def test_a_certificate_that_ended_is_told_with_its_end(authority):
    with serving(NOT_FOUND, authority.context(begins=-10 * DAY, ends=-DAY)) as address:
        cause, sentence = cause_at(address, authority)
    assert cause == "certificate-expired"
    assert "by this computer's clock" in sentence
    assert "got one that ended 20" in sentence


def test_a_certificate_that_is_not_valid_yet_is_told_with_its_begin(authority):
    with serving(NOT_FOUND, authority.context(begins=DAY)) as address:
        cause, sentence = cause_at(address, authority)
    assert cause == "certificate-not-yet-valid"
    assert "got one that begins 20" in sentence


def test_an_authority_whose_own_certificate_ended_is_told_apart(tmp_path):
    old = Authority(tmp_path, begins=-10 * DAY, ends=-DAY)
    with serving(NOT_FOUND, old.context(begins=-10 * DAY)) as address:
        cause, sentence = cause_at(address, old)
    assert cause == "certificate-expired"
    assert "one whose authority's ended" in sentence


@pytest.mark.parametrize(
    "answer",
    [NOT_FOUND, http_answer(200, b"<html>"), http_answer(400, b'{"code": 404, "detail": "no"}'), b"SSH-2.0-x\r\n", b""],
    ids=["404", "page", "other-code", "ssh", "nothing"],
)
def test_a_server_of_another_kind_is_told(authority, answer):
    with serving(answer, authority.context()) as address:
        assert cause_at(address, authority)[0] == "not-a-superlink"


def test_a_proxy_with_nothing_behind_it_is_told(authority):
    with serving(http_answer(503), authority.context()) as address:
        cause, sentence = cause_at(address, authority)
    assert cause == "unreachable"
    assert "HTTP 503" in sentence


def test_a_401_that_is_not_the_clocks_is_not_called_the_clock(authority):
    for date, cause in ((None, "not-a-superlink"), (0, "not-a-superlink"), (-60, "clock"), (7200, "clock")):
        dated = {} if date is None else {"date": formatdate(time.time() + date, usegmt=True)}
        with serving(http_answer(401, **dated), authority.context()) as address:
            assert cause_at(address, authority)[0] == cause


@pytest.mark.parametrize("date", ["yesterday", "Mon, 99 Nov 99999 99:99:99 GMT", "1 2 3 4 5 6 7 8", ""])
def test_a_date_that_is_none_is_no_date(authority, date):
    with serving(http_answer(401, date=date), authority.context()) as address:
        assert cause_at(address, authority)[0] == "not-a-superlink"


@pytest.mark.long
def test_a_server_that_says_a_byte_now_and_then_holds_no_thread(authority):
    slow = [b"HTTP/1.1 200 OK\r\n", *([b"x"] * 100)]
    with serving(slow, authority.context()) as address:
        assert diagnose(Connection(address, authority.path), 0.3).cause == "timed-out"
        until = time.monotonic() + 3
        while any(thread.name == "murmurfl-diagnosis" for thread in threading.enumerate()):
            assert time.monotonic() < until
            time.sleep(0.02)


@pytest.mark.long
def test_a_handshake_that_comes_a_byte_now_and_then_ends_in_time():
    record = bytes([22, 3, 3, 64, 0])  # of a handshake, and long
    with serving([record, *([b"x"] * 100)]) as address:
        host, port = address.split(":")
        began = time.monotonic()
        assert presented_by(host, int(port), 0.3) is None
        assert time.monotonic() - began < 5


def test_a_proxy_is_named_without_its_password(authority, monkeypatch):
    monkeypatch.setenv("https_proxy", f"http://anna:secret@127.0.0.1:{free_port()}")
    monkeypatch.setenv("no_proxy", "")
    cause, sentence = cause_at("fl.example.org:8000", authority)
    assert cause == "refused"
    assert "through the proxy 127.0.0.1:" in sentence
    assert "secret" not in sentence


def test_keys_and_certificates_that_cannot_be_used_are_told(authority, tmp_path):
    other = tmp_path / "rsa"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    locked = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "a long phrase", "-f", str(locked)], check=True)
    for path in (other, locked, authority.path):
        assert diagnose(Connection("127.0.0.1:1", authority.path, path)).cause == "key-unusable"
    assert diagnose(Connection("127.0.0.1:1", other)).cause == "certificate-unknown"


def test_what_a_server_puts_into_its_certificate_cannot_write_to_a_terminal(authority, tmp_path):
    hostile = Authority(tmp_path, name="\x1b[2J\n" + 50 * "x")
    with serving(NOT_FOUND, hostile.context()) as address:
        _, sentence = cause_at(address, authority)  # which is printable
    assert "(CN= [2J" in sentence
    assert printable(300 * "y\n") == 40 * "y "


def test_no_thread_and_no_session_is_left_of_a_diagnosis(authority):
    before = threading.active_count()
    with serving(NOT_FOUND, authority.context()) as address:
        cause_at(address, authority)
    assert threading.active_count() <= before


def test_an_unknown_cause_is_refused():
    assert len(set(CAUSES)) == len(CAUSES)
    with raises(ConfigurationError, "unknown-name", "cause", match="reached"):
        Diagnosis("bad weather", "It rains.")


def test_a_node_key_of_ours_is_one_of_flowers(tmp_path, authority):
    make_node_key(tmp_path / "key")
    found = diagnose(Connection(f"127.0.0.1:{free_port()}", authority.path, tmp_path / "key"))
    assert found.cause == "refused"


def test_every_cause_has_a_row_that_says_what_to_do():
    page = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
    section = page.partition("## When the SuperLink is not reached")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`([a-z-]+)`", " ".join(rows))) == set(CAUSES) - {"reached"}


@pytest.mark.parametrize(("answer", "takes"), [(200, True), (401, False), (403, False), (404, False), (None, False)])
def test_a_server_takes_commands_where_it_lists_its_runs_for_anybody(answer, takes):
    """None hangs up, as a proxy may: the SuperLink behind it was reached all the same."""

    def answered(request):
        assert request.url.path == "/v1/control/list-runs"
        if answer is None:
            raise httpx.RemoteProtocolError("hung up", request=request)
        return httpx.Response(answer)

    client = httpx.Client(transport=httpx.MockTransport(answered))
    assert FleetApi(client, "https://fl.example.org:8000", passing_key()).takes_commands() is takes


class Bench:
    """A clock that a test moves, and a diagnosis that a test decides."""

    def __init__(self, caplog):
        caplog.set_level(logging.WARNING)
        self.caplog, self.now, self.cause, self.asked, self.entries = caplog, 100.0, "refused", [], []
        self.journal = Journal(clock=lambda: self.now)
        self.journal.listen(self.entries.append)
        connection = Connection("127.0.0.1:8000", insecure=True)
        self.made = Reconnecting(connection, self.journal, trying=self._trying, clock=lambda: self.now)

    def _trying(self, connection, *, refused=False):
        self.asked.append(refused)
        cause = "session-open" if refused and self.cause == "reached" else self.cause
        return Diagnosis(cause, f"Expected a SuperLink, got {cause}.")

    def attempt(self, seconds=2.0, *contact):
        self.made.starts()
        for kind in contact:
            self.journal.note(kind, superlink="127.0.0.1:8000")
        self.now += seconds
        return self.made.ended()

    def said(self):
        return [record.getMessage() for record in self.caplog.records]


@pytest.fixture
def bench(caplog):
    return Bench(caplog)


def test_pauses_double_to_fifteen_seconds_and_reset_after_a_minute(bench):
    assert [bench.attempt() for _ in range(6)] == [1, 2, 4, 8, 15, 15]
    assert bench.attempt(61.0, "connected") == 1
    assert bench.attempt() == 2


def test_each_end_is_noted_with_its_cause_and_the_pause(bench):
    bench.attempt()
    kinds = [(entry.kind, dict(entry.facts)) for entry in bench.entries]
    there = {"superlink": "127.0.0.1:8000"}
    assert kinds == [("connecting", there), ("disconnected", {**there, "cause": "refused", "retry_s": 1.0})]


def test_the_same_cause_is_said_once_an_hour_and_another_one_at_once(bench):
    for _ in range(5):
        bench.attempt()
    assert bench.said() == ["Expected a SuperLink, got refused. (refused; tried again in 1 s.)"]
    bench.cause = "clock"
    bench.attempt()
    assert bench.said()[1:] == ["Expected a SuperLink, got clock. (clock; tried again in 15 s.)"]
    bench.now += 3600
    bench.attempt()
    assert len(bench.said()) == 3


def test_an_unexplained_rejection_means_an_open_session(bench):
    bench.cause = "reached"
    bench.attempt(2.0, "turned-away")
    bench.attempt(2.0, "connected")
    assert [entry.facts["cause"] for entry in bench.entries if entry.kind == "disconnected"] == [
        "session-open",
        "ended",
    ]
    assert bench.asked == [True, False]
    assert {"session-open", "ended"} <= set(CAUSES)


def test_what_supernodes_try_again_by_themselves_is_looked_into_and_said(bench):
    bench.made.starts()
    bench.journal.note("disconnected", superlink="127.0.0.1:8000", cause="refused")
    for thread in threading.enumerate():
        if thread.name == "murmurfl-reconnecting":
            thread.join(5)
    assert bench.said() == ["Expected a SuperLink, got refused. (refused; tried again at least every 20 s.)"]
