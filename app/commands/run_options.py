"""Options of what is run, for every command that runs, plans or measures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...privacy.setting import Value
from ..settings.layers import layered, names_own, parse_assignments, read_settings, search_here
from .completion import complete_assignment

Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A run-config key, such as mu=2; may be repeated. `murmurfl keys` lists all of them.",
        show_default=False,
        autocompletion=complete_assignment,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        help="Run-config keys from a TOML file; what is --set wins over them.",
        show_default=False,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Over how many processes the machines of a run on the cohort engine are spread; the model stays the same.",
        show_default="this process alone",
    ),
]
RayAddress = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="A Ray cluster for the workers: HOST:PORT, auto or ray://HOST:PORT. Without it they are on this computer.",
        show_default=False,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="What computes gradients and noise of a run on the cohort engine: cuda, cuda:1, or torch-cpu, which is "
        "that path without a GPU, for tests. The noise has other bits and the same law.",
        show_default="NumPy",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Details = Annotated[bool, typer.Option("--details", help="Say everything.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show Flower's whole log.")]


def settings_of(file: Path | None, assignments: list[str] | None) -> dict[str, Value]:
    """The settings of a file and of ``key=value`` texts, by hyphenated key; the latter win.

    If they name a user's own thing, the current folder is searched for it from now on.
    """
    made = layered({} if file is None else read_settings(file), parse_assignments(assignments or []))
    if names_own(made):
        search_here()
    return made
