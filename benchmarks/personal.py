"""Personalised models beside the common model and each site alone, on rows of the site's own distribution.

``python -m benchmarks.personal`` writes ``docs/results/personal.json`` and prints a table of it. A private model is
trained for each data set, epsilon and seed. Then each site adapts it to its rows, as ``murmurfl personalise`` does. The
common model, the site alone (the best of several penalties by its own cross-validation) and the personalised model are
scored on other rows of the site. What the file has already is not measured again; ``--only`` names some data sets.

Digits are dealt by label. A site's share of each class is known, so the test set, weighted by these shares, is a sample
from its own distribution. Full batches with all sites do not depend on how rows are dealt, so one model serves all
partitions. Tables have sites of their own (hospitals, states, kinds of employers, medical specialties), of which a part
of the rows is set aside for the test. They lie under MURMURFL_DATA.

Constants of :mod:`murmurfl.clients.personal_head` were chosen by :data:`CHOSEN_BY`; all others judge them.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from murmurfl.app import simulate
from murmurfl.app.data.loading import load_dataset
from murmurfl.app.models.trained_model import TrainedModel
from murmurfl.app.runs.fit_arguments import FitArguments
from murmurfl.app.runs.personal import usable_rows
from murmurfl.app.runs.rehearsal import rehearsed_once
from murmurfl.clients.personal_head import site_heads
from murmurfl.privacy import derived_seed
from numpy.typing import NDArray

DEFAULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "personal.json"
EPSILONS = (0.5, 2.0, 8.0)
SEEDS, SEEDS_BELOW_ONE, SITES = 5, 20, 20
SIZES = (5, 1000)
"""Rows of the smallest and of the largest site where classes follow a Dirichlet distribution."""
CHOSEN_BY = ("digits, Dirichlet 0.3", "digits, two classes each", "census by employer")
FEW_TEST_ROWS = 30
_LEFT_OUT = 0.01
Rows = list[dict[str, str]]


class Site(NamedTuple):
    """Scores and features of one site's rows, and of the rows that its models are judged on."""

    name: str
    scores: NDArray[np.float64]
    features: NDArray[np.float64]
    labels: NDArray[Any]
    test_scores: NDArray[np.float64]
    test_features: NDArray[np.float64]
    test_labels: NDArray[Any]
    weights: NDArray[np.float64]
    """Weight of each test row; the sum is one."""


def _generator(*parts: object) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=derived_seed("personal", *parts)))


# ----------------------------------------------------------------------------------------------------------- digits
def _shares(partition: str, random: np.random.Generator, classes: int) -> NDArray[np.float64]:
    """Return each site's share of each class, shape (sites, classes)."""
    if partition == "iid":
        return np.full((SITES, classes), 1 / classes)
    if partition.startswith("Dirichlet"):
        return random.dirichlet(np.full(classes, float(partition.split()[1])), SITES)
    number = {"one class each": 1, "two classes each": 2}[partition]
    own = (np.arange(SITES)[:, None] * number + np.arange(number)) % classes
    return np.stack([np.bincount(one, minlength=classes) / number for one in own])


def _dealt(partition: str, labels: NDArray[Any], seed: int) -> Iterator[tuple[NDArray[np.intp], NDArray[np.float64]]]:
    """Yield the rows of each site and its shares of classes; with a Dirichlet distribution sizes are of all scales."""
    random = _generator("deal", partition, seed)
    for shares in _shares(partition, random, int(labels.max()) + 1):
        count = len(labels) // SITES
        if partition.startswith("Dirichlet"):
            low, high = np.log(SIZES)
            count = round(float(np.exp(random.uniform(low, high))))
        wanted = np.bincount(random.choice(len(shares), count, p=shares), minlength=len(shares))
        pools = [random.permutation(np.flatnonzero(labels == one)) for one in range(len(shares))]
        yield np.concatenate([pool[:number] for pool, number in zip(pools, wanted, strict=True)]), shares


@cache
def _digits(epsilon: float, seed: int) -> tuple[NDArray[Any], ...]:
    """Return scores, features and labels of training rows and test rows by one private model."""
    result = simulate(
        {
            "task": "digits",
            "num-clients": SITES,
            "clients-per-round": SITES,
            "epsilon": epsilon,
            "seed": seed,
            "evaluate-every": 10_000,
            "noise-quality": "fast",
        }
    )
    data, model = load_dataset(result.experiment.config), result.model
    made: list[NDArray[Any]] = []
    for features, labels in ((data.train_features, data.train_labels), (data.test_features, data.test_labels)):
        inputs = model.inputs(features)
        made += [model.scores_of_inputs(inputs), np.asarray(inputs, np.float64), labels]
    return tuple(made)


def digits_sites(partition: str, epsilon: float, seed: int) -> Iterator[Site]:
    """Yield the sites of the digits, dealt by label; a site has no row twice, but sites may share rows."""
    scores, features, labels, test_scores, test_features, test_labels = _digits(epsilon, seed)
    frequent = np.bincount(test_labels)
    for number, (rows, shares) in enumerate(_dealt(partition, labels, seed)):
        test = (test_scores, test_features, test_labels, (shares / frequent)[test_labels])
        yield Site(f"{seed}, {number}", scores[rows], features[rows], labels[rows], *test)


# ----------------------------------------------------------------------------------------------------------- tables
class Table(NamedTuple):
    """A table whose rows have sites of their own."""

    rows: Callable[[], Rows]
    label: str
    site: str
    share: float
    """Share of each site's rows that is trained on."""


def _read(name: str, header: Sequence[str] | None = None) -> Rows:
    with gzip.open(Path(os.environ["MURMURFL_DATA"]) / name, "rt") as file:
        return list(csv.DictReader(file, fieldnames=header))


def _heart() -> Rows:
    rows = [
        {k: "" if v in ("-9", "-9.0", "?") else v for k, v in row.items()}
        for row in _read("tables/heart-four-sites.csv.gz")
    ]
    return [row | {"num": "no" if float(row["num"]) == 0 else "yes"} for row in rows]


def _communities() -> Rows:
    with gzip.open(Path(os.environ["MURMURFL_DATA"]) / "uci" / "communities.csv.gz", "rt") as file:
        header, *lines = list(csv.reader(file))
    names = ["state", "", "", "", "", *header]
    return [{k: "" if v == "?" else v for k, v in zip(names, line, strict=True) if k} for line in lines]


def _crime() -> Rows:
    """Return the communities with a yes where violent crimes are above their median, 0.15."""
    return [
        {
            **{k: v for k, v in row.items() if k != "ViolentCrimesPerPop"},
            "above": "yes" if float(row["ViolentCrimesPerPop"]) > 0.15 else "no",
        }
        for row in _communities()
    ]


def _census() -> Rows:
    names = "age,employer,weight,education,years,marital,occupation,relation,race,sex,gain,loss,hours,country,income"
    rows = [
        {k: v.strip() for k, v in row.items() if k != "weight"}
        for row in _read("tables/adult.csv.gz", names.split(","))
    ]
    return [row | {"income": "yes" if ">" in row["income"] else "no"} for row in rows]


def _diabetes() -> Rows:
    """Return the first visit of each patient whose physician's specialty is known."""
    made: dict[str, dict[str, str]] = {}
    left_out = ("encounter_id", "patient_nbr", "weight", "payer_code")
    for row in _read("tables/diabetes-130-hospitals.csv.gz"):
        if row["medical_specialty"] != "?" and row["patient_nbr"] not in made:
            own = {k: "" if v == "?" else v for k, v in row.items() if k not in left_out}
            made[row["patient_nbr"]] = own | {"readmitted": "no" if row["readmitted"] == "NO" else "yes"}
    return list(made.values())


TABLES: Mapping[str, Table] = {
    "census by employer": Table(_census, "income", "employer", 0.5),
    "heart disease in four hospitals": Table(_heart, "num", "site", 0.7),
    "crime by state": Table(_crime, "above", "state", 0.6),
    "crime by state, as a number": Table(_communities, "ViolentCrimesPerPop", "state", 0.6),
    "diabetes by specialty": Table(_diabetes, "readmitted", "medical_specialty", 0.5),
}


def table_sites(name: str, epsilon: float, seed: int) -> Iterator[Site]:
    """Yield the sites of a table, for one split of each site's rows and one private model."""
    table = TABLES[name]
    rows = table.rows()
    site_of = np.array([row[table.site] for row in rows])
    train, random = np.zeros(len(rows), dtype=bool), _generator("split", name, seed)
    for one in np.unique(site_of):
        places = random.permutation(np.flatnonzero(site_of == one))
        train[places[: int(np.ceil(table.share * len(places)))]] = True
    asked = FitArguments(
        [rows[i] for i in np.flatnonzero(train)],
        label=table.label,
        site=table.site,
        epsilon=epsilon,
        trust="secure-aggregation",
        settings={"seed": seed, "noise_quality": "fast"},
    )
    found, keys = asked.settled()
    model = rehearsed_once(found, keys, table.site, 0, held_out_share=_LEFT_OUT).model
    for one in np.unique(site_of):
        parts = [
            _of_model(model, [rows[i] for i in np.flatnonzero((site_of == one) & part)]) for part in (train, ~train)
        ]
        if len(parts[1][2]) > 1:
            yield Site(str(one), *parts[0], *parts[1], np.full(len(parts[1][2]), 1 / len(parts[1][2])))


def _of_model(model: TrainedModel, rows: Rows) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return scores, features and labels of a site's rows; none without rows."""
    if not rows:
        return np.zeros((0, 1)), np.zeros((0, 1)), np.zeros(0)
    found = usable_rows(model, rows)
    return model.scores_of_inputs(found.inputs), np.asarray(found.inputs, np.float64), found.labels


# ---------------------------------------------------------------------------------------------------------- figures
def judged(site: Site, variance: float) -> dict[str, Any]:
    """Return what three models score on a site's own distribution, in points, and how far the last is from the better.

    Points are percent of rows that are right; of numbers 100 (1 - squared error / ``variance``).
    """
    heads = site_heads(site.scores, site.labels, site.features)
    every = {
        "common": site.test_scores,
        "alone": heads.alone.scores(site.test_scores, site.test_features),
        "personal": heads.personal.scores(site.test_scores, site.test_features),
    }
    points = {name: _points(scores, site.test_labels, variance) for name, scores in every.items()}
    made: dict[str, Any] = {name: float(site.weights @ one) for name, one in points.items()}
    better = points["common" if made["common"] >= made["alone"] else "alone"]
    lost = better - points["personal"]
    regret = float(site.weights @ lost)
    error = float(np.sqrt(np.square(site.weights) @ np.square(lost - regret)))
    return {
        "site": site.name,
        "rows": len(site.labels),
        "test": round(float(1 / np.square(site.weights).sum())),
        **{name: round(value, 3) for name, value in made.items()},
        "within": bool(regret <= 2 * error + 1e-9),
    }


def _points(scores: NDArray[Any], labels: NDArray[Any], variance: float) -> NDArray[np.float64]:
    if scores.shape[1] == 1:
        return 100 * (1 - np.square(np.clip(scores[:, 0], -1.5, 1.5) - labels) / variance)
    return 100.0 * (scores.argmax(axis=1) == labels)


PARTITIONS = ("iid", "Dirichlet 1", "Dirichlet 0.3", "Dirichlet 0.1", "two classes each", "one class each")
CELLS = (*(f"digits, {partition}" for partition in PARTITIONS), *TABLES)


def measure(document: dict[str, Any], names: Sequence[str], seeds: int) -> Iterator[None]:
    """Measure what a document has not, and yield after each private model."""
    logging.disable(logging.WARNING)
    for epsilon in EPSILONS:
        for seed in range(min(seeds, SEEDS_BELOW_ONE if epsilon < 1 else SEEDS)):
            for name in names:
                runs = document.setdefault(name, {}).setdefault(f"{epsilon:g}", {})
                if str(seed) in runs:
                    continue
                partition = name.removeprefix("digits, ")
                sites = [
                    *(digits_sites(partition, epsilon, seed) if name != partition else table_sites(name, epsilon, seed))
                ]
                sites = [one for one in sites if len(one.labels)]
                variance = float(np.var(np.concatenate([one.labels for one in sites])))
                runs[str(seed)] = [judged(one, variance) for one in sites]
                yield
            _digits.cache_clear()


def summary(runs: Mapping[str, Sequence[Mapping[str, Any]]], least: int = 0) -> dict[str, float]:
    """Return means over sites; a site that every seed has is one site, with its mean over seeds.

    The better of common model and site alone is chosen by the same test rows that it is scored on, which favours it.
    """
    by_site: dict[str, list[Mapping[str, Any]]] = {}
    for one in (one for run in runs.values() for one in run if one["test"] >= least):
        by_site.setdefault(one["site"], []).append(one)
    means = [{k: fmean(one[k] for one in found) for k in ("common", "alone", "personal")} for found in by_site.values()]
    regrets = [max(one["common"], one["alone"]) - one["personal"] for one in means]
    every = [one for found in by_site.values() for one in found]
    return {
        **{k: fmean(one[k] for one in means) for k in ("common", "alone", "personal")},
        "regret": fmean(regrets),
        "error": stdev(regrets) / len(regrets) ** 0.5 if len(regrets) > 1 else 0.0,
        "within": 100 * fmean(one["within"] for one in every),
        "sites": len(means),
        "runs": len(every),
        "least": min(one["rows"] for one in every),
        "most": max(one["rows"] for one in every),
    }


def table(document: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of the page, with what holds on average over the rows that judge."""
    terms = (
        "Epsilon is of the common model, at delta = 1e-05, for replacement of one sample of one client, against the "
        "server and everybody else; noise on each client, under masks, for half of the sites honest; over all releases "
        "of a run. What a site adapts or trains alone has none, and stays inside it."
    )
    heading = "| data | epsilon | sites' rows | common | alone | personalised | regret | within 2 errors |"
    lines, judging = [terms, "", heading, "|---|---|---|---|---|---|---|---|"], list[dict[str, float]]()
    for name in (name for name in CELLS if name in document):
        for epsilon in sorted(document[name], key=float):
            one = summary(document[name][epsilon], 0 if name.startswith("digits") else FEW_TEST_ROWS)
            judging += [] if name in CHOSEN_BY else [one]
            cells = [
                f"{name}{' *' if name in CHOSEN_BY else ''}",
                epsilon,
                f"{one['least']:,.0f} to {one['most']:,.0f}",
                *(f"{one[which]:.1f}" for which in ("common", "alone", "personal")),
                f"{one['regret']:.2f} ± {one['error']:.2f}",
                f"{one['within']:.0f} % of {one['runs']:,.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    runs = sum(one["runs"] for one in judging)
    within = sum(one["within"] * one["runs"] for one in judging) / runs
    mean, most = fmean(one["regret"] for one in judging), max(one["regret"] for one in judging)
    lines += [
        "",
        f"Rows without *: regret {mean:.2f} on average and {most:.2f} at most; {within:.1f} % of {runs:,.0f} ",
    ]
    return "\n".join(lines) + "are within two errors."


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.personal", description=__doc__)
    parser.add_argument("--json", type=Path, default=DEFAULT)
    parser.add_argument("--only", choices=CELLS, action="append")
    parser.add_argument("--seeds", type=int, default=SEEDS_BELOW_ONE)
    asked = parser.parse_args()
    document = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    for _ in measure(document, asked.only or CELLS, asked.seeds):
        asked.json.write_text(json.dumps(document, separators=(",", ":")).replace("},{", "},\n{") + "\n")
    print(table(document))


if __name__ == "__main__":
    main()
