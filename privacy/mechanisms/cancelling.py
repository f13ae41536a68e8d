r"""Cancelling noise: each release adds fresh noise and takes out that of the release before (DP-mu^2-FL).

reshef-levy-2025, section 4.2 and algorithm 1: the k-th release is s_k + y_k - y_{k-1}, so the k-th prefix sum carries
y_k ~ N(0, sigma_k^2) alone. As a factorisation: B = diag(sigma), C = diag(1 / sigma) A with A the lower triangle of
ones, and the sensitivity of one participation is sqrt(sum_k 1 / sigma_k^2), the norm of C's first column.

The sigma_k are in units of Delta / mu, which makes the three schedules read as in the papers:

=============  ============================  ==========================================================
schedule       sigma_k^2                     source
=============  ============================  ==========================================================
``uniform``    K                             reshef-levy-2024; the default, measured far better
``harmonic``   H_K k                         the shape of ``paper`` with the exact constant
``paper``      (1 + ln T) k                  reshef-levy-2025, theorem 5.2; T = num_rounds >= K
=============  ============================  ==========================================================
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from ..noise import NONCE_BYTES
from .mechanism import Draw, Increment, Mechanism, State

Schedule = Literal["uniform", "harmonic", "paper"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


class CancellingNoise(Mechanism):
    """Noise that is taken out again by the next release (ALGORITHMS sections 2 and 3, ``cancelling``).

    Parameters
    ----------
    schedule : {"uniform", "harmonic", "paper"}
        How the noise grows with the release (module description).
    num_rounds : int, optional
        T of the ``paper`` schedule, at least num_releases; default num_releases. Refused for other schedules.

    Notes
    -----
    **Formal guarantees.** With noise_std = Delta / mu the stream of all K releases is mu'-GDP for replacement of one
    sample that takes part in one release, with mu' = mu for ``uniform`` and ``harmonic`` and
    mu' = mu sqrt(H_K / (1 + ln T)) <= mu for ``paper``. State: the last row, regenerated from its nonce.
    Proof: docs/proofs/sensitivities.md.
    """

    name = "cancelling"
    owns_output = True
    memory = "last"
    removes_last = True

    def __init__(self, num_releases: int, *, schedule: Schedule = "uniform", num_rounds: int | None = None) -> None:
        super().__init__(num_releases)
        count = self.num_releases
        if schedule not in SCHEDULES:
            raise ConfigurationError(
                f"Expected schedule one of {SCHEDULES}, got {schedule!r}.",
                kind="unknown-name",
                setting="schedule",
                got=schedule,
            )
        if num_rounds is not None and schedule != "paper":
            raise ConfigurationError(
                f"Expected num_rounds only with schedule 'paper', got it with {schedule!r}.",
                kind="conflict",
                setting="num_rounds",
            )
        releases = np.arange(1, count + 1, dtype=np.float64)
        if schedule == "uniform":
            variances = np.full(count, float(count))
        elif schedule == "harmonic":
            variances = math.fsum(1.0 / releases) * releases
        else:
            rounds = count if num_rounds is None else num_rounds
            if rounds < count:
                raise ConfigurationError(
                    f"Expected num_rounds >= num_releases = {count} (a client takes part at most once a round), "
                    f"got {num_rounds}.",
                    kind="out-of-range",
                    setting="num_rounds",
                    got=num_rounds,
                )
            variances = (1.0 + math.log(rounds)) * releases
        self.schedule: Schedule = schedule
        self.sigmas: NDArray[np.float64] = np.sqrt(variances)
        """sigma_1 .. sigma_K in units of Delta / mu."""
        self._sigmas: list[float] = self.sigmas.tolist()

    def materialize(self, n: int | None = None) -> NDArray[np.float64]:
        n = self._check_n(n)
        return np.tri(n) / self.sigmas[:n, None]

    def decoder(self, n: int | None = None) -> NDArray[np.float64]:
        return np.diag(self.sigmas[: self._check_n(n)])

    def initial_state(self, size: int) -> State:
        return ()

    def increment(self, state: State, release: int, normals: NDArray[np.floating], scale: float = 1.0) -> Increment:
        row = self._row(release, normals, scale)
        return Increment(row, state[0] if state else None, (row,))

    def state_after(self, release: int, draw: Draw, scale: float = 1.0) -> State:
        return (self._row(release, draw(range(release, release + 1))[0], scale),)

    @property
    def recovers(self) -> int:
        return self.num_releases

    def memory_bytes(self, size: int) -> int:
        return NONCE_BYTES

    def _row(self, release: int, normals: NDArray[np.floating], scale: float) -> NDArray[np.float64]:
        row = normals.astype(np.float64)  # first: converting and multiplying in one goes in small pieces
        row *= self._sigmas[self._check_release(release) - 1] * scale
        return row

    def largest_entry(self) -> float:
        return 1.0 / min(self._sigmas)

    def increment_bound(self, release: int) -> float:
        return max(self._sigmas[max(release - 2, 0) : release])

    def row_std(self, release: int) -> float:
        return self._sigmas[self._check_release(release) - 1]

    def noise_std(self, sensitivity: float, mu: float, **pattern: Any) -> float:
        # The schedules are written in units of Delta / mu; `paper` keeps its own, slightly too large, constant.
        return sensitivity / mu * (self.sensitivity(**pattern) / self.sensitivity())

    def _sensitivity(self, n: int, num_participations: int, min_separation: int) -> float:
        # Column j of C is 1/sigma_k from row j on, so <c_i, c_j> is a sum from max(i, j): the earliest are worst.
        tails = np.cumsum((1.0 / self.sigmas[:n] ** 2)[::-1])[::-1]
        chosen = range(0, n, min_separation)[:num_participations]
        total = sum((2 * rank + 1) * tails[column] for rank, column in enumerate(chosen))
        return math.sqrt(total)
