"""Diagnosis of a failed connection to a SuperLink: one cause of a fixed list, and a sentence for its operator.

:class:`FleetApi` asks without a session: it requests one with a heartbeat interval that Flower does not allow, which
the SuperLink must refuse. It checks the signature, the clock and the key first; the code of its refusal says how far it
came. So a diagnosis begins and ends no session, and a running node with the same key notices nothing.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.constant import MAX_RETRY_DELAY, SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
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

from ...privacy.errors import ConfigurationError
from .connection import (
    CERTIFICATE_CAUSES,
    NO_SERVER_BEHIND,
    NOT_YET_VALID,
    Connection,
    Presented,
    causes_of,
    presented_by,
    printable,
    tls_context,
    utc,
)
from .flower_process import Pauses
from .journal import Entry, Journal, Repeated

logger = logging.getLogger(__name__)


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
        """Ask for a session that must be refused; the request is signed for the time ``now``."""
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=_NEVER_ALLOWED_S)
        answer = self._post("activate-node", request, now)
        node = _node(answer, ActivateNodeResponse)
        if node is None:
            return answer
        # It began, so nobody had one open.
        self._post("deactivate-node", DeactivateNodeRequest(node_id=node), now)
        return replace(answer, begun=True)

    def takes_unknown_keys(self, now: float) -> bool:
        """Return True if a node with an unregistered key may sign in: ``key`` signs in and off again."""
        answer = self._post("register-node", RegisterNodeFleetRequest(public_key=self._public), now)
        node = _node(answer, RegisterNodeFleetResponse)
        if node is None:
            return answer.code != ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED
        self._post("unregister-node", UnregisterNodeFleetRequest(node_id=node), now)
        return True

    def takes_commands(self) -> bool:
        """Return True if the server lists its runs without a login; then it takes every other command too.

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
    """Return a key for a node without one, made as Flower's SuperNode makes it."""
    return generate_key_pairs()[0]


def _node(answer: Answer, kind: type[ActivateNodeResponse] | type[RegisterNodeFleetResponse]) -> int | None:
    """Return the node's number, if the answer grants something."""
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


CAUSES = (
    "reached",
    "name-not-found",
    "refused",
    "unreachable",
    "timed-out",
    "no-tls",
    "wants-tls",
    "certificate-unknown",
    "certificate-name",
    "certificate-expired",
    "certificate-not-yet-valid",
    "not-a-superlink",
    "key-unusable",
    "key-missing",
    "key-not-registered",
    "clock",
    "session-open",
    "ended",
)
"""``reached``: nothing is wrong. ``ended``: a connected SuperNode ended although nothing is wrong."""

AHEAD_S = float(SYSTEM_TIME_TOLERANCE)
"""The server refuses a node whose clock is this many seconds ahead of its own."""

BEHIND_S = float(TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE)
"""The server refuses a node whose clock is this many seconds behind its own."""


@dataclass(frozen=True)
class Diagnosis:
    """The outcome of trying a connection."""

    cause: str  # one of :data:`CAUSES`
    # For the operator: what was expected, what came, what to do. Independent of anybody's data.
    sentence: str
    # Seconds by which this computer's clock is ahead of the server's, to within two; None if the server tells no time
    ahead_s: float | None = None
    certificate_ends: float | None = None  # when the server's certificate ends, in seconds since 1970
    # Whether the server obeyed a command without a login
    takes_commands: bool = False

    def __post_init__(self) -> None:
        if self.cause not in CAUSES:
            raise ConfigurationError(
                f"Expected one of {', '.join(CAUSES)}, got {self.cause!r}.",
                kind="unknown-name",
                setting="cause",
                got=self.cause,
            )


_SPARE_S = 1.0
_DATES_S = 2.0  # the precision of HTTP dates


def diagnose(
    connection: Connection, timeout_s: float = 5.0, *, refused: bool = False, clock: Callable[[], float] = time.time
) -> Diagnosis:
    """Try a connection as a SuperNode would, step by step, within about ``timeout_s``.

    ``refused``: whether a SuperNode with this connection was turned away just now. If nothing else is wrong, its old
    session is still open.

    Releases nothing and reads neither data nor ledger. It sends what a SuperNode sends to sign in, and one question
    that a server answers only its owners; both depend on the connection, the time and the key alone.
    """
    attempt = _Attempt(connection, timeout_s, clock)
    found: list[Diagnosis] = []
    # A thread, because a name may take longer to look up than any socket waits.
    thread = threading.Thread(target=lambda: found.append(attempt.diagnosis()), daemon=True, name="murmurfl-diagnosis")
    thread.start()
    thread.join(timeout_s + _SPARE_S)
    attempt.end()
    diagnosis = found[0] if found else attempt.failed("timed-out", f"none within {timeout_s:g} s")
    if refused and diagnosis.cause == "reached":
        return attempt.failed("session-open", "a refusal", seen=diagnosis)
    return diagnosis


_WORDS = {
    "refused": ("a SuperLink", "have the SuperLink started, or correct the port"),
    "timed-out": ("an answer", "the network is down, a firewall drops what is sent, or the server is overloaded"),
    "no-tls": ("TLS", "the SuperLink was started with --insecure, or another service listens on that port"),
    "wants-tls": ("plain HTTP", "leave insecure out and name the server's root certificates"),
    "not-a-superlink": ("Flower's SuperLink", "correct the address, or ask who runs what stands in between"),
    "key-missing": (
        "this node to have a key",
        "registered nodes only are taken; name a key as private-key in [connection], or as --auth-private-key",
    ),
    "session-open": (
        "a session",
        "the session of a node with the same key is still open; after a crash it ends by itself within a minute or so, "
        "and if it does not, another computer runs with this key",
    ),
}
"""Expectation and remedy, by cause; where a cause has several, its finder supplies them."""


class _Attempt:
    """One try of a connection."""

    def __init__(self, connection: Connection, timeout_s: float, clock: Callable[[], float]) -> None:
        self._connection, self._timeout_s, self._clock = connection, timeout_s, clock
        self._client: httpx.Client | None = None
        host, _, port = connection.superlink.rpartition(":")
        scheme = "http" if connection.insecure else "https"
        self._host, self._port, self._url = host.strip("[]"), int(port), f"{scheme}://{connection.superlink}"
        proxies = urllib.request.getproxies()
        self._proxied = scheme in proxies and not urllib.request.proxy_bypass(self._host)
        self._where = connection.superlink + (f" through {_proxy(proxies[scheme])}" if self._proxied else "")

    def end(self) -> None:
        """Hang up: a server that sends a byte now and then would hold the thread for days."""
        if self._client is not None:
            self._client.close()

    def failed(
        self, cause: str, got: str, *, expected: str = "", advice: str = "", seen: Diagnosis | None = None
    ) -> Diagnosis:
        """Return a diagnosis with a cause, in the usual words unless others are given; ``seen`` has its figures."""
        usual_expected, usual_advice = _WORDS.get(cause, ("", ""))
        sentence = f"Expected {expected or usual_expected} at {self._where}, got {got}: {advice or usual_advice}."
        return replace(seen or Diagnosis(cause, ""), cause=cause, sentence=sentence)

    def diagnosis(self) -> Diagnosis:
        try:
            key = None if self._connection.private_key is None else read_key(self._connection.private_key)
            context = False if self._connection.insecure else tls_context(self._connection.root_certificates)
            self._client = httpx.Client(verify=context, timeout=self._timeout_s)
            superlink = FleetApi(self._client, self._url, key or passing_key())
            found = self._asked(superlink)
            return replace(found, takes_commands=found.cause == "reached" and superlink.takes_commands())
        except _KeyError as error:
            return Diagnosis("key-unusable", str(error))
        except ConfigurationError as error:
            return Diagnosis("certificate-unknown", str(error))
        except httpx.HTTPError as error:
            return self._unconnected(error)
        except Exception as error:  # whatever the other side sent, the operator gets a cause
            got = f"what Flower's client does not understand ({type(error).__name__})"
            return self.failed("not-a-superlink", got)

    def _asked(self, superlink: FleetApi) -> Diagnosis:
        answer = superlink.may_begin(self._clock())
        ahead = None if answer.server_time is None else self._clock() - answer.server_time
        seen = Diagnosis("reached", f"The SuperLink at {self._where} takes this node.", ahead, answer.ends)
        if answer.status == httpx.codes.UNAUTHORIZED:
            return self._not_authenticated(seen)
        if answer.code == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL or answer.begun:
            return seen
        if answer.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            if key := self._connection.private_key:
                expected, got = "a key that the SuperLink knows", f"no such key ({key})"
                advice = f"have its operator run `flwr supernode register` with {key}.pub"
                return self.failed("key-not-registered", got, expected=expected, advice=advice, seen=seen)
            takes_any = superlink.takes_unknown_keys(self._clock())
            return seen if takes_any else self.failed("key-missing", "none", seen=seen)
        if answer.status in NO_SERVER_BEHIND:
            advice = "something in front of it answers in its place; have the SuperLink started"
            return self.failed("unreachable", f"HTTP {answer.status}", expected="the SuperLink", advice=advice)
        return self.failed("not-a-superlink", f"HTTP {answer.status}")

    def _not_authenticated(self, seen: Diagnosis) -> Diagnosis:
        """Return the signature did not count: because of its time, or because something in between changed the request.

        Nothing is signed for another time to find out: whoever got that could pass for this node at that time.
        """
        if seen.ahead_s is None or -BEHIND_S + _DATES_S < seen.ahead_s < AHEAD_S - _DATES_S:
            return self.failed("not-a-superlink", "HTTP 401, though the clocks agree as far as it says")
        offset = f"{abs(seen.ahead_s):.0f} s {'ahead of' if seen.ahead_s > 0 else 'behind'}"
        sentence = (
            f"Expected this computer's clock to be less than {AHEAD_S:.0f} s ahead of the SuperLink's at "
            f"{self._where} and less than {BEHIND_S:.0f} s behind it, got about {offset} it: set the clock (NTP) of "
            "whichever is wrong."
        )
        return replace(seen, cause="clock", sentence=sentence)

    def _unconnected(self, error: httpx.HTTPError) -> Diagnosis:
        """Return why a request got no answer."""
        insecure, causes = self._connection.insecure, causes_of(error)

        def is_any(*kinds: type[BaseException]) -> bool:
            return any(isinstance(cause, kinds) for cause in causes)

        for cause in causes:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return self._not_believed(cause.verify_code)
        if isinstance(error, httpx.ProxyError):
            got, advice = "a proxy that makes none", "ask who runs the proxy"
            return self.failed("unreachable", got, expected="a connection", advice=advice)
        if isinstance(error, httpx.TimeoutException):
            return self.failed("timed-out", f"none within {self._timeout_s:g} s")
        if is_any(socket.gaierror):
            sentence = (
                f"Expected a name that can be looked up, got {self._where}, which cannot: correct the SuperLink's "
                "name, or mend this computer's DNS."
            )
            return Diagnosis("name-not-found", sentence)
        if is_any(ConnectionRefusedError):
            return self.failed("refused", "a refusal, for nobody listens there")
        # Somebody listens and speaks something else.
        if not insecure and is_any(ssl.SSLError):
            return self.failed("no-tls", "an answer that is none")
        if isinstance(error, httpx.ConnectError) and not is_any(ConnectionResetError, BrokenPipeError):
            advice = "look at this computer's network, and at the address"
            return self.failed("unreachable", "none", expected="a way to the SuperLink", advice=advice)
        if insecure and self._presented() is not None:
            return self.failed("wants-tls", "a server that wants TLS")
        return self.failed("not-a-superlink", "an end of the connection without an answer")

    def _presented(self) -> Presented | None:
        return None if self._proxied else presented_by(self._host, self._port, self._timeout_s)

    def _not_believed(self, code: int) -> Diagnosis:
        came, now = self._presented(), self._clock()
        cause = CERTIFICATE_CAUSES.get(code, "certificate-unknown")
        if cause == "certificate-name":
            expected = f"a certificate for {self._host}"
            got = f"one for {', '.join(came.names) if came and came.names else 'other names'}"
            advice = "name the SuperLink as its certificate does, or have one made with this subject alternative name"
        elif cause == "certificate-unknown":
            roots = self._connection.root_certificates
            expected = f"a certificate of an authority in {roots}" if roots else "a certificate of a public authority"
            got = f"one of another ({came.issuer})" if came else "one of another"
            name = "compare" if roots else "name the root certificates of the SuperLink; compare"
            advice = (
                f"{name} them with its operator by other means, for whoever is in between could show one of its own"
            )
        else:
            begins = code == NOT_YET_VALID
            limit = None if came is None else came.begins if begins else came.ends
            verb = "begins" if begins else "ended"
            expected = f"a certificate that is valid now, {utc(now)} by this computer's clock,"
            if limit is not None and (now < limit) == begins:
                got = f"one that {verb} {utc(limit)}"
            else:
                got = f"one whose authority's {verb} at another time"
            advice = "its operator makes a new one; if this computer's clock is wrong, set it"
        seen = Diagnosis(cause, "", certificate_ends=came.ends if came else None)
        return self.failed(cause, got, expected=expected, advice=advice, seen=seen)


def _proxy(named: str) -> str:
    """Return a proxy's host and port only: the variable that names it may hold a password."""
    try:
        proxy = httpx.URL(named)
    except httpx.InvalidURL:
        return "a proxy"
    return f"the proxy {printable(proxy.host)}" + (f":{proxy.port}" if proxy.port else "")


class _KeyError(ConfigurationError):
    """A node's key cannot be used."""

    kind = "unreadable"


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return a node's private key, from an OpenSSH file without a passphrase."""
    with_advice = (
        f"Expected an elliptic-curve key without a passphrase at {path}, got something else: make one with `ssh-keygen "
        "-t ecdsa -b 384`, and have its public half registered."
    )
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _KeyError(with_advice) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise _KeyError(with_advice)
    return key


class Reconnecting:
    """Reports to log and journal why a connection fails, and says how long to wait before the next try."""

    def __init__(
        self,
        connection: Connection,
        journal: Journal,
        *,
        trying: Callable[..., Diagnosis] = diagnose,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection, self._journal, self._trying, self._clock = connection, journal, trying, clock
        self._pauses, self._started_at, self._turned_away = Pauses(), clock(), False
        self._said = Repeated(clock)
        self._looking = threading.Lock()
        journal.listen(self._heard)

    def starts(self) -> None:
        """Note that a SuperNode is about to start."""
        self._started_at, self._turned_away = self._clock(), False
        self._journal.note("connecting", superlink=self._connection.superlink)

    def ended(self) -> float:
        """Note and log why a SuperNode ended; return the seconds to wait before the next start."""
        ended_at = self._clock()
        pause = self._pauses.after(ended_at - self._started_at)
        found = self._trying(self._connection, refused=self._turned_away)
        cause = "ended" if found.cause == "reached" else found.cause
        self._journal.note("disconnected", superlink=self._connection.superlink, cause=cause, retry_s=pause)
        sentence = (
            "The SuperNode ended though its SuperLink is there: what it said before says why."
            if cause == "ended"
            else found.sentence
        )
        self._say(cause, sentence, f"tried again in {pause:.0f} s")
        return max(pause - (self._clock() - ended_at), 0.0)

    def _heard(self, entry: Entry) -> None:
        if entry.kind == "connected":
            self._said.forget()
        elif entry.kind == "turned-away":
            self._turned_away = True
        elif entry.kind == "disconnected" and "retry_s" not in entry.facts:
            # Flower's SuperNode retries by itself, and knows less of the cause.
            threading.Thread(target=self._look, daemon=True, name="murmurfl-reconnecting").start()

    def _look(self) -> None:
        if not self._looking.acquire(blocking=False):
            return
        try:
            found = self._trying(self._connection)
            if found.cause != "reached":
                self._say(found.cause, found.sentence, f"tried again at least every {MAX_RETRY_DELAY} s")
        finally:
            self._looking.release()

    def _say(self, cause: str, sentence: str, when: str) -> None:
        """Log one line; repeat it for the same cause only after an hour."""
        if not self._said.is_repeated(cause):
            logger.warning("%s (%s; %s.)", sentence, cause, when)
