"""``murmurfl ledger``: make a real node's ledger, show what was spent, go on after a rollback."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ...privacy import (
    ConfigurationError,
    Guarantee,
    LedgerSummary,
    MurmurflError,
    SessionSummary,
    SQLiteLedger,
    accept_rollback,
    gdp_epsilon,
    gdp_mu,
    needs_upgrade,
    new_mark,
    read_ledger,
    rounded_up,
    upgrade_ledger,
)
from ...privacy.guarantee import SESSION
from ..terminal import say, say_table
from .command_line import CommandLine

ledger_cli = CommandLine(help="A real node's ledger: make it, show it, mend it.")

LedgerPath = Annotated[Path, typer.Argument(metavar="PATH", help="The ledger's file.", show_default=False)]
_NOTHING_AGAINST_IT = "Against the server nothing is guaranteed: it got contributions without noise."
_ONLY_TRUSTED = " under a trusted server, and for no other"

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@ledger_cli.command()
def create(
    path: LedgerPath,
    delta: Annotated[float, typer.Option(help="Where epsilon is shown, such as 1e-5.", show_default=False)],
    epsilon: Annotated[float | None, typer.Option(help="Budget of everything ever released, at delta.")] = None,
    mu: Annotated[float | None, typer.Option(help="The budget as a Gaussian-DP mu, instead of epsilon.")] = None,
    data: Annotated[str, typer.Option(help="What you call the data.")] = "",
    mark: Annotated[Path | None, typer.Option(help="The high-water mark's file; default PATH.mark.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="A new file for the noise key; default in the ledger.")] = None,
) -> None:
    """Make the ledger of a node that never had one."""
    with _one_line_errors():
        if (epsilon is None) == (mu is None):
            raise ConfigurationError("Expected the budget as --epsilon or as --mu, got both or neither.")
        budget = mu if epsilon is None else gdp_mu(epsilon, delta)
        SQLiteLedger.create(path, budget_mu=budget or 0.0, delta=delta, data=data, mark=mark, key_file=key_file)
        for line in _lines(read_ledger(path), path):
            say(line)


@ledger_cli.command()
def show(
    path: LedgerPath,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Show what was spent, on which run, and what is left; alters nothing."""
    with _one_line_errors():
        summary = read_ledger(path)
    if as_json:
        typer.echo(json.dumps(document_of(summary, path), indent=2, allow_nan=False))
        return
    for line in _lines(summary, path):
        say(line)
    if summary.sessions:
        say_table("Sessions: a run of training each", _rows(summary), ("session",))
    if summary.mark_problem:
        say(f"\nThis node releases nothing: {summary.mark_problem}")


@ledger_cli.command("accept-rollback")
def accept(path: LedgerPath, yes: Yes = False) -> None:
    """Go on with a ledger that was copied back, counting as spent all that its high-water mark knows of."""
    if not yes:
        typer.confirm(
            "This closes every session on the ledger; their budget and samples stay spent. Putting the newest file "
            "back would lose nothing. Go on?",
            abort=True,
        )
    with _one_line_errors():
        closed = accept_rollback(path)
    say(f"Closed {closed} sessions. `murmurfl ledger show {path}` says what is left.")


@ledger_cli.command("new-mark")
def mark_again(path: LedgerPath, yes: Yes = False) -> None:
    """Make a new high-water mark for a ledger whose mark is lost."""
    if not yes:
        typer.confirm(
            "Nothing can check this: are you certain that the ledger is the newest and was never copied back? If it "
            "was, privacy that is spent already will be spent again.",
            abort=True,
        )
    with _one_line_errors():
        new_mark(path)
    typer.echo("Made a new high-water mark.")


@ledger_cli.command()
def upgrade(path: LedgerPath, yes: Yes = False) -> None:
    """Make a ledger of murmurfl 0.1 one that knows the data it is used with."""
    with _one_line_errors():
        if not needs_upgrade(path):
            typer.echo("This ledger knows its data already: there is nothing to upgrade.")
            return
    if not yes:
        typer.confirm(
            "Nothing can check this: are the data those this ledger was used with, every row unchanged and in its "
            "place (new ones at the end)? If not, samples that are spent already will be spent again.",
            abort=True,
        )
    with _one_line_errors():
        upgrade_ledger(path)
    typer.echo("Upgraded. From its next release on the ledger knows its data; sessions begun with 0.1 cannot go on.")


def document_of(summary: LedgerSummary, path: Path) -> dict[str, Any]:
    """A ledger's summary as a JSON document; null where there is no bound.

    Parameters
    ----------
    summary : LedgerSummary
    path : Path
        Where it was read.

    Notes
    -----
    **Formal guarantees.** ``spent`` is what all releases of all sessions opened so far together guarantee, made or not,
    against whom ``guarantee`` says: where a session was under a trusted server, against everybody but that one.
    """
    return {
        "path": str(path),
        "data": summary.data,
        "created": summary.created,
        "guarantee": ledger_guarantee(summary).document(),
        "delta": summary.delta,
        **{
            name: {"mu": _finite(mu), "epsilon": _finite(gdp_epsilon(mu, summary.delta))}
            for name, mu in (("budget", summary.budget_mu), ("spent", summary.reserved_mu), ("left", summary.left_mu))
        },
        "samples_used": summary.samples_used,
        "commits": summary.commits,
        "mark": summary.mark,
        "problem": summary.mark_problem,
        "key_file": summary.key_file,
        "sessions": [
            {
                "session": session.session,
                "trust": "trusted-server" if session.trusted else "untrusted-server",
                "mu": _finite(session.mu),
                "epsilon": _finite(gdp_epsilon(session.mu, summary.delta)),
                "guarantee": session_guarantee(session, summary.delta).sentence,
                "releases": session.releases,
                "acknowledged": session.ack,
                "closed": session.closed,
                "first_release": session.first_release,
                "last_release": session.last_release,
                "terms": dict(session.terms),
            }
            for session in summary.sessions
        ],
    }


def ledger_guarantee(summary: LedgerSummary) -> Guarantee:
    """What everything released under a ledger guarantees: all sessions opened so far, made or not.

    Parameters
    ----------
    summary : LedgerSummary
    """
    words = list(dict.fromkeys(session_guarantee(s, summary.delta).mechanism for s in summary.sessions))
    return Guarantee(
        summary.reserved_mu,
        summary.delta,
        "; ".join(words) or "nothing released yet",
        trust="trusted-server" if summary.trusted_a_server else "untrusted-server",
        covers="over all releases of all sessions on this ledger",
        notes=(_NOTHING_AGAINST_IT,) if summary.trusted_a_server else (),
    )


def session_guarantee(session: SessionSummary, delta: float) -> Guarantee:
    """What one session on a ledger guarantees, by the terms it was opened with.

    Parameters
    ----------
    session : SessionSummary
    delta : float
        The ledger's.
    """
    terms = session.terms
    if session.trusted:
        return Guarantee(
            session.mu,
            delta,
            "no noise on this machine: the server's, by its own word",
            trust="trusted-server",
            covers=SESSION,
            notes=(_NOTHING_AGAINST_IT,),
        )
    options = (terms.get("schedule"), *terms.get("mechanism_options", {}).values())
    named = ", ".join(str(value) for value in options if value)
    words = f"{terms.get('mechanism', 'unknown')}{f' ({named})' if named else ''} noise on this machine"
    return Guarantee(session.mu, delta, words, covers=SESSION)


def _lines(summary: LedgerSummary, path: Path) -> list[str]:
    def amount(mu: float) -> str:
        if math.isinf(mu):
            return "no bound: a session under a trusted server, of version 0.1, reserved none"
        # One rounding for all three, so that a budget and what is spent of it read alike when they are equal.
        return f"epsilon {rounded_up(gdp_epsilon(mu, summary.delta))} at delta {summary.delta:g} (mu {rounded_up(mu)})"

    return [
        f"ledger    {path}",
        f"data      {summary.data or '(no name)'}; {summary.samples_used} samples used up",
        f"budget    {amount(summary.budget_mu)}",
        f"spent     {amount(summary.reserved_mu)}: all releases the sessions below may make",
        f"left      {amount(summary.left_mu)}: for new sessions{_ONLY_TRUSTED if summary.trusted_a_server else ''}",
        f"that is   {ledger_guarantee(summary).sentence}",
        f"mark      {summary.mark}{' (see below)' if summary.mark_problem else ''}",
        f"key       {summary.key_file or 'in the ledger'}",
    ]


def _rows(summary: LedgerSummary) -> list[dict[str, str]]:
    return [
        {
            "session": session.session,
            "opened, UTC": _when(session.first_release),
            "last, UTC": _when(session.last_release),
            "releases": f"{session.releases} of {session.terms.get('max_participations', '?')}",
            "mu": rounded_up(session.mu),
            "epsilon": rounded_up(gdp_epsilon(session.mu, summary.delta)),
            "clip": f"{session.terms.get('clip_norm', '?')} a {session.terms.get('clip_unit', '?')}",
            "batch": str(session.terms.get("batch_size", "?")),
            "noise": "none: the server's" if session.trusted else _noise(session.terms),
            "state": "closed" if session.closed else "open",
        }
        for session in summary.sessions
    ]


def _noise(terms: Mapping[str, Any]) -> str:
    return f"{terms.get('mechanism', '?')}, std {terms.get('noise_std', math.nan):.3g}"


def _when(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class _one_line_errors:  # noqa: N801 - reads as a sentence where it is used
    """Turns an error of ours into one line and exit code 1."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, MurmurflError):
            say(f"murmurfl: {error}", err=True)
            raise typer.Exit(1) from error
