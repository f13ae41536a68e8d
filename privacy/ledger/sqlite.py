"""The ledger of a real node: one SQLite file that outlives crashes and refuses whatever it cannot believe.

One file of mode 600 holds what a node must know again after a loss of power: the account, every session's stream, a
line for every release, and the noise key (or the name of the file that holds it). A second, small file, the high-water
mark, shows when the first was copied back from a backup. Header, mark, locking and the order of writing are those of
every durable store (:mod:`.store`). A release that was committed before a crash and not sent is wasted: the stream goes
on after it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError, LedgerError
from ..files import check_private
from ..mechanisms import State
from ..noise import KEY_BYTES, NoiseKeys, SystemKeys
from .ledger_file import (
    ADDED,
    CLOSED,
    LARGE_BYTES,
    UNDECIDED,
    Entry,
    Header,
    LedgerFile,
    LedgerState,
    LedgerStore,
    Place,
    SessionState,
    StoredArray,
    StoredArrays,
    StoredState,
    arrays_of,
    bytes_of,
    digest_of,
    key_check,
    of,
    read_added,
    read_reserved,
    unsealed_state,
    write_key,
)
from .ledger_records import Account, Ledger, LedgerTransaction, StreamRecord, no_bound
from .store import mark_path


@contextmanager
def begun(path: Path, timeout_s: float) -> Iterator[SQLiteTransaction]:
    """Begin a transaction that nobody else can enter, whatever the mark says; what is not committed in it is gone."""
    with LedgerStore(path, timeout_s).begun() as file:
        yield SQLiteTransaction(file)


class SQLiteTransaction(LedgerTransaction):
    """The ledger inside a transaction that has begun; without a commit nothing remains once it is closed."""

    def __init__(self, file: LedgerFile) -> None:
        self.file = file
        self._connection, self._errors = file.connection, file.store.errors
        self._large: dict[Place, StoredArray] = {}

    @property
    def header(self) -> Header:
        """The settings with which the ledger was made."""
        return self.file.header

    @property
    def state(self) -> LedgerState:
        """Progress of the ledger."""
        return self.file.state

    def account(self) -> Account:
        with self._errors():
            rows, added = list(read_reserved(self._connection)), read_added(self._connection)
        reserved = {session: mu for session, mu, _ in rows}
        reserved_local = {session: local for session, _, local in rows if local is not None}
        return Account(self.state.samples_used, reserved, self.state.data, reserved_local, added)

    def stream(self, session: str) -> StreamRecord | None:
        with self._errors():
            row = self._connection.execute(
                "SELECT fingerprint, release, ack, nonces, terms, digest FROM streams WHERE session = ?", (session,)
            ).fetchone()
            if row is None:
                return None
            found: dict[str, dict[int, Entry]] = {kind: {} for kind in ("pending", "state", "noted", "ids", "order")}
            for kind, number, values in self._arrays_of(session):
                found[kind][number] = values
            fingerprint, release, ack, nonces, terms, digest = row
            stream = StreamRecord(
                fingerprint,
                release,
                ack,
                nonces,
                pending=_as_needed(found["pending"]),
                noise_state=_state_as_needed(list(found["state"].values())),
                terms=terms,
                noted=tuple(map(of, found["noted"].values())),  # needed outside of the transaction, too
                ids={i: of(name).tobytes() for i, name in found["ids"].items()},
                order=b"".join(of(part).tobytes() for part in found["order"].values()),
            )
            if digest_of(stream) != digest:
                raise self.file.store.damaged("a stream that does not match its digest")
        return stream

    def commit(self, session: str, stream: StreamRecord, account: Account) -> None:
        with self._errors():
            before = self.state.sessions.get(session, SessionState())
            self._check_forward(session, before, stream, account)
            self._write_stream(session, stream)
            self._reserve(account.reserved, account.reserved_local, account.reserved_delta)
            if stream.release > before.releases:
                line = (session, stream.release, time.time(), account.samples_used)
                self._connection.execute("INSERT INTO releases VALUES (?, ?, ?, ?)", line)
            self._finish(self.state.counter + 1, account.samples_used, account.data)

    def accept_rollback(self, mark: LedgerState) -> int:
        """Count as spent whatever the mark knows of, and close every session; returns how many."""
        with self._errors():
            known = {**self.state.sessions, **mark.sessions}
            pairs = {name: [s.sessions.get(name, SessionState()) for s in (self.state, mark)] for name in known}
            self._decide(mark.budget_local_mu)  # the copy may be from before it was decided
            self._reserve(
                {name: _larger(ours.mu, theirs.mu) for name, (ours, theirs) in pairs.items()},
                {name: max(s.loss.worst_case.mu for s in both) for name, both in pairs.items() if _summed(*both)},
                {name: added for name, both in pairs.items() if (added := max(s.delta for s in both))},
            )
            for name, (ours, theirs) in pairs.items():
                self._close(name, max(ours.releases, theirs.releases))
            # The mark comes first, because max keeps the first of two equals: the mark knows what left last.
            furthest = max((mark, self.state), key=lambda state: (state.samples_used, bool(state.data)))
            counter = max(self.state.counter, mark.counter) + 1
            self._finish(counter, furthest.samples_used, furthest.data)
        return len(known)

    def exchange_key(self, key: bytes, key_file: Path | None, data: str) -> int:
        """Replace the noise key, close every session and return how many were open.

        ``key_file`` is None if the key is kept in the ledger; ``data`` is the digest of the used samples under the new
        key.
        """
        with self._errors():
            self._connection.execute("PRAGMA secure_delete = ON")  # the old key's bytes, the nonces and the sums go
            streams = self._connection.execute("SELECT session, fingerprint, release FROM streams").fetchall()
            for name, _, releases in streams:
                self._close(name, releases)
            write_key(self._connection, key, key_file)
            self._read_header()
            self._finish(self.state.counter + 1, self.state.samples_used, data)
        return sum(fingerprint != CLOSED for _, fingerprint, _ in streams)

    def _close(self, session: str, releases: int) -> None:
        """Forget a session's noise and sums; keep what it was and how many releases it made."""
        before = self.stream(session) or StreamRecord(CLOSED)
        self._write_stream(session, StreamRecord(CLOSED, releases, before.ack, terms=before.terms, order=before.order))

    def set_local_budget(self, budget_local_mu: float) -> None:
        with self._errors():
            self._decide(budget_local_mu)
            self._finish(self.state.counter + 1, self.state.samples_used, self.state.data)

    def set_data(self, data: str) -> None:
        """Write down what the operator calls the data."""
        with self._errors():
            self._connection.execute("UPDATE ledger SET data = ?", (data,))
            self._read_header()
            self._finish(self.state.counter + 1, self.state.samples_used, self.state.data)

    def _decide(self, budget_local_mu: float | None) -> None:
        if budget_local_mu is not None and self.header.budget_local_mu is None:
            self._connection.execute("UPDATE ledger SET budget_local_mu = ?", (budget_local_mu,))
            self._read_header()

    def _reserve(
        self,
        reserved: Mapping[str, float],
        reserved_local: Mapping[str, float],
        reserved_delta: Mapping[str, float],
    ) -> None:
        if reserved_delta:
            self._connection.execute(ADDED)
            self._connection.executemany("INSERT OR REPLACE INTO reserved_delta VALUES (?, ?)", reserved_delta.items())
        self._connection.executemany(
            "INSERT INTO reserved VALUES (?, ?, ?) ON CONFLICT (session) DO UPDATE SET mu = excluded.mu, "
            "local = excluded.local",
            ((session, mu, reserved_local.get(session)) for session, mu in reserved.items()),
        )

    def _check_forward(self, session: str, before: SessionState, stream: StreamRecord, account: Account) -> None:
        local, past = account.reserved_local, self.state.sessions
        summed = {name: state.loss.worst_case.mu for name, state in past.items() if _summed(state)}
        if (
            account.samples_used < self.state.samples_used
            or stream.release < before.releases
            or any(_forgets(account.reserved.get(name, 0.0), state.mu) for name, state in past.items())
            or any(name not in local or local[name] < mu for name, mu in summed.items())
            or any(account.reserved_delta.get(name, 0.0) < state.delta for name, state in past.items())
            # Without its name a release cannot be shown to be what the next one is built on.
            or (session in local and not stream.ids.keys() >= stream.pending.keys())
        ):
            raise LedgerError(
                "Expected a commit that forgets nothing spent, got fewer samples, releases or reserved budget than the "
                "ledger holds, or releases without their names; nothing was recorded or released.",
                kind="mismatch",
            )

    def _arrays_of(self, session: str) -> Iterator[tuple[str, int, Entry]]:
        """Yield a session's arrays; the large ones stay in the file."""
        rows = self._connection.execute(
            "SELECT rowid, kind, number, dtype, shape, CASE WHEN length(content) < ? THEN content END "
            "FROM arrays WHERE session = ? ORDER BY kind, number",
            (LARGE_BYTES, session),
        )
        for rowid, kind, number, dtype, dimensions, content in rows:
            shape, place = tuple(json.loads(dimensions)), (session, kind, number)
            if content is not None:
                yield kind, number, np.frombuffer(content, dtype).reshape(shape)
                continue
            self._large[place] = StoredArray(self._connection, rowid, place, dtype, shape, self._errors)
            yield kind, number, self._large[place]

    def _is_stored(self, place: Place, values: Entry) -> bool:
        """Return True if an array is in the file already, in this place and unchanged."""
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
        row = session, stream.fingerprint, stream.release, stream.ack, stream.nonces, stream.terms, digest_of(stream)
        self._connection.execute("INSERT OR REPLACE INTO streams VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        self._connection.executemany(
            "INSERT INTO arrays VALUES (?, ?, ?, ?, ?, ?)",
            ((*place, values.dtype.str, json.dumps(values.shape), bytes_of(values)) for place, values in new.items()),
        )

    def _read_header(self) -> None:
        self.file.header = self.file.store.read_header(self._connection)

    def _finish(self, counter: int, samples_used: int, data: str) -> None:
        row = counter, samples_used, data
        self._connection.execute("UPDATE state SET counter = ?, samples_used = ?, data = ?", row)
        state = unsealed_state(self._connection, self.header)
        self._connection.execute("UPDATE state SET seal = ?", (state.seal,))
        self.file.commit()


def _as_needed(entries: Mapping[int, Entry]) -> Mapping[int, NDArray[Any]]:
    """Return the arrays, read when they are asked for if any of them is large."""
    if any(isinstance(entry, StoredArray) for entry in entries.values()):
        return StoredArrays(entries)
    return cast("Mapping[int, NDArray[Any]]", entries)


def _state_as_needed(entries: Sequence[Entry]) -> State:
    if any(isinstance(entry, StoredArray) for entry in entries):
        return cast("State", StoredState(entries))
    return cast("State", tuple(entries))


def _forgets(mu: float, before: float) -> bool:
    """Return True if a session's reserved mu fell, or is no longer marked as a trusted server's."""
    return abs(mu) < abs(before) or (no_bound(before) and not no_bound(mu))


def _larger(one: float, other: float) -> float:
    """Return the larger of two entries for a session's reserved mu, marked as a trusted server's if either is."""
    mu = max(abs(one), abs(other))
    return -mu if min(one, other) < 0.0 else mu


def _summed(*histories: SessionState) -> bool:
    """Return True if any of a session's histories was under secure aggregation."""
    return any(state.local is not None for state in histories)


class SQLiteLedger(Ledger):
    """An existing ledger in a SQLite file; :meth:`create` makes one.

    Parameters
    ----------
    path : path
        The ledger's file.
    timeout_s : float
        How long a transaction waits for another process or thread that is using the ledger before it refuses.

    Notes
    -----
    **Formal guarantees.** Transactions exclude each other, a commit is all or nothing, and what was committed is what
    is read next, across processes and losses of power, as far as the disk keeps what it says it has written. A commit
    moves the high-water mark before it returns. A ledger that is missing is never made anew here, and one that is
    behind its mark, or differs from it, releases nothing until its operator accepts the rollback. If ledger and mark
    were both copied back nothing here can tell; noise is still never repeated, because every release draws a fresh
    nonce (:class:`~murmurfl.privacy.SystemKeys`), but samples and budget would be spent twice.

    Examples
    --------
    >>> import tempfile
    >>> from murmurfl.privacy import read_ledger
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ledger = SQLiteLedger.create(f"{folder}/ledger.sqlite", budget_mu=2.0, delta=1e-5)
    ...     read_ledger(f"{folder}/ledger.sqlite").budget.mu
    2.0
    """

    durable: ClassVar[bool] = True

    def __init__(self, path: str | Path, *, timeout_s: float = 30.0) -> None:
        self._store = LedgerStore(Path(path).absolute(), timeout_s)
        self._header = self._store.check()
        self.budget_mu = self._header.budget_mu
        self.delta = self._header.delta
        decided = self._header.budget_local_mu
        # Whoever did not decide has decided for the smaller one: what may be spent in the worst case.
        self.budget_local_mu = self.budget_mu if decided is None else decided
        self.local_hint = UNDECIDED.format(path=self.path) if decided is None else ""

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        budget_mu: float,
        delta: float,
        budget_local_mu: float | None = None,
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
            At which its epsilons are shown.
        budget_local_mu : float, optional
            Budget for what holds whatever server, helpers and other clients do: sessions under secure aggregation
            reserve more of it than of ``budget_mu``. Default ``budget_mu``.
        data : str
            What the operator calls the data.
        mark : path, optional
            Where the high-water mark goes: best on a disk that is not backed up with the ledger. Default ``path`` with
            ``.mark`` after it.
        key_file : path, optional
            A new file for the noise key; default it is kept in the ledger.

        Notes
        -----
        **Formal guarantees.** The key comes from the operating system. Nothing is ever overwritten, but for a mark
        under which nothing was released.
        """
        if not (math.isfinite(budget_mu) and budget_mu > 0):
            raise ConfigurationError(
                f"Expected budget_mu > 0 and finite, got {budget_mu!r}.",
                kind="out-of-range",
                setting="budget_mu",
                got=budget_mu,
            )
        if not 0 < delta < 1:
            raise ConfigurationError(
                f"Expected delta between 0 and 1, got {delta!r}.", kind="out-of-range", setting="delta", got=delta
            )
        check_local_budget(budget_local_mu, budget_mu)
        path = Path(path).absolute()
        mark_file = mark_path(path, "" if mark is None else str(Path(mark).absolute()))
        key_path = None if key_file is None else Path(key_file).absolute()
        files = [path, mark_file, *([] if key_path is None else [key_path])]
        if len(set(files)) < len(files):
            raise ConfigurationError(
                f"Expected ledger, mark and key in files of their own, got {files}.", kind="conflict"
            )
        local = None if budget_local_mu is None else float(budget_local_mu)
        key, terms = secrets.token_bytes(KEY_BYTES), (float(budget_mu), float(delta))
        state = LedgerState(secrets.token_hex(16), *terms, budget_local_mu=local)
        header = Header(state.ledger, time.time(), data, *terms, mark_file, key_path, key_check(key), local)

        def fill(connection: sqlite3.Connection) -> None:
            # A mark beside the ledger is looked for there: it goes where the ledger goes.
            files = {"mark": "" if mark is None else str(mark_file), "key_file": str(key_path or "")}
            row = {**vars(header), **files, "key": key if key_path is None else b""}
            connection.execute(
                "INSERT INTO ledger VALUES (:name, :created, :data, :budget_mu, :delta, :mark, :key_file, :key, "
                ":key_check, :budget_local_mu)",
                row,
            )
            connection.execute("INSERT INTO state VALUES (0, 0, ?, '')", (state.seal,))

        made = None if key_path is None else (key_path, key)
        LedgerStore(path, timeout_s).make(header, state, fill, key=made)
        return cls(path, timeout_s=timeout_s)

    @property
    def path(self) -> Path:
        """The ledger's file."""
        return self._store.path

    @property
    def data(self) -> str:
        """Operator's name for the data."""
        return self._header.data

    def call_data(self, data: str) -> None:
        """Call the data something else from now on; nothing is spent."""
        with self.exclusive() as page:
            page.set_data(data)
            self._header = page.header

    def keys(self) -> SystemKeys:
        """Return the node's noise key, with fresh nonces.

        Refused if its file is open to others or holds another key.
        """
        header = self._header
        with self._store.errors():
            if header.key_file is not None:
                check_private(
                    header.key_file,
                    "the noise key",
                    missing="Put it back; without it the sessions that are open cannot go on. Nothing was released.",
                )
                key = header.key_file.read_bytes()
            else:
                with self._store.connected() as connection:
                    (key,) = connection.execute("SELECT key FROM ledger").fetchone()
        if len(key) != KEY_BYTES or not hmac.compare_digest(key_check(key), header.key_check):
            raise LedgerError(
                f"Expected the noise key {self.path} was made with, got another or a damaged one in "
                f"{header.key_file or self.path}. Put the right one back; nothing was released.",
                kind="mismatch",
            )
        return SystemKeys(key)

    def secret_of_owners(self, keys: NoiseKeys) -> bytes:
        # The ledger's own random name: of 128 bits, made once, kept when the key is exchanged, and only ever in the two
        # private files.
        return hmac.digest(bytes.fromhex(self._header.name), b"murmurfl places of owners", hashlib.sha256)

    def seal_of(self, content: bytes) -> str:
        """Return a mark by which this ledger, and no other, knows again what it has released.

        Notes
        -----
        **Formal guarantees.** To whoever has not read the ledger it is indistinguishable from random, as far as
        HMAC-SHA-256 is, and says nothing about the data. It stays the same when the noise key is exchanged.
        """
        return hmac.digest(bytes.fromhex(self._header.name), b"murmurfl released " + content, hashlib.sha256).hex()

    def has_sealed(self, content: bytes, seal: str) -> bool:
        """Return True if a mark is this ledger's (:meth:`seal_of`)."""
        return hmac.compare_digest(self.seal_of(content).encode(), seal.encode(errors="replace"))

    @contextmanager
    def exclusive(self) -> Iterator[SQLiteTransaction]:
        with self._store.exclusive(self._header) as file:
            yield SQLiteTransaction(file)


def check_local_budget(budget_local_mu: float | None, budget_mu: float) -> None:
    """Raise if the local budget is smaller than the budget that rests on others' honesty."""
    if budget_local_mu is not None and not (math.isfinite(budget_local_mu) and budget_local_mu >= budget_mu):
        raise ConfigurationError(
            f"Expected budget_local_mu >= budget_mu = {budget_mu:g} and finite, got {budget_local_mu!r}: what holds "
            "in the worst case is never less than what holds if others are honest.",
            kind="out-of-range",
            setting="budget_local_mu",
            got=budget_local_mu,
        )
