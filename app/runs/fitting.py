"""From a table to a private model: :func:`fit`, a rehearsal on one computer in which each site is a machine."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...clients.records.schema import Schema
from ...privacy import ConfigurationError
from ...privacy.setting import Value
from ..data.table_task import FittedTable, ReadTable, TableTask, held_out
from ..engines.start import run_cohort
from ..models.trained_model import SCHEMA
from ..settings.layers import layered
from ..settings.run_config import RunConfig
from .outcome import Alone, Outcome, Twin
from .progress import Progress
from .real_fit import LEDGER_ENDING, fit_for_real
from .result import RunResult
from .without_noise import without_noise

MACHINES = 5
"""Machines that rows are dealt to where no column says whose they are."""
HELD_OUT_SHARE = 0.2
"""Of the rows, for the figure."""
_MOST_NAMED, _TWO, _GUESSING, _ERRORS = 4, 2, 0.5, 2.0


def fit(
    table: Any,
    *,
    label: str = "",
    site: str = "",
    machines: int = 0,
    epsilon: float = 0.0,
    schema: Schema | Path | str | None = None,
    trust: str = "",
    real: bool = False,
    budget: float = 0.0,
    ledger: Path | str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    **settings: Value,
) -> RunResult:
    """Train a private model of a table in this process, as its sites would together: a rehearsal.

    Parameters
    ----------
    table : path, DataFrame, or list of mappings
        ``.csv``, ``.csv.gz`` or ``.parquet``; a row is a record.
    label : str
        The column that is to be predicted; default the schema's, or else the last one.
    site : str
        The column that says whose a row is: each site is a machine, and the column is no feature.
    machines : int
        Without ``site``, over how many machines the rows are dealt.
    epsilon : float
        Of everything that the run releases, at ``delta`` (1e-5); default that of mu = 1.
    schema : Schema or path, optional
        How rows are read; default a draft from these very rows, which shows something of them.
    trust : {"untrusted-server", "secure-aggregation", "trusted-server"}
    real : bool
        Whether the model may be used: this computer takes the place of a trusted curator, and only what is released
        with noise is shown. It needs a file and a reviewed schema; ``site``, ``machines`` and ``trust`` stay out.
    budget : float
        With ``real``: epsilon of everything that is ever released of these rows, for a new ledger; default this call's.
    ledger : path, optional
        With ``real``: the ledger's file; default the table's with ``.ledger`` behind it.
    on_progress : callable, optional
        Called after every round.
    **settings
        Further run-config keys with underscores for hyphens.

    Returns
    -------
    RunResult
        With ``table``, ``predict`` and ``save``, and in ``outcome`` the same without noise and one site alone.

    Raises
    ------
    MurmurflError
        If there is no such table, column or setting, or nothing can be learnt; one line.

    Notes
    -----
    A rehearsal guarantees nothing: keys are seeded and a drafted schema was made from the rows, so nobody
    is protected; :attr:`RunResult.guarantee` says what the same run would guarantee on real machines with a reviewed
    schema. With ``real`` model and figure have the guarantee of :func:`~.real_fit.fit_for_real`.

    Examples
    --------
    >>> import numpy as np
    >>> ages = np.linspace(20, 80, 600)
    >>> rows = [{"age": float(age), "ill": "yes" if age > 50 else "no"} for age in ages]
    >>> result = fit(rows, label="ill", machines=4, epsilon=8)
    >>> result.predict([{"age": 30.0}, {"age": 75.0}]).tolist()
    ['no', 'yes']
    """
    found = ReadTable.of(table, label=label, site=site, schema=schema)
    of_numbers = found.schema.num_classes == 1  # made-up data of which have classes: there is nothing to rehearse
    own: dict[str, Value] = {
        "strategy": "full-batch" if of_numbers and trust != "trusted-server" else "auto",
        "model": "ridge" if of_numbers else "softmax",
        **{name.replace("_", "-"): value for name, value in settings.items()},
    }
    given = {"epsilon": epsilon, "trust": trust}
    own = layered(own, {name: value for name, value in given.items() if value})
    if real:
        return _for_real(found, table, own, ledger, budget, simulated=bool(site or machines or trust))
    if budget or ledger:
        raise ConfigurationError("Expected budget and ledger with real=True (--real) only: a rehearsal spends nothing.")
    if site and machines:
        raise ConfigurationError("Expected site or machines, got both: each site is a machine.")
    read = found.read(site)
    seed = int(settings.get("seed", 1))
    dataset = held_out(read, found.schema, HELD_OUT_SHARE, seed)
    task = TableTask(found.schema, dataset)
    many = len(read.sites) or machines or MACHINES
    dealt = {"task": task.name, "partition": "own" if site else "iid", "num-clients": many, "clients-per-round": many}
    config = RunConfig.from_mapping({**own, **dealt})
    with _quiet():
        result = run_cohort(config, on_progress=on_progress, rehearsed=not of_numbers)
    labels = dataset.test_labels
    frequent = np.bincount(dataset.train_labels).argmax() if found.schema.num_classes > 1 else 0
    described = FittedTable(
        name=found.name,
        schema=found.schema,
        drafted=found.drafted,
        rows=len(found.rows),
        trained=len(dataset.train_labels),
        tested=len(labels),
        misfits=sum(read.misfits.values()),
        site=site,
        left_out=found.left_out,
        majority=float(np.mean(labels == frequent)) if found.schema.num_classes > 1 else 0.0,
        variance=float(np.var(labels)),
    )
    made = replace(result, table=described)
    with _quiet():
        figures: dict[str, Any] = {"alone": made.alone}
        if made.experiment.config.private:
            figures["without_noise"] = without_noise(made.outcome)
    vars(made)["outcome"] = made.outcome.model_copy(update=figures)  # where its cached property looks first
    return made


def _for_real(
    found: ReadTable, table: Any, own: dict[str, Value], ledger: Path | str | None, budget: float, *, simulated: bool
) -> RunResult:
    if simulated:
        raise ConfigurationError(
            "Expected no site, machines or trust in a real fit, in which this computer has all rows, got some: leave "
            "them out, or give each site a node (docs/deployment.md)."
        )
    if found.drafted or not isinstance(table, str | Path):
        raise ConfigurationError(
            "Expected a file and a reviewed schema for a real fit, got a drafted one or no file: a draft shows "
            "something of the rows. `murmurfl schema FILE --out SCHEMA.toml` makes a draft to review."
        )
    where = Path(ledger) if ledger else Path(f"{Path(table).expanduser()}{LEDGER_ENDING}")
    with _quiet():
        result = fit_for_real(found, own, where, budget)
    rows = len(found.rows)
    # What else is of the rows was not released.
    unknown: dict[str, Any] = {"tested": 0, "misfits": 0, "majority": 0.0, "variance": 0.0, "left_out": {}}
    described = FittedTable(found.name, found.schema, drafted=False, rows=rows, trained=rows, site="", **unknown)
    return replace(result, table=described)


def figure(of: Outcome | Twin | Alone, table: FittedTable) -> float:
    """What a model is judged by: the AUC of two classes, the accuracy of several, R^2 of numbers."""
    if table.schema.num_classes == 1:
        return math.nan if of.loss is None or not table.variance else 1.0 - of.loss / table.variance
    found = of.auc if table.schema.num_classes == _TWO else of.accuracy
    return math.nan if found is None else found


def shown_figure(of: Outcome | Twin | Alone, table: FittedTable) -> str:
    """:func:`figure` for people."""
    value = figure(of, table)
    if table.schema.num_classes == 1:
        return f"R2 {value:.3f}"
    if table.schema.num_classes == _TWO:
        return f"AUC {value:.3f} (accuracy {100 * (of.accuracy or 0.0):.1f} %)"
    return f"{100 * value:.1f} %"


def is_useless(outcome: Outcome, table: FittedTable) -> bool:
    """Whether a fitted model tells no more than the usual answer does."""
    if table.schema.num_classes == 1:
        return not figure(outcome, table) > 0.0
    if table.schema.num_classes == _TWO and figure(outcome, table) > _GUESSING + _ERRORS * table.error_of_guessing:
        return False  # it ranks, even where one class is so rare that nobody is given it
    return not (outcome.accuracy or 0.0) > table.majority


def fit_lines(result: RunResult, table: FittedTable, folder: Path) -> list[str]:
    """A fitted model, saved in a folder, in about ten lines for people."""
    outcome, config = result.outcome, result.experiment.config
    schema, lines = table.schema, list[str]()
    if result.deployed:
        return _real_lines(result, table, folder)
    if is_useless(outcome, table):
        usual = "their mean" if schema.num_classes == 1 else f"the usual answer, {100 * table.majority:.1f} %"
        lines.append(f"This model is no better than always giving {usual}: do not use it.")
    unused = ", ".join(f"{name} ({reason})" for reason, names in table.left_out.items() for name in names[:_MOST_NAMED])
    misfits = f", {table.misfits} do not fit" if table.misfits else ""
    held = f"{table.trained:,} to train, {table.tested:,} held out{misfits}"
    whose = f"{outcome.num_clients} sites by {table.site!r}" if table.site else f"{outcome.num_clients} machines, dealt"
    rows = [
        ("table", f"{table.name}: {table.rows:,} rows ({held}); {whose}"),
        ("columns", f"{len(schema.columns)} used{f'; left out: {unused}' if unused else ''}"),
        ("label", _label_words(schema)),
        ("method", f"{config.strategy}, {outcome.rounds} rounds{', chosen by rehearsal' if outcome.chosen_by else ''}"),
        ("model", f"{shown_figure(outcome, table)} on the rows held out"),
        ("beside it", "; ".join(_beside(outcome, table)) or "no twin was made"),
        ("privacy", _privacy(result)),
        ("saved", f"{folder}: `murmurfl predict {folder} NEW.csv` adds a column"),
        ("next", _next(table, folder)),
    ]
    wide = max(len(name) for name, _ in rows)
    lines += [f"{name:<{wide}}  {value}" for name, value in rows]
    return lines


def _real_lines(result: RunResult, table: FittedTable, folder: Path) -> list[str]:
    """A model that was fitted for real: nothing but what was released with noise."""
    evaluation, outcome = result.outcome.private_evaluation, result.outcome
    measured = "none was released" if evaluation is None else evaluation.sentence or evaluation.failure
    rows = [
        ("table", f"{table.name}: {table.rows:,} rows, whose number is public"),
        ("label", _label_words(table.schema)),
        ("method", f"{result.experiment.config.strategy}, {outcome.rounds} rounds"),
        ("figure", f"{measured}"),
        ("privacy", f"REAL: {result.guarantee}"),
        ("saved", f"{folder}: `murmurfl predict {folder} NEW.csv` adds a column"),
    ]
    wide = max(len(name) for name, _ in rows)
    return [f"{name:<{wide}}  {value}" for name, value in rows]


def _label_words(schema: Schema) -> str:
    label = schema.label
    if schema.num_classes == 1:
        return (
            f"{label.column}: a number from {label.bounds[0]:g} to {label.bounds[1]:g}"
            if label.bounds
            else label.column
        )
    named = ", ".join(label.names[:_MOST_NAMED]) + (", ..." if len(label.names) > _MOST_NAMED else "")
    return f"{label.column}: {named}"


def _beside(outcome: Outcome, table: FittedTable) -> list[str]:
    said = []
    if outcome.without_noise is not None:
        said.append(f"without privacy {shown_figure(outcome.without_noise, table)}")
    if outcome.alone is not None and outcome.alone.machines:
        said.append(f"one site alone {shown_figure(outcome.alone, table)}")
    if table.schema.num_classes > 1:
        said.append(f"the usual answer {100 * table.majority:.1f} %")
    return said


def _privacy(result: RunResult) -> str:
    if result.outcome.mu is None:
        return "none: no noise was added"
    return (
        "REHEARSAL: keys are seeded, nobody was protected. With secret keys and a reviewed schema it would have: "
        f"{result.guarantee}"
    )


def _next(table: FittedTable, folder: Path) -> str:
    review = f"review {folder / SCHEMA}, " if table.drafted else ""
    return f"{review}then give each site's node its table and the schema (docs/deployment.md)"


@contextmanager
def _quiet() -> Iterator[None]:
    """Let Flower's log say nothing but errors: what matters is in the summary."""
    log = logging.getLogger("flwr")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
