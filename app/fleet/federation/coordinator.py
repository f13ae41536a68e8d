"""The public documents of a federation, and its coordinator, who makes and publishes them.

Kits for members, their answers, and what all of them compare are JSON without a secret. Nobody is believed for having
sent one: the digest of the :class:`Federation` covers what a member holds of it, and people compare it by their own
means.

The coordinator's folder holds the server's certificates and keys, the key of the owner who submits runs, a kit for each
member, and what members sent back; no private key of a member is ever in it. The server publishes the federation's
document to whoever has a kit, and registers the node keys of accepted members.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from ....clients.records.schema import Schema
from ....privacy.errors import ConfigurationError, MurmurflError, check_format
from ....privacy.files import replace_durably, write_private
from ....privacy.permits import OwnerKey
from ....privacy.setting import Value
from ....privacy.sums.roster import MOST_HELPERS, Roster, check_name
from ...engines.loopback import toml_document
from ...nodes.connection import Connection
from ...nodes.node_config import NodeConfig
from ...settings.run_config import SECURE
from ..servers.gate import is_loopback
from .keys_and_cards import Card, in_fours, make_server_certificates, roster_of, write_owner_key
from .proposal import DEFAULT_ROWS, SETTINGS, counts, propose, run_text, with_counts

CLIENT, HELPER = "client", "helper"

LARGEST_DOCUMENT = 16 << 20
"""Bytes of a document: nothing longer is read."""

_FORMAT = 1
_SHOWN_DIGITS = 16
_LONGEST_NODE_KEY = 1024
"""Characters of a node's public key as OpenSSH writes it, with its comment; Flower's curves need 300."""
_ANSWERED = ("federation", "terms", "node")


def digest_of(document: Any) -> str:
    """SHA-256 of a JSON document, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Terms:
    """Terms of a federation, as its coordinator proposes them.

    An operator takes the terms by starting a member with them. They fill the operator's own file, where each can be
    changed; none is read from a message later.
    """

    name: str
    address: str  # of the server, HOST:PORT
    authority: str  # the certificate, in PEM form, that the server's is checked against
    schema: str  # TOML: what a record is
    settings: Mapping[str, Value]

    def __post_init__(self) -> None:
        check_plain(self.name, "a federation's name")
        Connection(self.address)
        try:
            x509.load_pem_x509_certificate(self.authority.encode())
        except ValueError as error:
            raise ConfigurationError(
                "Expected the server's authority as a certificate in PEM form, got none.", kind="malformed"
            ) from error
        self.records.check_for_real_nodes()
        self._check_settings()

    def _check_settings(self) -> None:
        unknown = sorted(set(self.settings) - set(SETTINGS))
        own_code = [name for name, value in self.settings.items() if isinstance(value, str) and ":" in value]
        if unknown or own_code:
            raise ConfigurationError(
                f"Expected settings among {', '.join(SETTINGS)}, and built-in names, got "
                f"{', '.join(map(repr, unknown or own_code))}: what else a client has is its operator's to say.",
                kind="unknown-name",
                setting="settings",
            )
        NodeConfig.from_mapping(self.node_values("client", "0" * 64))

    @property
    def records(self) -> Schema:
        """The schema of the records."""
        return Schema.read_text(self.schema, f"the schema of federation {self.name!r}")

    @property
    def sums(self) -> bool:
        """Whether clients release under masks, which helpers take off sums."""
        return self.settings.get("trust") == SECURE

    def node_values(self, client: str, roster_digest: str) -> dict[str, Value]:
        """Top-level keys of a client's file, with placeholders for what only its operator knows."""
        sums: dict[str, Value] = {}
        if self.sums:
            sums = {"signing-key": "roster.key", "roster": "roster.json", "roster-digest": roster_digest}
        own: dict[str, Value] = {"samples": "records.csv", "schema": "schema.toml", "num-records": 1}
        return {"client": client, "ledger": "ledger.sqlite", **own, **sums, **self.settings}

    @property
    def document(self) -> dict[str, Any]:
        """The terms as plain values, for JSON."""
        return {**vars(self), "settings": dict(self.settings)}

    @property
    def digest(self) -> str:
        """SHA-256 of the terms, 64 hexadecimal digits; a member's answer names it."""
        return digest_of(self.document)

    @classmethod
    def from_document(cls, document: Any) -> Terms:
        """Terms from what :attr:`document` gave."""
        texts = ("name", "address", "authority", "schema")
        right = isinstance(document, dict) and document.keys() == {*texts, "settings"}
        right = right and all(isinstance(document[name], str) for name in texts)
        if not right or not isinstance(document["settings"], dict):
            raise ConfigurationError("Expected the terms of a federation, got something else.", kind="malformed")
        for value in document["settings"].values():
            if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and math.isnan(value)):
                raise ConfigurationError(
                    "Expected settings that are texts, numbers or booleans, got something else.", kind="wrong-type"
                )
        return cls(**document)


@dataclass(frozen=True)
class Invitation:
    """A member's invitation: the terms, its name and its role."""

    member: str
    role: str  # :data:`CLIENT` or :data:`HELPER`
    terms: Terms

    KIND = "murmurfl-kit"

    def __post_init__(self) -> None:
        check_plain(self.member, "a member's name")
        if self.role not in (CLIENT, HELPER):
            raise ConfigurationError(
                f"Expected a kit for a client or a helper, got one for {self.role!r}.", kind="unknown-name"
            )

    @property
    def document(self) -> dict[str, Any]:
        """The kit as plain values, for JSON."""
        return {self.KIND: _FORMAT, "member": self.member, "role": self.role, "terms": self.terms.document}

    @classmethod
    def read(cls, path: Path) -> Invitation:
        """Read a kit; ConfigurationError if it is none."""
        document = read_document(path, cls.KIND, {"member", "role", "terms"})
        return cls(document["member"], document["role"], Terms.from_document(document["terms"]))


@dataclass(frozen=True)
class JoinRequest:
    """Answer of a member: the public halves of its keys."""

    federation: str
    terms: str  # digest
    node: str  # the public key of the node, as OpenSSH writes it
    card: Card

    KIND = "murmurfl-joining"

    def __post_init__(self) -> None:
        # Everything in an answer stands in the document that all members read: none may make it longer than they take.
        check_plain(self.federation, "a federation's name")
        check_plain(self.card.name, "a member's name")
        if len(self.node) > _LONGEST_NODE_KEY or not self.node.isprintable():
            raise ConfigurationError(
                "Expected a node's public key in one short line, got something else.", kind="malformed"
            )
        public_node_key(self.node)

    @property
    def fingerprint(self) -> str:
        """Sixteen digits by which people tell members' keys apart: all keys count, the node's too."""
        keys = public_node_key(self.node).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        return in_fours(hashlib.sha256(self.card.sealing + self.card.signing + keys).hexdigest()[:_SHOWN_DIGITS])

    @property
    def document(self) -> dict[str, Any]:
        """The answer as plain values, for JSON."""
        return {self.KIND: _FORMAT, **vars(self), "card": self.card.document}

    @classmethod
    def read(cls, path: Path) -> JoinRequest:
        """Read an answer; ConfigurationError if it is none."""
        document = read_document(path, cls.KIND, {"federation", "terms", "node", "card"})
        return cls.from_document(document, f"in {path}")

    @classmethod
    def from_document(cls, document: Mapping[str, Any], where: str) -> JoinRequest:
        """Return an answer from what :attr:`document` gave."""
        texts = {name: text for name in _ANSWERED if isinstance(text := document.get(name), str)}
        if texts.keys() != set(_ANSWERED) or "card" not in document:
            raise ConfigurationError(
                f"Expected what a member sends back {where}, got something else.", kind="malformed"
            )
        return cls(**texts, card=Card.from_document(document["card"], where))


@dataclass(frozen=True)
class Federation:
    """State that all members share: the terms, and all members with all of their public keys.

    Once all operators have read the same digest to each other, all of them have the same server, schema and settings
    before them, and each member's keys are those that its operator found there: nobody else was believed.
    """

    terms: Terms
    members: tuple[JoinRequest, ...]  # by name

    KIND = "murmurfl-federation"
    PARTS = ("terms", "members")

    def __post_init__(self) -> None:
        names = [one.card.name for one in self.members]
        if names != sorted(set(names)) or any(one.terms != self.terms.digest for one in self.members):
            raise ConfigurationError(
                "Expected members by name, each once and by the federation's terms, got others: ask for the document "
                "again.",
                kind="mismatch",
            )

    @cached_property
    def roster(self) -> Roster | None:
        """Participants in secure aggregation; None without it, and until both a client and a helper are in."""
        cards = [one.card for one in self.members]
        whole = self.terms.sums and {card.kind for card in cards} == {CLIENT, HELPER}
        return roster_of(cards) if whole else None

    @property
    def document(self) -> dict[str, Any]:
        """The federation as plain values, for JSON."""
        return {self.KIND: _FORMAT, "terms": self.terms.document, "members": [one.document for one in self.members]}

    @property
    def digest(self) -> str:
        """The digest that operators compare, 64 hexadecimal digits."""
        return digest_of(self.document)

    @classmethod
    def read(cls, path: Path) -> Federation:
        """Read a federation's document; ConfigurationError if it is none."""
        return cls.from_document(read_document(path, cls.KIND, set(cls.PARTS)), f"in {path}")

    @classmethod
    def from_document(cls, document: Mapping[str, Any], where: str) -> Federation:
        """Return the federation of what :attr:`document` gave; ``where`` it stood, for errors."""
        members = document["members"]
        if not isinstance(members, list) or not all(isinstance(one, dict) for one in members):
            raise ConfigurationError(f"Expected a federation's members {where}, got something else.", kind="malformed")
        read = (JoinRequest.from_document(one, where) for one in members)
        return cls(Terms.from_document(document["terms"]), tuple(read))


def check_plain(name: Any, what: str) -> None:
    """Refuse a name that no file could have, or that looks like another one in some other alphabet.

    People tell members apart by names on screens and by telephone: letters of several alphabets look alike.
    """
    check_name(name)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigurationError(
            f"Expected {what} of Latin letters without accents, digits, '-', '_' and '.', a letter or digit first, got "
            f"{name!a}: characters of other alphabets look like these.",
            kind="malformed",
        )


def looks_of(name: str) -> str:
    """Return a name as eyes and ears take it: equal for names that are easily mistaken for each other."""
    alike = name.lower().translate(str.maketrans({"0": "o", "1": "l", "i": "l", "_": "-", ".": "-"}))
    return re.sub("-+", "-", alike.replace("rn", "m").replace("vv", "w")).rstrip("-")


def public_node_key(text: str) -> ec.EllipticCurvePublicKey:
    """Return a node's public key from OpenSSH's line; ConfigurationError if it is none that Flower takes."""
    try:
        found = load_ssh_public_key(text.encode())
    except ValueError:
        found = None
    if not isinstance(found, ec.EllipticCurvePublicKey):
        raise ConfigurationError("Expected a node's public key of kind ecdsa, got something else.", kind="wrong-type")
    return found


def toml_lines(values: Mapping[str, Value]) -> str:
    """Plain values as TOML for people: bare keys."""
    return re.sub(r'(?m)^"([A-Za-z0-9_.-]+)" =', r"\1 =", toml_document(values))


def read_document(path: Path, kind: str, keys: set[str]) -> dict[str, Any]:
    """Read a document of a federation from a file, up to a fixed length."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_DOCUMENT + 1)
    except OSError as error:
        raise ConfigurationError(
            f"Expected a {kind} document at {path}, got: {error.strerror or error}.", kind="unreadable"
        ) from error
    return parsed(content, kind, keys, f"at {path}")


def parsed(content: bytes, kind: str, keys: set[str], where: str) -> dict[str, Any]:
    """Return a document of a federation from its bytes."""
    try:
        document: Any = json.loads(content) if len(content) <= LARGEST_DOCUMENT else None
    except (ValueError, RecursionError):
        document = None
    check_format(f"a {kind} document {where}", document, kind, _FORMAT)
    if not isinstance(document, dict) or document.keys() != {kind, *keys}:
        raise ConfigurationError(
            f"Expected a {kind} document of format {_FORMAT} {where}, got something else: ask for the file again.",
            kind="other-format",
        )
    return document


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a public document, whole or not at all, to a file that only its owner may change, whatever the umask."""
    replace_durably(path, json.dumps(document, indent=1).encode() + b"\n", error=ConfigurationError)


FEDERATION_NAME, MEMBERS_NAME, PUBLISHED_NAME = "federation.json", "members.json", "published"
RUN_NAME = "run.settings"
_KITS, _OWNER_KEY, _OWNERS, _SCHEMA = "kits", "owner.key", "owners", "schema.toml"
_YEAR = datetime.timedelta(days=365)
MOST_MEMBERS = 10_000


@dataclass(frozen=True)
class Seen:
    """A member, as its server knows it."""

    status: str  # ``online``, ``offline``, ``registered``, ``not registered`` or ``unknown``
    statements: Sequence[Mapping[str, Any]] = ()  # its own, one a run whose result lies on this computer
    silent: int = 0  # such runs that it took part in and whose end it missed

    def total(self, name: str) -> float:
        """Root of the sum of squares of one figure of the statements; infinite where one lacks it."""
        return math.hypot(*(_number(one.get(name)) for one in self.statements))

    def last(self, name: str) -> float:
        """Return a figure of the last statement; infinite where it lacks it."""
        return _number(self.statements[-1].get(name)) if self.statements else math.inf


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.inf


def _statements(folder: Path) -> Mapping[str, Mapping[str, Any] | None]:
    """Return what each client that a run asked says in its result, None where it was not there at the end.

    Empty if there is no result that can be read.
    """
    from ...runs.outcome import Outcome, read_json
    from ...runs.result import CLIENTS_NAME

    try:
        statements = (Outcome.read(folder).clients if folder.is_absolute() else None) or {}
        rounds = read_json(folder / CLIENTS_NAME)["rounds"].values()
        return {**dict.fromkeys(name for asked in rounds for name in asked), **statements}
    except (MurmurflError, OSError, KeyError, AttributeError, TypeError):
        return {}


@dataclass(frozen=True)
class Coordinator:
    """A coordinator's folder."""

    folder: Path
    members: dict[str, JoinRequest] = field(default_factory=dict)  # accepted
    left: tuple[str, ...] = ()  # node keys that are no member's any more
    awaited: tuple[str, ...] = ()  # names of kits that nobody has answered
    num_records: int = DEFAULT_ROWS  # records of each client that the training was planned for
    counts: Mapping[str, int] = field(default_factory=dict)  # as they were last written into the run settings
    changes: tuple[str, ...] = ()  # what the last change did that its operator must know of, in lines

    @classmethod
    def open(cls, folder: Path) -> Coordinator:
        """Return the coordinator of a folder; ConfigurationError if it is none's."""
        path = folder / MEMBERS_NAME
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            members = [JoinRequest.from_document(one, f"in {path}") for one in document["members"]]
            return cls(
                folder,
                {one.card.name: one for one in members},
                tuple(document["left"]),
                tuple(document["awaited"]),
                int(document["rows"]),
                dict(document["counts"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(
                f"Expected a coordinator's folder at {folder}, made by `murmurfl federation new`, got none.",
                kind="not-found",
                setting="folder",
            ) from error

    @property
    def federation(self) -> Federation:
        """State that all members share."""
        return Federation.read(self.folder / FEDERATION_NAME)

    def seen(self) -> dict[str, Seen]:
        """Return what the server says of each member's node, and what each client said in the results of its runs."""
        from flwr.common.serde import user_config_from_proto

        from ...nodes.connection import server_name
        from ..servers.control_api import Control, ControlError, node_key_bytes
        from .keys_and_cards import read_owner_key

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
        statements = [_statements(folder) for folder in folders]
        seen = {}
        for name, one in self.members.items():
            own = [of[name] for of in statements if name in of]
            spoken = [statement for statement in own if statement is not None]
            node = status.get(node_key_bytes(one.node), "not registered")
            seen[name] = Seen(node, spoken, len(own) - len(spoken))
        return seen

    def server_options(self) -> list[str]:
        """Options of ``flower-superlink``."""
        host, _, port = self.federation.terms.address.rpartition(":")
        options = ["--host", listening_host(host.strip("[]")), "--port", port]
        options += ["--database", str(self.folder / "superlink.db"), "--enable-supernode-auth"]
        files = ("--ssl-ca-certfile", "ca.crt"), ("--ssl-certfile", "server.pem"), ("--ssl-keyfile", "server.key")
        return [*options, *(word for option, name in files for word in (option, str(self.folder / name)))]

    @property
    def owners(self) -> Path:
        """The list of those who may command the server."""
        return self.folder / _OWNERS

    def accept(self, answers: Sequence[JoinRequest]) -> Coordinator:
        """Take in members, or members' new keys; nothing is changed if one of the answers is refused."""
        terms = self.federation.terms
        if twice := {
            one.card.name for one in answers if sum(other.card.name == one.card.name for other in answers) > 1
        }:
            raise ConfigurationError(
                f"Expected one answer of each member, got two of {', '.join(sorted(twice))}.",
                kind="duplicate",
                setting="answers",
            )
        for one in answers:
            if one.terms != terms.digest:
                raise ConfigurationError(
                    f"Expected an answer to the terms of federation {terms.name!r}, got one of {one.card.name!r} to "
                    f"others (of {one.federation!r}): send its operator the kit again, and have it join again.",
                    kind="mismatch",
                    setting="answers",
                )
        self._check_returning(answers)
        members = {**self.members, **{one.card.name: one for one in answers}}
        self._check_looks(answers, members)
        self._check_roles(answers)
        replaced = [(self.members[one.card.name], one) for one in answers if one.card.name in self.members]
        replaced = [(before, one) for before, one in replaced if before != one]
        sentences = [
            f"the keys of {one.card.kind} {one.card.name!r} are replaced: {before.fingerprint} before, "
            f"{one.fingerprint} now. Ask its operator whether that is so, and have everybody compare the digest again"
            for before, one in replaced
        ]
        gone = [before.node for before, one in replaced if before.node != one.node]
        return self._changed(members, gone, sentences)

    def _check_returning(self, answers: Sequence[JoinRequest]) -> None:
        """Refuse node keys that have left: Flower's server takes none a second time."""
        left = [public_node_key(text).public_numbers() for text in self.left]
        for one in answers:
            if public_node_key(one.node).public_numbers() in left:
                raise ConfigurationError(
                    f"Expected a new node key from {one.card.kind} {one.card.name!r}, got one that has left this "
                    "federation, and the server takes no key twice. Have its operator run `murmurfl federation renew` "
                    "in its folder, and accept the new answer.",
                    kind="duplicate",
                    setting="answers",
                )

    def _check_looks(self, answers: Sequence[JoinRequest], members: Mapping[str, JoinRequest]) -> None:
        """Refuse a name that is easily mistaken for another member's."""
        alike: dict[str, set[str]] = {}
        for name in (*members, *self.awaited):
            alike.setdefault(looks_of(name), set()).add(name)
        for one in answers:
            name = one.card.name
            if others := sorted(alike[looks_of(name)] - {name}):
                raise ConfigurationError(
                    f"Expected a member's name that looks like no other one, got {name!r} next to {others[0]!r}: have "
                    "one of them join with another --name.",
                    kind="duplicate",
                    setting="name",
                )

    def _check_roles(self, answers: Sequence[JoinRequest]) -> None:
        """Refuse a client that answers as a helper, or the other way round: whose kit it is, is the coordinator's."""
        for one in answers:
            path = self.folder / _KITS / f"{one.card.name}.kit"
            role = Invitation.read(path).role if path.exists() else one.card.kind
            if role != one.card.kind:
                raise ConfigurationError(
                    f"Expected {one.card.name!r} to answer as the {role} that its kit was made for, got a "
                    f"{one.card.kind}'s keys: ask its operator by your own means what happened.",
                    kind="mismatch",
                    setting="answers",
                )

    def leave(self, name: str) -> Coordinator:
        """Take a member out; ConfigurationError if there is none of this name, or too few would be left."""
        if name not in self.members:
            raise ConfigurationError(
                f"Expected a member's name, one of {', '.join(sorted(self.members)) or 'none'}, got {name!r}.",
                kind="unknown-name",
                setting="name",
            )
        rest = {other: one for other, one in self.members.items() if other != name}
        return self._changed(rest, [self.members[name].node], [])

    def _changed(
        self, members: Mapping[str, JoinRequest], left: Sequence[str], sentences: Sequence[str]
    ) -> Coordinator:
        keys = [public_node_key(one.node).public_numbers() for one in members.values()]
        if len(set(keys)) < len(keys):
            raise ConfigurationError(
                "Expected a node key of its own for each member, got one twice: join again.",
                kind="duplicate",
                setting="members",
            )
        federation = Federation(self.federation.terms, tuple(members[name] for name in sorted(members)))
        federation.roster  # noqa: B018 - refuses two members with one key
        clients = sum(one.card.kind == CLIENT for one in members.values())
        now = counts(clients, len(members) - clients, self.num_records)
        changes = [*sentences, *self._count(now)]
        gone = tuple(dict.fromkeys([*self.left, *left]))
        awaited = tuple(name for name in self.awaited if name not in members)
        done = Coordinator(self.folder, dict(members), gone, awaited, self.num_records, now, tuple(changes))
        done._publish(federation)
        done._write_members()
        return done

    def _count(self, now: Mapping[str, int]) -> list[str]:
        """Write the members' present counts into the run settings, and leave everything else there as it is."""
        path = self.folder / RUN_NAME
        try:
            text, lines = with_counts(path.read_text(encoding="utf-8"), self.counts, now)
        except FileNotFoundError:
            return [f"{path} is not there, and is not made again: run settings are yours to write"]
        write_private(path, text)
        return [f"{RUN_NAME}: {line}" for line in lines]

    def _publish(self, federation: Federation) -> None:
        write_document(self.folder / FEDERATION_NAME, federation.document)
        write_document(self.folder / PUBLISHED_NAME / f"{federation.terms.digest}.json", federation.document)

    def _write_members(self) -> None:
        members: list[dict[str, Any]] = [one.document for one in self.members.values()]
        document = {"members": members, "left": list(self.left), "awaited": list(self.awaited)}
        # "rows": a folder of an earlier version is read by the same words.
        write_document(self.folder / MEMBERS_NAME, {**document, "rows": self.num_records, "counts": dict(self.counts)})

    def renew_certificate(self) -> None:
        """Make a new certificate of the server, with its key and its authority, for another year."""
        _certificates(self.folder, self.federation.terms.address)


def listening_host(host: str) -> str:
    """Return the address on which a server listens whose members reach it at ``host``.

    An address of this computer alone is listened on as it is. At any other one, members may arrive through another
    computer: the server listens on all addresses of its kind, IPv4 for a name that has both.
    """
    if is_loopback(host):
        return "127.0.0.1" if host == "localhost" else host
    try:
        kinds = {one[0] for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:  # a name that is known elsewhere
        kinds = set()
    return "::" if kinds == {socket.AF_INET6} else "0.0.0.0"  # noqa: S104 - members call from elsewhere


def new_federation(
    folder: Path,
    *,
    clients: int,
    helpers: int,
    schema: Path,
    address: str,
    settings: Mapping[str, Value],
    num_records: int = DEFAULT_ROWS,
) -> Coordinator:
    """Make a federation's folder, or nothing: certificates, keys of the server and of an owner, kits, run settings.

    Parameters
    ----------
    num_records : int
        About how many records each client has: method and rounds are planned for it.
    settings : mapping
        Run-config keys that are not left to the plan.
    """
    if not (clients >= 1 and 0 <= helpers <= MOST_HELPERS and clients + helpers <= MOST_MEMBERS):
        raise ConfigurationError(
            f"Expected 1 or more clients and 0 to {MOST_HELPERS} helpers, got {clients} and {helpers}.",
            kind="out-of-range",
        )
    records = Schema.read_file(schema)
    records.check_for_real_nodes()
    proposal = propose(records, clients, helpers, num_records, settings)
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigurationError(
            f"Expected to make the folder {folder}, got: {error.strerror}. Choose another name, or go on with the "
            "federation that is there.",
            kind="exists",
        ) from error
    text = schema.expanduser().read_text(encoding="utf-8")
    try:
        authority = _certificates(folder, address)
        terms = Terms(folder.name, address, authority, text, proposal.members)
    except ConfigurationError:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        raise
    key = OwnerKey.generate()
    write_owner_key(folder / _OWNER_KEY, key)
    write_private(folder / _OWNERS, f"{key.public.hex()} owner\n")
    write_private(folder / _SCHEMA, text)
    for name in (_KITS, PUBLISHED_NAME, "flower"):
        (folder / name).mkdir(mode=0o700)
    connection = {"address": address, "root-certificates": str((folder / "ca.crt").absolute())}
    write_private(
        folder / "flower" / "config.toml",
        f'[superlink]\ndefault = "{folder.name}"\n\n[superlink.{json.dumps(folder.name)}]\n{toml_lines(connection)}',
    )
    places = [
        (f"{role}-{i}", role) for role, count in ((CLIENT, clients), (HELPER, helpers)) for i in range(1, count + 1)
    ]
    for name, role in places:
        write_document(folder / _KITS / f"{name}.kit", Invitation(name, role, terms).document)
    planned = counts(clients, helpers, num_records)
    task = {"task": str((folder / _SCHEMA).absolute()), "schema": records.digest}
    write_private(folder / RUN_NAME, run_text({**planned, **task, **proposal.run}))
    awaited = tuple(name for name, _ in places)
    made = Coordinator(folder, awaited=awaited, num_records=num_records, counts=planned, changes=(proposal.reason,))
    made._publish(Federation(terms, ()))
    made._write_members()
    return made


def _certificates(folder: Path, address: str) -> str:
    host = address.rpartition(":")[0].strip("[]")
    made = make_server_certificates(folder, host, lifetime=_YEAR, keep_authority=True)
    return made.authority.read_text(encoding="ascii")
