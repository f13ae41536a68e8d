"""Who may command a SuperLink: its Control API answers owners who have logged in, and nobody else.

Flower's node keys cover the Fleet API alone: of the Control API, which submits and stops runs and registers nodes, its
open package lets anybody in. The gate stands before Flower's own application, in its process, so no port leads past it.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import logging
import os
import stat
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ....privacy import ConfigurationError
from ....privacy.files import exposure
from ....privacy.permits import PermitError, public_owner_key, verified_login
from ..watching.node_log import plain

CONTROL, OPEN_PATHS, HEALTH = "/v1/control/", ("/v1/fleet/", "/v1/runtime/"), "/health"
"""Where owners alone may call; where Flower asks for a node's key, or for the token of a run's process, itself."""

COMMANDED = "Command of "
"""Begins the line of a command that was let through."""

_WHAT = "a list of owners"
NONCE_HEADER, PROOF_HEADER = "x-murmurfl-nonce", "x-murmurfl-gate"
"""By which whoever started a SuperLink knows its gate from whatever else may have the port."""

_SAY_AGAIN_S = 10.0
_LARGEST_LIST = 1 << 20
_LONGEST_NAME = 64

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

logger = logging.getLogger("flwr")  # its lines are read as the SuperLink's own


def read_owners(path: Path) -> dict[bytes, str]:
    """Public keys and names of those who may command a server.

    Parameters
    ----------
    path : Path
        A line each: the public half as ``murmurfl owner key`` says it, and a name. ``#`` begins a comment.

    Raises
    ------
    ConfigurationError
        If there is no such file, others may write to it (its own mode and owner are looked at), or a line is none of
        these.
    """
    try:
        others_may, sentence = exposure(path, _WHAT)
        if others_may == "write":
            raise ConfigurationError(sentence)
        lines = _content(path).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"Expected {_WHAT} at {path}, got {getattr(error, 'strerror', None) or 'no text'}: write a line for each, "
            "the public half that `murmurfl owner key` says and a name."
        ) from error
    owners = {}
    for number, line in enumerate(lines, 1):
        key, _, name = line.partition("#")[0].strip().partition(" ")
        try:
            if key:
                owners[public_owner_key(key)] = plain(name)[:_LONGEST_NAME] or key[:8]
        except ConfigurationError as error:
            raise ConfigurationError(f"{error} It is in line {number} of {path}.") from error
    return owners


def _content(path: Path) -> bytes:
    """A regular file's bytes, never waited for: the other end of a pipe may never come."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_LIST:
            raise OSError(errno.EINVAL, "no regular file, or a very large one")
        if os.name == "posix" and status.st_uid not in (0, os.geteuid()):
            raise OSError(errno.EPERM, "a file of another user's")
        return file.read()


def proof_of(secret: bytes, nonce: bytes) -> bytes:
    """What a gate answers to a nonce, by a secret that it was given when it was started."""
    return hmac.digest(secret, nonce, "sha256").hex().encode()


def server_name(certificate: Path | None) -> str:
    """What a login calls a server: SHA-256 of its certificate's public key; empty without TLS.

    Raises
    ------
    ConfigurationError
        If the file holds no certificate.
    """
    if certificate is None:
        return ""
    try:
        return name_of(x509.load_pem_x509_certificates(certificate.read_bytes())[0])
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"Expected a certificate at {certificate}, got none that can be read.") from error


def name_of(certificate: x509.Certificate) -> str:
    """The same of a certificate that was shown, 64 hexadecimal digits; one that is renewed with its key keeps it."""
    key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(key).hexdigest()


class Gate:
    """An ASGI application before another one, which lets through what comes from owners and what needs none.

    Parameters
    ----------
    application : callable
        Flower's.
    owners : Path or None
        As for :func:`read_owners`; read at every command, so that who is taken out is out. None: nobody may command.
    server : str
        As for :func:`server_name`.
    secret : bytes
        By which it shows whose it is (:func:`proof_of`).
    clock : callable
        In seconds since 1970.

    Notes
    -----
    No path but ``/health`` and those of :data:`OPEN_PATHS` reaches the other application without a login
    (:func:`~murmurfl.privacy.permits.verified_login`); nothing of a request's body is read before. Whoever has a
    login's text has its owner's rights until it ends.
    """

    def __init__(
        self,
        application: Application,
        owners: Path | None,
        server: str,
        secret: bytes = b"",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._application, self._owners, self._server, self._clock = application, owners, server, clock
        self._secret = secret
        self._known: dict[bytes, str] = {}
        self._seen: tuple[int, ...] = ()
        self._said_at = float("-inf")

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] == "lifespan":
            await self._application(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        path = scope["path"]
        if path != HEALTH and not path.startswith(OPEN_PATHS):
            try:
                who = self._owner(scope["headers"])
            except ConfigurationError as error:
                self._say_refused(scope, path)
                nonces = [value for name, value in scope["headers"] if name.lower() == NONCE_HEADER.encode()]
                proof = [proof_of(self._secret, nonces[0])] if self._secret and nonces else []
                await _refuse(send, str(error), proof)
                return
            logger.info("%s%s: %s", COMMANDED, who, plain(path.removeprefix(CONTROL)))
        await self._application(scope, receive, send)

    def _owner(self, headers: list[tuple[bytes, bytes]]) -> str:
        """The name of whose login comes with a request."""
        found = [value for name, value in headers if name.lower() == b"authorization"]
        scheme, _, text = (found[0] if len(found) == 1 else b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            raise PermitError("Expected a login, got none.")
        try:
            owners = self._listed()
        except ConfigurationError as error:
            logger.error("Nobody may command this server: %s", error)
            raise PermitError("Expected a list of owners on the server, got none that can be read.") from error
        return owners[verified_login(text.strip(), owners, self._server, self._clock())]

    def _listed(self) -> dict[bytes, str]:
        """The list as it is now; read again where it is another."""
        if self._owners is None:
            return {}
        try:
            now = self._owners.stat()
            seen = (now.st_mtime_ns, now.st_ino, now.st_size, now.st_mode, now.st_uid)
        except OSError:
            seen = ()
        if not seen or seen != self._seen:
            self._known, self._seen = read_owners(self._owners), seen
        return self._known

    def _say_refused(self, scope: Message, path: str) -> None:
        """At most one line in a while: anybody can have it written."""
        now = time.monotonic()
        if path != CONTROL and now - self._said_at >= _SAY_AGAIN_S:  # that one is how a server tries its gate
            self._said_at = now
            client = (scope.get("client") or ("?",))[0]
            logger.warning("Refused %s from %s: no login of an owner.", plain(path)[:_LONGEST_NAME], plain(str(client)))


async def _refuse(send: Callable[[Message], Awaitable[None]], reason: str, proof: list[bytes]) -> None:
    # 403 and `detail`: that sentence is what `flwr` prints.
    detail = f"{reason} Only owners command this server: `murmurfl owner login KEY CONNECTION`."
    body = json.dumps({"detail": detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(PROOF_HEADER.encode(), one) for one in proof]
    await send({"type": "http.response.start", "status": 403, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})
