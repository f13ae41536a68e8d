"""``murmurfl federation``, ``roster`` and ``owner``: who takes part and whose runs are taken; no key travels."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...privacy.accounting.guarantee import added_words, rounded_up
from ...privacy.accounting.loss import Gaussian, Profile
from ...privacy.errors import ConfigurationError
from ...privacy.files import create_private
from ...privacy.ledger.ledger_history import read_ledger
from ...privacy.permits import OwnerKey, PermitError, read_permit, shown_time, verified_permit
from ...privacy.sums.roster import Roster
from ..fleet.federation.keys_and_cards import read_owner_key, write_owner_key
from .node_command import Checked, HealthAddress, LogJSON, MetricsAddress, Serving, take_part
from .run_options import AsJson, Verbose, settings_of
from .terminal import FAILED, CommandLine, failing_clearly, say, say_table

if TYPE_CHECKING:
    from ..fleet.federation.coordinator import Coordinator, Federation, Seen
    from ..fleet.federation.member import Member


federation_cli = CommandLine(help="Set a federation up: a coordinator with a server, clients with data, helpers.")

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The coordinator's or the member's folder.")]
Coordinators = Annotated[Path | None, typer.Option("--in", metavar="FOLDER", help="The coordinator's folder.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting that is not left to the plan: mu, num-rounds, ..."),
]
_NO_NOISE = "NO NOISE"
Digest = Annotated[
    str, typer.Option(help="The federation's digest, which this operator has compared.", show_default=False)
]


@federation_cli.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="NAME", help="The federation's name, and its new folder.")],
    schema: Annotated[Path, typer.Option(help="What a record is, reviewed by a person.", show_default=False)],
    clients: Annotated[int, typer.Option(help="How many clients with data.")] = 5,
    helpers: Annotated[int, typer.Option(help="How many helpers; 0: no secure aggregation.")] = 2,
    num_records: Annotated[
        int, typer.Option(help="About how many records a client has: rounds are planned for it.")
    ] = 1000,
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where members reach the server.", show_default="this host, 8000")
    ] = "",
    epsilon: Annotated[
        float | None, typer.Option(help="Epsilon of a run, at delta (1e-5).", show_default="9.998, which is mu = 2")
    ] = None,
    assignments: Settings = None,
) -> None:
    """Make a federation on its coordinator: certificates, keys of server and owner, and a kit for each member."""
    import socket

    from ..fleet.federation.coordinator import RUN_NAME, new_federation
    from ..fleet.federation.member import cost_of_a_run
    from ..settings.layers import layered

    with failing_clearly():
        made = new_federation(
            folder.expanduser(),
            clients=clients,
            helpers=helpers,
            schema=schema,
            address=address or f"{socket.getfqdn()}:8000",
            settings=layered(settings_of(None, assignments), {} if epsilon is None else {"epsilon": epsilon}),
            num_records=num_records,
        )
        terms = made.federation.terms
    say(f"made      {made.folder}: keys of the server and of an owner; keep this folder as secret as they are")
    say(f"server    {terms.address}: members must reach it there")
    for reason in filter(None, made.changes):
        say(f"chosen    {reason}")
    proposed = ", ".join(f"{name} = {value}" for name, value in terms.settings.items())
    say(f"proposed  {proposed}")
    say(f"a run     {cost_of_a_run(terms)}")
    planned = f"planned for {num_records:,} records a client"
    say(f"run       {made.folder / RUN_NAME}: for `flwr run`, {planned}; yours to edit")
    say(f"kits      {made.folder / 'kits'}: send each member its own; nothing in a kit is secret")
    say("Each member types: murmurfl federation join NAME.kit, and sends the answer back.")


@federation_cli.command()
def join(
    kit: Annotated[Path, typer.Argument(metavar="KIT", help="The coordinator's file.", show_default=False)],
    name: Annotated[str, typer.Option(help="This member's name.", show_default="the kit's")] = "",
    folder: Annotated[
        Path | None, typer.Option(help="This member's new folder.", show_default="the member's name")
    ] = None,
    accept_no_noise: Annotated[
        bool,
        typer.Option(
            "--accept-no-noise", help="Join also if this kit has the client send records' values unprotected."
        ),
    ] = False,
) -> None:
    """Join on a member's own computer: make its keys and its operator's file there, and an answer to send back."""
    from ..fleet.federation.coordinator import CLIENT, Invitation
    from ..fleet.federation.member import cost_of_a_run, without_noise
    from ..fleet.federation.member import join as join_federation

    with failing_clearly():
        found = Invitation.read(kit)
        found = Invitation(name or found.member, found.role, found.terms)
        if words := without_noise(found):
            say(words)  # before everything else
            if not accept_no_noise and _is_terminal():
                accept_no_noise = typer.prompt(f"Type {_NO_NOISE} to join all the same", err=True) == _NO_NOISE
        where = (folder or Path(found.member)).expanduser()
        member = join_federation(found, where, accept_no_noise=accept_no_noise)
        terms, own = member.terms, member.joining()
    say(f"made      {member.folder}: the keys of {found.role} {found.member!r}, which stay here")
    say(f"key       {own.fingerprint}")
    say(f"terms     {terms.digest[:16]}: federation {terms.name!r}, server {terms.address}")
    if found.role == CLIENT:
        say(f"a run     {cost_of_a_run(terms)}; mus add in squares")
        say(f"edit      {member.file}: samples, num-records and budgets are yours to say")
    say(f"answer    {member.answer}: send it to the coordinator; it has public keys only")


@federation_cli.command()
def accept(
    answers: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="What members sent back.", show_default=False)
    ],
    within: Coordinators = None,
) -> None:
    """Accept members, or members' new keys, on the coordinator: the federation has a new digest."""
    from ..fleet.federation.coordinator import JoinRequest

    with failing_clearly():
        read = [JoinRequest.read(path) for path in answers]
        coordinator = _coordinator(within or Path(read[0].federation)).accept(read)
    for one in read:
        say(f"accepted  {one.card.kind} {one.card.name!r}, {one.fingerprint}")
    _say_changes(coordinator)
    _say_members(coordinator)


@federation_cli.command()
def leave(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The member that leaves.", show_default=False)],
    within: Coordinators = None,
) -> None:
    """Take a member out, on the coordinator: its node is unregistered, and the federation has a new digest."""
    with failing_clearly():
        coordinator = _coordinator(within or Path()).leave(name)
    say(f"left      {name!r}; it keeps its ledger as long as its data exist")
    _say_changes(coordinator)
    say(f"training  one under way goes on without it: murmurfl federation exclude OUT-DIR/RUN-NAME {name}")
    _say_members(coordinator)


@federation_cli.command()
def start(
    folder: Folder = Path(),
    digest: Digest = "",
    check: Checked = False,
    health_address: HealthAddress = "",
    metrics_address: MetricsAddress = "",
    log_json: LogJSON = False,
    verbose: Verbose = False,
) -> None:
    """Start what a folder is: the server, a client's node, or a helper; a member's first start needs the digest."""
    from ..fleet.federation.member import Member

    if _is_coordinators(folder):
        with failing_clearly():
            if check or digest:
                raise ConfigurationError(
                    "Expected --check and --digest in a member's folder, got a coordinator's.", kind="conflict"
                )
        _serve(folder, health_address, metrics_address, log_json=log_json, verbose=verbose)
        return
    with failing_clearly():
        member = Member.open(folder.expanduser())
        _say_digest(_pin(member, digest))
        if not check and member.make_ledger():
            say(f"ledger    {member.folder}: made, once for these data")
    take_part(
        member.file.stem,
        config=member.file,
        check=check,
        log_json=log_json,
        verbose=verbose,
        health_address=health_address,
        metrics_address=metrics_address,
    )


@federation_cli.command()
def renew(folder: Folder = Path()) -> None:
    """Renew a member's keys, or the certificate of a coordinator's server; stop what the folder runs first."""
    from ..fleet.federation.member import Member

    with failing_clearly():
        if _is_coordinators(folder):
            _coordinator(folder).renew_certificate()
            say(f"renewed   {folder / 'server.pem'}: for a year, with the same key; start the server again")
            return
        member = Member.open(folder.expanduser())
        old = member.renew()
    say(f"renewed   the keys of {member.kit.role} {member.kit.member!r}, {member.joining().fingerprint}")
    say(f"old       {old[0].parent}: destroy it once no run goes on with these keys")
    say(f"answer    {member.answer}: send it to the coordinator, who accepts it; then all compare the new digest")


@federation_cli.command()
def status(folder: Folder = Path()) -> None:
    """Show a federation from one of its folders: its digest, who is there, what is ready, what is spent."""
    from ..fleet.federation.member import Member

    with failing_clearly():
        if _is_coordinators(folder):
            _say_members(_coordinator(folder), online=True)
            return
        member = Member.open(folder.expanduser())
        federation = member.pinned
        own = member.joining()
        say(f"member    {own.card.kind} {own.card.name!r} of {member.terms.name!r}, {own.fingerprint}")
        if federation is None:
            say("pinned    nothing yet: start it, with the digest that all operators have compared")
            return
        _say_digest(federation)
        say(f"now       {_published(member, federation)}")
        ledger = Path(getattr(member.operators(), "ledger", ""))
        if ledger.is_file():
            summary = read_ledger(ledger)
            local = f", in the worst case {_spent(summary.spent.worst_case, summary.budget.worst_case)}"
            say(
                f"spent     {_spent(summary.spent.assumed, summary.budget.assumed)}{local if member.terms.sums else ''}"
            )
        elif ledger.name:
            say("spent     nothing: the first start makes the ledger")
    take_part(member.file.stem, config=member.file, check=True)


@federation_cli.command()
def end(
    run: Annotated[Path, typer.Argument(metavar="FOLDER", help="The run's folder, on the server.", show_default=False)],
) -> None:
    """End a training after the round that is under way, on the server: the run completes with its model so far."""
    from ..runs.result import ask_to_end

    with failing_clearly():
        ask_to_end(run.expanduser())
    say(f"asked     {run}: the training ends after its round, with its model; what was reserved stays reserved")


def _is_terminal() -> bool:
    """Return True if somebody can be asked."""
    return sys.stdin.isatty()


@federation_cli.command()
def exclude(
    run: Annotated[Path, typer.Argument(metavar="FOLDER", help="The run's folder, on the server.", show_default=False)],
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Clients.", show_default=False)],
    back: Annotated[bool, typer.Option("--back", help="Ask them again.")] = False,
) -> None:
    """Take clients out of a training from its next round on, on the server, whether it runs or will be resumed."""
    from ..runs.result import exclude_clients

    with failing_clearly():
        excluded = exclude_clients(run.expanduser(), names, back=back)
    say(f"excluded  {', '.join(excluded) or 'nobody'}: not asked; numbers of clients, roster and min-cohort stay")


def _is_coordinators(folder: Path) -> bool:
    return (folder.expanduser() / "members.json").exists()


def _coordinator(folder: Path) -> Coordinator:
    from ..fleet.federation.coordinator import Coordinator

    return Coordinator.open(folder.expanduser())


def _pin(member: Member, digest: str) -> Federation:
    """Return the federation to take part by.

    The published one if its operator compared its digest, else the pinned one.
    """
    pinned = member.pinned
    if pinned is not None and digest.replace(" ", "").lower() in ("", pinned.digest):
        member.check(pinned)
        return pinned
    found = member.published()
    member.check(found)
    if not digest:
        _say_digest(found)
        if not _is_terminal():
            raise ConfigurationError(
                "Expected --digest with the digest that all operators have read to each other, got none: compare it, "
                "by telephone say and not through the server.",
                kind="missing",
            )
        typer.confirm("Do all other operators read the same digest, by their own means?", abort=True, err=True)
    member.pin(found, digest or found.digest)
    return found


def _published(member: Member, pinned: Federation) -> str:
    """Whether the server publishes the pinned federation, in words."""
    try:
        digest = member.published().digest
    except ConfigurationError as error:
        return str(error)
    if digest == pinned.digest:
        return "the server publishes the same"
    return f"the server publishes {digest}: compare it, then start with --digest"


def _serve(folder: Path, health: str, metrics: str, *, log_json: bool, verbose: bool) -> None:
    serving = Serving(log_json, log_details=True, verbose=verbose)
    serving.start_log()
    with serving.failing():
        from ..fleet.federation.coordinator import MEMBERS_NAME, PUBLISHED_NAME
        from ..fleet.health import Addresses
        from ..fleet.servers.watched_server import run_server

        made = _coordinator(folder.expanduser().absolute())
        members, published = made.folder / MEMBERS_NAME, made.folder / PUBLISHED_NAME
        _say_digest(made.federation)
        options, addresses = made.server_options(), Addresses(health, metrics)
        run_server(options, addresses, None, serving.journal(), made.owners, members, published)


def _say_digest(compared: Federation | Roster) -> None:
    from ..fleet.federation.keys_and_cards import in_fours

    say(f"digest    {compared.digest}")
    say(f"in fours  {in_fours(compared.digest)}")  # to be read out


def _say_changes(coordinator: Coordinator) -> None:
    for line in coordinator.changes:
        say(f"changed   {line}")


def _say_members(coordinator: Coordinator, *, online: bool = False) -> None:
    from ..fleet.federation.coordinator import CLIENT

    federation = coordinator.federation
    seen = coordinator.seen() if online else {}
    rows = [
        {
            "name": name,
            "is a": one.card.kind,
            "key": one.fingerprint,
            "is": seen[name].status if seen else "",
            "runs": str(len(seen[name].statements) + seen[name].silent or "") if seen else "",
            "spent in them": _reserved(seen[name]) if seen and one.card.kind == CLIENT else "",
        }
        for name, one in sorted(coordinator.members.items())
    ]
    nothing = dict.fromkeys(("name", "is a", "key", "is", "runs", "spent in them"), "")
    rows += [{**nothing, "name": name, "is": "awaited"} for name in coordinator.awaited]
    say_table(f"Federation {federation.terms.name}", rows, ("name",))
    if not federation.members or (federation.terms.sums and federation.roster is None):
        say(f"digest    none yet: it needs {'a client and a helper' if federation.terms.sums else 'a client'}")
        return
    _say_digest(federation)
    say("Every operator compares this digest with the others', by telephone say, and starts with it.")


def _reserved(seen: Seen) -> str:
    """Return the mu that a client's runs reserved, by its own statements, and in how many runs it made none."""
    if seen.status == "unknown":
        return "not known: the server does not answer"
    mu = seen.total("mu-guaranteed")
    unknown = "not stated" if seen.statements else ""
    spent = _spent(Gaussian(mu), Gaussian(seen.last("mu-budget"))) if seen.statements and math.isfinite(mu) else unknown
    if not seen.silent:
        return spent
    runs = f"{seen.silent} run{'s' * (seen.silent != 1)}"
    return f"{spent or 'not known'}: off at the end of {runs}, which its own ledger has"


def _spent(spent: Profile, budget: Profile) -> str:
    words = f"mu {rounded_up(spent.mu)}{added_words(spent)}"
    return f"{words} of {budget.mu:g}" if math.isfinite(budget.mu) else words


roster_cli = CommandLine(help="Secure aggregation: make keys, and the list of everybody's that operators agree on.")

RosterPath = Annotated[Path, typer.Argument(metavar="PATH", help="The roster's file.", show_default=False)]
_COMPARE = (
    "Every operator compares this digest with the others', by telephone say and not through the server, and pins it as "
    "roster-digest. Each then runs `murmurfl roster check` on its own file."
)


@roster_cli.command("key")
def roster_key(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="The private key's new file, say clinic.key; its card goes to clinic.card."
        ),
    ],
    client: Annotated[str, typer.Option(help="The client whose key it is.", show_default=False)] = "",
    helper: Annotated[str, typer.Option(help="Or the helper.", show_default=False)] = "",
    record: Annotated[
        Path | None, typer.Option(help="A helper's opening record, a new file made with the key.", show_default=False)
    ] = None,
    mark: Annotated[
        Path | None, typer.Option(help="The record's high-water mark; default RECORD.mark.", show_default=False)
    ] = None,
) -> None:
    """Make a client's or a helper's private key, and the card with its public half; overwrites nothing."""
    from ..fleet.federation.keys_and_cards import make_client, make_helper

    with failing_clearly():
        if bool(client) == bool(helper):
            raise ConfigurationError(
                "Expected whose key it is as --client or as --helper, got both or neither.", kind="conflict"
            )
        if bool(helper) != (record is not None) or (mark is not None and record is None):
            raise ConfigurationError(
                "Expected --record with --helper and with nothing else: a helper's key and the record of what it "
                "opened are made together and live as long as each other.",
                kind="conflict",
            )
        made = make_helper(path, helper, record, mark) if record is not None else make_client(path, client)
    say(f"key       {path}: private, of mode 600; it stays on this computer")
    if record is not None:
        say(f"record    {record}: if it is ever lost, this key must be replaced")
    say(f"card      {made.path}: send it to whoever makes the roster")
    say(f"that is   {made.card.kind} {made.card.name}, {made.card.fingerprint}")


@roster_cli.command("make")
def make_roster(
    cards: Annotated[list[Path], typer.Argument(metavar="CARD...", help="Everybody's cards.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The roster's new file.")] = Path("roster.json"),
) -> None:
    """Make the roster of some cards, and say its digest; overwrites nothing."""
    from ...clients.nodes.roster_files import write_roster
    from ..fleet.federation.keys_and_cards import Card, roster_of

    with failing_clearly():
        roster = roster_of(map(Card.read, cards))
        write_roster(out, roster)
    say(f"roster    {out}: {_size(len(roster.clients), len(roster.helpers))}; send it to every operator")
    _say_digest(roster)
    say(_COMPARE)


@roster_cli.command("show")
def show_roster(path: RosterPath, as_json: AsJson = False) -> None:
    """Show who is in a roster, their keys' fingerprints and the roster's digest."""
    from ...clients.nodes.roster_files import read_roster
    from ..fleet.federation.keys_and_cards import cards_of

    with failing_clearly():
        roster = read_roster(path, None)
    rows = [{"name": one.name, "is a": one.kind, "key": one.fingerprint} for one in cards_of(roster)]
    if as_json:
        typer.echo(json.dumps({"path": str(path), "digest": roster.digest, "members": rows}, indent=2))
        return
    say(f"roster    {path}: {_size(len(roster.clients), len(roster.helpers))}")
    _say_digest(roster)
    say_table("Clients and helpers", rows, ("name",))
    say("Fingerprints are for telling keys apart; what operators compare is the digest.")


@roster_cli.command("check")
def check_roster(
    path: Annotated[Path, typer.Argument(metavar="CONFIG", help="A client's or a helper's file.", show_default=False)],
) -> None:
    """Check an operator's file against its roster: my key, the pinned digest, min-cohort, helpers, record."""
    from ..fleet.preflight import check_operators_file

    with failing_clearly():
        findings = list(check_operators_file(path))
    for finding in findings:
        say(f"{'in order' if finding.right else 'WRONG'}  {finding.text}")
    if not all(finding.right for finding in findings):
        sys.exit(FAILED)


def _size(clients: int, helpers: int) -> str:
    return f"{clients} client{'s' * (clients != 1)}, {helpers} helper{'s' * (helpers != 1)}"


owner_cli = CommandLine(help="Say which runs clients take: an owner's key, permits signed with it, and logins.")

_DAY_S = 24 * 3600
_CLOCKS_DIFFER_S = 300

KeyPath = Annotated[
    Path, typer.Argument(metavar="KEY", help="The owner's private key; it is never on the server.", show_default=False)
]


@owner_cli.command("key")
def owner_key(path: KeyPath) -> None:
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
        from ..fleet.servers.control_api import log_in

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
    knots: Annotated[bool, typer.Option("--knots", help="Also for the knots of an additive model.")] = False,
    evaluation: Annotated[bool, typer.Option("--evaluation", help="Also for the private evaluation.")] = False,
    renew: Annotated[
        str, typer.Option(help="A permit of this key's, whose sessions and bundle it is for again.", show_default=False)
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="A new file to write it to; default standard output.", show_default=False)
    ] = None,
) -> None:
    """Sign a permit for one run: one line, the run key `permit`."""
    from ..methods.queries import EVALUATION, KNOTS, MEAN, part_session

    with failing_clearly():
        if renew and (session or bundle or mean or knots or evaluation):
            raise ConfigurationError(
                "Expected --renew alone: it takes sessions and bundle from the permit.", kind="conflict"
            )
        owner, now = read_owner_key(path), int(time.time())
        first = _time(begin) if begin else now
        if renew:
            # Whoever hands it over may have made it up: renew only what this key has signed.
            old = verified_permit(renew, [owner.public])
            sessions, bundle = old.sessions, old.bundle
        else:
            name = session or secrets.token_hex(16)
            parts = [MEAN] * mean + [KNOTS] * knots + [EVALUATION] * evaluation
            sessions = (name, *(part_session(name, part) for part in parts))
        if not 0 < days <= 3660:
            raise ConfigurationError(
                f"Expected --days to be a number > 0 and at most 3660, got {days:g}.",
                kind="out-of-range",
                setting="days",
                got=days,
            )
        begins = first if begin else now - _CLOCKS_DIFFER_S
        made = owner.permit(sessions, not_before=begins, until=first + round(days * _DAY_S), bundle=bundle)
        if out is not None:
            create_private(out, "a permit", f"{made}\n".encode(), error=ConfigurationError)
    _say_permit(made, err=True)
    if out is None:
        typer.echo(made)


@owner_cli.command("show")
def show_permit(
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
            raise ConfigurationError(
                "Expected a permit that its owner signed, got another signature: do not use it.",
                kind="not-permitted",
                setting="permit",
            )


@owner_cli.command()
def bundle(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The project that `flwr run` is given.", show_default=False)
    ] = Path(),
) -> None:
    """Say the SHA-256 of the bundle that `flwr run FOLDER` sends: for operators' `bundles`, or a permit's --bundle."""
    with failing_clearly():
        if not (folder / "pyproject.toml").is_file():
            raise ConfigurationError(
                f"Expected a Flower project in {folder}, got a folder without pyproject.toml.", kind="not-found"
            )
        from ..nodes.flower_internals import bundle_of

        content = bundle_of(folder)
    typer.echo(hashlib.sha256(content).hexdigest())


def _time(text: str) -> int:
    try:
        return int(datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError):
        raise ConfigurationError(
            f"Expected --from as YYYY-MM-DDTHH:MM, got {text!r}.", kind="malformed", setting="from", got=text
        ) from None


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
