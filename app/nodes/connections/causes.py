"""The causes for which a node does not reach its SuperLink, a fixed list, and what is said of one."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass, replace

import httpx
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

from ....privacy import ConfigurationError
from .connection import Connection
from .presented import printable

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
"""Every cause there is; ``reached`` is the one in which nothing is wrong, and ``ended`` that of a SuperNode which was
connected and ended though nothing is."""

AHEAD_S = float(SYSTEM_TIME_TOLERANCE)
"""A node whose clock is so many seconds ahead of the server's is refused."""

BEHIND_S = float(TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE)
"""And one whose clock is so many seconds behind."""


@dataclass(frozen=True)
class Diagnosis:
    """What came of trying a connection.

    Parameters
    ----------
    cause : str
        One of :data:`CAUSES`.
    sentence : str
        For the operator: what was expected, what came, what to do. No part of it depends on anybody's data.
    ahead_s : float, optional
        By how much this machine's clock is ahead of the server's, to within two seconds; None where the server did not
        say what time it is.
    certificate_ends : float, optional
        When the server's certificate ends, in seconds since 1970.
    takes_commands : bool
        Whether the server did what owners alone may have it do, for somebody without a login.
    """

    cause: str
    sentence: str
    ahead_s: float | None = None
    certificate_ends: float | None = None
    takes_commands: bool = False

    def __post_init__(self) -> None:
        if self.cause not in CAUSES:
            raise ConfigurationError(f"Expected one of {', '.join(CAUSES)}, got {self.cause!r}.")

    def but(self, cause: str, sentence: str) -> Diagnosis:
        """The same figures with another cause."""
        return replace(self, cause=cause, sentence=sentence)


class Target:
    """Where a connection goes, and how that is said.

    Parameters
    ----------
    connection : Connection
    """

    def __init__(self, connection: Connection) -> None:
        host, _, port = connection.superlink.rpartition(":")
        self.connection, self.host, self.port = connection, host.strip("[]"), int(port)
        self.scheme = "http" if connection.insecure else "https"
        self.url = f"{self.scheme}://{connection.superlink}"
        self.proxied = self.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(self.host)
        self.where = connection.superlink + (f" through {self._proxy()}" if self.proxied else "")

    def _proxy(self) -> str:
        """Where the proxy is: the variable that names it may have a password in it."""
        try:
            proxy = httpx.URL(urllib.request.getproxies()[self.scheme])
        except (httpx.InvalidURL, KeyError):
            return "a proxy"
        return f"the proxy {printable(proxy.host)}" + (f":{proxy.port}" if proxy.port else "")

    def sentence(self, expected: str, got: str, advice: str) -> str:
        """What was expected there, what came, what to do."""
        return f"Expected {expected} at {self.where}, got {got}: {advice}."

    def no_superlink(self, got: str) -> Diagnosis:
        """Somebody answered, or nobody, and it was not Flower's server."""
        advice = "correct the address, or ask who runs what stands in between"
        return Diagnosis("not-a-superlink", self.sentence("Flower's SuperLink", got, advice))

    def timed_out(self, timeout_s: float) -> Diagnosis:
        """Nothing came in time."""
        advice = "the network is down, a firewall drops what is sent, or the server is overloaded"
        return Diagnosis("timed-out", self.sentence("an answer", f"none within {timeout_s:g} s", advice))
