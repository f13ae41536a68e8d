"""Which 32 bytes are a public key of Curve25519 that its owner alone can use, and in its one encoding.

Signatures of a point of small order can be made without any secret, and a seed that is sealed for one is sealed for
everybody. A second encoding of one key would pass for another key. Whoever makes keys by the usual means never meets
either; a card that somebody made up might.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

_PRIME = 2**255 - 19
_D = -121665 * pow(121666, -1, _PRIME) % _PRIME
_PROBE = X25519PrivateKey.from_private_bytes(bytes(range(32)))


def is_signing_point(public: bytes) -> bool:
    """Whether 32 bytes are a public Ed25519 key: a point of the curve, canonically written, not of small order.

    Notes
    -----
    Nobody can sign for such a key without its secret, as far as Ed25519 goes.
    """
    y = int.from_bytes(public, "little") & (2**255 - 1)  # the highest bit is x's sign
    if y >= _PRIME:
        return False
    square = y * y % _PRIME
    # x^2 = above / below is a square if above * below is one. Doubling a point of order 8 gives y = 0.
    above, below = square - 1, _D * square + 1
    small_order = y == 0 or square == 1 or (_D * square * square + 2 * square - 1) % _PRIME == 0
    return not small_order and pow(above * below, (_PRIME - 1) // 2, _PRIME) == 1


def is_sealing_point(public: bytes) -> bool:
    """Whether 32 bytes are a public X25519 key, canonically written, not of small order.

    Notes
    -----
    What is sealed for such a key is not sealed for everybody.
    """
    if int.from_bytes(public, "little") >= _PRIME:
        return False
    try:
        _PROBE.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # the shared secret would be zero, whoever asks
        return False
    return True
