"""The clients of a simulation, asked together: no messages, gradients of many clients in one piece.

They are the ordinary clients, with their own policies, keys and ledgers; what they refuse here they refuse anywhere. If
clients share a model, and their class says how (:meth:`PrivateClient.together`), their samples are stacked and the
model computes all gradients in one call. Other clients are asked one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from ...privacy.errors import ConfigurationError, RefusedError
from ...privacy.ledger.ledger_records import BlockLedger
from ...privacy.noise import NoiseKeys
from ...privacy.release.clipping import ChosenContributions, StackedContributions
from ...privacy.release.ledgered_privatizer import Release
from ...privacy.release.prefix_sums import Privatizer, ReleaseRule
from ...privacy.release.privatizer_block import BlockAdmission, BlockArithmetic, BlockReleases, PrivatizerBlock
from ..adapters.per_sample_gradients import Samples
from ..private_client import BatchedContribution, PrivateClient, Request
from ..queries import QueryPart, read_query


@dataclass(frozen=True)
class Part:
    """Clients that are asked together and share one policy."""

    block: PrivatizerBlock
    names: list[str]
    places: list[int]
    """Places among all that are asked."""
    rows: list[int]
    """Rows in the block."""
    acks: list[int]
    here: list[bool]
    """Whether each of them is computed here."""


@dataclass(frozen=True)
class PartAnswer:
    """The answers of the clients of a part."""

    part: Part
    releases: BlockReleases

    def released(self) -> list[tuple[int, str]]:
        """Return the place among the releases, and the name, of each client that released and is computed here."""
        here, names = self.part.here, self.part.names
        return [(i, names[place]) for i, place in enumerate(self.releases.rows) if here[place]]

    def refused(self) -> Iterator[tuple[str, RefusedError]]:
        """Yield the name of each client that refused, and why."""
        for place, refusal in self.releases.refused.items():
            if self.part.here[place]:
                yield self.part.names[place], refusal

    def rows(self, places: Sequence[int]) -> list[int]:
        """Return the rows in the block of some clients, by their places among the releases."""
        rows, asked = self.part.rows, self.releases.rows
        return [rows[asked[i]] for i in places]

    def acknowledge(self, session: str, acks: Sequence[tuple[int, int]]) -> None:
        """Tell clients, by their places among the releases, which release of theirs was aggregated."""
        self.part.block.acknowledge(session, self.rows([i for i, _ in acks]), [ack for _, ack in acks])

    def release(self, i: int) -> Release:
        """Return a client's release, by its place among the releases."""
        return self.part.block.made(self.releases, i, self.part.rows[self.releases.rows[i]])


@dataclass(frozen=True)
class BlockAnswer:
    """The answers of clients that were asked together, in the order in which they were asked."""

    names: list[str]
    client: PrivateClient
    """One of them."""
    parts: list[PartAnswer]

    def __iter__(self) -> Iterator[tuple[str, Release | RefusedError]]:
        outcomes: dict[str, Release | RefusedError] = {}
        for part in self.parts:
            outcomes |= {name: part.release(i) for i, name in part.released()}
            outcomes |= dict(part.refused())
        return ((name, outcomes[name]) for name in self.names if name in outcomes)


@dataclass(frozen=True)
class BlockTask:
    """Computation of the contributions of a block."""

    names: list[str]
    client: PrivateClient
    """One of them."""
    request: Request
    """The same for all, but for the acknowledgement."""
    together: BatchedContribution
    batch: Callable[[Sequence[str], NDArray[np.int64], NDArray[np.int64]], Any]
    """Makes one batch of the samples of some names, from a start to a stop of each."""
    all_answer: bool = False
    """Whether it is known that nobody refuses: parts then have none of the clients that are computed elsewhere."""

    def answer(self, parts: Sequence[Part]) -> BlockAnswer:
        """Make and record the releases of all parts."""
        session = self.request.session
        with ExitStack() as transactions:
            admissions = [
                transactions.enter_context(part.block.admitted(session, part.rows, part.acks, part.here))
                for part in parts
            ]
            stacks = self._contributions(parts, admissions)
            made = [
                PartAnswer(part, admission.release(stack, self.together.note))
                for part, admission, stack in zip(parts, admissions, stacks, strict=True)
            ]
        return BlockAnswer(self.names, self.client, made)

    def _contributions(
        self, parts: Sequence[Part], admissions: Sequence[BlockAdmission]
    ) -> list[StackedContributions | None]:
        """Return the contributions of each part's clients, computed with those of all others."""
        if len(parts) == 1 and not self.all_answer and all(parts[0].here):
            return [self._whole(parts[0], admissions[0])]
        if not any(any(one.here) for one in admissions):
            return [None] * len(parts)
        asked = zip(parts, admissions, strict=True)
        place = np.concatenate([np.asarray(part.places, np.intp)[one.places] for part, one in asked])
        here = np.concatenate([np.asarray(one.here, bool) for one in admissions])
        start, stop = (np.concatenate([getattr(one, end) for one in admissions]) for end in ("start", "stop"))
        number = np.repeat(np.arange(len(parts)), [len(one.places) for one in admissions])
        # In the place of those that are computed elsewhere another's samples are computed, and dropped: products of
        # matrices of another shape differ in their last bits.
        other = int(here.argmax())
        computed = np.where(here, np.arange(len(place)), other)
        if self.all_answer:
            elsewhere = self._elsewhere(place, parts)
            place = np.concatenate([place, elsewhere])
            here = np.concatenate([here, np.zeros(len(elsewhere), bool)])
            number = np.concatenate([number, np.full(len(elsewhere), -1)])
            computed = np.concatenate([computed, np.full(len(elsewhere), other)])
        names = list(map(self.names.__getitem__, place[computed].tolist()))
        order = np.argsort(place)  # that in which all were asked
        computed, place, here, number = computed[order], place[order], here[order], number[order]
        samples = self._seen(self.batch([names[i] for i in order.tolist()], start[computed], stop[computed]))
        stack = self.together.contributions(place.tolist(), samples)
        if len(parts) == 1 and here.all():
            return [stack]
        share = self.client.privatizer.policy.rows_per_release
        chosen = [np.flatnonzero(np.repeat(here & (number == part), share)) for part in range(len(parts))]
        pick = getattr(stack, "chosen", partial(ChosenContributions, stack))
        return [pick(rows) if rows.size else None for rows in chosen]

    def _whole(self, part: Part, admission: BlockAdmission) -> StackedContributions | None:
        """Return the contributions of the clients of the only part, all of which are computed here."""
        if not admission.places:
            return None
        asked = list(map(part.places.__getitem__, admission.places))
        samples = self._seen(self.batch(list(map(self.names.__getitem__, asked)), admission.start, admission.stop))
        return self.together.contributions(asked, samples)

    def _seen(self, samples: Any) -> Any:
        """Return samples as they are seen by a public input."""
        if self.client.giver is not None and self.request.public_input is not None:
            return self.client.giver.asked.seen(samples, self.request.public_input)
        return samples

    def _elsewhere(self, placed: NDArray[np.intp], parts: Sequence[Part]) -> NDArray[np.intp]:
        """Return the places of the clients that are computed elsewhere: nothing else is known of them."""
        if len(placed) < sum(len(part.rows) for part in parts):
            raise ConfigurationError(
                "Expected every client to answer, as its cap and its samples allow, but one refused: use one worker.",
                kind="refused",
            )
        missing = np.ones(len(self.names), bool)
        missing[placed] = False
        return missing.nonzero()[0]


def stacked_samples(parts: Sequence[tuple[Any, slice]]) -> Any:
    """Return one batch of several clients' samples, along the first axis of arrays in tuples or by name."""
    kinds = {type(samples) for samples, _ in parts}
    stack = getattr(parts[0][0], "stack", None)
    if len(kinds) == 1 and stack is not None:
        return stack(parts)
    batches = [samples[chosen] for samples, chosen in parts]
    if isinstance(batches[0], list):
        raise _no_batch(batches[0])
    return _joined(batches)


def _joined(batches: Sequence[Any]) -> Any:
    first = batches[0]
    if isinstance(first, Mapping):
        return {name: _joined([batch[name] for batch in batches]) for name in first}
    if isinstance(first, tuple):
        return tuple(_joined(column) for column in zip(*batches, strict=True))
    if not hasattr(first, "shape") and not isinstance(first, list):
        raise _no_batch(first)
    return np.concatenate([np.asarray(batch) for batch in batches])


def _no_batch(found: Any) -> ConfigurationError:
    return ConfigurationError(
        f"Expected batches of arrays, in tuples or by name, got {type(found).__name__}; use another engine.",
        kind="wrong-type",
    )


logger = logging.getLogger(__name__)
_BLOCK_VALUES = 1 << 22
_MOST_RECENT = 256
"""Clients with parts that are kept for their next request: all of a small simulation."""
_NO_ENTRIES: Mapping[str, Any] = MappingProxyType({})
Answer = tuple[str, Release | RefusedError]


class ClientGroups(Protocol):
    """Simulated clients that differ by name, samples, ledger and keys alone; each has a row, from 0."""

    ledgers: BlockLedger
    num_samples: NDArray[np.int64]
    """Number of samples that each client trains on."""

    def rows(self, names: Sequence[str]) -> list[int]:
        """Return clients' rows."""
        ...

    def kinds(self, names: Sequence[str]) -> Sequence[Hashable | None]:
        """Return values that are equal for clients alike in everything else; None for one that is like no other."""
        ...

    def samples(self, name: str) -> Samples:
        """Return a client's samples."""
        ...

    def batch(self, names: Sequence[str], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Any:
        """Return some samples of clients as one batch, client after client."""
        ...

    def keys(self, row: int) -> NoiseKeys:
        """Return a client's simulated keys."""
        ...


class Cohort:
    """Simulated clients by name.

    Parameters
    ----------
    names : sequence of str
    make_client : callable
        Makes the client of a name, with simulated keys.
    kinds : Kinds, optional
        Which clients are alike: only rows of arrays are kept of them, and a client is made when it is asked for. By
        default each client is made when it is first asked, and kept.
    only : collection of str, optional
        The clients that are computed here, where others of a round are computed elsewhere.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.clients import NoisySGDClient
    >>> from murmurfl.privacy import MemoryLedger, PrivacyPolicy, SimulatedKeys
    >>> class Mean:
    ...     shapes = [(1,)]
    ...     def __call__(self, parameters, samples):
    ...         return parameters[0] - samples
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0, mechanism="independent")
    >>> def make_client(name):
    ...     return NoisySGDClient(Mean(), np.ones((20, 1)), policy, MemoryLedger(), SimulatedKeys(1, name), name=name)
    >>> cohort = Cohort(["0", "1", "2"], make_client)
    >>> cohort.client("2").name, cohort.client("2") is cohort.client("2")
    ('2', True)
    """

    def __init__(
        self,
        names: Sequence[str],
        make_client: Callable[[str], PrivateClient],
        *,
        kinds: ClientGroups | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        self._names = names
        self._make_client = make_client
        self._kinds = kinds
        self._only = only
        self._clients: dict[str, PrivateClient] = {}
        self._first: dict[Hashable, PrivateClient] = {}
        self._recent: dict[str, PrivateClient] = {}  # with parts, the latest last
        self._blocks: dict[Hashable, PrivatizerBlock] = {}
        self._alone: set[type[PrivateClient]] = set()
        self.arithmetic: Callable[[ReleaseRule], BlockArithmetic] | None = None
        """Computes the values of releases; None for NumPy."""
        self.all_answer = False
        """Whether nobody refuses, as caps and samples tell: those computed elsewhere then have their places only."""
        self.block_values = _BLOCK_VALUES
        """Largest number of contributions' values in memory at a time; more are computed in blocks."""

    def names(self) -> Sequence[str]:
        """All clients."""
        return self._names

    def client(self, name: str) -> PrivateClient:
        """Return a client."""
        kind, kinds = self._kind(name), self._kinds
        if kind is None or kinds is None:
            if name not in self._clients:
                self._clients[name] = self._make_client(name)
            return self._clients[name]
        first = self._like(name)
        if first.name == name:
            return first
        if first.parts:  # which are made for its ledger and keys
            client = self._recent.pop(name, None) or self._make_client(name)
            self._recent[name] = client
            if len(self._recent) > _MOST_RECENT:
                del self._recent[next(iter(self._recent))]
            return client
        client, row = copy(first), self._row(name)
        client.name, client.samples = name, kinds.samples(name)
        client.privatizer = first.privatizer.alike(
            int(kinds.num_samples[row]), kinds.ledgers.ledger(row), kinds.keys(row)
        )
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
    ) -> Iterator[Answer]:
        """Yield what every client answers to the request of round t, in the order of ``acks``.

        ``acks`` are the clients asked and the acknowledgement for each, ``points`` the query points, each a list of
        the model's arrays, and ``entries`` further entries of the request, for all of them.
        """
        for answer in self.answers(server_round, session, acks, points, entries):
            yield from answer

    def answers(
        self,
        server_round: int,
        session: str,
        acks: Mapping[str, int],
        points: Sequence[Sequence[NDArray[Any]]],
        entries: Mapping[str, Any] = _NO_ENTRIES,
    ) -> Iterator[BlockAnswer | tuple[Answer]]:
        """Yield the answers of :meth:`releases`, those of clients that were asked together in one piece."""
        asked = _Asked(server_round, session, acks, points)
        block = _Block(self.block_values)

        def collected() -> Iterator[BlockAnswer | tuple[Answer]]:
            nonlocal block
            full, block = block, _Block(self.block_values)
            yield from self._answers(full, asked)

        names, next_one = list(acks), 0
        kinds = self._kinds_of(names)
        while next_one < len(names):
            name, kind, next_one = names[next_one], kinds[next_one], next_one + 1
            client = self._like(name)
            try:
                request = asked.request(client, name, entries)
            except RefusedError as refusal:
                yield from collected()
                if self._is_here(name):
                    yield ((name, refusal),)
                continue
            privatizer, policy = client.privatizer, client.privatizer.policy
            alone = type(privatizer) is not Privatizer or privatizer.has_few
            if policy.sums_samples or request.of != "gradients" or alone:
                # Computed by itself, as a message would be: then a sum over many samples in float64 is the same on
                # every engine, to the last bit.
                yield from collected()
                yield from self._one_by_one([name], request, asked)
                continue
            size = policy.batch_size * client.privatizer.num_parameters
            if not block.takes(client, size):
                yield from collected()
            block.take([name], client, request, size)
            if kind is None:
                continue
            first, end = next_one, min(next_one + block.room // size, len(names))
            while next_one < end and kinds[next_one] == kind:  # their requests are the same
                next_one += 1
            block.take(names[first:next_one], client, request, size)
        yield from collected()

    def acknowledge(self, session: str, acks: Mapping[str, int]) -> None:
        """Tell clients which of their releases was aggregated, so that they can forget it."""
        together: dict[Hashable, list[str]] = {}
        for name, kind in zip(acks, self._kinds_of(list(acks)), strict=True):
            if kind in self._blocks:
                together.setdefault(kind, []).append(name)
            elif self._is_here(name):
                self.client(name).privatizer.acknowledge(session, acks[name])
        for kind, names in together.items():
            self._blocks[kind].acknowledge(session, self._rows(names), [acks[name] for name in names])

    def _is_here(self, name: str) -> bool:
        return self._only is None or name in self._only

    def _kind(self, name: str) -> Hashable | None:
        return self._kinds_of([name])[0]

    def _kinds_of(self, names: Sequence[str]) -> Sequence[Hashable | None]:
        return [None] * len(names) if self._kinds is None else self._kinds.kinds(names)

    def _row(self, name: str) -> int:
        return self._rows([name])[0]

    def _rows(self, names: Sequence[str]) -> list[int]:
        return list(map(self._names.index, names)) if self._kinds is None else self._kinds.rows(names)

    def _like(self, name: str) -> PrivateClient:
        """Return a client, or the one of its kind that was made first."""
        kind = self._kind(name)
        if kind is None:
            return self.client(name)
        if kind not in self._first:
            self._first[kind] = self._make_client(name)
        return self._first[kind]

    def _batch(self, names: Sequence[str], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Any:
        """Return some samples of clients, as one batch."""
        if self._kinds is not None and None not in self._kinds_of(names):
            return self._kinds.batch(names, starts, stops)
        chosen = map(slice, starts.tolist(), stops.tolist())
        return stacked_samples([(self.client(name).samples, some) for name, some in zip(names, chosen, strict=True)])

    def _answers(self, block: _Block, asked: _Asked) -> Iterator[BlockAnswer | tuple[Answer]]:
        """Yield the answers of the clients of a block."""
        if block.client is None or block.request is None:
            return
        names, client = block.names, block.client
        # A class with its own way of computing together may depend on what is recorded of all clients.
        plain = client.together.__func__ is PrivateClient.together.__func__
        everybody = [client] if plain else _Named(names, self.client)
        together = type(client).together(everybody, asked.server_round, asked.session, asked.points)
        if together is None:
            self._say_alone(client)
            yield from self._one_by_one(names, block.request, asked)
            return
        all_answer = self.all_answer and plain
        computing = BlockTask(names, client, block.request, together, self._batch, all_answer)
        yield computing.answer(self._parts(names, asked, all_answer=all_answer))

    def _parts(self, names: list[str], asked: _Asked, *, all_answer: bool) -> list[Part]:
        """Group the clients by their policies."""
        places = list(range(len(names)))
        here = [True] * len(names) if self._only is None else list(map(self._is_here, names))
        if all_answer:
            places = [place for place in places if here[place]]
            names, here = [names[place] for place in places], [True] * len(places)
        if not names:
            return []
        kinds = self._kinds_of(names)
        first = kinds[0]
        if first is not None and kinds.count(first) == len(kinds):
            rows, acks = self._rows(names), [asked.acks[name] for name in names]
            return [Part(self._block(first, names, first), names, places, rows, acks, here)]
        parts: dict[Hashable, Part] = {}
        for number, (place, name, kind) in enumerate(zip(places, names, kinds, strict=True)):
            privatizer = self.client(name).privatizer if kind is None else None
            key = kind if privatizer is None else (privatizer.plan.fingerprint, privatizer.policy)
            if key not in parts:
                parts[key] = Part(self._block(kind, names, key), [], [], [], [], [])
            part = parts[key]
            part.names.append(name)
            part.places.append(place)
            part.rows.append(len(part.rows) if kind is None else self._row(name))
            part.acks.append(asked.acks[name])
            part.here.append(here[number])
        return list(parts.values())

    def _block(self, kind: Hashable | None, names: list[str], key: Hashable) -> PrivatizerBlock:
        """Return the block of clients that are alike."""
        if kind is None or self._kinds is None:
            privatizers = [self.client(name).privatizer for name in names if self._kind(name) is None]
            alike = [one for one in privatizers if (one.plan.fingerprint, one.policy) == key]
            return PrivatizerBlock.of(alike, arithmetic=self.arithmetic)
        if kind not in self._blocks:
            kinds, made = self._kinds, self.arithmetic
            known = (kinds.ledgers, kinds.num_samples, kinds.keys)
            self._blocks[kind] = PrivatizerBlock(self._first[kind].privatizer, *known, arithmetic=made)
        return self._blocks[kind]

    def _one_by_one(self, names: Sequence[str], request: Request, asked: _Asked) -> Iterator[tuple[Answer]]:
        for name in filter(self._is_here, names):
            try:
                yield ((name, self.client(name).released(replace(request, ack=asked.acks[name]))),)
            except RefusedError as refusal:
                yield ((name, refusal),)

    def _say_alone(self, client: PrivateClient) -> None:
        if type(client) not in self._alone:
            self._alone.add(type(client))
            logger.warning("%s cannot be asked together: its clients are asked one by one.", type(client).__name__)


class _Block:
    """Clients whose gradients are computed in one piece, collected as they are asked."""

    def __init__(self, room: int) -> None:
        self.names: list[str] = []
        self.client: PrivateClient | None = None
        """One of them."""
        self.request: Request | None = None
        self._last: PrivateClient | None = None
        self.room = room
        """Number of values for which there is room."""

    def takes(self, client: PrivateClient, size: int) -> bool:
        """Return True if there is room for another client, and it is like the others."""
        if self.client is None or self._last is client:
            return self.client is None or self.room >= size
        return self.room >= size and _alike(client, self.client)

    def take(self, names: Sequence[str], client: PrivateClient, request: Request, size: int) -> None:
        """Take clients of the kind of ``client``, each of which has contributions of ``size`` values."""
        if self.client is None:
            self.client, self.request = client, request
        self._last = client
        self.names += names
        self.room -= size * len(names)


class _Named(Sequence[PrivateClient]):
    """Clients by name, each made when it is first needed."""

    def __init__(self, names: Sequence[str], client: Callable[[str], PrivateClient]) -> None:
        self._names, self._client = names, client

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, place: int) -> PrivateClient: ...
    @overload
    def __getitem__(self, place: slice) -> list[PrivateClient]: ...
    def __getitem__(self, place: int | slice) -> PrivateClient | list[PrivateClient]:
        chosen = self._names[place]
        return self._client(chosen) if isinstance(chosen, str) else list(map(self._client, chosen))


@dataclass(frozen=True)
class _Asked:
    """The request of a round to all clients."""

    server_round: int
    session: str
    acks: Mapping[str, int]
    points: Sequence[Sequence[NDArray[Any]]]

    def request(self, client: PrivateClient, name: str, entries: Mapping[str, Any]) -> Request:
        """Return the request of one client, which may refuse it like a message."""
        of, public = read_query(entries, client.parts)
        return Request(self.server_round, self.session, self.acks[name], tuple(map(list, self.points)), of, public)


def _alike(one: PrivateClient, other: PrivateClient) -> bool:
    ours, theirs = one.privatizer.policy, other.privatizer.policy
    same = (ours.batch_size, ours.clip_unit, ours.clip_norm) == (theirs.batch_size, theirs.clip_unit, theirs.clip_norm)
    return (
        same and _seen_alike(one.giver, other.giver) and type(one) is type(other) and one.gradients is other.gradients
    )


def _seen_alike(one: QueryPart | None, other: QueryPart | None) -> bool:
    """Return True if samples are seen in the same way by a public input; the policies of the queries may differ."""
    if one is None or other is None:
        return one is other
    return replace(one.asked, policy=other.asked.policy) == other.asked  # type: ignore[type-var]
