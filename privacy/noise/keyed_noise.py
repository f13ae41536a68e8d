"""Keyed Gaussian noise: a row of normals is a pure function of a secret key and a nonce.

Nothing here keeps a position in a stream. A row's cipher key is HMAC-SHA-256(secret key, nonce), so rows with different
nonces come from different keystreams and cannot overlap (a bare counter as the cipher's IV would give rows shifted by
a block), and a row is regenerated bit for bit whenever it is needed instead of being stored.

Two qualities (:mod:`.normals`):

``exact``
    Box-Muller in float64 from at least 75 random bits, 53 of them significant wherever the radius lies, meant to be
    rounded to a :class:`~murmurfl.privacy.noise.grid.Grid`. The only quality a real node accepts.
``fast``
    Box-Muller in float32 from 32-bit uniforms: simulation only. Its values have gaps an observer could use, about one
    pair in 2^25 is exactly zero, and none exceeds 6.8; statistically it is indistinguishable at the sizes we simulate.

Formal guarantees
-----------------
To anybody without the secret key, rows are indistinguishable from independent draws as far as AES-256 in counter mode
and HMAC-SHA-256 are pseudorandom. That ``exact`` normals are not ideal ones is charged by every policy, to delta for
their range and to mu for their resolution: :mod:`murmurfl.privacy.noise.normals` derives both. For ``fast`` no privacy
guarantee is claimed. Proof: docs/proofs/grid-and-noise.md.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, get_args

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from ..errors import ConfigurationError
from .normals import TAIL_WORDS, exact_pairs, fast_pairs

NoiseQuality = Literal["exact", "fast"]
NOISE_QUALITIES: tuple[NoiseQuality, ...] = get_args(NoiseQuality)

KEY_BYTES = 32
NONCE_BYTES = 16

# How many pairs of a long row, and how many normals of short rows, are computed at a time: so many that the work arrays
# stay in the second-level cache.
_BLOCK_PAIRS = 1 << 14
_NORMALS_TOGETHER = 1 << 16
_CIPHER_BLOCK_BYTES = 16
# The block of a row's keystream at which the words of the tail begin, and how many blocks each pair has there.
_TAIL_BLOCKS = 1 << 127
_BLOCKS_PER_TAIL = -(-8 * TAIL_WORDS // _CIPHER_BLOCK_BYTES)
_COUNTER_MODE = modes.CTR(bytes(16))
_ZEROS = memoryview(bytes(2 * _BLOCK_PAIRS * 8))


def row_key(secret_key: bytes, nonce: bytes) -> bytes:
    """The cipher key, 32 bytes, of one noise row: its nonce is never used for another row under this secret key."""
    if len(secret_key) != KEY_BYTES:
        raise ConfigurationError(f"Expected a secret key of {KEY_BYTES} bytes, got {len(secret_key)}.")
    if len(nonce) != NONCE_BYTES:
        raise ConfigurationError(f"Expected a nonce of {NONCE_BYTES} bytes, got {len(nonce)}.")
    return hmac.digest(secret_key, b"murmurfl noise row\x00" + nonce, hashlib.sha256)


def standard_normals(key: bytes, size: int, quality: NoiseQuality) -> NDArray[np.floating]:
    """A row of independent standard normals, a pure function: float64 for ``exact``, float32 for ``fast``.

    ``key`` is the row's cipher key, from :func:`row_key`, and used for this row only.

    Notes
    -----
    **Formal guarantees.** To anybody without the key, with ``exact``, the values are computationally like ideal normals
    once they are rounded to a grid. With ``fast`` nothing is claimed: simulation only.
    """
    return standard_normal_rows([key], size, quality)[0]


def standard_normal_rows(keys: Sequence[bytes], size: int, quality: NoiseQuality) -> NDArray[np.floating]:
    """The :func:`standard_normals` of several keys, shape (keys, size), with less overhead for short rows."""
    if size < 0:
        raise ConfigurationError(f"Expected size >= 0, got {size}.")
    if quality not in NOISE_QUALITIES:
        raise ConfigurationError(f"Expected noise quality one of {NOISE_QUALITIES}, got {quality!r}.")
    exact = quality == "exact"
    dtype, word = (np.dtype(np.float64), np.dtype("<u8")) if exact else (np.dtype(np.float32), np.dtype("<u4"))
    make: Callable[..., None] = exact_pairs if exact else fast_pairs
    encryptors = [_encryptor(key) for key in keys]
    pairs = (size + 1) // 2
    normals = np.empty((len(keys), 2 * pairs), dtype)
    for start in range(0, pairs, _BLOCK_PAIRS):
        count = min(_BLOCK_PAIRS, pairs - start)
        zeros = _ZEROS[: 2 * count * word.itemsize]
        # The library wants room for one block more than it writes: for the next row's block, and for one at the end.
        keystream = np.empty(len(keys) * len(zeros) + _CIPHER_BLOCK_BYTES, np.uint8)
        room = keystream.data
        for i, encryptor in enumerate(encryptors):
            encryptor.update_into(zeros, room[i * len(zeros) :])
        words = keystream[:-_CIPHER_BLOCK_BYTES].view(word).reshape(len(keys), 2 * count)
        cosines = normals[:, 2 * start : 2 * start + count]
        sines = normals[:, 2 * start + count : 2 * (start + count)]
        make(words[:, :count], words[:, count:], partial(_tail_of, keys, start), cosines, sines)
    return normals[:, :size]


def each_normal_row(keys: Sequence[bytes], size: int, quality: NoiseQuality) -> Iterator[NDArray[np.floating]]:
    """Rows of :func:`standard_normal_rows`, a few computed at a time: as many as stay in a processor's cache."""
    together = max(_NORMALS_TOGETHER // max(size, 1), 1)
    for start in range(0, len(keys), together):
        yield from standard_normal_rows(keys[start : start + together], size, quality)


def _encryptor(key: bytes, mode: modes.CTR = _COUNTER_MODE) -> CipherContext:
    return Cipher(algorithms.AES256(key), mode).encryptor()


def keystream_words(key: bytes, count: int) -> NDArray[np.uint64]:
    """Independent uniform words of 64 bits from a cipher key of 32 bytes that is used for nothing else.

    Notes
    -----
    **Formal guarantees.** To anybody without the key the words are like independent draws, as far as AES-256 in counter
    mode is pseudorandom. The first words are the same for any count.
    """
    return np.frombuffer(_encryptor(key).update(bytes(8 * count)), "<u8")


def _tail_words(key: bytes, pair: int) -> NDArray[np.uint64]:
    """More words for a pair far in the tail, from blocks of the same cipher that no row is long enough to reach."""
    counter = _TAIL_BLOCKS + _BLOCKS_PER_TAIL * pair
    stream = _encryptor(key, modes.CTR(counter.to_bytes(_CIPHER_BLOCK_BYTES, "big")))
    return np.frombuffer(stream.update(bytes(8 * TAIL_WORDS)), "<u8")


def _tail_of(keys: Sequence[bytes], first_pair: int, row: int, pair: int) -> NDArray[np.uint64]:
    return _tail_words(keys[row], first_pair + pair)
