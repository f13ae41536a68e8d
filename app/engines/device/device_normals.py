"""Keyed normals on a device: a row is a pure function of its key, with the same bits on every backend.

Words come from Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"): four
words of 32 bits as a pure function of a counter and a key. Its key and upper counter words are the first 160 bits of
the row's key; its lowest counter word numbers the blocks of a row. Words are kept in int64. A product of two of them
may wrap around, as integers do on every backend, and its upper half is still right; known answers check that before a
backend is used (:func:`check_known_answers`).

Two words make a pair of normals, R cos(theta) and R sin(theta) with R = sqrt(-2 ln U) (Box and Muller 1958), in
float32:

* U = w 2^-32 of the first word, so that no normal is larger than sqrt(66 ln 2) = 6.76 in magnitude, and about one pair
  in 2^25 is exactly zero.
* The logarithm, the sine and the cosine are polynomials with an error of a few units in the last place. They consist of
  sums, products, one quotient and one root, each of which IEEE 754 rounds in one way only. So a row has the same bits
  on every backend, alone or beside others: what is tested on a CPU is what a GPU draws.

The bits differ from those of :mod:`murmurfl.privacy.noise`; the law is that of its quality ``fast``. They
are for simulations only: Philox is no cipher, and the gaps of float32 tell neighbouring data sets apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ....privacy import ConfigurationError
from ....privacy.noise import KEY_BYTES

if TYPE_CHECKING:
    import torch

    Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
else:
    from .late_torch import torch


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


def philox_words(counter: Sequence[torch.Tensor], key: Sequence[torch.Tensor]) -> Words:
    """Four words for each counter under each key.

    Parameters
    ----------
    counter : four int64 tensors
        Words of the counters, from 0 to 2^32 - 1; their shapes broadcast with each other and with the key's.
    key : two int64 tensors
        Words of the keys.

    Returns
    -------
    tuple of four int64 tensors
        Words from 0 to 2^32 - 1, of the broadcast shape.
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
    """The upper word of a product, XORed with another word."""
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
            "wrap around as they must. Leave the device empty."
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
    """Rows of independent standard normals, each a pure function of its key and of ``size``.

    Parameters
    ----------
    keys : sequence of bytes
        One a row, from :func:`murmurfl.privacy.noise.row_key`; 32 bytes, each used for one row only.
    size : int
        Values of a row, from 0.
    blocks_together : int, optional
        Blocks of four normals computed at a time, which bounds the work memory and changes no bit. The default keeps a
        GPU busy, or fits a processor's cache.

    Raises
    ------
    ConfigurationError
        If a key has the wrong length, or a row would be longer than 2^34.
    """
    blocks = -(-size // _PER_BLOCK)
    if not 0 <= blocks < _MOST_BLOCKS:
        raise ConfigurationError(f"Expected size from 0 to {_PER_BLOCK * _MOST_BLOCKS - _PER_BLOCK}, got {size}.")
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
        raise ConfigurationError(f"Expected keys of {KEY_BYTES} bytes, got one of {len(wrong)}.")
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
    """The root, rounded as IEEE 754 says: float32's own is off by a unit in PyTorch on some processors.

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
