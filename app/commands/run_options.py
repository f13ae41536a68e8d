"""Options of what is run and where its files go, for every command that runs, plans or measures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from ...privacy.setting import Value
from ..settings.layers import layered, names_own, parse_assignments, read_settings, search_here
from ..settings.run_config import check_run_name
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


@contextmanager
def folder_for(out: Path, name: str | None, beginning: str) -> Iterator[Path]:
    """The folder of a run: ``out / name``, or without a name a new one named by the time.

    The latter is unique even among runs that start in the same second, and is removed if it stays empty.

    Raises
    ------
    ConfigurationError
        If the name would leave ``out`` (:func:`~murmurfl.app.settings.run_config.check_run_name`).
    """
    if name is not None:
        check_run_name(name)
        yield out / name
        return
    folder = _new_folder(out, f"{beginning}-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        yield folder
    finally:
        with suppress(OSError):  # not empty
            folder.rmdir()


def _new_folder(out: Path, name: str) -> Path:
    number = 1
    while True:
        folder = out / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder
