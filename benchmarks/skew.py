"""Sites whose data differ, and what to use there: ``python -m benchmarks.skew``.

Writes docs/results/skew.json, in about an hour on one core; rows that it has are not made again. ``python -m
benchmarks.pages`` draws the pictures of docs/sites-that-differ.md from it.

Sites differ in their mixes of classes, their sizes, the look of their images, what their labels mean, or they are often
absent; two tables come with sites of their own. Every model is linear, on the same features, and is judged on the
distribution of each site: the test set as that site would see it, in that site's mix of classes. The mean over sites,
each as heavy as its share of the training samples, is the figure on everybody's data. Beside the private federations
stand FedAvg, FedProx and SCAFFOLD without privacy (the best of three steps for each cell), all data in one place, and
one site alone (converged, the best of five penalties for each figure). Noise is of ``fast`` quality: the same law, and
no guarantee.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from murmurfl.app.data.loading import load_dataset
from murmurfl.app.data.partition import PARTITIONS
from murmurfl.app.data.task import Dataset, Task
from murmurfl.app.engines.cohort import CohortClients
from murmurfl.app.models.fitted_linear import logistic
from murmurfl.app.reports.figures import empty_figure
from murmurfl.app.runs.experiment import Experiment, prepare
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.settings.registry import registry
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import derived_seed
from numpy.typing import NDArray
from scipy import ndimage
from scipy.special import softmax

DEFAULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "skew.json"
SEEDS, MORE_SEEDS = range(1, 6), range(1, 21)
EPSILONS = (0.5, 2.0, 8.0)
CLIENTS = 20
Rows = tuple[NDArray[np.floating], NDArray[np.int64]]


# ------------------------------------------------------------------------------------------------------------- data
@dataclass(frozen=True)
class Sites:
    """Sites' training rows, and the test rows of every kind of site.

    Parameters
    ----------
    train : tuple of ndarray
        Rows, no longer than 1, and their classes, of all sites.
    client_of : ndarray
        The site of each training row.
    tests : list of tuple
        Test rows and classes as one kind of site sees them.
    kind_of : ndarray of shape (sites,)
        Which of ``tests`` is a site's.
    classes : int
        Number of classes.
    mixed : bool
        Whether a site's test rows are weighted by its mix of classes in training; otherwise they are its own rows.
    """

    train: Rows
    client_of: NDArray[np.int64]
    tests: list[Rows]
    kind_of: NDArray[np.int64]
    classes: int
    mixed: bool = True

    @property
    def count(self) -> int:
        """Number of sites."""
        return len(self.kind_of)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Training rows of each site."""
        return np.bincount(self.client_of, minlength=self.count)

    def rows(self, site: int) -> Rows:
        """Training rows of a site."""
        chosen = self.client_of == site
        return self.train[0][chosen], self.train[1][chosen]

    def accuracies(self, scores: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[np.float64]:
        """Accuracy of a model on the distribution of every site, in percent."""
        return self.weights @ self._right(scores)

    @property
    def weights(self) -> NDArray[np.float64]:
        """Weight of each class of each kind of test rows in a site's figure, of shape (sites, kinds x classes)."""
        if self not in _WEIGHTS:
            made = np.zeros((self.count, len(self.tests), self.classes))
            for site, kind in enumerate(self.kind_of):
                tested = np.bincount(self.tests[kind][1], minlength=self.classes)
                mix = np.bincount(self.rows(site)[1], minlength=self.classes) if self.mixed else tested
                made[site, kind] = np.where(tested > 0, mix, 0)
                made[site, kind] /= max(made[site, kind].sum(), 1)
            _WEIGHTS.clear()
            _WEIGHTS[self] = made.reshape(self.count, -1)
        return _WEIGHTS[self]

    def _right(self, scores: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[np.float64]:
        made = []
        for features, labels in self.tests:
            right = (scores(features).argmax(axis=1) == labels).astype(float)
            counts = np.bincount(labels, minlength=self.classes)
            made.append(np.bincount(labels, right, minlength=self.classes) / np.maximum(counts, 1))
        return 100 * np.concatenate(made)

    def figures(self, found: NDArray[np.float64]) -> dict[str, float]:
        """Everybody's data, and the mean, worst and best site, of accuracies by site."""
        heavy = float(np.average(found, weights=self.sizes))
        return {"everybody": heavy, "own": float(found.mean()), "worst": float(found.min()), "best": float(found.max())}

    __hash__ = object.__hash__


_WEIGHTS: dict[Sites, NDArray[np.float64]] = {}


def _generator(*parts: object) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=derived_seed("skew", *parts)))


def data_root() -> Path:
    """Folder of data sets that are not bundled."""
    return Path(os.environ.get("MURMURFL_DATA", "")).expanduser()


Images = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]


@cache
def images(data: str) -> Images:
    """Training and test images with their classes."""
    if data == "cifar":
        with np.load(data_root() / "cifar10" / "cifar10-subset.npz") as found:
            pixels, labels = found["images"].mean(axis=3).astype(np.uint8), found["labels"].astype(np.int64)
        order = _generator("cifar").permutation(len(labels))
        pixels, labels = pixels[order], labels[order]
        return pixels[600:], labels[600:], pixels[:600], labels[:600]
    if data == "mnist":
        made = load_dataset(RunConfig(task="mnist", training_samples=3000, num_clients=10, data_root=str(data_root())))
    else:
        made = load_dataset(RunConfig())
    side = math.isqrt(made.num_features)
    train, test = (
        np.rint(part * 255).astype(np.uint8).reshape(-1, side, side)
        for part in (made.train_features, made.test_features)
    )
    return train, made.train_labels, test[:2000], made.test_labels[:2000]


def _rotated(angle: float) -> Callable[[NDArray[np.uint8]], NDArray[np.uint8]]:
    return lambda made: np.asarray(ndimage.rotate(made, angle, axes=(1, 2), reshape=False, order=1), np.uint8)


def _styled(style: int) -> Callable[[NDArray[np.uint8]], NDArray[np.uint8]]:
    def noisy(made: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return np.clip(made + _generator("style", len(made)).normal(0, 60, made.shape), 0, 255).astype(np.uint8)

    return [
        lambda made: made,
        lambda made: 255 - made,
        lambda made: ndimage.grey_dilation(made, size=(1, 2, 2)),
        noisy,
    ][style]


def _scaled(scale: float) -> Callable[[NDArray[np.uint8]], NDArray[np.uint8]]:
    return lambda made: (made * scale).astype(np.uint8)


LOOKS: Mapping[str, Sequence[Callable[[NDArray[np.uint8]], NDArray[np.uint8]]]] = {
    "scale": [_scaled(one) for one in (0.1, 0.3, 0.6, 1.0)],
    "rotation": [_rotated(one) for one in (-40.0, -15.0, 15.0, 40.0)],
    "style": [_styled(one) for one in range(4)],
}
"""How the images of four kinds of sites look."""
PARTS: Mapping[str, Mapping[str, Any]] = {
    "Dirichlet 1": {"partition": "dirichlet", "dirichlet_alpha": 1.0},
    "Dirichlet 0.3": {"partition": "dirichlet", "dirichlet_alpha": 0.3},
    "Dirichlet 0.1": {"partition": "dirichlet", "dirichlet_alpha": 0.1},
    "two classes": {"partition": "classes", "classes_per_client": 2},
    "one class": {"partition": "classes", "classes_per_client": 1},
    "power law": {"partition": "power-law", "num_clients": 50},
    "absent": {"partition": "dirichlet", "dirichlet_alpha": 0.3},
}
"""Who has which samples, where it is not drawn at random."""
ABSENT = {"lost-replies": 0.5, "give-up-after": 0}
"""Half of the replies never come; sums are opened from four replies on, of which one may be a liar's."""
ABSENT_SUMS = {"trust.min-cohort": 4, "trust.colluders": 1}
SKEWS = ("alike", *PARTS, "1 to 5 records", *LOOKS, "concept")


@lru_cache(maxsize=8)
def sites(data: str, skew: str, seed: int) -> Sites:
    """Return the sites of a cell."""
    if data in TABLES:
        return table_sites(data, seed, alike=skew == "alike")
    train, labels, test, test_labels = images(data)
    dataset = Dataset(train.reshape(len(train), -1).astype(np.float32), labels, np.zeros((1, 1)), labels[:1], 10)
    settings = {"num_clients": CLIENTS, "seed": seed, "batch_size": 1, **PARTS.get(skew, {})}
    client_of = np.full(len(labels), -1)
    if skew == "1 to 5 records":
        sizes = _generator("few", seed).integers(1, 6, size=len(labels))
        clients = int(np.searchsorted(np.cumsum(sizes), len(labels)))
        client_of[_generator("few order", seed).permutation(len(labels))[: sizes[:clients].sum()]] = np.repeat(
            np.arange(clients), sizes[:clients]
        )
    else:
        config = RunConfig(**{**settings, "clients_per_round": 1})
        for client, part in enumerate(PARTITIONS[config.partition].parts(dataset, config)):
            client_of[part] = client
    kept = client_of >= 0
    train, labels, client_of = train[kept], labels[kept], client_of[kept]
    looks = LOOKS.get(skew, [lambda made: made])
    kind_of = np.arange(client_of.max() + 1) % len(looks)
    seen = np.empty_like(train)
    for kind, look in enumerate(looks):
        chosen = kind_of[client_of] == kind
        seen[chosen] = look(train[chosen])
    gradients = registry("features")["soft-gradients"]
    tests = [(gradients(look(test), 255), test_labels) for look in looks]
    if skew == "concept":  # a third of the sites read 3 for 5, 4 for 9 and 1 for 7, and the other way round
        kind_of = (np.arange(client_of.max() + 1) % 3 == 0).astype(np.int64)
        labels = np.where(kind_of[client_of] == 1, _CONFUSED[labels], labels)
        tests = [tests[0], (tests[0][0], _CONFUSED[test_labels])]
    return Sites((gradients(seen, 255), labels), client_of, tests, kind_of, 10)


_CONFUSED = np.array([0, 7, 2, 5, 9, 3, 6, 1, 8, 4])
TABLES = ("heart", "communities")


def table_sites(data: str, seed: int, *, alike: bool) -> Sites:
    """Return the sites of a table, a third of whose rows are for the score; ``alike`` deals all rows anew."""
    features, labels, names = _table(data)
    random = _generator("table", data, seed)
    found, site_of = np.unique(names, return_inverse=True)
    if alike:
        site_of = random.permutation(site_of)
    tested = np.zeros(len(labels), bool)
    for site in range(len(found)):
        own = random.permutation(np.flatnonzero(site_of == site))
        tested[own[: max(len(own) // 3, 1)]] = True
    tests = [(features[tested & (site_of == one)], labels[tested & (site_of == one)]) for one in range(len(found))]
    kinds = np.arange(len(found))
    return Sites((features[~tested], labels[~tested]), site_of[~tested], tests, kinds, 2, mixed=False)


@cache
def _table(data: str) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[Any]]:
    path = "tables/heart-four-sites.csv.gz" if data == "heart" else "uci/communities.csv.gz"
    with gzip.open(data_root() / path, "rt", encoding="utf-8") as file:
        _, *lines = csv.reader(file)
    if data == "heart":
        names = np.array([line[0] for line in lines])
        values = np.array([[_number(cell) for cell in line[1:-1]] for line in lines])
        low = np.array([20, 0, 1, 80, 100, 0, 0, 60, 0, -3, 1, 0, 3.0])
        high = np.array([90, 1, 4, 200, 600, 1, 2, 210, 1, 7, 3, 3, 7.0])
        labels = np.array([float(line[-1]) > 0 for line in lines])
    else:  # the first five columns are not in the header: state, county, community, its name, fold
        names = np.array([line[0] for line in lines])
        values = np.array([[_number(cell) for cell in line[5:-1]] for line in lines])
        low, high = np.zeros(values.shape[1]), np.ones(values.shape[1])
        labels = np.array([float(line[-1]) > 0.15 for line in lines])  # about half of the communities
        few = [name for name in np.unique(names) if (names == name).sum() < 6]
        names = np.where(np.isin(names, few), "others", names)
    scaled = np.clip((2 * values - low - high) / (high - low), -1, 1)
    rows = np.where(np.isnan(scaled), 0.0, scaled) / math.sqrt(values.shape[1])
    return rows.astype(np.float32), labels.astype(np.int64), names


def _number(cell: str) -> float:
    value = math.nan if cell in ("", "?") else float(cell)
    return math.nan if value == -9 else value


# ------------------------------------------------------------------------------------------------- private federations
class Federation(Task):
    """The sites of a cell as a task of a run."""

    feature_bound = 1.0

    def __init__(self, data: str, skew: str, seed: int) -> None:
        self.name = f"{data} {skew} {seed}"
        self.cell = data, skew, seed

    def squared_norm_bound(self, features: str, num_features: int, feature_bound: float) -> float:
        return 1.0

    def load(self, config: Any, root: str) -> Dataset:
        made = sites(*self.cell)
        return Dataset(*made.train, *made.tests[0], made.classes, client_of=made.client_of)


_TASKS: dict[str, Federation] = {}


def __getattr__(name: str) -> Any:
    """Federations as attributes, as run configurations name them."""
    if name not in _TASKS:
        raise AttributeError(name)
    return _TASKS[name]


@dataclass(frozen=True)
class Watched(Experiment):
    """An experiment that keeps how clients see samples, and its last model."""

    kept: dict[str, Any] = field(default_factory=dict)

    def seen_by(self, answers: Mapping[str, Any]) -> Experiment:
        self.kept["answers"] = answers
        return super().seen_by(answers)

    def evaluate(self, arrays: ArrayRecord) -> MetricRecord | None:
        self.kept["parameters"] = arrays.to_numpy_ndarrays()
        return super().evaluate(arrays)

    def scores(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Scores of the last model for rows as a site has them."""
        data = replace(self.data, test_features=rows, test_labels=np.zeros(len(rows), np.int64))
        for name, outcome in self.kept.get("answers", {}).items():
            data = self.query(name).seen(data, outcome.answer)
        return self.model.logits(self.kept["parameters"], data.test_features)


WAYS: Mapping[str, Mapping[str, Any]] = {
    "full batches": {"strategy": "full-batch"},
    "mu2, one pass": {"strategy": "mu2"},
    "noisy SGD, one pass": {"strategy": "noisy-sgd"},
}
TRUSTS = {"untrusted": "untrusted-server", "sums": "secure-aggregation"}


def private(data: str, skew: str, seed: int, settings: Mapping[str, Any]) -> dict[str, float]:
    """Train a private federation, and return its figures."""
    made = sites(data, skew, seed)
    name = f"t{len(_TASKS)}"
    _TASKS[name] = Federation(data, skew, seed)
    given = {
        "task": f"benchmarks.skew:{name}",
        "partition": "own",
        "num-clients": made.count,
        "clients-per-round": made.count,
        "seed": seed,
        "noise-quality": "fast",
        "checkpoint": False,
        **({"centring": "private"} if data not in TABLES else {}),
        **(ABSENT if skew == "absent" else {}),
        **(ABSENT_SUMS if skew == "absent" and settings.get("trust") == "secure-aggregation" else {}),
        **settings,
    }
    config = RunConfig.from_mapping(given)
    found = prepare(config)
    watched = Watched(**{one.name: getattr(found, one.name) for one in fields(Experiment)})
    run_experiment(CohortClients(watched), config, experiment=watched, engine="cohort")
    return made.figures(made.accuracies(watched.scores))


# ------------------------------------------------------------------------------------------------------ without privacy
PENALTIES = (1.0, 10.0, 100.0, 1_000.0, 10_000.0)
"""Inverse strengths of shrinkage, over the rows of a site, of rows about as long as 1."""
MOST_ALONE = 20


def alone(data: str, skew: str, seed: int) -> dict[str, float]:
    """Return the figures of single sites: converged, and the best of five penalties for each figure."""
    made = sites(data, skew, seed)
    chosen = np.unique(np.linspace(0, made.count - 1, min(MOST_ALONE, made.count)).round().astype(int))
    by_penalty = []
    for strength in PENALTIES:
        rows = [made.accuracies(logistic(*made.rows(one), strength, made.classes).scores) for one in chosen]
        on_own = np.array([row[one] for row, one in zip(rows, chosen, strict=True)])
        on_all = float(np.mean([np.average(row, weights=made.sizes) for row in rows]))
        by_penalty.append((on_all, on_own))
    own = max((one for _, one in by_penalty), key=lambda one: one.mean())
    everybody = max(one for one, _ in by_penalty)
    return {"everybody": everybody, "own": float(own.mean()), "worst": float(own.min()), "best": float(own.max())}


def in_one_place(data: str, skew: str, seed: int) -> dict[str, float]:
    """Return the figures of a model of all rows without privacy, the best of five penalties."""
    made = sites(data, skew, seed)
    models = [logistic(*made.train, strength / 10, made.classes) for strength in PENALTIES]
    return max((made.figures(made.accuracies(one.scores)) for one in models), key=lambda one: one["everybody"])


ROUNDS, EPOCHS, BATCH, RATES, PULL = 30, 2, 10, (1.0, 4.0, 16.0), 0.01


def averaged(data: str, skew: str, seed: int, way: str) -> dict[str, float]:
    """Return the figures of FedAvg, FedProx or SCAFFOLD, the best of three steps.

    30 rounds of two local epochs in batches of 10, all sites in each. FedProx pulls towards the global model with 0.01.
    SCAFFOLD (Karimireddy et al., 2020, option II) corrects each local step by control variates.
    """
    made = sites(data, skew, seed)
    found = []
    for rate in RATES:
        weights = _averaged(made, seed, way, rate, absent=skew == "absent")
        found.append(made.figures(made.accuracies(lambda rows, weights=weights: rows @ weights[:-1] + weights[-1])))
    return max(found, key=lambda one: one["everybody"])


def _averaged(made: Sites, seed: int, way: str, rate: float, *, absent: bool) -> NDArray[np.float64]:
    parts = [made.rows(site) for site in range(made.count)]
    parts = [(np.hstack([rows, np.ones((len(rows), 1))]), np.eye(made.classes)[labels]) for rows, labels in parts]
    world = np.zeros((parts[0][0].shape[1], made.classes))
    control, controls = np.zeros_like(world), np.zeros((made.count, *world.shape))
    shares = made.sizes / made.sizes.sum()
    random = _generator(way, seed)
    for _ in range(ROUNDS):
        here = [site for site in range(made.count) if not absent or random.random() < 0.5]
        moved, changed, heard = np.zeros_like(world), np.zeros_like(world), 0.0
        for site in here:
            rows, targets = parts[site]
            own, steps = world.copy(), 0
            correction = control - controls[site] if way == "SCAFFOLD" else 0.0
            for _ in range(EPOCHS):
                order = random.permutation(len(rows))
                for start in range(0, len(rows), BATCH):
                    batch = order[start : start + BATCH]
                    missed = softmax(rows[batch] @ own, axis=1) - targets[batch]
                    step = rows[batch].T @ missed / len(batch) + correction
                    own -= rate * (step + (PULL * (own - world) if way == "FedProx" else 0.0))
                    steps += 1
            moved += shares[site] * (own - world)
            heard += shares[site]
            if way == "SCAFFOLD":
                new = controls[site] - control + (world - own) / (steps * rate)
                changed += (new - controls[site]) / made.count
                controls[site] = new
        if heard:
            world += moved / heard
            control += changed
    return world


REFERENCES: Mapping[str, Callable[[str, str, int], dict[str, float]]] = {
    "one site alone": alone,
    "all data in one place": in_one_place,
    **{
        way: lambda data, skew, seed, way=way: averaged(data, skew, seed, way)
        for way in ("FedAvg", "FedProx", "SCAFFOLD")
    },
}


# ------------------------------------------------------------------------------------------------------------- streams
FEW_ASKED = 5
STREAMS = ("alike", "Dirichlet 1", "Dirichlet 0.3", "Dirichlet 0.1", "one class")
STREAM_WAYS: Mapping[str, Mapping[str, Any]] = {
    "all sites in each round": {},
    "5 of 20, drawn": {"clients-per-round": FEW_ASKED, "sampling": "uniform"},
    "5 of 20, in turn": {"clients-per-round": FEW_ASKED, "sampling": "balanced"},
    "5 of 20, in turn, not centred": {"clients-per-round": FEW_ASKED, "sampling": "balanced", "centring": "none"},
}


def heterogeneity(data: str, skew: str, seed: int) -> dict[str, float]:
    """Return the root mean square, over sites, of their gradients' distance from the mean one: xi.

    And that of single samples' gradients, which is what a stream has at least. Both at the model of zeros, where most
    differ the most, in units of the longest row.
    """
    made = sites(data, skew, seed)
    rows, labels = made.train
    missed = 1.0 / made.classes - np.eye(made.classes)[labels]
    seen = rows - rows.mean(axis=0)
    gradients = [seen[made.client_of == one].T @ missed[made.client_of == one] for one in range(made.count)]
    means = [one / size for one, size in zip(gradients, made.sizes, strict=True)]
    centre = np.average(means, axis=0, weights=made.sizes)
    xi = np.average([np.square(one - centre).sum() for one in means], weights=made.sizes)
    of_samples = (np.square(seen).sum(axis=1) * np.square(missed).sum(axis=1)).mean() - np.square(centre).sum()
    return {"xi": float(math.sqrt(xi)), "sigma": float(math.sqrt(of_samples))}


# ----------------------------------------------------------------------------------------------------------------- grid
Key = tuple[str, str, str, str, float]


Cell = tuple[Key, range, Callable[[str, str, int], dict[str, float]]]


def cells() -> Iterator[Cell]:
    """Yield every cell's key (data, skew, way, trust, epsilon), its seeds and what measures a seed.

    What the first tables show comes first.
    """
    some = ("alike", "Dirichlet 0.1", "one class")
    places = [
        *(("digits", skew) for skew in SKEWS),
        *((data, skew) for data in TABLES for skew in ("alike", "own sites")),
        *((data, skew) for data in ("cifar", "mnist") for skew in some),
    ]
    for data, skew in places:
        yield from _private_cells(data, skew, SHOWN)
        for name in ("one site alone", "FedAvg"):
            yield (data, skew, name, "", 0.0), SEEDS, REFERENCES[name]
    for skew in STREAMS:
        yield ("digits", skew, "xi", "", 0.0), SEEDS, heterogeneity
        for way, settings in STREAM_WAYS.items():
            for epsilon in (0.0, 8.0):
                given = {"strategy": "mu2", **settings, **({"epsilon": epsilon} if epsilon else {"mechanism": "none"})}
                yield ("digits", skew, f"mu2, {way}", "untrusted", epsilon), SEEDS, _private(given)
    for data, skew in places:
        for epsilon in EPSILONS if data in ("digits", *TABLES) else ():
            yield from _private_cells(data, skew, epsilon)
        for name, reference in REFERENCES.items():
            yield (data, skew, name, "", 0.0), SEEDS, reference


def _private_cells(data: str, skew: str, epsilon: float) -> Iterator[Cell]:
    seeds = MORE_SEEDS if epsilon < 1 and skew != "1 to 5 records" else SEEDS
    for way, settings in WAYS.items():
        for trust, kind in TRUSTS.items():
            yield (data, skew, way, trust, epsilon), seeds, _federated({**settings, "trust": kind}, epsilon)


def _federated(settings: Mapping[str, Any], epsilon: float) -> Callable[[str, str, int], dict[str, float]]:
    return _private({**settings, "epsilon": epsilon})


def _private(settings: Mapping[str, Any]) -> Callable[[str, str, int], dict[str, float]]:
    return lambda data, skew, seed: private(data, skew, seed, settings)


def measure(path: Path, only: str = "") -> list[dict[str, Any]]:
    """Measure the cells that the document lacks, and write it after each of them."""
    document: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    known: dict[Key, dict[str, Any]] = {_key(row): row for row in document}
    for key, seeds, measured in cells():
        if only and only not in key:
            continue
        row = known.get(key, {})
        if not row:
            row = {**dict(zip(("data", "skew", "way", "trust", "epsilon"), key, strict=True)), "seeds": []}
            document.append(row)
            known[key] = row
        missing = [seed for seed in seeds if seed not in row["seeds"]]
        for seed in missing:
            for name, value in measured(key[0], key[1], seed).items():
                row.setdefault(name, []).append(round(value, 4))
            row["seeds"].append(seed)
        if not missing:
            continue
        print(*key, *(f"{name} {_shown(row[name])}" for name in row if name in ("everybody", "own")), flush=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def _key(row: Mapping[str, Any]) -> Key:
    return row["data"], row["skew"], row["way"], row["trust"], row["epsilon"]


def _shown(runs: Sequence[float]) -> str:
    mean, error = _spread(runs)
    return f"{mean:.1f} ± {error:.1f}"


# ------------------------------------------------------------------------------------------------- tables and pictures
Document = Sequence[Mapping[str, Any]]
TERMS = (
    "Epsilon at delta = 1e-05, for replacement of one sample of one client, against the server and everybody else; "
    "noise on each client; over all releases of a run. Under sums that holds if one helper and half of the clients of "
    "each sum are honest (three where clients are absent). Simulated with seeded keys and fast noise, which guarantees "
    "nothing. What has no epsilon is not private."
)
SHOWN = 2.0
"""Epsilon of the tables by skew."""
COLUMNS: Mapping[str, tuple[str, str, float]] = {
    "full batches, sums": ("full batches", "sums", SHOWN),
    "mu2, sums": ("mu2, one pass", "sums", SHOWN),
    "noisy SGD, sums": ("noisy SGD, one pass", "sums", SHOWN),
    "full batches, untrusted": ("full batches", "untrusted", SHOWN),
    "mu2, untrusted": ("mu2, one pass", "untrusted", SHOWN),
    "FedAvg": ("FedAvg", "", 0.0),
    "FedProx": ("FedProx", "", 0.0),
    "SCAFFOLD": ("SCAFFOLD", "", 0.0),
    "one site alone": ("one site alone", "", 0.0),
}


def _rows(document: Document) -> dict[Key, Mapping[str, Any]]:
    return {_key(row): row for row in document}


def _places(document: Document) -> list[tuple[str, str]]:
    """Return data and skew of all rows, in the order of the tables."""
    order = [("digits", *TABLES, "mnist", "cifar"), (*SKEWS, "own sites")]
    found = {(row["data"], row["skew"]) for row in document}
    return sorted(found, key=lambda place: [names.index(name) for names, name in zip(order, place, strict=True)])


def everybody(document: Document) -> str:
    """Accuracy on everybody's data by skew, percent, as Markdown."""
    return _by_skew(document, list(COLUMNS), lambda row: _shown(row["everybody"]))


def own(document: Document) -> str:
    """Accuracy on a site's own distribution by skew: the mean over sites, and the worst and the best site."""
    names = ["full batches, sums", "mu2, sums", "full batches, untrusted", "FedAvg", "SCAFFOLD", "one site alone"]
    return _by_skew(
        document, names, lambda row: f"{fmean(row['own']):.1f} ({fmean(row['worst']):.0f} to {fmean(row['best']):.0f})"
    )


def _by_skew(document: Document, names: Sequence[str], shown: Callable[[Mapping[str, Any]], str]) -> str:
    rows = _rows(document)
    lines = [f"| data | sites | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for data, skew in _places(document):
        found = [rows.get((data, skew, *COLUMNS[name])) for name in names]
        if any(found):
            cells = ["" if row is None else shown(row) for row in found]
            lines.append(f"| {data} | {skew} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", TERMS])


def by_epsilon(document: Document) -> str:
    """Accuracy on everybody's data by epsilon, of sites that are alike and of sites that differ."""
    rows = _rows(document)
    heads = [f"{way.partition(',')[0]}, {trust}" for trust in TRUSTS for way in WAYS]
    lines = [f"| data | sites | ε | {' | '.join(heads)} |", f"|---|---|---|{'---|' * len(heads)}"]
    for data, skew in _places(document):
        if skew not in ("alike", "Dirichlet 0.1", "one class", "own sites"):
            continue
        for epsilon in EPSILONS:
            found = [rows.get((data, skew, way, trust, epsilon)) for trust in TRUSTS for way in WAYS]
            if all(found):
                cells = [_shown(row["everybody"]) for row in found if row]
                lines.append(f"| {data} | {skew} | {epsilon:g} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", TERMS])


def streams(document: Document) -> str:
    """Accuracy of mu2's streams on everybody's data, without noise and at epsilon 8, next to xi."""
    rows = _rows(document)
    lines = [f"| sites | xi / sigma | {' | '.join(STREAM_WAYS)} |", f"|---|---|{'---|' * len(STREAM_WAYS)}"]
    for skew in STREAMS:
        measured = rows.get(("digits", skew, "xi", "", 0.0))
        found = [
            [rows.get(("digits", skew, f"mu2, {way}", "untrusted", epsilon)) for epsilon in (0.0, 8.0)]
            for way in STREAM_WAYS
        ]
        if measured is None or not all(all(pair) for pair in found):
            continue
        ratio = fmean(xi / sigma for xi, sigma in zip(measured["xi"], measured["sigma"], strict=True))
        cells = [" / ".join(_shown(one["everybody"]) for one in pair if one) for pair in found]
        lines.append(f"| {skew} | {ratio:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


PICTURE = DEFAULT.parents[1] / "pictures" / "sites-that-differ.svg"
_LABELS = ("alike", "Dirichlet 1", "Dirichlet 0.3", "Dirichlet 0.1", "two classes", "one class")
_COLOURS = {
    "full batches, sums": "#4c9f70",
    "full batches, untrusted": "#0b3c49",
    "mu2, sums": "#8a5fa8",
    "FedAvg": "#b0704f",
    "one site alone": "#8a1c1c",
}


def draw(document: Document, path: Path) -> None:
    """Draw the accuracy on everybody's data and on a site's own against the skew of labels, into an SVG."""
    from matplotlib import rc_context

    rows = _rows(document)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "murmurfl", "font.family": "sans-serif"}):
        figure = empty_figure(10, 4.4)
        for axes, (part, title) in zip(
            figure.subplots(1, 2, sharey=True),
            (("everybody", "on everybody's data"), ("own", "on a site's own mix of classes, mean over sites")),
            strict=True,
        ):
            for name, colour in _COLOURS.items():
                found = [rows[("digits", skew, *COLUMNS[name])] for skew in _LABELS]
                means, errors = zip(*(_spread(row[part]) for row in found), strict=True)
                axes.errorbar(range(len(_LABELS)), means, yerr=errors, color=colour, label=name, marker="o", capsize=2)
                if part == "own":
                    axes.fill_between(
                        range(len(_LABELS)),
                        [fmean(row["worst"]) for row in found],
                        [fmean(row["best"]) for row in found],
                        color=colour,
                        alpha=0.08,
                        linewidth=0,
                    )
            axes.set_xticks(range(len(_LABELS)), _LABELS, rotation=20)
            axes.set_title(title, fontsize=10)
            axes.grid(alpha=0.3)
        figure.axes[0].set_ylabel("accuracy, %")
        figure.axes[0].legend(fontsize=8, frameon=False)
        caption = (
            f"Digits, 20 sites, epsilon = {SHOWN:g} where private. Shaded: from the worst to the best site. {TERMS}"
        )
        figure.supxlabel(textwrap.fill(caption, 150), fontsize=7, color="#444444")
        figure.savefig(path, metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def _spread(runs: Sequence[float]) -> tuple[float, float]:
    return fmean(runs), stdev(runs) / math.sqrt(len(runs)) if len(runs) > 1 else 0.0


def main() -> None:
    """Measure and write, or draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.skew", description=__doc__)
    parser.add_argument("--json", type=Path, default=DEFAULT)
    parser.add_argument("--only", default="", help="one data set, kind of skew or way")
    arguments = parser.parse_args()
    measure(arguments.json, arguments.only)


if __name__ == "__main__":
    from benchmarks import skew  # its tasks are found by the module's name, which `python -m` does not give it

    skew.main()
