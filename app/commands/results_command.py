"""``murmurfl list``, ``report`` and ``reproduce``: finished runs as lines and as a page, and a paper's tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ...privacy.accounting.guarantee import Guarantee, caption
from ...privacy.errors import ConfigurationError
from ..papers import PAPERS
from ..reports.finding import FoundRun, find_runs
from ..runs.outcome import Outcome
from ..runs.run_summary import loss_text, shown
from ..settings.catalogue import CATALOGUE
from ..settings.layers import search_here
from .run_options import AsJson, Assignments, ConfigFile, RayAddress, complete_paper, say_shelf, settings_of
from .terminal import MISUSED, fail, failing_clearly, say, say_table, width

if TYPE_CHECKING:
    from ..papers import Cell, Paper


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
    """List the runs in a folder, the newest last: when, strategy, epsilon, accuracy, and where their files are.

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
        lines.append(f"{_COUNTED} A private evaluation: counted by the clients, with noise.")
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
    heading = {name: name for name in (*columns, "folder")}
    return [line for row in [heading, *rows] for line in _row_lines(row, columns, wide, available)]


def _row_lines(
    row: Mapping[str, str], columns: Sequence[str], wide: Mapping[str, int], available: int | None
) -> list[str]:
    """Return a row as one line, or as two where its folder has no room next to the rest."""
    problem = row.get("problem", "")
    names = [name for name in columns if name in _NUMBERED] if problem else columns
    cells = [row[name].rjust(wide[name]) if name in _RIGHT else row[name].ljust(wide[name]) for name in names]
    before = _BETWEEN.join([*cells, *([problem] if problem else [])])
    if available is None or len(before) + len(_BETWEEN) + len(row["folder"]) <= available:
        return [f"{before}{_BETWEEN}{row['folder']}"]
    return [before.rstrip(), f"    {row['folder']}"]


def _print_schema(wanted: bool) -> None:
    from ..runs.outcome import result_schema

    if wanted:
        typer.echo(json.dumps(result_schema(), indent=2))
        raise typer.Exit


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of finished runs, or a folder of such.", show_default=False),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for page and plots; default `report` in the first RUN.")
    ] = None,
    twins: Annotated[
        bool,
        typer.Option(
            "--twins",
            help="Make runs that have none without noise too, and one client alone; keep that.",
        ),
    ] = False,
    schema: Annotated[  # noqa: ARG001 - its callback prints it
        bool,
        typer.Option(
            "--schema", help="Print the JSON schema of result.json, and end.", callback=_print_schema, is_eager=True
        ),
    ] = False,
) -> None:
    """Show runs as one HTML page that needs no network, with every plot as PNG and SVG beside it.

    Runs that differ in their seed alone are one line, with their mean and standard deviation.
    """
    from ..reports.finding import expanded
    from ..reports.making import make_report

    with failing_clearly():
        folders = expanded(runs)
        if twins:
            _make_twins(folders)
        say(f"Wrote {make_report(folders, out or runs[0] / 'report')}")


def _make_twins(folders: list[Path]) -> None:
    """Make every simulated run's twin without noise; say why where a run can have none."""
    from ..runs.simulate import add_alone, add_without_noise

    for folder in folders:
        try:
            add_alone(folder)
            add_without_noise(folder)
        except ConfigurationError as error:
            say(f"{folder}: {error}", err=True)


def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            help=f"One of {', '.join(PAPERS)}; or package.module:PAPER, a Paper of your own.",
            autocompletion=complete_paper,
            show_default=False,
        ),
    ] = "",
    assignments: Assignments = None,
    config_file: ConfigFile = None,
    seeds: Annotated[int, typer.Option(help="Runs of each cell, seeds 1 to this; 0 for as many as the paper.")] = 0,
    engine: Annotated[str, typer.Option(help="cohort, inprocess or ray.")] = "cohort",
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default runs/NAME.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "--jobs",
            help="Whole runs at once, each in a process of its own.",
            show_default="as many as cores",
        ),
    ] = None,
    ray: RayAddress = "",
    twins: Annotated[
        bool, typer.Option("--twins", help="With a line without noise in every table and picture that has none.")
    ] = False,
    as_json: AsJson = False,
    only_list: Annotated[bool, typer.Option("--list", help="Print the papers, and end.")] = False,
) -> None:
    """Reproduce a paper's tables, or with --set or --config any other cell of them."""
    from ..papers.reproduction import plan_runs, tables_of, with_twins

    with failing_clearly():
        if only_list:
            say_shelf(CATALOGUE["paper"])
            return
        if not name:
            fail("Expected the name of a paper, got none: `murmurfl reproduce --list` has them.", MISUSED)
        if ":" in name:
            search_here()
        paper = PAPERS[name]
        cells = paper.cells_with(settings_of(config_file, assignments))
        cells = with_twins(cells) if twins else cells
        seeds = seeds or paper.seeds
        plan_runs(cells, seeds, engine, paper.table)  # refuses before the progress bar shows
        folder = out or Path("runs") / paper.name
        where = {"workers": workers, "ray_address": ray}
        document = _made(paper, cells, folder, bar=not as_json, seeds=seeds, engine=engine, **where)
        if as_json:
            typer.echo(json.dumps(document, indent=2))
            return
        for table in tables_of(document, paper.name, paper.table):
            say_table(table.title, table.texts(), table.labels)
        say(f"{seeds} runs of each, with seeds 1 to {seeds}." if seeds > 1 else "One run of each, with seed 1.")
        say(document["guarantee"])
        made = [f"{paper.name}{end}" for end in (".json", ".csv", ".md", ".png")]
        say(f"In {folder}: {', '.join(name for name in made if (folder / name).exists())}")


def _made(paper: Paper, cells: list[Cell], folder: Path, *, bar: bool, **options: Any) -> dict[str, Any]:
    """Return the document of a reproduction, with a progress bar."""
    from ..papers.reproduction import reproduce as make

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, disable=not bar) as progress:
        task = progress.add_task(paper.name, total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        return make(paper, cells, folder, on_run=show, say=progress.console.print, **options)
