"""Rehearsals: a table's sites train together as simulated clients, beside models without privacy and other options."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients.records.schema import Schema
from ...privacy.accounting.guarantee import Guarantee
from ...privacy.errors import ConfigurationError
from ...privacy.noise import derived_seed
from ...privacy.release.tables import PRIVATE
from ...privacy.setting import Value
from ..data.table_task import FittedTable, ReadRows, ReadTable, TableTask, held_out, read_for, split_rows, with_gaps
from ..data.task import Dataset
from ..engines.start import run_cohort
from ..planning.rehearsal import ALIKE, SKEWED
from ..settings.layers import layered
from ..settings.run_config import RunConfig
from .baselines import baselines, mean_scores, one_against_others, reliability, scores_of, sites_alone_on_own
from .fit_arguments import CLIENTS, SCALING_SHARE, FitArguments
from .fit_summary import ERRORS, figure, is_useless, short_figure, shown_figure, summary_of_fit
from .outcome import Alone, Outcome, Rehearsal, Scores, SeveralSeeds
from .progress import Progress
from .real_fit import with_spent
from .result import RunResult
from .simulate import bar_of_rounds
from .simulated_figures import NOTE, alone

HELD_OUT_SHARE = 0.2
"""Share of rows held out for the score."""
_SUMS = "secure-aggregation"
_TWO, _FAR, _SMALL_PART, _SHARED_PART = 2, 0.01, 0.2, 0.5


class FittedResult(RunResult):
    """The result of a fit: it shows what a person must know of the model and of the rows."""

    def _summary(self) -> tuple[list[str], list[tuple[str, str]]]:
        return super()._summary() if self.table is None else summary_of_fit(self, self.table, None)


def fitted(result: RunResult, table: FittedTable) -> RunResult:
    """Return a run's result as that of a fit of a table."""
    known: dict[str, Any] = {one.name: getattr(result, one.name) for one in fields(result)}
    return FittedResult(**{**known, "table": table})


def rehearsed(
    asked: FitArguments, on_progress: Callable[[Progress], None] | None, *, compared: bool = True, seeds: int = 1
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
    if scale or not compared:
        return made
    if seeds > 1:
        made = _with_seeds(made, _several_seeds(made, found, own, site, clients, read, seeds))
    others: list[tuple[str, RunResult]] = []
    apart = found.drafted or found.schema.owner or made.experiment.trains_on_values
    too_wide = not apart and _far_too_wide(found.schema, read)
    if too_wide:
        again = replace(asked, label="", schema=found.schema, evaluate="", scale=PRIVATE)
        others += [(f"--scale {PRIVATE}", rehearsed(again, on_progress, compared=False))]
    for option, changes in _worth_a_try(config, made, described, read):
        with suppress(ConfigurationError), _quiet():  # of what the strategy cannot have
            run = run_cohort(RunConfig.from_mapping({**config.to_mapping(), **changes}), rehearsed=not of_numbers)
            others += [(option, _described(run, found, read, site, compared=False)[0])]
    tried = [(option, one.outcome, one.table) for option, one in others if one.table is not None]
    if not tried:
        return made
    outcome = _with_alternatives(made.outcome, tried)
    described = replace(
        described, also="".join(f", {_with_option(option)} {short_figure(one, its)}" for option, one, its in tried)
    )
    better = [one for one in tried if _is_better(*one[1:], made.outcome, described)]
    if better:
        option, best, its = max(better, key=lambda one: figure(one[1], one[2]))
        described = replace(described, better=f"{option}: {shown_figure(best, its)}, rehearsed on these rows")
    return _with(made, outcome, described)


def rehearsed_once(
    found: ReadTable, own: dict[str, Value], site: str, clients: int, *, held_out_share: float
) -> RunResult:
    """Return the result of one rehearsal on a table's rows, without others to compare it with.

    Parameters
    ----------
    own : dict
        Run-config keys, without those of data and clients.
    held_out_share : float
        Share of the rows that are held out for its figures.
    """
    read, config = _settled(found, own, site, clients, share=held_out_share)
    with _quiet():
        result = run_cohort(config, rehearsed=found.schema.num_classes > 1)
    return _described(result, found, read, site, compared=False)[0]


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
    chance = ERRORS * math.sqrt(0.25 / max(table.tested, 1))
    more_often = (one.accuracy or 0.0) > (other.accuracy or 0.0) + chance
    return figure(one, of) > figure(other, table) + chance * (-1.0 if more_often else 1.0)


def _settled(
    found: ReadTable,
    own: dict[str, Value],
    site: str,
    clients: int,
    read: ReadRows | None = None,
    share: float = HELD_OUT_SHARE,
) -> tuple[ReadRows, RunConfig]:
    """Return the rows that fit, ``read`` already or now, and the configuration of a run on them, some held out."""
    schema = read_for(found.schema, own)
    read = replace(found, schema=schema).read(site) if read is None else read
    many = len(read.sites) or clients or CLIENTS
    seed = int(own.get("seed", 1))
    dataset = held_out(read, schema, share, seed)
    usual: dict[str, Value] = {}
    if dataset.owner_of is not None:
        if not own.get("samples-per-owner"):
            usual = {"samples-per-owner": read.usual_samples_per_owner()}
        if dataset.client_of is None:
            dataset = replace(dataset, client_of=_dealt_owners(dataset.owner_of, many, seed))
    task = TableTask(schema, dataset)
    partition = own.get("partition", "iid") if dataset.client_of is None else "own"
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
    made = fitted(result, described)
    if not compared:
        return made, described
    with _quiet():
        rehearsal = _rehearsal(result, found, read).model_copy(update={"alone_skewed": _alone_skewed(result)})
        figures: dict[str, Any] = {"alone": made.alone, "rehearsal": rehearsal}
    return _with(made, made.outcome.model_copy(update=figures), described), described


def _alone_skewed(result: RunResult) -> Alone | None:
    """Return what one client alone reaches if labels are skewed; None unless rows with classes are dealt evenly."""
    config = result.experiment.config
    if config.partition != ALIKE.partition or result.experiment.data.num_classes == 1 or config.num_clients == 1:
        return None
    return alone(SKEWED.configured(config))


def _rehearsal(result: RunResult, found: ReadTable, read: ReadRows) -> Rehearsal:
    """Return what models without privacy reach on a rehearsal's rows, and what else follows from seeing them."""
    experiment = result.experiment.seen_by(result.answers)
    seed, classes = experiment.config.seed, found.schema.num_classes
    # Models without privacy see the very rows of the model, of which an additive one takes rows with missing cells.
    seen = replace(read, features=with_gaps(read.features, found.schema)) if experiment.trains_on_values else read
    dataset = held_out(seen, found.schema, HELD_OUT_SHARE, seed)
    _, test = split_rows(read, HELD_OUT_SHARE, seed)
    test_sites = None if read.client_of is None else read.client_of[test]
    data = experiment.data  # as the model takes them
    predicted, labels = experiment.model.logits(result.parameters, data.test_features), data.test_labels
    alone = {} if test_sites is None else sites_alone_on_own(dataset, test_sites)
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
        reliability=reliability(predicted, labels) if classes > 1 else [],
        log_loss=float(experiment.model.evaluate(result.parameters, (data.test_features, labels))[0])
        if classes > 1
        else None,
        note=NOTE,
        measure="r2" if classes == 1 else "auc" if classes == _TWO else "accuracy",
        baselines=baselines(dataset),
        alone_on_own=mean_scores(alone.values()),
        sites_alone={read.sites[number]: one for number, one in alone.items()},
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
