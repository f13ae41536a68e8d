"""How a data set is split among machines, by the run's seed."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy import ConfigurationError, derived_seed
from ...privacy.errors import check_installed
from ..settings.registry import Registry
from ..settings.run_config import RunConfig
from .shards import Parts
from .task import Dataset, settings


class Partition(ABC):
    """A way to split a data set among machines.

    Attributes
    ----------
    keys : frozenset of str
        Hyphenated run-config keys that only this partition reads.
    """

    name: str = ""
    sentence: str = ""
    keys: frozenset[str] = frozenset()

    def check(self, config: RunConfig) -> None:  # noqa: B027 - most refuse nothing
        """Raise if this partition cannot serve a run configuration."""

    @abstractmethod
    def parts(self, dataset: Dataset, config: RunConfig) -> Sequence[NDArray[np.int64]]:
        """Numbers of every machine's training samples, in the order in which it uses them.

        Raises
        ------
        ConfigurationError
            If the data cannot be split like that.
        """


class ByLabel(Partition):
    """A partition that sees only the samples' labels, and takes samples in a seeded order.

    Attributes
    ----------
    reads : frozenset of str, optional
        Fields of the run configuration that determine it; None for all.
    """

    reads: frozenset[str] | None = None

    @abstractmethod
    def split(
        self, labels: NDArray[Any], order: NDArray[np.int64], config: RunConfig, generator: np.random.Generator
    ) -> Sequence[NDArray[np.int64]]:
        """Split the shuffled numbers of ``order`` into parts, one a machine.

        Parameters
        ----------
        labels : ndarray of shape (samples,)
            Of all training samples, in the data set's order.
        order : ndarray of shape (samples,), int64
            Shuffled numbers of all training samples.
        generator : numpy.random.Generator
            For other draws.
        """

    def parts(self, dataset: Dataset, config: RunConfig) -> Sequence[NDArray[np.int64]]:
        labels = np.ascontiguousarray(dataset.train_labels)
        digest = hashlib.sha256(labels.data).digest()
        return _parts(_Wanted(self, digest, labels.dtype.str, settings(self.reads, config), config, labels))


@dataclass(frozen=True)
class _Wanted:
    """What determines a partition, and the run configuration that asks for it."""

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
    # A machine uses its samples in order, which must not reveal labels; a partitioner may group samples by label.
    return parts.shuffled(generator)


class Iid(ByLabel):
    """Equally many samples for each machine, drawn at random."""

    name = "iid"
    sentence = "as many samples for each machine, drawn at random"
    reads = frozenset({"num_clients", "seed"})

    def split(
        self, labels: NDArray[Any], order: NDArray[np.int64], config: RunConfig, generator: np.random.Generator
    ) -> Sequence[NDArray[np.int64]]:
        return Parts.even(order, config.num_clients)


class Dirichlet(ByLabel):
    """Labels skewed by a Dirichlet distribution, by flwr-datasets."""

    name = "dirichlet"
    sentence = "labels skewed by a Dirichlet distribution of concentration dirichlet-alpha"
    keys = frozenset({"dirichlet-alpha"})
    reads = frozenset({"num_clients", "dirichlet_alpha", "seed"})

    def split(
        self, labels: NDArray[Any], order: NDArray[np.int64], config: RunConfig, generator: np.random.Generator
    ) -> Sequence[NDArray[np.int64]]:
        for package in ("flwr_datasets", "datasets"):
            check_installed(package, "partitions", f"partition = {self.name!r}")
        from datasets import Dataset as Table
        from flwr_datasets.partitioner import DirichletPartitioner

        machines, alpha = config.num_clients, config.dirichlet_alpha
        partitioner = DirichletPartitioner(
            num_partitions=machines,
            partition_by="label",
            alpha=alpha,
            min_partition_size=1,
            self_balancing=True,
            seed=int(generator.integers(2**31)),
        )
        partitioner.dataset = Table.from_dict({"index": order, "label": labels[order]})
        try:
            return [np.array(partitioner.load_partition(i)["index"], dtype=np.int64) for i in range(machines)]
        except ValueError as error:
            raise ConfigurationError(
                f"Expected a Dirichlet partition of {len(order)} samples with at least one for each of {machines} "
                f"machines, found none for dirichlet-alpha = {alpha:g}; raise it or use fewer machines."
            ) from error


class HalfByLabel(ByLabel):
    """zhang-2025, section V-B: half of the samples spread evenly, the other half by label, digit l to machine l."""

    name = "half-by-label"
    sentence = "half of the samples spread evenly, the other half by label, class l to machine l (zhang-2025)"
    reads = frozenset({"num_clients", "seed"})

    def split(
        self, labels: NDArray[Any], order: NDArray[np.int64], config: RunConfig, generator: np.random.Generator
    ) -> Sequence[NDArray[np.int64]]:
        classes = int(labels.max()) + 1
        if config.num_clients != classes:
            raise ConfigurationError(
                f"Expected num-clients = {classes}, one a class, for partition 'half-by-label', got "
                f"{config.num_clients}."
            )
        half = len(order) // 2
        even = np.array_split(order[:half], config.num_clients)
        rest = order[half:]
        return [np.concatenate([part, rest[labels[rest] == i]]) for i, part in enumerate(even)]


class Unequal(ByLabel):
    """Shares drawn from a log-normal distribution: of 100 machines the largest has some fifty times the smallest's."""

    name = "unequal"
    sentence = "machines of very different sizes, log-normal, drawn at random"
    reads = frozenset({"num_clients", "seed"})
    spread = 1.0
    """Standard deviation of the logarithm of a machine's share."""
    least = 10
    """Samples that each machine has, where that is possible."""

    def split(
        self, labels: NDArray[Any], order: NDArray[np.int64], config: RunConfig, generator: np.random.Generator
    ) -> Sequence[NDArray[np.int64]]:
        machines = config.num_clients
        given = min(self.least, len(order) // machines)
        shares = generator.lognormal(sigma=self.spread, size=machines)
        ends = np.cumsum(shares) / shares.sum() * (len(order) - given * machines)
        starts = np.rint(ends[:-1]).astype(np.int64) + given * np.arange(1, machines)
        return Parts(order, np.diff(starts, prepend=0, append=len(order)))


class OwnPartition(Partition):
    """The machines that the data come with, each with its samples in a seeded order."""

    name = "own"
    sentence = "the machines that the data come with"

    def parts(self, dataset: Dataset, config: RunConfig) -> Sequence[NDArray[np.int64]]:
        machine_of = dataset.machine_of
        if machine_of is None:
            raise ConfigurationError(
                f"Expected data that say whose they are for partition 'own', got task {config.task!r}: give "
                "Dataset(machine_of=...), a machine's number for each training sample, or take partition 'iid'."
            )
        generator = np.random.Generator(np.random.Philox(key=derived_seed("partition", config.seed)))
        return Parts.of_owners(machine_of, config.num_clients).shuffled(generator)


PARTITIONS = Registry("partition", Partition, (Iid(), Dirichlet(), Unequal(), HalfByLabel(), OwnPartition()))
"""The built-in partitions by name; a user's own is a subclass, named ``package.module:Class``."""
