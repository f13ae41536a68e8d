"""The README's picture: what an epsilon buys on MNIST, by method and features.

``python -m benchmarks.pages`` draws docs/pictures/accuracy.svg from docs/results/best-accuracy.json. The text of the
picture stays text, so that a test can hold its figures against that document.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from murmurfl.app.papers.best_accuracy import BEST, FULL, NOISY_SGD, ONE_PASS, SECURE, SOFT, WITHOUT, best_rows
from murmurfl.app.reports.figures import empty_figure
from murmurfl.privacy import rounded_up

_COLUMNS = 170
_ERRORS = (1, 2, 3, 5, 10, 20, 40)
"""Where accuracies are marked, in percent wrong."""


class Line(NamedTuple):
    """A line of the picture and a row of the README's table."""

    name: str
    features: str
    algorithm: str
    colour: str

    def rows(self, document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Its rows of the reproduction, the strictest epsilon first."""
        found = [
            row for row in best_rows(document) if (row["table"], row["algorithm"]) == (self.features, self.algorithm)
        ]
        return sorted(found, key=lambda row: row["epsilon"] or 0.0)


LINES = (
    Line("full batches, scattering + strokes, only sums are seen", BEST, SECURE, "#4c9f70"),
    Line("full batches, scattering + strokes", BEST, FULL, "#0b3c49"),
    Line("full batches, soft gradients", SOFT, FULL, "#1f6f8b"),
    Line("one pass of DP-μ²-FL, soft gradients", SOFT, ONE_PASS, "#d98e5f"),
    Line("one pass of noisy SGD, soft gradients", SOFT, NOISY_SGD, "#b0b7bc"),
)
NOISELESS = Line("full batches, scattering + strokes, without noise", BEST, WITHOUT, "#777777")


class Record(NamedTuple):
    """A figure that others print, under assumptions of its own."""

    name: str
    epsilon: float
    accuracy: float
    assumes: str


CENTRAL = Record(
    "DP-SGD's record", 2.93, 98.7, "central: one trusted trainer has all data; ε for a sample added or removed"
)
"""Tramèr and Boneh 2021, "Differentially Private Learning Needs Better Features (or Much More Data)": scattering and a
linear model, delta = 1e-5."""


def drawn(document: Mapping[str, Any]) -> dict[Line, list[Mapping[str, Any]]]:
    """The lines that the document has, with their rows."""
    return {line: rows for line in (*LINES, NOISELESS) if (rows := line.rows(document))}


def percent_text(value: float) -> str:
    """A percentage as the picture shows it."""
    return f"{value:.1f}"


def draw(document: Mapping[str, Any], caption: str, path: Path) -> None:
    """Write the picture.

    Parameters
    ----------
    document : mapping
        Of ``best-accuracy``.
    caption : str
        What its epsilons are true of.
    path : Path
        Of an SVG.
    """
    from matplotlib import rc_context

    # Text as text, and identifiers from a salt of ours: the same document gives the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "murmurfl", "font.family": "sans-serif"}):
        figure = empty_figure(10, 5.4)
        axes = figure.add_subplot()
        for line, rows in drawn(document).items():
            _draw_line(axes, line, rows)
        axes.plot(CENTRAL.epsilon, 100 - CENTRAL.accuracy, "*", color="#8a1c1c", markersize=12)
        _note(axes, CENTRAL.epsilon, CENTRAL.accuracy, percent_text(CENTRAL.accuracy), "#8a1c1c")
        axes.plot([], [], "*", color="#8a1c1c", label=f"{CENTRAL.name} ({CENTRAL.assumes})")
        _name_axes(axes, [row["epsilon"] for rows in drawn(document).values() for row in rows if row["epsilon"]])
        axes.legend(loc="lower right", fontsize=8, frameon=False)
        figure.supxlabel(textwrap.fill(caption, _COLUMNS), fontsize=6.5, color="#444444")
        figure.savefig(path, metadata={"Date": None})
    # One newline at the end and none before line ends, as for every other text of the repository.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def _draw_line(axes: Any, line: Line, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows[0]["epsilon"] is None:
        axes.axhline(100 - rows[0]["accuracy %"], color=line.colour, linestyle=":", label=line.name)
        return
    axes.errorbar(
        [row["epsilon"] for row in rows],
        [100 - row["accuracy %"] for row in rows],
        yerr=[row["± std"] or 0.0 for row in rows],
        color=line.colour,
        label=line.name,
        marker="o",
        markersize=4,
        capsize=2,
    )
    for row in rows:
        text = percent_text(row["accuracy %"])
        _note(axes, row["epsilon"], row["accuracy %"], text, line.colour, below=line is LINES[-1])


def _note(axes: Any, epsilon: float, accuracy: float, text: str, colour: str, *, below: bool = False) -> None:
    axes.annotate(
        text,
        (epsilon, 100 - accuracy),
        xytext=(0, -14 if below else 6),
        textcoords="offset points",
        ha="center",
        fontsize=8,
        color=colour,
    )


def _name_axes(axes: Any, epsilons: Sequence[float]) -> None:
    """Epsilon along, accuracy up, by the logarithm of the error: what is near 100 % is told apart too."""
    ticks = sorted(set(epsilons))
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"ε = {rounded_up(tick)}" for tick in ticks], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_yscale("log")
    axes.invert_yaxis()
    axes.set_yticks(_ERRORS, [f"{100 - error:g}" for error in _ERRORS], fontsize=8)
    axes.set_yticks([], minor=True)
    axes.set_ylabel("test accuracy on MNIST [%]")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
