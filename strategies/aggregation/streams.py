"""Streams of a trusted server: what it releases of its un-noised state, and under how much noise.

A :class:`~murmurfl.strategies.aggregation.noisy.Noisy` server is given one stream, which declares a linear function of
all that clients have sent: the sum of each round (:class:`Sum`) or of all rounds so far (:class:`Prefix`). Private
momentum has streams of its own, each one unit with its rule (:class:`~murmurfl.strategies.tree_momentum.Tree`,
:class:`~murmurfl.strategies.correlated_momentum.Momentum`,
:class:`~murmurfl.strategies.reduced_tree_momentum.ReducedTree`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...privacy.accounting.amplification import Amplification
from ...privacy.accounting.gdp import gdp_epsilon
from ...privacy.errors import ConfigurationError
from ...privacy.mechanisms import IndependentNoise
from ...privacy.noise import (
    FINEST_GRID,
    Grid,
    NoiseKeys,
    ideal_mu,
    power_of_two_at_most,
    range_problem,
    row_key,
    standard_normal_rows,
    standard_normals,
)
from ...privacy.release.policy import NO_NOISE, PrivacyPolicy
from ..rounds.replies import Vector


class Stream(ABC):
    """A linear stream of a trusted server's un-noised state, with noise; a base class.

    A stream belongs to the one server that it is given to, which binds it to its policy and key.

    Notes
    -----
    **Formal guarantees.** All that a stream releases in the rounds of a training is mu-GDP for replacement of one
    sample of one client, under the conditions of :class:`~murmurfl.strategies.aggregation.noisy.Noisy`.
    Proof: docs/proofs/sensitivities.md.
    """

    accumulates: ClassVar[bool] = False
    """Whether the sum of all rounds so far is released, and a reply may hold several releases."""

    takes_samples: ClassVar[bool] = False
    """Whether its noise is accounted for Poisson batches."""

    policy: PrivacyPolicy
    num_rounds: int
    keys: NoiseKeys

    def __init__(self) -> None:
        self.session = ""
        self.clients_per_round = 0  # until it is settled
        self.num_parameters = 0  # of the model, until there is one
        self._grids: dict[int, Grid] = {}

    def bind(self, policy: PrivacyPolicy, num_rounds: int, keys: NoiseKeys) -> None:
        """Take the policy, the rounds and the noise key of a server; refuse a policy that the noise does not cover."""
        if hasattr(self, "policy"):
            raise ConfigurationError(
                f"Expected a stream of its own for each server, got one {type(self).__name__} for two: make another.",
                kind="conflict",
            )
        if policy.batch_selection == "poisson" and not self.takes_samples:
            raise ConfigurationError(
                f"Expected another batch_selection than 'poisson' with {type(self).__name__}, got it: what secret "
                "batches hide is accounted for steps along the mean of fresh gradients (CorrelatedMomentum).",
                kind="conflict",
                setting="batch_selection",
            )
        self.policy, self.num_rounds, self.keys = policy, num_rounds, keys

    def shape(self, num_parameters: int, release_size: int) -> None:
        """Note how many values the model and a release have."""
        self.num_parameters = num_parameters

    def released(self, total: Vector, server_round: int) -> Vector:
        """Return what the update rule sees of a round, from the un-noised sum of its releases.

        A stream that is one unit with its rule returns the sum itself: the rule asks it for noise.
        """
        return total

    def state(self) -> dict[str, Any]:
        """Return un-noised state for :meth:`restore`, arrays."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:  # noqa: B027
        """Take back what :meth:`state` returned."""

    # How much noise.

    @property
    def mu(self) -> float:
        """Gaussian-DP parameter of all num_rounds published models together; infinite without noise."""
        return math.inf if self.policy.mechanism == NO_NOISE else self.policy.mu

    def guaranteed_mu(self, num_parameters: int) -> float:
        """:attr:`mu`, or infinite where the range of the normals is too small for it (in simulation only)."""
        return math.inf if self._range_problem(num_parameters) else self.mu

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon at delta (default the policy's) of all num_rounds published models together."""
        mu = self.guaranteed_mu(self.num_parameters) if self.num_parameters else self.mu
        return gdp_epsilon(mu, self.policy.delta if delta is None else delta)

    def amplification(self, num_parameters: int) -> Amplification | None:
        """Return what secret batches make of epsilon; None where there are none."""
        return None

    def largest_shift(self) -> float:
        """Return the most standard deviations by which one sample moves one value: at most :attr:`mu`."""
        return self.mu

    @abstractmethod
    def unrounded_noise_std(self, num_parameters: int) -> float:
        """Largest standard deviation of the noise on one rounded value, before anything is charged for rounding."""

    @abstractmethod
    def calibrate(self, num_parameters: int) -> None:
        """Compute the noise, or refuse to, before any client is asked for what has no noise."""

    def _range_problem(self, num_parameters: int) -> str:
        if math.isinf(self.mu) or self.policy.noise_quality != "exact":
            return ""
        return range_problem(self.largest_shift(), num_parameters * self.num_rounds, self.policy.delta, self.mu)

    def ideal_mu(self, num_parameters: int, noise_std: float) -> float:
        """Return the mu to which ideal normals are calibrated, so that with ours the models are mu-GDP.

        ``noise_std`` is the standard deviation of the noise on one rounded value, were it calibrated to :attr:`mu`; the
        root mean square where values have different ones.

        Notes
        -----
        **Formal guarantees.** Models that are mu_i-GDP under ideal normals, for the mu_i that is returned, are mu-GDP
        under the noise that is added, for the same neighbouring relation.
        Proof: docs/proofs/grid-and-noise.md.
        """
        if self.policy.noise_quality != "exact":
            return self.mu
        values = num_parameters * self.num_rounds
        problem = self._range_problem(num_parameters)
        if problem and not self.keys.simulated:
            raise ConfigurationError(problem, kind="out-of-range")
        ideal = ideal_mu(self.mu, values, self.noise_grid(num_parameters).spacing / noise_std)
        if math.isnan(ideal):
            raise ConfigurationError(
                f"Expected a larger mu for {self.num_rounds} rounds of {num_parameters:,} values, got {self.mu:g}: the "
                "resolution of the normals alone tells as much. Raise mu, or lower num_rounds or the model's size.",
                kind="out-of-range",
                setting="mu",
                got=self.mu,
            )
        return ideal

    def noise_grid(self, num_parameters: int) -> Grid:
        """Return the grid to which sums and noise are rounded, and on which rounding is charged.

        It is the clients' own, or a coarser one where that is finer than large noise can be rounded to without showing
        (:mod:`murmurfl.privacy.noise`).
        """
        if num_parameters not in self._grids:
            spacing = self.policy.plan(num_parameters).grid.spacing
            if self.policy.noise_quality == "exact" and math.isfinite(self.mu):
                finest = power_of_two_at_most(4 * FINEST_GRID * self.unrounded_noise_std(num_parameters))
                spacing = max(spacing, finest)
            self._grids[num_parameters] = Grid(spacing)
        return self._grids[num_parameters]

    def rounding_charge(self, num_parameters: int) -> float:
        """Return what rounding a sum to :meth:`noise_grid` adds to its sensitivity; 0 on the clients' own grid."""
        grid = self.noise_grid(num_parameters)
        return 0.0 if grid == self.policy.plan(num_parameters).grid else grid.charge(num_parameters)

    # The noise.

    def fresh_normals(self, server_round: int, size: int) -> NDArray[np.floating]:
        """Draw standard normals from a round's own nonce; with real keys never the same ones again."""
        return self.normals_of(self.keys.nonce(self.session, server_round), size)

    def normals_of(self, nonce: bytes, size: int) -> NDArray[np.floating]:
        """Draw standard normals from a nonce under the server's key."""
        return standard_normals(row_key(self.keys.secret_key, nonce), size, self.policy.noise_quality)

    def rows_of(self, nonces: Sequence[bytes], size: int) -> NDArray[np.floating]:
        """Draw standard normals from several nonces, one row each."""
        keys = [row_key(self.keys.secret_key, nonce) for nonce in nonces]
        return standard_normal_rows(keys, size, self.policy.noise_quality)

    def with_nonce(self, nonces: NDArray[np.uint8], server_round: int) -> NDArray[np.uint8]:
        """Return the nonces of the rounds so far, one a row, with a new one for this round."""
        longer = nonces.copy()
        longer[server_round - 1] = np.frombuffer(self.keys.nonce(self.session, server_round), np.uint8)
        return longer

    def rounded(self, total: NDArray[np.floating], noise: NDArray[np.floating]) -> Vector:
        """Return a sum with noise, both on one grid, so that it is a rounded Gaussian release (privacy/noise.py)."""
        grid = self.noise_grid(len(total))
        return grid.values(grid.counts(total) + grid.counts(noise))

    def check_round(self, server_round: int) -> None:
        """Refuse a round beyond those the noise was calibrated for."""
        if server_round > self.num_rounds:
            raise ConfigurationError(
                f"Expected at most {self.num_rounds} rounds, for which the noise was calibrated, got {server_round}.",
                kind="exhausted",
                setting="num_rounds",
                got=server_round,
            )


class Sum(Stream):
    """The sum of every round, under fresh noise.

    Parameters
    ----------
    shares : str
        How mu^2 is shared among rounds (:class:`~murmurfl.privacy.mechanisms.IndependentNoise`).

    Notes
    -----
    **Formal guarantees.** One sample changes each of T sums by at most Delta, so noise of Delta sqrt(T) / mu on each,
    or of Delta sqrt(sum s / s_t) / mu with shares s_t, makes all that is published mu-GDP for replacement of one sample
    of one client, against everybody but the server itself, provided clients are honest and links are private.
    Proof: docs/proofs/sensitivities.md and docs/proofs/returning-samples.md.
    """

    def __init__(self, shares: str = "uniform") -> None:
        super().__init__()
        self.shares = shares

    def bind(self, policy: PrivacyPolicy, num_rounds: int, keys: NoiseKeys) -> None:
        super().bind(policy, num_rounds, keys)
        self.rounds_noise = IndependentNoise(num_rounds, shares=self.shares)

    def noise_std(self, num_parameters: int, server_round: int = 1) -> float:
        """Return the standard deviation of the noise on the sum that a round publishes."""
        if math.isinf(self.mu):
            return 0.0
        change = self.policy.plan(num_parameters).sensitivity + self.rounding_charge(num_parameters)
        often = self._often
        ideal = self.ideal_mu(num_parameters, change * often / self.mu * self.rounds_noise.rounded_std()[0])
        return change / self._over * often / ideal * self.rounds_noise.increment_bound(server_round)

    def unrounded_noise_std(self, num_parameters: int) -> float:
        sensitivity = self.policy.plan(num_parameters).sensitivity
        return sensitivity * self._often / self.mu * self.rounds_noise.rounded_std()[1]

    def calibrate(self, num_parameters: int) -> None:
        self.noise_std(num_parameters)

    def largest_shift(self) -> float:
        return self.mu * self.rounds_noise.largest_entry() / self._often

    def released(self, total: Vector, server_round: int) -> Vector:
        return self.noisy(total, server_round)

    def noisy(self, total: Vector, server_round: int) -> Vector:
        """Return a sum with the noise of a round, as it may be published."""
        self.check_round(server_round)
        std = self.noise_std(len(total), server_round) * self._over
        return self.rounded(total, self.fresh_normals(server_round, len(total)) * std)

    @property
    def _over(self) -> np.float64 | int:
        """Divisor of a sum where it is published."""
        return 1

    @property
    def _often(self) -> float:
        """Sensitivity of all rounds to a sample that is in each of them: sqrt(T)."""
        return self.rounds_noise.sensitivity(self.num_rounds, 1)


class Prefix(Sum):
    """The sum of all rounds so far, under fresh noise in each, published as a mean over the clients of a round.

    The update rule sees increments, whose sum is the last noisy prefix sum.

    Notes
    -----
    **Formal guarantees.** One sample changes every prefix sum from its round on by at most Delta, as it would change
    the sum of each of T rounds (:class:`Sum`). Proof: docs/proofs/sensitivities.md.
    """

    accumulates: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._prefix = self._published = np.zeros(0)  # until there is a model

    def shape(self, num_parameters: int, release_size: int) -> None:
        super().shape(num_parameters, release_size)
        self._prefix = self._published = np.zeros(release_size)

    def released(self, total: Vector, server_round: int) -> Vector:
        """Return what a round adds to the noisy prefix sum, from the un-noised sum of its releases.

        The sum of all that this returned is the last of them, exactly: all are multiples of one grid.
        """
        self._prefix = self._prefix + total
        before, self._published = self._published, self.noisy(self._prefix, server_round)
        return self._published - before

    def state(self) -> dict[str, Any]:
        return {"prefix": self._prefix, "published": self._published}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self._prefix, self._published = saved["prefix"], saved["published"]

    @property
    def _over(self) -> np.float64 | int:
        return np.float64(self.clients_per_round)
