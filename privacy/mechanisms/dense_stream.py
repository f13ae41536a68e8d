"""Streams in which every release uses all noise before it: a dense C^{-1}, its noise made again from nonces.

Row k of C^{-1} Z is a sum over all k rows of Z. Only their nonces are remembered, 16 bytes a release. To draw
every row again for every release would take K^2 / 2 rows, so releases go in blocks: when a block begins, all earlier
rows are drawn once and what they add to each release of the block is kept in memory. That is K^2 / 64 rows drawn, and
32 rows of memory (64 while they are made) that may be lost at any time, a restart included: they are made again to the
last bit, because they are always computed in the same order.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..noise.keyed_noise import NONCE_BYTES
from .mechanism import Draw, Increment, Mechanism, Memory, State

_BLOCK = 32
# How many values of a row are handled at a time: so many that the results stay in the second-level cache.
_VALUES = 1 << 12


class HistoryMechanism(Mechanism):
    """A mechanism whose increments use all noise so far.

    A subclass gives the entries of C^{-1}; a state is what the noise so far adds to the coming releases of a block.

    Notes
    -----
    **Formal guarantees.** mu = Delta x ``sensitivity(...)`` / noise_std for replacement of one sample that keeps to the
    declared pattern, with the C whose inverse a subclass gives. Memory that is lost is made again to the last bit, so
    it changes no release.
    Proof: docs/proofs/returning-samples.md.
    """

    memory: ClassVar[Memory] = "all"

    @abstractmethod
    def entries(self, rows: range, columns: range) -> NDArray[np.float64]:
        """A block of C^{-1}; rows and columns count releases from 1, and there is zero above the diagonal."""

    def initial_state(self, size: int) -> State:
        return (np.zeros((min(_BLOCK, self.num_releases), size), np.float32),)

    def increment(self, state: State, release: int, normals: NDArray[np.floating], scale: float = 1.0) -> Increment:
        ahead = self._with(state[0], self._check_release(release), normals * normals.dtype.type(scale))
        return Increment(ahead[0], None, (ahead[1:],) if len(ahead) > 1 else None)

    def state_after(self, release: int, draw: Draw, scale: float = 1.0) -> State:
        start = self._check_release(release) // _BLOCK * _BLOCK
        rows = range(start + 1, min(start + _BLOCK, self.num_releases) + 1)
        if not rows:
            return ()
        ahead: NDArray[np.floating] | None = None
        for first in range(1, start + 1, _BLOCK):
            columns = range(first, first + _BLOCK)
            normals = draw(columns)
            normals *= normals.dtype.type(scale)
            entries = self.entries(rows, columns).astype(normals.dtype)
            if ahead is None:
                ahead = np.zeros((len(rows), normals.shape[1]), normals.dtype)
            for values in _slices(normals.shape[1]):
                ahead[:, values] += entries @ normals[:, values]
        for column in range(start + 1, release + 1):
            normals = draw(range(column, column + 1))[0]
            if ahead is None:
                ahead = np.zeros((len(rows), normals.size), np.float32)
            ahead = self._with(ahead, column, normals * normals.dtype.type(scale))[1:]
        return () if ahead is None else (ahead,)

    def memory_bytes(self, size: int) -> int:
        return NONCE_BYTES * self.num_releases

    def _with(self, ahead: NDArray[np.floating], release: int, row: NDArray[np.floating]) -> NDArray[np.floating]:
        """The noise of the coming releases as far as row ``release`` of Z; that of the first is final."""
        column = self.entries(range(release, release + len(ahead)), range(release, release + 1)).astype(row.dtype)
        known = np.empty(ahead.shape, np.result_type(ahead, row))
        for values in _slices(row.size):
            np.multiply(column, row[values], out=known[:, values])
            known[:, values] += ahead[:, values]
        return known


def _slices(size: int) -> list[slice]:
    return [slice(start, start + _VALUES) for start in range(0, size, _VALUES)]
