"""Noise keys of machines, and the nonces of their releases.

On a real node both come from the operating system and every release draws a fresh nonce: a ledger restored from an old
backup, or work repeated after a crash, then never meets the same noise with other data. In simulation both derive from
the run's seed, so that the same run gives the same model on every engine; such keys are for engines only.
"""

from __future__ import annotations

import hashlib
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

from ..errors import ConfigurationError
from .keyed_noise import KEY_BYTES, NONCE_BYTES


class NoiseKeys(ABC):
    """A secret key and a source of nonces.

    Notes
    -----
    **Formal guarantees.** A (key, nonce) pair names one noise row. The privacy of every mechanism rests on a pair never
    being used for two different releases and on the key never leaving the machine.
    """

    simulated: ClassVar[bool]
    secret_key: bytes
    """The 32-byte key, which never leaves the machine."""

    @abstractmethod
    def nonce(self, session: str, release: int) -> bytes:
        """The 16-byte nonce for a release about to be made."""


@dataclass(frozen=True)
class SystemKeys(NoiseKeys):
    """Keys for a real machine: the given secret of 32 bytes and a fresh random nonce at every call.

    The operator keeps the secret; :meth:`generate` makes one.

    Notes
    -----
    **Formal guarantees.** No two releases share a (key, nonce) pair, but with the probability that two of the operating
    system's 16-byte values are equal. The key must never leave the machine.
    """

    secret_key: bytes = field(repr=False)
    simulated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if len(self.secret_key) != KEY_BYTES:
            raise ConfigurationError(f"Expected a secret key of {KEY_BYTES} bytes, got {len(self.secret_key)}.")

    @classmethod
    def generate(cls) -> SystemKeys:
        """A new key from the operating system."""
        return cls(secrets.token_bytes(KEY_BYTES))

    def nonce(self, session: str, release: int) -> bytes:
        return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True)
class SimulatedKeys(NoiseKeys):
    """Seeded keys of a simulated machine: reproducible, and therefore no protection against anybody who knows the seed.

    Notes
    -----
    **Formal guarantees.** Every machine, session and release has a pair of its own. Whoever knows the seed can take the
    noise out again, so a guarantee made with these keys is what real ones would give.
    """

    seed: int
    machine: str
    secret_key: bytes = field(init=False, repr=False)
    simulated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "secret_key", _digest(KEY_BYTES, "key", self.seed, self.machine))

    def nonce(self, session: str, release: int) -> bytes:
        return _simulated_nonce(session, release)


@lru_cache(maxsize=1024)
def _simulated_nonce(session: str, release: int) -> bytes:
    return _digest(NONCE_BYTES, "nonce", session, release)  # the same for all machines: their keys differ


def _digest(size: int, *parts: object) -> bytes:
    text = "\x00".join(f"{len(str(part))}:{part}" for part in parts)
    return hashlib.blake2b(text.encode(), digest_size=size, person=b"murmurfl").digest()


def derived_bytes(size: int, *parts: object) -> bytes:
    """At most 64 bytes from any printable parts, for the keys of a simulation: whoever knows the parts knows them."""
    return _digest(size, "derived", *parts)


def derived_seed(*parts: object) -> int:
    """A 128-bit integer from any printable parts, to seed a NumPy bit generator for a public, noise-free purpose.

    Sampling of machines, partitions and simulated losses use it; noise never does.
    """
    return int.from_bytes(_digest(16, "public", *parts), "little")
