"""A helper of secure aggregation on a simulation's node: with the seed's keys, and a record that ends with the run."""

from __future__ import annotations

from flwr.app import Message, RecordDict

from ..privacy import ConfigurationError
from ..privacy.opening import Opener
from ..privacy.roster import HelperKey, Roster
from .helper import ContextOpeningRecord, answer_helper
from .simulation import in_simulation


def answer_simulated_helper(message: Message, state: RecordDict, *, name: str, seed: int, roster: Roster) -> Message:
    """What a simulated helper answers to a message.

    Parameters
    ----------
    message : Message
    state : RecordDict
        ``context.state`` of its node, which may host others as well.
    name : str
        Its name in the roster.
    seed : int
        Of the run: its keys are derived from it.
    roster : Roster

    Raises
    ------
    ConfigurationError
        Outside a simulation.

    Notes
    -----
    Opens what a real helper would and nothing else. It hides nothing from anybody who knows the seed, and its record
    ends with the run: that is why a real node is refused.
    """
    if not in_simulation():
        raise ConfigurationError("Expected a simulation, got a real node: a helper there is `murmurfl helper CONFIG`.")
    opener = Opener(name, HelperKey.simulated(seed, name), roster, ContextOpeningRecord(state, name))
    return answer_helper(opener, message)
