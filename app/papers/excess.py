"""Empirical excess risk of shuffled gradients: the best step of a grid, tables and figures (jiang-2026)."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...privacy import rounded_up
from ..config import RunConfig
from ..engines.start import FIGURES
from ..experiment import prepare
from ..tasks.public import PAPER_SIZES
from .curves import curve_statistics
from .sweep import is_covered, optimum

Runs = Sequence[Mapping[str, Any]]


def excess_entry(configs: Mapping[str, RunConfig], runs: Mapping[str, Runs]) -> dict[str, Any]:
    """What a reproduction's document says of one algorithm.

    Parameters
    ----------
    configs : mapping of str to RunConfig
        Its runs at every step of the grid, by name.
    runs : mapping of str to sequence
        Their results, one a seed.

    Returns
    -------
    dict
        The figures at the best of the steps that the guarantee covers; ``grid`` with all of them, and ``beyond``: the
        best step of all, if it is one the guarantee does not cover.
    """
    least = optimum(next(iter(configs.values())))
    grid = []
    for name, made in runs.items():
        excess = _statistics([run["loss"] - least for run in made])
        covered = is_covered(configs[name])
        grid.append({"name": name, "step": prepare(configs[name]).values.learning_rate, "covered": covered, **excess})
    best = min((entry for entry in grid if entry["covered"]), key=lambda entry: entry["mean"], default=None)
    first = min(grid, key=lambda entry: entry["mean"])
    chosen = best or first
    made, config = runs[chosen["name"]], configs[chosen["name"]]
    experiment = prepare(config)
    curve = curve_statistics([run["curves"] for run in made])["loss"]
    shown = {
        "rounds": curve["rounds"],
        "mean": [_short(value - least) for value in curve["mean"]],
        "std": [_short(value) for value in curve["std"]],
    }
    return {
        **{figure: _statistics([run[figure] for run in made]) for figure in FIGURES},
        "settings": {"strategy": config.strategy, "variant": config.variant},
        "paper": {},
        "learning-rate": chosen["step"],
        "covered": chosen["covered"],
        "excess": {**_statistics([run["loss"] - least for run in made]), "optimum": least},
        "beyond": None if first["covered"] else _without_name(first),
        "grid": [_without_name(entry) for entry in grid],
        "samples": len(experiment.shards[0]),
        "parameters": experiment.model.num_parameters,
        "curves": {"excess": shown},
    }


def excess_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One flat row for each algorithm of each cell."""
    rows = []
    for cell in document["cells"]:
        settings = cell["settings"]
        for label, entry in cell["algorithms"].items():
            samples, parameters = PAPER_SIZES.get(settings["task"], (None, None))
            beyond = entry["beyond"]
            rows.append(
                {
                    "table": cell["table"],
                    "n": entry["samples"],
                    "paper n": samples,
                    "d": entry["parameters"],
                    "paper d": parameters,
                    "algorithm": label,
                    "step": entry["learning-rate"],
                    "excess risk": _short(entry["excess"]["mean"]),
                    "± std": _short(entry["excess"]["std"]) if len(entry["loss"]["runs"]) > 1 else None,
                    "epsilon": entry["epsilon"]["mean"],
                    "delta": entry["delta"]["mean"],
                    "noise": settings.get("noise-quality", RunConfig().noise_quality),
                    "uncovered step": None if beyond is None else beyond["step"],
                    "its excess risk": None if beyond is None else _short(beyond["mean"]),
                    "runs": len(entry["loss"]["runs"]),
                }
            )
    return rows


def excess_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows as Markdown, a line a cell: excess risk (and step) of every algorithm, the best private one in bold.

    ``beyond`` is the best step of all where the guarantee does not cover it: shown, and no result.
    """
    cells: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault(row["table"], {})[row["algorithm"]] = row
    labels = list(dict.fromkeys(label for cell in cells.values() for label in cell))
    lines = [
        f"| setting | n (paper) | d (paper) | epsilon | noise | {' | '.join(labels)} | beyond |",
        f"|{'---|' * (6 + len(labels))}",
    ]
    for table, cell in cells.items():
        first = next(iter(cell.values()))
        best = min((row["excess risk"] for row in cell.values() if row["epsilon"] != 0), default=None)
        shown = [_shown(cell[label], best) if label in cell else "" for label in labels]
        beyond = [
            f"{label}: {row['its excess risk']:.3g} ({row['uncovered step']:g})"
            for label, row in cell.items()
            if row["uncovered step"] is not None
        ]
        epsilons = sorted({rounded_up(row["epsilon"]) for row in cell.values() if row["epsilon"]})
        columns = (
            table,
            f"{first['n']} ({first['paper n']})",
            f"{first['d']} ({first['paper d']})",
            ", ".join(epsilons),
            first["noise"],
            *shown,
            "; ".join(beyond),
        )
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines) + "\n"


def _shown(row: Mapping[str, Any], best: float | None) -> str:
    text = f"{row['excess risk']:.3g}" + ("" if row["± std"] is None else f" ± {row['± std']:.1g}")
    text = f"**{text}**" if row["epsilon"] != 0 and row["excess risk"] == best else text
    return f"{text} ({row['step']:g}{', not covered' if row['epsilon'] is None else ''})"


def plot_excess(document: Mapping[str, Any], title: str, path: Path, caption: str = "") -> None:
    """A panel a cell: excess risk after every epoch, mean and band, as the paper's figures 2 to 6."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = document["cells"]
    width = min(len(cells), 4)
    height = -(-len(cells) // width)
    figure = Figure(figsize=(3.7 * width, 2.9 * height + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(height, width, squeeze=False).ravel()
    labels = list(dict.fromkeys(label for cell in cells for label in cell["algorithms"]))
    colours = dict(zip(labels, colormaps["tab10"].colors, strict=False))  # type: ignore[attr-defined]
    for cell, axes in zip(cells, panels, strict=False):
        for label, entry in cell["algorithms"].items():
            curve = entry["curves"]["excess"]
            floor = [max(value, 1e-9) for value in curve["mean"]]
            axes.plot(curve["rounds"], floor, color=colours[label], label=label, linewidth=1.4)
            low = [max(m - s, 0.5 * f) for m, s, f in zip(curve["mean"], curve["std"], floor, strict=True)]
            high = [m + s for m, s in zip(floor, curve["std"], strict=True)]
            axes.fill_between(curve["rounds"], low, high, color=colours[label], alpha=0.15, linewidth=0)
        axes.set_title(cell["table"], fontsize=8)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=7, which="both")
    for axes in panels[len(cells) :]:
        axes.set_visible(False)
    for axes in panels[max(len(cells) - width, 0) : len(cells)]:
        axes.set_xlabel("epoch", fontsize=8)
    handles, texts = panels[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside lower center", ncols=len(texts), fontsize=8)
    figure.suptitle(
        f"{title}: empirical excess risk, mean and standard deviation over {document['seeds']} runs\n"
        f"{textwrap.fill(caption, 45 * width)}",
        fontsize=9,
    )
    figure.savefig(path, dpi=110)


def _statistics(values: Sequence[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return {"mean": None, "std": None, "runs": list(values)}
    spread = statistics.stdev(known) if len(known) > 1 else 0.0
    return {"mean": statistics.fmean(known), "std": spread, "runs": [_short(value) for value in known]}


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _without_name(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _short(v) if k in ("mean", "std") else v for k, v in entry.items() if k not in ("name", "runs")}
