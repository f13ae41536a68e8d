"""The ledger in a process's memory."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from .ledger_records import Account, Ledger, LedgerPage, StreamRecord


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
