"""The kind of a paper's table: what it needs of a run, what it says of an algorithm, and how it is shown.

A paper names its kind. Nothing about a table is guessed from what a document happens to hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from ...privacy import ConfigurationError
from ..reports.table import Table
from ..settings.run_config import RunConfig

Run = Mapping[str, Any]
"""A run as a table needs it: the :data:`FIGURES` and its ``curves``."""

FIGURES = (
    "accuracy", "loss", "mu", "epsilon", "mu_local", "epsilon_local", "delta", "seconds", "releases", "refusals",
    "lost_replies",
)  # fmt: skip
"""Figures of a run's result that every table needs."""


@dataclass(frozen=True)
class Trial:
    """The runs of an algorithm with one step, one a seed.

    Parameters
    ----------
    config : RunConfig
        Of the first of them.
    covered : bool
        Whether the guarantee holds for this step. One for which it does not is no result.
    """

    config: RunConfig
    covered: bool
    runs: Sequence[Run]


class Measure(NamedTuple):
    """The measure of runs that choose a step; less is better."""

    name: str
    of: Callable[[Run], float]


class TableKind(ABC):
    """One kind of table. An instance must be picklable: worker processes ask it for the curves of a run."""

    name: str
    """Such as ``accuracy``."""
    sentence: str
    """A description of what it shows."""
    curves_needed: frozenset[str] = frozenset()
    """The curves it cannot do without; a finished run that was kept without them is made again."""
    honest_in_columns: bool = False
    """Whether it has columns for the honest machines of each sum and for what holds whatever happens."""
    has_alone: bool = False
    """Whether it has a line for one machine alone, without noise."""
    digits: int | None = None
    """Digits of single runs' figures in a document; None keeps all."""
    indent: int | None = 2
    """Indent of the JSON; None writes one line, for documents with thousands of figures."""

    def check(self, config: RunConfig) -> None:  # noqa: B027 - most kinds can show any run
        """Refuse a run that such a table cannot show."""

    def curves(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The curves it keeps of a run's result document, by name: ``rounds`` and ``values`` of each."""
        return {}

    def measure(self, *, held_out: bool) -> Measure:
        """The measure of runs that choose a step.

        Parameters
        ----------
        held_out : bool
            Whether their loss is that of samples held out for it, and not the test set's.
        """
        if not held_out:
            raise ConfigurationError(
                f"Expected validation-samples among the validation settings of a cell with grids in a table of kind "
                f"{self.name!r}, got none: a step chosen on the test set would make its figures too good."
            )
        return Measure("held_out_loss", lambda run: float(run["loss"]))

    def best(self, trials: Sequence[Trial]) -> Trial:
        """The step that is an algorithm's result: of least mean loss at the end, covered if any is."""
        covered = [trial for trial in trials if trial.covered]
        return min(covered or trials, key=lambda trial: fmean(float(run["loss"]) for run in trial.runs))

    def entry(self, best: Trial, trials: Sequence[Trial], choice: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Entries of one algorithm in a reproduction's document, beside its figures.

        Parameters
        ----------
        best : Trial
            The step that is its result.
        trials : sequence of Trial
            All steps that were run with every seed.
        choice : sequence of mapping
            Steps of runs that chose one, and what they were judged by, the one that was used first.
        """
        return {}

    def summary(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of the document for all its ``cells`` together."""
        return {}

    @abstractmethod
    def table(self, document: Mapping[str, Any], title: str = "") -> Table:
        """The table of a reproduction's document.

        Parameters
        ----------
        document : mapping
            With its ``cells``, the number of ``seeds``, and in ``guarantee`` what its epsilons are true of.
        title : str
            The paper's name.
        """

    def further_tables(self, document: Mapping[str, Any]) -> list[Table]:
        """Tables that stand below the first."""
        return []
