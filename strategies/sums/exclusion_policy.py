r"""Exclusion after a wrong sum: suspects take turns, nobody is blamed, and nobody is left out for good.

A sum that is no sum of releases has a liar in it, and nothing tells which client it is: masks hide every client's
counts. Let c be the most clients that lie. A *hypothesis* is a set of at most c clients that may be all the liars; a
wrong sum refutes those of which no client was in it. The next rounds leave out as many clients as min_cohort allows,
such that as many hypotheses as possible are left out whole, until another sum is wrong. Correct sums refute nothing:
liars may behave while others are left out. So who is left out follows from the wrong sums alone, and whenever c
clients choose to lie, :func:`most_wrong_sums` says how many there are at most before all c are left out.

After a correct sum one of those that were left out is asked again, after the next one two, then four. If such a sum is
wrong they are left out once more, one is asked again first, and the wait before that doubles: in T rounds this costs
log2 T sums.
Where wrong sums leave noise that clients do not mend, those who are left out stay so until another sum is wrong or the
training ends.

Where those who are asked send too few releases that can be opened, one more is asked again in each round.

If no hypothesis is left, more clients than c lie, or a helper does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MOST_HYPOTHESES = 50_000  # else fewer clients are taken to lie together
_RARER = 16.0  # a hypothesis of one more client counts so much less
_SINGLE_UP_TO = 24  # so many clients are looked at one by one; more in groups, which are left out whole


class ExclusionPolicy:
    """The wrong sums of a training, and who is left out because of them.

    Parameters
    ----------
    culprits : int
        c, the most clients that are taken to lie.
    """

    def __init__(self, culprits: int) -> None:
        self.culprits = culprits
        self.left_out: tuple[str, ...] = ()
        """The clients that are not asked now."""
        self.lets_in = True
        """Whether those that were left out are asked again before another sum is wrong."""
        self._wrong: list[list[str]] = []
        self._chosen: tuple[str, ...] = ()  # who was left out after the last wrong sum
        self._tried: tuple[str, ...] = ()  # who is asked again since the last sum
        self._wait, self._correct, self._together = 1, 0, 1

    def correct(self) -> None:
        """Note a correct sum; after enough of them more clients are asked again, twice as many each time."""
        self._tried = ()
        self._correct += 1
        if self.lets_in and self.left_out and self._correct >= self._wait:
            self._ask_again(self._together)
            self._correct, self._together = 0, 2 * self._together

    def too_few(self) -> None:
        """Note a round with too few releases to be opened: one more client is asked again."""
        if self.left_out:
            self._ask_again(1)

    def _ask_again(self, number: int) -> None:
        self._tried, self.left_out = self.left_out[:number], self.left_out[number:]

    def wrong(self, clients: Iterable[str], names: Sequence[str], room: int) -> bool:
        """Note a wrong sum of these clients, and choose whom to leave out; False if no hypothesis is left.

        Parameters
        ----------
        clients : iterable of str
            Those of the sum.
        names : sequence of str
            All clients that can be asked.
        room : int
            The most that can be left out without making later sums too small.
        """
        self._wrong.append(sorted(clients))
        chosen = suspects_of(names, self._wrong, self.culprits, room, self._chosen)
        if len(self.left_out) < len(self._chosen):  # somebody was asked again too early
            self._wait *= 2
        again = self._tried and chosen is not None and set(chosen) == set(self._chosen)
        self.left_out = (*self.left_out, *self._tried) if again else chosen or ()
        self._chosen, self._tried, self._correct, self._together = chosen or (), (), 0, 1
        if chosen is None:
            self._wrong, self._wait = [], 1  # whoever resumes begins anew
        return chosen is not None

    def plain(self) -> dict[str, Any]:
        """Everything as plain values, for a checkpoint."""
        chosen = {"left_out": list(self.left_out), "chosen": list(self._chosen), "tried": list(self._tried)}
        numbers = {"wait": self._wait, "correct": self._correct, "together": self._together}
        return {**chosen, "wrong": self._wrong, **numbers}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take what :meth:`plain` gave."""
        left = (tuple(map(str, saved[key])) for key in ("left_out", "chosen", "tried"))
        self.left_out, self._chosen, self._tried = left
        self._wrong = [[str(name) for name in one] for one in saved["wrong"]]
        self._wait, self._correct, self._together = (int(saved[key]) for key in ("wait", "correct", "together"))


def suspects_of(
    names: Sequence[str], wrong: Sequence[Iterable[str]], culprits: int, room: int, before: Sequence[str] = ()
) -> tuple[str, ...] | None:
    """Return at most ``room`` of ``names`` to be left out, as wrong sums have it; None if no hypothesis is left.

    Those that were left out ``before`` are again, as long as a hypothesis is left in which they are all the liars.
    """
    if room < 1:
        return ()
    groups, most = _groups(len(names), culprits, room)
    hypotheses = _hypotheses(len(groups), most)
    place = {name: number for number, members in enumerate(groups) for name in (names[i] for i in members)}
    for clients in wrong:
        seen = np.zeros(len(groups), np.float32)
        seen[[place[name] for name in clients if name in place]] = 1.0
        hypotheses = hypotheses[hypotheses @ seen > 0]
    if not len(hypotheses):
        return None
    again = np.zeros(len(groups), np.float32)
    again[[place[name] for name in before if name in place]] = 1.0
    whole = hypotheses.sum(axis=1) <= hypotheses @ again
    sizes = np.array([len(members) for members in groups], np.float32)
    chosen = again if whole.any() and sizes @ again <= room else _left_out(hypotheses, sizes, room)
    return tuple(names[i] for number, members in enumerate(groups) if chosen[number] for i in members)


def _groups(clients: int, culprits: int, room: int) -> tuple[list[range], int]:
    """Clients in groups that are left out whole, and the most groups of a hypothesis."""
    size = 1 if clients <= _SINGLE_UP_TO else max(min(-(-clients // _SINGLE_UP_TO), room // culprits), 1)
    groups = [range(start, min(start + size, clients)) for start in range(0, clients, size)]
    most = min(culprits, room // size)
    while most > 1 and sum(comb(len(groups), number) for number in range(1, most + 1)) > _MOST_HYPOTHESES:
        most -= 1
    return groups, most


def _hypotheses(groups: int, most: int) -> NDArray[np.float32]:
    """Every set of at most so many groups, a row each."""
    sets = [chosen for number in range(1, most + 1) for chosen in combinations(range(groups), number)]
    rows = np.zeros((len(sets), groups), np.float32)
    for row, chosen in zip(rows, sets, strict=True):
        row[list(chosen)] = 1.0
    return rows


def _left_out(hypotheses: NDArray[np.float32], sizes: NDArray[np.float32], room: int) -> NDArray[np.float32]:
    """Choose groups, one after the other, that fill as many hypotheses as possible."""
    number = hypotheses.sum(axis=1)
    chosen = np.zeros(len(sizes), np.float32)
    while True:
        missing = number - hypotheses @ chosen
        space = room - sizes @ chosen
        counts = np.where((missing > 0) & (hypotheses @ sizes - hypotheses @ (sizes * chosen) <= space), 1.0, 0.0)
        scores = hypotheses.T @ (counts * _RARER**-number * 4.0**-missing)
        scores[chosen > 0] = 0.0
        if scores.max(initial=0.0) <= 0.0:
            return chosen
        chosen[int(scores.argmax())] = 1.0


def most_wrong_sums(clients: int, room: int, culprits: int, assumed: int = 2) -> int | None:
    """Return the most wrong sums that so many liars can cause before all of them are left out together.

    Parameters
    ----------
    clients, room : int
        Clients that a round asks, all of which answer, and how many of them a sum may lack.
    culprits : int
        How many lie, whoever they are and whenever they choose to.
    assumed : int
        c of the schedule.

    Returns
    -------
    int or None
        None if they are never left out together.

    Examples
    --------
    >>> most_wrong_sums(20, 8, 1), most_wrong_sums(20, 8, 2), most_wrong_sums(20, 4, 2), most_wrong_sums(20, 1, 2)
    (3, 11, 38, None)
    """
    names = [str(number) for number in range(clients)]
    liars = {frozenset(chosen) for chosen in combinations(names, culprits)}
    suspects = ExclusionPolicy(assumed)
    for sums in range(1, 2 + comb(clients, min(assumed, clients))):
        if not suspects.wrong(set(names).difference(suspects.left_out), names, room):
            return None
        liars = {one for one in liars if not one <= set(suspects.left_out)}
        if not liars:
            return sums
    return None
