"""The ledger: what a machine must remember so that it never spends the same privacy twice.

Spend before you speak: a release, its nonce, the samples it used up and what has not been acknowledged are committed
before the reply leaves. A crash in between wastes a release; it never repeats one.

:mod:`.ledger_records` has what is remembered, the interface of every ledger and the one of tests and simulations;
:mod:`.sqlite` that of a real node, on its :mod:`.ledger_page` in the :mod:`.ledger_file` of its file, with the
high-water :mod:`.mark` beside it; :mod:`.repair`, :mod:`.key_rotation` and :mod:`.ledger_summary` are for its operator.
``murmurfl.clients`` adds the ledger on Flower's ``context.state``.
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
