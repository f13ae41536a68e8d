"""Flower's Control API as an owner uses it: log in, register the members of a federation, notice how runs end.

A server asks its own SuperLink as an owner would, with a login made of the secret that it started it with.
"""

from __future__ import annotations

import json
import logging
import socket
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import httpx
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListNodesResponse,
    ListRunsRequest,
    ListRunsResponse,
    RegisterNodeRequest,
    RegisterNodeResponse,
    UnregisterNodeRequest,
    UnregisterNodeResponse,
)
from flwr.supercore.address import parse_address
from flwr.supercore.constant import NodeStatus
from flwr.supercore.credential_store import get_credential_store
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from ....privacy.errors import ConfigurationError, MurmurflError
from ....privacy.permits import LONGEST_LOGIN_S, OwnerKey
from ...nodes.connection import name_of, server_name, tls_context
from ...nodes.flower_internals import keep_login
from ...nodes.journal import Journal, plain
from ..health import ENDS, OTHER
from .gate import CONTROL, SuperLinkOptions, is_loopback, own_key

logger = logging.getLogger(__name__)


TIMEOUT_S = 10.0
_LOGIN_S = 600
_RUNS_EVERY_S, _RUNS_A_SECOND = 5.0, 200.0
_FINISHED = "finished"
_LONGEST_WHY = 300
_UNHEARD = "heartbeat"
"""Word in Flower's details of a run whose process was killed."""


class ControlError(MurmurflError):
    """A SuperLink does not answer a command of its owner as expected."""

    kind = "failed"


def answer_to(
    command: str, address: str, context: ssl.SSLContext | bool, login: str, content: bytes = b""
) -> httpx.Response:
    """Return the answer of a SuperLink's Control API to a command with a login; ``context`` is False without TLS."""
    headers = {"authorization": f"Bearer {login}", "content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}
    url = f"{'https' if context else 'http'}://{address}{CONTROL}{command}"
    return httpx.post(url, content=content, headers=headers, verify=context, timeout=TIMEOUT_S, trust_env=False)


class Control:
    """Commands of an owner at a SuperLink; without ``authority``, which its certificate is checked against, no TLS."""

    def __init__(self, address: str, authority: Path | None, server: str, key: OwnerKey) -> None:
        self._key, self._server, self._address = key, server, address
        self._context = False if authority is None else tls_context(authority)

    def nodes(self) -> list[Any]:
        """Return the nodes that are registered now, as Flower describes them."""
        listed = self._call("list-nodes", ListNodesRequest(), ListNodesResponse)
        return [node for node in listed.nodes_info if node.status != NodeStatus.UNREGISTERED]

    def runs(self) -> dict[int, Any]:
        """Return the runs that the SuperLink knows, as Flower describes them, by their number."""
        return dict(self._call("list-runs", ListRunsRequest(), ListRunsResponse).run_dict)

    def register(self, public: bytes, name: str) -> None:
        """Register a node's key."""
        self._call("register-node", RegisterNodeRequest(public_key=public, name=name), RegisterNodeResponse)

    def unregister(self, node: int) -> None:
        """Take a node's key out."""
        self._call("unregister-node", UnregisterNodeRequest(node_id=node), UnregisterNodeResponse)

    def _call(self, command: str, request: Any, kind: Any) -> Any:
        login = self._key.login(self._server, until=int(time.time()) + _LOGIN_S)
        try:
            answer = answer_to(command, self._address, self._context, login, request.SerializeToString())
        except httpx.HTTPError as error:
            raise ControlError(f"Expected the SuperLink to answer {command}, got: {error}.") from error
        if answer.status_code != httpx.codes.OK:
            reason = plain(answer.text)[:_LONGEST_WHY]
            raise ControlError(f"Expected the SuperLink to take {command}, got HTTP {answer.status_code}: {reason}.")
        return kind.FromString(answer.content)


def node_key_bytes(openssh: str) -> bytes:
    """Return a node's public key as Flower keeps it, from OpenSSH's line."""
    found = load_ssh_public_key(openssh.encode())
    if not isinstance(found, ec.EllipticCurvePublicKey):
        raise ControlError("Expected a node's public key of kind ecdsa, got another kind.", kind="wrong-type")
    return public_key_to_bytes(found)


class OwnServer:
    """Follows the runs of a SuperLink, and keeps its nodes those of a federation; it fails quietly and tries again.

    ``proof`` is the secret that the SuperLink was started with; ``members`` is the federation's file of accepted
    members, read again whenever it changes.
    """

    def __init__(self, at: SuperLinkOptions, proof: bytes, members: Path | None, journal: Journal) -> None:
        self.ends: dict[str, int] = dict.fromkeys(map(str, ENDS), 0)
        """Number of runs that have ended, by how."""
        self._at, self._key, self._members, self._journal = at, own_key(proof), members, journal
        self._open: set[int] = set()
        self._finished: set[int] | None = None  # None before the first look: earlier ends are not this server's
        self._seen: tuple[int, int] = (0, 0)
        self._next, self._tried, self._said, self._unregistered = 0.0, float("-inf"), "", ""

    def restarted(self) -> None:
        """Note that the SuperLink was started again: nodes may have to be registered again."""
        self._seen = (0, 0)

    def look(self) -> None:
        """Do what is due; a failure is logged once, and tried again."""
        changed = self._changed()
        now = time.monotonic()
        if changed is None and now < self._next:
            return
        try:
            control = self._control()
            if changed is not None:
                self._tried = now
                self._unregistered = _said_once(self._register(control), self._unregistered)
                self._seen = self._seen if self._unregistered else changed
            if now >= self._next:
                runs = control.runs()
                # A database keeps every run for ever, and all of them are listed.
                self._next = now + _RUNS_EVERY_S + len(runs) / _RUNS_A_SECOND
                self._note_ends(runs)
            self._said = ""
        except (MurmurflError, OSError, ValueError, KeyError) as error:
            self._next = now + _RUNS_EVERY_S
            problem = f"This server could not look at its runs or register nodes: {error}"
            self._said = _said_once(problem, self._said)

    def _control(self) -> Control:
        certificate = Path(self._at.certificate).expanduser() if self._at.certificate else None
        authority = Path(self._at.authority).expanduser() if certificate else None
        return Control(self._at.nearby, authority, server_name(certificate), self._key)

    def _changed(self) -> tuple[int, int] | None:
        """Modification time and inode of the members' file if it has changed since it was registered, else None."""
        if self._members is None:
            return None
        try:
            status = self._members.stat()
        except OSError:
            return None
        now = (status.st_mtime_ns, status.st_ino)
        return now if now != self._seen and time.monotonic() - self._tried >= 1.0 else None

    def _register(self, control: Control) -> str:
        """Register accepted members' nodes and unregister those that have left; return what could not be done, or "".

        A node that the SuperLink refuses holds up no other one.
        """
        document = json.loads(self._members.read_text(encoding="utf-8")) if self._members else {}
        wanted = {node_key_bytes(one["node"]): _name(one) for one in document["members"]}
        left = {node_key_bytes(text) for text in document["left"]}
        known = {bytes(node.public_key): node.node_id for node in control.nodes()}
        failed = []
        for key, name in wanted.items():
            try:
                if key not in known:
                    control.register(key, name)
                    logger.info("Registered the node of %s.", name)
            except ControlError as error:
                failed.append(f"{name} ({error})")
        for key, node in known.items():
            try:
                if key in left and key not in wanted:
                    control.unregister(node)
                    logger.info("Unregistered a node that has left or has another key.")
            except ControlError as error:
                failed.append(f"a node that has left ({error})")
        if not failed:
            return ""
        return f"The SuperLink did not register or unregister every node: {'; '.join(failed)}"

    def _note_ends(self, runs: Mapping[int, Any]) -> None:
        open_before, finished_before = self._open, self._finished
        self._finished = {number for number, run in runs.items() if run.status.status == _FINISHED}
        self._open = runs.keys() - self._finished
        if finished_before is None:
            return
        for number in sorted(self._finished - finished_before):
            self._ended(number, _end_of(runs[number].status), runs[number].status.details)
        for number in sorted(open_before - runs.keys()):  # a SuperLink without a database has forgotten it
            self._ended(number, "killed", "its SuperLink ended")

    def _ended(self, number: int, end: str, details: str) -> None:
        self.ends[end] += 1
        self._journal.note("run-ended", run=number, end=end, why=plain(details)[:_LONGEST_WHY])


def _said_once(problem: str, before: str) -> str:
    """Log a problem unless it is the one before, and return it."""
    if problem and problem != before:
        logger.warning("%s", problem)
    return problem


def _name(joining: Mapping[str, Any]) -> str:
    card = joining["card"]
    return str(card.get("client") or card.get("helper"))


def _end_of(status: Any) -> str:
    if status.sub_status == "failed" and _UNHEARD in str(status.details).lower():
        return "killed"
    return status.sub_status if status.sub_status in ENDS else OTHER


_HOUR_S = 3600


def log_in(key: OwnerKey, connection: str | None, hours: float) -> tuple[str, int]:
    """Log in to the server of one of Flower's connections, and keep the login where `flwr` looks for it.

    ``connection`` is a name in Flower's ``config.toml``, as for ``flwr run``; None: the default one. Returns the
    server's address, and when the login ends, in seconds since 1970.

    The login holds only for the server whose certificate was checked; the key stays here. Whoever reads Flower's
    credentials file has the login; if the server refuses it, none is kept.
    """
    if not 0 < hours * _HOUR_S <= LONGEST_LOGIN_S:
        raise ConfigurationError(
            f"Expected hours > 0 and at most {LONGEST_LOGIN_S // _HOUR_S}, got {hours:g}.",
            kind="out-of-range",
            setting="hours",
            got=hours,
        )
    address, root, insecure = _connection(connection)
    if insecure and not is_loopback((parse_address(address) or ("",))[0]):
        raise ConfigurationError(
            f"Expected TLS on the way to {address}, got insecure = true: whoever listens there would have the login.",
            kind="insecure",
            setting="insecure",
        )
    until = int(time.time() + hours * _HOUR_S)
    try:
        context = False if insecure else tls_context(root)
        text = key.login(_server_at(address, context) if context else "", until=until)
        _try(address, context, text)
    except (OSError, ValueError, httpx.HTTPError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            f"Expected a server at {address} that shows a certificate for its name, got none ({error}): look at the "
            "connection in Flower's config.toml.",
            kind="unreachable",
        ) from error
    keep_login(get_credential_store(), address, text)
    return address, until


def _connection(name: str | None) -> tuple[str, Path | None, bool]:
    """Address, root certificates, and whether TLS is off."""
    from flwr.cli.flower_config import read_superlink_connection

    try:
        found = read_superlink_connection(name)
    except click.ClickException as error:
        raise ConfigurationError(error.message, kind="failed") from error
    if not found.address:
        raise ConfigurationError(
            f"Expected a connection with an address, got {found.name!r} without: name one of Flower's config.toml.",
            kind="missing",
        )
    return found.address, Path(found.root_certificates) if found.root_certificates else None, bool(found.insecure)


def _server_at(address: str, context: ssl.SSLContext) -> str:
    """Return the name of the server there, by its checked certificate."""
    parsed = parse_address(address)
    if parsed is None:
        raise ConfigurationError(f"Expected an address HOST:PORT, got {address!r}.", kind="malformed")
    host, port, _ = parsed
    with (
        socket.create_connection((host, port), TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as secured,
    ):
        return name_of(x509.load_der_x509_certificate(secured.getpeercert(binary_form=True) or b""))


def _try(address: str, context: ssl.SSLContext | bool, text: str) -> None:
    """Send a command that only owners may give, and raise if it is refused."""
    answer = answer_to("list-runs", address, context, text)
    if answer.status_code == httpx.codes.FORBIDDEN:
        raise ConfigurationError(
            f"Expected {address} to take this owner's commands, got a refusal: have its operator put the public half "
            "of the key into the file that `murmurfl server --owners` names, and set both clocks.",
            kind="not-permitted",
        )
    if answer.status_code != httpx.codes.OK:
        raise ConfigurationError(
            f"Expected {address} to be a SuperLink, got HTTP {answer.status_code}.", kind="mismatch"
        )
