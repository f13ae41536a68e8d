"""Participants in secure aggregation: the public keys of clients and helpers, and the private ones behind them.

A :class:`Roster` is a list that operators exchange by their own means. Its digest stands in every operator's own
configuration and in every masked release, so that nobody, the server least of all, can put another client or another
helper in. A client has one key, which signs what it releases (Ed25519). A helper has two: one that mask seeds are
sealed for (X25519), and one that signs its answers (Ed25519).

Proof: docs/proofs/secure-aggregation.md.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from .. import protocol
from ..errors import ConfigurationError, check_format
from ..noise import derived_bytes
from ..release.policy import MOST_CLIENTS

_PRIME = 2**255 - 19
_D = -121665 * pow(121666, -1, _PRIME) % _PRIME
_PROBE = X25519PrivateKey.from_private_bytes(bytes(range(32)))


def is_signing_point(public: bytes) -> bool:
    """Say whether 32 bytes are a public Ed25519 key: a point of the curve, canonically written, not of small order."""
    y = int.from_bytes(public, "little") & (2**255 - 1)  # the highest bit is x's sign
    if y >= _PRIME:
        return False
    square = y * y % _PRIME
    # x^2 = above / below is a square if above * below is one. Doubling a point of order 8 gives y = 0.
    above, below = square - 1, _D * square + 1
    small_order = y == 0 or square == 1 or (_D * square * square + 2 * square - 1) % _PRIME == 0
    return not small_order and pow(above * below, (_PRIME - 1) // 2, _PRIME) == 1


def is_sealing_point(public: bytes) -> bool:
    """Return True if 32 bytes are a public X25519 key, canonically written, not of small order."""
    if int.from_bytes(public, "little") >= _PRIME:
        return False
    try:
        _PROBE.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # the shared secret would be zero, whoever asks
        return False
    return True


KEY_BYTES = 32
MOST_HELPERS = 16
"""All helpers of a roster are needed for every sum."""

_FORMAT = 1
_FORMAT_KEY = "murmurfl-roster"
_STORED_CLIENTS = "machines"
"""Key of the clients in a roster's file: operators pinned digests of files that have it."""


@dataclass(frozen=True)
class ClientKey:
    """A client's private key of 32 bytes, which signs its masked releases; :meth:`generate` makes one.

    Notes
    -----
    **Formal guarantees.** What secure aggregation guarantees for a client, and counts it among the honest for, rests
    on this key staying secret for the whole session, and on its noise key and nonces staying secret for good.

    Examples
    --------
    >>> key = ClientKey.generate()
    >>> len(key.public), len(key.sign(b"a message"))
    (32, 64)
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _check_bytes("a client's secret key", self.secret)

    @classmethod
    def generate(cls) -> ClientKey:
        """Generate a key from the operating system's randomness."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def simulated(cls, seed: int, name: str) -> ClientKey:
        """Derive a simulated client's key: the same in every run of a seed, and no secret."""
        return cls(derived_bytes(KEY_BYTES, "machine key", seed, name))

    @cached_property
    def _private(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.secret)

    @cached_property
    def public(self) -> bytes:
        """The public key for the roster, 32 bytes."""
        return self._private.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        """Sign a message by Ed25519; 64 bytes."""
        return self._private.sign(message)


@dataclass(frozen=True)
class HelperKey:
    """A helper's private keys, for the seeds sealed for it and for its answers; :meth:`generate` makes them.

    Notes
    -----
    **Formal guarantees.** Whoever has the sealing key of *every* helper, and the masked releases, sees each client's
    own release; the worst case then is all that holds. A helper's key is good for as long as its opening record is: a
    helper that lost its record gets a new key.

    Examples
    --------
    >>> key = HelperKey.generate()
    >>> key.entry("left").name
    'left'
    """

    sealing_secret: bytes = field(repr=False)
    signing_secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _check_bytes("a helper's sealing key", self.sealing_secret)
        _check_bytes("a helper's signing key", self.signing_secret)

    @classmethod
    def generate(cls) -> HelperKey:
        """Generate keys from the operating system's randomness."""
        return cls(secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES))

    @classmethod
    def simulated(cls, seed: int, name: str) -> HelperKey:
        """Derive a simulated helper's keys: the same in every run of a seed, and no secret."""
        return cls(
            derived_bytes(KEY_BYTES, "helper sealing key", seed, name),
            derived_bytes(KEY_BYTES, "helper signing key", seed, name),
        )

    @cached_property
    def sealing(self) -> X25519PrivateKey:
        """The key that seeds are sealed for."""
        return X25519PrivateKey.from_private_bytes(self.sealing_secret)

    @cached_property
    def _signing(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.signing_secret)

    def entry(self, name: str) -> HelperEntry:
        """Return the helper's entry in the roster."""
        publics = [key.public_key().public_bytes_raw() for key in (self.sealing, self._signing)]
        return HelperEntry(name, *publics)

    def sign(self, message: bytes) -> bytes:
        """Sign a message by Ed25519; 64 bytes."""
        return self._signing.sign(message)


@dataclass(frozen=True)
class HelperEntry:
    """A helper in a roster, with its public keys of 32 bytes.

    Examples
    --------
    >>> from murmurfl.privacy import HelperKey
    >>> entry = HelperKey.generate().entry("left")
    >>> entry.name, len(entry.sealing), len(entry.signing)
    ('left', 32, 32)
    """

    name: str
    sealing: bytes
    """X25519."""
    signing: bytes
    """Ed25519."""


@dataclass(frozen=True)
class Roster:
    """Clients and helpers of a federation with their public keys.

    Parameters
    ----------
    clients : mapping of str to bytes
        Each client's public Ed25519 key by its name, 32 bytes.
    helpers : tuple of HelperEntry
        In the order in which clients seal for them.

    Notes
    -----
    Two names with one key would be one client that counts twice, so they are refused; that two keys are two *people*
    is the operators' to know (a roster full of one person's keys leaves what the noise of the others gives).

    Examples
    --------
    >>> from murmurfl.privacy import ClientKey, HelperKey
    >>> clients = {name: ClientKey.generate().public for name in ("a", "b", "c")}
    >>> roster = Roster(clients, tuple(HelperKey.generate().entry(name) for name in ("left", "right")))
    >>> roster.helper_names, Roster.from_document(roster.document) == roster
    (('left', 'right'), True)
    """

    clients: Mapping[str, bytes]
    helpers: tuple[HelperEntry, ...]

    def __post_init__(self) -> None:
        # Copies: the digest must stay that of what is inside.
        object.__setattr__(self, "clients", dict(self.clients))
        object.__setattr__(self, "helpers", tuple(self.helpers))
        if not 0 < len(self.clients) <= MOST_CLIENTS:
            raise ConfigurationError(
                f"Expected a roster of 1 to {MOST_CLIENTS} clients, got {len(self.clients)}.",
                kind="out-of-range",
                setting="clients",
            )
        if not 0 < len(self.helpers) <= MOST_HELPERS:
            raise ConfigurationError(
                f"Expected a roster of 1 to {MOST_HELPERS} helpers, got {len(self.helpers)}.",
                kind="out-of-range",
                setting="helpers",
            )
        names = [*self.clients, *(helper.name for helper in self.helpers)]
        for name in names:
            check_name(name)
        if (twice := _twice(names)) is not None:
            raise ConfigurationError(f"Expected every name once in a roster, got {twice!r} twice.", kind="duplicate")
        for name, key in self.clients.items():
            _check_key(f"client {name!r}", key, is_signing_point)
        for helper in self.helpers:
            _check_key(f"helper {helper.name!r} to sign with", helper.signing, is_signing_point)
            _check_key(f"helper {helper.name!r} to seal for", helper.sealing, is_sealing_point)
        keys = [*self.clients.values(), *(key for one in self.helpers for key in (one.sealing, one.signing))]
        if _twice(keys) is not None:
            raise ConfigurationError(
                "Expected every key once in a roster, got one twice: each makes its own.", kind="duplicate"
            )

    @property
    def document(self) -> dict[str, Any]:
        """The roster as plain values, for a JSON file; keys in hexadecimal."""
        return {
            _FORMAT_KEY: _FORMAT,
            _STORED_CLIENTS: {name: self.clients[name].hex() for name in sorted(self.clients)},
            "helpers": [
                {"name": one.name, "sealing": one.sealing.hex(), "signing": one.signing.hex()} for one in self.helpers
            ],
        }

    @classmethod
    def from_document(cls, document: Any) -> Roster:
        """Read a roster from what :attr:`document` gave."""
        check_format("a roster", document, _FORMAT_KEY, _FORMAT)
        try:
            if set(document) != {_FORMAT_KEY, _STORED_CLIENTS, "helpers"} or document[_FORMAT_KEY] != _FORMAT:
                raise ValueError("not the keys of a roster of this version")
            clients = {name: bytes.fromhex(key) for name, key in document[_STORED_CLIENTS].items()}
            if any(set(one) != {"name", "sealing", "signing"} for one in document["helpers"]):
                raise ValueError("not the keys of a helper")
            helpers = tuple(
                HelperEntry(one["name"], bytes.fromhex(one["sealing"]), bytes.fromhex(one["signing"]))
                for one in document["helpers"]
            )
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"Expected a roster of format {_FORMAT}, got something else ({error}).", kind="other-format"
            ) from error
        return cls(clients, helpers)

    @classmethod
    def from_json(cls, text: str) -> Roster:
        """Read a roster from the text of :attr:`document`; a name that stands twice is refused."""
        try:
            document = json.loads(text, object_pairs_hook=_each_once)
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigurationError(
                f"Expected a roster of format {_FORMAT}, got something else ({error}).", kind="other-format"
            ) from error
        return cls.from_document(document)

    @cached_property
    def digest(self) -> str:
        """The digest that every operator pins, 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.document, sort_keys=True).encode()).hexdigest()

    @property
    def helper_names(self) -> tuple[str, ...]:
        """The helpers' names, in order."""
        return tuple(one.name for one in self.helpers)

    @classmethod
    def simulated(cls, seed: int, clients: tuple[str, ...], helpers: tuple[str, ...]) -> Roster:
        """Make the roster of a simulation's keys."""
        return cls(
            {name: ClientKey.simulated(seed, name).public for name in clients},
            tuple(HelperKey.simulated(seed, name).entry(name) for name in helpers),
        )


def name_proof(name: str, roster: str, nonce: Any) -> bytes | None:
    """Return the bytes that a member of this digest's roster signs to show a server that a name is its own.

    None if what it was sent is no nonce. The server's is new each time, so that no answer serves twice.
    """
    if not isinstance(nonce, str) or not 0 < len(nonce) <= protocol.LONGEST_NONCE:
        return None
    parts = [text.encode("utf-8", "surrogatepass") for text in (name, roster, nonce)]
    return b"murmurfl name 1\x00" + b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def is_signed(public: bytes, signature: bytes, message: bytes) -> bool:
    """Return True if an Ed25519 signature is that of a public key on a message."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _check_bytes(what: str, value: Any) -> None:
    if not isinstance(value, bytes) or len(value) != KEY_BYTES:
        raise ConfigurationError(
            f"Expected {what} of {KEY_BYTES} bytes, got another length or kind.", kind="wrong-shape"
        )


def _check_key(whose: str, key: Any, is_point: Callable[[bytes], bool]) -> None:
    _check_bytes(f"the public key of {whose}", key)
    if not is_point(key):
        raise ConfigurationError(
            f"Expected the public key of {whose} to be one that only its owner can use, got a point that is none: have "
            "its operator make another card.",
            kind="malformed",
        )


def check_name(name: Any) -> None:
    """Refuse a name that a roster cannot have."""
    # People compare names by eye: what does not show, or shows as another name does, is none.
    right = isinstance(name, str) and 0 < len(name) <= protocol.LONGEST_CLIENT_NAME and name.isprintable()
    if not right or name != unicodedata.normalize("NFC", name).strip():
        raise ConfigurationError(
            f"Expected names of 1 to {protocol.LONGEST_CLIENT_NAME} characters that can be seen (Unicode's form NFC, "
            f"no space at either end) in a roster, got {name!r}.",
            kind="malformed",
            setting="name",
        )


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (twice := _twice([name for name, _ in pairs])) is not None:
        raise ValueError(f"{twice!r} stands twice")
    return dict(pairs)


def _twice(values: list[Any]) -> Any:
    seen: set[Any] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None
