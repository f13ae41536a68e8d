"""The built-in tasks: digits of scikit-learn and MNIST, synthetic data of any size, and tables of people.

A model's worth on tables of people is its AUC. Every value there is scaled by public constants (a limit of 10,000
dollars, an age of 40), never by statistics of the samples, so scaling costs no privacy. A constant 0.7 is appended, and
every row is scaled to length 1 by itself.
"""

from __future__ import annotations

import gzip
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...clients.records.image_files import pixels_of
from ...clients.records.image_folders import CLASS, IMAGE, ImageFolder
from ...privacy.errors import ConfigurationError, check_installed
from ...privacy.noise import derived_seed
from ..settings.run_config import RunConfig
from .loading import data_file, table_rows
from .task import SYNTHETIC_FEATURE_BOUND, Dataset, Images, ImageTask, Task, Tuned

_TEST_SHARE = 0.2  # the test set is fixed, whatever the run's seed


class Digits(ImageTask):
    """1,797 handwritten digits of 8 x 8 pixels with 17 shades."""

    name = "digits"
    sentence = "1,797 handwritten digits of 8 x 8 pixels, which come with scikit-learn"
    reads = frozenset()
    image_shape = (8, 8)
    tuned: ClassVar[Mapping[str, Tuned]] = {
        "pixels": Tuned(2.0, 58.0, 1.0, 2.0, 0.1, 1000.0, 80.0, 80.0),
        "soft-gradients": Tuned(0.7, 640.0, 0.8, 0.7, 0.8, 1000.0, 60.0, 80.0),
    }

    def images(self, config: RunConfig, root: str) -> Images:
        file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
        rows = np.loadtxt(str(file), np.uint8, delimiter=",")  # importing scikit-learn takes a second
        images, labels = rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)
        order = np.random.Generator(np.random.Philox(key=derived_seed("digits"))).permutation(len(labels))
        test = order[: round(len(labels) * _TEST_SHARE)]
        train = order[len(test) :]
        return Images(images[train], labels[train], images[test], labels[test], 10, white=16)


class Mnist(ImageTask):
    """60,000 handwritten digits of 28 x 28 pixels, and 10,000 for testing."""

    name = "mnist"
    sentence = "MNIST: 60,000 handwritten digits of 28 x 28 pixels, from data-root"
    reads = frozenset({"download"})
    image_shape = (28, 28)
    tuned: ClassVar[Mapping[str, Tuned]] = {
        "pixels": Tuned(8.0, 110.0, 0.5, 4.0, 0.0135, 20.0, 150.0, 600.0),
        "oriented-gradients": Tuned(1.0, 700.0, 1.0, 1.0, 0.15, 1000.0, 60.0, 140.0),
        # The same for features of norm 1 instead of 4.
        **dict.fromkeys(
            ("soft-gradients", "strokes", "scattering", "scattering+strokes"),
            Tuned(0.25, 11200.0, 1.0, 0.25, 2.4, 4000.0, 60.0, 140.0),
        ),
    }

    def images(self, config: RunConfig, root: str) -> Images:
        return read_mnist(root, config.download, f"task = {self.name!r}")


class MnistParity(ImageTask):
    """MNIST's images in two classes: even and odd digits."""

    name = "mnist-parity"
    sentence = "MNIST's images in two classes, even digits and odd ones"
    reads = frozenset({"download"})
    image_shape = (28, 28)

    def images(self, config: RunConfig, root: str) -> Images:
        digits = read_mnist(root, config.download, f"task = {self.name!r}")
        return replace(digits, train_labels=digits.train_labels % 2, test_labels=digits.test_labels % 2, num_classes=2)


def read_mnist(root: str, download: bool, setting: str) -> Images:
    """Read MNIST from the data root; with ``download`` torchvision fetches missing files there first.

    ``setting`` names in a refusal what asks for it.
    """
    if not root:
        raise ConfigurationError(
            "Expected a data root for task 'mnist', got none: set data-root or the environment variable MURMURFL_DATA, "
            "and download=true to fetch it there.",
            kind="missing",
            setting="data-root",
        )
    folder = Path(root).expanduser() / "MNIST" / "raw"
    names = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    if not all((folder / name).exists() or (folder / f"{name}.gz").exists() for name in names):
        if not download:
            raise ConfigurationError(
                f"Expected MNIST under {folder}, got no such files: set data-root or MURMURFL_DATA to the folder that "
                "has MNIST/raw, or set download=true.",
                kind="not-found",
                setting="data-root",
            )
        _fetch_mnist(str(Path(root).expanduser()), setting)
    train, train_labels, test, test_labels = (_read_idx(folder / name) for name in names)
    return Images(train, train_labels.astype(np.int64), test, test_labels.astype(np.int64), 10)


def _fetch_mnist(root: str, setting: str) -> None:
    try:
        check_installed("torchvision", "torch", setting)
        from torchvision.datasets import MNIST
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigurationError(
            f"Expected a torchvision that fits torch {version('torch')}, got: {error}. Install both together, from "
            "one place: pip install --upgrade --force-reinstall torch torchvision.",
            kind="not-installed",
        ) from error
    MNIST(root=root, download=True)


def _read_idx(path: Path) -> NDArray[np.uint8]:
    """Read the bytes of an idx file, packed or not, in the shape that its header says."""
    content = path.read_bytes() if path.exists() else gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes())
    shape = np.frombuffer(content, ">i4", content[3], 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


class Cifar10(ImageTask):
    """60,000 colour photographs of 32 x 32 pixels in ten classes, of which 10,000 are for testing.

    It is read from the data root: the binary version (``cifar-10-batches-bin``), an ``.npz`` (``cifar10.npz`` with
    ``x_train``, ``y_train``, ``x_test`` and ``y_test``, or any in ``cifar10`` with ``images`` and ``labels``, of which
    a fifth of each class is held out), or ``cifar10/train`` and ``cifar10/test`` with a directory for each class. The
    version in pickles is not read: a pickle can run code.
    """

    name = "cifar10"
    sentence = "CIFAR-10: 60,000 colour photographs of 32 x 32 pixels, or a part of them, from data-root"
    reads = frozenset()
    image_shape = (32, 32)
    in_colour = True

    def images(self, config: RunConfig, root: str) -> Images:
        return read_cifar10(root)


_CIFAR_SHAPE = (32, 32, 3)
_CIFAR_CLASSES = 10
_CIFAR_RECORD = 1 + 32 * 32 * 3


def read_cifar10(root: str) -> Images:
    """Read CIFAR-10, or a part of it, from the data root, in the first of the layouts that is there."""
    base = Path(root).expanduser() if root else Path()
    binary, folder = base / "cifar-10-batches-bin", base / "cifar10"
    files = [one for one in (base / "cifar10.npz", *sorted(folder.glob("*.npz"))) if one.is_file()] if root else []
    try:
        if root and (binary / "test_batch.bin").is_file():
            names = [f"data_batch_{number}.bin" for number in range(1, 6)]
            train = [_binary_batch(binary / name) for name in names if (binary / name).is_file()]
            test = _binary_batch(binary / "test_batch.bin")
            images, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
            return _cifar_images(images, labels, *test)
        if files:
            with np.load(files[0], allow_pickle=False) as file:
                if "x_train" in file.files:
                    return _cifar_images(*(file[name] for name in ("x_train", "y_train", "x_test", "y_test")))
                return _split_images(file["images"], file["labels"])
        if root and (folder / "train").is_dir():
            return _cifar_images(*_class_folders(folder / "train"), *_class_folders(folder / "test"))
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            f"Expected CIFAR-10 under {base} in one of the layouts that task = 'cifar10' reads, got: {error}.",
            kind="malformed",
            setting="data-root",
        ) from error
    raise ConfigurationError(
        f"Expected cifar-10-batches-bin, cifar10.npz, cifar10/*.npz or cifar10/train under the data root {root!r}, got "
        "none: set data-root or MURMURFL_DATA to the folder that has one.",
        kind="not-found",
        setting="data-root",
    )


def _cifar_images(train: Any, train_labels: Any, test: Any, test_labels: Any) -> Images:
    """Return images whose shapes and classes are checked."""
    parts = [np.asarray(part) for part in (train, test)]
    labels = [np.asarray(part).reshape(-1).astype(np.int64) for part in (train_labels, test_labels)]
    for images, classes in zip(parts, labels, strict=True):
        fit = images.dtype == np.uint8 and images.shape == (len(classes), *_CIFAR_SHAPE) and len(classes)
        if not fit or classes.min() < 0 or classes.max() >= _CIFAR_CLASSES:
            raise ConfigurationError(
                f"Expected images of shape (samples, 32, 32, 3), uint8, with classes 0 to 9, got {images.dtype} of "
                f"shape {images.shape} with {len(classes)} labels.",
                kind="wrong-shape",
                setting="data-root",
            )
    return Images(parts[0], labels[0], parts[1], labels[1], _CIFAR_CLASSES)


def _binary_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    records = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, _CIFAR_RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0]


def _split_images(images: NDArray[Any], labels: NDArray[Any]) -> Images:
    """Hold a fifth of each class out, whatever the run's seed."""
    classes = np.asarray(labels).reshape(-1).astype(np.int64)
    generator = np.random.Generator(np.random.Philox(key=derived_seed("cifar10")))
    order = generator.permutation(len(classes))
    place = np.zeros(len(classes), np.int64)
    for one in np.unique(classes):
        own = order[classes[order] == one]
        place[own] = np.arange(len(own)) < round(_TEST_SHARE * len(own))
    train, test = order[place[order] == 0], order[place[order] == 1]
    return _cifar_images(images[train], classes[train], images[test], classes[test])


def _class_folders(folder: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    rows = ImageFolder(folder)
    images = [pixels_of(rows[number][IMAGE]) for number in range(len(rows))]
    return np.stack(images), np.array([rows.classes.index(rows[number][CLASS]) for number in range(len(rows))])


_TEST = 1000
_BLOCK = 10_000
_LOGISTIC_TEST = 5000


class Synthetic(Task):
    """Ten Gaussian clouds, by default with MNIST's number of features, for benchmarks."""

    name = "synthetic"
    sentence = "ten Gaussian clouds of any size, for benchmarks"
    keys = frozenset({"task.samples", "task.features"})
    reads = frozenset({"synthetic_samples", "synthetic_features"})

    def load(self, config: RunConfig, root: str) -> Dataset:
        samples, num_features = config.synthetic_samples, config.synthetic_features
        generator = np.random.Generator(np.random.Philox(key=derived_seed("synthetic")))
        centres = generator.random((10, num_features), dtype=np.float32)
        labels = generator.integers(10, size=samples + _TEST)
        features = np.empty((len(labels), num_features), dtype=np.float32)
        for start in range(0, len(labels), _BLOCK):
            block = features[start : start + _BLOCK]
            generator.standard_normal(out=block, dtype=np.float32)
            block *= np.float32(0.5)
            block += centres[labels[start : start + _BLOCK]]
            np.clip(block, 0, 1, out=block)
        return Dataset(features[:samples], labels[:samples], features[samples:], labels[samples:], 10)


class SyntheticLogistic(Task):
    """synthetic(alpha, beta) of Li et al. 2020 (section 5.1 there), with two classes as zhang-2025 uses it.

    Client i has its own linear rule, of entries N(u_i, 1) with u_i ~ N(0, alpha), and its own features,
    N(v_i, diag(j^-1.2)) with the entries of v_i from N(B_i, 1) and B_i ~ N(0, beta). Alpha and beta are variances.
    """

    name = "synthetic-logistic"
    sentence = "synthetic(alpha, beta) of Li et al. 2020 in two classes; every client has a rule of its own"
    keys = frozenset({"task.samples", "task.features", "task.alpha", "task.beta", "feature-bound"})
    reads = frozenset(
        {"num_clients", "synthetic_samples", "synthetic_features", "synthetic_alpha", "synthetic_beta", "seed"}
    )
    partitions = ("own", "iid")
    feature_bound = SYNTHETIC_FEATURE_BOUND

    def load(self, config: RunConfig, root: str) -> Dataset:
        clients, samples, num_features = config.num_clients, config.synthetic_samples, config.synthetic_features
        generator = np.random.Generator(np.random.Philox(key=derived_seed("synthetic(alpha, beta)", config.seed)))
        each = samples // clients
        if each < 1:
            raise ConfigurationError(
                f"Expected task.samples >= num-clients = {clients}, got {samples}.",
                kind="out-of-range",
                setting="task.samples",
                got=samples,
            )
        held_out = max(_LOGISTIC_TEST // clients, 1)
        spreads = config.synthetic_alpha**0.5, config.synthetic_beta**0.5
        deviations = np.arange(1, num_features + 1) ** -0.6
        features = np.empty((clients, each + held_out, num_features), np.float32)
        labels = np.empty((clients, each + held_out), np.int64)
        for i in range(clients):
            model_mean, feature_mean = generator.normal(0.0, spreads)
            weights = generator.normal(model_mean, 1.0, size=(2, num_features))
            offsets = generator.normal(model_mean, 1.0, size=2)
            centre = generator.normal(feature_mean, 1.0, size=num_features)
            rows = centre + deviations * generator.standard_normal((each + held_out, num_features))
            features[i], labels[i] = rows, (rows @ weights.T + offsets).argmax(axis=1)
        return Dataset(
            features[:, :each].reshape(-1, num_features),
            labels[:, :each].ravel(),
            features[:, each:].reshape(-1, num_features),
            labels[:, each:].ravel(),
            2,
            np.repeat(np.arange(clients), each),
        )


_CONSTANT = 0.7
_TRAINING_SHARE = 0.8
_SPLIT = 1
"""Seed of the split, for NumPy's own generator, so that others can make the same one."""
_MONTHS = 6


class TabularTask(Task):
    """Rows of length 1 with a constant among their values; the test set is fixed, whatever the run's seed."""

    reads = frozenset()
    constant = True
    feature_bound = 1.0

    def load(self, config: RunConfig, root: str) -> Dataset:
        values, labels = self.rows(root)
        rows = unit_rows(values)
        order = np.random.Generator(np.random.PCG64(_SPLIT)).permutation(len(labels))
        # Whole hundreds, so that a hundred clients have equally many.
        train, test = np.split(order, [int(len(labels) * _TRAINING_SHARE) // 100 * 100])
        return Dataset(rows[train], labels[train], rows[test], labels[test], 2)

    @abstractmethod
    def rows(self, root: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Scaled values and classes of all people."""


class CreditDefault(TabularTask):
    """30,000 holders of credit cards in Taiwan (Yeh and Lien 2009), of whom 22 % do not pay next month."""

    name = "credit-default"
    sentence = "30,000 holders of credit cards and whether they pay next month, from data-root"
    tuned: ClassVar[Mapping[str, Tuned]] = {"pixels": Tuned(0.7, 400.0, 0.8, 0.7, 0.2, 1000.0, 60.0, 80.0)}

    def rows(self, root: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        table = np.array(table_rows(data_file(root, "uci/UCI_Credit_Card.csv.gz")), dtype=np.float64)
        limit, sex, education, marriage, age = table[:, 1:6].T
        states, bills, paid = (table[:, start : start + _MONTHS] for start in (6, 12, 18))
        people = [_logarithm(limit) * 2 - 1.6, (age - 40) / 40, sex - 1.5]
        groups = [education == 1, education == 2, education == 3, marriage == 1, marriage == 2]
        months = [np.maximum(states, 0) / 3, (states <= -1) / 2, states > 0, states > 1]
        amounts = [_logarithm(bills) / 2, _logarithm(paid) - 0.3]
        values = np.concatenate([np.stack([*people, *groups], axis=1), *months, *amounts], axis=1)
        return values, table[:, -1].astype(np.int64)


class Recidivism(TabularTask):
    """7,214 defendants in Broward County (ProPublica 2016), of whom 45 % are charged again; without their race."""

    name = "recidivism"
    sentence = "7,214 defendants and whether they are charged again within two years (COMPAS), from data-root"
    tuned: ClassVar[Mapping[str, Tuned]] = {"pixels": Tuned(0.35, 300.0, 0.8, 0.35, 0.2, 1000.0, 60.0, 80.0)}

    def rows(self, root: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        table = np.array(table_rows(data_file(root, "compas/compas-two-years.csv.gz")))
        age, felonies, misdemeanours, others, priors = table[:, [1, 4, 5, 6, 7]].astype(np.float64).T
        juvenile = [np.minimum(count, 3) / 3 for count in (felonies, misdemeanours, others)]
        groups = [age < 25, age > 45, (table[:, 0] == "Male") - 0.5, (table[:, 9] == "F") - 0.5]
        record = [np.log1p(priors) / 3 - 0.3, (priors > 0) - 0.5, priors > 4]
        values = np.stack([(age - 35) / 30, *groups, *record, *juvenile], axis=1)
        return values, table[:, -1].astype(np.int64)


def unit_rows(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Rows with a constant appended, each scaled to length 1 by itself."""
    rows = np.concatenate([values, np.full((len(values), 1), _CONSTANT)], axis=1)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def _logarithm(amounts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Signed amounts of money, mapped to about -1 to 1."""
    return np.sign(amounts) * np.log1p(np.abs(amounts)) / 14
