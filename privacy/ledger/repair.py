"""Repairs of a ledger by its operator: accept a rollback, make a new mark, decide a budget that was left open.

Each of these rests on something the operator knows and the file cannot show, so each has its own name and its own
refusals, and no node ever does them by itself. Each takes the ledger's ``path``, and waits at most ``timeout_s`` for
another process.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import LedgerError
from .ledger_file import check_mark, check_mark_belongs, is_rolled_back
from .ledger_page import begun
from .mark import read_mark
from .sqlite import check_local_budget

_WAIT_S = 30.0


def accept_rollback(path: str | Path, *, timeout_s: float = _WAIT_S) -> int:
    """Count as spent everything the mark of a copied-back ledger knows of, and return how many sessions were closed.

    The budget of all sessions that ledger or mark know stays reserved; new ones may be opened with what is left.

    Notes
    -----
    **Formal guarantees.** Afterwards the account is at least what it was when the last reply left, as far as the mark
    was not copied back too.
    """
    path = Path(path).absolute()
    with begun(path, timeout_s) as page:
        mark = read_mark(page.header.mark)
        check_mark_belongs(page.state, mark, path)
        if not is_rolled_back(page.state, mark):
            raise LedgerError(f"Expected a ledger that was copied back, got {path}, which was not; it was left alone.")
        if page.state.key != mark.key:
            raise LedgerError(
                f"Expected a copy made since the noise key of {path} was exchanged, got one with another key, which "
                "was given up: with it nobody can tell whether the data are those that were used since. It was left "
                "alone. Put back a copy made after `murmurfl ledger rotate-key`; if there is none, retire the data."
            )
        return page.accept_rollback(mark)


def new_mark(path: str | Path, *, timeout_s: float = _WAIT_S) -> None:
    """Make a new high-water mark for a ledger whose mark is lost.

    Notes
    -----
    **Formal guarantees.** The ledger counts what it has, as before. That it was never copied back is the operator's
    word: if it was, what it has forgotten will be spent again.
    """
    with begun(Path(path).absolute(), timeout_s) as page:
        if page.header.mark.exists():
            raise LedgerError(f"Expected no high-water mark at {page.header.mark}, got one; it was left alone.")
        page.state.write_mark(page.header.mark)


def set_local_budget(path: str | Path, budget_local_mu: float, *, timeout_s: float = _WAIT_S) -> None:
    """Decide what the machine may ever spend if nobody else is honest, where that was left open; it is decided once.

    Notes
    -----
    **Formal guarantees.** Nothing that was spent is forgotten, and the budget covers what was reserved.
    """
    path = Path(path).absolute()
    with begun(path, timeout_s) as page:
        check_mark(page.state, read_mark(page.header.mark), path)
        if page.header.budget_local_mu is not None:
            raise LedgerError(
                f"Expected a ledger without a decided budget_local_mu at {path}, got one with "
                f"{page.header.budget_local_mu:g}; it was left alone."
            )
        check_local_budget(budget_local_mu, page.header.budget_mu)
        page.set_local_budget(budget_local_mu)
