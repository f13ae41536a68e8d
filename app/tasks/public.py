"""The data of jiang-2026, built as its appendix H.2 says: private samples, and public ones of another distribution.

The paper measures the empirical risk on the private samples themselves, so those are the evaluation set here too: a
figure for research, which no real server has. Whatever the paper leaves open is settled by public knowledge alone:
constants, and statistics of the public samples.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy import ConfigurationError, derived_seed
from .loading import Task

Images = Callable[[], tuple[NDArray[np.uint8], NDArray[np.int64]]]
Samples = tuple[NDArray[np.floating], NDArray[Any]]

PAPER_SIZES = {
    "mnist-69": (1000, 784),
    "cifar10-ridge": (1000, 3072),
    "crime": (159, 124),
    "compas": (2103, 11),
    "credit-card": (200, 21),
}
"""n and d of the paper (table 6; for COMPAS it says 2013 there and 2103 in the text)."""

_PUBLIC_DEFAULTS = 10
# Features in units of the public samples' spread are cut here.
_LARGEST_DEVIATION = 4.0
_TYPICAL_NORM = 10.0


def load_public_task(name: str, root: str, mnist: Images) -> Task:
    """A task of the paper.

    Parameters
    ----------
    name : str
        One of :data:`PAPER_SIZES`.
    root : str
        The data root.
    mnist : callable
        The training images and labels of MNIST.

    Raises
    ------
    ConfigurationError
        If the data are not there.
    """
    makers: dict[str, Callable[[], tuple[Samples, Samples]]] = {
        "mnist-69": lambda: _mnist_69(*mnist()),
        "cifar10-ridge": lambda: _cifar(_file(root, "cifar10/cifar10-subset.npz")),
        "crime": lambda: _crime(_rows(_file(root, "uci/communities.csv.gz"))),
        "compas": lambda: _compas(_rows(_file(root, "compas/compas-two-years.csv.gz"))),
        "credit-card": lambda: _credit_card(_rows(_file(root, "uci/UCI_Credit_Card.csv.gz"))),
    }
    (features, labels), (public_features, public_labels) = makers[name]()
    features, public_features = (np.asarray(part, dtype=np.float32) for part in (features, public_features))
    return Task(
        features,
        labels,  # type: ignore[arg-type] - real numbers where there is something to regress on
        features,
        labels,  # type: ignore[arg-type]
        2 if name in ("compas", "credit-card") else 1,
        None,
        public_features,
        public_labels,  # type: ignore[arg-type]
    )


def _mnist_69(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> tuple[Samples, Samples]:
    """The first 1,000 sixes, and the first 1,000 nines upside down; pixels in [0, 1]."""
    six, nine = images[labels == 6][:1000], images[labels == 9][:1000, ::-1, ::-1]
    return tuple((part.reshape(1000, -1) / 255.0, np.zeros(1000)) for part in (six, nine))  # type: ignore[return-value]


def _cifar(path: Path) -> tuple[Samples, Samples]:
    """100 images of each class, and 250 others of each of the first four; the class's number is what is predicted.

    The paper says 200 of each of ten classes and n = 1,000, which cannot both be; n is that of its table 6.
    """
    with np.load(path) as file:
        images, labels = file["images"].reshape(len(file["labels"]), -1) / 255.0, file["labels"].astype(np.float64)
    private = np.concatenate([np.flatnonzero(labels == c)[:100] for c in range(10)])
    public = np.concatenate([np.flatnonzero(labels == c)[200:450] for c in range(4)])
    # In the file's order one class follows the other, and public samples are used in order.
    public = np.random.Generator(np.random.Philox(key=derived_seed("cifar10-ridge, public"))).permutation(public)
    return (images[private], labels[private]), (images[public], labels[public])


def _crime(rows: list[list[str]]) -> tuple[Samples, Samples]:
    """Communities without a missing value, halved; the public half times I + N(0, 1), as the paper writes it.

    State and fold are among the paper's 124 features; their largest values are public, so all features are in [0, 1].
    """
    complete = [[float(row[0]) / 56, float(row[4]) / 10, *map(float, row[5:])] for row in rows if "?" not in row[5:]]
    values = np.array(complete)
    features, targets = values[:, :-1], values[:, -1]
    half = len(values) // 2
    generator = np.random.Generator(np.random.Philox(key=derived_seed("crime, corruption")))
    corruption = np.eye(features.shape[1]) + generator.standard_normal((features.shape[1],) * 2)
    return (features[:half], targets[:half]), (features[half : 2 * half] @ corruption, targets[half : 2 * half])


def _compas(rows: list[list[str]]) -> tuple[Samples, Samples]:
    """Caucasian and African-American defendants, with ProPublica's own filter; COMPAS's scores are left out."""
    people: dict[str, list[list[float]]] = {"Caucasian": [], "African-American": []}
    for sex, age, age_group, race, *rest in rows:
        felonies, misdemeanours, others, priors, days, degree, recidivist, _, score, again = rest
        if race not in people or not days or abs(float(days)) > 30 or recidivist == "-1" or score == "N/A":
            continue
        groups = [age_group == group for group in ("Less than 25", "25 - 45", "Greater than 45")]
        counts = map(float, (age, felonies, misdemeanours, others, priors))
        people[race].append([sex == "Male", degree == "F", *groups, *counts, 1.0, float(again)])
    private, public = (np.array(people[race], dtype=np.float64) for race in ("Caucasian", "African-American"))
    return _standardised(private, public[: len(private)])


def _credit_card(rows: list[list[str]]) -> tuple[Samples, Samples]:
    """School leavers, half of whom default, and university graduates, of whom 5 % do; without sex and education."""

    def first(education: str, default: str, count: int) -> list[list[float]]:
        chosen = [row for row in rows if (row[3], row[-1]) == (education, default)][:count]
        return [[float(value) for i, value in enumerate(row) if i not in (0, 2, 3)] for row in chosen]

    private = np.array(first("3", "1", 100) + first("3", "0", 100))
    public = np.array(first("2", "1", _PUBLIC_DEFAULTS) + first("2", "0", 200 - _PUBLIC_DEFAULTS))
    order = np.random.Generator(np.random.Philox(key=derived_seed("credit-card, public"))).permutation(len(public))
    return _standardised(private, public[order])


def _standardised(private: NDArray[np.float64], public: NDArray[np.float64]) -> tuple[Samples, Samples]:
    """Features less the public samples' mean over their spread, cut, a typical sample as long as the paper's clip norm.

    The last column is the label. The paper gives no scale; with this one its clip of 10 hardly ever binds, and noise
    made for gradients of length 10 meets gradients about as long.
    """
    mean, spread = public[:, :-1].mean(axis=0), public[:, :-1].std(axis=0)
    constant = spread == 0
    mean, spread = np.where(constant, 0.0, mean), np.where(constant, 1.0, spread)

    def samples(values: NDArray[np.float64]) -> Samples:
        features = np.clip((values[:, :-1] - mean) / spread, -_LARGEST_DEVIATION, _LARGEST_DEVIATION)
        return features * (_TYPICAL_NORM / features.shape[1] ** 0.5), values[:, -1].astype(np.int64)

    return samples(private), samples(public)


def _file(root: str, name: str) -> Path:
    path = Path(root).expanduser() / name if root else Path(name)
    if not root or not path.is_file():
        raise ConfigurationError(
            f"Expected {name} under the data root {root!r}, got no such file: set data-root or MURMURFL_DATA to the "
            "folder that has it."
        )
    return path


def _rows(path: Path) -> list[list[str]]:
    with gzip.open(path, "rt") as file:
        return list(csv.reader(file))[1:]
