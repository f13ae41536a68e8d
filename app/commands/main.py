"""The ``murmurfl`` command, composed of its parts, each of which is imported when it is called."""

from __future__ import annotations

import ast
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperCommand
from typer.main import get_command, get_group

from ..version import __version__
from .terminal import CommandLine, CommandsWithHint

_DOCUMENTATION = "https://github.com/murmurfl/murmurfl/tree/main/docs"
_COMMANDS = {
    "fit": "fit_command:fit",
    "predict": "fit_command:predict",
    "personalise": "fit_command:personalise",
    "curves": "fit_command:curves",
    "run": "run_command:run",
    "search": "run_command:search",
    "reproduce": "results_command:reproduce",
    "statistics": "table_command:statistics",
    "report": "results_command:report",
    "audit": "plan_command:audit",
    "plan": "plan_command:plan",
    "try": "try_command:try_package",
    "list": "results_command:list_runs",
    "names": "run_options:list_names",
    "keys": "run_options:keys",
    "schema": "table_command:schema",
    "node": "node_command:node",
    "helper": "node_command:helper",
    "deploy-demo": "node_command:deploy_demo",
    "server": "node_command:server",
    "federation": "federation_command:federation_cli",
    "ledger": "ledger_command:ledger_cli",
    "roster": "federation_command:roster_cli",
    "owner": "federation_command:owner_cli",
}
"""Location of each command: a function, or an application of commands."""
_TASKS = {
    "Tables": ("fit", "predict", "personalise", "curves", "statistics", "schema"),
    "Runs": ("run", "plan", "search", "try", "audit", "report", "list", "reproduce", "names", "keys"),
    "Real clients": ("node", "helper", "server", "deploy-demo", "federation", "ledger", "roster", "owner"),
}
"""The commands by what a user wants to do, in the order of the help."""
_OPTIONS: dict[str, dict[str, Any]] = {
    "server": {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}
}


class _Late(Mapping[str, click.Command]):
    """The commands by name, imported when they are first asked for."""

    def __init__(self) -> None:
        self._made: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._made:
            module, _, attribute = _COMMANDS[name].partition(":")
            found = getattr(import_module(f".{module}", __package__), attribute)
            if isinstance(found, typer.Typer):
                self._made[name] = get_group(found)
            else:
                one = CommandLine(add_completion=False)
                one.command(name, **_OPTIONS.get(name, {}))(found)
                self._made[name] = get_command(one)
            self._made[name].name = name
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _LateCommands(CommandsWithHint):
    """Commands whose help shows their first sentences without importing any of them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: Any = _Late()

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show the help."""
        places = {name: place.split(":") for name, place in _COMMANDS.items()}
        helps = {name: _sentences(module)[attribute] for name, (module, attribute) in places.items()}
        late, self.commands = self.commands, {}
        for task, name in ((task, name) for task, names in _TASKS.items() for name in names):
            self.commands[name] = TyperCommand(name, help=helps[name], rich_help_panel=task)
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = late


@cache
def _sentences(module: str) -> dict[str, str]:
    """Return the docstrings of a file's functions and the help of its applications, by name, without importing it."""
    found = {}
    for part in ast.parse((Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")).body:
        if isinstance(part, ast.FunctionDef):
            found[part.name] = ast.get_docstring(part) or ""
        elif isinstance(part, ast.Assign) and isinstance(part.value, ast.Call):
            helps = [ast.literal_eval(one.value) for one in part.value.keywords if one.arg == "help"]
            found[ast.unparse(part.targets[0])] = "".join(helps)
    return found


cli = CommandLine(
    cls=_LateCommands,
    help="Private federated learning whose noise cancels itself.",
    epilog=f"Documentation: {_DOCUMENTATION}",
    pretty_exceptions_enable=False,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"murmurfl {__version__}")
        raise typer.Exit


@cli.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", help="Say the version, and end.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """Private federated learning whose noise cancels itself."""


def main() -> None:
    """Entry point of the ``murmurfl`` command."""
    in_any_shell(cli)


def in_any_shell(command: Callable[[], None]) -> None:
    """Run a command, which a shell may have started to ask for completions.

    Bash ends a word at ``=``: it hands over ``--set strategy=mu`` as three words, and expects only what follows the
    ``=``. Here the three are joined for Typer, and the beginning is removed again.
    """
    if os.environ.get("_MURMURFL_COMPLETE") != "complete_bash":
        command()
        return
    words = os.environ.get("COMP_WORDS", "").split("\n")
    words, rest = words[: int(os.environ.get("COMP_CWORD", "0")) + 1], ""
    if "=" in words[-2:]:
        start = len(words) - 1 - words[::-1].index("=")
        rest = f"{words[start - 1]}="
        words = [*words[: start - 1], f"{rest}{''.join(words[start + 1 :])}"]
        os.environ |= {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            command()
    finally:
        typer.echo("\n".join(line.removeprefix(rest) for line in printed.getvalue().splitlines()))
