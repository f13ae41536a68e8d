"""``murmurfl report``: runs as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ...privacy import ConfigurationError
from .terminal import failing_clearly, say


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
            help="Make runs that have none without noise too, and one machine alone; keep that.",
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
    """Every simulated run's twin without noise; of a run that can have none it is said why."""
    from ..runs.simulate import add_alone, add_without_noise

    for folder in folders:
        try:
            add_alone(folder)
            add_without_noise(folder)
        except ConfigurationError as error:
            say(f"{folder}: {error}", err=True)
