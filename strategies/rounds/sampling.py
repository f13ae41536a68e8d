"""The cohort of every round: how many clients a training has, whom a round asks, and who runs out of releases when.

The clients of a round are drawn by seed and round alone, so that every engine asks the same ones. A client is asked for
no more releases than it says it can make, by its cap and its fresh samples: :func:`exhaustion_schedule` tells, from
whom rounds ask and what clients can still make, who has none left when.

A step divides by ``clients_per_round``, whatever came: it is fixed for a session. How many answers a round waits for,
the quorum, may change from round to round.
"""

from __future__ import annotations

import logging
import math
import secrets
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from numpy.typing import NDArray

from ...privacy import ConfigurationError, derived_seed, protocol
from ...privacy.accounting.gdp import check_count
from .in_flight import JUST_BEHIND, InFlightRequests, RoundReplies
from .known_machines import MachineDirectory, NumberedNames
from .replies import UNREACHED, RoundReport, exchange

logger = logging.getLogger("flwr")

Sampling = Literal["uniform", "balanced"]
SAMPLINGS: tuple[Sampling, ...] = get_args(Sampling)

_LARGEST_INT32 = 2**31 - 1


def sample_machines(
    names: Sequence[str], count: int, seed: int, server_round: int, sampling: Sampling = "uniform"
) -> list[str]:
    """``count`` of ``names`` without replacement, in the order of ``names``: a function of the arguments alone.

    Parameters
    ----------
    sampling : {"uniform", "balanced"}
        ``uniform``: every round by itself, as in reshef-levy-2025. ``balanced``: without replacement over rounds
        (:class:`ShuffledSampler`), so that all machines take part equally often and a single pass uses every sample.

    Notes
    -----
    A machine's guarantee is the same whenever it is asked: sampling does not amplify it.
    """
    numbers: list[int] = sample_numbers(len(names), count, seed, server_round, sampling).tolist()
    return [names[i] for i in numbers]


def sample_numbers(
    num_machines: int, count: int, seed: int, server_round: int, sampling: Sampling = "uniform"
) -> NDArray[np.int64]:
    """The numbers, ascending, of the machines that :func:`sample_machines` draws of M."""
    if sampling == "balanced":
        return _shuffled(num_machines, count, seed).batch(server_round)
    generator = np.random.Generator(np.random.Philox(key=derived_seed("sample machines", seed, server_round)))
    return np.sort(generator.choice(num_machines, size=count, replace=False))


class ShuffledSampler:
    """Sampling without replacement: clients are taken in a shuffled order, and shuffled anew once all were taken.

    One epoch is kept. Of the others it is known in which round they begin and which clients remained of the epoch
    before, so that the batch of any round can be drawn again.
    """

    def __init__(self, num_clients: int, count: int, seed: int) -> None:
        if count > num_clients:
            raise ConfigurationError("Expected no more machines a round than there are.", kind="out-of-range")
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


_FEWEST = 2  # machines of a training that does not say how many there are, as in FedAvg
_ROUNDING = 1e-9  # 0.8 * 10 is 8 machines, whatever floating point makes of it


@dataclass(frozen=True, kw_only=True)
class ParticipationConfig:
    """A strategy's options on participation, checked; None for those that were left out.

    :class:`~murmurfl.strategies.RoundOptions` describes them; M is ``num_clients`` and m ``clients_per_round``.
    """

    num_clients: int | None = None
    clients_per_round: int | None = None
    fraction_train: float | None = None
    min_train_nodes: int | None = None
    min_available_nodes: int | None = None
    quorum: float = 1.0
    over_selection: float = 1.0
    excluded: Collection[str] = ()
    seed: int | None = None
    sampling: Sampling = "uniform"

    def __post_init__(self) -> None:
        for name, value in (("quorum", self.quorum), ("over_selection", self.over_selection)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigurationError(
                    f"Expected {name} to be a finite number, got {value!r}.",
                    kind="out-of-range",
                    setting=name,
                    got=value,
                )
        if not 0 < self.quorum <= 1:
            raise ConfigurationError(
                f"Expected 0 < quorum <= 1, got {self.quorum!r}: 1 waits for all.",
                kind="out-of-range",
                setting="quorum",
                got=self.quorum,
            )
        if self.over_selection < 1:
            raise ConfigurationError(
                f"Expected over_selection >= 1, got {self.over_selection!r}: 1 asks clients_per_round clients.",
                kind="out-of-range",
                setting="over_selection",
                got=self.over_selection,
            )
        if isinstance(self.excluded, str) or not all(isinstance(name, str) for name in self.excluded):
            raise ConfigurationError(
                f"Expected excluded to be names of clients, got {self.excluded!r}.",
                kind="wrong-type",
                setting="excluded",
            )
        for name in ("num_clients", "clients_per_round", "min_train_nodes", "min_available_nodes"):
            if (value := getattr(self, name)) is not None:
                check_count(name, value)
        fraction = self.fraction_train
        if fraction is not None and (isinstance(fraction, bool) or not isinstance(fraction, int | float)):
            raise ConfigurationError(
                f"Expected fraction_train to be a number, got {fraction!r}.",
                kind="wrong-type",
                setting="fraction_train",
                got=fraction,
            )
        if fraction is not None and not 0 < fraction <= 1:
            raise ConfigurationError(
                f"Expected 0 < fraction_train <= 1, got {fraction!r}: a round asks some machine.",
                kind="out-of-range",
                setting="fraction_train",
                got=fraction,
            )
        stated = [name for name in ("fraction_train", "min_train_nodes") if getattr(self, name) is not None]
        if self.clients_per_round is not None and stated:
            raise ConfigurationError(
                f"Expected clients_per_round or {stated[0]}, got both: they say the same thing in two ways.",
                kind="conflict",
                setting="clients_per_round",
            )
        most = math.inf if self.num_clients is None else self.num_clients
        if self.clients_per_round is not None and self.clients_per_round > most:
            raise ConfigurationError(
                f"Expected 1 <= clients_per_round <= num_clients, got {self.clients_per_round} of {self.num_clients}.",
                kind="out-of-range",
                setting="clients_per_round",
                got=self.clients_per_round,
            )
        for name in ("min_train_nodes", "min_available_nodes"):
            value = getattr(self, name)
            if value is not None and value > most:
                raise ConfigurationError(
                    f"Expected {name} of at most num_clients = {self.num_clients}, got {value}: there are no more "
                    "machines. Leave num_clients out to train with all that are connected.",
                    kind="out-of-range",
                    setting=name,
                    got=value,
                )
        if self.sampling not in SAMPLINGS:
            raise ConfigurationError(
                f"Expected sampling one of {SAMPLINGS}, got {self.sampling!r}.",
                kind="unknown-name",
                setting="sampling",
                got=self.sampling,
            )

    def fewest_left(self, machines: int) -> int:
        """The fewest connected clients, of M, with which a training that has begun goes on."""
        if self.min_available_nodes is not None:
            return self.min_available_nodes
        return min(-(-self.wanted(machines) // 2), self.needed(machines))

    @property
    def waits_for_all(self) -> bool:
        """Whether a round ends with the last answer."""
        return self.quorum == 1 and self.over_selection == 1

    @property
    def fewest(self) -> int:
        """How many machines must be there before the training begins."""
        if self.num_clients is not None:
            return self.num_clients
        asked = math.ceil(self.over_selection * (self.clients_per_round or self.min_train_nodes or 1) - _ROUNDING)
        return max(asked, _FEWEST if self.min_available_nodes is None else self.min_available_nodes)

    def asked(self, machines: int) -> int:
        """How many of M machines a round asks: ``over_selection`` times m."""
        wanted = self.wanted(machines)
        asked = math.ceil(self.over_selection * wanted - _ROUNDING)
        if asked > machines:
            raise ConfigurationError(
                f"Expected over_selection x clients_per_round of at most {machines} machines, got "
                f"{self.over_selection:g} x {wanted}: lower over_selection, or clients_per_round.",
                kind="out-of-range",
                setting="over_selection",
                got=self.over_selection,
            )
        return asked

    def needed(self, machines: int, asked: int | None = None) -> int:
        """How many answers end a round that asked ``asked`` of M machines (default as many as it may)."""
        most = self.asked(machines)
        share = self.quorum * self.wanted(machines) / most
        return math.ceil(share * (most if asked is None else asked) - _ROUNDING)

    def wanted(self, machines: int) -> int:
        """m, for M machines."""
        if self.clients_per_round is not None:
            return self.clients_per_round
        if self.fraction_train is None:
            return machines
        fewest = _FEWEST if self.min_train_nodes is None else self.min_train_nodes
        # As FedAvg counts; 0.29 * 100 is below 29 in floating point, which is nobody's wish.
        return min(max(int(machines * self.fraction_train + _ROUNDING), fewest, 1), machines)

    @property
    def plain(self) -> dict[str, Any]:
        """The numbers of clients that a checkpoint must agree on, plain values: M, and by what a step divides.

        The quorum, the fewest that a round begins with, and who is excluded are not among them: a resumed training may
        have others.
        """
        if self.num_clients is not None:
            return {"num_clients": self.num_clients, "clients_per_round": self.asked(self.num_clients)}
        rest = {"fraction_train": self.fraction_train, "min_train_nodes": self.min_train_nodes}
        more = {} if self.over_selection == 1 else {"over_selection": float(self.over_selection)}
        stated = {name: value for name, value in rest.items() if value is not None}
        return {"num_clients": None, "clients_per_round": self.clients_per_round, **stated, **more}

    def sentence(self) -> str:
        """A description for a log."""
        if self.num_clients is not None:
            return f"{self.num_clients} in all, {self.asked(self.num_clients)} a round"
        share = "all" if self.fraction_train is None else f"{100 * self.fraction_train:g} %"
        asked = f"{share} of them" if self.clients_per_round is None else self.clients_per_round
        asked = asked if self.over_selection == 1 else f"{self.over_selection:g} x {asked}"
        return f"all that are connected, at least {self.fewest}; {asked} a round"


_MOST_NAMED = 5

Schedule = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]
"""The numbers of the clients that a round asks, given the round and how many releases each of M clients has left."""

NO_CAP = np.iinfo(np.int64).max
"""The releases of a client that can make any number."""


@dataclass(frozen=True)
class ExhaustionSchedule:
    """When clients run out of releases, if every request is answered in time.

    Parameters
    ----------
    caps : ndarray of shape (M,)
        Releases that each client can make.
    rounds : range
        The rounds that were looked at.
    last : ndarray of shape (M,)
        The round after which each client has no release left; the end of ``rounds`` for those that never run out.
    refused : tuple of int, optional
        The first round that asks a client for one release more than it can make, and the client's number; None if none
        does. What comes after that round was not looked at.
    names : sequence of str
        The clients' names.
    """

    caps: NDArray[np.int64]
    rounds: range
    last: NDArray[np.int64]
    refused: tuple[int, int] | None
    names: Sequence[str]

    @property
    def after(self) -> dict[str, int]:
        """The round after which each client has run out, in that order, for those that do before the last round."""
        out = np.flatnonzero(self.last < self.rounds.stop - 1)
        in_order: list[int] = out[np.argsort(self.last[out], kind="stable")].tolist()
        return {self.names[i]: int(self.last[i]) for i in in_order}

    def left(self, server_round: int) -> int:
        """Return how many clients can still be asked in a round."""
        return len(self.last) - int(np.count_nonzero(self.last < min(server_round, self.rounds.stop - 1)))

    def lines(self) -> list[str]:
        """Return lines for a log; none if nobody runs out."""
        after = list(self.after.items())
        if not after:
            return []
        steps = sorted({last + 1 for _, last in after})
        counts = [f"{self.left(step)} left from round {step} on" for step in steps[:_MOST_NAMED]]
        if len(steps) > _MOST_NAMED:
            counts[-1] = f"..., {self.left(steps[-1])} left from round {steps[-1]} on"
        caps = dict(zip(self.names, self.caps.tolist(), strict=True))
        first = [f"{name!r} after round {last} ({caps[name]} releases)" for name, last in after[:_MOST_NAMED]]
        more = ", ..." if len(after) > _MOST_NAMED else ""
        return [
            f"Machines leave: {len(after)} of {len(self.last)} before the end of {self.rounds.stop - 1} rounds; "
            f"{', '.join(counts)}.",
            f"First: {', '.join(first)}{more}.",
        ]


def exhaustion_schedule(
    schedule: Schedule, caps: NDArray[np.int64], rounds: range, names: Sequence[str] | None = None
) -> ExhaustionSchedule:
    """Return when clients run out of releases, from whom rounds ask and how many releases each client can make.

    Parameters
    ----------
    schedule : callable
        The numbers of the clients that a round asks. It may pass over those that have no release left.
    caps : ndarray of shape (M,)
        Releases that each client can make; :data:`NO_CAP` for any number.
    rounds : range
        Rounds to look at.
    names : sequence of str, optional
        The clients' names; default their numbers.
    """
    left = caps.copy()
    last = np.full(len(caps), rounds.stop, np.int64)
    last[caps <= 0] = rounds.start - 1
    refused = None
    # Only a client with fewer releases than there are rounds can run out.
    for server_round in rounds if caps.min(initial=NO_CAP) < len(rounds) else ():
        numbers = schedule(server_round, left)
        left[numbers] -= 1
        asked = left[numbers]
        if (short := numbers[asked < 0]).size:
            refused = server_round, int(short[0])
            break
        last[numbers[asked == 0]] = server_round
    return ExhaustionSchedule(caps, rounds, last, refused, NumberedNames(len(caps)) if names is None else names)


def releases_left(statement: Mapping[str, Any]) -> float:
    """Return how many more releases a client says it can make in this session; by default what its cap allows."""
    left = statement.get(protocol.RELEASES_LEFT)
    if isinstance(left, int) and not isinstance(left, bool):
        return max(left, 0)
    return max(statement.get("max-participations", math.inf) - statement.get("releases", 0), 0)


class RemainingReleases:
    """How many more releases each client can make: what it states, less what it was asked for since."""

    def __init__(self) -> None:
        self._in_all: dict[str, int] = {}
        self._left: dict[str, int] = {}

    def read(self, statements: Mapping[str, Mapping[str, Any]]) -> None:
        """Read clients' statements; one that states no end has none."""
        for name, statement in statements.items():
            left, made = releases_left(statement), statement.get("releases", 0)
            if left != math.inf:
                self._left[name] = int(left)
                self._in_all[name] = int(left) + int(made)

    @property
    def exhausted(self) -> frozenset[str]:
        """The clients that can make no more releases."""
        return frozenset(name for name, left in self._left.items() if left <= 0)

    @property
    def left(self) -> dict[str, int]:
        """How many more releases each client can make that stated it."""
        return dict(self._left)

    def requested(self, names: Iterable[str]) -> None:
        """Count a request to each client: a release is spent even if no reply comes."""
        for name in names:
            if name in self._left:
                self._left[name] -= 1

    def received(self, releases: Mapping[str, int | None]) -> None:
        """Correct the counts by releases that came: what was asked for and never made is not spent."""
        for name, number in releases.items():
            if number is not None and name in self._left:
                self._left[name] = self._in_all[name] - number


LateAnswers = Literal["counted", "dropped", "refused"]
"""What becomes of an answer that comes after its round; ``refused``: rounds wait for all that they ask."""


class CohortSampler:
    """The clients that each round of a training asks, and how long it waits for them.

    A late reply counts by the same rule as any other, so whatever is late, lost or given up, a release enters the model
    at most once.
    """

    def __init__(
        self,
        config: ParticipationConfig,
        machines: MachineDirectory,
        *,
        late_answers: LateAnswers,
        strategy: str,
        needs_all: bool = False,
    ) -> None:
        if late_answers == "refused" and not config.waits_for_all:
            raise ConfigurationError(
                f"Expected quorum = 1 and over_selection = 1 for {strategy}, got {config.quorum:g} and "
                f"{config.over_selection:g}: it has no use for a late answer, whose budget would be spent for "
                "nothing. The timeout of start() says how long a round waits.",
                kind="conflict",
                setting="quorum",
                got=config.quorum,
            )
        self.config, self.machines = config, machines
        self.late_answers, self.needs_all = late_answers, needs_all
        self.seed = secrets.randbits(63) if config.seed is None else config.seed
        self.sampling: Sampling = config.sampling
        self.num_clients = config.num_clients or 0
        """M; 0 until it is known."""
        self.clients_per_round = 0
        """Machines a round asks; 0 until M is known."""
        self.requests = InFlightRequests()
        self.left_out: frozenset[str] = frozenset()
        """Machines that are not asked for now, for a reason of the trust's; others take their place."""
        self.excluded: frozenset[str] = frozenset()
        """Clients that the operator has taken out: they are not asked, and what they still send is not looked at."""
        self.fewest_summed = 0
        """The fewest releases that can enter the model together."""
        self._remaining = RemainingReleases()
        self._times: Counter[str] = Counter()
        self.sampled = 0
        """Number of machines drawn for the round that is under way, connected or not."""
        self.asked: dict[str, int] = {}
        """The connected ones among them, each with its last aggregated release."""
        self._overdue: dict[str, int] = {}
        self._given_up = 0

    def settle(self, machines: int) -> int:
        """Note the number of machines; returns for how many of them a round waits."""
        self.num_clients, self.clients_per_round = machines, self.config.asked(machines)
        return self.config.needed(machines)

    @property
    def _patient(self) -> bool:
        """Whether rounds may end before all have answered; simulated machines that share a node always answer."""
        return not self.config.waits_for_all and not self.machines.several_on_a_node

    @property
    def fewest_connected(self) -> int:
        """How many machines a round waits for until the deadline, before it begins."""
        if not self.machines.names:
            return self.config.fewest
        expected = sum(map(self.requests.absences.waits_for, self.askable))  # of a network: thousands at most
        return max(min(self.config.needed(self.num_clients), expected), self.fewest_left)

    @property
    def fewest_left(self) -> int:
        """With how many of them it begins once the deadline has passed."""
        if self.needs_all or not self.machines.names:
            return self.clients_per_round
        fewest = max(self.config.fewest_left(self.num_clients), self.fewest_summed)
        return min(fewest, len(self.askable))

    @property
    def askable(self) -> list[str]:
        """The machines that have not finished, are not left out and not excluded."""
        absent = self.unaskable
        return [name for name in self.machines.names if name not in absent]

    @property
    def unaskable(self) -> AbstractSet[str]:
        """Clients that are not asked now: they have finished, are left out, or are excluded."""
        return self._remaining.exhausted | self.left_out | self.excluded

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
        if unknown := sorted(excluded.difference(self.machines.names)):
            raise ConfigurationError(
                f"Expected names of this training's clients to exclude, got {', '.join(map(repr, unknown))}. Its "
                f"clients are {', '.join(list(self.machines.names)[:_MOST_NAMED])}, ...",
                kind="unknown-name",
                setting="excluded",
            )
        left = len(self.machines.names) - len(excluded)
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

    # Whom a round asks.

    def sample(self, server_round: int) -> list[str]:
        """The machines of a round, without those that have not answered, have finished or are not asked."""
        return self._drawn(server_round, self.requests.machines | self.unaskable, self._times)

    def _drawn(self, server_round: int, absent: AbstractSet[str], times: Mapping[str, int]) -> list[str]:
        """The sampled machines of a round, with others in the place of those that are absent."""
        names = self.machines.names
        sampled = sample_machines(names, self.clients_per_round, self.seed, server_round, self.sampling)
        missing = [name for name in sampled if name in absent]
        if not missing:
            return sampled
        chosen = set(sampled).difference(missing)
        if self._patient or self.left_out or self.excluded:
            free = [name for name in names if name not in chosen and name not in absent]
            key = derived_seed("replace machines", self.seed, server_round)
            order = np.random.Generator(np.random.Philox(key=key)).permutation(len(free)).tolist()
            if self.sampling == "balanced":
                order.sort(key=lambda place: times.get(free[place], 0))
            chosen.update(free[place] for place in order[: len(missing)])
        return [name for name in names if name in chosen]

    def give_up(self, reachable: Mapping[str, int] | None, timeout: float) -> None:
        """Forget requests that nobody will answer; ``reachable`` is None where there are no messages."""
        if reachable is not None:
            self._given_up = self.requests.give_up(reachable, timeout, self.excluded)

    def ask(self, names: Sequence[str], acks: Mapping[str, int]) -> None:
        """Note the machines of a round, and the acknowledgements of those that are asked."""
        self.sampled, self.asked, self._overdue = len(names), dict(acks), {}
        self._remaining.requested(acks)
        if self._patient or self.excluded:
            self._times.update(acks.keys())

    # How long it waits.

    def exchange(
        self,
        grid: Grid,
        messages: Iterable[Message],
        nodes: Mapping[str, int],
        *,
        server_round: int,
        least_releases: int,
        timeout: float,
    ) -> list[Message]:
        """Send a round's requests and take what comes; ``nodes`` has all connected machines."""
        messages = list(messages)
        if self.machines.several_on_a_node:
            return exchange(grid, messages, timeout)
        done, waits_for = self.unaskable - self.requests.machines, self.requests.absences.waits_for
        askable = [name for name in nodes if name not in done]
        awaited = [name for name in askable if waits_for(name)]
        if len(awaited) < max(len(askable) / 2, self.fewest_summed):  # of so few a round waits for the others as well
            awaited, waits_for = askable, lambda _: True
        elif self.config.waits_for_all:
            found = self._answers_of_all(grid, messages, nodes, waits_for, server_round, timeout)
            self._overdue = found.overdue
            return found.replies
        share = self.config.needed(self.num_clients, min(len(awaited), self.clients_per_round))
        found = self.requests.gather(
            *(grid, messages, self.asked),
            server_round=server_round,
            answers=self.config.needed(self.num_clients, sum(map(waits_for, self.asked))),
            most_open=max(len(awaited) - share, 0),
            least_releases=least_releases,
            timeout=timeout,
            waits_for=waits_for,
        )
        self._overdue = found.overdue
        self._given_up += found.given_up + found.unreached
        return found.replies

    def _answers_of_all(
        self,
        grid: Grid,
        messages: Sequence[Message],
        nodes: Mapping[str, int],
        waits_for: Callable[[str], bool],
        server_round: int,
        timeout: float,
    ) -> RoundReplies:
        """Wait for the answers of all that rounds wait for, and for as long again for the others that are asked."""
        started = self.requests.clock.now()
        names = {nodes[name]: name for name in self.asked}
        absent = {node_id for node_id, name in names.items() if not waits_for(name)}
        awaited = [message for message in messages if message.metadata.dst_node_id not in absent]
        rest = [message for message in messages if message.metadata.dst_node_id in absent]
        asked = [names[message.metadata.dst_node_id] for message in rest]
        found = self.requests.ask(grid, rest, asked, server_round)
        replies = exchange(grid, awaited, timeout)
        passed = self.requests.clock.now() - started
        self.requests.linger(grid, found, server_round, until=started + min((1 + JUST_BEHIND) * passed, timeout))
        self._given_up += found.given_up + found.unreached
        heard = [reply for reply in replies if not (reply.has_error() and reply.error.code in UNREACHED)]
        came = {reply.metadata.src_node_id for reply in heard}
        for node_id, name in names.items():
            if node_id not in came | absent:
                self.requests.absences.missed(name)
        self._given_up += max(len(awaited) - len(heard), 0)
        found.replies += replies
        return found

    def answering(self, nodes: Mapping[str, int]) -> dict[str, int]:
        """The nodes of machines that may answer in this round: those it asked, and those that were late."""
        return {name: nodes[name] for name in self.asked} | self._overdue

    def drops(self, machine: str) -> bool:
        """Whether a machine's answer came too late to count."""
        return self.late_answers != "counted" and machine in self._overdue

    def counted(self, report: RoundReport, participation: Mapping[str, int | None], *, direct: bool) -> RoundReport:
        """The report with the counts of requests."""
        self._remaining.received(participation)
        finished = len(self._remaining.exhausted)
        if self.machines.several_on_a_node or direct:
            return replace(report, finished=finished)
        return replace(
            report,
            lost=self.sampled - len(self.asked) + self._given_up,
            overdue=len(self._overdue),
            awaited=len(self.requests.machines),
            finished=finished,
        )

    # Before the first round.

    def check_rounds(
        self,
        statements: Mapping[str, Mapping[str, Any]],
        done: int,
        num_rounds: int,
        asks: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Refuse a training whose rounds ask a client more often than it says it can answer."""
        names = self.machines.names
        caps = {name: releases_left(statement) for name, statement in statements.items()}
        numbers = _numbers_of(names)

        def drawn(server_round: int, _: NDArray[np.int64]) -> NDArray[np.int64]:
            return numbers(self.sample(server_round) if asks(server_round) else ())

        found = exhaustion_schedule(drawn, _caps(names, caps), range(done + 1, num_rounds + 1)).refused
        if found is None:
            return
        last, name = found[0], names[found[1]]
        said = (
            f"machine {name} says that it can make {caps[name]} {'more ' if done else ''}releases, and round {last} "
            "asks it for one more: its cap (max-participations) and its fresh samples decide"
        )
        if not done:
            raise ConfigurationError(
                f"Expected at most {last - 1} rounds, got {num_rounds}: {said}. Use fewer rounds or a larger cap, "
                "train without that machine (`murmurfl federation leave`), or set allow_exhaustion=True "
                "(allow-exhaustion = true in murmurfl's own app): machines that can make no more then refuse.",
                kind="exhausted",
                setting="num_rounds",
                got=num_rounds,
            )
        # No refusal here: a server that was killed asks for a round again, and what its machines released for it the
        # first time is spent. So a training that was possible may end up short of a release, through no fault of its
        # plan.
        logger.warning("In what is left of %d rounds %s; it refuses from then on.", num_rounds, said)

    def foresee(
        self, statements: Mapping[str, Mapping[str, Any]], done: int, num_rounds: int, *, allow_exhaustion: bool
    ) -> ExhaustionSchedule:
        """Return who runs out of releases when, logged; refuse a training for which too few stay, unless allowed."""
        self._remaining.read(statements)
        schedule = self._exhaustion(done, num_rounds)
        if not (allow_exhaustion or done) and self._patient and schedule.caps.min(initial=NO_CAP) < num_rounds:
            self._check_enough_stay(schedule)
        return _logged(schedule)

    def foresee_again(self, done: int, num_rounds: int) -> ExhaustionSchedule:
        """Return anew who runs out of releases when, logged, after somebody was excluded."""
        return _logged(self._exhaustion(done, num_rounds))

    def _exhaustion(self, done: int, num_rounds: int) -> ExhaustionSchedule:
        """Return who runs out of releases when, if rounds ask others in the place of those that have none left."""
        names = [name for name in self.machines.names if name not in self.excluded]
        caps, numbers = _caps(names, self._remaining.left), _numbers_of(names)

        def drawn(server_round: int, left: NDArray[np.int64]) -> NDArray[np.int64]:
            exhausted = {names[i] for i in np.flatnonzero(left <= 0).tolist()}
            times = dict(zip(names, (caps - left).tolist(), strict=True))
            return numbers(self._drawn(server_round, exhausted | self.left_out | self.excluded, times))

        return exhaustion_schedule(drawn, caps, range(done + 1, num_rounds + 1), names)

    def _check_enough_stay(self, schedule: ExhaustionSchedule) -> None:
        fewest = self.config.needed(self.num_clients)
        for server_round in sorted({1, *(last + 1 for last in schedule.after.values())}):
            if (left := schedule.left(server_round)) < fewest:
                raise ConfigurationError(
                    f"Expected at most {server_round - 1} rounds, got {schedule.rounds.stop - 1}: from round "
                    f"{server_round} on {left} machines can make another release (caps and fresh samples decide), and "
                    f"a round waits for {fewest}. Use fewer rounds, larger caps, a smaller quorum, or "
                    "allow_exhaustion=True (allow-exhaustion = true in murmurfl's own app): it goes on with whatever "
                    "is left.",
                    kind="exhausted",
                    setting="num_rounds",
                )

    def say_what_absence_costs(self, strategy: str, costs: str) -> None:
        """Log what becomes of a training when a client is off: it goes on, unless its rule needs everybody."""
        if self.machines.several_on_a_node:
            return
        if self.needs_all:
            logger.warning("%s needs every client in every round: %s", strategy, costs)
            return
        logger.info(
            "A client that is off or silent is waited for once, and the training goes on as long as %d of %d are "
            "connected.%s",
            *(self.fewest_left, self.num_clients, costs and f" {costs}"),
        )

    def say_what_is_dropped(self) -> None:
        """Warn of the budget that not waiting costs, where late answers are dropped."""
        most = self.clients_per_round - self.config.needed(self.num_clients)
        if self._patient and self.late_answers == "dropped" and most:
            logger.warning(
                "A round waits for %d of %d machines. What comes later is dropped, and no other release carries it: of "
                "up to %d machines a round the budget of a release is spent for nothing.",
                *(self.clients_per_round - most, self.clients_per_round, most),
            )

    @property
    def heard_per_round(self) -> int:
        """How many machines of a round enter the model, sooner or later."""
        dropped = self._patient and self.late_answers == "dropped"
        return self.config.needed(self.num_clients) if dropped else self.clients_per_round


def _caps(names: Sequence[str], releases: Mapping[str, float]) -> NDArray[np.int64]:
    """Return the releases of each client by its place; a client that is missing can make any number."""
    caps = (releases.get(name, math.inf) for name in names)
    return np.fromiter((NO_CAP if cap >= NO_CAP else int(cap) for cap in caps), np.int64, len(names))


def _numbers_of(names: Sequence[str]) -> Callable[[Iterable[str]], NDArray[np.int64]]:
    """Return a function that gives the places of clients among ``names``."""
    if isinstance(names, NumberedNames):
        numbers = names.numbers
        return lambda drawn: np.fromiter((numbers.index(int(name)) for name in drawn), np.int64)
    places = {name: place for place, name in enumerate(names)}
    return lambda drawn: np.fromiter((places[name] for name in drawn), np.int64)


def _logged(schedule: ExhaustionSchedule) -> ExhaustionSchedule:
    for line in schedule.lines():
        logger.info("%s", line)
    return schedule
