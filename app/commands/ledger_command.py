"""``murmurfl ledger``: make a real node's ledger, show what was spent, continue after a rollback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ...privacy.accounting.gdp import gdp_mu
from ...privacy.errors import ConfigurationError
from ...privacy.ledger.ledger_history import LedgerHistory, LedgerSummary, read_history, read_ledger
from ...privacy.ledger.repair import accept_rollback, new_mark, set_local_budget
from ...privacy.ledger.sqlite import SQLiteLedger
from ..nodes.ledger_views import (
    LOCAL_COLUMNS,
    ledger_document,
    ledger_lines,
    releases_document,
    releases_notes,
    releases_rows,
    rotate_key_of,
    session_rows,
)
from .run_options import AsJson
from .terminal import CommandLine, aligned, failing_clearly, say, say_table, width

_LOCAL_BUDGET = "For secure aggregation: the budget, as a mu, of what holds even if nobody else is honest."
_WIDE = 110
"""Columns from which a release's line has room for both figures of secure aggregation."""

ledger_cli = CommandLine(help="A real node's ledger: make it, show it, mend it.")

LedgerPath = Annotated[Path, typer.Argument(metavar="PATH", help="The ledger's file.", show_default=False)]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@ledger_cli.command()
def create(
    path: LedgerPath,
    delta: Annotated[float, typer.Option(help="Where epsilon is shown, such as 1e-5.", show_default=False)],
    epsilon: Annotated[float | None, typer.Option(help="Budget of everything ever released, at delta.")] = None,
    mu: Annotated[float | None, typer.Option(help="The budget as a Gaussian-DP mu, instead of epsilon.")] = None,
    budget_local_mu: Annotated[float | None, typer.Option(help=_LOCAL_BUDGET)] = None,
    data: Annotated[str, typer.Option(help="What you call the data.")] = "",
    mark: Annotated[Path | None, typer.Option(help="The high-water mark's file; default PATH.mark.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="A new file for the noise key; default in the ledger.")] = None,
) -> None:
    """Make the ledger of a node that never had one."""
    with failing_clearly():
        if (epsilon is None) == (mu is None):
            raise ConfigurationError(
                "Expected the budget as --epsilon or as --mu, got both or neither.", kind="conflict"
            )
        budget = mu if epsilon is None else gdp_mu(epsilon, delta)
        budgets = {"budget_mu": budget or 0.0, "budget_local_mu": budget_local_mu}
        SQLiteLedger.create(path, **budgets, delta=delta, data=data, mark=mark, key_file=key_file)
        for line in ledger_lines(read_ledger(path), path):
            say(line)


@ledger_cli.command()
def show(
    path: LedgerPath,
    releases: Annotated[
        bool, typer.Option("--releases", help="Show every release: when, session, number, samples, mu so far.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what was spent, on which run, and what is left; alters nothing."""
    with failing_clearly():
        summary = read_ledger(path)
        history = read_history(path) if releases else None
    if as_json:
        document = ledger_document(summary, path)
        if history is not None:
            document |= releases_document(history, summary)
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    if history is not None:
        _say_releases(history, summary)
    else:
        for line in ledger_lines(summary, path):
            say(line)
        if summary.sessions:
            say_table("Sessions: a run of training each", session_rows(summary), ("session",))
    if summary.mark_problem:
        say(f"\nThis node releases nothing: {summary.mark_problem}")


def _say_releases(history: LedgerHistory, summary: LedgerSummary) -> None:
    if not history.lines:
        say("Nothing was released.")
        return
    available = width()
    rows = releases_rows(history, summary, short=available is not None)
    columns = [name for name in rows[0] if available is None or available >= _WIDE or name not in LOCAL_COLUMNS]
    for line in aligned(rows, columns, ("number", "samples", "mu so far", "mu reserved", *LOCAL_COLUMNS)):
        typer.echo(line)
    for note in releases_notes(history, summary, local_shown=LOCAL_COLUMNS[0] in columns):
        say(f"\n{note}")


@ledger_cli.command("accept-rollback")
def accept(path: LedgerPath, yes: Yes = False) -> None:
    """Go on with a ledger that was copied back, counting as spent all that its high-water mark knows of."""
    _ask(
        yes,
        "This closes every session on the ledger; their budget and samples stay spent. Putting the newest file back "
        "would lose nothing. Go on?",
    )
    with failing_clearly():
        closed = accept_rollback(path)
    say(f"Closed {closed} sessions. `murmurfl ledger show {path}` says what is left.")


@ledger_cli.command("new-mark")
def mark_again(path: LedgerPath, yes: Yes = False) -> None:
    """Make a new high-water mark for a ledger whose mark is lost."""
    _ask(
        yes,
        "Nothing can check this: are you certain that the ledger is the newest and was never copied back? If it was, "
        "privacy that is spent already will be spent again.",
    )
    with failing_clearly():
        new_mark(path)
    typer.echo("Made a new high-water mark.")


@ledger_cli.command("set-local-budget")
def decide(
    path: LedgerPath,
    budget_local_mu: Annotated[float, typer.Option(help=_LOCAL_BUDGET, show_default=False)],
) -> None:
    """Decide the budget of what holds even if nobody else is honest, once, for a ledger that was made without it."""
    with failing_clearly():
        set_local_budget(path, budget_local_mu)
    say(f"Decided. `murmurfl ledger show {path}` says what its budgets are.")


@ledger_cli.command("rotate-key")
def rotate(
    config: Annotated[Path, typer.Argument(help="The operator's file of the node.", show_default=False)],
    key_file: Annotated[
        Path | None, typer.Option(help="A new file for the new key; needed if the old one has its own.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Give a node's ledger a new noise key and destroy the old one; stop the node first, and start it again."""
    from ..nodes.node_app import read_node

    _ask(
        yes,
        "This closes every session on the ledger: a run that goes on loses this client, and its budget stays spent. "
        "Copies of the ledger from before can never be used again. Go on?",
    )
    with failing_clearly():
        node = read_node(config, runs_kept=True)  # it answers nothing
        closed = rotate_key_of(node, key_file)
    say(
        f"The noise key of {node.ledger} is a new one; {closed} sessions are closed. Start the node again, and make a "
        "backup now: copies from before cannot be gone on with, and should be destroyed, for they have the old key."
    )


def _ask(yes: bool, question: str) -> None:
    """End the command unless its user, or ``--yes``, agrees."""
    if not yes:
        typer.confirm(question, abort=True)
