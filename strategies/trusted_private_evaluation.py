"""Private evaluation with a trusted server, which adds the noise of the sum for everybody."""

from __future__ import annotations

from typing import Required, Unpack

from ..privacy import NoiseKeys, PrivacyPolicy
from .options import RoundOptions
from .private_evaluation import EvaluationState, PrivateEvaluation
from .trusted_one_answer import TrustedOneAnswer


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
        See :class:`~murmurfl.strategies.trusted_server.TrustedServer`, whose policy is one of
        :func:`~murmurfl.privacy.evaluation_policy`, and :class:`PrivateEvaluation`.

    Notes
    -----
    **Formal guarantees.** The figures are mu-GDP for replacement of one sample of one machine, against everybody but
    the server itself, provided machines are honest and links are private. Replies that state a larger sensitivity or
    another grid than the policy's are dropped. A run that is interrupted and resumed has the same guarantee
    (:class:`~murmurfl.strategies.trusted_server.TrustedServer`). With mechanism ``none``, which is refused unless the
    keys are simulated, nothing is guaranteed.
    Proof: docs/proofs/sensitivities.md.
    """

    made_with = "evaluation_policy"

    def __init__(self, **options: Unpack[TrustedEvaluationOptions]) -> None:
        # TrustedOneAnswer takes its own and hands the rest on; a type checker sees the first alone.
        super().__init__(**options)

    def own_noise_std(self) -> float:
        return self.noise_std(self.rows.width)
