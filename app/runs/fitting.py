"""Private models from tables: :func:`fit`, a rehearsal on one computer in which each site is a client."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from ...clients.records.schema import Schema
from ...privacy.accounting.guarantee import Guarantee
from ...privacy.errors import ConfigurationError
from ...privacy.noise import derived_seed
from ...privacy.release.tables import PRIVATE, SHUFFLED
from ...privacy.setting import Value, by_key
from ..data.table_task import FittedTable, ReadRows, ReadTable, TableTask, held_out, read_for, split_rows
from ..data.task import Dataset
from ..engines.start import run_cohort
from ..models.trained_model import SCHEMA
from ..settings.layers import layered
from ..settings.registry import registry
from ..settings.run_config import RunConfig, run_keys
from .baselines import baselines, one_against_others, scores_of, site_alone_on_own
from .outcome import Alone, Outcome, Rehearsal, Scores, SeveralSeeds
from .progress import Progress
from .real_fit import LEDGER_ENDING, evaluated_privately, fit_for_real, with_spent
from .result import RunResult
from .sealed import Seal, run_sealed
from .simulate import bar_of_rounds
from .simulated_figures import NOTE

if TYPE_CHECKING:
    from ...clients.records.client_records import Table
    from ..settings.keyword_arguments import FitSettings

CLIENTS = 5
"""Clients that rows are dealt to where no column says whose they are."""
HELD_OUT_SHARE = 0.2
"""Share of rows held out for the score."""
SCALING_SHARE = 0.1
"""Share of mu^2 for the statistics that columns are scaled by."""
EPSILON = 2.0
"""Default epsilon of a fit."""
_SUMS = "secure-aggregation"
_FULL_BATCH, _TRUSTED = "full-batch", "trusted-full-batch"
DEALT = ("task", "partition", "num-clients", "clients-per-round", "partition.alpha")
"""Keys that the table and its clients decide."""
_MOST_NAMED, _MOST_CHECKED, _TWO, _GUESSING, _ERRORS = 4, 4, 2, 0.5, 2.0
_FAR, _SMALL_PART, _SHARED_PART = 0.01, 0.2, 0.5
_FAR_BEHIND = 0.05
"""Distance below the mean from which the worst site's score is shown."""


class FittedResult(RunResult):
    """The result of a fit: it shows what a person must know of the model and of the rows."""

    def _summary(self) -> tuple[list[str], list[tuple[str, str]]]:
        return super()._summary() if self.table is None else _fit_summary(self, self.table, None)


def _fitted(result: RunResult, table: FittedTable) -> RunResult:
    known: dict[str, Any] = {one.name: getattr(result, one.name) for one in fields(result)}
    return FittedResult(**{**known, "table": table})


def fit(
    table: Table,
    *,
    label: str = "",
    site: str = "",
    clients: int = 0,
    owner: str = "",
    owners: int = 0,
    epsilon: float | None = None,
    schema: Schema | Path | str | None = None,
    seeds: int = 1,
    trust: str = "",
    evaluate: str = "",
    scale: str = "",
    real: bool = False,
    budget: float = 0.0,
    ledger: Path | str | None = None,
    private_log: Path | str | None = None,
    header: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
    **settings: Unpack[FitSettings],
) -> RunResult:
    """Train a private model of a table in this process, as its sites would together: a rehearsal.

    Parameters
    ----------
    table : path, DataFrame, or list of mappings
        ``.csv``, ``.csv.gz`` or ``.parquet``; a row is a record.
    label : str
        The column that is to be predicted; default the schema's, or else the last one.
    site : str
        The column that says whose a row is: each site is a client, and the column is no feature.
    clients : int
        Without ``site``, over how many clients the rows are dealt.
    owner : str
        The column that says which person a row belongs to; default the schema's, if it names one. All rows of a person
        are protected together, as ``samples_per_owner`` says, and are either trained on or held out. The column is no
        feature.
    owners : int
        With ``real`` and an owner: how many places there are for persons, a public number, with room for those who are
        to come.
    epsilon : float
        Of everything that the run releases, at ``delta`` (1e-5); default 2, or ``mu`` among the settings.
    schema : Schema or path, optional
        How rows are read; default a draft from these very rows, which shows something of them.
    seeds : int
        How many rehearsals are made that differ in their seed alone, with other rows held out and other noise: the
        summary then has the mean of their figures and its standard error.
    trust : {"untrusted-server", "secure-aggregation", "trusted-server"}
    evaluate : {"", "private"}
        ``private``: clients also release with noise, out of the same epsilon, how often the model is right on rows
        that they set aside. A real fit of classes always does.
    scale : {"", "private"}
        ``private``: clients release statistics of the columns first, for a tenth of mu^2, and numbers are scaled by
        these instead of the schema's bounds. It helps where bounds are far too wide, and costs a little where not.
    real : bool
        Whether the model may be used: this computer takes the place of a trusted curator, and only what is released
        with noise is shown. It needs a file and a reviewed schema; ``site``, ``clients`` and ``trust`` stay out.
    budget : float
        With ``real``: epsilon of everything that is ever released of these rows, for a new ledger; default this call's.
    ledger : path, optional
        With ``real``: the ledger's file; default the table's with ``.ledger`` behind it.
    private_log : path, optional
        With ``real``: new file, which nobody else can read, for everything that must not leave: log records, warnings,
        what is printed, and why the fit failed. Default nowhere.
    header : bool
        Whether the first line of a CSV file names its columns. Without it they are ``column-1``, ``column-2``, ...
    on_progress : callable, optional
        Called after every round; default a bar, in a notebook or on a terminal.
    **settings
        Further run-config keys with underscores for hyphens.

    Returns
    -------
    RunResult
        With ``table``, ``predict`` and ``save``, and in ``outcome`` models without privacy and one site alone.

    Raises
    ------
    MurmurflError
        If there is no such table, column or setting, or nothing can be learnt; one line. With ``real``, a failure after
        a row was read has one fixed text and no cause (:class:`~.sealed.SealedError`).

    Notes
    -----
    A rehearsal guarantees nothing: keys are seeded and a drafted schema was made from the rows,
    so nobody is protected; :attr:`RunResult.guarantee` says what the same run would guarantee on real clients with a
    reviewed schema that does not come from their rows. With ``real`` model and figure have the guarantee of
    :func:`~.real_fit.fit_for_real`, and while it runs nothing that this process prints, logs or warns of leaves it
    (:func:`~.sealed.run_sealed`).

    Examples
    --------
    >>> import numpy as np
    >>> ages = np.linspace(20, 80, 600)
    >>> rows = [{"age": float(age), "ill": "yes" if age > 50 else "no"} for age in ages]
    >>> result = fit(rows, label="ill", clients=4, epsilon=8)
    >>> result.predict([{"age": 30.0}, {"age": 75.0}]).tolist()
    ['no', 'yes']
    """
    asked = _Asked(table, label, site, clients, owner, epsilon, schema, trust, evaluate, scale, header, settings)
    if not real:
        if owners:
            raise ConfigurationError(
                f"Expected owners with real=True (--real) only, got {owners}: a rehearsal counts them.",
                kind="conflict",
                setting="owners",
                got=owners,
            )
        if budget or ledger or private_log:
            raise ConfigurationError(
                "Expected budget, ledger and private_log with real=True (--real) only: a rehearsal spends nothing.",
                kind="conflict",
                setting="real",
            )
        return _rehearsed(asked, on_progress, seeds=seeds)
    if seeds != 1:
        raise ConfigurationError(
            f"Expected one seed in a real fit, got seeds = {seeds}: each training spends. Rehearse several.",
            kind="conflict",
            setting="seeds",
            got=seeds,
        )
    report = on_progress or bar_of_rounds()
    return run_sealed(
        lambda seal: _for_real(asked, owners, ledger, budget, seal, report),
        None if private_log is None else Path(private_log),
    )


@dataclass(frozen=True)
class _Asked:
    """Arguments of :func:`fit` that a rehearsal and a real fit share."""

    table: Table
    label: str
    site: str
    clients: int
    owner: str
    epsilon: float | None
    schema: Schema | Path | str | None
    trust: str
    evaluate: str
    scale: str
    header: bool
    settings: Mapping[str, object]

    def settled(self) -> tuple[ReadTable, dict[str, Value]]:
        """Read the table's header and its schema; the table, and the run-config keys, checked."""
        asked = {"label": self.label, "site": self.site, "owner": self.owner, "header": self.header}
        found = ReadTable.of(self.table, schema=self.schema, **asked)
        return found, _own_keys(self, found.schema)


def _own_keys(asked: _Asked, schema: Schema) -> dict[str, Value]:
    """Return the run-config keys that are asked for, checked."""
    epsilon, trust, evaluate, scale = asked.epsilon, asked.trust, asked.evaluate, asked.scale
    of_numbers = schema.num_classes == 1
    given_keys = by_key(asked.settings, run_keys())
    if "model" in given_keys:
        additive = registry("model")[str(given_keys["model"])].takes_knots
    else:
        additive = not asked.scale and can_be_additive(schema, given_keys)
    own = {**_usual_keys(schema, trust, additive=additive), **given_keys}
    if not schema.owner and own.get("samples-per-owner"):
        raise ConfigurationError(
            f"Expected a column of owners with samples-per-owner = {own['samples-per-owner']}, got none: name it with "
            "--owner, or in the schema.",
            kind="missing",
            setting="owner",
        )
    if schema.owner and (scale or evaluate):
        option = "scale" if scale else "evaluate"
        raise ConfigurationError(
            f"Expected {option} to be empty with an owner, got {PRIVATE!r}: it counts rows, of which a person has "
            "several. Leave it out.",
            kind="conflict",
            setting=option,
            got=PRIVATE,
        )
    if dealt := next((name for name in DEALT if name in own), ""):
        raise ConfigurationError(
            f"Expected site or clients in the place of {dealt}, got {own[dealt]!r}: these say where a row is.",
            kind="conflict",
        )
    if epsilon is not None and not epsilon > 0:
        raise ConfigurationError(
            f"Expected epsilon > 0, got {epsilon!r}: to train without noise set mechanism = none.",
            kind="out-of-range",
            setting="epsilon",
            got=epsilon,
        )
    epsilon = EPSILON if epsilon is None and "mu" not in own else epsilon
    if evaluate not in ("", PRIVATE) or (evaluate and of_numbers):
        raise ConfigurationError(
            f"Expected evaluate to be empty or, of classes, 'private', got {evaluate!r}: numbers are never quite "
            "right.",
            kind="unknown-name",
            setting="evaluate",
            got=evaluate,
        )
    if evaluate:
        own = {**evaluated_privately(schema), **own}
    given = {"epsilon": epsilon, "trust": trust}
    own = layered(own, {name: value for name, value in given.items() if value})
    if scale and registry("model")[str(own["model"])].takes_knots:
        raise ConfigurationError(
            f"Expected no scale with model = {own['model']!r}, whose knots are private quantiles, got {scale!r}: leave "
            "one of them out.",
            kind="conflict",
            setting="scale",
            got=scale,
        )
    if scale not in ("", PRIVATE):
        raise ConfigurationError(
            f"Expected scale to be empty or 'private', got {scale!r}.", kind="unknown-name", setting="scale", got=scale
        )
    return own


def can_be_additive(schema: Schema, given: Mapping[str, Value]) -> bool:
    """Return True if a table and settings of one's own allow an additive model: what is public decides, and no row."""
    numbers = any(column.bounds is not None for column in schema.columns.values())
    strategy = str(given.get("strategy", _FULL_BATCH))
    other = given.get("centring") == PRIVATE or given.get("batch-selection") == SHUFFLED
    return numbers and schema.norm is None and strategy in (_FULL_BATCH, _TRUSTED) and not other


def _usual_keys(schema: Schema, trust: str, *, additive: bool) -> dict[str, Value]:
    """Return the strategy and the model of a fit for which none is set."""
    of_numbers, trusted = schema.num_classes == 1, trust == "trusted-server"
    if additive or schema.owner:  # `auto` compares strategies for single rows, and linear models
        strategy = _TRUSTED if trusted else _FULL_BATCH
    else:  # made-up data of numbers have classes: there is nothing to rehearse
        strategy = "auto" if trusted or not of_numbers else _FULL_BATCH
    return {"strategy": strategy, "model": "additive" if additive else "ridge" if of_numbers else "softmax"}


def _rehearsed(
    asked: _Asked, on_progress: Callable[[Progress], None] | None, *, compared: bool = True, seeds: int = 1
) -> RunResult:
    """Return a rehearsal's result, ``compared`` with models without privacy and with other options."""
    found, own = asked.settled()
    table, site, clients, scale = asked.table, asked.site, asked.clients, asked.scale
    of_numbers = found.schema.num_classes == 1
    if site and clients:
        raise ConfigurationError("Expected site or clients, got both: each site is a client.", kind="conflict")
    if seeds < 1 or (seeds > 1 and scale):
        raise ConfigurationError(
            f"Expected seeds >= 1, and one with scale = {PRIVATE!r}, got {seeds}.",
            kind="out-of-range",
            setting="seeds",
            got=seeds,
        )
    read, config = _settled(found, own, site, clients)
    scaled = None
    if scale:
        found, scaled = _scaled(found, table, config, site)
        rest = config.mu * math.sqrt(1.0 - SCALING_SHARE)
        read, config = _settled(found, layered(own, {"mu": rest}), site, clients)
    with _quiet():
        result = run_cohort(config, on_progress=on_progress or bar_of_rounds(), rehearsed=not of_numbers)
    result = result if scaled is None else with_spent(result, scaled.loss)
    made, described = _described(result, found, read, site, compared=compared)
    if scale:
        return made
    if seeds > 1:
        made = _with_seeds(made, _several_seeds(made, found, own, site, clients, read, seeds))
    others: list[tuple[str, RunResult]] = []
    apart = found.drafted or found.schema.owner or made.experiment.trains_on_values
    too_wide = not apart and _far_too_wide(found.schema, read)
    if too_wide:
        again = replace(asked, label="", schema=found.schema, evaluate="", scale=PRIVATE)
        others += [(f"--scale {PRIVATE}", _rehearsed(again, on_progress, compared=False))]
    for option, changes in _worth_a_try(config, made, described, read):
        with suppress(ConfigurationError), _quiet():  # of what the strategy cannot have
            run = run_cohort(RunConfig.from_mapping({**config.to_mapping(), **changes}), rehearsed=not of_numbers)
            others += [(option, _described(run, found, read, site, compared=False)[0])]
    tried = [(option, one.outcome, one.table) for option, one in others if one.table is not None]
    if not tried:
        return made
    outcome = _with_alternatives(made.outcome, tried)
    described = replace(
        described, also="".join(f", {_with_option(option)} {_short_figure(one, its)}" for option, one, its in tried)
    )
    better = [one for one in tried if _is_better(*one[1:], made.outcome, described)]
    if better:
        option, best, its = max(better, key=lambda one: figure(one[1], one[2]))
        described = replace(described, better=f"{option}: {shown_figure(best, its)}, rehearsed on these rows")
    return _with(made, outcome, described)


def _several_seeds(
    first: RunResult,
    found: ReadTable,
    own: dict[str, Value],
    site: str,
    clients: int,
    read: ReadRows,
    count: int,
) -> SeveralSeeds:
    """Return the figures of a rehearsal and of others that differ from it in their seed alone."""
    start = first.experiment.config.seed
    figures: list[float | None] = [] if first.table is None else [figure(first.outcome, first.table)]
    for seed in range(start + 1, start + count):
        _, config = _settled(found, {**own, "seed": seed}, site, clients, read)
        with _quiet():
            run = run_cohort(config, rehearsed=found.schema.num_classes > 1)
        made, its = _described(run, found, read, site, compared=False)
        figures.append(figure(made.outcome, its))
    figures = [one if one is not None and math.isfinite(one) else None for one in figures]
    known = [one for one in figures if one is not None]
    error = float(np.std(known, ddof=1) / math.sqrt(len(known))) if len(known) > 1 else None
    mean = float(np.mean(known)) if known else None
    return SeveralSeeds(seeds=list(range(start, start + count)), figures=figures, mean=mean, standard_error=error)


def _with_seeds(made: RunResult, seeds: SeveralSeeds) -> RunResult:
    rehearsal = made.outcome.rehearsal
    if rehearsal is None or made.table is None:
        return made
    outcome = made.outcome.model_copy(update={"rehearsal": rehearsal.model_copy(update={"seeds": seeds})})
    return _with(made, outcome, made.table)


def _with_option(option: str) -> str:
    return "under sums" if option == f"--trust {_SUMS}" else f"with {option}"


def _with_alternatives(outcome: Outcome, tried: Sequence[tuple[str, Outcome, FittedTable]]) -> Outcome:
    """Return an outcome that has the scores of other options."""
    found = {
        option: Scores(accuracy=one.accuracy, auc=one.auc, loss=one.loss, rows=table.tested)
        for option, one, table in tried
    }
    known = outcome.rehearsal or Rehearsal(note=NOTE, measure="accuracy")
    return outcome.model_copy(update={"rehearsal": known.model_copy(update={"alternatives": found})})


def _worth_a_try(
    config: RunConfig, made: RunResult, table: FittedTable, read: ReadRows
) -> Iterator[tuple[str, dict[str, Value]]]:
    """Yield options of `fit` that may do better than a rehearsal did, with the run-config keys that each sets."""
    if config.num_clients > 1 and made.guarantee.trust == "untrusted-server":
        yield f"--trust {_SUMS}", {"trust": _SUMS}
    of_numbers = table.schema.num_classes == 1
    if config.samples_per_owner or of_numbers or made.experiment.is_centred or config.centring:
        return
    if not made.experiment.trains_on_values and _is_off_centre(read):
        yield f"--set centring={PRIVATE}", {"centring": PRIVATE}


def _alone_does(outcome: Outcome, table: FittedTable) -> bool:
    """Return True if one client alone is no worse than the federation."""
    alone = outcome.alone
    return alone is not None and alone.clients > 0 and figure(alone, table) >= figure(outcome, table)


def _far_too_wide(schema: Schema, read: ReadRows) -> bool:
    """Whether nearly all values of a number lie in a small part of its bounds: of a rehearsal, where rows are seen."""
    place = 0
    for column in schema.columns.values():
        if column.bounds is not None:
            low, high = np.quantile(read.features[:, place], [_FAR, 1.0 - _FAR])
            if high - low < _SMALL_PART * 2.0:
                return True
        place += column.num_features
    return False


def _is_off_centre(read: ReadRows) -> bool:
    """Say whether most of a row's length is what all rows share, as in a table of zeros: of a rehearsal, as above."""
    rows = read.features.astype(np.float64)
    return float(np.square(rows.mean(axis=0)).sum()) > _SHARED_PART * float(np.square(rows).sum(axis=1).mean())


def _is_better(one: Outcome, of: FittedTable, other: Outcome, table: FittedTable) -> bool:
    """Whether a model is of use, and another is not, or is worse than twice what chance makes of the rows held out."""
    if is_useless(one, of) or is_useless(other, table):
        return not is_useless(one, of)
    chance = _ERRORS * math.sqrt(0.25 / max(table.tested, 1))
    more_often = (one.accuracy or 0.0) > (other.accuracy or 0.0) + chance
    return figure(one, of) > figure(other, table) + chance * (-1.0 if more_often else 1.0)


def _settled(
    found: ReadTable, own: dict[str, Value], site: str, clients: int, read: ReadRows | None = None
) -> tuple[ReadRows, RunConfig]:
    """Return the rows that fit, ``read`` already or now, and the configuration of a run on them, some held out."""
    schema = read_for(found.schema, own)
    read = replace(found, schema=schema).read(site) if read is None else read
    many = len(read.sites) or clients or CLIENTS
    seed = int(own.get("seed", 1))
    dataset = held_out(read, schema, HELD_OUT_SHARE, seed)
    usual: dict[str, Value] = {}
    if dataset.owner_of is not None:
        if not own.get("samples-per-owner"):
            usual = {"samples-per-owner": read.usual_samples_per_owner()}
        if dataset.client_of is None:
            dataset = replace(dataset, client_of=_dealt_owners(dataset.owner_of, many, seed))
    task = TableTask(schema, dataset)
    partition = "iid" if dataset.client_of is None else "own"
    dealt = {"task": task.name, "partition": partition, "num-clients": many, "clients-per-round": many}
    return read, RunConfig.from_mapping({**own, **usual, **dealt})


def _dealt_owners(owner_of: NDArray[np.int64], clients: int, seed: int) -> NDArray[np.int64]:
    """Return a client for each row: owners are dealt evenly, each with all rows."""
    present, place = np.unique(owner_of, return_inverse=True)
    if len(present) < clients:
        raise ConfigurationError(
            f"Expected a person for each client, got {len(present)} persons for {clients} clients: use fewer clients.",
            kind="out-of-range",
            setting="clients",
            got=clients,
        )
    generator = np.random.Generator(np.random.Philox(key=derived_seed("owners dealt", seed)))
    return (generator.permutation(len(present)) % clients)[place.ravel()]


def _scaled(found: ReadTable, table: Any, config: RunConfig, site: str) -> tuple[ReadTable, Guarantee]:
    """Return the table read by narrower bounds, from private statistics of its columns.

    And what these would guarantee.
    """
    from .private_statistics import private_statistics

    settings: dict[str, Any] = {"mu": config.mu * math.sqrt(SCALING_SHARE), "delta": config.delta, "seed": config.seed}
    if config.trust.kind:
        settings["trust"] = config.trust.kind
    if config.secure:
        settings["min_honest"] = config.sums.min_honest
    many = {"site": site} if site else {"clients": config.num_clients}
    with _quiet():
        statistics = private_statistics(
            table, found.schema, **many, **settings, mechanism="" if config.private else "none"
        )
    if statistics.guarantee is None:
        raise ConfigurationError("Expected statistics with a guarantee, got none.", kind="missing")
    return replace(found, schema=found.schema.bounded(statistics.bounds), scaled=True), statistics.guarantee


def _described(
    result: RunResult, found: ReadTable, read: ReadRows, site: str, *, compared: bool = True
) -> tuple[RunResult, FittedTable]:
    """Return a rehearsal's result with its table and, if it is ``compared``, models without privacy next to it."""
    experiment = result.experiment.seen_by(result.answers)
    dataset = experiment.data
    labels = dataset.test_labels
    frequent = np.bincount(dataset.train_labels).argmax() if found.schema.num_classes > 1 else 0
    usual = labels == frequent
    scores = experiment.model.logits(result.parameters, dataset.test_features)
    right = scores.argmax(axis=1) == labels
    cap = result.experiment.config.samples_per_owner
    described = FittedTable(
        name=found.name,
        schema=found.schema,
        drafted=found.drafted,
        rows=len(found.rows),
        trained=len(dataset.train_labels),
        tested=len(labels),
        invalid_records=read.invalid_records,
        site=site,
        left_out=found.left_out,
        majority=float(np.mean(usual)) if found.schema.num_classes > 1 else 0.0,
        variance=float(np.var(labels)),
        differing=int(np.sum(right != usual)),
        label_notes=found.label_notes,
        to_check=found.to_check,
        scaled=found.scaled,
        owners=0 if read.owner_of is None else int(read.owner_of.max()) + 1,
        samples_per_owner=cap,
        unused=_unused_rows(dataset, cap),
        likely_owner=_likely_owner(found),
    )
    made = _fitted(result, described)
    if not compared:
        return made, described
    with _quiet():
        figures: dict[str, Any] = {"alone": made.alone, "rehearsal": _rehearsal(result, found, read, site)}
    return _with(made, made.outcome.model_copy(update=figures), described), described


def _rehearsal(result: RunResult, found: ReadTable, read: ReadRows, site: str) -> Rehearsal:
    """Return what models without privacy reach on a rehearsal's rows, and what else follows from seeing them."""
    experiment = result.experiment.seen_by(result.answers)
    seed, classes = experiment.config.seed, found.schema.num_classes
    scaled = found.read(site) if experiment.trains_on_values else read  # as linear models take rows
    dataset = held_out(scaled, found.schema, HELD_OUT_SHARE, seed)
    _, test = split_rows(read, HELD_OUT_SHARE, seed)
    test_sites = None if read.client_of is None else read.client_of[test]
    data = experiment.data  # as the model takes them
    predicted, labels = experiment.model.logits(result.parameters, data.test_features), data.test_labels
    sites: dict[str, Scores] = {}
    for number, name in enumerate(read.sites if test_sites is not None else ()):
        own = test_sites == number
        if own.any():
            sites[name] = scores_of(predicted[own], labels[own])
    confusion = np.zeros((classes, classes), np.int64)
    if classes > 1:
        np.add.at(confusion, (labels, predicted.argmax(axis=1)), 1)
    return Rehearsal(
        sites=sites,
        confusion=confusion.tolist() if classes > 1 else None,
        classes=[str(one) for one in found.schema.label.names] if classes > 1 else [],
        macro_auc=one_against_others(predicted, labels) if classes > _TWO else None,
        note=NOTE,
        measure="r2" if classes == 1 else "auc" if classes == _TWO else "accuracy",
        baselines=baselines(dataset),
        alone_on_own=None if test_sites is None else site_alone_on_own(dataset, test_sites),
    )


def _unused_rows(dataset: Dataset, cap: int) -> int:
    """Return how many rows for training are above the cap of their owner on their client; 0 without a cap."""
    if not cap or dataset.owner_of is None:
        return 0
    clients = np.zeros_like(dataset.owner_of) if dataset.client_of is None else dataset.client_of
    _, counts = np.unique(np.stack([clients, dataset.owner_of]), axis=1, return_counts=True)
    return int(np.maximum(counts - cap, 0).sum())


def _likely_owner(found: ReadTable) -> str:
    """Return a sentence on a column that looks like a person's number; empty without one."""
    name, persons = found.likely_owner()
    if not name:
        return ""
    return (
        f"{name!r} has {persons:,} values in {len(found.rows):,} rows. If it names persons, use --owner {name}: "
        "without it single rows are protected and not persons, and a person's rows are trained on and held out."
    )


def _with(result: RunResult, outcome: Outcome, table: FittedTable) -> RunResult:
    made = replace(result, table=table)
    vars(made)["outcome"] = outcome  # where its cached property looks first
    return made


def _for_real(
    asked: _Asked,
    owners: int,
    ledger: Path | str | None,
    budget: float,
    seal: Seal,
    on_progress: Callable[[Progress], None] | None,
) -> RunResult:
    if asked.site or asked.clients or asked.trust:
        raise ConfigurationError(
            "Expected no site, clients or trust in a real fit, in which this computer has all rows, got some: leave "
            "them out, or give each site a node (docs/deployment.md).",
            kind="conflict",
        )
    if asked.schema is None or not isinstance(asked.table, str | Path):
        raise ConfigurationError(
            "Expected a file and a reviewed schema for a real fit, got a drafted one or no file: a draft shows "
            "something of the rows. `murmurfl schema FILE --out SCHEMA.toml` makes a draft to review.",
            kind="conflict",
            setting="schema",
        )
    found, own = asked.settled()
    _check_places(found.schema, own, owners)
    share = SCALING_SHARE if asked.scale else 0.0
    where = _ledger_of(Path(asked.table).expanduser(), ledger)
    made = fit_for_real(found, own, where, budget, seal, on_progress, scaling_share=share, owners=owners)
    # What else is of the rows was not released.
    unknown: dict[str, Any] = {"tested": 0, "invalid_records": {}, "majority": 0.0, "variance": 0.0, "left_out": {}}
    known: dict[str, Any] = {"drafted": False, "rows": made.rows, "trained": made.rows, "site": "", "scaled": share > 0}
    if found.schema.owner:
        known["samples_per_owner"] = made.result.experiment.config.samples_per_owner
    spent: dict[str, Any] = {"spent_mu": made.spent_mu, "budget_mu": made.budget_mu}
    return _fitted(made.result, FittedTable(found.name, made.schema, **known, **unknown, **spent))


def _check_places(schema: Schema, own: Mapping[str, Value], owners: int) -> None:
    """Raise unless both public numbers of a real fit with owners are there, or neither without."""
    if schema.owner and not (owners > 0 and own.get("samples-per-owner")):
        raise ConfigurationError(
            "Expected two public numbers in a real fit with an owner, --owners (owners), places for persons with room "
            "for those to come, and --set samples-per-owner (samples_per_owner), the rows of a person that are used, "
            f"got {owners} and {own.get('samples-per-owner', 0)}. A rehearsal proposes them.",
            kind="missing",
            setting="owners" if not owners > 0 else "samples-per-owner",
            got=owners,
        )
    if owners and not schema.owner:
        raise ConfigurationError(
            f"Expected a column of owners with owners = {owners}, got none: name it with --owner, or in the schema.",
            kind="missing",
            setting="owner",
        )


def _ledger_of(table: Path, ledger: Path | str | None) -> Path:
    """Return the ledger of a real fit: the table's own if it has one, whatever name the table is called by."""
    own = Path(f"{table.resolve()}{LEDGER_ENDING}")
    where = Path(ledger).expanduser() if ledger else own
    if own.exists() and where.resolve() != own.resolve():
        raise ConfigurationError(
            f"Expected the ledger {own}, which counts what was released on this table, got {where}: leave out "
            "--ledger.",
            kind="mismatch",
            setting="ledger",
        )
    return where


def figure(of: Outcome | Alone | Scores, table: FittedTable) -> float:
    """Return what a model is judged by: the AUC of two classes, the accuracy of several, R^2 of numbers."""
    if table.schema.num_classes == 1:
        return math.nan if of.loss is None or not table.variance else 1.0 - of.loss / table.variance
    found = of.auc if table.schema.num_classes == _TWO else of.accuracy
    return math.nan if found is None else found


def shown_figure(of: Outcome | Alone | Scores, table: FittedTable) -> str:
    """:func:`figure` for people."""
    value = figure(of, table)
    if table.schema.num_classes == 1:
        return f"R2 {value:.3f}"
    if table.schema.num_classes == _TWO:
        return f"AUC {value:.3f} (accuracy {100 * (of.accuracy or 0.0):.1f} %)"
    rehearsal = of.rehearsal if isinstance(of, Outcome) else None
    area = None if rehearsal is None else rehearsal.macro_auc
    return f"{100 * value:.1f} %" + ("" if area is None else f" (macro AUC {area:.3f})")


def _short_figure(of: Outcome | Alone | Scores, table: FittedTable) -> str:
    return shown_figure(of, table).partition(" (")[0].removeprefix("AUC ").removeprefix("R2 ")


def is_useless(outcome: Outcome, table: FittedTable) -> bool:
    """Say whether nothing shows that a fitted model tells more than the usual answer does: twice the error counts."""
    if table.schema.num_classes == 1:
        return not figure(outcome, table) > 0.0
    if table.schema.num_classes == _TWO and figure(outcome, table) > _GUESSING + _ERRORS * table.error_of_guessing:
        return False  # it ranks, even where one class is so rare that nobody is given it
    return not (outcome.accuracy or 0.0) > table.majority + _ERRORS * table.error_of_accuracy


def fit_lines(result: RunResult, table: FittedTable, folder: Path | None) -> list[str]:
    """Return a fitted model, saved in a folder or not yet, in ten to fifteen lines for people."""
    notes, rows = _fit_summary(result, table, folder)
    return [*notes, *_aligned(rows)]


def _fit_summary(result: RunResult, table: FittedTable, folder: Path | None) -> tuple[list[str], list[tuple[str, str]]]:
    """Return notes that must be read before any figure, and named rows."""
    outcome = result.outcome
    if result.deployed:
        return _real_verdict(result, table.schema), _real_rows(result, table, folder)
    whose = f"{outcome.num_clients} sites by {table.site!r}" if table.site else f"{outcome.num_clients} clients, dealt"
    unused = ", ".join(f"{name} ({reason})" for reason, names in table.left_out.items() for name in names[:_MOST_NAMED])
    public = f"leave only what is public in its {SCHEMA} (drafted from all rows), set reviewed = true, "
    review = public if table.drafted else ""
    rows = [
        ("table", f"{table.name}: {table.rows:,} rows, {table.tested:,} of them held out; {whose}"),
        *[("persons", _persons(table)) for _ in range(bool(table.owners))],
        *[("invalid rows", _invalid_records(table.invalid_records)) for _ in range(bool(table.invalid_records))],
        ("columns", f"{_columns_words(table)}{f'; left out: {unused}' if unused else ''}"),
        ("label", _label_words(table)),
        *_to_check(table),
        ("method", f"{_method(result)}{', chosen by rehearsal' if outcome.chosen_by else ''}"),
        ("model", f"{shown_figure(outcome, table)} on the rows held out{table.also}"),
        *_several_rows(outcome, table),
        *[("private", one.sentence) for one in (outcome.private_evaluation,) if one is not None and one.sentence],
        ("beside", _beside(outcome, table)),
        *[("warning", words) for words in outcome.warnings[:1]],
        *[("better", table.better) for _ in range(bool(table.better))],
        ("privacy", _privacy(result)),
        *_saved(folder),
        ("next", f"for use: {review}fit it --real{_of_owners(table)}, or give each site a node"),
    ]
    return _verdict(outcome, table), rows


def _several_rows(outcome: Outcome, table: FittedTable) -> list[tuple[str, str]]:
    """Return the figures of several seeds and of single sites, if there are any."""
    rehearsal, rows = outcome.rehearsal, []
    if rehearsal is None:
        return []
    named = {"auc": "AUC ", "r2": "R2 "}.get(rehearsal.measure, "accuracy ")
    several = rehearsal.seeds
    if several is not None and several.mean is not None:
        error = "" if several.standard_error is None else f", standard error {several.standard_error:.3f}"
        rows.append(("seeds", f"{named}{several.mean:.3f} on average of {len(several.seeds)} seeds{error}"))
    known = [(value, name) for name, one in rehearsal.sites.items() if (value := _of_site(one, table)) is not None]
    mean = float(np.mean([value for value, _ in known])) if known else 0.0
    if known and min(known)[0] < mean - _FAR_BEHIND:  # the report has all of them
        (low, worst), (high, best) = min(known), max(known)
        rows.append(("by site", f"{named}{mean:.3f} on average, {low:.3f} at {worst!r}, {high:.3f} at {best!r}"))
    return rows


def _of_site(scores: Scores, table: FittedTable) -> float | None:
    """Return what a model is judged by on a site's rows; None where they are of one class, or alike."""
    classes = table.schema.num_classes
    return scores.r2 if classes == 1 else scores.auc if classes == _TWO else scores.accuracy


def _persons(table: FittedTable) -> str:
    """Return who is protected, and how many rows of a person are used."""
    unused = f": {table.unused:,} of {table.trained:,} rows are not" if table.unused else ""
    return (
        f"{table.owners:,} by {table.schema.owner!r}, each protected with all rows; of each up to "
        f"{table.samples_per_owner} are used for training{unused}"
    )


def _to_check(table: FittedTable) -> list[tuple[str, str]]:
    """Return what a person should decide about the draft, the first few in words."""
    more = len(table.to_check) - _MOST_CHECKED
    rows = [("check", note) for note in table.to_check[:_MOST_CHECKED]]
    return [*rows, ("", f"{more} more: `murmurfl schema {table.name}` shows all")] if more > 0 else rows


def _verdict(outcome: Outcome, table: FittedTable) -> list[str]:
    """Return what must be known before any figure, if there is something."""
    numbers = table.schema.num_classes == 1
    persons = [table.likely_owner] if table.likely_owner else []
    if is_useless(outcome, table):
        usual = "their mean" if numbers else f"the usual answer, right in {100 * table.majority:.1f} %"
        return [
            *persons,
            f"Do not use this model: {table.tested:,} rows do not show it to be better than always giving {usual}.",
        ]
    accuracy = outcome.accuracy or 0.0
    if numbers or accuracy > table.majority:
        return persons
    return [
        *persons,
        f"Accuracy {100 * accuracy:.1f} % is not above the usual answer's {100 * table.majority:.1f} %, but the model "
        "ranks rows: use the order of its probabilities.",
    ]


def _of_owners(table: FittedTable) -> str:
    """Return what a real fit of persons is told."""
    if not table.owners:
        return ""
    return f" --owners N (places for persons, public) --set samples-per-owner={table.samples_per_owner}"


def _saved(folder: Path | None) -> list[tuple[str, str]]:
    return [] if folder is None else [("saved", f"{folder}: `murmurfl predict {folder} NEW.csv`")]


def _real_rows(result: RunResult, table: FittedTable, folder: Path | None) -> list[tuple[str, str]]:
    """Return the rows of a real fit, in which is only what was released with noise or is public."""
    evaluation, schema = result.outcome.private_evaluation, table.schema
    measured = "none: how far numbers are off is not released; rehearse without --real to see it"
    rows = f"{table.rows:,} rows, whose number is public"
    if schema.owner:
        measured = "none: it would count rows, of which a person has several; rehearse without --real to see one"
        rows = f"{table.rows:,} places for persons by {schema.owner!r}, of each up to {table.samples_per_owner} rows"
    elif schema.num_classes > 1:
        measured = "none was released" if evaluation is None else evaluation.sentence or evaluation.failure
    spent = table.spent(result.guarantee.delta)
    notes = [note for note in result.guarantee.notes if note != spent]
    return [
        ("table", f"{table.name}: {rows}"),
        ("columns", _columns_words(table)),
        ("label", _label_words(table)),
        ("method", _method(result)),
        ("figure", f"{measured}"),
        ("privacy", f"REAL: {replace(result.guarantee, notes=tuple(notes))}"),
        ("in all", spent),
        *_saved(folder),
    ]


def _real_verdict(result: RunResult, schema: Schema) -> list[str]:
    """Whether the released figure shows the model to be of use, by what is released or public alone."""
    found = result.evaluation
    if found is None:
        return []
    known = schema.label.majority
    if found.auc_interval is not None and found.auc_interval[0] > _GUESSING:
        return []
    if known is not None and found.interval[0] > known:
        return []
    usual = "the usual answer" if known is None else f"the usual answer, right in {100 * known:g} %"
    return [
        f"The released figure does not show that this model is better than always giving {usual}: it is too uncertain, "
        "or how often that is right is not public (majority in the schema's label)."
    ]


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    wide = max(len(name) for name, _ in rows)
    return [f"{name:<{wide}}  {value}" for name, value in rows]


def _method(result: RunResult) -> str:
    rounds = result.outcome.rounds
    return f"{result.experiment.config.strategy}, {rounds} round{'s' * (rounds != 1)}"


def _invalid_records(invalid_records: Mapping[str, int]) -> str:
    """Return how many rows do not fit, and the most frequent reasons."""
    frequent = sorted(invalid_records.items(), key=lambda one: -one[1])[:_MOST_NAMED]
    reasons = [f"{reason}: {count:,}" if len(invalid_records) > 1 else reason for reason, count in frequent]
    return f"{sum(invalid_records.values()):,} rows do not fit and are not used ({'; '.join(reasons)})"


def _columns_words(table: FittedTable) -> str:
    scaled = f", scaled by private statistics ({SCALING_SHARE:.0%} of mu^2)" if table.scaled else ""
    return f"{len(table.schema.columns)} used{scaled}"


def _label_words(table: FittedTable) -> str:
    label = table.schema.label
    if table.schema.num_classes == 1:
        low, high = label.bounds or (-math.inf, math.inf)
        return f"{label.column}: a number from {low:g} to {high:g}"
    named = ", ".join(label.names[:_MOST_NAMED]) + (", ..." if len(label.names) > _MOST_NAMED else "")
    notes = f" ({'; '.join(table.label_notes)})" if table.label_notes else ""
    return f"{label.column}: {named}{notes}"


def _beside(outcome: Outcome, table: FittedTable) -> str:
    """Return the figures of models without privacy, the best of them first."""
    found: list[str] = []
    rehearsal = outcome.rehearsal
    if rehearsal is not None and (known := rehearsal.baselines) is not None:
        models = {"trees": known.boosted, "additive": known.additive, "linear": known.linear}
        scores = {name: one for name, one in models.items() if one is not None}
        names = sorted(scores, key=lambda name: -figure(scores[name], table))
        listed = ", ".join(f"{name} {_short_figure(scores[name], table)}" for name in names)
        rows = f" (from {known.rows:,} rows)" if known.rows < table.trained else ""
        found.append(f"without privacy {listed}{rows}")
    if outcome.alone is not None and outcome.alone.clients:
        one = "site" if table.site else "client"
        no_worse = " (no worse)" if _alone_does(outcome, table) else ""
        average = " on average" if outcome.alone.clients > 1 else ""
        own = None if rehearsal is None else rehearsal.alone_on_own
        rows = f" ({_short_figure(own, table)} on its own rows)" if own is not None else ""
        found.append(f"one {one} alone {_short_figure(outcome.alone, table)}{average}{no_worse}{rows}")
    if table.schema.num_classes > 1:
        found.append(f"usual answer {100 * table.majority:.1f} %")
    return ", ".join(found)


def _privacy(result: RunResult) -> str:
    if result.outcome.mu is None:
        return "none: no noise was added"
    guarantee = result.guarantee
    # What its parts cost stands in the card, and the words before it say that keys are seeded.
    return (
        "REHEARSAL: nobody was protected. With secret keys and a reviewed schema that does not come from the rows it "
        f"would have {replace(guarantee, notes=())}"
    )


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
