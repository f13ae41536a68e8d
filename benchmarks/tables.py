"""Tables that ``murmurfl fit`` is judged by: what it reaches beside central training with and without noise.

``python -m benchmarks.tables`` writes ``docs/results/tables.json`` and prints a table of it. Two tables of people and
communities lie under MURMURFL_DATA; the four made ones have categories, blanks, columns without use and rare classes;
the small ones come with scikit-learn. *Central* is scikit-learn's linear model on the same columns of all rows, and
*central private* one client that has all rows and adds its own noise.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from murmurfl.app import fit
from murmurfl.app.runs.fit_summary import figure
from murmurfl.privacy import derived_seed
from numpy.typing import NDArray

DEFAULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "tables.json"
SITES, EPSILON, SEEDS = 8, 2.0, 5
Row = dict[str, Any]


def _generator(name: str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=derived_seed("tables", name)))


def _sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(-values))


def _blank(random: np.random.Generator, cells: Sequence[Any], share: float) -> list[Any]:
    return ["" if gone else cell for cell, gone in zip(cells, random.random(len(cells)) < share, strict=True)]


# ---------------------------------------------------------------------------------------------------------- generators
def readmissions() -> list[Row]:
    """7,000 stays in hospitals, of which one in eight is followed by another within a month."""
    random, n = _generator("readmissions"), 7_000
    age, bmi = random.integers(18, 96, n), random.normal(27, 5, n)
    smoker, stays = random.random(n) < 0.3, random.poisson(1.2, n)
    ward = random.choice(["surgery", "medicine", "intensive care", "orthopaedics"], n, p=[0.4, 0.35, 0.05, 0.2])
    score = -5 + 0.03 * age + 0.04 * (bmi - 27) + 0.8 * smoker + 1.2 * (ward == "intensive care") + 0.6 * stays
    again = random.random(n) < _sigmoid(score)
    columns = {
        "case": [f"c-{number:06d}" for number in random.permutation(10**6)[:n]],
        "age": age.tolist(),
        "bmi": _blank(random, [f"{value:.1f}" for value in bmi], 0.08),
        "smoker": ["yes" if one else "no" for one in smoker],
        "ward": _blank(random, ward.tolist(), 0.03),
        "stays": stays.tolist(),
        "readmitted": ["yes" if one else "no" for one in again],
    }
    return _rows(columns)


def churn() -> list[Row]:
    """9,000 customers of a telephone company, a quarter of whom leave: amounts of money with a long tail."""
    random, n = _generator("churn"), 9_000
    months, bill = random.integers(0, 73, n), np.exp(random.normal(4, 0.6, n))
    contract = random.choice(["month", "year", "two years"], n, p=[0.55, 0.25, 0.2])
    internet = random.choice(["fibre", "cable", "none"], n, p=[0.45, 0.35, 0.2])
    calls = random.negative_binomial(1, 0.4, n)
    score = -1.6 - 0.03 * months + 0.9 * np.log(bill / 55) + 1.3 * (contract == "month") + 0.7 * (internet == "fibre")
    leaves = random.random(n) < _sigmoid(score + 0.35 * calls)
    columns = {
        "customer": list(range(1, n + 1)),
        "months": months.tolist(),
        "contract": contract.tolist(),
        "internet": _blank(random, internet.tolist(), 0.05),
        "calls": calls.tolist(),
        "bill": [f"{value:.2f}" for value in bill],
        "paid in all": _blank(random, [f"{value:.2f}" for value in bill * months], 0.02),
        "plan": ["standard"] * n,
        "leaves": leaves.astype(int).tolist(),
    }
    return _rows(columns)


def triage() -> list[Row]:
    """8,000 arrivals in emergency departments in four classes of urgency, the most urgent one rare."""
    random, n = _generator("triage"), 8_000
    pulse, pressure = random.normal(85, 18, n), random.normal(128, 22, n)
    oxygen, fever = np.minimum(random.normal(97, 2.5, n), 100), random.normal(37.1, 0.8, n)
    complaint = random.choice(["chest", "injury", "fever", "head", "stomach", "other"], n)
    arrived = random.choice(["ambulance", "walked", "transferred"], n, p=[0.25, 0.65, 0.1])
    score = (
        0.04 * np.abs(pulse - 80)
        + 0.02 * np.abs(pressure - 125)
        - 0.35 * (oxygen - 97)
        + 0.7 * np.maximum(fever - 38, 0)
    )
    score += 1.0 * (complaint == "chest") + 0.9 * (arrived == "ambulance") + random.normal(0, 0.6, n)
    urgency = np.digitize(score, np.quantile(score, [0.4, 0.75, 0.95]))
    columns = {
        "pulse": _blank(random, [f"{value:.0f}" for value in pulse], 0.04),
        "pressure": _blank(random, [f"{value:.0f}" for value in pressure], 0.06),
        "oxygen": _blank(random, [f"{value:.1f}" for value in oxygen], 0.1),
        "temperature": [f"{value:.1f}" for value in fever],
        "complaint": complaint.tolist(),
        "arrived": arrived.tolist(),
        "urgency": [("low", "normal", "high", "now")[one] for one in urgency],
    }
    return _rows(columns)


def rents() -> list[Row]:
    """6,000 flats and their rent: a regression."""
    random, n = _generator("rents"), 6_000
    size, floor, year = random.gamma(6, 12, n) + 15, random.integers(0, 9, n), random.integers(1890, 2025, n)
    quarter = random.choice(["centre", "north", "south", "east", "west", "harbour"], n)
    effect = {"centre": 350, "harbour": 250, "west": 120, "north": 0, "south": -40, "east": -90}
    rent = 250 + 11 * size + 12 * floor + 1.5 * (year - 1950) + np.array([effect[one] for one in quarter])
    rent = rent + random.normal(0, 120, n)
    columns = {
        "size": [f"{value:.0f}" for value in size],
        "floor": _blank(random, floor.tolist(), 0.05),
        "built": _blank(random, year.tolist(), 0.15),
        "quarter": quarter.tolist(),
        "lift": random.choice(["yes", "no", ""], n, p=[0.4, 0.5, 0.1]).tolist(),
        "rent": [f"{value:.0f}" for value in rent],
    }
    return _rows(columns)


def _rows(columns: dict[str, list[Any]]) -> list[Row]:
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


# -------------------------------------------------------------------------------------------------------- other tables
def _root() -> Path:
    return Path(os.environ.get("MURMURFL_DATA", "")).expanduser()


def _stored(path: str) -> list[Row]:
    with gzip.open(_root() / path, "rt") as file:
        return list(csv.DictReader(file))


def communities() -> list[Row]:
    """1,994 communities and their rate of violent crimes: a regression; columns are numbers from 0 to 1."""
    with gzip.open(_root() / "uci/communities.csv.gz", "rt") as file:
        names, *rows = csv.reader(file)
    names = [name for name in names if name not in _UNNAMED]
    return [dict(zip(names, row[len(_UNNAMED) :], strict=True)) for row in rows]


_UNNAMED = ("state", "county", "community", "communityname", "fold")
"""What rows begin with, though the header does not name it."""


def recidivism() -> list[Row]:
    """7,214 defendants, without the answer in another column and the score that somebody sold for it."""
    rows = _stored("compas/compas-two-years.csv.gz")
    return [{name: cell for name, cell in row.items() if name not in _ANSWERS} for row in rows]


_ANSWERS = ("is_recid", "decile_score", "score_text")


def _bundled(name: str) -> list[Row]:
    from sklearn import datasets

    data = getattr(datasets, f"load_{name}")()
    names = [str(one) for one in data.feature_names]
    rows = np.column_stack([data.data, data.target])
    # In an order of its own: scikit-learn's begins with one class.
    return [dict(zip([*names, "target"], row.tolist(), strict=True)) for row in _generator(name).permutation(rows)]


TABLES: dict[str, tuple[Callable[[], list[Row]], str]] = {
    "readmissions": (readmissions, "readmitted"),
    "churn": (churn, "leaves"),
    "triage": (triage, "urgency"),
    "rents": (rents, "rent"),
    "credit default": (lambda: _stored("uci/UCI_Credit_Card.csv.gz"), "default.payment.next.month"),
    "recidivism": (recidivism, "two_year_recid"),
    "communities": (communities, "ViolentCrimesPerPop"),
    "breast cancer": (lambda: _bundled("breast_cancer"), "target"),
    "wine": (lambda: _bundled("wine"), "target"),
    "diabetes": (lambda: _bundled("diabetes"), "target"),
}


def main() -> None:
    """Fit every table in every way, and write the figures down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--json", type=Path, default=DEFAULT)
    parser.add_argument("--only", default="", help="tables with this in their names")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    arguments = parser.parse_args()
    document = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    for name, (rows, label) in TABLES.items():
        if arguments.only in name and name not in document:
            document[name] = fitted(rows(), label, arguments.seeds)
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")
            print(shown({name: document[name]}).splitlines()[-1], flush=True)
    print(shown(document))


def fitted(rows: list[Row], label: str, seeds: int) -> dict[str, Any]:
    """Figures of one table: AUC, accuracy of several classes, or R^2, in percent; a list has one for each seed."""
    ways: dict[str, dict[str, Any]] = {
        "untrusted": {"clients": SITES},
        "sums": {"clients": SITES, "trust": "secure-aggregation"},
        "central private": {"clients": 1},
    }
    found: dict[str, Any] = {"rows": len(rows), "central": [], "seconds": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        for way, options in ways.items():
            for seed in range(1, seeds + 1):
                started = time.perf_counter()
                result = fit(path, label=label, epsilon=EPSILON, seed=seed, **options)
                assert result.table is not None
                found.setdefault(way, []).append(100 * figure(result.outcome, result.table))
                found["seconds"].append(time.perf_counter() - started)
                if way == "central private" and result.alone is not None:
                    found["central"].append(100 * central(result))
                if way == "untrusted":
                    assert result.outcome.alone is not None
                    found.setdefault("alone", []).append(100 * figure(result.outcome.alone, result.table))
                    found["majority"] = 100 * result.table.majority
    return found


def central(result: Any) -> float:
    """scikit-learn's linear model of all rows that were trained on, without noise: AUC, accuracy or R^2."""
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.metrics import r2_score, roc_auc_score

    data = result.experiment.data
    if data.num_classes == 1:
        model = Ridge(alpha=0.1).fit(data.train_features, data.train_labels)
        return float(r2_score(data.test_labels, model.predict(data.test_features)))
    model = LogisticRegression(C=10.0, max_iter=2_000).fit(data.train_features, data.train_labels)
    if data.num_classes == len(model.classes_) == 2:
        return float(roc_auc_score(data.test_labels, model.decision_function(data.test_features)))
    return float(model.score(data.test_features, data.test_labels))


def shown(document: dict[str, Any]) -> str:
    """Return a row a table: means with their standard errors."""
    columns = ("central", "sums", "untrusted", "central private", "alone")
    lines = [
        f"| table | rows | {' | '.join(columns)} | majority | seconds |",
        "|---" * (len(columns) + 4) + "|",
    ]
    for name, one in document.items():
        cells = [f"{fmean(one[way]):.1f} ± {stdev(one[way]) / len(one[way]) ** 0.5:.1f}" for way in columns]
        lines.append(
            f"| {name} | {one['rows']} | {' | '.join(cells)} | {one['majority']:.1f} | {max(one['seconds']):.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
