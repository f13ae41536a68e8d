"""A paper whose tables are reproduced, as one object; a user's own is one more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from ...privacy import gdp_mu
from ..settings.run_config import RunConfig, without_unread
from .cell import Cell, Overrides, Settings
from .kind import TableKind


class Paper(ABC):
    """A paper: the cells of its tables, how many runs it made of each, and the kind of its tables."""

    name: str
    """The name in ``murmurfl reproduce NAME`` and of the files."""
    sentence: str
    """A description of its tables, for help and documentation."""
    table: TableKind
    seeds: int = 1
    """Runs of each cell, as many as the paper made."""
    everybody_is_asked: bool = False
    """Whether every machine is in every round throughout the paper, so that a setting of ``num-clients`` alone is one
    of ``clients-per-round`` too."""

    @abstractmethod
    def cells(self) -> list[Cell]:
        """The cells of its tables, in the order in which they are shown."""

    def cells_with(self, overrides: Overrides) -> list[Cell]:
        """The cells; with overrides, the one cell they describe.

        Parameters
        ----------
        overrides : mapping
            Run-config overrides. Those that name a cell's own settings (such as ``mu``) start from the first cell of
            the wanted preset; if the result is a cell of the paper, its figures stand beside it.
        """
        cells = self.cells()
        if not overrides:
            return cells
        preset = overrides.get("preset", _preset(cells[0]))
        base = next((cell for cell in cells if _preset(cell) == preset), cells[0])
        settings = _with_mu({**_still_read(base, overrides), **overrides})
        if self.everybody_is_asked and "clients-per-round" not in overrides:
            settings["clients-per-round"] = settings["num-clients"]
        strategy = settings.pop("strategy", None)
        known = next((cell for cell in cells if dict(cell.settings) == settings), None)
        algorithms = {
            label: options
            for label, options in (known or base).algorithms.items()
            # An algorithm's own mu or batch was worked out for its cell and means nothing in another.
            if strategy in (None, options["strategy"]) and (known or not {"mu", "batch-size"} & set(options))
        } or {str(strategy): {"strategy": str(strategy)}}
        shared = {key: value for key, value in overrides.items() if _is_of_some(key, base, algorithms)}
        for key in shared:
            settings.pop(key)
        algorithms = {
            label: {**options, **{key: value for key, value in shared.items() if key in options}}
            for label, options in algorithms.items()
        }
        steps, grids = ((), {}) if "learning-rate" in overrides else (base.steps, base.grids)
        table, paper = (known.table, known.paper) if known else ("as set", {})
        changed = replace(base, table=table, settings=settings, algorithms=algorithms, paper=paper)
        return [replace(changed, steps=steps, grids=grids)]


def _with_mu(settings: Settings) -> Settings:
    """Settings in which an epsilon is the mu it stands for, in the place of the cell's own."""
    epsilon = settings.pop("epsilon", 0.0)
    if epsilon:
        settings["mu"] = gdp_mu(float(epsilon), float(settings.get("delta", RunConfig().delta)))
    return settings


def _still_read(cell: Cell, overrides: Overrides) -> Settings:
    """A cell's settings that still mean something under others: not those of a task, a model or a mu that is gone."""
    method = next(iter(cell.algorithms.values()))  # a cell's settings are read by all its algorithms
    read = without_unread({**cell.settings, "strategy": method["strategy"], **overrides})
    return {
        key: value
        for key, value in cell.settings.items()
        if key in read and not (key == "mu" and overrides.get("epsilon"))
    }


def _preset(cell: Cell) -> object:
    return cell.settings.get("preset", RunConfig().preset)


def _is_of_some(key: str, base: Cell, algorithms: Mapping[str, Overrides]) -> bool:
    """Whether a setting is one that only some algorithms read, the same for all of them.

    Then it is theirs, and the others, which would refuse it, do not get it. Settings in which algorithms differ make
    them the algorithms they are, and stay.
    """
    values = {options[key] for options in algorithms.values() if key in options}
    return key != "strategy" and key not in base.settings and len(values) == 1
