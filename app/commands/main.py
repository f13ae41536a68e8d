"""The ``murmurfl`` command: its parts, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from ..version import __version__
from .audit import audit
from .command_line import CommandLine
from .completion import in_any_shell
from .helper import helper
from .keys import keys, list_names
from .ledger import ledger_cli
from .node import deploy_demo, node
from .owner import owner_cli
from .plan import plan
from .report import report
from .reproduce import reproduce
from .roster import roster_cli
from .run import run
from .runs import list_runs
from .schema import schema
from .search import search
from .server import server

cli = CommandLine(help="Private federated learning whose noise cancels itself.", pretty_exceptions_enable=False)


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


for command in (run, search, reproduce, report, audit, plan):
    cli.command()(command)
cli.command("list")(list_runs)
cli.command("names")(list_names)
for command in (keys, schema, node, helper, deploy_demo):
    cli.command()(command)
cli.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(server)
cli.add_typer(ledger_cli, name="ledger")
cli.add_typer(roster_cli, name="roster")
cli.add_typer(owner_cli, name="owner")


def main() -> None:
    """Entry point of the ``murmurfl`` command."""
    in_any_shell(cli)
