"""``murmurfl federation``: from nothing to a running federation, without a key that travels."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...privacy import ConfigurationError, read_ledger, rounded_up
from .node_command import take_part
from .run_options import Verbose, settings_of
from .serving import Checked, HealthAddress, LogJSON, MetricsAddress, Serving
from .terminal import CommandLine, failing_clearly, say, say_table

if TYPE_CHECKING:
    from ..nodes.federation.coordinator import Coordinator, Federation, Seen
    from ..nodes.federation.member import Member

federation_cli = CommandLine(help="Set a federation up: a coordinator with a server, machines with data, helpers.")

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The coordinator's or the member's folder.")]
Coordinators = Annotated[Path | None, typer.Option("--in", metavar="FOLDER", help="The coordinator's folder.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="What machines' files propose: clip-norm, mu, min-cohort, ..."),
]
Digest = Annotated[
    str, typer.Option(help="The federation's digest, which this operator has compared.", show_default=False)
]


@federation_cli.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="NAME", help="The federation's name, and its new folder.")],
    schema: Annotated[Path, typer.Option(help="What a record is, reviewed by a person.", show_default=False)],
    machines: Annotated[int, typer.Option(help="How many machines with data.")] = 5,
    helpers: Annotated[int, typer.Option(help="How many helpers; 0: no secure aggregation.")] = 2,
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where members reach the server.", show_default="this host, 8000")
    ] = "",
    assignments: Settings = None,
) -> None:
    """Make a federation on its coordinator: certificates, keys of server and owner, and a kit for each member."""
    import socket

    from ..nodes.federation.coordinator import new_federation

    with failing_clearly():
        made = new_federation(
            folder.expanduser(),
            machines=machines,
            helpers=helpers,
            schema=schema,
            address=address or f"{socket.getfqdn()}:8000",
            settings=settings_of(None, assignments),
        )
        terms = made.federation.terms
    say(f"made      {made.folder}: keys of the server and of an owner; keep this folder as secret as they are")
    say(f"server    {terms.address}: members must reach it there")
    proposed = ", ".join(f"{name} = {value}" for name, value in terms.settings.items())
    say(f"proposed  {proposed}")
    say(f"kits      {made.folder / 'kits'}: send each member its own; nothing in a kit is secret")
    say("Each member types: murmurfl federation join NAME.kit, and sends the answer back.")


@federation_cli.command()
def join(
    kit: Annotated[Path, typer.Argument(metavar="KIT", help="The coordinator's file.", show_default=False)],
    name: Annotated[str, typer.Option(help="This member's name.", show_default="the kit's")] = "",
    folder: Annotated[
        Path | None, typer.Option(help="This member's new folder.", show_default="the member's name")
    ] = None,
) -> None:
    """Join on a member's own computer: make its keys and its operator's file there, and an answer to send back."""
    from ..nodes.federation.coordinator import MACHINE, Kit
    from ..nodes.federation.member import cost_of_a_run
    from ..nodes.federation.member import join as join_federation

    with failing_clearly():
        found = Kit.read(kit)
        found = Kit(name or found.member, found.role, found.terms)
        member = join_federation(found, (folder or Path(found.member)).expanduser())
        terms, card = member.terms, member.card()
    say(f"made      {member.folder}: the keys of {found.role} {found.member!r}, which stay here")
    say(f"key       {card.fingerprint}")
    say(f"terms     {terms.digest[:16]}: federation {terms.name!r}, server {terms.address}")
    if found.role == MACHINE:
        say(f"a run     {cost_of_a_run(terms)}; mus add in squares")
        say(f"edit      {member.file}: samples, rows and budgets are yours to say")
    say(f"answer    {member.answer}: send it to the coordinator; it has public keys only")


@federation_cli.command()
def accept(
    answers: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="What members sent back.", show_default=False)
    ],
    within: Coordinators = None,
) -> None:
    """Accept members, or members' new keys, on the coordinator: the roster is made again, and has a new digest."""
    from ..nodes.federation.coordinator import Joining

    with failing_clearly():
        read = [Joining.read(path) for path in answers]
        coordinator = _coordinator(within or Path(read[0].federation)).accept(read)
    for one in read:
        say(f"accepted  {one.card.kind} {one.card.name!r}, {one.card.fingerprint}")
    _say_members(coordinator)


@federation_cli.command()
def leave(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The member that leaves.", show_default=False)],
    within: Coordinators = None,
) -> None:
    """Take a member out, on the coordinator: its node is unregistered, and the roster has a new digest."""
    with failing_clearly():
        coordinator = _coordinator(within or Path()).leave(name)
    say(f"left      {name!r}; it keeps its ledger as long as its data exist")
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
    """Start what a folder is: the server, a machine's node, or a helper; a member's first start needs the digest."""
    from ..nodes.federation.member import Member

    if _is_coordinators(folder):
        with failing_clearly():
            if check or digest:
                raise ConfigurationError("Expected --check and --digest in a member's folder, got a coordinator's.")
        _serve(folder, health_address, metrics_address, log_json=log_json, verbose=verbose)
        return
    with failing_clearly():
        member = Member.open(folder.expanduser())
        _say_digest(_pin(member, digest))
        if not check and member.make_ledger():
            say(f"ledger    {member.folder}: made, once for these data")
    _take_part(member, Serving(log_json, verbose=verbose), check, health_address, metrics_address)


@federation_cli.command()
def renew(folder: Folder = Path()) -> None:
    """Renew a member's keys, or the certificate of a coordinator's server; stop what the folder runs first."""
    from ..nodes.federation.member import Member

    with failing_clearly():
        if _is_coordinators(folder):
            _coordinator(folder).renew_certificate()
            say(f"renewed   {folder / 'server.pem'}: for a year, with the same key; start the server again")
            return
        member = Member.open(folder.expanduser())
        old = member.renew()
    say(f"renewed   the keys of {member.kit.role} {member.kit.member!r}, {member.card().fingerprint}")
    say(f"old       {old[0].parent}: destroy it once no run goes on with these keys")
    say(f"answer    {member.answer}: send it to the coordinator, who accepts it; then all compare the new digest")


@federation_cli.command()
def status(folder: Folder = Path()) -> None:
    """Show a federation from one of its folders: its digest, who is there, what is ready, what is spent."""
    from ..nodes.federation.member import Member

    with failing_clearly():
        if _is_coordinators(folder):
            _say_members(_coordinator(folder), online=True)
            return
        member = Member.open(folder.expanduser())
        federation = member.pinned
        say(f"member    {member.kit.role} {member.kit.member!r} of {member.terms.name!r}, {member.card().fingerprint}")
        if federation is None:
            say("pinned    nothing yet: start it, with the digest that all operators have compared")
            return
        _say_digest(federation)
        say(f"now       {_published(member, federation)}")
        ledger = Path(getattr(member.operators(), "ledger", ""))
        if ledger.is_file():
            summary = read_ledger(ledger)
            local = f", whatever happens {_spent(summary.reserved_local_mu, summary.budget_local_mu)}"
            say(f"spent     {_spent(summary.reserved_mu, summary.budget_mu)}{local if member.terms.sums else ''}")
        elif ledger.name:
            say("spent     nothing: the first start makes the ledger")
    _take_part(member, Serving(), check=True)


@federation_cli.command()
def end(
    run: Annotated[Path, typer.Argument(metavar="FOLDER", help="The run's folder, on the server.", show_default=False)],
) -> None:
    """End a training after the round that is under way, on the server: the run completes with its model so far."""
    from ..runs.run_files import ask_to_end

    with failing_clearly():
        ask_to_end(run.expanduser())
    say(f"asked     {run}: the training ends after its round, with its model; what was reserved stays reserved")


def _is_coordinators(folder: Path) -> bool:
    return (folder.expanduser() / "members.json").exists()


def _coordinator(folder: Path) -> Coordinator:
    from ..nodes.federation.coordinator import Coordinator

    return Coordinator.open(folder.expanduser())


def _pin(member: Member, digest: str) -> Federation:
    """The federation to take part by: the published one if its operator compared its digest, else the pinned one."""
    pinned = member.pinned
    if pinned is not None and digest.replace(" ", "").lower() in ("", pinned.digest):
        member.check(pinned)
        return pinned
    found = member.published()
    member.check(found)
    if not digest:
        _say_digest(found)
        if not sys.stdin.isatty():
            raise ConfigurationError(
                "Expected --digest with the digest that all operators have read to each other, got none: compare it, "
                "by telephone say and not through the server."
            )
        typer.confirm("Do all other operators read the same digest, by their own means?", abort=True, err=True)
    member.pin(found, digest or found.digest)
    return found


def _published(member: Member, pinned: Federation) -> str:
    """Whether the server publishes what was pinned, in words."""
    try:
        digest = member.published().digest
    except ConfigurationError as error:
        return str(error)
    if digest == pinned.digest:
        return "the server publishes the same"
    return f"the server publishes {digest}: compare it, then start with --digest"


def _take_part(member: Member, how: Serving, check: bool, health_address: str = "", metrics_address: str = "") -> None:
    """Start, or check, what the member's operator's file describes."""
    take_part(
        "node" if member.file.name == "node.toml" else "helper",
        config=member.file,
        superlink="",
        root_certificates=None,
        auth_private_key=None,
        insecure=False,
        check=check,
        run_every=None,
        as_json=False,
        log_json=how.log_json,
        log_details=False,
        verbose=how.verbose,
        health_address=health_address,
        metrics_address=metrics_address,
    )


def _serve(folder: Path, health: str, metrics: str, *, log_json: bool, verbose: bool) -> None:
    serving = Serving(log_json, log_details=True, verbose=verbose)
    serving.start_log()
    with serving.failing():
        from ..nodes.federation.coordinator import MEMBERS_NAME, PUBLISHED_NAME
        from ..nodes.servers.watched_server import run_server
        from ..nodes.watching.health import Addresses

        made = _coordinator(folder.expanduser().absolute())
        members, published = made.folder / MEMBERS_NAME, made.folder / PUBLISHED_NAME
        _say_digest(made.federation)
        options, addresses = made.server_options(), Addresses(health, metrics)
        run_server(options, addresses, None, serving.journal(), made.owners, members, published)


def _say_digest(federation: Federation) -> None:
    from ..nodes.federation.coordinator import in_fours

    say(f"digest    {federation.digest}")
    say(f"in fours  {in_fours(federation.digest)}")


def _say_members(coordinator: Coordinator, *, online: bool = False) -> None:
    federation = coordinator.federation
    seen = coordinator.seen() if online else {}
    rows = [
        {
            "name": name,
            "is a": one.card.kind,
            "key": one.card.fingerprint,
            "is": seen[name].status if seen else "",
            "runs": str(len(seen[name].statements) or "") if seen else "",
            "spent in them": _reserved(seen[name]) if seen else "",
        }
        for name, one in sorted(coordinator.members.items())
    ]
    nothing = dict.fromkeys(("name", "is a", "key", "is", "runs", "spent in them"), "")
    rows += [{**nothing, "name": name, "is": "awaited"} for name in coordinator.awaited]
    say_table(f"Federation {federation.terms.name}", rows, ("name",))
    if federation.terms.sums and federation.roster is None:
        say("digest    none yet: the roster needs a machine and a helper")
        return
    _say_digest(federation)
    say("Every operator compares this digest with the others', by telephone say, and starts with it.")


def _reserved(seen: Seen) -> str:
    """What a machine's runs reserved by its own word."""
    mu = seen.total("mu-guaranteed")
    return _spent(mu, seen.last("mu-budget")) if seen.statements and math.isfinite(mu) else ""


def _spent(mu: float, budget: float) -> str:
    return f"mu {rounded_up(mu)} of {budget:.4g}" if math.isfinite(budget) else f"mu {rounded_up(mu)}"
