r"""Full-batch gradient descent with a trusted server, which adds the noise for everybody (ALGORITHMS section 8).

Machines send the sums of their clipped gradients without noise. One sample changes the sum of all machines by at most
Delta = 2 S in each of T rounds, so noise of sigma = Delta sqrt(T) / mu, fresh and once a round, makes all published
models together mu-GDP. With shares s_t of the budget it is sigma_t = Delta sqrt(sum s / s_t) / mu.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

from ...privacy import ConfigurationError
from ...privacy.mechanisms import IndependentNoise
from ..full_batch import FullBatch, FullBatchOptions, FullBatchState
from ..rounds.layout import Vector
from ..rounds.replies import Reply, RoundReport
from .trusted_server import TrustedOptions, TrustedServer, could_be_honest


class TrustedFullBatchOptions(FullBatchOptions, TrustedOptions, total=False):
    """Options of :class:`TrustedFullBatch`: those of both of its bases."""


class TrustedFullBatch(TrustedServer[FullBatchState], FullBatch):
    """Full batches with a trusted server, which adds the noise for everybody.

    Parameters
    ----------
    shares : str
        Which part of mu^2 each round gets (:class:`~murmurfl.privacy.mechanisms.IndependentNoise`).
    **options
        See :class:`~murmurfl.strategies.trusted.trusted_server.TrustedServer`, whose policy has ``order="all"``, and
        :class:`FullBatch`.

    Notes
    -----
    **Formal guarantees.** The sequence of published models is mu-GDP for replacement of one sample of one machine,
    against everybody but the server itself, which sees sums without noise, provided machines are honest, links are
    private, and nothing else computed from the un-noised sums is published. A sample is in at most one sum a round, for
    a machine's reply counts once, and every round in which something came has noise of its own. Replies that state a
    larger sensitivity or another grid than the policy's are dropped. A run that is interrupted and resumed has the same
    guarantee (:class:`~murmurfl.strategies.trusted.trusted_server.TrustedServer`). How many samples a sum is over is
    public. With mechanism ``none``, which is refused unless the keys are simulated, nothing is guaranteed. Proof:
    docs/proofs/returning-samples.md.
    """

    def __init__(self, *, shares: str = "uniform", **options: Unpack[TrustedFullBatchOptions]) -> None:
        # TrustedServer takes its own and hands the rest on to FullBatch; a type checker sees the first alone.
        super().__init__(**options)  # pyright: ignore[reportCallIssue]
        if self.policy.order != "all" or self.policy.release_rule != "paper":
            raise ConfigurationError(
                "Expected a policy with order 'all' and release_rule 'paper' for TrustedFullBatch, got "
                f"{self.policy.order!r} and {self.policy.release_rule!r}: the noise is for sums over all samples, each "
                "of which stands alone."
            )
        if self.quantile:
            raise ConfigurationError(
                f"Expected quantile 0 for TrustedFullBatch, got {self.quantile:g}: its noise is for gradients alone."
            )
        self.rounds_noise = IndependentNoise(self.num_rounds, shares=shares)
        """The noise of all rounds, in units of that of a sum."""

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "shares": self.rounds_noise.shares}

    def noise_std(self, num_parameters: int, server_round: int = 1) -> float:
        """Standard deviation of the noise on the sum of a round."""
        if math.isinf(self.mu):
            return 0.0
        change, often = self._change(num_parameters), self._often
        ideal = self.ideal_mu(num_parameters, change * often / self.mu * self.rounds_noise.rounded_std()[0])
        return change * often / ideal * self.rounds_noise.increment_bound(server_round)

    def unrounded_noise_std(self, num_parameters: int) -> float:
        sensitivity = self.policy.plan(num_parameters).sensitivity
        return sensitivity * self._often / self.mu * self.rounds_noise.rounded_std()[1]

    def calibrate(self, num_parameters: int) -> None:
        self.noise_std(num_parameters)

    def largest_shift(self) -> float:
        return self.mu * self.rounds_noise.largest_entry() / self._often

    def check_reply(self, reply: Reply) -> bool:
        return super().check_reply(reply) and could_be_honest(self.policy, reply, most_releases=1)

    def next_state(self, state: FullBatchState, release_sum: Vector, report: RoundReport) -> FullBatchState:
        self.check_round(report.server_round)
        if not report.samples:
            return state  # nothing came
        # Sum and noise are on one grid, so that what is published is a rounded Gaussian release
        # (privacy/noise/grid.py).
        size, server_round = len(release_sum), report.server_round
        grid = self.noise_grid(size)
        noise = self.fresh_normals(server_round, size) * self.noise_std(size, server_round)
        noisy = grid.values(grid.counts(release_sum) + grid.counts(noise))
        return super().next_state(state, noisy, report)

    def _change(self, num_parameters: int) -> float:
        """What one sample may change of a round's sum."""
        return self.policy.plan(num_parameters).sensitivity + self.rounding_charge(num_parameters)

    @property
    def _often(self) -> float:
        """What a sample that is in every round counts for in all of them: sqrt(T)."""
        return self.rounds_noise.sensitivity(self.num_rounds, 1)
