"""A ledger's contents for its operator, read without altering the ledger."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..accounting.gdp import compose_gdp
from ..errors import LedgerError
from .ledger_file import (
    CLOSED,
    LEDGER,
    check_mark,
    clear_errors,
    opened,
    read_header,
    read_reserved,
    read_state,
)
from .ledger_records import left_of, no_bound
from .mark import read_mark

_ATTEMPTS = 50
_PAUSE_S = 0.02
WAIT_S = 5.0
"""How long to wait for another process, in seconds."""

Read = TypeVar("Read")


@dataclass(frozen=True)
class SessionSummary:
    """One session of a ledger, for its operator."""

    session: str
    mu: float
    """Reserved whole, whatever number of its releases was made; under a trusted server that server's word."""
    releases: int
    ack: int
    """The last release the server says it has."""
    closed: bool
    """Whether it was closed after a rollback."""
    first_release: float | None
    """When, in seconds since 1970; ``last_release`` likewise."""
    last_release: float | None
    terms: Mapping[str, Any]
    """The policy it was opened with and the noise that followed from it."""
    trusted: bool = False
    """Whether the machine left the noise to a trusted server: mu holds against everybody but that server, by its word;
    against it nothing is guaranteed."""
    mu_local: float | None = None
    """Reserved under secure aggregation: what holds whatever other machines and helpers do, where ``mu`` rests on
    enough of them. None otherwise."""

    @property
    def reserved_local(self) -> float:
        """The mu reserved whatever other machines and helpers do."""
        return self.mu if self.mu_local is None else self.mu_local

    @property
    def min_honest(self) -> int | None:
        """How many honest machines of each sum ``mu`` rests on; None if it rests on none or only the mark knows."""
        return None if self.mu_local is None else self.terms.get("min_honest")


@dataclass(frozen=True)
class LedgerSummary:
    """The contents of a ledger, for its operator."""

    data: str
    """The operator's name for the data."""
    created: float
    """When, in seconds since 1970."""
    budget_mu: float
    delta: float
    reserved_mu: float
    """Mu of all sessions together: what counts as spent. Against a server it is a bound only while none was trusted."""
    samples_used: int
    commits: int
    mark: str
    """Where the high-water mark is."""
    mark_problem: str
    """The error of the mark, or empty."""
    key_file: str
    """Where the noise key is; empty: in the ledger."""
    sessions: tuple[SessionSummary, ...]
    """In the order in which they were opened."""
    budget_local_mu: float
    """Budget for what holds whatever other machines and helpers do; ``budget_mu`` where it was not decided."""
    local_decided: bool

    @property
    def summed(self) -> bool:
        """Whether the local figure differs from the other: by a session, or by its budget."""
        return self.local_decided or any(session.mu_local is not None for session in self.sessions)

    @property
    def reserved_local_mu(self) -> float:
        """Mu of all sessions together, whatever other machines and helpers do."""
        return compose_gdp(session.reserved_local for session in self.sessions)

    @property
    def left_local_mu(self) -> float:
        """Mu that new sessions may still reserve of ``budget_local_mu``."""
        return left_of(self.budget_local_mu, self.reserved_local_mu)

    @property
    def trusted_a_server(self) -> bool:
        """Whether any session left the noise to a trusted server; then new sessions can only be of that kind."""
        return any(session.trusted for session in self.sessions)

    @property
    def left_mu(self) -> float:
        """Mu that new sessions may still reserve."""
        return left_of(self.budget_mu, self.reserved_mu)


def read_ledger(path: str | Path) -> LedgerSummary:
    """Read a ledger without altering it.

    It may be in use, or a copy. A mark that is missing or does not agree is no error here; the summary says so. After a
    crash SQLite's own index (``-shm``) of the log that was left may be made again; nothing else is touched.

    Notes
    -----
    What it returns does not depend on the machine's data.
    """
    return read_steadily(Path(path).absolute(), _read)


def read_steadily(path: Path, read: Callable[[Path], Read]) -> Read:
    """Read a ledger while nobody writes to it: again, if somebody did."""
    for _ in range(_ATTEMPTS):
        before = _times(path)
        try:
            found = read(path)
        except LedgerError:
            if _times(path) == before:
                raise
        else:
            if _times(path) == before:
                return found
        time.sleep(_PAUSE_S)  # its node wrote to it meanwhile
    raise LedgerError(
        f"Expected a moment in which {path} is not written to, got none in {_ATTEMPTS} attempts; try again."
    )


def _times(path: Path) -> list[tuple[int, int, int] | None]:
    """Inode, size and time of the files that change when a ledger is written to."""
    stats = [file.stat() if file.exists() else None for file in (path, _log(path))]
    return [None if stat is None else (stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]


def _log(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def read_only(path: Path) -> str:
    """Options of a connection that makes no file."""
    # Without a log nobody is writing, and SQLite need not make its own files; with one they are there already.
    return "mode=ro" if _log(path).exists() else "mode=ro&immutable=1"


def _read(path: Path) -> LedgerSummary:
    with clear_errors(path, WAIT_S), opened(path, WAIT_S, read_only(path)) as connection:
        LEDGER.check_integrity(connection, path)
        header, problem = read_header(connection, path), ""
        try:
            mark = read_mark(header.mark)
        except LedgerError as error:
            mark, problem = None, str(error)
        connection.execute("BEGIN")
        state = read_state(connection, header, path)
        sessions = tuple(session_summaries(connection))
    if mark is not None:
        try:
            check_mark(state, mark, path)
        except LedgerError as error:
            problem = str(error)
    local = header.budget_local_mu
    return LedgerSummary(
        data=header.data,
        created=header.created,
        budget_mu=header.budget_mu,
        delta=header.delta,
        reserved_mu=compose_gdp(session.mu for session in sessions),
        samples_used=state.samples_used,
        commits=state.counter,
        mark=str(header.mark),
        mark_problem=problem,
        key_file=str(header.key_file or ""),
        sessions=sessions,
        budget_local_mu=header.budget_mu if local is None else local,
        local_decided=local is not None,
    )


def session_summaries(connection: sqlite3.Connection) -> Iterator[SessionSummary]:
    """Yield the sessions of an open ledger, in the order in which they were opened."""
    local = {session: mu_local for session, _, mu_local in read_reserved(connection)}
    for session, mu, fingerprint, releases, ack, terms, first, last in connection.execute(
        "SELECT s.session, r.mu, s.fingerprint, s.release, s.ack, s.terms, min(l.time), max(l.time) "
        "FROM streams s JOIN reserved r USING (session) LEFT JOIN releases l USING (session) "
        "GROUP BY s.session ORDER BY r.rowid"
    ):
        made = session, abs(mu), releases, ack, fingerprint == CLOSED, first, last, json.loads(terms or "{}")
        yield SessionSummary(*made, trusted=no_bound(mu), mu_local=local[session])
