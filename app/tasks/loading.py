"""Tasks: data sets, how they are split among machines, and where they are read from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...privacy import ConfigurationError, derived_seed
from ..config import PUBLIC_TASKS, RunConfig
from .features import oriented_gradients, pooled

# Who is in the digits' test set is fixed, whatever the run's seed.
_DIGITS_TEST_SHARE = 0.2
_SYNTHETIC_TEST = 1000
_SYNTHETIC_BLOCK = 10_000
_SYNTHETIC_LOGISTIC_TEST = 5000


@dataclass(frozen=True)
class Task:
    """A data set, split into training and evaluation.

    Parameters
    ----------
    train_features, test_features : ndarray of shape (samples, features), float32
    train_labels, test_labels : ndarray of shape (samples,), int64
    num_classes : int
    machine_of : ndarray of shape (samples,), int64, optional
        Which machine a training sample belongs to, where the data say so.
    public_features, public_labels : ndarray, optional
        Samples that are nobody's secret, where there are any; as those for training.
    """

    train_features: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_features: NDArray[np.float32]
    test_labels: NDArray[np.int64]
    num_classes: int
    machine_of: NDArray[np.int64] | None = None
    public_features: NDArray[np.float32] | None = None
    public_labels: NDArray[np.int64] | None = None

    @property
    def num_features(self) -> int:
        """Values of one sample."""
        return self.train_features.shape[1]


class Shard:
    """One machine's samples, in the order it uses them."""

    def __init__(self, task: Task, indices: NDArray[np.int64]) -> None:
        self._task = task
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, samples: slice) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        chosen = self._indices[samples]
        return self._task.train_features[chosen], self._task.train_labels[chosen]

    @classmethod
    def stack(cls, parts: Sequence[tuple[Shard, slice]]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """One batch of several machines' samples."""
        task = parts[0][0]._task
        chosen = np.concatenate([shard._indices[samples] for shard, samples in parts])
        return task.train_features[chosen], task.train_labels[chosen]


def load_task(config: RunConfig) -> Task:
    """The task of a run configuration, cached in this process.

    Raises
    ------
    ConfigurationError
        If the data are not where the configuration says, or more validation samples are asked for than there are.
    """
    root = config.data_root or os.environ.get("MURMURFL_DATA", "")
    if config.task == "synthetic-logistic":
        task = _synthetic_logistic(
            config.num_clients,
            config.synthetic_samples,
            config.synthetic_features,
            config.synthetic_alpha,
            config.synthetic_beta,
            config.seed,
        )
    else:
        task = _load(
            config.task, config.features, root, config.download, (config.synthetic_samples, config.synthetic_features)
        )
    if config.validation_samples:
        task = _held_out(task, config.validation_samples)
    if config.training_samples:
        task = _fewer(task, config.training_samples)
    return _with_public(task, config.public_samples) if config.public_samples else task


def public_shard(task: Task, first: int) -> Shard | None:
    """A task's public samples in a fixed order, from number ``first`` on and around; None if it has none.

    Silos that start at different numbers use different ones first.
    """
    if task.public_features is None or task.public_labels is None:
        return None
    public = replace(task, train_features=task.public_features, train_labels=task.public_labels)
    return Shard(public, (first + np.arange(len(task.public_labels))) % len(task.public_labels))


def load_shards(config: RunConfig, task: Task) -> list[Shard]:
    """Every machine's samples under the configuration's partition, in an order of its seed.

    Raises
    ------
    ConfigurationError
        If there are fewer samples than machines, or a machine would have less than one batch.
    """
    labels = task.train_labels
    if config.num_clients > len(labels):
        raise ConfigurationError(
            f"Expected num-clients <= the {len(labels)} training samples of {config.task!r}, got {config.num_clients}."
        )
    if config.partition == "own":
        parts = _own_partition(task, config)
    else:
        parts = _partition(
            labels.tobytes(), len(labels), config.partition, config.num_clients, config.dirichlet_alpha, config.seed
        )
    least = min(len(part) for part in parts)
    if config.batch_size > least:
        raise ConfigurationError(
            f"Expected batch-size <= {least}, the samples of the smallest machine, got {config.batch_size}; "
            "use fewer machines or a smaller batch."
        )
    if config.passes == 1 and config.batch_size * config.max_participations > least:
        raise ConfigurationError(
            f"Expected batch-size x max-participations <= {least}, the samples of the smallest machine (each is used "
            f"once), got {config.batch_size} x {config.max_participations}."
        )
    return [Shard(task, part) for part in parts]


@lru_cache(maxsize=4)
def _load(name: str, features: str, root: str, download: bool, synthetic_shape: tuple[int, int]) -> Task:
    if name == "digits":
        return _digits()
    if name == "synthetic":
        return _synthetic(*synthetic_shape)
    if name in PUBLIC_TASKS:
        from .public import load_public_task

        return load_public_task(name, root, lambda: _mnist(root, download)[:2])
    images, labels, test_images, test_labels = _mnist(root, download)
    if features == "oriented-gradients":
        train, test = oriented_gradients(images), oriented_gradients(test_images)
    elif features in ("means-2x2", "means-4x4"):
        block = int(features[-1])
        train, test = pooled(images, block), pooled(test_images, block)
    else:
        train, test = (
            np.asarray(part.reshape(len(part), -1) / np.float32(255), dtype=np.float32)
            for part in (images, test_images)
        )
    if name == "mnist-parity":
        return Task(train, labels % 2, test, test_labels % 2, 2)
    return Task(train, labels, test, test_labels, 10)


def _digits() -> Task:
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    features = (np.asarray(pixels) / 16).astype(np.float32)
    labels = np.asarray(digits).astype(np.int64)
    order = np.random.Generator(np.random.Philox(key=derived_seed("digits"))).permutation(len(labels))
    test = order[: round(len(labels) * _DIGITS_TEST_SHARE)]
    train = order[len(test) :]
    return Task(features[train], labels[train], features[test], labels[test], 10)


def _synthetic(samples: int, num_features: int) -> Task:
    """Ten Gaussian clouds, by default with MNIST's number of features, for benchmarks: nothing to download."""
    generator = np.random.Generator(np.random.Philox(key=derived_seed("synthetic")))
    centres = generator.random((10, num_features), dtype=np.float32)
    labels = generator.integers(10, size=samples + _SYNTHETIC_TEST)
    features = np.empty((len(labels), num_features), dtype=np.float32)
    for start in range(0, len(labels), _SYNTHETIC_BLOCK):
        block = features[start : start + _SYNTHETIC_BLOCK]
        generator.standard_normal(out=block, dtype=np.float32)
        block *= np.float32(0.5)
        block += centres[labels[start : start + _SYNTHETIC_BLOCK]]
        np.clip(block, 0, 1, out=block)
    return Task(features[:samples], labels[:samples], features[samples:], labels[samples:], 10)


@lru_cache(maxsize=2)
def _synthetic_logistic(machines: int, samples: int, num_features: int, alpha: float, beta: float, seed: int) -> Task:
    """synthetic(alpha, beta) of Li et al. 2020 (section 5.1 there), with two classes as zhang-2025 uses it.

    Machine i has its own linear rule, of entries N(u_i, 1) with u_i ~ N(0, alpha), and its own features,
    N(v_i, diag(j^-1.2)) with the entries of v_i from N(B_i, 1) and B_i ~ N(0, beta). Alpha and beta are variances.
    """
    generator = np.random.Generator(np.random.Philox(key=derived_seed("synthetic(alpha, beta)", seed)))
    each = samples // machines
    if each < 1:
        raise ConfigurationError(f"Expected synthetic-samples >= num-clients = {machines}, got {samples}.")
    held_out = max(_SYNTHETIC_LOGISTIC_TEST // machines, 1)
    deviations = np.arange(1, num_features + 1) ** -0.6
    features = np.empty((machines, each + held_out, num_features), np.float32)
    labels = np.empty((machines, each + held_out), np.int64)
    for i in range(machines):
        model_mean, feature_mean = generator.normal(0.0, [alpha**0.5, beta**0.5])
        weights = generator.normal(model_mean, 1.0, size=(2, num_features))
        offsets = generator.normal(model_mean, 1.0, size=2)
        centre = generator.normal(feature_mean, 1.0, size=num_features)
        rows = centre + deviations * generator.standard_normal((each + held_out, num_features))
        features[i], labels[i] = rows, (rows @ weights.T + offsets).argmax(axis=1)
    return Task(
        features[:, :each].reshape(-1, num_features),
        labels[:, :each].ravel(),
        features[:, each:].reshape(-1, num_features),
        labels[:, each:].ravel(),
        2,
        np.repeat(np.arange(machines), each),
    )


def _mnist(
    root: str, download: bool
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
    try:
        from torchvision.datasets import MNIST
        from torchvision.datasets.mnist import read_image_file, read_label_file
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigurationError(
            f"Expected a torchvision that fits torch {version('torch')}, got: {error}. Install both together, from "
            "one place: pip install --upgrade --force-reinstall torch torchvision."
        ) from error
    if not root:
        raise ConfigurationError(
            "Expected a data root for task 'mnist', got none: set data-root or the environment variable MURMURFL_DATA, "
            "and download=true to fetch it there."
        )
    folder = Path(root).expanduser() / "MNIST" / "raw"
    names = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    if not all((folder / name).exists() or (folder / f"{name}.gz").exists() for name in names):
        if not download:
            raise ConfigurationError(
                f"Expected MNIST under {folder}, got no such files: set data-root or MURMURFL_DATA to the folder that "
                "has MNIST/raw, or set download=true."
            )
        MNIST(root=str(Path(root).expanduser()), download=True)
    arrays = []
    for name in names:
        read = read_image_file if "images" in name else read_label_file
        arrays.append(_read_idx(folder, name, read).numpy())
    return arrays[0], arrays[1].astype(np.int64), arrays[2], arrays[3].astype(np.int64)


def _read_idx(folder: Path, name: str, read):  # type: ignore[no-untyped-def]
    """Read an idx file with torchvision; a data root may be read-only, so a packed one is unpacked elsewhere."""
    import gzip
    import tempfile

    if (folder / name).exists():
        return read(str(folder / name))
    with tempfile.NamedTemporaryFile() as unpacked:
        unpacked.write(gzip.decompress((folder / f"{name}.gz").read_bytes()))
        unpacked.flush()
        return read(unpacked.name)


def _held_out(task: Task, count: int) -> Task:
    total = len(task.train_labels)
    if count >= total:
        raise ConfigurationError(f"Expected validation-samples < {total}, got {count}.")
    order = np.random.Generator(np.random.Philox(key=derived_seed("validation"))).permutation(total)
    held, kept = order[:count], order[count:]
    return replace(
        task,
        train_features=task.train_features[kept],
        train_labels=task.train_labels[kept],
        test_features=task.train_features[held],
        test_labels=task.train_labels[held],
        machine_of=None,
    )


def _fewer(task: Task, count: int) -> Task:
    total = len(task.train_labels)
    if count > total:
        raise ConfigurationError(f"Expected training-samples <= {total}, got {count}.")
    order = np.random.Generator(np.random.Philox(key=derived_seed("training samples"))).permutation(total)
    kept = np.sort(order[:count])
    return replace(
        task,
        train_features=task.train_features[kept],
        train_labels=task.train_labels[kept],
        machine_of=None if task.machine_of is None else task.machine_of[kept],
    )


def _with_public(task: Task, count: int) -> Task:
    total = len(task.train_labels)
    if count >= total:
        raise ConfigurationError(f"Expected public-samples < {total}, got {count}.")
    order = np.random.Generator(np.random.Philox(key=derived_seed("public samples"))).permutation(total)
    public, kept = order[:count], np.sort(order[count:])
    return replace(
        task,
        train_features=task.train_features[kept],
        train_labels=task.train_labels[kept],
        machine_of=None if task.machine_of is None else task.machine_of[kept],
        public_features=task.train_features[public],
        public_labels=task.train_labels[public],
    )


@lru_cache(maxsize=4)
def _partition(
    labels: bytes, count: int, kind: str, num_clients: int, alpha: float, seed: int
) -> list[NDArray[np.int64]]:
    """Indices of each machine's samples, of a seeded shuffle."""
    generator = np.random.Generator(np.random.Philox(key=derived_seed("partition", seed)))
    order = generator.permutation(count)
    if kind == "iid":
        parts = [np.asarray(part, dtype=np.int64) for part in np.array_split(order, num_clients)]
    elif kind == "half-by-label":
        parts = _half_by_label(np.frombuffer(labels, dtype=np.int64), order, num_clients)
    else:
        parts = _dirichlet(labels, order, num_clients, alpha, int(generator.integers(2**31)))
    # A partitioner may group a machine's samples by label; it uses them in order, so the order must not tell labels.
    return [generator.permutation(part) for part in parts]


def _half_by_label(labels: NDArray[np.int64], order: NDArray[np.int64], num_clients: int) -> list[NDArray[np.int64]]:
    """zhang-2025, section V-B: half of the samples spread evenly, the other half by label, digit l to machine l."""
    classes = int(labels.max()) + 1
    if num_clients != classes:
        raise ConfigurationError(
            f"Expected num-clients = {classes}, one a class, for partition 'half-by-label', got {num_clients}."
        )
    half = len(order) // 2
    even = np.array_split(order[:half], num_clients)
    rest = order[half:]
    return [np.concatenate([part, rest[labels[rest] == i]]) for i, part in enumerate(even)]


def _own_partition(task: Task, config: RunConfig) -> list[NDArray[np.int64]]:
    """The machines the data come with, each with its samples in a seeded order."""
    if task.machine_of is None:
        raise ConfigurationError(f"Expected partition 'iid' or 'dirichlet' for task {config.task!r}, got 'own'.")
    generator = np.random.Generator(np.random.Philox(key=derived_seed("partition", config.seed)))
    return [generator.permutation(np.flatnonzero(task.machine_of == i)) for i in range(config.num_clients)]


def _dirichlet(
    labels: bytes, order: NDArray[np.int64], num_clients: int, alpha: float, seed: int
) -> list[NDArray[np.int64]]:
    from datasets import Dataset
    from flwr_datasets.partitioner import DirichletPartitioner

    partitioner = DirichletPartitioner(
        num_partitions=num_clients,
        partition_by="label",
        alpha=alpha,
        min_partition_size=1,
        self_balancing=True,
        seed=seed,
    )
    partitioner.dataset = Dataset.from_dict({"index": order, "label": np.frombuffer(labels, dtype=np.int64)[order]})
    try:
        return [np.array(partitioner.load_partition(i)["index"], dtype=np.int64) for i in range(num_clients)]
    except ValueError as error:
        raise ConfigurationError(
            f"Expected a Dirichlet partition of {len(order)} samples with at least one for each of {num_clients} "
            f"machines, found none for dirichlet-alpha = {alpha:g}; raise it or use fewer machines."
        ) from error
