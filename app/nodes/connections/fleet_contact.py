"""What a SuperNode knows of its SuperLink: whether it was accepted, whether it is answered, and why not.

Runs inside Flower's own process (:mod:`.flower_supernode`) and tells the node that started it, as lines of JSON on a
pipe of its own: what is printed, where texts of a server may be, cannot pass for it.

Flower's Fleet API, as far as a SuperLink can be asked without a node's session being begun or ended. A session is asked
for with a heartbeat that Flower does not allow, so the SuperLink must refuse. It looks at the signature, the clock and
the key before it refuses, and the code of its refusal says how far it came.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
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

from .presented import Presented

_LONGEST_ANSWER = 64 * 1024
_NEVER_ALLOWED_S = 0.0  # Flower allows heartbeats from 10 s on


@dataclass(frozen=True)
class Answer:
    """What a SuperLink, or whoever it was, answered.

    Parameters
    ----------
    status : int
        Of HTTP.
    code : int, optional
        Of Flower's error.
    server_time : float, optional
        What the server takes for the time, in seconds since 1970, to within two seconds.
    ends : float, optional
        When its certificate ends.
    content : bytes
    begun : bool
        Whether it began a session after all; it was ended again.
    """

    status: int
    code: int | None
    server_time: float | None
    ends: float | None
    content: bytes
    begun: bool = False


class FleetApi:
    """A SuperLink as a node sees it.

    Parameters
    ----------
    client : httpx.Client
    url : str
        Scheme, host and port.
    key : EllipticCurvePrivateKey
        The node's own.
    """

    def __init__(self, client: httpx.Client, url: str, key: ec.EllipticCurvePrivateKey) -> None:
        self._client, self._url, self._key = client, url, key
        self._public = public_key_to_bytes(key.public_key())

    def may_begin(self, now: float) -> Answer:
        """Ask for a session that must be refused.

        Parameters
        ----------
        now : float
            The time that is signed, in seconds since 1970.
        """
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=_NEVER_ALLOWED_S)
        answer = self._post("activate-node", request, now)
        node = _node(answer, ActivateNodeResponse)
        if node is None:
            return answer
        # Only one that nobody had open can have begun.
        self._post("deactivate-node", DeactivateNodeRequest(node_id=node), now)
        return replace(answer, begun=True)

    def takes_unknown_keys(self, now: float) -> bool:
        """Whether a node without a registered key may sign in: one with a key of this moment does, and signs off.

        Parameters
        ----------
        now : float
            As for :meth:`may_begin`.
        """
        answer = self._post("register-node", RegisterNodeFleetRequest(public_key=self._public), now)
        node = _node(answer, RegisterNodeFleetResponse)
        if node is None:
            return answer.code != ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED
        self._post("unregister-node", UnregisterNodeFleetRequest(node_id=node), now)
        return True

    def takes_commands(self) -> bool:
        """Whether it lists its runs for somebody without a login: then it takes every other command too.

        What stands before it may well hang up instead of saying no.
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
            ends, body = _ends(response), b""  # the connection may be gone once all was read
            for chunk in response.iter_raw():
                body += chunk[: _LONGEST_ANSWER - len(body)]
                if len(body) == _LONGEST_ANSWER:
                    break
            error = FlowerError.from_json(body.decode("utf-8", "replace"))
            code = None if error is None else error.code
            return Answer(response.status_code, code, _date(response), ends, body)


def passing_key() -> ec.EllipticCurvePrivateKey:
    """A key for a node without one, as Flower's SuperNode makes it."""
    return generate_key_pairs()[0]


def _node(answer: Answer, kind: type[ActivateNodeResponse] | type[RegisterNodeFleetResponse]) -> int | None:
    """The node's number in an answer that grants something."""
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
"""Names the pipe in the environment of the SuperNode's process: the number of a file descriptor."""

CONTACT_EVERY_S = 5.0
_ACCEPTING, _LEAVING, _BEATING = "ActivateNode", "DeactivateNode", "SendNodeHeartbeat"
_NOT_THERE = (502, 503, 504)
_NO = 412  # to a node whose key is unknown, or whose session is open
_CERTIFICATE_CAUSES = {9: "certificate-not-yet-valid", 10: "certificate-expired", 62: "certificate-name"}
_CERTIFICATE_CAUSES[64] = "certificate-name"  # of an address, where 62 is of a host


class Contact:
    """What is known of a SuperLink after each answer and each failure.

    Parameters
    ----------
    tell : callable
        Gets an event, ``connected``, ``contact``, ``turned-away`` or ``lost``, and of the last the cause: one of few
        fixed words.
    clock : callable
        In seconds, ever rising.
    """

    def __init__(self, tell: Callable[[str, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._lock = threading.Lock()
        self._accepted = self._there = False
        self._cause = ""
        self._told_at = -CONTACT_EVERY_S

    def answered(self, method: str, *, success: bool = True) -> None:
        """The SuperLink has answered a call.

        Parameters
        ----------
        method : str
            Name of the remote procedure.
        success : bool
            Of a heartbeat, whether the SuperLink knows the node.
        """
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
        """A call got no answer of the SuperLink's; what it said no to is an answer.

        Parameters
        ----------
        error : BaseException
        method : str
            Name of the remote procedure.
        """
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
    """Why a call got no answer, in one of few fixed words; empty if the SuperLink answered, or what is in its place."""
    if isinstance(error, httpx.HTTPStatusError):
        return "unreachable" if error.response.status_code in _NOT_THERE else ""
    if not isinstance(error, httpx.TransportError):
        return ""
    for inner in _chain(error):
        if isinstance(inner, ssl.SSLCertVerificationError):
            return _CERTIFICATE_CAUSES.get(inner.verify_code, "certificate-unknown")
        if isinstance(inner, ssl.SSLError):
            return "no-tls"
        if isinstance(inner, socket.gaierror):
            return "name-not-found"
        if isinstance(inner, ConnectionRefusedError):
            return "refused"
        if isinstance(inner, httpx.TimeoutException | TimeoutError):
            return "timed-out"
    return "unreachable"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from, the innermost first."""
    found: list[BaseException] = []
    inner: BaseException | None = error
    while inner is not None and inner not in found:
        found.append(inner)
        inner = inner.__cause__ or inner.__context__
    yield from reversed(found)


def watch_fleet(contact: Contact) -> None:
    """Have every call of Flower's SuperNode in this process reported."""
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
    """Contact that is told through the pipe that the environment names; None if it names none."""
    named = os.environ.pop(EVENTS_VARIABLE, "")
    if not named.isdigit():
        return None
    pipe = int(named)
    os.set_inheritable(pipe, False)

    def tell(event: str, cause: str) -> None:
        with suppress(OSError):  # the node is gone, and this process will be
            os.write(pipe, json.dumps({"event": event, "cause": cause}).encode() + b"\n")

    return Contact(tell)
