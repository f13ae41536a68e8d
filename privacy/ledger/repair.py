"""Repairs of a ledger by an operator: accept a rollback, make a new mark, decide a budget, exchange the noise key.

Each of these rests on something the operator knows and the file cannot show, so each has its own name and its own
refusals, and no node ever does them by itself. Each takes the ledger's ``path``, and waits at most ``timeout_s`` for
another process.

What hangs on a client's noise key: the noise of its releases, with each release's nonce; the digest of the rows that
were used; the fingerprint of every session. A session goes on by taking its last noise row back out, which only the old
key can make again. So under a new key no session can go on: all are closed, and what they reserved stays reserved.
"""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import closing
from pathlib import Path

from ..errors import ConfigurationError, LedgerError
from ..files import create_private
from ..noise import KEY_BYTES
from ..release.known_samples import Owners, RowBytes, any_data, make_digest
from .ledger_file import LEDGER_MARK, LedgerStore
from .sqlite import SQLiteLedger, SQLiteTransaction, begun, check_local_budget
from .store import connect

_WAIT_S = 30.0


def accept_rollback(path: str | Path, *, timeout_s: float = _WAIT_S) -> int:
    """Count as spent everything the mark of a copied-back ledger knows of, and return how many sessions were closed.

    The budget of all sessions that ledger or mark know stays reserved; new ones may be opened with what is left.

    Notes
    -----
    **Formal guarantees.** Afterwards the account is at least what it was when the last reply left, as far as the mark
    was not copied back too.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from murmurfl.privacy import PrivacyPolicy, Privatizer, SQLiteLedger, read_ledger, row_bytes
    >>> policy = PrivacyPolicy(
    ...     clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0, budget_mu=2.0, noise_quality="exact"
    ... )
    >>> rows = [[0.0, float(number)] for number in range(100)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "ledger.sqlite"
    ...     ledger = SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5)
    ...     backup = path.read_bytes()
    ...     privatizer = Privatizer(policy, 3, 100, ledger, ledger.keys(), data=row_bytes(rows))
    ...     release = privatizer.release("spring", 0, lambda samples: np.zeros((samples.stop - samples.start, 3)))
    ...     written = path.write_bytes(backup)  # the ledger is copied back, its mark is not
    ...     accept_rollback(path)
    ...     read_ledger(path).spent.mu
    1
    1.0
    """
    path = Path(path).absolute()
    with begun(path, timeout_s) as transaction:
        mark = LEDGER_MARK.load(transaction.header.mark)
        transaction.file.check_belongs(mark)
        if not transaction.file.is_rolled_back(mark):
            raise LedgerError(
                f"Expected a ledger that was copied back, got {path}, which was not; it was left alone.",
                kind="wrong-order",
            )
        if transaction.state.key != mark.key:
            raise LedgerError(
                f"Expected a copy made since the noise key of {path} was exchanged, got one with another key, which "
                "was given up: with it nobody can tell whether the data are those that were used since. It was left "
                "alone. Put back a copy made after `murmurfl ledger rotate-key`; if there is none, retire the data.",
                kind="mismatch",
            )
        return transaction.accept_rollback(mark)


def new_mark(path: str | Path, *, timeout_s: float = _WAIT_S) -> None:
    """Make a new high-water mark for a ledger whose mark is lost.

    Notes
    -----
    **Formal guarantees.** The ledger counts what it has, as before. That it was never copied back is the operator's
    word: if it was, what it has forgotten will be spent again.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from murmurfl.privacy import SQLiteLedger, read_ledger
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "ledger.sqlite"
    ...     ledger = SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5)
    ...     Path(read_ledger(path).mark).unlink()  # it is lost
    ...     lost = bool(read_ledger(path).mark_problem)
    ...     new_mark(path)
    ...     lost, read_ledger(path).mark_problem
    (True, '')
    """
    with begun(Path(path).absolute(), timeout_s) as transaction:
        if transaction.header.mark.exists():
            raise LedgerError(
                f"Expected no high-water mark at {transaction.header.mark}, got one; it was left alone.", kind="exists"
            )
        transaction.file.move_mark()


def set_local_budget(path: str | Path, budget_local_mu: float, *, timeout_s: float = _WAIT_S) -> None:
    """Set the budget for the case that nobody else is honest, once, where it was left open.

    Notes
    -----
    **Formal guarantees.** Nothing that was spent is forgotten, and the budget covers what was reserved.

    Examples
    --------
    >>> import tempfile
    >>> from murmurfl.privacy import SQLiteLedger, read_ledger
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/ledger.sqlite"
    ...     ledger = SQLiteLedger.create(path, budget_mu=1.0, delta=1e-5)
    ...     set_local_budget(path, 8.0)
    ...     read_ledger(path).budget.worst_case.mu
    8.0
    """
    path = Path(path).absolute()
    with begun(path, timeout_s) as transaction:
        transaction.file.check_mark(LEDGER_MARK.load(transaction.header.mark))
        if transaction.header.budget_local_mu is not None:
            raise LedgerError(
                f"Expected a ledger without a decided budget_local_mu at {path}, got one with "
                f"{transaction.header.budget_local_mu:g}; it was left alone.",
                kind="exists",
                setting="budget_local_mu",
            )
        check_local_budget(budget_local_mu, transaction.header.budget_mu)
        transaction.set_local_budget(budget_local_mu)


logger = logging.getLogger(__name__)


def rotate_key(
    path: str | Path,
    rows: RowBytes | Owners,
    num_rows: int,
    *,
    key_file: str | Path | None = None,
    timeout_s: float = _WAIT_S,
) -> int:
    """Give a ledger a new noise key from the operating system, close its sessions and destroy the old key.

    Parameters
    ----------
    path : path
        The ledger.
    rows : callable or Owners
        What the client's data are known by, as its client has it
        (:func:`~murmurfl.privacy.release.known_samples.known_by`): the digest of the rows used so far is made again
        under the new key, and under the old one it is compared first.
    num_rows : int
        How many rows there are.
    key_file : path, optional
        A new file for the new key. It must be given where the old key is in a file of its own; given where it is in the
        ledger, the key moves out of it.
    timeout_s : float
        How long to wait for another process that is using the ledger.

    Returns
    -------
    int
        How many sessions were open and are closed now.

    Raises
    ------
    LedgerError
        If the ledger cannot be believed, was copied back or was used with other data, or the new file cannot be made:
        then ledger and key are as they were. Or if the mark cannot be written: then the ledger has its new key, and
        its next transaction moves the mark.

    Notes
    -----
    **Formal guarantees.** Nothing is released, and nothing that was spent is forgotten: samples, budgets and the
    releases of every session stay. No noise is drawn twice: no (key, nonce) pair of the old key is used after, and no
    release after it is made from a noise row before it. Whoever has the new key and all nonces cannot make the noise of
    earlier releases again. A crash leaves ledger and mark of the old key or of the new one, never of both. **Not
    promised**: whoever has an older copy of ledger and key can still take the noise out of what was sent until that
    copy was made. The bytes of the old key are overwritten in the files; what a disk or a file system keeps of
    overwritten blocks is not in anybody's hands here. A copy from before cannot be gone on with
    (:func:`~murmurfl.privacy.accept_rollback` refuses it).

    Examples
    --------
    >>> import tempfile
    >>> from murmurfl.privacy import SQLiteLedger, row_bytes
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ledger = SQLiteLedger.create(f"{folder}/ledger.sqlite", budget_mu=1.0, delta=1e-5)
    ...     before = ledger.keys().secret_key
    ...     rotate_key(f"{folder}/ledger.sqlite", row_bytes([[0.0], [1.0]]), 2)  # no session was open
    ...     SQLiteLedger(f"{folder}/ledger.sqlite").keys().secret_key != before
    0
    True
    """
    path = Path(path).absolute()
    old = SQLiteLedger(path, timeout_s=timeout_s)
    old_key, key_path = old.keys().secret_key, None if key_file is None else Path(key_file).absolute()
    new_key = secrets.token_bytes(KEY_BYTES)
    with begun(path, timeout_s) as transaction:
        transaction.file.check_mark(LEDGER_MARK.load(transaction.header.mark))
        old_file = transaction.header.key_file
        if old_file is not None and key_path is None:
            raise ConfigurationError(
                f"Expected a new file for the new noise key, as the old one has its own at {old_file}; got none: "
                "--key-file.",
                kind="missing",
                setting="key-file",
            )
        data = _digest_under(old_key, new_key, transaction, rows, num_rows)
        if key_path is not None:
            create_private(key_path, "a noise key", new_key)
        try:
            closed = transaction.exchange_key(new_key, key_path, data)
        except BaseException:
            if key_path is not None and _forget_unless_used(key_path, path):
                _wipe(old_file)
            raise
    _forget(path, timeout_s)
    _wipe(old_file)
    return closed


def _digest_under(
    old_key: bytes, new_key: bytes, transaction: SQLiteTransaction, rows: RowBytes | Owners, num_rows: int
) -> str:
    """Check the used rows under the old key, and return their digest under the new one."""
    used, digest = transaction.state.samples_used, transaction.state.data
    if rows is any_data:
        if digest:
            raise LedgerError(
                "Expected an operator's file that names the data this ledger was used with, got one that names none: "
                "the digest of the rows used so far could not be made again. Nothing was changed.",
                kind="missing",
            )
        return ""
    if not used:
        return ""
    make_digest(old_key, rows).check(used, digest, num_rows)
    return make_digest(new_key, rows).of(used)


def _forget_unless_used(key_path: Path, path: Path) -> bool:
    """Remove a new key's file and return False; True if the ledger uses it already, and only its mark is old."""
    with closing(connect(path, 0.0, "mode=ro")) as connection:
        (used,) = connection.execute("SELECT key_file FROM ledger").fetchone()
    if used != str(key_path):
        key_path.unlink()
    return used == str(key_path)


def _forget(path: Path, timeout_s: float) -> None:
    """Overwrite what SQLite's log has left of the old key."""
    with LedgerStore(path, timeout_s).errors(), closing(connect(path, timeout_s)) as connection:
        (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        logger.warning(
            f"The new noise key is in use, but another process holds {path} open, so the old key may still be in "
            f"{path.name}-wal: stop that process, and the file goes."
        )


def _wipe(old_file: Path | None) -> None:
    """Overwrite the file that the old key was in, and remove it."""
    if old_file is not None and old_file.exists():
        with old_file.open("r+b") as file:
            file.write(bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        old_file.unlink()
