"""Streams whose distribution moves, and what keeps up with it: ``python -m benchmarks.drift``.

Writes docs/results/drift.json, in about eight minutes on one core. A stream comes in portions, each released and
trained on once. Its samples have a position u from 0 to 1, and so has the test set by which the model of a round is
judged: that of the moment. What moves, at u = 1/2 or slowly from 0 to 1:

* ``classes, suddenly`` and ``classes, slowly``: each class comes to mean the next one,
* ``features, suddenly``: columns change places; ``features, slowly``: pairs of them turn by 90 degrees,
* ``shares, slowly``: the first half of the classes becomes rare and the other frequent.

Beside them stand streams of fewer portions in which nothing moves. Noisy SGD and online learning have the best of eight
clips and steps for every stream, found with a seed of its own; DP-mu^2-FL has one rule for all. Noise is of ``fast``
quality: the same law, and no guarantee.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from murmurfl.app.data.partition import Partition
from murmurfl.app.data.task import Dataset, Task
from murmurfl.app.engines.cohort import CohortClients
from murmurfl.app.runs.experiment import Experiment, prepare
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import derived_seed
from numpy.typing import NDArray

from .situations import TASKS, Rows

DEFAULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "drift.json"
ROUNDS, WINDOW = 24, 8
FEWER = (4, 8, 12)
"""Portions of streams in which nothing moves."""
SEEDS, SEARCHED = range(1, 6), 101
MOVED: Mapping[str, tuple[str, bool]] = {
    "nothing": ("", False),
    "classes, suddenly": ("classes", True),
    "classes, slowly": ("classes", False),
    "features, suddenly": ("features", True),
    "features, slowly": ("features", False),
    "shares, slowly": ("shares", False),
}
"""What moves in a stream, and whether suddenly."""
STREAMS: Mapping[str, Mapping[str, Any]] = {
    "digits": {"num-clients": 10, "epsilon": 8.0},
    "clouds-of-1": {"num-clients": 50, "epsilon": 3.0},
    "people-a": {"num-clients": 50, "epsilon": 2.0},
}
"""Data of :mod:`.situations`, clients and epsilon at delta = 1e-5."""


def moved(rows: Rows, at: NDArray[np.floating], drift: str, classes: int) -> Rows:
    """Return samples as they are at their positions in the stream."""
    features, labels = rows
    kind, suddenly = MOVED[drift]
    share = (at > 0.5).astype(np.float64) if suddenly else at
    generator = np.random.Generator(np.random.Philox(key=derived_seed("drift", drift, len(labels))))
    if kind == "classes":
        return features, np.where(generator.random(len(labels)) < share, (labels + 1) % classes, labels)
    if kind == "features" and suddenly:
        places = np.random.Generator(np.random.Philox(key=1)).permutation(features.shape[1])
        return np.where(share[:, None] > 0, features[:, places], features), labels
    if kind == "features":
        half, angle = features.shape[1] // 2, (share * np.pi / 2)[:, None]
        first, second = features[:, :half], features[:, half : 2 * half]
        turned = [np.cos(angle) * first - np.sin(angle) * second, np.sin(angle) * first + np.cos(angle) * second]
        return np.concatenate([*turned, features[:, 2 * half :]], axis=1), labels
    return features, labels


def weights(labels: NDArray[np.integer], at: float, drift: str, classes: int) -> NDArray[np.floating]:
    """How frequent samples of these classes are at a moment."""
    late = labels >= classes // 2
    return np.where(late, at, 1 - at) if MOVED[drift][0] == "shares" else np.ones(len(labels))


class Stream(Task):
    """A stream's samples in the order in which they come, from client to client in turn."""

    reads = frozenset({"num_clients", "seed"})

    def __init__(self, data: str, drift: str, part: int = 0, parts: int = 1) -> None:
        self.name = f"{data} {drift} {part} of {parts}"
        self.data, self.drift, self.part, self.parts = data, drift, part, parts
        self.feature_bound = TASKS[data].norm()

    def squared_norm_bound(self, features: str, num_features: int, feature_bound: float) -> float:
        return TASKS[self.data].norm() ** 2

    def load(self, config: Any, root: str) -> Dataset:
        source = TASKS[self.data].load(config, root)
        features, labels = source.train_features, source.train_labels
        generator = np.random.Generator(np.random.Philox(key=derived_seed("order", self.data, config.seed)))
        when = generator.random(len(labels))
        if MOVED[self.drift][0] == "shares":  # density 2 u of late classes, and 2 - 2 u of the others
            when = np.where(labels >= source.num_classes // 2, np.sqrt(when), 1 - np.sqrt(1 - when))
        order = np.argsort(when)[: len(labels) // config.num_clients * config.num_clients]
        at = (np.arange(len(order)) + 0.5) / len(order)
        features, labels = moved((features[order], labels[order]), at, self.drift, source.num_classes)
        mine = np.array_split(np.arange(len(order)).reshape(-1, config.num_clients), self.parts)[self.part].ravel()
        clients = np.arange(len(mine)) % config.num_clients
        test = (source.test_features, source.test_labels, source.num_classes)
        return Dataset(features[mine].astype(np.float32), labels[mine], *test, client_of=clients)


class InTurn(Partition):
    """Each client's samples in the order in which they come."""

    def parts(self, dataset: Dataset, config: RunConfig) -> Sequence[NDArray[np.int64]]:
        return [np.flatnonzero(dataset.client_of == client) for client in range(config.num_clients)]


in_turn = InTurn()


@cache
def _stream(*parts: Any) -> Stream:
    return Stream(*parts)


def __getattr__(name: str) -> Any:
    """Streams as attributes, as run configurations name them: ``benchmarks.drift:digits__1__0__1``."""
    data, number, part, parts = name.split("__") if name.count("__") == 3 else ("", "", "", "")
    if data.replace("_", "-") not in STREAMS:
        raise AttributeError(name)
    return _stream(data.replace("_", "-"), list(MOVED)[int(number)], int(part), int(parts))


@dataclass(frozen=True)
class Watched(Experiment):
    """An experiment that keeps the model of every round."""

    models: list[list[NDArray[Any]]] = field(default_factory=list)

    def evaluate(self, arrays: ArrayRecord) -> MetricRecord:
        self.models.append(arrays.to_numpy_ndarrays())
        return super().evaluate(arrays)


def accuracies(data: str, drift: str, settings: Mapping[str, Any], seed: int, rounds: int = ROUNDS) -> list[float]:
    """Accuracy in percent of the model after each round, on the distribution of the moment."""
    sessions = settings.get("sessions", 1)
    found: list[float] = []
    for part in range(sessions):
        task = f"benchmarks.drift:{data.replace('-', '_')}__{list(MOVED).index(drift)}__{part}__{sessions}"
        given = {
            "task": task,
            "partition": "benchmarks.drift:in_turn",
            "seed": seed,
            "noise-quality": "fast",
            **STREAMS[data],
            "clients-per-round": STREAMS[data]["num-clients"],
            "num-rounds": rounds // sessions,
            **{name: value for name, value in settings.items() if name != "sessions"},
        }
        config = RunConfig.from_mapping({**given, "batch-size": _portion(data, rounds)})
        made = prepare(config)
        watched = Watched(**{one.name: getattr(made, one.name) for one in fields(Experiment)})
        run_experiment(CohortClients(watched), config, experiment=watched, engine="cohort")
        rows = (made.data.test_features, made.data.test_labels)
        for model in watched.models:
            at = (len(found) + 1) / rounds
            x, y = moved(rows, np.full(len(rows[1]), at), drift, made.data.num_classes)
            heavy = weights(y, at, drift, made.data.num_classes)
            scores = x @ np.asarray(model[0], np.float64).reshape(made.data.num_classes, -1).T + model[1]
            found.append(100 * float(np.average(scores.argmax(axis=1) == y, weights=heavy)))
    return found


@cache
def _portion(data: str, rounds: int) -> int:
    samples = len(TASKS[data].rows()[1])
    return (samples - samples // 5) // STREAMS[data]["num-clients"] // rounds


def searched(data: str, strategy: str) -> list[dict[str, Any]]:
    """Eight clips and steps."""
    norm = math.hypot(TASKS[data].norm(), 1.0)
    made: list[dict[str, Any]] = []
    for share in (0.1, 0.4):
        for travel in (2, 6, 20, 60):
            own = {"strategy": strategy, "clip-norm": share * norm, "learning-rate": travel / (share * norm**2)}
            if strategy == "online":  # the server's step is eta tau
                own |= {"learning-rate": own["learning-rate"] / _portion(data, ROUNDS), "mechanism": "optimal"}
            made.append(own | ({"strategy.projection-radius": 5e8} if strategy == "noisy-sgd" else {}))
    return made


def _papers(data: str, rounds: int = ROUNDS) -> dict[str, Any]:
    norm = math.hypot(TASKS[data].norm(), 1.0)
    clip = 0.15 * norm
    return {
        "strategy": "mu2",
        "clip-norm": clip,
        "learning-rate": 640 / (clip * norm * rounds**2),
        "strategy.projection-radius": 5e8,
    }


ANYTIME = {"strategy": "mu2", "strategy.steps": "anytime"}
ENDS = "`mu2`, steps for the end"
WAYS: Mapping[str, Callable[[str], Sequence[dict[str, Any]]]] = {
    "`noisy-sgd`": lambda data: searched(data, "noisy-sgd"),
    "`online`": lambda data: searched(data, "online"),
    ENDS: lambda data: [_papers(data)],
    "`mu2`, anytime": lambda _: [ANYTIME],
    "the same, `cancelling`": lambda _: [{**ANYTIME, "mechanism": "cancelling"}],
    "the same, begun anew every 8 rounds": lambda _: [{**ANYTIME, "sessions": ROUNDS // WINDOW}],
    "the same, `window = 8`": lambda _: [
        {**ANYTIME, "strategy.window": WINDOW, "mechanism": "decay", "mechanism.decay": 1 - 1 / WINDOW}
    ],
}
"""Settings to choose from, by the data's name."""
STILL = ("`noisy-sgd`", ENDS, "`mu2`, anytime")
"""What is tried where nothing moves and portions are few."""


def measure() -> list[dict[str, Any]]:
    """Return a row a stream and way: mean accuracy over the stream, and at its end, of every seed."""
    made = []
    for data in STREAMS:
        for drift in MOVED if data != "people-a" else ():
            made += [_row(data, drift, ROUNDS, way, choices(data)) for way, choices in WAYS.items()]
        for rounds in FEWER:
            for way, choices in WAYS.items():
                if way in STILL:
                    given = [_papers(data, rounds)] if way == ENDS else choices(data)
                    made.append(_row(data, "nothing", rounds, way, given))
    return made


def _row(data: str, drift: str, rounds: int, way: str, given: Sequence[dict[str, Any]]) -> dict[str, Any]:
    best = given[0]
    if len(given) > 1:
        best = max(given, key=lambda one: fmean(accuracies(data, drift, one, SEARCHED, rounds)))
    runs = [accuracies(data, drift, best, seed, rounds) for seed in SEEDS]
    row = {"data": data, "moves": drift, "portions": rounds, "way": way, "settings": best}
    row |= {"mean": [fmean(run) for run in runs], "end": [run[-1] for run in runs]}
    print(data, drift, rounds, way, _shown(row["mean"]), _shown(row["end"]), flush=True)
    return row


def _shown(runs: Sequence[float]) -> str:
    return f"{fmean(runs):.1f} ± {stdev(runs) / math.sqrt(len(runs)):.1f}"


def table(document: Sequence[Mapping[str, Any]], moving: bool = True) -> str:
    """Mean over the stream / at its end, percent, as Markdown; the best mean of a column is bold."""
    chosen = [row for row in document if moving is (row["portions"] == ROUNDS)]
    lines: list[str] = []
    for data in dict.fromkeys(row["data"] for row in chosen):
        mine = {(row["way"], _column(row, moving)): row for row in chosen if row["data"] == data}
        ways, columns = dict.fromkeys(way for way, _ in mine), dict.fromkeys(column for _, column in mine)
        best = {column: max(ways, key=lambda way, at=column: fmean(mine[way, at]["mean"])) for column in columns}
        lines += [f"| {data} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
        for way in ways:
            shown = []
            for column in columns:
                mean, end = (_shown(mine[way, column][part]) for part in ("mean", "end"))
                shown.append(f"{f'**{mean}**' if best[column] == way else mean} / {end}")
            lines.append(f"| {way} | {' | '.join(shown)} |")
        lines.append("")
    return "\n".join(lines[:-1])


def _column(row: Mapping[str, Any], moving: bool) -> str:
    return row["moves"] if moving else f"{row['portions']} portions"


def main() -> None:
    """Measure and write."""
    document = measure()
    DEFAULT.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document), table(document, moving=False), sep="\n\n")


if __name__ == "__main__":
    main()
