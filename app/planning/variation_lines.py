"""The ways to run what is wanted, as people read them: a table, and why the default is not the first of them."""

from __future__ import annotations

from collections.abc import Sequence

from ..settings.trust_settings import SECURE
from .variations import DEFAULT, TAKEN, Variation

_TRUSTS = {"untrusted-server": "nobody", SECURE: "sums", "trusted-server": "server"}
_ALIKE = 1.005
RIGHT = ("#", "uses", "batch", "rounds", "noise", "undone", "score", "accuracy")
"""Columns of numbers."""
HEADING = "Ways to run it, the best first by a rule of thumb; in the last columns less is better:"
MEANINGS = (
    "trusts: what a machine trusts: nobody, that the server sees only sums (secure aggregation), or the server. uses: "
    "releases a sample is in. batch: samples of a machine in a release. noise: noise to signal, as above. undone: what "
    "so few rounds leave undone, in the same units. score: both together."
)
NOT_TRIED = "What they come to on your data: --try 5 trains the first five and says their accuracy."
TRIED = "Accuracy is of one simulated run each, on the test set: choosing by it is private only where that is public."


def rows_of(rows: Sequence[Variation]) -> list[dict[str, str]]:
    """The table's texts."""
    return [
        {
            "#": str(number),
            "strategy": row.option.strategy,
            "trusts": _TRUSTS[row.trust],
            "uses": str(row.uses),
            "batch": str(row.batch),
            "rounds": str(row.option.rounds),
            "noise": f"{row.option.noise_to_signal:.2f}",
            "undone": f"{row.option.shortfall:.2f}",
            "score": f"{row.option.score:.2f}",
            "accuracy": "" if row.accuracy is None else f"{100 * row.accuracy:.1f} %",
        }
        for number, row in enumerate(rows, 1)
    ]


def columns_of(rows: Sequence[Variation]) -> list[str]:
    """The columns: accuracy takes the place of what is undone where something was tried out."""
    columns = ["#", "strategy", "trusts", *RIGHT[1:]]
    return [name for name in columns if name != ("accuracy" if not _are_tried(rows) else "undone")]


def reasons(rows: Sequence[Variation], *, made_up: bool) -> list[str]:
    """What the rows say: which is taken, why the default is not the first, and what passes, batch and trust do.

    Parameters
    ----------
    rows : sequence of Variation
        The best first.
    made_up : bool
        Whether there are no data to try them on.
    """
    said = [
        MEANINGS,
        _which(rows),
        *_why_not_default(rows),
        *_not_taken(rows),
        *_passes(rows),
        *_batches(rows),
        *_trusts(rows),
    ]
    if _are_tried(rows):
        said.append(TRIED)
    elif not made_up:
        said.append(NOT_TRIED)
    return said


def _are_tried(rows: Sequence[Variation]) -> bool:
    return any(row.accuracy is not None for row in rows)


def _marked(rows: Sequence[Variation], mark: str) -> Variation | None:
    return next((row for row in rows if mark in row.mark), None)


def _number(rows: Sequence[Variation], row: Variation) -> int:
    return list(rows).index(row) + 1


def _which(rows: Sequence[Variation]) -> str:
    marked = [f"Row {number} is {row.mark}." for number, row in enumerate(rows, 1) if row.mark]
    return " ".join(marked)


def _why_not_default(rows: Sequence[Variation]) -> list[str]:
    """Why what would be run if nobody decided is not what is taken."""
    taken = _marked(rows, TAKEN)
    default = next((row for row in rows if row.mark and row is not taken), None)
    if taken is None or default is None:
        return []
    name = "the default" if DEFAULT in default.mark else "what is set"
    of, other = taken.option, default.option
    if other.score <= of.score:
        return []
    ratio = other.noise_to_signal / of.noise_to_signal if of.noise_to_signal else 1.0
    if ratio > _ALIKE:
        why = f"it has {ratio:.2g} times the noise of row {_number(rows, taken)}{_because_of_batches(taken, default)}"
    elif other.shortfall > of.shortfall:
        each = "" if default.whole else f" of {default.batch} samples a machine"
        why = (
            f"its noise is {'as large' if ratio > 1 / _ALIKE else 'smaller'}, but {other.rounds} rounds{each} leave "
            f"more undone, {other.shortfall:.2f} against {of.shortfall:.2f}"
        )
    else:
        why = "noise does more to it than to steps"
    return [f"Why {name} is not the best: {why}.{_measured(taken, default)}"]


def _not_taken(rows: Sequence[Variation]) -> list[str]:
    """Rows that would seem to be better than the one that is taken, and what is to be thought of them."""
    taken = _marked(rows, TAKEN)
    if taken is None:
        return []
    others = [row for row in rows if row.trust == taken.trust and row is not taken]
    before = [_number(rows, row) for row in others if row.option.score < taken.option.score]
    said = []
    if before:
        named = f"Rows {', '.join(map(str, before))} score" if len(before) > 1 else f"Row {before[0]} scores"
        said.append(
            f"{named} less than row {_number(rows, taken)}, which is taken: the rule is rough where samples return in "
            "batches, and where both were measured (docs/tuning.md) full batches did better."
        )
    if taken.accuracy is not None:
        better = [row for row in others if row.accuracy is not None and row.accuracy > taken.accuracy]
        said += [
            f"Tried out, row {_number(rows, row)} did better than row {_number(rows, taken)}: {100 * row.accuracy:.1f} "
            f"% against {100 * taken.accuracy:.1f} %."
            for row in better
            if row.accuracy is not None
        ]
    return said


def _because_of_batches(taken: Variation, default: Variation) -> str:
    if default.whole or not taken.whole:
        return ""
    uses = "once" if default.uses == 1 else f"in {default.uses} releases"
    return (
        f": a release has {default.batch} samples of a machine, each used {uses}, and not all {taken.batch} in each of "
        f"{taken.option.rounds} rounds"
    )


def _measured(taken: Variation, default: Variation) -> str:
    if taken.accuracy is None or default.accuracy is None:
        return ""
    return f" Tried out: {100 * default.accuracy:.1f} % against {100 * taken.accuracy:.1f} %."


def _passes(rows: Sequence[Variation]) -> list[str]:
    """What it does to use samples more often, for each strategy that was tried in several ways."""
    own = [row for row in rows if row.varied in ("taken", "passes")]
    said = []
    for strategy in dict.fromkeys(row.option.strategy for row in own):
        alike: dict[int, Variation] = {}
        for row in own:  # the best first: of several batches the best
            if row.option.strategy == strategy:
                alike.setdefault(row.uses, row)
        if len(alike) > 1:
            best = min(alike.values(), key=lambda row: row.option.score)
            scores = ", ".join(f"{uses}: {alike[uses].option.score:.2f}" for uses in sorted(alike))
            said.append(f"Passes: {strategy} by uses of a sample, score {scores}. {_pays(alike, best)}")
    return said


def _pays(alike: dict[int, Variation], best: Variation) -> str:
    if best.uses == max(alike):
        return "Each use adds noise, and more rounds are worth it here."
    if best.uses == min(alike):
        return "Each use adds noise, and here more of them are not worth it."
    return f"Fewer than {best.uses} leave too much undone; more add too much noise."


def _batches(rows: Sequence[Variation]) -> list[str]:
    """What other batches do to the best row with batches."""
    others = [row for row in rows if row.varied == "batch"]
    if not others:
        return []
    like = [
        row
        for row in rows
        if row.varied in ("taken", "passes")
        and (row.option.strategy, row.uses) == (others[0].option.strategy, others[0].uses)
    ]
    by_size = sorted({row.batch: row for row in [*others, *like]}.values(), key=lambda row: row.batch)
    scores = ", ".join(
        f"{row.batch}: {row.option.score:.2f} (noise {row.option.noise_to_signal:.2f})" for row in by_size
    )
    return [
        f"Batch: {others[0].option.strategy} in {others[0].uses} passes by samples a release, score {scores}. Large "
        "batches have less noise and fewer rounds."
    ]


def _trusts(rows: Sequence[Variation]) -> list[str]:
    """What the same mu costs under other kinds of trust, and the commands for them."""
    taken = _marked(rows, TAKEN)
    if taken is None or not taken.option.noise_to_signal:
        return []
    said = []
    for row in (one for one in rows if one.varied == "trust"):
        config, option = row.config, row.option
        assumed = {
            "untrusted-server": "trusting nobody",
            SECURE: f"with secure aggregation, if one helper and {config.min_honest} of {config.cohort_floor} machines "
            "of each sum are honest",
            "trusted-server": "with a server that is trusted",
        }[row.trust]
        said += [
            f"Trust: row {_number(rows, row)}, {assumed}: noise {option.noise_to_signal:.2f}, which is "
            f"{option.noise_to_signal / taken.option.noise_to_signal:.2g} times that of row {_number(rows, taken)}. "
            "Run it:",
            f"    {row.command}",
        ]
    return said
