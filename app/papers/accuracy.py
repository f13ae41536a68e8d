"""Kinds of tables: what each needs of a run, the rows, columns and pictures that they share, the table of accuracies.

A paper names its kind. Nothing about a table is guessed from what a document happens to hold.
"""

from __future__ import annotations

import textwrap
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from ...privacy.accounting.guarantee import rounded_up
from ...privacy.errors import ConfigurationError
from ..reports.figures import empty_figure
from ..reports.table import Column, Row, Table
from ..settings.run_config import NO_NOISE, RunConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = Mapping[str, Any]
"""A run as a table needs it: the :data:`FIGURES` and its ``curves``."""
Document = Mapping[str, Any]

FIGURES = (
    "accuracy", "loss", "mu", "epsilon", "mu_local", "epsilon_local", "delta", "seconds", "releases", "refusals",
    "lost_replies",
)  # fmt: skip
"""Figures of a run's result that every table needs."""


@dataclass(frozen=True)
class Trial:
    """The runs of an algorithm with one step, one a seed.

    Parameters
    ----------
    config : RunConfig
        Of the first of them.
    covered : bool
        Whether the guarantee holds for this step. One for which it does not is no result.
    """

    config: RunConfig
    covered: bool
    runs: Sequence[Run]


class Measure(NamedTuple):
    """The measure of runs that choose a step; less is better."""

    name: str
    of: Callable[[Run], float]


class TableKind(ABC):
    """One kind of table. An instance must be picklable: worker processes ask it for the curves of a run."""

    name: str
    """Such as ``accuracy``."""
    sentence: str
    """A description of what it shows."""
    columns: Sequence[Column] = ()
    """The columns of the first table, one line for each algorithm of each cell."""
    curves_needed: frozenset[str] = frozenset()
    """Curves it needs; a finished run that was kept without them is made again."""
    honest_in_columns: bool = False
    """Whether it has columns for the honest clients of each sum and for the worst case."""
    has_alone: bool = False
    """Whether it has a line for one client alone, without noise."""
    digits: int | None = None
    """Digits of single runs' figures in a document; None keeps all."""
    indent: int | None = 2
    """Indent of the JSON; None writes one line, for documents with thousands of figures."""

    def check(self, config: RunConfig) -> None:  # noqa: B027 - most kinds can show any run
        """Refuse a run that such a table cannot show."""

    def curves(self, document: Document) -> dict[str, Any]:
        """Return the curves it keeps of a run's result document, by name: ``rounds`` and ``values`` of each."""
        return {}

    def measure(self, *, held_out: bool) -> Measure:
        """Return the measure of runs that choose a step.

        Parameters
        ----------
        held_out : bool
            Whether their loss is that of samples held out for it, and not the test set's.
        """
        if not held_out:
            raise ConfigurationError(
                f"Expected validation-samples among the validation settings of a cell with grids in a table of kind "
                f"{self.name!r}, got none: a step chosen on the test set would make its figures too good.",
                kind="missing",
                setting="validation-samples",
            )
        return Measure("held_out_loss", lambda run: float(run["loss"]))

    def best(self, trials: Sequence[Trial]) -> Trial:
        """Return the step that is an algorithm's result: of least mean loss at the end, covered if any is."""
        covered = [trial for trial in trials if trial.covered]
        return min(covered or trials, key=lambda trial: fmean(float(run["loss"]) for run in trial.runs))

    def entry(self, best: Trial, trials: Sequence[Trial], choice: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Entries of one algorithm in a reproduction's document, beside its figures.

        Parameters
        ----------
        best : Trial
            The step that is its result.
        trials : sequence of Trial
            All steps that were run with every seed.
        choice : sequence of mapping
            Steps of runs that chose one, and what they were judged by, the one that was used first.
        """
        return {}

    def summary(self, document: Document) -> dict[str, Any]:
        """Entries of the document for all its ``cells`` together."""
        return {}

    def row(self, cell: Document, label: str, entry: Document) -> dict[str, Any]:
        """Return the flat row of one algorithm of one cell."""
        return accuracy_row(cell, label, entry)

    def rows(self, document: Document) -> list[dict[str, Any]]:
        """One flat row for each algorithm of each cell."""
        return [self.row(cell, label, entry) for cell, label, entry in entries_of(document)]

    def draw(self, document: Document, title: str, path: Path) -> None:  # noqa: B027 - a kind may have no picture
        """Draw the picture of a reproduction's document into a file."""

    def table(self, document: Document, title: str = "") -> Table:
        """Return the table of a reproduction's document.

        Parameters
        ----------
        document : mapping
            With its ``cells``, the number of ``seeds``, and in ``guarantee`` what its epsilons are true of.
        title : str
            The paper's name.
        """
        rows, caption = self.rows(document), caption_of(document)
        return Table(title, self.columns, rows, caption, draw=lambda path: self.draw(document, title, path))

    def further_tables(self, document: Document) -> list[Table]:
        """Tables that stand below the first."""
        return []


def entries_of(document: Document) -> list[tuple[Document, str, Document]]:
    """Every cell, algorithm and entry of a document, in the order in which they are shown."""
    return [(cell, label, entry) for cell in document["cells"] for label, entry in cell["algorithms"].items()]


def caption_of(document: Document) -> str:
    """Return what a document's epsilons are true of."""
    return str(document.get("guarantee", ""))


def measured_rounds(document: Document, measure: str, factor: float = 1.0) -> dict[str, Any]:
    """Return the curve of a measure over the rounds of a run in which it was evaluated."""
    entries = [entry for entry in document["per_round"] if entry[measure] is not None]
    return {"rounds": [e["round"] for e in entries], "values": [factor * e[measure] for e in entries]}


def at_the_end(document: Document, value: float | None) -> dict[str, Any]:
    """Return a curve of one point, in a run's last round."""
    return {"rounds": [document["rounds"]], "values": [value]}


EPSILON = Column(
    "epsilon", "what every run of the line guarantees, in the terms above", form=rounded_up, missing="none"
)
MU = Column("mu", "what every run of the line guarantees, in the terms above", form=rounded_up)
AT_DELTA = Column("epsilon", "the same at delta", form=rounded_up)
PART = Column("table", "the part of the table that the line belongs to", label=True)
ALGORITHM = Column("algorithm", "what was run", label=True)
ASKED = Column(
    "asked of clients",
    "clients asked in a round, of all there are",
    lambda row: f"{row['asked']} of {row['clients']}",
)
NOISE = Column("noise", "quality of the noise; only exact noise carries the guarantee")
SECONDS = Column("seconds", "mean time of a run", form=".0f")
ACCURACY = Column("accuracy %", "test accuracy, mean ± standard deviation over seeds", form=".1f", spread="± std")
ALONE = "one client alone, without noise"
"""Label of the line in a table for one client alone: of simulated clients, and not private."""


def accuracy_row(cell: Document, label: str, entry: Document) -> dict[str, Any]:
    """Return settings, accuracy, loss and guarantee of one algorithm of one cell."""
    settings = {**RunConfig().to_mapping(), **cell["settings"], **entry.get("settings", {})}
    noisy = settings["mechanism"] != NO_NOISE
    runs = len(entry["accuracy"]["runs"])
    return {
        "table": cell["table"],
        "clients": settings["num-clients"],
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


def percent(share: float | None) -> float | None:
    """Return a share of one in percent; None, as the accuracy of a model that classifies nothing, stays None."""
    return None if share is None else 100 * share


def with_alone(document: Document) -> dict[str, Any]:
    """Return a document with one client alone among the algorithms of the first cell of each part that has it."""
    known: set[str] = set()
    cells = []
    for cell in document["cells"]:
        found = cell.get("alone")
        algorithms = dict(cell["algorithms"])
        if found and (part := repr((cell["table"], found))) not in known:
            known.add(part)
            algorithms[ALONE] = _alone_entry(found)
        cells.append({**cell, "algorithms": algorithms})
    return {**document, "cells": cells}


def _alone_entry(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of one client alone among algorithms: figures without a run, and no release."""
    figures = {**dict.fromkeys(FIGURES), "releases": 0, "refusals": 0, "lost_replies": 0, **found}
    return {
        **{name: {"mean": value, "std": None, "runs": []} for name, value in figures.items()},
        "settings": {"mechanism": NO_NOISE, "clients-per-round": 1},
        "paper": {},
    }


def colours(document: Document) -> dict[str, Any]:
    """Return a colour for each algorithm of a document, the same in all its panels."""
    from matplotlib import colormaps

    labels = list(dict.fromkeys(label for _, label, _ in entries_of(document)))
    palette = colormaps["tab10"].colors  # type: ignore[attr-defined]
    return {label: palette[i % len(palette)] for i, label in enumerate(labels)}


def panels(count: int, most_columns: int, size: tuple[float, float], below: float) -> tuple[Figure, list[Axes], int]:
    """Return a figure of so many panels of a size, with room below them; the panels, and how many stand in a row."""
    columns = min(count, most_columns)
    rows = -(-count // columns)
    figure = empty_figure(size[0] * columns, size[1] * rows + below)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[count:]:
        axes.set_visible(False)
    return figure, list(grid[:count]), columns


def accuracy_axis(axes: Axes, errors: tuple[float, ...]) -> None:
    """Accuracy up, by the logarithm of the error: accuracies near 100 % are told apart too."""
    axes.set_yscale("log")
    axes.invert_yaxis()
    axes.set_yticks(errors, [f"{100 - error:g}" for error in errors])
    axes.set_yticks([], minor=True)


def draw_by_epsilon(
    axes: Axes, rows: Sequence[Row], colour: Any, measure: str = "accuracy %", spread: str = "± std", **style: Any
) -> None:
    """Draw a measure of one algorithm against epsilon, with its deviation; without noise a line across."""
    height = (lambda value: 100 - value) if measure == "accuracy %" else float
    for row in rows:
        if row["epsilon"] is None:
            axes.axhline(height(row[measure]), color=colour, linestyle=":", label=row["algorithm"])
    noisy = sorted((row for row in rows if row["epsilon"] is not None), key=lambda row: row["epsilon"])
    if noisy:
        axes.set_xscale("log")
        axes.errorbar(
            [row["epsilon"] for row in noisy],
            [height(row[measure]) for row in noisy],
            yerr=[row[spread] or 0.0 for row in noisy],
            **{"color": colour, "label": noisy[0]["algorithm"], "marker": "o", "capsize": 2, **style},
        )


def draw_band(
    axes: Axes, rounds: list[int], line: list[float], band: tuple[list[float], list[float]], **style: Any
) -> None:
    """Draw a curve and the band around it."""
    axes.plot(rounds, line, linewidth=1.4, **style)
    axes.fill_between(rounds, *band, color=style["color"], alpha=0.15, linewidth=0)


def add_legend(figure: Figure, axes: list[Axes], columns: int = 8) -> None:
    """One legend below all panels, each algorithm once."""
    known = {text: handle for one in axes for handle, text in zip(*one.get_legend_handles_labels(), strict=True)}
    ncols = min(len(known), columns)
    figure.legend(list(known.values()), list(known), loc="outside lower center", ncols=ncols, fontsize=8)


def save(figure: Figure, path: Path, heading: str, document: Document, columns: int) -> None:
    """Put the heading and the document's caption, wrapped to so many columns, above a figure, and write it."""
    figure.suptitle(f"{heading}\n{textwrap.fill(caption_of(document), columns)}", fontsize=9)
    figure.savefig(path, dpi=110)


class AccuracyTable(TableKind):
    """A line for each algorithm: accuracy and loss, the paper's beside them."""

    name = "accuracy"
    has_alone = True
    sentence = "test accuracy and loss of each algorithm, and what the paper prints of it"

    columns = (
        Column("table", "the table, or the part of it, that the line belongs to", label=True),
        ASKED,
        Column("batch", "samples of a release"),
        Column("mu set", "the run configuration's mu", "mu asked", rounded_up),
        ALGORITHM,
        ACCURACY,
        Column("paper %", "the accuracy that the paper prints", form=".1f"),
        Column("loss", "test loss, mean over seeds", form=".4f"),
        Column("paper loss", "the loss that the paper prints", form=".3f"),
        EPSILON,
        NOISE,
        SECONDS,
    )

    def draw(self, document: Document, title: str, path: Path) -> None:
        """Draw a bar for each line, the paper's figure as a mark on it."""
        rows = self.rows(document)
        lines = textwrap.wrap(caption_of(document), 150)
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


_COLOURS = {"mu2": "#1f6f8b", "trusted-mu2": "#4c9f70", "noisy-sgd": "#b0b7bc"}
_OTHER_COLOUR = "#d98e5f"


def _named(row: Row) -> str:
    if row["algorithm"] == ALONE:
        return f"{row['table']}: one client alone"
    mu = "no noise" if row["mu asked"] is None else f"mu {rounded_up(row['mu asked'])}"
    return f"{row['table']}: {mu}, {row['asked']} of {row['clients']}, {row['algorithm']}"
