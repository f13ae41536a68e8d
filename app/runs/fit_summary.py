"""Summary of a fit: the figure that a model is judged by, a verdict, and named lines for people."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...clients.records.schema import Schema
from ..data.table_task import FittedTable
from ..models.trained_model import SCHEMA
from ..planning.rehearsal import SKEWED
from .fit_arguments import SCALING_SHARE
from .outcome import Alone, Outcome, Rehearsal, Scores
from .real_fit import FIGURE_OPTION, why_no_figure

if TYPE_CHECKING:
    from .result import RunResult

_MOST_NAMED, _MOST_CHECKED, _TWO, _GUESSING = 4, 4, 2, 0.5
ERRORS = 2.0
"""Standard errors by which a model must be better than chance."""


def alone_does(outcome: Outcome, table: FittedTable) -> bool:
    """Return True if one client alone is no worse than the federation."""
    alone = outcome.alone
    return alone is not None and alone.clients > 0 and figure(alone, table) >= figure(outcome, table)


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


def short_figure(of: Outcome | Alone | Scores, table: FittedTable) -> str:
    """:func:`figure` for people, without the accuracy and a name."""
    return shown_figure(of, table).partition(" (")[0].removeprefix("AUC ").removeprefix("R2 ")


def is_useless(outcome: Outcome, table: FittedTable) -> bool:
    """Say whether nothing shows that a model tells more than the commonest class does: twice the error counts."""
    if table.schema.num_classes == 1:
        return not figure(outcome, table) > 0.0
    if table.schema.num_classes == _TWO and figure(outcome, table) > _GUESSING + ERRORS * table.error_of_guessing:
        return False  # it ranks, even where one class is so rare that nobody is given it
    return not (outcome.accuracy or 0.0) > table.majority + ERRORS * table.error_of_accuracy


def fit_lines(result: RunResult, table: FittedTable, folder: Path | None, real: str = "") -> list[str]:
    """Return a fitted model, saved in a folder or not yet, in ten to fifteen lines for people.

    ``real`` is the command of a real fit without the places for persons, to be shown after a rehearsal.
    """
    notes, rows = summary_of_fit(result, table, folder, real)
    return [*notes, *_aligned(rows)]


def summary_of_fit(
    result: RunResult, table: FittedTable, folder: Path | None, real: str = ""
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return notes that must be read before any figure, and named rows."""
    outcome = result.outcome
    if result.deployed:
        return _real_verdict(result, table.schema), _real_rows(result, table, folder)
    whose = f"{outcome.num_clients} sites by {table.site!r}" if table.site else f"{outcome.num_clients} clients, dealt"
    public = f"leave only what is public in its {SCHEMA} (drafted from all rows) and set reviewed = true, then "
    review = public if table.drafted else ""
    rows = [
        ("table", f"{table.name}: {table.rows:,} rows, {table.tested:,} of them held out; {whose}"),
        *[("persons", _persons(table)) for _ in range(bool(table.owners))],
        *[("invalid rows", _invalid_records(table.invalid_records)) for _ in range(bool(table.invalid_records))],
        ("columns", _columns_words(table)),
        ("label", _label_words(table)),
        *_to_check(table),
        ("method", f"{_method(result)}{', chosen by rehearsal' if outcome.chosen_by else ''}"),
        ("model", f"{shown_figure(outcome, table)} on the rows held out{_of_seed(outcome)}{table.also}"),
        *_several_rows(outcome, table),
        *[("private", one.sentence) for one in (outcome.private_evaluation,) if one is not None and one.sentence],
        ("compare", _compared(outcome, table)),
        *[("warning", words) for words in outcome.warnings[:1]],
        *[("better", table.better) for _ in range(bool(table.better))],
        ("privacy", _privacy(result)),
        *_saved(folder, table),
        ("next", f"for use: {review}{_ways_to_use(outcome, table, real)}"),
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
        each = ", ".join(
            f"{'none' if one is None else f'{one:.3f}'} of seed {seed}"
            for seed, one in zip(several.seeds, several.figures, strict=True)
        )
        rows.append(("seeds", f"{named}{several.mean:.3f} on average of {len(several.seeds)} seeds{error}: {each}"))
    known = [(value, name) for name, one in rehearsal.sites.items() if (value := _of_site(one, table)) is not None]
    if known:
        rows += _by_site(rehearsal, table, named, known)
    return rows


def _by_site(
    rehearsal: Rehearsal, table: FittedTable, named: str, known: Sequence[tuple[float, str]]
) -> list[tuple[str, str]]:
    """Return the common model's mean over sites next to that of each site's own model, on the same rows."""
    mean, own = float(np.mean([value for value, _ in known])), rehearsal.alone_on_own
    words = f"common model {named}{mean:.3f} on average{_extremes(known)}"
    alone = None if own is None else _of_site(own, table)
    if own is not None and alone is not None:
        each = [(one, name) for name, own in rehearsal.sites_alone.items() if (one := _of_site(own, table)) is not None]
        fewer = own.rows < sum(one.rows for one in rehearsal.sites.values())
        words += f", each site's own model {alone:.3f}{_extremes(each)}{' (some sites alone)' if fewer else ''}"
    return [("by site", words)]


def _extremes(known: Sequence[tuple[float, str]]) -> str:
    """Return the worst and the best site in parentheses, by name where they are far apart; empty for a single one."""
    (low, worst), (high, best) = min(known, default=(0.0, "")), max(known, default=(0.0, ""))
    if high - low > _FAR_APART:
        return f" ({low:.3f} at {worst!r}, {high:.3f} at {best!r})"
    return f" ({low:.3f} to {high:.3f})" if worst != best else ""


_FAR_APART = 0.05


def _of_seed(outcome: Outcome) -> str:
    """Return which of several seeds a figure is of; empty for one alone."""
    several = None if outcome.rehearsal is None else outcome.rehearsal.seeds
    return "" if several is None else f" by seed {several.seeds[0]}, whose model this is"


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
    asked = f"{table.name} --label {table.schema.label.column}{f' --site {table.site}' if table.site else ''}"
    return [*rows, ("", f"{more} more: `murmurfl schema {asked}` shows all")] if more > 0 else rows


def _verdict(outcome: Outcome, table: FittedTable) -> list[str]:
    """Return what must be known before any figure, if there is something."""
    numbers = table.schema.num_classes == 1
    persons = [table.likely_owner] if table.likely_owner else []
    if is_useless(outcome, table):
        usual = "their mean" if numbers else f"the commonest class (accuracy {100 * table.majority:.1f} %)"
        return [
            *persons,
            f"Do not use this model: {table.tested:,} rows do not show it to be better than always predicting {usual}.",
        ]
    accuracy = outcome.accuracy or 0.0
    if numbers or accuracy > table.majority:
        return persons
    return [
        *persons,
        f"Accuracy {100 * accuracy:.1f} % is not above that of always predicting the commonest class, "
        f"{100 * table.majority:.1f} %, but the model ranks rows: use the order of its probabilities.",
    ]


def _of_owners(table: FittedTable) -> str:
    """Return what a real fit of persons is told."""
    if not table.owners:
        return ""
    return f" --owners N (places for persons, public) --set samples-per-owner={table.samples_per_owner}"


REHEARSED = (
    "No epsilon covers what a rehearsal prints: it is for a person who may see the rows anyway, and nothing from it "
    "may leave."
)
"""Sentence on rehearsals with private rows, in the output and on the pages."""
_TRUSTED = "trusted-server"


def _ways_to_use(outcome: Outcome, table: FittedTable, real: str) -> str:
    """Return the two ways to a model for use, and the trust under which each is rehearsed."""
    command = f": `{real}{_of_owners(table)}`" if real else ""
    way = "fit it for real" if real else f"fit it --real{_of_owners(table)}"
    if getattr(outcome.privacy, "trust", "") == _TRUSTED:
        return f"give each site a node, or {way}, with all rows on this computer, which is the trusted server{command}"
    return (
        f"give each site a node, as rehearsed here, or {way}, with all rows on this computer, which --trust {_TRUSTED} "
        f"rehearses{command}"
    )


def _saved(folder: Path | None, table: FittedTable) -> list[tuple[str, str]]:
    if folder is None:
        return []
    rows = "FOLDER" if any(one.kind == "image" for one in table.schema.columns.values()) else "NEW.csv"
    return [("saved", f"{folder}: `murmurfl predict {shlex.quote(str(folder))} {rows}`")]


def _real_rows(result: RunResult, table: FittedTable, folder: Path | None) -> list[tuple[str, str]]:
    """Return the rows of a real fit, in which is only what was released with noise or is public."""
    evaluation, schema = result.outcome.private_evaluation, table.schema
    measured = "none: how far numbers are off is not released; rehearse without --real to see it"
    rows = f"{table.rows:,} rows, whose number is public"
    if schema.owner:
        rows = f"{table.rows:,} places for persons by {schema.owner!r}, of each up to {table.samples_per_owner} rows"
    if schema.num_classes > 1:
        measured = _no_figure(result, table) if evaluation is None else evaluation.sentence or evaluation.failure
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
        *_saved(folder, table),
    ]


def _no_figure(result: RunResult, table: FittedTable) -> str:
    """Return that no accuracy was released, why, and how to ask for it."""
    why = why_no_figure(result.experiment.config, table.schema, table.rows)
    return f"none was released: {why}. {FIGURE_OPTION}" if why else "none was released"


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
    usual = "the commonest class" if known is None else f"the commonest class (accuracy {100 * known:g} %)"
    return [
        f"The released figure does not show that this model is better than always predicting {usual}: it is too "
        "uncertain, or the share of that class is not public (majority in the schema's label)."
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
    unused = ", ".join(
        f"{name} ({reason})" if number < _MOST_NAMED else f"{len(names) - _MOST_NAMED} more ({reason})"
        for reason, names in table.left_out.items()
        for number, name in enumerate(names[: _MOST_NAMED + 1])
    )
    return f"{len(table.schema.columns)} used{scaled}{f'; not used: {unused}' if unused else ''}"


def _label_words(table: FittedTable) -> str:
    label = table.schema.label
    if table.schema.num_classes == 1:
        low, high = label.bounds or (-math.inf, math.inf)
        return f"{label.column}: a number from {low:g} to {high:g}"
    named = ", ".join(label.names[:_MOST_NAMED]) + (", ..." if len(label.names) > _MOST_NAMED else "")
    notes = f" ({'; '.join(table.label_notes)})" if table.label_notes else ""
    return f"{label.column}: {named}{notes}"


def _compared(outcome: Outcome, table: FittedTable) -> str:
    """Return the figures of models without privacy, the best of them first."""
    found: list[str] = []
    rehearsal = outcome.rehearsal
    if rehearsal is not None and (known := rehearsal.baselines) is not None:
        models = {"trees": known.boosted, "additive": known.additive, "linear": known.linear}
        scores = {name: one for name, one in models.items() if one is not None}
        names = sorted(scores, key=lambda name: -figure(scores[name], table))
        listed = ", ".join(f"{name} {short_figure(scores[name], table)}" for name in names)
        rows = f" (from {known.rows:,} rows)" if known.rows < table.trained else ""
        found.append(f"without privacy {listed}{rows}")
    if outcome.alone is not None and outcome.alone.clients:
        one = "site" if table.site else "client"
        alone, average = short_figure(outcome.alone, table), " on average" if outcome.alone.clients > 1 else ""
        same = alone == short_figure(outcome, table)
        better = f", {'as good as' if same else 'better than'} this model" if alone_does(outcome, table) else ""
        found.append(f"one {one} alone {alone}{average}{better}{_if_skewed(outcome, table)}")
    if table.schema.num_classes > 1:
        found.append(f"majority-class baseline: accuracy {100 * table.majority:.1f} %")
    several = None if rehearsal is None else rehearsal.seeds
    return f"{'' if several is None else f'with seed {several.seeds[0]}: '}{'; '.join(found)}"


def _if_skewed(outcome: Outcome, table: FittedTable) -> str:
    """Return what one client alone reaches where sites' labels differ, which rows that are dealt do not show."""
    skewed = None if outcome.rehearsal is None else outcome.rehearsal.alone_skewed
    if skewed is None or not skewed.clients:
        return ""
    return f" ({short_figure(skewed, table)} if sites' labels differed: {SKEWED.name})"


def _privacy(result: RunResult) -> str:
    if result.outcome.mu is None:
        return "none: no noise was added"
    guarantee = result.guarantee
    # What its parts cost stands in the card, and the words before it say that keys are seeded.
    return (
        f"REHEARSAL: nobody was protected. {REHEARSED} With secret keys and a reviewed schema that does not come from "
        f"the rows it would have {replace(guarantee, notes=())}"
    )
