"""A paper whose tables are reproduced, as one object, and the cells of its tables; a user's own is one more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...privacy.accounting.gdp import gdp_mu
from ...privacy.release.policy import NO_NOISE
from ...privacy.setting import by_key
from ..settings.run_config import RunConfig, run_keys, without_unread
from .accuracy import TableKind

Overrides = Mapping[str, bool | int | float | str]
Settings = dict[str, bool | int | float | str]

LONG_RUN: Settings = {"noise-quality": "fast", "checkpoint": False, "node-deadline-s": 600.0}
"""Settings of long simulations in large numbers: fast noise, no files, patience with busy cores."""
JUDGED_AT_THE_END: Settings = {**LONG_RUN, "evaluate-every": 1_000_000}
"""The same where only the last model is evaluated."""

VALIDATION_SEEDS = (101,)
"""Seeds of the runs that choose a step; no result is made with them."""


def hyphenated(**values: bool | float | str) -> Settings:
    """Return settings by the names of run-config keys, with underscores for hyphens."""
    return by_key(values, run_keys())


def everybody(clients: int) -> Settings:
    """Return settings of so many clients, all of them in every round."""
    return {"num-clients": clients, "clients-per-round": clients}


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Parameters
    ----------
    table : str
        The table it belongs to.
    settings : mapping
        Run-config overrides beside those of the algorithm. All algorithms of the cell read them; what only some of them
        read stands among the algorithms' own.
    algorithms : mapping of str to mapping
        Overrides of each algorithm in the cell.
    paper : mapping of str to mapping
        What the paper prints, by algorithm: ``accuracy`` in percent, ``loss``; or, in a table of rates, the terms of
        its bound in this cell, and the quantity's ``value``.
    steps : tuple of float
        Learning rates each algorithm is run with, all of them with every seed; the kind of table says which of them is
        its result (:meth:`TableKind.best`).
    grids : mapping of str to tuple of float
        Learning rates to choose from, by algorithm. Runs of their own, with the seeds of ``VALIDATION_SEEDS``, try
        them, and the one that is best by the measure of the kind of table is used.
    validation : mapping
        Overrides of the runs that choose a step, such as ``validation-samples``, how many samples are held out for
        them.
    times : int
        How many times as many seeds it has as other cells: more where single runs differ much and take little.
    """

    table: str
    settings: Overrides
    algorithms: Mapping[str, Overrides]
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    steps: tuple[float, ...] = ()
    grids: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    validation: Overrides = field(default_factory=dict)
    times: int = 1

    @property
    def holds_out(self) -> bool:
        """Whether the runs that choose a step are judged on samples that are held out for it."""
        return bool(self.validation.get("validation-samples"))


def is_without_noise(settings: Mapping[str, object]) -> bool:
    """Return True if an algorithm's settings, its cell's among them, are those of a run without noise."""
    return settings.get("mechanism") == NO_NOISE


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
    """Whether every client is in every round throughout the paper, so that a setting of ``num-clients`` alone is one
    of ``clients-per-round`` too."""

    @abstractmethod
    def cells(self) -> list[Cell]:
        """Return the cells of its tables, in the order in which they are shown."""

    def cells_with(self, overrides: Overrides) -> list[Cell]:
        """Return the cells; with overrides, the one cell they describe.

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
    """Return settings with the mu that an epsilon stands for, in place of the cell's own."""
    epsilon = settings.pop("epsilon", 0.0)
    if epsilon:
        settings["mu"] = gdp_mu(float(epsilon), float(settings.get("delta", RunConfig().delta)))
    return settings


def _still_read(cell: Cell, overrides: Overrides) -> Settings:
    """Return a cell's settings without those of a task, a model or a mu that the overrides replace."""
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
    """Return True if only some algorithms read a setting, with one value for all of them.

    Then it goes to those alone: the others would refuse it. Settings in which algorithms differ make them the
    algorithms they are, and stay.
    """
    values = {options[key] for options in algorithms.values() if key in options}
    return key != "strategy" and key not in base.settings and len(values) == 1
