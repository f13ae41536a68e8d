"""The ``murmurfl`` command, composed of its parts."""

from __future__ import annotations

from typing import Annotated

import typer

from ..version import __version__
from .audit_command import audit
from .completion import in_any_shell
from .keys_command import keys, list_names
from .ledger_command import ledger_cli
from .list_command import list_runs
from .node_command import deploy_demo, helper, node
from .owner_command import owner_cli
from .plan_command import plan
from .report_command import report
from .reproduce_command import reproduce
from .roster_command import roster_cli
from .run_command import run
from .schema_command import schema
from .search_command import search
from .server_command import server
from .statistics_command import statistics
from .terminal import CommandLine

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


for command in (run, search, reproduce, report, audit, plan, statistics):
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
