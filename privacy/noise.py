r"""Keyed Gaussian noise on a grid: a row of normals is a pure function of a secret key and a nonce.

Nothing here keeps a position in a stream. A row's cipher key is HMAC-SHA-256(secret key, nonce), so rows with different
nonces come from different keystreams and cannot overlap (a bare counter as the cipher's IV would give rows shifted by
a block), and a row is regenerated bit for bit whenever it is needed instead of being stored.

Two qualities:

``exact``
    Box-Muller in float64 from at least 75 random bits, 53 of them significant wherever the radius lies, meant to be
    rounded to a :class:`Grid`. The only quality a real node accepts.
``fast``
    Box-Muller in float32 from 32-bit uniforms: simulation only. Its values have gaps an observer could use, about one
    pair in 2^25 is exactly zero, and none exceeds 6.8; statistically it is indistinguishable at the sizes we simulate.

On a real node key and nonces come from the operating system and every release draws a fresh nonce: a ledger restored
from an old backup, or work repeated after a crash, then never meets the same noise with other data. In simulation both
derive from the run's seed, so that the same run gives the same model on every engine; such keys are for engines only.

Normals from random words
-------------------------
A pair of normals is R cos(theta), R sin(theta) with R = sqrt(-2 ln U) (Box and Muller 1958). Whoever sees both halves
of a pair, rounded to the grid gamma, sees R to within a few gamma. With U a multiple of 2^-53, as version 1 had it, R
lies on one of 2^53 circles, which in the tail are further apart than gamma. A pair that lies on none of the circles a
data set allows refutes that data set with certainty. So here U has at least 53 significant bits *wherever it is*, in
the tail and near one:

* U = (w + f) 2^-64 with w a random word of 64 bits. Where w < 2^53, once in 2^11 pairs, f takes the 11 bits that the
  angle leaves over.
* Where also w < 2^42, once in 2^22 pairs, f goes on with 192 bits of a keystream that only such pairs draw from.
* Where w >= 2^64 - 2^53 the logarithm is taken of 1 - U, as ``log1p``: near R = 0 the circles stay as close.

The largest R is therefore sqrt(2 x 268 ln 2) = 19.27; an event of probability 2^-267 is what is missing beyond it.

What is charged (``exact`` noise)
---------------------------------
Let N be the number of values of all releases of a session, g = gamma / std the grid in standard deviations of the noise
on one value, and s the most standard deviations by which one sample moves one value.

1. *Range.* No pair is further from zero than R_max = 19.27, so values that lie further from what the other data set
   would have given refute it. It takes a pair beyond R_max - s, which has probability exp(-(R_max - s)^2 / 2); one
   sample can move at most (mu / s)^2 values by s, for these moves add up to mu in squares (a chord bounds what smaller
   moves add, but for the N e exp(-R_max^2 / 2) of those that hardly move). What has no :func:`range_problem` holds all
   of it, and the missing tail N 2^-267, below 2^-20 delta. It is what is charged to delta. A policy that needs more is
   refused by a real client, with the largest mu that can be served; in simulation its mu is infinite. Of sums of
   several clients' noise: :func:`summed_range_problem`.
2. *Resolution.* A normal is a float64, so of the 2^52 / |x| or more floats that fall into a cell of the grid at x, one
   at either end may fall on the wrong side: in units of a cell, 2 x 2^-53 |x| / g of its probability. The circles and
   angles are no coarser than that (they are points of a plane, closer in each direction). The observer knows which
   cells have too many, so under either data set a value gives it a log-likelihood of standard deviation at most
   2 x 2^-53 |x| / g, 2^-51 / g for the difference of the two with E x^2 = 1. (x and g are in units of the noise on that
   value: the larger its noise, the larger the hint.) N values are N independent such hints, as
   much as a Gaussian mechanism of mu_n = 2^-51 sqrt(N) / g tells. It composes with the noise itself, so ideal noise is
   calibrated to mu_i with mu_i^2 + mu_n^2 = mu^2 (:func:`ideal_mu`). A policy for which there is no such mu_i is
   refused. gamma is never below 2^-25 std (:data:`FINEST_GRID`): beyond it mu_n costs more than rounding saves.
3. *Randomness.* AES-256 in counter mode and HMAC-SHA-256 are assumed pseudorandom.

Step 2 bounds the size of the hints by counting floats; that the errors of ``log``, ``cos`` and ``sin``, a unit in the
last place each, have no coarser pattern of their own is an assumption about the mathematical library. The tests try to
break it (tests/privacy/test_noise.py): the observer of both halves, in the tail, near zero and in between, and
the low bits of counts. Proof: docs/proofs/grid-and-noise.md.

The grid
--------
Floating-point noise added to a floating-point value leaks: the gaps between representable numbers depend on the value
(Mironov 2012). So contributions and noise are each rounded to multiples of one public spacing ``gamma``, a power of
two, and everything after that is exact integer arithmetic: sums do not depend on their order, noise cancels to the last
bit, and the difference of two private prefixes is exact.

Formal guarantees
-----------------
To anybody without the secret key, rows are indistinguishable from independent draws as far as AES-256 in counter mode
and HMAC-SHA-256 are pseudorandom. That ``exact`` normals are not ideal ones is charged by every policy, to delta for
their range and to mu for their resolution, as derived above. For ``fast`` no privacy guarantee is claimed.

round(x) + round(noise) = round(x' + noise) for x' on the grid: a release on the grid is a function of the real-valued
Gaussian mechanism applied to the rounded contributions. Rounding moves every coordinate of a contribution by at most
gamma / 2, so replacing one sample changes a rounded sum by at most Delta + gamma sqrt(d), which is what is charged.
Proof: docs/proofs/grid-and-noise.md.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from .accounting.gdp import gdp_epsilon, gdp_mu
from .errors import ConfigurationError

KEY_BYTES = 32
NONCE_BYTES = 16
TAIL_WORDS = 3
"""Words of 64 bits that a pair far in the tail draws in addition."""


class NoiseKeys(ABC):
    """A secret key and a source of nonces.

    Notes
    -----
    **Formal guarantees.** A (key, nonce) pair names one noise row. The privacy of every mechanism rests on a pair never
    being used for two different releases and on the key never leaving the client.

    Examples
    --------
    >>> from murmurfl.privacy import SimulatedKeys, SystemKeys
    >>> keys = SystemKeys.generate()
    >>> keys.simulated, len(keys.nonce("session", 1)), keys.nonce("session", 1) != keys.nonce("session", 1)
    (False, 16, True)
    >>> SimulatedKeys(seed=1, client="3").simulated
    True
    """

    simulated: ClassVar[bool]
    secret_key: bytes
    """The 32-byte key, which never leaves the client."""

    @abstractmethod
    def nonce(self, session: str, release: int) -> bytes:
        """Return the 16-byte nonce for a release about to be made."""


@dataclass(frozen=True)
class SystemKeys(NoiseKeys):
    """Keys for a real client: the given secret of 32 bytes and a fresh random nonce at every call.

    The operator keeps the secret; :meth:`generate` makes one.

    Notes
    -----
    **Formal guarantees.** No two releases share a (key, nonce) pair, but with the probability that two of the operating
    system's 16-byte values are equal. The key must never leave the client.

    Examples
    --------
    >>> keys = SystemKeys.generate()
    >>> len(keys.secret_key), keys.nonce("session", 1) != keys.nonce("session", 1)
    (32, True)
    """

    secret_key: bytes = field(repr=False)
    simulated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if len(self.secret_key) != KEY_BYTES:
            raise ConfigurationError(
                f"Expected a secret key of {KEY_BYTES} bytes, got {len(self.secret_key)}.",
                kind="wrong-shape",
                setting="secret_key",
            )

    @classmethod
    def generate(cls) -> SystemKeys:
        """Return a new key from the operating system."""
        return cls(secrets.token_bytes(KEY_BYTES))

    def nonce(self, session: str, release: int) -> bytes:
        return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True)
class SimulatedKeys(NoiseKeys):
    """Seeded keys of a simulated client: reproducible, and therefore no protection against anybody who knows the seed.

    Notes
    -----
    **Formal guarantees.** Every client, session and release has a pair of its own. Whoever knows the seed can take the
    noise out again, so a guarantee made with these keys is what real ones would give.

    Examples
    --------
    >>> keys = SimulatedKeys(seed=1, client="3")
    >>> keys == SimulatedKeys(seed=1, client="3")
    True
    """

    seed: int
    client: str
    secret_key: bytes = field(init=False, repr=False)
    simulated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "secret_key", _digest(KEY_BYTES, "key", self.seed, self.client))

    def nonce(self, session: str, release: int) -> bytes:
        return _simulated_nonce(session, release)


@lru_cache(maxsize=1024)
def _simulated_nonce(session: str, release: int) -> bytes:
    return _digest(NONCE_BYTES, "nonce", session, release)  # the same for all clients: their keys differ


def _digest(size: int, *parts: object) -> bytes:
    text = "\x00".join(f"{len(str(part))}:{part}" for part in parts)
    return hashlib.blake2b(text.encode(), digest_size=size, person=b"murmurfl").digest()


def derived_bytes(size: int, *parts: object) -> bytes:
    """Return at most 64 bytes from any printable parts, for keys of simulations: whoever knows the parts knows them."""
    return _digest(size, "derived", *parts)


def derived_seed(*parts: object) -> int:
    """Return a 128-bit integer from printable parts, to seed a NumPy bit generator for a public, noise-free purpose.

    Sampling of clients, partitions and simulated losses use it; noise never does.

    Examples
    --------
    >>> derived_seed("partition", 1) == derived_seed("partition", 1) != derived_seed("partition", 2)
    True
    """
    return int.from_bytes(_digest(16, "public", *parts), "little")


NoiseQuality = Literal["exact", "fast"]
NOISE_QUALITIES: tuple[NoiseQuality, ...] = get_args(NoiseQuality)


# How many pairs of a long row, and how many normals of short rows, are computed at a time: so many that the work arrays
# stay in the second-level cache.
_BLOCK_PAIRS = 1 << 14
_NORMALS_TOGETHER = 1 << 16
_NORMALS_OF_A_PIECE = 1 << 18  # of rows, where a call costs more than memory further away
_CIPHER_BLOCK_BYTES = 16
# The block of a row's keystream at which the words of the tail begin, and how many blocks each pair has there.
_TAIL_BLOCKS = 1 << 127
_BLOCKS_PER_TAIL = -(-8 * TAIL_WORDS // _CIPHER_BLOCK_BYTES)
_COUNTER_MODE = modes.CTR(bytes(16))
_ZEROS = memoryview(bytes(2 * _BLOCK_PAIRS * 8))


def row_key(secret_key: bytes, nonce: bytes) -> bytes:
    """Return the cipher key, 32 bytes, of one noise row.

    Its nonce is never used for another row under this secret key.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import standard_normals
    >>> key = row_key(secret_key=bytes(32), nonce=bytes(16))
    >>> np.array_equal(standard_normals(key, 3, quality="exact"), standard_normals(key, 3, quality="exact"))
    True
    """
    if len(secret_key) != KEY_BYTES:
        raise ConfigurationError(
            f"Expected a secret key of {KEY_BYTES} bytes, got {len(secret_key)}.",
            kind="wrong-shape",
            setting="secret_key",
        )
    if len(nonce) != NONCE_BYTES:
        raise ConfigurationError(
            f"Expected a nonce of {NONCE_BYTES} bytes, got {len(nonce)}.", kind="wrong-shape", setting="nonce"
        )
    return hmac.digest(secret_key, b"murmurfl noise row\x00" + nonce, hashlib.sha256)


def standard_normals(key: bytes, size: int, quality: NoiseQuality) -> NDArray[np.floating]:
    """Return a row of independent standard normals, a pure function: float64 for ``exact``, float32 for ``fast``.

    ``key`` is the row's cipher key, from :func:`row_key`, and used for this row only.

    Notes
    -----
    **Formal guarantees.** To anybody without the key, with ``exact``, the values are computationally like ideal normals
    once they are rounded to a grid. With ``fast`` nothing is claimed: simulation only.

    Examples
    --------
    >>> standard_normals(bytes(32), size=3, quality="exact").shape
    (3,)
    """
    return standard_normal_rows([key], size, quality)[0]


def standard_normal_rows(keys: Sequence[bytes], size: int, quality: NoiseQuality) -> NDArray[np.floating]:
    """Return the :func:`standard_normals` of several keys, shape (keys, size), with less overhead for short rows."""
    if size < 0:
        raise ConfigurationError(f"Expected size >= 0, got {size}.", kind="out-of-range", setting="size", got=size)
    if quality not in NOISE_QUALITIES:
        raise ConfigurationError(
            f"Expected noise quality one of {NOISE_QUALITIES}, got {quality!r}.",
            kind="unknown-name",
            setting="quality",
            got=quality,
        )
    normals = np.empty((len(keys), size + size % 2), _DTYPES[quality])
    rows = _Rows(keys, quality)
    for start in range(0, size, 2 * _BLOCK_PAIRS):
        rows.draw(normals[:, start : start + 2 * _BLOCK_PAIRS])
    return normals[:, :size]


def each_normal_row(keys: Sequence[bytes], size: int, quality: NoiseQuality) -> Iterator[NDArray[np.floating]]:
    """Rows of :func:`standard_normal_rows`, a few computed at a time: as many as stay in a processor's cache."""
    together = max(_NORMALS_TOGETHER // max(size, 1), 1)
    for start in range(0, len(keys), together):
        yield from standard_normal_rows(keys[start : start + together], size, quality)


class NormalPiece(NamedTuple):
    """Some columns of some of the rows of :func:`standard_normal_rows`."""

    rows: slice
    columns: slice
    normals: NDArray[np.floating]
    """Shape (rows, columns), or one column more where their number is odd; the next piece overwrites this memory."""


def normal_pieces(
    keys: Sequence[bytes], size: int, quality: NoiseQuality, pairs: WordPairs | None = None
) -> Iterator[NormalPiece]:
    """Yield the values of :func:`standard_normal_rows` in pieces that stay in a processor's cache.

    All columns of some rows come before the next rows. ``pairs`` makes the values of ``fast`` quality that
    :func:`fast_pairs` would make; ``exact`` ones are always made here.
    """
    together, width = max(_NORMALS_OF_A_PIECE // max(size, 1), 1), 2 * _BLOCK_PAIRS
    if together < len(keys) <= 2 * together and size <= width:
        together = len(keys)  # rather than two pieces
    room = np.empty(min(together, len(keys)) * min(size + size % 2, width), _DTYPES[quality])
    for first in range(0, len(keys), together):
        chosen = slice(first, min(first + together, len(keys)))
        count, rows = chosen.stop - first, _Rows(keys[chosen], quality, pairs)
        for start in range(0, size, width):
            columns = slice(start, min(start + width, size))
            values = columns.stop - start + columns.stop % 2
            normals = room[: count * values].reshape(count, values)
            rows.draw(normals)
            yield NormalPiece(chosen, columns, normals)


WordPairs = Callable[[NDArray[np.uint32], NDArray[np.float32]], None]
"""Writes the normals that words of 32 bits become, given both, contiguous and of shape (rows, 2 pairs).

Radius words come before angle words, and cosines before sines.
"""

_DTYPES: dict[NoiseQuality, type[np.floating]] = {"exact": np.float64, "fast": np.float32}


class _Rows:
    """The rows of some keys, drawn from their beginning, so many values at a time."""

    def __init__(self, keys: Sequence[bytes], quality: NoiseQuality, pairs: WordPairs | None = None) -> None:
        self._keys, self._start = keys, 0
        self._word, self._make = _WORDS[quality]
        self._pairs = pairs if quality == "fast" else None
        self._encryptors = list(_encryptors(keys))

    def draw(self, normals: NDArray[np.floating]) -> None:
        """Write the next values of every row, the cosines of pairs before their sines; at most a block of pairs."""
        count = normals.shape[1] // 2
        zeros = _ZEROS[: 2 * count * self._word.itemsize]
        # The library wants room for one block more than it writes: for the next row's block, and for one at the end.
        keystream = _room("keystream", np.uint8, len(self._keys) * len(zeros) + _CIPHER_BLOCK_BYTES)
        room = keystream.data
        for i, encryptor in enumerate(self._encryptors):
            encryptor.update_into(zeros, room[i * len(zeros) :])
        words = keystream[:-_CIPHER_BLOCK_BYTES].view(self._word).reshape(len(self._keys), 2 * count)
        if self._pairs is not None:
            self._pairs(words, normals)
        else:
            tail = partial(_tail_of, self._keys, self._start)
            self._make(words[:, :count], words[:, count:], tail, normals[:, :count], normals[:, count:])
        self._start += count


def _encryptor(key: bytes, mode: modes.CTR = _COUNTER_MODE) -> CipherContext:
    return Cipher(algorithms.AES256(key), mode).encryptor()


def _encryptors(keys: Sequence[bytes]) -> Iterator[CipherContext]:
    """Yield the :func:`_encryptor` of each key; what the library checks of a mode is checked once where it can be."""
    if not _takes_another_key():
        yield from map(_encryptor, keys)
        return
    cipher = Cipher(algorithms.AES256(bytes(KEY_BYTES)), _COUNTER_MODE)
    for key in keys:
        cipher.algorithm = algorithms.AES256(key)
        yield cipher.encryptor()


@cache
def _takes_another_key() -> bool:
    """Return True if the installed library's ciphers use the key that they were given last, as all known ones do.

    It is not documented, and noise under the wrong key would be known to everybody.
    """
    first, second = bytes(KEY_BYTES), bytes(range(KEY_BYTES))
    try:
        cipher = Cipher(algorithms.AES256(first), _COUNTER_MODE)
        cipher.algorithm = algorithms.AES256(second)
        found = cipher.encryptor().update(first)
    except (AttributeError, TypeError):
        return False
    return found == _encryptor(second).update(first)


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


NOISE_VERSION = 2
"""The version of the map from key and nonce to normals: a stream goes on only under the version it was begun with.
Version 1 had 53-bit radii."""


_RADIUS_BITS = 64 + 11 + 64 * TAIL_WORDS
LARGEST_RADIUS = math.sqrt(2.0 * (_RADIUS_BITS + 1) * math.log(2.0))
"""R_max: no normal of either quality is larger in magnitude, but for rounding."""

LARGEST_NORMAL = 20.0
"""A bound on the magnitude of a normal, rounding included."""

FINEST_GRID = 2.0**-25
"""The finest spacing, in standard deviations of the noise, to which normals are rounded."""

_MISSED = 2.0**-20  # the share of delta that may be charged for the range
_RESOLUTION = 2.0**-51

_MOST_KEPT_BYTES = 1 << 21

Words = NDArray[np.uint64]
Tail = Callable[[int, int], NDArray[np.uint64]]
"""Given a row and a pair of it, TAIL_WORDS words of its own keystream."""

# w < 2^53 or w >= 2^64 - 2^53: adding 2^53 modulo 2^64 brings both below 2^54.
_EDGE, _BOTH_EDGES = np.uint64(1 << 53), np.uint64(1 << 54)
_DEEP = np.uint64(1 << 42)
_LEFT_OVER = np.uint64((1 << 11) - 1)
_ANGLE_SHIFT = np.uint64(11)
_TURN = 2.0 * math.pi * 2.0**-53


def exact_pairs(
    radius_words: Words, angle_words: Words, tail: Tail, cosines: NDArray[np.float64], sines: NDArray[np.float64]
) -> None:
    """Pairs of float64 normals from two independent uniform words each, shape (rows, pairs): a pure function.

    The two halves are written to ``cosines`` and ``sines``. ``tail`` is called for pairs with a radius word below 2^42.
    Alone they are floats, whose gaps show what they were added to: round them to a grid.
    """
    logs = radius_words.astype(np.float64)
    logs += 0.5
    logs *= 2.0**-64
    np.log(logs, out=logs)
    edge = np.flatnonzero((radius_words + _EDGE < _BOTH_EDGES).ravel())
    if edge.size:
        logs.reshape(-1)[edge] = _edge_logs(radius_words, angle_words, tail, edge)
    logs *= -2.0
    radius = np.sqrt(logs, out=logs)
    angle = (angle_words >> _ANGLE_SHIFT).astype(np.float64)
    angle *= _TURN
    np.cos(angle, out=cosines)
    np.sin(angle, out=sines)
    cosines *= radius
    sines *= radius


def _edge_logs(radius_words: Words, angle_words: Words, tail: Tail, edge: NDArray[np.intp]) -> NDArray[np.float64]:
    """Ln U where U is close to 0 or to 1, at the flat positions ``edge``."""
    pairs = radius_words.shape[1]
    words, left_over = radius_words.reshape(-1)[edge], angle_words.reshape(-1)[edge] & _LEFT_OVER
    below = np.full(edge.shape, 0.5)  # what is below the 75 bits, as a share of the last of them
    for i in np.flatnonzero(words < _DEEP):
        row, pair = divmod(int(edge[i]), pairs)
        below[i] = _fraction(tail(row, pair))
    share = (left_over.astype(np.float64) + below) * 2.0**-11
    small = words < _EDGE
    up = (words.astype(np.float64) + share) * 2.0**-64
    # 1 - U counts from the other end: 2^64 - 1 - w whole steps, and the rest of this one. No 1 is subtracted from.
    down = ((~words).astype(np.float64) + (1.0 - share)) * 2.0**-64
    return np.where(small, np.log(up), np.log1p(-np.where(small, 0.0, down)))


def _fraction(words: NDArray[np.uint64]) -> float:
    """Return a number between 0 and 1 from words, the first the most significant; 53 bits of it however small it is."""
    value = 0.5
    for word in words[::-1].tolist():
        value = (float(word) + value) * 2.0**-64
    return value


def fast_pairs(
    radius_words: NDArray[np.uint32],
    angle_words: NDArray[np.uint32],
    tail: Tail,  # noqa: ARG001 - there is none: as exact_pairs
    cosines: NDArray[np.float32],
    sines: NDArray[np.float32],
) -> None:
    """Pairs of float32 normals from two words of 32 bits each: for simulation.

    Their gaps tell neighbouring data sets apart.
    """
    unit = np.float32(2.0**-32)
    # The same memory again and again: fresh memory takes longer to get than to fill.
    radius, angle = _room("work", np.float32, 2 * radius_words.size).reshape(2, *radius_words.shape)
    np.copyto(radius, radius_words, casting="unsafe")  # to the nearest float32, as astype
    radius += np.float32(0.5)
    radius *= unit
    np.log(radius, out=radius)
    radius *= np.float32(-2.0)
    np.sqrt(radius, out=radius)
    np.copyto(angle, angle_words, casting="unsafe")
    angle *= np.float32(2 * math.pi * 2.0**-32)
    np.cos(angle, out=cosines)
    np.sin(angle, out=sines)
    cosines *= radius
    sines *= radius


_WORDS: dict[NoiseQuality, tuple[np.dtype[np.unsignedinteger], Callable[..., None]]] = {
    "exact": (np.dtype("<u8"), exact_pairs),
    "fast": (np.dtype("<u4"), fast_pairs),
}
_kept = threading.local()


def _room(name: str, dtype: type[np.generic], size: int) -> NDArray[Any]:
    """Return memory of this thread, which the next call with this name returns again."""
    room = getattr(_kept, name, None)
    if room is None or room.size < size:
        room = np.empty(size, dtype)
        if room.nbytes <= _MOST_KEPT_BYTES:
            setattr(_kept, name, room)
    return room[:size]


def resolution_mu(num_values: int, grid_per_std: float) -> float:
    """Return the mu_n of the module: what the resolution of float64 normals tells about N values rounded to a grid.

    ``grid_per_std`` is g; where the noise differs between values, the root mean square of it, for hints add up in
    squares.

    Notes
    -----
    **Formal guarantees.** Step 2 of the module, with the assumption named there.

    Examples
    --------
    >>> resolution_mu(7850 * 600, 2.0**-21) < 1e-5
    True
    """
    return _RESOLUTION * math.sqrt(num_values) / grid_per_std if grid_per_std > 0 else math.inf


def ideal_mu(mu: float, num_values: int, grid_per_std: float) -> float:
    """Return the mu to which ideal noise is calibrated, so that with these normals it is ``mu``; NaN if there is none.

    It is the larger root mu_i of mu_i^2 + (mu_n mu / mu_i)^2 = mu^2, with g = ``grid_per_std`` at noise calibrated to
    ``mu`` itself: noise for a smaller mu is larger, and its g smaller.

    Notes
    -----
    **Formal guarantees.** Step 2 of the module: mu_i-GDP under ideal normals is mu-GDP under these.
    Proof: docs/proofs/grid-and-noise.md.

    Examples
    --------
    >>> round(ideal_mu(1.0, 7850 * 600, 2.0**-21), 9)
    1.0
    """
    share = resolution_mu(num_values, grid_per_std) / mu
    if not share <= 0.5:
        return math.nan
    return mu * math.sqrt((1.0 + math.sqrt(1.0 - 4.0 * share * share)) / 2.0)


def largest_shift(delta: float, spread: float = 1.0) -> float:
    """Return the most standard deviations by which one sample may move one value.

    ``spread`` is how many values it may move so far, (mu / s)^2; at least 1.

    Notes
    -----
    **Formal guarantees.** Step 1 of the module: up to it, the range costs less than 2^-20 delta.
    """
    return LARGEST_RADIUS - math.sqrt(2.0 * math.log(2.0 * max(spread, 1.0) / (delta * _MISSED)))


def range_problem(shift: float, num_values: int, delta: float, mu: float, name: str = "mu") -> str:
    """Return why the range of the noise cannot serve a policy, with the mu that it could serve; empty if it can.

    ``shift`` is s, ``num_values`` is N of all releases together, ``name`` what the text calls mu. What has no problem
    costs less than 2^-20 delta (step 1 of the module).
    """
    missing = _missing(num_values)
    if missing > delta * _MISSED / 2.0:
        return _too_many(num_values, delta, 2.0 * missing)
    most = largest_shift(delta, (mu / shift) ** 2)
    if shift > most:
        return (
            f"Expected {name} <= {mu * most / shift * (1 - 1e-3):.3g} at delta = {delta:g} with this clip, cap and "
            f"mechanism, got {mu:g}: exact noise ends at {LARGEST_RADIUS:.1f} standard deviations, and one sample may "
            f"move a value by {shift:.3g} of them. Lower mu; to see what noise costs use mechanism 'none', in "
            "simulation only."
        )
    return ""


def summed_range_problem(num_values: int, delta: float, mu: float) -> str:
    """Return why the range of several clients' summed noise cannot serve a policy; empty if it can.

    Where the range of a sum ends nobody has worked out. So all its normals count as ideal ones: what they miss of those
    may be there under one data set and not under the other, which costs delta once, and exp(epsilon) times once more.
    What has no problem costs less than 2^-20 delta. ``num_values`` is N of all releases of all clients together.
    """
    missing, room = _missing(num_values), delta * _MISSED
    if 2.0 * missing > room:
        return _too_many(num_values, delta, 2.0 * missing)
    allowed = math.log(room / missing - 1.0)  # 1 + exp(epsilon) = room / missing
    if gdp_epsilon(mu, delta) > allowed:
        return (
            f"Expected mu <= {gdp_mu(allowed, delta) * (1 - 1e-3):.3g} at delta = {delta:g} for sums of {num_values:,} "
            f"values of noise, got {mu:g}: exact noise ends at {LARGEST_RADIUS:.1f} standard deviations, and what is "
            "missing beyond is charged to delta. Lower mu; to see what noise costs use mechanism 'none', in simulation "
            "only."
        )
    return ""


def _missing(num_values: int) -> float:
    """Return a bound on the probability that any of N normals would have been beyond the range."""
    return num_values * (2.0**-_RADIUS_BITS + math.exp(1.0 - LARGEST_RADIUS**2 / 2.0))


def _too_many(num_values: int, delta: float, missing: float) -> str:
    return (
        f"Expected delta >= {1.01 * missing / _MISSED:.3g} for {num_values:,} values of noise, got {delta:g}: the "
        "noise cannot be vouched for beyond that."
    )


# Rounded values stay below this. A sum may be four times as large and is still exact in float64, the type in which a
# release is sent.
_LARGEST_COUNT = 2.0**51
ROUNDER = np.float64(1.5 * 2.0**52)
MARK = ROUNDER.view(np.int64)
"""Marked counts are too large by this much (:meth:`Grid.marked`)."""


@dataclass(frozen=True)
class Grid:
    """The multiples of ``spacing``, gamma, a positive power of two.

    Examples
    --------
    >>> import numpy as np
    >>> Grid(spacing=0.25)
    Grid(spacing=0.25)
    """

    spacing: float

    def __post_init__(self) -> None:
        if not (self.spacing > 0 and math.isfinite(self.spacing) and math.frexp(self.spacing)[0] == 0.5):
            raise ConfigurationError(
                f"Expected a grid spacing that is a positive power of two, got {self.spacing!r}.",
                kind="out-of-range",
                setting="spacing",
                got=self.spacing,
            )

    def counts(
        self, values: NDArray[np.floating], *, scale: float = 1.0, bound: float | None = None
    ) -> NDArray[np.int64]:
        """Nearest multiples of the spacing to ``scale`` times finite values, as int64 counts.

        With a ``bound`` the caller knows that no value exceeds it in magnitude. Without it every value is looked at,
        and one that is too large for the grid is an error: callers bound their values beforehand.
        """
        return self.rounded(np.asarray(values * self.factor(scale)), None if bound is None else bound * scale)

    def factor(self, scale: float) -> np.float64:
        """Return the factor from a value to ``scale`` times it in units of the spacing.

        A power of two loses no digit.
        """
        return np.float64(scale / self.spacing)

    def rounded(self, scaled: NDArray[np.float64], bound: float | None = None) -> NDArray[np.int64]:
        """Return counts of values that are in units of the spacing already, written over the values.

        ``bound`` is as for :meth:`counts`: a value, not in units of the spacing.
        """
        counts = self.marked(scaled, bound)
        counts -= MARK
        return counts

    def marked(
        self, scaled: NDArray[np.floating], bound: float | None = None, *, in_place: bool = True
    ) -> NDArray[np.int64]:
        """Return the counts of :meth:`rounded`, all too large by ``MARK``.

        Which cancels in the difference of two of them.

        Values that are not to be overwritten (``in_place`` False) may be of another real dtype, and are converted.
        """
        if bound is not None:
            fits = bound / self.spacing < _LARGEST_COUNT
        else:
            # Also false for NaN. This must stop loudly: a wrapped integer would be a wrong release that nobody notices.
            fits = not scaled.size or (scaled.max() < _LARGEST_COUNT and scaled.min() > -_LARGEST_COUNT)
        if not fits:
            raise ConfigurationError(
                "Expected finite values below 2^51 grid spacings; clip before rounding to the grid.",
                kind="out-of-range",
            )
        # In [2^52, 2^53) the spacing of float64 is 1: adding 1.5 x 2^52 rounds to the nearest integer, ties to even as
        # rint does, and leaves that integer in the low bits. Twice as fast as rounding and converting.
        if scaled.dtype != np.float64:
            scaled, in_place = scaled.astype(np.float64), True
        scaled = np.add(scaled, ROUNDER, out=scaled if in_place else None)
        return scaled.view(np.int64)

    def values(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the numbers behind int64 counts, exact in float64 up to 2^53 spacings."""
        values = counts.astype(np.float64)  # first: converting and multiplying in one goes in small pieces
        values *= self.spacing
        return values

    def charge(self, num_parameters: int) -> float:
        """Return the addition of rounding to the sensitivity: gamma sqrt(d)."""
        return self.spacing * math.sqrt(num_parameters)


def power_of_two_at_most(value: float) -> float:
    """Return the largest power of two that is at most ``value`` (> 0)."""
    return math.ldexp(0.5, math.frexp(value)[1])
