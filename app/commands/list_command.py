"""``murmurfl list``: the runs there are, with what each came to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ...privacy import Guarantee, caption
from ..reports.finding import FoundRun, find_runs
from ..runs.outcome import Outcome
from ..runs.run_summary import loss_text, shown
from .run_options import AsJson
from .terminal import failing_clearly, say, width

RUNS = Path("runs")
_MOST = 20
_RIGHT = ("#", "epsilon", "accuracy", "without noise", "one alone")
_DROPPED = ("task", "time", "without noise", "one alone")
"""Columns that a narrow terminal goes without, the first of them first, until most folders have room."""
_NUMBERED = ("#", "date", "time")
_BETWEEN = "  "
_FAST, _COUNTED = "*", "~"


def list_runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER]...", help="Where runs lie; default runs.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help=f"All of them, and not the newest {_MOST} alone.")] = False,
    as_json: AsJson = False,
) -> None:
    """The runs in a folder, the newest last: when, strategy, epsilon, accuracy, and where their files are.

    What strategies, tasks and mechanisms there are is `murmurfl names`.
    """
    with failing_clearly():
        found = find_runs(folders or [RUNS]) if folders or RUNS.is_dir() else []
        if as_json:
            typer.echo(json.dumps([one.document() for one in found], indent=2, allow_nan=False))
            return
        if not found:
            where = ", ".join(map(str, folders or [RUNS]))
            say(f"No runs in {where}. `murmurfl run` makes one; `murmurfl names` says what it can be made of.")
            return
        newest = found if every else found[-_MOST:]
        for line in _lines(newest, len(found) - len(newest)):
            say(line)


def _lines(found: Sequence[FoundRun], before: int) -> list[str]:
    rows = [_row(number, one) for number, one in enumerate(found, before + 1)]
    lines = [f"{before} older runs are left out; --all shows them."] if before else []
    lines += _laid_out(rows, width())
    guarantees: list[tuple[str, Guarantee]] = []
    for number, one in enumerate(found, before + 1):
        if one.outcome and one.outcome.epsilon is not None and (guarantee := one.outcome.terms):
            guarantees.append((str(number), guarantee))
    if any(row["epsilon"].endswith(_FAST) for row in rows):
        lines.append(f"{_FAST} Fast simulation noise: a figure for research, no guarantee.")
    if any(row["accuracy"].endswith(_COUNTED) for row in rows):
        lines.append(f"{_COUNTED} A private evaluation: counted by the machines, with noise.")
    if guarantees:
        lines += ["", caption(guarantees)]
    return [*lines, "", "One page of several: murmurfl report FOLDER..."]


def _row(number: int, one: FoundRun) -> dict[str, str]:
    day, time = one.date.astimezone().strftime("%Y-%m-%d %H:%M").split()
    row = {"#": str(number), "date": day, "time": time}
    outcome = one.outcome
    if outcome is None:
        return {**row, **dict.fromkeys(_FIGURES, ""), "problem": one.problem, "folder": str(one.folder)}
    config, twin = outcome.config, outcome.without_noise
    fast = _FAST if config.get("noise-quality") == "fast" and outcome.epsilon is not None else ""
    return {
        **row,
        "strategy": str(config["strategy"]).rpartition(":")[2],
        "task": str(config["task"]),
        "epsilon": shown(outcome.epsilon) + fast,
        "accuracy": _accuracy(outcome),
        "without noise": _percent(None if twin is None else twin.accuracy),
        "one alone": _percent(None if outcome.alone is None else outcome.alone.accuracy),
        "folder": str(one.folder),
    }


_FIGURES = ("strategy", "task", "epsilon", "accuracy", "without noise", "one alone")


def _accuracy(outcome: Outcome) -> str:
    """Accuracy on the test set, else by the private evaluation, else the loss."""
    counted = outcome.private_evaluation
    if outcome.accuracy is None and counted is not None and counted.accuracy is not None:
        return f"{_percent(counted.accuracy)}{_COUNTED}"
    if outcome.accuracy is None and outcome.loss is None:
        return "none"
    return _percent(outcome.accuracy) or f"loss {loss_text(outcome.loss)}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _laid_out(rows: Sequence[Mapping[str, str]], available: int | None) -> list[str]:
    """Rows under their headings; a folder that has no room beside the rest stands on a line of its own."""
    columns = [*_NUMBERED, *(name for name in _FIGURES if any(row[name] for row in rows))]
    wide = {name: max(len(row[name]) for row in [dict(zip(columns, columns, strict=True)), *rows]) for name in columns}
    folder = sorted(len(row["folder"]) for row in rows)[len(rows) // 2]
    for name in _DROPPED:
        if available is not None and sum(wide[one] + len(_BETWEEN) for one in columns) + folder > available:
            columns = [one for one in columns if one != name]
    lines = []
    for row in [{name: name for name in (*columns, "folder")}, *rows]:
        said = row.get("problem", "")
        shown = [name for name in columns if name in _NUMBERED] if said else columns
        cells = [row[name].rjust(wide[name]) if name in _RIGHT else row[name].ljust(wide[name]) for name in shown]
        before = _BETWEEN.join([*cells, *([said] if said else [])])
        fits = available is None or len(before) + len(_BETWEEN) + len(row["folder"]) <= available
        lines += [f"{before}{_BETWEEN}{row['folder']}"] if fits else [before.rstrip(), f"    {row['folder']}"]
    return lines
