"""The ledger of a real node: one SQLite file that outlives crashes and refuses whatever it cannot believe.

One file of mode 600 holds what a node must know again after a loss of power: the account, every session's stream, a
line for every release, and the noise key (or the name of the file that holds it). A second, small file, the high-water
mark (:mod:`.mark`), shows when the first was copied back from a backup.

Order of writing
----------------
The release is committed (write-ahead log, ``synchronous=FULL``), then the mark is moved up to it, then the reply may
leave. So, depending on where a crash comes:

* before the commit: neither knows of the release; nothing was sent and nothing spent;
* between commit and mark: the ledger is ahead of its mark, which is no rollback; the release is wasted, the stream goes
  on after it, and the next transaction moves the mark before it does anything else;
* after the mark: both know of the release; whether it was sent or not, it is never made again.

The mark is never ahead of the ledger, unless the ledger was copied back. (Writing the mark first would leave it ahead
after a crash, and one commit behind would look like either.)
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from ..errors import ConfigurationError, LedgerError
from ..files import check_private, create_private, sync_folder
from ..noise.keyed_noise import KEY_BYTES
from ..noise.noise_keys import NoiseKeys, SystemKeys
from .ledger_file import (
    LEDGER,
    UNDECIDED,
    Header,
    check_mark,
    clear_errors,
    key_check,
    mark_path,
    read_header,
    read_state,
    write_new,
)
from .ledger_page import begun, connection_to
from .ledger_records import Ledger, LedgerPage
from .mark import LedgerState, read_mark


class SQLiteLedger(Ledger):
    """An existing ledger in a SQLite file; :meth:`create` makes one.

    Parameters
    ----------
    path : path
        The ledger's file.
    timeout_s : float
        How long a transaction waits for another process or thread that is using the ledger before it refuses.

    Notes
    -----
    **Formal guarantees.** Transactions exclude each other, a commit is all or nothing, and what was committed is what
    is read next, across processes and losses of power, as far as the disk keeps what it says it has written. A commit
    moves the high-water mark before it returns. A ledger that is missing is never made anew here, and one that is
    behind its mark, or differs from it, releases nothing until its operator accepts the rollback. If ledger and mark
    were both copied back nothing here can tell; noise is still never repeated, because every release draws a fresh
    nonce (:class:`~murmurfl.privacy.SystemKeys`), but samples and budget would be spent twice.
    """

    durable: ClassVar[bool] = True

    def __init__(self, path: str | Path, *, timeout_s: float = 30.0) -> None:
        self.path = Path(path).absolute()
        self.timeout_s = timeout_s
        with connection_to(self.path, timeout_s) as connection, clear_errors(self.path, timeout_s):
            LEDGER.check_integrity(connection, self.path)
            self._header = read_header(connection, self.path)
            mark = read_mark(self._header.mark)  # before the ledger: another process may be moving both
            connection.execute("BEGIN")
            check_mark(read_state(connection, self._header, self.path), mark, self.path)
        self.budget_mu = self._header.budget_mu
        self.delta = self._header.delta
        decided = self._header.budget_local_mu
        # Whoever did not decide has decided for the smaller one: what may be spent whatever happens.
        self.budget_local_mu = self.budget_mu if decided is None else decided
        self.local_hint = UNDECIDED.format(path=self.path) if decided is None else ""

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        budget_mu: float,
        delta: float,
        budget_local_mu: float | None = None,
        data: str = "",
        mark: str | Path | None = None,
        key_file: str | Path | None = None,
        timeout_s: float = 30.0,
    ) -> SQLiteLedger:
        """Make a new ledger, its noise key and its high-water mark.

        Parameters
        ----------
        path : path
            Where; its folder must exist.
        budget_mu : float
            Gaussian-DP parameter of everything that is ever released about these data.
        delta : float
            At which its epsilons are shown.
        budget_local_mu : float, optional
            Budget for what holds whatever server, helpers and other machines do: sessions under secure aggregation
            reserve more of it than of ``budget_mu``. Default ``budget_mu``.
        data : str
            What the operator calls the data.
        mark : path, optional
            Where the high-water mark goes: best on a disk that is not backed up with the ledger. Default ``path`` with
            ``.mark`` after it.
        key_file : path, optional
            A new file for the noise key; default it is kept in the ledger.

        Notes
        -----
        **Formal guarantees.** The key comes from the operating system. Nothing is ever overwritten, but for a mark
        under which nothing was released.
        """
        if not (math.isfinite(budget_mu) and budget_mu > 0):
            raise ConfigurationError(f"Expected budget_mu > 0 and finite, got {budget_mu!r}.")
        if not 0 < delta < 1:
            raise ConfigurationError(f"Expected delta between 0 and 1, got {delta!r}.")
        check_local_budget(budget_local_mu, budget_mu)
        path = Path(path).absolute()
        mark_file = mark_path(path, "" if mark is None else str(Path(mark).absolute()))
        key_path = None if key_file is None else Path(key_file).absolute()
        files = [path, mark_file, *([] if key_path is None else [key_path])]
        if len(set(files)) < len(files):
            raise ConfigurationError(f"Expected ledger, mark and key in files of their own, got {files}.")
        local = None if budget_local_mu is None else float(budget_local_mu)
        key, terms = secrets.token_bytes(KEY_BYTES), (float(budget_mu), float(delta))
        state = LedgerState(secrets.token_hex(16), *terms, budget_local_mu=local)
        header = Header(state.ledger, time.time(), data, *terms, mark_file, key_path, key_check(key), local)
        create_private(path, "a ledger")
        made = [path]
        try:
            if mark_file.exists() and (counter := read_mark(mark_file).counter) > 0:
                raise LedgerError(
                    f"Expected no trace of an earlier ledger, got a high-water mark at {mark_file} that counts "
                    f"{counter} commits: this node had a ledger. Restore that one (docs/ledger.md); nothing was made."
                )
            if key_path is not None:
                create_private(key_path, "a noise key", key)
                made.append(key_path)
            state.write_mark(mark_file)
            write_new(path, timeout_s, header, key, state.seal, mark_beside=mark is None)
            sync_folder(path.parent)
        except BaseException:
            for file in made:
                file.unlink(missing_ok=True)
            raise
        return cls(path, timeout_s=timeout_s)

    def keys(self) -> SystemKeys:
        """The node's noise key, with fresh nonces; refused if its file is open to others or holds another key."""
        header = self._header
        with clear_errors(self.path, self.timeout_s):
            if header.key_file is not None:
                check_private(
                    header.key_file,
                    "the noise key",
                    missing="Put it back; without it the sessions that are open cannot go on. Nothing was released.",
                )
                key = header.key_file.read_bytes()
            else:
                with connection_to(self.path, self.timeout_s) as connection:
                    (key,) = connection.execute("SELECT key FROM ledger").fetchone()
        if len(key) != KEY_BYTES or not hmac.compare_digest(key_check(key), header.key_check):
            raise LedgerError(
                f"Expected the noise key {self.path} was made with, got another or a damaged one in "
                f"{header.key_file or self.path}. Put the right one back; nothing was released."
            )
        return SystemKeys(key)

    def secret_of_owners(self, keys: NoiseKeys) -> bytes:
        # The ledger's own random name: of 128 bits, made once, kept when the key is exchanged, and only ever in the two
        # private files.
        return hmac.digest(bytes.fromhex(self._header.name), b"murmurfl places of owners", hashlib.sha256)

    @contextmanager
    def exclusive(self) -> Iterator[LedgerPage]:
        with begun(self.path, self.timeout_s) as page:
            if page.header != self._header:
                raise LedgerError(
                    f"Expected the ledger this node began with at {self.path}, got another. Nothing was released; "
                    "restart the node."
                )
            mark = read_mark(page.header.mark)
            check_mark(page.state, mark, self.path)
            if mark.counter < page.state.counter:
                # A crash came between a commit and its mark; if it still cannot be written, nothing more is spent.
                page.state.write_mark(page.header.mark)
            yield page


def check_local_budget(budget_local_mu: float | None, budget_mu: float) -> None:
    """Raise if the budget for what holds whatever happens is less than that for what rests on others."""
    if budget_local_mu is not None and not (math.isfinite(budget_local_mu) and budget_local_mu >= budget_mu):
        raise ConfigurationError(
            f"Expected budget_local_mu >= budget_mu = {budget_mu:g} and finite, got {budget_local_mu!r}: what holds "
            "whatever happens is never less than what holds if others are honest."
        )
