"""Options of what is run, their completions, and ``murmurfl keys`` and ``names``, which list what they may be."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import click
import typer
from typer.core import TyperOption

from .terminal import failing_clearly, say

if TYPE_CHECKING:
    from ...privacy.setting import Setting, Value
    from ..settings.catalogue import RegistryView


_LONGEST_HELP = 60
"""Characters; Typer wraps longer help at 80 columns, and shells take the second line for another completion."""

Completion = tuple[str, str]
"""A text and its help, for shells that show it."""


def _completion(text: str, sentence: str) -> Completion:
    return text, textwrap.shorten(sentence, _LONGEST_HELP, placeholder=" ...")


def complete_assignment(incomplete: str) -> Iterator[Completion]:
    """Completions of ``--set``: keys, and behind the ``=`` of a key its values."""
    from ..settings.run_config import run_keys

    name, equals, typed = incomplete.partition("=")
    if not equals:
        yield from ((f"{key}=", sentence) for key, sentence in complete_key(name))
    elif name in run_keys():
        for choice, sentence in choices(run_keys()[name]):
            if choice.startswith(typed):
                yield _completion(f"{name}={choice}", sentence)


def complete_key(incomplete: str) -> Iterator[Completion]:
    """Keys that begin with ``incomplete``."""
    from ..settings.run_config import run_keys

    for one in run_keys().values():
        if one.name.startswith(incomplete):
            yield _completion(one.name, one.sentence)


def complete_paper(incomplete: str) -> Iterator[Completion]:
    """Papers that begin with ``incomplete``."""
    from ..settings.catalogue import CATALOGUE

    papers = CATALOGUE["paper"]
    return (_completion(name, papers.sentence(name)) for name in papers.names() if name.startswith(incomplete))


def choices(one: Setting) -> list[Completion]:
    """Return the names or texts that a key may be, each with its sentence if it has one."""
    from ..settings.catalogue import CATALOGUE

    if one.kind is bool:
        return [("true", ""), ("false", "")]
    shelf = CATALOGUE.get(one.name)
    return [(name, shelf.sentence(name) if shelf else "") for name in one.known if name]


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
        help="Over how many processes the clients of a run on the cohort engine are spread; the model stays the same.",
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


_GIVEN = f"{__name__}.given"
CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def setting_options(names: Mapping[str, tuple[str, str, str]]) -> Callable[[CommandT], CommandT]:
    """Give a command an option for each of some settings, with the setting's type and sentence.

    Parameters
    ----------
    names : mapping
        By the option's name in Python: the run-config key that it stands for, what it is where it is left out, and a
        sentence on what this command does with it; both may be empty. The command reads what was given with
        :func:`given_settings`.
    """
    from ..settings.run_config import run_keys

    def with_options(command: CommandT) -> CommandT:
        made = [_option_of(name, run_keys()[key], *words) for name, (key, *words) in names.items()]
        command.__dict__["__click_params__"] = made
        return command

    return with_options


def _option_of(name: str, one: Setting, default: str, note: str) -> TyperOption:
    is_flag = one.kind is bool
    return TyperOption(
        param_decls=[name, f"--{name.replace('_', '-')}"],
        type=None if is_flag else one.kind,
        is_flag=is_flag,
        default=None,
        help=f"{one.sentence} {note}".strip(),
        show_default=default or False,
        expose_value=False,
        callback=_keep,
    )


def _keep(context: click.Context, option: click.Parameter, value: Value | None) -> None:
    if value is not None:
        context.meta.setdefault(_GIVEN, {})[option.name] = value


def given_settings(context: click.Context) -> Mapping[str, Value]:
    """Return the values of the options of :func:`setting_options` that were given, by their names."""
    return context.meta.get(_GIVEN, {})


def settings_of(file: Path | None, assignments: list[str] | None) -> dict[str, Value]:
    """Return the settings of a file and of ``key=value`` texts, by hyphenated key; the latter win.

    If they name a user's own thing, the current folder is searched for it from now on.
    """
    from ..settings.layers import layered, names_own, parse_assignments, read_settings, search_here

    made = layered({} if file is None else read_settings(file), parse_assignments(assignments or []))
    if names_own(made):
        search_here()
    return made


def keys(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="One key, such as mu; default all.", show_default=False, autocompletion=complete_key
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON schema of a run configuration.")] = False,
    as_toml: Annotated[
        bool, typer.Option("--toml", help="Print every key with its default, as a file for --config.")
    ] = False,
) -> None:
    """List the keys of a run configuration: default, what each may be, who reads it, and what it is."""
    from ...privacy.setting import unknown_key
    from ..settings.catalogue import config_schema, key_toml
    from ..settings.run_config import run_keys

    with failing_clearly():
        if name is not None:
            if name not in run_keys():
                raise unknown_key(name, run_keys())
            _say_one(run_keys()[name], as_json)
        elif as_json:
            typer.echo(json.dumps(config_schema(), indent=2))
        elif as_toml:
            typer.echo(key_toml(), nl=False)
        else:
            _say_all()


def _say_one(one: Setting, as_json: bool) -> None:
    from ..settings.catalogue import expected, key_schema, readers, shown

    if as_json:
        typer.echo(json.dumps(key_schema(one), indent=2))
        return
    say(f"{one.name}: {one.sentence}")
    say(f"  default  {shown(one.default) or 'empty'}")
    say(f"  may be   {expected(one)}")
    say(f"  read by  {readers(one)}")
    named = [(choice, sentence) for choice, sentence in choices(one) if sentence]
    if named:
        say("")
    for choice, sentence in named:
        say(f"  {choice:<{max(len(name) for name, _ in named)}}  {sentence}")


def _say_all() -> None:
    from ..settings.catalogue import expected, readers, shown
    from ..settings.run_config import readers_of, run_keys

    widest = max(map(len, run_keys()))
    for one in run_keys().values():
        read = f" Read by {readers(one)}." if readers_of(one) else ""
        default, values = shown(one.default), expected(one)
        default = f"default {default}" if default else "empty by default"
        say(f"{one.name:<{widest}}  {one.sentence} {values[:1].upper()}{values[1:]}; {default}.{read}")


def say_shelf(shelf: RegistryView) -> None:
    """Print the things of one kind, each with its sentence."""
    names = list(shelf.names())
    widest = max(map(len, names))
    say(f"{shelf.title}: {shelf.how}")
    for name in names:
        say(f"  {name:<{widest}}  {shelf.sentence(name).rstrip('.')}")


def list_names(as_json: AsJson = False) -> None:
    """List methods, tasks, features, partitions, models, mechanisms and papers by name."""
    from ..settings.catalogue import CATALOGUE

    with failing_clearly():
        if as_json:
            made = {key: {name: shelf.sentence(name) for name in shelf.names()} for key, shelf in CATALOGUE.items()}
            typer.echo(json.dumps(made, indent=2))
            return
        for number, shelf in enumerate(CATALOGUE.values()):
            if number:
                say("")
            say_shelf(shelf)
        say("\nOne of your own, package.module:Thing, may stand for each: docs/own.md.")
