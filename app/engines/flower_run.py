"""Run a Flower App through the real ``flwr run`` on the Ray engine, and leave nothing behind."""

from __future__ import annotations

import os
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...privacy import ConfigurationError
from .loopback import LaunchError, Scalar, interrupts_as_keyboard_interrupt, toml_document
from .superlink import Launch


@dataclass(frozen=True)
class LaunchResult:
    """A run that completed."""

    run_id: int  # flower's id of the run
    status: str  # ``finished:completed``
    seconds: float  # from the call to the last process stopped
    log: str  # the streamed log


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

    Raises
    ------
    LaunchError
        If the run did not complete: the exception that ended the ServerApp, Flower's refusal, a
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
