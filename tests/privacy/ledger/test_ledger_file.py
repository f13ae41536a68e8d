"""A ledger of another format, or one whose number was edited, is refused and left alone, whatever opens it.

What is large stays in the ledger's file until it is asked for, and nothing else changes by that.
What a high-water mark says of the budget: the same as its ledger.
"""

import math
import shutil
import sqlite3
import tracemalloc
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.privacy import (
    Account,
    LedgerError,
    MemoryLedger,
    SimulatedKeys,
    SQLiteLedger,
    StreamRecord,
    accept_rollback,
    new_mark,
    read_ledger,
    rotate_key,
    row_bytes,
    set_local_budget,
)
from murmurfl.privacy.accounting.loss import Loss
from murmurfl.privacy.ledger import ledger_file as stored
from murmurfl.privacy.ledger import sqlite as ledger_page
from murmurfl.privacy.ledger.ledger_file import LEDGER_MARK, LedgerState, SessionState, budget_left
from murmurfl.privacy.ledger.ledger_history import read_history

from tests.harness.errors import raises
from tests.privacy.ledger.nodes import client, contribution, folder, run

pytestmark = pytest.mark.usefixtures("quick_disk")

OTHERS = (0, 1, 2, 5, 2**31 - 1)
READERS = (
    SQLiteLedger,
    read_ledger,
    read_history,
    accept_rollback,
    new_mark,
    lambda path: set_local_budget(path, 5.0),
    lambda path: rotate_key(path, row_bytes(range(200)), 200),
    lambda path: SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5),
)
# What a ledger had not yet when its format had another number.
EARLIER = {
    2: ("ALTER TABLE ledger DROP COLUMN budget_local_mu", "ALTER TABLE reserved DROP COLUMN local"),
    1: (
        "ALTER TABLE ledger DROP COLUMN budget_local_mu",
        "ALTER TABLE reserved DROP COLUMN local",
        "ALTER TABLE state DROP COLUMN data",
    ),
}


def changed(path, *statements):
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def number(path, version):
    """Write another number of the format into the file, and nothing else."""
    with path.open("r+b") as file:
        file.seek(60)
        file.write(version.to_bytes(4))


def refusals(path, left=folder):
    """What everything that opens a ledger says to this one; nothing in its folder may change."""
    before, said = left(path), []
    for reader in READERS:
        with pytest.raises(LedgerError) as refused:
            reader(path)
        said.append(str(refused.value))
        assert left(path) == before
    return said[:-1]  # a new one is refused for the file that is there


@pytest.mark.parametrize("version", OTHERS)
def test_a_ledger_of_another_format_is_refused_with_the_two_ways_out(path, version):
    run(path, 3)
    number(path, version)
    for said in refusals(path):
        assert f"Expected a ledger of format 3 or 4 at {path}, got one of format {version}" in said
        assert "Go on with the version of murmurfl that wrote it" in said
        assert "data that were never used before" in said
        assert "ledger create" not in said


@pytest.mark.parametrize("version", OTHERS)
def test_crash_log_of_an_unknown_format_is_left_alone(path, version, tmp_path):
    """SQLite would write it into the file, for whoever opens that."""
    run(path, 1)
    (tmp_path / "copy").mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("SELECT * FROM state").fetchone()  # the log stays while somebody reads
        run(path, 1, "t")
        for file in path.parent.iterdir():
            if not file.name.endswith("-shm"):
                shutil.copy(file, tmp_path / "copy")
    copy = tmp_path / "copy" / path.name
    assert copy.with_name(f"{copy.name}-wal").stat().st_size
    number(copy, version)
    refusals(copy)


@pytest.mark.parametrize("version", EARLIER)
@pytest.mark.parametrize("edited", [3, 4])
@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_an_earlier_layout_under_this_formats_number_is_refused(path, version, edited, journal):
    run(path, 3)
    changed(path, *EARLIER[version], f"PRAGMA journal_mode = {journal}", f"PRAGMA user_version = {edited}")
    assert all("damaged or no ledger" in said for said in refusals(path))


def test_a_ledger_under_the_number_of_one_whose_key_was_exchanged_is_refused(path):
    run(path, 3)
    number(path, 4)
    assert all("damaged or no ledger" in said for said in refusals(path))


def test_a_ledger_with_an_exchanged_key_is_refused(path):
    run(path, 3)
    rotate_key(path, row_bytes(range(200)), 200)
    assert read_ledger(path).mark_problem == ""
    number(path, 3)
    assert all("do not match their seal" in said for said in refusals(path)[:2])


@pytest.mark.parametrize("kept", [0, 50, 100, 4096, 8192, -4096, -5000])
def test_a_truncated_ledger_is_refused(path, kept):
    run(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    # SQLite leaves an empty log beside what it cannot read.
    refusals(path, lambda path: [file.read_bytes() for file in (path, path.with_name("ledger.db.mark"))])


@pytest.mark.parametrize("version", [0, 2, '"1"', "null"])
def test_a_mark_of_another_format_is_refused_and_says_nothing_of_making_another(path, version):
    run(path, 3)
    mark = path.with_name("ledger.db.mark")
    text = mark.read_text()
    mark.write_text(text.replace('"murmurfl-ledger-mark": 1', f'"murmurfl-ledger-mark": {version}'))
    before = folder(path)
    assert mark.read_text() != text
    readers = (SQLiteLedger, accept_rollback, lambda path: set_local_budget(path, 5.0), lambda _: budget_left(mark))
    for reader in readers:
        with raises(
            LedgerError, "other-format", match=r"high-water mark of format 1 at .* data that were never used"
        ) as refused:
            reader(path)
        assert "new-mark" not in str(refused.value)
    assert "format 1" in read_ledger(path).mark_problem
    with raises(LedgerError, "exists"):
        new_mark(path)
    assert folder(path) == before
    path.unlink()
    with raises(LedgerError, "other-format", match="high-water mark of format 1"):
        SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5)
    assert {name: content for name, content in before.items() if name != path.name} == folder(path)


def test_a_copy_without_a_log_gets_one_again_once_it_is_believed(path):
    run(path, 3)
    changed(path, "PRAGMA journal_mode = DELETE")
    assert path.read_bytes()[18:20] == b"\1\1"
    assert SQLiteLedger(path).budget_mu == 2.0
    assert path.read_bytes()[18:20] == b"\2\2"
    changed(path, "PRAGMA journal_mode = DELETE", "UPDATE state SET samples_used = 0")
    refusals(path)


def test_ledgers_with_first_and_rotated_keys_continue(path):
    assert run(path, 2)[-1].release == 2
    rotate_key(path, row_bytes(range(200)), 200)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (4,)
    assert [release.release for release in run(path, 2, "t")] == [1, 2]


LARGE = 1 << 18  # values: 2 MiB each
ACCOUNT = Account(1, {"s": 0.5})


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


def test_unchanged_arrays_stay_in_their_rows(path, read):
    commit(path, {1: counts(1), 2: counts(2), 3: counts(3)})
    before = rows(path)
    with SQLiteLedger(path).exclusive() as page:
        stream = page.stream("s")
        kept = stream.pending[2]
        changed = {1: stream.pending[1] - kept, 2: kept, 4: counts(4)}
        page.commit("s", replace(stream, release=stream.release + 1, pending=changed), ACCOUNT)
    after = rows(path)
    assert set(after) == {("pending", 1), ("pending", 2), ("pending", 4)}
    assert after["pending", 2] == before["pending", 2]
    assert after["pending", 1][1][-1] == changed[1].tobytes()
    assert after["pending", 4][1][-1] == counts(4).tobytes()
    del read[:]
    with SQLiteLedger(path).exclusive() as page:
        stream = page.stream("s")
        page.commit("s", replace(stream, release=stream.release + 1), ACCOUNT)
        assert read == [], "hashed in pieces, and neither read nor written"
        assert page.stream("s").release == 5
    assert rows(path) == after


def test_a_ledger_that_kept_a_row_that_was_changed_would_be_found_out(path, monkeypatch):
    commit(path, {1: counts(1)})
    monkeypatch.setattr(stored.StoredArray, "is_read_as", lambda self, values: True)
    with SQLiteLedger(path).exclusive() as page:
        stream = page.stream("s")
        page.commit("s", replace(stream, release=stream.release + 1, pending={1: stream.pending[1] + 1}), ACCOUNT)
    with SQLiteLedger(path).exclusive() as page, raises(LedgerError, "damaged", match="does not match its digest"):
        page.stream("s")


def test_flipped_bit_in_a_large_array_is_refused_unread(path):
    commit(path, {1: counts(1), 2: counts(2)})
    with closing(sqlite3.connect(path)) as connection:
        (rowid,) = connection.execute("SELECT rowid FROM arrays WHERE number = 2").fetchone()
        with connection.blobopen("arrays", "content", rowid) as blob:
            blob.seek(1_500_000)
            (byte,) = blob.read(1)
            blob.seek(1_500_000)
            blob.write(bytes([byte ^ 16]))
        connection.commit()
    with SQLiteLedger(path).exclusive() as page, raises(LedgerError, "damaged", match="does not match its digest"):
        page.stream("s")


def test_asking_for_an_array_too_late_is_an_error(path):
    commit(path, {1: counts(1)})
    with SQLiteLedger(path).exclusive() as page:
        stream = page.stream("s")
    with raises(LedgerError, "wrong-order"):
        stream.pending[1]


@pytest.mark.parametrize("mechanism", ["cancelling", "blt", "tree"])
def test_releases_and_ledger_are_the_same_wherever_the_arrays_are(path, tmp_path, monkeypatch, mechanism):
    """A new process for every release, with losses and acknowledgements of earlier releases."""
    other = tmp_path / "other.db"
    SQLiteLedger.create(other, budget_mu=2.0, delta=1e-5)
    keys, memory = SimulatedKeys(1, "m"), client(MemoryLedger(), SimulatedKeys(1, "m"), mechanism=mechanism)
    for k, ack in enumerate([0, 1, 1, 1, 3, 3, 3, 3, 7, 9], start=1):
        expected = memory.release("s", ack, contribution)
        for file, limit in ((path, 1), (other, 1 << 20)):
            monkeypatch.setattr(ledger_page, "LARGE_BYTES", limit)
            release = client(SQLiteLedger(file), keys, mechanism=mechanism).release("s", ack, contribution)
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


def test_a_new_ledger_has_all_of_its_budget(tmp_path):
    SQLiteLedger.create(tmp_path / "l", budget_mu=2.0, delta=1e-5, budget_local_mu=3.0)
    left, summary = budget_left(tmp_path / "l.mark"), read_ledger(tmp_path / "l")
    assert (left.left, left.sessions) == (summary.left, 0) == (Loss.of(2, 3), 0)


@pytest.mark.parametrize(
    ("sessions", "mu", "local"),
    [
        ({"a": SessionState(1.2, 3), "b": SessionState(1.6, 1, local=2.0)}, 0.0, math.sqrt(9 - 1.44 - 4)),
        ({"a": SessionState(-1.2, 3)}, 1.6, math.sqrt(9 - 1.44)),  # a trusted server's word
        ({"a": SessionState(math.inf, 3)}, 0.0, 0.0),
        ({"a": SessionState(5.0, 3)}, 0.0, 0.0),
    ],
)
def test_what_is_left_is_what_no_session_has_reserved(tmp_path, sessions, mu, local):
    state = LedgerState("l", 2.0, 1e-5, 1, 8, sessions, budget_local_mu=3.0)
    LEDGER_MARK.save(tmp_path / "mark", state)
    left = budget_left(tmp_path / "mark")
    assert left.left.mu == pytest.approx(mu, abs=1e-7)
    assert left.left.worst_case.mu == pytest.approx(local)
    assert left.sessions == len(sessions)


def test_a_mark_that_is_not_there_or_damaged_says_nothing(tmp_path):
    with pytest.raises(LedgerError):
        budget_left(tmp_path / "mark")
    (tmp_path / "mark").write_text("{}")
    (tmp_path / "mark").chmod(0o600)
    with pytest.raises(LedgerError):
        budget_left(tmp_path / "mark")
