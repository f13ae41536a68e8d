"""``murmurfl list``: the runs there are, with what each came to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ...privacy import Guarantee, caption
from ..reports.finding import FoundRun, find_runs
from ..runs.run_summary import loss_text, shown
from .run_options import AsJson
from .terminal import failing_clearly, say, width

RUNS = Path("runs")
_MOST = 20
_RIGHT = ("#", "epsilon", "accuracy", "without noise")
_DROPPED = ("task", "time", "without noise")
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
        guarantee = one.guarantee
        if guarantee is not None and one.run is not None and one.run.document["epsilon"] is not None:
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
    if one.run is None:
        return {**row, **dict.fromkeys(_FIGURES, ""), "problem": one.problem, "folder": str(one.folder)}
    document = one.run.document
    twin = document.get("without_noise") or {}
    fast = _FAST if document["config"].get("noise-quality") == "fast" and document["epsilon"] is not None else ""
    return {
        **row,
        "strategy": str(document["config"]["strategy"]).rpartition(":")[2],
        "task": str(document["config"]["task"]),
        "epsilon": shown(document["epsilon"]) + fast,
        "accuracy": _accuracy(document),
        "without noise": _percent(twin.get("accuracy")),
        "folder": str(one.folder),
    }


_FIGURES = ("strategy", "task", "epsilon", "accuracy", "without noise")


def _accuracy(document: Mapping[str, Any]) -> str:
    """On the test set; where there is none what machines counted with noise, and else the loss."""
    counted = (document.get("private_evaluation") or {}).get("accuracy")
    if document["accuracy"] is None and counted is not None:
        return f"{_percent(counted)}{_COUNTED}"
    if document["accuracy"] is None and document["loss"] is None:
        return "none"
    return _percent(document["accuracy"]) or f"loss {loss_text(document['loss'])}"


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
