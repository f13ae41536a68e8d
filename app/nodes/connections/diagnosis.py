"""Why a node's connection to its SuperLink fails: one cause of a fixed list, and a sentence for its operator.

No session of a node is begun, and none ends (:mod:`.fleet_api`): one that is running with the same key notices nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.supercore.error import ApiErrorCode

from ....privacy import ConfigurationError
from .causes import AHEAD_S, BEHIND_S, CAUSES, Diagnosis, Target
from .connection import Connection
from .fleet_api import Answer, FleetApi, passing_key
from .presented import tls_context
from .unconnected import why_unconnected

__all__ = ["AHEAD_S", "BEHIND_S", "CAUSES", "Diagnosis", "diagnose"]

_SPARE_S = 1.0
_DATES_S = 2.0  # as exact as dates are
_NO_SERVER_BEHIND = (502, 503, 504)


def diagnose(
    connection: Connection, timeout_s: float = 5.0, *, refused: bool = False, clock: Callable[[], float] = time.time
) -> Diagnosis:
    """Try a connection as a SuperNode would, step by step, and say what came of it.

    Parameters
    ----------
    connection : Connection
    timeout_s : float
        For all of it, about.
    refused : bool
        Whether a SuperNode with this connection was turned away just now. If nothing else is wrong, its old session is
        still open.
    clock : callable
        What this machine takes for the time, in seconds since 1970.

    Notes
    -----
    Releases nothing, and reads neither data nor ledger: what it sends depends on the connection, the time and the
    node's key alone, and is what a SuperNode sends when it signs in, and one question that a server answers its owners
    alone. No session of a node is begun or ended.
    """
    attempt = _Attempt(connection, timeout_s, clock)
    found: list[Diagnosis] = []
    # A thread, for a name may take longer to be looked up than any socket waits.
    thread = threading.Thread(target=lambda: found.append(attempt.diagnosis()), daemon=True, name="murmurfl-diagnosis")
    thread.start()
    thread.join(timeout_s + _SPARE_S)
    attempt.end()
    diagnosis = found[0] if found else attempt.target.timed_out(timeout_s)
    return attempt.session_open(diagnosis) if refused and diagnosis.cause == "reached" else diagnosis


class _Attempt:
    """One try, and the words for what a SuperLink may say."""

    def __init__(self, connection: Connection, timeout_s: float, clock: Callable[[], float]) -> None:
        self.target = Target(connection)
        self._connection, self._timeout_s, self._clock = connection, timeout_s, clock
        self._client: httpx.Client | None = None

    def end(self) -> None:
        """Hang up: a server that says a byte now and then would hold the thread for days."""
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
            return self._unconnected(error)
        except Exception as error:  # whatever somebody else's server made of it: an operator gets a cause all the same
            return self.target.no_superlink(f"what Flower's client does not understand ({type(error).__name__})")

    def _unconnected(self, error: httpx.HTTPError) -> Diagnosis:
        return why_unconnected(self.target, error, self._timeout_s, self._clock())

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
        return self._another(answer)

    def _not_registered(self, seen: Diagnosis) -> Diagnosis:
        key = self._connection.private_key
        advice = f"have its operator run `flwr supernode register` with {key}.pub"
        return seen.but(
            "key-not-registered",
            self.target.sentence("a key that the SuperLink knows", f"no such key ({key})", advice),
        )

    def _without_key(self, superlink: FleetApi, seen: Diagnosis) -> Diagnosis:
        if superlink.takes_unknown_keys(self._clock()):
            return seen
        advice = "registered nodes only are taken; name a key as private-key in [connection], or as --auth-private-key"
        return seen.but("key-missing", self.target.sentence("this node to have a key", "none", advice))

    def _not_authenticated(self, seen: Diagnosis) -> Diagnosis:
        """The signature did not count: for its time, or because something in between changed the request.

        Nothing is signed for another time to find out: whoever got it could pass for this node when that time comes.
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

    def _another(self, answer: Answer) -> Diagnosis:
        if answer.status in _NO_SERVER_BEHIND:
            advice = "something in front of it answers in its place; have the SuperLink started"
            return Diagnosis("unreachable", self.target.sentence("the SuperLink", f"HTTP {answer.status}", advice))
        return self.target.no_superlink(f"HTTP {answer.status}")

    def session_open(self, seen: Diagnosis) -> Diagnosis:
        """Nothing is wrong, and yet a SuperNode was turned away."""
        advice = (
            "the session of a node with the same key is still open; after a crash it ends by itself within a minute or "
            "so, and if it does not, another machine runs with this key"
        )
        return seen.but("session-open", self.target.sentence("a session", "a refusal", advice))


class _KeyError(ConfigurationError):
    """A node's key cannot be used."""


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
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
