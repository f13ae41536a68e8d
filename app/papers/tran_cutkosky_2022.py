"""tran-cutkosky-2022: private momentum with tree noise, to a stationary point."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from ...privacy.accounting.gdp import gdp_mu
from ...privacy.errors import ConfigurationError
from ..reports.figures import empty_figure
from ..reports.table import Column, Row, Table, curve_statistics, short, spread, statistics
from ..settings.run_config import RunConfig
from .accuracy import (
    ACCURACY,
    ALGORITHM,
    EPSILON,
    NOISE,
    SECONDS,
    Document,
    Measure,
    Run,
    TableKind,
    Trial,
    accuracy_row,
    add_legend,
    caption_of,
    colours,
    entries_of,
    save,
)
from .paper import Cell, Paper, Settings, everybody, hyphenated
from .rates import fitted_power, theorem_6

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_FEWEST_POINTS = 3
"""Fewer points get no fitted line."""


class _Point(NamedTuple):
    """The gradient norms of an algorithm's runs in one cell."""

    epsilon: float
    samples: float
    mean: Sequence[float]
    last: Sequence[float]


@dataclass(frozen=True)
class GradientNormTable(TableKind):
    """A line for each algorithm: its gradient norms; and the powers of epsilon and N that they go with.

    ``rates`` are the theorems' powers of epsilon N by algorithm, ``model_names`` what the table of powers calls a
    model.
    """

    name = "gradient-norm"
    sentence = "the norm of the training loss's gradient, and the powers of epsilon and N that it goes with"
    curves_needed = frozenset({"gradient-norm"})
    columns = (
        Column("setting", "the part of the table that the line belongs to", "table", label=True),
        ALGORITHM,
        Column("step", "the learning rate", form=".3g"),
        Column(
            "gradient norm, mean over rounds",
            "of the training loss, mean over the rounds in which it was computed, ± standard deviation over seeds",
            "gradient norm",
            ".4f",
            "± gradient norm",
        ),
        Column("in the last round", "the same in the end", "last gradient norm", ".4f", "± last gradient norm"),
        ACCURACY,
        EPSILON,
        NOISE,
        SECONDS,
    )
    rates: Mapping[str, float] = field(default_factory=dict)
    model_names: Mapping[str, str] = field(default_factory=dict)

    def check(self, config: RunConfig) -> None:
        """Refuse a run that does not compute its gradient norm."""
        if not config.gradient_norm:
            raise ConfigurationError(
                "Expected gradient-norm = true for a table of gradient norms, got false.",
                kind="mismatch",
                setting="gradient-norm",
            )

    def curves(self, document: Document) -> dict[str, Any]:
        """Return the gradient norms."""
        return {"gradient-norm": document["gradient_norms"]}

    def measure(self, *, held_out: bool) -> Measure:
        """Return steps are judged by the gradient norm, which is of training samples, or by a loss on held-out ones."""
        return super().measure(held_out=True) if held_out else Measure("gradient_norm", mean_gradient_norm)

    def entry(self, best: Trial, trials: Sequence[Trial], choice: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Gradient norms, their curve, and under ``validation`` how the step was chosen."""
        curve = curve_statistics([run["curves"] for run in best.runs])["gradient-norm"]
        last = [run["curves"]["gradient-norm"]["values"][-1] for run in best.runs]
        return {
            "gradient_norm": statistics([mean_gradient_norm(run) for run in best.runs], 5),
            "last_gradient_norm": statistics(last, 5),
            "validation": [dict(entry) for entry in choice],
            "curves": {
                "gradient-norm": {
                    "rounds": curve["rounds"],
                    **{name: [short(value) for value in curve[name]] for name in ("mean", "std")},
                }
            },
        }

    def summary(self, document: Document) -> dict[str, Any]:
        """Return the fitted powers, under ``slopes``."""
        return {"slopes": self.slopes(document)}

    def row(self, cell: Document, label: str, entry: Document) -> dict[str, Any]:
        """Step, gradient norms and accuracy."""
        made = accuracy_row(cell, label, entry)
        settings = {**cell["settings"], **entry["settings"]}
        norms = {"gradient norm": entry["gradient_norm"], "last gradient norm": entry["last_gradient_norm"]}
        row = {"table": made["table"], "algorithm": label, "step": settings.get("learning-rate")}
        for name, found in norms.items():
            row |= {name: found["mean"], f"± {name}": found["std"] if made["runs"] > 1 else None}
        row |= {name: made[name] for name in ("accuracy %", "± std", "loss", "mu", "epsilon", "delta")}
        quality = settings.get("noise-quality", RunConfig().noise_quality)
        return {**row, "noise": quality, "seconds": made["seconds"], "runs": made["runs"]}

    def further_tables(self, document: Document) -> list[Table]:
        """Return the fitted powers, if there are any."""
        return [self.powers(document)] if document["slopes"] else []

    def powers(self, document: Document) -> Table:
        """Return a line for each line that was fitted."""
        rows = [{**line, "model": self.model_names.get(line["model"], line["model"])} for line in document["slopes"]]
        columns = (
            Column("task", "what is trained", "model", label=True),
            ALGORITHM,
            Column("gradient norm against", "what varies, and in brackets what does not", _against, label=True),
            Column("points", "cells the line goes through"),
            Column("power, mean over rounds", "the line's slope ± its standard error", "mean", _power),
            Column("power, last round", "the same in the end", "last", _power),
            Column("theorem", "the theorem's power", "theory", ".2f"),
        )
        return Table("Powers", columns, rows, caption_of(document))

    def slopes(self, document: Document) -> list[dict[str, Any]]:
        """Powers of epsilon and of the number of samples that gradient norms go with, by task and algorithm.

        A line through log(gradient norm) of every run against the logarithm of one of the two, the other fixed, by
        least squares; the standard error is that of its slope.
        """
        lines = []
        for (model, label), found in _points(document).items():
            for against, other in (("epsilon", "samples"), ("samples", "epsilon")):
                for fixed in sorted({_near(getattr(point, other)) for point in found}):
                    chosen = [point for point in found if _near(getattr(point, other)) == fixed]
                    if len(chosen) < _FEWEST_POINTS or not all(getattr(point, against) for point in chosen):
                        continue
                    about = {"model": model, "algorithm": label, "against": against, "fixed": fixed}
                    fits = {
                        name: fitted_power((getattr(point, against), getattr(point, name)) for point in chosen)
                        for name in ("mean", "last")
                    }
                    lines.append({**about, "points": len(chosen), **fits, "theory": self.rates.get(label)})
        return lines

    def draw(self, document: Document, title: str, path: Path) -> None:
        """Gradient norm and accuracy against epsilon and N, log by log, with the theorems' slopes."""
        panels, colour = _panels(document), colours(document)
        figure = empty_figure(3.9 * len(panels), 6.4)
        grid = figure.subplots(2, len(panels), squeeze=False)
        for column, ((model, against, fixed, algorithms), cells) in enumerate(panels.items()):
            for label in algorithms:
                self._draw_line(grid[0, column], cells, against, label, "gradient_norm", colour[label])
                self._draw_line(grid[1, column], cells, against, label, "accuracy", colour[label])
            for axes, words in zip(grid[:, column], ("gradient norm", "test accuracy [%]"), strict=True):
                x = sorted({place for cell, _, e in entries_of({"cells": cells}) for place in _at(cell, e, against)})
                axes.set_xscale("log")
                axes.set_xticks(x, [f"{value:g}" for value in x], fontsize=8)
                axes.minorticks_off()
                axes.set_xlabel(against)
                axes.set_ylabel(words)
                axes.grid(alpha=0.3, which="both")
            grid[0, column].set_yscale("log")
            known = f"N = {fixed:g}" if against == "epsilon" else f"epsilon = {fixed:g}"
            grid[0, column].set_title(f"{model}, {known}", fontsize=9)
        add_legend(figure, list(grid[0]))
        over = f"mean and standard deviation over {document['seeds']} runs; dotted: the theorems' powers"
        save(figure, path, f"{title}: {over}", document, 50 * len(panels))

    def _draw_line(
        self, axes: Axes, cells: Sequence[Document], against: str, label: str, name: str, colour: Any
    ) -> None:
        factor = 100 if name == "accuracy" else 1
        points = sorted(
            (place, factor * entry[name]["mean"], factor * entry[name]["std"])
            for cell in cells
            for entry in [cell["algorithms"][label]]
            for place in _at(cell, entry, against)
        )
        if not points:  # without noise there is no epsilon: a line across
            for value in {factor * cell["algorithms"][label][name]["mean"] for cell in cells}:
                axes.axhline(value, color=colour, label=label, linestyle="--", linewidth=1.2)
            return
        x, y, error = zip(*points, strict=True)
        axes.errorbar(x, y, error, color=colour, label=label, marker="o", markersize=3, linewidth=1.2)
        if name == "gradient_norm" and label in self.rates:
            line = [y[0] * (value / x[0]) ** self.rates[label] for value in x]
            axes.plot(x, line, ":", color=colour, linewidth=1)


def mean_gradient_norm(run: Run) -> float:
    """Return the mean of ||grad F(w_t)|| over the rounds that were evaluated: what the theorems bound."""
    return fmean(run["curves"]["gradient-norm"]["values"])


def _points(document: Document) -> dict[tuple[str, str], list[_Point]]:
    """Return the points of fitted lines, by model and algorithm; runs without an epsilon have none."""
    points: dict[tuple[str, str], list[_Point]] = {}
    for cell, label, entry in entries_of(document):
        if (epsilon := entry["epsilon"]["mean"]) is not None:
            norms = entry["gradient_norm"]["runs"], entry["last_gradient_norm"]["runs"]
            points.setdefault((_model(cell), label), []).append(_Point(float(epsilon), _samples(cell), *norms))
    return points


def _panels(document: Document) -> dict[tuple[str, str, float, tuple[str, ...]], list[Document]]:
    """Return the cells of each panel, by model, what varies in it, what does not, and its algorithms."""
    groups: dict[tuple[str, str, float, tuple[str, ...]], list[Document]] = {}
    for cell in document["cells"]:
        epsilons = [entry["epsilon"]["mean"] for entry in cell["algorithms"].values()]
        algorithms = tuple(cell["algorithms"])
        groups.setdefault((_model(cell), "epsilon", _samples(cell), algorithms), []).append(cell)
        for epsilon in {_near(epsilon) for epsilon in epsilons if epsilon is not None}:
            groups.setdefault((_model(cell), "N", epsilon, algorithms), []).append(cell)
    return {key: cells for key, cells in groups.items() if len(cells) > 1} or dict([next(iter(groups.items()))])


def _model(cell: Document) -> str:
    return str(cell["settings"].get("model", RunConfig().model))


def _samples(cell: Document) -> float:
    return float(cell["settings"].get("training-samples", 0))


def _at(cell: Document, entry: Document, against: str) -> list[float]:
    """Return the place of an entry on a panel's axis; empty if that is not known."""
    place = entry["epsilon"]["mean"] if against == "epsilon" else _samples(cell)
    return [place] if place else []


def _against(line: Row) -> str:
    if line["against"] == "epsilon":
        return f"epsilon (N = {line['fixed']:g})"
    return f"N (epsilon = {line['fixed']:g})"


def _power(fit: Mapping[str, float]) -> str:
    return spread(fit["slope"], fit["standard_error"], ".2f")


def _near(value: float) -> float:
    """Epsilons that went through mu and back are alike to this."""
    return float(f"{value:.6g}")


_DELTA = 1e-5
_MOMENTUM: dict[str, Settings] = {
    "algorithm 1": {"strategy": "tree-momentum"},
    "algorithm 2": {"strategy": "reduced-tree-momentum"},
    "sqrt_toeplitz": {"strategy": "correlated-momentum", "mechanism": "sqrt_toeplitz"},
    "blt": {"strategy": "correlated-momentum", "mechanism": "blt"},
}
UNSAMPLED_SGD = "noisy SGD without sampling"
"""Label of SGD that is not DP-SGD: samples are in a fixed order, and no sampling amplifies (docs/results.md)."""
_LOGISTIC_SAMPLES = 6000
"""Training samples where epsilon varies."""


def _settings(clients: int, **settings: Any) -> Settings:
    return {
        "preset": "practical",
        "delta": _DELTA,
        "noise-quality": "fast",
        "checkpoint": False,
        "gradient-norm": True,
        "node-deadline-s": 600.0,
        **everybody(clients),
        **hyphenated(**settings),
    }


def _logistic(epsilon: float, samples: int, **settings: Any) -> Settings:
    return _settings(
        1,
        task="mnist-parity",
        features="means-4x4",
        model="nonconvex-logistic",
        training_samples=samples,
        feature_bound=1.0,
        clip_norm=1.05,  # the model's own bound, R + lambda 3 sqrt(3 d) / 8, is 1.045: nothing is clipped
        mu=gdp_mu(epsilon, _DELTA),
        **settings,
    )


def _algorithms(alpha: float) -> dict[str, Settings]:
    """All algorithms; alpha is for those with a momentum."""
    momentum: dict[str, Settings] = {
        label: {**options, "strategy.alpha": alpha} for label, options in _MOMENTUM.items()
    }
    return {**momentum, UNSAMPLED_SGD: {"strategy": "trusted-sgd"}}


def _grids(rounds: int, paths: tuple[float, ...], rates: tuple[float, ...]) -> dict[str, tuple[float, ...]]:
    """Return as many steps for every algorithm: eta T for normalised ones, eta for noisy SGD."""
    return {**{label: tuple(path / rounds for path in paths) for label in _MOMENTUM}, UNSAMPLED_SGD: rates}


def _theorem_6(epsilon: float, samples: int, parameters: int) -> Cell:
    """Algorithm 1 with one sample a step, and T, eta and alpha as theorem 6 has them: nothing is chosen."""
    num_rounds, alpha, step = theorem_6(epsilon, samples, parameters, _DELTA)
    settings = _logistic(
        epsilon,
        samples,
        batch_size=1,
        passes=max(math.ceil(num_rounds / samples), 2),
        num_rounds=num_rounds,
        alpha=alpha,
        learning_rate=step,
        evaluate_every=max(num_rounds // 20, 1),
    )
    name = f"logistic, theorem 6, epsilon = {epsilon:g}, N = {samples}"
    return Cell(name, settings, {"algorithm 1, theorem 6": {"strategy": "tree-momentum"}})


class TranCutkosky2022(Paper):
    """The theorems' rates, at sizes that can be run."""

    name = "tran-cutkosky-2022"
    sentence = "private momentum with tree noise: gradient norms against epsilon and the number of samples"
    seeds = 3
    table = GradientNormTable(
        # Up to logarithms and 1 / sqrt(N).
        rates={"algorithm 1": -1 / 2, "algorithm 1, theorem 6": -1 / 2, "algorithm 2": -2 / 3},
        model_names={"nonconvex-logistic": "logistic", "cnn": "CNN"},
    )

    def cells(self) -> list[Cell]:
        """Our own cells: the paper has no experiments; these show what its rates say at sizes one can run."""
        return [
            *(_varied(epsilon, _LOGISTIC_SAMPLES) for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0)),
            *(_varied(1.0, samples) for samples in (750, 1500, 3000, 12_000)),
            *(_theorem_6(2.0, samples, 49) for samples in (250, 500, 1000)),
            *(_network(epsilon) for epsilon in (4.0, 32.0)),
        ]


def _varied(epsilon: float, samples: int) -> Cell:
    """Logistic regression with ten passes in batches of 100."""
    rounds = 10 * (samples // 100)
    return Cell(
        f"logistic, epsilon = {epsilon:g}, N = {samples}",
        _logistic(epsilon, samples, batch_size=100, passes=10, evaluate_every=max(rounds // 20, 1)),
        _algorithms(0.03),
        grids=_grids(rounds, (3.0, 10.0, 30.0, 100.0), (0.02, 0.1, 0.5, 2.5)),
    )


def _network(epsilon: float) -> Cell:
    """Return a CNN with two passes in batches of 60 on ten clients."""
    batch, passes, clients, samples = 60, 2, 10, 12_000
    rounds = passes * (samples // (batch * clients))
    settings = _settings(
        clients,
        batch_size=batch,
        passes=passes,
        evaluate_every=rounds // 4,
        task="mnist",
        features="means-2x2",
        model="cnn",
        clip_norm=1.0,
        training_samples=samples,
        mu=gdp_mu(epsilon, _DELTA),
    )
    return Cell(
        f"CNN, epsilon = {epsilon:g}, N = {samples}",
        settings,
        _algorithms(0.1),
        grids=_grids(rounds, (4.0, 10.0, 25.0), (1.0, 4.0, 16.0)),
        # A network's gradient is small where it begins: least gradient norm would choose the step of rest.
        validation={"validation-samples": 10_000},
    )
