"""Which machines leave a training before its end, and when: known before the first round, from what they state.

A machine states how many releases it can still make; its cap and its fresh samples decide. It is not asked for more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from logging import INFO
from typing import Any

from flwr.common.logger import log

from ...privacy import ConfigurationError
from .asked_statements import releases_left
from .known_machines import by_length_and_name

_MOST_NAMED = 5

Draw = Callable[[int, AbstractSet[str], Mapping[str, int]], Iterable[str]]
"""The machines that a round asks, given those that it cannot ask and how often each was asked before."""


@dataclass(frozen=True)
class Leaving:
    """When machines leave a training.

    Parameters
    ----------
    machines, rounds : int
        M and T.
    after : mapping of str to int
        The round after which each of them has finished, in that order; of those that finish before T.
    releases : mapping of str to int
        How many each of these can make.

    Notes
    -----
    A lost or late reply changes when a machine leaves, by the rounds in which it was not asked.
    """

    machines: int
    rounds: int
    after: Mapping[str, int]
    releases: Mapping[str, int]

    def left(self, server_round: int) -> int:
        """How many machines can still be asked in a round."""
        return self.machines - sum(last < server_round for last in self.after.values())

    def lines(self) -> list[str]:
        """What people read; none where nobody leaves."""
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
    """How many more releases each machine can make: what it stated, less what it was asked for since."""

    def __init__(self) -> None:
        self._in_all: dict[str, int] = {}
        self._left: dict[str, int] = {}

    def take(self, statements: Mapping[str, Mapping[str, Any]]) -> None:
        """Take what machines state of themselves; one that states nothing is asked as if it had no end."""
        for name, said in statements.items():
            left, made = releases_left(said), said.get("releases", 0)
            if left != float("inf"):
                self._left[name] = int(left)
                self._in_all[name] = int(left) + int(made)

    @property
    def finished(self) -> frozenset[str]:
        """The machines that can make no more."""
        return frozenset(name for name, left in self._left.items() if left <= 0)

    @property
    def stated(self) -> dict[str, int]:
        """How many more each can make, of those that said so."""
        return dict(self._left)

    def asked(self, names: Iterable[str]) -> None:
        """Count a request to each of several machines: it is spent even if no reply comes."""
        for name in names:
            if name in self._left:
                self._left[name] -= 1

    def made(self, releases: Mapping[str, int | None]) -> None:
        """Take note of the numbers of releases that came: what was asked for and never made is not spent."""
        for name, number in releases.items():
            if number is not None and name in self._left:
                self._left[name] = self._in_all[name] - number


def foreseen(draw: Draw, left: Mapping[str, int], names: Iterable[str], rounds: range, fewest: int) -> Leaving:
    """Who leaves when, if every request is answered in time.

    Parameters
    ----------
    draw : callable
        :data:`Draw`.
    left : mapping of str to int
        How many releases machines can still make; who is missing can make any number.
    names : iterable of str
        All machines.
    rounds : range
        Those to come.
    fewest : int
        How many machines must remain in each of these rounds.

    Raises
    ------
    ConfigurationError
        If fewer remain in one of them.
    """
    machines = len(list(names))
    remaining, times, after = dict(left), dict[str, int](), dict[str, int]()
    finished = {name for name, most in remaining.items() if most <= 0}
    after.update(dict.fromkeys(sorted(finished, key=by_length_and_name), rounds.start - 1))
    if finished or min(remaining.values(), default=len(rounds)) < len(rounds):  # else nobody can leave
        for server_round in rounds:
            if machines - len(finished) < fewest:
                raise _too_few(server_round, machines - len(finished), fewest, rounds)
            for name in draw(server_round, finished, times):
                times[name] = times.get(name, 0) + 1
                if name in remaining:
                    remaining[name] -= 1
                    if not remaining[name] and server_round + 1 in rounds:
                        after[name] = server_round
            finished.update(name for name, last in after.items() if last == server_round)
    return Leaving(machines, rounds.stop - 1, after, {name: left[name] for name in after})


def log_leaving(leaving: Leaving) -> None:
    """Say who leaves when, before the first round."""
    for line in leaving.lines():
        log(INFO, "%s", line)


def _too_few(server_round: int, remaining: int, fewest: int, rounds: range) -> ConfigurationError:
    return ConfigurationError(
        f"Expected at most {server_round - 1} rounds, got {rounds.stop - 1}: from round {server_round} on {remaining} "
        f"machines can make another release (caps and fresh samples decide), and a round waits for {fewest}. Use fewer "
        "rounds, larger caps, a smaller wait_for, or run_dry=True (run-dry = true in murmurfl's own app): it goes on "
        "with whatever is left."
    )
