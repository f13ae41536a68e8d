"""A ledger on disk inside one transaction: what is read there, what a commit writes and in which order."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import LedgerError
from ..mechanisms import State
from .ledger_file import (
    CLOSED,
    arrays_of,
    bytes_of,
    clear_errors,
    damaged,
    digest_of,
    opened,
    read_header,
    read_reserved,
    read_state,
    unsealed_state,
    write_key,
)
from .ledger_records import Account, LedgerPage, StreamRecord, no_bound
from .mark import LedgerState, SessionState
from .stored import LARGE_BYTES, Entry, Place, StoredArray, StoredArrays, StoredState, of


@contextmanager
def connection_to(path: Path, timeout_s: float) -> Iterator[sqlite3.Connection]:
    """A connection for one transaction: so threads and forks share none, and a file that was replaced is noticed."""
    with opened(path, timeout_s, writable=True) as connection:
        with clear_errors(path, timeout_s):
            if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
                # A copy that came back without a log. One that cannot be believed is left without it.
                read_state(connection, read_header(connection, path), path)
                connection.execute("PRAGMA journal_mode = WAL")
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
        self._large: dict[Place, StoredArray] = {}
        self.header = read_header(connection, path)
        self.state = read_state(connection, self.header, path)

    def account(self) -> Account:
        with clear_errors(self._path, self._timeout_s):
            rows = list(read_reserved(self._connection))
        reserved = {session: mu for session, mu, _ in rows}
        reserved_local = {session: local for session, _, local in rows if local is not None}
        return Account(self.state.samples_used, reserved, self.state.data, reserved_local)

    def stream(self, session: str) -> StreamRecord | None:
        with clear_errors(self._path, self._timeout_s):
            row = self._connection.execute(
                "SELECT fingerprint, release, ack, nonces, terms, digest FROM streams WHERE session = ?", (session,)
            ).fetchone()
            if row is None:
                return None
            kinds = ("pending", "state", "noted", "ids", "order")
            found: dict[str, dict[int, Entry]] = {kind: {} for kind in kinds}
            for kind, number, values in self._arrays_of(session):
                found[kind][number] = values
            fingerprint, release, ack, nonces, terms, digest = row
            ids, order = ({i: of(part).tobytes() for i, part in found[kind].items()} for kind in ("ids", "order"))
            stream = StreamRecord(
                fingerprint,
                release,
                ack,
                nonces,
                _as_needed(found["pending"]),
                _state_as_needed(list(found["state"].values())),
                terms,
                tuple(map(of, found["noted"].values())),  # needed outside of the transaction, too
                ids,
                b"".join(order.values()),
            )
            if digest_of(stream) != digest:
                raise damaged(self._path, "a stream that does not match its digest")
        return stream

    def commit(self, session: str, stream: StreamRecord, account: Account) -> None:
        with clear_errors(self._path, self._timeout_s):
            before = self.state.sessions.get(session, SessionState(0.0, 0))
            self._check_forward(session, before, stream, account)
            self._write_stream(session, stream)
            self._reserve(account.reserved, account.reserved_local)
            if stream.release > before.releases:
                line = (session, stream.release, time.time(), account.samples_used)
                self._connection.execute("INSERT INTO releases VALUES (?, ?, ?, ?)", line)
            self._finish(self.state.counter + 1, account.samples_used, account.data)

    def accept_rollback(self, mark: LedgerState) -> int:
        """Count as spent whatever the mark knows of, and close every session; returns how many."""
        with clear_errors(self._path, self._timeout_s):
            known = {**self.state.sessions, **mark.sessions}
            pairs = {name: [s.sessions.get(name, SessionState(0.0, 0)) for s in (self.state, mark)] for name in known}
            self._decide(mark.budget_local_mu)  # the copy may be from before it was decided
            self._reserve(
                {name: _larger(ours.mu, theirs.mu) for name, (ours, theirs) in pairs.items()},
                {name: max(map(_local, both)) for name, both in pairs.items() if _has_local(both)},
            )
            for name, (ours, theirs) in pairs.items():
                self._close(name, max(ours.releases, theirs.releases))
            # The mark comes first, because max keeps the first of two equals: the mark knows what left last.
            furthest = max((mark, self.state), key=lambda state: (state.samples_used, bool(state.data)))
            counter = max(self.state.counter, mark.counter) + 1
            self._finish(counter, furthest.samples_used, furthest.data)
        return len(known)

    def exchange_key(self, key: bytes, key_file: Path | None, data: str) -> int:
        """Have another noise key from now on, and close every session; returns how many were open.

        Parameters
        ----------
        key : bytes
        key_file : Path, optional
            Where it is; None: in the ledger.
        data : str
            Digest of the samples used up, under the new key.
        """
        with clear_errors(self._path, self._timeout_s):
            self._connection.execute("PRAGMA secure_delete = ON")  # the old key's bytes, the nonces and the sums go
            streams = self._connection.execute("SELECT session, fingerprint, release FROM streams").fetchall()
            for name, _, releases in streams:
                self._close(name, releases)
            write_key(self._connection, key, key_file)
            self.header = read_header(self._connection, self._path)
            self._finish(self.state.counter + 1, self.state.samples_used, data)
        return sum(fingerprint != CLOSED for _, fingerprint, _ in streams)

    def _close(self, session: str, releases: int) -> None:
        """Leave of a session what it was and how many releases it made: its noise and its sums are forgotten."""
        before = self.stream(session) or StreamRecord(CLOSED)
        self._write_stream(session, StreamRecord(CLOSED, releases, before.ack, terms=before.terms, order=before.order))

    def set_local_budget(self, budget_local_mu: float) -> None:
        """Set the budget of local figures, if it was not decided yet."""
        with clear_errors(self._path, self._timeout_s):
            self._decide(budget_local_mu)
            self._finish(self.state.counter + 1, self.state.samples_used, self.state.data)

    def _decide(self, budget_local_mu: float | None) -> None:
        if budget_local_mu is not None and self.header.budget_local_mu is None:
            self._connection.execute("UPDATE ledger SET budget_local_mu = ?", (budget_local_mu,))
            self.header = read_header(self._connection, self._path)

    def _reserve(self, reserved: Mapping[str, float], reserved_local: Mapping[str, float]) -> None:
        self._connection.executemany(
            "INSERT INTO reserved VALUES (?, ?, ?) ON CONFLICT (session) DO UPDATE SET mu = excluded.mu, "
            "local = excluded.local",
            ((session, mu, reserved_local.get(session)) for session, mu in reserved.items()),
        )

    def _check_forward(self, session: str, before: SessionState, stream: StreamRecord, account: Account) -> None:
        local = account.reserved_local
        if (
            account.samples_used < self.state.samples_used
            or stream.release < before.releases
            or any(_forgets(account.reserved.get(name, 0.0), past.mu) for name, past in self.state.sessions.items())
            or any(
                local.get(name, -1.0) < _local(past) for name, past in self.state.sessions.items() if _has_local([past])
            )
            # A release that is told to nobody by its name cannot be shown to be what the next one is built on.
            or (session in local and not stream.ids.keys() >= stream.pending.keys())
        ):
            raise LedgerError(
                "Expected a commit that forgets nothing spent, got fewer samples, releases or reserved budget than the "
                "ledger holds, or releases without their names; nothing was recorded or released."
            )

    def _arrays_of(self, session: str) -> Iterator[tuple[str, int, Entry]]:
        """A session's arrays as they are stored; the large ones are left where they are."""
        rows = self._connection.execute(
            "SELECT rowid, kind, number, dtype, shape, CASE WHEN length(content) < ? THEN content END "
            "FROM arrays WHERE session = ? ORDER BY kind, number",
            (LARGE_BYTES, session),
        )
        for rowid, kind, number, dtype, stated, content in rows:
            shape, place = tuple(json.loads(stated)), (session, kind, number)
            if content is not None:
                yield kind, number, np.frombuffer(content, dtype).reshape(shape)
                continue
            self._large[place] = StoredArray(self._connection, rowid, place, dtype, shape, self._errors)
            yield kind, number, self._large[place]

    def _errors(self) -> AbstractContextManager[None]:
        return clear_errors(self._path, self._timeout_s)

    def _is_stored(self, place: Place, values: Entry) -> bool:
        """Whether an array is in the file already, in this place and as it is."""
        stored = self._large.get(place)
        return stored is not None and (stored is values or stored.is_read_as(values))  # type: ignore[arg-type]

    def _write_stream(self, session: str, stream: StreamRecord) -> None:
        arrays = {(session, kind, number): values for kind, number, values in arrays_of(stream)}
        stay = {place: self._large[place] for place, values in arrays.items() if self._is_stored(place, values)}
        new = {place: of(values) for place, values in arrays.items() if place not in stay}
        marks = ", ".join("?" * len(stay))
        gone = f"DELETE FROM arrays WHERE session = ? AND rowid NOT IN ({marks})"  # noqa: S608 - question marks
        self._connection.execute(gone, (session, *(stored.rowid for stored in stay.values())))
        self._large = stay
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
            ((*place, values.dtype.str, json.dumps(values.shape), bytes_of(values)) for place, values in new.items()),
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


def _as_needed(entries: Mapping[int, Entry]) -> Mapping[int, NDArray[Any]]:
    """Arrays that are read when they are asked for, where any of them is large."""
    if any(isinstance(entry, StoredArray) for entry in entries.values()):
        return StoredArrays(entries)
    return cast("Mapping[int, NDArray[Any]]", entries)


def _state_as_needed(entries: Sequence[Entry]) -> State:
    if any(isinstance(entry, StoredArray) for entry in entries):
        return cast("State", StoredState(entries))
    return cast("State", tuple(entries))


def _forgets(mu: float, before: float) -> bool:
    """Whether a session's reserved mu is less than it was, or no longer that of a trusted server."""
    return abs(mu) < abs(before) or (no_bound(before) and not no_bound(mu))


def _larger(one: float, other: float) -> float:
    """The larger of two entries for a session's reserved mu, marked as a trusted server's if either is."""
    mu = max(abs(one), abs(other))
    return -mu if min(one, other) < 0.0 else mu


def _local(session: SessionState) -> float:
    """What a session has reserved for the case that nobody else is honest."""
    return abs(session.mu) if session.local is None else session.local


def _has_local(sessions: Iterable[SessionState]) -> bool:
    """Whether any of a session's histories was under secure aggregation."""
    return any(session.local is not None for session in sessions)
