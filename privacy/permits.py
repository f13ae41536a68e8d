"""Permits: a session's owner signs, away from the server, which sessions a run may have, with which bundle and when.

A client whose operator lists owners answers only what comes with a permit of one of them. The server carries the
permit and cannot make one: it can reuse it within its sessions and its time, and for nothing else.

A permit is one line of text, ``murmurfl-permit-1.PAYLOAD.SIGNATURE``: a JSON object and an Ed25519 signature of exactly
these bytes after a label, both in base64url. With the same key an owner logs in to a server (`murmurfl owner login`):
``murmurfl-login-1.PAYLOAD.SIGNATURE`` names the server and an end. Whoever has it commands that server until then; no
client takes it for a permit.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from . import protocol
from .errors import ConfigurationError
from .sums.roster import KEY_BYTES, is_signed, is_signing_point

LONGEST_PERMIT = 4096
"""Characters of a permit: nothing longer is read."""

MOST_SESSIONS = 8

LONGEST_LOGIN_S = 31 * 24 * 3600
"""A login lasts no longer, whoever signed it."""

_NAME = "murmurfl-permit-1"
_LABEL = b"murmurfl permit 1\x00"
_LOGIN_NAME = "murmurfl-login-1"
_LOGIN_LABEL = b"murmurfl login 1\x00"
_LOGIN_KEYS = {"owner", "server", "until"}
_CLOCKS_DIFFER_S = 300
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LATEST = 2**40
_KEYS = {"owner", "sessions", "bundle", "not-before", "until"}


class PermitError(ConfigurationError):
    """A text is no permit or login, or no listed owner signed it."""

    kind = "not-permitted"


@dataclass(frozen=True)
class Permit:
    """Permit of an owner for sessions of training.

    It bounds for which sessions a client spends its budget; each of them may spend what any session may.

    Parameters
    ----------
    owner : bytes
        The owner's public Ed25519 key, 32 bytes.
    sessions : tuple of str
        The sessions that may be begun and continued: the training's first, and those of its parts.
    bundle : str
        SHA-256 of the run's bundle, 64 hexadecimal digits; empty for any.
    not_before, until : int
        Its first second, and the first after its end, since 1970.
    """

    owner: bytes
    sessions: tuple[str, ...]
    bundle: str
    not_before: int
    until: int

    def __post_init__(self) -> None:
        if not isinstance(self.owner, bytes) or len(self.owner) != KEY_BYTES:
            raise ConfigurationError(
                f"Expected an owner's public key of {KEY_BYTES} bytes, got another length or kind.", kind="wrong-shape"
            )
        if not 1 <= len(self.sessions) <= MOST_SESSIONS or len(set(self.sessions)) < len(self.sessions):
            raise ConfigurationError(
                f"Expected a permit for 1 to {MOST_SESSIONS} different sessions, got {list(self.sessions)}.",
                kind="out-of-range",
                setting="permit",
            )
        for session in self.sessions:
            check_session(session)
        if self.bundle:
            check_bundle_digest(self.bundle)
        if not 0 <= self.not_before < self.until <= _LATEST:
            raise ConfigurationError(
                f"Expected a permit that begins before it ends, got one from {shown_time(self.not_before)} to "
                f"{shown_time(self.until)}.",
                kind="out-of-range",
                setting="permit",
            )

    def is_for(self, now: float) -> bool:
        """Return True if a time, in seconds since 1970, is one of the permit's."""
        return self.not_before <= now < self.until

    @property
    def payload(self) -> bytes:
        """The bytes that are signed, without their label."""
        document = {
            "owner": self.owner.hex(),
            "sessions": list(self.sessions),
            "bundle": self.bundle,
            "not-before": self.not_before,
            "until": self.until,
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def of(cls, payload: bytes) -> Permit:
        """Return the permit in a payload; PermitError if there is none."""
        try:
            document: Any = json.loads(payload)
            if not isinstance(document, dict) or set(document) != _KEYS or type(document["sessions"]) is not list:
                raise ValueError
            times = [document["not-before"], document["until"]]
            texts = [document["owner"], document["bundle"], *document["sessions"]]
            if not all(type(time) is int for time in times) or not all(isinstance(text, str) for text in texts):
                raise ValueError
            return cls(bytes.fromhex(document["owner"]), tuple(document["sessions"]), document["bundle"], *times)
        except (TypeError, ValueError, RecursionError):
            raise PermitError("Expected the payload of a permit, got something else.", kind="malformed") from None


@dataclass(frozen=True)
class OwnerKey:
    """An owner's private key, 32 bytes, which signs permits and logins; it is never on the server.

    Which runs a client takes, and whose commands a server obeys, rests on this key staying its owner's alone.
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.secret, bytes) or len(self.secret) != KEY_BYTES:
            raise ConfigurationError(
                f"Expected an owner's secret key of {KEY_BYTES} bytes, got another length or kind.",
                kind="wrong-shape",
                setting="secret",
            )

    @classmethod
    def generate(cls) -> OwnerKey:
        """Return a new key from the operating system."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @cached_property
    def _private(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.secret)

    @cached_property
    def public(self) -> bytes:
        """The public key that operators list, 32 bytes."""
        return self._private.public_key().public_bytes_raw()

    def permit(self, sessions: Sequence[str], *, not_before: int, until: int, bundle: str = "") -> str:
        """Return a signed permit, one line of text; the parameters are those of :class:`Permit`.

        Every client that lists this owner takes the named sessions from whoever has the text: name no more of them
        than the run needs.
        """
        payload = Permit(self.public, tuple(sessions), bundle, not_before, until).payload
        return ".".join((_NAME, _encoded(payload), _encoded(self._private.sign(_LABEL + payload))))

    def login(self, server: str, *, until: int) -> str:
        """Return a signed login to one server until a time, one line of text.

        Whoever has it commands that server until then.

        ``server`` is SHA-256 of its certificate's public key, 64 hexadecimal digits; empty for one without TLS on this
        computer.
        """
        document = {"owner": self.public.hex(), "server": server, "until": until}
        payload = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        return ".".join((_LOGIN_NAME, _encoded(payload), _encoded(self._private.sign(_LOGIN_LABEL + payload))))


def verified_login(text: Any, owners: Collection[bytes], server: str, now: float) -> bytes:
    """Return the public key of the owner who signed a login; PermitError unless it is for this server and for now.

    ``text`` may come from anybody; ``owners`` are the public keys in the operator's own file. Every byte was signed as
    a login and as nothing else, as far as Ed25519 goes. A login that would last longer than :data:`LONGEST_LOGIN_S` is
    none.
    """
    payload, signature = _parts(text, _LOGIN_NAME)
    named, where, until = _login(payload)
    owner = next((one for one in owners if one.hex() == named), b"")
    if not is_signed(owner, signature, _LOGIN_LABEL + payload):
        raise PermitError("Expected a login that a listed owner signed, got another.")
    if where != server:
        raise PermitError("Expected a login to this server, got one to another: log in again.")
    if until <= now or until > now + LONGEST_LOGIN_S + _CLOCKS_DIFFER_S:
        raise PermitError("Expected a login that has not ended, got another: log in again.")
    return owner


def _login(payload: bytes) -> tuple[str, str, int]:
    try:
        document: Any = json.loads(payload)
        if not isinstance(document, dict) or set(document) != _LOGIN_KEYS or type(document["until"]) is not int:
            raise ValueError
        return str(document["owner"]), str(document["server"]), document["until"]
    except (TypeError, ValueError, RecursionError):
        raise PermitError("Expected the payload of a login, got something else.", kind="malformed") from None


def read_permit(text: Any) -> Permit:
    """Return what a permit says, whoever signed it: its signature is not checked.

    A client believes a permit only by :func:`verified_permit`.
    """
    return Permit.of(_parts(text)[0])


def verified_permit(text: Any, owners: Collection[bytes]) -> Permit:
    """Return the permit in a text, if a listed owner signed it and is named in it; PermitError otherwise.

    ``text`` comes from a server that is not trusted; ``owners`` are the public keys in the operator's own file. Every
    byte was signed as a permit and as nothing else, as far as Ed25519 goes. Time, sessions and bundle are for the
    caller to compare.
    """
    payload, signature = _parts(text)
    for owner in owners:
        if is_signed(owner, signature, _LABEL + payload):
            permit = Permit.of(payload)
            if permit.owner == owner:
                return permit
    raise PermitError("Expected a permit that a listed owner signed, got another.", setting="permit")


def public_owner_key(text: Any) -> bytes:
    """Return an owner's public key from its 64 hexadecimal digits; keys for which anybody can sign are refused."""
    digits = text.strip().lower() if isinstance(text, str) else ""
    if not _DIGEST.fullmatch(digits) or not is_signing_point(bytes.fromhex(digits)):
        raise ConfigurationError(
            f"Expected an owner's public key, 64 hexadecimal digits as `murmurfl owner key` says them, got {text!r}.",
            kind="malformed",
            setting="owners",
        )
    return bytes.fromhex(digits)


def check_bundle_digest(text: Any) -> None:
    """Raise if a text is no SHA-256 in hexadecimal digits."""
    if not isinstance(text, str) or not _DIGEST.fullmatch(text):
        raise ConfigurationError(
            f"Expected a bundle's SHA-256, 64 hexadecimal digits as `murmurfl owner bundle` says them, got {text!r}.",
            kind="malformed",
            setting="bundles",
        )


def check_session(name: Any) -> None:
    """Raise if a text cannot be a session's name."""
    longest = protocol.LONGEST_SESSION_NAME
    if not isinstance(name, str) or not name.isalnum() or len(name) > longest:
        raise ConfigurationError(
            f"Expected a session of 1 to {longest} letters and digits, got {name!r}.",
            kind="malformed",
            setting="session",
            got=name,
        )


def shown_time(seconds: int) -> str:
    """Return a time for people, in UTC."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        return f"{seconds} s after 1970"


def _parts(text: Any, name: str = _NAME) -> tuple[bytes, bytes]:
    parts = text.split(".") if isinstance(text, str) and len(text) <= LONGEST_PERMIT else []
    kind = "permit" if name == _NAME else "login"
    if len(parts) != 3 or parts[0] != name:
        raise PermitError(
            f"Expected a {kind}, one line that begins with {name}, as `murmurfl owner {kind}` makes it; got something "
            "else.",
            kind="malformed",
        )
    try:
        return _decoded(parts[1]), _decoded(parts[2])
    except (ValueError, binascii.Error):
        raise PermitError(f"Expected a whole {kind}, got one whose text was changed or cut.", kind="damaged") from None


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    content = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _encoded(content) != text:  # one text for one permit
        raise ValueError
    return content
