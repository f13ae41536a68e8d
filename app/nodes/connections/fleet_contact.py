"""What a SuperNode knows of its SuperLink: whether it was accepted, whether it is answered, and why not.

Runs inside Flower's own process (:mod:`.flower_supernode`) and tells the node that started it, as lines of JSON on a
pipe of its own: what is printed, where texts of a server may be, cannot pass for it.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx

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
