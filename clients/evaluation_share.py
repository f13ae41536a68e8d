"""A private evaluation in one word, for machines whose training has a policy already: a share of its mu^2."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from ..privacy import ConfigurationError, PrivacyPolicy, divided_mu, evaluation_policy
from ..privacy.evaluation import EVALUATION_SHARE, EvaluationRows
from .evaluation import Evaluation, Measure, held_out_samples
from .gradients import Samples

_KEPT = (
    *("budget_mu", "delta", "mechanism", "noise_quality"),
    *("trust", "min_honest", "min_cohort", "budget_local_mu"),
)


@dataclass(frozen=True)
class EvaluationShare:
    """What of a machine's mu^2 and of its samples is for a private evaluation of the model.

    Parameters
    ----------
    share : float
        Of mu^2, above 0 and below 1. The training has the rest, so that both together are what was asked for.
    held_out : float
        Which share of a machine's samples, the last ones, is set aside for it and never trained on. 0: the evaluation
        is of the samples that were trained on.
    score_bins : int
        Bins of scores for each of two classes, for the area under the ROC curve; 0 for none. The server's
        :class:`~murmurfl.strategies.PrivateEvaluation` needs the same number.
    right : callable, optional
        Where the model is no classifier of the usual kind: how right a batch of its predictions is, from 0 to 1 for
        each sample. Of a module ``right(output, target)``. It must not mix samples.

    Raises
    ------
    ConfigurationError

    Notes
    -----
    **Formal guarantees.** With it a machine's training and its evaluation together are as private as the training alone
    would be without: everything is mu-GDP for replacement of one sample, for the mu that was asked for, since mus add
    in squares.
    Proof: docs/proofs/release-rule.md.
    """

    share: float = EVALUATION_SHARE
    held_out: float = 0.1
    score_bins: int = 0
    right: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name, low in (("share", False), ("held_out", True)):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not (number and (0 <= value < 1 if low else 0 < value < 1)):
                raise ConfigurationError(
                    f"Expected {name} of an evaluation {'>= 0' if low else '> 0'} and < 1, got {value!r}."
                )
        EvaluationRows(self.score_bins)
        if self.right is not None and not callable(self.right):
            raise ConfigurationError(f"Expected right to be a function, got {type(self.right).__name__}.")

    @classmethod
    def of(cls, evaluation: float | EvaluationShare | None) -> EvaluationShare | None:
        """What a project wrote: a share of mu^2, all of it, or nothing.

        Raises
        ------
        ConfigurationError
        """
        if evaluation is None or isinstance(evaluation, EvaluationShare):
            return evaluation
        return cls(evaluation)

    def training(self, policy: PrivacyPolicy) -> PrivacyPolicy:
        """The policy of the training, with what the evaluation leaves of the mu of a policy of both.

        Notes
        -----
        The evaluation takes samples that a training may have used, so that an order in which each is used once, ever,
        becomes one in which the budget counts sessions together.
        """
        once = policy.order == "in-turn" and policy.sample_participations == 1
        return replace(policy, mu=divided_mu(policy.mu, self.share)[1], order="again" if once else policy.order)

    def evaluation(self, policy: PrivacyPolicy, measure: Measure | None, samples: Samples) -> Evaluation:
        """A machine's evaluation, beside the policy of a training and an evaluation together.

        Raises
        ------
        ConfigurationError
            If nobody says which predictions are right, or no sample would be left to train on.
        """
        if measure is None:
            raise ConfigurationError(
                "Expected a model whose predictions can be right or wrong, got one that does not say: leave evaluation "
                "out."
            )
        known = {one.name for one in fields(policy)}
        kept = {name: getattr(policy, name) for name in _KEPT if name in known}
        own = evaluation_policy(divided_mu(policy.mu, self.share)[0], **kept)
        held_out = held_out_samples(len(samples), self.held_out) if self.held_out else 0
        return Evaluation(own, measure, bins=self.score_bins, held_out=held_out)
