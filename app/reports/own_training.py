"""A training of somebody's own project, left as a run's folder: ``murmurfl report`` and ``murmurfl list`` read it.

A run of murmurfl's own app knows its configuration; a training in somebody's own ServerApp is known by its strategy, by
what its machines state, and by what was measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.serverapp.strategy import Result

from ...privacy import ConfigurationError, Guarantee, stated_words
from ...strategies import ReleaseStrategy
from ...strategies.side.evaluation_figures import EvaluationResult
from ..runs.outcome import MEASURES, Outcome
from ..runs.run_files import write_outcome
from ..runs.run_guarantees import Figures, stated_figures
from ..runs.run_summary import plot_accuracy

Statements = Mapping[str, Mapping[str, Any]]

_UNCHECKED = "It is what {said} of {all} machines say of themselves, which a server cannot check."
_NOT_PRIVATE = "Machines evaluated the model without noise: no epsilon covers what they reported."


def record_training(
    folder: Path | str,
    strategy: ReleaseStrategy[Any],
    result: Result,
    statements: Statements,
    *,
    task: str,
    evaluation: EvaluationResult | None = None,
) -> dict[str, Any]:
    """Leave a training of one's own project as a folder that ``murmurfl report`` and ``murmurfl list`` read.

    Parameters
    ----------
    folder : Path or str
        Made if need be: ``result.json`` and, where the model was evaluated centrally, ``accuracy.png``.
    strategy : ReleaseStrategy
        After its last round.
    result : Result
        What its ``start`` returned; metrics called ``accuracy``, ``auc`` and ``loss`` are its evaluations'.
    statements : mapping
        What machines say of themselves, by name: ``strategy.ask_privacy(grid)`` after everything was released.
    task : str
        What the data are, in a word or two.
    evaluation : EvaluationResult, optional
        What :class:`~murmurfl.strategies.PrivateEvaluation` found.

    Returns
    -------
    dict
        The contents of ``result.json``.

    Raises
    ------
    ConfigurationError
        If no machine states anything, or machines trust their server: what such a server guarantees, they cannot say.
    OSError
        If the folder cannot be written.

    Notes
    -----
    Mu, epsilon and what they are true of are what the machines state, the weakest of them; a server cannot check it.
    Machines whose evaluation is private state it together with their training, if they are asked after it. Nothing is
    written that the server does not know.
    """
    guarantee = _guarantee(strategy, result, statements)
    sums = strategy.secure_aggregation
    outcome = Outcome.made(
        guarantee,
        strategy.history,
        _central(result),
        min_cohort=max(_stated(statements, "min-cohort"), default=None) if guarantee.min_honest else None,
        helpers=None if sums is None else sums.helpers,
        forecast=None if strategy.forecast is None else strategy.forecast.document(),
        num_clients=strategy.num_clients,
        releases=sum(int(one["releases"]) for one in statements.values()),
        num_parameters=sum(array.numpy().size for array in result.arrays.values()),
        config={
            "strategy": _class_name(strategy),
            "task": "own:" + (re.sub(r"\W+", "_", task).strip("_") or "data"),
            "trust": guarantee.trust,
            "num-clients": strategy.num_clients,
            "clients-per-round": strategy.clients_per_round,
            "num-rounds": len(strategy.history),
            "noise-quality": "fast" if "fast" in _stated(statements, "noise-quality") else "exact",
        },
        # How much of mu the evaluation took is the machines' matter.
        private_evaluation=None if evaluation is None else evaluation.document,
        machines={name: dict(one) for name, one in statements.items()},
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(one.accuracy is not None or one.loss is not None for one in outcome.per_round):
        plot_accuracy(outcome, folder / "accuracy.png")
    write_outcome(outcome, folder)
    return outcome.document()


def _guarantee(strategy: ReleaseStrategy[Any], result: Result, statements: Statements) -> Guarantee:
    """The guarantee that machines state, in one sentence that is true of all of them."""
    if not statements:
        raise ConfigurationError(
            "Expected what machines state, got nothing: pass strategy.ask_privacy(grid), after the training."
        )
    trusts = _stated(statements, "trust")
    if "trusted-server" in trusts:
        raise ConfigurationError(
            "Expected machines that vouch for their own noise, got trust 'trusted-server': what the server guarantees, "
            "machines cannot say. Run it with murmurfl's own app (`murmurfl run`), which knows it."
        )
    # Only if all of them hide their releases: what is said of sums is not true of a machine without masks.
    secure = trusts == {"secure-aggregation"}
    own = max(float(one["mu-guaranteed"]) for one in statements.values())
    expected = Figures(own, own if secure else None)
    figures = stated_figures(expected, statements, len(statements))
    # Whoever protects all data of a machine protects each sample.
    units = {one.get("unit") for one in statements.values()}
    unit = "machine" if units == {"machine"} else "owner" if units <= {"machine", "owner"} else "sample"
    notes = [_UNCHECKED.format(said=len(statements), all=strategy.num_clients)]
    notes += [_NOT_PRIVATE] if result.evaluate_metrics_clientapp else []
    words = stated_words(_stated(statements, "mechanism"), masked=secure)
    return Guarantee(
        min(figures.mu, figures.mu_local or math.inf),
        min(_stated(statements, "delta")),
        words or "noise on each machine, by its own account",
        trust="secure-aggregation" if secure else "untrusted-server",
        unit=unit,
        notes=tuple(notes),
        mu_local=figures.mu_local if secure else None,
        min_honest=figures.min_honest if secure else None,
    )


def _stated(statements: Statements, name: str) -> set[Any]:
    """The different values that machines state for something."""
    return {one[name] for one in statements.values() if name in one}


def _class_name(strategy: ReleaseStrategy[Any]) -> str:
    """A strategy's class, as a run configuration would name it."""
    kind = type(strategy)
    module = "murmurfl.strategies" if kind.__module__.startswith("murmurfl.strategies.") else kind.__module__
    return f"{module}:{kind.__name__}"


def _central(result: Result) -> dict[int, dict[str, float]]:
    """The figures of central evaluations, by round."""
    found: dict[int, dict[str, float]] = {}
    for number, record in result.evaluate_metrics_serverapp.items():
        values = {name: record.get(name) for name in MEASURES}
        found[number] = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    return found
