"""A cell of a paper's table: what is run, what the paper prints of it, and means over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...privacy import NO_NOISE

Overrides = Mapping[str, bool | int | float | str]
Settings = dict[str, bool | int | float | str]

LONG_RUN: Settings = {"noise-quality": "fast", "checkpoint": False, "node-deadline-s": 600.0}
"""Settings of simulations that are long and many: quick noise, no files, patience with busy cores."""
JUDGED_AT_THE_END: Settings = {
    "noise-quality": "fast",
    "evaluate-every": 1_000_000,
    "checkpoint": False,
    "node-deadline-s": 600.0,
}
"""The same for runs of which only the last model is evaluated."""

VALIDATION_SEEDS = (101,)
"""Seeds of the runs that choose a step; no result is made with them."""


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


def is_without_noise(settings: Mapping[str, object]) -> bool:
    """Whether an algorithm's settings, its cell's among them, are those of a run without noise."""
    return settings.get("mechanism") == NO_NOISE
