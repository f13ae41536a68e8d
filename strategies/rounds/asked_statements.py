"""Asking machines what they have spent and what they can still do, in messages to the nodes they are on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from ...privacy import protocol
from ...privacy.sums.roster import MOST_MACHINES
from .replies import exchange

_STATEMENT_NUMBERS = ("releases", "mu-spent", "mu-guaranteed", "mu-budget", "samples-used", "max-participations")


def ask_statements(
    grid: Grid,
    nodes: Mapping[str, int],
    *,
    session: str,
    num_parameters: int,
    message_type: str,
    timeout: float,
    entries: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """The privacy statements of machines, by name; one that gives no sensible answer is missing.

    Parameters
    ----------
    grid : Grid
    nodes : mapping of str to int
        The machines asked and the nodes they are on.
    session : str
        The training the statements are about.
    num_parameters : int
        d: a machine behind a noise mod learns the model's size from it.
    message_type : str
        The type of the messages.
    timeout : float
        Seconds to wait for the answers.
    entries : mapping
        What every message of the training says.

    Notes
    -----
    The statements are the machines' own words; a server cannot check them.
    """
    messages = []
    for name, node_id in nodes.items():
        config = ConfigRecord(
            {
                **entries,
                protocol.VERSION: protocol.PROTOCOL_VERSION,
                protocol.ASK: protocol.ASK_PRIVACY,
                protocol.SESSION: session,
                protocol.MACHINE: name,
                protocol.NUM_PARAMETERS: num_parameters,
            }
        )
        content = RecordDict({protocol.CONFIG: config})
        messages.append(Message(content, dst_node_id=node_id, message_type=message_type))
    statements = {}
    for reply in exchange(grid, messages, timeout):
        if not reply.has_error() and protocol.CONFIG in reply.content.config_records:
            entries = dict(reply.content.config_records[protocol.CONFIG])
            name = str(entries.pop(protocol.MACHINES, ""))
            # A machine speaks for itself only, and what it says must be a statement.
            if nodes.get(name) == reply.metadata.src_node_id and is_statement(entries):
                statements[name] = entries
    return statements


def is_statement(entries: Mapping[str, Any]) -> bool:
    """Whether the entries of an answer are those of a machine's privacy statement."""
    numbers = [entries.get(key) for key in _STATEMENT_NUMBERS]
    # Under secure aggregation all three, or none: a mu without what it rests on would be said of anybody.
    sums = [entries.get(key) for key in (protocol.MU_LOCAL, protocol.MIN_HONEST, protocol.MIN_COHORT)]
    if sums != [None] * len(sums):
        numbers += sums
        if any(not isinstance(number, int) or not 1 <= number <= MOST_MACHINES for number in sums[1:]):
            return False
    return all(isinstance(n, int | float) and not isinstance(n, bool) and n >= 0 for n in numbers)


def releases_left(statement: Mapping[str, Any]) -> float:
    """How many more releases a machine says it can make in this session; if it does not say, what its cap allows."""
    left = statement.get(protocol.RELEASES_LEFT)
    if isinstance(left, int) and not isinstance(left, bool):
        return max(left, 0)
    return max(statement.get("max-participations", math.inf) - statement.get("releases", 0), 0)
