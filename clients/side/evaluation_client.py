"""Private evaluation, the machine's half: how many of its samples a model gets right, once a session and with noise.

What is released and what it costs stands in :mod:`murmurfl.privacy.side.evaluation_query`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...privacy import (
    ConfigurationError,
    PrivacyPolicy,
    PrivateMachine,
    Release,
    divided_mu,
    evaluation_policy,
    protocol,
)
from ...privacy.side.evaluation_query import (
    EVALUATION_SHARE,
    SCORES_SHARE,
    EvaluationRows,
    Measured,
    is_evaluation_policy,
)
from ..adapters.per_sample_gradients import Samples
from ..messages import Request
from .side_parts import PartTerms, SidePart, SideRelease, check_beside

Measure = Callable[[Sequence[NDArray[Any]], Any], Measured]
"""From a model's arrays and a batch of samples, how right the model is about each of them."""


@dataclass(frozen=True)
class Evaluation(SideRelease):
    """Configures a machine to say, privately, how good a model is on its samples.

    Parameters
    ----------
    policy : PrivacyPolicy
        Policy of the evaluation's release (:func:`~murmurfl.privacy.evaluation_policy`), on the same budget as the
        machine's other policy.
    measure : callable
        ``measure(arrays, samples)`` gives a :class:`~murmurfl.privacy.Measured`: how right the model is about each
        sample of a batch, and scores where there are ``bins``.
    bins : int
        Bins of scores for each of two classes, for the area under the ROC curve; 0 for none.
    scores_share : float
        Share of the evaluation's mu^2 spent on the scores.
    held_out : int
        How many of the machine's samples, the last ones, are set aside: they are evaluated on, and nothing else is
        made from them. 0: the evaluation is of all samples, those that the model was trained on.
    shapes : sequence of tuple of int, optional
        Shapes of the model's arrays; by default those of the machine's gradients.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy the release is mu-GDP for replacement of one sample, whatever
    model a server sends and whatever ``measure`` makes of it, provided row i of it depends on sample i alone. The
    number of samples it is of is public.
    Proof: docs/proofs/sensitivities.md.
    """

    of: ClassVar[str] = protocol.OF_EVALUATION
    option: ClassVar[str] = "evaluation"
    ability: ClassVar[str] = "evaluates"
    unable: ClassVar[str] = "an epoch goes through all of its samples, and none can be set aside"
    not_configured: ClassVar[str] = "this machine is not configured for private evaluation: it releases no count"

    policy: PrivacyPolicy
    measure: Measure
    bins: int = 0
    scores_share: float = SCORES_SHARE
    held_out: int = 0
    shapes: Sequence[tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        if not is_evaluation_policy(self.policy):
            raise ConfigurationError(
                "Expected for an evaluation a policy with clip_norm 1, clip_unit 'nonnegative', order 'all' and "
                "max_participations 1, got another: make it with evaluation_policy."
            )
        if not callable(self.measure):
            raise ConfigurationError(f"Expected measure to be a function, got {type(self.measure).__name__}.")
        if isinstance(self.held_out, bool) or not isinstance(self.held_out, int) or self.held_out < 0:
            raise ConfigurationError(f"Expected held_out to be an integer >= 0, got {self.held_out!r}.")
        self.rows  # noqa: B018 - refuses what cannot be

    @property
    def rows(self) -> EvaluationRows:
        """The rows that are added up."""
        return EvaluationRows(self.bins, self.scores_share)

    def check_beside(self, policy: PrivacyPolicy) -> None:
        """Refuse a policy of everything else with which the evaluation cannot share samples or a budget."""
        check_beside(self.policy, policy, beside="an evaluation", release="the evaluation")

    def trained_on(self, samples: int) -> int:
        """How many of a machine's samples, the first ones, are trained on."""
        if self.held_out >= samples:
            raise ConfigurationError(
                f"Expected held_out below the machine's {samples} samples, got {self.held_out}: none would be left to "
                "train on."
            )
        return samples - self.held_out

    def part(self, terms: PartTerms) -> Evaluated:
        """The part of a machine that makes the evaluation."""
        own = terms.private_machine(self.policy, self.rows.width, terms.machine.num_rows)
        return Evaluated(self, terms.shapes, own, beside=terms.machine.policy)


class Evaluated(SidePart):
    """The part of a machine that makes a private evaluation.

    ``machine`` makes it, on the ledger and keys of everything else the machine releases, whose policy is ``beside``. It
    has all samples, those that were trained on too, because the ledger knows rows by their place.

    Notes
    -----
    **Formal guarantees.** The ledger counts the evaluation's sessions and all others together, so that they stay within
    one budget for replacement of one sample. The budget counts an evaluation of samples that were set aside in full,
    though no training used them.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        shapes: Sequence[tuple[int, ...]],
        machine: PrivateMachine,
        *,
        beside: PrivacyPolicy,
    ) -> None:
        evaluation.check_beside(beside)
        super().__init__(machine)
        self.evaluation = evaluation
        self.asked_at = [tuple(shape) for shape in (shapes if evaluation.shapes is None else evaluation.shapes)]
        self.rows = evaluation.rows
        self.first = machine.num_samples - evaluation.held_out if evaluation.held_out else 0
        """The first sample that is evaluated on."""

    @property
    def samples(self) -> int:
        """How many samples are evaluated on, a public number."""
        return self.machine.num_samples - self.first

    @property
    def entries(self) -> dict[str, Any]:
        """Further entries of a reply; independent of data."""
        return {
            protocol.NOISE_STD: float(self.machine.plan.noise_std),
            protocol.HELD_OUT: int(self.evaluation.held_out > 0),
            **({protocol.SCORES_SHARE: float(self.evaluation.scores_share)} if self.rows.bins else {}),
        }

    def answer(self, request: Request, batch: Callable[[slice], Any]) -> Release:
        """The sum of the samples' rows at the request's one query point, with noise; the only one of its session."""
        (model,) = request.query_points

        def rows(chosen: slice) -> NDArray[np.float64]:
            found = np.zeros((chosen.stop - chosen.start, self.rows.width))
            start = max(chosen.start, self.first)
            if start < chosen.stop:
                # A hostile model may make this overflow; what is not finite counts as wrong.
                with np.errstate(all="ignore"):
                    measured = self.evaluation.measure(model, batch(slice(start, chosen.stop)))
                found[start - chosen.start :] = self.rows.rows(measured)
            return found

        return replace(self.machine.release(request.session, request.ack, rows), samples=self.samples)


def held_out_samples(samples: int, share: float) -> int:
    """How many samples a share of them is: at least one of two, and never all."""
    if not 0 < share < 1:
        raise ConfigurationError(f"Expected a share of samples above 0 and below 1 to hold out, got {share!r}.")
    return min(max(math.floor(share * samples), 1), samples - 1)


_KEPT = (
    *("budget_mu", "delta", "mechanism", "noise_quality"),
    *("trust", "min_honest", "min_cohort", "budget_local_mu"),
)


@dataclass(frozen=True)
class EvaluationShare:
    """The shares of a machine's mu^2 and of its samples that are for a private evaluation of the model.

    Parameters
    ----------
    share : float
        Share of mu^2, above 0 and below 1. The training has the rest, so that both together are what was asked for.
    held_out : float
        Share of a machine's samples, the last ones, that is set aside and never trained on. 0: the evaluation is of the
        samples that were trained on.
    score_bins : int
        Bins of scores for each of two classes, for the area under the ROC curve; 0 for none. The server's
        :class:`~murmurfl.strategies.PrivateEvaluation` needs the same number.
    right : callable, optional
        Where the model is no classifier of the usual kind: how right a batch of its predictions is, from 0 to 1 for
        each sample. Of a module ``right(output, target)``. It must not mix samples.

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
        """An evaluation share from what a project wrote: a share of mu^2, an object of this class, or None."""
        if evaluation is None or isinstance(evaluation, EvaluationShare):
            return evaluation
        return cls(evaluation)

    def training(self, policy: PrivacyPolicy) -> PrivacyPolicy:
        """The policy of the training, with what the evaluation leaves of the mu of a policy of both.

        The evaluation takes samples that a training may have used, so an order that uses each once, ever, becomes one
        in which the budget counts sessions together.
        """
        once = policy.order == "in-turn" and policy.sample_participations == 1
        return replace(policy, mu=divided_mu(policy.mu, self.share)[1], order="again" if once else policy.order)

    def evaluation(self, policy: PrivacyPolicy, measure: Measure | None, samples: Samples) -> Evaluation:
        """A machine's evaluation, from the policy of a training and an evaluation together."""
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
