"""best-accuracy: the most accuracy that an epsilon buys, on MNIST and on two tables of people (docs/results.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...privacy.accounting.guarantee import rounded_up
from ..reports.table import Column, Row, Table, statistics
from ..settings.run_config import NO_NOISE
from .accuracy import (
    ACCURACY,
    ALGORITHM,
    EPSILON,
    MU,
    NOISE,
    SECONDS,
    Document,
    TableKind,
    Trial,
    accuracy_axis,
    add_legend,
    at_the_end,
    caption_of,
    colours,
    draw_by_epsilon,
    panels,
    percent,
    save,
)
from .paper import JUDGED_AT_THE_END, Cell, Overrides, Paper, Settings, everybody

_AUC, _AMPLIFIED = "auc", "epsilon_amplified"
_ERRORS = (1.5, 2, 3, 5, 10, 20, 40)
"""Ticks of the accuracy axis, in percent wrong."""
_FEATURES = Column("table", "the features, or the part of the table that the line belongs to", label=True)


class BestTable(TableKind):
    """A line for each algorithm of each features and epsilon, and the same crosswise."""

    name = "best-accuracy"
    sentence = "test accuracy, and AUC where there are two classes, by features, method and epsilon"
    curves_needed = frozenset({_AUC})
    has_alone = True

    columns = (
        _FEATURES,
        ALGORITHM,
        replace(MU, missing="none"),
        EPSILON,
        Column(
            "in a secret order",
            "epsilon while nobody learns which release a sample is in",
            _AMPLIFIED,
            rounded_up,
        ),
        ACCURACY,
        Column("AUC %", "area under the ROC curve, likewise", form=".1f", spread="± AUC"),
        Column("releases", "releases of a client", "releases a client", ".0f"),
        NOISE,
        SECONDS,
    )

    def curves(self, document: Document) -> dict[str, Any]:
        """Return the AUC at the end, and epsilon in a secret order where that is proved.

        An estimate has no place here.
        """
        found, privacy = {_AUC: document["auc"]}, document["privacy"]
        if privacy["amplified_proved"]:
            found[_AMPLIFIED] = privacy[_AMPLIFIED]
        return {name: at_the_end(document, value) for name, value in found.items()}

    def entry(self, best: Trial, trials: Sequence[Trial], choice: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the AUC, and epsilon in a secret order."""
        curves = [run["curves"] for run in best.runs]
        return {name: statistics([made[name]["values"][-1] for made in curves]) for name in curves[0]}

    def row(self, cell: Document, label: str, entry: Document) -> dict[str, Any]:
        """Accuracy and AUC, and the releases of a client."""
        row = super().row(cell, label, entry)
        return {
            **row,
            "AUC %": percent(entry[_AUC]["mean"]),
            "± AUC": percent(entry[_AUC]["std"]) if row["runs"] > 1 else None,
            _AMPLIFIED: entry.get(_AMPLIFIED, {}).get("mean"),
            "releases a client": entry["releases"]["mean"] / row["clients"],
        }

    def further_tables(self, document: Document) -> list[Table]:
        """Return a line for each features and method, accuracies beside each other by epsilon; the same of AUCs."""
        rows, caption = self.rows(document), caption_of(document)
        images = [row for row in rows if row["AUC %"] is None]
        tables = [row for row in rows if row["AUC %"] is not None]
        made = [
            ("test accuracy in percent", images, "accuracy %", "± std"),
            ("AUC in percent", tables, "AUC %", "± AUC"),
        ]
        return [_crosswise(title, part, value, std, caption) for title, part, value, std in made if part]

    def draw(self, document: Document, title: str, path: Path) -> None:
        """Draw a panel for each part of the table: accuracy, or AUC, against epsilon, a line for each algorithm."""
        colour = colours(document)
        tables: dict[str, list[Row]] = {}
        for row in self.rows(document):
            tables.setdefault(row["table"], []).append(row)
        figure, grid, columns = panels(len(tables), 3, (4.4, 3.2), 1.4)
        for axes, (name, table) in zip(grid, tables.items(), strict=True):
            measure, std = ("accuracy %", "± std") if table[0]["AUC %"] is None else ("AUC %", "± AUC")
            for label in dict.fromkeys(row["algorithm"] for row in table):
                rows = [{**row, "epsilon": compared_at(row)} for row in table if row["algorithm"] == label]
                draw_by_epsilon(axes, rows, colour[label], measure, std, markersize=3.5)
            axes.set_title(name, fontsize=9)
            axes.set_xlabel(f"epsilon at delta = {table[0]['delta']:g}", fontsize=8)
            axes.set_ylabel("test accuracy [%]" if measure == "accuracy %" else measure, fontsize=8)
            axes.grid(alpha=0.3)
            if measure == "accuracy %":
                accuracy_axis(axes, _ERRORS)
        add_legend(figure, list(figure.axes), columns=3)
        seeds = sorted({row["runs"] for table in tables.values() for row in table if row["runs"]})
        heading = f"{title}: mean and standard deviation over {' or '.join(map(str, seeds))} runs"
        save(figure, path, heading, document, 60 * columns)


def _crosswise(title: str, rows: Sequence[Row], value: str, std: str, caption: str) -> Table:
    """Return a line for each features and method, a column for each epsilon.

    In a secret order the one that counts on it.
    """
    by_epsilon = {compared_at(row): epsilon_name(compared_at(row)) for row in rows}
    ascending = sorted(by_epsilon, key=lambda one: float("inf") if one is None else one)
    names = list(dict.fromkeys(by_epsilon[one] for one in ascending))
    empty = {**dict.fromkeys(names), **dict.fromkeys(f"± {name}" for name in names)}
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        place = {"table": row["table"], "algorithm": row["algorithm"]}
        name = by_epsilon[compared_at(row)]
        lines.setdefault(tuple(place.values()), {**empty, **place}).update({name: row[value], f"± {name}": row[std]})
    meaning = "mean ± standard deviation over seeds"
    columns = [Column(name, meaning, form=".1f", spread=f"± {name}") for name in names]
    return Table(title, [_FEATURES, ALGORITHM, *columns], list(lines.values()), caption)


def compared_at(row: Row) -> float | None:
    """Return the epsilon at which a row is compared with others: in a secret order the one that counts on it."""
    amplified = row.get(_AMPLIFIED)
    return row["epsilon"] if amplified is None else amplified


def epsilon_name(epsilon: float | None) -> str:
    """Return the heading of a column of figures at an epsilon."""
    return "no noise" if epsilon is None else f"epsilon {rounded_up(epsilon)}"


_SHARED: Settings = {**everybody(100), **JUDGED_AT_THE_END}
SOFT, STROKES, BEST = "soft-gradients", "strokes", "scattering+strokes"
MUS = (0.1, 0.25, 0.5, 1.0, 2.0)

_EPSILON_BELOW_ONE = 0.25


def _times(mu: float) -> int:
    """Four times as many seeds below an epsilon of 1, where single runs differ most."""
    return 4 if mu <= _EPSILON_BELOW_ONE else 1


FULL_BATCH: Overrides = {"strategy": "full-batch"}
ONE_SHOT: Overrides = {"strategy": "one-shot"}


def _sums_of(clients: int) -> tuple[str, Overrides]:
    """Return sums of which seven tenths are honest, and their name."""
    honest = clients * 7 // 10
    cohort = {"trust": "secure-aggregation", "trust.min-cohort": clients, "trust.colluders": clients - honest}
    return f"full batches, sums of {honest} honest clients", {**FULL_BATCH, **cohort}


FULL, ONE_PASS, NOISY_SGD, SHOT = "full batches", "one pass of mu2", "one pass of noisy SGD", "one shot"
HIDDEN_ORDER = "one pass of noisy SGD in a secret order"
WITHOUT = "full batches without noise"
SECURE, SUMS = _sums_of(100)


_BATCHES = {
    SOFT: {0.1: (100, 100), 0.25: (50, 100), 0.5: (50, 50), 1.0: (50, 50), 2.0: (25, 25)},
    BEST: {0.1: (100, 100), 0.25: (100, 100), 0.5: (100, 100), 1.0: (50, 50), 2.0: (25, 25)},
}
"""Batches of mu^2 and noisy SGD by features and mu: the best of 12, 25, 50 and 100 on held-out images."""


SECRET_ORDERS = {0.1: (0.243866, 100), 0.25: (0.827967, 50), 0.5: (1.779226, 25)}
"""Mu and batch of noisy SGD in a secret order, by the mu of the other lines of its cell.

While nobody learns the order, it has the epsilon of the other lines: the mu is the largest with six decimals that
keeps it below. The batch is the best of five on held-out images, or within 0.1
points of it (docs/tuning.md).
"""


def _in_secret(mu: float, batch_size: int) -> Overrides:
    return {"strategy": "noisy-sgd", "batch-selection": "shuffled", "batch-size": batch_size, "mu": mu}


def _one_pass(batch_size: int, of_sgd: int = 0) -> dict[str, Overrides]:
    """Every sample once: mu^2 with the best of its noises, and the same with noise that adds up."""
    return {
        ONE_PASS: {"strategy": "mu2", "batch-size": batch_size, "mechanism": "decay"},
        NOISY_SGD: {"strategy": "noisy-sgd", "batch-size": of_sgd or batch_size},
    }


def _algorithms(features: str, mu: float) -> dict[str, Overrides]:
    found: dict[str, Overrides] = {FULL: FULL_BATCH}
    if features == STROKES:
        return {**found, SHOT: ONE_SHOT}
    found |= _one_pass(*_BATCHES[features][mu])
    if features == BEST and mu in SECRET_ORDERS:
        found[HIDDEN_ORDER] = _in_secret(*SECRET_ORDERS[mu])
    return {**found, SECURE: SUMS} if features == BEST and mu <= 0.25 else found


def _images(features: str, **more: bool | float | str) -> Settings:
    return {**_SHARED, "task": "mnist", "features": features, **more}


def _standard() -> list[Cell]:
    return [
        Cell(features, _images(features, mu=mu), _algorithms(features, mu), times=_times(mu))
        for features in (SOFT, BEST, STROKES)
        for mu in MUS
    ]


def _noiseless() -> list[Cell]:
    """Return the runs without noise, which show what the features and the model are good for."""
    return [Cell(features, _images(features, mechanism=NO_NOISE), {WITHOUT: FULL_BATCH}) for features in (SOFT, BEST)]


_FITTING_BATCH = 12
"""No larger than the smallest of unequal clients; skewed ones may have a single sample, which is none for one pass."""


def _partitions() -> list[Cell]:
    one_pass = {ONE_PASS: _one_pass(_FITTING_BATCH)[ONE_PASS]}
    skewed: Settings = {"partition": "dirichlet", "partition.alpha": 0.1}
    unequal: Settings = {"partition": "unequal"}
    return [
        Cell(
            f"{features}, {name}",
            {**_images(features, mu=mu), **partition},
            {FULL: FULL_BATCH, **others},
            times=_times(mu),
        )
        for name, partition, others in (
            ("labels skewed (Dirichlet 0.1)", skewed, {}),
            ("clients of unequal size", unequal, one_pass),
        )
        for features in (SOFT, BEST)
        for mu in (0.25, 1.0)
    ]


_TABLES = {"credit-default": 48, "recidivism": 28}
"""Tables of people, and how many samples there are in a release of one pass: the best of three on held-out people."""
_NOISELESS_STEPS = {"credit-default": 10.0, "recidivism": 3.0}
"""The preset's clip and step are for noise; tables of people are small enough that it shows without."""


def _tables() -> list[Cell]:
    noisy = [
        Cell(
            task,
            {**_SHARED, "task": task, "mu": mu},
            {FULL: FULL_BATCH, **_one_pass(batch_size)},
            times=_times(mu),
        )
        for task, batch_size in _TABLES.items()
        for mu in (0.25, 1.0)
    ]
    noiseless = [
        Cell(
            task,
            {**_SHARED, "task": task, "mechanism": NO_NOISE},
            {WITHOUT: {**FULL_BATCH, "clip-norm": 2.0, "learning-rate": step}},
        )
        for task, step in _NOISELESS_STEPS.items()
    ]
    return noisy + noiseless


_EPSILONS = (0.3, 0.5, 0.7, 1.0, 2.0, 4.0, 8.0)


def _ways(clients: int) -> dict[str, Overrides]:
    return {FULL: FULL_BATCH, **dict([_sums_of(clients)])}


class ManySites(Paper):
    """Data that no site has enough of: 60 images on each of 1,000 clients, and tables of people over 100 sites."""

    name = "many-sites"
    sentence = "Where a federation pays: 1,000 clients of 60 images, and people over 100 sites, beside one site alone"
    seeds = 5
    table = BestTable()

    def cells(self) -> list[Cell]:
        """Images by epsilon; then tables of people."""
        many = {**_images(BEST), **everybody(1_000)}
        images = [Cell("1,000 clients of 60", {**many, "epsilon": epsilon}, _ways(1_000)) for epsilon in _EPSILONS]
        people = [
            Cell(
                f"{task}, 100 sites",
                {**_SHARED, "task": task, "epsilon": epsilon},
                _ways(100),
                times=4 if epsilon < 1 else 1,
            )
            for task in _TABLES
            for epsilon in _EPSILONS
        ]
        return [*images, *people]


class BestAccuracy(Paper):
    """60,000 images of MNIST on 100 clients that trust nobody, by epsilon, features and method."""

    name = "best-accuracy"
    sentence = "The most accuracy an epsilon buys: full batches, one pass and one shot on fixed features"
    seeds = 5
    table = BestTable()

    def cells(self) -> list[Cell]:
        """Features and mus; then other partitions, and tables of people."""
        return [*_standard(), *_noiseless(), *_partitions(), *_tables()]
