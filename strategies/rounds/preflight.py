"""Before the first round, while nothing is spent: who is there, and what clients state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.serverapp import Grid

from ..aggregation.plain import Aggregator
from .known_machines import Awaited, MachineDirectory, NodesUnavailableError, in_order
from .replies import DirectMachines, ask_statements
from .sampling import CohortSampler

_FEW = 100
"""Clients whose statements show how loud the noise is, where how long each of them lasts does not matter."""


def wait_for_clients(
    grid: Grid | DirectMachines, machines: MachineDirectory, sampler: CohortSampler, aggregator: Aggregator
) -> None:
    """Wait until enough clients can be asked; the first time for all, whose names are learned then.

    Raises
    ------
    NodesUnavailableError
        If too few are connected when the deadline passes.
    """
    begun = bool(machines.names)
    needed = sampler.fewest_connected
    if not isinstance(grid, DirectMachines):
        without = sampler.unaskable if begun else frozenset[str]()
        aggregator.wait_for_clients(machines, grid, Awaited(needed, sampler.fewest_left, without))
        if begun:
            sampler.note_absent([name for name in machines.node_map() if name not in without])
    elif not begun:
        names = in_order(grid.names())
        if len(names) < needed:
            raise NodesUnavailableError(f"Expected {needed} machines, got {len(names)}.")
        machines.restore(names[: sampler.config.num_clients])


def client_statements(
    grid: Grid | DirectMachines,
    machines: MachineDirectory,
    sampler: CohortSampler,
    *,
    session: str,
    num_parameters: int,
    message_type: str,
    timeout: float,
    few: bool = False,
) -> Mapping[str, Mapping[str, Any]]:
    """Return the statements of all connected clients by name, or those of a few of many, spread over all."""
    if isinstance(grid, DirectMachines):
        names = machines.names
        some = list(names[:: -(-len(names) // _FEW)]) if few and len(names) > _FEW else None
        statements = grid.statements(session) if some is None else grid.statements(session, some)
        if some or len(statements) == len(names):
            return statements
    else:
        # Who owes an answer would get a second message at a time; who is excluded is asked nothing.
        owing = sampler.excluded | sampler.requests.machines
        nodes = {name: node for name, node in machines.node_map().items() if name not in owing}
        every = max(-(-len(nodes) // _FEW), 1) if few else 1
        statements = ask_statements(
            grid,
            dict(list(nodes.items())[::every]),
            session=session,
            num_parameters=num_parameters,
            message_type=message_type,
            timeout=timeout,
            entries=machines.entries,
        )
    return {name: statements[name] for name in machines.names if name in statements}
