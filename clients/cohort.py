"""The machines of a simulation, asked together: no messages, gradients of many machines in one piece.

They are the ordinary clients, with their own policies, keys and ledgers; what they refuse here they refuse anywhere. If
machines share a model, and their class says how (:meth:`PrivateClient.together`), their samples are stacked and the
model computes all gradients in one call. Other machines are asked one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..privacy import ConfigurationError, RefusedError, Release
from ..privacy.cohort import release_together
from ..privacy.contributions import StackedContributions
from .base import PrivateClient, Request
from .gradients import PerSampleGradients, Samples
from .release_of import read_release_of

logger = logging.getLogger(__name__)

# How many values of contributions may be in memory at a time. More of them, of many samples or a large model, are
# computed in blocks.
_BLOCK_VALUES = 1 << 22
_NO_ENTRIES: Mapping[str, Any] = MappingProxyType({})


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
        self._names = names
        self._make_client = make_client
        self._clients: dict[str, PrivateClient] = {}
        self._alone: set[type[PrivateClient]] = set()

    def names(self) -> Sequence[str]:
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
        entries: Mapping[str, Any] = _NO_ENTRIES,
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
        entries : mapping
            What else the request says to all of them.

        Yields
        ------
        tuple of str and (Release or RefusedError)
        """
        asked = _Asked(server_round, session, acks, points)
        together: list[tuple[str, PrivateClient, Request]] = []
        room = _BLOCK_VALUES
        for name in acks:
            client = self.client(name)
            try:
                request = asked.request(client, name, entries)
            except RefusedError as refusal:
                yield from self._block(together, asked)
                together, room = [], _BLOCK_VALUES
                yield name, refusal
                continue
            if client.machine.policy.sums_samples or request.of != "gradients":
                # By itself, and computed as a message would have it computed: a sum over many samples in float64 is
                # then the same on every engine, to the last bit.
                yield from self._block(together, asked)
                together, room = [], _BLOCK_VALUES
                yield from _one_by_one([(name, client, request)])
                continue
            size = client.machine.policy.batch_size * client.machine.num_parameters
            if together and (room < size or not _alike(client, together[0][1])):
                yield from self._block(together, asked)
                together, room = [], _BLOCK_VALUES
            together.append((name, client, request))
            room -= size
        yield from self._block(together, asked)

    def _block(
        self, block: list[tuple[str, PrivateClient, Request]], asked: _Asked
    ) -> Iterator[tuple[str, Release | RefusedError]]:
        if not block:
            return
        clients = [client for _, client, _ in block]
        together = type(clients[0]).together(clients, asked.server_round, asked.session, asked.points)
        if together is None:
            self._say_alone(clients[0])
            yield from _one_by_one(block)
            return
        centring, centre = clients[0].centring, block[0][2].centre

        def contributions(positions: list[int], slices: list[slice]) -> StackedContributions:
            samples = stacked_samples(
                [(clients[i].samples, chosen) for i, chosen in zip(positions, slices, strict=True)]
            )
            if centring is not None and centre is not None:
                samples = centring.batch(samples, centre)
            return together.contributions(positions, samples)

        outcomes = release_together(
            [client.machine for client in clients],
            asked.session,
            [request.ack for _, _, request in block],
            contributions,
            note=together.note,
        )
        yield from zip((name for name, _, _ in block), outcomes, strict=True)

    def _say_alone(self, client: PrivateClient) -> None:
        if type(client) not in self._alone:
            self._alone.add(type(client))
            logger.warning("%s cannot be asked together: its machines are asked one by one.", type(client).__name__)


@dataclass(frozen=True)
class _Asked:
    """What a round asks of all machines."""

    server_round: int
    session: str
    acks: Mapping[str, int]
    points: Sequence[Sequence[NDArray[Any]]]

    def request(self, client: PrivateClient, name: str, entries: Mapping[str, Any]) -> Request:
        """The request of one machine; refused as it would refuse a message."""
        of, centre = read_release_of(entries, client.centring, client.evaluation)
        return Request(self.server_round, self.session, self.acks[name], tuple(map(list, self.points)), of, centre)


def _one_by_one(
    block: Sequence[tuple[str, PrivateClient, Request]],
) -> Iterator[tuple[str, Release | RefusedError]]:
    for name, client, request in block:
        try:
            yield name, client.released(request)
        except RefusedError as refusal:
            yield name, refusal


def _alike(one: PrivateClient, other: PrivateClient) -> bool:
    ours, theirs = one.machine.policy, other.machine.policy
    same = (ours.batch_size, ours.clip_unit, ours.clip_norm) == (theirs.batch_size, theirs.clip_unit, theirs.clip_norm)
    same = same and _centred_alike(one, other)
    return same and type(one) is type(other) and one.gradients is other.gradients


def _centred_alike(one: PrivateClient, other: PrivateClient) -> bool:
    ours, theirs = one.centring, other.centring
    return ours is theirs if ours is None or theirs is None else ours.terms == theirs.terms


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
