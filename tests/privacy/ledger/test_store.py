"""A durable store compared with a model of what its files have been through, and files that earlier versions wrote.

Ledger and opening record go through the same operations in any order: commits that succeed, that are cut off before
they are made or before their mark is moved, backups of either file that are copied back, another store's files, files
that were cut short.
"""

import sqlite3
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from murmurfl.privacy import Account, HelperKey, LedgerError, SQLiteLedger, SQLiteOpeningRecord, StreamRecord
from murmurfl.privacy.ledger.store import StoreTransaction
from murmurfl.privacy.sums.opening_rule import LastOpened, OpenedSet, SessionTerms

pytestmark = pytest.mark.usefixtures("quick_disk")

CARD = HelperKey.simulated(3, "h").entry("h")
TERMS = SessionTerms("cumulative", 5, 0.25, "roster", ("h",), "terms")


class Ledgers:
    """A ledger whose commits are releases, each known by its nonce."""

    @staticmethod
    def create(path):
        return SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5)

    open = SQLiteLedger

    @staticmethod
    def commit(transaction, number, token):
        nonce = token.to_bytes(16)
        transaction.commit("s", StreamRecord("plan", number, 0, nonce), Account(number, {"s": 1.0}))

    @staticmethod
    def read(transaction):
        stream = transaction.stream("s")
        return (0, None) if stream is None else (stream.release, int.from_bytes(stream.nonces))

    @staticmethod
    def is_believed(file, mark):
        """Whether a store with these commits goes on from a mark with those: seals are compared at equal numbers."""
        return len(mark) < len(file) or mark == file


class Records:
    """An opening record whose commits are opened sets, each known by its client's release."""

    @staticmethod
    def create(path):
        return SQLiteOpeningRecord.create(path, helper=CARD)

    open = SQLiteOpeningRecord

    @staticmethod
    def commit(transaction, number, token):
        last = {"m": LastOpened(number, f"{token}")}
        transaction.commit(OpenedSet("s", f"set-{number}", f"{token:064d}", TERMS, last))

    @staticmethod
    def read(transaction):
        last = transaction.last_opened("s", ["m"]).get("m")
        return (0, None) if last is None else (last.release, int(last.release_id))

    @staticmethod
    def is_believed(file, mark):
        """Whether a store with these commits goes on from a mark with those: its log has the mark's last line."""
        return file[: len(mark)] == mark


class CrashError(Exception):
    """Ends a process that had more to do."""


class Life(RuleBasedStateMachine):
    """The life of one store on a disk; ``file`` and ``mark`` are the commits that either knows of."""

    kind: type

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "store.db"
        self.mark_path = self.path.with_name("store.db.mark")
        self.file, self.mark, self.tokens = (), (), 0
        self.saved = []

    def teardown(self):
        self.folder.cleanup()

    @initialize()
    def make(self):
        self.running = self.kind.create(self.path)
        self.save()

    @property
    def is_believed(self):
        return self.kind.is_believed(self.file, self.mark)

    def content(self):
        """What both files hold, with SQLite's log folded into the first, and no log left."""
        if self.path.read_bytes()[:6] == b"SQLite":
            with closing(sqlite3.connect(self.path)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for name in ("store.db-wal", "store.db-shm"):
            self.path.with_name(name).unlink(missing_ok=True)
        return self.path.read_bytes(), self.mark_path.read_bytes()

    def attempt(self, store, *, dies_before=False, dies_before_mark=False):
        """One transaction with a commit; the model moves on by what it has to have done."""
        self.tokens += 1
        with store().exclusive() as transaction:
            assert self.is_believed, "a store that was copied back went on"
            self.mark = self.file
            assert self.kind.read(transaction) == (len(self.file), self.file[-1] if self.file else None)
            if dies_before:
                raise CrashError
            if not dies_before_mark:
                self.kind.commit(transaction, len(self.file) + 1, self.tokens)
                self.file = self.mark = (*self.file, self.tokens)
                return
            with mock.patch.object(StoreTransaction, "move_mark", side_effect=CrashError):
                self.file = (*self.file, self.tokens)
                self.kind.commit(transaction, len(self.file), self.tokens)

    def goes_on(self, store, **dies):
        if self.is_believed:
            if not dies:
                self.attempt(store)
                return
            with pytest.raises(CrashError):
                self.attempt(store, **dies)
            return
        before = self.content()
        with pytest.raises(LedgerError, match="copied back"):
            self.attempt(store, **dies)
        assert before == self.content()

    @rule(restarted=st.booleans())
    def commit(self, restarted):
        self.goes_on((lambda: self.kind.open(self.path)) if restarted else (lambda: self.running))

    @rule()
    def die_before_the_commit(self):
        self.goes_on(lambda: self.running, dies_before=True)

    @rule()
    def die_before_the_mark(self):
        self.goes_on(lambda: self.running, dies_before_mark=True)

    @rule()
    def save(self):
        """Make a backup of both files."""
        content, mark = self.content()
        self.saved.append((content, self.file, mark, self.mark))

    @rule(data=st.data(), file=st.booleans(), mark=st.booleans())
    def restore(self, data, file, mark):
        content, commits, mark_content, known = data.draw(st.sampled_from(self.saved))
        self.content()
        if file:
            self.path.write_bytes(content)
            self.file = commits
        if mark:
            self.mark_path.write_bytes(mark_content)
            self.mark = known

    @precondition(lambda self: self.is_believed)
    @rule()
    def read(self):
        with self.kind.open(self.path).exclusive() as transaction:
            assert self.kind.read(transaction)[0] == len(self.file)
        self.mark = self.file

    @rule(what=st.sampled_from(["another store", "another's mark", "cut short", "no mark", "another kind", "open"]))
    def spoil(self, what):
        """Files that are another's, damaged or missing are refused and left alone."""
        kept = self.content()
        other = self.path.with_name("other.db")
        made = (Records if self.kind is Ledgers and what == "another kind" else self.kind).create(other)
        if what == "another kind" and self.kind is Records:
            Path(made.path).unlink()
            other.with_name("other.db.mark").unlink()
            Ledgers.create(other)
        if what in ("another store", "another kind"):
            with closing(sqlite3.connect(other)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self.path.write_bytes(other.read_bytes())
        elif what == "another's mark":
            self.mark_path.write_bytes(other.with_name("other.db.mark").read_bytes())
        elif what == "cut short":
            self.path.write_bytes(kept[0][:-4096])
        elif what == "no mark":
            self.mark_path.unlink()
        else:
            self.path.chmod(0o640)
        spoiled = self.path.read_bytes()
        with pytest.raises(LedgerError):
            self.kind.open(self.path)
        if what != "cut short":  # a page that a transaction needs not read may be missing until one does
            with pytest.raises(LedgerError), self.running.exclusive():
                pass
        assert self.path.read_bytes() == spoiled
        for name in ("store.db-wal", "store.db-shm"):
            self.path.with_name(name).unlink(missing_ok=True)
        for file in self.path.parent.glob("other.db*"):
            file.unlink()
        self.path.chmod(0o600)
        self.path.write_bytes(kept[0])
        self.mark_path.write_bytes(kept[1])
        self.mark_path.chmod(0o600)


class LedgerLife(Life):
    kind = Ledgers


class RecordLife(Life):
    kind = Records


TestLedgerLife, TestRecordLife = LedgerLife.TestCase, RecordLife.TestCase
TestLedgerLife.settings = TestRecordLife.settings = settings(max_examples=8, stateful_step_count=25)


KEPT = Path(__file__).with_name("kept")
"""Files that version 86e8abcf wrote: each store as SQL, with its mark."""


def kept(name, folder):
    """Make a store's files again as they were."""
    path = folder / name
    path.touch(mode=0o600)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((KEPT / f"{name}.sql").read_text())
    mark = path.with_name(f"{name}.mark")
    mark.touch(mode=0o600)
    mark.write_bytes((KEPT / f"{name}.mark").read_bytes())
    return path


def dumped(path):
    with closing(sqlite3.connect(path)) as connection:
        return [*connection.iterdump(), connection.execute("PRAGMA user_version").fetchone()]


@pytest.mark.parametrize(("name", "releases", "fingerprint"), [("ledger", 2, "plan"), ("rotated", 1, "closed")])
def test_ledgers_of_earlier_versions_open_unchanged_and_go_on(tmp_path, name, releases, fingerprint):
    path = kept(name, tmp_path)
    before, mark = dumped(path), path.with_name(f"{name}.mark").read_bytes()
    with SQLiteLedger(path).exclusive() as transaction:
        stream, account = transaction.stream("s"), transaction.account()
    assert (stream.release, stream.fingerprint) == (releases, fingerprint)
    assert account.reserved == {"s": 1.0}
    assert (dumped(path), path.with_name(f"{name}.mark").read_bytes()) == (before, mark)
    with SQLiteLedger(path).exclusive() as transaction:
        transaction.commit("t", StreamRecord("plan", 1, 0, b"n" * 16), replace(account, reserved={"s": 1.0, "t": 0.5}))
    with SQLiteLedger(path).exclusive() as transaction:
        assert transaction.account().reserved == {"s": 1.0, "t": 0.5}


@pytest.mark.parametrize(("name", "lines"), [("record", 1), ("promising", 3)])
def test_records_of_earlier_versions_open_unchanged_and_go_on(tmp_path, name, lines):
    path = kept(name, tmp_path)
    before, mark = dumped(path), path.with_name(f"{name}.mark").read_bytes()
    record = SQLiteOpeningRecord(path)
    record.check_helper(CARD)
    with record.exclusive() as transaction:
        assert transaction.last_opened("s", ["m"]) == {"m": LastOpened(lines, str(lines))}
        assert bool(transaction.voids("s", "set-3")) == (name == "promising")
    assert (dumped(path), path.with_name(f"{name}.mark").read_bytes()) == (before, mark)
    with record.exclusive() as transaction:
        Records.commit(transaction, lines + 1, 9)
    assert SQLiteOpeningRecord(path).sets == 2
