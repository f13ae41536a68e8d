"""The ledger's file: its tables and header, how far it has come, and the arrays that stay in it until they are read.

Large arrays are read when they are asked for. A release of a large model is asked for twice, before its gradients are
computed and when it is recorded, and mostly needs nothing of what was sent before. So what is large stays in the file,
for as long as the transaction lasts.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import sqlite3
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ..accounting.loss import Loss, total_loss
from ..errors import ANOTHER_FORMAT, LedgerError
from .ledger_records import StreamRecord
from .store import MarkFormat, Store, StoreTransaction, format_of, mark_path

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

ADDED = """
CREATE TABLE IF NOT EXISTS reserved_delta (session TEXT PRIMARY KEY, delta REAL NOT NULL);
"""
"""A table that a ledger has from its first session with an added delta on."""


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
    """Number of times that the noise key was exchanged."""


def read_reserved(connection: sqlite3.Connection) -> Iterator[tuple[str, float, float | None]]:
    """Yield the sessions in the order in which they were opened: name, mu reserved, and mu_local or None."""
    return connection.execute("SELECT session, mu, local FROM reserved ORDER BY rowid")


def read_added(connection: sqlite3.Connection) -> dict[str, float]:
    """Return the added delta of every session that has one."""
    (there,) = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'reserved_delta'").fetchone()
    return dict(connection.execute("SELECT session, delta FROM reserved_delta")) if there else {}


def write_key(connection: sqlite3.Connection, key: bytes, key_file: Path | None) -> None:
    """Replace the noise key, inside a transaction."""
    if format_of(connection) != ROTATED:
        connection.execute("ALTER TABLE ledger ADD COLUMN rotations INTEGER NOT NULL DEFAULT 0")
        connection.execute(f"PRAGMA user_version = {ROTATED}")
    row = b"" if key_file else key, key_check(key), str(key_file or "")
    connection.execute("UPDATE ledger SET key = ?, key_check = ?, key_file = ?, rotations = rotations + 1", row)


def key_check(key: bytes) -> bytes:
    """Return a check value by which a key is recognised without being written down."""
    return hmac.digest(key, b"murmurfl ledger key", hashlib.sha256)[:16]


@dataclass(frozen=True)
class SessionState:
    """Progress of one session."""

    mu: float = 0.0
    """Reserved, with a minus sign under a trusted server (:class:`~murmurfl.privacy.Account`)."""
    releases: int = 0
    digest: str = ""
    """Digest of the session's whole stream; empty if it has none."""
    local: float | None = None
    """Reserved for the worst case under secure aggregation; None otherwise."""
    delta: float = 0.0
    """Added delta."""

    @property
    def loss(self) -> Loss:
        """Reserved loss; in the worst case, for the case that nobody else is honest."""
        return Loss.of(abs(self.mu), self.local).with_added(self.delta)


@dataclass(frozen=True)
class LedgerState:
    """Progress of a ledger."""

    ledger: str
    """The ledger's own random name."""
    budget_mu: float
    delta: float
    counter: int = 0
    """Commits so far."""
    samples_used: int = 0
    sessions: Mapping[str, SessionState] = field(default_factory=dict)
    data: str = ""
    """Digest of the samples used up; empty in a ledger that never had one."""
    budget_local_mu: float | None = None
    """None until the operator has decided it."""
    key: str = ""
    """Check value of the noise key, once it was exchanged; empty in a ledger with its first key."""

    @cached_property
    def seal(self) -> str:
        """A digest of the whole state: it does not match if a part was lost or comes from another time."""
        document = self._document()
        if not self.data:
            del document["data"]  # what is not there is not sealed
        return hashlib.blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def name(self) -> str:
        """The ledger's own random name."""
        return self.ledger

    @property
    def steps(self) -> int:
        """Commits so far."""
        return self.counter

    def to_document(self) -> dict[str, Any]:
        """Return the contents of a mark."""
        return {"seal": self.seal, **self._document()}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> LedgerState:
        """Read what :meth:`to_document` wrote; ValueError if its seal does not match."""
        seal = document.pop("seal")
        sessions = {name: SessionState(**values) for name, values in document.pop("sessions").items()}
        state = cls(**document, sessions=sessions)
        if state.seal != seal:
            raise ValueError("the seal does not match")
        return state

    def _document(self) -> dict[str, Any]:
        document = asdict(self)
        if not self.key:
            del document["key"]
        for values in (document, *document["sessions"].values()):
            for name in ("local", "budget_local_mu"):
                if name in values and values[name] is None:
                    del values[name]
        for values in document["sessions"].values():
            if not values["delta"]:  # what is not there is not sealed
                del values["delta"]
        return document


LEDGER_MARK = MarkFormat[LedgerState](
    what="the ledger's high-water mark",
    key="murmurfl-ledger-mark",
    done="nothing was released",
    missing="Without it nobody can tell whether the ledger was copied back, so nothing is released. Put the mark back; "
    "if it is lost, and this ledger was never copied back, `murmurfl ledger new-mark` makes another.",
    damaged="Nothing was released. If the mark is lost, and this ledger was never copied back, remove the file; "
    "`murmurfl ledger new-mark` makes another.",
    other_format=ANOTHER_FORMAT,
    error=LedgerError,
    to_document=LedgerState.to_document,
    from_document=LedgerState.from_document,
)


@dataclass(frozen=True)
class BudgetLeft:
    """A ledger's budget and what new sessions may still reserve of it."""

    budget: Loss
    left: Loss
    delta: float
    sessions: int


def budget_left(mark: Path) -> BudgetLeft:
    """Read the budget left from a high-water mark; the ledger is neither locked nor touched.

    Notes
    -----
    What it returns does not depend on the client's data: budgets, and what sessions reserved when they were opened.
    Between a commit and its mark it is what was left before; the ledger alone decides what is released.
    """
    state = LEDGER_MARK.load(mark)
    budget, sessions = Loss.of(state.budget_mu, state.budget_local_mu), state.sessions.values()
    left = budget.left_of(total_loss(session.loss for session in sessions), state.delta)
    return BudgetLeft(budget, left, state.delta, len(sessions))


def unsealed_state(connection: sqlite3.Connection, header: Header) -> LedgerState:
    """Read how far the ledger has come, as its tables say."""
    counter, samples_used, data = connection.execute("SELECT counter, samples_used, data FROM state").fetchone()
    added = read_added(connection)
    sessions = {
        name: SessionState(mu, 0, local=local, delta=added.pop(name, 0.0))
        for name, mu, local in read_reserved(connection)
    }
    sessions |= {name: SessionState(delta=delta) for name, delta in added.items()}
    for name, release, digest in connection.execute("SELECT session, release, digest FROM streams"):
        sessions[name] = replace(sessions.get(name, SessionState()), releases=release, digest=digest)
    terms = header.budget_mu, header.delta
    key = header.key_check.hex() if header.rotations else ""
    return LedgerState(header.name, *terms, counter, samples_used, sessions, data, header.budget_local_mu, key)


class LedgerStore(Store[Header, LedgerState]):
    """The store of a ledger.

    Notes
    -----
    **Formal guarantees.** A file whose account, sessions or digests of streams do not match their seal is refused, and
    so is one whose seal is not the mark's at the mark's commit.
    """

    what = "a ledger"
    user = "node"
    done = "nothing was released"
    step = "commit"
    forgotten = "releases"
    error = LedgerError
    application_id = 0x6D757266  # "murf"
    formats = (FORMAT, ROTATED)
    schema = SCHEMA
    missing = (
        "A node that had one must get it back: put the file back, or a backup of it and `murmurfl ledger "
        "accept-rollback`. On a new node make one: `murmurfl ledger create`. Nothing was released."
    )
    other_format = ANOTHER_FORMAT
    lost = "Nothing was released. Restore a backup (then `murmurfl ledger accept-rollback`), or use these data no more."
    copied_back = (
        "Nothing was released. Put the newest file back, or go on without what was forgotten: `murmurfl ledger "
        "accept-rollback` closes all its sessions and counts as spent what the mark knows of."
    )
    other_mark = "Nothing was released."
    had_one = "Restore that one (docs/ledger.md); nothing was made."
    marks = LEDGER_MARK

    def read_header(self, connection: sqlite3.Connection) -> Header:
        name, created, data, budget_mu, delta, mark, key_file, key_check, budget_local_mu = connection.execute(
            "SELECT name, created, data, budget_mu, delta, mark, key_file, key_check, budget_local_mu FROM ledger"
        ).fetchone()
        rotations = 0
        if format_of(connection) == ROTATED:
            (rotations,) = connection.execute("SELECT rotations FROM ledger").fetchone()
        files = mark_path(self.path, mark), Path(key_file) if key_file else None
        return Header(name, created, data, budget_mu, delta, *files, key_check, budget_local_mu, rotations)

    def read_state(self, connection: sqlite3.Connection, header: Header) -> LedgerState:
        state = unsealed_state(connection, header)
        (seal,) = connection.execute("SELECT seal FROM state").fetchone()
        if state.seal != seal:
            raise self.damaged("contents that do not match their seal")
        return state

    def follows(self, connection: sqlite3.Connection, state: LedgerState, mark: LedgerState) -> bool:
        return mark.counter < state.counter or mark.seal == state.seal


LedgerFile = StoreTransaction[Header, LedgerState]
"""A ledger's file inside a transaction."""


LARGE_BYTES = 1 << 20
"""Arrays from here on stay in the file until they are asked for."""
_PIECE_BYTES = 1 << 20
Place = tuple[str, str, int]
"""Session, kind and number of an array."""


class StoredArray:
    """An array in a ledger's file, for as long as the transaction of its connection lasts."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        rowid: int,
        place: Place,
        dtype: str,
        shape: tuple[int, ...],
        errors: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._connection, self._errors = connection, errors
        self.rowid, self.place = rowid, place
        self.dtype, self.shape = np.dtype(dtype), shape
        self._read: weakref.ref[NDArray[Any]] | None = None

    def pieces(self) -> Iterator[bytes]:
        """Yield the array's bytes, some at a time."""
        with self._connection.blobopen("arrays", "content", self.rowid, readonly=True) as blob:
            while piece := blob.read(_PIECE_BYTES):
                yield piece

    def values(self) -> NDArray[Any]:
        """Return the array, read-only; read once as long as somebody holds it."""
        known = None if self._read is None else self._read()
        if known is None:
            known = self._values()
            self._read = weakref.ref(known)
        return known

    def is_read_as(self, values: NDArray[Any]) -> bool:
        """Return True if ``values`` is the array that was read here, and so is unchanged."""
        return self._read is not None and self._read() is values

    def _values(self) -> NDArray[Any]:
        values = np.empty(self.shape, self.dtype)
        room, start = values.reshape(-1).view(np.uint8), 0
        with self._errors():
            try:
                for piece in self.pieces():
                    room[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
                    start += len(piece)
            except sqlite3.ProgrammingError as error:
                raise LedgerError(
                    "Expected an array to be read in the transaction in which its ledger gave it, got one that has "
                    "ended.",
                    kind="wrong-order",
                ) from error
            if start < room.size:
                raise ValueError("an array that is too short")
        values.setflags(write=False)
        return values


Entry = NDArray[Any] | StoredArray


def of(entry: Entry) -> NDArray[Any]:
    """Return the array of an entry, read from the file if it is there."""
    return entry.values() if isinstance(entry, StoredArray) else entry


class StoredArrays(Mapping[int, NDArray[Any]]):
    """Arrays by number, the large ones in the file until they are asked for."""

    def __init__(self, entries: Mapping[int, Entry]) -> None:
        self.entries = entries

    def __getitem__(self, number: int) -> NDArray[Any]:
        return of(self.entries[number])

    def __contains__(self, number: object) -> bool:
        return number in self.entries  # without reading it

    def __iter__(self) -> Iterator[int]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class StoredState(Sequence[NDArray[Any]]):
    """A mechanism's state, its large arrays in the file until one is used; then it stays in memory."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self._read: tuple[NDArray[Any], ...] | None = None

    @overload
    def __getitem__(self, index: int) -> NDArray[Any]: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[NDArray[Any], ...]: ...

    def __getitem__(self, index: int | slice) -> NDArray[Any] | tuple[NDArray[Any], ...]:
        if self._read is None:
            self._read = tuple(map(of, self.entries))
        return self._read[index]

    def __len__(self) -> int:
        return len(self.entries)


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
    """Return an array's own bytes, not copied."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def digest_of(stream: StreamRecord) -> str:
    """Return a digest of a stream, arrays and all; what is still in the file is read in pieces."""
    digest = hashlib.blake2b(digest_size=16)
    plain = [stream.fingerprint, stream.release, stream.ack, stream.nonces.hex(), stream.terms]
    digest.update(json.dumps(plain).encode())
    for kind, number, values in arrays_of(stream):
        digest.update(json.dumps([kind, number, values.dtype.str, values.shape]).encode())
        for piece in values.pieces() if isinstance(values, StoredArray) else [bytes_of(values)]:
            digest.update(piece)
    return digest.hexdigest()
