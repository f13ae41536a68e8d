"""Keyed normals on a device, and what each release of a block of clients adds to its contribution and removes from it.

**Normals.** A row is a pure function of its key, with the same bits on every backend. Words come from Philox4x32-10
(Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"): four words of 32 bits as a pure
function of a counter and a key. Its key and upper counter words are the first 160 bits of the row's key; its lowest
counter word numbers the blocks of a row. Words are kept in int64. A product of two of them may wrap around, as integers
do on every backend, and its upper half is still right; known answers check that before a backend is used
(:func:`check_known_answers`).

Two words make a pair of normals, R cos(theta) and R sin(theta) with R = sqrt(-2 ln U) (Box and Muller 1958), in
float32:

* U = w 2^-32 of the first word, so that no normal is larger than sqrt(66 ln 2) = 6.76 in magnitude, and about one pair
  in 2^25 is exactly zero.
* The logarithm, the sine and the cosine are polynomials with an error of a few units in the last place. They consist of
  sums, products, one quotient and one root, each of which IEEE 754 rounds in one way only. So a row has the same bits
  on every backend, alone or beside others: what is tested on a CPU is what a GPU draws.

The bits differ from those of :mod:`murmurfl.privacy.noise`; the law is that of its quality ``fast``. They
are for simulations only: Philox is no cipher, and the gaps of float32 tell neighbouring data sets apart.

**Increments.** A mechanism's increment is linear in the normals of the release and of the few before it. Its own code
gives the factors, as its increment of unit vectors (:func:`factors_of`). The device multiplies, adds and rounds to the
grid like :class:`~murmurfl.privacy.release.prefix_sums.NoiseStream`; a mechanism that removes its whole last row
removes the very integers that were added.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....privacy.accounting.noise_plan import NoisePlan
from ....privacy.errors import ConfigurationError
from ....privacy.mechanisms import Mechanism
from ....privacy.noise import KEY_BYTES, LARGEST_NORMAL, MARK, NONCE_BYTES, row_key
from .backend import torch
from .device_gradients import marked

ROUNDS = 10
WORD_BITS = 32
WORD_MASK = (1 << WORD_BITS) - 1

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

KNOWN_ANSWERS: tuple[tuple[tuple[int, ...], tuple[int, int], tuple[int, ...]], ...] = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD_MASK,) * 4, (WORD_MASK, WORD_MASK), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
"""Counter, key and words, as published by the authors with their library Random123."""


def philox_words(counter: Sequence[torch.Tensor], key: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Four words, from 0 to 2^32 - 1, for each counter of four words under each key of two, all int64 tensors.

    The words' shapes are those of counters and keys, broadcast.
    """
    shape = torch.broadcast_shapes(*(one.shape for one in (*counter, *key)))
    first, second, third, fourth = counter
    key_0, key_1 = key
    for step in range(ROUNDS):
        if step:
            key_0, key_1 = (key_0 + _WEYL[0]) & WORD_MASK, (key_1 + _WEYL[1]) & WORD_MASK
        low, high = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        # The mask drops what is above 32 bits of the other words; unmasked words are products.
        first, third = _mixed(high, second ^ key_0, shape), _mixed(low, fourth ^ key_1, shape)
        second, fourth = high, low
    return first, second & WORD_MASK, third, fourth & WORD_MASK


def _mixed(product: torch.Tensor, other: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the upper word of a product, XORed with another word."""
    upper = product >> WORD_BITS
    upper = upper.bitwise_xor_(other) if upper.shape == shape else upper ^ other
    return upper.bitwise_and_(WORD_MASK)


def check_known_answers(device: torch.device) -> None:
    """Raise if a backend computes other than the published words."""
    counters = torch.tensor([counter for counter, _, _ in KNOWN_ANSWERS], dtype=torch.int64, device=device)
    keys = torch.tensor([key for _, key, _ in KNOWN_ANSWERS], dtype=torch.int64, device=device)
    expected = [list(words) for _, _, words in KNOWN_ANSWERS]
    got = torch.stack(philox_words(counters.unbind(1), keys.unbind(1)), dim=1).tolist()
    if got != expected:
        raise ConfigurationError(
            f"Expected the published words of Philox4x32-10 on device {str(device)!r}, got others: its integers do not "
            "wrap around as they must. Leave the device empty.",
            kind="unsupported",
            setting="device",
        )


_PER_BLOCK = 4
_BLOCKS_TOGETHER = 1 << 16
_BLOCKS_TOGETHER_ON_GPU = 1 << 23
_MOST_BLOCKS = 1 << WORD_BITS  # that one word of the counter can number

_ROOT_HALF_BITS = 0x3F3504F3
"""The float32 next to sqrt(1/2), as an integer: mantissas lie between it and twice it."""
_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1

# Of (atanh(s) / s - 1) / z, (sin(x) / x - 1) / z and (cos(x) - 1) / z in z = s^2 or x^2, interpolated at Chebyshev's
# nodes of [0, (sqrt(2) - 1)^4] and [0, (pi / 4)^2]: below 2^-25 of the value.
_LOGARITHM = (0.33333343, 0.1999439, 0.14789975)
_SINE = (-0.16666665, 0.00833275, -0.00019587)
_COSINE = (-0.5, 0.0416666505, -0.00138875833, 2.44632430e-05)

_ANGLE_BITS = WORD_BITS - 2
_SIGN, _SWAP = 1 << _ANGLE_BITS, 1 << (_ANGLE_BITS + 1)


def standard_normal_rows(
    keys: Sequence[bytes], size: int, device: torch.device, *, blocks_together: int | None = None
) -> torch.Tensor:
    """Rows of independent standard normals, each a pure function of its 32-byte key and of ``size``.

    A key (:func:`murmurfl.privacy.noise.row_key`) is for one row only. ``blocks_together`` is how many
    blocks of four normals are computed at a time: it bounds the work memory and changes no bit.
    """
    blocks = -(-size // _PER_BLOCK)
    if not 0 <= blocks < _MOST_BLOCKS:
        raise ConfigurationError(
            f"Expected size from 0 to {_PER_BLOCK * _MOST_BLOCKS - _PER_BLOCK}, got {size}.",
            kind="out-of-range",
            setting="size",
            got=size,
        )
    if blocks_together is None:
        blocks_together = _BLOCKS_TOGETHER if device.type == "cpu" else _BLOCKS_TOGETHER_ON_GPU
    normals = torch.empty((len(keys), _PER_BLOCK, blocks), dtype=torch.float32, device=device)
    words = _key_words(keys, device)
    rows_together = max(blocks_together // max(blocks, 1), 1)
    for first_row in range(0, len(keys), rows_together):
        rows = slice(first_row, first_row + rows_together)
        for start in range(0, blocks, blocks_together):
            some = slice(start, min(start + blocks_together, blocks))
            numbers = torch.arange(some.start, some.stop, dtype=torch.int64, device=device)
            made = philox_words((numbers, *words[2:, rows, None]), tuple(words[:2, rows, None]))
            for pair in range(_PER_BLOCK // 2):
                cosines, sines = normals[rows, 2 * pair, some], normals[rows, 2 * pair + 1, some]
                _write_pairs(made[2 * pair], made[2 * pair + 1], cosines, sines)
    return normals.view(len(keys), _PER_BLOCK * blocks)[:, :size]


def _key_words(keys: Sequence[bytes], device: torch.device) -> torch.Tensor:
    """Words of Philox's key and upper counter for each row, shape (5, rows)."""
    wrong = next((key for key in keys if len(key) != KEY_BYTES), None)
    if wrong is not None:
        raise ConfigurationError(
            f"Expected keys of {KEY_BYTES} bytes, got one of {len(wrong)}.", kind="wrong-shape", setting="keys"
        )
    words = np.frombuffer(b"".join(keys), "<u4").reshape(len(keys), KEY_BYTES // 4)[:, :5]
    return torch.from_numpy(np.ascontiguousarray(words.T, np.int64)).to(device)


def _write_pairs(
    radius_words: torch.Tensor, angle_words: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> None:
    """Write pairs of normals made from two words of 32 bits each."""
    radius = radius_words.to(torch.float32).add_(0.5).mul_(2.0**-WORD_BITS)
    radius = _root(_minus_twice_logarithm(radius))
    radius = torch.where((angle_words & _SIGN) != 0, -radius, radius)
    # An eighth of a turn to either side of a half axis; sign and swap make the four half axes of it.
    angle = (angle_words & (_SIGN - 1)).sub_(_SIGN >> 1).to(torch.float32)
    angle.add_(0.5).mul_(math.pi / 2 * 2.0**-_ANGLE_BITS)
    squares = angle * angle
    sine = _polynomial(_SINE, squares).mul_(squares).mul_(angle).add_(angle)
    cosine = _polynomial(_COSINE, squares).mul_(squares).add_(1.0)
    swap = (angle_words & _SWAP) != 0
    torch.mul(torch.where(swap, sine, cosine), radius, out=cosines)
    torch.mul(torch.where(swap, cosine, sine), radius, out=sines)


def _root(values: torch.Tensor) -> torch.Tensor:
    """Return the root, rounded as IEEE 754 says: float32's own is off by a unit in PyTorch on some processors.

    A root of a float32 lies 2^-50 or more from where float32 rounds another way, so that float64's may be off too.
    """
    return values.to(torch.float64).sqrt_().to(torch.float32)


def _minus_twice_logarithm(values: torch.Tensor) -> torch.Tensor:
    """-2 ln U for U of (0, 1], float32: with U = 2^e m, ln m = 2 atanh((m - 1) / (m + 1))."""
    bits = values.view(torch.int32) - _ROOT_HALF_BITS
    exponent = (bits >> _MANTISSA_BITS).to(torch.float32)
    mantissa = bits.bitwise_and_(_MANTISSA_MASK).add_(_ROOT_HALF_BITS).view(torch.float32)
    ratio = mantissa - 1.0
    ratio /= mantissa.add_(1.0)
    squares = ratio * ratio
    logarithm = _polynomial(_LOGARITHM, squares).mul_(squares).mul_(ratio).add_(ratio).mul_(-4.0)
    return logarithm.sub_(exponent.mul_(2.0 * math.log(2.0)))


def _polynomial(coefficients: Sequence[float], values: torch.Tensor) -> torch.Tensor:
    """Horner's rule; each product and sum is rounded by itself."""
    total = values * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        total.add_(coefficient).mul_(values)
    return total.add_(coefficients[0])


Name = tuple[bytes, bytes]
"""A client's secret key and the nonce of a release."""


class RowTable:
    """Noise rows in one table, so that a kept row holds no other row's memory.

    At most ``most_rows`` are kept: the oldest go first, and are drawn again if needed.
    """

    def __init__(self, size: int, most_rows: int, device: torch.device) -> None:
        self._most = most_rows
        self._table = torch.empty((0, size), dtype=torch.float32, device=device)
        self._places: dict[Name, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._places)

    def get(self, names: Sequence[Name], make: Callable[[Sequence[Name]], torch.Tensor]) -> torch.Tensor:
        """Return the rows of some names; ``make`` draws those that are missing."""
        here = [self._places.get(name) for name in names]
        missing = [i for i, place in enumerate(here) if place is None]
        if len(missing) == len(names):
            return make(names)
        places = torch.tensor([0 if place is None else place for place in here], device=self._table.device)
        rows = self._table.index_select(0, places)
        if missing:
            rows[torch.tensor(missing, device=rows.device)] = make([names[i] for i in missing])
        return rows

    def forget(self, names: Sequence[Name]) -> None:
        """Free the places of rows that nobody needs any more."""
        for name in names:
            place = self._places.pop(name, None)
            if place is not None:
                self._free.append(place)

    def keep(self, names: Sequence[Name], rows: torch.Tensor) -> None:
        """Keep rows while there is room; only the last ones if there are too many."""
        if self._most < 1:
            return
        names, rows = names[-self._most :], rows[-self._most :]
        self.forget(names)
        while len(self._places) + len(names) > self._most:
            self._free.append(self._places.pop(next(iter(self._places))))
        self._grow(len(self._places) + len(names))
        places = [self._free.pop() for _ in names]
        self._places.update(zip(names, places, strict=True))
        self._table[torch.tensor(places, device=rows.device)] = rows

    def _grow(self, rows: int) -> None:
        """Make room for this many rows, at least doubling the table so that it is copied only a few times."""
        had = len(self._table)
        if rows <= had:
            return
        table = self._table.new_empty((min(max(rows, 2 * had), self._most), self._table.shape[1]))
        table[:had] = self._table
        self._table = table
        self._free += range(had, len(table))


_MARK = int(MARK)


class Factors(NamedTuple):
    """The factors of a release's increment, in units of the grid.

    ``added[j]`` and ``removed[j]`` multiply the normals of the release j before this one.
    """

    added: NDArray[np.floating]
    removed: NDArray[np.floating] | None


def check_mechanism_on_device(mechanism: Mechanism) -> None:
    """Raise if a mechanism makes a release from more than a few releases' normals."""
    if _earlier_rows(mechanism, mechanism.num_releases) is None:
        raise ConfigurationError(
            "Expected a mechanism whose releases are made of the normals of a few (cancelling, decay, bisr, "
            f"independent) or none on a device, got {mechanism.name!r}: leave the device empty for it.",
            kind="conflict",
            setting="mechanism",
            got=mechanism.name,
        )


def _earlier_rows(mechanism: Mechanism, release: int) -> int | None:
    """Return how many earlier releases' normals a release's noise uses; None if it is not made of releases' normals."""
    if any(mechanism.draws(k) != 1 for k in (1, release)):
        return None
    kept = {"nothing": 0, "last": 1, "recent": mechanism.remembered}.get(mechanism.memory)
    return None if kept is None else min(kept, release - 1)


@lru_cache(maxsize=4096)
def factors_of(mechanism: Mechanism, release: int, scale: float) -> Factors:
    """Return the factors of release k, times ``scale``, by the mechanism's own increment of unit vectors."""
    size = (_earlier_rows(mechanism, release) or 0) + 1
    units = np.eye(size)

    def draw(releases: range) -> NDArray[np.floating]:
        return units[[release - j for j in releases]]

    state = mechanism.initial_state(size) if release == 1 else mechanism.state_after(release - 1, draw, scale)
    added, removed, _ = mechanism.increment(state, release, units[0], scale)
    if removed is not None and not mechanism.removes_last:
        added, removed = added - removed, None
    return Factors(np.array(added), None if removed is None else np.array(removed))


class DeviceNoise:
    """The noise of sessions of the clients of one policy, for simulations only.

    It depends neither on what ``rows`` keeps, nor on data, nor on which clients share a block.
    """

    def __init__(self, plan: NoisePlan, num_parameters: int, device: torch.device, rows: RowTable) -> None:
        self.plan = plan
        self.num_parameters = num_parameters
        self.device = device
        self._scale = float(plan.grid.factor(plan.noise_std))
        self._needed = _earlier_rows(plan.mechanism, plan.mechanism.num_releases) or 0
        self._rows = rows

    def add_to(
        self,
        counts: torch.Tensor,
        releases: Sequence[int],
        keys: Sequence[bytes],
        nonces: Sequence[bytes],
        earlier: Sequence[bytes],
    ) -> None:
        """Add the noise of each client's next release to its contribution: ``counts`` (clients, d) changes in place.

        ``earlier`` has the nonces of each client's earlier releases, the last one last, as far as the mechanism
        remembers them.
        """
        if self.plan.noise_std == 0.0:
            return
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for i, release in enumerate(releases):
            groups[release].append(i)
        for release, chosen in groups.items():
            names = [(keys[i], _lagged(nonces[i], earlier[i])) for i in chosen]
            noise = self._increment(release, names)
            if len(groups) == 1:
                counts += noise
            else:
                counts.index_add_(0, torch.tensor(chosen, device=self.device), noise)

    def _increment(self, release: int, names: Sequence[tuple[bytes, Sequence[bytes]]]) -> torch.Tensor:
        """Return what clients that make release k add, less what they remove, as counts."""
        mechanism = self.plan.mechanism
        factors = factors_of(mechanism, release, self._scale)
        self._check_room(factors)
        fresh = self._rows_of(names, 0)
        added = fresh.to(torch.float64).mul_(float(factors.added[0]))
        removed: torch.Tensor | None = None
        for lag in range(1, len(factors.added)):
            rows = self._rows_of(names, lag)
            if factors.removed is not None and factors.removed[lag]:
                removed = _plus(removed, rows, float(factors.removed[lag]))
            if factors.added[lag]:
                added = _plus(added, rows, float(factors.added[lag]))
            if lag == self._needed:  # used for the last time
                self._rows.forget([(key, lagged[lag]) for key, lagged in names])
        if self._needed and release < mechanism.num_releases:
            self._rows.keep([(key, lagged[0]) for key, lagged in names], fresh)
        counts = marked(added)
        # Removed counts take the mark with them.
        return counts.sub_(_MARK) if removed is None else counts.sub_(marked(removed))

    def _rows_of(self, names: Sequence[tuple[bytes, Sequence[bytes]]], lag: int) -> torch.Tensor:
        return self._rows.get([(key, lagged[lag]) for key, lagged in names], self._made)

    def _made(self, names: Sequence[Name]) -> torch.Tensor:
        keys = [row_key(*name) for name in names]
        return standard_normal_rows(keys, self.num_parameters, self.device)

    def _check_room(self, factors: Factors) -> None:
        """Raise if the noise does not fit the grid, as a single client does."""
        largest = sum(np.abs(part).sum() for part in factors if part is not None)
        self.plan.grid.rounded(np.empty(0), LARGEST_NORMAL * float(largest) * self.plan.grid.spacing)


def _lagged(nonce: bytes, earlier: bytes) -> list[bytes]:
    """Nonces of a release and of those before it, the latest first."""
    return [nonce, *(earlier[i - NONCE_BYTES : i] for i in range(len(earlier), 0, -NONCE_BYTES))]


def _plus(total: torch.Tensor | None, rows: torch.Tensor, factor: float) -> torch.Tensor:
    term = rows.to(torch.float64).mul_(factor)
    return term if total is None else total.add_(term)
