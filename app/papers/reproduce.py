"""Reproduce the papers' tables: cells times seeds, in worker processes, finished ones kept.

A cell (:mod:`.papers`) is a set of run-config overrides; an algorithm is one more. Every run is the ordinary app on an
engine, so a table says what the code does that users run.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import multiprocessing
import os
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...privacy import ConfigurationError, rounded_up
from ..config import NO_NOISE, RunConfig
from ..engines.start import ENGINES, FIGURES, run_once
from ..guarantees import table_caption
from ..summary import spread
from .cells import REPRODUCTIONS, VALIDATION_SEEDS, Cell, Overrides
from .curves import SUMS, curve_statistics, plot_curves
from .excess import excess_entry, excess_rows, excess_table, plot_excess
from .stationary import mean_gradient_norm, norm_entry, norm_rows, norm_table, plot_norms, slopes
from .sweep import can_sweep, is_covered, run_sweep, sweep_of

_Key = tuple[int, str, int]
"""Cell, algorithm and seed of a run."""
_STEP = ", step "


def cells_of(name: str, overrides: Overrides) -> list[Cell]:
    """The cells of a reproduction; with overrides, the one cell they describe.

    Parameters
    ----------
    name : str
        A key of :data:`REPRODUCTIONS`.
    overrides : mapping
        Run-config overrides. Those that name a cell's own settings (such as ``mu``) start from the reproduction's first
        cell of the wanted preset; if the result is a cell of the paper, its figures stand beside it.

    Raises
    ------
    ConfigurationError
        If the name or a setting is unknown or impossible.
    """
    if name not in REPRODUCTIONS:
        raise ConfigurationError(f"Expected a reproduction, one of {', '.join(REPRODUCTIONS)}, got {name!r}.")
    cells = REPRODUCTIONS[name]()
    if not overrides:
        return cells
    preset = overrides.get("preset", cells[0].settings["preset"])
    base = next((cell for cell in cells if cell.settings["preset"] == preset), cells[0])
    settings = {**base.settings, **overrides}
    if "clients-per-round" not in overrides and name == "reshef-levy-2024":
        settings["clients-per-round"] = settings["num-clients"]
    strategy = settings.pop("strategy", None)
    known = next((cell for cell in cells if dict(cell.settings) == settings), None)
    algorithms = {
        label: options
        for label, options in (known or base).algorithms.items()
        # A mu or a batch of an algorithm's own was worked out for its cell.
        if strategy in (None, options["strategy"]) and (known or not {"mu", "batch-size"} & set(options))
    } or {str(strategy): {"strategy": str(strategy)}}
    steps, grids = ((), {}) if "learning-rate" in overrides else (base.steps, base.grids)
    table, paper = (known.table, known.paper) if known else ("as set", {})
    return [Cell(table, settings, algorithms, paper, steps, grids, base.validation)]


def plan_runs(cells: list[Cell], seeds: int, engine: str) -> dict[tuple[int, str, int], RunConfig]:
    """The configuration of every run, by cell, algorithm and seed.

    Raises
    ------
    ConfigurationError
        If a setting is impossible or the engine unknown: before anything runs.
    """
    if engine not in ENGINES:
        raise ConfigurationError(f"Expected engine one of {', '.join(ENGINES)}, got {engine!r}.")
    if seeds < 1:
        raise ConfigurationError(f"Expected seeds >= 1, got {seeds}.")
    return {
        (index, label, seed): RunConfig.from_mapping({**cell.settings, **options, "seed": seed})
        for index, cell in enumerate(cells)
        for label, options in _labelled(cell)
        for seed in range(1, seeds + 1)
    }


def _labelled(cell: Cell) -> list[tuple[str, Overrides]]:
    """The algorithms of a cell, each with every step of its grid."""
    if not cell.steps:
        return list(cell.algorithms.items())
    return [
        (_at_step(label, step), {**options, "learning-rate": step})
        for label, options in cell.algorithms.items()
        for step in cell.steps
    ]


def _at_step(label: str, step: float) -> str:
    return f"{label}{_STEP}{step!r}"


def run_cells(
    cells: list[Cell],
    *,
    seeds: int,
    out: Path,
    engine: str = "cohort",
    jobs: int | None = None,
    on_run: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Run every algorithm of every cell with seeds 1 .. seeds; finished runs found in ``out`` are not run again.

    Parameters
    ----------
    cells : list of Cell
    seeds : int
        Runs of each.
    out : Path
        Folder for ``runs/*.json``, one a finished run.
    engine : {"cohort", "inprocess", "ray"}
    jobs : int, optional
        Worker processes; default as many as cores. Ray uses one, for it uses the cores itself.
    on_run : callable, optional
        Called with runs done and runs in all.

    Returns
    -------
    dict
        The document of the reproduction: its ``cells``, and in words what their epsilons are true of.

    Raises
    ------
    ConfigurationError
        If a setting is impossible or the engine unknown.
    """
    tried = _validation_runs(cells)
    final = len(plan_runs(cells, seeds, engine))
    report = on_run or (lambda done, total: None)  # noqa: ARG005

    def make(configs: dict[_Key, RunConfig], before: int) -> dict[_Key, dict[str, Any]]:
        total = len(tried) + final
        return _run_all(configs, out, engine, jobs, lambda done: report(before + done, total))

    choices = _choose(cells, make(tried, 0)) if tried else {}
    cells = [_with_steps(i, cell, choices) for i, cell in enumerate(cells)]
    results = make(plan_runs(cells, seeds, engine), len(tried))
    document: dict[str, Any] = {
        "cells": [_cell_document(i, cell, results, seeds, choices) for i, cell in enumerate(cells)]
    }
    if _has_norms(document):
        document["slopes"] = slopes(document)
    return {"guarantee": table_caption(document), **document}


def _validation_runs(cells: list[Cell]) -> dict[_Key, RunConfig]:
    """The runs that choose steps, on seeds that no result is made with."""
    runs = {}
    for index, cell in enumerate(cells):
        for label, grid in cell.grids.items():
            if label in cell.algorithms:
                for step in grid:
                    settings = {**cell.settings, **cell.algorithms[label], **cell.validation, "learning-rate": step}
                    settings["gradient-norm"] = True
                    for seed in VALIDATION_SEEDS:
                        runs[index, _at_step(label, step), seed] = RunConfig.from_mapping({**settings, "seed": seed})
    return runs


def _choose(
    cells: list[Cell], results: Mapping[_Key, Mapping[str, Any]]
) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Steps tried for each algorithm of a cell and what they were judged by, the best first."""
    tried: dict[tuple[int, str], dict[float, list[float]]] = {}
    for (index, name, _), run in results.items():
        label, step = name.rsplit(_STEP, 1)
        measured = float(run["loss"]) if _held_out(cells[index]) else mean_gradient_norm(run)
        tried.setdefault((index, label), {}).setdefault(float(step), []).append(measured)
    choices = {}
    for (index, label), steps in tried.items():
        measure = "held_out_loss" if _held_out(cells[index]) else "gradient_norm"
        entries = [{"step": step, measure: statistics.fmean(values)} for step, values in steps.items()]
        choices[index, label] = sorted(entries, key=lambda entry: entry[measure])
    return choices


def _held_out(cell: Cell) -> bool:
    return bool(cell.validation.get("validation-samples"))


def _with_steps(index: int, cell: Cell, choices: Mapping[tuple[int, str], list[dict[str, Any]]]) -> Cell:
    algorithms = {
        label: {**options, "learning-rate": choices[index, label][0]["step"]} if (index, label) in choices else options
        for label, options in cell.algorithms.items()
    }
    return replace(cell, algorithms=algorithms)


def _run_all(
    configs: dict[_Key, RunConfig], out: Path, engine: str, jobs: int | None, on_run: Callable[[int], None]
) -> dict[_Key, dict[str, Any]]:
    """Every run's result; those found in ``out`` are not run again."""
    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[tuple[int, str, int], dict[str, Any]] = {}
    waiting = []
    for keys in _together(configs, engine):
        group = [configs[key] for key in keys]
        path = folder / f"{_group_name(group, engine)}.json"
        if path.exists():
            results |= zip(keys, _listed(json.loads(path.read_text())), strict=True)
        else:
            waiting.append((keys, group, path))
    on_run(len(results))
    # The longest first, so that no worker is left with one at the end: a run costs its client updates. Then by seed:
    # data that are made from it are made once.
    waiting.sort(key=lambda item: (-item[1][0].num_clients / max(item[1][0].clients_per_round, 1), item[1][0].seed))
    workers = 1 if engine == "ray" else jobs or os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, max(len(waiting), 1)), mp_context=context, initializer=_one_thread) as pool:
        futures = {pool.submit(_run_group, group, engine): (keys, path) for keys, group, path in waiting}
        try:
            for future in as_completed(futures):
                keys, path = futures[future]
                made = future.result()
                results |= zip(keys, made, strict=True)
                path.with_suffix(".part").write_text(json.dumps(made if len(made) > 1 else made[0]))
                path.with_suffix(".part").replace(path)
                on_run(len(results))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return results


def _together(configs: Mapping[tuple[int, str, int], RunConfig], engine: str) -> list[list[tuple[int, str, int]]]:
    """Runs that are made at once, by their keys; a step that silos refuse is shown where they are not asked."""
    groups: dict[object, list[tuple[int, str, int]]] = {}
    for key, config in configs.items():
        if engine == "cohort" and can_sweep(config):
            groups.setdefault(sweep_of(config), []).append(key)
        elif config.strategy != "shuffled" or is_covered(config):
            groups[key] = [key]
    return list(groups.values())


def _run_group(group: list[RunConfig], engine: str) -> list[dict[str, Any]]:
    return run_sweep(group) if engine == "cohort" and can_sweep(group[0]) else [run_once(group[0], engine)]


def _listed(made: Any) -> list[dict[str, Any]]:
    return made if isinstance(made, list) else [made]


def _group_name(group: list[RunConfig], engine: str) -> str:
    names = [_run_name(config, engine) for config in group]
    return names[0] if len(names) == 1 else hashlib.sha256("".join(names).encode()).hexdigest()[:24]


def _run_name(config: RunConfig, engine: str) -> str:
    default = RunConfig().to_mapping()
    told = replace(config, data_root="", download=False).to_mapping()
    changed = sorted((key, value) for key, value in told.items() if value != default[key])
    return hashlib.sha256(repr((engine, changed)).encode()).hexdigest()[:24]


def _one_thread() -> None:
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(1)
    threadpool_limits(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)


def _cell_document(
    index: int,
    cell: Cell,
    results: Mapping[_Key, Mapping[str, Any]],
    seeds: int,
    choices: Mapping[tuple[int, str], list[dict[str, Any]]],
) -> dict[str, Any]:
    algorithms = {}
    for label in cell.algorithms:
        if cell.algorithms[label].get("strategy") == "shuffled":
            tried = [(_at_step(label, step), {"learning-rate": step}) for step in cell.steps] or [(label, {})]
            configs = {
                name: RunConfig.from_mapping({**cell.settings, **cell.algorithms[label], **step})
                for name, step in tried
            }
            runs = {
                name: [results[index, name, seed] for seed in range(1, seeds + 1)]
                for name in configs
                if (index, name, 1) in results
            }
            algorithms[label] = excess_entry(configs, runs)
            continue
        runs = [results[index, label, seed] for seed in range(1, seeds + 1)]
        entry: dict[str, Any] = {name: _statistics([run[name] for run in runs]) for name in FIGURES}
        entry["settings"] = dict(cell.algorithms[label])
        entry["paper"] = dict(cell.paper.get(label, {}))
        if cell.settings.get("gradient-norm"):
            entry |= norm_entry(runs, choices.get((index, label), []))
        elif all(run.get("curves") for run in runs):
            entry["curves"] = curve_statistics([run["curves"] for run in runs])
        algorithms[label] = entry
    return {"table": cell.table, "settings": dict(cell.settings), "algorithms": algorithms}


def _statistics(values: list[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    if len(known) < len(values):  # an infinite mu or epsilon
        return {"mean": None, "std": None, "runs": values}
    return {
        "mean": statistics.fmean(known),
        "std": statistics.stdev(known) if len(known) > 1 else 0.0,
        "runs": values,
    }


def table_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One flat row for each algorithm of each cell, for the terminal and the CSV file."""
    if any("excess" in entry for entry in document["cells"][0]["algorithms"].values()):
        return excess_rows(document)
    if _has_norms(document):
        return norm_rows(document)
    rows = []
    for cell in document["cells"]:
        for label, entry in cell["algorithms"].items():
            settings = {**cell["settings"], **entry.get("settings", {})}
            noisy = settings.get("mechanism") != NO_NOISE
            runs = len(entry["accuracy"]["runs"])
            row = {
                "table": cell["table"],
                "machines": settings["num-clients"],
                "asked": settings["clients-per-round"],
                "batch": settings["batch-size"],
                "mu asked": settings["mu"] if noisy else None,
                "algorithm": label,
                "accuracy %": 100 * entry["accuracy"]["mean"],
                "± std": 100 * entry["accuracy"]["std"] if runs > 1 else None,
                "paper %": entry["paper"].get("accuracy"),
                "loss": entry["loss"]["mean"],
                "paper loss": entry["paper"].get("loss"),
                "mu": entry["mu"]["mean"],
                "epsilon": entry["epsilon"]["mean"],
                "noise": settings.get("noise-quality", RunConfig().noise_quality) if noisy else NO_NOISE,
                "delta": entry["delta"]["mean"],
                "seconds": entry["seconds"]["mean"],
                "runs": runs,
            }
            if "curves" in entry:
                row["step"] = settings["learning-rate"]
                for name in SUMS:
                    curve = entry["curves"].get(name)
                    row[name], row[f"± {name}"] = (
                        (None, None) if curve is None else (curve["mean"][-1], curve["std"][-1] if runs > 1 else None)
                    )
            rows.append(row)
    return rows


def _has_norms(document: Mapping[str, Any]) -> bool:
    return any("gradient_norm" in entry for entry in document["cells"][0]["algorithms"].values())


def write_reproduction(document: Mapping[str, Any], name: str, out: Path) -> None:
    """Write ``<name>.json``, ``.csv``, ``.md`` and ``.png`` into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    rows, caption = table_rows(document), table_caption(document)
    indent = None if "excess risk" in rows[0] else 2  # a step grid has thousands of figures
    (out / f"{name}.json").write_text(json.dumps(document, indent=indent) + "\n")
    with (out / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*rows[0], "guarantee"])
        writer.writeheader()
        writer.writerows({**row, "guarantee": caption} for row in rows)
    (out / f"{name}.md").write_text(f"{caption}\n\n{markdown_table(rows)}")
    if "excess risk" in rows[0]:
        plot_excess(document, name, out / f"{name}.png", caption)
    elif "gradient norm" in rows[0]:
        plot_norms(document, name, out / f"{name}.png", caption)
    elif "step" in rows[0]:
        plot_curves(document, name, out / f"{name}.png", caption)
    else:
        _plot(rows, name, out / f"{name}.png", caption)


def markdown_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table for people: figures with their spread, the paper's beside them."""
    rows = list(rows)
    if "excess risk" in rows[0]:
        return excess_table(rows)
    if "gradient norm" in rows[0]:
        return norm_table(rows)
    if "step" in rows[0]:
        return _online_table(rows)
    lines = [
        "| table | asked of machines | batch | mu asked | algorithm | accuracy % | paper "
        "| loss | paper | epsilon | noise | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        paper, paper_loss = row["paper %"], row["paper loss"]
        cells = (
            row["table"],
            f"{row['asked']} of {row['machines']}",
            row["batch"],
            "" if row["mu asked"] is None else rounded_up(row["mu asked"]),
            row["algorithm"],
            spread(row["accuracy %"], row["± std"], ".1f"),
            "" if paper is None else f"{paper:.1f}",
            f"{row['loss']:.4f}",
            "" if paper_loss is None else f"{paper_loss:.3f}",
            "none" if row["epsilon"] is None else rounded_up(row["epsilon"]),
            row["noise"],
            f"{row['seconds']:.0f}",
        )
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _online_table(rows: list[Mapping[str, Any]]) -> str:
    lines = [
        "| setting | mechanism | step | accuracy % | cumulative loss | dynamic regret | static regret "
        "| epsilon | noise |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sums = ["" if row[name] is None else spread(row[name], row[f"± {name}"], ".0f") for name in SUMS]
        epsilon = "none" if row["epsilon"] is None else rounded_up(row["epsilon"])
        cells = (
            row["table"],
            row["algorithm"],
            f"{row['step']:g}",
            spread(row["accuracy %"], row["± std"], ".1f"),
            *sums,
            epsilon,
            row["noise"],
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _plot(rows: Iterable[Mapping[str, Any]], name: str, path: Path, caption: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(rows)
    mus = ["no noise" if row["mu asked"] is None else f"mu {rounded_up(row['mu asked'])}" for row in rows]
    labels = [
        f"{row['table']}: {mu}, {row['asked']} of {row['machines']}, {row['algorithm']}"
        for row, mu in zip(rows, mus, strict=True)
    ]
    lines = textwrap.wrap(caption, 150)
    figure = Figure(figsize=(10, 1.2 + 0.32 * len(rows) + 0.13 * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    positions = list(range(len(rows)))[::-1]
    colours = {"mu2": "#1f6f8b", "trusted-mu2": "#4c9f70", "noisy-sgd": "#b0b7bc"}
    axes.barh(
        positions,
        [row["accuracy %"] for row in rows],
        xerr=[row["± std"] or 0.0 for row in rows],
        color=[colours.get(row["algorithm"], "#d98e5f") for row in rows],
        error_kw={"elinewidth": 1, "ecolor": "#444444"},
    )
    printed = [(p, row["paper %"]) for p, row in zip(positions, rows, strict=True) if row["paper %"] is not None]
    if printed:
        axes.plot([x for _, x in printed], [p for p, _ in printed], "k|", markersize=11, markeredgewidth=2)
        axes.set_xlabel("test accuracy [%], mean and standard deviation over seeds; the bar |: the paper")
    else:
        axes.set_xlabel("test accuracy [%], mean and standard deviation over seeds")
    for position, row in zip(positions, rows, strict=True):
        note = "not private: no noise"
        if row["epsilon"] is not None:
            note = f"ε = {rounded_up(row['epsilon'])} at δ = {row['delta']:g}, {row['noise']} noise"
        axes.text(1, position, note, va="center", fontsize=7, color="white")
    axes.set_yticks(positions, labels, fontsize=8)
    axes.set_xlim(0, 100)
    axes.margins(y=0.01)
    axes.set_title(name)
    figure.supxlabel("\n".join(lines), fontsize=7, color="#444444")
    figure.savefig(path, dpi=130)
