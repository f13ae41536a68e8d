"""What an operator's file says of samples and of whose they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients import PerSampleGradients, Samples, Schema
from ...clients.adapters.per_sample_gradients import check_rows_alone
from ...clients.records.machine_records import Records
from ...clients.records.sources import file_items
from ...privacy import ConfigurationError
from ...privacy.side.centring_query import CENTRING_CONSTANT
from ..data.loading import load_dataset, load_shards
from ..data.shards import OwnedShards
from ..methods import Method
from ..settings.run_config import RunConfig


class OwnedNode:
    """The part of an operator's file that its samples, and their owners, are in; its fields are the file's."""

    samples: str
    schema: str
    rows: int
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

    @property
    def centred(self) -> bool:
        """Whether it releases the mean of its features first."""
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

    def check_model(self, model: PerSampleGradients) -> None:
        """Refuse a model that does not treat each record by itself, on records made up from the schema alone.

        Raises
        ------
        ConfigurationError
        """
        if not self.samples:
            return
        seen = np.full(
            int(self.centred), CENTRING_CONSTANT, np.float32
        )  # what a centred sample has beside its features
        examples = Schema.read_file(Path(self.schema)).examples()
        check_rows_alone(model, [(np.append(_flat(x), seen)[None], label) for x, label in examples])

    def load_samples(self, secret: bytes = b"") -> tuple[Samples, int, int]:
        """The machine's own samples, their number of features and of classes; with owners, a row for each of them.

        Parameters
        ----------
        secret : bytes
            With owners: of the machine's ledger (:meth:`~murmurfl.privacy.Ledger.secret_of_owners`).

        Raises
        ------
        ConfigurationError
            If they are not there, or not what was promised; the text says nothing of any one sample.
        """
        if self.samples:
            schema = Schema.read_file(Path(self.schema))
            schema.check_for_real_nodes()
            return self._records(schema, secret), schema.num_features, schema.num_classes
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
        shards = load_shards(run, data)
        owned = isinstance(shards, OwnedShards)
        held = shards.real(self.partition_id, secret, None) if owned else shards[self.partition_id]
        return held, data.num_features, data.num_classes

    def _records(self, schema: Schema, secret: bytes) -> Samples:
        if bool(schema.owner) != bool(self.samples_per_owner):
            raise ConfigurationError(
                f"Expected samples-per-owner >= 1 with a schema that names an owner, and 0 with another, got "
                f"{self.samples_per_owner} and owner = {schema.owner!r}."
            )
        if len(schema.inputs) > 1:
            raise ConfigurationError(f"Expected a schema of one input for these models, got {len(schema.inputs)}.")
        items = file_items(Path(self.samples), schema)
        if not self.samples_per_owner:
            records = Records(items, schema, count=self.rows, prepared=_flat)
            records.log()
            return records
        records = Records(items, schema, prepared=_flat, together=True)
        records.log()
        return records.by_owner(self.samples_per_owner, places=self.rows, secret=secret)


def _flat(inputs: NDArray[Any]) -> NDArray[np.float32]:
    """One record's inputs as these models take them."""
    return inputs.astype(np.float32).ravel()
