"""Rows of normals that are kept on a device until no release needs them any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
else:
    from .late_torch import torch


Name = tuple[bytes, bytes]
"""A machine's secret key and the nonce of a release."""


class RowTable:
    """Rows of one table, so that a kept row holds no memory of others'.

    Parameters
    ----------
    size : int
        Values of a row.
    most_rows : int
        The most to keep. The oldest go first, and are made again.
    device : torch.device
    """

    def __init__(self, size: int, most_rows: int, device: torch.device) -> None:
        self._most = most_rows
        self._table = torch.empty((0, size), dtype=torch.float32, device=device)
        self._places: dict[Name, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._places)

    def get(self, names: Sequence[Name], make: Callable[[Sequence[Name]], torch.Tensor]) -> torch.Tensor:
        """The rows of some names, those that are not here made anew.

        Parameters
        ----------
        names : sequence
        make : callable
            Rows of names.

        Returns
        -------
        float32 tensor of shape (names, size)
        """
        here = [self._places.get(name) for name in names]
        missing = [i for i, place in enumerate(here) if place is None]
        if len(missing) == len(names):
            return make(names)
        places = torch.tensor([0 if place is None else place for place in here], device=self._table.device)
        rows = self._table.index_select(0, places)
        if missing:
            rows[torch.tensor(missing, device=rows.device)] = make([names[i] for i in missing])
        return rows

    def forget(self, names: Sequence[Name]) -> None:
        """Give back the room of rows that nobody needs any more."""
        for name in names:
            place = self._places.pop(name, None)
            if place is not None:
                self._free.append(place)

    def keep(self, names: Sequence[Name], rows: torch.Tensor) -> None:
        """Keep rows as long as there is room; the last of them if there are too many."""
        if self._most < 1:
            return
        names, rows = names[-self._most :], rows[-self._most :]
        self.forget(names)
        while len(self._places) + len(names) > self._most:
            self._free.append(self._places.pop(next(iter(self._places))))
        self._grow(len(self._places) + len(names))
        places = [self._free.pop() for _ in names]
        self._places.update(zip(names, places, strict=True))
        self._table[torch.tensor(places, device=rows.device)] = rows

    def _grow(self, rows: int) -> None:
        """Room for so many rows: twice what there is, so that a table is copied a few times in all."""
        had = len(self._table)
        if rows <= had:
            return
        table = self._table.new_empty((min(max(rows, 2 * had), self._most), self._table.shape[1]))
        table[:had] = self._table
        self._table = table
        self._free += range(had, len(table))
