"""The noise of a block of machines on a device: what each release adds to its contribution and removes from it.

A mechanism's increment is linear in the normals of the release and of the few before it. Its own code gives the
factors, as its increment of unit vectors (:func:`factors_of`). The device multiplies, adds and rounds to the grid like
:class:`~murmurfl.privacy.machine.prefix_sums.NoiseStream`; a mechanism that removes its whole last row removes the very
integers that were added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....privacy import ConfigurationError
from ....privacy.accounting.noise_plan import NoisePlan
from ....privacy.mechanisms import Mechanism
from ....privacy.noise import LARGEST_NORMAL, MARK, NONCE_BYTES, row_key
from .device_counts import marked
from .device_normals import standard_normal_rows

if TYPE_CHECKING:
    import torch
else:
    from .late_torch import torch


Name = tuple[bytes, bytes]
"""A machine's secret key and the nonce of a release."""


class RowTable:
    """Noise rows in one table, so that a kept row holds no other row's memory.

    Parameters
    ----------
    size : int
        Values of a row.
    most_rows : int
        Most rows to keep. The oldest go first, and are drawn again if needed.
    """

    def __init__(self, size: int, most_rows: int, device: torch.device) -> None:
        self._most = most_rows
        self._table = torch.empty((0, size), dtype=torch.float32, device=device)
        self._places: dict[Name, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._places)

    def get(self, names: Sequence[Name], make: Callable[[Sequence[Name]], torch.Tensor]) -> torch.Tensor:
        """The rows of some names; ``make`` draws those that are missing."""
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
        """Free the places of rows that nobody needs any more."""
        for name in names:
            place = self._places.pop(name, None)
            if place is not None:
                self._free.append(place)

    def keep(self, names: Sequence[Name], rows: torch.Tensor) -> None:
        """Keep rows while there is room; only the last ones if there are too many."""
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
        """Make room for this many rows, at least doubling the table so that it is copied only a few times."""
        had = len(self._table)
        if rows <= had:
            return
        table = self._table.new_empty((min(max(rows, 2 * had), self._most), self._table.shape[1]))
        table[:had] = self._table
        self._table = table
        self._free += range(had, len(table))


_MARK = int(MARK)


class Factors(NamedTuple):
    """The factors of a release's increment, in units of the grid.

    ``added[j]`` and ``removed[j]`` multiply the normals of the release j before this one.
    """

    added: NDArray[np.floating]
    removed: NDArray[np.floating] | None


def check_mechanism_on_device(mechanism: Mechanism) -> None:
    """Raise if a mechanism makes a release from more than a few releases' normals.

    Raises
    ------
    ConfigurationError
        With the names of those that work.
    """
    if _earlier_rows(mechanism, mechanism.num_releases) is None:
        raise ConfigurationError(
            "Expected a mechanism whose releases are made of the normals of a few (cancelling, decay, bisr, "
            f"independent) or none on a device, got {mechanism.name!r}: leave the device empty for it."
        )


def _earlier_rows(mechanism: Mechanism, release: int) -> int | None:
    """How many earlier releases' normals a release's noise uses; None if it is not made of releases' normals."""
    if any(mechanism.draws(k) != 1 for k in (1, release)):
        return None
    kept = {"nothing": 0, "last": 1, "recent": mechanism.remembered}.get(mechanism.memory)
    return None if kept is None else min(kept, release - 1)


@lru_cache(maxsize=4096)
def factors_of(mechanism: Mechanism, release: int, scale: float) -> Factors:
    """The factors of a release, by the mechanism's own increment of unit vectors.

    Parameters
    ----------
    mechanism : Mechanism
        One that passes :func:`check_mechanism_on_device`.
    release : int
        k, from 1.
    scale : float
        Common factor of all normals.
    """
    size = (_earlier_rows(mechanism, release) or 0) + 1
    units = np.eye(size)

    def draw(releases: range) -> NDArray[np.floating]:
        return units[[release - j for j in releases]]

    state = mechanism.initial_state(size) if release == 1 else mechanism.state_after(release - 1, draw, scale)
    added, removed, _ = mechanism.increment(state, release, units[0], scale)
    if removed is not None and not mechanism.removes_last:
        added, removed = added - removed, None
    return Factors(np.array(added), None if removed is None else np.array(removed))


class DeviceNoise:
    """The noise of sessions of the machines of one policy, for simulations only.

    It depends neither on what ``rows`` keeps, nor on data, nor on which machines share a block.

    Parameters
    ----------
    num_parameters : int
        d.
    rows : RowTable
        Keeps the normals that a later release needs; rows beyond its room are drawn again.
    """

    def __init__(self, plan: NoisePlan, num_parameters: int, device: torch.device, rows: RowTable) -> None:
        self.plan = plan
        self.num_parameters = num_parameters
        self.device = device
        self._scale = float(plan.grid.factor(plan.noise_std))
        self._needed = _earlier_rows(plan.mechanism, plan.mechanism.num_releases) or 0
        self._rows = rows

    def add_to(
        self,
        counts: torch.Tensor,
        releases: Sequence[int],
        keys: Sequence[bytes],
        nonces: Sequence[bytes],
        earlier: Sequence[bytes],
    ) -> None:
        """Add the noise of each machine's next release to its contribution.

        Parameters
        ----------
        counts : int64 tensor of shape (machines, d)
            Changed in place.
        releases : sequence of int
            k of each machine, from 1.
        keys, nonces : sequences of bytes
            Each machine's secret key and the nonce of its release.
        earlier : sequence of bytes
            Nonces of the earlier releases, the last one last, as far as the mechanism remembers them.
        """
        if self.plan.noise_std == 0.0:
            return
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for i, release in enumerate(releases):
            groups[release].append(i)
        for release, chosen in groups.items():
            names = [(keys[i], _lagged(nonces[i], earlier[i])) for i in chosen]
            noise = self._increment(release, names)
            if len(groups) == 1:
                counts += noise
            else:
                counts.index_add_(0, torch.tensor(chosen, device=self.device), noise)

    def _increment(self, release: int, names: Sequence[tuple[bytes, Sequence[bytes]]]) -> torch.Tensor:
        """What machines that make release k add, less what they remove, as counts."""
        mechanism = self.plan.mechanism
        factors = factors_of(mechanism, release, self._scale)
        self._check_room(factors)
        fresh = self._rows_of(names, 0)
        added = fresh.to(torch.float64).mul_(float(factors.added[0]))
        removed: torch.Tensor | None = None
        for lag in range(1, len(factors.added)):
            rows = self._rows_of(names, lag)
            if factors.removed is not None and factors.removed[lag]:
                removed = _plus(removed, rows, float(factors.removed[lag]))
            if factors.added[lag]:
                added = _plus(added, rows, float(factors.added[lag]))
            if lag == self._needed:  # used for the last time
                self._rows.forget([(key, lagged[lag]) for key, lagged in names])
        if self._needed and release < mechanism.num_releases:
            self._rows.keep([(key, lagged[0]) for key, lagged in names], fresh)
        counts = marked(added)
        # Removed counts take the mark with them.
        return counts.sub_(_MARK) if removed is None else counts.sub_(marked(removed))

    def _rows_of(self, names: Sequence[tuple[bytes, Sequence[bytes]]], lag: int) -> torch.Tensor:
        return self._rows.get([(key, lagged[lag]) for key, lagged in names], self._made)

    def _made(self, names: Sequence[Name]) -> torch.Tensor:
        keys = [row_key(*name) for name in names]
        return standard_normal_rows(keys, self.num_parameters, self.device)

    def _check_room(self, factors: Factors) -> None:
        """Raise if the noise does not fit the grid, as a single machine does."""
        largest = sum(np.abs(part).sum() for part in factors if part is not None)
        self.plan.grid.rounded(np.empty(0), LARGEST_NORMAL * float(largest) * self.plan.grid.spacing)


def _lagged(nonce: bytes, earlier: bytes) -> list[bytes]:
    """Nonces of a release and of those before it, the latest first."""
    return [nonce, *(earlier[i - NONCE_BYTES : i] for i in range(len(earlier), 0, -NONCE_BYTES))]


def _plus(total: torch.Tensor | None, rows: torch.Tensor, factor: float) -> torch.Tensor:
    term = rows.to(torch.float64).mul_(factor)
    return term if total is None else total.add_(term)
