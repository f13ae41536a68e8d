"""The coordinator of a federation: its folder, who is in it, and what its server is started with.

The folder holds the server's certificates and keys, the key of the owner who submits runs, a kit for each member, and
what members sent back. No private key of a member is ever in it. The server publishes the federation's document to
whoever has a kit, and registers the node keys of accepted members.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...clients import Schema
from ...clients.adapters.sample_methods import MU2
from ...privacy import ConfigurationError, MurmurflError
from ...privacy.files import write_private
from ...privacy.permits import OwnerKey
from ...privacy.setting import Value
from ...privacy.sums.roster import MOST_HELPERS
from ..settings.trust_settings import SECURE, cohort_floor
from .cards import roster_of
from .deployment import make_server_certificates
from .federation_files import (
    HELPER,
    MACHINE,
    Federation,
    Joining,
    Kit,
    Terms,
    public_node_key,
    toml_lines,
    write_document,
)
from .owner_key import write_owner_key
from .servers.server_health import is_loopback

FEDERATION_NAME, MEMBERS_NAME, PUBLISHED_NAME = "federation.json", "members.json", "published"
_KITS, _OWNER_KEY, _OWNERS, _RUN = "kits", "owner.key", "owners", "run.settings"
_YEAR = datetime.timedelta(days=365)
_MOST_MEMBERS = 10_000
DEFAULTS: dict[str, Value] = {
    "strategy": "mu2",
    "model": "softmax",
    "batch-size": 32,
    "max-participations": 14,
    "mu": 2.0,
    "delta": 1e-5,
}
"""What members are proposed where ``--set`` says nothing else."""
_HONEST = 2
_DIGITS = 3


@dataclass(frozen=True)
class Seen:
    """A member, as its server knows it."""

    status: str  # ``online``, ``offline``, ``registered``, ``not registered`` or ``unknown``
    statements: Sequence[Mapping[str, Any]] = ()  # its own, one a run whose result lies on this computer

    def total(self, name: str) -> float:
        """The sum in squares of one figure of the statements; infinite where it is not said."""
        return math.hypot(*(_number(one.get(name)) for one in self.statements))

    def last(self, name: str) -> float:
        """A figure of the last statement; infinite where it is not said."""
        return _number(self.statements[-1].get(name)) if self.statements else math.inf


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.inf


def _statements(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """What machines said in the result of a run; nothing where none can be read."""
    from ..runs.outcome import Outcome

    try:
        return (Outcome.read(folder).machines if folder.is_absolute() else None) or {}
    except (MurmurflError, OSError):
        return {}


@dataclass(frozen=True)
class Coordinator:
    """A coordinator's folder."""

    folder: Path
    members: dict[str, Joining] = field(default_factory=dict)  # accepted
    left: tuple[str, ...] = ()  # node keys that are no member's any more
    awaited: tuple[str, ...] = ()  # names of kits that nobody has answered

    @classmethod
    def open(cls, folder: Path) -> Coordinator:
        """The coordinator of a folder; ConfigurationError if it is none's."""
        path = folder / MEMBERS_NAME
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            members = [Joining.from_document(one, f"in {path}") for one in document["members"]]
            return cls(
                folder, {one.card.name: one for one in members}, tuple(document["left"]), tuple(document["awaited"])
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(
                f"Expected a coordinator's folder at {folder}, made by `murmurfl federation new`, got none."
            ) from error

    @property
    def federation(self) -> Federation:
        """What all members hold alike."""
        return Federation.read(self.folder / FEDERATION_NAME)

    def seen(self) -> dict[str, Seen]:
        """What the server says of each member's node, and what each machine said in the results of its runs."""
        from flwr.common.serde import user_config_from_proto

        from .owner_key import read_owner_key
        from .servers.gate import server_name
        from .servers.own_server import Control, ControlError, node_key_bytes

        path = self.folder / _OWNER_KEY
        try:
            key, server = read_owner_key(path), server_name(self.folder / "server.pem")
            control = Control(self.federation.terms.address, self.folder / "ca.crt", server, key)
            nodes, runs = control.nodes(), control.runs().values()
        except (ControlError, ConfigurationError):
            return {name: Seen("unknown") for name in self.members}
        status = {bytes(node.public_key): str(node.status) for node in nodes}
        places = [user_config_from_proto(run.override_config) for run in runs]
        # Once each: a run that was killed and resumed is two to Flower.
        folders = dict.fromkeys(Path(str(one.get("out-dir", "")), str(one.get("run-name", ""))) for one in places)
        said = [_statements(folder) for folder in folders]
        return {
            name: Seen(status.get(node_key_bytes(one.node), "not registered"), [of[name] for of in said if name in of])
            for name, one in self.members.items()
        }

    def server_options(self) -> list[str]:
        """Options of ``flower-superlink``."""
        host, _, port = self.federation.terms.address.rpartition(":")
        reached = "127.0.0.1" if is_loopback(host.strip("[]")) else "0.0.0.0"  # noqa: S104 - members call from elsewhere
        options = ["--host", reached, "--port", port]
        options += ["--database", str(self.folder / "superlink.db"), "--enable-supernode-auth"]
        files = ("--ssl-ca-certfile", "ca.crt"), ("--ssl-certfile", "server.pem"), ("--ssl-keyfile", "server.key")
        return [*options, *(word for option, name in files for word in (option, str(self.folder / name)))]

    @property
    def owners(self) -> Path:
        """The list of those who may command the server."""
        return self.folder / _OWNERS

    def accept(self, answers: Sequence[Joining]) -> Coordinator:
        """Take in members, or the new keys of members; nothing is changed if one of them is refused.

        Raises
        ------
        ConfigurationError
            If an answer is to other terms, or two members have one name or one key.
        """
        terms = self.federation.terms
        if twice := {
            one.card.name for one in answers if sum(other.card.name == one.card.name for other in answers) > 1
        }:
            raise ConfigurationError(f"Expected one answer of each member, got two of {', '.join(sorted(twice))}.")
        for one in answers:
            if one.terms != terms.digest:
                raise ConfigurationError(
                    f"Expected an answer to the terms of federation {terms.name!r}, got one of {one.card.name!r} to "
                    f"others (of {one.federation!r}): send its operator the kit again, and have it join again."
                )
        members = {**self.members, **{one.card.name: one for one in answers}}
        return self._changed(members, [self.members[name].node for name in members.keys() & self.members.keys()])

    def leave(self, name: str) -> Coordinator:
        """Take a member out; ConfigurationError if there is none of this name, or too few would be left."""
        if name not in self.members:
            raise ConfigurationError(
                f"Expected a member's name, one of {', '.join(sorted(self.members)) or 'none'}, got {name!r}."
            )
        rest = {other: one for other, one in self.members.items() if other != name}
        return self._changed(rest, [self.members[name].node])

    def _changed(self, members: Mapping[str, Joining], left: Sequence[str]) -> Coordinator:
        keys = [public_node_key(one.node).public_numbers() for one in members.values()]
        if len(set(keys)) < len(keys):
            raise ConfigurationError("Expected a node key of its own for each member, got one twice: join again.")
        terms, cards = self.federation.terms, [one.card for one in members.values()]
        kinds = {card.kind for card in cards}
        roster = roster_of(cards) if terms.sums and kinds == {MACHINE, HELPER} else None
        machines = sum(card.kind == MACHINE for card in cards)
        now = {one.node for one in members.values()}
        gone = tuple(key for key in dict.fromkeys([*self.left, *left]) if key not in now)
        awaited = tuple(name for name in self.awaited if name not in members)
        done = Coordinator(self.folder, dict(members), gone, awaited)
        self._publish(Federation(terms, roster))
        _write_members(done)
        _write_run(self.folder, terms, machines, len(cards) - machines)
        return done

    def _publish(self, federation: Federation) -> None:
        write_document(self.folder / FEDERATION_NAME, federation.document)
        write_document(self.folder / PUBLISHED_NAME / f"{federation.terms.digest}.json", federation.document)

    def renew_certificate(self) -> None:
        """Make a new certificate of the server, with its key and its authority, for another year."""
        _certificates(self.folder, self.federation.terms.address)


def new_federation(
    folder: Path, *, machines: int, helpers: int, schema: Path, address: str, settings: Mapping[str, Value]
) -> Coordinator:
    """Make the folder of a federation, which is named after it: certificates, keys of the server and of an owner, kits.

    Raises
    ------
    ConfigurationError
        If there is such a folder, or the terms are impossible; nothing was made.
    """
    if not (machines >= 1 and 0 <= helpers <= MOST_HELPERS and machines + helpers <= _MOST_MEMBERS):
        raise ConfigurationError(
            f"Expected 1 or more machines and 0 to {MOST_HELPERS} helpers, got {machines} and {helpers}."
        )
    records = Schema.read_file(schema)
    records.check_for_real_nodes()
    proposed = proposed_settings(records, machines, helpers, settings)
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigurationError(
            f"Expected to make the folder {folder}, got: {error.strerror}. Choose another name, or go on with the "
            "federation that is there."
        ) from error
    try:
        authority = _certificates(folder, address)
        terms = Terms(folder.name, address, authority, schema.expanduser().read_text(encoding="utf-8"), proposed)
    except ConfigurationError:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        raise
    key = OwnerKey.generate()
    write_owner_key(folder / _OWNER_KEY, key)
    write_private(folder / _OWNERS, f"{key.public.hex()} owner\n")
    for name in (_KITS, PUBLISHED_NAME, "flower"):
        (folder / name).mkdir(mode=0o700)
    connection = {"address": address, "root-certificates": str((folder / "ca.crt").absolute())}
    write_private(
        folder / "flower" / "config.toml",
        f'[superlink]\ndefault = "{folder.name}"\n\n[superlink.{json.dumps(folder.name)}]\n{toml_lines(connection)}',
    )
    places = [
        (f"{role}-{i}", role) for role, count in ((MACHINE, machines), (HELPER, helpers)) for i in range(1, count + 1)
    ]
    for name, role in places:
        write_document(folder / _KITS / f"{name}.kit", Kit(name, role, terms).document)
    made = Coordinator(folder, awaited=tuple(name for name, _ in places))
    made._publish(Federation(terms, None))
    _write_members(made)
    _write_run(folder, terms, machines, helpers)
    return made


def proposed_settings(records: Schema, machines: int, helpers: int, settings: Mapping[str, Value]) -> dict[str, Value]:
    """What members are proposed: a clip in units of the schema's bound, and sums where there are helpers."""
    made = dict(DEFAULTS)
    if math.isfinite(records.norm_bound):
        made["clip-norm"] = float(f"{MU2.clip * math.hypot(records.norm_bound, 1.0):.{_DIGITS}g}")
    elif "clip-norm" not in settings:
        raise ConfigurationError(
            "Expected --set clip-norm=VALUE for a schema that bounds no record, got none: gradients are cut to it."
        )
    if helpers:
        least = int(settings.get("min-cohort", 0)) or cohort_floor(machines, 0)
        made |= {"trust": SECURE, "min-cohort": least, "min-honest": min(_HONEST, least)}
    return {**made, **settings}


def _certificates(folder: Path, address: str) -> str:
    host = address.rpartition(":")[0].strip("[]")
    made = make_server_certificates(folder, host, lifetime=_YEAR, keep_authority=True)
    return made.authority.read_text(encoding="ascii")


def _write_members(made: Coordinator) -> None:
    members: list[dict[str, Any]] = [one.document for one in made.members.values()]
    write_document(
        made.folder / MEMBERS_NAME, {"members": members, "left": list(made.left), "awaited": list(made.awaited)}
    )


def _write_run(folder: Path, terms: Terms, machines: int, helpers: int) -> None:
    """Write what ``flwr run -c`` is told of this federation."""
    own = {name: value for name, value in terms.settings.items() if name != "min-honest"}
    run: dict[str, Value] = {"num-clients": machines, "clients-per-round": machines, **own}
    run["schema"] = terms.records.digest
    if terms.sums:
        floor = int(terms.settings["min-cohort"])
        run |= {"helpers": helpers, "colluders": floor - int(terms.settings["min-honest"])}
    # One line for `flwr run -c`, which takes no file beside other settings.
    write_private(folder / _RUN, toml_lines(run).replace(" = ", "=").replace("\n", " ").strip() + "\n")
