"""``murmurfl report``: runs as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .failing import failing_clearly
from .terminal import say


def _print_schema(wanted: bool) -> None:
    from ..report.schema import result_schema

    if wanted:
        typer.echo(json.dumps(result_schema(), indent=2))
        raise typer.Exit


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Folder for page and plots; default `report` in the first RUN.")
    ] = None,
    schema: Annotated[  # noqa: ARG001 - its callback prints it
        bool,
        typer.Option(
            "--schema", help="Print the JSON schema of result.json, and end.", callback=_print_schema, is_eager=True
        ),
    ] = False,
) -> None:
    """Show runs as one HTML page that needs no network, with every plot as PNG and SVG beside it."""
    from ..report.making import make_report

    with failing_clearly():
        say(f"Wrote {make_report(runs, out or runs[0] / 'report')}")
