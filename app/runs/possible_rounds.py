"""Lost replies of a simulation, and how many rounds its machines can take part in, computed before the first one.

Samples and cap settle how many releases a machine can make; seed and round settle whom a round asks, and which replies
are lost. A request spends samples whether or not its reply is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from ...privacy import ConfigurationError, derived_seed, protocol
from ...strategies.rounds.attendance import first_asked_too_often, sample_numbers
from ..methods import Method, Problem
from ..nodes.flower_internals import Run


def reply_is_lost(share: float, seed: int, server_round: int, machine: str) -> bool:
    """Whether a machine's reply of a round is lost: each reply has a coin of its own, the same on every engine."""
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


_MOST_COINS = 200_000
"""Replies whose loss is looked at before the first round: seconds."""


@dataclass(frozen=True)
class Shortage:
    """The machine that first runs out: how many releases it can make, why, and the round that asks for one more."""

    machine: int
    server_round: int
    releases: int
    reason: str


def shortage(method: Method, problem: Problem, num_rounds: int) -> Shortage | None:
    """Which machine runs out first in so many rounds, if one does."""
    config, sizes = problem.config, problem.sizes
    rounds = method.asked_rounds(config, num_rounds)
    fewest = min(sizes)
    limits = {size: method.releases_of(config, size, fewest) for size in set(sizes)}
    if all(releases >= len(rounds) for releases, _ in limits.values()):
        return None  # every machine can answer every round
    # More releases than rounds are as good as that many; so they need not be finite.
    most = {size: math.floor(min(releases, len(rounds))) for size, (releases, _) in limits.items()}
    found = first_asked_too_often(_asked(problem), rounds, np.fromiter((most[size] for size in sizes), np.int64))
    if found is None:
        return None
    server_round, machine = found
    releases, reason = limits[sizes[machine]]
    return Shortage(machine, server_round, int(releases), reason)


def _asked(problem: Problem) -> Callable[[int], NDArray[np.int64]]:
    """The machines that a round asks."""
    config, sampling = problem.config, problem.values.sampling

    def asked(server_round: int) -> NDArray[np.int64]:
        return sample_numbers(config.num_clients, config.asked_per_round, config.seed, server_round, sampling)  # type: ignore[arg-type]

    return asked


def refuse_shortage(method: Method, problem: Problem, found: Shortage) -> ConfigurationError:
    """The refusal of a run that asks a machine for too many releases; it says how many rounds are possible."""
    config, num_rounds = problem.config, problem.num_rounds
    # Which rounds ask machines may depend on how many there are; where all of them do, the answer is known at once.
    fixed = len(method.asked_rounds(config, num_rounds)) == num_rounds
    possible = found.server_round - 1 if fixed else num_rounds - 1
    while shortage(method, problem, possible):
        possible -= 1
    ways = ["fewer rounds", "a larger cap" if config.max_participations else "more data, smaller batches, more passes"]
    if config.asked_per_round < config.num_clients and problem.values.sampling != "balanced":
        ways.append("sampling = balanced, which asks all machines equally often")
    if method.may_lose:
        ways.append("run-dry = true: machines that have nothing left then refuse, and the others go on")
    return ConfigurationError(
        f"Expected num-rounds <= {possible}, got {num_rounds}: machine {found.machine} can make {found.releases} "
        f"releases ({found.reason}), and round {found.server_round} asks it for one more. Use {', or '.join(ways)}."
    )


def replies_left(method: Method, problem: Problem) -> list[int]:
    """The replies that arrive in each round; of very many rounds, in the first ones."""
    config = problem.config
    rounds = method.asked_rounds(config, problem.num_rounds)[: max(_MOST_COINS // config.asked_per_round, 1)]
    asked = _asked(problem)
    left = []
    for server_round in rounds:
        names = map(str, asked(server_round).tolist())
        left.append(sum(not reply_is_lost(config.lost_replies, config.seed, server_round, name) for name in names))
    return left


def refuse_closed(problem: Problem, left: list[int]) -> None:
    """Refuse a run under secure aggregation that would be given up, given the replies left of each round."""
    config, patience = problem.config, problem.config.give_up_after
    if not patience or len(left) < patience:
        return
    # Of every so many rounds in a row the best one must be opened.
    possible = min(max(left[i : i + patience]) for i in range(len(left) - patience + 1))
    if possible < config.cohort_floor:
        raise ConfigurationError(
            f"Expected a sum in one of every {patience} rounds, got {patience} rounds in a row with fewer than "
            f"min-cohort = {config.cohort_floor} replies, with lost-replies = {config.lost_replies:g}: the run would "
            f"be given up. Here min-cohort may be at most {possible}; or set a larger give-up-after (0: never)."
        )
