"""What is said of runs that differ in their seed: means and standard deviations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any


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
