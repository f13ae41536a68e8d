"""Which machine and which owner has which samples, as one array of sample numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from ...clients.records.machine_records import OwnedSamples
from ...privacy import ConfigurationError
from ...privacy.machine.record_owners import Owners
from ...privacy.noise.noise_keys import derived_bytes
from .task import Dataset, Shard

T = TypeVar("T", covariant=True)


class PerMachine(Sequence[T]):
    """Things of machines, each made on access by :meth:`machine`."""

    @abstractmethod
    def machine(self, number: int) -> T:
        """The thing of one machine."""

    @overload
    def __getitem__(self, number: int) -> T: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[T]: ...
    def __getitem__(self, number: int | slice) -> T | Sequence[T]:
        if isinstance(number, slice):
            return [self.machine(i) for i in range(len(self))[number]]
        return self.machine(number)


class Parts(PerMachine[NDArray[np.int64]]):
    """Numbers of every machine's samples in the order in which it uses them; each machine's is a view.

    Parameters
    ----------
    numbers : ndarray of shape (samples,), int64
        Of all machines, one machine after the other.
    sizes : ndarray of shape (M,), int64
        Samples of each machine.
    """

    def __init__(self, numbers: NDArray[np.int64], sizes: NDArray[np.integer]) -> None:
        self.numbers = numbers
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self._ends = np.cumsum(self.sizes)

    @classmethod
    def together(cls, parts: Iterable[NDArray[np.integer]]) -> Parts:
        """Parts from one array for each machine."""
        if isinstance(parts, Parts):
            return parts
        arrays = [np.asarray(part, dtype=np.int64) for part in parts]
        sizes = np.array([len(part) for part in arrays], dtype=np.int64)
        return cls(np.concatenate([np.empty(0, np.int64), *arrays]), sizes)

    @classmethod
    def even(cls, numbers: NDArray[np.int64], machines: int) -> Parts:
        """Equal parts; if that is impossible, the first ones have one more."""
        each, more = divmod(len(numbers), machines)
        return cls(numbers, np.repeat([each + 1, each], [more, machines - more]))

    @classmethod
    def of_owners(cls, owner: NDArray[np.integer], machines: int) -> Parts:
        """Parts in which machine i has the samples with i in ``owner``, ascending."""
        order = np.argsort(owner, kind="stable").astype(np.int64, copy=False)
        first, last = np.searchsorted(owner[order], [0, machines])
        return cls(order[first:last], np.bincount(owner[order[first:last]], minlength=machines))

    def __len__(self) -> int:
        return len(self.sizes)

    def machine(self, number: int) -> NDArray[np.int64]:
        end, size = self._ends[number], self.sizes[number]
        return self.numbers[end - size : end]

    def starts(self, machines: NDArray[np.integer]) -> NDArray[np.int64]:
        """Positions in :attr:`numbers` where some machines' samples begin."""
        return self._ends[machines] - self.sizes[machines]

    def shuffled(self, generator: np.random.Generator) -> Parts:
        """The same parts, each machine's in the order of one ``generator.permutation`` after another."""
        numbers = self.numbers.copy()
        for machines, size in self._alike():
            start = int(self._ends[machines.start]) - size
            stop = start + size * len(machines)
            # Shuffling one sample would draw nothing; parts of equal size are rows, shuffled in turn.
            if size > 1 and len(machines) == 1:
                generator.shuffle(numbers[start:stop])
            elif size > 1:
                numbers[start:stop] = generator.permuted(numbers[start:stop].reshape(-1, size), axis=1).ravel()
        return Parts(numbers, self.sizes)

    def _alike(self) -> Iterator[tuple[range, int]]:
        """Runs of neighbours with equally many samples, and that number."""
        starts = np.flatnonzero(np.diff(self.sizes, prepend=-1))
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(self)], strict=True):
            yield range(start, stop), int(self.sizes[start])


class Shards(PerMachine[Shard]):
    """Every machine's samples, each machine's made on access."""

    def __init__(self, dataset: Dataset, parts: Parts) -> None:
        self._dataset = dataset
        self._parts = parts

    @property
    def sizes(self) -> NDArray[np.int64]:
        return self._parts.sizes

    def batch(self, machines: Sequence[int], samples: Sequence[slice]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Equally many samples of each of several machines, one machine after the other."""
        starts = np.array([chosen.start for chosen in samples])
        counts = np.array([chosen.stop for chosen in samples]) - starts
        if (counts != counts[0]).any() or (starts + counts > self.sizes[np.asarray(machines)]).any():
            return Shard.stack([(self[i], chosen) for i, chosen in zip(machines, samples, strict=True)])
        firsts = self._parts.starts(np.asarray(machines)) + starts
        chosen = self._parts.numbers[(firsts[:, None] + np.arange(counts[0])).ravel()]
        return self._dataset.train_features[chosen], self._dataset.train_labels[chosen]

    def __len__(self) -> int:
        return len(self._parts)

    def machine(self, number: int) -> Shard:
        return Shard(self._dataset, self._parts[number])


def shard_sizes(shards: Sequence[Any], used: Callable[[int], int] = int) -> list[int]:
    """Samples of each machine, of which ``used`` says how many count; equal numbers are one object."""
    sizes = getattr(shards, "sizes", None)
    if sizes is None:
        return [used(len(shard)) for shard in shards]
    if sizes.min() == sizes.max():
        return [used(int(sizes[0]))] * len(shards)
    distinct, place = np.unique(sizes, return_inverse=True)
    values = [used(size) for size in distinct.tolist()]
    return [values[i] for i in place.tolist()]


class OwnedShards(PerMachine[OwnedSamples]):
    """Machines whose samples are grouped by owner, at most ``most`` of each.

    Parameters
    ----------
    dataset : Dataset
        If it names no owners, every ``most`` consecutive samples of a machine stand for one owner's, which shows on any
        data what protecting owners costs.
    parts : Parts
        An owner with samples on several machines is one on each of them.
    most : int
        j, samples of an owner that are used.
    seed : int
        Of the run; simulated machines' secrets follow from it.

    Notes
    -----
    For simulated machines: each owner has a place of its own (:meth:`~murmurfl.privacy.Owners.one_each`). Owners of
    real machines fall into places (:meth:`real`).
    """

    def __init__(self, dataset: Dataset, parts: Parts, most: int, seed: int) -> None:
        self._arrays = dataset.train_features, dataset.train_labels
        self._owner_of, self._parts, self._most = dataset.owner_of, parts, most
        self._owners = [self._simulated(machine, part, seed) for machine, part in enumerate(parts)]
        self.sizes: NDArray[np.int64] = np.array([len(owners) for owners in self._owners], dtype=np.int64)
        """Number of owners of each machine."""

    def __len__(self) -> int:
        return len(self._owners)

    def machine(self, number: int) -> OwnedSamples:
        return OwnedSamples(self._arrays, self._owners[number])

    def real(self, machine: int, secret: bytes, places: int | None) -> OwnedSamples:
        """A real machine's samples, of data that name owners.

        Parameters
        ----------
        secret : bytes
            Of its ledger (:meth:`~murmurfl.privacy.Ledger.secret_of_owners`).
        places : int, optional
            As its operator has decided; default the number of owners.

        Raises
        ------
        ConfigurationError
            If the data name no owners: stand-ins are for simulation.
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
