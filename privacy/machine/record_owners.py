r"""Owners of samples: what a mu is worth to somebody with several samples, and data whose rows are owners.

Two answers to the same question. :func:`person_mu` says what a guarantee *for one sample* becomes for a person with
several of them, on one machine or on many. :class:`Owners` makes the question go away on one machine: it groups a
machine's samples by owner, at most so many of each, so that what a machine admits, clips and counts is an owner and
not a sample. Every proof about a machine's samples then is one about its owners, word for word: nothing in the rule of
admission, the noise or the ledger knows what a row of data is (docs/proofs/owners.md).

Formal guarantees
-----------------
Both are functions of public numbers, or of one owner's samples each: which rows of an owner are kept depends on that
owner's own rows and their order, which release the owner is in on its name and a secret, and neither on anybody else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..accounting.asked import check_count
from ..errors import ConfigurationError
from .clipping import MOST_ROWS

if TYPE_CHECKING:
    from .policy import PrivacyPolicy, Trust

OWNER_KINDS = "iuSUO"
"""NumPy's kinds of owners' names: integers, texts, or objects that are either."""
LEAST_SECRET_BYTES = 16


def person_mu(
    mu: float,
    *,
    machines: int = 1,
    samples: int = 1,
    trust: Trust = "untrusted-server",
    mu_local: float | None = None,
) -> float:
    """What a mu for one sample becomes for a person with ``samples`` samples on each of ``machines`` machines.

    ``mu`` and ``trust`` are those of the guarantee, the same on each machine. Under ``secure-aggregation``
    ``mu_local``, which holds whatever happens, is required.

    Notes
    -----
    **Formal guarantees.** For replacement of all of that person's samples by any others, on all these machines at once.
    Machines that add their own noise are independent, so their mus add in squares: samples x sqrt(machines) x mu.
    Where mu counts on other machines' noise, or on the server's, one sample after the other is replaced: samples x
    machines x mu; under secure aggregation no more than samples x sqrt(machines) x mu_local, which needs nobody. All
    of these are upper bounds that some placement of the samples attains. The machines must be honest, as mu asks of
    the machine that it is of. Of a secret order's epsilon nothing is said.
    Proof: docs/proofs/owners.md.

    Examples
    --------
    >>> person_mu(1.0, machines=4), person_mu(1.0, samples=3), person_mu(1.0, machines=4, trust="trusted-server")
    (2.0, 3.0, 4.0)
    >>> person_mu(1.0, machines=100, trust="secure-aggregation", mu_local=5.0)  # 25 honest machines of each sum
    50.0
    """
    for name, value in (("machines", machines), ("samples", samples)):
        check_count(name, value)
    if not mu >= 0:
        raise ConfigurationError(f"Expected mu >= 0, got {mu!r}.")
    if trust == "untrusted-server":
        return samples * math.sqrt(machines) * mu
    if trust == "trusted-server":
        return samples * machines * mu
    if mu_local is None:
        raise ConfigurationError("Expected mu_local under secure aggregation, got None.")
    return min(samples * machines * mu, samples * math.sqrt(machines) * mu_local)


@dataclass(frozen=True, eq=False)
class Owners:
    """The rows of data of each owner, at most so many of each, and the place that each owner is in.

    A machine of owners has N places, a public number. A release is of b of them, of whoever falls into these: a place
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
    is in a place, is not.
    Proof: docs/proofs/owners.md.
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
        names : array of shape (n,)
            Whose each row is: integers or texts, or objects that are. Rows with equal names are one owner's; the
            integer 1 and the text "1" are equal. Rows without a name (an empty text, or None) are left out.
        most : int
            j: of each owner's rows the first j are used.
        secret : bytes
            The machine's, 16 to 64 bytes (:meth:`~murmurfl.privacy.Ledger.secret_of_owners`).
        places : int, optional
            N, a public number that the machine's operator has settled. Default the number of owners, which is public
            then, and moves everybody when it changes.

        Notes
        -----
        An error says nothing of any one row.
        """
        texts, rows, ends = _grouped(names, most)
        places = max(len(texts), 1) if places is None else places
        check_count("places", places)
        if len(texts) > MOST_ROWS:
            raise ConfigurationError(
                f"Expected at most {MOST_ROWS} owners, got more: counts of their sum would not be exact."
            )
        marks = _marks(texts, secret)
        order = np.lexsort((marks[:, 1], marks[:, 0], marks[:, 0] % np.uint64(places)))
        return cls(*_reordered(rows, ends, order), most, places, marks[order])

    @classmethod
    def one_each(cls, names: Any, most: int, *, secret: bytes) -> Owners:
        """Owners with a place of their own each, in the order of their keyed digests: for simulated machines only.

        These are computed in blocks of as many rows each; real ones refuse it: with one owner more, or renamed, many
        have another place. They release what machines of :meth:`of` release, but that every batch has b owners.
        """
        texts, rows, ends = _grouped(names, most)
        marks = _marks(texts, secret)
        return cls(*_reordered(rows, ends, np.lexsort((marks[:, 1], marks[:, 0]))), most, len(texts))

    @classmethod
    def in_turn(cls, rows: int, most: int) -> Owners:
        """Owners of ``most`` rows each, one after the other: stand-ins, for data that do not say whose they are."""
        check_count("most", most)
        check_count("rows", rows)
        ends = np.minimum(np.arange(1, -(-rows // most) + 1) * most, rows)
        return cls(np.arange(rows), ends, most, len(ends))

    def __len__(self) -> int:
        """The number of owners: not public where they have marks."""
        return len(self.ends)

    @cached_property
    def mark_bytes(self) -> list[bytes]:
        """The mark of each owner, 16 bytes; empty without marks."""
        made = b"" if self.marks is None else self.marks.astype("<u8").tobytes()
        return [made[start : start + 16] for start in range(0, len(made), 16)]

    def taken_from(self, rows: NDArray[np.integer]) -> Owners:
        """The same owners, whose rows are those of a larger table: row i is ``rows[i]`` there."""
        return replace(self, rows=np.asarray(rows, dtype=np.int64)[self.rows])

    def in_places(self, places: slice) -> slice:
        """The numbers of the owners in some places; how many they are is as secret as who they are."""
        if self.marks is None:
            return places
        first, behind = np.searchsorted(self._place, places.indices(self.num_places)[:2]).tolist()
        return slice(first, behind)

    @cached_property
    def _place(self) -> NDArray[np.int64]:
        """The place of each owner, in ascending order."""
        if self.marks is None:
            return np.arange(len(self.ends))
        return (self.marks[:, 0] % np.uint64(self.num_places)).astype(np.int64)

    def padded_rows(self, owners: slice) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The first ``most`` rows of some owners, repeated where there are fewer, and which are no repetitions.

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


def _grouped(names: Any, most: int) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64]]:
    """The names of owners as texts, their rows one owner after the other, and where each owner's end."""
    check_count("most", most)
    given = np.asarray(names)
    if given.ndim != 1 or given.dtype.kind not in OWNER_KINDS or not len(given):
        raise ConfigurationError(
            f"Expected one owner a row, integers or texts, got an array of {given.dtype} of shape {given.shape}."
        )
    numbers: dict[str, int] = {}
    texts = map(_text, given.tolist())
    owner = np.fromiter((numbers.setdefault(t, len(numbers)) if t else -1 for t in texts), np.int64, len(given))
    rows = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :]
    return list(numbers), rows, np.cumsum(np.bincount(owner[rows], minlength=len(numbers)))


def _text(name: object) -> str:
    """A name as text, the same however it was stored; empty for whatever is none: no record is refused for it."""
    if isinstance(name, str):
        return name
    if isinstance(name, bytes):
        return name.decode(errors="surrogateescape")
    whole = isinstance(name, int | np.integer) and not isinstance(name, bool) and -(2**63) <= name < 2**64
    return str(name) if whole else ""


def _marks(texts: Sequence[str], secret: bytes) -> NDArray[np.uint64]:
    """The keyed digest of each name, as two numbers of 64 bits."""
    if not LEAST_SECRET_BYTES <= len(secret) <= hashlib.blake2b.MAX_KEY_SIZE:
        raise ConfigurationError(
            f"Expected a secret of {LEAST_SECRET_BYTES} to {hashlib.blake2b.MAX_KEY_SIZE} bytes, got {len(secret)}."
        )
    keyed = hashlib.blake2b(key=secret, digest_size=16, person=b"murmurfl owner")
    made = bytearray()
    for text in texts:
        one = keyed.copy()
        one.update(text.encode(errors="surrogatepass"))
        made += one.digest()
    return np.frombuffer(bytes(made), "<u8").astype(np.uint64).reshape(-1, 2)


def _reordered(
    rows: NDArray[np.int64], ends: NDArray[np.int64], order: NDArray[np.intp]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and ends of owners in another order."""
    counts = np.diff(ends, prepend=0)
    starts, behind = (ends - counts)[order], np.cumsum(counts[order])
    return rows[np.arange(len(rows)) + np.repeat(starts - behind + counts[order], counts[order])], behind


def check_owned(policy: PrivacyPolicy, samples: Any) -> None:
    """Raise unless samples are grouped by owner just as the policy says."""
    held = getattr(samples, "samples_per_owner", 0)
    if policy.samples_per_owner != held:
        raise ConfigurationError(
            f"Expected samples grouped by owner, at most {policy.samples_per_owner} of each, as the policy says, got "
            f"{f'at most {held} of each' if held else 'samples by themselves'}: group them with OwnedSamples, and set "
            "samples_per_owner of the policy to the same number (0 for samples by themselves)."
        )
