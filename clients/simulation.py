"""Whether this process runs a simulation: only there may keys be seeded, and ledgers end with the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..privacy.training import TrainingFigures, observer_around

_in_process: ContextVar[bool] = ContextVar("murmurfl_inprocess", default=False)
_kept: ContextVar[dict[str, Any] | None] = ContextVar("murmurfl_kept_by_node", default=None)


@contextmanager
def simulated_in_process(kept: dict[str, Any] | None = None) -> Iterator[None]:
    """Mark what runs inside as a message of a simulation in this process; for engines.

    Parameters
    ----------
    kept : dict, optional
        What the node keeps from one message to the next (:func:`kept_by_node`), as the process of a real node does;
        by default nothing.
    """
    token, token_kept = _in_process.set(True), _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token_kept)
        _in_process.reset(token)


def kept_by_node() -> dict[str, Any] | None:
    """What the node of a simulation in this process keeps between messages; None if it keeps nothing, or is none.

    A node's own: no other node of the simulation sees it, and it ends with the engine.
    """
    return _kept.get()


def in_simulation() -> bool:
    """Whether this process is a simulation's worker: no message can make it look like one."""
    if _in_process.get():
        return True
    ray = sys.modules.get("ray")  # a worker of Ray's has imported it
    return ray is not None and bool(ray.is_initialized()) and ray.get_runtime_context().get_actor_id() is not None


def training_entries(name: str, figures: TrainingFigures | None) -> dict[str, int | float]:
    """What clipping did to a simulated machine's release, as entries of its reply; none to an engine in this process.

    In this process the engine that carries the messages is told directly, so that replies are those of real machines.

    Parameters
    ----------
    name : str
        The machine's.
    figures : TrainingFigures or None

    Notes
    -----
    **Formal guarantees.** None: not private. Outside a simulation there are no entries, and nobody is told.
    """
    if figures is None or not in_simulation():
        return {}
    if not _in_process.get():
        return figures.entries()
    observer = observer_around()
    if observer is not None:
        observer.machines[name] = figures
    return {}
