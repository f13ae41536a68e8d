"""A cell of a paper's table: what is run, what the paper prints of it, and means over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

Overrides = Mapping[str, bool | int | float | str]
Settings = dict[str, bool | int | float | str]

VALIDATION_SEEDS = (101,)
"""Of the runs that choose a step; no result is made with them."""


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
        What the paper prints, by algorithm: ``accuracy`` in percent, ``loss``.
    steps : tuple of float
        Learning rates each algorithm is run with, all of them with every seed; the kind of table says which of them is
        its result (:meth:`~murmurfl.app.papers.kind.TableKind.best`).
    grids : mapping of str to tuple of float
        Learning rates to choose from, by algorithm. Runs of their own, with the seeds of ``VALIDATION_SEEDS``, try
        them, and the one that is best by the measure of the kind of table is used.
    validation : mapping
        Overrides of the runs that choose a step, such as ``validation-samples``, how many samples are held out for
        them.
    """

    table: str
    settings: Overrides
    algorithms: Mapping[str, Overrides]
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    steps: tuple[float, ...] = ()
    grids: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    validation: Overrides = field(default_factory=dict)

    @property
    def holds_out(self) -> bool:
        """Whether the runs that choose a step are judged on samples that are held out for it."""
        return bool(self.validation.get("validation-samples"))


def statistics(values: Sequence[float | None], digits: int | None = None) -> dict[str, Any]:
    """Mean, standard deviation and the values themselves.

    Parameters
    ----------
    values : sequence of float or None
        One a seed. None stands for no finite number, such as the epsilon of a run without noise; with one of them there
        is neither a mean nor a deviation.
    digits : int, optional
        To how many digits the values are kept; default all.
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return {"mean": None, "std": None, "runs": list(values)}
    runs = known if digits is None else [short(value, digits) for value in known]
    return {"mean": fmean(known), "std": stdev(known) if len(known) > 1 else 0.0, "runs": runs}


def curve_statistics(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation of each curve over runs with the same rounds."""
    curves = {}
    for name, first in runs[0].items():
        columns = list(zip(*(run[name]["values"] for run in runs), strict=True))
        curves[name] = {
            "rounds": first["rounds"],
            "mean": [fmean(column) for column in columns],
            "std": [stdev(column) if len(column) > 1 else 0.0 for column in columns],
        }
    return curves


def short(value: float, digits: int = 5) -> float:
    """A value to so many digits: a document of thousands of figures need not have sixteen of each."""
    return float(f"{value:.{digits}g}")
