"""What an operator's file says of samples and of whose they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...clients import Samples
from ...clients.owners import OwnedSamples
from ...privacy import ConfigurationError
from ...privacy.owners import OWNER_KINDS, Owners
from ..config import RunConfig
from ..methods import Method
from ..tasks.loading import load_dataset, load_shards
from .own_samples import OwnSamples


class OwnedNode:
    """The part of an operator's file that its samples, and their owners, are in; its fields are the file's."""

    samples: str
    num_classes: int
    samples_per_owner: int
    task: str
    features: str
    data_root: str
    partition: str
    partition_seed: int
    num_partitions: int
    partition_id: int
    batch_size: int
    model: str
    strategy: str

    @property
    def method(self) -> Method:
        """What the machine takes part in."""
        raise NotImplementedError

    def _check(self, name: str, holds: bool, expected: str) -> None:
        raise NotImplementedError

    def check_owners(self, *, beside: bool) -> None:
        """Refuse owners that the strategy cannot have, or that releases ``beside`` the training would not protect."""
        self._check("samples_per_owner", self.samples_per_owner >= 0, "an integer >= 0")
        if not self.samples_per_owner:
            return
        able = "samples-per-owner" in self.method.keys
        self._check("samples_per_owner", able, f"0 with strategy = {self.strategy!r}, which does not clip by owner")
        self._check("samples_per_owner", not beside, "0 with centring or private-evaluation, which count samples")

    def load_samples(self) -> tuple[Samples, int, int]:
        """The machine's own samples, their number of features and of classes; with owners, a row for each of them.

        Raises
        ------
        ConfigurationError
            If they are not there, or not what was promised; the text says nothing of any one sample.
        """
        if self.samples:
            own = OwnSamples.read(Path(self.samples), self.num_classes)
            held: Samples = self._by_owner(own) if self.samples_per_owner else own
            return held, own.features.shape[1], self.num_classes
        run = RunConfig(
            task=self.task,
            features=self.features,
            data_root=self.data_root,
            partition=self.partition,
            seed=self.partition_seed,
            num_clients=self.num_partitions,
            clients_per_round=self.num_partitions,
            batch_size=self.batch_size,
            samples_per_owner=self.samples_per_owner,
            model=self.model,
        )
        data = load_dataset(run)
        if self.samples_per_owner and data.owner_of is None:
            raise ConfigurationError(
                f"Expected samples-per-owner = 0 with task = {self.task!r}, which does not say whose its samples are, "
                f"got {self.samples_per_owner}: stand-ins are for simulation."
            )
        return load_shards(run, data)[self.partition_id], data.num_features, data.num_classes

    def _by_owner(self, own: OwnSamples) -> OwnedSamples:
        owners = Owners.of(_owners(Path(self.samples), len(own)), self.samples_per_owner)
        return OwnedSamples((own.features, own.labels), owners)


def _owners(path: Path, samples: int) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    """Whose each sample of an operator's file is.

    Raises
    ------
    ConfigurationError
        If the file does not say; the text says nothing of any one sample.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            owners = file["owners"]
    except (OSError, KeyError, ValueError) as error:
        raise ConfigurationError(
            f"Expected an array `owners` in {path}, whose each sample is, with samples-per-owner, got: {error}."
        ) from error
    if owners.shape != (samples,) or owners.dtype.kind not in OWNER_KINDS:
        raise ConfigurationError(
            f"Expected `owners` in {path} to be {samples} integers or texts, one a sample, got {owners.dtype} of shape "
            f"{owners.shape}."
        )
    return owners
