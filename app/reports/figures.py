"""Figures of a report: drawn once, as PNG, as SVG, and as SVG that takes a page's colours.

Colours are Okabe and Ito's, which people with any colour vision tell apart; lines differ in dashes as well.
"""

from __future__ import annotations

import io
import re
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...privacy.errors import check_installed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, PINK, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"
PALETTE = (BLUE, RED, GREEN, PINK, ORANGE, SKY)
_DASHES = ("-", "--", "-.", ":")
INK, _GRID = "#1a1c1e", "#9aa0a6"
SIZE = (6.4, 3.6)


@dataclass(frozen=True)
class Plot:
    """One figure.

    Parameters
    ----------
    name : str
        Of its files.
    title, caption : str
        What it shows, and how to read it.
    note : str
        What stands in the files above the figure, where there is no page around it.
    """

    name: str
    title: str
    caption: str
    figure: Figure
    note: str = ""

    def write(self, folder: Path, prefix: str) -> None:
        """``<prefix>-<name>.png`` and ``.svg``; to be called after :meth:`inline`, for it adds title and note."""
        self.figure.axes[0].set_title(plain_text(self.title), loc="left", fontsize=11)
        if self.note:
            lines = [line for part in plain_text(self.note).splitlines() for line in textwrap.wrap(part, 120)]
            self.figure.set_size_inches(SIZE[0], SIZE[1] + 0.12 * len(lines))
            self.figure.suptitle("\n".join(lines), fontsize=6.5, x=0.02, ha="left")
        stem = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', prefix)}-{self.name}"
        with figure_style():
            self.figure.savefig(folder / f"{stem}.png", dpi=150, facecolor="white")
        (folder / f"{stem}.svg").write_text(self._svg(transparent=False), encoding="utf-8")

    def inline(self, prefix: str) -> dict[str, str]:
        """Return the figure's SVG for a page, in the page's colours and with ids that no other figure has."""
        text = self._svg(transparent=True)
        text = text[text.index("<svg") :]
        own = f"{prefix}-{self.name}"
        text = re.sub(r'\bid="', f'id="{own}-', text)
        text = re.sub(r'(xlink:href="|href="|url\()#', rf"\g<1>#{own}-", text)
        text = re.sub(r"<svg[^>]*viewBox=(\"[^\"]*\")[^>]*>", r'<svg xmlns="http://www.w3.org/2000/svg" '
                      r'xmlns:xlink="http://www.w3.org/1999/xlink" viewBox=\1 role="img">', text, count=1)  # fmt: skip
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        for colour, variable in {INK: "currentColor", _GRID: "var(--grid)"}.items():
            text = text.replace(colour, variable)
        for number, colour in enumerate(PALETTE):
            text = text.replace(colour, f"var(--c{number})")
        return {"title": self.title, "caption": self.caption, "svg": text}

    def _svg(self, *, transparent: bool) -> str:
        buffer = io.StringIO()
        with figure_style():
            self.figure.savefig(buffer, format="svg", transparent=transparent, metadata={"Date": None})
        return buffer.getvalue()


def plain_text(text: str) -> str:
    """Return a text for a figure in which dollar signs are dollar signs, and no formula of matplotlib's."""
    return text.replace("$", r"\$")


@contextmanager
def figure_style() -> Iterator[None]:
    """Colours and lines of every figure."""
    check_installed("matplotlib", "reports", "figures")
    from matplotlib import rc_context

    ink = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    settings: Any = {
        **dict.fromkeys(ink, INK),
        "grid.color": _GRID,
        "grid.alpha": 0.35,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "font.size": 10,
        "svg.fonttype": "none",
        "svg.hashsalt": "murmurfl",
    }
    with rc_context(settings):
        yield


def empty_figure(width: float, height: float) -> Figure:
    """Make an empty figure of a size in inches; no display is needed."""
    check_installed("matplotlib", "reports", "figures")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_figure(height: float = SIZE[1]) -> tuple[Figure, Axes]:
    """Make a report's empty figure, ``height`` inches high, and its axes."""
    with figure_style():
        figure = empty_figure(SIZE[0], height)
        return figure, figure.add_subplot()


def rounds_along(axes: Axes) -> None:
    """Label the x axis with rounds."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def line_style(number: int) -> dict[str, Any]:
    """Colour and dashes of a line, another one for each number."""
    return {"color": PALETTE[number % len(PALETTE)], "linestyle": _DASHES[number // len(PALETTE) % len(_DASHES)]}
