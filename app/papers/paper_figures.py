"""Parts of the pictures of reproductions: colours of algorithms, bands, legend and heading."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..reports.figures import empty_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def colours(document: Mapping[str, Any]) -> dict[str, Any]:
    """A colour for each algorithm of a document, the same in all its panels."""
    from matplotlib import colormaps

    labels = list(dict.fromkeys(label for cell in document["cells"] for label in cell["algorithms"]))
    palette = colormaps["tab10"].colors  # type: ignore[attr-defined]
    return {label: palette[i % len(palette)] for i, label in enumerate(labels)}


def panels(count: int, most_columns: int, size: tuple[float, float], below: float) -> tuple[Figure, list[Axes], int]:
    """A figure of so many panels of a size, with room below them; the panels, and how many stand in a row."""
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


def draw_band(
    axes: Axes, rounds: list[int], line: list[float], band: tuple[list[float], list[float]], **style: Any
) -> None:
    """A curve and the band around it."""
    axes.plot(rounds, line, linewidth=1.4, **style)
    axes.fill_between(rounds, *band, color=style["color"], alpha=0.15, linewidth=0)


def add_legend(figure: Figure, axes: list[Axes], columns: int = 8) -> None:
    """One legend below all panels, each algorithm once."""
    known = {text: handle for one in axes for handle, text in zip(*one.get_legend_handles_labels(), strict=True)}
    ncols = min(len(known), columns)
    figure.legend(list(known.values()), list(known), loc="outside lower center", ncols=ncols, fontsize=8)


def save(figure: Figure, path: Path, heading: str, caption: str, columns: int) -> None:
    """Put the heading and the caption, wrapped to so many columns, above a figure, and write it."""
    figure.suptitle(f"{heading}\n{textwrap.fill(caption, columns)}", fontsize=9)
    figure.savefig(path, dpi=110)
