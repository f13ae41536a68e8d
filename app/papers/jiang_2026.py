"""jiang-2026: shuffled gradients with public samples, mean estimation, ridge and lasso regression (section 6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ...privacy.accounting.gdp import gdp_mu
from ...privacy.accounting.guarantee import rounded_up
from ..reports.table import Column, Marked, Row, Table, curve_statistics, short, spread, statistics
from ..settings.run_config import RunConfig
from .accuracy import (
    NOISE,
    PART,
    Document,
    TableKind,
    Trial,
    add_legend,
    colours,
    draw_band,
    measured_rounds,
    panels,
    save,
)
from .paper import Cell, Overrides, Paper, everybody, is_without_noise


@dataclass(frozen=True)
class ExcessRiskTable(TableKind):
    """A line for each cell: the excess risk of every algorithm at the best of its steps that the guarantee covers.

    ``paper_sizes`` are n and d of the paper's data, by task.
    """

    name = "excess-risk"
    sentence = "empirical excess risk of each algorithm at the best of its steps"
    curves_needed = frozenset({"loss"})
    digits = 5
    indent = None  # a grid of steps has thousands of figures

    paper_sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def curves(self, document: Document) -> dict[str, Any]:
        """Return the objective after every epoch."""
        return {"loss": measured_rounds(document, "loss")}

    def best(self, trials: Sequence[Trial]) -> Trial:
        """Return the step of least mean excess risk, of those that the guarantee covers if it covers any."""
        least = _least(trials)
        covered = [trial for trial in trials if trial.covered]
        return min(covered or trials, key=lambda trial: _mean_excess(trial, least))

    def entry(self, best: Trial, trials: Sequence[Trial], choice: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the excess risk at the best step; ``grid`` with that of all steps, and ``beyond``.

        ``beyond`` is the best step of all, if it is one that the guarantee does not cover: shown, and no result.
        """
        # Late, as elsewhere here: the command names the papers, and with them the kinds, before it knows what is asked.
        from ..runs.experiment import prepare

        least = _least(trials)
        grid = [_of_grid(trial, least) for trial in trials]
        first = min(range(len(trials)), key=lambda i: _mean_excess(trials[i], least))
        experiment = prepare(best.config)
        curve = curve_statistics([run["curves"] for run in best.runs])["loss"]
        return {
            "learning-rate": experiment.values.learning_rate,
            "covered": best.covered,
            "excess": {**statistics([run["loss"] - least for run in best.runs], self.digits), "optimum": least},
            "beyond": None if trials[first].covered else grid[first],
            "grid": grid,
            "samples": len(experiment.shards[0]),
            "parameters": experiment.model.num_parameters,
            "curves": {
                "excess": {
                    "rounds": curve["rounds"],
                    "mean": [short(value - least) for value in curve["mean"]],
                    "std": [short(value) for value in curve["std"]],
                }
            },
        }

    def table(self, document: Document, title: str = "") -> Table:
        """Return a line for each cell, a column for each algorithm; the figures have a row for each of both."""
        figures = self.rows(document)
        cells: dict[str, dict[str, Row]] = {}
        for row in figures:
            cells.setdefault(row["table"], {})[row["algorithm"]] = row
        labels = list(dict.fromkeys(label for cell in cells.values() for label in cell))
        meaning = "excess risk, mean ± standard deviation over seeds, and the step; the best private one stands out"
        columns = (
            replace(PART, name="setting"),
            Column("n (paper)", "samples of the silo", _size("n")),
            Column("d (paper)", "values in the model", _size("d")),
            Column("epsilon", "what the private runs of the line guarantee, in the terms above", _epsilons),
            replace(NOISE, value=lambda line: _any(line)["noise"]),
            *(Column(label, meaning, _excess_of(label), lambda excess: excess) for label in labels),
            Column("beyond", "a better step that the guarantee does not cover; no result", _beyond),
        )
        lines = [{"setting": name, "cell": cell, "best": _least_private(cell)} for name, cell in cells.items()]
        made = super().table(document, title)
        return replace(made, columns=columns, rows=lines, figures=figures)

    def row(self, cell: Document, label: str, entry: Document) -> dict[str, Any]:
        """Sizes, excess risk and step, whether that is an end of the grid, and the step beyond the guarantee."""
        settings = {**RunConfig().to_mapping(), **cell["settings"]}
        samples, parameters = self.paper_sizes.get(settings["task"], (None, None))
        beyond, runs = entry["beyond"], len(entry["loss"]["runs"])
        return {
            "table": cell["table"],
            "n": entry["samples"],
            "paper n": samples,
            "d": entry["parameters"],
            "paper d": parameters,
            "algorithm": label,
            "step": entry["learning-rate"],
            "end of grid": end_of_grid(entry),
            "excess risk": short(entry["excess"]["mean"]),
            "± std": short(entry["excess"]["std"]) if runs > 1 else None,
            "epsilon": entry["epsilon"]["mean"],
            "delta": entry["delta"]["mean"],
            "noise": settings["noise-quality"],
            "not private": is_without_noise({**settings, **entry["settings"]}),
            "uncovered step": None if beyond is None else beyond["step"],
            "its excess risk": None if beyond is None else short(beyond["mean"]),
            "runs": runs,
        }

    def draw(self, document: Document, title: str, path: Path) -> None:
        """Draw a panel for each cell: excess risk after every epoch, mean and band, as the paper's figures 2 to 6."""
        cells, colour = document["cells"], colours(document)
        figure, grid, width = panels(len(cells), 4, (3.7, 2.9), 0.8)
        for cell, axes in zip(cells, grid, strict=True):
            for label, entry in cell["algorithms"].items():
                curve = entry["curves"]["excess"]
                floor = [max(value, _LOWEST) for value in curve["mean"]]
                low = [max(m - s, 0.5 * f) for m, s, f in zip(curve["mean"], curve["std"], floor, strict=True)]
                high = [m + s for m, s in zip(floor, curve["std"], strict=True)]
                draw_band(axes, curve["rounds"], floor, (low, high), color=colour[label], label=label)
            axes.set_title(cell["table"], fontsize=8)
            axes.set_yscale("log")
            axes.grid(alpha=0.3)
            axes.tick_params(labelsize=7, which="both")
        for axes in grid[-width:]:
            axes.set_xlabel("epoch", fontsize=8)
        add_legend(figure, [grid[0]])
        heading = f"{title}: empirical excess risk, mean and standard deviation over {document['seeds']} runs"
        save(figure, path, heading, document, 45 * width)


_LOWEST = 1e-9
"""The end of the logarithmic axis: an excess risk may be 0 up to rounding."""


def end_of_grid(entry: Document) -> str | None:
    """Return which end of the grid of steps an algorithm's best step is, in a word; None for a step inside it."""
    tried = [one["step"] for one in entry["grid"]]
    if len(tried) < 2 or entry["learning-rate"] not in (min(tried), max(tried)):
        return None
    return "smallest" if entry["learning-rate"] == min(tried) else "largest"


def standing_still(cell: Document) -> float | None:
    """Return the excess risk of a model that hardly moves: without noise, at the smallest step that was tried.

    None where every algorithm of the cell uses private samples.
    """
    for entry in cell["algorithms"].values():
        if entry["epsilon"]["mean"] == 0:
            return float(min(entry["grid"], key=lambda one: one["step"])["mean"])
    return None


def _least(trials: Sequence[Trial]) -> float:
    """Return the optimum that the excess risk is measured from."""
    from .sweep import optimum

    return optimum(trials[0].config)


def _mean_excess(trial: Trial, least: float) -> float:
    return fmean(run["loss"] - least for run in trial.runs)


def _of_grid(trial: Trial, least: float) -> dict[str, Any]:
    from ..runs.experiment import prepare

    found = statistics([run["loss"] - least for run in trial.runs])
    return {
        "step": prepare(trial.config).values.learning_rate,
        "covered": trial.covered,
        **{name: short(found[name]) for name in ("mean", "std")},
    }


def _any(line: Row) -> Row:
    """Return a row of a line's cell: in what the columns beside the algorithms show they are all alike."""
    return next(iter(line["cell"].values()))


def _size(name: str) -> Callable[[Row], str]:
    def text(line: Row) -> str:
        row = _any(line)
        return str(row[name]) + ("" if row[f"paper {name}"] is None else f" ({row[f'paper {name}']})")

    return text


def _epsilons(line: Row) -> str:
    return ", ".join(sorted({rounded_up(row["epsilon"]) for row in line["cell"].values() if row["epsilon"]}))


def _least_private(cell: Mapping[str, Row]) -> float | None:
    """Return the least excess risk of algorithms that are private and use private samples (epsilon is 0 without)."""
    private = (row for row in cell.values() if row["epsilon"] != 0 and not row["not private"])
    return min((row["excess risk"] for row in private), default=None)


def _excess_of(label: str) -> Callable[[Row], str | Marked | None]:
    def shown(line: Row) -> str | Marked | None:
        row = line["cell"].get(label)
        if row is None:
            return None
        excess = spread(row["excess risk"], row["± std"], ".3g", ".1g")
        uncovered = row["epsilon"] is None and not row["not private"]
        end = f", the {row['end of grid']} tried" if row["end of grid"] else ""
        step = f" ({row['step']:g}{end}{', not covered' if uncovered else ''})"
        stands_out = row["epsilon"] != 0 and not row["not private"] and row["excess risk"] == line["best"]
        return Marked(excess, step) if stands_out else excess + step

    return shown


def _beyond(line: Row) -> str:
    return "; ".join(
        f"{label}: {row['its excess risk']:.3g} ({row['uncovered step']:g})"
        for label, row in line["cell"].items()
        if row["uncovered step"] is not None
    )


SIZES = {
    "mnist-69": (1000, 784),
    "cifar10-ridge": (1000, 3072),
    "crime": (159, 124),
    "compas": (2103, 11),
    "credit-card": (200, 21),
}
"""n and d of the paper (table 6; for COMPAS it says 2013 there and 2103 in the text)."""

_STEPS = tuple(float(f"{digit}e-{power}") for power in range(1, 10) for digit in (5, 1))
_DELTA = 1e-6
_ALGORITHMS: dict[str, Overrides] = {
    name: {"strategy": "shuffled", "strategy.variant": name.lower()}
    for name in ("Interleaved", "Priv-Pub", "Pub-Priv", "DP-ShuffleG", "Public-Only")
}


def _cells(
    task: str, model: str, epsilons: tuple[float, ...], settings: tuple[tuple[str, float], ...] = (("RR", 0.5),)
) -> list[Cell]:
    """Section 6 and appendix H: figure 2, and for some data sets figures 3 to 6, with other orders and shares p."""
    return [
        Cell(
            f"{task}, epsilon = {epsilon:g}, {order}, p = {share:g}",
            {
                "preset": "practical",
                "task": task,
                "model": model,
                **everybody(1),
                "num-rounds": 50,
                "clip-norm": 10.0,
                "delta": _DELTA,
                "mu": gdp_mu(epsilon, _DELTA),
                "strategy.order": order,
                "strategy.private-share": share,
                "noise-quality": "fast",
                "checkpoint": False,
            },
            _ALGORITHMS,
            steps=_STEPS,
        )
        for order, share in settings
        for epsilon in epsilons
    ]


_VARIED = (("RR", 0.5), ("IG", 0.5), ("SO", 0.5), ("RR", 0.25), ("RR", 0.75))


class Jiang2026(Paper):
    """One of the paper's three problems."""

    seeds = 10
    table = ExcessRiskTable(SIZES)

    def __init__(self, problem: str, sentence: str, cells: Sequence[Cell]) -> None:
        self.name = f"jiang-2026-{problem}"
        self.sentence = f"{sentence} with shuffled gradients and public samples: excess risk"
        self._cells = list(cells)

    def cells(self) -> list[Cell]:
        """One for each task, epsilon, order and share of private samples."""
        return list(self._cells)


MEAN = Jiang2026("mean", "mean estimation", _cells("mnist-69", "mean", (5.0, 10.0), _VARIED))
RIDGE = Jiang2026(
    "ridge",
    "ridge regression",
    [cell for task in ("cifar10-ridge", "crime") for cell in _cells(task, "ridge", (1.0, 5.0))],
)
LASSO = Jiang2026(
    "lasso",
    "logistic lasso regression",
    [
        *_cells("compas", "logistic", (5.0, 10.0)),
        *_cells("credit-card", "logistic", (5.0, 10.0), _VARIED),
    ],
)
