"""The public documents of a federation: kits for its members, their answers, and what all of them compare.

Every one of them is JSON without a secret. Nobody is believed for having sent one: the digest of the
:class:`Federation` covers what a member holds of it, and people compare it by means of their own.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from ...clients import Schema
from ...privacy import ConfigurationError, Roster
from ...privacy.errors import check_format
from ...privacy.files import replace_durably
from ...privacy.setting import Value
from ...privacy.sums.roster import check_name
from ..engines.loopback import toml_document
from ..settings.trust_settings import SECURE
from .cards import Card
from .connections.connection import Connection
from .node_config import NodeConfig

MACHINE, HELPER = "machine", "helper"
SETTINGS: tuple[str, ...] = (
    *("strategy", "model", "clip-norm", "batch-size", "max-participations", "passes", "mechanism", "mu", "delta"),
    *("trust", "min-cohort", "min-honest"),
)
"""Keys of operators' files that a federation may propose: no path, no address, and no name of somebody's code."""

LARGEST_DOCUMENT = 4 << 20
"""Bytes of a document: nothing longer is read."""

_FORMAT = 1
_GROUP = 4


def in_fours(digest: str) -> str:
    """A digest as people read it out."""
    return " ".join(digest[i : i + _GROUP] for i in range(0, len(digest), _GROUP))


def digest_of(document: Any) -> str:
    """SHA-256 of a JSON document, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Terms:
    """What a federation is about, as its coordinator proposes it.

    Notes
    -----
    An operator takes them by starting a member with them. They fill the operator's own file, where each can be changed;
    none is read from a message later.
    """

    name: str
    address: str  # of the server, HOST:PORT
    authority: str  # the certificate, in PEM form, that the server's is checked against
    schema: str  # TOML: what a record is
    settings: Mapping[str, Value]

    def __post_init__(self) -> None:
        check_name(self.name)
        if not self.name[0].isalnum() or not all(c.isalnum() or c in "-_." for c in self.name):
            raise ConfigurationError(
                f"Expected a federation's name of letters, digits, '-', '_' and '.', got {self.name!r}."
            )
        Connection(self.address)
        try:
            x509.load_pem_x509_certificate(self.authority.encode())
        except ValueError as error:
            raise ConfigurationError(
                "Expected the server's authority as a certificate in PEM form, got none."
            ) from error
        self.records.check_for_real_nodes()
        self._check_settings()

    def _check_settings(self) -> None:
        unknown = sorted(set(self.settings) - set(SETTINGS))
        own_code = [name for name, value in self.settings.items() if isinstance(value, str) and ":" in value]
        if unknown or own_code:
            raise ConfigurationError(
                f"Expected settings among {', '.join(SETTINGS)}, and built-in names, got "
                f"{', '.join(map(repr, unknown or own_code))}: what else a machine has is its operator's to say."
            )
        NodeConfig.from_mapping(self.node_values("machine", "0" * 64))

    @property
    def records(self) -> Schema:
        """What a record is."""
        return Schema.read_text(self.schema, f"the schema of federation {self.name!r}")

    @property
    def sums(self) -> bool:
        """Whether machines release under masks, which helpers take off sums."""
        return self.settings.get("trust") == SECURE

    def node_values(self, machine: str, roster_digest: str) -> dict[str, Value]:
        """Top-level keys of a machine's file, with placeholders for what only its operator knows."""
        sums: dict[str, Value] = {}
        if self.sums:
            sums = {"signing-key": "roster.key", "roster": "roster.json", "roster-digest": roster_digest}
        own: dict[str, Value] = {"samples": "records.csv", "schema": "schema.toml", "rows": 1}
        return {"machine": machine, "ledger": "ledger.sqlite", **own, **sums, **self.settings}

    @property
    def document(self) -> dict[str, Any]:
        """The terms as plain values, for JSON."""
        return {**vars(self), "settings": dict(self.settings)}

    @property
    def digest(self) -> str:
        """SHA-256 by which an answer says to which terms it is one; 64 hexadecimal digits."""
        return digest_of(self.document)

    @classmethod
    def from_document(cls, document: Any) -> Terms:
        """Terms from what :attr:`document` gave."""
        texts = ("name", "address", "authority", "schema")
        right = isinstance(document, dict) and document.keys() == {*texts, "settings"}
        right = right and all(isinstance(document[name], str) for name in texts)
        if not right or not isinstance(document["settings"], dict):
            raise ConfigurationError("Expected the terms of a federation, got something else.")
        for value in document["settings"].values():
            if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and math.isnan(value)):
                raise ConfigurationError("Expected settings that are texts, numbers or booleans, got something else.")
        return cls(**document)


@dataclass(frozen=True)
class Kit:
    """A member's invitation: the terms, and the place that is meant for it."""

    member: str
    role: str  # :data:`MACHINE` or :data:`HELPER`
    terms: Terms

    KIND = "murmurfl-kit"

    def __post_init__(self) -> None:
        check_member(self.member)
        if self.role not in (MACHINE, HELPER):
            raise ConfigurationError(f"Expected a kit for a machine or a helper, got one for {self.role!r}.")

    @property
    def document(self) -> dict[str, Any]:
        """The kit as plain values, for JSON."""
        return {self.KIND: _FORMAT, "member": self.member, "role": self.role, "terms": self.terms.document}

    @classmethod
    def read(cls, path: Path) -> Kit:
        """Read a kit; ConfigurationError if it is none."""
        document = read_document(path, cls.KIND, {"member", "role", "terms"})
        return cls(document["member"], document["role"], Terms.from_document(document["terms"]))


@dataclass(frozen=True)
class Joining:
    """What a member sends back: the public halves of its keys."""

    federation: str
    terms: str  # digest
    node: str  # the public key of the node, as OpenSSH writes it
    card: Card

    KIND = "murmurfl-joining"

    def __post_init__(self) -> None:
        check_member(self.card.name)
        public_node_key(self.node)

    @property
    def document(self) -> dict[str, Any]:
        """The answer as plain values, for JSON."""
        return {self.KIND: _FORMAT, **vars(self), "card": self.card.document}

    @classmethod
    def read(cls, path: Path) -> Joining:
        """Read an answer; ConfigurationError if it is none."""
        document = read_document(path, cls.KIND, {"federation", "terms", "node", "card"})
        return cls.from_document(document, f"in {path}")

    @classmethod
    def from_document(cls, document: Mapping[str, Any], where: str) -> Joining:
        """An answer from what :attr:`document` gave."""
        texts = {name: document[name] for name in ("federation", "terms", "node")}
        if not all(isinstance(text, str) for text in texts.values()):
            raise ConfigurationError(f"Expected what a member sends back {where}, got something else.")
        return cls(**texts, card=Card.from_document(document["card"], where))


@dataclass(frozen=True)
class Federation:
    """What all members hold alike: the terms, and who takes part in sums.

    Notes
    -----
    Once all operators have read the same digest to each other, all of them have the same server, schema and settings
    before them, and each key of the roster is that of the operator who found it there: nobody else was believed.
    """

    terms: Terms
    roster: Roster | None  # None without secure aggregation, and until both a machine and a helper are in

    KIND = "murmurfl-federation"

    @property
    def document(self) -> dict[str, Any]:
        """The federation as plain values, for JSON."""
        roster = None if self.roster is None else self.roster.document
        return {self.KIND: _FORMAT, "terms": self.terms.document, "roster": roster}

    @property
    def digest(self) -> str:
        """The digest that operators compare, 64 hexadecimal digits."""
        return digest_of(self.document)

    @classmethod
    def read(cls, path: Path) -> Federation:
        """Read a federation's document; ConfigurationError if it is none."""
        return cls.from_document(read_document(path, cls.KIND, {"terms", "roster"}))

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Federation:
        """A federation from what :attr:`document` gave."""
        roster = document["roster"]
        return cls(Terms.from_document(document["terms"]), None if roster is None else Roster.from_document(roster))


def check_member(name: Any) -> None:
    """Refuse a member's name that could be no file's."""
    check_name(name)
    if not all(c.isalnum() or c in "-_." for c in name) or name.startswith((".", "-")):
        raise ConfigurationError(f"Expected a member's name of letters, digits, '-', '_' and '.', got {name!r}.")


def public_node_key(text: str) -> ec.EllipticCurvePublicKey:
    """A node's public key from OpenSSH's line; ConfigurationError if it is none that Flower takes."""
    try:
        found = load_ssh_public_key(text.encode())
    except ValueError:
        found = None
    if not isinstance(found, ec.EllipticCurvePublicKey):
        raise ConfigurationError("Expected a node's public key of kind ecdsa, got something else.")
    return found


def toml_lines(values: Mapping[str, Value]) -> str:
    """Plain values as TOML for people: bare keys."""
    return re.sub(r'(?m)^"([A-Za-z0-9_-]+)" =', r"\1 =", toml_document(values))


def read_document(path: Path, kind: str, keys: set[str]) -> dict[str, Any]:
    """Read one of these documents from a file, up to a fixed length."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_DOCUMENT + 1)
    except OSError as error:
        raise ConfigurationError(f"Expected a {kind} document at {path}, got: {error.strerror or error}.") from error
    return parsed(content, kind, keys, f"at {path}")


def parsed(content: bytes, kind: str, keys: set[str], where: str) -> dict[str, Any]:
    """One of these documents from its bytes."""
    try:
        document: Any = json.loads(content) if len(content) <= LARGEST_DOCUMENT else None
    except (ValueError, RecursionError):
        document = None
    check_format(f"a {kind} document {where}", document, kind, _FORMAT)
    if not isinstance(document, dict) or document.keys() != {kind, *keys}:
        raise ConfigurationError(
            f"Expected a {kind} document of format {_FORMAT} {where}, got something else: ask for the file again."
        )
    return document


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a public document, whole or not at all, to a file that only its owner may change, whatever the umask."""
    replace_durably(path, json.dumps(document, indent=1).encode() + b"\n", error=ConfigurationError)
