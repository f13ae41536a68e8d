"""Run the Flower App through the real ``flwr run``, and leave nothing behind.

``flwr run`` alone leaves a daemon, returns 0 when the run failed, writes into the user's home and may install packages
(docs/running.md). Here a SuperLink of our own is started on a free loopback port with a scratch home, the run is
submitted to it, and success is what the SuperLink says of the run. Whatever happens, every process started is stopped.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..privacy import MurmurflError

_CONNECTION = "murmurfl-run"
_MARKER = "MURMURFL_LAUNCH"
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 15.0
_LOG_TAIL = 30
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class LaunchError(MurmurflError):
    """The run could not be started, failed, or did not end in time."""


@dataclass(frozen=True)
class LaunchResult:
    """A run that ended well.

    Parameters
    ----------
    run_id : str
        Flower's id of the run.
    status : str
        ``finished:completed``.
    seconds : float
        From the first process to the last.
    """

    run_id: str
    status: str
    seconds: float


def run_flower_app(
    app_dir: Path,
    *,
    run_config: Mapping[str, bool | int | float | str] | None = None,
    num_supernodes: int,
    total_cpus: int | None = None,
    timeout_s: float = 3600.0,
    on_line: Callable[[str], None] | None = None,
) -> LaunchResult:
    """Run a Flower App directory on the Ray simulation engine.

    Parameters
    ----------
    app_dir : Path
        Folder with the app's pyproject.toml, which is left as it is.
    run_config : mapping, optional
        Overrides of ``[tool.flwr.app.config]``.
    num_supernodes : int
        Virtual nodes.
    total_cpus : int, optional
        Cores Ray may use; default all of this machine's. A node needs one.
    timeout_s : float
        Longest time the run may take, in seconds.
    on_line : callable, optional
        Gets every line of the log, without colours.

    Returns
    -------
    LaunchResult

    Raises
    ------
    LaunchError
        With the reason in its first line and the end of the log below, if anything but a completed run came of it.
    """
    started = time.monotonic()
    project = app_dir.resolve() / "pyproject.toml"
    if not project.is_file():
        raise LaunchError(f"Expected a Flower App with a pyproject.toml, got none in {app_dir}.")
    before = project.read_bytes()
    home = Path(tempfile.mkdtemp(prefix="murmurfl-"))
    marker = secrets.token_hex(8)
    environment = _environment(home, marker)
    tail: deque[str] = deque(maxlen=_LOG_TAIL)

    def line_seen(line: str) -> None:
        tail.append(line)
        if on_line is not None:
            on_line(line)

    try:
        with _superlink(home, environment) as address:
            command = [
                _executable("flwr"),
                "run",
                str(app_dir.resolve()),
                _CONNECTION,
                "--stream",
                "--federation-config",
                f"num-supernodes={num_supernodes} client-resources-num-cpus=1 "
                f"init-args-num-cpus={total_cpus or os.cpu_count() or 1}",
            ]
            if run_config:
                # As a file: on the command line flwr splits values at quotes and spaces.
                overrides = home / "run-config.toml"
                overrides.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in run_config.items()))
                command += ["--run-config", str(overrides)]
            (home / "config.toml").write_text(
                f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\n'
                f'address = "{address}"\ninsecure = true\n'
            )
            code = _follow(command, home, environment, timeout_s, line_seen)
            run_id, status, details = _status(home, environment)
    finally:
        _stop_all(marker)
        shutil.rmtree(home, ignore_errors=True)
        changed = project.read_bytes() != before
        if changed:
            project.write_bytes(before)
    if status != "finished:completed":
        raise LaunchError(_failure(status, details, code, list(tail)))
    if changed:
        raise LaunchError(f"Expected {project} to be left as it was, but the run changed it; it was restored.")
    return LaunchResult(run_id, status, time.monotonic() - started)


def _environment(home: Path, marker: str) -> dict[str, str]:
    environment = dict(os.environ)
    environment.update(
        {
            _MARKER: marker,
            "FLWR_HOME": str(home),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(home),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(home / "datasets"),
            # Flower starts its other executables by name.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")]),
        }
    )
    return environment


def _executable(name: str) -> str:
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise LaunchError(f"Expected {name} beside {sys.executable}, got none: install murmurfl into this environment.")
    return str(path)


@contextmanager
def _superlink(home: Path, environment: dict[str, str]) -> Iterator[str]:
    """A simulation SuperLink on a free loopback port, until the block ends."""
    port = _free_port()
    log = home / "superlink.log"
    command = [
        _executable("flower-superlink"),
        "--insecure",
        "--simulation",
        "--isolation",
        "subprocess",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--disable-runtime-dependency-installation",
        "--database",
        str(home / "state.db"),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=home, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                end = log.read_text(errors="replace").splitlines()[-_LOG_TAIL:]
                state = "ended" if process.poll() is not None else f"did not answer within {_START_TIMEOUT_S:g} s"
                raise LaunchError("\n".join([f"Expected a SuperLink on port {port}, but it {state}.", *end]))
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _follow(
    command: list[str], home: Path, environment: dict[str, str], timeout_s: float, line_seen: Callable[[str], None]
) -> int:
    """Run ``flwr run --stream`` and hand on its lines; its exit code says only whether it was accepted."""
    process = subprocess.Popen(
        command,
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    deadline = time.monotonic() + timeout_s

    def expire(*_: object) -> None:
        raise LaunchError(f"Expected the run to end within {timeout_s:g} s; it was stopped.")

    # An alarm, because reading a line blocks for as long as the run says nothing.
    usable = hasattr(signal, "SIGALRM") and _in_main_thread()
    previous = signal.signal(signal.SIGALRM, expire) if usable else None
    if usable:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        if process.stdout is not None:
            for line in process.stdout:
                line_seen(_ANSI.sub("", line.rstrip("\n")))
                if time.monotonic() > deadline:
                    expire()
        return process.wait()
    finally:
        if usable:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        if process.poll() is None:
            process.kill()
            process.wait()


def _in_main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()


def _status(home: Path, environment: dict[str, str]) -> tuple[str, str, str]:
    """Id, status and details of the only run of this SuperLink, once it has ended."""
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    run: dict[str, str] = {}
    while True:
        listing = subprocess.run(
            [_executable("flwr"), "ls", _CONNECTION, "--format", "json"],
            cwd=home,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            runs = json.loads(listing.stdout).get("runs", [])
        except (json.JSONDecodeError, AttributeError):
            runs = []
        run = runs[0] if runs else {}
        status = str(run.get("status", "never started"))
        if status.startswith("finished") or not runs or time.monotonic() > deadline:
            return (
                str(run.get("run-id", "")),
                status,
                str(run.get("details", "") or run.get("status-details", "") or ""),
            )
        time.sleep(0.3)


def _failure(status: str, details: str, code: int, tail: list[str]) -> str:
    raised = [
        line.strip() for line in tail if re.match(r"^\s*([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception|Exit)\b.*:", line)
    ]
    if raised:
        reason = raised[-1]
    elif status == "never started":
        boxed = [line.strip("│ ") for line in tail if line.startswith("│")]
        words = boxed or [line.strip() for line in tail]
        reason = " ".join(filter(None, words)) or f"exit code {code}"
    else:
        reason = details or f"status {status}"
    return "\n".join([f"The run did not complete ({status}): {reason}", "", "The end of its log:", *tail])


def _stop_all(marker: str) -> None:
    """Stop every process that carries the marker in its environment: what was started, and what that started."""
    for sign, wait_s in ((signal.SIGTERM, _STOP_TIMEOUT_S), (signal.SIGKILL, _STOP_TIMEOUT_S)):
        deadline = time.monotonic() + wait_s
        processes = _marked(marker)
        for process in processes:
            try:
                os.kill(process, sign)
            except ProcessLookupError:
                continue
        while processes and time.monotonic() < deadline:
            time.sleep(0.1)
            processes = _marked(marker)
        if not processes:
            return


def _marked(marker: str) -> list[int]:
    """Processes with the marker; none where there is no /proc, and the sessions' own ends must do."""
    wanted = f"{_MARKER}={marker}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            entries = (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rsplit(")", 1)[-1].split()[0]
        except OSError:
            continue
        if wanted in entries and state != "Z" and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def _toml(value: bool | int | float | str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML basic string
    return repr(value)
