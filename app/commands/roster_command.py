"""``murmurfl roster``: keys of secure aggregation, and the list of their public halves that operators agree on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ...privacy import ConfigurationError
from .run_options import AsJson
from .terminal import FAILED, CommandLine, failing_clearly, say, say_table

roster_cli = CommandLine(help="Secure aggregation: make keys, and the list of everybody's that operators agree on.")

_GROUP = 4

RosterPath = Annotated[Path, typer.Argument(metavar="PATH", help="The roster's file.", show_default=False)]
_COMPARE = (
    "Every operator compares this digest with the others', by telephone say and not through the server, and pins it as "
    "roster-digest. Each then runs `murmurfl roster check` on its own file."
)


@roster_cli.command()
def key(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="The private key's new file, say clinic.key; its card goes to clinic.card."
        ),
    ],
    machine: Annotated[str, typer.Option(help="The machine whose key it is.", show_default=False)] = "",
    helper: Annotated[str, typer.Option(help="Or the helper.", show_default=False)] = "",
    record: Annotated[
        Path | None, typer.Option(help="A helper's opening record, a new file made with the key.", show_default=False)
    ] = None,
    mark: Annotated[
        Path | None, typer.Option(help="The record's high-water mark; default RECORD.mark.", show_default=False)
    ] = None,
) -> None:
    """Make a machine's or a helper's private key, and the card with its public half; overwrites nothing."""
    from ..nodes.federation.keys_and_cards import make_helper, make_machine

    with failing_clearly():
        if bool(machine) == bool(helper):
            raise ConfigurationError("Expected whose key it is as --machine or as --helper, got both or neither.")
        if bool(helper) != (record is not None) or (mark is not None and record is None):
            raise ConfigurationError(
                "Expected --record with --helper and with nothing else: a helper's key and the record of what it "
                "opened are made together and live as long as each other."
            )
        made = make_helper(path, helper, record, mark) if record is not None else make_machine(path, machine)
    say(f"key       {path}: private, of mode 600; it stays on this machine")
    if record is not None:
        say(f"record    {record}: if it is ever lost, this key must be replaced")
    say(f"card      {made.path}: send it to whoever makes the roster")
    say(f"that is   {made.card.kind} {made.card.name}, {made.card.fingerprint}")


@roster_cli.command()
def make(
    cards: Annotated[list[Path], typer.Argument(metavar="CARD...", help="Everybody's cards.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The roster's new file.")] = Path("roster.json"),
) -> None:
    """Make the roster of some cards, and say its digest; overwrites nothing."""
    from ...clients.nodes.roster_files import write_roster
    from ..nodes.federation.keys_and_cards import Card, roster_of

    with failing_clearly():
        roster = roster_of(map(Card.read, cards))
        write_roster(out, roster)
    say(f"roster    {out}: {_size(len(roster.machines), len(roster.helpers))}; send it to every operator")
    _say_digest(roster.digest)
    say(_COMPARE)


@roster_cli.command()
def show(path: RosterPath, as_json: AsJson = False) -> None:
    """Show who is in a roster, their keys' fingerprints and the roster's digest."""
    from ...clients.nodes.roster_files import read_roster
    from ..nodes.federation.keys_and_cards import cards_of

    with failing_clearly():
        roster = read_roster(path, None)
    rows = [{"name": one.name, "is a": one.kind, "key": one.fingerprint} for one in cards_of(roster)]
    if as_json:
        typer.echo(json.dumps({"path": str(path), "digest": roster.digest, "members": rows}, indent=2))
        return
    say(f"roster    {path}: {_size(len(roster.machines), len(roster.helpers))}")
    _say_digest(roster.digest)
    say_table("Machines and helpers", rows, ("name",))
    say("Fingerprints are for telling keys apart; what operators compare is the digest.")


@roster_cli.command()
def check(
    path: Annotated[Path, typer.Argument(metavar="CONFIG", help="A machine's or a helper's file.", show_default=False)],
) -> None:
    """Check an operator's file against its roster: my key, the pinned digest, min-cohort, helpers, record."""
    from ..nodes.preflight import check_operators_file

    with failing_clearly():
        findings = list(check_operators_file(path))
    for finding in findings:
        say(f"{'in order' if finding.right else 'WRONG'}  {finding.text}")
    if not all(finding.right for finding in findings):
        sys.exit(FAILED)


def _say_digest(digest: str) -> None:
    say(f"digest    {digest}")
    say(f"in fours  {' '.join(digest[i : i + _GROUP] for i in range(0, len(digest), _GROUP))}")  # to be read out


def _size(machines: int, helpers: int) -> str:
    return f"{machines} machine{'s' * (machines != 1)}, {helpers} helper{'s' * (helpers != 1)}"
