"""What is large stays in the ledger's file until it is asked for, and nothing else changes by that."""

import sqlite3
import tracemalloc
from contextlib import closing

import numpy as np
import pytest
from murmurfl.privacy import Account, LedgerError, MemoryLedger, SimulatedKeys, SQLiteLedger, StreamRecord
from murmurfl.privacy.ledger import ledger_file as stored
from murmurfl.privacy.ledger import sqlite as ledger_page

from tests.privacy.ledger.nodes import contribution, machine

LARGE = 1 << 18  # values: 2 MiB each
ACCOUNT = Account(1, {"s": 0.5})

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture
def read(monkeypatch):
    """How often an array was read from the file, by its place."""
    asked, values = [], stored.StoredArray._values

    def counted(self):
        asked.append(self.place)
        return values(self)

    monkeypatch.setattr(stored.StoredArray, "_values", counted)
    return asked


@pytest.fixture
def all_large(monkeypatch):
    monkeypatch.setattr(ledger_page, "LARGE_BYTES", 1)


def counts(release, size=LARGE):
    return np.random.Generator(np.random.Philox(key=release)).integers(-(2**60), 2**60, size)


def commit(path, pending, release=3, state=()):
    with SQLiteLedger(path).exclusive() as page:
        page.commit("s", StreamRecord("f" * 64, release, 0, bytes(16), pending, state), ACCOUNT)


def rows(path):
    """Row number and content of what a ledger's file has, by kind and number."""
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT kind, number, rowid, dtype, shape, content FROM arrays").fetchall()
    return {(kind, number): (rowid, rest) for kind, number, rowid, *rest in found}


def test_large_arrays_are_loaded_exactly_on_demand(path, read):
    pending, state = {1: counts(1), 2: counts(2), 3: counts(3, 5)}, (counts(4).astype(np.float32), np.ones(3))
    commit(path, pending, state=state)
    with SQLiteLedger(path).exclusive() as page:
        stream = page.stream("s")
        assert list(stream.pending) == [1, 2, 3]
        assert 2 in stream.pending
        assert 7 not in stream.pending
        assert len(stream.noise_state) == 2
        assert read == []
        assert stream.pending[2].tobytes() == pending[2].tobytes()
        assert not stream.pending[2].flags.writeable
        assert read == [("s", "pending", 2)] * 2, "nobody kept it in between"
        assert [values.tobytes() for values in stream.noise_state] == [values.tobytes() for values in state]
        assert stream.noise_state[0].dtype == np.float32


def test_what_is_not_changed_stays_in_its_row_and_everything_else_is_written(path, read):
    commit(path, {1: counts(1), 2: counts(2), 3: counts(3)})
    before = rows(path)
    with SQLiteLedger(path).exclusive() as page:
        stream = page.stream("s")
        kept = stream.pending[2]
        changed = {1: stream.pending[1] - kept, 2: kept, 4: counts(4)}
        page.commit("s", stream.released(bytes(16), changed, ()), ACCOUNT)
    after = rows(path)
    assert set(after) == {("pending", 1), ("pending", 2), ("pending", 4)}
    assert after["pending", 2] == before["pending", 2]
    assert after["pending", 1][1][-1] == changed[1].tobytes()
    assert after["pending", 4][1][-1] == counts(4).tobytes()
    del read[:]
    with SQLiteLedger(path).exclusive() as page:
        stream = page.stream("s")
        page.commit("s", stream.released(bytes(16), stream.pending, ()), ACCOUNT)
        assert read == [], "hashed in pieces, and neither read nor written"
        assert page.stream("s").release == 5
    assert rows(path) == after


def test_a_ledger_that_kept_a_row_that_was_changed_would_be_found_out(path, monkeypatch):
    commit(path, {1: counts(1)})
    monkeypatch.setattr(stored.StoredArray, "is_read_as", lambda self, values: True)
    with SQLiteLedger(path).exclusive() as page:
        stream = page.stream("s")
        page.commit("s", stream.released(bytes(16), {1: stream.pending[1] + 1}, ()), ACCOUNT)
    with SQLiteLedger(path).exclusive() as page, pytest.raises(LedgerError, match="does not match its digest"):
        page.stream("s")


def test_a_flipped_bit_in_a_large_array_is_refused_before_it_is_asked_for(path):
    commit(path, {1: counts(1), 2: counts(2)})
    with closing(sqlite3.connect(path)) as connection:
        (rowid,) = connection.execute("SELECT rowid FROM arrays WHERE number = 2").fetchone()
        with connection.blobopen("arrays", "content", rowid) as blob:
            blob.seek(1_500_000)
            (byte,) = blob.read(1)
            blob.seek(1_500_000)
            blob.write(bytes([byte ^ 16]))
        connection.commit()
    with SQLiteLedger(path).exclusive() as page, pytest.raises(LedgerError, match="does not match its digest"):
        page.stream("s")


def test_asking_for_an_array_too_late_is_an_error(path):
    commit(path, {1: counts(1)})
    with SQLiteLedger(path).exclusive() as page:
        stream = page.stream("s")
    with pytest.raises(LedgerError, match="in the transaction in which its ledger gave it"):
        stream.pending[1]


@pytest.mark.parametrize("mechanism", ["cancelling", "blt", "tree"])
def test_releases_and_ledger_are_the_same_wherever_the_arrays_are(path, tmp_path, monkeypatch, mechanism):
    """A new process for every release, with losses and acknowledgements of earlier releases."""
    other = tmp_path / "other.db"
    SQLiteLedger.create(other, budget_mu=2.0, delta=1e-5)
    keys, memory = SimulatedKeys(1, "m"), machine(MemoryLedger(), SimulatedKeys(1, "m"), mechanism=mechanism)
    for k, ack in enumerate([0, 1, 1, 1, 3, 3, 3, 3, 7, 9], start=1):
        expected = memory.release("s", ack, contribution)
        for file, limit in ((path, 1), (other, 1 << 20)):
            monkeypatch.setattr(ledger_page, "LARGE_BYTES", limit)
            release = machine(SQLiteLedger(file), keys, mechanism=mechanism).release("s", ack, contribution)
            assert (release.release, release.counts.tobytes()) == (k, expected.counts.tobytes())
        ours, theirs = rows(path), rows(other)
        assert {place: rest for place, (_, rest) in ours.items()} == {
            place: rest for place, (_, rest) in theirs.items()
        }


@pytest.mark.usefixtures("all_large")
def test_a_session_that_is_closed_lets_its_arrays_go(path):
    commit(path, {1: counts(1), 2: counts(2)})
    with SQLiteLedger(path).exclusive() as page:
        page.commit("s", StreamRecord("closed", 3), ACCOUNT)
    assert rows(path) == {}


def test_looking_at_a_stream_takes_no_memory_for_its_arrays(path):
    commit(path, {1: counts(1, 4 * LARGE), 2: counts(2, 4 * LARGE)})
    tracemalloc.start()
    try:
        with SQLiteLedger(path).exclusive() as page:
            tracemalloc.reset_peak()
            stream = page.stream("s")
            looked = tracemalloc.get_traced_memory()[1]
            held = [stream.pending[release] for release in stream.pending]
            read = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = held[0].nbytes
    assert looked < 0.5 * size
    assert 2.0 * size <= read < 2.5 * size
