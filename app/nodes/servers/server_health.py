"""Whether Flower's SuperLink runs and answers, and refuses commands, as whoever started it sees it."""

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
    """What the options of ``flower-superlink`` say of its address, its files and its runs' processes.

    Parameters
    ----------
    host, port : str, int
    certificate : str
        Its certificate's file; empty without TLS.
    database : Path, optional
        The file that it keeps nodes, runs and messages in; None where that is memory.
    authority : str
        The file of what its certificate is checked against.
    processes : {"subprocess", "process"}
        Whether runs' processes are started with it, or by somebody who knows the secret.
    secret : str
        The file of that secret.
    nodes_register : bool
        Whether only nodes whose keys were registered may sign in; in a simulation there are none.
    """

    host: str
    port: int
    certificate: str
    database: Path | None = None
    authority: str = ""
    processes: str = "subprocess"
    secret: str = ""
    nodes_register: bool = False

    @classmethod
    def read(cls, options: Sequence[str]) -> SuperLinkOptions:
        """As Flower reads them; what else there is belongs to Flower alone.

        Parameters
        ----------
        options : sequence of str
        """
        import argparse

        from flwr.supercore.constant import SUPERLINK_UVICORN_DEFAULT_PORT, UVICORN_DEFAULT_HOST

        parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
        parser.add_argument("--host", default=UVICORN_DEFAULT_HOST)
        parser.add_argument("--port", default=str(SUPERLINK_UVICORN_DEFAULT_PORT))
        parser.add_argument("--ssl-certfile", default="")
        parser.add_argument("--database", default="")
        parser.add_argument("--insecure", action="store_true")
        parser.add_argument("--enable-supernode-auth", action="store_true")
        parser.add_argument("--simulation", action="store_true")
        parser.add_argument("--ssl-ca-certfile", default="")
        parser.add_argument("--isolation", default="subprocess")
        parser.add_argument("--superexec-auth-secret-file", default="")
        try:
            read, _ = parser.parse_known_args(list(options))
        except argparse.ArgumentError:  # Flower says what is wrong
            read = parser.parse_args([])
        try:
            port = int(read.port)
        except ValueError:  # Flower says so
            port = SUPERLINK_UVICORN_DEFAULT_PORT
        certificate = "" if read.insecure else read.ssl_certfile
        database = _database_file(read.database.strip())
        secret = read.superexec_auth_secret_file
        registered = read.enable_supernode_auth or read.simulation
        return cls(read.host, port, certificate, database, read.ssl_ca_certfile, read.isolation, secret, registered)

    def check(self) -> None:
        """Refuse what would let others than owners command the server.

        Raises
        ------
        ConfigurationError
            If logins would travel in clear over a network, anybody could be a node, or take a run's task.
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
        """Host and port, as this computer's own processes call it."""
        host = _EVERYWHERE.get(self.host, self.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def answers(self) -> bool:
        """Whether a SuperLink answers there, asked from this computer."""
        answer = self._asked("GET", "/health", {})
        return answer is not None and answer.status == http.HTTPStatus.OK

    def refuses(self, proof: bytes) -> bool | None:
        """Whether the gate of the SuperLink with this proof stands there and refuses a command; None without an answer.

        Parameters
        ----------
        proof : bytes
            What that SuperLink was given when it was started, and nobody else has.
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
            # Whether it answers is asked, not who it is: nothing is sent, and nothing of the answer is believed.
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
    """Whether a host is this computer and reached by nobody else."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _database_file(named: str) -> Path | None:
    """The file of a path or of one of SQLAlchemy's addresses; None for one in memory or elsewhere."""
    scheme, there, rest = named.partition(":///")
    file = rest.partition("?")[0] if there and scheme == "sqlite" else named
    return None if not file or file.startswith(":") or "://" in file else Path(file)


class ServerHealth:
    """Whether a SuperLink runs and answers; asks it every few seconds from a thread of its own.

    Parameters
    ----------
    answers : callable
        Whether it answers now.
    clock : callable
        Seconds that only ever grow.
    """

    def __init__(self, answers: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._answers = answers
        self._clock = clock
        self._started_at: float | None = None
        self._answered_at: float | None = None
        self._starts = 0
        self._ended = False
        self._wake = threading.Event()

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self._started_at is not None

    @property
    def answered(self) -> bool:
        """Whether the process that runs, or the last one that did, has ever answered."""
        return self._answered_at is not None

    @property
    def restarts(self) -> int:
        """How often it was started again."""
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
        """Take note of a process that was started."""
        self._answered_at = None
        self._started_at = self._clock()
        self._starts += 1
        self._wake.set()

    def ended(self) -> None:
        """Take note of its end."""
        self._started_at = None

    def ask(self) -> None:
        """Ask it once whether it answers."""
        started = self._started_at
        # Of the process that was asked: another may have been started meanwhile.
        if started is not None and self._answers() and self._started_at == started:
            self._answered_at = self._clock()

    def ask_forever(self) -> None:
        """Ask it every few seconds, in a thread that ends with :meth:`close`."""
        threading.Thread(target=self._ask_forever, daemon=True, name="murmurfl-health").start()

    def close(self) -> None:
        """Ask no more."""
        self._ended = True
        self._wake.set()

    def _ask_forever(self) -> None:
        while not self._ended:
            self._wake.clear()
            with suppress(Exception):
                self.ask()
            self._wake.wait(ASK_EVERY_S if self.answered else _STARTING_EVERY_S)
