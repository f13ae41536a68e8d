"""Why a SuperNode ended is noted at every end and said once, and the next try comes later each time."""

import logging
import threading

import pytest
from murmurfl.app.nodes.connection import Connection
from murmurfl.app.nodes.diagnosis import CAUSES, Diagnosis, Reconnecting
from murmurfl.app.nodes.watching.journal import Journal


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
