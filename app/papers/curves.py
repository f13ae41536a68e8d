"""Curves over rounds of a reproduction: means and bands over seeds, as figures."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SUMS = ("cumulative-loss", "dynamic-regret", "static-regret")
"""What is summed over rounds, beside the accuracy."""

_TITLES = {
    "accuracy": "test accuracy [%]",
    "cumulative-loss": "cumulative loss",
    "dynamic-regret": "dynamic regret",
    "static-regret": "static regret",
}


def run_curves(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """The curves of one run's result document, or None where none were computed."""
    if document["config"]["strategy"] == "shuffled":
        entries = [entry for entry in document["per_round"] if entry["loss"] is not None]
        return {"loss": {"rounds": [e["round"] for e in entries], "values": [e["loss"] for e in entries]}}
    if document.get("gradient_norms"):
        return {"gradient-norm": document["gradient_norms"]}
    if not document.get("online"):
        return None
    evaluated = [entry for entry in document["per_round"] if entry["accuracy"] is not None]
    accuracy = {"rounds": [e["round"] for e in evaluated], "values": [100 * e["accuracy"] for e in evaluated]}
    online = document["online"]
    sums = {name: {"rounds": online["rounds"], "values": online[name]} for name in SUMS if online[name] is not None}
    return {"accuracy": accuracy, **sums}


def curve_statistics(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation of each curve over runs with the same rounds."""
    curves = {}
    for name, first in runs[0].items():
        columns = list(zip(*(run[name]["values"] for run in runs), strict=True))
        curves[name] = {
            "rounds": first["rounds"],
            "mean": [statistics.fmean(column) for column in columns],
            "std": [statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns],
        }
    return curves


def plot_curves(document: Mapping[str, Any], title: str, path: Path, caption: str = "") -> None:
    """One row of panels a cell: every curve with its band, algorithms in the same colours throughout."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = document["cells"]
    names = [name for name in _TITLES if name in next(iter(cells[0]["algorithms"].values()))["curves"]]
    labels = list(dict.fromkeys(label for cell in cells for label in cell["algorithms"]))
    colours = dict(zip(labels, colormaps["tab10"].colors, strict=False))  # type: ignore[attr-defined]
    figure = Figure(figsize=(4.4 * len(names), 3.1 * len(cells) + 0.7), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(cells), len(names), squeeze=False)
    for cell, row in zip(cells, grid, strict=True):
        for name, axes in zip(names, row, strict=True):
            for label, entry in cell["algorithms"].items():
                curve = entry["curves"][name]
                low = [mean - std for mean, std in zip(curve["mean"], curve["std"], strict=True)]
                high = [mean + std for mean, std in zip(curve["mean"], curve["std"], strict=True)]
                dashes = "--" if label == "noiseless" else "-"
                axes.plot(curve["rounds"], curve["mean"], dashes, color=colours[label], label=label, linewidth=1.4)
                axes.fill_between(curve["rounds"], low, high, color=colours[label], alpha=0.15, linewidth=0)
            axes.set_title(f"{cell['table']}: {_TITLES[name]}", fontsize=9)
            axes.grid(alpha=0.3)
            if name != "accuracy":
                axes.set_yscale("symlog", linthresh=10.0)
            if name == "cumulative-loss":  # a mean of positive numbers minus their deviation need not be one
                axes.set_ylim(
                    bottom=min(min(entry["curves"][name]["mean"]) for entry in cell["algorithms"].values()) / 2
                )
        row[0].set_ylim(top=100)
    for axes in grid[-1]:
        axes.set_xlabel("round")
    handles, texts = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside lower center", ncols=min(len(texts), 8), fontsize=8)
    seeds = document["seeds"]
    figure.suptitle(
        f"{title}: {f'mean and standard deviation over {seeds} runs' if seeds > 1 else 'one run'}\n"
        f"{textwrap.fill(caption, 55 * len(names))}",
        fontsize=9,
    )
    figure.savefig(path, dpi=110)
