"""A table: its rows, its columns with what they mean, and every form it is shown in.

The terminal, the Markdown and the page of a report take their texts from the same columns, so that a figure is rounded
and named in one place.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ...privacy.errors import ConfigurationError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Marked:
    """A text whose beginning stands out: bold in Markdown, plain in a terminal."""

    bold: str
    rest: str = ""

    def __str__(self) -> str:
        """Return the text without any mark."""
        return self.bold + self.rest

    @property
    def markdown(self) -> str:
        """Text with the mark."""
        return f"**{self.bold}**{self.rest}"


def spread(mean: float, std: float | None, form: str, std_form: str = "") -> str:
    """Format a mean and its standard deviation for people; for a single run (None) the mean alone."""
    return f"{mean:{form}}" if std is None else f"{mean:{form}} ± {std:{std_form or form}}"


@dataclass(frozen=True)
class Column:
    """One column.

    Parameters
    ----------
    name : str
        Its heading, which no other column of the table has.
    meaning : str
        What stands in it, in words.
    value : str or callable, optional
        The key of its value in a row, or what makes the value of a row; default the name.
    form : str or callable
        How a value becomes a text: a format such as ``.1f``, or a function.
    spread : str
        The key of a standard deviation that is shown behind the value in the same format; a row without one (None) is
        of a single run.
    missing : str
        What stands for None.
    label : bool
        Whether it says whose a row is. Such columns stand on the left wherever a table is cut.
    """

    name: str
    meaning: str
    value: str | Callable[[Row], Any] = ""
    form: str | Callable[[Any], str | Marked] = ""
    spread: str = ""
    missing: str = ""
    label: bool = False

    def shown(self, row: Row) -> str | Marked:
        """Return the text of a row in this column."""
        value = self.value(row) if callable(self.value) else row.get(self.value or self.name)
        if value is None:
            return self.missing
        if callable(self.form):
            return self.form(value)
        return spread(value, row[self.spread], self.form) if self.spread else format(value, self.form)


@dataclass(frozen=True)
class Table:
    """Rows and columns.

    Parameters
    ----------
    rows : sequence of mapping
        What the lines show, alike in their keys.
    caption : str
        What the table's epsilons are true of; empty for a table without any.
    figures : sequence of mapping, optional
        The flat rows of the CSV and the JSON, where they are others than the lines'; default ``rows``.
    draw : callable, optional
        Draws the table's picture into a file.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    caption: str = ""
    figures: Sequence[Row] | None = None
    draw: Callable[[Path], None] | None = None

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigurationError(
                f"Expected columns with names of their own, got two called {twice[0]!r}.",
                kind="duplicate",
                setting="columns",
            )

    @property
    def labels(self) -> list[str]:
        """The names of the columns that say whose a row is."""
        return [column.name for column in self.columns if column.label]

    def texts(self) -> list[dict[str, str]]:
        """Every line as texts by the names of the columns, for a terminal or a page."""
        return [{column.name: str(column.shown(row)) for column in self.columns} for row in self.rows]

    def markdown(self) -> str:
        """Return the table in Markdown, without its caption; it ends with a newline."""
        lines = [[column.name for column in self.columns]]
        lines += [[_markdown(column.shown(row)) for column in self.columns] for row in self.rows]
        written = ["| " + " | ".join(line) + " |" for line in lines]
        written.insert(1, f"|{'---|' * len(self.columns)}")
        return "\n".join(written) + "\n"

    def csv(self) -> str:
        """Return the figures unrounded, a line each, with the caption in the column ``guarantee`` of each."""
        figures = self._figures
        buffer = io.StringIO(newline="")
        names = list(dict.fromkeys(name for row in figures for name in row))
        writer = csv.DictWriter(buffer, fieldnames=[*names, *(["guarantee"] if self.caption else [])])
        writer.writeheader()
        writer.writerows({**row, "guarantee": self.caption} if self.caption else dict(row) for row in figures)
        return buffer.getvalue()

    def document(self) -> dict[str, Any]:
        """Everything as plain values: title, guarantee, the columns and what they mean, and the figures unrounded."""
        return {
            "title": self.title,
            "guarantee": self.caption,
            "columns": [{"name": column.name, "meaning": column.meaning} for column in self.columns],
            "rows": [dict(row) for row in self._figures],
        }

    @property
    def _figures(self) -> Sequence[Row]:
        return self.rows if self.figures is None else self.figures


def _markdown(cell: str | Marked) -> str:
    # A label is anybody's text; a bar in it would be one column more.
    return (cell.markdown if isinstance(cell, Marked) else cell).replace("|", "\\|")


def statistics(values: Sequence[float | None], digits: int | None = None) -> dict[str, Any]:
    """Mean, standard deviation and the values themselves.

    Parameters
    ----------
    values : sequence of float or None
        One a seed. None stands for no finite number, such as the epsilon of a run without noise; with one of them there
        is neither a mean nor a deviation.
    digits : int, optional
        To how many digits the values are kept; default all.
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return {"mean": None, "std": None, "runs": list(values)}
    runs = known if digits is None else [short(value, digits) for value in known]
    return {"mean": fmean(known), "std": stdev(known) if len(known) > 1 else 0.0, "runs": runs}


def curve_statistics(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation of each curve over runs with the same rounds."""
    curves = {}
    for name, first in runs[0].items():
        columns = list(zip(*(run[name]["values"] for run in runs), strict=True))
        curves[name] = {
            "rounds": first["rounds"],
            "mean": [fmean(column) for column in columns],
            "std": [stdev(column) if len(column) > 1 else 0.0 for column in columns],
        }
    return curves


def short(value: float, digits: int = 5) -> float:
    """Round a value to so many digits: a document of thousands of figures need not have sixteen of each."""
    return float(f"{value:.{digits}g}")
