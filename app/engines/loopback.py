"""Flower's commands and servers on this machine: where they are, on which port, in which environment.

Servers of a run listen on the loopback interface alone.
"""

from __future__ import annotations

import http.client
import os
import secrets
import shutil
import socket
import ssl
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ...privacy import MurmurflError

MARKER = "MURMURFL_LAUNCH"
"""An environment variable that tells a launch's processes from all others."""

_TAIL_LINES = 30
# Ray puts sockets at HOME/ray/session_<date>_<pid>/sockets/plasma_store, and a socket's path has 103 bytes on macOS.
_LONGEST_SCRATCH_PARENT = 16
# These would join another Ray cluster, or open Flower's legacy APIs on fixed ports.
_DROPPED_VARIABLES = ("RAY_ADDRESS", "FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")


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


def scratch_parent() -> str | None:
    """A folder whose name is short enough for Ray's sockets."""
    default = tempfile.gettempdir()
    return "/tmp" if len(default) > _LONGEST_SCRATCH_PARENT and os.access("/tmp", os.W_OK) else default


def launch_environment(home: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """The caller's own environment with these additions, bent so that the run stays in its scratch home."""
    merged = {**os.environ, **extra}
    for name in _DROPPED_VARIABLES:
        merged.pop(name, None)
    merged.update(without_proxy(merged))
    merged.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")
    # Up to so many bytes Ray hands a message over by itself; a larger one goes through its object store, for two more
    # milliseconds each way. Its own limit, 100 KiB, is below the messages of most models.
    merged.setdefault("RAY_max_direct_call_object_size", str(1 << 20))
    return {
        **merged,
        MARKER: secrets.token_hex(8),
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
    """The path of one of Flower's commands, or of murmurfl's, beside this interpreter.

    Raises
    ------
    LaunchError
        If it is not there.
    """
    folder = Path(sys.executable).parent
    found = shutil.which(name, path=str(folder))
    if found is None:
        raise LaunchError(f"Expected {name} in {folder}, beside this interpreter: install murmurfl there.")
    return found


def free_port() -> int:
    """A port of the loopback interface nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_listening(port: int) -> bool:
    """Whether anybody listens on a port of the loopback interface."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_healthy(port: int, tls: ssl.SSLContext | None) -> bool:
    """Whether a server of Flower's on a port of the loopback interface says that it is well."""
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
