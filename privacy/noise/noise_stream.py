r"""The noise of a machine's stream: what each release adds to its contribution and takes back out of it.

The stream's noise is B Z, row by row. Release k carries the difference of row k and row k - 1, as int64 counts on the
machine's grid, so that what a sum of releases should cancel does cancel, to the last bit. Normals are pure functions of
the machine's secret key and a nonce, so earlier noise is made again from its nonce and never stored.

Formal guarantees
-----------------
The counts of releases 1 to k, summed, are row k of noise_std B Z. Each release is rounded to the grid once; where the
mechanism removes its last row whole, what is removed is the very counts that were added. Z comes from
:func:`~murmurfl.privacy.standard_normals`, under keys that no two releases share as long as no nonce repeats. What the
stream guarantees is the mechanism's promise, and the grid's.
Proof: docs/proofs/grid-and-noise.md.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..accounting.noise_plan import NoisePlan
from ..ledger import StreamRecord
from ..mechanisms import Draw, Increment, State
from .grid import MARK
from .keyed_noise import NONCE_BYTES, NoiseQuality, row_key, standard_normal_rows, standard_normals
from .normals import LARGEST_NORMAL

# Where a row is made from much of the noise before it, so much is kept by a machine whose caller keeps nothing.
_OWN_CACHE_BYTES = 256 << 20
_FROM_NONCES = ("last", "recent", "all")


class RowCache:
    """Arrays made from noise lately, at most ``limit_bytes`` of them, so that they need not be made twice.

    The oldest go first, and are made again from their nonces.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._rows: dict[tuple[bytes, bytes], tuple[NDArray[np.generic], ...]] = {}
        self._bytes = 0

    def keep(self, key: bytes, nonce: bytes, arrays: tuple[NDArray[np.generic], ...]) -> None:
        """Keep arrays that belong to a key and the nonce of a release."""
        self._rows[key, nonce] = arrays
        self._bytes += _nbytes(arrays)
        while self._bytes > self.limit_bytes and self._rows:
            self._bytes -= _nbytes(self._rows.pop(next(iter(self._rows))))

    def take(self, key: bytes, nonce: bytes) -> Any:
        """The arrays of a release, which are then forgotten, because each is needed once; None if they are gone."""
        arrays = self._rows.pop((key, nonce), None)
        if arrays is not None:
            self._bytes -= _nbytes(arrays)
        return arrays


def _nbytes(arrays: tuple[NDArray[np.generic], ...]) -> int:
    return arrays[0].nbytes if len(arrays) == 1 else sum(values.nbytes for values in arrays)


class Past(NamedTuple):
    """The part of a stream that its next release's noise depends on, as :class:`StreamRecord` has it."""

    release: int
    nonces: bytes
    noise_state: State


class NoiseStream:
    """The noise of sessions of the machines of one policy, for models of ``num_parameters`` parameters.

    ``rows`` keeps what the next release will need, for simulations; by default each row is made again when it is taken
    back out, and 256 MiB are set aside where that would take the noise of several releases.
    """

    def __init__(
        self, plan: NoisePlan, num_parameters: int, quality: NoiseQuality, rows: RowCache | None = None
    ) -> None:
        if rows is None and plan.mechanism.memory in ("recent", "all"):
            rows = RowCache(_OWN_CACHE_BYTES)
        self.plan = plan
        self.num_parameters = num_parameters
        self.quality: NoiseQuality = quality
        self._rows = rows
        self._mechanism, self._memory = plan.mechanism, plan.mechanism.memory
        self._silent = plan.noise_std == 0.0
        self._bounds: dict[int, float | None] = {}
        self._factors: dict[int, float] = {}

    def add_to(
        self,
        counts: NDArray[np.int64],
        stream: Past | StreamRecord,
        key: bytes,
        nonce: bytes,
        normals: NDArray[np.floating] | None = None,
    ) -> tuple[bytes, State]:
        """Put the noise of a stream's next release on its contribution.

        Parameters
        ----------
        counts : ndarray of shape (d,)
            The contribution in units of the grid's spacing; changed in place.
        stream : Past or StreamRecord
            After the release before.
        key : bytes
            The machine's secret key.
        nonce : bytes
            Of the release: never used before under this key.
        normals : ndarray of shape (draws x d,), optional
            Those of this key and nonce, if they were made already.

        Returns
        -------
        nonces : bytes
            What the noise up to this release is made again from.
        noise_state : tuple of ndarray
            The part of it that cannot be made again.
        """
        if self._silent:
            return nonce, stream.noise_state
        mechanism, memory, release = self._mechanism, self._memory, stream.release + 1
        state, kept = self._before(stream, release, key)
        if normals is None:
            normals = standard_normals(
                row_key(key, nonce), mechanism.draws(release) * self.num_parameters, self.quality
            )
        increment = mechanism.increment(state, release, normals, self._scale)
        added, removed = self._rounded(increment, release, kept)
        counts += added
        # Marked counts carry the grid's mark, which goes with what is removed; without that it goes by itself.
        counts -= MARK if removed is None else removed
        self._keep(key, nonce, added, increment)
        if memory == "last":
            return nonce, ()
        left = (increment.state or ()) if memory == "state" else ()
        return self.nonces_after(stream.nonces, nonce), left

    def nonces_after(self, nonces: bytes, nonce: bytes) -> bytes:
        """The nonces that the noise up to a release is made again from: those before it, and its own."""
        if self._silent or self._memory not in ("recent", "all"):
            return nonce
        nonces = nonces + nonce
        return nonces[-NONCE_BYTES * self._mechanism.remembered :] if self._memory == "recent" else nonces

    def last_row(self, stream: Past | StreamRecord, key: bytes) -> tuple[float, NDArray[np.int64] | None]:
        """The factor from normals to counts of the next row, and the marked counts of the last one.

        For a mechanism that removes its last row. The counts, None before the first release, become the caller's.
        Stream and key are as for :meth:`add_to`.
        """
        release = stream.release + 1
        state, kept = self._before(stream, release, key)
        if kept is None and state:
            kept = self._marked(state[0], self._bound(release))
        if release not in self._factors:
            self.plan.grid.marked(np.empty(0), self._bound(release))  # that noise fits the grid
            self._factors[release] = self._mechanism.row_std(release) * self._scale
        return self._factors[release], kept

    def kept(self, key: bytes, nonce: bytes, room: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """The array for the marked counts of a release's row, so that the next release can remove them."""
        row = np.empty(self.num_parameters, np.int64) if room is None else room
        if self._rows is not None:
            self._rows.keep(key, nonce, (row,))
        return row

    def draws_a_row(self, release: int) -> bool:
        """Whether a release needs one row of normals, which can be made beforehand with those of others."""
        return self.plan.noise_std > 0.0 and self.plan.mechanism.draws(release) == 1

    def _before(self, stream: Past | StreamRecord, release: int, key: bytes) -> tuple[State, NDArray[np.int64] | None]:
        """The mechanism's state before a release, or the counts of its last row, if these are what is removed."""
        mechanism = self._mechanism
        if release == 1:
            return mechanism.initial_state(self.num_parameters), None
        if self._memory not in _FROM_NONCES:
            return stream.noise_state, None
        last = stream.nonces[-NONCE_BYTES:]
        made = None if self._rows is None else self._rows.take(key, last)
        if made is None:
            return mechanism.state_after(stream.release, self._draw(stream, key), self._scale), None
        return ((), made[0]) if mechanism.removes_last else (made, None)

    def _rounded(
        self, increment: Increment, release: int, kept: NDArray[np.int64] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """The marked counts that a release adds and removes."""
        mechanism, bound = self._mechanism, self._bound(release)
        if increment.removed is not None and not mechanism.removes_last:
            # Only a whole row cancels to the last bit. A part of one, rounded by itself, would make a message depend on
            # more than the real-valued mechanism releases (docs/proofs/grid-and-noise.md).
            increment = increment._replace(added=increment.added - increment.removed, removed=None)
            bound = None if bound is None else 2 * bound
        added = self._marked(increment.added, bound)
        if kept is None and increment.removed is not None:
            kept = self._marked(increment.removed, bound)
        return added, kept

    def _bound(self, release: int) -> float | None:
        """The largest value that a release adds or removes; None if that is not known."""
        if release not in self._bounds:
            bound = self._mechanism.increment_bound(release)
            self._bounds[release] = None if bound is None else LARGEST_NORMAL * bound * self.plan.noise_std
        return self._bounds[release]

    def _keep(self, key: bytes, nonce: bytes, added: NDArray[np.int64], increment: Increment) -> None:
        """Keep what the next release takes back out, or starts from."""
        if self._rows is None or self._memory not in _FROM_NONCES:
            return
        if self._mechanism.removes_last:
            self._rows.keep(key, nonce, (added,))
        elif increment.state is not None:
            self._rows.keep(key, nonce, increment.state)

    @cached_property
    def _scale(self) -> float:
        # Noise is made in units of the grid: its spacing is a power of two, so no digit depends on that.
        return float(self.plan.grid.factor(self.plan.noise_std))

    def _marked(self, noise: NDArray[np.floating], bound: float | None) -> NDArray[np.int64]:
        # Not in the mechanism's own memory unless it hands that over: what it adds may be part of its state, which a
        # cache may hold, or of what it removes.
        return self.plan.grid.marked(np.asarray(noise), bound, in_place=self._in_place)

    @cached_property
    def _in_place(self) -> bool:
        return bool(vars(type(self.plan.mechanism)).get("hands_over", False))

    def _draw(self, stream: Past | StreamRecord, key: bytes) -> Draw:
        """The normals of earlier releases whose nonces are kept."""
        first = stream.release - len(stream.nonces) // NONCE_BYTES + 1

        def draw(releases: range) -> NDArray[np.floating]:
            nonces = [stream.nonces[NONCE_BYTES * (j - first) : NONCE_BYTES * (j - first + 1)] for j in releases]
            return standard_normal_rows([row_key(key, nonce) for nonce in nonces], self.num_parameters, self.quality)

        return draw
