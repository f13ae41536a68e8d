"""The data of a run configuration: found, loaded once, held out or reduced, and split among the clients."""

from __future__ import annotations

import csv
import gzip
import math
import os
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients.records.schema import check_majority
from ...privacy.errors import ConfigurationError
from ...privacy.noise import derived_seed
from ...privacy.release.clipping import clip_per_sample
from ...privacy.release.policy import SINGLE_SAMPLES
from ..settings.registry import registry
from ..settings.run_config import RunConfig, is_additive
from .partition import OwnedShards, Parts, Shards
from .task import Dataset, Shard, Task, refuse_text, settings


def data_file(root: str, name: str) -> Path:
    """Path of a file under the data root; raises ConfigurationError if it is not there."""
    path = Path(root).expanduser() / name if root else Path(name)
    if not root or not path.is_file():
        raise ConfigurationError(
            f"Expected {name} under the data root {root!r}, got no such file: set data-root or MURMURFL_DATA to the "
            "folder that has it.",
            kind="not-found",
            setting="data-root",
        )
    return path


def table_rows(path: Path) -> list[list[str]]:
    """Rows of a gzipped CSV file, without its header."""
    with gzip.open(path, "rt") as file:
        return list(csv.reader(file))[1:]


def load_dataset(config: RunConfig) -> Dataset:
    """Load the data set of a run configuration; what the task loads is cached in this process.

    Raises ConfigurationError if the data are not where the configuration says, or are too few for what it sets aside.
    """
    dataset = loaded(config)
    if config.validation_samples:
        dataset = _held_out(dataset, config.validation_samples)
    if config.training_samples:
        dataset = _fewer(dataset, config.training_samples)
    return _with_public(dataset, config.public_samples) if config.public_samples else dataset


def loaded(config: RunConfig) -> Dataset:
    """All data of a run configuration's task, before anything is set aside."""
    wanted = wanted_by(config)
    return _given[wanted] if wanted in _given else _loaded(wanted)


def wanted_by(config: RunConfig) -> Hashable:
    """Return a key of a run configuration's data: equal keys, equal data."""
    root = config.data_root or os.environ.get("MURMURFL_DATA", "")
    task: Task = registry("task")[config.task]
    return _Wanted(task, config.features, root, settings(task.reads, config), config.feature_bound, config)


def give(config: RunConfig, dataset: Dataset) -> None:
    """Provide a run configuration's data (:func:`loaded`), so that they are not read from this computer's disk."""
    wanted = wanted_by(config)
    _given.pop(wanted, None)
    while len(_given) >= _MOST_GIVEN:
        del _given[next(iter(_given))]
    _given[wanted] = dataset


_MOST_GIVEN = 2
_given: dict[Hashable, Dataset] = {}


def public_shard(dataset: Dataset, first: int) -> Shard | None:
    """Return a data set's public samples in cyclic order from number ``first`` on; None if it has none.

    Clients that start at different numbers use different samples first.
    """
    if dataset.public_features is None or dataset.public_labels is None:
        return None
    public = replace(dataset, train_features=dataset.public_features, train_labels=dataset.public_labels)
    return Shard(public, (first + np.arange(len(dataset.public_labels))) % len(dataset.public_labels))


def load_shards(config: RunConfig, dataset: Dataset, *, stated: bool = False) -> Shards | OwnedShards:
    """Every client's samples, or owners, under the configuration's partition, in an order of its seed.

    With ``stated`` clients state themselves how many samples they have; then none of these numbers bounds anything.
    Raises ConfigurationError if there are fewer samples than clients or than a batch, or a client would have none.
    """
    samples = len(dataset.train_labels)
    if config.num_clients > samples:
        raise ConfigurationError(
            f"Expected num-clients <= the {samples} training samples of {config.task!r}, got {config.num_clients}.",
            kind="out-of-range",
            setting="num-clients",
            got=config.num_clients,
        )
    parts = registry("partition")[config.partition].parts(dataset, config)
    if len(parts) != config.num_clients:
        raise ConfigurationError(
            f"Expected partition {config.partition!r} to give num-clients = {config.num_clients} parts, got "
            f"{len(parts)}.",
            kind="wrong-shape",
        )
    parts = Parts.together(parts)
    if not np.diff(np.sort(parts.numbers)).all():
        raise ConfigurationError(
            f"Expected partition {config.partition!r} to give a sample to one client at most.", kind="duplicate"
        )
    most = config.samples_per_owner
    shards = OwnedShards(dataset, parts, most, config.seed) if most else Shards(dataset, parts)
    if stated:
        return shards
    least, rows = int(shards.sizes.min()), "owners" if most else "samples"
    if least < 1:
        raise ConfigurationError(
            "Expected at least one sample for each client, got none: use fewer clients.", kind="out-of-range"
        )
    method = registry("strategy")[config.strategy]
    if "batch-size" not in method.keys:
        return shards
    # A client with fewer samples has smaller batches, unless what is clipped is made of local steps.
    by_samples = (config.clip_unit or method.clip_units[0]) in SINGLE_SAMPLES
    held, whose = (int(shards.sizes.sum()), "all clients") if by_samples else (least, "the smallest client")
    if config.batch_size > held:
        raise ConfigurationError(
            f"Expected batch-size <= {held}, the {rows} of {whose}, got {config.batch_size}; "
            "use fewer clients or a smaller batch.",
            kind="out-of-range",
            setting="batch-size",
            got=config.batch_size,
        )
    if config.passes == 1 and config.batch_size * config.max_participations > held:
        raise ConfigurationError(
            f"Expected batch-size x max-participations <= {held}, the {rows} of {whose} (each is used "
            f"once), got {config.batch_size} x {config.max_participations}.",
            kind="out-of-range",
            setting="batch-size",
            got=config.batch_size,
        )
    return shards


@dataclass(frozen=True)
class _Wanted:
    """Settings that determine a task's data, and the run configuration that asks for them."""

    task: Task
    features: str
    root: str
    settings: Any
    feature_bound: float
    config: RunConfig = field(compare=False)


@lru_cache(maxsize=4)
def _loaded(wanted: Any) -> Dataset:
    setting = f"task = {wanted.config.task!r}"
    made = wanted.task.load(wanted.config, wanted.root)
    if wanted.task.schema is not None and is_additive(wanted.config):  # values of records, which no bound is for
        return made
    dataset = checked(made, setting)
    if wanted.task.majority:
        check_majority(wanted.task.majority, dataset.num_classes, f"majority of {setting}")
    declared = wanted.config.feature_bound or wanted.task.feature_bound
    if ":" not in wanted.config.task:  # the house's own tasks keep to what they declare, or their models see to it
        return dataset
    norm = math.sqrt(wanted.task.squared_norm_bound(wanted.features, dataset.num_features, declared))
    longer = int((np.linalg.norm(dataset.train_features, axis=1) > _FAR * norm).sum())
    return replace(cut_to(dataset, declared) if declared else dataset, far_longer=longer)


_FAR = 2.0


def _held_out(dataset: Dataset, count: int) -> Dataset:
    total = len(dataset.train_labels)
    if count >= total:
        raise ConfigurationError(
            f"Expected validation-samples < {total}, got {count}.",
            kind="out-of-range",
            setting="validation-samples",
            got=count,
        )
    order = np.random.Generator(np.random.Philox(key=derived_seed("validation"))).permutation(total)
    test_features, test_labels = dataset.train_features[order[:count]], dataset.train_labels[order[:count]]
    rest = _only(dataset, order[count:])
    return replace(rest, test_features=test_features, test_labels=test_labels, client_of=None)


def _fewer(dataset: Dataset, count: int) -> Dataset:
    total = len(dataset.train_labels)
    if count > total:
        raise ConfigurationError(
            f"Expected training-samples <= {total}, got {count}.",
            kind="out-of-range",
            setting="training-samples",
            got=count,
        )
    if count == total:
        return dataset
    order = np.random.Generator(np.random.Philox(key=derived_seed("training samples"))).permutation(total)
    return _only(dataset, np.sort(order[:count]))


def _with_public(dataset: Dataset, count: int) -> Dataset:
    total = len(dataset.train_labels)
    if dataset.public_features is not None:
        raise ConfigurationError(
            f"Expected strategy.public-samples to be 0 for a task with public samples of its own, got {count}.",
            kind="conflict",
            setting="strategy.public-samples",
            got=count,
        )
    if count >= total:
        raise ConfigurationError(
            f"Expected strategy.public-samples < {total}, got {count}.",
            kind="out-of-range",
            setting="strategy.public-samples",
            got=count,
        )
    order = np.random.Generator(np.random.Philox(key=derived_seed("public samples"))).permutation(total)
    public_features, public_labels = dataset.train_features[order[:count]], dataset.train_labels[order[:count]]
    rest = _only(dataset, np.sort(order[count:]))
    return replace(rest, public_features=public_features, public_labels=public_labels)


def _only(dataset: Dataset, kept: NDArray[np.int64]) -> Dataset:
    """Return a data set with some of its training samples."""
    return replace(
        dataset,
        train_features=dataset.train_features[kept],
        train_labels=dataset.train_labels[kept],
        client_of=None if dataset.client_of is None else dataset.client_of[kept],
        owner_of=None if dataset.owner_of is None else dataset.owner_of[kept],
    )


def checked(dataset: Dataset, setting: str) -> Dataset:
    """Return a data set in the types that models take, once its arrays fit each other.

    Raises ConfigurationError with the wrong array, ``setting`` and its error; it reveals nothing of any one sample.
    """
    if not isinstance(dataset, Dataset):
        raise ConfigurationError(
            f"Expected {setting} to give a Dataset, got {type(dataset).__name__}.", kind="wrong-type", setting="task"
        )
    classes = dataset.num_classes
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        raise ConfigurationError(
            f"Expected {setting} to have num_classes, an integer >= 1, got {classes!r}.",
            kind="out-of-range",
            setting="task",
        )
    if (dataset.public_features is None) != (dataset.public_labels is None):
        raise ConfigurationError(
            f"Expected {setting} to have public features and public labels, got one of them.",
            kind="conflict",
            setting="task",
        )
    parts: dict[str, tuple[Any, Any]] = {
        "train": (dataset.train_features, dataset.train_labels),
        "test": (dataset.test_features, dataset.test_labels),
    }
    if dataset.public_features is not None:
        parts["public"] = dataset.public_features, dataset.public_labels
    arrays = {}
    for part, (features, labels) in parts.items():
        arrays[f"{part}_features"] = _features(features, f"{part}_features of {setting}")
        arrays[f"{part}_labels"] = _labels(labels, len(features), classes, f"{part}_labels of {setting}")
        width = np.shape(dataset.train_features)[1]
        if np.shape(features)[1] != width:
            raise ConfigurationError(
                f"Expected {part}_features of {setting} to have {width} columns as train_features, got "
                f"{np.shape(features)[1]}.",
                kind="wrong-shape",
            )
    count = len(dataset.train_labels)
    for name, whose in (("client_of", dataset.client_of), ("owner_of", dataset.owner_of)):
        if whose is not None and (np.shape(whose) != (count,) or np.asarray(whose).dtype.kind not in "iu"):
            raise ConfigurationError(
                f"Expected {name} of {setting} to be integers of shape ({count},), one a training sample, got "
                f"{np.asarray(whose).dtype} of shape {np.shape(whose)}.",
                kind="wrong-shape",
            )
    return replace(dataset, **arrays)


def cut_to(dataset: Dataset, norm: float) -> Dataset:
    """Return a data set whose longer rows of features are scaled down to ``norm``, each by itself."""

    def cut(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        lengths = np.linalg.norm(rows, axis=1)
        return rows if (lengths <= norm).all() else clip_per_sample(rows, norm).astype(np.float32)

    parts = {
        name: cut(rows)
        for name in ("train_features", "test_features", "public_features")
        if (rows := getattr(dataset, name)) is not None
    }
    return replace(dataset, **parts)


def _features(values: Any, what: str) -> NDArray[np.float32]:
    refuse_text(values, what)
    array = np.asarray(values)
    if array.ndim != 2 or array.dtype.kind not in "fiub" or not array.size:
        raise ConfigurationError(
            f"Expected {what} to be numbers of shape (samples, features), got {array.dtype} of shape {array.shape}.",
            kind="wrong-type",
        )
    return np.asarray(array, dtype=np.float32)


def _labels(values: Any, count: int, classes: int, what: str) -> NDArray[Any]:
    array = np.asarray(values)
    if array.shape != (count,) or array.dtype.kind not in "fiub":
        raise ConfigurationError(
            f"Expected {what} to be numbers of shape ({count},), one a sample, got {array.dtype} of shape "
            f"{array.shape}.",
            kind="wrong-type",
        )
    if classes == 1:
        return array  # numbers to regress on
    if array.dtype.kind == "f" or array.min() < 0 or array.max() >= classes:
        raise ConfigurationError(
            f"Expected {what} to be integers from 0 to {classes - 1}, got others.", kind="out-of-range"
        )
    return np.asarray(array, dtype=np.int64)
