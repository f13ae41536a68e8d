"""Rounds that do not wait for the slowest: which requests are open, and when a round has enough answers.

A machine that has not answered is not asked again. Its answer is taken in the round in which it comes, by the rule that
every answer has to pass: nothing of it counts twice, and nothing is lost but time (docs/operations.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from flwr.app import Message
from flwr.serverapp import Grid

LateAnswers = Literal["counted", "dropped", "refused"]
"""What becomes of an answer that comes after its round; ``refused``: rounds wait for all that they ask."""

_JUST_BEHIND = 1.0
"""Of the time until enough had answered: for how much longer a round goes on, for those just behind."""
# Every look for answers costs a SuperLink some hundredths of a second; Flower's own grid looks every 3 s.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_SHARE = 1.0, 3.0, 0.1
_NEXT_TO_NOTHING_S = 0.001


@dataclass(frozen=True)
class Clock:
    """The time that passes while a server waits; for tests and measurements another one.

    Parameters
    ----------
    now : callable
        Seconds, never backwards.
    sleep : callable
        Waits for so many.
    """

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class OpenRequest:
    """A request that was sent and not answered yet.

    Parameters
    ----------
    machine : str
    node_id : int
        Where the machine was.
    server_round : int
        t.
    since : float
        When it was sent, by the clock.
    """

    machine: str
    node_id: int
    server_round: int
    since: float


@dataclass(frozen=True)
class Enough:
    """When a round may end.

    Parameters
    ----------
    answers : int
        Of those that it asked.
    open : int
        The most requests that may be open then, of any round.
    releases : int
        The fewest replies without an error, late ones among them: of a sum under secure aggregation.
    """

    answers: int
    open: int
    releases: int = 0


@dataclass
class Gathered:
    """What came while a round lasted.

    Parameters
    ----------
    replies : list of Message
        In the order in which they came.
    overdue : dict of str to int
        The machines that answered a request of an earlier round, and the nodes they did it on.
    given_up : int
        Requests that nobody waits for any more.
    """

    replies: list[Message] = field(default_factory=list)
    overdue: dict[str, int] = field(default_factory=dict)
    given_up: int = 0

    @property
    def releases(self) -> int:
        """Replies without an error."""
        return sum(not reply.has_error() for reply in self.replies)


class OpenRequests:
    """The requests of a training that are open, at most one a machine.

    Parameters
    ----------
    clock : Clock, optional

    Notes
    -----
    What a machine guarantees holds whenever it is asked, and whether its reply counts is decided where all replies are
    looked at.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = Clock() if clock is None else clock
        self._open: dict[str, OpenRequest] = {}  # by the message's id

    @property
    def machines(self) -> frozenset[str]:
        """The machines that have not answered."""
        return frozenset(request.machine for request in self._open.values())

    def give_up(self, nodes: Mapping[str, int], timeout: float) -> int:
        """Forget requests that are too old, or whose machine is gone or on another node by now; how many they were.

        Parameters
        ----------
        nodes : mapping of str to int
            Connected machines, and where they are.
        timeout : float
            Seconds.
        """
        oldest = self.clock.now() - timeout
        kept = {
            message_id: one
            for message_id, one in self._open.items()
            if one.since > oldest and nodes.get(one.machine) == one.node_id
        }
        given_up = len(self._open) - len(kept)
        self._open = kept
        return given_up

    def gather(
        self,
        grid: Grid,
        messages: Sequence[Message],
        machines: Iterable[str],
        *,
        server_round: int,
        enough: Enough,
        timeout: float,
    ) -> Gathered:
        """Send a round's requests, and take what comes, from them and from those before, until it is enough.

        Parameters
        ----------
        grid : Grid
        messages : sequence of Message
            One a machine, none of which has a request open.
        machines : iterable of str
            Whose they are.
        server_round : int
            t.
        enough : Enough
        timeout : float
            Seconds, at most.
        """
        started, found = self.clock.now(), Gathered()
        shortest = min(_SHORTEST_PAUSE_S, float(getattr(grid, "pull_interval", _SHORTEST_PAUSE_S)))  # of a simulation
        own = self._send(grid, messages, machines, server_round)
        found.given_up = len(messages) - len(own)  # nobody carries them
        wanted = min(enough.answers, len(own))
        satisfied: float | None = None
        while True:
            self._take(grid, found, server_round)
            passed, waiting = self.clock.now() - started, sum(one in self._open for one in own)
            if satisfied is None and len(own) - waiting >= wanted:
                satisfied = passed
            behind = waiting and passed < (1 + _JUST_BEHIND) * (passed if satisfied is None else satisfied)
            over = satisfied is not None and not behind and len(self._open) <= enough.open
            if (over and found.releases >= enough.releases) or not self._open or passed >= timeout:
                return found
            pause = min(max(_PAUSE_SHARE * passed, shortest), _LONGEST_PAUSE_S)
            self.clock.sleep(max(min(pause, timeout - passed), _NEXT_TO_NOTHING_S))

    def _send(
        self, grid: Grid, messages: Sequence[Message], machines: Iterable[str], server_round: int
    ) -> frozenset[str]:
        """Send requests, and take note of those that were taken on: their ids."""
        ids = list(grid.push_messages(messages)) if messages else []
        now, sent = self.clock.now(), set()
        for message_id, message, machine in zip(ids, messages, machines, strict=False):
            if message_id:
                self._open[message_id] = OpenRequest(machine, message.metadata.dst_node_id, server_round, now)
                sent.add(message_id)
        return frozenset(sent)

    def _take(self, grid: Grid, found: Gathered, server_round: int) -> None:
        """Take what has come; an error that the network answers with closes a request as well."""
        for reply in grid.pull_messages(list(self._open)) if self._open else ():
            request = self._open.pop(reply.metadata.reply_to_message_id, None)
            if request is None:
                continue  # twice
            found.replies.append(reply)
            if request.server_round != server_round:
                found.overdue[request.machine] = request.node_id
