"""Why a node cannot reach its SuperLink: one cause of a fixed list, and a sentence for its operator.

A diagnosis begins and ends no session (:mod:`.fleet_contact`): a running node with the same key notices nothing.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE
from flwr.supercore.error import ApiErrorCode

from ....privacy import ConfigurationError
from .connection import Connection
from .fleet_contact import CERTIFICATE_CAUSES, NO_SERVER_BEHIND, NOT_YET_VALID, FleetApi, causes_of, passing_key
from .presented import Presented, presented_by, printable, tls_context, utc

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
    # Seconds by which this machine's clock is ahead of the server's, to within two; None if the server tells no time
    ahead_s: float | None = None
    certificate_ends: float | None = None  # when the server's certificate ends, in seconds since 1970
    # Whether the server obeyed a command without a login
    takes_commands: bool = False

    def __post_init__(self) -> None:
        if self.cause not in CAUSES:
            raise ConfigurationError(f"Expected one of {', '.join(CAUSES)}, got {self.cause!r}.")

    def but(self, cause: str, sentence: str) -> Diagnosis:
        return replace(self, cause=cause, sentence=sentence)


class Target:
    """A connection's address, and the words for it."""

    def __init__(self, connection: Connection) -> None:
        host, _, port = connection.superlink.rpartition(":")
        self.connection, self.host, self.port = connection, host.strip("[]"), int(port)
        self.scheme = "http" if connection.insecure else "https"
        self.url = f"{self.scheme}://{connection.superlink}"
        self.proxied = self.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(self.host)
        self.where = connection.superlink + (f" through {self._proxy()}" if self.proxied else "")

    def _proxy(self) -> str:
        """The proxy's host and port only: the variable that names it may hold a password."""
        try:
            proxy = httpx.URL(urllib.request.getproxies()[self.scheme])
        except (httpx.InvalidURL, KeyError):
            return "a proxy"
        return f"the proxy {printable(proxy.host)}" + (f":{proxy.port}" if proxy.port else "")

    def sentence(self, expected: str, got: str, advice: str) -> str:
        return f"Expected {expected} at {self.where}, got {got}: {advice}."

    def no_superlink(self, got: str) -> Diagnosis:
        advice = "correct the address, or ask who runs what stands in between"
        return Diagnosis("not-a-superlink", self.sentence("Flower's SuperLink", got, advice))

    def timed_out(self, timeout_s: float) -> Diagnosis:
        advice = "the network is down, a firewall drops what is sent, or the server is overloaded"
        return Diagnosis("timed-out", self.sentence("an answer", f"none within {timeout_s:g} s", advice))


_SPARE_S = 1.0
_DATES_S = 2.0  # the precision of HTTP dates


def diagnose(
    connection: Connection, timeout_s: float = 5.0, *, refused: bool = False, clock: Callable[[], float] = time.time
) -> Diagnosis:
    """Try a connection as a SuperNode would, step by step.

    Parameters
    ----------
    timeout_s : float
        For all steps together, about.
    refused : bool
        Whether a SuperNode with this connection was turned away just now. If nothing else is wrong, its old session is
        still open.
    clock : callable
        This machine's time, in seconds since 1970.

    Notes
    -----
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
    diagnosis = found[0] if found else attempt.target.timed_out(timeout_s)
    return attempt.session_open(diagnosis) if refused and diagnosis.cause == "reached" else diagnosis


class _Attempt:
    def __init__(self, connection: Connection, timeout_s: float, clock: Callable[[], float]) -> None:
        self.target = Target(connection)
        self._connection, self._timeout_s, self._clock = connection, timeout_s, clock
        self._client: httpx.Client | None = None

    def end(self) -> None:
        """Hang up: a server that sends a byte now and then would hold the thread for days."""
        if self._client is not None:
            self._client.close()

    def diagnosis(self) -> Diagnosis:
        try:
            key = None if self._connection.private_key is None else read_key(self._connection.private_key)
            context = False if self._connection.insecure else tls_context(self._connection.root_certificates)
            self._client = httpx.Client(verify=context, timeout=self._timeout_s)
            superlink = FleetApi(self._client, self.target.url, key or passing_key())
            found = self._asked(superlink, registers=key is not None)
            return replace(found, takes_commands=found.cause == "reached" and superlink.takes_commands())
        except _KeyError as error:
            return Diagnosis("key-unusable", str(error))
        except ConfigurationError as error:
            return Diagnosis("certificate-unknown", str(error))
        except httpx.HTTPError as error:
            return why_unconnected(self.target, error, self._timeout_s, self._clock())
        except Exception as error:  # whatever the other side sent, the operator gets a cause
            return self.target.no_superlink(f"what Flower's client does not understand ({type(error).__name__})")

    def _asked(self, superlink: FleetApi, *, registers: bool) -> Diagnosis:
        answer = superlink.may_begin(self._clock())
        seen = Diagnosis("reached", f"The SuperLink at {self.target.where} takes this node.")
        ahead = None if answer.server_time is None else self._clock() - answer.server_time
        seen = replace(seen, ahead_s=ahead, certificate_ends=answer.ends)
        if answer.status == httpx.codes.UNAUTHORIZED:
            return self._not_authenticated(seen)
        if answer.code == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL or answer.begun:
            return seen
        if answer.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            return self._not_registered(seen) if registers else self._without_key(superlink, seen)
        if answer.status in NO_SERVER_BEHIND:
            advice = "something in front of it answers in its place; have the SuperLink started"
            return Diagnosis("unreachable", self.target.sentence("the SuperLink", f"HTTP {answer.status}", advice))
        return self.target.no_superlink(f"HTTP {answer.status}")

    def _not_registered(self, seen: Diagnosis) -> Diagnosis:
        key = self._connection.private_key
        advice = f"have its operator run `flwr supernode register` with {key}.pub"
        sentence = self.target.sentence("a key that the SuperLink knows", f"no such key ({key})", advice)
        return seen.but("key-not-registered", sentence)

    def _without_key(self, superlink: FleetApi, seen: Diagnosis) -> Diagnosis:
        if superlink.takes_unknown_keys(self._clock()):
            return seen
        advice = "registered nodes only are taken; name a key as private-key in [connection], or as --auth-private-key"
        return seen.but("key-missing", self.target.sentence("this node to have a key", "none", advice))

    def _not_authenticated(self, seen: Diagnosis) -> Diagnosis:
        """The signature did not count: because of its time, or because something in between changed the request.

        Nothing is signed for another time to find out: whoever got that could pass for this node at that time.
        """
        if seen.ahead_s is None or -BEHIND_S + _DATES_S < seen.ahead_s < AHEAD_S - _DATES_S:
            return self.target.no_superlink("HTTP 401, though the clocks agree as far as it says")
        told = f"{abs(seen.ahead_s):.0f} s {'ahead of' if seen.ahead_s > 0 else 'behind'}"
        return seen.but(
            "clock",
            f"Expected this machine's clock to be less than {AHEAD_S:.0f} s ahead of the SuperLink's at "
            f"{self.target.where} and less than {BEHIND_S:.0f} s behind it, got about {told} it: set the clock (NTP) "
            "of whichever is wrong.",
        )

    def session_open(self, seen: Diagnosis) -> Diagnosis:
        advice = (
            "the session of a node with the same key is still open; after a crash it ends by itself within a minute or "
            "so, and if it does not, another machine runs with this key"
        )
        return seen.but("session-open", self.target.sentence("a session", "a refusal", advice))


class _KeyError(ConfigurationError):
    """A node's key cannot be used."""


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A node's private key, from an OpenSSH file without a passphrase."""
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


def why_unconnected(target: Target, error: httpx.HTTPError, timeout_s: float, now: float) -> Diagnosis:
    """The reason why a request got no answer.

    Parameters
    ----------
    timeout_s : float
        For each further look.
    now : float
        This machine's time, in seconds since 1970.
    """
    chain = causes_of(error)
    for one in chain:
        if isinstance(one, ssl.SSLCertVerificationError):
            return _not_believed(target, one.verify_code, timeout_s, now)
    if isinstance(error, httpx.ProxyError):
        got = "a proxy that makes none"
        return Diagnosis("unreachable", target.sentence("a connection", got, "ask who runs the proxy"))
    if isinstance(error, httpx.TimeoutException):
        return target.timed_out(timeout_s)
    return _no_way(target, chain) or _other_words(target, error, chain, timeout_s)


def _no_way(target: Target, chain: list[BaseException]) -> Diagnosis | None:
    for one in chain:
        if isinstance(one, socket.gaierror):
            return Diagnosis(
                "name-not-found",
                f"Expected a name that can be looked up, got {target.where}, which cannot: correct the SuperLink's "
                "name, or mend this machine's DNS.",
            )
        if isinstance(one, ConnectionRefusedError):
            advice = "have the SuperLink started, or correct the port"
            got = "a refusal, for nobody listens there"
            return Diagnosis("refused", target.sentence("a SuperLink", got, advice))
    return None


def _other_words(target: Target, error: httpx.HTTPError, chain: list[BaseException], timeout_s: float) -> Diagnosis:
    insecure = target.connection.insecure
    if not insecure and any(isinstance(one, ssl.SSLError) for one in chain):
        advice = "the SuperLink was started with --insecure, or another service listens on that port"
        return Diagnosis("no-tls", target.sentence("TLS", "an answer that is none", advice))
    cut = any(isinstance(one, ConnectionResetError | BrokenPipeError) for one in chain)
    if isinstance(error, httpx.ConnectError) and not cut:
        advice = "look at this machine's network, and at the address"
        return Diagnosis("unreachable", target.sentence("a way to the SuperLink", "none", advice))
    if insecure and not target.proxied and presented_by(target.host, target.port, timeout_s) is not None:
        advice = "leave insecure out and name the server's root certificates"
        return Diagnosis("wants-tls", target.sentence("plain HTTP", "a server that wants TLS", advice))
    return target.no_superlink("an end of the connection without an answer")


def _not_believed(target: Target, code: int, timeout_s: float, now: float) -> Diagnosis:
    came = None if target.proxied else presented_by(target.host, target.port, timeout_s)
    cause = CERTIFICATE_CAUSES.get(code, "certificate-unknown")
    if cause == "certificate-name":
        sentence = _of_name(target, came)
    elif cause == "certificate-unknown":
        sentence = _of_authority(target, came)
    else:
        sentence = _of_time(target, came, now, begins=code == NOT_YET_VALID)
    return Diagnosis(cause, sentence, certificate_ends=came.ends if came else None)


def _of_time(target: Target, came: Presented | None, now: float, *, begins: bool) -> str:
    limit = None if came is None else came.begins if begins else came.ends
    verb = "begins" if begins else "ended"
    if limit is not None and (now < limit) == begins:
        got = f"one that {verb} {utc(limit)}"
    else:
        got = f"one whose authority's {verb} at another time"
    return target.sentence(
        f"a certificate that is valid now, {utc(now)} by this machine's clock,",
        got,
        "its operator makes a new one; if this machine's clock is wrong, set it",
    )


def _of_name(target: Target, came: Presented | None) -> str:
    names = ", ".join(came.names) if came and came.names else "other names"
    advice = "name the SuperLink as its certificate does, or have one made with this subject alternative name"
    return target.sentence(f"a certificate for {target.host}", f"one for {names}", advice)


def _of_authority(target: Target, came: Presented | None) -> str:
    roots = target.connection.root_certificates
    expected = f"a certificate of an authority in {roots}" if roots else "a certificate of a public authority"
    got = f"one of another ({came.issuer})" if came else "one of another"
    name = "compare" if roots else "name the root certificates of the SuperLink; compare"
    advice = f"{name} them with its operator by other means, for whoever is in between could show one of its own"
    return target.sentence(expected, got, advice)
