"""Run a Flower App through the real ``flwr run`` on a SuperLink of its own, and leave nothing behind.

``flwr run`` alone starts a daemon that stays, writes into the user's Flower home, returns 0 when the run failed, and
may edit the app's pyproject.toml. Here every run gets its own SuperLink, on a free loopback port, with a scratch home.
``flwr run`` submits to it and streams its log, ``flwr ls`` tells whether the run succeeded. Before the call returns,
every process is stopped, the port closed and the scratch home removed.

The SuperLink is our child and not one of ``flwr run``, which gives it 15 s: its start may take as long as a busy
computer needs, and its log can explain a refusal. It stands behind the gate of `murmurfl server` and obeys a key made
for it: nobody else on this computer can make it run anything.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from ...privacy.errors import ConfigurationError, check_installed
from ...privacy.files import write_private
from ...privacy.permits import LONGEST_LOGIN_S, OwnerKey
from .loopback import (
    MARKER,
    LaunchError,
    Processes,
    Scalar,
    executable,
    free_port,
    interrupts_as_keyboard_interrupt,
    is_healthy,
    is_listening,
    launch_environment,
    scratch_parent,
    toml_document,
)

CONNECTION_NAME = "murmurfl-launch"
"""The SuperLink's name in the scratch home's ``config.toml``."""

_OWNERS = "owners"
_START_TIMEOUT_S = 90.0
_STATUS_TIMEOUT_S = 60.0
_PORT_ATTEMPTS = 3
_PORT_TIMEOUT_S = 3.0
# Politely to the processes started here, which end their own children; then to every process; then by force.
_STOP_STEPS = (
    (3.0, signal.SIGTERM, False),
    (2.0, signal.SIGTERM, True),
    (10.0, getattr(signal, "SIGKILL", signal.SIGTERM), True),
)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NO_DETAILS = ("", "N/A")


def override_document(app_dir: Path, run_config: Mapping[str, Scalar]) -> str:
    """Return values for an app's run configuration as TOML.

    The name of a choice stands for its kind, ``mechanism`` for ``mechanism.kind``, where the configuration has a table
    of that name: Flower refuses a key that the app does not have.
    """
    try:
        project = tomllib.loads((app_dir / "pyproject.toml").read_text(encoding="utf-8"))
        own = project["tool"]["flwr"]["app"]["config"]
    except (OSError, ValueError, KeyError, TypeError):  # Flower says what is wrong with it
        own = {}
    choices = {name for name, value in own.items() if isinstance(value, dict) and "kind" in value}
    return toml_document({f"{key}.kind" if key in choices else key: value for key, value in run_config.items()})


class Launch:
    """Processes, scratch home and log of one call; ``deadline`` is in monotonic seconds."""

    def __init__(self, app_dir: Path, deadline: float, timeout_s: float, on_line: Callable[[str], None]) -> None:
        self.app_dir, self.deadline, self.timeout_s, self.on_line = app_dir, deadline, timeout_s, on_line
        self.lines: list[str] = []
        self.home: Path | None = None
        self.environment: dict[str, str] = {}
        self.port: int | None = None
        self.processes: list[subprocess.Popen[Any]] = []
        self.superlink: subprocess.Popen[Any] | None = None
        self._earlier: set[str] = set()

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def prepare(self, overrides: str, environment: Mapping[str, str]) -> None:
        """Make the scratch home with the run configuration's overrides."""
        self.home = Path(tempfile.mkdtemp(prefix="murmurfl-", dir=scratch_parent())).resolve()
        self.environment = launch_environment(self.home, environment)
        (self.home / "run-config.toml").write_text(overrides, encoding="utf-8")

    def start_superlink(self) -> None:
        """Start a SuperLink and wait until it answers."""
        home, key = self.scratch(), OwnerKey.generate()
        write_private(home / _OWNERS, f"{key.public.hex()} {CONNECTION_NAME}\n")
        for _ in range(_PORT_ATTEMPTS):
            self.port = port = free_port()
            log = home / "superlink.log"
            with log.open("wb") as output:
                command = [executable("murmurfl"), "server", "--verbose", "--owners", str(home / _OWNERS)]
                command += [*self.superlink_options(), "--host", "127.0.0.1", "--port", str(port)]
                command += ["--disable-runtime-dependency-installation"]
                self.superlink = process = self.start_process(command, stdout=output)
            limit = min(self.deadline, time.monotonic() + _START_TIMEOUT_S)
            while process.poll() is None and not is_healthy(port, self.tls()):
                if time.monotonic() > limit:
                    self.check_time()
                    raise LaunchError("The SuperLink did not answer in time.", self._superlink_log())
                time.sleep(0.05)
            if process.poll() is None:
                (home / "config.toml").write_text(
                    f'[superlink]\ndefault = "{CONNECTION_NAME}"\n\n'
                    f'[superlink.{CONNECTION_NAME}]\naddress = "127.0.0.1:{port}"\n{self.connection()}\n',
                    encoding="utf-8",
                )
                # What a server needs takes half a second, and runs of this process have none.
                from flwr.supercore.credential_store.file_credential_store import FileCredentialStore

                from ..nodes.connection import server_name
                from ..nodes.flower_internals import keep_login

                login = key.login(server_name(self.certificate()), until=int(time.time()) + LONGEST_LOGIN_S)
                keep_login(FileCredentialStore(home / "credentials.yaml"), f"127.0.0.1:{port}", login)
                return
            if "address already in use" not in self._superlink_log().lower():
                break
        raise LaunchError("The SuperLink ended while it started.", self._superlink_log())

    def superlink_options(self) -> list[str]:
        """Options of the SuperLink: a simulation, with plain HTTP on the loopback address only."""
        return ["--insecure", "--simulation"]

    def connection(self) -> str:
        """Return the SuperLink's security in Flower's ``config.toml``."""
        return "insecure = true"

    def certificate(self) -> Path | None:
        """Return the SuperLink's certificate; None for plain HTTP."""
        return None

    def tls(self) -> ssl.SSLContext | None:
        """Return the context that checks the certificate; None for plain HTTP."""
        return None

    def run(self, federation: str, *, has_overrides: bool) -> tuple[int, str]:
        """Submit the app, follow its log to the end, and return its id and status if it completed."""
        home = self.scratch()
        command = [executable("flwr"), "run", str(self.app_dir), CONNECTION_NAME, "--stream"]
        command += ["--federation-config", federation] if federation else []
        if has_overrides:
            # A file, because flwr's parser of key="value" has no escapes.
            command += ["--run-config", str(home / "run-config.toml")]
        code = self._follow(command)
        while True:
            runs = [run for run in self._runs() if str(run.get("run-id")) not in self._earlier]
            if not runs:
                raise LaunchError(self._refusal(code), self.log)
            status = str(runs[0].get("status", ""))
            if status.startswith("finished"):
                break
            # The stream broke; the run continues.
            self.check_time()
            time.sleep(1.0)
        self._earlier.add(str(runs[0].get("run-id")))
        self._complete_log(str(runs[0].get("run-id")))
        if status != "finished:completed":
            raise LaunchError(self._reason(status, str(runs[0].get("status-details", ""))), self.log)
        return int(runs[0]["run-id"]), status

    def stop(self) -> list[int]:
        """Stop every process of this launch and remove its home; return the processes that would not stop."""
        if self.home is None:
            return []
        processes = Processes(f"{MARKER}={self.environment.get(MARKER)}")
        left: list[int] = []
        for grace_s, sign, everyone in _STOP_STEPS:
            limit = time.monotonic() + grace_s
            asked: set[int] = set()
            while True:
                # poll() reaps a process; its number may then be another process's, which must not be signalled.
                own = {process.pid for process in self.processes if process.poll() is None}
                left = processes.living(own)
                for pid in left:
                    if pid not in asked and (everyone or pid in own):
                        asked.add(pid)
                        with suppress(ProcessLookupError, PermissionError):
                            os.kill(pid, sign)
                if not left or time.monotonic() > limit:
                    break
                time.sleep(0.05)
            if not left:
                break
        limit = time.monotonic() + _PORT_TIMEOUT_S
        while self.port is not None and is_listening(self.port) and time.monotonic() < limit:
            time.sleep(0.05)
        shutil.rmtree(self.home, ignore_errors=True)
        return left

    def start_process(
        self, command: list[str], *, stdout: int | IO[bytes], stderr: int = subprocess.STDOUT, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process in the environment of this launch."""
        # A session of its own: Ctrl-C in the terminal reaches only us, and we stop the rest in order.
        process = subprocess.Popen(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            **options,
        )
        self.processes.append(process)
        return process

    def _follow(self, command: list[str]) -> int:
        """Run ``flwr run --stream`` and pass on its lines; the exit code tells only whether the run was accepted."""
        # In the scratch home, because flwr looks for legacy settings in its working directory.
        process = self.start_process(
            command, stdout=subprocess.PIPE, cwd=self.scratch(), text=True, encoding="utf-8", errors="replace"
        )
        stream = cast(IO[str], process.stdout)
        arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def read() -> None:
            with suppress(ValueError, OSError), stream:
                for line in stream:
                    arrived.put(_ANSI.sub("", line.rstrip("\n")))
            arrived.put(None)

        # A thread, because reading blocks while the run is silent, and a silent run must time out too.
        threading.Thread(target=read, daemon=True, name="murmurfl-launch-log").start()
        while True:
            self.check_time()
            try:
                line = arrived.get(timeout=0.5)
            except queue.Empty:
                if self._superlink_ended():
                    raise LaunchError("The SuperLink ended during the run.", self._superlink_log()) from None
                continue
            if line is None:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(_STATUS_TIMEOUT_S)
                return 1
            self.lines.append(line)
            self.on_line(line)

    def _complete_log(self, run_id: str) -> None:
        """Pass on the lines of a finished run's log that its stream, which Flower may end early, did not bring."""
        limit = min(self.deadline, time.monotonic() + _STATUS_TIMEOUT_S)
        answer = self._answer_of(["log", run_id, CONNECTION_NAME, "--show"], limit)
        for line in missing_lines(self.lines, _ANSI.sub("", answer).splitlines()):
            self.lines.append(line)
            self.on_line(line)

    def _answer_of(self, arguments: list[str], limit: float) -> str:
        """Return what a command of Flower's prints, or "" if it has not ended by ``limit``, in monotonic seconds."""
        process = self.start_process(
            [executable("flwr"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self.scratch(),
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        with suppress(subprocess.TimeoutExpired):
            return str(process.communicate(timeout=max(1.0, limit - time.monotonic()))[0])
        return ""

    def _runs(self) -> list[dict]:
        """Return the accepted runs of this launch's SuperLink."""
        limit = min(self.deadline, time.monotonic() + _STATUS_TIMEOUT_S)
        while True:
            answer = self._answer_of(["ls", CONNECTION_NAME, "--format", "json"], limit)
            with suppress(ValueError):
                listing = json.loads(answer)
                if listing.get("success"):
                    return list(listing.get("runs", []))
            if time.monotonic() > limit or self._superlink_ended():
                self.check_time()
                raise LaunchError("The SuperLink did not say how the run ended.", self.log + "\n" + answer)
            time.sleep(0.5)

    def check_time(self) -> None:
        """Raise if the deadline has passed."""
        if time.monotonic() > self.deadline:
            raise LaunchError(f"The run did not end within {self.timeout_s:g} s and was stopped.", self.log)

    def scratch(self) -> Path:
        """Return the scratch home, which is removed with the launch."""
        if self.home is None:
            raise LaunchError("Expected prepare() first.")
        return self.home

    def _superlink_ended(self) -> bool:
        return self.superlink is None or self.superlink.poll() is not None

    def _superlink_log(self) -> str:
        with suppress(OSError):
            return (self.scratch() / "superlink.log").read_text(encoding="utf-8", errors="replace")
        return ""

    def _refusal(self, code: int) -> str:
        """Flower's message without its box, and the detail that only the SuperLink's log has."""
        lines = [line.strip() for line in self.lines]
        boxed = [line.strip("│ ") for line in lines if line.startswith("│")]
        words = boxed or [line for line in lines if line][-1:] or [f"exit code {code}"]
        details = re.findall(r"Could not start run: (.*)", _ANSI.sub("", self._superlink_log()))
        return f"Flower refused the run: {' '.join([*words, *details[-1:]])}"

    def _reason(self, status: str, details: str) -> str:
        """Return the last line of the exception that ended the run, if there was one."""
        details = "" if details in _NO_DETAILS else details
        prefix, _, message = details.partition("failed with exception: ")
        if not message and not details.startswith("Simulation failed with exception"):
            return f"The run did not complete ({status}): {details or 'Flower gives no details'}"
        first = (message.splitlines() or [""])[0].rstrip()
        # Flower's details lack the exception's type; its traceback is the last thing the run logs.
        for line in reversed(self.lines):
            text = line.rstrip()
            if re.match(r"(?:\w+\.)*[A-Za-z_]\w*(?:: |$)", text) and text.endswith(first):
                return f"The run failed: {text}"
        return f"The run failed: {first or prefix}"


def missing_lines(streamed: Sequence[str], log: Sequence[str]) -> list[str]:
    """Return the lines of a log behind those that were streamed; lines of ``flwr`` itself may stand between."""
    remaining = deque(log)
    for line in streamed:
        if remaining and line == remaining[0]:
            remaining.popleft()
    return list(remaining)


@dataclass(frozen=True)
class LaunchResult:
    """A completed run."""

    run_id: int
    status: str  # ``finished:completed``
    seconds: float  # from the call until the last process stopped
    log: str


def run_flower_app(
    app_dir: Path,
    *,
    run_config: Mapping[str, Scalar] | None = None,
    num_supernodes: int,
    client_cpus: float = 1,
    total_cpus: int | None = None,
    timeout_s: float = 3600.0,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> LaunchResult:
    """Complete a run of a Flower App on the Ray simulation engine.

    The ServerApp's working directory is the caller's. Several calls may run at once, in threads or processes.

    Parameters
    ----------
    app_dir : Path
        Folder with the app's pyproject.toml, which is left byte for byte as it is.
    run_config : mapping, optional
        Overrides of ``[tool.flwr.app.config]``; Flower refuses keys that are not there.
    num_supernodes : int
        Virtual nodes.
    client_cpus : float
        Cores of a working virtual node, which limits how many work at once. Flower takes whole numbers only.
    total_cpus : int, optional
        Cores for Ray; default all that this process may use.
    timeout_s : float
        For everything but the stopping, in seconds.
    environment : mapping, optional
        Further environment variables for the run's processes, ServerApp and ClientApps included.
    on_line : callable, optional
        Receives every line of the log, without Flower's colour codes, in the calling thread; default writes it to
        standard output.

    Raises
    ------
    LaunchError
        If the run did not complete: the exception that ended the ServerApp, Flower's refusal, a timeout, an interrupt
        (SIGINT, or SIGTERM and SIGHUP where nobody else handles them). Raised after everything is stopped.
    ConfigurationError
        If an argument is impossible; nothing was started.
    """
    check_installed("ray", "simulation", "engine = 'ray'", load=False)
    started = time.monotonic()
    app_dir = Path(app_dir).expanduser().resolve()
    federation = _federation_config(num_supernodes, client_cpus, total_cpus)
    overrides = override_document(app_dir, run_config or {})
    project = app_dir / "pyproject.toml"
    before = _project_bytes(project)
    launch = Launch(app_dir, started + timeout_s, timeout_s, on_line or _write_line)
    failure: LaunchError | None = None
    run_id, status = 0, ""
    with interrupts_as_keyboard_interrupt() as protect:
        try:
            launch.prepare(overrides, environment or {})
            launch.start_superlink()
            run_id, status = launch.run(federation, has_overrides=bool(run_config))
        except LaunchError as error:
            failure = error
        except KeyboardInterrupt as interrupt:
            failure = LaunchError(f"The run was interrupted ({str(interrupt) or 'SIGINT'}).", launch.log)
            failure.__cause__ = interrupt
        finally:
            protect()  # a second Ctrl-C must not stop the stopping
            left = launch.stop()
            changed = not project.is_file() or project.read_bytes() != before
            if changed:
                project.write_bytes(before)
    if failure is not None:
        raise failure
    if left:
        raise LaunchError(f"The run ended, but these processes of it could not be stopped: {left}.", launch.log)
    if changed:
        raise LaunchError(f"Expected {project} to stay as it was, but the run changed it; it is restored.", launch.log)
    return LaunchResult(run_id, status, time.monotonic() - started, launch.log)


def _write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _project_bytes(project: Path) -> bytes:
    """Return the app's pyproject.toml; raises if ``flwr run`` would rewrite it."""
    try:
        content = project.read_bytes()
    except OSError:
        raise LaunchError(f"Expected a Flower App, got no pyproject.toml in {project.parent}.") from None
    try:
        flower = tomllib.loads(content.decode("utf-8")).get("tool", {}).get("flwr", {})
    except ValueError as error:
        raise LaunchError(f"Expected valid TOML in {project}, got: {error}") from error
    if "federations" in flower:
        raise LaunchError(
            f"Expected no [tool.flwr.federations] in {project}: it is obsolete, and Flower would comment it out."
        )
    return content


def _federation_config(num_supernodes: int, client_cpus: float, total_cpus: int | None) -> str:
    """Return the ``--federation-config`` argument. Flower itself keeps Ray's dashboard off."""
    if num_supernodes < 1:
        raise ConfigurationError(
            f"Expected num_supernodes >= 1, got {num_supernodes}.",
            kind="out-of-range",
            setting="num_supernodes",
            got=num_supernodes,
        )
    if not client_cpus >= 1 or client_cpus % 1:
        raise ConfigurationError(
            f"Expected a whole client_cpus >= 1 (Flower takes no fractions), got {client_cpus}.",
            kind="out-of-range",
            setting="client_cpus",
            got=client_cpus,
        )
    if total_cpus is None:
        affinity = getattr(os, "sched_getaffinity", None)
        total_cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
        total_cpus = max(total_cpus, int(client_cpus))
    if total_cpus < client_cpus:
        raise ConfigurationError(
            f"Expected total_cpus >= client_cpus = {client_cpus:g}, got {total_cpus}.",
            kind="out-of-range",
            setting="total_cpus",
            got=total_cpus,
        )
    return (
        f"num-supernodes={num_supernodes} client-resources-num-cpus={int(client_cpus)} init-args-num-cpus={total_cpus}"
    )
