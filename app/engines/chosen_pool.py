"""Which pool a number of workers comes to: this process, or Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .pool import HerePool, Pool, checked_workers
from .ray_pool import ray_pool


@contextmanager
def opened_pool(
    workers: int | None, ray_address: str = "", *, most: int, of: str, say: Callable[[str], None], data_bytes: int = 0
) -> Iterator[Pool]:
    """The pool for a number of workers, until the block ends: this process for one, Ray for more of them.

    Parameters
    ----------
    workers : int or None
        None for one on each core of the cluster, or of this computer.
    ray_address : str
        Of a Ray cluster, on which even one worker is another process; empty for this computer.
    most : int
        More than that would have nothing to do, and are not started.
    of : str
        What there are so many of, in words.
    say : callable
        Told what is waited for.
    data_bytes : int
        About how much will be shared.

    Raises
    ------
    ConfigurationError
    WorkerError
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
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
