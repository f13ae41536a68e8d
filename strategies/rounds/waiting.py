"""Why waiting for machines is pointless, said at once where that is certain: what a server sees, and the sentences.

The nodes of a simulation are all there from its start, and all run the same ClientApp. On real nodes more may come, and
others may be mended; there the deadline decides, unless not one of the nodes that are there runs murmurfl.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MOST_NAMED = 10

WITHOUT = "without"
"""A node whose ClientApp does not speak murmurfl's protocol."""
LEGACY = "legacy"
"""Such a node, whose ClientApp is of Flower's legacy kind."""


def is_simulation(grid: object) -> bool:
    """Whether a grid is that of Flower's simulation, whose nodes are all there from the start."""
    from flwr.superlink.grid import InMemoryGrid  # here, because a worker of a simulation never comes here

    return isinstance(grid, InMemoryGrid)


@dataclass(frozen=True)
class Attending:
    """What a server knows of the nodes while it waits.

    Parameters
    ----------
    nodes : int
        Connected.
    silent : int
        Of these, those that have not answered their greeting yet.
    machines, helpers : sequence of str
        Names of those that were met.
    gone : sequence of str
        Names of machines of the training that are not connected any more.
    doubles : sequence of str
        Names that several nodes report.
    strangers : mapping of str to int
        How many nodes there are of each kind that does not speak the protocol.
    said : str
        What other nodes answered.
    simulated : bool
        Whether these are all nodes there will ever be.
    """

    nodes: int
    silent: int
    machines: Sequence[str]
    helpers: Sequence[str] = ()
    gone: Sequence[str] = ()
    doubles: Sequence[str] = ()
    strangers: Mapping[str, int] = field(default_factory=dict)
    said: str = ""
    simulated: bool = False


@dataclass(frozen=True)
class Needed:
    """What a training waits for.

    Parameters
    ----------
    machines, helpers : int
        How many of each.
    client : str
        What the machines' ClientApp must have, as a line of code.
    """

    machines: int
    helpers: int = 0
    client: str = ""

    @property
    def nodes(self) -> int:
        """Nodes of a simulation."""
        return self.machines + self.helpers


def pointless(needed: Needed, seen: Attending) -> str:
    """Why there is no point in waiting; empty where there may be.

    Parameters
    ----------
    needed : Needed
    seen : Attending
        In a simulation, once its nodes are all there.
    """
    strangers = sum(seen.strangers.values())
    if not seen.simulated:
        nobody = not (seen.silent or seen.machines or seen.helpers)
        return _foreign(needed, seen) if strangers >= needed.machines and nobody else ""
    if seen.nodes < needed.nodes:
        return _small(needed, seen)
    if seen.nodes - strangers < needed.nodes and strangers:
        return _foreign(needed, seen)
    if seen.silent:
        return ""
    if len(seen.machines) < needed.machines:
        return shortage(needed, seen)
    return no_helpers(needed, seen) if len(seen.helpers) < needed.helpers else ""


def shortage(needed: Needed, seen: Attending, deadline_s: float | None = None) -> str:
    """That there are too few machines.

    Parameters
    ----------
    needed : Needed
    seen : Attending
    deadline_s : float, optional
        How long was waited; default not at all.
    """
    if seen.strangers:
        return _foreign(needed, seen)
    within = "" if deadline_s is None else f" within {deadline_s:g} s"
    missing = f" (missing: {_listed(seen.gone)})" if seen.gone else ""
    doubles = (
        f"; {len(seen.doubles)} reported by several nodes, of which one is asked: "
        f"{', '.join(map(repr, seen.doubles[:MOST_NAMED]))}"
        if seen.doubles
        else ""
    )
    said = f"Expected {needed.machines} machines{within}, got {len(seen.machines)}{missing}{seen.said}{doubles}."
    if seen.helpers and not needed.helpers:
        return (
            f"{said} {len(seen.helpers)} of the nodes are helpers, which open sums of masked releases: give the "
            "strategy secure_aggregation=SecureAggregation(...)."
        )
    if deadline_s is None:
        return f"{said} The log above has what the nodes say of it."
    why = " Nodes that answered so say in their own logs what is wrong." if seen.said else ""
    return f"{said}{why} Start more nodes, lower num-clients or clients-per-round, or raise node-deadline-s."


def no_helpers(needed: Needed, seen: Attending, deadline_s: float | None = None) -> str:
    """That there are too few helpers; parameters as for :func:`shortage`."""
    names = f" ({', '.join(map(repr, sorted(seen.helpers)))})" if seen.helpers else ""
    if deadline_s is None:
        return (
            f"Expected {needed.helpers} helpers, got {len(seen.helpers)}{names}: without every helper no sum can be "
            "opened. Have the machines release under masks, UpdatePolicy(..., trust='secure-aggregation', "
            f"min_honest=..., min_cohort=...), with CorrelatedNoiseMod(..., helpers={needed.helpers})."
        )
    return (
        f"Expected {needed.helpers} helpers within {deadline_s:g} s, got {len(seen.helpers)}{names}{seen.said}. Start "
        "them (murmurfl helper; in a simulation CorrelatedNoiseMod(helpers=...)), or raise node-deadline-s; without "
        "every helper no sum can be opened."
    )


def _small(needed: Needed, seen: Attending) -> str:
    """A simulation has too few nodes."""
    what = f"{needed.machines} machines"
    if needed.helpers:
        what = f"{needed.nodes} nodes, for {what} and {needed.helpers} helpers"
    return (
        f"Expected a simulation of {what}, got {seen.nodes} nodes (Flower's default is 2). Start it with as many: flwr "
        f'run . --federation-config "num-supernodes={needed.nodes}". Or ask for fewer: lower num_clients.'
    )


def _foreign(needed: Needed, seen: Attending) -> str:
    """Nodes run a ClientApp that does not know murmurfl."""
    strangers = sum(seen.strangers.values())
    there = f"{strangers} of {seen.nodes} nodes"
    if seen.strangers.get(LEGACY):
        return (
            f"Expected ClientApps that speak murmurfl's protocol, got Flower's legacy ClientApp(client_fn) on {there}. "
            f"No model was sent to them. Write {needed.client.replace('ClientApp(', 'numpy_client_app(client_fn, ', 1)}"
        )
    real = (
        "" if seen.simulated else " On a real node the operator's file decides the policy, and murmurfl node reads it."
    )
    # A mod answers for CorrelatedFedAvg alone: under other strategies Flower does not even call it.
    lacks = "it has no mod of murmurfl's around it" if "Mod(" in needed.client else "it is none of this strategy's"
    return (
        f"Expected ClientApps that speak murmurfl's protocol, got {there} whose ClientApp does not: {lacks}. No model "
        f"was sent to them. Write {needed.client}{real}"
    )


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:MOST_NAMED])}{', ...' if len(names) > MOST_NAMED else ''}"
