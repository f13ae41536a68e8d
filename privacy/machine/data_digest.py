"""Which data a ledger was used with: a keyed digest of the rows used so far, which never leaves the machine.

A sample is protected because the ledger says how often its row number was used. If a data file is written again in
another order, or the data are partitioned differently, samples would be used twice and the ledger would not notice. So
the ledger keeps a digest of the rows used up, in their order,

    D_0 = nothing,    D_(i+1) = BLAKE2b(key; D_i, row i)

with a key that only the machine has. Before anything is released, the rows now at those places must have the same
digest. The rows behind them may change until they are used, and new ones may be added at the end.

A machine of owners knows them by their names and not by their rows (:class:`OwnersDigest`).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np

from ..errors import OF_DATA, LedgerError, MisfitError, is_interrupt
from .record_owners import Owners

logger = logging.getLogger(__name__)

RowBytes = Callable[[int], bytes]
"""Gives the bytes by which a row is recognised: its contents, the same in every process while the row is the same."""


def any_data(row: int) -> bytes:  # noqa: ARG001
    """Recognise no row: for client-level policies only, of which every release counts for all data of the machine."""
    return b""


_UNREADABLE = b"murmurfl: this row could not be read"
_DIGEST_BYTES = 16
_FIRST_ROWS = 16
_OWNER_BYTES = 4
_MOST_OWNERS = 4096
_OTHER_DATA = "Other data need a ledger of their own (`murmurfl ledger create`); these stay spent as far as they are."
_WAY_OUT = (
    "Nothing was released. Put the data back as they were: new rows may be added at the end, nothing before it may "
    f"change. {_OTHER_DATA}"
)
_OWNERS_WAY_OUT = (
    "Nothing was released. Put the names back as they were, with the same number of places and samples-per-owner: rows "
    f"of owners may move and change, and new owners may come. {_OTHER_DATA}"
)


class Sliceable(Protocol):
    """Rows of data: a batch for a slice."""

    def __getitem__(self, rows: slice, /) -> Any: ...


def row_bytes(samples: Sliceable) -> RowBytes:
    """A callable that gives the bytes by which each row of ``samples`` is recognised.

    ``samples`` gives a batch of one row for a slice: arrays, tensors, numbers, texts, bytes, or lists, tuples and
    mappings of them. Anything else is pickled, and must be pickled alike in every process. All rows that cannot be read
    have the same bytes and raise nothing, because whether a row can be read must not show.
    """

    def bytes_of_row(row: int) -> bytes:
        try:
            parts = list(_parts(samples[row : row + 1]))
        except MisfitError:
            return _UNREADABLE
        except BaseException as error:
            if is_interrupt(error):
                raise
            logger.exception("A row could not be read to know it again; it is known as unreadable.", extra=OF_DATA)
            return _UNREADABLE
        return b"".join(parts) if set(parts) - {_UNREADABLE} else _UNREADABLE

    return bytes_of_row


def _parts(value: Any) -> Iterator[bytes]:
    """A value as bytes: different values of the kinds above have different bytes; unreadable parts are all alike."""
    if isinstance(value, Mapping):
        yield b"mapping %d\x00" % len(value)
        for key in sorted(value, key=repr):
            yield from _parts(key)
            yield from _parts(value[key])
    elif isinstance(value, str | bytes | bytearray | int | float | complex | None):
        text = repr(value).encode()
        yield b"%s %d\x00" % (type(value).__name__.encode(), len(text))
        yield text
    elif isinstance(value, Sequence):
        yield b"sequence %d\x00" % len(value)
        for part in value:
            yield from _parts(part)
    else:
        try:
            yield from list(_array_parts(value))
        except BaseException as error:
            if is_interrupt(error):
                raise
            logger.exception("A part of a row could not be read to know it again.", extra=OF_DATA)
            yield _UNREADABLE


def _array_parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, np.ma.MaskedArray):
        yield from _array_parts(np.ma.getmaskarray(value))
    array = np.asarray(_plain_tensor(value))
    if array.dtype.hasobject:
        content = pickle.dumps(value, protocol=4)
        yield b"pickle %d\x00" % len(content)
        yield content
        return
    yield f"array {array.dtype.str} {array.shape}\x00".encode()
    yield array.tobytes()


def _plain_tensor(value: Any) -> Any:
    """A tensor as one NumPy can read: in memory, dense, without its history, as bytes where NumPy lacks its kind."""
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    value = value.cpu() if value.layout == torch.strided else value.cpu().to_dense()
    return value.contiguous().view(torch.uint8) if value.dtype == torch.bfloat16 else value


class DataDigest:
    """Digests of the first rows of a machine's data; each row is hashed once.

    The key is the machine's: without it nobody can tell from a ledger which rows were used.
    """

    def __init__(self, secret_key: bytes, rows: RowBytes) -> None:
        self._key = hmac.digest(secret_key, b"murmurfl used rows", hashlib.sha256)
        self.rows = rows
        self._known: dict[int, bytes] = {0: b""}

    def of(self, count: int) -> str:
        """The digest of the first ``count`` rows, in hexadecimal; empty for none."""
        known = self._known.get(count)
        if known is None:
            start = max(rows for rows in tuple(self._known) if rows < count)
            known = self._known[start]
            for row in range(start, count):
                digest = hashlib.blake2b(known, key=self._key, digest_size=_DIGEST_BYTES)
                digest.update(self.rows(row))
                known = digest.digest()
            self._known[count] = known
        return known.hex()

    def warn_of_kind(self, available: int) -> None:
        """Log an error if none of the first rows can be read, whatever is in the others.

        A refusal instead of a line in the machine's log could depend on a single row, and the server would see it.
        """
        first = min(available, _FIRST_ROWS)
        if first and all(self.rows(row) == _UNREADABLE for row in range(first)):
            logger.error(
                "None of the first %d rows can be read to know them again: if these data are rewritten nobody will "
                "notice. Rows are arrays, tensors, numbers, texts, or lists, tuples and mappings of them.",
                first,
                extra=OF_DATA,
            )

    def check(self, used: int, digest: str, available: int) -> None:
        """Raise LedgerError, with the way out, if data are not those a ledger was used with.

        Parameters
        ----------
        used : int
            Rows that are used up.
        digest : str
            Of those rows, as the ledger has it. Empty if all releases so far were of machines that know no rows
            (:func:`any_data`): each of them counts for all data.
        available : int
            How many rows there are now.

        Notes
        -----
        A change of, an exchange between, or a loss of used rows that can be read is found, but for a collision of
        BLAKE2b under a secret key. Rows, or parts of them, that cannot be read are all alike.
        """
        if used > available:
            raise LedgerError(
                f"Expected the {used} rows this ledger was used with, got data of {available} rows. {_WAY_OUT}"
            )
        if digest and not hmac.compare_digest(self.of(used), digest):
            raise LedgerError(
                f"Expected the {used} rows this ledger was used with, unchanged and in their order, got other ones: "
                f"the data were rewritten, the task, partition or seed is another, or the noise key is. {_WAY_OUT}"
            )


class OwnersDigest:
    """Short keyed digests of the names of owners who were used.

    Rows of an owner may move, change, come and go; new owners may come. An error says that those who were used are not
    there any more under their names: then somebody would be used again under another one. Everything here is the same
    for two files with the same set of owners' names. Owners who were used and have another name are found, but for one
    of 2^32 each, of at most the first 4,096 of them.
    """

    def __init__(self, secret_key: bytes, owners: Owners) -> None:
        self._key = hmac.digest(secret_key, b"murmurfl used owners", hashlib.sha256)
        self.rows = owners
        self._found: tuple[int, str] | None = None

    @cached_property
    def _digests(self) -> list[str]:
        made = partial(hashlib.blake2b, key=self._key, digest_size=_OWNER_BYTES)
        return [made(mark).hexdigest() for mark in self.rows.mark_bytes]

    def of(self, count: int) -> str:
        """The ledger's text on the owners in the first ``count`` places: N and j, and their digests in order."""
        if not count:
            return ""
        return self._kind + "".join(sorted(self._in(count))[:_MOST_OWNERS])

    def warn_of_kind(self, available: int) -> None:
        """Do nothing: names are texts, which can always be told apart."""

    def check(self, used: int, digest: str, available: int) -> None:
        """Raise LedgerError, with the way out, if owners that a ledger was used with are gone.

        The parameters are those of :meth:`DataDigest.check`.
        """
        if self._found == (used, digest):
            return
        kept, there = digest.removeprefix(self._kind), set(self._in(used))
        width = 2 * _OWNER_BYTES
        gone = any(kept[start : start + width] not in there for start in range(0, len(kept), width))
        if used > available or (digest and (gone or not digest.startswith(self._kind))):
            raise LedgerError(
                f"Expected the {used} places of owners this ledger was used with, and in them everybody who was used, "
                "got others: names were written anew, somebody is gone, the number of places or samples-per-owner is "
                f"another, or these were samples. {_OWNERS_WAY_OUT}"
            )
        self._found = used, digest

    @property
    def _kind(self) -> str:
        return f"owners {self.rows.num_places} {self.rows.most} "

    def _in(self, count: int) -> list[str]:
        return self._digests[self.rows.in_places(slice(0, count))]


def make_digest(secret_key: bytes, known: RowBytes | Owners) -> DataDigest | OwnersDigest:
    """The digest a ledger keeps of a machine's data: of its owners' names, or of its rows."""
    return OwnersDigest(secret_key, known) if isinstance(known, Owners) else DataDigest(secret_key, known)


def known_by(samples: Any) -> RowBytes | Owners:
    """The names of the samples' owners, or else what gives the bytes of each row: so a ledger recognises them.

    Notes
    -----
    **Formal guarantees.** Of owners it is their names: two files with the same set of them are known alike, whoever's
    rows differ. Of other samples it is every row, as it is read before anything that was released is used to read it
    (``first_read``), where samples have that.
    """
    if getattr(samples, "samples_per_owner", 0):
        return samples.owners
    return row_bytes(getattr(samples, "first_read", samples))
