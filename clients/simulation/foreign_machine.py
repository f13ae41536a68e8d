"""What a simulated machine of other people's projects is made with."""

from __future__ import annotations

from typing import TypedDict

from flwr.app import Context

from ...privacy import ConfigurationError, SimulatedKeys
from .context_ledger import ContextLedger
from .in_simulation import in_simulation


class SimulatedMachine(TypedDict):
    """What a simulated machine's client is made with."""

    name: str
    ledger: ContextLedger
    keys: SimulatedKeys


def simulated_machine(context: Context, *, seed: int = 0) -> SimulatedMachine:
    """Name, ledger and keys of the simulated machine a message is for, to be handed to a client as ``**``.

    Parameters
    ----------
    context : Context
        Flower's.
    seed : int
        Of the run: the same run gives the same model.

    Raises
    ------
    ConfigurationError
        Outside a simulation.

    Examples
    --------
    A ``client_fn``::

        return Mu2Client(gradients, samples, policy, **simulated_machine(context)).to_client()

    Notes
    -----
    The keys follow from the seed, and the ledger ends with the run. That is why a real node is refused them.
    """
    if not in_simulation():
        raise ConfigurationError(
            "Expected a simulation, got a real node: there a client is made with a ledger and keys of its own, "
            "ledger = SQLiteLedger(path) and ledger.keys(), or with `murmurfl node`."
        )
    name = str(context.node_config.get("partition-id", context.node_id))
    return SimulatedMachine(name=name, ledger=ContextLedger(context.state, name), keys=SimulatedKeys(seed, name))
