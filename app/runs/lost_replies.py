"""Losing replies, to see what a real network does to an algorithm."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from ...privacy import derived_seed
from ...privacy import protocol


def reply_is_lost(share: float, seed: int, server_round: int, machine: str) -> bool:
    """Whether a machine's reply of a round is lost: each reply has a coin of its own, the same on every engine.

    Parameters
    ----------
    share : float
        Probability of a loss.
    """
    if share == 0.0:
        return False
    generator = np.random.Generator(np.random.Philox(key=derived_seed("loss", seed, server_round, machine)))
    return bool(generator.random() < share)


class LossyGrid(Grid):
    """Another grid, whose train replies are lost at random: the machine did its work, the server never hears of it.

    Parameters
    ----------
    grid : Grid
        Carries the messages.
    lost_replies : float
        Probability that a train reply is lost, each by itself.
    seed : int
        The same seed loses the same replies on every engine.
    """

    def __init__(self, grid: Grid, lost_replies: float, seed: int) -> None:
        self._grid = grid
        self._lost_replies = lost_replies
        self._seed = seed

    def set_run(self, run: Run) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        lost = {message.metadata.dst_node_id for message in messages if self._loses(message)}
        replies = self._grid.send_and_receive(messages, timeout=timeout)
        return [
            reply
            for reply in replies
            if reply.metadata.message_type != MessageType.TRAIN or reply.metadata.src_node_id not in lost
        ]

    def _loses(self, message: Message) -> bool:
        config = message.content.get(protocol.CONFIG, None)
        if message.metadata.message_type != MessageType.TRAIN or not isinstance(config, ConfigRecord):
            return False
        if protocol.ASK in config:  # a query to a noise mod, in a message of this type
            return False
        server_round, machine = config[protocol.SERVER_ROUND], config[protocol.MACHINE]
        return reply_is_lost(self._lost_replies, self._seed, int(server_round), str(machine))  # type: ignore[arg-type]
