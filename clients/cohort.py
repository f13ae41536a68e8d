"""The machines of a simulation, asked together: no messages, gradients of many machines in one piece.

They are the ordinary clients, with their own policies, keys and ledgers; what they refuse here they refuse anywhere. If
machines share a model, and their class says how (:meth:`PrivateClient.together`), their samples are stacked and the
model computes all gradients in one call. Other machines are asked one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..privacy import ConfigurationError, RefusedError, Release
from ..privacy.cohort import release_together
from ..privacy.contributions import StackedContributions
from .base import PrivateClient, Request
from .gradients import PerSampleGradients, Samples

logger = logging.getLogger(__name__)

# How many values of contributions may be in memory at a time. More of them, of many samples or a large model, are
# computed in blocks.
_BLOCK_VALUES = 1 << 22


class StackableGradients(PerSampleGradients, Protocol):
    """Gradients that can combine several points in closed form, without a row for every sample. Not required."""

    def stacked(
        self,
        points: Sequence[Sequence[NDArray[Any]]],
        weights: Sequence[float | NDArray[np.float64]],
        samples: Any,
    ) -> StackedContributions:
        """As :func:`~murmurfl.clients.gradients.combined_gradients`, without a row for every sample."""
        ...


class StackableSamples(Samples, Protocol):
    """Samples of many machines that come from one place. Not required."""

    @classmethod
    def stack(cls, parts: Sequence[tuple[Any, slice]]) -> Any:
        """The batch of all parts, one after the other; a part is a machine's samples and a slice of them."""
        ...


class Cohort:
    """Simulated machines by name, made when they are first asked.

    Parameters
    ----------
    names : sequence of str
    make_client : callable
        The machine of a name, with simulated keys.

    Notes
    -----
    **Formal guarantees.** Those of each machine, in simulation.
    """

    def __init__(self, names: Sequence[str], make_client: Callable[[str], PrivateClient]) -> None:
        self._names = list(names)
        self._make_client = make_client
        self._clients: dict[str, PrivateClient] = {}
        self._alone: set[type[PrivateClient]] = set()

    def names(self) -> list[str]:
        """All machines."""
        return self._names

    def client(self, name: str) -> PrivateClient:
        """A machine."""
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = self._make_client(name)
        return client

    @property
    def one_by_one(self) -> list[str]:
        """Kinds of clients that could not be asked together."""
        return sorted(kind.__name__ for kind in self._alone)

    def releases(
        self,
        server_round: int,
        session: str,
        acks: Mapping[str, int],
        points: Sequence[Sequence[NDArray[Any]]],
    ) -> Iterator[tuple[str, Release | RefusedError]]:
        """What every machine of ``acks`` answers to the request of a round, in order.

        Parameters
        ----------
        server_round : int
            t.
        session : str
        acks : mapping of str to int
            The machines asked and the acknowledgement for each.
        points : sequence of sequences of ndarray
            Query points, each a list of the model's arrays.

        Yields
        ------
        tuple of str and (Release or RefusedError)
        """
        clients = [(name, self.client(name)) for name in acks]
        together: list[tuple[str, PrivateClient]] = []
        room = _BLOCK_VALUES
        for name, client in clients:
            if client.machine.policy.sums_samples:
                # By itself, and computed as a message would have it computed: a sum over many samples in float64 is
                # then the same on every engine, to the last bit.
                if together:
                    yield from self._block(together, server_round, session, acks, points)
                    together, room = [], _BLOCK_VALUES
                yield from _one_by_one([(name, client)], server_round, session, acks, points)
                continue
            size = client.machine.policy.batch_size * client.machine.num_parameters
            alike = not together or _alike(client, together[0][1])
            if together and (room < size or not alike):
                yield from self._block(together, server_round, session, acks, points)
                together, room = [], _BLOCK_VALUES
            together.append((name, client))
            room -= size
        if together:
            yield from self._block(together, server_round, session, acks, points)

    def _block(
        self,
        block: list[tuple[str, PrivateClient]],
        server_round: int,
        session: str,
        acks: Mapping[str, int],
        points: Sequence[Sequence[NDArray[Any]]],
    ) -> Iterator[tuple[str, Release | RefusedError]]:
        clients = [client for _, client in block]
        together = type(clients[0]).together(clients, server_round, session, points)
        if together is None:
            self._say_alone(clients[0])
            yield from _one_by_one(block, server_round, session, acks, points)
            return

        def contributions(positions: list[int], slices: list[slice]) -> StackedContributions:
            parts = [(clients[i].samples, chosen) for i, chosen in zip(positions, slices, strict=True)]
            return together.contributions(positions, stacked_samples(parts))

        outcomes = release_together(
            [client.machine for client in clients],
            session,
            [acks[name] for name, _ in block],
            contributions,
            note=together.note,
        )
        yield from zip((name for name, _ in block), outcomes, strict=True)

    def _say_alone(self, client: PrivateClient) -> None:
        if type(client) not in self._alone:
            self._alone.add(type(client))
            logger.warning("%s cannot be asked together: its machines are asked one by one.", type(client).__name__)


def _one_by_one(
    clients: Sequence[tuple[str, PrivateClient]],
    server_round: int,
    session: str,
    acks: Mapping[str, int],
    points: Sequence[Sequence[NDArray[Any]]],
) -> Iterator[tuple[str, Release | RefusedError]]:
    for name, client in clients:
        try:
            yield name, client.release(Request(server_round, session, acks[name], tuple(map(list, points))))
        except RefusedError as refusal:
            yield name, refusal


def _alike(one: PrivateClient, other: PrivateClient) -> bool:
    ours, theirs = one.machine.policy, other.machine.policy
    same = (ours.batch_size, ours.clip_unit, ours.clip_norm) == (theirs.batch_size, theirs.clip_unit, theirs.clip_norm)
    return same and type(one) is type(other) and one.gradients is other.gradients


def stacked_samples(parts: Sequence[tuple[Any, slice]]) -> Any:
    """One batch of several machines' samples.

    Parameters
    ----------
    parts : sequence of (samples, slice)
        Batches that are arrays, or tuples of arrays, with the samples along the first axis.

    Raises
    ------
    ConfigurationError
        If the batches are of another kind.
    """
    kinds = {type(samples) for samples, _ in parts}
    stack = getattr(parts[0][0], "stack", None)
    if len(kinds) == 1 and stack is not None:
        return stack(parts)
    batches = [samples[chosen] for samples, chosen in parts]
    if all(isinstance(batch, np.ndarray) for batch in batches):
        return np.concatenate(batches)
    if all(isinstance(batch, tuple) for batch in batches):
        return tuple(np.concatenate([np.asarray(part) for part in column]) for column in zip(*batches, strict=True))
    raise ConfigurationError(
        f"Expected batches that are arrays or tuples of arrays, got {type(batches[0]).__name__}; use another engine."
    )
