"""A SuperLink of one run, started, followed and stopped, so that ``flwr run`` leaves nothing behind.

``flwr run`` alone starts a daemon that stays, writes into the user's Flower home, returns 0 when the run failed, and
may edit the app's pyproject.toml. Here every run gets its own SuperLink, on a free loopback port, with a scratch home;
``flwr run`` submits to it and streams its log, ``flwr ls`` says whether it succeeded; and whatever happens, every
process is stopped, the port closed and the scratch home removed before the call returns.

The SuperLink is started here and not by ``flwr run``. So it is our child, its start may take as long as a busy computer
needs (``flwr run`` gives it 15 s), and its own log can explain a refusal. It stands behind the gate of `murmurfl
server`, and takes the commands of a key that goes with it: nobody else on this computer can have it run something.
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
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from flwr.supercore.credential_store.file_credential_store import FileCredentialStore

from ...privacy.files import write_private
from ...privacy.permits import LONGEST_LOGIN_S, OwnerKey
from ..nodes.servers.gate import server_name
from ..nodes.servers.login import keep_login
from .loopback import (
    MARKER,
    LaunchError,
    Processes,
    executable,
    free_port,
    is_healthy,
    is_listening,
    launch_environment,
    scratch_parent,
)

CONNECTION_NAME = "murmurfl-launch"
"""The SuperLink's name in the scratch home's ``config.toml``."""

_OWNERS = "owners"
_START_TIMEOUT_S = 90.0
_STATUS_TIMEOUT_S = 60.0
_PORT_ATTEMPTS = 3
_PORT_TIMEOUT_S = 3.0
# First politely to what was started here, which takes its own children along; then to every process; then by force.
_STOP_STEPS = (
    (3.0, signal.SIGTERM, False),
    (2.0, signal.SIGTERM, True),
    (10.0, getattr(signal, "SIGKILL", signal.SIGTERM), True),
)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NO_DETAILS = ("", "N/A")


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
                self.superlink = process = self.start_process(
                    [
                        executable("murmurfl"),
                        "server",
                        "--verbose",
                        "--owners",
                        str(home / _OWNERS),
                        *self.superlink_options(),
                        "--host",
                        "127.0.0.1",
                        "--port",
                        str(port),
                        "--disable-runtime-dependency-installation",
                    ],
                    stdout=output,
                )
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
                login = key.login(server_name(self.certificate()), until=int(time.time()) + LONGEST_LOGIN_S)
                keep_login(FileCredentialStore(home / "credentials.yaml"), f"127.0.0.1:{port}", login)
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

    def certificate(self) -> Path | None:
        """The SuperLink's certificate; None for plain HTTP."""
        return None

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
        processes = Processes(f"{MARKER}={self.environment.get(MARKER)}")
        left: list[int] = []
        for grace_s, sign, everyone in _STOP_STEPS:
            limit = time.monotonic() + grace_s
            asked: set[int] = set()
            while True:
                # poll() reaps a process; from then on its number may be another process's, and must not be signalled.
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
        """Start a process of this launch, in its environment."""
        # In a session of its own, so that Ctrl-C in the terminal reaches us alone and we stop the rest in order.
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
