"""Whether this process runs a simulation: only there may keys be seeded, and ledgers end with the process."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from flwr.app import Context

from ...privacy.machine.clipping_figures import TrainingFigures, observer_around

_in_process: ContextVar[bool] = ContextVar("murmurfl_inprocess", default=False)
_kept: ContextVar[dict[str, Any] | None] = ContextVar("murmurfl_kept_by_node", default=None)


def simulated_in_process(kept: dict[str, Any] | None = None) -> AbstractContextManager[None]:
    """Mark what runs inside as a message of a simulation in this process; for engines.

    Parameters
    ----------
    kept : dict, optional
        What the node keeps from one message to the next (:func:`kept_by_node`), as the process of a real node does;
        by default nothing.
    """
    return _InProcess(kept)


class _InProcess(AbstractContextManager[None]):
    """A class and not a generator, because every message of a simulation comes here."""

    def __init__(self, kept: dict[str, Any] | None) -> None:
        self._memory = kept

    def __enter__(self) -> None:
        self._tokens = _in_process.set(True), _kept.set(self._memory)

    def __exit__(self, *error: object) -> None:
        in_process, kept = self._tokens
        _kept.reset(kept)
        _in_process.reset(in_process)


class _Worker(threading.local):
    """What a worker process of a simulation keeps of the nodes whose messages it was given; each thread its own."""

    def __init__(self) -> None:
        self.run_id: int | None = None
        self.nodes: dict[int, dict[str, Any]] = {}


_MOST_NODES = 1024
"""Of so many nodes a worker keeps something; the first ones go first."""
_worker = _Worker()


def kept_by_node(context: Context) -> dict[str, Any] | None:
    """What a simulation's node keeps in this process between messages; None if it keeps nothing, or is none.

    A node's own: no other node sees it, and it ends with the run. A worker may be given a node's message after another
    worker had the one before. There, only what does not change in a run may be kept, and what changes is in the
    context's state, which travels (:func:`state_travels`).
    """
    if _in_process.get():
        return _kept.get()
    if not in_simulation():
        return None
    if _worker.run_id != context.run_id:
        _worker.run_id, _worker.nodes = context.run_id, {}
    kept = _worker.nodes.get(context.node_id)
    if kept is None:
        if len(_worker.nodes) >= _MOST_NODES:
            del _worker.nodes[next(iter(_worker.nodes))]
        kept = _worker.nodes[context.node_id] = {}
    return kept


def in_simulation() -> bool:
    """Whether this process is a simulation's worker: no message can make it look like one."""
    return _in_process.get() or _is_worker()


def _is_worker() -> bool:
    global _known_as_worker  # for good: Ray gives an actor a process of its own
    if not _known_as_worker:
        ray = sys.modules.get("ray")  # a worker of Ray's has imported it
        _known_as_worker = (
            ray is not None and bool(ray.is_initialized()) and ray.get_runtime_context().get_actor_id() is not None
        )
    return _known_as_worker


_known_as_worker = False


def state_travels() -> bool:
    """Whether a simulated machine's state goes back to where messages come from: not to an engine in this process."""
    return not _in_process.get()


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
    They are not private. Outside a simulation there are no entries, and nobody is told.
    """
    if figures is None or not in_simulation():
        return {}
    if not _in_process.get():
        return figures.entries()
    observer = observer_around()
    if observer is not None:
        observer.machines[name] = figures
    return {}
