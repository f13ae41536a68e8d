"""Which runs a reproduction is made of: cells, times algorithms, times steps, times seeds; and a line without noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from ...privacy import ConfigurationError
from ..settings.run_config import NO_NOISE, RunConfig, run_keys
from .cell import VALIDATION_SEEDS, Cell, Overrides, Settings, is_without_noise
from .kind import Run, TableKind


class RunKey(NamedTuple):
    """Which run of a reproduction it is; a step of None is that of the cell or of the preset."""

    cell: int
    algorithm: str
    seed: int
    step: float | None = None


Choices = Mapping[tuple[int, str], Sequence[Mapping[str, Any]]]
"""The steps tried for each cell and algorithm and what they were judged by, the best first."""


def plan_runs(cells: Sequence[Cell], seeds: int, engine: str, kind: TableKind | None = None) -> dict[RunKey, RunConfig]:
    """The configuration of every run whose figures are shown."""
    from ..engines.start import ENGINES  # the command names the papers in its help, and needs no engine for it

    if engine not in ENGINES:
        raise ConfigurationError(f"Expected engine one of {', '.join(ENGINES)}, got {engine!r}.")
    if seeds < 1:
        raise ConfigurationError(f"Expected seeds >= 1, got {seeds}.")
    runs = {
        RunKey(index, label, seed, step): _configured(cell, label, step, {"seed": seed})
        for index, cell in enumerate(cells)
        for label in cell.algorithms
        for step in cell.steps or (None,)
        for seed in range(1, seeds + 1)
    }
    if kind is not None:
        for config in runs.values():
            kind.check(config)
    return runs


def plan_validation(cells: Sequence[Cell], kind: TableKind) -> dict[RunKey, RunConfig]:
    """The runs that choose steps, on seeds that no result is made with."""
    runs = {}
    for index, cell in enumerate(cells):
        if cell.grids:
            kind.measure(held_out=cell.holds_out)
        for label, grid in cell.grids.items():
            for step in grid if label in cell.algorithms else ():
                for seed in VALIDATION_SEEDS:
                    config = _configured(cell, label, step, {**cell.validation, "seed": seed})
                    kind.check(config)
                    runs[RunKey(index, label, seed, step)] = config
    return runs


def _configured(cell: Cell, label: str, step: float | None, more: Overrides) -> RunConfig:
    settings = {**cell.settings, **cell.algorithms[label], **more}
    return RunConfig.from_mapping(settings if step is None else {**settings, "learning-rate": step})


def choose_steps(cells: Sequence[Cell], kind: TableKind, results: Mapping[RunKey, Run]) -> Choices:
    """The steps tried for each algorithm of a cell and what they were judged by, the best first."""
    tried: dict[tuple[int, str], dict[float | None, list[float]]] = {}
    for key, run in results.items():
        measured = kind.measure(held_out=cells[key.cell].holds_out).of(run)
        tried.setdefault((key.cell, key.algorithm), {}).setdefault(key.step, []).append(measured)
    choices = {}
    for (index, label), steps in tried.items():
        name = kind.measure(held_out=cells[index].holds_out).name
        entries = [{"step": step, name: fmean(values)} for step, values in steps.items()]
        choices[index, label] = sorted(entries, key=lambda entry: entry[name])
    return choices


def with_chosen_steps(cells: Sequence[Cell], choices: Choices) -> list[Cell]:
    """The cells, their algorithms with the best of the steps that were tried."""
    return [
        replace(
            cell,
            algorithms={
                label: {**options, "learning-rate": choices[i, label][0]["step"]} if (i, label) in choices else options
                for label, options in cell.algorithms.items()
            },
        )
        for i, cell in enumerate(cells)
    ]


WITHOUT = "without noise"
"""The twin's name among the algorithms of its cell."""
_OF_NOISE = ("schedule", "secret-order", "epsilon")
"""Keys beside the mechanisms' own that mean nothing without noise."""


def with_twins(cells: Sequence[Cell]) -> list[Cell]:
    """Cells with one more algorithm: the first that can be run without noise, without noise.

    A cell that has an algorithm without noise already gets no other.

    Notes
    -----
    A twin is not private, and every caption says so of it.
    """
    return [_with_twin(cell) for cell in cells]


def _with_twin(cell: Cell) -> Cell:
    if any(is_without_noise({**cell.settings, **options}) for options in cell.algorithms.values()):
        return cell
    for label, options in cell.algorithms.items():
        made = _twin(cell.settings, options)
        if made is not None:
            grids = {**cell.grids, **({WITHOUT: cell.grids[label]} if label in cell.grids else {})}
            return replace(cell, algorithms={**cell.algorithms, WITHOUT: made}, grids=grids)
    return cell


def _twin(shared: Overrides, options: Overrides) -> Settings | None:
    """An algorithm's settings without noise; None where it cannot be run without.

    Mu is that of the default, so that cells that differ in it alone share their runs.
    """
    keys, settings = run_keys(), {**shared, **options}
    of_mechanisms = [one.name for one in keys.values() if one.read_by == "mechanism"]
    unset = {name: keys[name].default for name in (*of_mechanisms, *_OF_NOISE) if name in settings}
    own: Settings = {**options, **unset, "mu": RunConfig.mu, "mechanism": NO_NOISE}
    try:
        RunConfig.from_mapping({**shared, **own})
    except ConfigurationError:
        return None
    return own
