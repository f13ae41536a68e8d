"""Keyed Gaussian noise: a row of normals is a pure function of a secret key and a nonce.

Nothing here keeps a position in a stream. A row's cipher key is HMAC-SHA-256(secret key, nonce), so rows with different
nonces come from different keystreams and cannot overlap (a bare counter as the cipher's IV would give rows shifted by
a block), and a row is regenerated bit for bit whenever it is needed instead of being stored.

Two qualities:

``exact``
    Box-Muller in float64 from 53-bit uniforms, meant to be rounded to a :class:`~murmurfl.privacy.grid.Grid`. The only
    quality a real node accepts.
``fast``
    Box-Muller in float32 from 32-bit uniforms: simulation only. Its values have gaps an observer could use, about one
    pair in 2^25 is exactly zero, and none exceeds 6.8; statistically it is indistinguishable at the sizes we simulate.

Formal guarantees
-----------------
To anybody without the secret key, rows are indistinguishable from independent draws as far as AES-256 in counter mode
and HMAC-SHA-256 are pseudorandom. The normals themselves are Gaussian up to the resolution of the quality: for
``exact``, 2^-53 in probability and a cut at 8.6 standard deviations, which rounding to a grid of about 2^-20 standard
deviations hides; for ``fast`` no privacy guarantee is claimed.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from .errors import ConfigurationError

NoiseQuality = Literal["exact", "fast"]
NOISE_QUALITIES: tuple[NoiseQuality, ...] = get_args(NoiseQuality)

KEY_BYTES = 32
NONCE_BYTES = 16

LARGEST_NORMAL = 9.0
"""No normal of either quality is larger in magnitude."""

# Pairs of a row computed at a time, and normals of short rows: the work arrays stay in the second-level cache.
_BLOCK_PAIRS = 1 << 14
_NORMALS_TOGETHER = 1 << 15
_CIPHER_BLOCK_BYTES = 16
_COUNTER_MODE = modes.CTR(bytes(16))
_ZEROS = memoryview(bytes(2 * _BLOCK_PAIRS * 8))


def row_key(secret_key: bytes, nonce: bytes) -> bytes:
    """The cipher key of one noise row.

    Parameters
    ----------
    secret_key : bytes
        The machine's secret key, 32 bytes.
    nonce : bytes
        The nonce of the row, 16 bytes, never used for another row under this key.

    Returns
    -------
    bytes
        32 bytes.

    Raises
    ------
    ConfigurationError
        If either has the wrong length.
    """
    if len(secret_key) != KEY_BYTES:
        raise ConfigurationError(f"Expected a secret key of {KEY_BYTES} bytes, got {len(secret_key)}.")
    if len(nonce) != NONCE_BYTES:
        raise ConfigurationError(f"Expected a nonce of {NONCE_BYTES} bytes, got {len(nonce)}.")
    return hmac.digest(secret_key, b"murmurfl noise row\x00" + nonce, hashlib.sha256)


def standard_normals(key: bytes, size: int, quality: NoiseQuality) -> NDArray[np.floating]:
    """A row of independent standard normals, a pure function of its arguments.

    Parameters
    ----------
    key : bytes
        The row's cipher key, from :func:`row_key`; 32 bytes, used for this row only.
    size : int
        Number of values, >= 0.
    quality : {"exact", "fast"}
        See the module's description.

    Returns
    -------
    ndarray of shape (size,)
        float64 for ``exact``, float32 for ``fast``.

    Raises
    ------
    ConfigurationError
        If quality is unknown or size is negative.

    Notes
    -----
    **Formal guarantees.** Those of the module: with ``exact``, a computational stand-in for ideal normals to be rounded
    to a grid; with ``fast``, simulation only.
    """
    return standard_normal_rows([key], size, quality)[0]


def standard_normal_rows(keys: Sequence[bytes], size: int, quality: NoiseQuality) -> NDArray[np.floating]:
    """:func:`standard_normals` of several keys, one row a key: the same values, and less overhead for short rows.

    Parameters
    ----------
    keys : sequence of bytes
    size, quality
        See :func:`standard_normals`.

    Returns
    -------
    ndarray of shape (keys, size)

    Raises
    ------
    ConfigurationError
        As for :func:`standard_normals`.

    Notes
    -----
    **Formal guarantees.** Those of :func:`standard_normals`.
    """
    return _normals(_encryptors(keys), size, quality)


def each_normal_row(keys: Sequence[bytes], size: int, quality: NoiseQuality) -> Iterator[NDArray[np.floating]]:
    """:func:`standard_normal_rows` one row after the other, a few at a time: as many as stay in a processor's cache.

    Parameters
    ----------
    keys : sequence of bytes
    size, quality
        See :func:`standard_normals`.

    Yields
    ------
    ndarray of shape (size,)

    Raises
    ------
    ConfigurationError
        As for :func:`standard_normals`.

    Notes
    -----
    **Formal guarantees.** Those of :func:`standard_normals`.
    """
    encryptors, together = _encryptors(keys), max(_NORMALS_TOGETHER // max(size, 1), 1)
    for start in range(0, len(encryptors), together):
        yield from _normals(encryptors[start : start + together], size, quality)


def _encryptors(keys: Sequence[bytes]) -> list[CipherContext]:
    return [Cipher(algorithms.AES256(key), _COUNTER_MODE).encryptor() for key in keys]


def _normals(encryptors: Sequence[CipherContext], size: int, quality: NoiseQuality) -> NDArray[np.floating]:
    if size < 0:
        raise ConfigurationError(f"Expected size >= 0, got {size}.")
    if quality == "exact":
        dtype, word, shift, scale = np.dtype(np.float64), np.dtype("<u8"), 11, 2.0**-53
    elif quality == "fast":
        dtype, word, shift, scale = np.dtype(np.float32), np.dtype("<u4"), 0, 2.0**-32
    else:
        raise ConfigurationError(f"Expected noise quality one of {NOISE_QUALITIES}, got {quality!r}.")
    pairs = (size + 1) // 2
    normals = np.empty((len(encryptors), 2 * pairs), dtype)
    half, unit, minus_two = dtype.type(0.5), dtype.type(scale), dtype.type(-2.0)
    full_turn = dtype.type(2 * math.pi * scale)
    for start in range(0, pairs, _BLOCK_PAIRS):
        count = min(_BLOCK_PAIRS, pairs - start)
        zeros = _ZEROS[: 2 * count * word.itemsize]
        # The library wants room for a block more than it writes: the next row's, and a block at the end.
        keystream = np.empty(len(encryptors) * len(zeros) + _CIPHER_BLOCK_BYTES, np.uint8)
        room = keystream.data
        for i, encryptor in enumerate(encryptors):
            encryptor.update_into(zeros, room[i * len(zeros) :])
        words = keystream[:-_CIPHER_BLOCK_BYTES].view(word)
        if shift:
            words = words >> np.uint64(shift)
        words = words.reshape(len(encryptors), 2 * count)
        radius = words[:, :count].astype(dtype)
        radius += half
        radius *= unit
        np.log(radius, out=radius)
        radius *= minus_two
        np.sqrt(radius, out=radius)
        angle = words[:, count:].astype(dtype)
        angle *= full_turn
        cosines = normals[:, 2 * start : 2 * start + count]
        sines = normals[:, 2 * start + count : 2 * (start + count)]
        np.cos(angle, out=cosines)
        np.sin(angle, out=sines)
        cosines *= radius
        sines *= radius
    return normals[:, :size]
