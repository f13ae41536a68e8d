"""Test accuracy and AUC by features, method and epsilon: what an epsilon buys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...privacy import rounded_up
from ..reports.table import Column, Row, Table, statistics
from .accuracy import ACCURACY, EPSILON, NOISE, SECONDS, accuracy_rows, percent
from .kind import TableKind, Trial
from .paper_figures import add_legend, colours, new_figure, save

_AUC = "auc"
_ERRORS = (1.5, 2, 3, 5, 10, 20, 40)
"""Where accuracies are marked, in percent wrong."""


class BestTable(TableKind):
    """A line for each algorithm of each features and epsilon, and the same crosswise."""

    name = "best-accuracy"
    sentence = "test accuracy, and AUC where there are two classes, by features, method and epsilon"
    curves_needed = frozenset({_AUC})

    columns = (
        Column("table", "the features, or the part of the table that the line belongs to", label=True),
        Column("algorithm", "what was run", label=True),
        Column("mu", "what every run of the line guarantees, in the terms above", form=rounded_up, missing="none"),
        EPSILON,
        ACCURACY,
        Column("AUC %", "area under the ROC curve, likewise", form=".1f", spread="± AUC"),
        Column("releases", "releases of a machine", "releases a machine", ".0f"),
        NOISE,
        SECONDS,
    )

    def curves(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The AUC at the end."""
        return {_AUC: {"rounds": [document["rounds"]], "values": [document["auc"]]}}

    def entry(self, best: Trial, trials: Sequence[Trial], choice: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The AUC."""
        return {_AUC: statistics([run["curves"][_AUC]["values"][-1] for run in best.runs])}

    def table(self, document: Mapping[str, Any], title: str = "") -> Table:
        """A line for each algorithm of each cell."""
        rows, caption = best_rows(document), str(document.get("guarantee", ""))
        return Table(title, self.columns, rows, caption, draw=lambda path: _draw(document, title, caption, path))

    def further_tables(self, document: Mapping[str, Any]) -> list[Table]:
        """A line for each features and method, accuracies beside each other by epsilon; the same of AUCs."""
        rows, caption = best_rows(document), str(document.get("guarantee", ""))
        images = [row for row in rows if row["AUC %"] is None]
        tables = [row for row in rows if row["AUC %"] is not None]
        made = [
            ("test accuracy in percent", images, "accuracy %", "± std"),
            ("AUC in percent", tables, "AUC %", "± AUC"),
        ]
        return [_crosswise(title, part, value, std, caption) for title, part, value, std in made if part]


def best_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One flat row for each algorithm of each cell."""
    entries = [entry for cell in document["cells"] for entry in cell["algorithms"].values()]
    return [
        {
            **row,
            "AUC %": percent(entry[_AUC]["mean"]),
            "± AUC": percent(entry[_AUC]["std"]) if row["runs"] > 1 else None,
            "releases a machine": entry["releases"]["mean"] / row["machines"],
        }
        for row, entry in zip(accuracy_rows(document), entries, strict=True)
    ]


def _crosswise(title: str, rows: Sequence[Row], value: str, std: str, caption: str) -> Table:
    by_epsilon = {row["epsilon"]: epsilon_name(row["epsilon"]) for row in rows}
    known = sorted(by_epsilon, key=lambda epsilon: float("inf") if epsilon is None else epsilon)
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        place = row["table"], row["algorithm"]
        line = lines.setdefault(place, {"table": place[0], "algorithm": place[1]})
        name = by_epsilon[row["epsilon"]]
        line |= {name: row[value], f"± {name}": row[std]}
    columns = [
        Column("table", "the features, or the part of the table that the line belongs to", label=True),
        Column("algorithm", "what was run", label=True),
        *(
            Column(by_epsilon[one], "mean ± standard deviation over seeds", form=".1f", spread=f"± {by_epsilon[one]}")
            for one in known
        ),
    ]
    full = [
        {**{column.name: None for column in columns[2:]}, **{f"± {c.name}": None for c in columns[2:]}, **line}
        for line in lines.values()
    ]
    return Table(title, columns, full, caption)


def epsilon_name(epsilon: float | None) -> str:
    """The heading of a column of figures at an epsilon."""
    return "no noise" if epsilon is None else f"epsilon {rounded_up(epsilon)}"


def _draw(document: Mapping[str, Any], title: str, caption: str, path: Path) -> None:
    """A panel for each part of the table: accuracy, or AUC, against epsilon, a line for each algorithm."""
    rows, colour = best_rows(document), colours(document)
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(row["table"], []).append(row)
    columns = min(len(panels), 3)
    lines = -(-len(panels) // columns)
    figure = new_figure(4.4 * columns, 3.2 * lines + 1.4)
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes, (name, shown) in zip(grid, panels.items(), strict=False):
        measure = "accuracy %" if shown[0]["AUC %"] is None else "AUC %"
        for label in dict.fromkeys(row["algorithm"] for row in shown):
            _draw_line(axes, [row for row in shown if row["algorithm"] == label], measure, colour[label])
        axes.set_title(name, fontsize=9)
        axes.set_xlabel(f"epsilon at delta = {shown[0]['delta']:g}", fontsize=8)
        axes.set_ylabel("test accuracy [%]" if measure == "accuracy %" else measure, fontsize=8)
        axes.grid(alpha=0.3)
        if measure == "accuracy %":
            axes.set_yscale("log")
            axes.invert_yaxis()
            axes.set_yticks(_ERRORS, [f"{100 - error:g}" for error in _ERRORS])
            axes.set_yticks([], minor=True)
    add_legend(figure, list(figure.axes), columns=3)
    save(figure, path, f"{title}: mean and standard deviation over {document['seeds']} runs", caption, 60 * columns)


def _draw_line(axes: Any, rows: Sequence[Row], measure: str, colour: Any) -> None:
    """One algorithm in one panel; without noise it is a line across."""
    height = (lambda value: 100 - value) if measure == "accuracy %" else float
    noisy = sorted((row for row in rows if row["epsilon"] is not None), key=lambda row: row["epsilon"])
    for row in rows:
        if row["epsilon"] is None:
            axes.axhline(height(row[measure]), color=colour, linestyle=":", label=row["algorithm"])
    if noisy:
        axes.set_xscale("log")
        std = "± std" if measure == "accuracy %" else "± AUC"
        axes.errorbar(
            [row["epsilon"] for row in noisy],
            [height(row[measure]) for row in noisy],
            yerr=[row[std] or 0.0 for row in noisy],
            color=colour,
            label=noisy[0]["algorithm"],
            marker="o",
            markersize=3.5,
            capsize=2,
        )
