"""The ``murmurfl`` command, composed of its parts, each of which is imported when it is called."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.main import get_command, get_group

from ..version import __version__
from .completion import in_any_shell
from .terminal import CommandLine, CommandsWithHint

_COMMANDS = {
    "fit": "fit_command:fit",
    "predict": "fit_command:predict",
    "run": "run_command:run",
    "search": "search_command:search",
    "reproduce": "reproduce_command:reproduce",
    "statistics": "statistics_command:statistics",
    "report": "report_command:report",
    "audit": "audit_command:audit",
    "plan": "plan_command:plan",
    "list": "list_command:list_runs",
    "names": "keys_command:list_names",
    "keys": "keys_command:keys",
    "schema": "schema_command:schema",
    "node": "node_command:node",
    "helper": "node_command:helper",
    "deploy-demo": "node_command:deploy_demo",
    "server": "server_command:server",
    "federation": "federation_command:federation_cli",
    "ledger": "ledger_command:ledger_cli",
    "roster": "roster_command:roster_cli",
    "owner": "owner_command:owner_cli",
}
"""Where each command stands: a function, or an application of commands."""
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
    """Commands of which the help shows the first sentences without importing any."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: Any = _Late()

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show the help."""
        late, self.commands = self.commands, {name: click.Command(name, help=_sentence(name)) for name in _COMMANDS}
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = late


def _sentence(name: str) -> str:
    """The docstring of a command's function, or the help of its application, read from its file."""
    module, _, attribute = _COMMANDS[name].partition(":")
    for part in ast.parse((Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")).body:
        if isinstance(part, ast.FunctionDef) and part.name == attribute:
            return ast.get_docstring(part) or ""
        if (
            isinstance(part, ast.Assign)
            and isinstance(part.value, ast.Call)
            and ast.unparse(part.targets[0]) == attribute
        ):
            return next(ast.literal_eval(one.value) for one in part.value.keywords if one.arg == "help")
    return ""


cli = CommandLine(
    cls=_LateCommands,
    help="Private federated learning whose noise cancels itself.",
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
