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
  on after it, and the next transaction moves the mark before it does anything else;
* after the mark: both know of the release; whether it was sent or not, it is never made again.

The mark is never ahead of the ledger, unless the ledger was copied back. (Writing the mark first would leave it ahead
after a crash, and one commit behind would look like either.)
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigurationError, LedgerError
from .files import check_private, create_private, sync_folder
from .high_water_mark import LedgerState, SessionState, read_mark
from .keys import SystemKeys
from .ledger import Account, Ledger, LedgerPage, StreamRecord, by_a_servers_word
from .noise import KEY_BYTES
from .sqlite_format import (
    APPLICATION_ID,
    CLOSED,
    FORMAT,
    SCHEMA,
    arrays_of,
    bytes_of,
    check_file,
    check_format,
    check_integrity,
    check_mark,
    check_mark_belongs,
    clear_errors,
    connect,
    damaged,
    digest_of,
    is_rolled_back,
    key_check,
    mark_path,
    read_header,
    read_state,
    unsealed_state,
)


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
        with _connection(self.path, timeout_s) as connection, clear_errors(self.path, timeout_s):
            check_integrity(connection, self.path)
            self._header = read_header(connection, self.path)
            mark = read_mark(self._header.mark)  # before the ledger: another process may be moving both
            connection.execute("BEGIN")
            check_mark(read_state(connection, self._header, self.path), mark, self.path)
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
        mark_file = mark_path(path, "" if mark is None else str(Path(mark).absolute()))
        files = [path, mark_file] + ([] if key_file is None else [Path(key_file).absolute()])
        if len(set(files)) < len(files):
            raise ConfigurationError(f"Expected ledger, mark and key in files of their own, got {files}.")
        key, state = secrets.token_bytes(KEY_BYTES), LedgerState(secrets.token_hex(16), float(budget_mu), float(delta))
        create_private(path, "a ledger")
        made = [path]
        try:
            if mark_file.exists() and (counter := read_mark(mark_file).counter) > 0:
                raise LedgerError(
                    f"Expected no trace of an earlier ledger, got a high-water mark at {mark_file} that counts "
                    f"{counter} commits: this node had a ledger. Restore that one (docs/ledger.md); nothing was made."
                )
            for key_path in files[2:]:
                create_private(key_path, "a noise key", key)
                made.append(key_path)
            state.write_mark(mark_file)
            header = {
                "name": state.ledger,
                "created": time.time(),
                "data": data,
                "budget_mu": state.budget_mu,
                "delta": state.delta,
                "mark": "" if mark is None else str(mark_file),
                "key_file": "".join(map(str, files[2:])),
                "key": key if key_file is None else b"",
                "key_check": key_check(key),
            }
            with clear_errors(path, timeout_s), closing(connect(path, timeout_s)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                # All in one transaction: what is interrupted is not a ledger.
                connection.executescript(f"BEGIN; {SCHEMA}")
                connection.execute(
                    "INSERT INTO ledger VALUES (:name, :created, :data, :budget_mu, :delta, :mark, :key_file, :key, "
                    ":key_check)",
                    header,
                )
                connection.execute("INSERT INTO state VALUES (0, 0, ?, '')", (state.seal,))
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
        with clear_errors(self.path, self.timeout_s):
            if header.key_file is not None:
                check_private(
                    header.key_file,
                    "the noise key",
                    missing="Put it back; without it the sessions that are open cannot go on. Nothing was released.",
                )
                key = header.key_file.read_bytes()
            else:
                with _connection(self.path, self.timeout_s) as connection:
                    (key,) = connection.execute("SELECT key FROM ledger").fetchone()
        if len(key) != KEY_BYTES or not hmac.compare_digest(key_check(key), header.key_check):
            raise LedgerError(
                f"Expected the noise key {self.path} was made with, got another or a damaged one in "
                f"{header.key_file or self.path}. Put the right one back; nothing was released."
            )
        return SystemKeys(key)

    @contextmanager
    def exclusive(self) -> Iterator[LedgerPage]:
        with _begun(self.path, self.timeout_s) as page:
            if page.header != self._header:
                raise LedgerError(
                    f"Expected the ledger this node began with at {self.path}, got another. Nothing was released; "
                    "restart the node."
                )
            mark = read_mark(page.header.mark)
            check_mark(page.state, mark, self.path)
            if mark.counter < page.state.counter:
                # Of a commit whose mark was not written; if it still cannot be, nothing more is spent.
                page.state.write_mark(page.header.mark)
            yield page


@contextmanager
def _connection(path: Path, timeout_s: float) -> Iterator[sqlite3.Connection]:
    """A connection for one transaction: so threads and forks share none, and a file that was replaced is noticed."""
    check_file(path, writable=True)
    with clear_errors(path, timeout_s):
        connection = connect(path, timeout_s)
    with closing(connection):
        with clear_errors(path, timeout_s):
            check_format(connection, path)
            connection.execute("PRAGMA journal_mode = WAL")  # a copy may have come back without it
        yield connection


@contextmanager
def _begun(path: Path, timeout_s: float) -> Iterator[_SQLitePage]:
    with _connection(path, timeout_s) as connection:
        with clear_errors(path, timeout_s):
            connection.execute("BEGIN IMMEDIATE")
            page = _SQLitePage(connection, path, timeout_s)
        yield page


class _SQLitePage(LedgerPage):
    """The ledger inside a transaction that has begun; what is not committed is gone when its connection is closed."""

    def __init__(self, connection: sqlite3.Connection, path: Path, timeout_s: float) -> None:
        self._connection, self._path, self._timeout_s = connection, path, timeout_s
        self.header = read_header(connection, path)
        self.state = read_state(connection, self.header, path)

    def account(self) -> Account:
        with clear_errors(self._path, self._timeout_s):
            reserved = dict(self._connection.execute("SELECT session, mu FROM reserved ORDER BY rowid"))
        return Account(self.state.samples_used, reserved, self.state.data)

    def stream(self, session: str) -> StreamRecord | None:
        with clear_errors(self._path, self._timeout_s):
            row = self._connection.execute(
                "SELECT fingerprint, release, ack, nonces, terms, digest FROM streams WHERE session = ?", (session,)
            ).fetchone()
            if row is None:
                return None
            arrays: dict[str, dict[int, NDArray[Any]]] = {"pending": {}, "state": {}, "noted": {}}
            for kind, number, dtype, shape, content in self._connection.execute(
                "SELECT kind, number, dtype, shape, content FROM arrays WHERE session = ? ORDER BY kind, number",
                (session,),
            ):
                arrays[kind][number] = np.frombuffer(content, dtype).reshape(json.loads(shape))
            fingerprint, release, ack, nonces, terms, digest = row
            states, noted = (tuple(arrays[kind].values()) for kind in ("state", "noted"))
            stream = StreamRecord(fingerprint, release, ack, nonces, arrays["pending"], states, terms, noted)
            if digest_of(stream) != digest:
                raise damaged(self._path, "a stream that does not match its digest")
        return stream

    def commit(self, session: str, stream: StreamRecord, account: Account) -> None:
        with clear_errors(self._path, self._timeout_s):
            before = self.state.sessions.get(session, SessionState(0.0, 0))
            self._check_forward(before, stream, account)
            self._write_stream(session, stream)
            self._reserve(account.reserved)
            if stream.release > before.releases:
                line = (session, stream.release, time.time(), account.samples_used)
                self._connection.execute("INSERT INTO releases VALUES (?, ?, ?, ?)", line)
            self._finish(self.state.counter + 1, account.samples_used, account.data)

    def accept_rollback(self, mark: LedgerState) -> int:
        """Count as spent whatever the mark knows of, and close every session; returns how many."""
        with clear_errors(self._path, self._timeout_s):
            known = {**self.state.sessions, **mark.sessions}
            pairs = {name: [s.sessions.get(name, SessionState(0.0, 0)) for s in (self.state, mark)] for name in known}
            self._reserve({name: _larger(ours.mu, theirs.mu) for name, (ours, theirs) in pairs.items()})
            for name, (ours, theirs) in pairs.items():
                before = self.stream(name) or StreamRecord(CLOSED)
                releases = max(ours.releases, theirs.releases)
                self._write_stream(name, StreamRecord(CLOSED, releases, before.ack, terms=before.terms))
            # The mark first: of what both know equally well it has what left last.
            furthest = max((mark, self.state), key=lambda state: (state.samples_used, bool(state.data)))
            counter = max(self.state.counter, mark.counter) + 1
            self._finish(counter, furthest.samples_used, furthest.data)
        return len(known)

    def _reserve(self, reserved: Mapping[str, float]) -> None:
        self._connection.executemany(
            "INSERT INTO reserved VALUES (?, ?) ON CONFLICT (session) DO UPDATE SET mu = excluded.mu",
            reserved.items(),
        )

    def _check_forward(self, before: SessionState, stream: StreamRecord, account: Account) -> None:
        if (
            account.samples_used < self.state.samples_used
            or stream.release < before.releases
            or any(_forgets(account.reserved.get(name, 0.0), past.mu) for name, past in self.state.sessions.items())
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
                digest_of(stream),
            ),
        )
        self._connection.executemany(
            "INSERT INTO arrays VALUES (?, ?, ?, ?, ?, ?)",
            (
                (session, kind, number, values.dtype.str, json.dumps(values.shape), bytes_of(values))
                for kind, number, values in arrays_of(stream)
            ),
        )

    def _finish(self, counter: int, samples_used: int, data: str) -> None:
        row = counter, samples_used, data
        self._connection.execute("UPDATE state SET counter = ?, samples_used = ?, data = ?", row)
        state = unsealed_state(self._connection, self.header)
        self._connection.execute("UPDATE state SET seal = ?", (state.seal,))
        self._connection.execute("COMMIT")
        # The mark is moved inside a transaction again, so that no other process moves it at the same time; one that
        # came in between may have committed and moved it further.
        self._connection.execute("BEGIN IMMEDIATE")
        self.state = read_state(self._connection, self.header, self._path)
        self.state.write_mark(self.header.mark)


def _forgets(mu: float, before: float) -> bool:
    """Whether a session's reserved mu is less than it was, or no longer that of a trusted server."""
    return abs(mu) < abs(before) or (by_a_servers_word(before) and not by_a_servers_word(mu))


def _larger(one: float, other: float) -> float:
    """What two accounts of a session's reserved mu have in common: the larger, and a trusted server's if either is."""
    mu = max(abs(one), abs(other))
    return -mu if min(one, other) < 0.0 else mu


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
    path = Path(path).absolute()
    with _begun(path, timeout_s) as page:
        mark = read_mark(page.header.mark)
        check_mark_belongs(page.state, mark, path)
        if not is_rolled_back(page.state, mark):
            raise LedgerError(f"Expected a ledger that was copied back, got {path}, which was not; it was left alone.")
        return page.accept_rollback(mark)


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
    with _begun(Path(path).absolute(), timeout_s) as page:
        if page.header.mark.exists():
            raise LedgerError(f"Expected no high-water mark at {page.header.mark}, got one; it was left alone.")
        page.state.write_mark(page.header.mark)


def needs_upgrade(path: str | Path, *, timeout_s: float = 30.0) -> bool:
    """Whether a ledger is one of murmurfl 0.1.

    Parameters
    ----------
    path : path
        The ledger.
    timeout_s : float
        How long to wait for another process.

    Raises
    ------
    LedgerError
        If there is none, or it is of a format this version does not know.

    Notes
    -----
    **Formal guarantees.** Releases nothing and changes nothing.
    """
    path = Path(path).absolute()
    check_file(path)
    with clear_errors(path, timeout_s), closing(connect(path, timeout_s)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        check_format(connection, path, expected=1 if version == 1 else FORMAT)
    return version == 1


def upgrade_ledger(path: str | Path, *, timeout_s: float = 30.0) -> None:
    """Make a ledger of murmurfl 0.1 one that knows its data, from its next release on.

    Parameters
    ----------
    path : path
        The ledger.
    timeout_s : float
        How long to wait for another process.

    Raises
    ------
    LedgerError
        If it is none of format 1, cannot be believed, or was copied back; it is left as it was.

    Notes
    -----
    **Formal guarantees.** None: the operator vouches that the data are those the ledger was used with, row by row. The
    rows used so far are known by a digest as soon as the node makes its next release.
    """
    path = Path(path).absolute()
    check_file(path, writable=True)
    with clear_errors(path, timeout_s), closing(connect(path, timeout_s)) as connection:
        check_format(connection, path, expected=1)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ALTER TABLE state ADD COLUMN data TEXT NOT NULL DEFAULT ''")
        header = read_header(connection, path)
        check_mark(read_state(connection, header, path), read_mark(header.mark), path)
        connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.execute("COMMIT")
