"""Secure aggregation in simulations of other people's projects: which node is a helper, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NoReturn, TypedDict

from flwr.app import Context, Message

from ...privacy import ConfigurationError, SimulatedKeys
from ...privacy.sums.masking import Masking
from ...privacy.sums.roster import MachineKey, Roster
from ..messages.answers import answer
from ..messages.sums_helper import answer_simulated_helper
from .context_ledger import ContextLedger, in_simulation


class SimulatedSums:
    """A simulation's roster, and its helpers: the last nodes of all. Whoever knows the run's seed knows every key."""

    def __init__(self, helpers: int, seed: int) -> None:
        if isinstance(helpers, bool) or not isinstance(helpers, int) or helpers < 1:
            raise ConfigurationError(f"Expected helpers to be an integer >= 1, got {helpers!r}.")
        self._helpers = helpers
        self._seed = seed

    def answer(self, message: Message, context: Context, as_machine: Callable[[Context], Message]) -> Message:
        """A node's answer: a helper's own, or ``as_machine``'s, with a context that knows of machines only."""
        try:
            node, machines = self._place(context)
        except ConfigurationError as error:
            return answer(message, partial(_fail, error))
        if node >= machines:
            roster = _roster(self._seed, machines, self._helpers)
            name = roster.helper_names[node - machines]
            return answer_simulated_helper(message, context.state, name=name, seed=self._seed, roster=roster)
        own = Context(
            run_id=context.run_id,
            node_id=context.node_id,
            node_config={**context.node_config, "num-partitions": machines},
            state=context.state,
            run_config=context.run_config,
        )
        return as_machine(own)

    def masking(self, context: Context, min_cohort: int) -> Masking:
        """The masks of the simulated machine that a message is for, from the context that :meth:`answer` made."""
        name, machines = str(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
        if machines < min_cohort:
            raise ConfigurationError(
                f"Expected a simulation of at least min_cohort = {min_cohort} machines, got {machines}: its "
                f"{machines + self._helpers} nodes less {self._helpers} helpers, the last ones. Start it with a node "
                "for each machine and each helper."
            )
        return Masking(name, MachineKey.simulated(self._seed, name), _roster(self._seed, machines, self._helpers))

    def _place(self, context: Context) -> tuple[int, int]:
        """The number of this node, and how many nodes are machines."""
        node, nodes = (context.node_config.get(key) for key in ("partition-id", "num-partitions"))
        if not isinstance(node, int) or not isinstance(nodes, int) or nodes <= self._helpers:
            raise ConfigurationError(
                f"Expected nodes with a partition-id, more of them than the {self._helpers} helpers, got partition-id "
                f"{node!r} of num-partitions {nodes!r}: start the simulation with a node for each machine and helper."
            )
        return node, nodes - self._helpers


def _fail(error: Exception) -> NoReturn:
    raise error


@lru_cache(maxsize=8)
def _roster(seed: int, machines: int, helpers: int) -> Roster:
    names = tuple(f"helper-{number}" for number in range(helpers))
    return Roster.simulated(seed, tuple(map(str, range(machines))), names)


class SimulatedMachine(TypedDict):
    """Options with which a simulated machine's client is made."""

    name: str
    ledger: ContextLedger
    keys: SimulatedKeys


def simulated_machine(context: Context, *, seed: int = 0) -> SimulatedMachine:
    """Name, ledger and keys of the simulated machine a message is for, to be handed to a client as ``**``.

    The keys follow from the run's seed, and the ledger ends with the run. That is why a real node is refused them.

    Examples
    --------
    A ``client_fn``::

        return Mu2Client(gradients, samples, policy, **simulated_machine(context)).to_client()
    """
    if not in_simulation():
        raise ConfigurationError(
            "Expected a simulation, got a real node: there a client is made with a ledger and keys of its own, "
            "ledger = SQLiteLedger(path) and ledger.keys(), or with `murmurfl node`."
        )
    name = str(context.node_config.get("partition-id", context.node_id))
    return SimulatedMachine(name=name, ledger=ContextLedger(context.state, name), keys=SimulatedKeys(seed, name))
