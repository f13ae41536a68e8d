"""Before the first round, while nothing is spent: who is there, and what clients state."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from flwr.serverapp import Grid

from ..aggregation.plain import Aggregator
from .client_registry import Awaited, ClientRegistry, NodesUnavailableError, in_order
from .exchange import RoundExchange
from .exhaustion import NO_CAP, ExhaustionSchedule, check_enough_stay
from .replies import DirectReplies, ask_statements
from .sampling import CohortSampler

logger = logging.getLogger("flwr")

_FEW = 100
"""Clients whose statements show how loud the noise is, where how long each of them lasts does not matter."""


def wait_for_clients(
    grid: Grid | DirectReplies, clients: ClientRegistry, sampler: CohortSampler, aggregator: Aggregator
) -> None:
    """Wait until enough clients can be asked; the first time for all, whose names are learned then.

    Raises
    ------
    NodesUnavailableError
        If too few are connected when the deadline passes.
    """
    begun = bool(clients.names)
    needed = sampler.fewest_connected
    if not isinstance(grid, DirectReplies):
        without = sampler.unaskable if begun else frozenset[str]()
        aggregator.wait_for_clients(clients, grid, Awaited(needed, sampler.fewest_left, without))
        if begun:
            sampler.note_absent([name for name in clients.node_map() if name not in without])
    elif not begun:
        names = in_order(grid.names())
        if len(names) < needed:
            raise NodesUnavailableError(f"Expected {needed} clients, got {len(names)}.", kind="conflict")
        clients.restore(names[: sampler.config.num_clients])


def client_statements(
    grid: Grid | DirectReplies,
    clients: ClientRegistry,
    sampler: CohortSampler,
    *,
    session: str,
    num_parameters: int,
    message_type: str,
    timeout: float,
    few: bool = False,
) -> Mapping[str, Mapping[str, Any]]:
    """Return the statements of all connected clients by name, or those of a few of many, spread over all."""
    if isinstance(grid, DirectReplies):
        names = clients.names
        some = list(names[:: -(-len(names) // _FEW)]) if few and len(names) > _FEW else None
        statements = grid.statements(session) if some is None else grid.statements(session, some)
        if some or len(statements) == len(names):
            return statements
    else:
        # Who owes an answer would get a second message at a time; who is excluded is asked nothing.
        owing = sampler.excluded | sampler.requests.clients
        nodes = {name: node for name, node in clients.node_map().items() if name not in owing}
        every = max(-(-len(nodes) // _FEW), 1) if few else 1
        statements = ask_statements(
            grid,
            dict(list(nodes.items())[::every]),
            session=session,
            num_parameters=num_parameters,
            message_type=message_type,
            timeout=timeout,
            entries=clients.entries,
        )
    return {name: statements[name] for name in clients.names if name in statements}


def foresee(
    sampler: CohortSampler, statements: Mapping[str, Mapping[str, Any]], rounds: range, *, allow_exhaustion: bool
) -> ExhaustionSchedule:
    """Return who runs out of releases when, logged; refuse a training for which too few stay, unless allowed."""
    sampler.remaining.read(statements)
    schedule = sampler.exhaustion(rounds)
    begins = rounds.start == 1
    if begins and not allow_exhaustion and sampler.is_patient and schedule.caps.min(initial=NO_CAP) < len(rounds):
        check_enough_stay(schedule, sampler.config.needed(sampler.num_clients))
    return schedule.logged()


def plain_statements(statements: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return clients' statements as a checkpoint has them."""
    return {
        name: {key: value for key, value in statement.items() if isinstance(value, str | int | float)}
        for name, statement in statements.items()
    }


def log_absence_costs(sampler: CohortSampler, strategy: str, costs: str) -> None:
    """Log what becomes of a training when a client is off: it goes on, unless its rule needs everybody."""
    if sampler.clients.several_on_a_node:
        return
    if sampler.needs_all:
        logger.warning("%s needs every client in every round: %s", strategy, costs)
        return
    logger.info(
        "A client that is off or silent is waited for once, and the training goes on as long as %d of %d are "
        "connected.%s",
        *(sampler.fewest_left, sampler.num_clients, costs and f" {costs}"),
    )


def log_dropped(exchange: RoundExchange, sampler: CohortSampler) -> None:
    """Warn of the budget that not waiting costs, where late answers are dropped."""
    if most := exchange.dropped_per_round:
        logger.warning(
            "A round waits for %d of %d clients. What comes later is dropped, and no other release carries it: of "
            "up to %d clients a round the budget of a release is spent for nothing.",
            *(exchange.heard_per_round, sampler.clients_per_round, most),
        )
