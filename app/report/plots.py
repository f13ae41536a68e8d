"""The figures of a report: drawn once, as PNG, as SVG, and as SVG that takes a page's colours, light or dark.

Colours are Okabe and Ito's, which people with any colour vision tell apart; lines differ in dashes as well.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...privacy import rounded_up
from .recorded import RecordedRun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, PINK, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"
_PALETTE = (BLUE, RED, GREEN, PINK, ORANGE, SKY)
_DASHES = ("-", "--", "-.", ":")
_INK, _GRID = "#1a1c1e", "#9aa0a6"
_SIZE = (6.4, 3.6)
_MOST_CELLS = 6000
_MOST_LINES = 30
_MOST_BARS = 120
_MOST_ROWS = 150
_ROW_GROUPS = 60

BOOKKEEPING = (
    "Lines are bookkeeping: what the releases made so far would cost had their number been fixed in advance; a request "
    "without an answer counts as a release. What is guaranteed is the dashed line, from the first round on."
)


@dataclass(frozen=True)
class Plot:
    """One figure.

    Parameters
    ----------
    name : str
        Of its files.
    title, caption : str
        What it shows, and how to read it.
    figure : Figure
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
        self.figure.axes[0].set_title(self.title, loc="left", fontsize=11)
        if self.note:
            lines = [line for part in self.note.splitlines() for line in textwrap.wrap(part, 120)]
            self.figure.set_size_inches(_SIZE[0], _SIZE[1] + 0.12 * len(lines))
            self.figure.suptitle("\n".join(lines), fontsize=6.5, x=0.02, ha="left")
        stem = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', prefix)}-{self.name}"
        with _style():
            self.figure.savefig(folder / f"{stem}.png", dpi=150, facecolor="white")
        (folder / f"{stem}.svg").write_text(self._svg(transparent=False), encoding="utf-8")

    def inline(self, prefix: str) -> dict[str, str]:
        """For a page: the figure's SVG with the page's colours and with names no other figure has."""
        text = self._svg(transparent=True)
        text = text[text.index("<svg") :]
        own = f"{prefix}-{self.name}"
        text = re.sub(r'\bid="', f'id="{own}-', text)
        text = re.sub(r'(xlink:href="|href="|url\()#', rf"\g<1>#{own}-", text)
        text = re.sub(r"<svg[^>]*viewBox=(\"[^\"]*\")[^>]*>", r'<svg xmlns="http://www.w3.org/2000/svg" '
                      r'xmlns:xlink="http://www.w3.org/1999/xlink" viewBox=\1 role="img">', text, count=1)  # fmt: skip
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        for colour, variable in {_INK: "currentColor", _GRID: "var(--grid)"}.items():
            text = text.replace(colour, variable)
        for number, colour in enumerate(_PALETTE):
            text = text.replace(colour, f"var(--c{number})")
        return {"title": self.title, "caption": self.caption, "svg": text}

    def _svg(self, *, transparent: bool) -> str:
        buffer = io.StringIO()
        with _style():
            self.figure.savefig(buffer, format="svg", transparent=transparent, metadata={"Date": None})
        return buffer.getvalue()


def run_plots(run: RecordedRun) -> list[Plot]:
    """The figures of one run; those whose figures were not recorded are left out."""
    made = [_measure([run], "accuracy"), _measure([run], "loss"), _epsilon(run), _participation(run), _replies(run)]
    return [plot for plot in (*made, _noise(run)) if plot is not None]


def compared_plots(runs: Sequence[RecordedRun]) -> list[Plot]:
    """The figures of several runs together."""
    made = [_measure(runs, "accuracy"), _measure(runs, "loss"), _against_epsilon(runs)]
    return [plot for plot in made if plot is not None]


@contextmanager
def _style() -> Iterator[None]:
    from matplotlib import rc_context

    ink = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    settings: Any = {
        **dict.fromkeys(ink, _INK),
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


def _figure(height: float = _SIZE[1]) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(figsize=(_SIZE[0], height), layout="constrained")
        FigureCanvasAgg(figure)
        return figure, figure.add_subplot()


def _rounds_along(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _line(number: int) -> dict[str, Any]:
    return {"color": _PALETTE[number % len(_PALETTE)], "linestyle": _DASHES[number // len(_PALETTE) % len(_DASHES)]}


def _measure(runs: Sequence[RecordedRun], measure: str) -> Plot | None:
    curves = [(number, run, *run.curve(measure)) for number, run in enumerate(runs)]
    curves = [curve for curve in curves if curve[2]]
    if not curves:
        return None
    figure, axes = _figure()
    percent = 100 if measure == "accuracy" else 1
    with _style():
        for number, run, rounds, values in curves:
            axes.plot(
                rounds,
                [percent * value for value in values],
                label=run.name,
                linewidth=2,
                marker="o" if len(rounds) <= 40 else None,
                markersize=3.5,
                **_line(number),
            )
        _rounds_along(axes)
        axes.set_ylabel("test accuracy [%]" if measure == "accuracy" else "test loss")
        if measure == "accuracy":
            axes.set_ylim(0, 100)
        if len(runs) > 1:
            figure.legend(loc="outside lower center", ncols=min(len(runs), 2))
    title = f"{measure.capitalize()} against rounds"
    return Plot(measure, title, "Of the published model, on the test set, which is public.", figure)


def _against_epsilon(runs: Sequence[RecordedRun]) -> Plot | None:
    known = [(i, run) for i, run in enumerate(runs) if run.document["epsilon"] and run.document["accuracy"] is not None]
    if len(known) < 2:
        return None
    figure, axes = _figure()
    with _style():
        for number, run in known:
            axes.plot(
                run.document["epsilon"],
                100 * run.document["accuracy"],
                "osD^vP"[number % 6],
                color=_PALETTE[number % len(_PALETTE)],
                markersize=9,
                label=run.name,
            )
        axes.set_xscale("log")
        axes.set_xlabel("ε of the whole run (less is more private)")
        axes.set_ylabel("test accuracy [%]")
        axes.set_ylim(0, 100)
        axes.set_xlim(*_padded([run.document["epsilon"] for _, run in known]))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
        figure.legend(loc="outside lower center", ncols=min(len(known), 2))
    note = "\n".join(f"{run.name}: {run.document['guarantee']}" for _, run in known)
    return Plot("accuracy-epsilon", "Accuracy against ε", "Each ε is its run's own guarantee, as above.", figure, note)


def _padded(values: Sequence[float]) -> tuple[float, float]:
    return min(values) / 1.6, max(values) * 1.6


def _epsilon(run: RecordedRun) -> Plot | None:
    epsilons, guaranteed = run.epsilons, run.document["epsilon"]
    if epsilons is None or guaranteed is None:
        return None
    figure, axes = _figure()
    known = epsilons[~np.isnan(epsilons).any(axis=1)]
    with _style():
        if len(known) <= _MOST_LINES:
            for i, line in enumerate(known):
                label = "each machine" if not i else None
                axes.step(run.rounds, line, where="post", color=SKY, linewidth=1, alpha=0.8, label=label)
        else:
            low, high = np.percentile(known, (5, 95), axis=0)
            axes.fill_between(
                run.rounds, low, high, step="post", color=SKY, alpha=0.35, linewidth=0, label="9 of 10 machines"
            )
            axes.step(run.rounds, np.median(known, axis=0), where="post", color=SKY, linewidth=1.5, label="median")
        axes.step(run.rounds, known.max(axis=0), where="post", color=BLUE, linewidth=2.2, label="the largest")
        axes.axhline(
            guaranteed, color=RED, linestyle="--", linewidth=1.8, label=f"guaranteed: ε = {rounded_up(guaranteed)}"
        )
        axes.set_ylim(0, guaranteed * 1.12)
        _rounds_along(axes)
        axes.set_ylabel(f"ε at δ = {run.document['delta']:g}")
        figure.legend(loc="outside lower center", ncols=4)
    note = f"{run.document['guarantee']} {BOOKKEEPING}"
    return Plot("epsilon", "ε spent against rounds, by machine", BOOKKEEPING, figure, note)


def _participation(run: RecordedRun) -> Plot | None:
    table = run.participation
    if table is None:
        return None
    rows = len(table)
    figure, axes = _figure(min(max(2.2, 0.8 + 0.16 * rows), 6.0))
    edges = np.array(run.rounds, dtype=float) - 0.5
    extent = np.append(edges, edges[-1] + 1)
    with _style():
        axes.grid(visible=False)
        draw = _shares_of_groups if rows > _MOST_ROWS else _each_machine
        caption = draw(figure, axes, table, extent)
        if rows <= _MOST_LINES:
            axes.set_yticks(range(rows), run.names, fontsize=8)
        axes.invert_yaxis()
        _rounds_along(axes)
        axes.set_ylabel("machine")
    return Plot("participation", "Who took part", caption, figure)


def _shares_of_groups(figure: Figure, axes: Axes, table: NDArray[np.int32], extent: NDArray[np.float64]) -> str:
    """More machines than a picture has rows: how many of neighbouring ones took part. Its caption is returned."""
    groups = np.array_split(np.arange(len(table)), _ROW_GROUPS)
    shares = np.array([100 * (table[group] > 0).mean(axis=0) for group in groups])
    mesh = axes.pcolormesh(extent, np.linspace(0, len(table), _ROW_GROUPS + 1), shares, cmap="cividis", rasterized=True)
    figure.colorbar(mesh, label="machines with an aggregated release [%]")
    return f"Machines in order, in {_ROW_GROUPS} groups: how many of each had a release aggregated in a round."


def _each_machine(figure: Figure, axes: Axes, table: NDArray[np.int32], extent: NDArray[np.float64]) -> str:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    axes.pcolormesh(
        extent,
        np.arange(len(table) + 1) - 0.5,
        np.ma.masked_less(np.where(table > 0, 1, table), 0),
        cmap=ListedColormap([RED, BLUE]),
        vmin=0,
        vmax=1,
        edgecolor="none",
        rasterized=table.size > _MOST_CELLS,
    )
    colours = {"aggregated": BLUE, "asked, nothing aggregated": RED}
    patches = [Patch(color=colour, label=label) for label, colour in colours.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=2)
    return "Empty: not asked. Nothing aggregated: the reply was lost, refused, late, malformed or not opened."


def _replies(run: RecordedRun) -> Plot:
    figure, axes = _figure()
    history = run.document["per_round"]
    kinds = {
        "aggregated": (BLUE, [entry["aggregated"] for entry in history]),
        "lost": (RED, [entry["lost"] for entry in history]),
        "refused": (ORANGE, [sum(entry["refused"].values()) for entry in history]),
        "late": (PINK, [entry["late"] for entry in history]),
        "malformed": (GREEN, [entry["malformed"] for entry in history]),
        "not opened": (SKY, [entry.get("unopened", 0) for entry in history]),
    }
    groups = np.array_split(np.arange(len(history)), min(len(history), _MOST_BARS))
    rounds = np.array([np.mean([run.rounds[i] for i in group]) for group in groups])
    widths = np.array([(0.92 if len(groups) <= 40 else 1.0) * len(group) for group in groups])
    with _style():
        bottom = np.zeros(len(groups))
        for label, (colour, counts) in kinds.items():
            if label != "aggregated" and not any(counts):
                continue
            heights = np.array([np.mean([counts[i] for i in group]) for group in groups])
            axes.bar(rounds, heights, widths, bottom=bottom, color=colour, label=label, linewidth=0)
            bottom += heights
        _rounds_along(axes)
        axes.set_ylabel("requests" + (", mean of neighbouring rounds" if len(groups) < len(history) else ""))
        axes.grid(visible=False, axis="x")
        figure.legend(loc="outside lower center", ncols=6)
    return Plot("replies", "What became of the requests", "Kinds that never occurred are left out.", figure)


def _noise(run: RecordedRun) -> Plot | None:
    # Machines with the same noise differ only in how far they may go: the longest is drawn.
    levels: dict[float, dict[str, Any]] = {}
    for stream in (run.machines or {}).get("streams", []):
        level = levels.setdefault(stream["noise_std"], {"machines": 0, "releases": []})
        level["machines"] += len(stream["machines"])
        if len(stream["releases"]) > len(level["releases"]):
            level |= {"releases": stream["releases"], "prefix_std": stream["prefix_std"]}
            level["sensitivity"] = stream["sensitivity"]
    if not levels:
        return None
    figure, axes = _figure()
    with _style():
        for number, (std, level) in enumerate(sorted(levels.items())[: len(_PALETTE)]):
            count = level["machines"]
            axes.plot(
                level["releases"][1:],  # the first is that of nothing released
                level["prefix_std"][1:],
                linewidth=2,
                label=f"{count} machine{'s' if count > 1 else ''}, noise std {std:.3g} a row",
                **_line(number),
            )
        sensitivity = max(level["sensitivity"] for level in levels.values())
        axes.axhline(sensitivity, color=_INK, linestyle=":", linewidth=1.2, label="what one sample can move")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("release of a machine")
        axes.set_ylabel("noise of a prefix sum, std")
        figure.legend(loc="outside lower center", ncols=2)
    mechanism = next((statement["mechanism"] for statement in run.document.get("machines", {}).values()), "")
    caption = (
        f"Standard deviation, in one value, of the noise in all that a machine has released so far ({mechanism}); "
        "dotted: the most that one sample can move a release, in all values together."
    )
    return Plot("noise", "Noise level", caption, figure)
