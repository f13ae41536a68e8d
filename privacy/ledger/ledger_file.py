"""The file of a ledger on disk: its tables, how it is opened and read, and everything it is refused for."""

from __future__ import annotations

import hashlib
import hmac
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ANOTHER_FORMAT, LedgerError
from ..files import check_private
from .ledger_records import StreamRecord
from .mark import LedgerState, SessionState
from .stored import Entry, StoredArray, StoredArrays, StoredState

FORMAT = 3
ROTATED = 4
"""The format of a ledger whose noise key was exchanged: it counts how often, and is FORMAT in all else."""

CLOSED = "closed"
UNDECIDED = (
    " This ledger was made without a budget for what holds if nobody else is honest, so it is that of all releases: "
    "decide it once, with `murmurfl ledger set-local-budget {path} --budget-local-mu MU`, or on a new node with "
    "`murmurfl ledger create --budget-local-mu MU`."
)
SCHEMA = """
CREATE TABLE ledger (
    name TEXT NOT NULL, created REAL NOT NULL, data TEXT NOT NULL, budget_mu REAL NOT NULL, delta REAL NOT NULL,
    mark TEXT NOT NULL, key_file TEXT NOT NULL, key BLOB NOT NULL, key_check BLOB NOT NULL, budget_local_mu REAL
);
CREATE TABLE state (
    counter INTEGER NOT NULL, samples_used INTEGER NOT NULL, seal TEXT NOT NULL, data TEXT NOT NULL DEFAULT ''
);
CREATE TABLE reserved (session TEXT PRIMARY KEY, mu REAL NOT NULL, local REAL);
CREATE TABLE streams (
    session TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, release INTEGER NOT NULL, ack INTEGER NOT NULL,
    nonces BLOB NOT NULL, terms TEXT NOT NULL, digest TEXT NOT NULL
);
CREATE TABLE arrays (
    session TEXT NOT NULL, kind TEXT NOT NULL, number INTEGER NOT NULL, dtype TEXT NOT NULL, shape TEXT NOT NULL,
    content BLOB NOT NULL, PRIMARY KEY (session, kind, number)
);
CREATE TABLE releases (
    session TEXT NOT NULL, release INTEGER NOT NULL, time REAL NOT NULL, samples_used INTEGER NOT NULL,
    PRIMARY KEY (session, release)
) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class FileKind:
    """A kind of SQLite file that only its owner may touch, and everything that such a file is refused for.

    A machine's ledger is one, a helper's opening record another.
    """

    what: str
    """``"a ledger"``, for the errors."""
    user: str
    """Who keeps it: a node or a helper."""
    done: str
    """``"nothing was released"``, for the errors."""
    error: type[LedgerError]
    application_id: int
    formats: tuple[int, ...]
    missing: str
    """The way out where there is no file."""
    other_format: str
    """The way out from a file of another format."""
    lost: str
    """The way out from a file that cannot be believed."""

    @property
    def _noun(self) -> str:
        return self.what.split(" ", 1)[1]

    @contextmanager
    def opened(
        self, path: Path, timeout_s: float, options: str = "mode=rw", *, writable: bool = False
    ) -> Iterator[sqlite3.Connection]:
        """Connect to the file at ``path``; refuse one that is missing, not private, of another kind or format."""
        check_private(path, self.what, missing=self.missing, writable=writable, error=self.error)
        with self.clear_errors(path, timeout_s):
            application_id, version = first_numbers(path)
            if application_id == self.application_id:
                self._check_version(version, path)
            connection = connect(path, timeout_s, options)
        with closing(connection):
            with self.clear_errors(path, timeout_s):
                (application_id,) = connection.execute("PRAGMA application_id").fetchone()
                if application_id != self.application_id:
                    raise self.error(
                        f"Expected {self.what} of murmurfl at {path}, got another file or one whose making "
                        f"was interrupted; it was left alone. Check the path in the {self.user}'s configuration; "
                        f"{self.done}."
                    )
                self._check_version(format_of(connection), path)
            yield connection

    @contextmanager
    def connection_to(
        self, path: Path, timeout_s: float, believe: Callable[[sqlite3.Connection], None]
    ) -> Iterator[sqlite3.Connection]:
        """Connect for one transaction: no threads or forks share a connection, and a replaced file is noticed.

        A copy that came back without SQLite's log gets one, unless ``believe`` refuses it.
        """
        with self.opened(path, timeout_s, writable=True) as connection:
            with self.clear_errors(path, timeout_s):
                if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
                    believe(connection)
                    connection.execute("PRAGMA journal_mode = WAL")
            yield connection

    @contextmanager
    def making(self, path: Path, timeout_s: float, schema: str) -> Iterator[sqlite3.Connection]:
        """Make the tables of a new file in an empty one; the caller fills them. What is interrupted is no such file."""
        with self.clear_errors(path, timeout_s), closing(connect(path, timeout_s)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(f"BEGIN; {schema}")
            yield connection
            connection.execute(f"PRAGMA application_id = {self.application_id}")
            connection.execute(f"PRAGMA user_version = {self.formats[0]}")
            connection.execute("COMMIT")

    def _check_version(self, version: int, path: Path) -> None:
        if version not in self.formats:
            formats = " or ".join(map(str, self.formats))
            raise self.error(
                f"Expected {self.what} of format {formats} at {path}, got one of format {version}; it was left alone, "
                f"and {self.done}. {self.other_format}"
            )

    def check_integrity(self, connection: sqlite3.Connection, path: Path) -> None:
        """Refuse a file whose pages do not fit together."""
        with self.clear_errors(path, 0.0):
            (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise self.damaged(path, str(verdict).splitlines()[0])

    @contextmanager
    def clear_errors(self, path: Path, timeout_s: float) -> Iterator[None]:
        """Turn an error of SQLite, of the disk or from a damaged row into one that says what to do."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise self.error(
                    f"Expected {path} to be free within {timeout_s:g} s, but another process is using this "
                    f"{self._noun}. Let only one {self.user} use it, or wait; {self.done}."
                ) from error
            if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
                raise self.error(
                    f"Expected {path} and its folder to be writable, got: {error}. Nothing can be recorded, so "
                    f"{self.done}."
                ) from error
            if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
                raise self.error(
                    f"Expected room on a disk that works for {path}, got: {error}. {self.done.capitalize()}."
                ) from error
            raise self.damaged(path, str(error)) from error
        except OSError as error:
            raise self.error(f"Expected to read {path}, got {error.strerror}. {self.done.capitalize()}.") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self.damaged(path, str(error)) from error

    def damaged(self, path: Path, what: str) -> LedgerError:
        """The error of a file that cannot be believed."""
        return self.error(
            f"Expected a readable {self._noun} at {path}, got {what}: it is damaged or no {self._noun}. It was left "
            f"alone. {self.lost}"
        )


def connect(path: Path, timeout_s: float, options: str = "mode=rw") -> sqlite3.Connection:
    """Connect to an existing file; a commit waits for the disk."""
    connection = sqlite3.connect(f"{path.as_uri()}?{options}", timeout=timeout_s, isolation_level=None, uri=True)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA fullfsync = ON")
    return connection


def format_of(connection: sqlite3.Connection) -> int:
    """The number of a file's format."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return version


def first_numbers(path: Path) -> tuple[int, int]:
    """The application's number and that of the format, in a SQLite file's first bytes; 0 where only the log has them.

    They are read before SQLite opens a file, for it may then write what a crash left in the log.
    """
    with path.open("rb") as file:
        first = file.read(100)  # https://www.sqlite.org/fileformat.html#the_database_header
    return int.from_bytes(first[68:72]), int.from_bytes(first[60:64])


LEDGER = FileKind(
    what="a ledger",
    user="node",
    done="nothing was released",
    error=LedgerError,
    application_id=0x6D757266,  # "murf"
    formats=(FORMAT, ROTATED),
    missing="A node that had one must get it back: put the file back, or a backup of it and `murmurfl ledger "
    "accept-rollback`. On a new node make one: `murmurfl ledger create`. Nothing was released.",
    other_format=ANOTHER_FORMAT,
    lost="Nothing was released. Restore a backup (then `murmurfl ledger accept-rollback`), or use these data no more.",
)
clear_errors, damaged, opened = LEDGER.clear_errors, LEDGER.damaged, LEDGER.opened


@dataclass(frozen=True)
class Header:
    """The settings with which a ledger was made."""

    name: str
    created: float
    data: str
    budget_mu: float
    delta: float
    mark: Path
    key_file: Path | None
    key_check: bytes
    budget_local_mu: float | None = None
    rotations: int = 0
    """How often the noise key was exchanged."""


def write_new(path: Path, timeout_s: float, header: Header, key: bytes, seal: str, *, mark_beside: bool) -> None:
    """Make the tables of a new ledger in an empty file; the noise key is among them if the header names no file for it.

    A mark that is ``mark_beside`` the ledger is looked for there: it goes where the ledger goes.
    """
    row = {
        **vars(header),
        "mark": "" if mark_beside else str(header.mark),
        "key_file": str(header.key_file or ""),
        "key": b"" if header.key_file else key,
    }
    with LEDGER.making(path, timeout_s, SCHEMA) as connection:
        connection.execute(
            "INSERT INTO ledger VALUES (:name, :created, :data, :budget_mu, :delta, :mark, :key_file, :key, "
            ":key_check, :budget_local_mu)",
            row,
        )
        connection.execute("INSERT INTO state VALUES (0, 0, ?, '')", (seal,))


def read_header(connection: sqlite3.Connection, path: Path) -> Header:
    """Read the settings with which the ledger at ``path`` was made."""
    name, created, data, budget_mu, delta, mark, key_file, key_check, budget_local_mu = connection.execute(
        "SELECT name, created, data, budget_mu, delta, mark, key_file, key_check, budget_local_mu FROM ledger"
    ).fetchone()
    rotations = 0
    if format_of(connection) == ROTATED:
        (rotations,) = connection.execute("SELECT rotations FROM ledger").fetchone()
    files = mark_path(path, mark), Path(key_file) if key_file else None
    return Header(name, created, data, budget_mu, delta, *files, key_check, budget_local_mu, rotations)


def read_reserved(connection: sqlite3.Connection) -> Iterator[tuple[str, float, float | None]]:
    """Yield the sessions in the order in which they were opened: name, mu reserved, and mu_local or None."""
    return connection.execute("SELECT session, mu, local FROM reserved ORDER BY rowid")


def write_key(connection: sqlite3.Connection, key: bytes, key_file: Path | None) -> None:
    """Replace the noise key, inside a transaction."""
    if format_of(connection) != ROTATED:
        connection.execute("ALTER TABLE ledger ADD COLUMN rotations INTEGER NOT NULL DEFAULT 0")
        connection.execute(f"PRAGMA user_version = {ROTATED}")
    row = b"" if key_file else key, key_check(key), str(key_file or "")
    connection.execute("UPDATE ledger SET key = ?, key_check = ?, key_file = ?, rotations = rotations + 1", row)


def mark_path(path: Path, mark: str) -> Path:
    """Where a ledger's high-water mark is: where it was put, or beside the ledger."""
    return Path(mark) if mark else path.with_name(path.name + ".mark")


def key_check(key: bytes) -> bytes:
    """A check value by which a key is recognised without being written down."""
    return hmac.digest(key, b"murmurfl ledger key", hashlib.sha256)[:16]


def read_state(connection: sqlite3.Connection, header: Header, path: Path) -> LedgerState:
    """Read how far the ledger has come; refuse it if its parts do not belong together."""
    state = unsealed_state(connection, header)
    (seal,) = connection.execute("SELECT seal FROM state").fetchone()
    if state.seal != seal:
        raise damaged(path, "contents that do not match their seal")
    return state


def unsealed_state(connection: sqlite3.Connection, header: Header) -> LedgerState:
    """Read how far the ledger has come, as its tables say."""
    counter, samples_used, data = connection.execute("SELECT counter, samples_used, data FROM state").fetchone()
    sessions = {name: SessionState(mu, 0, local=local) for name, mu, local in read_reserved(connection)}
    for name, release, digest in connection.execute("SELECT session, release, digest FROM streams"):
        before = sessions.get(name, SessionState(0.0, 0))
        sessions[name] = SessionState(before.mu, release, digest, before.local)
    terms = header.budget_mu, header.delta
    key = header.key_check.hex() if header.rotations else ""
    return LedgerState(header.name, *terms, counter, samples_used, sessions, data, header.budget_local_mu, key)


def is_rolled_back(state: LedgerState, mark: LedgerState) -> bool:
    """Whether a ledger is behind its mark, or beside it."""
    return mark.counter > state.counter or (mark.counter == state.counter and mark.seal != state.seal)


def check_mark_belongs(state: LedgerState, mark: LedgerState, path: Path) -> None:
    """Refuse another ledger's mark."""
    if mark.ledger != state.ledger:
        raise LedgerError(
            f"Expected the high-water mark of {path}, got that of another ledger. Put the right one back; nothing was "
            "released."
        )


def check_mark(state: LedgerState, mark: LedgerState, path: Path) -> None:
    """Refuse another ledger's mark, and a ledger that was copied back."""
    check_mark_belongs(state, mark, path)
    if is_rolled_back(state, mark):
        raise LedgerError(
            f"Expected {path} at commit {mark.counter} of its high-water mark or after it, got commit {state.counter}"
            f"{' of another history' if mark.counter == state.counter else ''}: the ledger was copied back from a "
            "backup and has forgotten releases. Nothing was released. Put the newest file back, or go on without what "
            "was forgotten: `murmurfl ledger accept-rollback` closes all its sessions and counts as spent what the "
            "mark knows of."
        )


def arrays_of(stream: StreamRecord) -> Iterator[tuple[str, int, Entry]]:
    """Yield a stream's arrays: kind, number, values; what is still in the file is not read."""
    pending = stream.pending.entries if isinstance(stream.pending, StoredArrays) else stream.pending
    for release, counts in sorted(pending.items(), key=lambda item: item[0]):
        yield "pending", release, counts
    for release, name in sorted(stream.ids.items()):
        yield "ids", release, np.frombuffer(name, np.uint8)
    state = stream.noise_state.entries if isinstance(stream.noise_state, StoredState) else stream.noise_state
    for number, values in enumerate(state):
        yield "state", number, values
    for number, values in enumerate(stream.noted):
        yield "noted", number, values
    if stream.order:
        yield "order", 0, np.frombuffer(stream.order, np.uint8)


def bytes_of(values: NDArray[Any]) -> memoryview:
    """An array's own bytes, not copied."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def digest_of(stream: StreamRecord) -> str:
    """A digest of a stream, arrays and all; what is still in the file is read in pieces."""
    digest = hashlib.blake2b(digest_size=16)
    plain = [stream.fingerprint, stream.release, stream.ack, stream.nonces.hex(), stream.terms]
    digest.update(json.dumps(plain).encode())
    for kind, number, values in arrays_of(stream):
        digest.update(json.dumps([kind, number, values.dtype.str, values.shape]).encode())
        for piece in values.pieces() if isinstance(values, StoredArray) else [bytes_of(values)]:
            digest.update(piece)
    return digest.hexdigest()
