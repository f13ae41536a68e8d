r"""Momentum of gradients with correlated noise; noisy SGD as the case without momentum (ALGORITHMS 3 and 4).

With g_t the mean of the machines' clipped gradients and row t of B Z the noise on their prefix sums,

    g^_t    = g_t + (row t - row t-1 of B Z)
    m^_t    = (1 - alpha) m^_{t-1} + alpha g^_t
    w_{t+1} = w_t - eta m^_t / ||m^_t||,  or  w_t - eta m^_t  without normalisation

This is the momentum of tran-cutkosky-2022 with noise from another factorisation than its trees. With alpha = 1,
independent noise and no normalisation it is noisy SGD without sampling: the steps of DP-SGD (Abadi et al. 2016) on
samples in a fixed order, so with the noise of plain composition and not with that of a sampled batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..privacy import ConfigurationError, Mechanism, make_mechanism
from ..privacy.mechanisms import State
from ..privacy.noise import NONCE_BYTES
from .rounds.options import takes
from .rounds.replies import Vector
from .tree_momentum import MomentumNoise, MomentumOptions, TrustedMomentum, normalised_step

MOMENTUM_MECHANISMS = (
    "independent", "decay", "sqrt_toeplitz", "sqrt_normalised", "bisr", "banded", "blt", "optimal",
)  # fmt: skip
"""The mechanisms with a square C: one row of Z a round."""


@dataclass(frozen=True)
class CorrelatedMomentumState:
    """State after round t.

    Parameters
    ----------
    w, momentum : ndarray of shape (d,)
        w_{t+1} and m^_t.
    noise : ndarray of shape (rows, d)
        The mechanism's state, where it keeps one.
    nonces : ndarray of shape (T, 16), uint8
        The nonces of the rows drawn so far. A mechanism that keeps no state makes it again from these rows.
    """

    w: Vector
    momentum: Vector
    noise: NDArray[np.floating]
    nonces: NDArray[np.uint8]


class CorrelatedNoise(MomentumNoise):
    """The noise of a mechanism, one of :data:`MOMENTUM_MECHANISMS`, on the machines' sums of gradients.

    Notes
    -----
    **Formal guarantees.** All noisy sums together are mu-GDP for replacement of one sample that takes part in rounds
    c, c + N, ... only. Sums and noise are rounded to the machines' grid, which is charged.
    Proof: docs/proofs/returning-samples.md.
    """

    def __init__(self, options: MomentumOptions, mechanism: Mechanism) -> None:
        super().__init__(options)
        self.mechanism = mechanism

    def noise_std(self, num_parameters: int) -> float:
        """Standard deviation in front of Z, for the mean of the gradients."""
        if math.isinf(self.mu):
            return 0.0
        change = self.policy.plan(num_parameters).sensitivity + self.rounding_charge(num_parameters)
        mean_std, _ = self.mechanism.rounded_std()
        std = self.mechanism.noise_std(change, self.mu, **self.policy.pattern)
        ideal = self.ideal_mu(num_parameters, std * mean_std)
        return self.mechanism.noise_std(change, ideal, **self.policy.pattern) / self.clients_per_round

    def unrounded_noise_std(self, num_parameters: int) -> float:
        change, (_, largest_std) = self.policy.plan(num_parameters).sensitivity, self.mechanism.rounded_std()
        return self.mechanism.noise_std(change, self.mu, **self.policy.pattern) * largest_std

    def calibrate(self, num_parameters: int) -> None:
        self.noise_std(num_parameters)

    def noisy_sum(
        self, state: CorrelatedMomentumState, release_sum: Vector, server_round: int
    ) -> tuple[Vector, NDArray[np.floating], NDArray[np.uint8]]:
        """The sum of a round with its noise, the mechanism's next state as rows, and the nonces with the round's."""
        self.check_round(server_round)
        grid, size = self.noise_grid(len(release_sum)), len(release_sum)
        scale = self.noise_std(size) * self.clients_per_round
        nonces = self.with_nonce(state.nonces, server_round)
        before = self._unpacked(state, server_round, scale)
        increment = self.mechanism.increment(before, server_round, self._row(nonces, server_round, size), scale)
        # Sum and noise are on one grid, so that what is published is a rounded Gaussian release
        # (privacy/noise.py).
        counts = grid.counts(release_sum) + grid.counts(np.asarray(increment.added, np.float64))
        if increment.removed is not None:
            counts -= grid.counts(np.asarray(increment.removed, np.float64))
        rows = np.zeros((0, size)) if increment.state is None else _packed(increment.state, size)
        return grid.values(counts), rows, nonces

    def _row(self, nonces: NDArray[np.uint8], server_round: int, size: int) -> NDArray[np.floating]:
        return self.normals_of(nonces[server_round - 1].tobytes(), size)

    def _unpacked(self, state: CorrelatedMomentumState, server_round: int, scale: float) -> State:
        """The mechanism's state before a round."""
        if self.mechanism.memory == "nothing":
            return ()
        if self.mechanism.memory != "all":
            return tuple(state.noise)
        if len(state.noise):
            return (state.noise,)
        size = len(state.w)

        def draw(rounds: range) -> NDArray[np.floating]:
            return np.stack([self._row(state.nonces, k, size) for k in rounds])

        return self.mechanism.state_after(server_round - 1, draw, scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class CorrelatedOptions(MomentumOptions):
    """What :class:`CorrelatedMomentum` takes."""

    mechanism: str = "independent"
    mechanism_options: dict[str, Any] | None = None
    normalised: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mechanism not in MOMENTUM_MECHANISMS:
            raise ConfigurationError(
                f"Expected mechanism one of {MOMENTUM_MECHANISMS} for momentum, got {self.mechanism!r}; TreeMomentum "
                "has the tree."
            )


class CorrelatedMomentum(TrustedMomentum[CorrelatedMomentumState]):
    """Momentum with correlated noise, trusted server, for :class:`~murmurfl.clients.NoisySGDClient`.

    Parameters
    ----------
    mechanism : str
        One of :data:`MOMENTUM_MECHANISMS`.
    normalised : bool
        Whether a step has the length eta or eta times that of the momentum.
    **options
        See :class:`~murmurfl.strategies.tree_momentum.TrustedMomentum`.

    Notes
    -----
    **Formal guarantees.** The sequence of published models is mu-GDP for replacement of one sample of one machine,
    against everybody but the server itself, under the conditions of
    :class:`~murmurfl.strategies.tree_momentum.TrustedMomentum`; the mechanism's sensitivity is that of samples
    that return every N rounds. Sums and noise are rounded to the machines' grid, which is charged.
    Proof: docs/proofs/returning-samples.md.
    """

    options: CorrelatedOptions  # type: ignore[assignment]
    aggregator: CorrelatedNoise
    state_type: ClassVar[type[CorrelatedMomentumState]] = CorrelatedMomentumState

    @takes(CorrelatedOptions)
    def __init__(self, **options: Any) -> None:
        taken = self.options
        made = make_mechanism(taken.mechanism, taken.num_rounds, **(taken.mechanism_options or {}))
        super().__init__(self.options, aggregator=CorrelatedNoise(taken, made))

    def settings(self) -> dict[str, Any]:
        mechanism = self.aggregator.mechanism
        own = {"mechanism": mechanism.name, "normalised": self.options.normalised}
        return {**super().settings(), **own, "encoder": mechanism.identity().hex()[:64]}

    def initial_state(self, start: Vector) -> CorrelatedMomentumState:
        noise = _packed(self.aggregator.mechanism.initial_state(len(start)), len(start))
        nonces = np.zeros((self.aggregator.num_rounds, NONCE_BYTES), np.uint8)
        return CorrelatedMomentumState(start, np.zeros_like(start), noise, nonces)

    def query_points(self, state: CorrelatedMomentumState) -> tuple[Vector, ...]:
        return (state.w,)

    def step(self, state: CorrelatedMomentumState, release_sum: Vector, server_round: int) -> CorrelatedMomentumState:
        noisy, noise, nonces = self.aggregator.noisy_sum(state, release_sum, server_round)
        alpha = self.aggregator.alpha
        momentum = (1 - alpha) * state.momentum + alpha * (noisy / self.clients_per_round)
        if self.options.normalised:
            w = normalised_step(state.w, momentum, self.options.learning_rate)
        else:
            w = state.w - self.options.learning_rate * momentum
        return CorrelatedMomentumState(w, momentum, noise, nonces)

    def model(self, state: CorrelatedMomentumState) -> Vector:
        return state.w


def _packed(state: State, size: int) -> NDArray[np.floating]:
    """A mechanism's state as one array of rows."""
    if not state:
        return np.zeros((0, size))
    return np.concatenate([rows.reshape(-1, size) for rows in state])
