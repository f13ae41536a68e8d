"""Test accuracy and loss of every algorithm, beside what the paper prints (reshef-levy-2025 and -2024)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...privacy import rounded_up
from ..reports.figures import empty_figure
from ..reports.table import Column, Row, Table
from ..settings.run_config import NO_NOISE, RunConfig
from .kind import FIGURES, TableKind

EPSILON = Column(
    "epsilon", "what every run of the line guarantees, in the terms above", form=rounded_up, missing="none"
)
NOISE = Column("noise", "quality of the noise; only exact noise carries the guarantee")
SECONDS = Column("seconds", "mean time of a run", form=".0f")
ALONE = "one machine alone, without noise"
"""Its line in a table: of simulated machines, and not private."""
ACCURACY = Column("accuracy %", "test accuracy, mean ± standard deviation over seeds", form=".1f", spread="± std")


class AccuracyTable(TableKind):
    """A line for each algorithm: accuracy and loss, the paper's beside them."""

    name = "accuracy"
    has_alone = True
    sentence = "test accuracy and loss of each algorithm, and what the paper prints of it"

    columns = (
        Column("table", "the table, or the part of it, that the line belongs to", label=True),
        Column(
            "asked of machines",
            "machines asked in a round, of all there are",
            lambda row: f"{row['asked']} of {row['machines']}",
        ),
        Column("batch", "samples of a release"),
        Column("mu set", "the run configuration's mu", "mu asked", rounded_up),
        Column("algorithm", "what was run", label=True),
        ACCURACY,
        Column("paper %", "the accuracy that the paper prints", form=".1f"),
        Column("loss", "test loss, mean over seeds", form=".4f"),
        Column("paper loss", "the loss that the paper prints", form=".3f"),
        EPSILON,
        NOISE,
        SECONDS,
    )

    def table(self, document: Mapping[str, Any], title: str = "") -> Table:
        """A line for each algorithm of each cell."""
        rows, caption = accuracy_rows(document), str(document.get("guarantee", ""))
        return Table(title, self.columns, rows, caption, draw=lambda path: _draw(rows, title, caption, path))


def accuracy_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One flat row for each algorithm of each cell."""
    return [_row(cell, label, entry) for cell in document["cells"] for label, entry in cell["algorithms"].items()]


def with_alone(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document with one machine alone among the algorithms of the first cell of each part that has it."""
    shown: set[str] = set()
    cells = []
    for cell in document["cells"]:
        found = cell.get("alone")
        algorithms = dict(cell["algorithms"])
        if found and (part := repr((cell["table"], found))) not in shown:
            shown.add(part)
            algorithms[ALONE] = _alone_entry(found)
        cells.append({**cell, "algorithms": algorithms})
    return {**document, "cells": cells}


def _alone_entry(found: Mapping[str, Any]) -> dict[str, Any]:
    """Its entry among algorithms: figures without a run, of which nothing is released."""
    figures = {**dict.fromkeys(FIGURES), "releases": 0, "refusals": 0, "lost_replies": 0, **found}
    settings = {"mechanism": NO_NOISE, "clients-per-round": 1}
    return {
        **{name: {"mean": value, "std": None, "runs": []} for name, value in figures.items()},
        "settings": settings,
        "paper": {},
    }


def percent(share: float | None) -> float | None:
    """A share of one in percent; None, as the accuracy of a model that classifies nothing, stays None."""
    return None if share is None else 100 * share


def _row(cell: Mapping[str, Any], label: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    settings = {**RunConfig().to_mapping(), **cell["settings"], **entry.get("settings", {})}
    noisy = settings["mechanism"] != NO_NOISE
    runs = len(entry["accuracy"]["runs"])
    return {
        "table": cell["table"],
        "machines": settings["num-clients"],
        "asked": settings["clients-per-round"],
        "batch": None if label == ALONE else settings["batch-size"],
        "mu asked": settings["mu"] if noisy else None,
        "algorithm": label,
        "accuracy %": percent(entry["accuracy"]["mean"]),
        "± std": percent(entry["accuracy"]["std"]) if runs > 1 else None,
        "paper %": entry["paper"].get("accuracy"),
        "loss": entry["loss"]["mean"],
        "paper loss": entry["paper"].get("loss"),
        "mu": entry["mu"]["mean"],
        "epsilon": entry["epsilon"]["mean"],
        "noise": settings["noise-quality"] if noisy else NO_NOISE,
        "delta": entry["delta"]["mean"],
        "seconds": entry["seconds"]["mean"],
        "runs": runs,
    }


_COLOURS = {"mu2": "#1f6f8b", "trusted-mu2": "#4c9f70", "noisy-sgd": "#b0b7bc"}
_OTHER_COLOUR = "#d98e5f"


def _draw(rows: Sequence[Row], title: str, caption: str, path: Path) -> None:
    """A bar for each line, the paper's figure as a mark on it."""
    lines = textwrap.wrap(caption, 150)
    figure = empty_figure(10, 1.2 + 0.32 * len(rows) + 0.13 * len(lines))
    axes = figure.add_subplot()
    positions = list(range(len(rows)))[::-1]
    axes.barh(
        positions,
        [row["accuracy %"] or 0.0 for row in rows],
        xerr=[row["± std"] or 0.0 for row in rows],
        color=[_COLOURS.get(row["algorithm"], _OTHER_COLOUR) for row in rows],
        error_kw={"elinewidth": 1, "ecolor": "#444444"},
    )
    printed = [(p, row["paper %"]) for p, row in zip(positions, rows, strict=True) if row["paper %"] is not None]
    if printed:
        axes.plot([x for _, x in printed], [p for p, _ in printed], "k|", markersize=11, markeredgewidth=2)
    mark = "; the bar |: the paper" if printed else ""
    axes.set_xlabel(f"test accuracy [%], mean and standard deviation over seeds{mark}")
    for position, row in zip(positions, rows, strict=True):
        note = "not private: no noise"
        if row["epsilon"] is not None:
            note = f"ε = {rounded_up(row['epsilon'])} at δ = {row['delta']:g}, {row['noise']} noise"
        axes.text(1, position, note, va="center", fontsize=7, color="white")
    axes.set_yticks(positions, [_named(row) for row in rows], fontsize=8)
    axes.set_xlim(0, 100)
    axes.margins(y=0.01)
    axes.set_title(title)
    figure.supxlabel("\n".join(lines), fontsize=7, color="#444444")
    figure.savefig(path, dpi=130)


def _named(row: Row) -> str:
    if row["algorithm"] == ALONE:
        return f"{row['table']}: one machine alone"
    mu = "no noise" if row["mu asked"] is None else f"mu {rounded_up(row['mu asked'])}"
    return f"{row['table']}: {mu}, {row['asked']} of {row['machines']}, {row['algorithm']}"
