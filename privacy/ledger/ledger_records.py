"""The records that a ledger keeps, the interface of every ledger, and the ledgers of many clients at once.

The ledgers of many clients are an array or a list for each entry, with a row for each client. The release rule works
on these (:mod:`murmurfl.privacy.release.admission`, :mod:`murmurfl.privacy.release.prefix_sums`). A real client is a
block of one, read from its ledger and written back to it; the clients of a simulation stand in one
:class:`BlockLedger`.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from ..accounting.loss import Loss, total_loss
from ..errors import ConfigurationError
from ..mechanisms import State
from ..noise import NoiseKeys


@dataclass(frozen=True)
class StreamRecord:
    """One session's stream of releases, as it stands between two releases.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import MemoryLedger, PrivacyPolicy, Privatizer, SimulatedKeys
    >>> ledger = MemoryLedger()
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0)
    >>> privatizer = Privatizer(policy, 3, 100, ledger, SimulatedKeys(1, "3"))
    >>> release = privatizer.release("session", 0, lambda samples: np.zeros((samples.stop - samples.start, 3)))
    >>> with ledger.exclusive() as transaction:
    ...     stream = transaction.stream("session")
    >>> stream.release, stream.ack, list(stream.pending)
    (1, 0, [1])
    """

    fingerprint: str
    """The noise plan this session was opened with."""
    release: int = 0
    """k, releases made."""
    ack: int = 0
    """The last of them the server says it has aggregated."""
    nonces: bytes = b""
    """The nonces from which the mechanism's state is made again, 16 bytes each, that of release k last."""
    pending: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    """P_j - P_ack for releases j > ack that may still be acknowledged: what was sent, noise included (without noise
    under a trusted server)."""
    noise_state: State = ()
    """The mechanism's state after release k, where it cannot be regenerated from the nonce."""
    terms: str = ""
    """Terms with which the session was opened (:meth:`~murmurfl.privacy.PrivacyPolicy.terms`), for whoever reads the
    ledger; a ledger nobody reads may leave them out."""
    noted: State = ()
    """Public values a client wants to find again at its next release, such as the query point of release k."""
    ids: Mapping[int, bytes] = field(default_factory=dict)
    """Random names, 16 bytes each, under secure aggregation, of the acknowledged release and of those after it that
    may still be acknowledged; empty otherwise."""
    order: bytes = b""
    """The nonce from which, with the client's key, its secret order is made again
    (:func:`~murmurfl.privacy.release.known_samples.slots_of`), 16 bytes; empty for other orders."""


@dataclass(frozen=True)
class Account:
    """The privacy and samples that one client has spent, over all sessions.

    Examples
    --------
    >>> from murmurfl.privacy import Loss
    >>> account = Account().reserve("spring", Loss.of(0.6)).reserve("autumn", Loss.of(0.8))
    >>> account.spent.mu, account.unbounded
    (1.0, False)
    """

    samples_used: int = 0
    """Fresh samples used up; they are taken in order, each once."""
    reserved: Mapping[str, float] = field(default_factory=dict)
    """mu reserved by each session: that of all its K releases, reserved whole when it makes its first, because an
    adaptive server may choose when to stop. With a minus sign: mu by a trusted server's word. The client added no
    noise, so the figure holds against everybody but that server, and against it nothing does. Infinity: nothing
    holds against anybody, of a simulated client (mechanism ``none``, or a mu its noise cannot serve)."""
    data: str = ""
    """Digest of the samples used up (:class:`~murmurfl.privacy.release.known_samples.DataDigest`); empty where none is
    kept."""
    reserved_local: Mapping[str, float] = field(default_factory=dict)
    """Loss that sessions under secure aggregation reserved in the worst case. For all others
    that is what they reserved."""
    reserved_delta: Mapping[str, float] = field(default_factory=dict)
    """Added delta of sessions that have one (:class:`~murmurfl.privacy.accounting.loss.Gaussian`)."""

    @property
    def spent(self) -> Loss:
        """The loss of all sessions together: against a server only while :attr:`unbounded` is false.

        In the worst case it is as if every release had been seen by itself.
        """
        return total_loss(
            Loss.of(abs(mu), self.reserved_local.get(name)).with_added(self.reserved_delta.get(name, 0.0))
            for name, mu in self.reserved.items()
        )

    @property
    def unbounded(self) -> bool:
        """Whether any session has no bound: then the samples used have no guarantee against a server."""
        return any(no_bound(mu) for mu in self.reserved.values())

    def bound_of(self, session: str) -> float:
        """Return the mu that holds for a session against a server: what it reserved, or infinite."""
        reserved = self.reserved.get(session, math.inf)
        return math.inf if no_bound(reserved) else reserved

    def local_bound_of(self, session: str) -> float:
        """Return the mu that holds for a session whatever other clients and helpers do.

        What it reserved, or infinite.
        """
        return max(self.bound_of(session), self.reserved_local.get(session, 0.0))

    def reserve(self, session: str, loss: Loss, *, trusted: bool = False) -> Account:
        """Return the account with one more session; ``trusted`` if its loss is a trusted server's word."""
        mu, local = loss.mus
        reserved_local = self.reserved_local if local is None else {**self.reserved_local, session: local}
        added = loss.added_delta
        return replace(
            self,
            reserved={**self.reserved, session: -mu if trusted else mu},
            reserved_local=reserved_local,
            reserved_delta={**self.reserved_delta, session: added} if added else self.reserved_delta,
        )


def no_bound(mu: float) -> bool:
    """Return True if nothing holds against a server for a session, by its entry in :attr:`Account.reserved`."""
    return mu < 0.0 or math.isinf(mu)


class LedgerTransaction(ABC):
    """The ledger inside one exclusive transaction.

    Examples
    --------
    >>> from murmurfl.privacy import Account, MemoryLedger, StreamRecord
    >>> ledger = MemoryLedger()
    >>> with ledger.exclusive() as transaction:
    ...     transaction.commit("session", StreamRecord(fingerprint="plan", release=1), Account(samples_used=8))
    >>> with ledger.exclusive() as transaction:
    ...     transaction.account().samples_used, transaction.stream("session").release, transaction.stream("another")
    (8, 1, None)
    """

    @abstractmethod
    def account(self) -> Account:
        """Read the account."""

    @abstractmethod
    def stream(self, session: str) -> StreamRecord | None:
        """Return a session's stream, or None if it has none yet."""

    @abstractmethod
    def commit(self, session: str, stream: StreamRecord, account: Account) -> None:
        """Record both, together and durably; after it returns the reply may leave."""


class Ledger(ABC):
    """A client's memory of what it has spent.

    Notes
    -----
    **Formal guarantees.** An implementation promises that transactions on one client's ledger exclude each other, that
    a commit is all or nothing, and that what was committed is what is read next. The client's privacy rests on it.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import MemoryLedger, PrivacyPolicy, Privatizer, SimulatedKeys
    >>> ledger = MemoryLedger()
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0)
    >>> privatizer = Privatizer(policy, 3, 100, ledger, SimulatedKeys(1, "3"))
    >>> release = privatizer.release("session", 0, lambda samples: np.zeros((samples.stop - samples.start, 3)))
    >>> with ledger.exclusive() as transaction:
    ...     account = transaction.account()
    >>> account.samples_used, account.spent.mu
    (2, 1.0)
    """

    durable: ClassVar[bool] = False
    """Whether a commit outlives the process: real clients insist on it."""

    budget_mu: float | None = None
    """The budget this ledger was made for, which a client's policy must then have; None: the policy's own."""

    delta: float | None = None
    """Delta at which the epsilons of this ledger are shown, likewise."""

    budget_local_mu: float | None = None
    """The budget for what holds whatever other clients and helpers do, likewise: of sessions under secure aggregation
    mu_local, of all others their mu."""

    local_hint: str = ""
    """Advice to the operator if that budget is too small; empty where it was decided."""

    def secret_of_owners(self, keys: NoiseKeys) -> bytes:
        """Return the secret from which, with their names, the places of owners follow.

        It follows from the client's noise keys; a ledger whose key may be exchanged has a secret of its own.

        Notes
        -----
        **Formal guarantees.** It is the same for as long as the ledger is used, so owners keep their places. Without
        it nobody can tell from a name in which release its owner is, nor choose a name for that.
        """
        return hmac.digest(keys.secret_key, b"murmurfl places of owners", hashlib.sha256)

    @abstractmethod
    def exclusive(self) -> AbstractContextManager[LedgerTransaction]:
        """Return a transaction nobody else can enter; without a commit it changes nothing."""


Counts = NDArray[np.int64]
Pending = Mapping[int, Counts]

NOTHING: Mapping[Any, Any] = {}
"""An empty mapping that rows share; nobody changes one."""


@dataclass
class _Block:
    """Columns of equal length."""

    _counted: ClassVar[str]
    """The column by which rows are counted."""

    def chosen(self, rows: Sequence[int] | NDArray[np.integer]) -> Any:
        """Copy some of the rows."""
        index = np.asarray(rows, dtype=np.intp)
        places = index.tolist()
        made = object.__new__(type(self))
        for name, column in vars(self).items():
            if isinstance(column, list):
                made.__dict__[name] = [column[i] for i in places]
            else:
                made.__dict__[name] = column[index] if isinstance(column, np.ndarray) else column
        return made

    def put(self, rows: Sequence[int] | NDArray[np.integer], block: Any) -> None:
        """Replace some of the rows by all rows of another block."""
        index = np.asarray(rows, dtype=np.intp)
        places = index.tolist()
        for name, column in vars(self).items():
            ours = getattr(block, name)
            if isinstance(column, list):
                for i, value in zip(places, ours, strict=True):
                    column[i] = value
            elif isinstance(column, np.ndarray):
                column[index] = ours

    def grow(self, rows: int) -> None:
        """Grow to so many rows; the new ones are copies of the first."""
        more = rows - len(vars(self)[self._counted])
        for name, column in vars(self).items():
            if isinstance(column, list):
                column.extend(column[:1] * more)
            elif isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate([column, np.repeat(column[:1], more)]))


@dataclass
class StreamBlock(_Block):
    """The streams of one session of several clients: each column an entry of :class:`StreamRecord`.

    A client without a stream yet has an empty fingerprint.
    """

    _counted = "release"
    session: str
    release: NDArray[np.int64]
    ack: NDArray[np.int64]
    fingerprint: list[str]
    nonces: list[bytes]
    pending: list[Pending]
    noise_state: list[State]
    terms: list[str]
    noted: list[State]
    ids: list[Mapping[int, bytes]]
    order: list[bytes]

    @classmethod
    def empty(cls, session: str, clients: int) -> StreamBlock:
        """Return a block of so many clients without streams."""
        numbers = np.zeros((2, clients), np.int64)
        defaults = ("", b"", NOTHING, (), "", (), NOTHING, b"")
        return cls(session, numbers[0], numbers[1], *([value] * clients for value in defaults))  # type: ignore[misc]

    @classmethod
    def of(cls, session: str, stream: StreamRecord | None) -> StreamBlock:
        """Return a block of one client."""
        block = cls.empty(session, 1)
        if stream is not None:
            block.set(0, stream)
        return block

    def __len__(self) -> int:
        return len(self.fingerprint)

    def has(self, row: int) -> bool:
        """Return True if a client has a stream."""
        return bool(self.fingerprint[row])

    def record(self, row: int) -> StreamRecord:
        made = object.__new__(StreamRecord)  # its constructor would set every entry by itself, at every release
        made.__dict__.update({name: getattr(self, name)[row] for name in _STREAM_LISTS})
        made.__dict__.update(fingerprint=self.fingerprint[row], release=int(self.release[row]), ack=int(self.ack[row]))
        return made

    def set(self, row: int, stream: StreamRecord) -> None:
        for name in ("fingerprint", "release", "ack", *_STREAM_LISTS):
            getattr(self, name)[row] = getattr(stream, name)


_STREAM_LISTS = ("nonces", "pending", "noise_state", "terms", "noted", "ids", "order")


@dataclass
class AccountBlock(_Block):
    """The accounts of several clients: each column an entry of :class:`Account`."""

    _counted = "samples_used"
    samples_used: NDArray[np.int64]
    reserved: list[Mapping[str, float]]
    data: list[str]
    reserved_local: list[Mapping[str, float]]
    reserved_delta: list[Mapping[str, float]]

    @classmethod
    def empty(cls, clients: int) -> AccountBlock:
        """Return a block of so many clients that have spent nothing."""
        none = [[NOTHING] * clients for _ in range(3)]
        return cls(np.zeros(clients, np.int64), none[0], [""] * clients, *none[1:])

    @classmethod
    def of(cls, account: Account) -> AccountBlock:
        """Return a block of one client."""
        block = cls.empty(1)
        block.set(0, account)
        return block

    def record(self, row: int) -> Account:
        of_row = self.reserved[row], self.data[row], self.reserved_local[row], self.reserved_delta[row]
        return Account(int(self.samples_used[row]), *of_row)

    def set(self, row: int, account: Account) -> None:
        for entry in fields(Account):
            getattr(self, entry.name)[row] = getattr(account, entry.name)


class LedgerBlock(Protocol):
    """The ledgers of several clients, a row each; a real client's is the only one of its block."""

    def exclusive(self, rows: NDArray[np.intp]) -> AbstractContextManager[LedgerBlock]:
        """Return a transaction of some clients together, in which alone the other methods may be called."""
        ...

    def transaction(self, row: int) -> LedgerTransaction:
        """One client's ledger, within a transaction."""
        ...

    def streams(self, session: str, rows: NDArray[np.intp]) -> StreamBlock:
        """Copy some clients' streams of a session."""
        ...

    def accounts(self, rows: NDArray[np.intp]) -> AccountBlock:
        """Copy what some clients have spent."""
        ...

    def commit(self, rows: NDArray[np.intp], streams: StreamBlock, accounts: AccountBlock | None = None) -> None:
        """Record streams, and accounts if they changed; after it returns replies may leave."""
        ...


class BlockLedger:
    """The ledgers of the clients of a simulation, in this process's memory; gone with it.

    Each client has a row, from 0. One in whose ledger nothing stands yet costs four bytes.
    """

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self._lock = threading.RLock()
        self._entered: list[NDArray[np.intp]] = []  # the clients of each transaction that is open
        # Where each client's entries stand in the columns: at first all of them in row 0, which stays empty.
        self._place = np.zeros(clients, np.int32)
        self._used = self._rows = 1
        self._accounts = AccountBlock.empty(1)
        self._streams: dict[str, StreamBlock] = {}

    def ledger(self, row: int) -> Ledger:
        """One client's ledger."""
        if not 0 <= row < self.clients:
            raise IndexError(row)
        return MemoryLedger(self, row)

    def transaction(self, row: int) -> LedgerTransaction:
        """One client's ledger, within a transaction of all."""
        return MemoryLedger(self, row)

    @contextmanager
    def exclusive(self, rows: NDArray[np.intp]) -> Iterator[BlockLedger]:
        """Open a transaction of some clients together; other threads wait."""
        with self._lock:
            # A client that is named twice, or again by the thread that has it, would make the same release twice.
            if len(set(rows.tolist())) < len(rows) or any(np.isin(rows, others).any() for others in self._entered):
                raise ConfigurationError(
                    "Expected every client once and in one transaction at a time, got one again before its "
                    "transaction has ended; nothing was released.",
                    kind="wrong-order",
                    setting="rows",
                )
            self._entered.append(rows)
            try:
                yield self
            finally:
                # By identity: arrays of equal rows are equal, and transactions may end in any order.
                self._entered = [others for others in self._entered if others is not rows]

    def account(self, row: int) -> Account:
        """Return what one client has spent."""
        return self._accounts.record(int(self._place[row]))

    def stream(self, session: str, row: int) -> StreamRecord | None:
        """Return one client's stream of a session, or None if it has none yet."""
        known, place = self._streams.get(session), int(self._place[row])
        return known.record(place) if known is not None and known.has(place) else None

    def record(self, rows: NDArray[np.intp], session: str, stream: StreamRecord, account: Account) -> None:
        """Record the stream and account of one client, the only one of ``rows``."""
        place = int(self._places(rows)[0])
        self._of_session(session).set(place, stream)
        self._accounts.set(place, account)

    def streams(self, session: str, rows: NDArray[np.intp]) -> StreamBlock:
        """Copy some clients' streams of a session."""
        known = self._streams.get(session)
        return StreamBlock.empty(session, len(rows)) if known is None else known.chosen(self._place[rows])

    def whole(self, session: str, rows: NDArray[np.intp]) -> tuple[StreamBlock, list[int]] | None:
        """Return a session's streams uncopied, with the rows of some clients in them; None if the session has none."""
        known = self._streams.get(session)
        return None if known is None else (known, self._place[rows].tolist())

    def accounts(self, rows: NDArray[np.intp]) -> AccountBlock:
        """Copy what some clients have spent."""
        return self._accounts.chosen(self._place[rows])

    def figures(self, rows: NDArray[np.intp]) -> list[NDArray[np.int64]]:
        """Return samples used, sessions reserved and releases of each session, from which statements follow."""
        places = self._place[rows]
        sessions = np.array([len(reserved) for reserved in self._accounts.reserved], dtype=np.int64)
        releases = [streams.release[places] for streams in self._streams.values()]
        return [self._accounts.samples_used[places], sessions[places], *releases]

    def commit(self, rows: NDArray[np.intp], streams: StreamBlock, accounts: AccountBlock | None = None) -> None:
        """Record streams and accounts together."""
        places = self._places(rows)
        self._of_session(streams.session).put(places, streams)
        if accounts is not None:
            self._accounts.put(places, accounts)

    def _of_session(self, session: str) -> StreamBlock:
        if session not in self._streams:
            self._streams[session] = StreamBlock.empty(session, self._rows)
        return self._streams[session]

    def _places(self, rows: NDArray[np.intp]) -> NDArray[np.int32]:
        """Return the indices of the clients' entries; a client that is new gets an entry of its own."""
        new = rows[self._place[rows] == 0]
        if new.size:
            needed = self._used + len(new)
            if needed > self._rows:
                self._rows = min(max(needed, self._rows + self._rows // 2), self.clients + 1)
                for block in (self._accounts, *self._streams.values()):
                    block.grow(self._rows)
            self._place[new] = np.arange(self._used, needed, dtype=np.int32)
            self._used = needed
        return self._place[rows]


class MemoryLedger(Ledger, LedgerTransaction):
    """A ledger in this process's memory: for tests and simulations; gone with the process.

    Parameters
    ----------
    block : BlockLedger, optional
        The ledgers of which it is one; by default it is the only one of its block.
    row : int
        Its row there.

    Notes
    -----
    **Formal guarantees.** Transactions exclude each other, and what was committed is what is read next, until the
    process ends: a client that was started again would spend its budget anew.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import PrivacyPolicy, Privatizer, SimulatedKeys
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0)
    >>> privatizer = Privatizer(policy, 3, 100, MemoryLedger(), SimulatedKeys(1, "3"))
    >>> privatizer.statement("session").samples_used
    0
    """

    def __init__(self, block: BlockLedger | None = None, row: int = 0) -> None:
        self._block, self._row = block or BlockLedger(1), row
        self._rows = np.array([row], dtype=np.intp)

    @contextmanager
    def exclusive(self) -> Iterator[LedgerTransaction]:
        with self._block.exclusive(self._rows):
            yield self

    def account(self) -> Account:
        return self._block.account(self._row)

    def stream(self, session: str) -> StreamRecord | None:
        return self._block.stream(session, self._row)

    def commit(self, session: str, stream: StreamRecord, account: Account) -> None:
        self._block.record(self._rows, session, stream, account)


class JoinedLedgers:
    """Separate ledgers of clients, such as a real client's own, as a :class:`LedgerBlock`."""

    def __init__(self, ledgers: Sequence[Ledger]) -> None:
        self._ledgers = list(ledgers)
        self._transactions: dict[int, LedgerTransaction] = {}

    def transaction(self, row: int) -> LedgerTransaction:
        """One client's ledger, within a transaction."""
        return self._transactions[row]

    @contextmanager
    def exclusive(self, rows: NDArray[np.intp]) -> Iterator[JoinedLedgers]:
        """Open a transaction in the ledger of each of some clients."""
        with ExitStack() as stack:
            opened = JoinedLedgers(self._ledgers)
            for row in rows.tolist():
                opened._transactions[row] = stack.enter_context(self._ledgers[row].exclusive())
            yield opened

    def streams(self, session: str, rows: NDArray[np.intp]) -> StreamBlock:
        """Read some clients' streams of a session."""
        block = StreamBlock.empty(session, len(rows))
        for place, row in enumerate(rows.tolist()):
            stream = self._transactions[row].stream(session)
            if stream is not None:
                block.set(place, stream)
        return block

    def accounts(self, rows: NDArray[np.intp]) -> AccountBlock:
        """Read what some clients have spent."""
        block = AccountBlock.empty(len(rows))
        for place, row in enumerate(rows.tolist()):
            block.set(place, self._transactions[row].account())
        return block

    def commit(self, rows: NDArray[np.intp], streams: StreamBlock, accounts: AccountBlock | None = None) -> None:
        """Record streams and accounts, client by client."""
        for place, row in enumerate(rows.tolist()):
            transaction = self._transactions[row]
            account = transaction.account() if accounts is None else accounts.record(place)
            transaction.commit(streams.session, streams.record(place), account)
