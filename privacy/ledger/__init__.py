"""The ledger: what a machine must remember so that it never spends the same privacy twice.

Spend before you speak: a release, its nonce, the samples it used up and what has not been acknowledged are committed
before the reply leaves. A crash in between wastes a release; it never repeats one.

:mod:`.records` has what is remembered and the interface of every ledger; :mod:`.memory` the ledger of tests and
simulations; :mod:`.sqlite` that of a real node, on its :mod:`.page` in the :mod:`.format` of its file, with the
high-water :mod:`.mark` beside it; :mod:`.repair`, :mod:`.rotation` and :mod:`.summary` are for its operator.
``murmurfl.clients`` adds the ledger on Flower's ``context.state``.
"""

from typing import TYPE_CHECKING

from ..late import late_names
from .records import Account, Ledger, LedgerPage, StreamRecord

if TYPE_CHECKING:
    from .memory import MemoryLedger
    from .repair import accept_rollback, new_mark, set_local_budget
    from .rotation import rotate_key
    from .sqlite import SQLiteLedger
    from .summary import LedgerSummary, SessionSummary, read_ledger

# For real machines and their operators: no simulation needs them.
_LATE = {
    "LedgerSummary": "summary",
    "MemoryLedger": "memory",
    "SQLiteLedger": "sqlite",
    "SessionSummary": "summary",
    "accept_rollback": "repair",
    "new_mark": "repair",
    "read_ledger": "summary",
    "rotate_key": "rotation",
    "set_local_budget": "repair",
}
if not TYPE_CHECKING:  # else the type checker would believe in any name
    __getattr__, __dir__ = late_names(__name__, _LATE)

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
