"""A client's samples: whose each one is, which release it is in, and how the ledger knows it again.

Owners
------
A guarantee *for one sample* becomes one for a person with several of them by :func:`~murmurfl.privacy.person_loss`.
:class:`Owners` makes the question go away on one client: it groups a client's samples by owner, at most so many of
each, so that what a client admits, clips and counts is an owner and not a sample. Every proof about a client's
samples then is one about its owners, word for word: nothing in the rule of admission, the noise or the ledger knows
what a row of data is (docs/proofs/owners.md).

A secret order
--------------
In a secret order each sample is in one release of a session. It draws its release independently of all others and
uniformly among the K that the cap allows, from a keystream of the client's secret key and a nonce; an owner from the
same key and the digest of the owner's name. The nonce is drawn with a session's first release and recorded with it, so
the order is the same after a restart and is never used for another session. A sample's release depends on its row's
number alone, not on how many rows there are, nor on what is in them; an owner's on the name alone.

The nearest numbers of 53 bits are used: a release's chance differs from 1 / K by less than K 2^-53 of itself, which
the accountant's rounding covers (:data:`murmurfl.privacy.accounting.amplification.EPSILON_ROUNDING`).

Poisson batches
---------------
In a Poisson batch each sample is in a release with probability q, independently of all others and of other releases. It
draws that from a keystream of the client's secret key and a nonce of the release, which is drawn anew for each and used
for nothing else; an owner from the same key and the digest of the owner's name. With 53 bits the probability is within
2^-53 of q, which the accountant's rounding covers (:data:`murmurfl.privacy.accounting.poisson.ROUNDING`).

The digest of used rows
-----------------------
A sample is protected because the ledger says how often its row number was used. If a data file is written again in
another order, or the data are partitioned differently, samples would be used twice and the ledger would not notice. So
the ledger keeps a digest of the rows used up, in their order,

    D_0 = nothing,    D_(i+1) = BLAKE2b(key; D_i, row i)

with a key that only the client has. Before anything is released, the rows now at those places must have the same
digest. The rows behind them may change until they are used, and new ones may be added at the end.

A client of owners knows them by their names and not by their rows (:class:`OwnersDigest`).

Formal guarantees
-----------------
Of owners: functions of public numbers, or of one owner's samples each: which rows of an owner are kept depends on that
owner's own rows and their order, which release the owner is in on its name and a secret, and neither on anybody else.

Of a secret order: to anybody without the key an order is indistinguishable from independent uniform draws, as far as
AES-256 in counter mode and HMAC-SHA-256 are pseudorandom. A simulated client's follows from the run's seed: whoever
knows that knows it. What an order that stays secret is worth: :mod:`murmurfl.privacy.accounting.amplification`. Proof:
docs/proofs/secret-order.md.

Of Poisson batches: the same of the batches, which are independent from release to release as long as no nonce repeats.
What they are worth: :mod:`murmurfl.privacy.accounting.poisson`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..accounting.gdp import check_count
from ..errors import OF_DATA, ConfigurationError, InvalidRecordError, LedgerError, is_interrupt
from ..noise import KEY_BYTES, NONCE_BYTES, keystream_words
from .clipping import MOST_ROWS

OWNER_KINDS = "iuSUO"
"""NumPy's kinds of owners' names: integers, texts, or objects that are either."""
LEAST_SECRET_BYTES = 16


@dataclass(frozen=True, eq=False)
class Owners:
    """The rows of data of each owner, at most so many of each, and the place that each owner is in.

    A client of owners has N places, a public number. A release is of b of them, of whoever falls into these: a place
    has none, one or several owners. Make one by :meth:`of`.

    Parameters
    ----------
    rows : ndarray of int
        Owner after owner, in the order of their places.
    ends : ndarray of int
        Where each owner's end in ``rows``.
    most : int
        How many rows of an owner are used, at most: the first.
    num_places : int
        N.
    marks : ndarray of shape (owners, 2), uint64, optional
        The keyed digest of each owner's name, whose first half modulo N is the owner's place. None: every owner has a
        place of its own, in the order of ``ends``; for simulation.

    Notes
    -----
    **Formal guarantees.** For two files with the same set of owners' names, of which one owner's rows are any others,
    anywhere in the file: every owner has the same place and number in both, and :meth:`padded_rows` gives the same rows
    of every other owner, as far as rows are known by what is in them. N is public; how many owners there are, and who
    is in a place, is not. Files with another set of names, or of which a record has another owner, are no neighbours:
    the proof has what they cost, up to 2 mu for one record.
    Proof: docs/proofs/owners.md.

    Examples
    --------
    >>> owners = Owners.of(["ann", "bob", "ann"], most=2, secret=bytes(32))
    >>> owners.num_places
    2
    """

    rows: NDArray[np.int64]
    ends: NDArray[np.int64]
    most: int
    num_places: int
    marks: NDArray[np.uint64] | None = None

    @classmethod
    def of(cls, names: Any, most: int, *, secret: bytes, places: int | None = None) -> Owners:
        """Rows by who owns them, each owner in a place that follows from a secret and the owner's name alone.

        Parameters
        ----------
        names : iterable
            Whose each row is: integers, texts or bytes, in any iterable. Rows with equal names are one owner's; the
            integer 1 and the text "1" are equal. Rows without a name (an empty text, or None) are left out. Names are
            read once and hashed, so a long one costs no memory. NumPy's own arrays of texts drop trailing NULs and are
            as wide as the longest; give a list of names that may have either.
        most : int
            j: of each owner's rows the first j are used.
        secret : bytes
            The client's, 16 to 64 bytes (:meth:`~murmurfl.privacy.Ledger.secret_of_owners`).
        places : int, optional
            N, a public number that the client's operator has settled. Default the number of owners, which is public
            then, and moves everybody when it changes.

        Notes
        -----
        An error says nothing of any one row.
        """
        rows, ends, marks, places = _grouped(names, most, secret, places)
        if len(ends) > MOST_ROWS:
            raise ConfigurationError(
                f"Expected at most {MOST_ROWS} owners, got more: counts of their sum would not be exact.",
                kind="out-of-range",
            )
        return cls(rows, ends, most, places, marks)

    @classmethod
    def one_each(cls, names: Any, most: int, *, secret: bytes) -> Owners:
        """Owners with a place of their own each, in the order of their keyed digests: for simulated clients only.

        These are computed in blocks of as many rows each; real ones refuse it: with one owner more, or renamed, many
        have another place. They release what clients of :meth:`of` release, but that every batch has b owners.
        """
        rows, ends, _, _ = _grouped(names, most, secret, 1)
        return cls(rows, ends, most, len(ends))

    @classmethod
    def in_turn(cls, rows: int, most: int) -> Owners:
        """Owners of ``most`` rows each, one after the other: stand-ins, for data that do not say whose they are."""
        check_count("most", most)
        check_count("rows", rows)
        ends = np.minimum(np.arange(1, -(-rows // most) + 1) * most, rows)
        return cls(np.arange(rows), ends, most, len(ends))

    def __len__(self) -> int:
        """Return the number of owners: not public where they have marks."""
        return len(self.ends)

    @cached_property
    def mark_bytes(self) -> list[bytes]:
        """The mark of each owner, 16 bytes; empty without marks."""
        made = b"" if self.marks is None else self.marks.astype("<u8").tobytes()
        return [made[start : start + 16] for start in range(0, len(made), 16)]

    def taken_from(self, rows: NDArray[np.integer]) -> Owners:
        """Return the same owners with rows of a larger table: row i becomes ``rows[i]``."""
        return replace(self, rows=np.asarray(rows, dtype=np.int64)[self.rows])

    def in_places(self, places: slice) -> slice:
        """Return the numbers of the owners in some places; how many there are is as secret as who they are."""
        first, behind = np.searchsorted(self._place, places.indices(self.num_places)[:2]).tolist()
        return slice(first, behind)

    @cached_property
    def _place(self) -> NDArray[np.int64]:
        """The place of each owner, in ascending order."""
        if self.marks is None:
            return np.arange(len(self.ends))
        return (self.marks[:, 0] % np.uint64(self.num_places)).astype(np.int64)

    def padded_rows(self, owners: slice) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the first ``most`` rows of some owners, repeated where there are fewer, and which are no repetitions.

        Both have shape (owners, most).

        Notes
        -----
        **Formal guarantees.** Row i depends on owner i alone, and has as many entries whoever that is: how many samples
        somebody has settles neither shapes nor how much is computed.
        """
        ends = self.ends[owners]
        starts = np.concatenate([[0], self.ends])[:-1][owners]
        counts, number = (ends - starts)[:, None], np.arange(self.most)
        return self.rows[starts[:, None] + number % counts], number < counts


def _grouped(
    names: Iterable[object], most: int, secret: bytes, places: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64], int]:
    """Rows one owner after the other, where each owner's end, each owner's mark, and the number of places.

    Owners stand in the order of their places and marks; without ``places`` there are as many as owners.
    """
    check_count("most", most)
    every, named = _marks(_checked(names), secret)
    rows = np.flatnonzero(named)
    order = np.lexsort((every[rows, 1], every[rows, 0]))  # a stable sort: rows of an owner stay in their order
    rows, marks = rows[order], every[rows[order]]
    last = np.append((marks[1:] != marks[:-1]).any(axis=1), True)[: len(rows)]
    ends, marks = np.flatnonzero(last) + 1, marks[last]
    places = max(len(ends), 1) if places is None else places
    check_count("places", places)
    order = np.argsort(marks[:, 0] % np.uint64(places), kind="stable")
    return *_reordered(rows, ends, order), marks[order], places


def _checked(names: Any) -> Iterable[object]:
    """Names one by one; an array of numbers that are no integers, or of another shape, is refused."""
    if isinstance(names, str | bytes | Mapping):
        raise ConfigurationError(
            f"Expected one owner a row, in a list or an array, got a {type(names).__name__} as a whole.",
            kind="wrong-type",
            setting="names",
        )
    given = np.asarray(names) if hasattr(names, "__array__") else None
    if given is not None and (given.ndim != 1 or given.dtype.kind not in OWNER_KINDS):
        raise ConfigurationError(
            f"Expected one owner a row, integers or texts, got an array of {given.dtype} of shape {given.shape}.",
            kind="wrong-type",
        )
    # Not as an array where they are none: one long name would widen the entry of every row.
    return names if given is None else map(given.item, range(len(given)))


def _text(name: object) -> str:
    """Return a name as text, the same however it was stored.

    Empty for whatever is none: no record is refused for it.
    """
    if isinstance(name, str):
        return name
    if isinstance(name, bytes):
        return name.decode(errors="surrogateescape")
    whole = isinstance(name, int | np.integer) and not isinstance(name, bool) and -(2**63) <= name < 2**64
    return str(name) if whole else ""


def _marks(names: Iterable[object], secret: bytes) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return the keyed digest of each row's name, as two numbers of 64 bits, and which rows have a name.

    A name is hashed as it is read and not kept, so that a row costs as much whatever its name is.
    """
    if not LEAST_SECRET_BYTES <= len(secret) <= hashlib.blake2b.MAX_KEY_SIZE:
        raise ConfigurationError(
            f"Expected a secret of {LEAST_SECRET_BYTES} to {hashlib.blake2b.MAX_KEY_SIZE} bytes, got {len(secret)}.",
            kind="wrong-shape",
            setting="secret",
        )
    keyed = hashlib.blake2b(key=secret, digest_size=16, person=b"murmurfl owner")
    made, named = bytearray(), bytearray()
    for name in names:
        one, text = keyed.copy(), _text(name)
        one.update(text.encode(errors="surrogatepass"))
        made += one.digest()
        named.append(bool(text))
    if not named:
        raise ConfigurationError("Expected one owner a row, integers or texts, got no rows.", kind="missing")
    marks = np.frombuffer(bytes(made), "<u8").astype(np.uint64).reshape(-1, 2)
    return marks, np.frombuffer(bytes(named), dtype=np.bool_)


def _reordered(
    rows: NDArray[np.int64], ends: NDArray[np.int64], order: NDArray[np.intp]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and ends of owners in another order."""
    counts = np.diff(ends, prepend=0)
    starts, behind = (ends - counts)[order], np.cumsum(counts[order])
    return rows[np.arange(len(rows)) + np.repeat(starts - behind + counts[order], counts[order])], behind


_DISCARDED_BITS = np.uint64(11)


@lru_cache(maxsize=128)
def slots_of(secret_key: bytes, nonce: bytes, samples: int, slots: int) -> NDArray[np.int32]:
    """Return the release of each sample, from 1 to ``slots``, as a read-only int32 array.

    A pure function of its arguments.
    """
    drawn = _slots(keystream_words(_order_key(secret_key, nonce), samples), slots)
    drawn.setflags(write=False)
    return drawn


def _order_key(secret_key: bytes, nonce: bytes) -> bytes:
    return _labelled_key(secret_key, b"murmurfl secret order\x00", nonce)


def _labelled_key(secret_key: bytes, label: bytes, nonce: bytes) -> bytes:
    """Return a cipher key that belongs to a use, which the label names, and a nonce."""
    if len(secret_key) != KEY_BYTES or len(nonce) != NONCE_BYTES:
        raise ConfigurationError(
            f"Expected a key of {KEY_BYTES} bytes and a nonce of {NONCE_BYTES}, got {len(secret_key)} and "
            f"{len(nonce)}.",
            kind="wrong-shape",
            setting="secret_key",
        )
    return hmac.digest(secret_key, label + nonce, hashlib.sha256)


def _words_of(key: bytes, marks: Sequence[bytes]) -> NDArray[np.uint64]:
    """Return 64 bits for each owner, by marks, from a key."""
    words = b"".join(hashlib.blake2b(mark, key=key, digest_size=8).digest() for mark in marks)
    return np.frombuffer(words, "<u8")


def _slots(words: NDArray[np.uint64], slots: int) -> NDArray[np.int32]:
    """Return a release for each word of 64 random bits, counted from 1."""
    uniform = (words >> _DISCARDED_BITS).astype(np.float64) * 2.0**-53
    return 1 + (uniform * slots).astype(np.int32)  # below slots, for (1 - 2^-53) slots is not rounded up to it


def weights_of_owners(
    secret_key: bytes, nonce: bytes, marks: Sequence[bytes], slots: int, release: int
) -> NDArray[np.float64]:
    """Weight 1 for owners, by their marks, who are in a release and 0 for all others (:func:`weights_of`).

    Notes
    -----
    **Formal guarantees.** The order is that of the module, secret to all without the key. An owner's release stays the
    same when others come or go.
    """
    words = _words_of(_order_key(secret_key, nonce), marks)
    return (_slots(words, slots) == release).astype(np.float64)


def weights_of(secret_key: bytes, nonce: bytes, samples: int, slots: int, release: int) -> NDArray[np.float64]:
    """Weight 1 for samples that are in a release, counted from 1, and 0 for all others.

    Notes
    -----
    **Formal guarantees.** The order is that of the module, secret to all without the key, as long as nobody learns how
    many there are.
    """
    return (slots_of(secret_key, nonce, samples, slots) == release).astype(np.float64)


def sampled(secret_key: bytes, nonce: bytes, samples: int, rate: float) -> NDArray[np.float64]:
    """Weight 1 for samples in the Poisson batch of a nonce, each with probability ``rate``, and 0 for all others.

    Notes
    -----
    **Formal guarantees.** The batch is that of the module, secret to all without the key, and independent of those of
    other nonces, as long as nobody learns how many there are.
    """
    return _drawn(keystream_words(_batch_key(secret_key, nonce), samples), rate)


def sampled_owners(secret_key: bytes, nonce: bytes, marks: Sequence[bytes], rate: float) -> NDArray[np.float64]:
    """Weight 1 for owners, by their marks, in the Poisson batch of a nonce and 0 for all others (:func:`sampled`).

    Notes
    -----
    **Formal guarantees.** The batch is that of the module, secret to all without the key. Whether an owner is in it
    stays the same when others come or go.
    """
    return _drawn(_words_of(_batch_key(secret_key, nonce), marks), rate)


def _batch_key(secret_key: bytes, nonce: bytes) -> bytes:
    return _labelled_key(secret_key, b"murmurfl Poisson batch\x00", nonce)


def _drawn(words: NDArray[np.uint64], rate: float) -> NDArray[np.float64]:
    return ((words >> _DISCARDED_BITS).astype(np.float64) * 2.0**-53 < rate).astype(np.float64)


logger = logging.getLogger(__name__)

RowBytes = Callable[[int], bytes]
"""Gives the bytes by which a row is recognised: its contents, the same in every process while the row is the same."""


def any_data(row: int) -> bytes:  # noqa: ARG001
    """Recognise no row: for client-level policies only, of which every release counts for all data of the client.

    Examples
    --------
    >>> any_data(0) == any_data(1)
    True
    """
    return b""


_UNREADABLE = b"murmurfl: this row could not be read"
_DIGEST_BYTES = 16
_FIRST_ROWS = 16
_OWNER_BYTES = 4
_MOST_OWNERS = 4096
_OTHER_DATA = "Other data need a ledger of their own (`murmurfl ledger create`); these stay spent as far as they are."
_WAY_OUT = (
    "Nothing was released. Put the data back as they were, and their schema: new rows may be added at the end, nothing "
    f"before it may change. {_OTHER_DATA}"
)
_OWNERS_WAY_OUT = (
    "Nothing was released. Put the names back as they were, with the same number of places and samples-per-owner: rows "
    f"of owners may move and change, and new owners may come. {_OTHER_DATA}"
)


class Sliceable(Protocol):
    """Rows of data: a batch for a slice."""

    def __getitem__(self, rows: slice, /) -> Any: ...


def row_bytes(samples: Sliceable) -> RowBytes:
    """Return a callable that gives the bytes by which each row of ``samples`` is recognised.

    ``samples`` gives a batch of one row for a slice: arrays, tensors, numbers, texts, bytes, or lists, tuples and
    mappings of them. Anything else is pickled, and must be pickled alike in every process. All rows that cannot be read
    have the same bytes and raise nothing, because whether a row can be read must not show.

    Examples
    --------
    >>> import numpy as np
    >>> row = row_bytes((np.zeros((2, 3)), np.array([0, 1])))
    >>> row(0) != row(1)
    True
    """

    def bytes_of_row(row: int) -> bytes:
        try:
            parts = list(_parts(samples[row : row + 1]))
        except InvalidRecordError:
            return _UNREADABLE
        except BaseException as error:
            if is_interrupt(error):
                raise
            logger.exception("A row could not be read to know it again; it is known as unreadable.", extra=OF_DATA)
            return _UNREADABLE
        return b"".join(parts) if set(parts) - {_UNREADABLE} else _UNREADABLE

    return bytes_of_row


def _parts(value: Any) -> Iterator[bytes]:
    """Yield a value as bytes.

    Different values of the kinds above have different bytes; unreadable parts are all alike.
    """
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
    """Return a tensor as one NumPy can read.

    In memory, dense, without its history, as bytes where NumPy lacks its kind.
    """
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    value = value.cpu() if value.layout == torch.strided else value.cpu().to_dense()
    return value.contiguous().view(torch.uint8) if value.dtype == torch.bfloat16 else value


class DataDigest:
    """Digests of the first rows of a client's data; each row is hashed once.

    The key is the client's: without it nobody can tell from a ledger which rows were used.
    """

    def __init__(self, secret_key: bytes, rows: RowBytes) -> None:
        self._key = hmac.digest(secret_key, b"murmurfl used rows", hashlib.sha256)
        self.rows = rows
        self._known: dict[int, bytes] = {0: b""}

    def of(self, count: int) -> str:
        """Return the digest of the first ``count`` rows, in hexadecimal; empty for none."""
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

        A refusal instead of a line in the client's log could depend on a single row, and the server would see it.
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
        """Raise LedgerError, with the way out, if data of ``available`` rows are not those a ledger was used with.

        ``digest`` is of the ``used`` rows, as the ledger has it; empty if all releases so far were of clients that
        know no rows (:func:`any_data`), each of which counts for all data.

        Notes
        -----
        A change of, an exchange between, or a loss of used rows that can be read is found, but for a collision of
        BLAKE2b under a secret key. Rows, or parts of them, that cannot be read are all alike.
        """
        if used > available:
            raise LedgerError(
                f"Expected the {used} rows this ledger was used with, got data of {available} rows. {_WAY_OUT}",
                kind="wrong-shape",
                setting="data",
            )
        if digest and not hmac.compare_digest(self.of(used), digest):
            raise LedgerError(
                f"Expected the {used} rows this ledger was used with, unchanged and in their order, got other ones: "
                "the data or their schema were changed, the task, partition or seed is another, or the noise key is. "
                f"{_WAY_OUT}",
                kind="mismatch",
                setting="data",
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
        """Return the ledger's text on the owners in the first ``count`` places: N and j, and their digests in order."""
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
                "got others: names were written anew, somebody is gone, the schema's owner, the number of places or "
                f"samples-per-owner is another, or these were samples. {_OWNERS_WAY_OUT}",
                kind="mismatch",
                setting="owners",
            )
        self._found = used, digest

    @property
    def _kind(self) -> str:
        return f"owners {self.rows.num_places} {self.rows.most} "

    def _in(self, count: int) -> list[str]:
        return self._digests[self.rows.in_places(slice(0, count))]


def make_digest(secret_key: bytes, known: RowBytes | Owners) -> DataDigest | OwnersDigest:
    """Return the digest a ledger keeps of a client's data: of its owners' names, or of its rows."""
    return OwnersDigest(secret_key, known) if isinstance(known, Owners) else DataDigest(secret_key, known)


def known_by(samples: Any) -> RowBytes | Owners:
    """Return how a ledger recognises samples: by their owners' names, or by the bytes of each row.

    Notes
    -----
    **Formal guarantees.** Of owners it is their names: two files with the same set of them are known alike, whoever's
    rows differ. Of other samples it is every row, as it is read before anything that was released is used to read it
    (``first_read``), where samples have that.
    """
    if getattr(samples, "samples_per_owner", 0):
        return samples.owners
    return row_bytes(getattr(samples, "first_read", samples))
