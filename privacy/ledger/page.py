"""A ledger on disk inside one transaction: what is read there, what a commit writes and in which order."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import LedgerError
from .format import (
    CLOSED,
    arrays_of,
    bytes_of,
    clear_errors,
    damaged,
    digest_of,
    opened,
    read_header,
    read_state,
    unsealed_state,
)
from .mark import LedgerState, SessionState
from .records import Account, LedgerPage, StreamRecord, no_bound


@contextmanager
def connection_to(path: Path, timeout_s: float) -> Iterator[sqlite3.Connection]:
    """A connection for one transaction: so threads and forks share none, and a file that was replaced is noticed."""
    with opened(path, timeout_s, writable=True) as connection:
        with clear_errors(path, timeout_s):
            connection.execute("PRAGMA journal_mode = WAL")  # a copy may have come back without it
        yield connection


@contextmanager
def begun(path: Path, timeout_s: float) -> Iterator[SQLitePage]:
    """A transaction that nobody else can enter; what is not committed in it is gone."""
    with connection_to(path, timeout_s) as connection:
        with clear_errors(path, timeout_s):
            connection.execute("BEGIN IMMEDIATE")
            page = SQLitePage(connection, path, timeout_s)
        yield page


class SQLitePage(LedgerPage):
    """The ledger inside a transaction that has begun; without a commit nothing remains once it is closed."""

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
            # The mark comes first, because max keeps the first of two equals: the mark knows what left last.
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
        # The mark is moved inside another transaction, so that no other process moves it at the same time. Another
        # process may have committed in between and moved it further, so the state is read again.
        self._connection.execute("BEGIN IMMEDIATE")
        self.state = read_state(self._connection, self.header, self._path)
        self.state.write_mark(self.header.mark)


def _forgets(mu: float, before: float) -> bool:
    """Whether a session's reserved mu is less than it was, or no longer that of a trusted server."""
    return abs(mu) < abs(before) or (no_bound(before) and not no_bound(mu))


def _larger(one: float, other: float) -> float:
    """The larger of two entries for a session's reserved mu, marked as a trusted server's if either is."""
    mu = max(abs(one), abs(other))
    return -mu if min(one, other) < 0.0 else mu
