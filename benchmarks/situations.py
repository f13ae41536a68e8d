"""Thirty situations that presets and planner are judged by, and the grid of settings that they are held against.

``python -m benchmarks.situations grid`` makes what the best of a grid of settings reaches, which takes hours, ``auto``
what ``strategy = auto`` reaches, and ``table`` shows both. Finished parts lie in ``docs/results/situations.json`` and
are not made again. Noise is of ``fast`` quality: the same law, in a fraction of the time, and no guarantee.

A situation is a data set or a generator, a number of clients, an epsilon, and whether samples stay (full batches may
use each in every round) or come as a stream (each is used once). Values are scaled by public bounds alone; in *wide*
situations the bounds are ten times as far apart as they need to be. Half of the situations are *kept*: no preset and no
rule of the planner may be chosen by them. Seeds of the grid, of its best cells and of the planner are apart.

What is scored: accuracy in percent; of a regression 100 R^2. A test set of fewer than 1,000 rows is drawn anew for each
seed, so that a mean over seeds is one over splits.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from murmurfl.app import simulate
from murmurfl.app.data.task import Dataset, Task
from murmurfl.app.runs.result import RunResult
from murmurfl.privacy import ConfigurationError, derived_seed, gdp_mu
from numpy.typing import NDArray

DEFAULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "situations.json"
BIAS = 1.0
"""What the model has beside the features: softmax regression has one constant input."""
WIDE = 10.0
GRID_SEEDS, BEST_SEEDS, AUTO_SEEDS = 3, 5, 5
SPLITS = 20
"""Of test sets with fewer than ``FEW`` rows."""
FEW = 1000
DELTA = 1e-5
TERMS = (
    f"Epsilon at delta = {DELTA:g}, for replacement of one sample of one client, against the server and everybody "
    "else; noise on each client; over all releases of a run. Simulated with seeded keys."
)
"""What the epsilons of a table of runs of untrusted federations are true of."""
BEST = 3
"""So many of the best cells are made again, on fresh seeds."""

Rows = tuple[NDArray[np.floating], NDArray[Any]]


# ------------------------------------------------------------------------------------------------ data and generators
def _generator(*parts: object) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=derived_seed("situations", *parts)))


def numbers(
    values: NDArray[np.floating], low: NDArray[Any] | float, high: NDArray[Any] | float
) -> NDArray[np.floating]:
    """Columns brought from public bounds to -1 .. 1."""
    return np.clip((2 * values - (high + low)) / np.subtract(high, low), -1, 1)


def one_hot(codes: NDArray[np.integer], categories: int) -> NDArray[np.floating]:
    """Return a column of categories as a row of norm 1; a blank (-1) is all zeros."""
    return (codes[:, None] == np.arange(categories)).astype(np.float64)


def _bundled(name: str) -> Rows:
    from sklearn import datasets

    data = getattr(datasets, f"load_{name}")()
    low, high = data.data.min(axis=0), data.data.max(axis=0)  # of public data: what anybody knows of such measurements
    return numbers(data.data, low, high), data.target


def _digits() -> Rows:
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.data / 16, data.target


def _clouds(norm: float, spread: float, classes: int, width: int, skewed: bool, seed: int) -> Rows:
    """Gaussian clouds around an offset mean, rows cut to ``norm``."""
    generator = _generator("clouds", norm, spread, classes, width, skewed, seed)
    share = np.linspace(1, 3 if skewed else 1, classes)
    labels = generator.choice(classes, 12_000, p=share / share.sum())
    centres = generator.standard_normal((classes, width)) * spread
    rows = centres[labels] + generator.standard_normal((len(labels), width)) + generator.standard_normal(width)
    rows *= norm / np.quantile(np.linalg.norm(rows, axis=1), 0.9)
    return rows * np.minimum(1, norm / np.linalg.norm(rows, axis=1))[:, None], labels


def _people(kind: str) -> Rows:
    """Return a made-up table of people with numbers, categories and blanks, and whether something happens to each."""
    generator = _generator("people", kind)
    count, base = 8000, {"a": 0.0, "b": -1.2, "c": 0.5}[kind]
    age = generator.integers(18, 95, count).astype(float)
    visits = generator.poisson(np.exp(generator.normal(0.5, 0.8, count)))
    pressure = generator.normal(120 + age / 4, 15)
    ward, insurance = generator.integers(0, 7, count), generator.choice(4, count, p=(0.5, 0.3, 0.15, 0.05))
    blank = generator.random(count) < 0.08
    risk = base + 0.03 * (age - 55) + 0.5 * np.log1p(visits) - 0.9 + 0.02 * (pressure - 135)
    risk += np.array([0.0, 0.4, -0.5, 0.9, 0.1, -0.8, 0.3])[ward] + np.array([0.0, -0.3, 0.6, 1.0])[insurance]
    if kind == "c":  # what matters is a product, which a linear model only sees the half of
        risk += 0.03 * (age - 55) * (ward == 3)
    labels = (generator.random(count) < 1 / (1 + np.exp(-2 * risk))).astype(np.int64)
    ward = np.where(blank, -1, ward)
    columns = [
        numbers(age, 0, 110)[:, None],
        numbers(np.minimum(visits, 30).astype(float), 0, 30)[:, None],
        numbers(pressure, 60, 220)[:, None],
        one_hot(ward, 7),
        one_hot(insurance, 4),
    ]
    return np.concatenate(columns, axis=1), labels


def _texts() -> Rows:
    """Made-up messages in six topics: hashed character n-grams of words drawn from each topic's own frequencies."""
    from sklearn.feature_extraction.text import HashingVectorizer

    generator = _generator("texts")
    letters = np.array(list("abcdefghijklmnoprstuvw"))
    words = np.array(["".join(generator.choice(letters, generator.integers(3, 9))) for _ in range(900)])
    common = generator.dirichlet(np.full(len(words), 0.1))
    topics = [0.75 * common + 0.25 * generator.dirichlet(np.full(len(words), 0.05)) for _ in range(6)]
    labels = generator.integers(0, 6, 9000)
    messages = [" ".join(generator.choice(words, 25, p=topics[label])) for label in labels]
    hashed = HashingVectorizer(analyzer="char_wb", ngram_range=(3, 3), n_features=1024, norm="l2", alternate_sign=True)
    return hashed.transform(messages).toarray(), labels


def _root() -> Path:
    root = os.environ.get("MURMURFL_DATA", "")
    if not root:
        raise ConfigurationError("Expected the environment variable MURMURFL_DATA for this situation, got none.")
    return Path(root)


def _cifar() -> Rows:
    """Return a subset of CIFAR-10, in means over 4 x 4 pixels of each colour."""
    found = np.load(_root() / "cifar10" / "cifar10-subset.npz")
    images = found["images"].reshape(-1, 8, 4, 8, 4, 3).mean(axis=(2, 4)) / 255
    return images.reshape(len(images), -1), found["labels"]


def _communities() -> Rows:
    """Crime in 1,994 communities, of values from 0 to 1, as a regression; blanks count as the middle."""
    with gzip.open(_root() / "uci" / "communities.csv.gz", "rt") as file:
        rows = list(csv.reader(file))[1:]
    table = np.array([[float(cell) if cell not in ("?", "") else 0.5 for cell in row[5:]] for row in rows])
    return numbers(table[:, :-1], 0.0, 1.0), table[:, -1] - 0.5


def _widened(features: NDArray[np.floating], name: str) -> NDArray[np.floating]:
    """Numbers as bounds ten times as far apart show them: closer together, around a middle of their own."""
    middles = _generator("wide", name).uniform(-1 + 1 / WIDE, 1 - 1 / WIDE, features.shape[1])
    are_categories = np.isin(features, (0.0, 1.0)).all(axis=0)
    return np.where(are_categories, features, features / WIDE + middles)


class Judged(Task):
    """A situation's data: a fifth is for the test, and another fifth for each seed where that is few rows."""

    reads = frozenset({"seed"})

    def __init__(self, name: str, rows: Callable[[], Rows], bound: float | None = None, *, wide: bool = False) -> None:
        self.name, self._rows, self._wide = name, cache(rows), wide
        self.bound = bound
        if bound is not None:
            self.feature_bound = bound

    def rows(self) -> Rows:
        """Features within the declared norm, and labels."""
        features, labels = self._rows()
        if self._wide:
            features = _widened(features, self.name)
        norm = self.norm()
        lengths = np.maximum(np.linalg.norm(features, axis=1), 1e-12)
        return features * np.minimum(1, norm / lengths)[:, None], labels

    @cache  # noqa: B019 - one object a situation, which lasts as long as the process
    def norm(self) -> float:
        """R: what public bounds say a row's norm is at most."""
        if self.bound is not None:
            return self.bound
        width = self._rows()[0].shape[1]
        return math.sqrt(width)

    def squared_norm_bound(self, features: str, num_features: int, feature_bound: float) -> float:
        return self.norm() ** 2

    def load(self, config: Any, root: str) -> Dataset:
        features, labels = self.rows()
        test = len(labels) // 5
        seed = config.seed if test < FEW else 0
        order = _generator("split", seed).permutation(len(labels))
        train, test_rows = order[test:], order[:test]
        classes = 1 if labels.dtype.kind == "f" else int(labels.max()) + 1
        kind = np.float64 if classes == 1 else np.int64
        x = features.astype(np.float32)
        return Dataset(x[train], labels[train].astype(kind), x[test_rows], labels[test_rows].astype(kind), classes)


TASKS: Mapping[str, Judged] = {
    task.name: task
    for task in (
        Judged("wine", lambda: _bundled("wine")),
        Judged("iris", lambda: _bundled("iris")),
        Judged("breast-cancer", lambda: _bundled("breast_cancer")),
        Judged("breast-cancer-wide", lambda: _bundled("breast_cancer"), wide=True),
        Judged("digits", _digits),
        Judged("digits-wide", _digits, wide=True),
        Judged("clouds-of-1", lambda: _clouds(1.0, 0.4, 5, 60, False, 1), 1.0),
        Judged("clouds-of-10", lambda: _clouds(10.0, 0.3, 8, 40, True, 2), 10.0),
        Judged("clouds-of-1-wide", lambda: _clouds(1.0, 0.6, 3, 30, False, 3), 10.0),
        Judged("clouds-of-tenths", lambda: _clouds(0.1, 0.5, 4, 80, True, 4), 0.1),
        Judged("clouds-of-5-wide", lambda: _clouds(5.0, 0.5, 6, 25, True, 5), 50.0),
        Judged("people-a", lambda: _people("a"), math.sqrt(5)),
        Judged("people-a-wide", lambda: _people("a"), wide=True),
        Judged("people-b", lambda: _people("b"), math.sqrt(5)),
        Judged("people-c-wide", lambda: _people("c"), wide=True),
        Judged("texts", _texts, 1.0),
        Judged("cifar", _cifar),
        Judged("communities", _communities),
    )
}


def __getattr__(name: str) -> Any:
    """Tasks as attributes, as run configurations name them: ``benchmarks.situations:people_a``."""
    if (task := TASKS.get(name.replace("_", "-"))) is None:
        raise AttributeError(name)
    return task


# ------------------------------------------------------------------------------------------------------- situations
@dataclass(frozen=True)
class Situation:
    """What is asked for.

    Parameters
    ----------
    data : str
        A name in :data:`TASKS`, or a built-in task with features, ``mnist/soft-gradients``.
    clients : int
        M.
    epsilon : float
        At delta = 1e-5.
    stream : bool
        Whether each sample is used once.
    kept : bool
        Whether it is kept out of every choice.
    samples : int
        Training samples that are used; 0 for all.
    """

    data: str
    clients: int
    epsilon: float
    stream: bool = False
    kept: bool = False
    samples: int = 0

    @property
    def name(self) -> str:
        """A name for tables and files."""
        how = "stream" if self.stream else "standing"
        return f"{self.data}, {self.clients} clients, epsilon {self.epsilon:g}, {how}"

    @property
    def settings(self) -> dict[str, Any]:
        """As run-config keys."""
        name, _, features = self.data.partition("/")
        if name in TASKS:
            settings: dict[str, Any] = {"task": f"benchmarks.situations:{name.replace('-', '_')}"}
        else:
            settings = {"task": name, "features": features or "pixels"}
        if name == "communities":
            settings["model"] = "ridge"
        if self.samples:
            settings["training-samples"] = self.samples
        many = {"num-clients": self.clients, "clients-per-round": self.clients}
        return {**settings, **many, "epsilon": self.epsilon, "evaluate-every": 10_000, "noise-quality": "fast"}

    @property
    def splits(self) -> bool:
        """Whether each seed has a test set of its own."""
        name = self.data.partition("/")[0]
        return name in TASKS and len(TASKS[name].rows()[1]) // 5 < FEW


SITUATIONS = (
    Situation("wine", 5, 8.0),
    Situation("iris", 5, 8.0, stream=True),
    Situation("breast-cancer", 10, 3.0),
    Situation("breast-cancer-wide", 10, 8.0, stream=True),
    Situation("digits", 10, 3.0, stream=True),
    Situation("digits", 10, 8.0),
    Situation("clouds-of-1", 100, 1.0, stream=True),
    Situation("clouds-of-10", 100, 1.0),
    Situation("clouds-of-1-wide", 1000, 0.5),
    Situation("mnist", 100, 1.0, samples=20_000),
    Situation("mnist/soft-gradients", 100, 3.0, stream=True, samples=20_000),
    Situation("people-a", 50, 2.0, stream=True),
    Situation("people-a-wide", 50, 2.0),
    Situation("recidivism", 10, 2.0),
    Situation("texts", 100, 3.0, stream=True),
    Situation("wine", 5, 3.0, stream=True, kept=True),
    Situation("iris", 5, 8.0, kept=True),
    Situation("breast-cancer", 10, 3.0, stream=True, kept=True),
    Situation("digits-wide", 10, 3.0, kept=True),
    Situation("clouds-of-tenths", 100, 3.0, stream=True, kept=True),
    Situation("clouds-of-5-wide", 20, 2.0, kept=True),
    Situation("mnist", 1000, 3.0, stream=True, kept=True, samples=20_000),
    Situation("mnist/soft-gradients", 1000, 0.3, kept=True, samples=20_000),
    Situation("cifar", 50, 8.0, stream=True, kept=True),
    Situation("credit-default", 100, 1.0, kept=True),
    Situation("credit-default", 100, 1.0, stream=True, kept=True),
    Situation("people-b", 200, 1.0, stream=True, kept=True),
    Situation("people-c-wide", 20, 4.0, stream=True, kept=True),
    Situation("texts", 100, 1.0, stream=True, kept=True),
    Situation("communities", 10, 8.0, kept=True),
)


# ------------------------------------------------------------------------------------------------------------- grid
def norm_of(situation: Situation) -> float:
    """R with the bias: what clips and steps of the grid are in units of."""
    name, _, features = situation.data.partition("/")
    if name in TASKS:
        return math.hypot(TASKS[name].norm(), BIAS)
    if name == "mnist":
        return math.hypot(4.0 if features else 9.2, BIAS)  # pixels: the root mean square of a row
    return 1.0  # tables of people: rows of length 1, the constant among them


def cells(situation: Situation, fewest: int) -> Iterator[dict[str, Any]]:
    """Yield settings to try: clip in R, step in 1 / (clip R), rounds; at least 75."""
    norm = norm_of(situation)
    if not situation.stream:
        travels = (0.02, 0.06, 0.2, 0.6) if situation.data == "communities" else (2, 6, 20, 60)
        for rounds, share, travel, momentum in itertools.product((3, 6, 12, 24, 48), (0.1, 0.4), travels, (0.7, 0.9)):
            clip = share * norm
            yield {
                "strategy": "full-batch",
                "num-rounds": rounds,
                "clip-norm": clip,
                "learning-rate": travel / (clip * norm),
                "strategy.momentum": momentum,
            }
        return
    for rounds in (1, 2, 4, 8, 16, 32):
        if rounds > fewest:
            break
        batch = {"num-rounds": rounds, "batch-size": fewest // rounds, "centring": "none"}  # a sample has one use
        for share, travel in itertools.product((0.15, 0.5, 1.5), (10, 40, 160, 640, 2560)):
            clip = share * norm
            step = travel / (clip * norm * rounds**2)
            yield {
                "strategy": "mu2",
                "clip-norm": clip,
                "learning-rate": step,
                "strategy.projection-radius": 5e8,
                **batch,
            }
        for share, travel in itertools.product((0.1, 0.4), (2, 6, 20, 60)):
            clip = share * norm
            step = travel / (clip * norm)
            yield {
                "strategy": "noisy-sgd",
                "clip-norm": clip,
                "learning-rate": step,
                "strategy.projection-radius": 5e8,
                **batch,
            }


def score(situation: Situation, settings: Mapping[str, Any], seed: int) -> float:
    """Of one run: accuracy in percent, or 100 R^2."""
    wanted = {**situation.settings, **settings, "seed": seed}
    result = simulate({name: value for name, value in wanted.items() if name != "epsilon" or value})
    if situation.data != "communities":
        return 100 * float(result.accuracy or 0.0)
    return 100 * _r2(result)


def _r2(result: RunResult) -> float:
    dataset = TASKS["communities"].load(result.experiment.config, "")
    labels = np.asarray(dataset.test_labels, np.float64)
    predicted = np.asarray(dataset.test_features, np.float64) @ np.asarray(result.parameters[0], np.float64).ravel()
    return float(1 - np.mean((predicted - labels) ** 2) / np.var(labels))


def majority(situation: Situation) -> float:
    """Return what always naming the most frequent class scores, on the training samples."""
    from murmurfl.app.data.loading import load_dataset
    from murmurfl.app.settings.run_config import RunConfig

    labels = load_dataset(RunConfig.from_mapping(situation.settings)).train_labels
    return 0.0 if labels.dtype.kind == "f" else 100 * float(np.bincount(labels).max() / len(labels))


def fewest_samples(situation: Situation) -> int:
    """Training samples of the client with the fewest."""
    from murmurfl.app.data.loading import load_dataset
    from murmurfl.app.settings.run_config import RunConfig

    return len(load_dataset(RunConfig.from_mapping(situation.settings)).train_labels) // situation.clients


def condensed(situation: Situation, cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same run with one client that has all samples.

    As much noise in a round's mean, for a fraction of the time.

    The mean of M clients' releases of b samples has noise of 2 S / (mu b sqrt(M)), and one client's release of M b
    samples as much at mu / sqrt(M).
    """
    clients = situation.clients
    alone = {"num-clients": 1, "clients-per-round": 1, "epsilon": 0.0}
    settings = {**cell, **alone, "mu": gdp_mu(situation.epsilon, DELTA) / math.sqrt(clients)}
    if "batch-size" in cell:
        settings["batch-size"] = cell["batch-size"] * clients
    return settings


def grid(situation: Situation) -> dict[str, Any]:
    """Return the best cell of the grid.

    Found with one client, and chosen among the best on fresh seeds with all clients.
    """
    tried = list(cells(situation, fewest_samples(situation)))
    seeds = range(1, 1 + (SPLITS if situation.splits else GRID_SEEDS))
    scores = [fmean(score(situation, condensed(situation, cell), seed) for seed in seeds) for cell in tried]
    found = sorted(zip(scores, tried, strict=True), key=lambda one: -one[0])
    fresh = range(101, 101 + (SPLITS if situation.splits else BEST_SEEDS))
    again = [([score(situation, cell, seed) for seed in fresh], cell) for _, cell in found[:BEST]]
    runs, cell = max(again, key=lambda one: fmean(one[0]))
    shown = " ".join(f"{one:.1f}" for one in scores)
    return {"cells": shown, "runs": runs, "settings": cell, "majority": majority(situation)}


def auto(situation: Situation) -> dict[str, Any]:
    """Return what ``strategy = auto`` reaches."""
    own = {
        "strategy": "auto",
        **({"strategy.stream": True, "strategy.sample-uses": "once"} if situation.stream else {}),
    }
    fresh = range(201, 201 + (SPLITS if situation.splits else AUTO_SEEDS))
    return {"runs": [score(situation, own, seed) for seed in fresh]}


def table(document: Mapping[str, Any]) -> str:
    """Return a row a situation: the best of the grid, auto, and what it misses."""
    lines = ["| situation | majority | best of the grid | auto | miss | kept |", "|---|---|---|---|---|---|"]
    misses = []
    for one in SITUATIONS:
        best, chosen = document.get("grid", {}).get(one.name), document.get("auto", {}).get(one.name)
        if best is None or chosen is None:
            continue
        miss = fmean(best["runs"]) - fmean(chosen["runs"])
        misses.append(miss)
        kept = "yes" if one.kept else ""
        found = f"{_shown(best['runs'])} | {_shown(chosen['runs'])} | {miss:.1f} | {kept}"
        lines.append(f"| {one.name} | {best['majority']:.1f} | {found} |")
    if not misses:
        return "Nothing was made yet."
    lost = [max(miss, 0.0) for miss in misses]
    said = f"mean {fmean(lost):.1f}, median {median(lost):.1f}, worst {max(lost):.1f} points"
    return "\n".join([*lines, "", f"Misses of {len(misses)} situations, with 0 for gains: {said}. {TERMS}"])


def _shown(runs: list[float]) -> str:
    return f"{fmean(runs):.1f} ± {stdev(runs) / math.sqrt(len(runs)):.1f}"


def main() -> None:
    """Make what is missing of a part, and write it down situation by situation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.situations", description=__doc__)
    parser.add_argument("part", choices=("grid", "auto", "table"))
    parser.add_argument("--json", type=Path, default=DEFAULT)
    parser.add_argument("--only", default="", help="situations with this in their names")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    document = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    if arguments.part != "table":
        made = document.setdefault(arguments.part, {})
        wanted = [one for one in SITUATIONS if arguments.only in one.name and one.name not in made]
        with ProcessPoolExecutor(arguments.workers) as pool:
            for one, found in zip(wanted, pool.map({"grid": grid, "auto": auto}[arguments.part], wanted), strict=True):
                made[one.name] = found
                arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))


if __name__ == "__main__":
    main()
