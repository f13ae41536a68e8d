"""Attendance: how many clients a training has, whom a round asks, how long it waits, and who leaves when.

The clients of a round are drawn by seed and round alone, so that every engine asks the same ones. A client that has
not answered is not asked again. A late answer is taken in the round in which it comes, by the rule that every answer
has to pass: nothing of it counts twice (docs/proofs/release-rule.md). A client is asked for no more releases than it
says it can make, by its cap and its fresh samples.

A step divides by ``clients_per_round``, whatever came: it is fixed for a session. How many answers a round waits for,
the quorum, may change from round to round. A client that is off or silent costs one deadline, and is then asked without
being waited for (:class:`Absences`).
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from numpy.typing import NDArray

from ...privacy import ConfigurationError, derived_seed
from ...privacy.accounting.gdp import check_count
from .guarded_grid import guarded
from .known_machines import MachineDirectory, by_length_and_name
from .replies import UNREACHED, RoundReport, exchange, releases_left

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
        ``uniform``: every round by itself, as in reshef-levy-2025. ``balanced``: as from a shuffled pack of cards, so
        that all machines take part equally often and a single pass uses every sample.

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
        return _dealer(num_machines, count, seed).hand(server_round)
    generator = np.random.Generator(np.random.Philox(key=derived_seed("sample machines", seed, server_round)))
    return np.sort(generator.choice(num_machines, size=count, replace=False))


def rounds_possible(
    asked: Callable[[int], Iterable[str]], rounds: Iterable[int], releases: Mapping[str, float]
) -> tuple[int | None, str | None]:
    """The first round that asks a machine for more ``releases`` than it can make, and that machine; None if none does.

    ``asked`` gives the machines of a round; one that is missing in ``releases`` can make any number.
    """
    if not releases:
        return None, None
    left = dict(releases)
    for server_round in rounds:
        for name in asked(server_round):
            left[name] = left.get(name, math.inf) - 1
            if left[name] < 0:
                return server_round, name
    return None, None


def first_asked_too_often(
    asked: Callable[[int], NDArray[np.int64]], rounds: Iterable[int], releases: NDArray[np.int64]
) -> tuple[int, int] | None:
    """:func:`rounds_possible` for machines by number, with their ``releases`` of shape (M,)."""
    left = releases.copy()
    for server_round in rounds:
        numbers = asked(server_round)
        left[numbers] -= 1
        short = np.flatnonzero(left[numbers] < 0)
        if short.size:
            return server_round, int(numbers[short[0]])
    return None


class _Dealer:
    """Deals ``count`` distinct machines a round from a shuffled pack; an empty pack is shuffled anew.

    One pack is kept. Of the others it is known with which hand they begin and what the pack before left over, so that
    any hand can be dealt again.
    """

    def __init__(self, num_machines: int, count: int, seed: int) -> None:
        if count > num_machines:
            raise ConfigurationError("Expected no more machines a round than there are.")
        self._num_machines, self._count, self._seed = num_machines, count, seed
        self._kind = np.int32 if num_machines <= _LARGEST_INT32 else np.int64
        self._firsts = [1]
        self._leftovers: list[NDArray[np.integer]] = [np.empty(0, self._kind)]
        self._open: tuple[int, _Pack] | None = None

    def hand(self, server_round: int) -> NDArray[np.int64]:
        while True:
            number = bisect_right(self._firsts, server_round) - 1
            pack = self._pack(number)
            if server_round < pack.end:
                return pack.hand(server_round)
            self._firsts.append(pack.end)  # the next pack begins where the last one that is known ends
            self._leftovers.append(pack.leftover.copy())

    def _pack(self, number: int) -> _Pack:
        if self._open is None or self._open[0] != number:
            self._open = None  # one at a time
            key = derived_seed("deal machines", self._seed, number + 1)
            order = np.random.Generator(np.random.Philox(key=key)).permutation(self._num_machines).astype(self._kind)
            self._open = number, _Pack(order, self._count, self._firsts[number], self._leftovers[number])
        return self._open[1]


class _Pack:
    """One shuffled pack, dealt from its beginning."""

    def __init__(self, order: NDArray[np.integer], count: int, first: int, leftover: NDArray[np.integer]) -> None:
        self._count, self._first = count, first
        self._across: list[NDArray[np.integer]] = []
        if leftover.size:
            # A hand may hold the last of one pack and the first of the next. A machine that is in it already is passed
            # over, and stays on top of the new pack for the next hand.
            free = np.flatnonzero(~np.isin(order[:count], leftover))[: count - leftover.size]
            self._across = [np.concatenate([leftover, order[free]])]
            order = np.delete(order, free)
        self._order = order
        self._whole = len(order) // count

    @property
    def end(self) -> int:
        """The first hand that is not all of this pack's."""
        return self._first + len(self._across) + self._whole

    @property
    def leftover(self) -> NDArray[np.integer]:
        """Machines left when there is no whole hand any more."""
        return self._order[self._whole * self._count :]

    def hand(self, number: int) -> NDArray[np.int64]:
        place = number - self._first - len(self._across)
        hand = self._across[0] if place < 0 else self._order[place * self._count : (place + 1) * self._count]
        return np.sort(hand).astype(np.int64)


@lru_cache(maxsize=8)
def _dealer(num_machines: int, count: int, seed: int) -> _Dealer:
    return _Dealer(num_machines, count, seed)


_FEWEST = 2  # machines of a training that does not say how many there are, as in FedAvg
_ROUNDING = 1e-9  # 0.8 * 10 is 8 machines, whatever floating point makes of it


@dataclass(frozen=True, kw_only=True)
class Attendance:
    """A strategy's options on attendance, checked; None for those that were left out.

    :class:`~murmurfl.strategies.ReleaseStrategy` describes them; M is ``num_clients`` and m ``clients_per_round``.
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
                raise ConfigurationError(f"Expected {name} to be a finite number, got {value!r}.")
        if not 0 < self.quorum <= 1:
            raise ConfigurationError(f"Expected 0 < quorum <= 1, got {self.quorum!r}: 1 waits for all.")
        if self.over_selection < 1:
            raise ConfigurationError(
                f"Expected over_selection >= 1, got {self.over_selection!r}: 1 asks clients_per_round clients."
            )
        if isinstance(self.excluded, str) or not all(isinstance(name, str) for name in self.excluded):
            raise ConfigurationError(f"Expected excluded to be names of clients, got {self.excluded!r}.")
        for name in ("num_clients", "clients_per_round", "min_train_nodes", "min_available_nodes"):
            if (value := getattr(self, name)) is not None:
                check_count(name, value)
        fraction = self.fraction_train
        if fraction is not None and (isinstance(fraction, bool) or not isinstance(fraction, int | float)):
            raise ConfigurationError(f"Expected fraction_train to be a number, got {fraction!r}.")
        if fraction is not None and not 0 < fraction <= 1:
            raise ConfigurationError(f"Expected 0 < fraction_train <= 1, got {fraction!r}: a round asks some machine.")
        stated = [name for name in ("fraction_train", "min_train_nodes") if getattr(self, name) is not None]
        if self.clients_per_round is not None and stated:
            raise ConfigurationError(
                f"Expected clients_per_round or {stated[0]}, got both: they say the same thing in two ways."
            )
        most = math.inf if self.num_clients is None else self.num_clients
        if self.clients_per_round is not None and self.clients_per_round > most:
            raise ConfigurationError(
                f"Expected 1 <= clients_per_round <= num_clients, got {self.clients_per_round} of {self.num_clients}."
            )
        for name in ("min_train_nodes", "min_available_nodes"):
            value = getattr(self, name)
            if value is not None and value > most:
                raise ConfigurationError(
                    f"Expected {name} of at most num_clients = {self.num_clients}, got {value}: there are no more "
                    "machines. Leave num_clients out to train with all that are connected."
                )
        if self.sampling not in SAMPLINGS:
            raise ConfigurationError(f"Expected sampling one of {SAMPLINGS}, got {self.sampling!r}.")

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
                f"{self.over_selection:g} x {wanted}: lower over_selection, or clients_per_round."
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

Draw = Callable[[int, AbstractSet[str], Mapping[str, int]], Iterable[str]]
"""The machines that a round asks, given the round, those that it cannot ask and how often each was asked before."""


@dataclass(frozen=True)
class Leaving:
    """When machines leave a training, if every request is answered in time."""

    machines: int  # M
    rounds: int  # T
    after: Mapping[str, int]  # the round after which each machine has finished, in that order, if before T
    releases: Mapping[str, int]  # how many each of these can make

    def left(self, server_round: int) -> int:
        """How many machines can still be asked in a round."""
        return self.machines - sum(last < server_round for last in self.after.values())

    def lines(self) -> list[str]:
        """Lines for a log; none where nobody leaves."""
        if not self.after:
            return []
        steps = sorted({last + 1 for last in self.after.values()})
        told = [f"{self.left(step)} left from round {step} on" for step in steps[:_MOST_NAMED]]
        if len(steps) > _MOST_NAMED:
            told[-1] = f"..., {self.left(steps[-1])} left from round {steps[-1]} on"
        first = [
            f"{name!r} after round {last} ({self.releases[name]} releases)"
            for name, last in list(self.after.items())[:_MOST_NAMED]
        ]
        more = ", ..." if len(self.after) > _MOST_NAMED else ""
        return [
            f"Machines leave: {len(self.after)} of {self.machines} before the end of {self.rounds} rounds; "
            f"{', '.join(told)}.",
            f"First: {', '.join(first)}{more}.",
        ]


class ReleasesLeft:
    """How many more releases each machine can make: its statement, less what it was asked for since."""

    def __init__(self) -> None:
        self._in_all: dict[str, int] = {}
        self._left: dict[str, int] = {}

    def take(self, statements: Mapping[str, Mapping[str, Any]]) -> None:
        """Take machines' statements; one that states no end has none."""
        for name, said in statements.items():
            left, made = releases_left(said), said.get("releases", 0)
            if left != float("inf"):
                self._left[name] = int(left)
                self._in_all[name] = int(left) + int(made)

    @property
    def finished(self) -> frozenset[str]:
        """The machines that can make no more releases."""
        return frozenset(name for name, left in self._left.items() if left <= 0)

    @property
    def stated(self) -> dict[str, int]:
        """How many more releases each machine can make that stated it."""
        return dict(self._left)

    def asked(self, names: Iterable[str]) -> None:
        """Count a request to each machine: a release is spent even if no reply comes."""
        for name in names:
            if name in self._left:
                self._left[name] -= 1

    def made(self, releases: Mapping[str, int | None]) -> None:
        """Correct the counts by releases that came: what was asked for and never made is not spent."""
        for name, number in releases.items():
            if number is not None and name in self._left:
                self._left[name] = self._in_all[name] - number


def foreseen(draw: Draw, left: Mapping[str, int], names: Iterable[str], rounds: range, fewest: int) -> Leaving:
    """Which machines leave when in ``rounds``; refused if fewer than ``fewest`` remain in one of them.

    ``left`` has the releases that machines can still make; one that is missing can make any number.
    """
    machines = len(list(names))
    remaining, times, after = dict(left), dict[str, int](), dict[str, int]()
    finished = {name for name, most in remaining.items() if most <= 0}
    after.update(dict.fromkeys(sorted(finished, key=by_length_and_name), rounds.start - 1))
    if finished or min(remaining.values(), default=len(rounds)) < len(rounds):  # else nobody can leave
        for server_round in rounds:
            if machines - len(finished) < fewest:
                raise ConfigurationError(
                    f"Expected at most {server_round - 1} rounds, got {rounds.stop - 1}: from round {server_round} on "
                    f"{machines - len(finished)} machines can make another release (caps and fresh samples decide), "
                    f"and a round waits for {fewest}. Use fewer rounds, larger caps, a smaller quorum, or "
                    "allow_exhaustion=True (allow-exhaustion = true in murmurfl's own app): it goes on with whatever "
                    "is left."
                )
            for name in draw(server_round, finished, times):
                times[name] = times.get(name, 0) + 1
                if name in remaining:
                    remaining[name] -= 1
                    if not remaining[name] and server_round + 1 in rounds:
                        after[name] = server_round
            finished.update(name for name, last in after.items() if last == server_round)
    return Leaving(machines, rounds.stop - 1, after, {name: left[name] for name in after})


LateAnswers = Literal["counted", "dropped", "refused"]
"""What becomes of an answer that comes after its round; ``refused``: rounds wait for all that they ask."""

_JUST_BEHIND = 1.0
"""A round goes on for this share of the time until enough had answered, for those just behind."""
# Every look for answers costs a SuperLink some hundredths of a second; Flower's own grid looks every 3 s.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_SHARE = 1.0, 3.0, 0.1
_NEXT_TO_NOTHING_S = 0.001


@dataclass(frozen=True)
class Clock:
    """The time that passes while a server waits; tests have another one."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class OpenRequest:
    """A request that was sent and not answered yet."""

    machine: str
    node_id: int  # where the machine was
    server_round: int  # t
    since: float  # when it was sent, by the clock


@dataclass
class Gathered:
    """What came while a round lasted."""

    sent: frozenset[str] = frozenset()  # ids of the round's own requests
    replies: list[Message] = field(default_factory=list)  # in the order in which they came
    overdue: dict[str, int] = field(default_factory=dict)  # machines that answered an earlier round, and their nodes
    given_up: int = 0  # requests that nobody waits for any more
    unreached: int = 0  # requests of which Flower says that they reach nobody


_MOST_DOUBLINGS = 10


class Absences:
    """Clients that kept a round waiting in vain, which rounds do not wait for until they have answered again.

    After the k-th time it takes 2^(k-1) answers: whoever stays away, or answers now and then, makes no more than about
    log2 T of T rounds wait. Such a client is asked all the same, and what it answers counts.
    """

    def __init__(self) -> None:
        self._times: Counter[str] = Counter()
        self._owed: dict[str, int] = {}

    def waits_for(self, name: str) -> bool:
        """Return True if rounds wait for a client."""
        return name not in self._owed

    def missed(self, name: str) -> None:
        """Note that a round waited for a client in vain."""
        self._times[name] += 1
        self._owed[name] = 2 ** min(self._times[name] - 1, _MOST_DOUBLINGS)

    def answered(self, name: str) -> None:
        """Note that a client has answered."""
        if self._owed.get(name, 0) > 1:
            self._owed[name] -= 1
        else:
            self._owed.pop(name, None)

    def patience(self, name: str) -> int:
        """Return how many times the timeout a request to a client stays open, for slow ones to be heard."""
        return 2 ** min(self._times[name], _MOST_DOUBLINGS)


class OpenRequests:
    """The open requests of a training, at most one a machine."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = Clock() if clock is None else clock
        self.absences = Absences()
        self._open: dict[str, OpenRequest] = {}  # by the message's id
        self._missed: set[str] = set()  # ids of those that a round waited for in vain
        self._given_up: list[str] = []  # ids of requests that the grid may forget

    @property
    def machines(self) -> frozenset[str]:
        """Machines that have not answered."""
        return frozenset(request.machine for request in self._open.values())

    def give_up(self, nodes: Mapping[str, int], timeout: float, excluded: Collection[str] = ()) -> int:
        """Forget requests that are too old, or whose machine is gone, elsewhere or excluded; returns their number."""
        now = self.clock.now()
        self._miss(message_id for message_id, one in self._open.items() if now - one.since >= timeout)
        kept = {
            message_id: one
            for message_id, one in self._open.items()
            if now - one.since < timeout * self.absences.patience(one.machine)
            and nodes.get(one.machine) == one.node_id
            and one.machine not in excluded
        }
        given_up = [message_id for message_id in self._open if message_id not in kept]
        self._given_up += given_up
        self._open, self._missed = kept, self._missed & kept.keys()
        return len(given_up)

    def gather(
        self,
        grid: Grid,
        messages: Sequence[Message],
        machines: Iterable[str],
        *,
        server_round: int,
        answers: int,
        most_open: int,
        least_releases: int,
        timeout: float,
        waits_for: Callable[[str], bool] = lambda _: True,
    ) -> Gathered:
        """Send a round's requests, one a machine, and take answers to them and to earlier ones until it is enough.

        It is with ``answers`` of machines that it asked and ``least_releases`` replies without an error, late ones
        among them, once at most ``most_open`` requests of any round are open to machines that it ``waits_for``.
        """
        started = self.clock.now()
        shortest = min(_SHORTEST_PAUSE_S, float(getattr(grid, "pull_interval", _SHORTEST_PAUSE_S)))  # of a simulation
        found = self.ask(grid, messages, machines, server_round)
        own = found.sent
        wanted = min(answers, len(own))
        satisfied: float | None = None
        while True:
            self.take(grid, found, server_round)
            passed, waiting = self.clock.now() - started, sum(one in self._open for one in own)
            if satisfied is None and len(own) - waiting >= wanted:
                satisfied = passed
            behind = waiting and passed < (1 + _JUST_BEHIND) * (passed if satisfied is None else satisfied)
            still = sum(waits_for(request.machine) for request in self._open.values())
            over = satisfied is not None and not behind and still <= most_open
            releases = sum(not reply.has_error() for reply in found.replies)
            if (over and releases >= least_releases) or not self._open:
                return found
            if passed >= timeout:
                self._miss(own)
                return found
            pause = min(max(_PAUSE_SHARE * passed, shortest), _LONGEST_PAUSE_S)
            self.clock.sleep(max(min(pause, timeout - passed), _NEXT_TO_NOTHING_S))

    def _miss(self, ids: Iterable[str]) -> None:
        """Note, once for each of some requests, that it was waited for in vain; whatever was answered is none."""
        for message_id in [one for one in ids if one in self._open and one not in self._missed]:
            self._missed.add(message_id)
            self.absences.missed(self._open[message_id].machine)

    def ask(self, grid: Grid, messages: Sequence[Message], machines: Iterable[str], server_round: int) -> Gathered:
        """Send requests, one a machine, without waiting."""
        guard = guarded(grid)
        guard.forget(self._given_up)
        self._given_up = []
        ids = list(guard.push_messages(messages)) if messages else []
        now, sent = self.clock.now(), set()
        for message_id, message, machine in zip(ids, messages, machines, strict=False):
            if message_id:
                self._open[message_id] = OpenRequest(machine, message.metadata.dst_node_id, server_round, now)
                sent.add(message_id)
        return Gathered(sent=frozenset(sent), given_up=len(messages) - len(sent))  # nobody carries the others

    def linger(self, grid: Grid, found: Gathered, server_round: int, until: float) -> None:
        """Take answers until the round's own requests have theirs, or the clock shows a time."""
        while True:
            self.take(grid, found, server_round)
            left = until - self.clock.now()
            if left <= 0 or not any(one in self._open for one in found.sent):
                return
            self.clock.sleep(min(_SHORTEST_PAUSE_S, left))

    def take(self, grid: Grid, found: Gathered, server_round: int) -> None:
        """Take what has come; the network's own errors close a request, too."""
        for reply in guarded(grid).pull_messages(list(self._open)) if self._open else ():
            request = self._open.pop(reply.metadata.reply_to_message_id, None)
            if request is None:
                continue  # twice
            found.replies.append(reply)
            if reply.has_error() and reply.error.code in UNREACHED:
                found.unreached += 1
                self.absences.missed(request.machine)
                continue
            self.absences.answered(request.machine)
            if request.server_round != server_round:
                found.overdue[request.machine] = request.node_id


class RollCall:
    """Whom each round of a training asks, and how long it waits.

    A late reply counts by the same rule as any other, so whatever is late, lost or given up, a release enters the model
    at most once.
    """

    def __init__(
        self,
        attendance: Attendance,
        machines: MachineDirectory,
        *,
        late_answers: LateAnswers,
        strategy: str,
        needs_all: bool = False,
    ) -> None:
        if late_answers == "refused" and not attendance.waits_for_all:
            raise ConfigurationError(
                f"Expected quorum = 1 and over_selection = 1 for {strategy}, got {attendance.quorum:g} and "
                f"{attendance.over_selection:g}: it has no use for a late answer, whose budget would be spent for "
                "nothing. The timeout of start() says how long a round waits."
            )
        self.attendance, self.machines = attendance, machines
        self.late_answers, self.needs_all = late_answers, needs_all
        self.seed = secrets.randbits(63) if attendance.seed is None else attendance.seed
        self.sampling: Sampling = attendance.sampling
        self.num_clients = attendance.num_clients or 0
        """M; 0 until it is known."""
        self.clients_per_round = 0
        """Machines a round asks; 0 until M is known."""
        self.requests = OpenRequests()
        self.left_out: frozenset[str] = frozenset()
        """Machines that are not asked for now, for a reason of the trust's; others take their place."""
        self.excluded: frozenset[str] = frozenset()
        """Clients that the operator has taken out: they are not asked, and what they still send is not looked at."""
        self.fewest_summed = 0
        """The fewest releases that can enter the model together."""
        self._left = ReleasesLeft()
        self._times: Counter[str] = Counter()
        self.sampled = 0
        """Number of machines drawn for the round that is under way, connected or not."""
        self.asked: dict[str, int] = {}
        """The connected ones among them, each with its last aggregated release."""
        self._overdue: dict[str, int] = {}
        self._given_up = 0

    def settle(self, machines: int) -> int:
        """Note the number of machines; returns for how many of them a round waits."""
        self.num_clients, self.clients_per_round = machines, self.attendance.asked(machines)
        return self.attendance.needed(machines)

    @property
    def _patient(self) -> bool:
        """Whether rounds may end before all have answered; simulated machines that share a node always answer."""
        return not self.attendance.waits_for_all and not self.machines.several_on_a_node

    @property
    def fewest_connected(self) -> int:
        """How many machines a round waits for until the deadline, before it begins."""
        if not self.machines.names:
            return self.attendance.fewest
        expected = sum(map(self.requests.absences.waits_for, self.askable))  # of a network: thousands at most
        return max(min(self.attendance.needed(self.num_clients), expected), self.fewest_left)

    @property
    def fewest_left(self) -> int:
        """With how many of them it begins once the deadline has passed."""
        if self.needs_all or not self.machines.names:
            return self.clients_per_round
        fewest = max(self.attendance.fewest_left(self.num_clients), self.fewest_summed)
        return min(fewest, len(self.askable))

    @property
    def askable(self) -> list[str]:
        """The machines that have not finished, are not left out and not excluded."""
        absent = self.unaskable
        return [name for name in self.machines.names if name not in absent]

    @property
    def unaskable(self) -> AbstractSet[str]:
        """Clients that are not asked now: they have finished, are left out, or are excluded."""
        return self._left.finished | self.left_out | self.excluded

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
                f"clients are {', '.join(list(self.machines.names)[:_MOST_NAMED])}, ..."
            )
        left = len(self.machines.names) - len(excluded)
        if excluded and (self.needs_all or left < max(self.fewest_summed, 1)):
            needed = self.num_clients if self.needs_all else max(self.fewest_summed, 1)
            raise ConfigurationError(
                f"Expected at least {needed} clients to be left, for this rule or for a sum, got {left} after "
                f"{len(excluded)} were excluded. Exclude fewer, or begin a new training."
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
        self._left.asked(acks)
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
        elif self.attendance.waits_for_all:
            found = self._answers_of_all(grid, messages, nodes, waits_for, server_round, timeout)
            self._overdue = found.overdue
            return found.replies
        share = self.attendance.needed(self.num_clients, min(len(awaited), self.clients_per_round))
        found = self.requests.gather(
            *(grid, messages, self.asked),
            server_round=server_round,
            answers=self.attendance.needed(self.num_clients, sum(map(waits_for, self.asked))),
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
    ) -> Gathered:
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
        self.requests.linger(grid, found, server_round, until=started + min((1 + _JUST_BEHIND) * passed, timeout))
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
        self._left.made(participation)
        finished = len(self._left.finished)
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

    def foresee(
        self, statements: Mapping[str, Mapping[str, Any]], done: int, num_rounds: int, *, allow_exhaustion: bool
    ) -> Leaving:
        """Which machines leave when, logged; refuses a training for which too few stay, unless that is allowed."""
        self._left.take(statements)
        fewest = 0 if allow_exhaustion or not self._patient or done else self.attendance.needed(self.num_clients)
        return self._foreseen(done, num_rounds, fewest)

    def foresee_again(self, done: int, num_rounds: int) -> Leaving:
        """Work out anew who leaves when, logged, after somebody was excluded."""
        return self._foreseen(done, num_rounds, 0)

    def _foreseen(self, done: int, num_rounds: int, fewest: int) -> Leaving:
        def draw(server_round: int, absent: AbstractSet[str], times: Mapping[str, int]) -> Iterable[str]:
            return self._drawn(server_round, absent | self.left_out | self.excluded, times)

        names = [name for name in self.machines.names if name not in self.excluded]
        stated = {name: left for name, left in self._left.stated.items() if name not in self.excluded}
        leaving = foreseen(draw, stated, names, range(done + 1, num_rounds + 1), fewest)
        for line in leaving.lines():
            logger.info("%s", line)
        return leaving

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
        most = self.clients_per_round - self.attendance.needed(self.num_clients)
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
        return self.attendance.needed(self.num_clients) if dropped else self.clients_per_round
