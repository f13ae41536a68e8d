"""What an operator may do to a ledger that a node refuses: accept a rollback, make a new mark, upgrade it.

Each of these rests on something the operator vouches for and the file cannot show, so each has its own name and its own
refusals, and no node ever does them by itself. Each takes the ledger's ``path``, and waits at most ``timeout_s`` for
another process.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import LedgerError
from .format import (
    FORMAT,
    READABLE,
    Header,
    check_mark,
    check_mark_belongs,
    clear_errors,
    format_of,
    is_rolled_back,
    opened,
    read_header,
    read_state,
)
from .mark import read_mark
from .page import begun
from .sqlite import check_local_budget

_WAIT_S = 30.0


def accept_rollback(path: str | Path, *, timeout_s: float = _WAIT_S) -> int:
    """Go on with a ledger that was copied back, counting as spent everything its mark knows of.

    Returns
    -------
    int
        Sessions closed: all that ledger or mark know. Their budget stays reserved; new ones may be opened with what is
        left.

    Raises
    ------
    LedgerError
        If the ledger was not copied back, or there is no mark to say what was spent.

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

    Raises
    ------
    LedgerError
        If there is a mark.

    Notes
    -----
    **Formal guarantees.** The ledger counts what it has, as before. That it was never copied back is the operator's
    word: if it was, what it has forgotten will be spent again.
    """
    with begun(Path(path).absolute(), timeout_s) as page:
        if page.header.mark.exists():
            raise LedgerError(f"Expected no high-water mark at {page.header.mark}, got one; it was left alone.")
        page.state.write_mark(page.header.mark)


def needs_upgrade(path: str | Path, *, timeout_s: float = _WAIT_S) -> bool:
    """Whether a ledger is one of murmurfl 0.1, of whose data its operator must vouch.

    Raises
    ------
    LedgerError
        If there is none, or it is of a format this version does not know.
    """
    path = Path(path).absolute()
    with clear_errors(path, timeout_s), opened(path, timeout_s, accepted=(1, *READABLE)) as connection:
        return format_of(connection) == 1


def upgrade_ledger(path: str | Path, *, budget_local_mu: float | None = None, timeout_s: float = _WAIT_S) -> None:
    """Give a ledger of an earlier version what this one's have, and decide a budget that was left open.

    A ledger of murmurfl 0.1 knows its data from its next release on. One of format 2 has room for sessions under secure
    aggregation. Whatever was spent stays as it is.

    Parameters
    ----------
    path : path
    budget_local_mu : float, optional
        What the machine may ever spend if nobody else is honest. It can be decided once.
    timeout_s : float
        How long to wait for another process.

    Raises
    ------
    LedgerError
        If there is nothing to upgrade, or the ledger cannot be believed, was copied back, or has decided that budget;
        it is left as it was.
    ConfigurationError
        If the budget is less than what it must cover.

    Notes
    -----
    **Formal guarantees.** Nothing is forgotten, and the new budget covers what was reserved. For a ledger of murmurfl
    0.1 the operator vouches that the data are those it was used with, row by row; the rows used so far are known by a
    digest as soon as the node makes its next release.
    """
    path = Path(path).absolute()
    with clear_errors(path, timeout_s), opened(path, timeout_s, accepted=(1, *READABLE)) as connection:
        version, header = format_of(connection), read_header(connection, path)
    _check_upgrade(version, header, budget_local_mu, path)
    if version == 1:
        _know_data(path, timeout_s)
    with begun(path, timeout_s) as page:
        check_mark(page.state, read_mark(page.header.mark), path)
        page.make_current(budget_local_mu)


def _check_upgrade(version: int, header: Header, budget_local_mu: float | None, path: Path) -> None:
    """Refuse where there is nothing to do, or a budget that was decided already."""
    if version >= FORMAT and budget_local_mu is None:
        raise LedgerError(
            f"Expected a ledger of an earlier format than {FORMAT} at {path}, got one of format {version}: there is "
            "nothing to upgrade."
        )
    if budget_local_mu is not None and header.budget_local_mu is not None:
        raise LedgerError(
            f"Expected a ledger without a decided budget_local_mu at {path}, got one with {header.budget_local_mu:g}; "
            "it was left alone."
        )
    check_local_budget(budget_local_mu, header.budget_mu)


def _know_data(path: Path, timeout_s: float) -> None:
    """Make a ledger of format 1 one of format 2."""
    with clear_errors(path, timeout_s), opened(path, timeout_s, writable=True, accepted=(1,)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ALTER TABLE state ADD COLUMN data TEXT NOT NULL DEFAULT ''")
        header = read_header(connection, path)
        check_mark(read_state(connection, header, path), read_mark(header.mark), path)
        connection.execute("PRAGMA user_version = 2")
        connection.execute("COMMIT")
