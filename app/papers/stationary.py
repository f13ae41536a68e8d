"""Gradient norms against epsilon and the number of samples: entries, rates, tables and figures (tran-cutkosky-2022)."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...privacy import rounded_up
from ..config import RunConfig
from ..summary import spread
from .curves import curve_statistics

Runs = Sequence[Mapping[str, Any]]


class _Point(NamedTuple):
    """The gradient norms of an algorithm's runs in one cell."""

    epsilon: float
    samples: float
    mean: Sequence[float]
    last: Sequence[float]


_RATES = {"algorithm 1": -1 / 2, "algorithm 1, theorem 6": -1 / 2, "algorithm 2": -2 / 3}
"""The theorems' powers of epsilon N, up to logarithms and 1 / sqrt(N)."""
_FEWEST_POINTS = 3


def mean_gradient_norm(run: Mapping[str, Any]) -> float:
    """The mean of ||grad F(w_t)|| over the rounds that were evaluated: what the theorems bound."""
    return statistics.fmean(run["curves"]["gradient-norm"]["values"])


def norm_entry(runs: Runs, tried: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a reproduction's document says of one algorithm beside its figures.

    Parameters
    ----------
    runs : sequence
        Results, one a seed.
    tried : sequence of mapping
        Steps and what their validation runs were judged by, the one that was used first.
    """
    curve = curve_statistics([run["curves"] for run in runs])["gradient-norm"]
    return {
        "gradient_norm": _statistics([mean_gradient_norm(run) for run in runs]),
        "last_gradient_norm": _statistics([run["curves"]["gradient-norm"]["values"][-1] for run in runs]),
        "validation": [dict(entry) for entry in tried],
        "curves": {
            "gradient-norm": {
                "rounds": curve["rounds"],
                **{name: [_short(value) for value in curve[name]] for name in ("mean", "std")},
            }
        },
    }


def slopes(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Powers of epsilon and of the number of samples that gradient norms go with, by task and algorithm.

    A line through log(gradient norm) of every run against the logarithm of one of the two, the other fixed, by least
    squares; the standard error is that of its slope.
    """
    points: dict[tuple[str, str], list[_Point]] = {}
    for cell in document["cells"]:
        for label, entry in cell["algorithms"].items():
            key = str(cell["settings"]["model"]), label
            point = _Point(
                epsilon=float(entry["epsilon"]["mean"]),
                samples=float(cell["settings"]["training-samples"]),
                mean=entry["gradient_norm"]["runs"],
                last=entry["last_gradient_norm"]["runs"],
            )
            points.setdefault(key, []).append(point)
    lines = []
    for (model, label), found in points.items():
        for against, other in (("epsilon", "samples"), ("samples", "epsilon")):
            for fixed in sorted({_near(getattr(point, other)) for point in found}):
                chosen = [point for point in found if _near(getattr(point, other)) == fixed]
                if len(chosen) < _FEWEST_POINTS:
                    continue
                line = {"model": model, "algorithm": label, "against": against, "fixed": fixed, "points": len(chosen)}
                for name in ("mean", "last"):
                    x = [math.log(getattr(point, against)) for point in chosen for _ in getattr(point, name)]
                    y = [math.log(norm) for point in chosen for norm in getattr(point, name)]
                    line[name] = fitted_slope(x, y)
                lines.append({**line, "theory": _RATES.get(label)})
    return lines


def fitted_slope(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """The slope of a line through points by least squares, and its standard error."""
    offsets = np.asarray(x) - np.mean(x)
    spread = float(offsets @ offsets)
    slope = float(offsets @ np.asarray(y)) / spread
    residuals = np.asarray(y) - np.mean(y) - slope * offsets
    error = math.sqrt(float(residuals @ residuals) / max(len(offsets) - 2, 1) / spread)
    return {"slope": slope, "standard_error": error}


def norm_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One flat row for each algorithm of each cell."""
    rows = []
    for cell in document["cells"]:
        for label, entry in cell["algorithms"].items():
            settings = {**cell["settings"], **entry["settings"]}
            several = len(entry["accuracy"]["runs"]) > 1
            rows.append(
                {
                    "table": cell["table"],
                    "algorithm": label,
                    "step": settings.get("learning-rate"),
                    "gradient norm": entry["gradient_norm"]["mean"],
                    "± gradient norm": entry["gradient_norm"]["std"] if several else None,
                    "last gradient norm": entry["last_gradient_norm"]["mean"],
                    "± last gradient norm": entry["last_gradient_norm"]["std"] if several else None,
                    "accuracy %": 100 * entry["accuracy"]["mean"],
                    "± std": 100 * entry["accuracy"]["std"] if several else None,
                    "loss": entry["loss"]["mean"],
                    "mu": entry["mu"]["mean"],
                    "epsilon": entry["epsilon"]["mean"],
                    "delta": entry["delta"]["mean"],
                    "noise": settings.get("noise-quality", RunConfig().noise_quality),
                    "seconds": entry["seconds"]["mean"],
                    "runs": len(entry["accuracy"]["runs"]),
                }
            )
    return rows


def norm_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| setting | algorithm | step | gradient norm, mean over rounds | in the last round | accuracy % | epsilon "
        "| noise | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            row["table"],
            row["algorithm"],
            "" if row["step"] is None else f"{row['step']:.3g}",
            spread(row["gradient norm"], row["± gradient norm"], ".4f"),
            spread(row["last gradient norm"], row["± last gradient norm"], ".4f"),
            spread(row["accuracy %"], row["± std"], ".1f"),
            rounded_up(row["epsilon"]),
            row["noise"],
            f"{row['seconds']:.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def slope_table(document: Mapping[str, Any]) -> str:
    """The fitted powers as Markdown."""
    lines = [
        "| task | algorithm | gradient norm against | points | power, mean over rounds | power, last round | theorem |",
        "|---|---|---|---|---|---|---|",
    ]
    names: dict[str, str] = {"nonconvex-logistic": "logistic", "cnn": "CNN"}
    for line in document["slopes"]:
        fixed = f"N = {line['fixed']:g}" if line["against"] == "epsilon" else f"epsilon = {line['fixed']:g}"
        powers = [f"{line[name]['slope']:.2f} ± {line[name]['standard_error']:.2f}" for name in ("mean", "last")]
        cells = (
            names.get(str(line["model"]), str(line["model"])),
            line["algorithm"],
            f"{'epsilon' if line['against'] == 'epsilon' else 'N'} ({fixed})",
            str(line["points"]),
            *powers,
            "" if line["theory"] is None else f"{line['theory']:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot_norms(document: Mapping[str, Any], title: str, path: Path, caption: str = "") -> None:
    """Gradient norm and accuracy against epsilon and N, log by log, with the theorems' slopes."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups: dict[tuple[str, str, float, tuple[str, ...]], list[Mapping[str, Any]]] = {}
    for cell in document["cells"]:
        epsilons = {_near(entry["epsilon"]["mean"]) for entry in cell["algorithms"].values()}
        model, samples = str(cell["settings"]["model"]), float(cell["settings"]["training-samples"])
        algorithms = tuple(cell["algorithms"])
        groups.setdefault((model, "epsilon", samples, algorithms), []).append(cell)
        for epsilon in epsilons:
            groups.setdefault((model, "N", epsilon, algorithms), []).append(cell)
    shown = {key: cells for key, cells in groups.items() if len(cells) > 1} or dict([next(iter(groups.items()))])
    labels = list(dict.fromkeys(label for cell in document["cells"] for label in cell["algorithms"]))
    colours = dict(zip(labels, colormaps["tab10"].colors, strict=False))  # type: ignore[attr-defined]
    measures = (("gradient_norm", "gradient norm", 1), ("accuracy", "test accuracy [%]", 100))
    figure = Figure(figsize=(3.9 * len(shown), 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(shown), squeeze=False)
    for column, ((model, against, fixed, algorithms), cells) in enumerate(shown.items()):
        for (name, words, factor), axes in zip(measures, grid[:, column], strict=True):
            x: tuple[float, ...] = ()
            for label in algorithms:
                points = sorted(
                    (
                        entry["epsilon"]["mean"] if against == "epsilon" else cell["settings"]["training-samples"],
                        factor * entry[name]["mean"],
                        factor * entry[name]["std"],
                    )
                    for cell in cells
                    for entry in [cell["algorithms"][label]]
                )
                x, y, error = zip(*points, strict=True)
                axes.errorbar(x, y, error, color=colours[label], label=label, marker="o", markersize=3, linewidth=1.2)
                if name == "gradient_norm" and label in _RATES:
                    line = [y[0] * (value / x[0]) ** _RATES[label] for value in x]
                    axes.plot(x, line, ":", color=colours[label], linewidth=1)
            axes.set_xscale("log")
            axes.set_xticks(x, [f"{value:g}" for value in x], fontsize=8)
            axes.minorticks_off()
            axes.set_xlabel(against)
            axes.set_ylabel(words)
            axes.grid(alpha=0.3, which="both")
        grid[0, column].set_yscale("log")
        known = f"N = {fixed:g}" if against == "epsilon" else f"epsilon = {fixed:g}"
        grid[0, column].set_title(f"{model}, {known}", fontsize=9)
    handles = {text: handle for axes in grid[0] for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles), fontsize=8)
    figure.suptitle(
        f"{title}: mean and standard deviation over {document['seeds']} runs; dotted: the theorems' powers\n"
        f"{textwrap.fill(caption, 50 * len(shown))}",
        fontsize=9,
    )
    figure.savefig(path, dpi=110)


def _statistics(values: Sequence[float]) -> dict[str, Any]:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "std": spread, "runs": [_short(value) for value in values]}


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _near(value: float) -> float:
    """Epsilons that went through mu and back are alike to this."""
    return float(f"{value:.6g}")
