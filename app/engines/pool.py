"""Processes over which simulated machines, or whole runs, are spread; and the pool that is this process alone.

A pool is small on purpose: a value that all workers get once, a function called on one worker, and what the calls gave,
as they end. What a worker keeps between calls lies in a mapping that each function gets first. The one on Ray stands in
:mod:`.ray_pool`.
"""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ...privacy import ConfigurationError, MurmurflError

WorkerState = dict[str, Any]
"""What a worker keeps between calls."""

Call = Hashable
"""A call that was made."""


class WorkerError(MurmurflError, RuntimeError):
    """A worker process could not be started, or ended before its work was done. There is no result, not even a part."""


class Pool(ABC):
    """Workers, numbered from 0.

    Attributes
    ----------
    size : int
        How many.
    """

    size: int

    @abstractmethod
    def share(self, value: Any) -> Any:
        """A value that is sent once, to be given as an argument to any number of calls."""

    @abstractmethod
    def call(self, worker: int, function: Callable[..., Any], *arguments: Any) -> Call:
        """Have one worker compute ``function(state, *arguments)``, after what it was asked for before."""

    @abstractmethod
    def completed(self, calls: Iterable[Call]) -> Iterator[tuple[Call, Any]]:
        """Each call and what it gave, as they end.

        Raises
        ------
        WorkerError
            If a worker is gone.
        Exception
            Whatever a call raised.
        """

    def on_all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What every worker makes of ``function(state, number, *arguments)``, in the order of their numbers."""
        calls = [self.call(worker, function, worker, *arguments) for worker in range(self.size)]
        made = dict(self.completed(calls))
        return [made[call] for call in calls]

    def each(self, function: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        """Whole tasks, each on whichever worker is idle: the number of each and what ``function`` made of it.

        Arguments are asked for when a worker is there for them.
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
    """Workers that are this process: each call is made at once.

    Parameters
    ----------
    size : int
        One, or for tests several, which keep apart what they keep.
    """

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
    """Refuse a number of workers that cannot be, or on an engine that knows none.

    Parameters
    ----------
    workers : int or None
        None where nobody asked for any.
    ray_address : str
        Of a Ray cluster; empty for this computer.
    """
    if workers is not None and workers < 1:
        raise ConfigurationError(f"Expected workers >= 1, got {workers}.")
    if engine != "cohort" and (workers is not None or ray_address):
        raise ConfigurationError(
            f"Expected engine 'cohort' for workers and a Ray cluster's address, got {engine!r}: only the cohort "
            "engine splits the machines of a run over processes."
        )


@contextmanager
def computing_alone() -> Iterator[None]:
    """In one thread, and without the lines of Flower's log: as many workers as cores leave no core for a second thread.

    What it changes of this process is put back.
    """
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
    torch = sys.modules.get("torch")  # models that import it later see to this themselves
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def say_nothing(said: str) -> None:
    """For those who need not be told what is waited for."""
