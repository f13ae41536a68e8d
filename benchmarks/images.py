"""Images and texts under privacy: fixed features, three trust models, DP-SGD, no noise and one site alone.

``python -m benchmarks.images`` writes ``docs/results/images.json`` and prints a table of it, in about ten minutes
on one core. What the file has already is not measured again; ``--only`` names some data sets, and ``--seeds`` says
how many splits. ``--networks`` measures a network on pixels instead, at epsilon 3 and 8, in an hour or two. Each seed
splits a data set into training and test, a fifth of each class held out, and draws its own noise. Ten sites have equal
parts of the training set.

* CIFAR-10: the first 200 images of each class of the subset under MURMURFL_DATA, 1,600 for training. Its other 1,000
  images, of four classes, were looked at when ``colour`` was made, and play no part here.
* All of CIFAR-10 (``--only "all of CIFAR-10"``): the task ``cifar10`` with the binary version under MURMURFL_DATA.
* MNIST: 10,000 of the training images, 8,000 for training.
* Digits: all of scikit-learn's, 1,438 for training.
* Docstrings: which of three packages the first paragraphs of a docstring come from, without the packages' names; they
  are read from the installed packages' files, and no code of them runs.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from murmurfl.app import simulate
from murmurfl.app.data.built_in_tasks import read_cifar10, read_mnist
from murmurfl.app.data.features import FEATURES
from murmurfl.app.data.task import Dataset, Task
from murmurfl.app.runs.fit_arguments import mean_is_noise
from murmurfl.app.settings.registry import registry
from murmurfl.app.settings.run_config import RunConfig, run_keys
from murmurfl.clients.records.encoders import HashedNGrams
from murmurfl.privacy import derived_seed, gdp_mu
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

DEFAULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "images.json"
EPSILONS = (0.5, 1.0, 3.0, 8.0)
SEEDS, SITES, HELD_OUT = 1, 10, 0.2
DELTA = float(run_keys()["delta"].default)
PACKAGES = ("numpy", "scipy", "sklearn")
_EACH, _MNIST, _FEWEST_WORDS, _DOCSTRINGS, _LONGEST = 200, 10_000, 8, 700, 600
Samples = tuple[NDArray[np.float32], NDArray[np.int64]]


def _generator(*parts: object) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=derived_seed("images", *parts)))


def _encoded(images: NDArray[np.uint8], features: str, white: int = 255) -> NDArray[np.float32]:
    made = FEATURES[features]
    blocks = [made.of_any(images[start : start + 1000], white) for start in range(0, len(images), 1000)]
    return np.concatenate(blocks)


@cache
def _cifar(features: str) -> Samples:
    file = next((Path(os.environ["MURMURFL_DATA"]) / "cifar10").glob("*.npz"))
    with np.load(file, allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"].astype(np.int64)
    chosen = np.concatenate([np.flatnonzero(labels == one)[:_EACH] for one in range(10)])
    return _encoded(images[chosen], features), labels[chosen]


@cache
def _mnist(features: str) -> Samples:
    found = read_mnist(os.environ["MURMURFL_DATA"], download=False, setting="benchmarks.images")
    chosen = _generator("mnist").permutation(len(found.train))[:_MNIST]
    return _encoded(found.train[chosen], features), found.train_labels[chosen]


@cache
def _digits(features: str) -> Samples:
    found: Any = load_digits()
    return _encoded(found.images.astype(np.uint8), features, 16), found.target.astype(np.int64)


@cache
def _docstrings(features: str) -> Samples:
    texts: list[str] = []
    labels: list[int] = []
    for label, package in enumerate(PACKAGES):
        found = sorted(set(_texts_of(package)))
        order = _generator("docstrings", package).permutation(len(found))[:_DOCSTRINGS]
        texts += [found[i] for i in order]
        labels += [label] * len(order)
    encode = HashedNGrams(int(features.rpartition("-")[2]))
    return np.stack([encode(text) for text in texts]).astype(np.float32), np.array(labels)


def _texts_of(package: str) -> Iterator[str]:
    """Yield the beginnings of a package's docstrings without the names of packages."""
    spec = find_spec(package)
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in sorted(Path(folder).rglob("*.py")):
            if "test" in str(path.relative_to(folder)):
                continue
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, ValueError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                    plain = re.sub(r"(?i)\w*(numpy|scipy|sklearn|scikit|ndarray|np\.)\w*", " ", text)
                    if len(plain.split()) >= _FEWEST_WORDS:
                        yield " ".join(plain.split())[:_LONGEST]


DATA: Mapping[str, tuple[Callable[[str], Samples], tuple[int, int], Sequence[str]]] = {
    "CIFAR-10, 2,000 images": (_cifar, (32, 32), ("colour", "colour-96", "colour-24")),
    "MNIST, 10,000 images": (_mnist, (28, 28), ("scattering+strokes",)),
    "digits, 1,797 images": (_digits, (8, 8), ("strokes", "soft-gradients")),
    "docstrings, 2,100 texts": (_docstrings, (1, 1), ("n-grams-2048", "n-grams-1024", "n-grams-512", "n-grams-256")),
}
"""Data sets, their shape as images, and the features that are compared."""
WHOLE = "all of CIFAR-10"
NETWORK = "group-norm-cnn"
OF_NETWORKS = (NETWORK, f"{NETWORK}, 4 augmentations")
"""Models on pixels, in the place of features."""
NETWORK_EPSILONS = (3.0, 8.0)

METHODS: Mapping[str, Mapping[str, Any]] = {
    "untrusted": {"strategy": "full-batch", "trust": "untrusted-server"},
    "sums": {"strategy": "full-batch", "trust": "secure-aggregation", "trust.colluders": 0},
    "central": {"strategy": "trusted-full-batch", "trust": "trusted-server"},
    "DP-SGD": {
        "strategy": "trusted-sgd",
        "trust": "trusted-server",
        "batch-selection": "poisson",
        "batch-size": 16,
    },
}
"""Settings of each column; under sums all ten sites are taken to be honest."""


class Split(Task):
    """One split of a data set whose features are made already."""

    sentence = "a split of a benchmark's data"
    reads = frozenset()

    def __init__(self, name: str, dataset: Dataset, shape: tuple[int, int]) -> None:
        self.name, self._dataset = name, dataset
        self.image_shape = shape if min(shape) > 1 else None
        self.feature_bound = 0.0 if self.image_shape else 1.0
        registry("task").give(name, self)

    def load(self, config: RunConfig, root: str) -> Dataset:
        """Return the split."""
        return self._dataset


def split(data: str, features: str, seed: int) -> Dataset:
    """Return a data set with a fifth of each class held out."""
    if data == WHOLE:
        whole = read_cifar10(os.environ["MURMURFL_DATA"])
        parts = _encoded(whole.train, features), whole.train_labels, _encoded(whole.test, features), whole.test_labels
        return Dataset(*parts, 10)
    rows, labels = DATA[data][0](features)
    order = _generator("split", data, seed).permutation(len(labels))
    held = np.zeros(len(labels), bool)
    for one in np.unique(labels):
        own = order[labels[order] == one]
        held[own[: round(HELD_OUT * len(own))]] = True
    train, test = order[~held[order]], order[held[order]]
    return Dataset(rows[train], labels[train], rows[test], labels[test], int(labels.max()) + 1)


def measured(data: str, features: str, method: str, epsilon: float, seed: int) -> float:
    """Return the accuracy in percent of one training on one split."""
    network = features in OF_NETWORKS
    dataset = split(data, "pixels" if network else features, seed)
    if method == "alone" and not network:
        return _alone(dataset)
    shape = (32, 32) if data == WHOLE else DATA[data][1]
    if method == "alone":
        first = np.array_split(np.arange(len(dataset.train_labels)), SITES)[0]
        dataset = replace(
            dataset, train_features=dataset.train_features[first], train_labels=dataset.train_labels[first]
        )
    task = Split(f"benchmark:{data}:{features}:{method == 'alone'}:{seed}", dataset, shape)
    usual: dict[str, Any] = {"task": task.name, "seed": seed + 1, "noise-quality": "fast"}
    sites = 1 if method == "alone" else SITES
    usual |= {"num-clients": sites, "clients-per-round": sites}
    usual["features"] = features if task.image_shape and not network else "pixels"
    if network:
        usual |= {"model": NETWORK, "model.augmentations": 1 if features == NETWORK else 4}
    noisy = method not in ("no noise", "alone")
    own = dict(METHODS[method], epsilon=epsilon) if noisy else dict(METHODS["central"], mechanism="none")
    if noisy and method != "DP-SGD" and not network:
        moved = math.sqrt(2.0) if task.image_shape and FEATURES[features].nonnegative else 2.0
        mu = gdp_mu(epsilon, DELTA) / (math.sqrt(SITES) if method == "untrusted" else 1.0)
        noise = mean_is_noise(dataset.num_features, mu, len(dataset.train_labels), moved=moved)
        by_default = task.image_shape is not None and FEATURES[features].centring == "private"
        own["centring"] = "none" if noise and not by_default else "private"
    return 100 * float(simulate({**usual, **own}, on_progress=lambda _: None).accuracy or 0.0)


def _alone(dataset: Dataset) -> float:
    """Return the mean accuracy of sites that train alone without noise: the best of four penalties on the test set."""
    parts = np.array_split(np.arange(len(dataset.train_labels)), SITES)[:3]
    scores = [
        max(
            LogisticRegression(C=strength, max_iter=500)
            .fit(dataset.train_features[part], dataset.train_labels[part])
            .score(dataset.test_features, dataset.test_labels)
            for strength in (1.0, 10.0, 100.0, 1000.0)
        )
        for part in parts
    ]
    return 100 * fmean(scores)


def cells(names: Sequence[str], *, networks: bool = False) -> Iterator[tuple[str, str, str, float]]:
    """Yield data set, features, method and epsilon of every cell; 0 where there is no noise."""
    epsilons = NETWORK_EPSILONS if networks else EPSILONS
    for data in names:
        usual = ("colour",) if data == WHOLE else DATA[data][2]
        if networks and data != WHOLE and min(DATA[data][1]) == 1:
            continue
        for features in OF_NETWORKS if networks else usual:
            yield from ((data, features, method, 0.0) for method in ("no noise", "alone"))
            yield from ((data, features, method, epsilon) for epsilon in epsilons for method in METHODS)


def measure(document: dict[str, Any], names: Sequence[str], seeds: int, *, networks: bool = False) -> Iterator[None]:
    """Measure what a document has not, and yield after each training."""
    logging.disable(logging.WARNING)
    for seed in range(seeds):
        for data, features, method, epsilon in cells(names, networks=networks):
            if method == "alone" and seed and data == WHOLE:
                continue
            runs = document.setdefault(data, {}).setdefault(features, {}).setdefault(method, {})
            runs = runs.setdefault(f"{epsilon:g}", {})
            if str(seed) not in runs:
                runs[str(seed)] = measured(data, features, method, epsilon, seed)
                yield


def table(document: Mapping[str, Any]) -> str:
    """Return the table of the page: means over splits, with their standard error."""
    terms = (
        "Accuracy in percent, and with several splits its mean and standard error. Epsilon is at delta = 1e-05, for "
        "replacement of one sample of one client, against the server and everybody else; independent noise of each "
        "client; over all releases of a run. Under sums this holds if one helper and 10 clients of each sum are "
        "honest. In both central columns it is against everybody but the trusted server, which adds the noise. Models "
        "without noise and sites alone have none; a site's penalty was chosen on the test set, which favours it. "
        "With a network a site alone is the first of ten."
    )
    heading = (
        "| data | features or network | epsilon | untrusted | sums | central | DP-SGD | no noise | one site alone |"
    )
    lines = [terms, "", heading, "|---|---|---|---|---|---|---|---|---|"]
    for data, by_features in document.items():
        for features, found in by_features.items():
            for epsilon in EPSILONS:
                shown = [_shown(found.get(method, {}).get(f"{epsilon:g}", {})) for method in METHODS]
                if features in OF_NETWORKS and not any(shown):
                    continue
                shown += [_shown(found.get(method, {}).get("0", {})) for method in ("no noise", "alone")]
                lines.append(f"| {data} | {features} | {epsilon:g} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _shown(runs: Mapping[str, float]) -> str:
    values = list(runs.values())
    if not values:
        return ""
    error = f" ± {stdev(values) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
    return f"{fmean(values):.1f}{error}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=DEFAULT)
    parser.add_argument("--only", action="append", choices=[*DATA, WHOLE])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--networks", action="store_true")
    asked = parser.parse_args()
    document = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    for _ in measure(document, asked.only or list(DATA), asked.seeds, networks=asked.networks):
        asked.json.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))


if __name__ == "__main__":
    main()
