"""A real helper's opening record: one SQLite file that outlives crashes and refuses whatever it cannot believe.

One file of mode 600 holds a log of every set the helper opened, promised to open or declared void, and tables made from
it for looking things up. Each line of the log has a link: the digest of the line and of the link before it. So a commit
costs as much as the set it records, and when a record is opened the whole log is gone through and compared with the
tables. A second, small file, the high-water mark, holds the number and the link of the last line: it shows when the
first was copied back from a backup, and belongs on a disk that is not backed up with it.

Order of writing
----------------
The set is committed (write-ahead log, ``synchronous=FULL``), then the mark is moved up to it, then the sum, or what the
helper says of the set, may leave.
So, depending on where a crash comes:

* before the commit: nobody knows of the set, and nothing left; the server may ask for it again, or for another;
* between commit and mark: the record is ahead of its mark, which is no rollback; the next transaction moves the mark
  before it does anything else, and the set that was recorded gets its answer when it is asked for again;
* after the mark: likewise.

Unlike a machine's ledger, a record that was copied back cannot be accepted: which releases were opened since is not
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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from .. import protocol
from ..errors import ConfigurationError
from ..files import FileKind, check_private, create_private, replace_durably, sync_folder
from ..ledger.ledger_file import mark_path
from .opening_rule import (
    LastOpened,
    OpenedSet,
    OpeningPage,
    OpeningRecord,
    OpeningRecordError,
    SessionTerms,
    check_forward,
    key_digest,
)
from .roster import HelperEntry

_MARK_FORMAT = 1
_FORMAT_KEY = "murmurfl-opening-mark"

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
    """How far a record has come."""

    record: str
    """The record's own random name."""
    number: int
    """Lines of its log so far."""
    link: str
    """Link of the last of them, in hexadecimal; it depends on all before it."""

    def write_mark(self, path: Path) -> None:
        """Make this the mark, durably."""
        document = {_FORMAT_KEY: _MARK_FORMAT, **asdict(self)}
        replace_durably(path, json.dumps(document, indent=1).encode() + b"\n", error=OpeningRecordError)


def read_opening_mark(path: Path) -> OpeningPlace:
    """Read the mark at ``path``; refuse one that is missing, damaged, of another format or open to others."""
    check_private(
        path,
        "the opening record's high-water mark",
        missing=f"Without it nobody can tell whether the record was copied back. Put the mark back. {RECORD_LOST}",
        error=OpeningRecordError,
    )
    try:
        document = json.loads(path.read_text())
        if (version := document.pop(_FORMAT_KEY)) != _MARK_FORMAT:
            raise OpeningRecordError(
                f"Expected an opening record's high-water mark of format {_MARK_FORMAT} at {path}, got one of format "
                f"{version!r}; it was left alone, and nothing was opened. {ANOTHER_RECORD}"
            )
        mark = OpeningPlace(**document)
        if type(mark.number) is not int or mark.number < 0 or len(bytes.fromhex(mark.link)) != 32:
            raise ValueError("impossible values")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise OpeningRecordError(
            f"Expected the opening record's high-water mark at {path}, got a file that is damaged or something else "
            f"({error}). Put the mark back. {RECORD_LOST}"
        ) from error
    return mark


_FORMAT = 1
_PROMISING = 2
"""The format of a record that has other lines than of opened sets; it is the first in all else."""

_RECORD = FileKind(
    what="an opening record",
    user="helper",
    done="nothing was opened",
    error=OpeningRecordError,
    application_id=0x6D75726F,  # "muro"
    formats=(_FORMAT, _PROMISING),
    missing=f"Put it back. {RECORD_LOST} `murmurfl roster key` makes each helper's record with its key.",
    other_format=ANOTHER_RECORD,
    lost=f"Put the newest file back. {RECORD_LOST}",
)
_clear_errors, _damaged = _RECORD.clear_errors, _RECORD.damaged
_SCHEMA = """
CREATE TABLE record (name TEXT NOT NULL, created REAL NOT NULL, helper TEXT NOT NULL, key BLOB NOT NULL,
    mark TEXT NOT NULL);
-- opening: the name under which the set was opened, or, as no name is, what else became of it and the line's number
CREATE TABLE log (number INTEGER PRIMARY KEY, session TEXT NOT NULL, opening TEXT NOT NULL, time REAL NOT NULL,
    line BLOB NOT NULL, link BLOB NOT NULL, UNIQUE (session, opening));
CREATE TABLE sessions (session TEXT PRIMARY KEY, terms TEXT NOT NULL);
CREATE TABLE machines (session TEXT NOT NULL, machine TEXT NOT NULL, release INTEGER NOT NULL,
    release_id TEXT NOT NULL, PRIMARY KEY (session, machine)) WITHOUT ROWID;
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
    """

    durable: ClassVar[bool] = True

    def __init__(self, path: str | Path, *, timeout_s: float = 30.0) -> None:
        self.path = Path(path).absolute()
        self.timeout_s = timeout_s
        with _connection_to(self.path, timeout_s) as connection, _clear_errors(self.path, timeout_s):
            _RECORD.check_integrity(connection, self.path)
            self._identity = _read_identity(connection, self.path)
            mark = read_opening_mark(self._identity.mark)  # before the log: another process may be moving both
            connection.execute("BEGIN")
            _check_whole(connection, self._identity, self.path)
            _check_mark(connection, _place(connection, self._identity, self.path), mark, self.path)

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
            raise ConfigurationError(f"Expected record and mark in files of their own, got {path} for both.")
        identity = _Identity(secrets.token_hex(16), helper.name, key_digest(helper), mark_file)
        create_private(path, "an opening record", error=OpeningRecordError)
        try:
            if mark_file.exists() and (number := read_opening_mark(mark_file).number) > 0:
                raise OpeningRecordError(
                    f"Expected no trace of an earlier record, got a high-water mark at {mark_file} that counts "
                    f"{number} lines: this helper had a record. Put that one back. {RECORD_LOST}"
                )
            OpeningPlace(identity.name, 0, identity.first_link.hex()).write_mark(mark_file)
            _write_new(path, timeout_s, identity, mark_beside=mark is None)
            sync_folder(path.parent)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return cls(path, timeout_s=timeout_s)

    def check_helper(self, helper: HelperEntry) -> None:
        if self._identity.key != key_digest(helper):
            raise OpeningRecordError(
                f"Expected the opening record of the keys of helper {helper.name!r}, got that of other keys, of helper "
                f"{self._identity.helper!r}, at {self.path}. Use each helper's own record; new keys need a new one. "
                "Nothing was opened."
            )

    @property
    def sets(self) -> int:
        """How many sets this helper opened, of all sessions."""
        with _connection_to(self.path, self.timeout_s) as connection, _clear_errors(self.path, self.timeout_s):
            return connection.execute("SELECT count(*) FROM log WHERE opening NOT GLOB '* *'").fetchone()[0]

    @contextmanager
    def exclusive(self) -> Iterator[OpeningPage]:
        with _connection_to(self.path, self.timeout_s) as connection:
            with _clear_errors(self.path, self.timeout_s):
                connection.execute("BEGIN IMMEDIATE")
                if _read_identity(connection, self.path) != self._identity:
                    raise OpeningRecordError(
                        f"Expected the record this helper began with at {self.path}, got another. Nothing was opened; "
                        "restart the helper."
                    )
                mark, place = read_opening_mark(self._identity.mark), _place(connection, self._identity, self.path)
                _check_mark(connection, place, mark, self.path)
                if mark.number < place.number:
                    # A crash came between a commit and its mark; if it still cannot be written, nothing is answered.
                    place.write_mark(self._identity.mark)
            yield _SQLitePage(connection, self._identity, self.path, self.timeout_s)


class _SQLitePage(OpeningPage):
    """The record inside a transaction that has begun; without a commit nothing remains once it is closed."""

    def __init__(self, connection: sqlite3.Connection, identity: _Identity, path: Path, timeout_s: float) -> None:
        self._connection, self._identity = connection, identity
        self._path, self._timeout_s = path, timeout_s

    def set_digest(self, session: str, opening: str) -> str | None:
        with _clear_errors(self._path, self._timeout_s):
            row = self._connection.execute(
                "SELECT line FROM log WHERE session = ? AND opening = ?", (session, opening)
            ).fetchone()
            return None if row is None else OpenedSet.from_bytes(row[0]).set_digest

    def voids(self, session: str, opening: str) -> frozenset[str]:
        with _clear_errors(self._path, self._timeout_s):
            rows = self._connection.execute(
                "SELECT line FROM log WHERE session = ? AND opening GLOB ?", (session, f"{protocol.VIEW_VOID} *")
            )
            found = [OpenedSet.from_bytes(line) for (line,) in rows]
            return frozenset(one.set_digest for one in found if one.opening == opening)

    def lock(self, session: str) -> OpenedSet | None:
        with _clear_errors(self._path, self._timeout_s):  # whatever became of a session's sets after it ended it
            row = self._connection.execute(
                "SELECT line FROM log WHERE number = (SELECT max(number) FROM log WHERE session = ?)", (session,)
            ).fetchone()
            last = None if row is None else OpenedSet.from_bytes(row[0])
            return last if last is not None and last.kind == protocol.VIEW_LOCKED else None

    def terms(self, session: str) -> SessionTerms | None:
        with _clear_errors(self._path, self._timeout_s):
            row = self._connection.execute("SELECT terms FROM sessions WHERE session = ?", (session,)).fetchone()
            return None if row is None else SessionTerms.from_values(json.loads(row[0]))

    def last_opened(self, session: str, machines: Sequence[str]) -> dict[str, LastOpened]:
        with _clear_errors(self._path, self._timeout_s):
            found = {}
            for name in machines:
                row = self._connection.execute(
                    "SELECT release, release_id FROM machines WHERE session = ? AND machine = ?", (session, name)
                ).fetchone()
                if row is not None:
                    found[name] = LastOpened(*row)
            return found

    def times(self, sessions: int, sets: int) -> tuple[float, float]:
        with _clear_errors(self._path, self._timeout_s):
            opened = self._connection.execute(_LAST_BUT, (sets,)).fetchone() if sets else None
            begun = self._connection.execute(_BEGUN_LAST_BUT, (sessions,)).fetchone() if sessions else None
            return (-math.inf if begun is None else begun[0], -math.inf if opened is None else opened[0])

    def commit(self, opened: OpenedSet) -> None:
        with _clear_errors(self._path, self._timeout_s):
            check_forward(self, opened)
            place, line = _place(self._connection, self._identity, self._path), opened.to_bytes()
            link, moved = (
                _next_link(bytes.fromhex(place.link), line),
                opened.moves(self.last_opened(opened.session, list(opened.machines))),
            )
            number, promise = place.number + 1, opened.kind == protocol.VIEW_LOCKED
            row = (number, opened.session, _column(opened, number), time.time(), line, link)
            self._connection.execute("INSERT INTO log VALUES (?, ?, ?, ?, ?, ?)", row)
            if opened.kind != protocol.VIEW_OPENED:
                self._connection.execute(f"PRAGMA user_version = {_PROMISING}")
            if not promise:
                terms = (opened.session, _terms_text(opened.terms))
                self._connection.execute("INSERT OR IGNORE INTO sessions VALUES (?, ?)", terms)
            self._connection.executemany(
                "INSERT OR REPLACE INTO machines VALUES (?, ?, ?, ?)",
                ((opened.session, name, last.release, last.release_id) for name, last in moved.items()),
            )
            self._connection.execute("COMMIT")
            # The mark is moved inside another transaction, so that no other process moves it at the same time. Another
            # process may have committed in between and moved it further, so the place is read again.
            self._connection.execute("BEGIN IMMEDIATE")
            _place(self._connection, self._identity, self._path).write_mark(self._identity.mark)


def _write_new(path: Path, timeout_s: float, identity: _Identity, *, mark_beside: bool) -> None:
    row = (identity.name, time.time(), identity.helper, identity.key, "" if mark_beside else str(identity.mark))
    with _RECORD.making(path, timeout_s, _SCHEMA) as connection:
        connection.execute("INSERT INTO record VALUES (?, ?, ?, ?, ?)", row)


def _connection_to(path: Path, timeout_s: float) -> AbstractContextManager[sqlite3.Connection]:
    """Connect to a record for one transaction."""

    def believe(connection: sqlite3.Connection) -> None:
        _check_whole(connection, _read_identity(connection, path), path)

    return _RECORD.connection_to(path, timeout_s, believe)


def _read_identity(connection: sqlite3.Connection, path: Path) -> _Identity:
    name, helper, key, mark = connection.execute("SELECT name, helper, key, mark FROM record").fetchone()
    return _Identity(name, helper, key, mark_path(path, mark))


def _place(connection: sqlite3.Connection, identity: _Identity, path: Path) -> OpeningPlace:
    """How far a record has come, if its last line follows from the one before."""
    rows = connection.execute("SELECT number, line, link FROM log ORDER BY number DESC LIMIT 2").fetchall()
    if not rows:
        return OpeningPlace(identity.name, 0, identity.first_link.hex())
    (number, line, link), before = rows[0], rows[1][2] if len(rows) > 1 else identity.first_link
    if link != _next_link(before, line):
        raise _damaged(path, "a line that does not follow from the one before")
    return OpeningPlace(identity.name, number, link.hex())


def _check_whole(connection: sqlite3.Connection, identity: _Identity, path: Path) -> None:
    """Refuse a record whose lines do not follow from each other, or whose tables do not follow from its lines."""
    before, terms = identity.first_link, dict[str, str]()
    last: dict[str, dict[str, LastOpened]] = {}
    rows = connection.execute("SELECT number, session, opening, line, link FROM log ORDER BY number")
    for expected, (number, session, opening, line, link) in enumerate(rows, start=1):
        opened = OpenedSet.from_bytes(line)
        before = _next_link(before, line)
        if (number, link, session, opening) != (expected, before, opened.session, _column(opened, expected)):
            raise _damaged(path, f"a line {number} that does not follow from the one before")
        if opened.kind != protocol.VIEW_LOCKED:
            terms[session] = _terms_text(opened.terms)
        machines = last.setdefault(session, {})
        machines |= opened.moves(machines)
    found_terms = dict(connection.execute("SELECT session, terms FROM sessions"))
    found = {tuple(row[:2]): LastOpened(*row[2:]) for row in connection.execute("SELECT * FROM machines")}
    moved = {(session, name): one for session, machines in last.items() for name, one in machines.items()}
    if (found_terms, found) != (terms, moved):
        raise _damaged(path, "tables that do not follow from its lines")


def _column(opened: OpenedSet, number: int) -> str:
    return opened.opening if opened.kind == protocol.VIEW_OPENED else f"{opened.kind} {number}"


def _next_link(before: bytes, line: bytes) -> bytes:
    return hashlib.sha256(before + line).digest()


def _terms_text(terms: SessionTerms) -> str:
    return json.dumps(asdict(terms), sort_keys=True)


def _check_mark(connection: sqlite3.Connection, place: OpeningPlace, mark: OpeningPlace, path: Path) -> None:
    """Refuse another record's mark, and a record that was copied back."""
    if mark.record != place.record:
        raise OpeningRecordError(
            f"Expected the high-water mark of {path}, got that of another record. Put the right one back. {RECORD_LOST}"
        )
    if mark.number > place.number:
        raise OpeningRecordError(
            f"Expected {path} at line {mark.number} of its high-water mark or after it, got line {place.number}: the "
            f"record was copied back from a backup and has forgotten what was opened. Put the newest file back. "
            f"{RECORD_LOST}"
        )
    row = connection.execute("SELECT link FROM log WHERE number = ?", (mark.number,)).fetchone()
    if mark.number > 0 and (row is None or row[0].hex() != mark.link):
        raise OpeningRecordError(
            f"Expected {path} to have the line {mark.number} that its high-water mark knows, got one of another "
            f"history: the record was copied back. Put the newest file back. {RECORD_LOST}"
        )
