"""Philox4x32-10 in PyTorch's integers: four random words of 32 bits as a pure function of a counter and a key.

Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". A word is kept in an int64, so that
the product of two words of 32 bits fits; the upper half of a product that does not fit a signed integer comes out right
all the same, because integers wrap around on every backend. That a backend does all this is checked by its known
answers before it is used (:func:`check_known_answers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....privacy import ConfigurationError

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
"""Counter, key and words, as the authors published them with their library Random123."""


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
        Words from 0 to 2^32 - 1, of the shape that all broadcast to.
    """
    shape = torch.broadcast_shapes(*(one.shape for one in (*counter, *key)))
    first, second, third, fourth = counter
    key_0, key_1 = key
    for step in range(ROUNDS):
        if step:
            key_0, key_1 = (key_0 + _WEYL[0]) & WORD_MASK, (key_1 + _WEYL[1]) & WORD_MASK
        low, high = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        # What is above 32 bits of the other words goes with the mask; words that nobody has masked yet are products.
        first, third = _mixed(high, second ^ key_0, shape), _mixed(low, fourth ^ key_1, shape)
        second, fourth = high, low
    return first, second & WORD_MASK, third, fourth & WORD_MASK


def _mixed(product: torch.Tensor, other: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The upper word of a product, with another word added bit by bit."""
    upper = product >> WORD_BITS
    upper = upper.bitwise_xor_(other) if upper.shape == shape else upper ^ other
    return upper.bitwise_and_(WORD_MASK)


def check_known_answers(device: torch.device) -> None:
    """Refuse a backend that computes other words than those that were published.

    Raises
    ------
    ConfigurationError
    """
    counters = torch.tensor([counter for counter, _, _ in KNOWN_ANSWERS], dtype=torch.int64, device=device)
    keys = torch.tensor([key for _, key, _ in KNOWN_ANSWERS], dtype=torch.int64, device=device)
    expected = [list(words) for _, _, words in KNOWN_ANSWERS]
    got = torch.stack(philox_words(counters.unbind(1), keys.unbind(1)), dim=1).tolist()
    if got != expected:
        raise ConfigurationError(
            f"Expected the published words of Philox4x32-10 on device {str(device)!r}, got others: its integers do not "
            "wrap around as they must. Leave the device empty."
        )
