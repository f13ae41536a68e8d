"""The gate of a SuperLink: its Control API answers owners who have logged in, and nobody else.

Flower's node keys protect the Fleet API only. The Control API submits and stops runs and registers nodes, and Flower's
open package lets anybody use it. The gate stands in front of Flower's application, in its process, so no port leads
past it; whoever starts a SuperLink checks its options, and that the gate answers (:class:`SuperLinkOptions`).
"""

from __future__ import annotations

import errno
import hmac
import http.client
import ipaddress
import json
import logging
import os
import re
import secrets
import ssl
import stat
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from ....privacy.errors import ConfigurationError
from ....privacy.files import exposure
from ....privacy.permits import OwnerKey, PermitError, public_owner_key, verified_login
from ...nodes.journal import plain
from .limits import (
    LARGEST_BODY,
    UNKNOWN_S,
    BodyLimits,
    Message,
    Receive,
    RejectedRequestError,
    UploadLimits,
    received,
    request_of_unknown,
)

FLEET, RUNTIME = "/v1/fleet/", "/v1/runtime/"
"""Paths of nodes; paths of runs' processes."""

CONTROL, OPEN_PATHS, HEALTH = "/v1/control/", (FLEET, RUNTIME), "/health"
"""Paths for owners only; paths for a node's key or the token of a run's process; a path for all."""

PUBLISHED = "/federation/"
"""Path of a federation's public document, followed by the digest of its terms, which only holders of a kit know."""

COMMANDED, OURSELVES = "Command of ", "this server"
"""Prefix of the log line of an accepted command; whose it is if whoever started the SuperLink gave it."""

_WHAT = "a list of owners"
NONCE_HEADER, PROOF_HEADER = "x-murmurfl-nonce", "x-murmurfl-gate"
"""Headers by which whoever started a SuperLink recognises its gate."""

_OWN_COMMANDS = frozenset(
    f"{CONTROL}{name}" for name in ("list-nodes", "list-runs", "register-node", "unregister-node")
)
"""Commands that the process that started a SuperLink may send."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SAY_AGAIN_S = 10.0
_LARGEST_LIST = 1 << 20
_LONGEST_NAME = 64
_PART = 64 << 10

UPLOAD, FETCH = f"{FLEET}push-object", f"{FLEET}pull-messages"
"""The call by which a node sends a part of a reply; the call by which it gets a message."""

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Sender:
    """Sender of a request, and how much of the request is read."""

    name: bytes  # SHA-256 of a node's key, a task's token or an owner's key; empty if unknown
    largest_body: int  # 0: it is not read, and Flower gets an empty one
    seconds: float | None  # for the whole request; None if it may last


Senders = Callable[[str, Headers], Awaitable[Sender | None]]
"""Function that returns the sender of a request; None if the request is answered in Flower's place."""

UNREAD = Sender(b"", 0, UNKNOWN_S)
"""A sender whose request needs no body."""

Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

logger = logging.getLogger("flwr")  # so that its lines are read as the SuperLink's own


def read_owners(path: Path) -> dict[bytes, str]:
    """Public keys and names of the owners of a server, from a file that nobody else may write to.

    One owner a line: the public half that ``murmurfl owner key`` prints, and a name. ``#`` begins a comment.
    """
    try:
        others_may, sentence = exposure(path, _WHAT)
        if others_may == "write":
            raise ConfigurationError(sentence, kind="insecure")
        lines = _content(path).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"Expected {_WHAT} at {path}, got {getattr(error, 'strerror', None) or 'no text'}: write a line for each, "
            "the public half that `murmurfl owner key` says and a name.",
            kind="malformed",
        ) from error
    owners = {}
    for number, line in enumerate(lines, 1):
        key, _, name = line.partition("#")[0].strip().partition(" ")
        try:
            if key:
                owners[public_owner_key(key)] = plain(name)[:_LONGEST_NAME] or key[:8]
        except ConfigurationError as error:
            raise error.reworded(f"{error} It is in line {number} of {path}.") from error
    return owners


def _content(path: Path) -> bytes:
    """Read a regular file without waiting: a pipe's other end may never come."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_LIST:
            raise OSError(errno.EINVAL, "no regular file, or a very large one")
        if os.name == "posix" and status.st_uid not in (0, os.geteuid()):
            raise OSError(errno.EPERM, "a file of another user's")
        return file.read()


def proof_of(secret: bytes, nonce: bytes) -> bytes:
    """Return a gate's answer to a nonce, made with the secret that it was started with."""
    return hmac.digest(secret, nonce, "sha256").hex().encode()


def own_key(secret: bytes) -> OwnerKey:
    """Return the key by which whoever started a SuperLink logs in to it, made of its secret."""
    return OwnerKey(hmac.digest(secret, b"murmurfl: a server's own login", "sha256"))


class Gate:
    """An ASGI application that passes owners' commands, and what needs no login, on to Flower's ``application``.

    ``owners`` (:func:`read_owners`) is read again at every command, so that a removed owner is out at once; None:
    nobody may command. ``senders`` recognises nodes and runs' processes by the headers of their requests. ``secret``
    proves which gate answers (:func:`proof_of`), and lets who started it list runs and nodes and register nodes.
    ``published`` is a folder of public documents, each named by a digest (:data:`PUBLISHED`).

    Without a login (:func:`~murmurfl.privacy.permits.verified_login`), only ``/health`` and :data:`OPEN_PATHS` reach
    the other application, and published documents are answered here. Whoever has a login's text has its owner's rights
    until it ends.

    No body is read before the sender is known, but for the few kilobytes by which a node or a run's process introduces
    itself. Bodies of known senders are bounded (:class:`~.limits.BodyLimits`), and so is what nodes upload, by
    ``largest_reply`` bytes a message (:class:`~.limits.UploadLimits`).
    """

    def __init__(
        self,
        application: Application,
        owners: Path | None,
        server: str,
        senders: Senders,
        secret: bytes = b"",
        clock: Callable[[], float] = time.time,
        published: Path | None = None,
        largest_reply: int = 1 << 30,
    ) -> None:
        self._application, self._owners, self._server, self._clock = application, owners, server, clock
        self._secret, self._published, self._senders = secret, published, senders
        self._own = own_key(secret).public if secret else b""
        self._bodies, self._uploads = BodyLimits(), UploadLimits(largest_reply)
        self._known: dict[bytes, str] = {}
        self._seen: tuple[int, ...] = ()
        self._said_at = float("-inf")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._application(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        with request_of_unknown() as connection:
            path, headers = scope["path"], scope["headers"]
            if self._published is not None and path.startswith(PUBLISHED):
                await _publish(send, self._published, path.removeprefix(PUBLISHED))
                return
            try:
                sender = UNREAD if path == HEALTH else await self._sender(path, headers)
            except ConfigurationError as error:
                self._say_refused(scope, path)
                nonces = [value for name, value in headers if name.lower() == NONCE_HEADER.encode()]
                proof = [proof_of(self._secret, nonces[0])] if self._secret and nonces else []
                # `flwr` prints the `detail` of a 403.
                detail = f"{error} Only owners command this server: `murmurfl owner login KEY CONNECTION`."
                await _refuse(send, RejectedRequestError(http.HTTPStatus.FORBIDDEN, detail), proof)
                return
            if sender is None:
                await _refuse(
                    send, RejectedRequestError(http.HTTPStatus.UNAUTHORIZED, "Invalid SuperNode authentication")
                )
                return
            if connection is not None and sender.name and not connection.is_from(sender.name, sender.seconds):
                too_many = RejectedRequestError(
                    http.HTTPStatus.SERVICE_UNAVAILABLE, "This sender has too many connections."
                )
                await _refuse(send, too_many)
                return
            await self._pass(sender, scope, receive, send)

    async def _pass(self, sender: Sender, scope: Message, receive: Receive, send: Send) -> None:
        """Hand a request over to Flower once its body is here."""
        if not sender.largest_body:
            await self._application(scope, received(b"", receive), _closing(send))
            return
        try:
            async with self._bodies.body(receive, scope["headers"], sender.name, sender.largest_body) as body:
                if scope["path"] == UPLOAD:
                    self._uploads.take(sender.name, len(body))
                elif scope["path"] == FETCH:
                    send = self._noting_messages(sender.name, send)
                await self._application(scope, received(body, receive), send)
        except RejectedRequestError as refused:
            await _refuse(send, refused)

    def _noting_messages(self, node: bytes, send: Send) -> Send:
        """Note when an answer has a message in it; without one it is empty, and a refusal has none."""
        waiting = False

        async def noting(message: Message) -> None:
            nonlocal waiting
            if message["type"] == "http.response.start":
                waiting = message["status"] == http.HTTPStatus.OK
            elif waiting and message.get("body"):
                self._uploads.asked(node)
                waiting = False
            await send(message)

        return noting

    async def _sender(self, path: str, headers: Headers) -> Sender | None:
        """Return the sender of a request; raise without an owner's login where one is needed."""
        if path.startswith(OPEN_PATHS):
            return await self._senders(path, headers)
        key, owner = self._owner(headers, path)
        logger.info("%s%s: %s", COMMANDED, owner, plain(path.removeprefix(CONTROL)))
        return Sender(key, LARGEST_BODY, None)

    def _owner(self, headers: Headers, path: str) -> tuple[bytes, str]:
        """Key and name of the owner whose login comes with a request."""
        found = [value for name, value in headers if name.lower() == b"authorization"]
        scheme, _, text = (found[0] if len(found) == 1 else b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            raise PermitError("Expected a login, got none.")
        if self._own and path in _OWN_COMMANDS:
            with suppress(PermitError):
                verified_login(text.strip(), [self._own], self._server, self._clock())
                return self._own, OURSELVES
        try:
            owners = self._listed()
        except ConfigurationError as error:
            logger.error("Nobody may command this server: %s", error)
            raise PermitError(
                "Expected a list of owners on the server, got none that can be read.", kind="unreadable"
            ) from error
        key = verified_login(text.strip(), owners, self._server, self._clock())
        return key, owners[key]

    def _listed(self) -> dict[bytes, str]:
        """Return the current list; read again if the file changed."""
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
        """Log a refusal, at most one line in a while: anybody can cause one."""
        now = time.monotonic()
        if path != CONTROL and now - self._said_at >= _SAY_AGAIN_S:  # a server tries its gate at CONTROL
            self._said_at = now
            client = (scope.get("client") or ("?",))[0]
            logger.warning("Refused %s from %s: no login of an owner.", plain(path)[:_LONGEST_NAME], plain(str(client)))


async def _publish(send: Send, folder: Path, name: str) -> None:
    """Send a document in small parts, so that whoever does not read it holds one; no body of the request is read."""
    with ExitStack() as stack:
        size, file = 0, None
        if _DIGEST.fullmatch(name):
            with suppress(OSError):
                file = stack.enter_context((folder / f"{name}.json").open("rb"))
                size = os.fstat(file.fileno()).st_size
        headers = [(b"content-type", b"application/json"), (b"content-length", str(size).encode())]
        start = {"type": "http.response.start", "status": 200 if size else 404, "headers": headers}
        await _closing(send)(start)
        while file is not None and size > _PART:
            await send({"type": "http.response.body", "body": file.read(_PART), "more_body": True})
            size -= _PART
        await send({"type": "http.response.body", "body": file.read(size) if file is not None else b""})


def _closing(send: Send) -> Send:
    """End the connection with the answer: a body that was not read would be taken for the next request."""

    async def last(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        await send(message)

    return last


async def _refuse(send: Send, refused: RejectedRequestError, proof: Sequence[bytes] = ()) -> None:
    body = json.dumps({"detail": refused.reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(PROOF_HEADER.encode(), one) for one in proof]
    await _closing(send)({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


_ANSWER_WITHIN_S = 3.0
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@dataclass(frozen=True)
class SuperLinkOptions:
    """Address, files and processes of runs, by the options of ``flower-superlink``."""

    host: str
    port: int
    certificate: str  # PEM file; empty without TLS
    database: Path | None = None  # of nodes, runs and messages; None if in memory
    authority: str = ""  # PEM file that the certificate is checked against
    processes: str = "subprocess"  # or "process": runs' processes are started by somebody who knows the secret
    secret: str = ""  # file of that secret
    # Whether only nodes with registered keys may sign in; a simulation has no nodes
    nodes_register: bool = False

    @classmethod
    def read(cls, options: Sequence[str]) -> SuperLinkOptions:
        """Read the options as Flower does; all others are left to Flower."""
        import argparse

        from flwr.supercore.constant import SUPERLINK_UVICORN_DEFAULT_PORT, UVICORN_DEFAULT_HOST

        parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
        parser.add_argument("--host", default=UVICORN_DEFAULT_HOST)
        parser.add_argument("--port", default=str(SUPERLINK_UVICORN_DEFAULT_PORT))
        parser.add_argument("--isolation", default="subprocess")
        for option in ("--ssl-certfile", "--ssl-ca-certfile", "--database", "--superexec-auth-secret-file"):
            parser.add_argument(option, default="")
        for option in ("--insecure", "--enable-supernode-auth", "--simulation"):
            parser.add_argument(option, action="store_true")
        try:
            read, _ = parser.parse_known_args(list(options))
        except argparse.ArgumentError:  # Flower reports it
            read = parser.parse_args([])
        try:
            port = int(read.port)
        except ValueError:  # Flower reports it
            port = SUPERLINK_UVICORN_DEFAULT_PORT
        certificate = "" if read.insecure else read.ssl_certfile
        database = _database_file(read.database.strip())
        secret = read.superexec_auth_secret_file
        registered = read.enable_supernode_auth or read.simulation
        return cls(read.host, port, certificate, database, read.ssl_ca_certfile, read.isolation, secret, registered)

    def check(self) -> None:
        """Raise if logins would travel in clear, anybody could be a node, or anybody could take a run's task."""
        if not self.certificate and not is_loopback(self.host):
            raise ConfigurationError(
                f"Expected --ssl-certfile, --ssl-keyfile and --ssl-ca-certfile, or --host 127.0.0.1, got {self.host} "
                "without TLS: whoever listens on the way could command the server.",
                kind="insecure",
            )
        if not self.nodes_register and not is_loopback(self.host):
            raise ConfigurationError(
                "Expected --enable-supernode-auth, or --host 127.0.0.1, got neither: anybody could register a node, be "
                "asked by runs, and fetch their bundles.",
                kind="insecure",
            )
        if self.processes == "process" and not self.secret:
            raise ConfigurationError(
                "Expected --superexec-auth-secret-file with --isolation process, got none: anybody could take the "
                "place of a run's process.",
                kind="insecure",
            )

    @property
    def nearby(self) -> str:
        """Host and port for processes of this computer."""
        host = _EVERYWHERE.get(self.host, self.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def answers(self) -> bool:
        """Return True if a SuperLink answers, asked from this computer."""
        answer = self._asked("GET", "/health", {})
        return answer is not None and answer.status == http.HTTPStatus.OK

    def refuses(self, proof: bytes) -> bool | None:
        """Whether the gate with the secret ``proof`` answers and refuses a command; None without an answer."""
        nonce = secrets.token_hex(16)
        answer = self._asked("POST", CONTROL, {NONCE_HEADER: nonce})
        if answer is None:
            return None
        header = answer.getheader(PROOF_HEADER) or ""
        ours = hmac.compare_digest(header.encode(), proof_of(proof, nonce.encode()))
        return ours and answer.status == http.HTTPStatus.FORBIDDEN

    def _asked(self, method: str, path: str, headers: Mapping[str, str]) -> http.client.HTTPResponse | None:
        """Return an answer without its body; None without one."""
        host = _EVERYWHERE.get(self.host, self.host)
        connection: http.client.HTTPConnection
        if self.certificate:
            # Nothing secret is sent, and the answer is believed for its proof alone.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            connection = http.client.HTTPSConnection(host, self.port, timeout=_ANSWER_WITHIN_S, context=context)
        else:
            connection = http.client.HTTPConnection(host, self.port, timeout=_ANSWER_WITHIN_S)
        try:
            connection.request(method, path, headers=dict(headers))
            return connection.getresponse()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def is_loopback(host: str) -> bool:
    """Return True if only this computer reaches the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _database_file(named: str) -> Path | None:
    """File of a path or of an SQLAlchemy address; None if the database is in memory or elsewhere."""
    scheme, there, rest = named.partition(":///")
    file = rest.partition("?")[0] if there and scheme == "sqlite" else named
    return None if not file or file.startswith(":") or "://" in file else Path(file)
