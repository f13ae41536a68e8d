r"""DP-mu^2-FL with a trusted server (reshef-levy-2025, appendix F; reshef-levy-2024, algorithm 2; ALGORITHMS 2.1).

Machines send their contributions without noise over an authenticated, encrypted link; the server steps with
q_t + Y_t, Y_t fresh in every round and never accumulated. One sample changes q by at most Delta / m and stays in it to
the end, so with T rounds sigma^2 = (Delta / m)^2 T / mu^2 makes the whole run mu-GDP.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import numpy as np

from ...privacy import ConfigurationError
from ..mu2 import Mu2, Mu2State, mu2_step
from ..projected import ProjectedOptions
from ..rounds.layout import Vector
from ..rounds.replies import Outcome, Reply, RoundReport, RoundRequest
from ..sums.release_sum import Summation
from .trusted_server import TrustedOptions, TrustedServer, could_be_honest


class TrustedMu2Options(ProjectedOptions, TrustedOptions, total=False):
    """Options of :class:`TrustedMu2`: those of both of its bases."""


class TrustedMu2(TrustedServer[Mu2State], Mu2):
    """DP-mu^2-FL with a trusted server, which adds the noise for everybody.

    Parameters
    ----------
    **options
        See :class:`~murmurfl.strategies.trusted.trusted_server.TrustedServer`, whose policy must use every sample once,
        and :class:`~murmurfl.strategies.projected.ProjectedStrategy`.

    Notes
    -----
    **Formal guarantees.** The sequence of published models is mu-GDP for replacement of one sample of one machine,
    against everybody but the server itself, which sees contributions without noise, provided machines are honest,
    links are private, and nothing else computed from the un-noised momentum is published; the checkpoint holds it and
    must be kept like the data. Each release is aggregated exactly once, and replies that state a larger sensitivity
    or another grid than the policy's are dropped, and so are those of more releases than the machine was asked for. A
    run that is interrupted and resumed has the same guarantee
    (:class:`~murmurfl.strategies.trusted.trusted_server.TrustedServer`). With mechanism ``none``, which is refused
    unless the keys are simulated, nothing is guaranteed.

    A sample counts once. A sample that returns would move q by Delta / m once more every time, and in which rounds it
    returns depends on how many samples its machine has, which no reply tells. So policies in which samples return are
    refused here, by :class:`~murmurfl.clients.Mu2Client` and in the operator's file.
    Proof: docs/proofs/sensitivities.md.
    """

    def __init__(self, **options: Unpack[TrustedMu2Options]) -> None:
        # TrustedServer takes its own and hands the rest on to Mu2, the next base; a type checker sees the first alone.
        super().__init__(**options)  # pyright: ignore[reportCallIssue]
        if self.policy.sample_participations > 1:
            raise ConfigurationError(
                f"Expected sample_participations = 1 for TrustedMu2, got {self.policy.sample_participations}: a sample "
                "that returns moves the momentum again, which the noise does not cover. Use one pass, or a strategy "
                "of private momentum (TreeMomentum)."
            )
        self._unheard: Counter[str] = Counter()
        """How often each machine was asked, at most, since its last release that was aggregated."""

    def noise_std(self, num_parameters: int) -> float:
        """Standard deviation of Y_t, the noise on q."""
        if math.isinf(self.mu):
            return 0.0
        change = self.policy.plan(num_parameters).sensitivity + self.rounding_charge(num_parameters)
        often = math.sqrt(self.num_rounds)
        ideal = self.ideal_mu(num_parameters, change * often / self.mu)
        return change / self.clients_per_round * often / ideal

    def unrounded_noise_std(self, num_parameters: int) -> float:
        return self.policy.plan(num_parameters).sensitivity * math.sqrt(self.num_rounds) / self.mu

    def calibrate(self, num_parameters: int) -> None:
        self.noise_std(num_parameters)

    def largest_shift(self) -> float:
        return self.mu / math.sqrt(self.num_rounds)

    def check_reply(self, reply: Reply) -> bool:
        # Only a reply built on the acknowledgement this server gave is aggregated; any other is late.
        current = reply.ack == self._ack(reply.machine)
        most = self._unheard[reply.machine] if current else self.policy.max_participations
        return could_be_honest(self.policy, reply, most_releases=most)

    def step(self, state: Mu2State, release_sum: Vector, server_round: int) -> Mu2State:
        self.check_round(server_round)
        # Sum and noise are on one grid, so that what is published is a rounded Gaussian release
        # (privacy/noise/grid.py).
        grid, total = self.noise_grid(len(release_sum)), state.release_sum + release_sum
        std = self.noise_std(len(release_sum)) * self.clients_per_round
        noise = self.fresh_normals(server_round, len(release_sum)) * np.float64(std)
        noise = grid.values(grid.counts(total) + grid.counts(noise)) - total
        return mu2_step(state, release_sum, server_round, noise=noise, **self.step_options())

    def _plan_round(self, server_round: int, reachable: Mapping[str, int] | None) -> RoundRequest:
        request = super()._plan_round(server_round, reachable)
        self._unheard.update(request.acks.keys())
        return request

    def _believe(self, server_round: int, outcomes: Iterable[Outcome], release_sum: Summation) -> RoundReport:
        report = super()._believe(server_round, outcomes, release_sum)
        for name, release in self.participation.items():
            if release is not None:
                del self._unheard[name]
        return report

    def _kept(self) -> dict[str, Any]:
        return {**super()._kept(), "unheard": dict(self._unheard)}

    def _restore(self, saved: Mapping[str, Any]) -> None:
        super()._restore(saved)
        self._unheard = Counter({str(name): int(times) for name, times in saved["unheard"].items()})
        # The round that was cut off may have been asked, and answered, after the checkpoint.
        self._unheard.update(self.machines.names)
