"""``murmurfl owner``: keys, permits and logins of the people whose runs machines take, made away from the server."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from ...privacy import ConfigurationError
from ...privacy.files import create_private
from ...privacy.permits import OwnerKey, PermitError, read_permit, shown_time, verified_permit
from ..nodes.federation.keys_and_cards import read_owner_key, write_owner_key
from .run_options import AsJson
from .terminal import CommandLine, failing_clearly, say

owner_cli = CommandLine(help="Say which runs machines take: an owner's key, permits signed with it, and logins.")

_DAY_S = 24 * 3600
_CLOCKS_DIFFER_S = 300

KeyPath = Annotated[
    Path, typer.Argument(metavar="KEY", help="The owner's private key; it is never on the server.", show_default=False)
]


@owner_cli.command()
def key(path: KeyPath) -> None:
    """Make an owner's private key, and say the public half that operators list; overwrites nothing."""
    with failing_clearly():
        made = OwnerKey.generate()
        write_owner_key(path, made)
    say(f"key       {path}: private, of mode 600; keep it away from the server")
    say(f"public    {made.public.hex()}")
    say("Operators list the public half: of nodes in their own files (owners, in [runs]), of the server in --owners.")


@owner_cli.command()
def public(path: KeyPath) -> None:
    """Say the public half of a key and the file's name, as a line of the list for `murmurfl server --owners`."""
    with failing_clearly():
        typer.echo(f"{read_owner_key(path).public.hex()} {path.stem}")


@owner_cli.command()
def login(
    path: KeyPath,
    connection: Annotated[
        str,
        typer.Argument(metavar="CONNECTION", help="Of Flower's config.toml, as for `flwr run`; default its default."),
    ] = "",
    hours: Annotated[float, typer.Option(help="How long it lasts, at most 744.")] = 12.0,
) -> None:
    """Log in to a server that takes commands of owners alone; `flwr` sends the login from then on."""
    with failing_clearly():
        owner = read_owner_key(path)
        from ..nodes.servers.control_api import log_in

        address, until = log_in(owner, connection or None, hours)
    say(f"server    {address}: takes this owner's commands, from `flwr` on this account")
    say(f"until     {shown_time(until)}")


@owner_cli.command()
def permit(
    path: KeyPath,
    session: Annotated[
        str, typer.Option(help="The session it is for, letters and digits; default a fresh name.", show_default=False)
    ] = "",
    days: Annotated[float, typer.Option(help="How long it lasts.")] = 7.0,
    begin: Annotated[
        str,
        typer.Option("--from", help="When it begins, YYYY-MM-DDTHH:MM, local time; default now.", show_default=False),
    ] = "",
    bundle: Annotated[
        str, typer.Option(help="The bundle it is for (`murmurfl owner bundle`); default any.", show_default=False)
    ] = "",
    mean: Annotated[bool, typer.Option("--mean", help="Also for the mean of the features.")] = False,
    evaluation: Annotated[bool, typer.Option("--evaluation", help="Also for the private evaluation.")] = False,
    renew: Annotated[
        str, typer.Option(help="A permit of this key's, whose sessions and bundle it is for again.", show_default=False)
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="A new file to write it to; default standard output.", show_default=False)
    ] = None,
) -> None:
    """Sign a permit for one run: one line, the run key `permit`."""
    from ..runs.permitted_run import EVALUATION, MEAN, part_session

    with failing_clearly():
        if renew and (session or bundle or mean or evaluation):
            raise ConfigurationError("Expected --renew alone: it takes sessions and bundle from the permit.")
        owner, now = read_owner_key(path), int(time.time())
        first = _time(begin) if begin else now
        if renew:
            # Whoever hands it over may have made it up: renew only what this key has signed.
            old = verified_permit(renew, [owner.public])
            sessions, bundle = old.sessions, old.bundle
        else:
            name = session or secrets.token_hex(16)
            parts = [MEAN] * mean + [EVALUATION] * evaluation
            sessions = (name, *(part_session(name, part) for part in parts))
        if not 0 < days <= 3660:
            raise ConfigurationError(f"Expected --days to be a number > 0 and at most 3660, got {days:g}.")
        begins = first if begin else now - _CLOCKS_DIFFER_S
        made = owner.permit(sessions, not_before=begins, until=first + round(days * _DAY_S), bundle=bundle)
        if out is not None:
            create_private(out, "a permit", f"{made}\n".encode(), error=ConfigurationError)
    _say_permit(made, err=True)
    if out is None:
        typer.echo(made)


@owner_cli.command()
def show(
    text: Annotated[str, typer.Argument(metavar="PERMIT", help="The permit, one line.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Show what a permit says, and whether the owner that it names has signed it."""
    with failing_clearly():
        found, signed = read_permit(text), _is_signed(text)
        if as_json:
            document = {
                "owner": found.owner.hex(),
                "sessions": list(found.sessions),
                "bundle": found.bundle,
                "not-before": found.not_before,
                "until": found.until,
                "signed": signed,
            }
            typer.echo(json.dumps(document, indent=2))
        else:
            _say_permit(text)
        if not signed:
            raise ConfigurationError("Expected a permit that its owner signed, got another signature: do not use it.")


@owner_cli.command()
def bundle(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The project that `flwr run` is given.", show_default=False)
    ] = Path(),
) -> None:
    """Say the SHA-256 of the bundle that `flwr run FOLDER` sends: for operators' `bundles`, or a permit's --bundle."""
    with failing_clearly():
        if not (folder / "pyproject.toml").is_file():
            raise ConfigurationError(f"Expected a Flower project in {folder}, got a folder without pyproject.toml.")
        from ..nodes.flower_internals import bundle_of

        content = bundle_of(folder)
    typer.echo(hashlib.sha256(content).hexdigest())


def _time(text: str) -> int:
    try:
        return int(datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError):
        raise ConfigurationError(f"Expected --from as YYYY-MM-DDTHH:MM, got {text!r}.") from None


def _is_signed(text: str) -> bool:
    try:
        verified_permit(text, [read_permit(text).owner])
    except PermitError:
        return False
    return True


def _say_permit(text: str, *, err: bool = False) -> None:
    found = read_permit(text)
    say(f"owner     {found.owner.hex()}", err=err)
    say(f"sessions  {', '.join(found.sessions)}", err=err)
    say(f"bundle    {found.bundle or 'any'}", err=err)
    say(f"from      {shown_time(found.not_before)}", err=err)
    say(f"until     {shown_time(found.until)}", err=err)
