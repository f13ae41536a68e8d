"""What an operator may do to a ledger that a node refuses: accept a rollback, make a new mark, upgrade.

Each of these rests on something the operator vouches for and the file cannot show, so each has its own name and its own
refusals, and no node ever does them by itself. Each takes the ledger's ``path``, and waits at most ``timeout_s`` for
another process.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import LedgerError
from .format import (
    FORMAT,
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
        return page.accept_rollback(mark)


def new_mark(path: str | Path, *, timeout_s: float = _WAIT_S) -> None:
    """Make a new high-water mark for a ledger whose mark is lost.

    Raises
    ------
    LedgerError
        If there is a mark.

    Notes
    -----
    **Formal guarantees.** None: the operator vouches that this ledger was never copied back. If it was, what it has
    forgotten will be spent again.
    """
    with begun(Path(path).absolute(), timeout_s) as page:
        if page.header.mark.exists():
            raise LedgerError(f"Expected no high-water mark at {page.header.mark}, got one; it was left alone.")
        page.state.write_mark(page.header.mark)


def needs_upgrade(path: str | Path, *, timeout_s: float = _WAIT_S) -> bool:
    """Whether a ledger is one of murmurfl 0.1.

    Raises
    ------
    LedgerError
        If there is none, or it is of a format this version does not know.

    Notes
    -----
    **Formal guarantees.** Releases nothing and changes nothing.
    """
    path = Path(path).absolute()
    with clear_errors(path, timeout_s), opened(path, timeout_s, accepted=(1, FORMAT)) as connection:
        return format_of(connection) == 1


def upgrade_ledger(path: str | Path, *, timeout_s: float = _WAIT_S) -> None:
    """Make a ledger of murmurfl 0.1 one that knows its data, from its next release on.

    Raises
    ------
    LedgerError
        If it is none of format 1, cannot be believed, or was copied back; it is left as it was.

    Notes
    -----
    **Formal guarantees.** None: the operator vouches that the data are those the ledger was used with, row by row. The
    rows used so far are known by a digest as soon as the node makes its next release.
    """
    path = Path(path).absolute()
    with clear_errors(path, timeout_s), opened(path, timeout_s, writable=True, accepted=(1,)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ALTER TABLE state ADD COLUMN data TEXT NOT NULL DEFAULT ''")
        header = read_header(connection, path)
        check_mark(read_state(connection, header, path), read_mark(header.mark), path)
        connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.execute("COMMIT")
