"""A secret order: which one of a session's releases each sample of a machine is in.

Each sample draws its release independently of all others and uniformly among the K that the cap allows, from a
keystream of the machine's secret key and a nonce. The nonce is drawn with a session's first release and recorded with
it, so the order is the same after a restart and is never used for another session. A sample's release depends on its
row's number alone, not on how many rows there are, nor on what is in them.

The nearest numbers of 53 bits are used: a release's chance differs from 1 / K by less than K 2^-53 of itself, which
the accountant's rounding covers (:data:`murmurfl.privacy.allocation.EPSILON_ROUNDING`).

Formal guarantees
-----------------
To anybody without the key an order is indistinguishable from independent uniform draws, as far as AES-256 in counter
mode and HMAC-SHA-256 are pseudorandom. A simulated machine's follows from the run's seed: whoever knows that knows it.
What an order that stays secret is worth: :mod:`murmurfl.privacy.allocation`. Proof: docs/proofs/secret-order.md.
"""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigurationError
from .noise import KEY_BYTES, NONCE_BYTES, keystream_words

_DISCARDED_BITS = np.uint64(11)


@lru_cache(maxsize=128)
def slots_of(secret_key: bytes, nonce: bytes, samples: int, slots: int) -> NDArray[np.int32]:
    """The release of each sample, counted from 1: a pure function of its arguments.

    Parameters
    ----------
    secret_key : bytes
        The machine's, 32 bytes.
    nonce : bytes
        Of the session's order, 16 bytes.
    samples : int
        Rows of the machine's data.
    slots : int
        K, the most releases of the session.

    Returns
    -------
    ndarray of shape (samples,), int32, read-only

    Raises
    ------
    ConfigurationError
        If the key or the nonce has the wrong length.

    Notes
    -----
    **Formal guarantees.** Those of the module.
    """
    if len(secret_key) != KEY_BYTES or len(nonce) != NONCE_BYTES:
        raise ConfigurationError(
            f"Expected a key of {KEY_BYTES} bytes and a nonce of {NONCE_BYTES}, got {len(secret_key)} and {len(nonce)}."
        )
    key = hmac.digest(secret_key, b"murmurfl secret order\x00" + nonce, hashlib.sha256)
    uniform = (keystream_words(key, samples) >> _DISCARDED_BITS).astype(np.float64) * 2.0**-53
    drawn = 1 + np.minimum((uniform * slots).astype(np.int32), np.int32(slots - 1))
    drawn.setflags(write=False)
    return drawn


def weights_of(secret_key: bytes, nonce: bytes, samples: int, slots: int, release: int) -> NDArray[np.float64]:
    """1 for the samples that are in a release, 0 for all others.

    Parameters
    ----------
    secret_key, nonce, samples, slots
        See :func:`slots_of`.
    release : int
        k, from 1.

    Notes
    -----
    **Formal guarantees.** Those of the module, as long as nobody learns how many there are.
    """
    return (slots_of(secret_key, nonce, samples, slots) == release).astype(np.float64)
