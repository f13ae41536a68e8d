"""The records that a ledger keeps, and the interface of every ledger."""

from __future__ import annotations

import hashlib
import hmac
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..accounting.gdp import compose_gdp
from ..mechanisms import State
from ..noise.noise_keys import NoiseKeys


@dataclass(frozen=True)
class StreamRecord:
    """One session's stream of releases, as it stands between two releases."""

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
    """Under secure aggregation the random names, 16 bytes each, of the acknowledged release and of those after it that
    may still be acknowledged; empty otherwise."""
    order: bytes = b""
    """The nonce from which, with the machine's key, its secret order is made again
    (:func:`~murmurfl.privacy.machine.secret_order.slots_of`), 16 bytes; empty for other orders."""

    def acknowledged(self, ack: int, pending: Mapping[int, NDArray[np.int64]]) -> StreamRecord:
        """The stream after an acknowledgement."""
        ids = {j: name for j, name in self.ids.items() if j >= ack} if self.ids else self.ids
        return self._changed(ack=ack, pending=pending, ids=ids)

    def released(self, nonces: bytes, pending: Mapping[int, NDArray[np.int64]], noise_state: State) -> StreamRecord:
        """The stream after one more release."""
        return self._changed(release=self.release + 1, nonces=nonces, pending=pending, noise_state=noise_state)

    def _changed(self, **changes: Any) -> StreamRecord:
        # As dataclasses.replace in a quarter of its time: a simulation comes here twice a release.
        changed = object.__new__(StreamRecord)
        changed.__dict__.update(self.__dict__)
        changed.__dict__.update(changes)
        return changed


@dataclass(frozen=True)
class Account:
    """The privacy and samples that one machine has spent, over all sessions."""

    samples_used: int = 0
    """Fresh samples used up; they are taken in order, each once."""
    reserved: Mapping[str, float] = field(default_factory=dict)
    """mu reserved by each session: that of all its K releases, reserved whole when it makes its first, because an
    adaptive server may choose when to stop. With a minus sign: mu by a trusted server's word. The machine added no
    noise, so the figure holds against everybody but that server, and against it nothing does. Infinity: nothing
    holds against anybody, of a simulated machine (mechanism ``none``, or a mu its noise cannot serve)."""
    data: str = ""
    """Digest of the samples used up (:class:`~murmurfl.privacy.machine.data_digest.DataDigest`); empty where none is
    kept."""
    reserved_local: Mapping[str, float] = field(default_factory=dict)
    """mu_local of the sessions under secure aggregation: what holds for them whatever happens. For all others that is
    what they reserved."""

    @property
    def reserved_mu(self) -> float:
        """The mu of all sessions together: against a server only while :attr:`unbounded` is false."""
        return compose_gdp(map(abs, self.reserved.values()))

    @property
    def reserved_local_mu(self) -> float:
        """The mu of all sessions together as if every release had been seen by itself."""
        local = {session: abs(mu) for session, mu in self.reserved.items()} | dict(self.reserved_local)
        return compose_gdp(local.values())

    @property
    def unbounded(self) -> bool:
        """Whether a session was opened that has no bound: then the samples used have no guarantee against a server."""
        return any(no_bound(mu) for mu in self.reserved.values())

    def bound_of(self, session: str) -> float:
        """The mu that holds for a session against a server: what it reserved, or infinite."""
        reserved = self.reserved.get(session, math.inf)
        return math.inf if no_bound(reserved) else reserved

    def local_bound_of(self, session: str) -> float:
        """The mu that holds for a session whatever other machines and helpers do: what it reserved, or infinite."""
        return max(self.bound_of(session), self.reserved_local.get(session, 0.0))

    def reserve(self, session: str, mu: float, *, trusted: bool = False, local: float | None = None) -> Account:
        """The account with one more session; ``trusted`` if mu is a trusted server's word."""
        reserved_local = self.reserved_local if local is None else {**self.reserved_local, session: local}
        return replace(self, reserved={**self.reserved, session: -mu if trusted else mu}, reserved_local=reserved_local)


def no_bound(mu: float) -> bool:
    """Whether nothing holds against a server for a session, by its entry in :attr:`Account.reserved`."""
    return mu < 0.0 or math.isinf(mu)


def left_of(budget_mu: float, spent_mu: float) -> float:
    """The mu that new sessions may still reserve of a budget."""
    return math.sqrt(max(budget_mu**2 - spent_mu**2, 0.0))


class LedgerPage(ABC):
    """The ledger inside one exclusive transaction."""

    @abstractmethod
    def account(self) -> Account:
        """Read the account."""

    @abstractmethod
    def stream(self, session: str) -> StreamRecord | None:
        """A session's stream, or None if it has none yet."""

    @abstractmethod
    def commit(self, session: str, stream: StreamRecord, account: Account) -> None:
        """Record both, together and durably; after it returns the reply may leave."""


class Ledger(ABC):
    """A machine's memory of what it has spent.

    Notes
    -----
    **Formal guarantees.** An implementation promises that transactions on one machine's ledger exclude each other, that
    a commit is all or nothing, and that what was committed is what is read next. The machine's privacy rests on it.
    """

    durable: ClassVar[bool] = False
    """Whether a commit outlives the process: real machines insist on it."""

    budget_mu: float | None = None
    """The budget this ledger was made for, which a machine's policy must then have; None: the policy's own."""

    delta: float | None = None
    """Where the epsilons of this ledger are shown, likewise."""

    budget_local_mu: float | None = None
    """The budget for what holds whatever other machines and helpers do, likewise: of sessions under secure aggregation
    mu_local, of all others their mu."""

    local_hint: str = ""
    """Advice to the operator if that budget is too small; empty where it was decided."""

    def secret_of_owners(self, keys: NoiseKeys) -> bytes:
        """The secret from which, with their names, the places of owners follow (:class:`~murmurfl.privacy.Owners`).

        It follows from the machine's noise keys; a ledger whose key may be exchanged has a secret of its own.

        Notes
        -----
        **Formal guarantees.** It is the same for as long as the ledger is used, so owners keep their places. Without
        it nobody can tell from a name in which release its owner is, nor choose a name for that.
        """
        return hmac.digest(keys.secret_key, b"murmurfl places of owners", hashlib.sha256)

    @abstractmethod
    def exclusive(self) -> AbstractContextManager[LedgerPage]:
        """A transaction nobody else can enter; without a commit it changes nothing."""


class MemoryLedger(Ledger, LedgerPage):
    """A ledger in this process's memory: for tests and in-process experiments; gone with the process.

    Notes
    -----
    **Formal guarantees.** Transactions exclude each other, and what was committed is what is read next, until the
    process ends: a machine that was started again would spend its budget anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._account = Account()
        self._streams: dict[str, StreamRecord] = {}

    def exclusive(self) -> AbstractContextManager[LedgerPage]:
        return self

    def __enter__(self) -> LedgerPage:
        self._lock.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def account(self) -> Account:
        return self._account

    def stream(self, session: str) -> StreamRecord | None:
        return self._streams.get(session)

    def commit(self, session: str, stream: StreamRecord, account: Account) -> None:
        self._streams[session] = stream
        self._account = account
