"""``murmurfl reproduce``: a paper's tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..papers import PAPERS
from ..settings.catalogue import CATALOGUE
from ..settings.layers import search_here
from .completion import complete_paper
from .keys_command import say_shelf
from .run_options import AsJson, Assignments, ConfigFile, RayAddress, settings_of
from .terminal import MISUSED, fail, failing_clearly, say, say_table

if TYPE_CHECKING:
    from ..papers import Cell, Paper


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
        say(f"{paper.name}.json, .csv, .md and .png are in {folder}")


def _made(paper: Paper, cells: list[Cell], folder: Path, *, bar: bool, **options: Any) -> dict[str, Any]:
    """The document of a reproduction, with a progress bar."""
    from ..papers.reproduction import reproduce as make

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, disable=not bar) as progress:
        task = progress.add_task(paper.name, total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        return make(paper, cells, folder, on_run=show, say=progress.console.print, **options)
