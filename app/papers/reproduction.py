"""Reproduce a paper's tables: its runs, and the document, table and picture that come of them.

A cell is a set of run-config overrides; an algorithm is one more. Every run is the ordinary app on an engine, so a
table shows the code that users run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...privacy import ConfigurationError
from ..engines.pool import say_nothing
from ..methods import METHODS
from ..reports.table import Table, statistics
from ..runs.alone import alone
from ..runs.experiment import prepare
from ..settings.run_config import RunConfig
from .accuracy import with_alone
from .captions import table_caption
from .cell import Cell
from .kind import FIGURES, Run, TableKind, Trial
from .made_runs import Workplace, made_together, make_runs
from .paper import Paper
from .planned_runs import Choices, RunKey, choose_steps, plan_runs, plan_validation, with_chosen_steps


def run_cells(
    cells: Sequence[Cell],
    kind: TableKind,
    *,
    seeds: int,
    out: Path,
    engine: str = "cohort",
    workers: int | None = None,
    ray_address: str = "",
    say: Callable[[str], None] | None = None,
    on_run: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Run every algorithm of every cell with seeds 1 .. seeds; finished runs found in ``out`` are not run again.

    Parameters
    ----------
    kind : TableKind
        What the runs are made for.
    seeds : int
        Runs of each.
    out : Path
        Folder for ``runs/*.json``.
    workers : int, optional
        Runs at once, each in a process of its own; default as many as cores. Runs on the ray engine are made one after
        the other, because it uses the cores itself.
    ray_address : str
        A Ray cluster on which the workers are; default this computer. Its nodes get the data from here.
    say : callable, optional
        Told what is waited for, in a sentence.
    on_run : callable, optional
        Called with runs done and runs in all.

    Returns
    -------
    dict
        The document of the reproduction: its ``cells``, and in words what their epsilons are true of.

    Raises
    ------
    ConfigurationError
        If a setting is impossible, the engine unknown, or all steps of an algorithm are beyond its guarantee.
    WorkerError
        If a worker could not be started, or is gone; finished runs are kept.
    """
    tried = plan_validation(cells, kind)
    final = plan_runs(cells, seeds, engine, kind)
    _check_covered(cells, final, kind, engine)
    report = on_run or (lambda done, total: None)  # noqa: ARG005
    workplace, total = Workplace(out, engine, workers, ray_address, say or say_nothing), len(tried) + len(final)

    def make(configs: Mapping[RunKey, RunConfig], before: int) -> dict[RunKey, Run]:
        return make_runs(configs, kind, workplace, lambda done: report(before + done, total))

    choices = choose_steps(cells, kind, make(tried, 0)) if tried else {}
    chosen = with_chosen_steps(cells, choices)
    results = make(plan_runs(chosen, seeds, engine, kind), len(tried))
    made = [_cell_document(i, cell, kind, results, choices) for i, cell in enumerate(chosen)]
    document: dict[str, Any] = {"cells": made}
    told = table_caption(document, in_columns=kind.honest_in_columns)
    return {"guarantee": told, **document, **kind.summary(document)}


def write_reproduction(document: Mapping[str, Any], name: str, kind: TableKind, out: Path) -> list[Table]:
    """Write ``<name>.json``, ``.csv``, ``.md`` and ``.png`` into a folder.

    Returns
    -------
    list of Table
        What the Markdown holds.
    """
    out.mkdir(parents=True, exist_ok=True)
    first, *further = tables = tables_of(document, name, kind)
    (out / f"{name}.json").write_text(json.dumps(document, indent=kind.indent) + "\n")
    with (out / f"{name}.csv").open("w", newline="") as file:
        file.write(first.csv())
    below = "".join(f"\n{table.title}\n\n{table.markdown()}" for table in further)
    (out / f"{name}.md").write_text(f"{first.caption}\n\n{first.markdown()}{below}")
    if first.draw is not None:
        first.draw(out / f"{name}.png")
    return tables


def tables_of(document: Mapping[str, Any], name: str, kind: TableKind) -> list[Table]:
    """The tables of a reproduction's document, the one with its figures first."""
    document = with_alone(document) if kind.has_alone else document
    told = table_caption(document, in_columns=kind.honest_in_columns)
    captioned = {"seeds": 1, **document, "guarantee": told}
    return [kind.table(captioned, name), *kind.further_tables(captioned)]


def reproduce(
    paper: Paper, cells: Sequence[Cell], out: Path, *, seeds: int, engine: str, **options: Any
) -> dict[str, Any]:
    """The document of a paper's cells, with its files written; the options are those of :func:`run_cells`."""
    document = run_cells(cells, paper.table, seeds=seeds, out=out, engine=engine, **options)
    document = {"reproduction": paper.name, "engine": engine, "seeds": seeds, **document}
    write_reproduction(document, paper.name, paper.table, out)
    return document


def _check_covered(cells: Sequence[Cell], runs: Mapping[RunKey, RunConfig], kind: TableKind, engine: str) -> None:
    # The steps of algorithms with a grid of their own are not chosen yet.
    of_grids = {(i, label) for i, cell in enumerate(cells) for label in cell.grids}
    planned = {key: config for key, config in runs.items() if (key.cell, key.algorithm) not in of_grids}
    left = {(key.cell, key.algorithm) for group in made_together(planned, kind, engine) for key in group}
    for key in planned:
        if (key.cell, key.algorithm) not in left:
            raise ConfigurationError(
                f"Expected a step that the guarantee covers for {key.algorithm!r} in {cells[key.cell].table!r}, got "
                f"none: on the {engine} engine machines refuse all of them."
            )


def _cell_document(
    index: int, cell: Cell, kind: TableKind, results: Mapping[RunKey, Run], choices: Choices
) -> dict[str, Any]:
    algorithms = {}
    for label, options in cell.algorithms.items():
        trials = _trials(index, label, cell, results)
        best = kind.best(trials)
        algorithms[label] = {
            **{name: statistics([run[name] for run in best.runs], kind.digits) for name in FIGURES},
            "settings": dict(options),
            "paper": dict(cell.paper.get(label, {})),
            **kind.entry(best, trials, choices.get((index, label), [])),
        }
    made = {"table": cell.table, "settings": dict(cell.settings), "algorithms": algorithms}
    return {**made, "alone": _alone(cell)} if kind.has_alone else made


def _alone(cell: Cell) -> dict[str, Any] | None:
    """What one machine reaches alone with the data of the first seed; None of models that have no such figures."""
    settings = next(iter(cell.algorithms.values()), {})
    found = alone(RunConfig.from_mapping({**cell.settings, **settings, "seed": 1}))
    return None if found.reason else {name: getattr(found, name) for name in ("accuracy", "auc", "loss")}


def _trials(index: int, label: str, cell: Cell, results: Mapping[RunKey, Run]) -> list[Trial]:
    trials = []
    for step in cell.steps or (None,):
        seeds = sorted(key.seed for key in results if (key.cell, key.algorithm, key.step) == (index, label, step))
        if seeds:
            settings = {**cell.settings, **cell.algorithms[label], "seed": seeds[0]}
            config = RunConfig.from_mapping(settings if step is None else {**settings, "learning-rate": step})
            trials.append(
                Trial(
                    config,
                    METHODS[config.strategy].covers(config, prepare),
                    [results[RunKey(index, label, s, step)] for s in seeds],
                )
            )
    return trials
