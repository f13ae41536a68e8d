"""Who may command a SuperLink: its Control API answers owners who have logged in, and nobody else.

Flower's node keys cover the Fleet API alone: of the Control API, which submits and stops runs and registers nodes, its
open package lets anybody in. The gate stands before Flower's own application, in its process, so no port leads past it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ...privacy import ConfigurationError
from ...privacy.files import exposure
from ...privacy.permits import PermitError, public_owner_key, verified_login
from ..watching.log import plain

CONTROL, OPEN_PATHS, HEALTH = "/v1/control/", ("/v1/fleet/", "/v1/runtime/"), "/health"
"""Where owners alone may call; where Flower asks for a node's key, or for the token of a run's process, itself."""

COMMANDED = "Command of "
"""Begins the line of a command that was let through."""

_WHAT = "a list of owners"
_SAY_AGAIN_S = 10.0
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
        If there is no such file, others may write to it, or a line is none of these.
    """
    try:
        others_may, sentence = exposure(path, _WHAT)
        if others_may == "write":
            raise ConfigurationError(sentence)
        lines = path.read_text(encoding="utf-8").splitlines()
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
    clock : callable
        In seconds since 1970.

    Notes
    -----
    No path but ``/health`` and those of :data:`OPEN_PATHS` reaches the other application without a login
    (:func:`~murmurfl.privacy.permits.verified_login`); nothing of a request's body is read before. Whoever has a
    login's text has its owner's rights until it ends.
    """

    def __init__(
        self, application: Application, owners: Path | None, server: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._application, self._owners, self._server, self._clock = application, owners, server, clock
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
                await _refuse(send, str(error))
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
            owners = {} if self._owners is None else read_owners(self._owners)
        except ConfigurationError as error:
            logger.error("Nobody may command this server: %s", error)
            raise PermitError("Expected a list of owners on the server, got none that can be read.") from error
        return owners[verified_login(text.strip(), owners, self._server, self._clock())]

    def _say_refused(self, scope: Message, path: str) -> None:
        """At most one line in a while: anybody can have it written."""
        now = time.monotonic()
        if path != CONTROL and now - self._said_at >= _SAY_AGAIN_S:  # that one is how a server tries its gate
            self._said_at = now
            client = (scope.get("client") or ("?",))[0]
            logger.warning("Refused %s from %s: no login of an owner.", plain(path)[:_LONGEST_NAME], plain(str(client)))


async def _refuse(send: Callable[[Message], Awaitable[None]], reason: str) -> None:
    # 403 and `detail`: that sentence is what `flwr` prints.
    detail = f"{reason} Only owners command this server: `murmurfl owner login KEY CONNECTION`."
    body = json.dumps({"detail": detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})
