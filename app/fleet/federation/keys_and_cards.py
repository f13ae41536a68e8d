"""Keys and certificates that are made here, and cards: small files with a key's public half, for other operators.

Cards make a roster (:class:`~murmurfl.privacy.sums.roster.Roster`). A card holds nothing secret, and nothing proves who
made it: operators compare the roster's digest, and each looks for its own key in it.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ....clients.nodes.roster_files import write_client_key, write_helper_key
from ....privacy.errors import ConfigurationError, check_format
from ....privacy.files import check_private, create_private, write_private
from ....privacy.permits import OwnerKey
from ....privacy.release.policy import MOST_CLIENTS
from ....privacy.sums.opening_file import SQLiteOpeningRecord
from ....privacy.sums.roster import MOST_HELPERS, ClientKey, HelperEntry, HelperKey, Roster, check_name

_CARD_KIND = "murmurfl-card"
_CARD_FORMAT = 1
_SHOWN_DIGITS, _GROUP = 16, 4
_KEY_BYTES = 32
"""Bytes of a public Ed25519 or X25519 key."""


def in_fours(digest: str) -> str:
    """Return a digest as people read it out."""
    return " ".join(digest[i : i + _GROUP] for i in range(0, len(digest), _GROUP))


@dataclass(frozen=True)
class Card:
    """The public keys of a client or a helper.

    A card proves nothing: only its owner, who misses the right key in the roster, notices that it was altered on its
    way.
    """

    name: str  # in the roster: public
    signing: bytes  # public Ed25519 key
    sealing: bytes = b""  # a helper's public X25519 key; empty for a client

    @classmethod
    def of_client(cls, name: str, key: ClientKey) -> Card:
        return cls(name, key.public)

    @classmethod
    def of_helper(cls, name: str, key: HelperKey) -> Card:
        entry = key.entry(name)
        return cls(name, entry.signing, entry.sealing)

    @property
    def kind(self) -> str:
        """``client`` or ``helper``."""
        return "helper" if self.sealing else "client"

    @property
    def document(self) -> dict[str, Any]:
        """The card as plain values, for JSON."""
        sealing = {"sealing": self.sealing.hex()} if self.sealing else {}
        return {_CARD_KIND: _CARD_FORMAT, self.kind: self.name, **sealing, "signing": self.signing.hex()}

    @property
    def fingerprint(self) -> str:
        """Sixteen digits by which people tell keys apart; what must be compared is the roster's digest."""
        return in_fours(hashlib.sha256(self.sealing + self.signing).hexdigest()[:_SHOWN_DIGITS])

    def write(self, path: Path) -> None:
        """Write the card to a new file; one that is in the way is left alone."""
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(self.document, indent=1) + "\n")
        except FileExistsError as error:
            raise ConfigurationError(
                f"Expected nothing at {path}, where a card is to be written, got a file; it was left alone.",
                kind="exists",
            ) from error
        except OSError as error:
            raise ConfigurationError(
                f"Expected to write a card to {path}, got {error.strerror}.", kind="failed"
            ) from error

    @classmethod
    def read(cls, path: Path) -> Card:
        """Read a card from a file."""
        try:
            document: Any = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"Expected a card at {path}, got: {error.strerror}.", kind="unreadable") from error
        except ValueError:
            document = None
        return cls.from_document(document, f"at {path}")

    @classmethod
    def from_document(cls, document: Any, where: str) -> Card:
        """Return a card from what :attr:`document` gave; ``where`` it stood, for errors."""
        check_format(f"a card {where}", document, _CARD_KIND, _CARD_FORMAT)
        try:
            (kind,) = {"client", "helper"} & document.keys()
            expected = {_CARD_KIND, kind, "signing"} | ({"sealing"} if kind == "helper" else set())
            if document.keys() != expected or document[_CARD_KIND] != _CARD_FORMAT:
                raise ValueError("other keys")
            keys = {name: bytes.fromhex(document[name]) for name in expected & {"signing", "sealing"}}
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"Expected a card of `murmurfl roster key` {where}, got something else: ask its operator for it.",
                kind="malformed",
            ) from error
        if any(len(key) != _KEY_BYTES for key in keys.values()):
            raise ConfigurationError(
                f"Expected keys of {_KEY_BYTES} bytes in a card {where}, got others: ask its operator for it.",
                kind="wrong-shape",
            )
        return cls(document[kind], **keys)


def roster_of(cards: Iterable[Card]) -> Roster:
    """Return the roster of some cards, whatever their order; no name or key may occur twice."""
    clients: dict[str, bytes] = {}
    helpers: dict[str, HelperEntry] = {}
    for card in cards:
        if card.name in clients or card.name in helpers:
            raise ConfigurationError(
                f"Expected one card for each name, got two for {card.name!r}: leave one out, or have one of the two "
                "made again under a name of its own.",
                kind="duplicate",
            )
        if card.sealing:
            helpers[card.name] = HelperEntry(card.name, card.sealing, card.signing)
        else:
            clients[card.name] = card.signing
    for kind, found in (("client", clients), ("helper", helpers)):
        if not found:
            raise ConfigurationError(
                f"Expected a roster of 1 to {MOST_CLIENTS if kind == 'client' else MOST_HELPERS} {kind}s, got no "
                f"{kind}'s card: its operator makes one with `murmurfl roster key PATH --{kind} NAME`.",
                kind="missing",
            )
    return Roster(clients, tuple(helpers[name] for name in sorted(helpers)))


def cards_of(roster: Roster) -> list[Card]:
    """Cards of a roster: clients by name, then helpers in their order."""
    clients = [Card(name, roster.clients[name]) for name in sorted(roster.clients)]
    return [*clients, *(Card(helper.name, helper.signing, helper.sealing) for helper in roster.helpers)]


@dataclass(frozen=True)
class NewKey:
    """A card whose private key was just made."""

    card: Card
    path: Path  # of the card


def make_client(path: Path, name: str) -> NewKey:
    """Make a client's key at ``path``, with mode 600, and its card beside it; a file in the way is left alone."""
    check_name(name)  # now, and not when somebody makes the roster
    key = ClientKey.generate()
    return _made(path, Card.of_client(name, key), lambda: write_client_key(path, key))


def make_helper(path: Path, name: str, record: Path, mark: Path | None = None) -> NewKey:
    """Make a helper's keys at ``path``, with mode 600, its card beside them, and its empty opening record.

    A record is made only with its keys, so keys that have opened something never have an empty record: a helper that
    forgot what it opened could be made to open a release a second time, or one that builds on nothing opened.
    """
    check_name(name)
    key = HelperKey.generate()

    def write() -> None:
        # The key last: a record without a key is useless, but a key without a record could be given another one.
        SQLiteOpeningRecord.create(record, helper=key.entry(name), mark=mark)
        write_helper_key(path, name, key)

    return _made(path, Card.of_helper(name, key), write)


def _made(path: Path, card: Card, write: Callable[[], None]) -> NewKey:
    if path.suffix == ".card":  # people send each other *.card
        raise ConfigurationError(
            f"Expected a private key's file not to end in .card, got {path}: cards are sent around. Call it "
            f"{path.with_suffix('.key').name}; its card then goes to {path.name}.",
            kind="malformed",
        )
    card_path = path.with_name(path.name.removesuffix(".key") + ".card")
    for one in (path, card_path):
        if one.exists():
            raise ConfigurationError(
                f"Expected nothing at {one}, where a new key is to be made, got a file; it was left alone. Keep it if "
                "it is in a roster already, else give the new key another name.",
                kind="exists",
            )
    write()
    card.write(card_path)
    return NewKey(card, card_path)


_OWNER_FORMAT = 1
_OWNER_KIND = "murmurfl-owner-key"
_OWNER_FILE = "an owner's key"


def write_owner_key(path: Path, key: OwnerKey) -> None:
    """Write an owner's private key to a new file of mode 600, durable on return; a file in the way is left alone.

    The file is not encrypted: whoever reads it decides which runs clients take. It belongs on no server.
    """
    document = {_OWNER_KIND: _OWNER_FORMAT, "secret": key.secret.hex()}
    create_private(path, _OWNER_FILE, (json.dumps(document, indent=2) + "\n").encode(), error=ConfigurationError)


def read_owner_key(path: Path) -> OwnerKey:
    """Read an owner's private key; a file that others could have read, and so could sign with, is refused."""
    check_private(path, _OWNER_FILE, missing="Make one with `murmurfl owner key`.", error=ConfigurationError)
    # Nothing of the content but the format's number is in an error's text or causes.
    try:
        document: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        document = None
    check_format(f"{_OWNER_FILE} at {path}", document, _OWNER_KIND, _OWNER_FORMAT)
    try:
        if (
            not isinstance(document, dict)
            or set(document) != {_OWNER_KIND, "secret"}
            or document[_OWNER_KIND] != _OWNER_FORMAT
        ):
            raise ValueError
        return OwnerKey(bytes.fromhex(document["secret"]))
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"Expected {_OWNER_FILE} of format {_OWNER_FORMAT} at {path}, got something else: name the file that "
            "`murmurfl owner key` made.",
            kind="other-format",
        ) from None


_LIFETIME = datetime.timedelta(days=1)
_CLOCK_SKEW = datetime.timedelta(hours=1)
_LONGEST_COMMON_NAME = 64


@dataclass(frozen=True)
class ServerCertificates:
    """Files of a SuperLink's certificates."""

    authority: Path  # the public certificate that nodes and users check against
    certificate: Path
    key: Path  # private


def make_server_certificates(
    folder: Path, host: str = "localhost", *, lifetime: datetime.timedelta = _LIFETIME, keep_authority: bool = False
) -> ServerCertificates:
    """Make a certificate for a host, 127.0.0.1, ::1 and localhost.

    ``keep_authority``: the authority's key is kept, as ``ca.key``, for ten years. An authority and a server's key that
    lie in the folder are then used again: nodes and logins go on with a renewed certificate.
    """
    paths = ServerCertificates(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    kept = folder / "ca.key"
    authority_key, key = (_key(path if keep_authority else None) for path in (kept, paths.key))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "murmurfl authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:_LONGEST_COMMON_NAME])])
    names = [_general_name(name) for name in dict.fromkeys(("127.0.0.1", "::1", "localhost", host))]
    ca_usage = _usage(key_cert_sign=True, crl_sign=True)
    ten_years = datetime.timedelta(days=3650)
    authority = (
        _certificate(issuer, issuer, authority_key.public_key(), ten_years if keep_authority else lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(ca_usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    certificate = (
        _certificate(subject, issuer, key.public_key(), lifetime)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    if not (keep_authority and kept.exists()):
        paths.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    paths.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for path, one in ((kept, authority_key), (paths.key, key)) if keep_authority else ((paths.key, key),):
        write_private(path, one.private_bytes(*private).decode())
    return paths


def _key(path: Path | None) -> ec.EllipticCurvePrivateKey:
    """Return the private key in a file, or a new one."""
    if path is None or not path.exists():
        return ec.generate_private_key(ec.SECP384R1())
    found = serialization.load_pem_private_key(path.read_bytes(), password=None)
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(
            f"Expected a private key of an elliptic curve at {path}, got another kind.", kind="wrong-type"
        )
    return found


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def make_node_key(path: Path) -> Path:
    """Make a node's private key as ``ssh-keygen -t ecdsa -b 384`` does; return the path of its public key."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    write_private(path, key.private_bytes(*private).decode())
    public = path.with_name(path.name + ".pub")
    openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    public.write_bytes(key.public_key().public_bytes(*openssh))
    return public


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lifetime: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + lifetime)
    )


def _usage(**allowed: bool) -> x509.KeyUsage:
    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in names})
