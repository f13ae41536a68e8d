"""Flower's Fleet API as a node uses it: ask a SuperLink without a session, and report a running SuperNode's contact.

To ask without a session, :class:`FleetApi` requests one with a heartbeat interval that Flower does not allow, which the
SuperLink must refuse. It checks the signature, the clock and the key first; the code of its refusal says how far it
came.

:class:`Contact` runs inside Flower's own process (:mod:`.flower_supernode`) and reports to the node that started it,
as lines of JSON on a pipe of its own. Printed text, which may come from a server, cannot pass for it.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    RegisterNodeFleetRequest,
    RegisterNodeFleetResponse,
    UnregisterNodeFleetRequest,
)
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Protobuf

from .certificate import Presented

_LONGEST_ANSWER = 64 * 1024
_NEVER_ALLOWED_S = 0.0  # Flower allows heartbeats from 10 s on


@dataclass(frozen=True)
class Answer:
    """The answer of a SuperLink, or of whatever listens in its place."""

    status: int  # HTTP's
    code: int | None  # of Flower's error
    server_time: float | None  # seconds since 1970, to within two
    ends: float | None  # when the certificate ends, in seconds since 1970
    content: bytes
    begun: bool = False  # whether a session began after all; it was ended again


class FleetApi:
    """A SuperLink as a node with this key sees it."""

    def __init__(self, client: httpx.Client, url: str, key: ec.EllipticCurvePrivateKey) -> None:
        self._client, self._url, self._key = client, url, key
        self._public = public_key_to_bytes(key.public_key())

    def may_begin(self, now: float) -> Answer:
        """Ask for a session that must be refused.

        Parameters
        ----------
        now : float
            The time to sign, in seconds since 1970.
        """
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=_NEVER_ALLOWED_S)
        answer = self._post("activate-node", request, now)
        node = _node(answer, ActivateNodeResponse)
        if node is None:
            return answer
        # It began, so nobody had one open.
        self._post("deactivate-node", DeactivateNodeRequest(node_id=node), now)
        return replace(answer, begun=True)

    def takes_unknown_keys(self, now: float) -> bool:
        """Whether a node with an unregistered key may sign in: ``key`` signs in and off again."""
        answer = self._post("register-node", RegisterNodeFleetRequest(public_key=self._public), now)
        node = _node(answer, RegisterNodeFleetResponse)
        if node is None:
            return answer.code != ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED
        self._post("unregister-node", UnregisterNodeFleetRequest(node_id=node), now)
        return True

    def takes_commands(self) -> bool:
        """Whether the server lists its runs without a login; then it takes every other command too.

        A gate may hang up instead of refusing.
        """
        headers = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}
        try:
            with self._client.stream("POST", f"{self._url}/v1/control/list-runs", headers=headers) as response:
                return response.status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def _post(self, name: str, request: Protobuf, now: float) -> Answer:
        signed_at = datetime.fromtimestamp(now, UTC).isoformat()
        signature = sign_message(self._key, signed_at.encode("ascii"))
        headers = {
            "content-type": PROTOBUF_MEDIA_TYPE,
            "accept": PROTOBUF_MEDIA_TYPE,
            "accept-encoding": "identity",
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(self._public).decode("ascii"),
            TIMESTAMP_HEADER: signed_at,
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode("ascii"),
        }
        url, content = f"{self._url}/v1/fleet/{name}", request.SerializeToString(deterministic=True)
        with self._client.stream("POST", url, content=content, headers=headers) as response:
            ends, body = _ends(response), b""  # read now: the connection may be gone after the body
            for chunk in response.iter_raw():
                body += chunk[: _LONGEST_ANSWER - len(body)]
                if len(body) == _LONGEST_ANSWER:
                    break
            error = FlowerError.from_json(body.decode("utf-8", "replace"))
            code = None if error is None else error.code
            return Answer(response.status_code, code, _date(response), ends, body)


def passing_key() -> ec.EllipticCurvePrivateKey:
    """A key for a node without one, made as Flower's SuperNode makes it."""
    return generate_key_pairs()[0]


def _node(answer: Answer, kind: type[ActivateNodeResponse] | type[RegisterNodeFleetResponse]) -> int | None:
    """The node's number, if the answer grants something."""
    if answer.status != httpx.codes.OK:
        return None
    try:
        return kind.FromString(answer.content).node_id or None
    except DecodeError:
        return None


def _date(response: httpx.Response) -> float | None:
    try:
        return parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError, IndexError, OverflowError):
        return None


def _ends(response: httpx.Response) -> float | None:
    stream = response.extensions.get("network_stream")
    secured = None if stream is None else stream.get_extra_info("socket")
    der = secured.getpeercert(binary_form=True) if isinstance(secured, ssl.SSLSocket) else None
    presented = Presented.of(der) if der else None
    return None if presented is None else presented.ends


EVENTS_VARIABLE = "MURMURFL_SUPERNODE_EVENTS"
"""Environment variable of the SuperNode's process: the file descriptor of the pipe."""

CONTACT_EVERY_S = 5.0
_ACCEPTING, _LEAVING, _BEATING = "ActivateNode", "DeactivateNode", "SendNodeHeartbeat"
NO_SERVER_BEHIND = (502, 503, 504)
_NO = 412  # the key is unknown, or the session open
NOT_YET_VALID, _EXPIRED, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 62, 64  # OpenSSL's X509_V_ERR
CERTIFICATE_CAUSES = {
    NOT_YET_VALID: "certificate-not-yet-valid",
    _EXPIRED: "certificate-expired",
    _OTHER_NAME: "certificate-name",
    _OTHER_ADDRESS: "certificate-name",
}


class Contact:
    """Reports changes of a SuperNode's contact with its SuperLink.

    Parameters
    ----------
    tell : callable
        Receives an event, ``connected``, ``contact``, ``turned-away`` or ``lost``, and for ``lost`` its cause.
    clock : callable
        Monotonic seconds.
    """

    def __init__(self, tell: Callable[[str, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._lock = threading.Lock()
        self._accepted = self._there = False
        self._cause = ""
        self._told_at = -CONTACT_EVERY_S

    def answered(self, method: str, *, success: bool = True) -> None:
        """Note an answer of the SuperLink to a remote procedure; ``success`` is whether it knows the node."""
        with self._lock:
            self._accepted = (self._accepted or method == _ACCEPTING) and method != _LEAVING and success
            self._cause = ""
            if not self._accepted:
                self._there = False
                return
            now = self._clock()
            event = "contact" if self._there else "connected"
            self._there = True
            if event == "connected" or now - self._told_at >= CONTACT_EVERY_S:
                self._told_at = now
                self._tell(event, "")

    def failed(self, error: BaseException, method: str = "") -> None:
        """Note a call without an answer. A refusal is an answer."""
        if method == _ACCEPTING and isinstance(error, httpx.HTTPStatusError) and error.response.status_code == _NO:
            self._tell("turned-away", "")
        cause = cause_of(error)
        if not cause:
            return
        with self._lock:
            told, self._there, self._cause = self._cause, False, cause
            if told != cause:
                self._tell("lost", cause)


def cause_of(error: BaseException) -> str:
    """Cause of a failed call, one of few fixed words; empty if the SuperLink, or something in its place, answered."""
    if isinstance(error, httpx.HTTPStatusError):
        return "unreachable" if error.response.status_code in NO_SERVER_BEHIND else ""
    if not isinstance(error, httpx.TransportError):
        return ""
    for inner in reversed(causes_of(error)):
        if isinstance(inner, ssl.SSLCertVerificationError):
            return CERTIFICATE_CAUSES.get(inner.verify_code, "certificate-unknown")
        if isinstance(inner, ssl.SSLError):
            return "no-tls"
        if isinstance(inner, socket.gaierror):
            return "name-not-found"
        if isinstance(inner, ConnectionRefusedError):
            return "refused"
        if isinstance(inner, httpx.TimeoutException | TimeoutError):
            return "timed-out"
    return "unreachable"


def causes_of(error: BaseException) -> list[BaseException]:
    """An error and what it was raised from, the outermost first."""
    found: list[BaseException] = []
    inner: BaseException | None = error
    while inner is not None and inner not in found:
        found.append(inner)
        inner = inner.__cause__ or inner.__context__
    return found


def watch_fleet(contact: Contact) -> None:
    """Report every call that Flower's SuperNode makes in this process."""
    # The one place that touches the private names of Flower's connection; a test with a real SuperNode covers it.
    from flwr.supernode.fleet_http_client import FleetHttpClient

    call = FleetHttpClient._unary_unary

    def watched(client: FleetHttpClient, *, rpc_method: str, **request: Any) -> Any:
        method = rpc_method.rpartition("/")[2]
        try:
            response = call(client, rpc_method=rpc_method, **request)
        except Exception as error:
            contact.failed(error, method)
            raise
        contact.answered(method, success=method != _BEATING or bool(response.success))
        return response

    FleetHttpClient._unary_unary = watched  # type: ignore[method-assign]


def telling_the_node() -> Contact | None:
    """A contact that reports through the pipe named in the environment; None if none is named."""
    named = os.environ.pop(EVENTS_VARIABLE, "")
    if not named.isdigit():
        return None
    pipe = int(named)
    os.set_inheritable(pipe, False)

    def tell(event: str, cause: str) -> None:
        with suppress(OSError):  # the node is gone, and this process will be
            os.write(pipe, json.dumps({"event": event, "cause": cause}).encode() + b"\n")

    return Contact(tell)
