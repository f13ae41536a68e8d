"""``murmurfl reproduce``: a paper's tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ...privacy import rounded_up
from ..papers.cells import DEFAULT_SEEDS, REPRODUCTIONS
from .completion import complete_paper
from .failing import failing_clearly
from .settings import AsJson, Assignments, ConfigFile, settings_of
from .terminal import say, say_table

LABELS = ("table", "setting", "algorithm", "mechanism")
_PRIVACY_COLUMNS = ("mu", "mu asked", "epsilon")


def reproduce(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(REPRODUCTIONS)}.", autocompletion=complete_paper)],
    assignments: Assignments = None,
    config_file: ConfigFile = None,
    seeds: Annotated[int, typer.Option(help="Runs of each cell, seeds 1 to this; 0 for as many as the paper.")] = 0,
    engine: Annotated[str, typer.Option(help="cohort, inprocess or ray.")] = "cohort",
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default runs/NAME.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Worker processes; default as many as cores.")] = None,
    as_json: AsJson = False,
) -> None:
    """Reproduce a paper's tables, or with --set any other cell of them."""
    from ..papers.reproduce import cells_of, markdown_table, plan_runs, run_cells, table_rows, write_reproduction

    with failing_clearly():
        cells = cells_of(name, settings_of(config_file, assignments))
        seeds = seeds or DEFAULT_SEEDS[name]
        plan_runs(cells, seeds, engine)  # refuses before the progress bar shows
        folder = out or Path("runs") / name
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(
            *columns, TextColumn("left"), TimeRemainingColumn(), console=console, disable=as_json
        ) as progress:
            task = progress.add_task(name, total=None)
            document = run_cells(
                cells,
                seeds=seeds,
                out=folder,
                engine=engine,
                jobs=jobs,
                on_run=lambda done, total: progress.update(task, completed=done, total=total),
            )
        document = {"reproduction": name, "engine": engine, "seeds": seeds, **document}
        write_reproduction(document, name, folder)
        if as_json:
            typer.echo(json.dumps(document, indent=2))
            return
        rows = table_rows(document)
        # Tables of curves have a column for everything; people get those of the pages.
        shown = _markdown_texts(markdown_table(rows)) if "step" in rows[0] else texts(rows)
        say_table(name, shown, LABELS)
        say(document["guarantee"])
        say(f"{name}.json, .csv, .md and .png are in {folder}")


def texts(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Rows as people read them."""
    formats = {"accuracy %": ".1f", "± std": ".1f", "paper %": ".1f", "loss": ".3f", "paper loss": ".3f"}
    formats |= {"delta": "g", "seconds": ".1f", "step": "g"}
    formats |= {column: ".1f" for column in rows[0] if "regret" in column or "cumulative" in column}
    return [{column: _cell(column, value, formats) for column, value in row.items()} for row in rows]


def _cell(column: str, value: Any, formats: Mapping[str, str]) -> str:
    if value is None:
        return ""
    if column in _PRIVACY_COLUMNS:
        return rounded_up(value)
    return format(value, formats.get(column, ".4g" if isinstance(value, float) else ""))


def _markdown_texts(text: str) -> list[dict[str, str]]:
    text = text.strip().replace("**", "")
    header, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
    return [dict(zip(header, line, strict=True)) for line in lines]
