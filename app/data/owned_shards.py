"""Every machine's samples by owner: shards whose rows are owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from ...clients.records.owner_rows import OwnedSamples
from ...privacy import ConfigurationError
from ...privacy.machine.record_owners import Owners
from ...privacy.noise.noise_keys import derived_bytes
from .shards import Parts
from .task import Dataset


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
    seed : int
        Of the run, from which simulated machines have their secrets.

    Notes
    -----
    Simulated machines alone: each of their owners has a place of its own (:meth:`~murmurfl.privacy.Owners.one_each`),
    where owners of real ones fall into places (:meth:`real`).
    """

    def __init__(self, dataset: Dataset, parts: Parts, most: int, seed: int) -> None:
        self._arrays = dataset.train_features, dataset.train_labels
        self._owner_of, self._parts, self._most = dataset.owner_of, parts, most
        self._owners = [self._simulated(machine, part, seed) for machine, part in enumerate(parts)]
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

    def real(self, machine: int, secret: bytes, places: int | None) -> OwnedSamples:
        """The samples of a real machine, of data that say whose they are.

        Parameters
        ----------
        machine : int
        secret : bytes
            Of its ledger (:meth:`~murmurfl.privacy.Ledger.secret_of_owners`).
        places : int, optional
            As its operator has settled it; default the number of owners.

        Raises
        ------
        ConfigurationError
            If the data do not say it: stand-ins are for simulation.
        """
        if self._owner_of is None:
            raise ConfigurationError(
                f"Expected data that say whose they are with samples-per-owner = {self._most}, got none: stand-ins are "
                "for simulation."
            )
        part = self._parts[machine]
        owners = Owners.of(self._owner_of[part], self._most, secret=secret, places=places)
        return OwnedSamples(self._arrays, owners.taken_from(part))

    def _simulated(self, machine: int, part: NDArray[np.int64], seed: int) -> Owners:
        if not len(part):
            return Owners(part, part, self._most, 0)
        if self._owner_of is None:
            return Owners.in_turn(len(part), self._most).taken_from(part)
        secret = derived_bytes(32, "places of owners", seed, machine)
        return Owners.one_each(self._owner_of[part], self._most, secret=secret).taken_from(part)
