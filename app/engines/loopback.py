"""Flower's commands, servers and processes on this computer: where they are, how they are found and ended.

A run's servers listen on the loopback interface only.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import secrets
import shutil
import signal
import socket
import ssl
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from ...privacy.errors import ConfigurationError, MurmurflError

MARKER = "MURMURFL_LAUNCH"
"""Environment variable that marks a launch's processes."""

_TAIL_LINES = 30
# Ray puts sockets at HOME/ray/session_<date>_<pid>/sockets/plasma_store, and a socket's path has 103 bytes on macOS.
_LONGEST_SCRATCH_PARENT = 16
# These would join another Ray cluster, or open Flower's legacy APIs on fixed ports.
_DROPPED_VARIABLES = ("RAY_ADDRESS", "FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")


class LaunchError(MurmurflError, RuntimeError):
    """A run was refused, failed, was interrupted, or did not end in time.

    ``reason`` is one line; the last lines of the ``log`` so far follow it in the message.
    """

    kind = "failed"

    def __init__(self, reason: str, log: str = "") -> None:
        tail = log.rstrip().splitlines()[-_TAIL_LINES:]
        super().__init__("\n".join([reason, *(["", "The end of its log:", *tail] if tail else [])]))
        self.reason = reason
        self.log = log


def scratch_parent() -> str | None:
    """Return a folder whose name is short enough for Ray's sockets."""
    default = tempfile.gettempdir()
    return "/tmp" if len(default) > _LONGEST_SCRATCH_PARENT and os.access("/tmp", os.W_OK) else default


def launch_environment(home: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the caller's environment with additions, changed so that the run stays in its scratch home."""
    merged = {**os.environ, **extra}
    for name in _DROPPED_VARIABLES:
        merged.pop(name, None)
    merged.update(without_proxy(merged))
    merged.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")
    # Larger messages pass Ray's object store, for two more milliseconds each way. Ray's own limit, 100 KiB, is below
    # the messages of most models.
    merged.setdefault("RAY_max_direct_call_object_size", str(1 << 20))
    return {
        **merged,
        MARKER: secrets.token_hex(8),
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        # Ray: files in the scratch home, no reports to its makers, and a token, since it listens on every interface.
        "RAY_TMPDIR": str(home),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "SPT_NOENV": "1",  # Ray's process titles would overwrite the environment that stop() looks for
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
        # Flower starts its other executables by name.
        "PATH": os.pathsep.join(filter(None, [str(Path(sys.executable).parent), merged.get("PATH", "")])),
    }


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that keep Flower's HTTP clients from using a proxy for the loopback address."""
    names = ("NO_PROXY", "no_proxy")
    return {name: ",".join(filter(None, [environment.get(name, ""), "127.0.0.1", "localhost"])) for name in names}


def executable(name: str) -> str:
    """Path of a command of Flower's or murmurfl's beside this interpreter; refused if it is not there."""
    folder = Path(sys.executable).parent
    found = shutil.which(name, path=str(folder))
    if found is None:
        raise LaunchError(f"Expected {name} in {folder}, beside this interpreter: install murmurfl there.")
    return found


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_listening(port: int) -> bool:
    """Return True if anybody listens on a port of the loopback interface."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_healthy(port: int, tls: ssl.SSLContext | None) -> bool:
    """Return True if a server of Flower's on a port of the loopback interface reports that it is well."""
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


Scalar = bool | int | float | str


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
    raise ConfigurationError(f"Expected a bool, int, float or str in the run config, got {value!r}.", kind="wrong-type")


class Processes:
    """The processes with a marker, ``NAME=VALUE``, in their environment, and all their descendants.

    The environment finds detached and orphaned processes; descent finds those that changed their environment. Every one
    found is remembered, because it may be orphaned afterwards.
    """

    def __init__(self, marker: str) -> None:
        self._variable, _, self._value = marker.partition("=")
        self._known: set[psutil.Process] = set()  # equal by number and birth: numbers are reused

    def living(self, own: set[int]) -> list[int]:
        """Living processes with the marker, those of ``own``, and their descendants, in ascending order."""
        parents: dict[psutil.Process, int] = {}
        found = set(own)
        for pid in psutil.pids():  # not process_iter, which would keep the object of a number's earlier process
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                with process.oneshot():
                    if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                        parents[process] = process.ppid()
                        if process in self._known or self._is_marked(process):
                            found.add(pid)
        grew = True
        while grew:
            children = {process.pid for process, parent in parents.items() if parent in found} - found
            found |= children
            grew = bool(children)
        living = {process for process in parents if process.pid in found - {os.getpid()}}
        self._known |= living
        return sorted(process.pid for process in living)

    def _is_marked(self, process: psutil.Process) -> bool:
        with suppress(psutil.AccessDenied, OSError):  # another user's
            return process.environ().get(self._variable) == self._value
        return False


@contextmanager
def interrupts_as_keyboard_interrupt() -> Iterator[Callable[[], None]]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that they, too, lead to a clean-up.

    Yields a function that ignores them and SIGINT until the block ends. Does nothing outside the main thread, which
    alone gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    previous = {}

    def interrupt(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    def protect() -> None:
        for number in (signal.SIGINT, *ending):
            previous.setdefault(number, signal.getsignal(number))
            signal.signal(number, signal.SIG_IGN)

    ending = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    for number in ending:
        if signal.getsignal(number) is signal.SIG_DFL:
            previous[number] = signal.signal(number, interrupt)
    try:
        yield protect
    finally:
        for number, handler in previous.items():
            # None is a handler that was not installed from Python and cannot be put back by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
