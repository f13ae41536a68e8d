"""Exhaustion: which clients run out of releases, and when.

A client is asked for no more releases than it says it can make, by its cap and its fresh samples.
:func:`exhaustion_schedule` tells, from whom rounds ask and what clients can still make, who has none left when.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy import protocol
from ...privacy.errors import ConfigurationError
from .client_registry import NumberedNames

logger = logging.getLogger("flwr")

_MOST_NAMED = 5

Schedule = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]
"""The numbers of the clients that a round asks, given the round and how many releases each of M clients has left."""

NO_CAP = np.iinfo(np.int64).max
"""The releases of a client that can make any number."""


@dataclass(frozen=True)
class ExhaustionSchedule:
    """Schedule of when clients run out of releases, if every request is answered in time.

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

    def logged(self) -> ExhaustionSchedule:
        """Log who runs out; return the schedule."""
        for line in self.lines():
            logger.info("%s", line)
        return self

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
            f"Clients leave: {len(after)} of {len(self.last)} before the end of {self.rounds.stop - 1} rounds; "
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
    """Number of releases that each client can still make: what it states, less what it was asked for since."""

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
        """Number of releases that each client can still make, for those that stated it."""
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


def capped(names: Sequence[str], releases: Mapping[str, float]) -> NDArray[np.int64]:
    """Return the releases of each client by its place; a client that is missing can make any number."""
    caps = (releases.get(name, math.inf) for name in names)
    return np.fromiter((NO_CAP if cap >= NO_CAP else int(cap) for cap in caps), np.int64, len(names))


def numbers_of(names: Sequence[str]) -> Callable[[Iterable[str]], NDArray[np.int64]]:
    """Return a function that gives the places of clients among ``names``."""
    if isinstance(names, NumberedNames):
        numbers = names.numbers
        return lambda drawn: np.fromiter((numbers.index(int(name)) for name in drawn), np.int64)
    places = {name: place for place, name in enumerate(names)}
    return lambda drawn: np.fromiter((places[name] for name in drawn), np.int64)


def check_rounds(
    draw: Callable[[int], Iterable[str]],
    names: Sequence[str],
    statements: Mapping[str, Mapping[str, Any]],
    rounds: range,
) -> None:
    """Refuse a training whose rounds ask a client more often than it says it can answer.

    Parameters
    ----------
    draw : callable
        The clients that a round asks.
    names : sequence of str
        All clients.
    statements : mapping
        What clients state, by name.
    rounds : range
        The rounds to come.
    """
    caps = {name: releases_left(statement) for name, statement in statements.items()}
    numbers, done = numbers_of(names), rounds.start > 1
    found = exhaustion_schedule(
        lambda server_round, _: numbers(draw(server_round)), capped(names, caps), rounds
    ).refused
    if found is None:
        return
    last, name = found[0], names[found[1]]
    problem = (
        f"client {name} says that it can make {caps[name]} {'more ' if done else ''}releases, and round {last} "
        "asks it for one more: its cap (max-participations) and its fresh samples decide"
    )
    if not done:
        raise ConfigurationError(
            f"Expected at most {last - 1} rounds, got {rounds.stop - 1}: {problem}. Use fewer rounds or a larger cap, "
            "train without that client (`murmurfl federation leave`), or set allow_exhaustion=True "
            "(allow-exhaustion = true in murmurfl's own app): clients that can make no more then refuse.",
            kind="exhausted",
            setting="num_rounds",
            got=rounds.stop - 1,
        )
    # No refusal here: a server that was killed asks for a round again, and what its clients released for it the
    # first time is spent. So a training that was possible may end up short of a release, through no fault of its
    # plan.
    logger.warning("In what is left of %d rounds %s; it refuses from then on.", rounds.stop - 1, problem)


def check_enough_stay(schedule: ExhaustionSchedule, fewest: int) -> None:
    """Refuse a training some of whose rounds wait for more clients than have a release left."""
    for server_round in sorted({1, *(last + 1 for last in schedule.after.values())}):
        if (left := schedule.left(server_round)) < fewest:
            raise ConfigurationError(
                f"Expected at most {server_round - 1} rounds, got {schedule.rounds.stop - 1}: from round "
                f"{server_round} on {left} clients can make another release (caps and fresh samples decide), and "
                f"a round waits for {fewest}. Use fewer rounds, larger caps, a smaller quorum, or "
                "allow_exhaustion=True (allow-exhaustion = true in murmurfl's own app): it goes on with whatever "
                "is left.",
                kind="exhausted",
                setting="num_rounds",
            )
