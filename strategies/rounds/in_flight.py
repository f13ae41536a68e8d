"""Requests that are under way: which clients owe an answer, and for whom a round waits.

A client that has not answered is not asked again. A late answer is taken in the round in which it comes, by the rule
that every answer has to pass: nothing of it counts twice (docs/proofs/release-rule.md). A client that is off or silent
costs one deadline, and is then asked without being waited for (:class:`Absences`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

from .guarded_grid import guarded
from .replies import UNREACHED

JUST_BEHIND = 1.0
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
class InFlightRequest:
    """A request that was sent and not answered yet."""

    client: str
    node_id: int  # where the client was
    server_round: int  # t
    since: float  # when it was sent, by the clock


@dataclass
class RoundReplies:
    """Replies that came while a round lasted."""

    sent: frozenset[str] = frozenset()  # ids of the round's own requests
    replies: list[Message] = field(default_factory=list)  # in the order in which they came
    overdue: dict[str, int] = field(default_factory=dict)  # clients that answered an earlier round, and their nodes
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


class InFlightRequests:
    """The open requests of a training, at most one a client."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = Clock() if clock is None else clock
        self.absences = Absences()
        self._open: dict[str, InFlightRequest] = {}  # by the message's id
        self._missed: set[str] = set()  # ids of those that a round waited for in vain
        self._given_up: list[str] = []  # ids of requests that the grid may forget

    def follow(self, other: InFlightRequests) -> None:
        """Wait for no clients for which another training does not wait any more."""
        self.absences = other.absences

    @property
    def clients(self) -> frozenset[str]:
        """Clients that have not answered."""
        return frozenset(request.client for request in self._open.values())

    def give_up(self, nodes: Mapping[str, int], timeout: float, excluded: Collection[str] = ()) -> int:
        """Forget requests that are too old, or whose client is gone, elsewhere or excluded; returns their number."""
        now = self.clock.now()
        self._miss(message_id for message_id, one in self._open.items() if now - one.since >= timeout)
        kept = {
            message_id: one
            for message_id, one in self._open.items()
            if now - one.since < timeout * self.absences.patience(one.client)
            and nodes.get(one.client) == one.node_id
            and one.client not in excluded
        }
        given_up = [message_id for message_id in self._open if message_id not in kept]
        self._given_up += given_up
        self._open, self._missed = kept, self._missed & kept.keys()
        return len(given_up)

    def gather(
        self,
        grid: Grid,
        messages: Sequence[Message],
        clients: Iterable[str],
        *,
        server_round: int,
        answers: int,
        most_open: int,
        least_releases: int,
        timeout: float,
        waits_for: Callable[[str], bool] = lambda _: True,
    ) -> RoundReplies:
        """Send a round's requests, one a client, and take answers to them and to earlier ones until it is enough.

        It is with ``answers`` of clients that it asked and ``least_releases`` replies without an error, late ones
        among them, once at most ``most_open`` requests of any round are open to clients that it ``waits_for``.
        """
        started = self.clock.now()
        shortest = min(_SHORTEST_PAUSE_S, float(getattr(grid, "pull_interval", _SHORTEST_PAUSE_S)))  # of a simulation
        found = self.ask(grid, messages, clients, server_round)
        own = found.sent
        wanted = min(answers, len(own))
        satisfied: float | None = None
        while True:
            self.take(grid, found, server_round)
            passed, waiting = self.clock.now() - started, sum(one in self._open for one in own)
            if satisfied is None and len(own) - waiting >= wanted:
                satisfied = passed
            behind = waiting and passed < (1 + JUST_BEHIND) * (passed if satisfied is None else satisfied)
            still = sum(waits_for(request.client) for request in self._open.values())
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
            self.absences.missed(self._open[message_id].client)

    def ask(self, grid: Grid, messages: Sequence[Message], clients: Iterable[str], server_round: int) -> RoundReplies:
        """Send requests, one a client, without waiting."""
        guard = guarded(grid)
        guard.forget(self._given_up)
        self._given_up = []
        ids = list(guard.push_messages(messages)) if messages else []
        now, sent = self.clock.now(), set()
        for message_id, message, client in zip(ids, messages, clients, strict=False):
            if message_id:
                self._open[message_id] = InFlightRequest(client, message.metadata.dst_node_id, server_round, now)
                sent.add(message_id)
        return RoundReplies(sent=frozenset(sent), given_up=len(messages) - len(sent))  # nobody carries the others

    def linger(self, grid: Grid, found: RoundReplies, server_round: int, until: float) -> None:
        """Take answers until the round's own requests have theirs, or the clock shows a time."""
        while True:
            self.take(grid, found, server_round)
            left = until - self.clock.now()
            if left <= 0 or not any(one in self._open for one in found.sent):
                return
            self.clock.sleep(min(_SHORTEST_PAUSE_S, left))

    def take(self, grid: Grid, found: RoundReplies, server_round: int) -> None:
        """Take what has come; the network's own errors close a request, too."""
        for reply in guarded(grid).pull_messages(list(self._open)) if self._open else ():
            request = self._open.pop(reply.metadata.reply_to_message_id, None)
            if request is None:
                continue  # twice
            found.replies.append(reply)
            if reply.has_error() and reply.error.code in UNREACHED:
                found.unreached += 1
                self.absences.missed(request.client)
                continue
            self.absences.answered(request.client)
            if request.server_round != server_round:
                found.overdue[request.client] = request.node_id
