"""The network of :mod:`.fleet`: Flower's messages between one server and thousands of clients, by a clock of its own.

Clients that are down or late cost no waiting: the clock stands still while anybody computes, and jumps to the next
thing that happens while the server waits.
"""

from __future__ import annotations

import heapq
import itertools
import math
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
from flwr.app import Message, MessageType, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from murmurfl.privacy import derived_seed

SERVER, FIRST_NODE = 1, 1000


@dataclass(frozen=True)
class Weather:
    """What goes wrong with clients; times in seconds.

    Parameters
    ----------
    down, late : float
        Shares of clients and of answers.
    quick, slow : tuple of float
        Between which times an answer takes, and a late one.
    spell : float
        How long a client is down at a time, at least.
    unnoticed : float
        How long Flower goes on listing a client that is down.
    seed : int
    """

    down: float = 0.1
    late: float = 0.2
    quick: tuple[float, float] = (1.0, 6.0)
    slow: tuple[float, float] = (10.0, 60.0)
    spell: float = 90.0
    unnoticed: float = 60.0
    seed: int = 1

    def is_down(self, client: int, now: float) -> bool:
        """Return True if a client is down at a time; before the time 0 none is, for all are registered then."""
        return now >= 0 and self._coin("down", client, int(now // self.spell)) < self.down

    def up_again(self, client: int, now: float) -> float:
        """When a client answers again: now, or at the end of its spell."""
        while self.is_down(client, now):
            now = (now // self.spell + 1) * self.spell
        return now

    def is_listed(self, client: int, now: float) -> bool:
        """Return True if Flower counts a client among those that are connected."""
        return not (self.is_down(client, now) and self.is_down(client, now - self.unnoticed))

    def takes(self, client: int, number: int, kind: str) -> float:
        """How long a client takes for an answer; only requests for releases come late."""
        late = kind == MessageType.TRAIN and self._coin("late", client, number) < self.late
        low, high = self.slow if late else self.quick
        return low + (high - low) * self._coin("takes", client, number)

    def _coin(self, *about: str | int) -> float:
        return float(np.random.Generator(np.random.Philox(key=derived_seed("weather", self.seed, *about))).random())


class VirtualClock:
    """Time that passes only while somebody waits: from an hour before the first request for a release, which is 0."""

    def __init__(self) -> None:
        self.time = -3600.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class FleetGrid(Grid):
    """Nodes whose clients answer at the other end of a pipe.

    Parameters
    ----------
    pipe : Connection
        To :func:`~.fleet_clients.serve`.
    clients : int
        M.
    weather : Weather
    """

    def __init__(self, pipe: Connection, clients: int, weather: Weather) -> None:
        self._pipe, self._clients, self._weather = pipe, clients, weather
        self.clock = VirtualClock()
        self._run = Run.create_empty(run_id=uuid.uuid4().int >> 65)
        self._messages = itertools.count(1)
        # In the order of time: messages that wait for their clients, and how long each will take; then the replies.
        self._waiting: list[tuple[float, int, float]] = []
        self._coming: list[tuple[float, int]] = []
        self._arrived: set[int] = set()
        self._busy_until: dict[int, float] = {}
        self.bytes_sent = self.bytes_received = 0
        self.late_answers = self.requests = 0
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, self._run.run_id, SERVER

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        now, listed = self.clock.now(), self._weather.is_listed
        return [FIRST_NODE + client for client in range(self._clients) if listed(client, now)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        identifiers = []
        for message in messages:
            kind, client = message.metadata.message_type, message.metadata.dst_node_id - FIRST_NODE
            if kind == MessageType.TRAIN and not self.requests:
                self.clock.time = 0.0
            number = next(self._messages)
            proto = message_to_proto(message)
            proto.metadata.message_id = f"{number:x}"
            takes = self._weather.takes(client, number, kind)
            if kind == MessageType.TRAIN:
                self.requests += 1
                self.late_answers += takes >= self._weather.slow[0]
            # A client that is down gets it when it is back; one that is busy, after what it is at.
            free = self._weather.up_again(client, max(self.clock.now(), self._busy_until.get(client, -math.inf)))
            self._busy_until[client] = free + takes
            wire = proto.SerializeToString()
            self.bytes_sent += len(wire)
            self._pipe.send(("post", [(number, client, wire)]))
            heapq.heappush(self._waiting, (free, number, takes))
            identifiers.append(proto.metadata.message_id)
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._let_happen()
        wanted = [number for identifier in message_ids if (number := int(identifier, 16)) in self._arrived]
        found = list[Message]()
        for first in range(0, len(wanted), _BATCH):
            batch = wanted[first : first + _BATCH]
            self._arrived.difference_update(batch)
            self._pipe.send(("fetch", batch))
            for wire in self._pipe.recv():
                self.bytes_received += len(wire)
                found.append(message_from_proto(ProtoMessage.FromString(wire)))
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        own, replies = set(self.push_messages(messages)), list[Message]()
        until = self.clock.now() + (3600.0 if timeout is None else timeout)
        while own:
            came = list(self.pull_messages(own))
            replies += came
            own -= {reply.metadata.reply_to_message_id for reply in came}
            if not own or self.clock.now() >= until:
                break
            self.clock.time = min([until, *(queue[0][0] for queue in (self._waiting, self._coming) if queue)])
        return replies

    def _let_happen(self) -> None:
        """Have clients answer what has reached them by now, and take what has come back."""
        now, due = self.clock.now(), list[int]()
        while self._waiting and self._waiting[0][0] <= now:
            began, number, takes = heapq.heappop(self._waiting)
            due.append(number)
            heapq.heappush(self._coming, (began + takes, number))
        if due:
            self._pipe.send(("answer", due))
        while self._coming and self._coming[0][0] <= now:
            self._arrived.add(heapq.heappop(self._coming)[1])


_BATCH = 256
"""Of so many replies the pipe is asked at once."""
