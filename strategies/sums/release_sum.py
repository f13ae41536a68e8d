"""Adding up the releases of a round whose machines hide nothing: integers of one grid exactly, in any order."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...privacy import Release
from ...privacy.noise.grid import Grid
from ..rounds.layout import Vector
from ..rounds.replies import LARGEST_COUNT, Reply, SummedReplies

_MOST_TOGETHER = 2**62  # a sum of counts up to this much in magnitude fits into an int64


class Summation(Protocol):
    """Where a round's releases are added up."""

    def add(self, reply: Reply) -> None:
        """One more release."""
        ...

    def add_sum(self, replies: SummedReplies) -> None:
        """The sum of several releases."""
        ...


class ReleaseSum:
    """The sum of a round's releases.

    A release that was not sent in a message is still integers, the counts of its grid. Counts of one grid are added as
    integers, which is exact, and their sum is turned into numbers once. A release that was sent is numbers, multiples
    of the grid's spacing, whose sum is exact as long as it stays below 2^53 spacings. Both ways then give the same sum.

    Parameters
    ----------
    size : int
        d.
    """

    def __init__(self, size: int) -> None:
        self._values = np.zeros(size)
        self._counts = np.zeros(size, np.int64)
        self._spacing = 0.0
        self._largest = 0  # no count of the sum is larger in magnitude

    def add(self, reply: Reply) -> None:
        """One more release."""
        contents = reply.contents
        if not isinstance(contents, Release):
            self._values += reply.values
            return
        self._add(contents.counts, contents.spacing, LARGEST_COUNT)

    def add_sum(self, replies: SummedReplies) -> None:
        """The sum of several releases."""
        self._add(replies.counts, replies.spacing, replies.largest * len(replies.machines))

    def _add(self, counts: NDArray[np.int64], spacing: float, largest: int) -> None:
        if spacing != self._spacing or self._largest + largest > _MOST_TOGETHER:
            self._collect()
            self._spacing = spacing
        self._counts += counts
        self._largest += largest

    def total(self) -> Vector:
        """The sum, shape (d,)."""
        self._collect()
        return self._values

    def _collect(self) -> None:
        if self._largest:
            self._values += Grid(self._spacing).values(self._counts)
            self._counts[:] = 0
            self._largest = 0
