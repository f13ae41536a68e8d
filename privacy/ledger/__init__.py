"""The ledger: what a machine must remember so that it never spends the same privacy twice.

Spend before you speak: a release, its nonce, the samples it used up and what has not been acknowledged are committed
before the reply leaves. A crash in between wastes a release; it never repeats one.

Read :mod:`.ledger_records` first, then :mod:`.sqlite`, the ledger of a real node: its transactions are in
:mod:`.ledger_page`, its file in :mod:`.ledger_file`, its high-water mark in :mod:`.mark`.
"""

from .key_rotation import rotate_key
from .ledger_records import Account, Ledger, LedgerPage, MemoryLedger, StreamRecord
from .ledger_summary import LedgerSummary, SessionSummary, read_ledger
from .repair import accept_rollback, new_mark, set_local_budget
from .sqlite import SQLiteLedger

__all__ = [
    "Account",
    "Ledger",
    "LedgerPage",
    "LedgerSummary",
    "MemoryLedger",
    "SQLiteLedger",
    "SessionSummary",
    "StreamRecord",
    "accept_rollback",
    "new_mark",
    "read_ledger",
    "rotate_key",
    "set_local_budget",
]
