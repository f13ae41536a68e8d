"""The options that say what is run, the same for every command that runs, plans or measures something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ..config import parse_assignments, run_keys
from ..keys import Key, Value
from ..own_modules import names_own, search_here
from ..settings import layered, read_settings


def complete_assignment(incomplete: str) -> Iterator[tuple[str, str]]:
    """What ``--set`` can go on with: keys, and behind the ``=`` of one of them what it may be.

    Parameters
    ----------
    incomplete : str
        What has been typed of the option's value.

    Yields
    ------
    tuple
        A completion and, for shells that show it, its help.
    """
    name, equals, typed = incomplete.partition("=")
    if not equals:
        yield from ((f"{one.name}=", one.sentence) for one in run_keys().values() if one.name.startswith(name))
    elif name in run_keys():
        for choice, sentence in choices(run_keys()[name]):
            if choice.startswith(typed):
                yield f"{name}={choice}", sentence


def choices(one: Key) -> list[tuple[str, str]]:
    """The names or texts a key may be, each with its sentence where it has one."""
    if one.kind == "bool":
        return [("true", ""), ("false", "")]
    return [(name, sentence_of(one, name)) for name in one.known if name]


def sentence_of(one: Key, name: str) -> str:
    """What a name that a key may be stands for; empty where nothing is said of it."""
    from ..catalogue import CATALOGUE

    return CATALOGUE[one.name].sentence(name) if one.name in CATALOGUE else ""


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
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show Flower's whole log.")]


def settings_of(file: Path | None, assignments: list[str] | None) -> dict[str, Value]:
    """The settings of a file and of a command line, by hyphenated key; the latter win.

    If they name something of one's own, the current folder is searched for it from now on.

    Parameters
    ----------
    file : Path or None
    assignments : list of str or None
        Texts ``key=value``.

    Raises
    ------
    ConfigurationError
    """
    made = layered({} if file is None else read_settings(file), parse_assignments(assignments or []))
    if names_own(made):
        search_here()
    return made
