"""Private evaluation, the server's half: accuracy and AUC on everybody's samples, in one round after a training.

Each machine releases the noisy sum of its rows once (:mod:`murmurfl.privacy.side.evaluation_query`). The figures are
read from the sum of these, each with a 95 % interval (:mod:`.evaluation_figures`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import numpy as np
from flwr.app import ArrayRecord, MessageType
from flwr.serverapp import Grid

from ...privacy import EvaluationRows, MurmurflError, NoiseKeys, PrivacyPolicy, protocol
from ...privacy.side.evaluation_query import SCORES_SHARE
from ..rounds.layout import Layout, Vector
from ..rounds.options import RoundOptions
from ..rounds.replies import DirectMachines, RoundReport
from ..trust.server_trust import TrustedStrategy
from .evaluation_figures import EvaluationResult
from .one_answer import OneAnswer, one_sum, stated_std

logger = logging.getLogger("flwr")

_ROUNDING = 1e-9


class NotEvaluatedError(MurmurflError):
    """No machine has evaluated the model."""


@dataclass(frozen=True)
class EvaluationState:
    """The model that is evaluated, shape (d,), and the sum of the machines' rows; zeros before the round."""

    model: Vector
    total: Vector


class EvaluationOptions(RoundOptions, total=False):
    """Options of :class:`PrivateEvaluation`, where they are described."""

    num_clients: int | None
    bins: int
    scores_share: float
    of_updates: bool


class PrivateEvaluation(OneAnswer[EvaluationState]):
    """The evaluation of a model on machines' samples in one round, for machines configured for it.

    Parameters
    ----------
    num_clients : int, optional
        M, machines in all; all of them are asked. Default as many as are connected.
    bins : int
        Bins of scores, as on the machines; 0 where they count right predictions alone.
    scores_share : float
        Share of the evaluation's mu^2 spent on the scores, as on the machines.
    of_updates : bool
        Whether the machines are those of :class:`~murmurfl.strategies.CorrelatedFedAvg`, which asks them otherwise.
    **options
        See :class:`~murmurfl.strategies.ReleaseStrategy`; checkpoint and session are this round's own.

    Notes
    -----
    Each machine answers once in a session, and counts every session against its budget.

    Examples
    --------
    A training and an evaluation take two strategies, one after the other, over one grid::

        trained = FullBatch(num_clients=10, clients_per_round=10, learning_rate=0.1).start(grid, initial, num_rounds=9)
        print(PrivateEvaluation(num_clients=10).evaluate(grid, trained.arrays).sentence)
    """

    state_type: ClassVar[type[EvaluationState]] = EvaluationState

    def __init__(
        self,
        *,
        num_clients: int | None = None,
        bins: int = 0,
        scores_share: float = SCORES_SHARE,
        of_updates: bool = False,
        **options: Unpack[RoundOptions],
    ) -> None:
        self.rows = EvaluationRows(bins, scores_share)
        if of_updates:
            self.message_type_of_queries = MessageType.TRAIN  # type: ignore[misc]
        super().__init__(num_clients=num_clients, of=protocol.OF_EVALUATION, **options)

    def evaluate(
        self, grid: Grid | DirectMachines, arrays: ArrayRecord, *, timeout: float = 3600.0
    ) -> EvaluationResult:
        """The figures of a model, from all machines or from the checkpoint.

        Parameters
        ----------
        grid : Grid or DirectMachines
            Where the machines are.
        arrays : ArrayRecord
            The model.
        timeout : float
            Seconds to wait for replies; later ones are not in the figures.

        Raises
        ------
        NodesUnavailableError
            If too few machines are connected when the deadline passes.
        OpeningError
            Under secure aggregation, if the sum cannot be opened.
        NotEvaluatedError
            If no machine released anything, with what they said.

        Notes
        -----
        A server that was killed while machines answered asks again in the same session. murmurfl's nodes repeat their
        last answer; other machines have made their only release of it, and refuse.
        """
        self.start(grid, arrays, num_rounds=1, timeout=timeout)
        report = self.history[-1]
        if not report.aggregated or self.state is None:
            killed = (
                " by a server that was killed before it had their answers" if self.answered_to_another(report) else ""
            )
            raise NotEvaluatedError(
                f"Expected machines to evaluate the model, got nothing from {report.asked}{killed}: "
                f"{self.said(report)}. Machines must be configured for private evaluation; see their logs."
            )
        found = self.result(self.state, report)
        logger.info("Private evaluation: %s.", found.sentence)
        return found

    def result(self, state: EvaluationState, report: RoundReport) -> EvaluationResult:
        """The figures from the sum of a round."""
        noise = self.noise_std(self.rows.width)
        return EvaluationResult(
            right=self.rows.right(state.total, report.samples),
            right_std=self.rows.right_std(noise),
            samples=report.samples,
            machines=report.aggregated,
            held_out=all(held_out for _, held_out in self.heard),
            histograms=self.rows.histograms(state.total) if self.rows.bins else None,
            histogram_std=self.rows.histogram_std(noise) if self.rows.bins else 0.0,
            silent=self.rows.silent(state.total, report.samples),
            silent_std=self.rows.silent_std(noise),
        )

    @property
    def release_layout(self) -> Layout:
        return [("evaluation", (self.rows.width,), np.dtype(np.float64))]

    def initial_state(self, start: Vector) -> EvaluationState:
        return EvaluationState(start, np.zeros(self.rows.width))

    def query_points(self, state: EvaluationState) -> tuple[Vector, ...]:
        return (state.model,)

    def step(self, state: EvaluationState, release_sum: Vector, server_round: int) -> EvaluationState:
        """The state with the sum of the rows."""
        return EvaluationState(state.model, release_sum)

    def next_state(self, state: EvaluationState, release_sum: Vector, report: RoundReport) -> EvaluationState:
        if not report.samples:
            return state  # nothing came
        return self.step(state, self.trust.noisy(release_sum, report.server_round), report.server_round)

    def model(self, state: EvaluationState) -> Vector:
        return state.model

    def settings(self) -> dict[str, Any]:
        shares = {"scores_share": self.rows.scores_share} if self.rows.bins else {}
        return {**super().settings(), "bins": self.rows.bins, **shares}

    def read_entries(self, entries: Mapping[str, Any]) -> list[float] | None:
        """A machine's own noise, and whether it held samples out, by its entries; None where they make no sense."""
        std, held_out = stated_std(entries), entries.get(protocol.HELD_OUT)
        if std is None or held_out not in (0, 1):
            return None
        share = entries.get(protocol.SCORES_SHARE)
        if self.rows.bins and not (isinstance(share, float) and abs(share - self.rows.scores_share) <= _ROUNDING):
            return None
        return [std, float(held_out)]


class TrustedPrivateEvaluation(TrustedStrategy, PrivateEvaluation):
    """An evaluation with a trusted server.

    Parameters
    ----------
    policy : PrivacyPolicy
        The :func:`~murmurfl.privacy.evaluation_policy` that all machines were configured with.
    noise_keys : NoiseKeys, optional
        See :class:`~murmurfl.strategies.trust.server_trust.TrustedServer`.
    **options
        See :class:`PrivateEvaluation`.

    Notes
    -----
    **Formal guarantees.** The figures are mu-GDP for replacement of one sample of one machine, against everybody but
    the server itself, under the conditions of :class:`~murmurfl.strategies.trust.server_trust.TrustedStrategy`.
    Proof: docs/proofs/sensitivities.md.
    """

    def __init__(
        self, *, policy: PrivacyPolicy, noise_keys: NoiseKeys | None = None, **options: Unpack[EvaluationOptions]
    ) -> None:
        self.trust = one_sum(type(self), policy, noise_keys, "evaluation_policy")
        super().__init__(**options)
