"""One round with a trusted server, which adds the noise of the sum for everybody.

Machines send the sums of their rows without noise. One sample changes the sum of all of them by at most Delta, which
follows from the policy that all machines have, so noise of Delta / mu on the sum makes what is published mu-GDP.
"""

from __future__ import annotations

import math
from typing import Any, Required, TypeVar, Unpack

from ...privacy import ConfigurationError, NoiseKeys, PrivacyPolicy
from ..rounds.layout import Vector, vector_size
from ..rounds.options import RoundOptions
from ..rounds.replies import Reply, RoundReport
from ..side.mean_of_features import MeanOfFeatures, MeanState
from ..side.private_evaluation import EvaluationState, PrivateEvaluation
from .trusted_server import TrustedServer, could_be_honest

StateT = TypeVar("StateT")


class TrustedOneAnswer(TrustedServer[StateT]):
    """A trusted server's noise on the one sum of a ``OneAnswer`` (:mod:`~murmurfl.strategies.side.one_answer`).

    Parameters
    ----------
    **options
        See :class:`~murmurfl.strategies.trusted.trusted_server.TrustedServer`.

    Notes
    -----
    **Formal guarantees.** What is published is mu-GDP for replacement of one sample of one machine, against everybody
    but the server itself, provided machines are honest and links are private. Replies that state a larger sensitivity
    or another grid than the policy's are dropped. A run that is interrupted and resumed has the same guarantee
    (:class:`~murmurfl.strategies.trusted.trusted_server.TrustedServer`). With mechanism ``none``, which is refused
    unless the keys are simulated, nothing is guaranteed. Proof: docs/proofs/sensitivities.md.
    """

    made_with = "centring_policy"
    """What makes its policies."""

    def __init__(self, **options: Any) -> None:
        super().__init__(num_rounds=1, **options)
        if self.policy.order != "all" or self.policy.max_participations != 1:
            raise ConfigurationError(
                f"Expected for {type(self).__name__} a policy with order 'all' and max_participations 1, got "
                f"{self.policy.order!r} and {self.policy.max_participations}: make it with {self.made_with}."
            )

    @property
    def worth_keeping(self) -> bool:
        """See :class:`~murmurfl.strategies.side.one_answer.OneAnswer`, which comes after this class."""
        return not self.history or self.history[-1].aggregated > 0

    def noise_std(self, num_parameters: int) -> float:
        """Standard deviation of the noise on the sum."""
        if math.isinf(self.mu):
            return 0.0
        change = self.policy.plan(num_parameters).sensitivity + self.rounding_charge(num_parameters)
        return change / self.ideal_mu(num_parameters, change / self.mu)

    def unrounded_noise_std(self, num_parameters: int) -> float:
        return self.policy.plan(num_parameters).sensitivity / self.mu

    def calibrate(self, num_parameters: int) -> None:
        self.noise_std(vector_size(self.release_layout))

    def check_reply(self, reply: Reply) -> bool:
        return super().check_reply(reply) and could_be_honest(self.policy, reply, most_releases=1)

    def next_state(self, state: StateT, release_sum: Vector, report: RoundReport) -> StateT:
        self.check_round(report.server_round)
        if not report.samples:
            return state  # nothing came
        # Sum and noise are on one grid, so that what is published is a rounded Gaussian release
        # (privacy/noise/grid.py).
        grid, size = self.noise_grid(len(release_sum)), len(release_sum)
        noise = self.fresh_normals(report.server_round, size) * self.noise_std(size)
        noisy = grid.values(grid.counts(release_sum) + grid.counts(noise))
        return super().next_state(state, noisy, report)

    def _save(self) -> None:
        if self.worth_keeping:
            super()._save()

    def _before_asking(self) -> None:
        """Nothing: a trusted server has written its checkpoint, before it asks anybody."""


class TrustedMeanOptions(RoundOptions, total=False):
    """Options of :class:`TrustedMeanOfFeatures`: those of both of its bases."""

    num_features: Required[int]
    num_clients: Required[int]
    policy: Required[PrivacyPolicy]
    noise_keys: NoiseKeys | None


class TrustedMeanOfFeatures(TrustedOneAnswer[MeanState], MeanOfFeatures):
    """The mean of the features, of machines that trust the server to add the noise.

    Parameters
    ----------
    **options
        See :class:`~murmurfl.strategies.trusted.trusted_server.TrustedServer`, whose policy is one of
        :func:`~murmurfl.privacy.centring_policy`, and :class:`MeanOfFeatures`.

    Notes
    -----
    **Formal guarantees.** The centre is mu-GDP for replacement of one sample of one machine, against everybody but the
    server itself, provided machines are honest and links are private. Replies that state a larger sensitivity or
    another grid than the policy's are dropped. A run that is interrupted and resumed has the same guarantee
    (:class:`~murmurfl.strategies.trusted.trusted_server.TrustedServer`). With mechanism ``none``, which is refused
    unless the keys are simulated, nothing is guaranteed. Proof: docs/proofs/sensitivities.md.
    """

    def __init__(self, **options: Unpack[TrustedMeanOptions]) -> None:
        # TrustedOneAnswer takes its own and hands the rest on; a type checker sees the first alone.
        super().__init__(**options)


class TrustedEvaluationOptions(RoundOptions, total=False):
    """Options of :class:`TrustedPrivateEvaluation`: those of both of its bases."""

    num_clients: Required[int]
    policy: Required[PrivacyPolicy]
    bins: int
    scores_share: float
    noise_keys: NoiseKeys | None


class TrustedPrivateEvaluation(TrustedOneAnswer[EvaluationState], PrivateEvaluation):
    """An evaluation of machines that trust the server to add the noise.

    Parameters
    ----------
    **options
        See :class:`~murmurfl.strategies.trusted.trusted_server.TrustedServer`, whose policy is one of
        :func:`~murmurfl.privacy.evaluation_policy`, and :class:`PrivateEvaluation`.

    Notes
    -----
    **Formal guarantees.** The figures are mu-GDP for replacement of one sample of one machine, against everybody but
    the server itself, provided machines are honest and links are private. Replies that state a larger sensitivity or
    another grid than the policy's are dropped. A run that is interrupted and resumed has the same guarantee
    (:class:`~murmurfl.strategies.trusted.trusted_server.TrustedServer`). With mechanism ``none``, which is refused
    unless the keys are simulated, nothing is guaranteed. Proof: docs/proofs/sensitivities.md.
    """

    made_with = "evaluation_policy"

    def __init__(self, **options: Unpack[TrustedEvaluationOptions]) -> None:
        # TrustedOneAnswer takes its own and hands the rest on; a type checker sees the first alone.
        super().__init__(**options)

    def own_noise_std(self) -> float:
        return self.noise_std(self.rows.width)
