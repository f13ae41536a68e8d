"""``murmurfl keys`` and ``murmurfl names``: the keys and names of a run configuration, from their declarations."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ...privacy.setting import Setting, unknown_key
from ..settings.catalogue import CATALOGUE, Shelf
from ..settings.key_reference import config_schema, expected, key_schema, key_toml, readers, shown
from ..settings.run_config import readers_of, run_keys
from .completion import choices, complete_key
from .run_options import AsJson
from .terminal import failing_clearly, say


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
    """The keys of a run configuration: default, what each may be, who reads it, and what it is."""
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
    widest = max(map(len, run_keys()))
    for one in run_keys().values():
        read = f" Read by {readers(one)}." if readers_of(one) else ""
        default, values = shown(one.default), expected(one)
        default = f"default {default}" if default else "empty by default"
        say(f"{one.name:<{widest}}  {one.sentence} {values[:1].upper()}{values[1:]}; {default}.{read}")


def say_shelf(shelf: Shelf) -> None:
    """Print the things of one kind, each with its sentence."""
    names = list(shelf.names())
    widest = max(map(len, names))
    say(f"{shelf.title}: {shelf.how}")
    for name in names:
        say(f"  {name:<{widest}}  {shelf.sentence(name).rstrip('.')}")


def list_names(as_json: AsJson = False) -> None:
    """What there is by name: methods, tasks, features, partitions, models, mechanisms and papers."""
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
