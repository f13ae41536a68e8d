"""Another noise key for a ledger: everything that hangs on the old one ends, and nothing that was spent is forgotten.

What hangs on a machine's noise key: the noise of its releases, with each release's nonce; the digest of the rows that
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
from ..machine.data_digest import RowBytes, any_data, make_digest
from ..machine.record_owners import Owners
from ..noise.keyed_noise import KEY_BYTES
from .ledger_file import check_mark, clear_errors, connect
from .ledger_page import SQLitePage, begun
from .mark import read_mark
from .sqlite import SQLiteLedger

logger = logging.getLogger(__name__)

_WAIT_S = 30.0


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
        What the machine's data are known by, as its machine has it
        (:func:`~murmurfl.privacy.machine.data_digest.known_by`): the digest of the rows used so far is made again under
        the new key, and under the old one it is compared first.
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
    """
    path = Path(path).absolute()
    old = SQLiteLedger(path, timeout_s=timeout_s)
    old_key, key_path = old.keys().secret_key, None if key_file is None else Path(key_file).absolute()
    new_key = secrets.token_bytes(KEY_BYTES)
    with begun(path, timeout_s) as page:
        check_mark(page.state, read_mark(page.header.mark), path)
        old_file = page.header.key_file
        if old_file is not None and key_path is None:
            raise ConfigurationError(
                f"Expected a new file for the new noise key, as the old one has its own at {old_file}; got none: "
                "--key-file."
            )
        data = _digest_under(old_key, new_key, page, rows, num_rows)
        if key_path is not None:
            create_private(key_path, "a noise key", new_key)
        try:
            closed = page.exchange_key(new_key, key_path, data)
        except BaseException:
            if key_path is not None and _forget_unless_used(key_path, path):
                _wipe(old_file)
            raise
    _forget(path, timeout_s)
    _wipe(old_file)
    return closed


def _digest_under(old_key: bytes, new_key: bytes, page: SQLitePage, rows: RowBytes | Owners, num_rows: int) -> str:
    """The digest of the rows used so far under the new key, once they are known to be those of the old one."""
    used, digest = page.state.samples_used, page.state.data
    if rows is any_data:
        if digest:
            raise LedgerError(
                "Expected an operator's file that names the data this ledger was used with, got one that names none: "
                "the digest of the rows used so far could not be made again. Nothing was changed."
            )
        return ""
    if not used:
        return ""
    make_digest(old_key, rows).check(used, digest, num_rows)
    return make_digest(new_key, rows).of(used)


def _forget_unless_used(key_path: Path, path: Path) -> bool:
    """Remove a new key's file, unless the ledger has it already (only its mark could not be written): then true."""
    with closing(connect(path, 0.0, "mode=ro")) as connection:
        (used,) = connection.execute("SELECT key_file FROM ledger").fetchone()
    if used != str(key_path):
        key_path.unlink()
    return used == str(key_path)


def _forget(path: Path, timeout_s: float) -> None:
    """Overwrite what SQLite's log has left of the old key."""
    with clear_errors(path, timeout_s), closing(connect(path, timeout_s)) as connection:
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
