"""The file of a ledger on disk: its tables, how it is opened and read, and everything it is refused for."""

from __future__ import annotations

import hashlib
import hmac
import json
import sqlite3
from collections.abc import Iterator, Sequence
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

APPLICATION_ID = 0x6D757266  # "murf"
FORMAT = 3
ROTATED = 4
"""Of a ledger whose noise key was exchanged, which counts how often; in all else the two are the same."""

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
    """Make the tables of a new ledger in an empty file.

    Parameters
    ----------
    path : Path
    timeout_s : float
    header : Header
    key : bytes
        The noise key, kept in the ledger if the header names no file for it.
    seal : str
        Of the state in which nothing was released.
    mark_beside : bool
        Whether the mark is where it is looked for by default: then it goes where the ledger goes.
    """
    mark = "" if mark_beside else str(header.mark)
    row = (
        header.name,
        header.created,
        header.data,
        header.budget_mu,
        header.delta,
        mark,
        str(header.key_file or ""),
        b"" if header.key_file else key,
        header.key_check,
        header.budget_local_mu,
    )
    with clear_errors(path, timeout_s), closing(connect(path, timeout_s)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        # All in one transaction: what is interrupted is not a ledger.
        connection.executescript(f"BEGIN; {SCHEMA}")
        connection.execute("INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        connection.execute("INSERT INTO state VALUES (0, 0, ?, '')", (seal,))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.execute("COMMIT")


def read_header(connection: sqlite3.Connection, path: Path) -> Header:
    """The settings with which the ledger at ``path`` was made."""
    name, created, data, budget_mu, delta, mark, key_file, key_check, budget_local_mu = connection.execute(
        "SELECT name, created, data, budget_mu, delta, mark, key_file, key_check, budget_local_mu FROM ledger"
    ).fetchone()
    rotations = 0
    if format_of(connection) == ROTATED:
        (rotations,) = connection.execute("SELECT rotations FROM ledger").fetchone()
    key_path, place = Path(key_file) if key_file else None, mark_path(path, mark)
    terms = budget_mu, delta, place, key_path, key_check, budget_local_mu, rotations
    return Header(name, created, data, *terms)


def read_reserved(connection: sqlite3.Connection) -> Iterator[tuple[str, float, float | None]]:
    """Sessions in the order in which they were opened, each with the mu it reserved, and mu_local where it has one."""
    return connection.execute("SELECT session, mu, local FROM reserved ORDER BY rowid")


def write_key(connection: sqlite3.Connection, key: bytes, key_file: Path | None) -> None:
    """Put another noise key in the place of the one there is, inside a transaction."""
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
    """How far the ledger has come, if all its parts belong together."""
    state = unsealed_state(connection, header)
    (seal,) = connection.execute("SELECT seal FROM state").fetchone()
    if state.seal != seal:
        raise damaged(path, "contents that do not match their seal")
    return state


def unsealed_state(connection: sqlite3.Connection, header: Header) -> LedgerState:
    """How far the ledger has come, as its tables say."""
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


def check_file(path: Path, *, writable: bool = False) -> None:
    """Refuse a ledger that is not there, not private or not writable."""
    check_private(
        path,
        "a ledger",
        missing="A node that had one must get it back: put the file back, or a backup of it and `murmurfl ledger "
        "accept-rollback`. On a new node make one: `murmurfl ledger create`. Nothing was released.",
        writable=writable,
    )


def connect(path: Path, timeout_s: float, options: str = "mode=rw") -> sqlite3.Connection:
    """A connection to an existing file; a commit on it waits for the disk."""
    connection = sqlite3.connect(f"{path.as_uri()}?{options}", timeout=timeout_s, isolation_level=None, uri=True)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA fullfsync = ON")
    return connection


@contextmanager
def opened(
    path: Path,
    timeout_s: float,
    options: str = "mode=rw",
    *,
    writable: bool = False,
) -> Iterator[sqlite3.Connection]:
    """A connection to a ledger of this format, closed in the end; what the caller does with it is the caller's.

    Raises
    ------
    LedgerError
        If there is no ledger at ``path``, or one of another format, or it cannot be opened.
    """
    check_file(path, writable=writable)
    with clear_errors(path, timeout_s):
        application_id, version = first_numbers(path)
        if application_id == APPLICATION_ID:
            _check_number(version, path)
        connection = connect(path, timeout_s, options)
    with closing(connection):
        with clear_errors(path, timeout_s):
            check_format(connection, path)
        yield connection


def format_of(connection: sqlite3.Connection) -> int:
    """The number of a ledger's format."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return version


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is no ledger, or one of another format."""
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    if application_id != APPLICATION_ID:
        raise LedgerError(
            f"Expected a murmurfl ledger at {path}, got another file or one whose making was interrupted; it was left "
            "alone. Check the path in the node's configuration; nothing was released."
        )
    _check_number(format_of(connection), path)


def first_numbers(path: Path) -> tuple[int, int]:
    """The application's number and that of the format, as a SQLite file's first bytes have them.

    They are looked at before SQLite opens a file, for it may then write what a crash left in the log. Both are 0 where
    the log alone knows them.
    """
    with path.open("rb") as file:
        first = file.read(100)  # https://www.sqlite.org/fileformat.html#the_database_header
    return int.from_bytes(first[68:72]), int.from_bytes(first[60:64])


def _check_number(version: int, path: Path) -> None:
    if version not in (FORMAT, ROTATED):
        raise LedgerError(
            f"Expected a ledger of format {FORMAT} or {ROTATED} at {path}, got one of format {version}; it was left "
            f"alone, and nothing was released. {ANOTHER_FORMAT}"
        )


def check_integrity(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file whose pages do not fit together."""
    with clear_errors(path, 0.0):
        (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if verdict != "ok":
        raise damaged(path, str(verdict).splitlines()[0])


@contextmanager
def clear_errors(path: Path, timeout_s: float) -> Iterator[None]:
    """Turn an error of SQLite, of the disk or from a damaged row into a LedgerError that says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise LedgerError(
                f"Expected {path} to be free within {timeout_s:g} s, but another process is using this ledger. Let "
                "only one node use it, or wait; nothing was released."
            ) from error
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            raise LedgerError(
                f"Expected {path} and its folder to be writable, got: {error}. Nothing can be recorded, so nothing is "
                "released."
            ) from error
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise LedgerError(
                f"Expected room on a disk that works for {path}, got: {error}. Nothing was released."
            ) from error
        raise damaged(path, str(error)) from error
    except OSError as error:
        raise LedgerError(f"Expected to read {path}, got {error.strerror}. Nothing was released.") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged(path, str(error)) from error


def damaged(path: Path, what: str) -> LedgerError:
    """The error of a ledger that cannot be believed."""
    return LedgerError(
        f"Expected a readable ledger at {path}, got {what}: it is damaged or no ledger. It was left alone and nothing "
        "was released. Restore a backup (then `murmurfl ledger accept-rollback`), or use these data no more."
    )


def arrays_of(stream: StreamRecord) -> Iterator[tuple[str, int, Entry]]:
    """A stream's arrays: kind, number, values; what is still in the file is not read."""
    pending = stream.pending.entries if isinstance(stream.pending, StoredArrays) else stream.pending
    for release, counts in sorted(pending.items(), key=lambda item: item[0]):
        yield "pending", release, counts
    for release, name in sorted(stream.ids.items()):
        yield "ids", release, np.frombuffer(name, np.uint8)
    for number, values in enumerate(_entries(stream.noise_state)):
        yield "state", number, values
    for number, values in enumerate(stream.noted):
        yield "noted", number, values
    if stream.order:
        yield "order", 0, np.frombuffer(stream.order, np.uint8)


def _entries(state: Sequence[NDArray[Any]]) -> Sequence[Entry]:
    return state.entries if isinstance(state, StoredState) else state


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
