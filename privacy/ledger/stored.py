"""Large arrays of a ledger on disk: read when they are asked for, hashed and kept without being read.

A release of a large model is asked for twice, before its gradients are computed and when it is recorded, and mostly
needs nothing of what was sent before. So what is large stays in the file, for as long as the transaction lasts.
"""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ..errors import LedgerError

LARGE_BYTES = 1 << 20
"""Arrays from here on stay in the file until they are asked for."""
_PIECE_BYTES = 1 << 20

Place = tuple[str, str, int]
"""Session, kind and number of an array."""


class StoredArray:
    """An array in a ledger's file, for as long as the transaction of its connection lasts."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        rowid: int,
        place: Place,
        dtype: str,
        shape: tuple[int, ...],
        errors: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._connection, self._errors = connection, errors
        self.rowid, self.place = rowid, place
        self.dtype, self.shape = np.dtype(dtype), shape
        self._read: weakref.ref[NDArray[Any]] | None = None

    def pieces(self) -> Iterator[bytes]:
        """Yield the array's bytes, some at a time."""
        with self._connection.blobopen("arrays", "content", self.rowid, readonly=True) as blob:
            while piece := blob.read(_PIECE_BYTES):
                yield piece

    def values(self) -> NDArray[Any]:
        """The array, read-only; read once as long as somebody holds it."""
        known = None if self._read is None else self._read()
        if known is None:
            known = self._values()
            self._read = weakref.ref(known)
        return known

    def is_read_as(self, values: NDArray[Any]) -> bool:
        """Whether ``values`` is the very array that was read here: it cannot have been changed."""
        return self._read is not None and self._read() is values

    def _values(self) -> NDArray[Any]:
        values = np.empty(self.shape, self.dtype)
        room, start = values.reshape(-1).view(np.uint8), 0
        with self._errors():
            try:
                for piece in self.pieces():
                    room[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
                    start += len(piece)
            except sqlite3.ProgrammingError as error:
                raise LedgerError(
                    "Expected an array to be read in the transaction in which its ledger gave it, got one that has "
                    "ended."
                ) from error
            if start < room.size:
                raise ValueError("an array that is too short")
        values.setflags(write=False)
        return values


Entry = NDArray[Any] | StoredArray


def of(entry: Entry) -> NDArray[Any]:
    """The array of an entry, read from the file if it is there."""
    return entry.values() if isinstance(entry, StoredArray) else entry


class StoredArrays(Mapping[int, NDArray[Any]]):
    """Arrays by number, the large ones in the file until they are asked for."""

    def __init__(self, entries: Mapping[int, Entry]) -> None:
        self.entries = entries

    def __getitem__(self, number: int) -> NDArray[Any]:
        return of(self.entries[number])

    def __contains__(self, number: object) -> bool:
        return number in self.entries  # without reading it

    def __iter__(self) -> Iterator[int]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class StoredState(Sequence[NDArray[Any]]):
    """A mechanism's state, its large arrays in the file until one is used; then it stays in memory."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self._read: tuple[NDArray[Any], ...] | None = None

    @overload
    def __getitem__(self, index: int) -> NDArray[Any]: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[NDArray[Any], ...]: ...

    def __getitem__(self, index: int | slice) -> NDArray[Any] | tuple[NDArray[Any], ...]:
        if self._read is None:
            self._read = tuple(map(of, self.entries))
        return self._read[index]

    def __len__(self) -> int:
        return len(self.entries)
