"""The ledger of a real node: one SQLite file that outlives crashes and refuses whatever it cannot believe.

What a node must know again after a loss of power is in one file of mode 600: the account, every session's stream, a
line for every release, and the noise key (or the name of the file that holds it). A second, small file is the
high-water mark (:mod:`.high_water_mark`), which notices when the first is copied back from a backup.

Order of writing
----------------
The release is committed (write-ahead log, ``synchronous=FULL``), then the mark is moved up to it, then the reply may
leave. So wherever a crash comes:

* before the commit: neither knows of the release; nothing was sent and nothing spent;
* between commit and mark: the ledger is ahead of its mark, which is no rollback; the release is wasted, the stream goes
  on after it, and the next commit moves the mark;
* after the mark: both know of the release; whether it was sent or not, it is never made again.

The mark is never ahead of the ledger, unless the ledger was copied back. (Writing the mark first would leave it ahead
after a crash, and one commit behind would look like either.)
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigurationError, LedgerError
from .files import check_private, create_private, sync_folder
from .gdp import compose_gdp
from .high_water_mark import LedgerState, SessionState, read_mark
from .keys import SystemKeys
from .ledger import Account, Ledger, LedgerPage, StreamRecord
from .noise import KEY_BYTES

APPLICATION_ID = 0x6D757266  # "murf"
FORMAT = 1

_CLOSED = "closed"
_SCHEMA = """
CREATE TABLE ledger (
    name TEXT NOT NULL, created REAL NOT NULL, data TEXT NOT NULL, budget_mu REAL NOT NULL, delta REAL NOT NULL,
    mark TEXT NOT NULL, key_file TEXT NOT NULL, key BLOB NOT NULL, key_check BLOB NOT NULL
);
CREATE TABLE state (counter INTEGER NOT NULL, samples_used INTEGER NOT NULL, seal TEXT NOT NULL);
CREATE TABLE reserved (session TEXT PRIMARY KEY, mu REAL NOT NULL);
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
class SessionSummary:
    """What a ledger says of one session.

    Parameters
    ----------
    session : str
    mu : float
        Reserved, whatever number of its releases was made.
    releases, ack : int
        Made, and the last one the server says it has.
    closed : bool
        Whether it was closed after a rollback.
    first_release, last_release : float or None
        When, in seconds since 1970.
    terms : mapping
        The policy it was opened with and the noise that followed from it.
    """

    session: str
    mu: float
    releases: int
    ack: int
    closed: bool
    first_release: float | None
    last_release: float | None
    terms: Mapping[str, Any]


@dataclass(frozen=True)
class LedgerSummary:
    """What a ledger says, for its operator.

    Parameters
    ----------
    data : str
        What the operator called the data.
    created : float
        When, in seconds since 1970.
    budget_mu, delta : float
    reserved_mu : float
        Of all sessions together; this is what counts as spent.
    samples_used, commits : int
    mark : str
        Where the high-water mark is.
    mark_problem : str
        What is wrong with it, or empty.
    key_file : str
        Where the noise key is; empty: in the ledger.
    sessions : tuple of SessionSummary
        In the order in which they were opened.
    """

    data: str
    created: float
    budget_mu: float
    delta: float
    reserved_mu: float
    samples_used: int
    commits: int
    mark: str
    mark_problem: str
    key_file: str
    sessions: tuple[SessionSummary, ...]

    @property
    def left_mu(self) -> float:
        """Mu that new sessions may still reserve."""
        return math.sqrt(max(self.budget_mu**2 - self.reserved_mu**2, 0.0))


class SQLiteLedger(Ledger):
    """An existing ledger in a SQLite file; :meth:`create` makes one.

    Parameters
    ----------
    path : path
        The ledger's file.
    timeout_s : float
        How long a transaction waits for another process or thread that is using the ledger before it refuses.

    Raises
    ------
    LedgerError
        If there is no ledger at ``path``, other people can read or write it, it is read-only, something else, of
        another version or damaged, or it was copied back.

    Notes
    -----
    **Formal guarantees.** Those of :class:`~murmurfl.privacy.Ledger`, across processes and losses of power, as far as
    the disk keeps what it says it has written. A commit moves the high-water mark before it returns. A ledger that is
    missing is never made anew here, and one that is behind its mark, or differs from it, releases nothing until its
    operator accepts the rollback. If ledger and mark were both copied back nothing here can tell; noise is still never
    repeated, because every release draws a fresh nonce (:class:`~murmurfl.privacy.SystemKeys`), but samples and budget
    would be spent twice.
    """

    durable: ClassVar[bool] = True

    def __init__(self, path: str | Path, *, timeout_s: float = 30.0) -> None:
        self.path = Path(path).absolute()
        self.timeout_s = timeout_s
        with self._connection(writable=True) as connection:
            _check_integrity(connection, self.path)
            with _clear_errors(self.path, timeout_s):
                self._header = _read_header(connection, self.path)
                mark = read_mark(self._header.mark)  # before the ledger: another process may be moving both
                connection.execute("BEGIN")
                _check_mark(_read_state(connection, self._header, self.path), mark, self.path)
        self.budget_mu = self._header.budget_mu
        self.delta = self._header.delta

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        budget_mu: float,
        delta: float,
        data: str = "",
        mark: str | Path | None = None,
        key_file: str | Path | None = None,
        timeout_s: float = 30.0,
    ) -> SQLiteLedger:
        """Make a new ledger, its noise key and its high-water mark.

        Parameters
        ----------
        path : path
            Where; its folder must exist.
        budget_mu : float
            Gaussian-DP parameter of everything that is ever released about these data.
        delta : float
            Where its epsilons are shown.
        data : str
            What the operator calls the data.
        mark : path, optional
            Where the high-water mark goes: best on a disk that is not backed up with the ledger. Default ``path`` with
            ``.mark`` after it.
        key_file : path, optional
            A new file for the noise key; default it is kept in the ledger.
        timeout_s : float
            As for the class.

        Raises
        ------
        LedgerError
            If there is a file already, or a mark that says this node had a ledger.
        ConfigurationError
            If the budget or delta is impossible.

        Notes
        -----
        **Formal guarantees.** The key comes from the operating system. Nothing is ever overwritten, but for a mark
        under which nothing was released.
        """
        if not (math.isfinite(budget_mu) and budget_mu > 0):
            raise ConfigurationError(f"Expected budget_mu > 0 and finite, got {budget_mu!r}.")
        if not 0 < delta < 1:
            raise ConfigurationError(f"Expected delta between 0 and 1, got {delta!r}.")
        path = Path(path).absolute()
        mark_path = _mark_path(path, "" if mark is None else str(Path(mark).absolute()))
        if mark_path.exists() and (counter := read_mark(mark_path).counter) > 0:
            raise LedgerError(
                f"Expected no trace of an earlier ledger, got a high-water mark at {mark_path} that counts {counter} "
                "commits: this node had a ledger. Restore that one (docs/ledger.md); nothing was made."
            )
        key, state = secrets.token_bytes(KEY_BYTES), LedgerState(secrets.token_hex(16), float(budget_mu), float(delta))
        create_private(path, "a ledger")
        made = [path]
        try:
            if key_file is not None:
                create_private(Path(key_file).absolute(), "a noise key", key)
                made.append(Path(key_file).absolute())
            state.write_mark(mark_path)
            with _clear_errors(path, timeout_s), closing(_connect(path, timeout_s)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                # Application id and version come last: what is interrupted before is not a ledger.
                connection.executescript(f"BEGIN; {_SCHEMA}")
                connection.execute(
                    "INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        state.ledger,
                        time.time(),
                        data,
                        state.budget_mu,
                        state.delta,
                        "" if mark is None else str(mark_path),
                        "" if key_file is None else str(Path(key_file).absolute()),
                        key if key_file is None else b"",
                        _key_check(key),
                    ),
                )
                connection.execute("INSERT INTO state VALUES (0, 0, ?)", (state.seal,))
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {FORMAT}")
                connection.execute("COMMIT")
            sync_folder(path.parent)
        except BaseException:
            for file in made:
                file.unlink(missing_ok=True)
            raise
        return cls(path, timeout_s=timeout_s)

    def keys(self) -> SystemKeys:
        """The node's noise key, with fresh nonces.

        Raises
        ------
        LedgerError
            If its file is missing, open to others, or holds another key.
        """
        header = self._header
        with _clear_errors(self.path, self.timeout_s):
            if header.key_file is not None:
                check_private(
                    header.key_file,
                    "the noise key",
                    missing="Put it back; without it the sessions that are open cannot go on. Nothing was released.",
                )
                key = header.key_file.read_bytes()
            else:
                with self._connection() as connection:
                    (key,) = connection.execute("SELECT key FROM ledger").fetchone()
        if len(key) != KEY_BYTES or not hmac.compare_digest(_key_check(key), header.key_check):
            raise LedgerError(
                f"Expected the noise key {self.path} was made with, got another or a damaged one in "
                f"{header.key_file or self.path}. Put the right one back; nothing was released."
            )
        return SystemKeys(key)

    @contextmanager
    def exclusive(self) -> Iterator[LedgerPage]:
        with self._connection(writable=True) as connection:
            with _clear_errors(self.path, self.timeout_s):
                connection.execute("BEGIN IMMEDIATE")
                page = _SQLitePage(connection, self)
                _check_mark(page.state, read_mark(self._header.mark), self.path)
            yield page

    @contextmanager
    def _connection(self, *, writable: bool = False) -> Iterator[sqlite3.Connection]:
        """A connection of its own for every transaction: threads, forks and a file that was replaced are all safe."""
        _check_file(self.path, writable=writable)
        with _clear_errors(self.path, self.timeout_s):
            connection = _connect(self.path, self.timeout_s)
        with closing(connection):
            with _clear_errors(self.path, self.timeout_s):
                _check_format(connection, self.path)
            yield connection


class _SQLitePage(LedgerPage):
    """The ledger inside a transaction that has begun; what is not committed is gone when its connection is closed."""

    def __init__(self, connection: sqlite3.Connection, ledger: SQLiteLedger) -> None:
        self._connection = connection
        self._path, self._timeout_s = ledger.path, ledger.timeout_s
        self._header = _read_header(connection, ledger.path)
        if self._header != ledger._header:
            raise LedgerError(
                f"Expected the ledger this node began with at {self._path}, got another. Restart the node."
            )
        self.state = _read_state(connection, self._header, self._path)

    def account(self) -> Account:
        with _clear_errors(self._path, self._timeout_s):
            reserved = dict(self._connection.execute("SELECT session, mu FROM reserved ORDER BY rowid"))
        return Account(self.state.samples_used, reserved)

    def stream(self, session: str) -> StreamRecord | None:
        with _clear_errors(self._path, self._timeout_s):
            row = self._connection.execute(
                "SELECT fingerprint, release, ack, nonces, terms, digest FROM streams WHERE session = ?", (session,)
            ).fetchone()
            if row is None:
                return None
            arrays: dict[str, dict[int, NDArray[Any]]] = {"pending": {}, "state": {}}
            for kind, number, dtype, shape, content in self._connection.execute(
                "SELECT kind, number, dtype, shape, content FROM arrays WHERE session = ? ORDER BY kind, number",
                (session,),
            ):
                arrays[kind][number] = np.frombuffer(content, dtype).reshape(json.loads(shape))
            fingerprint, release, ack, nonces, terms, digest = row
            stream = StreamRecord(
                fingerprint, release, ack, nonces, arrays["pending"], tuple(arrays["state"].values()), terms
            )
            if _digest(stream) != digest:
                raise _damaged(self._path, "a stream that does not match its digest")
        return stream

    def commit(self, session: str, stream: StreamRecord, account: Account) -> None:
        with _clear_errors(self._path, self._timeout_s):
            self._check_forward(session, stream, account)
            self._write_stream(session, stream)
            for name, mu in account.reserved.items():
                self._connection.execute("INSERT OR REPLACE INTO reserved VALUES (?, ?)", (name, mu))
            self._connection.execute(
                "INSERT OR IGNORE INTO releases SELECT ?, ?, ?, ? WHERE ? > 0",
                (session, stream.release, time.time(), account.samples_used, stream.release),
            )
            self._finish(self.state.counter + 1, account.samples_used)

    def accept_rollback(self, mark: LedgerState) -> int:
        """Count as spent whatever the mark knows of, and close every session; returns how many."""
        with _clear_errors(self._path, self._timeout_s):
            known = {**self.state.sessions, **mark.sessions}
            for name in known:
                ours, theirs = (s.sessions.get(name, SessionState(0.0, 0)) for s in (self.state, mark))
                self._connection.execute(
                    "INSERT OR REPLACE INTO reserved VALUES (?, ?)", (name, max(ours.mu, theirs.mu))
                )
                before = self.stream(name) or StreamRecord(_CLOSED)
                releases = max(ours.releases, theirs.releases)
                self._write_stream(name, StreamRecord(_CLOSED, releases, before.ack, terms=before.terms))
            self._finish(max(self.state.counter, mark.counter) + 1, max(self.state.samples_used, mark.samples_used))
        return len(known)

    def _check_forward(self, session: str, stream: StreamRecord, account: Account) -> None:
        before = self.state.sessions.get(session)
        if (
            account.samples_used < self.state.samples_used
            or (before is not None and stream.release < before.releases)
            or any(account.reserved.get(name, 0.0) < past.mu for name, past in self.state.sessions.items())
        ):
            raise LedgerError(
                "Expected a commit that forgets nothing spent, got fewer samples, releases or reserved budget than the "
                "ledger holds; nothing was recorded or released."
            )

    def _write_stream(self, session: str, stream: StreamRecord) -> None:
        self._connection.execute("DELETE FROM arrays WHERE session = ?", (session,))
        self._connection.execute(
            "INSERT OR REPLACE INTO streams VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                session,
                stream.fingerprint,
                stream.release,
                stream.ack,
                stream.nonces,
                stream.terms,
                _digest(stream),
            ),
        )
        self._connection.executemany(
            "INSERT INTO arrays VALUES (?, ?, ?, ?, ?, ?)",
            (
                (session, kind, number, values.dtype.str, json.dumps(values.shape), _bytes(values))
                for kind, number, values in _arrays(stream)
            ),
        )

    def _finish(self, counter: int, samples_used: int) -> None:
        self._connection.execute("UPDATE state SET counter = ?, samples_used = ?", (counter, samples_used))
        state = _unsealed_state(self._connection, self._header)
        self._connection.execute("UPDATE state SET seal = ?", (state.seal,))
        self._connection.execute("COMMIT")
        # The mark is moved inside a transaction again, so that no other process moves it at the same time; one that
        # came in between may have committed and moved it further.
        self._connection.execute("BEGIN IMMEDIATE")
        self.state = _read_state(self._connection, self._header, self._path)
        self.state.write_mark(self._header.mark)


def read_ledger(path: str | Path) -> LedgerSummary:
    """Read a ledger without altering it or making anything beside it.

    Parameters
    ----------
    path : path
        A ledger, or a copy of one; it may be in use.

    Returns
    -------
    LedgerSummary
        A mark that is missing or does not agree is no error here; it is told.

    Raises
    ------
    LedgerError
        If there is no ledger at ``path``, or none that can be read or believed.

    Notes
    -----
    **Formal guarantees.** Releases nothing. What it returns does not depend on the machine's data.
    """
    path = Path(path).absolute()
    _check_file(path)
    with _clear_errors(path, 0.0), closing(_connect_to_read(path)) as connection:
        _check_format(connection, path)
        _check_integrity(connection, path)
        header, problem = _read_header(connection, path), ""
        try:
            mark = read_mark(header.mark)
        except LedgerError as error:
            mark, problem = None, str(error)
        connection.execute("BEGIN")
        state = _read_state(connection, header, path)
        sessions = tuple(_session_summaries(connection))
    if mark is not None:
        try:
            _check_mark(state, mark, path)
        except LedgerError as error:
            problem = str(error)
    mus = [session.mu for session in sessions]
    return LedgerSummary(
        data=header.data,
        created=header.created,
        budget_mu=header.budget_mu,
        delta=header.delta,
        reserved_mu=math.inf if math.inf in mus else compose_gdp(mus),
        samples_used=state.samples_used,
        commits=state.counter,
        mark=str(header.mark),
        mark_problem=problem,
        key_file=str(header.key_file or ""),
        sessions=sessions,
    )


def accept_rollback(path: str | Path, *, timeout_s: float = 30.0) -> int:
    """Go on with a ledger that was copied back, counting as spent everything its mark knows of.

    Parameters
    ----------
    path : path
        The ledger.
    timeout_s : float
        How long to wait for another process.

    Returns
    -------
    int
        Sessions closed: all that ledger or mark know. Their budget stays reserved; new ones may be opened with what is
        left.

    Raises
    ------
    LedgerError
        If the ledger was not copied back, or there is no mark to say what was spent.

    Notes
    -----
    **Formal guarantees.** Afterwards the account is at least what it was when the last reply left, as far as the mark
    was not copied back too.
    """
    with _for_its_operator(path, timeout_s) as (page, mark_path):
        mark = read_mark(mark_path)
        try:
            _check_mark(page.state, mark, page._path)
        except LedgerError:
            if mark.ledger != page.state.ledger:
                raise
            return page.accept_rollback(mark)
        raise LedgerError(
            f"Expected a ledger that was copied back, got {path}, which agrees with its mark; left alone."
        )


def new_mark(path: str | Path, *, timeout_s: float = 30.0) -> None:
    """Make a new high-water mark for a ledger whose mark is lost.

    Parameters
    ----------
    path : path
        The ledger.
    timeout_s : float
        How long to wait for another process.

    Raises
    ------
    LedgerError
        If there is a mark.

    Notes
    -----
    **Formal guarantees.** None: the operator vouches that this ledger was never copied back. If it was, what it has
    forgotten will be spent again.
    """
    with _for_its_operator(path, timeout_s) as (page, mark_path):
        if mark_path.exists():
            raise LedgerError(f"Expected no high-water mark at {mark_path}, got one; it was left alone.")
        page.state.write_mark(mark_path)


@contextmanager
def _for_its_operator(path: str | Path, timeout_s: float) -> Iterator[tuple[_SQLitePage, Path]]:
    """A transaction on a ledger whose mark is not believed."""
    ledger = SQLiteLedger.__new__(SQLiteLedger)
    ledger.path, ledger.timeout_s = Path(path).absolute(), timeout_s
    with ledger._connection(writable=True) as connection:
        with _clear_errors(ledger.path, timeout_s):
            _check_integrity(connection, ledger.path)
            connection.execute("BEGIN IMMEDIATE")
            ledger._header = _read_header(connection, ledger.path)
            page = _SQLitePage(connection, ledger)
        yield page, ledger._header.mark


@dataclass(frozen=True)
class _Header:
    """What a ledger was made with."""

    name: str
    created: float
    data: str
    budget_mu: float
    delta: float
    mark: Path
    key_file: Path | None
    key_check: bytes


def _read_header(connection: sqlite3.Connection, path: Path) -> _Header:
    name, created, data, budget_mu, delta, mark, key_file, key_check = connection.execute(
        "SELECT name, created, data, budget_mu, delta, mark, key_file, key_check FROM ledger"
    ).fetchone()
    key_path = Path(key_file) if key_file else None
    return _Header(name, created, data, budget_mu, delta, _mark_path(path, mark), key_path, key_check)


def _mark_path(path: Path, mark: str) -> Path:
    return Path(mark) if mark else path.with_name(path.name + ".mark")


def _key_check(key: bytes) -> bytes:
    return hmac.digest(key, b"murmurfl ledger key", hashlib.sha256)[:16]


def _read_state(connection: sqlite3.Connection, header: _Header, path: Path) -> LedgerState:
    state = _unsealed_state(connection, header)
    (seal,) = connection.execute("SELECT seal FROM state").fetchone()
    if state.seal != seal:
        raise _damaged(path, "contents that do not match their seal")
    return state


def _unsealed_state(connection: sqlite3.Connection, header: _Header) -> LedgerState:
    counter, samples_used = connection.execute("SELECT counter, samples_used FROM state").fetchone()
    sessions = {name: SessionState(mu, 0) for name, mu in connection.execute("SELECT session, mu FROM reserved")}
    for name, release, digest in connection.execute("SELECT session, release, digest FROM streams"):
        mu = sessions[name].mu if name in sessions else 0.0
        sessions[name] = SessionState(mu, release, digest)
    return LedgerState(header.name, header.budget_mu, header.delta, counter, samples_used, sessions)


def _session_summaries(connection: sqlite3.Connection) -> Iterator[SessionSummary]:
    for session, mu, fingerprint, releases, ack, terms, first, last in connection.execute(
        "SELECT s.session, r.mu, s.fingerprint, s.release, s.ack, s.terms, min(l.time), max(l.time) "
        "FROM streams s JOIN reserved r USING (session) LEFT JOIN releases l USING (session) "
        "GROUP BY s.session ORDER BY r.rowid"
    ):
        closed = fingerprint == _CLOSED
        yield SessionSummary(session, mu, releases, ack, closed, first, last, json.loads(terms or "{}"))


def _check_mark(state: LedgerState, mark: LedgerState, path: Path) -> None:
    if mark.ledger != state.ledger:
        raise LedgerError(
            f"Expected the high-water mark of {path}, got that of another ledger. Put the right one back; nothing was "
            "released."
        )
    if mark.counter > state.counter or (mark.counter == state.counter and mark.seal != state.seal):
        raise LedgerError(
            f"Expected {path} at commit {mark.counter} of its high-water mark or after it, got commit {state.counter} "
            "or another history: the ledger was copied back from a backup and has forgotten releases. Nothing was "
            "released. Put the newest file back, or go on without what was forgotten: `murmurfl ledger "
            "accept-rollback` closes all its sessions and counts as spent what the mark knows of."
        )


def _check_file(path: Path, *, writable: bool = False) -> None:
    check_private(
        path,
        "a ledger",
        missing="A node that had one must get it back: put the file back, or a backup of it and `murmurfl ledger "
        "accept-rollback`. On a new node make one: `murmurfl ledger create`. Nothing was released.",
        writable=writable,
    )


def _connect(path: Path, timeout_s: float, options: str = "mode=rw") -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.as_uri()}?{options}", timeout=timeout_s, isolation_level=None, uri=True)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA fullfsync = ON")
    return connection


def _connect_to_read(path: Path) -> sqlite3.Connection:
    # Without a log nobody is writing, and SQLite need not make its own files; with one they are there already.
    log = path.with_name(path.name + "-wal")
    return _connect(path, 5.0, "mode=ro" if log.exists() else "mode=ro&immutable=1")


def _check_format(connection: sqlite3.Connection, path: Path) -> None:
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application_id != APPLICATION_ID:
        raise LedgerError(
            f"Expected a murmurfl ledger at {path}, got another file or one whose making was interrupted; it was left "
            "alone. Check the path in the node's configuration; nothing was released."
        )
    if version != FORMAT:
        age = "an older" if version < FORMAT else "a newer"
        raise LedgerError(
            f"Expected a ledger of format {FORMAT} at {path}, got {age} one, format {version}; it was left alone. Use "
            "the murmurfl that wrote it; nothing was released."
        )


def _check_integrity(connection: sqlite3.Connection, path: Path) -> None:
    with _clear_errors(path, 0.0):
        (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if verdict != "ok":
        raise _damaged(path, str(verdict).splitlines()[0])


@contextmanager
def _clear_errors(path: Path, timeout_s: float) -> Iterator[None]:
    """Turn what SQLite, the disk or a damaged row says into a LedgerError that says what to do."""
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
        raise _damaged(path, str(error)) from error
    except OSError as error:
        raise LedgerError(f"Expected to read {path}, got {error.strerror}. Nothing was released.") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, what: str) -> LedgerError:
    return LedgerError(
        f"Expected a readable ledger at {path}, got {what}: it is damaged or no ledger. It was left alone and nothing "
        "was released. Restore a backup (then `murmurfl ledger accept-rollback`), or use these data no more."
    )


def _arrays(stream: StreamRecord) -> Iterator[tuple[str, int, NDArray[Any]]]:
    for release, counts in sorted(stream.pending.items()):
        yield "pending", release, counts
    for number, values in enumerate(stream.noise_state):
        yield "state", number, values


def _bytes(values: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _digest(stream: StreamRecord) -> str:
    digest = hashlib.blake2b(digest_size=16)
    plain = [stream.fingerprint, stream.release, stream.ack, stream.nonces.hex(), stream.terms]
    digest.update(json.dumps(plain).encode())
    for kind, number, values in _arrays(stream):
        digest.update(json.dumps([kind, number, values.dtype.str, values.shape]).encode())
        digest.update(_bytes(values))
    return digest.hexdigest()
