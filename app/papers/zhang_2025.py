"""zhang-2025: online federated learning with correlated noise, logistic regression (V-A) and a CNN (V-B)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...privacy import gdp_mu
from ..reports.figures import empty_figure
from ..reports.table import Column, Table, curve_statistics
from .accuracy import ACCURACY, EPSILON, NOISE, accuracy_rows
from .cell import LONG_RUN, Cell, Settings
from .kind import TableKind, Trial
from .paper import Paper
from .paper_figures import add_legend, colours, draw_band, save

SUMS = ("cumulative-loss", "dynamic-regret", "static-regret")
"""Curves that are sums over rounds."""

_TITLES = {
    "accuracy": "test accuracy [%]",
    "cumulative-loss": "cumulative loss",
    "dynamic-regret": "dynamic regret",
    "static-regret": "static regret",
}


def _sum(name: str, meaning: str) -> Column:
    return Column(_TITLES[name], f"{meaning}, after the last round", name, ".0f", f"± {name}")


class RegretTable(TableKind):
    """A line for each algorithm: accuracy, cumulative loss and regrets at the end; the picture has them by rounds."""

    name = "regret"
    sentence = "cumulative loss and regret of each algorithm, and their curves over the rounds"
    curves_needed = frozenset({"accuracy"})

    columns = (
        Column("setting", "the part of the table that the line belongs to", "table", label=True),
        Column("mechanism", "whose noise it is", "algorithm", label=True),
        Column("step", "the learning rate", form="g"),
        ACCURACY,
        _sum("cumulative-loss", "sum of the losses over all samples, by the number of machines"),
        _sum("dynamic-regret", "that sum less the least of every round"),
        _sum("static-regret", "that sum less the least of one model for all rounds"),
        EPSILON,
        NOISE,
    )

    def curves(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The accuracy where it was evaluated, and the sums, where the run is one of online learning."""
        evaluated = [entry for entry in document["per_round"] if entry["accuracy"] is not None]
        accuracy = {"rounds": [e["round"] for e in evaluated], "values": [100 * e["accuracy"] for e in evaluated]}
        online = document["online"] or {}
        sums = {
            name: {"rounds": online["rounds"], "values": online[name]} for name in SUMS if online.get(name) is not None
        }
        return {"accuracy": accuracy, **sums}

    def entry(self, best: Trial, trials: Sequence[Trial], choice: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The curves' means and deviations."""
        return {"curves": curve_statistics([run["curves"] for run in best.runs])}

    def table(self, document: Mapping[str, Any], title: str = "") -> Table:
        """A line for each algorithm of each cell."""
        rows = accuracy_rows(document)
        entries = [(cell, entry) for cell in document["cells"] for entry in cell["algorithms"].values()]
        for row, (cell, entry) in zip(rows, entries, strict=True):
            row["step"] = {**cell["settings"], **entry["settings"]}.get("learning-rate")
            for name in SUMS:
                curve = entry["curves"].get(name)
                row[name] = None if curve is None else curve["mean"][-1]
                row[f"± {name}"] = None if curve is None or row["runs"] < 2 else curve["std"][-1]
        caption = str(document.get("guarantee", ""))
        return Table(title, self.columns, rows, caption, draw=lambda path: _draw(document, title, caption, path))


def _draw(document: Mapping[str, Any], title: str, caption: str, path: Path) -> None:
    """One row of panels a cell: every curve with its band."""
    cells = document["cells"]
    names = [name for name in _TITLES if any(name in entry["curves"] for entry in cells[0]["algorithms"].values())]
    colour = colours(document)
    figure = empty_figure(4.4 * len(names), 3.1 * len(cells) + 0.7)
    grid = figure.subplots(len(cells), len(names), squeeze=False)
    for cell, row in zip(cells, grid, strict=True):
        for name, axes in zip(names, row, strict=True):
            drawn = {label: e for label, e in cell["algorithms"].items() if name in e["curves"]}
            for label, entry in drawn.items():
                curve = entry["curves"][name]
                low = [mean - std for mean, std in zip(curve["mean"], curve["std"], strict=True)]
                high = [mean + std for mean, std in zip(curve["mean"], curve["std"], strict=True)]
                dashes = "--" if entry["epsilon"]["mean"] is None else "-"  # nothing is guaranteed
                draw_band(
                    axes,
                    curve["rounds"],
                    curve["mean"],
                    (low, high),
                    color=colour[label],
                    label=label,
                    linestyle=dashes,
                )
            axes.set_title(f"{cell['table']}: {_TITLES[name]}", fontsize=9)
            axes.grid(alpha=0.3)
            if name != "accuracy":
                axes.set_yscale("symlog", linthresh=10.0)
            if name == "cumulative-loss":  # a mean of positive numbers minus their deviation need not be one
                axes.set_ylim(bottom=min(min(entry["curves"][name]["mean"]) for entry in drawn.values()) / 2)
        row[0].set_ylim(top=100)
    for axes in grid[-1]:
        axes.set_xlabel("round")
    add_legend(figure, [grid[0][0]])
    seeds = document["seeds"]
    what = f"mean and standard deviation over {seeds} runs" if seeds > 1 else "one run"
    save(figure, path, f"{title}: {what}", caption, 55 * len(names))


def _online(**extra: Any) -> Settings:
    return {"strategy": "online", **extra}


_CORRELATED: dict[str, Settings] = {
    "(i) tree": _online(mechanism="tree", decoder="dyadic"),
    "(ii) optimal": _online(mechanism="optimal"),
    "(iii) sqrt_toeplitz": _online(mechanism="sqrt_toeplitz"),
    "banded": _online(mechanism="banded"),
    "blt": _online(mechanism="blt"),
}
_DELTA = 1e-3


def _settings(**settings: Any) -> Settings:
    return {"preset": "practical", "delta": _DELTA, **LONG_RUN, **settings}


class Zhang2025Logistic(Paper):
    """Figure 3."""

    name = "zhang-2025-logistic"
    sentence = "correlated noise in online learning: regret of logistic regression"
    seeds = 10
    table = RegretTable()

    def cells(self) -> list[Cell]:
        """Section V-A: one step size for all, and independent noise at its own best beside it.

        The paper prints neither step sizes nor the gradient bound; these were chosen on seeds 101 and up
        (docs/tuning.md).
        """
        own_step = {2.0: 0.0001, 0.5: 0.0001}
        return [
            Cell(
                f"epsilon = {epsilon:g}",
                _settings(
                    **{
                        "task": "synthetic-logistic",
                        "partition": "own",
                        "model": "logistic",
                        "clip-unit": "contractive",
                        "num-clients": 20,
                        "clients-per-round": 20,
                        "batch-size": 5,
                        "num-rounds": 1000,
                        "synthetic-samples": 100_000,
                        "synthetic-features": 100,
                        "evaluate-every": 20,
                        "clip-norm": 12.0,
                        "learning-rate": 0.003,
                        "mu": gdp_mu(epsilon, _DELTA),
                    }
                ),
                {
                    "noiseless": _online(mechanism="none"),
                    **_CORRELATED,
                    "independent": _online(mechanism="independent"),
                    "independent, own step": _online(mechanism="independent", **{"learning-rate": step}),
                },
            )
            for epsilon, step in own_step.items()
        ]


class Zhang2025Cnn(Paper):
    """Figure 4."""

    name = "zhang-2025-cnn"
    sentence = "correlated noise in online learning: accuracy and loss of a CNN on MNIST"
    seeds = 10
    table = RegretTable()

    def cells(self) -> list[Cell]:
        """Section V-B, with both sensitivities, each with a step of its own for all its curves.

        ``update`` clips a machine's whole update, which is a guarantee. The paper divides the sensitivity by tau, which
        holds only for steps that never move two iterates apart. So its noise is that of ``update`` at tau times the mu,
        and the epsilon beside it is the true one of that mu.
        """
        cells = []
        for steps in (5, 10):
            for label, factor, rate in (("update", 1, 0.015 / steps), ("the paper's noise", steps, 0.03)):
                cells.append(
                    Cell(
                        f"tau = {steps}, {label}",
                        _settings(
                            **{
                                "task": "mnist",
                                "partition": "half-by-label",
                                "model": "cnn",
                                "num-clients": 10,
                                "clients-per-round": 10,
                                "batch-size": steps,
                                "evaluate-every": 500 // steps,
                                "clip-norm": 1.0,
                                "learning-rate": rate,
                                "mu": factor * gdp_mu(2.0, _DELTA),
                            }
                        ),
                        {
                            "noiseless": _online(mechanism="none"),
                            **_CORRELATED,
                            "independent": _online(mechanism="independent"),
                        },
                    )
                )
        return cells
