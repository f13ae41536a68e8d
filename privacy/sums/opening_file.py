"""A real helper's opening record: one SQLite file that outlives crashes and refuses whatever it cannot believe.

One file of mode 600 holds a log of every set the helper opened, promised to open or declared void, and tables made from
it for looking things up. Each line of the log has a link: the digest of the line and of the link before it. So a commit
costs as much as the set it records, and when a record is opened the whole log is gone through and compared with the
tables. A second, small file, the high-water mark, holds the number and the link of the last line: it shows when the
first was copied back from a backup, and belongs on a disk that is not backed up with it. Header, mark, locking and the
order of writing are those of every durable store (:mod:`murmurfl.privacy.ledger.store`). A set that was recorded before
a crash gets its answer when it is asked for again.

Unlike a client's ledger, a record that was copied back cannot be accepted: which releases were opened since is not
known to anybody one could believe.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from .. import protocol
from ..errors import ConfigurationError
from ..ledger.store import MarkFormat, Store, StoreTransaction, mark_path
from .opening_rule import (
    LastOpened,
    OpenedSet,
    OpeningRecord,
    OpeningRecordError,
    OpeningTransaction,
    SessionTerms,
    check_forward,
    key_digest,
)
from .roster import HelperEntry

RECORD_LOST = (
    "If the newest one is lost, this helper's keys are used up: make new ones (`murmurfl roster key`), have a roster "
    "made with them, and begin new sessions. Nothing was opened."
)
"""The way out from a record that cannot be believed."""

ANOTHER_RECORD = (
    "Go on with the version of murmurfl that wrote it, or with new keys of this helper (`murmurfl roster key`), a "
    "roster made with them, and new sessions: with its old keys it would open again what it has forgotten."
)
"""The way out from a record of another format."""


@dataclass(frozen=True)
class OpeningPlace:
    """Progress of a record."""

    record: str
    """The record's own random name."""
    number: int
    """Lines of its log so far."""
    link: str
    """Link of the last of them, in hexadecimal; it depends on all before it."""

    @property
    def name(self) -> str:
        """The record's own random name."""
        return self.record

    @property
    def steps(self) -> int:
        """Lines of its log so far."""
        return self.number

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> OpeningPlace:
        """Read a mark; ValueError if its values are impossible."""
        mark = cls(**document)
        if type(mark.number) is not int or mark.number < 0 or len(bytes.fromhex(mark.link)) != 32:
            raise ValueError("impossible values")
        return mark


OPENING_MARK = MarkFormat[OpeningPlace](
    what="the opening record's high-water mark",
    key="murmurfl-opening-mark",
    done="nothing was opened",
    missing=f"Without it nobody can tell whether the record was copied back. Put the mark back. {RECORD_LOST}",
    damaged=f"Put the mark back. {RECORD_LOST}",
    other_format=ANOTHER_RECORD,
    error=OpeningRecordError,
    to_document=asdict,
    from_document=OpeningPlace.from_document,
)


_FORMAT = 1
_PROMISING = 2
"""The format of a record that has other lines than of opened sets; it is the first in all else."""

_SCHEMA = """
CREATE TABLE record (name TEXT NOT NULL, created REAL NOT NULL, helper TEXT NOT NULL, key BLOB NOT NULL,
    mark TEXT NOT NULL);
-- opening: the name under which the set was opened, or, as no name is, what else became of it and the line's number
CREATE TABLE log (number INTEGER PRIMARY KEY, session TEXT NOT NULL, opening TEXT NOT NULL, time REAL NOT NULL,
    line BLOB NOT NULL, link BLOB NOT NULL, UNIQUE (session, opening));
CREATE TABLE sessions (session TEXT PRIMARY KEY, terms TEXT NOT NULL);
CREATE TABLE clients (session TEXT NOT NULL, client TEXT NOT NULL, release INTEGER NOT NULL,
    release_id TEXT NOT NULL, PRIMARY KEY (session, client)) WITHOUT ROWID;
"""

_LAST_BUT = "SELECT time FROM log WHERE opening NOT GLOB '* *' ORDER BY number DESC LIMIT 1 OFFSET ? - 1"
_BEGUN_LAST_BUT = """
SELECT time FROM log WHERE number =
    (SELECT MIN(number) AS first FROM log WHERE opening NOT GLOB '* *'
    GROUP BY session ORDER BY first DESC LIMIT 1 OFFSET ? - 1)
"""


@dataclass(frozen=True)
class _Identity:
    """The record's name and helper, fixed when it is made."""

    name: str
    helper: str
    key: bytes
    mark: Path

    @property
    def first_link(self) -> bytes:
        return hashlib.sha256(b"murmurfl opening record 1\x00" + self.name.encode() + b"\x00" + self.key).digest()


class _RecordStore(Store[_Identity, OpeningPlace]):
    """The store of an opening record."""

    what = "an opening record"
    user = "helper"
    done = "nothing was opened"
    step = "line"
    forgotten = "what was opened"
    error = OpeningRecordError
    application_id = 0x6D75726F  # "muro"
    formats = (_FORMAT, _PROMISING)
    schema = _SCHEMA
    missing = f"Put it back. {RECORD_LOST} `murmurfl roster key` makes each helper's record with its key."
    other_format = ANOTHER_RECORD
    lost = f"Put the newest file back. {RECORD_LOST}"
    copied_back = f"Put the newest file back. {RECORD_LOST}"
    other_mark = RECORD_LOST
    had_one = f"Put that one back. {RECORD_LOST}"
    marks = OPENING_MARK

    def read_header(self, connection: sqlite3.Connection) -> _Identity:
        name, helper, key, mark = connection.execute("SELECT name, helper, key, mark FROM record").fetchone()
        return _Identity(name, helper, key, mark_path(self.path, mark))

    def read_state(self, connection: sqlite3.Connection, header: _Identity) -> OpeningPlace:
        rows = connection.execute("SELECT number, line, link FROM log ORDER BY number DESC LIMIT 2").fetchall()
        if not rows:
            return OpeningPlace(header.name, 0, header.first_link.hex())
        (number, line, link), before = rows[0], rows[1][2] if len(rows) > 1 else header.first_link
        if link != _next_link(before, line):
            raise self.damaged("a line that does not follow from the one before")
        return OpeningPlace(header.name, number, link.hex())

    def read_whole(self, connection: sqlite3.Connection, header: _Identity) -> OpeningPlace:
        """Refuse a record whose lines do not follow from each other, or whose tables do not follow from its lines."""
        before, terms = header.first_link, dict[str, str]()
        last: dict[str, dict[str, LastOpened]] = {}
        rows = connection.execute("SELECT number, session, opening, line, link FROM log ORDER BY number")
        for expected, (number, session, opening, line, link) in enumerate(rows, start=1):
            opened = OpenedSet.from_bytes(line)
            before = _next_link(before, line)
            if (number, link, session, opening) != (expected, before, opened.session, _column(opened, expected)):
                raise self.damaged(f"a line {number} that does not follow from the one before")
            if opened.kind != protocol.VIEW_LOCKED:
                terms[session] = _terms_text(opened.terms)
            clients = last.setdefault(session, {})
            clients |= opened.moves(clients)
        found_terms = dict(connection.execute("SELECT session, terms FROM sessions"))
        found = {tuple(row[:2]): LastOpened(*row[2:]) for row in connection.execute("SELECT * FROM clients")}
        moved = {(session, name): one for session, clients in last.items() for name, one in clients.items()}
        if (found_terms, found) != (terms, moved):
            raise self.damaged("tables that do not follow from its lines")
        return self.read_state(connection, header)

    def follows(self, connection: sqlite3.Connection, state: OpeningPlace, mark: OpeningPlace) -> bool:
        row = connection.execute("SELECT link FROM log WHERE number = ?", (mark.number,)).fetchone()
        return mark.number == 0 or (row is not None and row[0].hex() == mark.link)


class SQLiteOpeningRecord(OpeningRecord):
    """An existing opening record in a SQLite file; :meth:`create` makes one.

    Parameters
    ----------
    path : path
        The record's file.
    timeout_s : float
        How long a transaction waits for another process or thread that is using the record before it refuses.

    Notes
    -----
    **Formal guarantees.** Transactions exclude each other, a commit is all or nothing, and what was committed is what
    is read next, across processes and losses of power, as far as the disk keeps what it says it has written. A commit
    moves the high-water mark before it returns. A record that is missing is never made anew here, and one that is
    behind its mark, or differs from it, opens nothing. If record and mark were both copied back, or one key is used
    with two records, nothing here can tell.

    Examples
    --------
    >>> import tempfile
    >>> from murmurfl.privacy import HelperKey, Opener, Roster
    >>> key, roster = HelperKey.simulated(1, "left"), Roster.simulated(1, clients=("a", "b"), helpers=("left", "right"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = SQLiteOpeningRecord.create(f"{folder}/opened.sqlite", helper=key.entry("left"))
    ...     record = SQLiteOpeningRecord(f"{folder}/opened.sqlite")  # from now on, whenever the helper starts
    ...     opener = Opener("left", key, roster, record)
    ...     opener.durable, record.sets
    (True, 0)
    """

    durable: ClassVar[bool] = True

    def __init__(self, path: str | Path, *, timeout_s: float = 30.0) -> None:
        self._store = _RecordStore(Path(path).absolute(), timeout_s)
        self._identity = self._store.check()

    @property
    def path(self) -> Path:
        """The record's file."""
        return self._store.path

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        helper: HelperEntry,
        mark: str | Path | None = None,
        timeout_s: float = 30.0,
    ) -> SQLiteOpeningRecord:
        """Make a new record and its high-water mark, for a helper whose keys never opened anything.

        Parameters
        ----------
        path : path
            Where; its folder must exist.
        helper : HelperEntry
            The helper's card: its record serves no other keys.
        mark : path, optional
            Where the high-water mark goes: best on a disk that is not backed up with the record. Default ``path`` with
            ``.mark`` after it.

        Notes
        -----
        **Formal guarantees.** Nothing is ever overwritten, but for a mark under which nothing was opened. That the keys
        are new nobody can check here: an empty record beside keys that were used before forgets what they opened.
        """
        path = Path(path).absolute()
        mark_file = mark_path(path, "" if mark is None else str(Path(mark).absolute()))
        if mark_file == path:
            raise ConfigurationError(
                f"Expected record and mark in files of their own, got {path} for both.", kind="conflict", setting="mark"
            )
        identity = _Identity(secrets.token_hex(16), helper.name, key_digest(helper), mark_file)

        def fill(connection: sqlite3.Connection) -> None:
            place = "" if mark is None else str(mark_file)
            row = (identity.name, time.time(), identity.helper, identity.key, place)
            connection.execute("INSERT INTO record VALUES (?, ?, ?, ?, ?)", row)

        first = OpeningPlace(identity.name, 0, identity.first_link.hex())
        _RecordStore(path, timeout_s).make(identity, first, fill)
        return cls(path, timeout_s=timeout_s)

    def check_helper(self, helper: HelperEntry) -> None:
        if self._identity.key != key_digest(helper):
            raise OpeningRecordError(
                f"Expected the opening record of the keys of helper {helper.name!r}, got that of other keys, of helper "
                f"{self._identity.helper!r}, at {self.path}. Use each helper's own record; new keys need a new one. "
                "Nothing was opened.",
                kind="mismatch",
            )

    @property
    def sets(self) -> int:
        """Number of sets that this helper opened, in all sessions."""
        with self._store.connected() as connection, self._store.errors():
            return connection.execute("SELECT count(*) FROM log WHERE opening NOT GLOB '* *'").fetchone()[0]

    @contextmanager
    def exclusive(self) -> Iterator[OpeningTransaction]:
        with self._store.exclusive(self._identity) as file:
            yield SQLiteOpeningTransaction(file)


class SQLiteOpeningTransaction(OpeningTransaction):
    """The record inside a transaction that has begun; without a commit nothing remains once it is closed."""

    def __init__(self, file: StoreTransaction[_Identity, OpeningPlace]) -> None:
        self._file = file
        self._connection, self._errors = file.connection, file.store.errors

    def set_digest(self, session: str, opening: str) -> str | None:
        with self._errors():
            row = self._connection.execute(
                "SELECT line FROM log WHERE session = ? AND opening = ?", (session, opening)
            ).fetchone()
            return None if row is None else OpenedSet.from_bytes(row[0]).set_digest

    def voids(self, session: str, opening: str) -> frozenset[str]:
        with self._errors():
            rows = self._connection.execute(
                "SELECT line FROM log WHERE session = ? AND opening GLOB ?", (session, f"{protocol.VIEW_VOID} *")
            )
            found = [OpenedSet.from_bytes(line) for (line,) in rows]
            return frozenset(one.set_digest for one in found if one.opening == opening)

    def lock(self, session: str) -> OpenedSet | None:
        with self._errors():  # whatever became of a session's sets after it ended it
            row = self._connection.execute(
                "SELECT line FROM log WHERE number = (SELECT max(number) FROM log WHERE session = ?)", (session,)
            ).fetchone()
            last = None if row is None else OpenedSet.from_bytes(row[0])
            return last if last is not None and last.kind == protocol.VIEW_LOCKED else None

    def terms(self, session: str) -> SessionTerms | None:
        with self._errors():
            row = self._connection.execute("SELECT terms FROM sessions WHERE session = ?", (session,)).fetchone()
            return None if row is None else SessionTerms.from_values(json.loads(row[0]))

    def last_opened(self, session: str, clients: Sequence[str]) -> dict[str, LastOpened]:
        with self._errors():
            found = {}
            for name in clients:
                row = self._connection.execute(
                    "SELECT release, release_id FROM clients WHERE session = ? AND client = ?", (session, name)
                ).fetchone()
                if row is not None:
                    found[name] = LastOpened(*row)
            return found

    def times(self, sessions: int, sets: int) -> tuple[float, float]:
        with self._errors():
            opened = self._connection.execute(_LAST_BUT, (sets,)).fetchone() if sets else None
            begun = self._connection.execute(_BEGUN_LAST_BUT, (sessions,)).fetchone() if sessions else None
            return (-math.inf if begun is None else begun[0], -math.inf if opened is None else opened[0])

    def commit(self, opened: OpenedSet) -> None:
        with self._errors():
            check_forward(self, opened)
            place, line = self._file.state, opened.to_bytes()
            link = _next_link(bytes.fromhex(place.link), line)
            moved = opened.moves(self.last_opened(opened.session, list(opened.clients)))
            number, promise = place.number + 1, opened.kind == protocol.VIEW_LOCKED
            row = (number, opened.session, _column(opened, number), time.time(), line, link)
            self._connection.execute("INSERT INTO log VALUES (?, ?, ?, ?, ?, ?)", row)
            if opened.kind != protocol.VIEW_OPENED:
                self._connection.execute(f"PRAGMA user_version = {_PROMISING}")
            if not promise:
                terms = (opened.session, _terms_text(opened.terms))
                self._connection.execute("INSERT OR IGNORE INTO sessions VALUES (?, ?)", terms)
            self._connection.executemany(
                "INSERT OR REPLACE INTO clients VALUES (?, ?, ?, ?)",
                ((opened.session, name, last.release, last.release_id) for name, last in moved.items()),
            )
            self._file.commit()


def _column(opened: OpenedSet, number: int) -> str:
    return opened.opening if opened.kind == protocol.VIEW_OPENED else f"{opened.kind} {number}"


def _next_link(before: bytes, line: bytes) -> bytes:
    return hashlib.sha256(before + line).digest()


def _terms_text(terms: SessionTerms) -> str:
    return json.dumps(terms.to_values(), sort_keys=True)
