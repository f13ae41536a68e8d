"""The cohort of every round: whom it asks.

The clients of a round are drawn by seed and round alone, so that every engine asks the same ones. Those that cannot be
asked now (they owe an answer, have no release left, or are excluded) are passed over, and others take their place.
"""

from __future__ import annotations

import logging
import secrets
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...privacy.errors import ConfigurationError
from ...privacy.noise import derived_seed
from ..aggregation.plain import Aggregator
from .client_registry import ClientRegistry, NumberedNames
from .exhaustion import ExhaustionSchedule, RemainingReleases, capped, exhaustion_schedule, numbers_of
from .in_flight import InFlightRequests
from .participation import ParticipationConfig, Sampling

logger = logging.getLogger("flwr")

_LARGEST_INT32 = 2**31 - 1
_MOST_NAMED = 5


def sample_clients(
    names: Sequence[str], count: int, seed: int, server_round: int, sampling: Sampling = "uniform"
) -> list[str]:
    """Draw ``count`` of ``names`` without replacement, in the order of ``names``; the arguments alone decide.

    Parameters
    ----------
    sampling : {"uniform", "balanced"}
        ``uniform``: every round by itself, as in reshef-levy-2025. ``balanced``: without replacement over rounds
        (:class:`ShuffledSampler`), so that all clients take part equally often and a single pass uses every sample.

    Notes
    -----
    A client's guarantee is the same whenever it is asked: sampling does not amplify it.

    Examples
    --------
    >>> drawn = sample_clients(["a", "b", "c"], 2, seed=1, server_round=1)
    >>> len(drawn), drawn == sample_clients(["a", "b", "c"], 2, seed=1, server_round=1)
    (2, True)
    """
    numbers: list[int] = sample_numbers(len(names), count, seed, server_round, sampling).tolist()
    return names.at(numbers) if isinstance(names, NumberedNames) else [names[i] for i in numbers]


def sample_numbers(
    num_clients: int, count: int, seed: int, server_round: int, sampling: Sampling = "uniform"
) -> NDArray[np.int64]:
    """Return the numbers, ascending, of the clients that :func:`sample_clients` draws of M."""
    if sampling == "balanced":
        return _shuffled(num_clients, count, seed).batch(server_round)
    generator = np.random.Generator(np.random.Philox(key=derived_seed("sample machines", seed, server_round)))
    return np.sort(generator.choice(num_clients, size=count, replace=False))


class ShuffledSampler:
    """Sampling without replacement: clients are taken in a shuffled order, and shuffled anew once all were taken.

    One epoch is kept. Of the others it is known in which round they begin and which clients remained of the epoch
    before, so that the batch of any round can be drawn again.
    """

    def __init__(self, num_clients: int, count: int, seed: int) -> None:
        if count > num_clients:
            raise ConfigurationError("Expected no more clients a round than there are.", kind="out-of-range")
        self._num_clients, self._count, self._seed = num_clients, count, seed
        self._kind = np.int32 if num_clients <= _LARGEST_INT32 else np.int64
        self._firsts = [1]
        self._remainders: list[NDArray[np.integer]] = [np.empty(0, self._kind)]
        self._current: tuple[int, _Epoch] | None = None

    def batch(self, server_round: int) -> NDArray[np.int64]:
        """Return the numbers, ascending, of the clients of a round."""
        while True:
            number = bisect_right(self._firsts, server_round) - 1
            epoch = self._epoch(number)
            if server_round < epoch.end:
                return epoch.batch(server_round)
            self._firsts.append(epoch.end)  # the next epoch begins where the last one that is known ends
            self._remainders.append(epoch.remainder.copy())

    def _epoch(self, number: int) -> _Epoch:
        if self._current is None or self._current[0] != number:
            self._current = None  # one at a time
            key = derived_seed("deal machines", self._seed, number + 1)
            order = np.random.Generator(np.random.Philox(key=key)).permutation(self._num_clients).astype(self._kind)
            self._current = number, _Epoch(order, self._count, self._firsts[number], self._remainders[number])
        return self._current[1]


class _Epoch:
    """One shuffled order of all clients, taken from its beginning."""

    def __init__(self, order: NDArray[np.integer], count: int, first: int, remainder: NDArray[np.integer]) -> None:
        self._count, self._first = count, first
        self._across: list[NDArray[np.integer]] = []
        if remainder.size:
            # A batch may hold the last of one epoch and the first of the next. A client that is in it already is passed
            # over, and stays at the front of the new epoch for the next batch.
            free = np.flatnonzero(~np.isin(order[:count], remainder))[: count - remainder.size]
            self._across = [np.concatenate([remainder, order[free]])]
            order = np.delete(order, free)
        self._order = order
        self._whole = len(order) // count

    @property
    def end(self) -> int:
        """The first round whose batch is not all of this epoch's."""
        return self._first + len(self._across) + self._whole

    @property
    def remainder(self) -> NDArray[np.integer]:
        """The clients left when there is no whole batch any more."""
        return self._order[self._whole * self._count :]

    def batch(self, server_round: int) -> NDArray[np.int64]:
        place = server_round - self._first - len(self._across)
        batch = self._across[0] if place < 0 else self._order[place * self._count : (place + 1) * self._count]
        return np.sort(batch).astype(np.int64)


@lru_cache(maxsize=8)
def _shuffled(num_clients: int, count: int, seed: int) -> ShuffledSampler:
    return ShuffledSampler(num_clients, count, seed)


def most_requests(num_clients: int, per_round: int, num_rounds: int, sampling: str) -> int:
    """Return the most rounds of a training that ask one client."""
    # Whoever is shuffled anew only once all were taken is asked at most once more than anybody else.
    return num_rounds if sampling == "uniform" else min(num_rounds, -(-num_rounds * per_round // num_clients))


class CohortSampler:
    """The clients that each round of a training asks.

    Parameters
    ----------
    config : ParticipationConfig
        How many clients there are and how many a round asks.
    clients : ClientRegistry
        The clients of the training.
    aggregator : Aggregator
        It may leave clients out for a while, and says how few releases a round can do with.
    requests : InFlightRequests
        Clients that owe an answer are not asked again.
    needs_all : bool
        Whether the rule needs every client in every round.
    """

    def __init__(
        self,
        config: ParticipationConfig,
        clients: ClientRegistry,
        aggregator: Aggregator,
        requests: InFlightRequests,
        *,
        needs_all: bool = False,
    ) -> None:
        self.config, self.clients, self.requests, self.needs_all = config, clients, requests, needs_all
        self._aggregator = aggregator
        self.seed = secrets.randbits(63) if config.seed is None else config.seed
        self.sampling: Sampling = config.sampling
        self.num_clients = config.num_clients or 0
        """M; 0 until it is known."""
        self.clients_per_round = 0
        """Clients a round asks; 0 until M is known."""
        self.excluded: frozenset[str] = frozenset()
        """Clients that the operator has taken out: they are not asked, and what they still send is not looked at."""
        self.remaining = RemainingReleases()
        """Number of releases that each client can still make."""
        self._times: Counter[str] = Counter()

    def settle(self, clients: int) -> int:
        """Note the number of clients; returns for how many of them a round waits."""
        self.num_clients, self.clients_per_round = clients, self.config.asked(clients)
        return self.config.needed(clients)

    def resume(self, seed: int) -> None:
        """Go on with the seed of a checkpoint."""
        self.seed = seed

    @property
    def left_out(self) -> frozenset[str]:
        """Clients that the aggregator leaves out for now; others take their place."""
        return frozenset(self._aggregator.excluded)

    @property
    def fewest_summed(self) -> int:
        """The fewest releases that can enter the model together."""
        return self._aggregator.fewest_releases

    @property
    def is_patient(self) -> bool:
        """Whether rounds may end before all have answered; simulated clients that share a node always answer."""
        return not self.config.waits_for_all and not self.clients.several_on_a_node

    @property
    def fewest_connected(self) -> int:
        """Number of clients that a round waits for until the deadline, before it begins."""
        if not self.clients.names:
            return self.config.fewest
        expected = sum(map(self.requests.absences.waits_for, self.askable))  # of a network: thousands at most
        return max(min(self.config.needed(self.num_clients), expected), self.fewest_left)

    @property
    def fewest_left(self) -> int:
        """Number of them with which a round begins once the deadline has passed."""
        if self.needs_all or not self.clients.names:
            return self.clients_per_round
        fewest = max(self.config.fewest_left(self.num_clients), self.fewest_summed)
        return min(fewest, len(self.askable))

    @property
    def askable(self) -> list[str]:
        """The clients that have not finished, are not left out and not excluded."""
        absent = self.unaskable
        return [name for name in self.clients.names if name not in absent]

    @property
    def unaskable(self) -> AbstractSet[str]:
        """Clients that are not asked now: they have finished, are left out, or are excluded."""
        return self.remaining.exhausted | self.left_out | self.excluded

    def note_absent(self, connected: Collection[str]) -> None:
        """Note who was waited for in vain before a round; rounds do not wait for these until they have answered."""
        missing = [name for name in self.askable if name not in connected and self.requests.absences.waits_for(name)]
        if not missing or len(connected) >= self.fewest_connected:
            return
        for name in missing:
            self.requests.absences.missed(name)
        logger.warning(
            "%d of %d clients are connected; the training goes on without %s, and asks them when they come back.",
            *(len(connected), len(self.askable), ", ".join(map(repr, missing[:_MOST_NAMED]))),
        )

    def exclude(self, names: Iterable[str]) -> bool:
        """Take clients out, or back in: exactly these are excluded from now on; returns whether that is a change.

        Raises
        ------
        ConfigurationError
            If a name is none of this training's, if its rule needs everybody, or if fewer would be left than a sum has.
        """
        excluded = frozenset(names)
        if excluded and (unknown := sorted(excluded.difference(self.clients.names))):
            raise ConfigurationError(
                f"Expected names of this training's clients to exclude, got {', '.join(map(repr, unknown))}. Its "
                f"clients are {', '.join(list(self.clients.names)[:_MOST_NAMED])}, ...",
                kind="unknown-name",
                setting="excluded",
            )
        left = len(self.clients.names) - len(excluded)
        if excluded and (self.needs_all or left < max(self.fewest_summed, 1)):
            needed = self.num_clients if self.needs_all else max(self.fewest_summed, 1)
            raise ConfigurationError(
                f"Expected at least {needed} clients to be left, for this rule or for a sum, got {left} after "
                f"{len(excluded)} were excluded. Exclude fewer, or begin a new training.",
                kind="out-of-range",
            )
        changed = excluded != self.excluded
        self.excluded = excluded
        return changed

    def draw(self, server_round: int) -> list[str]:
        """Draw the clients of a round, without those that have not answered, have finished or are not asked."""
        return self._drawn(server_round, self.requests.clients | self.unaskable, self._times)

    def _drawn(self, server_round: int, absent: AbstractSet[str], times: Mapping[str, int]) -> list[str]:
        """Return the sampled clients of a round, with others in the place of those that are absent."""
        names = self.clients.names
        sampled = sample_clients(names, self.clients_per_round, self.seed, server_round, self.sampling)
        missing = [name for name in sampled if name in absent]
        if not missing:
            return sampled
        chosen = set(sampled).difference(missing)
        if self.is_patient or self.left_out or self.excluded:
            free = [name for name in names if name not in chosen and name not in absent]
            key = derived_seed("replace machines", self.seed, server_round)
            order = np.random.Generator(np.random.Philox(key=key)).permutation(len(free)).tolist()
            if self.sampling == "balanced":
                order.sort(key=lambda place: times.get(free[place], 0))
            chosen.update(free[place] for place in order[: len(missing)])
        return [name for name in names if name in chosen]

    def count_requests(self, names: Collection[str]) -> None:
        """Note that clients are asked: a release of each is spent."""
        self.remaining.requested(names)
        if self.is_patient or self.excluded:
            self._times.update(names)

    def exhaustion(self, rounds: range) -> ExhaustionSchedule:
        """Return who runs out of releases when, if rounds ask others in the place of those that have none left."""
        names = [name for name in self.clients.names if name not in self.excluded]
        caps, numbers = capped(names, self.remaining.left), numbers_of(names)

        def drawn(server_round: int, left: NDArray[np.int64]) -> NDArray[np.int64]:
            exhausted = {names[i] for i in np.flatnonzero(left <= 0).tolist()}
            times = dict(zip(names, (caps - left).tolist(), strict=True))
            return numbers(self._drawn(server_round, exhausted | self.left_out | self.excluded, times))

        return exhaustion_schedule(drawn, caps, rounds, names)
