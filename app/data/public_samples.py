"""The data of jiang-2026 (appendix H.2): private samples, and public ones of another distribution.

The paper measures the empirical risk on the private samples, so they are the evaluation set here too: a figure for
research, which no real server has. What the paper leaves open follows from public knowledge: constants, and statistics
of the public samples.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy.noise import derived_seed
from ..settings.run_config import RunConfig
from .built_in_tasks import read_mnist
from .loading import data_file, table_rows
from .task import Dataset, Task

Samples = tuple[NDArray[np.floating], NDArray[Any]]

_PUBLIC_DEFAULTS = 10
_LARGEST_DEVIATION = 4.0  # at which features are cut, in units of the public samples' spread
_TYPICAL_NORM = 10.0


class PublicTask(Task):
    """A task of the paper; ``num_classes`` is 1 if there is a number to regress on, or nothing to predict."""

    reads = frozenset()
    public = True
    num_classes: int

    @abstractmethod
    def samples(self, config: RunConfig, root: str) -> tuple[Samples, Samples]:
        """Features and labels of the private samples, and of the public ones."""

    def load(self, config: RunConfig, root: str) -> Dataset:
        (features, labels), (public_features, public_labels) = self.samples(config, root)
        features, public_features = (np.asarray(part, dtype=np.float32) for part in (features, public_features))
        return Dataset(
            features,
            labels,  # type: ignore[arg-type] - real numbers where there is something to regress on
            features,
            labels,  # type: ignore[arg-type]
            self.num_classes,
            None,
            public_features,
            public_labels,  # type: ignore[arg-type]
        )


class Mnist69(PublicTask):
    """The first 1,000 sixes, and the first 1,000 nines upside down; pixels in [0, 1]."""

    name = "mnist-69"
    sentence = "sixes of MNIST, and nines upside down as public samples (jiang-2026)"
    reads = frozenset({"download"})
    models = ("mean",)
    num_classes = 1
    feature_bound = 28.0  # 784 pixels in [0, 1]
    regularizer = "ball"
    regularizer_strength = 10.0

    def samples(self, config: RunConfig, root: str) -> tuple[Samples, Samples]:
        digits = read_mnist(root, config.download, f"task = {self.name!r}")
        images, labels = digits.train, digits.train_labels
        six, nine = images[labels == 6][:1000], images[labels == 9][:1000, ::-1, ::-1]
        return tuple((part.reshape(1000, -1) / 255.0, np.zeros(1000)) for part in (six, nine))  # type: ignore[return-value]


class Cifar10Ridge(PublicTask):
    """100 images of each class, and 250 others of each of the first four; the class's number is predicted.

    The paper says 200 of each of ten classes and n = 1,000, which contradict each other; n is that of its table 6.
    """

    name = "cifar10-ridge"
    sentence = "images of CIFAR-10, whose class's number is predicted; four classes are public (jiang-2026)"
    models = ("ridge",)
    num_classes = 1
    feature_bound = math.sqrt(3072)  # pixels in [0, 1]
    regularizer = "l2"
    regularizer_strength = 0.1

    def samples(self, config: RunConfig, root: str) -> tuple[Samples, Samples]:
        with np.load(data_file(root, "cifar10/cifar10-subset.npz")) as file:
            images, labels = file["images"].reshape(len(file["labels"]), -1) / 255.0, file["labels"].astype(np.float64)
        private = np.concatenate([np.flatnonzero(labels == c)[:100] for c in range(10)])
        public = np.concatenate([np.flatnonzero(labels == c)[200:450] for c in range(4)])
        # The file has one class after the other, and public samples are used in order.
        public = np.random.Generator(np.random.Philox(key=derived_seed("cifar10-ridge, public"))).permutation(public)
        return (images[private], labels[private]), (images[public], labels[public])


class Crime(PublicTask):
    """Communities without a missing value, halved; the public half times I + N(0, 1), as the paper writes it.

    State and fold are among the paper's 124 features; their largest values are public, so all features are in [0, 1].
    """

    name = "crime"
    sentence = "crime in communities; the other half of them is public, corrupted (jiang-2026)"
    models = ("ridge",)
    num_classes = 1
    feature_bound = 84.0  # private features are in [0, 1], public ones are multiplied by a public matrix
    regularizer = "l2"
    regularizer_strength = 0.1

    def samples(self, config: RunConfig, root: str) -> tuple[Samples, Samples]:
        rows = table_rows(data_file(root, "uci/communities.csv.gz"))
        complete = [
            [float(row[0]) / 56, float(row[4]) / 10, *map(float, row[5:])] for row in rows if "?" not in row[5:]
        ]
        values = np.array(complete)
        features, targets = values[:, :-1], values[:, -1]
        half = len(values) // 2
        generator = np.random.Generator(np.random.Philox(key=derived_seed("crime, corruption")))
        corruption = np.eye(features.shape[1]) + generator.standard_normal((features.shape[1],) * 2)
        return (features[:half], targets[:half]), (features[half : 2 * half] @ corruption, targets[half : 2 * half])


class Compas(PublicTask):
    """Caucasian and African-American defendants, with ProPublica's own filter; COMPAS's scores are left out."""

    name = "compas"
    sentence = "defendants who are arrested again or not; those of another group are public (jiang-2026)"
    models = ("logistic",)
    num_classes = 2
    feature_bound = 20.0  # a typical sample is 10 long
    regularizer = "l1"
    regularizer_strength = 0.1

    def samples(self, config: RunConfig, root: str) -> tuple[Samples, Samples]:
        people: dict[str, list[list[float]]] = {"Caucasian": [], "African-American": []}
        for sex, age, age_group, race, *rest in table_rows(data_file(root, "compas/compas-two-years.csv.gz")):
            felonies, misdemeanours, others, priors, days, degree, recidivist, _, score, again = rest
            if race not in people or not days or abs(float(days)) > 30 or recidivist == "-1" or score == "N/A":
                continue
            groups = [age_group == group for group in ("Less than 25", "25 - 45", "Greater than 45")]
            counts = map(float, (age, felonies, misdemeanours, others, priors))
            people[race].append([sex == "Male", degree == "F", *groups, *counts, 1.0, float(again)])
        private, public = (np.array(people[race], dtype=np.float64) for race in ("Caucasian", "African-American"))
        return _standardised(private, public[: len(private)])


class CreditCard(PublicTask):
    """School leavers, half of whom default, and university graduates, of whom 5 % do; without sex and education."""

    name = "credit-card"
    sentence = "credit cards of school leavers; those of university graduates are public (jiang-2026)"
    models = ("logistic",)
    num_classes = 2
    feature_bound = 20.0  # a typical sample is 10 long
    regularizer = "l1"
    regularizer_strength = 0.1

    def samples(self, config: RunConfig, root: str) -> tuple[Samples, Samples]:
        rows = table_rows(data_file(root, "uci/UCI_Credit_Card.csv.gz"))

        def first(education: str, default: str, count: int) -> list[list[float]]:
            chosen = [row for row in rows if (row[3], row[-1]) == (education, default)][:count]
            return [[float(value) for i, value in enumerate(row) if i not in (0, 2, 3)] for row in chosen]

        private = np.array(first("3", "1", 100) + first("3", "0", 100))
        public = np.array(first("2", "1", _PUBLIC_DEFAULTS) + first("2", "0", 200 - _PUBLIC_DEFAULTS))
        order = np.random.Generator(np.random.Philox(key=derived_seed("credit-card, public"))).permutation(len(public))
        return _standardised(private, public[order])


def _standardised(private: NDArray[np.float64], public: NDArray[np.float64]) -> tuple[Samples, Samples]:
    """Standardise features by the public samples' mean and spread.

    They are cut, and a typical length is the paper's clip norm.

    The last column is the label. The paper gives no scale; with this one its clip of 10 hardly ever binds, and noise
    for gradients of length 10 meets gradients about as long.
    """
    mean, spread = public[:, :-1].mean(axis=0), public[:, :-1].std(axis=0)
    constant = spread == 0
    mean, spread = np.where(constant, 0.0, mean), np.where(constant, 1.0, spread)

    def samples(values: NDArray[np.float64]) -> Samples:
        features = np.clip((values[:, :-1] - mean) / spread, -_LARGEST_DEVIATION, _LARGEST_DEVIATION)
        return features * (_TYPICAL_NORM / features.shape[1] ** 0.5), values[:, -1].astype(np.int64)

    return samples(private), samples(public)


PUBLIC_TASKS = (Mnist69(), Cifar10Ridge(), Crime(), Compas(), CreditCard())
