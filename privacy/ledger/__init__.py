"""The ledger: what a machine must remember so that it never spends the same privacy twice.

Spend before you speak: a release, its nonce, the samples it used up and what has not been acknowledged are committed
before the reply leaves. A crash in between wastes a release; it never repeats one.

:mod:`.records` has what is remembered and the interface of every ledger; :mod:`.memory` the ledger of tests and
simulations; :mod:`.sqlite` that of a real node, on its :mod:`.page` in the :mod:`.format` of its file, with the
high-water :mod:`.mark` beside it; :mod:`.repair`, :mod:`.rotation` and :mod:`.summary` are for its operator.
``murmurfl.clients`` adds the ledger on Flower's ``context.state``.
"""

from .memory import MemoryLedger
from .records import Account, Ledger, LedgerPage, StreamRecord
from .repair import accept_rollback, new_mark, set_local_budget
from .rotation import rotate_key
from .sqlite import SQLiteLedger
from .summary import LedgerSummary, SessionSummary, read_ledger

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
