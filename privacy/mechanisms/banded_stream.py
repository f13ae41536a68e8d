r"""Streams in which a release uses the noise of the last few: C^{-1} is Toeplitz with few diagonals.

Row k of C^{-1} Z is z_k + r_1 z_{k-1} + ... + r_{p-1} z_{k-p+1}. So a stream needs the nonces of the last p - 1
releases, 16 bytes each, and draws p rows for a release whose predecessors' rows it no longer has. (``banded`` is the
other way round: there C has few diagonals, and C^{-1} has all.)

With r_1, ..., r_{p-1} <= 0 and a_j = -r_j, the first column of C is c_0 = 1 and
c_n = a_1 c_{n-1} + ... + a_{p-1} c_{n-p+1}: non-negative. For n >= p, c_n - c_{n-1} is the same sum of
c_{n-j} - c_{n-1-j}, so C's column never rises if its first p entries do not. Both mechanisms here are so
(:mod:`.toeplitz` says what follows).

===========  ============================================  ====================================================
mechanism    C^{-1}                                        source
===========  ============================================  ====================================================
``decay``    r_1 = -lambda: C = Toeplitz(lambda^j)         lambda-cancelling noise, arXiv 2601.22334
``bisr``     (1 - x)^{1/2}, the first ``bands`` of it      Kalinin, McKenna, Upadhyay and Lampert 2025,
                                                           arXiv 2505.12128
===========  ============================================  ====================================================
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from ..noise.keyed_noise import NONCE_BYTES
from .mechanism import Draw, Increment, Memory, State
from .optimal import WORKLOADS, Workload
from .toeplitz import BLOCK, ToeplitzMechanism, one_minus_x, positive_integer


class RecentNoise(ToeplitzMechanism):
    """A mechanism with a C^{-1} of few diagonals, which a subclass gives as :attr:`diagonals`.

    A state is the last rows of Z, times the noise's standard deviation, the latest first.

    Notes
    -----
    **Formal guarantees.** mu = Delta x ``sensitivity(...)`` / noise_std for replacement of one sample that keeps to the
    declared pattern; exact for every pattern.
    Proof: docs/proofs/returning-samples.md.
    """

    memory: ClassVar[Memory] = "recent"
    diagonals: NDArray[np.float64]
    """r_0 = 1, r_1, ..., r_{p-1}: the first column of C^{-1}, as far as it is not zero."""

    @property
    def remembered(self) -> int:
        return max(1, min(len(self.diagonals), self.num_releases) - 1)

    def initial_state(self, size: int) -> State:
        return ()

    def increment(self, state: State, release: int, normals: NDArray[np.floating], scale: float = 1.0) -> Increment:
        self._check_release(release)
        row = np.multiply(normals, scale)
        added = np.empty_like(row)
        scratch = np.empty(min(BLOCK, row.size), row.dtype)
        for start in range(0, row.size, BLOCK):
            values = slice(start, start + BLOCK)
            block = added[values]
            block[:] = row[values]
            term = scratch[: block.size]
            for weight, earlier in zip(self.diagonals[1:].tolist(), state, strict=False):
                block += np.multiply(earlier[values], weight, out=term)
        return Increment(added, None, (row, *state)[: self.remembered])

    def state_after(self, release: int, draw: Draw, scale: float = 1.0) -> State:
        first = max(1, self._check_release(release) - self.remembered + 1)
        return tuple(np.multiply(normals, scale) for normals in draw(range(first, release + 1))[::-1])

    def memory_bytes(self, size: int) -> int:
        return NONCE_BYTES * self.remembered

    def _inverse_column(self) -> NDArray[np.float64]:
        column = np.zeros(max(self.num_releases, len(self.diagonals)))
        column[: len(self.diagonals)] = self.diagonals
        return column[: self.num_releases]

    def _encoder_column(self) -> NDArray[np.float64]:
        from scipy.signal import lfilter  # here, because it brings half of SciPy: a second of every worker's start

        # By the recurrence: a transform would leave errors of the size of the first entry in the last one.
        impulse = np.zeros(self.num_releases)
        impulse[0] = 1.0
        return np.asarray(lfilter([1.0], self.diagonals, impulse))


class DecayNoise(RecentNoise):
    """Each release adds fresh noise and takes out a part of that of the release before (ALGORITHMS section 2.2).

    Parameters
    ----------
    decay : float, optional
        lambda, from 0 (independent noise) to 1 (``cancelling`` with schedule ``uniform``). Default: the best one
        (:func:`best_decay`).
    workload : {"mu2", "prefix-sum"}
        Whose error is least, where ``decay`` is not given: of the sums of prefix sums, by which DP-mu^2-FL moves its
        model, or of prefix sums.

    Notes
    -----
    For ``mu2`` the best lambda is about 1 - 2.2 / K, takes 13 to 14 % off the noise of ``cancelling`` with schedule
    ``uniform``, root mean square over the releases, for K = 16 to 256, and is within 1.2 % of ``optimal``. The last
    sum of prefix sums by itself has 4 % more noise than with ``cancelling``.

    **Formal guarantees.** mu = Delta x ``sensitivity(...)`` / noise_std for replacement of one sample that keeps to the
    declared pattern; exact for every pattern, for any lambda. For one participation the sensitivity is
    sqrt(1 + lambda^2 + ... + lambda^(2 K - 2)). State: the last row of Z, made again from its nonce.
    Proof: docs/proofs/sensitivities.md, docs/proofs/returning-samples.md.
    """

    name = "decay"
    hands_over = True
    memory = "last"

    def __init__(self, num_releases: int, *, decay: float | None = None, workload: Workload = "mu2") -> None:
        super().__init__(num_releases)
        if workload not in WORKLOADS:
            raise ConfigurationError(f"Expected workload one of {WORKLOADS}, got {workload!r}.")
        if decay is None:
            decay = best_decay(self.num_releases, workload)
        elif isinstance(decay, bool) or not isinstance(decay, int | float) or not 0.0 <= decay <= 1.0:
            raise ConfigurationError(f"Expected decay from 0 to 1, got {decay!r}.")
        self.decay = float(decay)
        """lambda."""
        self.diagonals = np.array([1.0, -self.decay])

    def identity(self) -> bytes:
        return repr(self.decay).encode()  # the options may not say it

    @property
    def mends(self) -> bool:
        return self.decay >= 0.5

    def _encoder_column(self) -> NDArray[np.float64]:
        ratios = np.full(self.num_releases, self.decay)
        ratios[0] = 1.0
        return np.cumprod(ratios, dtype=np.float64)


class BisrNoise(RecentNoise):
    r"""The inverse square root with few diagonals, "banded inverse square root" (ALGORITHMS section 3, ``bisr``).

    C^{-1} has r_0 = 1, r_j = (1 - 3 / (2 j)) r_{j-1} for j < ``bands``, which is the first ``bands`` diagonals of
    ``sqrt_toeplitz``'s; more than num_releases are the same as num_releases.

    Notes
    -----
    For streams in which samples return many times, and whose machines have no room for rows of noise. In one pass few
    bands are weak: at 1024 releases 16 of them have 5.10 Delta / mu of noise in a prefix sum where ``sqrt_toeplitz``
    has 3.11.

    **Formal guarantees.** mu = Delta x ``sensitivity(...)`` / noise_std for replacement of one sample that keeps to the
    declared pattern; exact for every pattern. State: the last ``bands`` - 1 rows of Z, made again from their nonces.
    Proof: docs/proofs/sensitivities.md, docs/proofs/returning-samples.md.
    """

    name = "bisr"
    hands_over = True

    def __init__(self, num_releases: int, *, bands: int = 16) -> None:
        super().__init__(num_releases)
        self.bands = min(positive_integer("bands", bands), self.num_releases)
        self.diagonals = one_minus_x(0.5, self.bands)

    def identity(self) -> bytes:
        return b""


def best_decay(num_releases: int, workload: Workload = "mu2") -> float:
    r"""The lambda of least error at a fixed mu, where a sample takes part once; a function of its arguments alone.

    Minimises sensitivity^2 times the squared error summed over the releases: with a = 1 - lambda, B's column is 1, a,
    a, ..., and that of the sums of prefix sums is 1 + j a. Tried are 0, 1 and every 1 - a with two digits of a; the
    error is within 0.1 % of the least. Only sums and products are used, so that every machine finds the same digits:
    machines that share a sum must have one noise. The sensitivity is derived from whatever lambda is in use: the choice
    affects the error only.
    """
    n = positive_integer("num_releases", num_releases)
    steps = [(digits, 10**places) for places in range(2, len(str(n)) + 3) for digits in range(10, 100)]
    decays = np.array([0.0, *((whole - digits) / whole for digits, whole in steps), 1.0])
    a = 1.0 - decays
    if workload == "mu2":  # the sums over j < K of (K - j) (1 + j a)^2
        errors = n * (n + 1) / 2 + a * ((n - 1) * n * (n + 1) / 3 + a * (n * n * (n * n - 1) / 12))
    else:
        errors = n + a * a * (n * (n - 1) / 2)
    return float(decays[int(np.argmin(errors * _geometric_sum(decays * decays, n)))])


def _geometric_sum(ratios: NDArray[np.float64], terms: int) -> NDArray[np.float64]:
    """1 + r + ... + r^(terms-1), by doubling: a power's last digit may differ between mathematical libraries."""
    total, power = np.zeros_like(ratios), np.ones_like(ratios)
    for bit in f"{terms:b}":
        total, power = total * (1.0 + power), power * power
        if bit == "1":
            total, power = total + power, power * ratios
    return total
