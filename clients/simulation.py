"""Whether this process is a simulation's: there, and only there, keys may be seeded and ledgers may be forgotten."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_in_process: ContextVar[bool] = ContextVar("murmurfl_inprocess", default=False)


@contextmanager
def simulated_in_process() -> Iterator[None]:
    """Mark what runs inside as a message of a simulation in this process; for engines."""
    token = _in_process.set(True)
    try:
        yield
    finally:
        _in_process.reset(token)


def in_simulation() -> bool:
    """Whether this process is a simulation's worker: no message can make it look like one."""
    if _in_process.get():
        return True
    ray = sys.modules.get("ray")  # a worker of Ray's has imported it
    return ray is not None and bool(ray.is_initialized()) and ray.get_runtime_context().get_actor_id() is not None
