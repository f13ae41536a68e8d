"""Pools of worker processes for simulated clients or whole runs: this process alone, or Ray.

A pool has a value that all workers get once, functions called on one worker, and the results of these calls as they
end. A worker keeps what it likes in a mapping that each function gets first.

A private Ray shares nothing with any other: its files lie in a folder of its own, speaking to it needs a token that
only this process and its children know, and a mark finds its processes, which end however the run ends. ``flwr run``
starts such a Ray too, in another process (:mod:`.superlink`).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...privacy.errors import ConfigurationError, MurmurflError, check_installed
from ..version import __version__
from .loopback import MARKER, Processes, interrupts_as_keyboard_interrupt, scratch_parent

WorkerState = dict[str, Any]
"""State that a worker keeps between calls."""

Call = Hashable


class WorkerError(MurmurflError, RuntimeError):
    """A worker process did not start, or ended before its work was done: there is no result, not even a part."""

    kind = "failed"


class Pool(ABC):
    """``size`` workers, numbered from 0."""

    size: int

    @abstractmethod
    def share(self, value: Any) -> Any:
        """Send a value once, to be an argument of any number of calls."""

    @abstractmethod
    def call(self, worker: int, function: Callable[..., Any], *arguments: Any) -> Call:
        """Have one worker compute ``function(state, *arguments)``, after its earlier calls."""

    @abstractmethod
    def completed(self, calls: Iterable[Call]) -> Iterator[tuple[Call, Any]]:
        """Yield each call and its result, as they end.

        Raises
        ------
        WorkerError
            If a worker is gone.
        Exception
            Whatever a call raised.
        """

    def on_all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Results of ``function(state, number, *arguments)`` on every worker, in the order of their numbers."""
        calls = [self.call(worker, function, worker, *arguments) for worker in range(self.size)]
        made = dict(self.completed(calls))
        return [made[call] for call in calls]

    def each(self, function: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        """Run tasks on idle workers; yield each one's number and result.

        A task's arguments are taken when a worker is free for them.
        """
        waiting = iter(enumerate(tasks))
        under_way: dict[Call, tuple[int, int]] = {}

        def begin(worker: int) -> None:
            for number, arguments in waiting:
                under_way[self.call(worker, function, *arguments)] = worker, number
                return

        for worker in range(self.size):
            begin(worker)
        while under_way:
            call, made = next(self.completed(list(under_way)))
            worker, number = under_way.pop(call)
            begin(worker)  # before the caller does anything with what was made
            yield number, made


class HerePool(Pool):
    """Workers that are this process: each call runs at once. Tests use several, which share nothing."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self._states: list[WorkerState] = [{} for _ in range(size)]
        self._made: dict[Call, Any] = {}

    def share(self, value: Any) -> Any:
        return value

    def call(self, worker: int, function: Callable[..., Any], *arguments: Any) -> Call:
        call = object()
        self._made[call] = function(self._states[worker], *arguments)
        return call

    def completed(self, calls: Iterable[Call]) -> Iterator[tuple[Call, Any]]:
        for call in list(calls):
            yield call, self._made.pop(call)


def checked_workers(workers: int | None, engine: str = "cohort", ray_address: str = "") -> None:
    """Raise if the number of workers is impossible, or the engine has none."""
    if workers is not None and workers < 1:
        raise ConfigurationError(
            f"Expected workers >= 1, got {workers}.", kind="out-of-range", setting="workers", got=workers
        )
    if engine != "cohort" and (workers is not None or ray_address):
        raise ConfigurationError(
            f"Expected engine 'cohort' for workers and a Ray cluster's address, got {engine!r}: only the cohort "
            "engine splits the clients of a run over processes.",
            kind="conflict",
            setting="engine",
            got=engine,
        )


@contextmanager
def computing_alone() -> Iterator[None]:
    """Compute in one thread and without Flower's log, until the block ends: workers take all cores."""
    from threadpoolctl import threadpool_limits

    flower = logging.getLogger("flwr")
    level = flower.level
    flower.setLevel(logging.ERROR)
    try:
        with threadpool_limits(1), _one_torch_thread():
            yield
    finally:
        flower.setLevel(level)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    torch = sys.modules.get("torch")  # models that import it later limit it themselves
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def say_nothing(line: str) -> None:
    """Drop a message."""


Say = Callable[[str], None]

_ANSWER_S = 5.0
_START_S = 120.0
_SAY_EVERY_S = 10.0
_END_S = 10.0
_STORE_BYTES = 1 << 30
"""Most memory for Ray's shared values, unless the data are larger; Ray takes it as it uses it."""
# Ray reads these once, when it is imported.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "SPT_NOENV": "1",  # Ray's process titles would overwrite the environment by which processes are found
}


class RayPool(Pool):
    """Workers that are Ray actors of one core each; made by :func:`ray_pool`.

    Workers look for modules in the folders of ``search`` after their own, such as a user's.
    """

    def __init__(self, ray: Any, size: int, search: list[str], where: str, say: Say, *, spread: bool) -> None:
        self.size = size
        self._ray = ray
        self._where = where
        strategy = "SPREAD" if spread else "DEFAULT"
        kind: Any = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0, scheduling_strategy=strategy)(_Worker)
        self._actors = [kind.remote(search) for _ in range(size)]
        self._number: dict[Call, int] = {}
        self._wait_for_start(say)

    def share(self, value: Any) -> Any:
        return self._ray.put(value)

    def call(self, worker: int, function: Callable[..., Any], *arguments: Any) -> Call:
        call = self._actors[worker].run.remote(function, *arguments)
        self._number[call] = worker
        return call

    def completed(self, calls: Iterable[Call]) -> Iterator[tuple[Call, Any]]:
        waiting = list(calls)
        while waiting:
            ready, waiting = self._ray.wait(waiting, num_returns=1)
            for call in ready:
                worker = self._number.pop(call)
                yield call, self._got(call, worker)

    def _got(self, call: Call, worker: int) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(call)
        except errors.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise
        except errors.RayError as error:
            raise WorkerError(
                f"Expected worker {worker + 1} of {self.size} on {self._where} to do its part, but its process is gone "
                f"({type(error).__name__}). Nothing of the run is kept. If memory ran out, use fewer workers or "
                "clients; then start it again."
            ) from error

    def _wait_for_start(self, say: Say) -> None:
        hello = {actor.version.remote(): number for number, actor in enumerate(self._actors)}
        waiting, started = list(hello), time.monotonic()
        while waiting:
            ready, waiting = self._ray.wait(waiting, num_returns=len(waiting), timeout=_SAY_EVERY_S)
            for call in ready:
                if (found := self._got(call, hello[call])) != __version__:
                    raise ConfigurationError(
                        f"Expected murmurfl {__version__} on every node of {self._where}, as here, got {found}: "
                        "install the same version there.",
                        kind="mismatch",
                    )
            if waiting and time.monotonic() - started > _START_S:
                raise WorkerError(
                    f"Expected {self.size} workers on {self._where} within {_START_S:.0f} s, got "
                    f"{self.size - len(waiting)}: its cores are busy, or murmurfl is not installed there. Use fewer "
                    "workers, or try again later."
                )
            if waiting:
                say(f"Waiting for {len(waiting)} of {self.size} workers on {self._where} ...")

    def close(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)


class _Worker:
    """A process that runs one call after the other."""

    def __init__(self, search: list[str]) -> None:
        sys.path.extend(folder for folder in search if folder not in sys.path)
        self._alone = computing_alone()  # while the process lives
        self._alone.__enter__()
        self._state: WorkerState = {}

    def version(self) -> str:
        return __version__

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self._state, *arguments)


@contextlib.contextmanager
def ray_pool(size: int, address: str = "", *, say: Say, most: int = 0, data_bytes: int = 0) -> Iterator[Pool]:
    """Workers on Ray, until the block ends; on a cluster size 0 means one on each core, but no more than ``most``.

    ``address`` is that of a Ray cluster, ``host:port``, ``auto`` or ``ray://host:port``, or empty for a private Ray on
    this computer. ``data_bytes`` is about the size of what will be shared.
    """
    with interrupts_as_keyboard_interrupt() as protect:
        ray, end, where = _connected(size, address, say, data_bytes)
        pool: RayPool | None = None
        try:
            if address:
                there = int(ray.cluster_resources().get("CPU", 0))
                if size > there:
                    raise ConfigurationError(
                        f"Expected workers <= {there}, the cores of {where}, got {size}.",
                        kind="out-of-range",
                        setting="workers",
                        got=size,
                    )
                size = size or max(min(there, most), 1)
            search = [folder or str(Path.cwd()) for folder in sys.path]
            pool = RayPool(ray, size, search, where, say, spread=bool(address))
            yield pool
        finally:
            protect()  # a second Ctrl-C must not stop the stopping
            if pool is not None:
                pool.close()
            end()


def _connected(size: int, address: str, say: Say, data_bytes: int) -> tuple[Any, Callable[[], None], str]:
    """Ray, a function that lets go of it, and its place in words."""
    if address:
        where = f"the Ray cluster at {address}"
        _check_answers(address)
        say(f"Connecting to {where} ...")
    else:
        where = "this computer"
        say(f"Starting {size} workers on a Ray of their own ...")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if not address and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    check_installed("ray", "simulation", "workers on Ray")
    ray = importlib.import_module("ray")
    if ray.is_initialized():
        if address:
            raise ConfigurationError(
                f"Expected to connect to {where}, but this process is connected to a Ray already: call ray.shutdown() "
                "before, or leave the address out to use that Ray.",
                kind="conflict",
            )
        return ray, lambda: None, "the Ray that this process is connected to"
    with _own_signals():
        return (*(_joined(ray, address, where) if address else _started(ray, size, data_bytes)), where)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's signal handlers: Ray's own would end the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _joined(ray: Any, address: str, where: str) -> tuple[Any, Callable[[], None]]:
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL, configure_logging=False)
    except (Exception, SystemExit) as error:  # Ray ends the process if it cannot connect
        ray.shutdown()
        raise ConfigurationError(
            f"Expected {where} to take this computer in, got {type(error).__name__}: {_line(error)}. Is this computer "
            "one of its nodes (`ray status`), and its Ray the same version? From outside, use ray://HOST:10001.",
            kind="failed",
        ) from error
    return ray, ray.shutdown


def _started(ray: Any, size: int, data_bytes: int) -> tuple[Any, Callable[[], None]]:
    folder = Path(tempfile.mkdtemp(prefix="mf-", dir=scratch_parent()))
    mark, before = secrets.token_hex(8), {name: os.environ.get(name) for name in (MARKER, "RAY_ADDRESS")}
    os.environ[MARKER] = mark
    os.environ.pop("RAY_ADDRESS", None)

    def end() -> None:
        with contextlib.suppress(Exception):
            ray.shutdown()
        _end_all(Processes(f"{MARKER}={mark}"))
        shutil.rmtree(folder, ignore_errors=True)

    try:
        ray.init(
            address="local",
            num_cpus=size,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            configure_logging=False,
            object_store_memory=max(_STORE_BYTES, 2 * data_bytes),
            _temp_dir=str(folder),
        )
    except BaseException as error:
        end()
        if isinstance(error, KeyboardInterrupt):
            raise
        raise WorkerError(
            f"Expected Ray to start on this computer, got {type(error).__name__}: {_line(error)}. Leave out --workers "
            "to compute in one process."
        ) from error
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    return ray, end


def _end_all(processes: Processes) -> None:
    """Kill what is left of a Ray."""
    deadline = time.monotonic() + _END_S
    while (left := processes.living(set())) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _check_answers(address: str) -> None:
    """Raise if nobody listens at an address: Ray itself would try for minutes, and end this process."""
    if address in ("auto", "local"):
        if address == "local":
            raise ConfigurationError(
                "Expected the address of a Ray cluster, got 'local': leave it out for that.", kind="malformed"
            )
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 2**16):
        raise ConfigurationError(
            f"Expected a Ray cluster's address as HOST:PORT, ray://HOST:PORT or auto, got {address!r}.",
            kind="malformed",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise ConfigurationError(
            f"Expected a Ray cluster at {address}, but nobody answers there ({error.strerror or error}): start one "
            "with `ray start --head` and give the address that it prints, or leave it out for workers on this "
            "computer.",
            kind="unreachable",
        ) from error


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")[:300]


@contextmanager
def opened_pool(
    workers: int | None, ray_address: str = "", *, most: int, of: str, say: Callable[[str], None], data_bytes: int = 0
) -> Iterator[Pool]:
    """Keep a pool of workers until the block ends: this process for one, Ray for more.

    ``workers`` is None for one on each core; no more are started than there are things to do, ``most`` of ``of`` in
    words. On a Ray cluster (``ray_address``) even one worker is another process.
    """
    checked_workers(workers, ray_address=ray_address)
    asked = workers or (0 if ray_address else cores())
    size = min(asked, max(most, 1))
    if workers is not None and size < workers:
        say(f"{size} of {workers} workers are enough: there are {most} {of}.")
    if size == 1 and not ray_address:
        yield HerePool()
        return
    with ray_pool(size, ray_address, say=say, most=most, data_bytes=data_bytes) as pool:
        yield pool


def cores() -> int:
    """Return number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
