"""Checks of a node or a helper before it starts: its file, roster, runs, data, budget, disk and connection.

None alters anything.
"""

from __future__ import annotations

import hmac
import math
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...clients.adapters.per_sample_gradients import programs_of
from ...clients.nodes.client_file import NodeSums, SampleNode, UpdateNode
from ...clients.nodes.operators_file import operators_values
from ...clients.nodes.roster_files import pinned_digest, read_client_key, read_roster
from ...clients.private_client import PrivateClient
from ...clients.records.client_records import Records, file_items
from ...clients.records.schema import Schema
from ...privacy.accounting.loss import SumAssumption
from ...privacy.errors import ConfigurationError, MurmurflError
from ...privacy.files import exposure
from ...privacy.ledger.ledger_history import read_ledger
from ...privacy.ledger.sqlite import SQLiteLedger
from ...privacy.sums.roster import Roster
from ..nodes.connection import Connection, expiries, utc
from ..nodes.diagnosis import AHEAD_S, BEHIND_S, Diagnosis, diagnose
from ..nodes.ledger_views import DAY_S, Allowance, Costs, allowance_of
from ..nodes.node_app import OwnNode, client_of, describe, describe_helper, describe_own, own_app, read_node
from ..nodes.node_config import HelperConfig, NodeConfig
from ..nodes.run_admission import RunAdmissionPolicy
from ..settings.run_config import SECURE
from .federation.keys_and_cards import Card, cards_of

STATES = ("ok", "warning", "failed", "not tried")


@dataclass(frozen=True)
class Check:
    """The outcome of one check."""

    name: str
    state: str  # one of :data:`STATES`
    sentence: str  # for the operator; with ``failed`` it says what to do

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ConfigurationError(
                f"Expected one of {', '.join(STATES)}, got {self.state!r}.", kind="unknown-name", setting="state"
            )


def worst(checks: Sequence[Check]) -> str:
    """``failed`` if any check failed, else ``warning`` if any warned, else ``ok``."""
    states = {check.state for check in checks}
    return next((state for state in ("failed", "warning") if state in states), "ok")


_BYTES_OF_A_VALUE = 8
_VECTORS = 8  # sent and perhaps still to be acknowledged: up to four in the file, as many in its log
_LEAST_FREE = 16 << 20
_COMFORTABLE = 4
_ENOUGH = 0.9
"""Share of records that fit their schema below which a warning is due."""


@dataclass(frozen=True)
class Preflight:
    """The outcome of all checks."""

    description: str = ""  # of the client or helper; empty if it could not be made
    checks: list[Check] = field(default_factory=list)
    allowance: Allowance | None = None  # of a client that could be made

    @property
    def state(self) -> str:
        """The worst state of all checks."""
        return worst(self.checks)

    def document(self, now: float) -> dict[str, Any]:
        """Plain values for JSON; ``now`` in seconds since 1970."""
        left = self.allowance
        ends = None if left is None or left.days is None else now + left.days * DAY_S
        budget = None if left is None else {"runs": left.runs, "releases": left.releases, "until": ends}
        checks = [{"check": check.name, "state": check.state, "sentence": check.sentence} for check in self.checks]
        return {"state": self.state, "description": self.description, "checks": checks, "left": budget}


def check_node(
    path: Path, given: Mapping[str, Any], *, run_every_days: float | None = None, clock: Callable[[], float] = time.time
) -> Preflight:
    """Check everything that can be known of a node before it starts, at a run in ``run_every_days`` if that is said.

    Releases and spends nothing: ledger and mark stay as they are. The samples are read as when the node starts, and one
    sentence depends on what is in them: ``records`` says how many fit the schema and why the others do not. It is for
    the operator alone; neither it nor the exit code of ``--check`` belongs anywhere that a server can see. A node that
    starts says and does the same whatever it is. The SuperLink receives what
    :func:`~murmurfl.app.nodes.diagnosis.diagnose` sends.
    """
    try:
        config, runs = read_node(path, runs_kept=True), RunAdmissionPolicy.read(path)
    except (MurmurflError, OSError) as error:
        made = Preflight(checks=[Check("configuration", "failed", _told(error))])
    else:
        made = _client_checks(config, run_every_days, clock())
        made.checks.extend([*(_roster(path) if config.secure else []), *_data(config), *_runs(runs)])
    return Preflight(made.description, [*made.checks, *_connection(path, given, clock)], made.allowance)


def check_helper(path: Path, given: Mapping[str, Any], *, clock: Callable[[], float] = time.time) -> Preflight:
    """Check everything that can be known of a helper before it starts; parameters as :func:`check_node`.

    Opens nothing; the record stays as it is.
    """
    checks, description = [], ""
    try:
        config, runs = HelperConfig.read(path, runs_kept=True), RunAdmissionPolicy.read(path)
        description = describe_helper(config, config.opener())
        checks.append(Check("configuration", "ok", "Configuration, key, roster and record are in order."))
        checks += [*_roster(path), _disk([Path(config.record)], 0), *_runs(runs)]
    except (MurmurflError, OSError) as error:
        checks.append(Check("configuration", "failed", _told(error)))
    return Preflight(description, [*checks, *_connection(path, given, clock)])


def _roster(path: Path) -> list[Check]:
    """Whether file and roster agree: the pinned digest, this operator's own key, the cohort, the helpers."""
    try:
        found = list(check_operators_file(path))
    except (MurmurflError, OSError) as error:
        return [Check("roster", "failed", _told(error))]
    wrong = [one.text for one in found if not one.right]
    text = "; ".join(wrong or [one.text for one in found])
    return [Check("roster", "failed" if wrong else "ok", f"{text[0].upper()}{text[1:].removesuffix('.')}.")]


def _runs(runs: RunAdmissionPolicy | None) -> list[Check]:
    return [] if runs is None else [Check("runs", "ok", runs.sentence())]


def _data(config: NodeConfig | OwnNode) -> list[Check]:
    """Whether others may change or read the data files that the operator's file names; everybody may read a schema."""
    try:
        found = [exposure(file, "a data file") for file in _data_files(config)]
        schema = Path("" if isinstance(config, UpdateNode) else config.schema)
        if schema.is_file():
            kind, sentence = exposure(schema, "a schema")
            found.append((kind, sentence) if kind == "write" else ("", ""))
    except OSError as error:
        return [Check("data", "failed", f"Expected to look at the data files, got: {_told(error)}.")]
    for others_may, state in (("write", "failed"), ("read", "warning")):
        sentences = [sentence for kind, sentence in found if kind == others_may]
        if sentences:
            return [Check("data", state, " ".join(sentences))]
    return [Check("data", "ok", "Others may neither change nor read the data files.")] if found else []


def _data_files(config: NodeConfig | OwnNode) -> list[Path]:
    """Return the files that are there, of those that the operator's file names; in tables any text may be a path."""
    own = [] if isinstance(config, NodeConfig) else [*config.run_config.values(), *config.node_config.values()]
    files = config.data_files if isinstance(config, UpdateNode) else (config.samples,)
    named = [*files, *(value for value in own if isinstance(value, str))]
    return [Path(text) for text in dict.fromkeys(named) if os.path.isfile(text)]  # noqa: PTH113 - any text: none is an error


def _connection(path: Path, given: Mapping[str, Any], clock: Callable[[], float]) -> list[Check]:
    try:
        connection = Connection.of(path, given)
    except (MurmurflError, OSError) as error:
        first, *rest = not_tried("The connection comes first.")
        return [Check(first.name, "failed", _told(error)), *rest]
    if connection is None:
        return not_tried("No SuperLink is named, neither by --superlink nor in [connection] of the file.")
    return connection_checks(connection, clock=clock)


def _client_checks(config: NodeConfig | OwnNode, run_every_days: float | None, now: float) -> Preflight:
    """Return checks of the client, made as when the node starts: what would be refused then is refused here."""
    parameters, records, programs = 0, None, ""  # the size of an app's updates is unknown before the first
    try:
        if isinstance(config, UpdateNode):
            own_app(config)
            description, costs = describe_own(config), Costs.of_updates(config.policy(SQLiteLedger(config.ledger)))
        else:
            _, client = client_of(config)
            description, costs = describe(client), Costs.of_client(client)
            parameters, records = client.privatizer.num_parameters, _read(client, config)
            programs = programs_of(client.gradients)
        summary = read_ledger(config.ledger)
    except (MurmurflError, OSError) as error:
        # It may have failed for want of room.
        disk = _disk([Path(config.ledger)], 0)
        return Preflight(checks=[Check("configuration", "failed", _told(error)), disk])
    left = allowance_of(summary, costs, run_every_days, now)
    checks = [
        Check("configuration", "ok", "Configuration, data and ledger are in order."),
        *([Check("model", "ok", f"Computed in a process of its own, by hash: {programs}.")] if programs else []),
        *_records(records),
        Check("budget", left.state, left.sentence(now)),
        _disk([Path(config.ledger), Path(summary.mark)], parameters),
    ]
    return Preflight(description, checks, left)


def _read(client: PrivateClient, config: NodeConfig | SampleNode) -> Records | None:
    """Return the records that a client was made of; with owners, its file read again."""
    if isinstance(client.samples, Records):
        return client.samples
    if not config.samples:
        return None
    schema = Schema.read_file(Path(config.schema))
    return Records(file_items(Path(config.samples), schema), schema)


def _records(found: Records | None) -> list[Check]:
    """Return a check of how many records fit their schema; nothing without a schema, as with a built-in data set."""
    if found is None:
        return []
    if found.changes():
        return [
            Check(
                "records",
                "warning",
                f"{found.report()} Some of the first ones are others when they are read again, as random crops are: "
                "every round uses the first reading, and the ledger refuses other data after a restart. Give the same "
                "records every time.",
            )
        ]
    share = float(found.fits.mean()) if len(found) else 0.0
    if share >= _ENOUGH:
        return [Check("records", "ok", found.report())]
    state = "warning" if share else "failed"
    return [Check("records", state, f"{found.report()} Compare the schema with the data.")]


def _disk(files: Sequence[Path], num_parameters: int) -> Check:
    """Whether the folders can be written to, with room for what a run leaves in them."""
    needed = _LEAST_FREE + _VECTORS * _BYTES_OF_A_VALUE * num_parameters
    least = None
    for folder in dict.fromkeys(file.absolute().parent for file in files):
        try:
            with tempfile.TemporaryFile(dir=folder) as file:  # as a ledger's log and mark are written
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
            status = os.statvfs(folder)
        except OSError as error:
            return Check(
                "disk",
                "failed",
                f"Expected to write to {folder}, got: {error.strerror}. Nothing can be recorded there, so nothing is "
                "released; make room, or give the folder to the user this runs as.",
            )
        free = status.f_bavail * status.f_frsize
        if least is None or free < least[0]:
            least = free, folder
    if least is None:
        return Check("disk", "not tried", "There is no folder to look at.")
    free, folder = least
    sentence = f"{_size(free)} are free in {folder}; what was sent and is not acknowledged takes up to {_size(needed)}"
    if free < needed:
        return Check("disk", "failed", f"{sentence}: make room.")
    return Check("disk", "warning" if free < _COMFORTABLE * needed else "ok", f"{sentence}.")


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def _told(error: Exception) -> str:
    """Return an error in one line for the operator."""
    if isinstance(error, OSError) and not isinstance(error, MurmurflError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    return " ".join(str(error).split())


_NO_START = "so the node does not start"
_NO_HELP = "so the helper does not start, and no sum is opened"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at, and whether it is right."""

    right: bool
    text: str  # what was found and, if it is wrong, its effect and what to do


def check_operators_file(path: Path) -> Iterator[Finding]:
    """Check everything that the file of a client or a helper states of a roster; changes nothing.

    A file in order shows that *this* operator's key is in the pinned roster. Once every operator has seen that for the
    same digest, each key belongs to the operator with its name: nobody has put a key in somebody else's place.
    """
    if "helper" in operators_values(path.expanduser()):
        yield from _helper_findings(HelperConfig.read(path, runs_kept=True))
        return
    node = read_node(path, runs_kept=True)
    sums = node.trust
    if not isinstance(sums, NodeSums):
        yield Finding(
            False,
            f"trust is {sums.kind or 'not set'!r}, so client {node.client!r} sends single releases and needs no "
            f"roster: set trust = {SECURE!r} to take part in sums only.",
        )
        return
    roster, found = _pinned(sums.roster, sums.roster_digest, _NO_START)
    yield found
    if roster is None:
        return
    try:
        yield _own_card(Card.of_client(node.client, read_client_key(Path(sums.signing_key))), roster, _NO_START)
    except MurmurflError as error:
        yield Finding(False, _because(error, _NO_START))
    yield _cohort(node.sums, len(roster.clients))
    names = ", ".join(repr(name) for name in roster.helper_names)
    if len(roster.helper_names) == 1:
        yield Finding(True, f"one helper, {names}: that it does not work with the server rests on it alone")
    else:
        text = f"{len(roster.helper_names)} helpers, {names}: one of them must not work with the server"
        yield Finding(True, text)


def _helper_findings(config: HelperConfig) -> Iterator[Finding]:
    roster, found = _pinned(config.roster, config.roster_digest, _NO_HELP)
    yield found
    if roster is None:
        return
    try:
        yield _own_card(Card.of_helper(config.helper, config.keys()), roster, _NO_HELP)
        config.opener()
        yield Finding(True, f"the record at {config.record} is this key's and can be written")
    except MurmurflError as error:
        yield Finding(False, _because(error, _NO_HELP))


def _pinned(path: str, digest: str, consequence: str) -> tuple[Roster | None, Finding]:
    """Return the roster, if it can be read and has the pinned digest."""
    try:
        roster, pinned = read_roster(Path(path), None), pinned_digest(digest)
    except MurmurflError as error:
        return None, Finding(False, _because(error, consequence))
    if hmac.compare_digest(roster.digest.encode(), pinned.encode()):
        return roster, Finding(True, f"roster-digest is that of {path}")
    return None, Finding(
        False,
        f"the roster at {path} has the digest {roster.digest}, and roster-digest pins {digest}, {consequence}. One of "
        "them is old, or somebody changed the roster: ask the other operators what theirs is, by your own means, and "
        "pin that one.",
    )


def _because(error: MurmurflError, consequence: str) -> str:
    return f"{error} {consequence[0].upper()}{consequence[1:]}."


def _own_card(own: Card, roster: Roster, consequence: str) -> Finding:
    """Whether the roster has this operator's key under this operator's name."""
    known = next((card for card in cards_of(roster) if card.name == own.name), None)
    if known == own:
        return Finding(True, f"{own.kind} {own.name!r} stands in the roster with its own key, {own.fingerprint}")
    if known is None:
        return Finding(
            False,
            f"the roster has no {own.kind} {own.name!r}, {consequence}: send its card to whoever makes the roster. All "
            "operators then pin the new digest.",
        )
    if known.kind != own.kind:
        return Finding(False, f"the roster has a {known.kind} of the name {own.name!r}, no {own.kind}, {consequence}.")
    return Finding(
        False,
        f"the roster has {own.kind} {own.name!r} with the key {known.fingerprint}, and this key is {own.fingerprint}, "
        f"{consequence}. Either this is an old or another key file, or somebody exchanged your card: with a key of "
        "theirs in your place, they would count as you. Tell the other operators before anybody trains.",
    )


def _cohort(sums: SumAssumption, clients: int) -> Finding:
    least, honest = sums.min_cohort, sums.min_honest
    if least > clients:
        return Finding(
            False,
            f"trust.min-cohort = {least}, and the roster has {clients} clients, {_NO_START}: no sum could ever be "
            "opened.",
        )
    colluders = least - honest
    return Finding(
        True,
        f"trust.min-cohort = {least} of the roster's {clients} clients: {colluders} of a sum may work with the "
        f"server, {honest} must not; {clients - least} may be missing from a round",
    )


NAMES = ("connection", "certificate", "clock", "key", "commands")
"""The checks, in the order in which a SuperLink makes them."""

_DAYS_LEFT = 30.0


def not_tried(reason: str) -> list[Check]:
    """All checks of a connection as not tried, for one reason."""
    return [Check(name, "not tried", reason) for name in NAMES]


def connection_checks(
    connection: Connection,
    *,
    trying: Callable[..., Diagnosis] = diagnose,
    clock: Callable[[], float] = time.time,
) -> list[Check]:
    """Try a connection and report each step; a running node with the same key keeps its session."""
    found = trying(connection)
    if found.cause == "key-unusable" and connection.private_key is not None:  # the rest can be tried without it
        rest = connection_checks(replace(connection, private_key=None), trying=trying, clock=clock)
        at = NAMES.index("key")
        return [*rest[:at], Check("key", "failed", found.sentence), *rest[at + 1 :]]
    failed = None
    if found.cause != "reached":
        failed = next((name for name in NAMES if found.cause.startswith(name)), "connection")
    reached = NAMES.index(failed) if failed else len(NAMES)
    passed = [
        Check("connection", "ok", f"A SuperLink answers at {connection.superlink}."),
        _certificate(connection, found, clock()),
        _clock(found),
        _key(connection),
        _commands(connection, found),
    ][:reached]
    if failed is None:
        return passed
    rest = [Check(name, "not tried", f"The {failed} comes first.") for name in NAMES[reached + 1 :]]
    return [*passed, Check(failed, "failed", found.sentence), *rest]


def _certificate(connection: Connection, found: Diagnosis, now: float) -> Check:
    if connection.insecure:
        return Check("certificate", "warning", "There is none: without TLS anybody in between reads and answers.")
    ends = [] if found.certificate_ends is None else [found.certificate_ends]
    ends += sorted(expiries(connection.root_certificates))[-1:]
    if not ends:
        return Check("certificate", "ok", "The SuperLink's certificate is believed.")
    days = math.floor((min(ends) - now) / DAY_S)
    whose = "The SuperLink's certificate" if min(ends) == found.certificate_ends else "Its authority's certificate"
    sentence = f"{whose} is valid until {utc(min(ends))}, for {days} more day{'s' * (days != 1)}"
    if days >= _DAYS_LEFT:
        return Check("certificate", "ok", f"{sentence}.")
    return Check("certificate", "warning", f"{sentence}: ask the server's operator for the next one now.")


def _clock(found: Diagnosis) -> Check:
    allowed = f"(up to {AHEAD_S:.0f} s ahead and {BEHIND_S:.0f} s behind are allowed)"
    if found.ahead_s is None:
        return Check("clock", "ok", f"The SuperLink accepts this computer's clock {allowed}.")
    side = "ahead of" if found.ahead_s > 0 else "behind"
    sentence = f"This computer's clock is {abs(found.ahead_s):.0f} s {side} the SuperLink's, to within 2 s {allowed}"
    if found.ahead_s > AHEAD_S - 1 or found.ahead_s < -BEHIND_S / 2:
        return Check("clock", "warning", f"{sentence}: set the clock (NTP) of whichever is wrong.")
    return Check("clock", "ok", f"{sentence}.")


def _key(connection: Connection) -> Check:
    path = connection.private_key
    if path is None:
        sentence = "The SuperLink takes any node, and this one has no key: any client may take part."
        return Check("key", "warning", sentence)
    if os.name == "posix" and Path(path).stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return Check("key", "warning", f"It is registered, but others may read it: run `chmod 600 {path}`.")
    return Check("key", "ok", f"The SuperLink knows the key at {path}.")


def _commands(connection: Connection, found: Diagnosis) -> Check:
    if not found.takes_commands:
        return Check("commands", "ok", "The SuperLink takes none from a client without a login.")
    return Check(
        "commands",
        "warning",
        f"Whoever reaches {connection.superlink} may submit runs there and run code as the server: ask its operator "
        "for `murmurfl server --owners`.",
    )
