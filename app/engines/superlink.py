"""Run a Flower App through the real ``flwr run`` on the Ray engine, and leave nothing behind.

``flwr run`` alone starts a daemon that stays, writes into the user's Flower home, returns 0 when the run failed, and
may edit the app's pyproject.toml. Here every run gets its own SuperLink, on a free loopback port, with a scratch home;
``flwr run`` submits to it and streams its log, ``flwr ls`` says whether it succeeded; and whatever happens, every
process is stopped, the port closed and the scratch home removed before the call returns.

The SuperLink is started here rather than by ``flwr run``: then it is our child, its start may take as long as a busy
machine needs (``flwr run`` gives it 15 s), and its own log can explain a refusal.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import queue
import re
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from ...privacy import ConfigurationError, MurmurflError
from .processes import Processes, interrupts_as_keyboard_interrupt

Scalar = bool | int | float | str

CONNECTION_NAME = "murmurfl-launch"
"""The SuperLink's name in the scratch home's ``config.toml``."""

_MARKER = "MURMURFL_LAUNCH"  # an environment variable that tells a launch's processes from all others
_START_TIMEOUT_S = 90.0
_STATUS_TIMEOUT_S = 60.0
_PORT_ATTEMPTS = 3
_PORT_TIMEOUT_S = 3.0
# Politely to what was started here, which takes its own children along; to every process; without asking.
_STOP_STEPS = (
    (3.0, signal.SIGTERM, False),
    (2.0, signal.SIGTERM, True),
    (10.0, getattr(signal, "SIGKILL", signal.SIGTERM), True),
)
_TAIL_LINES = 30
# Ray puts sockets at HOME/ray/session_<date>_<pid>/sockets/plasma_store, and a socket's path has 103 bytes on macOS.
_LONGEST_SCRATCH_PARENT = 16
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# These would join another Ray cluster, or open Flower's legacy APIs on fixed ports.
_DROPPED_VARIABLES = ("RAY_ADDRESS", "FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")
_NO_DETAILS = ("", "N/A")


class LaunchError(MurmurflError, RuntimeError):
    """The run was refused, failed, was interrupted, or did not end in time.

    Parameters
    ----------
    reason : str
        One line.
    log : str
        The log as far as it was streamed; its last lines follow the reason in the message.
    """

    def __init__(self, reason: str, log: str = "") -> None:
        tail = log.rstrip().splitlines()[-_TAIL_LINES:]
        super().__init__("\n".join([reason, *(["", "The end of its log:", *tail] if tail else [])]))
        self.reason = reason
        self.log = log


@dataclass(frozen=True)
class LaunchResult:
    """A run that completed.

    Parameters
    ----------
    run_id : int
        Flower's id of the run.
    status : str
        ``finished:completed``.
    seconds : float
        From the call to the last process stopped.
    log : str
        The streamed log.
    """

    run_id: int
    status: str
    seconds: float
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
    """Run a Flower App directory on the Ray simulation engine, to its end.

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
        Cores a virtual node occupies while it works, hence how many work at once. Flower takes whole numbers only.
    total_cpus : int, optional
        Cores Ray may use; default all this process may run on.
    timeout_s : float
        Longest time for the whole call but the stopping, in seconds.
    environment : mapping, optional
        Further environment variables for the run's processes, ServerApp and ClientApps included.
    on_line : callable, optional
        Gets every line of the log as it comes, without Flower's colour codes and otherwise as it is, in the calling
        thread; default writes it to standard output.

    Returns
    -------
    LaunchResult

    Raises
    ------
    LaunchError
        If anything but a completed run came of it: the exception that ended the ServerApp, Flower's refusal, a
        timeout, an interrupt (SIGINT, or SIGTERM and SIGHUP where nobody else handles them). Raised after everything
        is stopped.
    ConfigurationError
        If an argument is impossible; nothing was started.
    """
    started = time.monotonic()
    app_dir = Path(app_dir).expanduser().resolve()
    federation = _federation_config(num_supernodes, client_cpus, total_cpus)
    overrides = toml_document(run_config or {})
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


class Launch:
    """One call's processes, scratch home and log.

    Parameters
    ----------
    app_dir : Path
        The Flower App.
    deadline : float
        On the monotonic clock.
    timeout_s : float
        What the deadline was, for the message.
    on_line : callable
        Gets the lines of the run's log.
    """

    def __init__(self, app_dir: Path, deadline: float, timeout_s: float, on_line: Callable[[str], None]) -> None:
        self.app_dir = app_dir
        self.deadline = deadline
        self.timeout_s = timeout_s
        self.on_line = on_line
        self.lines: list[str] = []
        self.home: Path | None = None
        self.environment: dict[str, str] = {}
        self.port: int | None = None
        self.processes: list[subprocess.Popen[Any]] = []
        self.superlink: subprocess.Popen[Any] | None = None
        self._earlier: set[str] = set()

    @property
    def log(self) -> str:
        """The run's log so far."""
        return "\n".join(self.lines)

    def prepare(self, overrides: str, environment: Mapping[str, str]) -> None:
        """Make the scratch home, with the run configuration's overrides in it."""
        self.home = Path(tempfile.mkdtemp(prefix="murmurfl-", dir=_scratch_parent())).resolve()
        self.environment = _environment(self.home, environment)
        (self.home / "run-config.toml").write_text(overrides, encoding="utf-8")

    def start_superlink(self) -> None:
        """Start a SuperLink and wait until it answers."""
        home = self.scratch()
        for _ in range(_PORT_ATTEMPTS):
            self.port = port = free_port()
            log = home / "superlink.log"
            with log.open("wb") as output:
                self.superlink = process = self.start_process(
                    [
                        executable("flower-superlink"),
                        *self.superlink_options(),
                        "--isolation",
                        "subprocess",
                        "--host",
                        "127.0.0.1",
                        "--port",
                        str(port),
                        "--disable-runtime-dependency-installation",
                    ],
                    stdout=output,
                )
            limit = min(self.deadline, time.monotonic() + _START_TIMEOUT_S)
            while process.poll() is None and not _healthy(port, self.tls()):
                if time.monotonic() > limit:
                    raise LaunchError("The SuperLink did not answer in time.", self._superlink_log())
                time.sleep(0.05)
            if process.poll() is None:
                (home / "config.toml").write_text(
                    f'[superlink]\ndefault = "{CONNECTION_NAME}"\n\n'
                    f'[superlink.{CONNECTION_NAME}]\naddress = "127.0.0.1:{port}"\n{self.connection()}\n',
                    encoding="utf-8",
                )
                return
            if "address already in use" not in self._superlink_log().lower():
                break
        raise LaunchError("The SuperLink ended while it started.", self._superlink_log())

    def superlink_options(self) -> list[str]:
        """What kind of SuperLink: one of the simulation, with plain HTTP on the loopback address only."""
        return ["--insecure", "--simulation"]

    def connection(self) -> str:
        """The SuperLink's security in Flower's ``config.toml``."""
        return "insecure = true"

    def tls(self) -> ssl.SSLContext | None:
        """What the SuperLink's certificate is checked against; None for plain HTTP."""
        return None

    def run(self, federation: str, *, has_overrides: bool) -> tuple[int, str]:
        """Submit the app, follow its log to the end, and return its id and status if it completed."""
        home = self.scratch()
        command = [executable("flwr"), "run", str(self.app_dir), CONNECTION_NAME, "--stream"]
        command += ["--federation-config", federation] if federation else []
        if has_overrides:
            # A file, because flwr's parser of key="value" arguments has no escapes.
            command += ["--run-config", str(home / "run-config.toml")]
        code = self._follow(command)
        while True:
            runs = [run for run in self._runs() if str(run.get("run-id")) not in self._earlier]
            if not runs:
                raise LaunchError(self._refusal(code), self.log)
            status = str(runs[0].get("status", ""))
            if status.startswith("finished"):
                break
            # The stream broke, the run goes on.
            self.check_time()
            time.sleep(1.0)
        self._earlier.add(str(runs[0].get("run-id")))
        if status != "finished:completed":
            raise LaunchError(self._reason(status, str(runs[0].get("status-details", ""))), self.log)
        return int(runs[0]["run-id"]), status

    def stop(self) -> list[int]:
        """Stop every process of this launch, then remove its home; returns the processes that would not stop."""
        if self.home is None:
            return []
        processes = Processes(f"{_MARKER}={self.environment.get(_MARKER)}")
        left: list[int] = []
        for grace_s, sign, everyone in _STOP_STEPS:
            limit = time.monotonic() + grace_s
            asked: set[int] = set()
            while True:
                # poll() reaps; what it has reaped is not ours any more, and its number may be somebody else's.
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
        while self.port is not None and _listening(self.port) and time.monotonic() < limit:
            time.sleep(0.05)
        shutil.rmtree(self.home, ignore_errors=True)
        return left

    def start_process(
        self, command: list[str], *, stdout: int | IO[bytes], stderr: int = subprocess.STDOUT, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process of this launch, in its environment."""
        # A session of its own: Ctrl-C in the terminal reaches us alone, and we stop the rest in order.
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
        """Run ``flwr run --stream`` and hand on its lines; the exit code says only whether the run was accepted."""
        # In the scratch home, because flwr looks for legacy settings where it stands; unbuffered, to see lines live.
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

        # A thread, because reading blocks for as long as the run says nothing, and a silent run must time out too.
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

    def _runs(self) -> list[dict]:
        """The runs of this launch's SuperLink; a refused one is not among them."""
        limit = min(self.deadline, time.monotonic() + _STATUS_TIMEOUT_S)
        while True:
            process = self.start_process(
                [executable("flwr"), "ls", CONNECTION_NAME, "--format", "json"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=self.scratch(),
                text=True,
                encoding="utf-8",
                errors="replace",
            )
            answer = ""
            with suppress(subprocess.TimeoutExpired):
                answer, _ = process.communicate(timeout=max(1.0, limit - time.monotonic()))
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
        """The scratch home, which goes with the launch."""
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
        """Flower's message, taken out of its box, and the detail that only the SuperLink's log has."""
        lines = [line.strip() for line in self.lines]
        boxed = [line.strip("│ ") for line in lines if line.startswith("│")]
        words = boxed or [line for line in lines if line][-1:] or [f"exit code {code}"]
        details = re.findall(r"Could not start run: (.*)", _ANSI.sub("", self._superlink_log()))
        return f"Flower refused the run: {' '.join([*words, *details[-1:]])}"

    def _reason(self, status: str, details: str) -> str:
        """The last line of the exception that ended the run, where there was one."""
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


def _write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _project_bytes(project: Path) -> bytes:
    """The app's pyproject.toml, unless ``flwr run`` would rewrite it."""
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
    """The ``--federation-config`` argument. Flower itself keeps Ray's dashboard off (include_dashboard=False)."""
    if num_supernodes < 1:
        raise ConfigurationError(f"Expected num_supernodes >= 1, got {num_supernodes}.")
    if not client_cpus >= 1 or client_cpus % 1:
        raise ConfigurationError(f"Expected a whole client_cpus >= 1 (Flower takes no fractions), got {client_cpus}.")
    if total_cpus is None:
        affinity = getattr(os, "sched_getaffinity", None)
        total_cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
        total_cpus = max(total_cpus, int(client_cpus))
    if total_cpus < client_cpus:
        raise ConfigurationError(f"Expected total_cpus >= client_cpus = {client_cpus:g}, got {total_cpus}.")
    return (
        f"num-supernodes={num_supernodes} client-resources-num-cpus={int(client_cpus)} init-args-num-cpus={total_cpus}"
    )


def toml_document(run_config: Mapping[str, Scalar]) -> str:
    """Plain values as TOML."""
    return "".join(f"{_toml(key)} = {_toml(value)}\n" for key, value in run_config.items())


def _toml(value: Scalar) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        # Through float: a NumPy scalar's repr names its type.
        return repr(float(value)) if math.isfinite(value) else str(float(value))
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    raise ConfigurationError(f"Expected a bool, int, float or str in the run config, got {value!r}.")


def _scratch_parent() -> str | None:
    """A folder whose name is short enough for Ray's sockets."""
    default = tempfile.gettempdir()
    return "/tmp" if len(default) > _LONGEST_SCRATCH_PARENT and os.access("/tmp", os.W_OK) else default


def _environment(home: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """The caller's own environment with these additions, bent so that the run stays in its scratch home."""
    merged = {**os.environ, **extra}
    for name in _DROPPED_VARIABLES:
        merged.pop(name, None)
    merged.update(without_proxy(merged))
    merged.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")
    return {
        **merged,
        _MARKER: secrets.token_hex(8),
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        # Ray: its files in the scratch home, no report home, and since it listens on every interface, a password.
        "RAY_TMPDIR": str(home),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "SPT_NOENV": "1",  # keeps Ray's process titles off the environment that stop() looks for
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
        # Flower starts its other executables by name.
        "PATH": os.pathsep.join(filter(None, [str(Path(sys.executable).parent), merged.get("PATH", "")])),
    }


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep the loopback address from going through a proxy: Flower's HTTP clients read them."""
    names = ("NO_PROXY", "no_proxy")
    return {name: ",".join(filter(None, [environment.get(name, ""), "127.0.0.1", "localhost"])) for name in names}


def executable(name: str) -> str:
    """The path of one of Flower's commands, beside this interpreter.

    Raises
    ------
    LaunchError
        If it is not there.
    """
    folder = Path(sys.executable).parent
    found = shutil.which(name, path=str(folder))
    if found is None:
        raise LaunchError(f"Expected {name} in {folder}, beside this interpreter: install flwr[simulation] there.")
    return found


def free_port() -> int:
    """A port of the loopback interface nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _healthy(port: int, tls: ssl.SSLContext | None) -> bool:
    if tls is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=1.0, context=tls)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
