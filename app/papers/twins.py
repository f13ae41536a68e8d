"""A line without noise in every table and picture: the algorithms of cells once more, and nobody adds noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...privacy import ConfigurationError
from ..settings.run_config import NO_NOISE, RunConfig, run_keys
from .cell import Cell, Overrides, Settings

WITHOUT = "without noise"
"""What it is called among the algorithms of its cell."""
_OF_NOISE = ("schedule", "secret-order", "epsilon")
"""Keys beside the mechanisms' own that mean nothing without noise."""


def with_twins(cells: Sequence[Cell]) -> list[Cell]:
    """Cells with one more algorithm: the first that can be run without noise, without noise.

    A cell that has an algorithm without noise already gets no other.

    Parameters
    ----------
    cells : sequence of Cell

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


def is_without_noise(settings: Mapping[str, object]) -> bool:
    """Whether an algorithm's settings, its cell's among them, are those of a run without noise."""
    return settings.get("mechanism") == NO_NOISE
