"""Ledgers of machines that were made by themselves, as one block's (:mod:`.ledger_block`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
from numpy.typing import NDArray

from .ledger_block import AccountBlock, StreamBlock
from .ledger_records import Ledger, LedgerPage


class JoinedLedgers:
    """Ledgers of machines that were made by themselves, as one block's.

    Parameters
    ----------
    ledgers : sequence of Ledger
    """

    def __init__(self, ledgers: Sequence[Ledger]) -> None:
        self._ledgers = list(ledgers)
        self._pages: dict[int, LedgerPage] = {}

    def page(self, row: int) -> LedgerPage:
        """One of them, within a transaction."""
        return self._pages[row]

    @contextmanager
    def exclusive(self, rows: NDArray[np.intp]) -> Iterator[JoinedLedgers]:
        """A transaction in each of some of them."""
        with ExitStack() as stack:
            opened = JoinedLedgers(self._ledgers)
            for row in rows.tolist():
                opened._pages[row] = stack.enter_context(self._ledgers[row].exclusive())
            yield opened

    def streams(self, session: str, rows: NDArray[np.intp]) -> StreamBlock:
        """A session's streams of some of them."""
        block = StreamBlock.empty(session, len(rows))
        for place, row in enumerate(rows.tolist()):
            stream = self._pages[row].stream(session)
            if stream is not None:
                block.set(place, stream)
        return block

    def accounts(self, rows: NDArray[np.intp]) -> AccountBlock:
        """What some of them have spent."""
        block = AccountBlock.empty(len(rows))
        for place, row in enumerate(rows.tolist()):
            block.set(place, self._pages[row].account())
        return block

    def commit(self, rows: NDArray[np.intp], streams: StreamBlock, accounts: AccountBlock | None = None) -> None:
        """Record both."""
        for place, row in enumerate(rows.tolist()):
            page = self._pages[row]
            account = page.account() if accounts is None else accounts.record(place)
            page.commit(streams.session, streams.record(place), account)
