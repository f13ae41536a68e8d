"""Flower's Fleet API, as far as a SuperLink can be asked without a node's session being begun or ended.

A session is asked for with a heartbeat that Flower does not allow, so the SuperLink must refuse. It looks at the
signature, the clock and the key before it refuses, and the code of its refusal says how far it came.
"""

from __future__ import annotations

import ssl
from base64 import b64encode
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

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
