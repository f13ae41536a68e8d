"""Partitions of a data set among clients, by the run's seed: which client and which owner has which samples."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar, overload
from warnings import catch_warnings, simplefilter

import numpy as np
from numpy.typing import NDArray

from ...clients.records.client_records import OwnedSamples
from ...privacy.errors import ConfigurationError, check_installed
from ...privacy.noise import derived_bytes, derived_seed
from ...privacy.release.known_samples import Owners
from ..settings.registry import Named, Registry
from ..settings.run_config import RunConfig
from .task import Dataset, Shard, settings

T = TypeVar("T", covariant=True)


class PerClient(Sequence[T]):
    """A sequence with an entry for each client, made on access by :meth:`client`."""

    @abstractmethod
    def client(self, number: int) -> T:
        """Return the entry of one client."""

    @overload
    def __getitem__(self, number: int) -> T: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[T]: ...
    def __getitem__(self, number: int | slice) -> T | Sequence[T]:
        if isinstance(number, slice):
            return [self.client(i) for i in range(len(self))[number]]
        return self.client(number)


class Parts(PerClient[NDArray[np.int64]]):
    """Numbers of every client's samples in the order in which it uses them; each client's is a view.

    ``numbers`` has those of all clients, one client after the other; ``sizes`` how many each has.
    """

    def __init__(self, numbers: NDArray[np.int64], sizes: NDArray[np.integer]) -> None:
        self.numbers = numbers
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self._ends = np.cumsum(self.sizes)

    @classmethod
    def together(cls, parts: Iterable[NDArray[np.integer]]) -> Parts:
        """Parts from one array for each client."""
        if isinstance(parts, Parts):
            return parts
        arrays = [np.asarray(part, dtype=np.int64) for part in parts]
        sizes = np.array([len(part) for part in arrays], dtype=np.int64)
        return cls(np.concatenate([np.empty(0, np.int64), *arrays]), sizes)

    @classmethod
    def even(cls, numbers: NDArray[np.int64], clients: int) -> Parts:
        """Equal parts; if that is impossible, the first ones have one more."""
        each, more = divmod(len(numbers), clients)
        return cls(numbers, np.repeat([each + 1, each], [more, clients - more]))

    @classmethod
    def of_owners(cls, owner: NDArray[np.integer], clients: int) -> Parts:
        """Parts in which client i has the samples with i in ``owner``, ascending."""
        order = np.argsort(owner, kind="stable").astype(np.int64, copy=False)
        first, last = np.searchsorted(owner[order], [0, clients])
        return cls(order[first:last], np.bincount(owner[order[first:last]], minlength=clients))

    def __len__(self) -> int:
        return len(self.sizes)

    def client(self, number: int) -> NDArray[np.int64]:
        end, size = self._ends[number], self.sizes[number]
        return self.numbers[end - size : end]

    def starts(self, clients: NDArray[np.integer]) -> NDArray[np.int64]:
        """Positions in :attr:`numbers` where some clients' samples begin."""
        return self._ends[clients] - self.sizes[clients]

    def shuffled(self, generator: np.random.Generator) -> Parts:
        """Return the same parts, each client's in the order of one ``generator.permutation`` after another."""
        numbers = self.numbers.copy()
        for clients, size in self._alike():
            start = int(self._ends[clients.start]) - size
            stop = start + size * len(clients)
            # Shuffling one sample would draw nothing; parts of equal size are rows, shuffled in turn.
            if size > 1 and len(clients) == 1:
                generator.shuffle(numbers[start:stop])
            elif size > 1:
                numbers[start:stop] = generator.permuted(numbers[start:stop].reshape(-1, size), axis=1).ravel()
        return Parts(numbers, self.sizes)

    def _alike(self) -> Iterator[tuple[range, int]]:
        """Consecutive clients with equally many samples, and that number."""
        starts = np.flatnonzero(np.diff(self.sizes, prepend=-1))
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(self)], strict=True):
            yield range(start, stop), int(self.sizes[start])


class Shards(PerClient[Shard]):
    """Every client's samples, each client's made on access."""

    def __init__(self, dataset: Dataset, parts: Parts) -> None:
        self._dataset = dataset
        self._parts = parts

    @property
    def sizes(self) -> NDArray[np.int64]:
        return self._parts.sizes

    def batch(
        self, clients: Sequence[int], starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return samples of several clients, from a start to a stop of each, one client after the other."""
        counts = stops - starts
        if (counts != counts[0]).any() or (stops > self.sizes[np.asarray(clients)]).any():
            samples = map(slice, starts.tolist(), stops.tolist())
            return Shard.stack([(self[i], chosen) for i, chosen in zip(clients, samples, strict=True)])
        firsts = self._parts.starts(np.asarray(clients)) + starts
        chosen = self._parts.numbers[(firsts[:, None] + np.arange(counts[0])).ravel()]
        return self._dataset.train_features[chosen], self._dataset.train_labels[chosen]

    def __len__(self) -> int:
        return len(self._parts)

    def client(self, number: int) -> Shard:
        return Shard(self._dataset, self._parts[number])


def shard_sizes(shards: Sequence[Any], used: Callable[[int], int] = int) -> list[int]:
    """Return the number of samples of each client that count, which ``used`` says; equal numbers are one object."""
    sizes = getattr(shards, "sizes", None)
    if sizes is None:
        return [used(len(shard)) for shard in shards]
    if sizes.min() == sizes.max():
        return [used(int(sizes[0]))] * len(shards)
    distinct, place = np.unique(sizes, return_inverse=True)
    values = [used(size) for size in distinct.tolist()]
    return [values[i] for i in place.tolist()]


class OwnedShards(PerClient[OwnedSamples]):
    """Clients whose samples are grouped by owner, at most ``most`` of each.

    Where the data name no owners, every ``most`` consecutive samples of a client stand for one owner's, which shows on
    any data what protecting owners costs. An owner with samples on several clients is one on each of them. Simulated
    clients' secrets follow from the run's ``seed``, and each of their owners has a place of its own
    (:meth:`~murmurfl.privacy.Owners.one_each`); owners of real clients fall into places (:meth:`real`).
    """

    def __init__(self, dataset: Dataset, parts: Parts, most: int, seed: int) -> None:
        self._arrays = dataset.train_features, dataset.train_labels
        self._owner_of, self._parts, self._most = dataset.owner_of, parts, most
        self._owners = [self._simulated(client, part, seed) for client, part in enumerate(parts)]
        self.sizes: NDArray[np.int64] = np.array([len(owners) for owners in self._owners], dtype=np.int64)
        """Number of owners of each client."""

    def __len__(self) -> int:
        return len(self._owners)

    def client(self, number: int) -> OwnedSamples:
        return OwnedSamples(self._arrays, self._owners[number])

    def real(self, client: int, secret: bytes, places: int | None) -> OwnedSamples:
        """Return a real client's samples, of data that name owners: stand-ins are for simulation.

        ``secret`` is its ledger's (:meth:`~murmurfl.privacy.Ledger.secret_of_owners`), ``places`` as its operator has
        decided; default the number of owners.
        """
        if self._owner_of is None:
            raise ConfigurationError(
                f"Expected data that say whose they are with samples-per-owner = {self._most}, got none: stand-ins are "
                "for simulation.",
                kind="missing",
                setting="samples-per-owner",
            )
        part = self._parts[client]
        owners = Owners.of(self._owner_of[part], self._most, secret=secret, places=places)
        return OwnedSamples(self._arrays, owners.taken_from(part))

    def _simulated(self, client: int, part: NDArray[np.int64], seed: int) -> Owners:
        if not len(part):
            return Owners(part, part, self._most, 0)
        if self._owner_of is None:
            return Owners.in_turn(len(part), self._most).taken_from(part)
        secret = derived_bytes(32, "places of owners", seed, client)
        return Owners.one_each(self._owner_of[part], self._most, secret=secret).taken_from(part)


class Partition(Named, ABC):
    """A way to split a data set among clients."""

    @abstractmethod
    def parts(self, dataset: Dataset, config: RunConfig) -> Sequence[NDArray[np.int64]]:
        """Numbers of every client's training samples, in the order in which it uses them.

        Raises
        ------
        ConfigurationError
            If the data cannot be split like that.
        """


class ByLabel(Partition):
    """A partition that sees only the samples' labels, and takes samples in a seeded order.

    ``reads`` are the fields of the run configuration that determine it; None for all.
    """

    reads: frozenset[str] | None = None

    @abstractmethod
    def split(
        self, labels: NDArray[Any], order: NDArray[np.int64], config: RunConfig, generator: np.random.Generator
    ) -> Sequence[NDArray[np.int64]]:
        """Split ``order``, shuffled numbers of all training samples, into parts, one a client.

        ``labels`` are in the data set's order; ``generator`` is for other draws.
        """

    def parts(self, dataset: Dataset, config: RunConfig) -> Sequence[NDArray[np.int64]]:
        labels = np.ascontiguousarray(dataset.train_labels)
        digest = hashlib.sha256(labels.data).digest()
        return _parts(_Wanted(self, digest, labels.dtype.str, settings(self.reads, config), config, labels))


@dataclass(frozen=True)
class _Wanted:
    """Settings that determine a partition, and the run configuration that asks for it."""

    partition: ByLabel
    digest: bytes
    kind: str
    settings: Any
    config: RunConfig = field(compare=False)
    labels: NDArray[Any] = field(compare=False, repr=False)


@lru_cache(maxsize=4)
def _parts(wanted: _Wanted) -> Parts:
    labels, config = wanted.labels, wanted.config
    generator = np.random.Generator(np.random.Philox(key=derived_seed("partition", config.seed)))
    order = generator.permutation(len(labels))
    parts = Parts.together(wanted.partition.split(labels, order, config, generator))
    # A client uses its samples in order, which must not reveal labels; a partitioner may group samples by label.
    return parts.shuffled(generator)


class Iid(ByLabel):
    """Equally many samples for each client, drawn at random."""

    name = "iid"
    sentence = "as many samples for each client, drawn at random"
    reads = frozenset({"num_clients", "seed"})

    def split(
        self, labels: NDArray[Any], order: NDArray[np.int64], config: RunConfig, generator: np.random.Generator
    ) -> Sequence[NDArray[np.int64]]:
        return Parts.even(order, config.num_clients)


class Dirichlet(ByLabel):
    """Labels skewed by a Dirichlet distribution, by flwr-datasets."""

    name = "dirichlet"
    sentence = "labels skewed by a Dirichlet distribution of concentration partition.alpha"
    keys = frozenset({"partition.alpha"})
    reads = frozenset({"num_clients", "dirichlet_alpha", "seed"})

    def split(
        self, labels: NDArray[Any], order: NDArray[np.int64], config: RunConfig, generator: np.random.Generator
    ) -> Sequence[NDArray[np.int64]]:
        for package in ("flwr_datasets", "datasets"):
            check_installed(package, "partitions", f"partition = {self.name!r}")
        from datasets import Dataset as Table
        from flwr_datasets.partitioner import DirichletPartitioner

        clients, alpha = config.num_clients, config.dirichlet_alpha
        partitioner = DirichletPartitioner(
            num_partitions=clients,
            partition_by="label",
            alpha=alpha,
            min_partition_size=1,
            self_balancing=True,
            seed=int(generator.integers(2**31)),
        )
        partitioner.dataset = Table.from_dict({"index": order, "label": labels[order]})
        try:
            with catch_warnings():
                simplefilter("ignore")  # that it draws again
                return [np.array(partitioner.load_partition(i)["index"], dtype=np.int64) for i in range(clients)]
        except ValueError as error:
            raise ConfigurationError(
                f"Expected a Dirichlet partition of {len(order)} samples with at least one for each of {clients} "
                f"clients, found none for partition.alpha = {alpha:g}; raise it or use fewer clients.",
                kind="out-of-range",
                setting="partition.alpha",
            ) from error


class LabelSkew(ByLabel):
    """Equally many samples for each client, with class proportions from a Dirichlet distribution.

    Notes
    -----
    Source: Hsu, Qi and Brown, 2019, arXiv:1909.06335, section 3: each client draws its own proportions; a class that
    has run out leaves its share to the others.
    """

    name = "label-skew"
    sentence = "as many samples for each client, in proportions of classes drawn with concentration partition.alpha"
    keys = frozenset({"partition.alpha"})
    reads = frozenset({"num_clients", "dirichlet_alpha", "seed"})

    def split(
        self, labels: NDArray[Any], order: NDArray[np.int64], config: RunConfig, generator: np.random.Generator
    ) -> Sequence[NDArray[np.int64]]:
        pools = [order[labels[order] == one] for one in np.unique(labels)]
        parts = []
        for size in map(len, np.array_split(order, config.num_clients)):
            wanted = generator.dirichlet(np.full(len(pools), config.dirichlet_alpha))
            counts = np.zeros(len(pools), dtype=np.int64)
            while (missing := size - counts.sum()) > 0:
                left = np.array([len(pool) for pool in pools]) - counts
                shares = np.where(left > 0, wanted + np.finfo(float).tiny, 0.0)
                counts += np.minimum(generator.multinomial(missing, shares / shares.sum()), left)
            parts.append(np.concatenate([pool[:count] for pool, count in zip(pools, counts, strict=True)]))
            pools = [pool[count:] for pool, count in zip(pools, counts, strict=True)]
        return parts


class Classes(ByLabel):
    """Clients that each have samples of few classes; a class is split evenly among the clients that have it.

    Notes
    -----
    Source: McMahan et al., 2017, arXiv:1602.05629, section 3, with classes in place of shards of sorted samples.
    """

    name = "classes"
    sentence = "samples of partition.classes classes for each client"
    keys = frozenset({"partition.classes"})
    reads = frozenset({"num_clients", "classes_per_client", "seed"})

    def split(
        self, labels: NDArray[Any], order: NDArray[np.int64], config: RunConfig, generator: np.random.Generator
    ) -> Sequence[NDArray[np.int64]]:
        classes, each, clients = np.unique(labels), config.classes_per_client, config.num_clients
        if not len(classes) <= clients * each <= clients * len(classes):
            raise ConfigurationError(
                f"Expected partition.classes from {-(-len(classes) // clients)} to {len(classes)}, with which "
                f"{clients} clients have all {len(classes)} classes, got {each}.",
                kind="out-of-range",
                setting="partition.classes",
                got=each,
            )
        # In turn, so that every class has as many clients as every other, or one more.
        turns = generator.permutation(classes)[np.arange(clients * each) % len(classes)].reshape(clients, each)
        parts: list[list[NDArray[np.int64]]] = [[] for _ in range(clients)]
        for one in classes:
            holders = np.flatnonzero((turns == one).any(axis=1))
            for client, samples in zip(holders, np.array_split(order[labels[order] == one], len(holders)), strict=True):
                parts[client].append(samples)
        return [np.concatenate(part) for part in parts]


class HalfByLabel(ByLabel):
    """zhang-2025, section V-B: half of the samples spread evenly, the other half by label, digit l to client l."""

    name = "half-by-label"
    sentence = "half of the samples spread evenly, the other half by label, class l to client l (zhang-2025)"
    reads = frozenset({"num_clients", "seed"})

    def split(
        self, labels: NDArray[Any], order: NDArray[np.int64], config: RunConfig, generator: np.random.Generator
    ) -> Sequence[NDArray[np.int64]]:
        classes = int(labels.max()) + 1
        if config.num_clients != classes:
            raise ConfigurationError(
                f"Expected num-clients = {classes}, one a class, for partition 'half-by-label', got "
                f"{config.num_clients}.",
                kind="mismatch",
                setting="num-clients",
                got=config.num_clients,
            )
        half = len(order) // 2
        even = np.array_split(order[:half], config.num_clients)
        rest = order[half:]
        return [np.concatenate([part, rest[labels[rest] == i]]) for i, part in enumerate(even)]


class Unequal(ByLabel):
    """Shares drawn from a log-normal distribution: of 100 clients the largest has some fifty times the smallest's."""

    name = "unequal"
    sentence = "clients of very different sizes, log-normal, drawn at random"
    reads = frozenset({"num_clients", "seed"})
    spread = 1.0
    """Standard deviation of the logarithm of a client's share."""
    least = 10
    """Samples that each client has, where that is possible."""

    def split(
        self, labels: NDArray[Any], order: NDArray[np.int64], config: RunConfig, generator: np.random.Generator
    ) -> Sequence[NDArray[np.int64]]:
        clients = config.num_clients
        given = min(self.least, len(order) // clients)
        shares = generator.lognormal(sigma=self.spread, size=clients)
        ends = np.cumsum(shares) / shares.sum() * (len(order) - given * clients)
        starts = np.rint(ends[:-1]).astype(np.int64) + given * np.arange(1, clients)
        return Parts(order, np.diff(starts, prepend=0, append=len(order)))


class PowerLaw(ByLabel):
    """Sizes of a power law: a few clients have most samples, and many have a handful."""

    name = "power-law"
    sentence = "few clients with most samples and many with a handful, drawn at random"
    reads = frozenset({"num_clients", "seed"})
    exponent = 1.5
    """The client with the r-th most samples has a share of r^-exponent."""

    def split(
        self, labels: NDArray[Any], order: NDArray[np.int64], config: RunConfig, generator: np.random.Generator
    ) -> Sequence[NDArray[np.int64]]:
        clients = config.num_clients
        shares = np.arange(1.0, clients + 1) ** -self.exponent
        ends = np.cumsum(shares) / shares.sum() * (len(order) - clients)
        ends[-1] = len(order) - clients
        # One sample for each client, and the rest by shares.
        sizes = 1 + np.diff(np.rint(ends).astype(np.int64), prepend=0)
        return Parts(order, generator.permutation(sizes))


class OwnPartition(Partition):
    """The clients that the data come with, each with its samples in a seeded order."""

    name = "own"
    sentence = "the clients that the data come with"

    def parts(self, dataset: Dataset, config: RunConfig) -> Sequence[NDArray[np.int64]]:
        client_of = dataset.client_of
        if client_of is None:
            raise ConfigurationError(
                f"Expected data that say whose they are for partition 'own', got task {config.task!r}: give "
                "Dataset(client_of=...), a client's number for each training sample, or take partition 'iid'.",
                kind="missing",
                setting="partition",
            )
        generator = np.random.Generator(np.random.Philox(key=derived_seed("partition", config.seed)))
        return Parts.of_owners(client_of, config.num_clients).shuffled(generator)


PARTITIONS = Registry(
    "partition",
    Partition,
    (Iid(), LabelSkew(), Dirichlet(), Classes(), Unequal(), PowerLaw(), HalfByLabel(), OwnPartition()),
)
"""The built-in partitions by name; a user's own is a subclass, named ``package.module:Class``."""
