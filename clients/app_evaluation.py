"""Private evaluation in an app of a project's own: what of mu^2 and of the samples is for it, and what is right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..privacy import ConfigurationError, Measured, PrivacyPolicy, divided_mu, evaluation_policy
from .beside import IN_COMMON
from .evaluation import Evaluation, Measure, held_out_samples

HELD_OUT = 0.1
"""The share of a machine's samples that is set aside by default, where there is an evaluation."""


@dataclass(frozen=True)
class EvaluationShare:
    """What is for a private evaluation.

    Parameters
    ----------
    share : float
        Of mu^2, above 0 and below 1.
    held_out : float
        Of each machine's samples, the last ones, from 0 to below 1: they are set aside and never trained on. 0: the
        evaluation is of all samples, those that are trained on.
    bins : int
        Bins of scores for each of two classes, for the area under the ROC curve; 0 for none.

    Raises
    ------
    ConfigurationError
        If a share is none.
    """

    share: float
    held_out: float = HELD_OUT
    bins: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigurationError(f"Expected evaluation, a share of mu^2, above 0 and below 1, got {self.share!r}.")
        if not 0 <= self.held_out < 1:
            raise ConfigurationError(
                f"Expected held_out, a share of samples, from 0 to below 1, got {self.held_out!r}."
            )

    @classmethod
    def of(cls, share: float, held_out: float | None, bins: int) -> EvaluationShare | None:
        """What an app or an operator's file says; None where nothing is for an evaluation.

        Raises
        ------
        ConfigurationError
            If a share of samples or bins are said of no evaluation.
        """
        if not share and held_out is None and not bins:
            return None
        return cls(share, HELD_OUT if held_out is None else held_out, bins)

    def beside(self, policy: PrivacyPolicy) -> PrivacyPolicy:
        """What is left of a policy for everything else.

        Notes
        -----
        **Formal guarantees.** With :meth:`evaluation` it is together as private as ``policy``: mus add in squares, and
        the ledger counts both within one budget.
        """
        once = policy.order == "in-turn" and policy.sample_participations == 1
        left = divided_mu(policy.mu, self.share)[1]
        return replace(policy, mu=left, order="again" if once else policy.order)

    def evaluation(self, policy: PrivacyPolicy, measure: Measure, num_samples: int) -> Evaluation:
        """A machine's evaluation, with its share of the mu of ``policy``, which is that of everything together.

        Notes
        -----
        **Formal guarantees.** Those of :func:`~murmurfl.privacy.evaluation_policy`.
        """
        kept: dict[str, Any] = {name: getattr(policy, name) for name in IN_COMMON}
        own = evaluation_policy(divided_mu(policy.mu, self.share)[0], mechanism=policy.mechanism, **kept)
        aside = held_out_samples(num_samples, self.held_out) if self.held_out else 0
        return Evaluation(own, measure, bins=self.bins, held_out=aside)


def measured_scores(scores: NDArray[Any], targets: NDArray[Any], *, probabilities: bool = False) -> Measured:
    """Whether scores are right about classes, each sample by itself.

    Parameters
    ----------
    scores : ndarray of shape (b, C, ...), (b, 1) or (b,)
        One score a class, or one score, positive for class 1.
    targets : ndarray of shape (b, ...)
        Numbers of classes; beside one score anything above 1/2 is class 1.
    probabilities : bool
        Whether the one score is the probability of class 1, and the prediction is 1 above 1/2.

    Raises
    ------
    ConfigurationError
        If they are no scores of classes.

    Notes
    -----
    **Formal guarantees.** Row i depends on row i of both alone.
    """
    scores, targets = np.asarray(scores, dtype=np.float64), np.asarray(targets)
    count = len(targets)
    with np.errstate(all="ignore"):
        if scores.size == count == targets.size:
            score, positive = scores.ravel(), targets.ravel() > 0.5
            if probabilities:
                return Measured((score > 0.5) == positive, score, positive)
            return Measured((score > 0) == positive, 1.0 / (1.0 + np.exp(-score)), positive)
        if scores.ndim < 2 or scores.shape[1] < 2 or scores.shape[:1] + scores.shape[2:] != targets.shape:
            raise ConfigurationError(
                f"Expected a score for each class and a class for each sample, got shapes {scores.shape[1:]} and "
                f"{targets.shape[1:]} a sample: an evaluation counts right classes."
            )
        right = (scores.argmax(axis=1) == targets).reshape(count, -1).mean(axis=1)
        if scores.shape[1] != 2 or scores.ndim != 2:
            return Measured(right)
        return Measured(right, 1.0 / (1.0 + np.exp(scores[:, 0] - scores[:, 1])), targets)
