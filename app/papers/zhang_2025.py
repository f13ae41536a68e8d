"""zhang-2025: online federated learning with correlated noise, logistic regression (V-A) and a CNN (V-B)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...privacy.accounting.gdp import gdp_mu
from ..reports.figures import empty_figure
from ..reports.table import Column, curve_statistics
from .accuracy import (
    ACCURACY,
    EPSILON,
    NOISE,
    Document,
    TableKind,
    Trial,
    add_legend,
    colours,
    draw_band,
    measured_rounds,
    save,
)
from .paper import LONG_RUN, Cell, Paper, Settings, everybody, hyphenated

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
        _sum("cumulative-loss", "sum of the losses over all samples, by the number of clients"),
        _sum("dynamic-regret", "that sum less the least of every round"),
        _sum("static-regret", "that sum less the least of one model for all rounds"),
        EPSILON,
        NOISE,
    )

    def curves(self, document: Document) -> dict[str, Any]:
        """Return the accuracy where it was evaluated, and the sums, where the run is one of online learning."""
        online = document["online"] or {}
        sums = {
            name: {"rounds": online["rounds"], "values": online[name]} for name in SUMS if online.get(name) is not None
        }
        return {"accuracy": measured_rounds(document, "accuracy", 100), **sums}

    def entry(self, best: Trial, trials: Sequence[Trial], choice: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the curves' means and deviations."""
        return {"curves": curve_statistics([run["curves"] for run in best.runs])}

    def row(self, cell: Document, label: str, entry: Document) -> dict[str, Any]:
        """Accuracy, step and the sums after the last round."""
        row = super().row(cell, label, entry)
        row["step"] = {**cell["settings"], **entry["settings"]}.get("learning-rate")
        for name in SUMS:
            curve = entry["curves"].get(name)
            row[name] = None if curve is None else curve["mean"][-1]
            row[f"± {name}"] = None if curve is None or row["runs"] < 2 else curve["std"][-1]
        return row

    def draw(self, document: Document, title: str, path: Path) -> None:
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
                    style = {"color": colour[label], "label": label, "linestyle": dashes}
                    draw_band(axes, curve["rounds"], curve["mean"], (low, high), **style)
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
        save(figure, path, f"{title}: {what}", document, 55 * len(names))


def _online(mechanism: str, **more: Any) -> Settings:
    return {"strategy": "online", "mechanism": mechanism, **hyphenated(**more)}


_NOISELESS = {"noiseless": _online("none")}
_CORRELATED: dict[str, Settings] = {
    "(i) tree": _online("tree", decoder="dyadic"),
    "(ii) optimal": _online("optimal"),
    "(iii) sqrt_toeplitz": _online("sqrt_toeplitz"),
    "banded": _online("banded"),
    "blt": _online("blt"),
}
_INDEPENDENT = {"independent": _online("independent")}
_DELTA = 1e-3


def lemma_mu(epsilon: float, delta: float) -> float:
    """Return the mu of the noise that the paper adds for its (epsilon, delta).

    Lemma IV.8 and its proof in appendix B: zero-concentrated DP with

    * rho = (sqrt(epsilon + ln(1 / delta)) - sqrt(ln(1 / delta)))^2, equation (14), and
    * noise of variance V_i^2 = Delta^2 / (2 rho), equation (16), for the sensitivity Delta of C G_i, equation (15).

    Notes
    -----
    Gaussian noise of standard deviation V_i on what moves by at most Delta is mu-GDP with
    mu = Delta / V_i = sqrt(2 rho), for replacement of one sample of one client. The conversion (14) is not tight, so
    this is less than :func:`~murmurfl.privacy.gdp_mu` of the same (epsilon, delta), and the epsilon that the noise
    guarantees is less than the paper's. Whether Delta = 2 B / tau holds is another question
    (:meth:`Zhang2025Cnn.cells`).

    Examples
    --------
    >>> [round(lemma_mu(epsilon, 1e-3), 3) for epsilon in (2.0, 0.5)]
    [0.504, 0.132]
    """
    logarithm = math.log(1.0 / delta)
    # The difference of the two roots, written without cancellation.
    return math.sqrt(2.0) * epsilon / (math.sqrt(epsilon + logarithm) + math.sqrt(logarithm))


def _settings(clients: int, **settings: Any) -> Settings:
    return {"preset": "practical", "delta": _DELTA, **LONG_RUN, **everybody(clients), **hyphenated(**settings)}


class Zhang2025Logistic(Paper):
    """Figure 3."""

    name = "zhang-2025-logistic"
    sentence = "correlated noise in online learning: regret of logistic regression"
    seeds = 10
    table = RegretTable()

    def cells(self) -> list[Cell]:
        """Section V-A: one step size for all, and independent noise at its own best beside it.

        The noise is the paper's (:func:`lemma_mu`); the epsilon of a line is the one that this noise guarantees. The
        paper prints neither step sizes nor the gradient bound; these were chosen on seeds 101 and up (docs/tuning.md).
        """
        own_step = _online("independent", learning_rate=0.0001)
        algorithms = {**_NOISELESS, **_CORRELATED, **_INDEPENDENT, "independent, own step": own_step}
        return [
            Cell(
                f"the paper's ε = {epsilon:g}",
                _settings(
                    20,
                    task="synthetic-logistic",
                    partition="own",
                    model="logistic",
                    clip_unit="contractive",
                    batch_size=5,
                    num_rounds=1000,
                    synthetic_samples=100_000,
                    synthetic_features=100,
                    evaluate_every=20,
                    clip_norm=12.0,
                    learning_rate=0.003,
                    mu=lemma_mu(epsilon, _DELTA),
                ),
                algorithms,
            )
            for epsilon in (2.0, 0.5)
        ]


class Zhang2025Cnn(Paper):
    """Figure 4."""

    name = "zhang-2025-cnn"
    sentence = "correlated noise in online learning: accuracy and loss of a CNN on MNIST"
    seeds = 10
    table = RegretTable()

    def cells(self) -> list[Cell]:
        """Section V-B, with both sensitivities, each with a step of its own for all its curves.

        ``update`` clips a client's whole update, which is a guarantee, and adds the least noise that guarantees
        epsilon = 2. The paper adds the noise of lemma IV.8 (:func:`lemma_mu`) for the sensitivity 2 B / tau of equation
        (15). The division by tau holds only for steps that never move two iterates apart, so what the paper's noise
        guarantees is tau times the lemma's mu, and the epsilon of these lines is the true one of that mu.
        """
        return [
            Cell(
                f"tau = {steps}, {label}",
                _settings(
                    10,
                    task="mnist",
                    partition="half-by-label",
                    model="cnn",
                    batch_size=steps,
                    evaluate_every=500 // steps,
                    clip_norm=1.0,
                    learning_rate=rate,
                    mu=mu,
                ),
                {**_NOISELESS, **_CORRELATED, **_INDEPENDENT},
            )
            for steps in (5, 10)
            for label, mu, rate in (
                ("update", gdp_mu(2.0, _DELTA), 0.015 / steps),
                ("the paper's noise", steps * lemma_mu(2.0, _DELTA), 0.03),
            )
        ]
