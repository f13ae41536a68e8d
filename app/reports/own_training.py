"""A training of somebody's own project, left as a run's folder: ``murmurfl report`` and ``murmurfl list`` read it.

A run of murmurfl's own app knows its configuration; a training in somebody's own ServerApp is known by its strategy, by
what its clients state, and by what was measured.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from flwr.serverapp.strategy import Result

from ...privacy.accounting.guarantee import REHEARSED, Statements, stated_guarantee, stated_values
from ...privacy.forecast_text import forecast_document
from ...privacy.queries.evaluation import EvaluationResult
from ...strategies.callbacks.callback import Training
from ..runs.outcome import MEASURES, Outcome
from ..runs.result import folder_for, new_folder, write_outcome

_NOT_PRIVATE = "Clients evaluated the model without noise: no epsilon covers what they reported."


def record_training(
    folder: Path | str,
    strategy: Training,
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
        Made if need be, for ``result.json``.
    strategy : ReleaseStrategy
        After its last round.
    result : Result
        What its ``start`` returned; metrics called ``accuracy``, ``auc`` and ``loss`` are its evaluations'.
    statements : mapping
        What clients say of themselves, by name: ``strategy.ask_privacy(grid)`` after everything was released.
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
        If no client states anything, or clients trust their server: what such a server guarantees, they cannot say.
    OSError
        If the folder cannot be written.

    Notes
    -----
    Mu, epsilon and what they are true of are what the clients state, the weakest of them; a server cannot check it.
    Clients whose evaluation is private state it together with their training, if they are asked after it. Nothing is
    written that the server does not know. A training on Flower's simulation is a rehearsal, and the folder says so.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from murmurfl.app.engines.inprocess import InProcessGrid
    >>> from murmurfl.clients import NoisySGDClient, numpy_client_app, simulated_client
    >>> from murmurfl.privacy import PrivacyPolicy
    >>> from murmurfl.strategies import NoisySGD, ResultFolder
    >>> class Mean:
    ...     shapes = [(1,)]
    ...     def __call__(self, parameters, samples):
    ...         return parameters[0] - samples
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0, mechanism="independent")
    >>> def client_fn(context):
    ...     return NoisySGDClient(Mean(), np.ones((20, 1)), policy, **simulated_client(context))
    >>> grid = InProcessGrid(numpy_client_app(client_fn), 4, {})
    >>> strategy = NoisySGD(learning_rate=0.1, num_clients=4, callbacks=[ResultFolder(None)])
    >>> result = strategy.start(grid, ArrayRecord([np.zeros(1)]), num_rounds=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     document = record_training(folder, strategy, result, strategy.ask_privacy(grid), task="a mean")
    >>> document["mu"], document["releases"], document["aggregated"]
    (1.0, 8, 8)
    """
    rehearsed = (REHEARSED,) if strategy.simulated else ()
    notes = (*rehearsed, _NOT_PRIVATE) if result.evaluate_metrics_clientapp else rehearsed
    sums = strategy.secure_aggregation
    guarantee = stated_guarantee(statements, strategy.num_clients, notes, masked=sums is not None)
    outcome = Outcome.made(
        guarantee,
        strategy.history,
        _central(result),
        min_cohort=min(stated_values(statements, "min-cohort"), default=None) if guarantee.min_honest else None,
        helpers=None if sums is None else sums.helpers,
        forecast=None if strategy.forecast is None else forecast_document(strategy.forecast),
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
            "noise-quality": "fast" if "fast" in stated_values(statements, "noise-quality") else "exact",
        },
        # How much of mu the evaluation took is the clients' matter.
        private_evaluation=None if evaluation is None else evaluation.document,
        clients={name: dict(one) for name, one in statements.items()},
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_outcome(outcome, folder)
    return outcome.document()


def leave_training(folder: Path | str, strategy: Training, result: Result, statements: Statements) -> Path:
    """:func:`record_training` in a folder that holds nothing yet; empty for one in ``runs``, named by the time.

    Returns
    -------
    Path
        The folder: beside the given one if that holds something.
    """
    wanted = Path(folder).resolve()
    if not folder:
        made = folder_for(wanted / "runs", None, type(strategy).__name__)
    elif wanted.is_dir() and not any(wanted.iterdir()):
        made = nullcontext(wanted)  # as a container's volume is
    else:
        made = new_folder(wanted)
    with made as left:
        record_training(left, strategy, result, statements, task="")
    return left


def _class_name(strategy: Training) -> str:
    """Return a strategy's class, as a run configuration would name it."""
    kind = type(strategy)
    module = "murmurfl.strategies" if kind.__module__.startswith("murmurfl.strategies.") else kind.__module__
    return f"{module}:{kind.__name__}"


def _central(result: Result) -> dict[int, dict[str, float]]:
    """Return the figures of central evaluations, by round."""
    found: dict[int, dict[str, float]] = {}
    for number, record in result.evaluate_metrics_serverapp.items():
        values = {name: record.get(name) for name in MEASURES}
        found[number] = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    return found
