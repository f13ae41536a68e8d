"""A secret order: which one of a session's releases each sample of a machine is in.

Each sample draws its release independently of all others and uniformly among the K that the cap allows, from a
keystream of the machine's secret key and a nonce; an owner from the same key and the digest of the owner's name. The
nonce is drawn with a session's first release and recorded with it, so the order is the same after a restart and is
never used for another session. A sample's release depends on its row's number alone, not on how many rows there are,
nor on what is in them; an owner's on the name alone.

The nearest numbers of 53 bits are used: a release's chance differs from 1 / K by less than K 2^-53 of itself, which
the accountant's rounding covers (:data:`murmurfl.privacy.accounting.allocation.EPSILON_ROUNDING`).

Formal guarantees
-----------------
To anybody without the key an order is indistinguishable from independent uniform draws, as far as AES-256 in counter
mode and HMAC-SHA-256 are pseudorandom. A simulated machine's follows from the run's seed: whoever knows that knows it.
What an order that stays secret is worth: :mod:`murmurfl.privacy.accounting.allocation`. Proof:
docs/proofs/secret-order.md.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from ..noise.keyed_noise import KEY_BYTES, NONCE_BYTES, keystream_words

_DISCARDED_BITS = np.uint64(11)


@lru_cache(maxsize=128)
def slots_of(secret_key: bytes, nonce: bytes, samples: int, slots: int) -> NDArray[np.int32]:
    """The release of each sample, from 1 to ``slots``, as a read-only int32 array: a pure function of its arguments."""
    drawn = _slots(keystream_words(_order_key(secret_key, nonce), samples), slots)
    drawn.setflags(write=False)
    return drawn


def _order_key(secret_key: bytes, nonce: bytes) -> bytes:
    if len(secret_key) != KEY_BYTES or len(nonce) != NONCE_BYTES:
        raise ConfigurationError(
            f"Expected a key of {KEY_BYTES} bytes and a nonce of {NONCE_BYTES}, got {len(secret_key)} and {len(nonce)}."
        )
    return hmac.digest(secret_key, b"murmurfl secret order\x00" + nonce, hashlib.sha256)


def _slots(words: NDArray[np.uint64], slots: int) -> NDArray[np.int32]:
    """A release for each word of 64 random bits, counted from 1."""
    uniform = (words >> _DISCARDED_BITS).astype(np.float64) * 2.0**-53
    return 1 + np.minimum((uniform * slots).astype(np.int32), np.int32(slots - 1))


def weights_of_owners(
    secret_key: bytes, nonce: bytes, marks: Sequence[bytes], slots: int, release: int
) -> NDArray[np.float64]:
    """Weight 1 for owners, by their marks, who are in a release and 0 for all others (:func:`weights_of`).

    Notes
    -----
    **Formal guarantees.** The order is that of the module, secret to all without the key. An owner's release stays the
    same when others come or go.
    """
    key = _order_key(secret_key, nonce)
    words = b"".join(hashlib.blake2b(mark, key=key, digest_size=8).digest() for mark in marks)
    return (_slots(np.frombuffer(words, "<u8"), slots) == release).astype(np.float64)


def weights_of(secret_key: bytes, nonce: bytes, samples: int, slots: int, release: int) -> NDArray[np.float64]:
    """Weight 1 for samples that are in a release, counted from 1, and 0 for all others.

    Notes
    -----
    **Formal guarantees.** The order is that of the module, secret to all without the key, as long as nobody learns how
    many there are.
    """
    return (slots_of(secret_key, nonce, samples, slots) == release).astype(np.float64)
