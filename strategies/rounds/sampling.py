"""The machines of a round, a function of seed and round alone, so that every engine asks the same ones.

Machines are numbers here, in the order of their names. Sampling m of M machines takes time that grows with m; only
``balanced`` keeps a permutation of all M.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ...privacy import ConfigurationError, derived_seed

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
