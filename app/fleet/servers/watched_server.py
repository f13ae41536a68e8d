"""``murmurfl server``: Flower's SuperLink behind a gate, restarted when it ends, with health and metrics.

The SuperLink is Flower's own and gets its options unchanged. It takes commands from owners only (:mod:`.gate`). Its
runs' processes are started beside it, by Flower's SuperExec with a secret, once the SuperLink has proved to
be the one started here. The log has one line for each round, and the metrics outlive a run.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ....privacy.errors import ConfigurationError, MurmurflError
from ....privacy.files import create_private, exposure
from ....strategies.callbacks.metrics_file import FIGURES_VARIABLE, ServerFigures, read_figures
from ...engines.loopback import interrupts_as_keyboard_interrupt, without_proxy
from ...nodes.connection import expiries, server_name
from ...nodes.flower_process import (
    Pauses,
    end_process,
    follow_lines,
    no_core_dumps,
    open_process,
)
from ...nodes.journal import SAY_AGAIN_S, Journal, flower_line
from ..health import (
    NOT_LISTENING,
    NOT_RUNNING,
    SERVER,
    STARTING,
    Addresses,
    Shown,
    Value,
    health_answer,
    shown,
)
from . import superlink_process
from .control_api import OwnServer
from .gate import COMMANDED, OURSELVES, SuperLinkOptions, read_owners
from .limits import LARGEST_REPLY_VARIABLE, known_connections, largest_reply, raise_file_limit
from .superlink_process import PROOF_VARIABLE, PUBLISHED_VARIABLE

logger = logging.getLogger(__name__)


_LOOK_EVERY_S = 1.0
_LOOK_AT_FIRST_S = 0.1
_FEW_FILES = 1024
_DATABASE = "a SuperLink's database"
_READS = re.compile(r": (list|get|show|stream|pull)-[^:]*$")
_WEB_SERVER = re.compile(r"\S+Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) (\[.*)")


class ServerError(MurmurflError, RuntimeError):
    """Flower's SuperLink does not start."""

    kind = "failed"


def run_server(
    options: Sequence[str],
    addresses: Addresses,
    figures: Path | None = None,
    journal: Journal | None = None,
    owners: Path | None = None,
    members: Path | None = None,
    published: Path | None = None,
) -> None:
    """Run Flower's SuperLink with its ``options`` until interrupted (SIGINT, SIGTERM or SIGHUP).

    A SuperLink that ends is started again after 1 to 15 seconds, unless it never answered: its options are wrong, or a
    port is taken. ``figures`` is a folder that keeps the counts when this process ends. ``owners`` may submit, stop,
    list and read runs and register nodes (:func:`~.gate.read_owners`); by default nobody. ``members`` and ``published``
    are a federation's file of accepted members, whose nodes are registered, and its folder of public documents.

    Nothing is started if an address, the folder or the list of owners is impossible, others may change its database, or
    the options would let others than owners command. Each start tries that a command without a login is refused
    (:class:`~.gate.Gate`), and ends with a :class:`ServerError` if it is not.

    Metrics are counts of clients, answers and refusals, and times: nothing that a client released, and no name. What
    runs write into the folder is read as :func:`~murmurfl.strategies.callbacks.metrics_file.read_figures` says. What
    owners submit runs as this user, who can read the TLS key and the database, unless another user starts it
    (``--isolation process``). A new database gets mode 600; the log warns of one that others may read.
    """
    no_core_dumps()
    at = SuperLinkOptions.read(options)
    at.check()
    files, _ = raise_file_limit(), largest_reply(os.environ.get(LARGEST_REPLY_VARIABLE))
    if files < _FEW_FILES:
        logger.warning(
            "Only %d files may be open, so %d connections of nodes: raise the hard limit with `ulimit -n`, or "
            "LimitNOFILE= in the unit.",
            files,
            known_connections(files),
        )
    server_name(Path(at.certificate) if at.certificate else None)
    if owners is None or not read_owners(owners):
        logger.warning("Nobody may submit, stop or read runs or register nodes: name owners with --owners FILE.")
    health = ServerHealth(at.answers)
    journal = journal or Journal()
    with ExitStack() as stack:
        folder = stack.enter_context(_folder(figures, writing=at.processes == "subprocess"))
        if at.database is not None:
            _keep_private(at.database)
        server = _Server(options, at, folder, owners, published=published)
        own = OwnServer(at, server.proof, members, journal)
        if addresses:
            expiry = min(expiries(Path(at.certificate).expanduser() if at.certificate else None), default=None)
            metrics = ServerMetrics(health, folder, float(int(time.time())), expiry, own.ends)
            text = Shown(SERVER, metrics.read).text
            stack.enter_context(shown(addresses, lambda: health_answer(SERVER, health.problem), text))
        stack.callback(health.close)
        health.ask_forever()
        stack.enter_context(interrupts_as_keyboard_interrupt())
        journal.note("started", kind="server", name=f"{at.host}:{at.port}")
        if server.starts_processes:
            logger.warning(
                "What owners submit runs as this user and may read the TLS key and the database: docs/deployment.md "
                "has another user start it, with --isolation process."
            )
            server.secret = stack.enter_context(_secret())
        _serve_forever(server, folder, health, journal, own)


@dataclass
class _Server:
    options: Sequence[str]
    at: SuperLinkOptions
    folder: Path
    owners: Path | None
    secret: Path | None = None
    published: Path | None = None
    proof: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    @property
    def starts_processes(self) -> bool:
        """Whether this user starts the runs' processes."""
        return self.at.processes != "process"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the SuperLink's own process, and of no run's."""
        published = {} if self.published is None else {PUBLISHED_VARIABLE: str(self.published.absolute())}
        return {PROOF_VARIABLE: self.proof.hex(), **published}

    @property
    def _told(self) -> list[str]:
        return [] if self.secret is None else ["--superexec-auth-secret-file", str(self.secret)]

    def superlink(self) -> list[str]:
        """Command that starts the SuperLink."""
        owners = "-" if self.owners is None else str(self.owners.expanduser().absolute())
        # -P: import nothing from the current folder. Of an option given twice, the last counts.
        superlink = [sys.executable, "-P", "-m", superlink_process.__name__, "superlink", str(os.getpid()), owners]
        superlink += self.options
        return superlink if self.secret is None else [*superlink, "--isolation", "process", *self._told]

    def starter(self, superlink: int) -> list[str]:
        """Command that starts the runs' processes, and ends with the SuperLink of this process number."""
        tls = ["--root-certificates", self.at.authority] if self.at.certificate else ["--insecure"]
        command = [sys.executable, "-P", "-m", superlink_process.__name__, "superexec", *tls, *self._told]
        return [*command, "--runtime-api-address", self.at.nearby, "--parent-pid", str(superlink)]


@contextmanager
def _secret() -> Iterator[Path]:
    """Write a file with the secret of this start, which runs' processes show to get a task."""
    with tempfile.TemporaryDirectory(prefix="murmurfl-secret-") as made:
        path = Path(made) / "secret"
        create_private(path, "a secret", secrets.token_bytes(32), error=ServerError)
        yield path


def _keep_private(database: Path) -> None:
    """Create a missing database with mode 600; refuse one that others may change."""
    if not database.exists():
        create_private(database, _DATABASE, error=ServerError)  # SQLite makes the files beside it with the same mode
    for file in (database, database.with_name(f"{database.name}-wal"), database.with_name(f"{database.name}-journal")):
        others_may, sentence = exposure(file, _DATABASE) if file.exists() else ("", "")
        if others_may == "write":
            raise ServerError(sentence, kind="insecure")
        if others_may:
            logger.warning("%s It holds what nodes send.", sentence)


def _serve_forever(server: _Server, folder: Path, health: ServerHealth, journal: Journal, own: OwnServer) -> None:
    rounds = _Rounds(folder, journal)
    pauses = Pauses()
    try:
        while True:
            started = time.monotonic()
            code = _serve(server, folder, health, rounds, own)
            if not health.answered and not health.restarts:
                raise ServerError(
                    f"Expected Flower's SuperLink to start, got exit code {code}: the lines above say why. `murmurfl "
                    "server` takes the options of flower-superlink."
                )
            pause = pauses.after(time.monotonic() - started)
            logger.warning("The SuperLink ended with exit code %d; it is started again in %.0f s.", code, pause)
            time.sleep(pause)
    except KeyboardInterrupt:
        journal.note("stopped")


def _serve(server: _Server, folder: Path, health: ServerHealth, rounds: _Rounds, own: OwnServer) -> int:
    """Run one SuperLink to its end and return its exit code."""
    processes = []
    health.started()
    closed = False
    try:
        own.restarted()
        lines = SuperLinkLines()
        processes.append(_started(server.superlink(), folder, lines, server.environment))
        superlink, _ = processes[0]
        while all(process.poll() is None for process, _ in processes):
            with suppress(subprocess.TimeoutExpired):
                superlink.wait(_LOOK_EVERY_S if closed else _LOOK_AT_FIRST_S)
            if health.answered and not closed and (refuses := server.at.refuses(server.proof)) is not None:
                closed = refuses
                if not closed:
                    raise ServerError(
                        "Expected the SuperLink that was started here to refuse a command without a login, got another "
                        f"answer at {server.at.nearby}: another program has that port, or this version of Flower is "
                        "none that murmurfl closes."
                    )
                logger.info("The SuperLink answers.")
                # Not before: whatever has the port would decide what runs here.
                if server.starts_processes:
                    processes.append(_started(server.starter(superlink.pid), folder, flower_line))
            rounds.look()
            if closed:
                own.look()
    finally:
        health.ended()
        for process, reading in reversed(processes):
            end_process(process)
            if reading is not None:
                reading.join(_LOOK_EVERY_S)  # a run's processes may hold the other end longer
    return next((process.returncode for process, _ in processes if process.returncode), 0)


def _started(
    command: list[str], folder: Path, line: Callable[[int, str], None], more: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], threading.Thread | None]:
    """Start a process whose lines go into the log."""
    process = open_process(subprocess.Popen, command, {**_environment(folder), **(more or {})})
    return process, follow_lines(process.stdout, line) if process.stdout else None


class SuperLinkLines:
    """Logs the lines of a SuperLink; calls that it refuses again and again are one line of ours in an hour."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[tuple[str, str], tuple[float, int]] = {}  # when each was said last, and how often since

    def __call__(self, level: int, text: str) -> None:
        found = _REFUSED_CALL.match(text)
        if found is None:
            _superlink_line(level, text)
            return
        flower_line(logging.DEBUG, text)
        call, code = found["call"], found["code"]
        if code == _A_CHECK or len(self._said) > _MOST_CALLS:
            return
        now = self._clock()
        at, since = self._said.get((call, code), (-SAY_AGAIN_S, 0))
        if now - at < SAY_AGAIN_S:
            self._said[call, code] = at, since + 1
            return
        self._said[call, code] = now, 0
        meant = _CALLS.get(code, "the log with --verbose has Flower's words")
        again = f" (and {since} times in the last hour)" if since else ""
        logger.warning("The SuperLink refuses %s with error %s%s: %s.", call, code, again, meant)


_REFUSED_CALL = re.compile(r"\[/v1/(?P<call>[\w/-]{1,60})\]\[(?:ApiError|UnexpectedError):(?P<code>\w{1,40})\]")
_A_CHECK = "2003"
"""A node's ``--check`` asks for an impossible heartbeat, so that no session begins."""
_CALLS = {
    "1008": "a process of a run that has ended still calls",
    "2001": "a node's key is not registered",
    "2004": "a node that was cut off is back before its last session has ended, within a minute, or its key is unknown",
    "2007": "a node answers a run that has ended",
    "OperationalError": "its database (--database) cannot be written: look at the disk that it is on (`df`), make room",
}
_MOST_CALLS = 1000
_OF_ANYBODY = ("Invalid HTTP request received", "Unsupported upgrade request", "No supported WebSocket library")
"""Messages of the web server about requests that anybody can send, as often as they like."""


def _superlink_line(level: int, text: str) -> None:
    """Log a line of the SuperLink; lines of its web server state their own time and level."""
    if text.startswith(COMMANDED):
        usual = _READS.search(text) or text.startswith(f"{COMMANDED}{OURSELVES}:")  # what that came to is logged here
        logger.log(logging.DEBUG if usual else logging.INFO, "%s", text)
        return
    found = _WEB_SERVER.match(text)
    level, text = (logging.getLevelNamesMapping()[found[1]], found[2]) if found else (level, text)
    flower_line(logging.DEBUG if any(one in text for one in _OF_ANYBODY) else level, text)


def _environment(folder: Path) -> dict[str, str]:
    defaults = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # The server's operator installs what a run needs, not whoever submits it.
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }
    path = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    own = {FIGURES_VARIABLE: str(folder), "PATH": path, "PYTHONUNBUFFERED": "1"}
    environment = {**defaults, **os.environ, **without_proxy(os.environ), **own}
    for name in ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"):
        environment.pop(name, None)  # second ways in, without a gate
    return environment


@contextmanager
def _folder(named: Path | None, *, writing: bool) -> Iterator[Path]:
    if named is None:
        with tempfile.TemporaryDirectory(prefix="murmurfl-server-") as made:
            yield Path(made)
        return
    folder = named.expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"Expected a folder at {folder} for figures, got: {error.strerror}.", kind="failed"
        ) from error
    if not os.access(folder, (os.W_OK if writing else os.R_OK) | os.X_OK):
        raise ConfigurationError(
            f"Expected a folder at {folder} that can be {'written to' if writing else 'read'}, got one that cannot.",
            kind="failed",
        )
    yield folder


class _Rounds:
    """Writes one journal entry for each round, by the file in which runs note them."""

    def __init__(self, folder: Path, journal: Journal) -> None:
        self._folder, self._journal = folder, journal
        self._before = read_figures(folder) or ServerFigures()

    def look(self) -> None:
        """Note what has ended since the last look."""
        now, before = read_figures(self._folder), self._before
        if now is None or now.rounds == before.rounds:
            return
        self._before = now
        if now.rounds < before.rounds:  # the file was replaced
            return
        counts = ("aggregated", "asked", "lost", "late", "malformed")
        since = {name: getattr(now, name) - getattr(before, name) for name in counts}
        refused = sum(now.refused.values()) - sum(before.refused.values())
        since |= {"rounds": now.rounds - before.rounds, "refused": refused}
        if now.run and since["rounds"] == 1:  # several may be of several runs
            since["run"] = now.run
        self._journal.note("round", round=now.round, planned=now.planned, seconds=round(now.seconds), **since)


class ServerMetrics:
    """Metrics of a server: counts of clients, answers and refusals, and times; no figure of a model, no name."""

    def __init__(
        self,
        health: ServerHealth,
        folder: Path,
        started: float,
        expiry: float | None = None,
        ends: Mapping[str, int] | None = None,
    ) -> None:
        self._health, self._folder, self._started, self._expiry = health, folder, started, expiry
        self._ends = ends or {}

    def read(self) -> dict[str, Value]:
        """Return the current metrics by name."""
        noted = read_figures(self._folder)
        rounds = noted or ServerFigures()
        last = {
            "murmurfl_last_contact_timestamp_seconds": int(rounds.at),
            "murmurfl_round_seconds": round(rounds.seconds),
            "murmurfl_round": rounds.round,
            "murmurfl_rounds_planned": rounds.planned,
        }
        return {
            "murmurfl_started_timestamp_seconds": self._started,
            "murmurfl_healthy": float(not self._health.problem),
            "murmurfl_superlink_running": float(self._health.running),
            "murmurfl_superlink_restarts_total": self._health.restarts,
            "murmurfl_certificate_expiry_timestamp_seconds": self._expiry,
            "murmurfl_runs_total": dict(self._ends),
            "murmurfl_rounds_total": rounds.rounds,
            "murmurfl_closed_rounds_total": rounds.closed,
            "murmurfl_asked_total": rounds.asked,
            "murmurfl_releases_total": rounds.aggregated,
            "murmurfl_lost_total": rounds.lost,
            "murmurfl_late_total": rounds.late,
            "murmurfl_malformed_total": rounds.malformed,
            "murmurfl_unopened_total": rounds.unopened,
            "murmurfl_refusals_total": rounds.refused,
            **({} if noted is None else last),
        }


ASK_EVERY_S = 5.0
_STARTING_EVERY_S = 0.2
_STARTS_WITHIN_S = 90.0
_SILENT_S = 30.0


class ServerHealth:
    """Whether a SuperLink runs and answers; a thread asks it every few seconds."""

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
        """Current problem, one of :data:`~.health.PROBLEMS`; empty if there is none."""
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
