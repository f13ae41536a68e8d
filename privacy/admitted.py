"""What the rule of admission decides about, and what it says (:mod:`.admission`): for one machine, and for many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import RefusedError
from .ledger import Account, LedgerPage
from .ledger.block import AccountBlock, StreamBlock


class Machines(Protocol):
    """The machines that are asked, a row each: what the rule must know of them beside their ledgers."""

    @property
    def num_samples(self) -> NDArray[np.int64]:
        """How many samples each of them has."""
        ...

    @property
    def fingerprints(self) -> Sequence[str]:
        """What names the policy and the key of each: a session in its ledger belongs to one of these."""
        ...

    def order_nonce(self, row: int, session: str) -> bytes:
        """The nonce of a session's secret order: drawn once, and the same until it is recorded."""
        ...

    def has_secret_order(self, row: int, account: Account) -> bool:
        """Whether any of a machine's sessions has a secret order."""
        ...


@dataclass(frozen=True, eq=False)
class Admissions:
    """Requests of several machines that may be answered, and what from; nothing is spent yet.

    Parameters
    ----------
    rows : ndarray of int
        Which of the machines that were asked these are; the other columns have a row for each of them.
    streams : StreamBlock
        With the acknowledgements applied.
    accounts : AccountBlock
        With the session's mu reserved.
    start, stop : ndarray of int
        The samples the releases will be made from.
    refused : dict of int to RefusedError
        Why the others are refused.
    """

    rows: NDArray[np.intp]
    streams: StreamBlock
    accounts: AccountBlock
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    refused: Mapping[int, RefusedError]

    @property
    def samples_used(self) -> NDArray[np.int64]:
        """Samples that are used up once they are recorded."""
        return np.maximum(self.accounts.samples_used, self.stop)

    @property
    def slices(self) -> list[slice]:
        """The samples of each release."""
        return list(map(slice, self.start.tolist(), self.stop.tolist()))


@dataclass(frozen=True, eq=False)
class Admission:
    """A request of one machine that may be answered, and what it will be answered from; nothing is spent yet.

    Parameters
    ----------
    page : LedgerPage
        The transaction it was made in. It is worth nothing after that.
    session : str
    admitted : Admissions
        Of a block of one.

    Notes
    -----
    Two admissions are never equal: each may be recorded once.
    """

    page: LedgerPage
    session: str
    admitted: Admissions

    @property
    def samples(self) -> slice:
        """The samples the release will be made from."""
        return self.admitted.slices[0]

    @property
    def streams(self) -> StreamBlock:
        """The machine's stream."""
        return self.admitted.streams

    @property
    def release(self) -> int:
        """The number of the release it is for."""
        return int(self.streams.release[0]) + 1

    @property
    def samples_used(self) -> int:
        """Samples that are used up once it is recorded."""
        return int(self.admitted.samples_used[0])
