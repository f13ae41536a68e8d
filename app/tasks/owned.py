"""Every machine's samples by owner: shards whose rows are owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from ...clients.owners import OwnedSamples
from ...privacy.owners import Owners
from .base import Dataset
from .parts import Parts


class OwnedShards(Sequence[OwnedSamples]):
    """Machines whose samples are grouped by owner, at most so many of each.

    Parameters
    ----------
    dataset : Dataset
        Which says whose its samples are. If it does not, every ``most`` samples of a machine, in the order in which it
        has them, stand for one owner's: what it costs to protect owners can be seen with any data.
    parts : Parts
        Which samples each machine has. An owner whose samples are on several machines is one on each of them.
    most : int
        j, samples of an owner that are used.
    """

    def __init__(self, dataset: Dataset, parts: Parts, most: int) -> None:
        self._arrays = dataset.train_features, dataset.train_labels
        self._owners = [_owners(dataset.owner_of, part, most) for part in parts]
        self.sizes: NDArray[np.int64] = np.array([len(owners) for owners in self._owners], dtype=np.int64)
        """How many owners each machine has."""

    def __len__(self) -> int:
        return len(self._owners)

    @overload
    def __getitem__(self, machine: int) -> OwnedSamples: ...
    @overload
    def __getitem__(self, machine: slice) -> Sequence[OwnedSamples]: ...
    def __getitem__(self, machine: int | slice) -> OwnedSamples | Sequence[OwnedSamples]:
        if isinstance(machine, slice):
            return [self[i] for i in range(len(self))[machine]]
        return OwnedSamples(self._arrays, self._owners[machine])


def _owners(owner_of: NDArray[np.int64] | None, part: NDArray[np.int64], most: int) -> Owners:
    if not len(part):
        return Owners(part, part, most)
    grouped = Owners.in_turn(len(part), most) if owner_of is None else Owners.of(owner_of[part], most)
    return grouped.taken_from(part)
