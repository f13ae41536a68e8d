"""Whether Flower's SuperLink runs, answers, and refuses commands, as seen by the process that started it."""

from __future__ import annotations

import hmac
import http.client
import ipaddress
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ....privacy import ConfigurationError
from ..watching.health import NOT_LISTENING, NOT_RUNNING, STARTING
from .gate import CONTROL, NONCE_HEADER, PROOF_HEADER, proof_of

ASK_EVERY_S = 5.0
_STARTING_EVERY_S = 0.2
_ANSWER_WITHIN_S = 3.0
_STARTS_WITHIN_S = 90.0
_SILENT_S = 30.0
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
        """Raise if others than owners could command the server.

        Raises
        ------
        ConfigurationError
            If logins would travel in clear over a network, anybody could be a node, or anybody could take a run's task.
        """
        if not self.certificate and not is_loopback(self.host):
            raise ConfigurationError(
                f"Expected --ssl-certfile, --ssl-keyfile and --ssl-ca-certfile, or --host 127.0.0.1, got {self.host} "
                "without TLS: whoever listens on the way could command the server."
            )
        if not self.nodes_register and not is_loopback(self.host):
            raise ConfigurationError(
                "Expected --enable-supernode-auth, or --host 127.0.0.1, got neither: anybody could register a node, be "
                "asked by runs, and fetch their bundles."
            )
        if self.processes == "process" and not self.secret:
            raise ConfigurationError(
                "Expected --superexec-auth-secret-file with --isolation process, got none: anybody could take the "
                "place of a run's process."
            )

    @property
    def nearby(self) -> str:
        """Host and port for processes of this computer."""
        host = _EVERYWHERE.get(self.host, self.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def answers(self) -> bool:
        """Whether a SuperLink answers, asked from this computer."""
        answer = self._asked("GET", "/health", {})
        return answer is not None and answer.status == http.HTTPStatus.OK

    def refuses(self, proof: bytes) -> bool | None:
        """Whether the gate with this proof answers and refuses a command; None without an answer.

        Parameters
        ----------
        proof : bytes
            The secret that only this SuperLink was started with.
        """
        nonce = secrets.token_hex(16)
        answer = self._asked("POST", CONTROL, {NONCE_HEADER: nonce})
        if answer is None:
            return None
        shown = answer.getheader(PROOF_HEADER) or ""
        ours = hmac.compare_digest(shown.encode(), proof_of(proof, nonce.encode()))
        return ours and answer.status == http.HTTPStatus.FORBIDDEN

    def _asked(self, method: str, path: str, headers: Mapping[str, str]) -> http.client.HTTPResponse | None:
        """An answer without its body; None without one."""
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
    """Whether only this computer reaches the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _database_file(named: str) -> Path | None:
    """File of a path or of an SQLAlchemy address; None if the database is in memory or elsewhere."""
    scheme, there, rest = named.partition(":///")
    file = rest.partition("?")[0] if there and scheme == "sqlite" else named
    return None if not file or file.startswith(":") or "://" in file else Path(file)


class ServerHealth:
    """Whether a SuperLink runs and answers; a thread asks it every few seconds.

    Parameters
    ----------
    answers : callable
        Whether it answers now.
    clock : callable
        Monotonic seconds.
    """

    def __init__(self, answers: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._answers, self._clock = answers, clock
        self._started_at: float | None = None
        self._answered_at: float | None = None
        self._starts = 0
        self._ended = False
        self._wake = threading.Event()

    @property
    def running(self) -> bool:
        return self._started_at is not None

    @property
    def answered(self) -> bool:
        """Whether the current process, or the last one, has ever answered."""
        return self._answered_at is not None

    @property
    def restarts(self) -> int:
        return max(self._starts - 1, 0)

    @property
    def problem(self) -> str:
        """What is wrong, one of :data:`~.health.REASONS`; empty if nothing is."""
        started, answered = self._started_at, self._answered_at
        if started is None:
            return NOT_RUNNING if self._starts else STARTING
        if answered is None:
            return STARTING if self._clock() - started < _STARTS_WITHIN_S else NOT_LISTENING
        return NOT_LISTENING if self._clock() - answered > _SILENT_S else ""

    def started(self) -> None:
        """Note that a process was started."""
        self._answered_at = None
        self._started_at = self._clock()
        self._starts += 1
        self._wake.set()

    def ended(self) -> None:
        """Note that the process ended."""
        self._started_at = None

    def ask(self) -> None:
        """Ask once whether it answers."""
        started = self._started_at
        # Another process may have been started meanwhile.
        if started is not None and self._answers() and self._started_at == started:
            self._answered_at = self._clock()

    def ask_forever(self) -> None:
        """Ask every few seconds, in a thread that ends with :meth:`close`."""
        threading.Thread(target=self._ask_forever, daemon=True, name="murmurfl-health").start()

    def close(self) -> None:
        self._ended = True
        self._wake.set()

    def _ask_forever(self) -> None:
        while not self._ended:
            self._wake.clear()
            with suppress(Exception):
                self.ask()
            self._wake.wait(ASK_EVERY_S if self.answered else _STARTING_EVERY_S)
