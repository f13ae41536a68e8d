"""Private evaluation, the server's half: accuracy and AUC on everybody's samples, in one round after a training.

Each machine releases the noisy sum of its rows once (:mod:`murmurfl.privacy.side.evaluation_query`). The figures are
read from the sum of these, each with a 95 % interval that counts the noise.

**Accuracy.** a = count / n has noise of a known standard deviation s. The n samples are drawn from something in which
a share p of predictions is right. Then (a - p)^2 <= z^2 (p (1 - p) / n + s^2) holds for about 95 % of all outcomes,
z = 1.96, and the interval has every p for which it does: Wilson's interval, with noise beside the sampling. Without the
sampling it is a +- z s, for these very samples. Where machines draw from different sources, p (1 - p) / n is more than
the variance, so that the interval is not too short.

**AUC.** Scores are known in bins, and two scores in one bin count half. With the classes' noisy counts C_0 and C_1

    A = sum_b C_1[b] (C_0[0] + ... + C_0[b - 1] + C_0[b] / 2) / (|C_0| |C_1|),

whose noise follows from its derivatives with respect to each count, and from what products of two noises add to the
numerator. The variance of the sampling is at most A (1 - A) / min(|C_0|, |C_1|) (van Dantzig 1951), ties or not, which
is what is counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, MessageType
from flwr.serverapp import Grid
from numpy.typing import NDArray

from ...privacy import EvaluationRows, MurmurflError, protocol
from ...privacy.side.evaluation_query import SCORES_SHARE
from ..aggregation.noisy import TrustedStrategy
from ..rounds.options import takes
from ..rounds.replies import DirectMachines, Layout, RoundReport, Vector
from .mean_of_features import OneAnswer, OneAnswerOptions, OneSumOptions, one_sum, stated_std

logger = logging.getLogger("flwr")

Z_95 = 1.959963984540054
"""Standard deviations that a 95 % interval reaches."""

_SURELY = 4.0
"""Standard deviations of its noise from which a number is reported: by chance once in 30,000 times."""

EVALUATION_FIGURES = (
    *("accuracy", "interval", "noise_interval", "auc", "auc_interval", "auc_noise_interval"),
    *("samples", "machines", "held_out", "noise_std", "sentence"),
)
"""The names of an evaluation's figures as plain values."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class EvaluationResult:
    """The figures of a model from the noisy sum of an evaluation: post-processing of a release.

    Parameters
    ----------
    right : float
        Right predictions, noise and all.
    right_std : float
        The standard deviation of that noise.
    samples : int
        n, samples in the sum.
    machines : int
        Machines in the sum.
    held_out : bool
        Whether all of them had set those samples aside, so that nobody trained on them.
    histograms : ndarray of shape (2, B), optional
        Samples of class 0 and of class 1 with a score in each bin, noise and all.
    histogram_std : float
        The standard deviation of the noise in each of these.
    silent, silent_std : float
        Samples without a prediction, noise and all, and the noise's standard deviation. Each counts as half right.
    """

    right: float
    right_std: float
    samples: int
    machines: int
    held_out: bool = False
    histograms: NDArray[np.float64] | None = None
    histogram_std: float = 0.0
    silent: float = 0.0
    silent_std: float = 0.0

    @property
    def accuracy(self) -> float:
        """The share of right predictions, from 0 to 1."""
        return min(max(self.right / self.samples, 0.0), 1.0)

    @property
    def noise_std(self) -> float:
        """The standard deviation of the noise in :attr:`accuracy`."""
        return self.right_std / self.samples

    @property
    def noise_interval(self) -> Interval:
        """95 % interval of the accuracy on these very samples, for the noise alone."""
        return _around(self.accuracy, self.noise_std)

    @property
    def interval(self) -> Interval:
        """95 % interval of the accuracy in the population, for noise and sampling."""
        return noisy_share_interval(self.right / self.samples, self.samples, self.noise_std)

    @property
    def auc(self) -> float | None:
        """The area under the ROC curve, of scores in bins; None without scores, or where the noise hides a class."""
        curve = self._curve
        return None if curve is None else min(max(curve[0], 0.0), 1.0)

    @property
    def auc_noise_interval(self) -> Interval | None:
        """95 % interval of the AUC on these very samples, for the noise alone."""
        curve = self._curve
        return None if curve is None else _around(curve[0], curve[1])

    @property
    def auc_interval(self) -> Interval | None:
        """95 % interval of the AUC in the population; never too short for the sampling."""
        curve = self._curve
        return None if curve is None else _around(curve[0], math.hypot(curve[1], curve[2]))

    @property
    def _curve(self) -> tuple[float, float, float] | None:
        """The AUC, the standard deviation of its noise, and at most that of the sampling."""
        return None if self.histograms is None else noisy_auc(self.histograms, self.histogram_std)

    @property
    def sentence(self) -> str:
        """The figures in words."""
        of = "that were held out" if self.held_out else "that it was trained on"
        machines = f"{self.machines:,} machine{'s' * (self.machines != 1)}"
        parts = [
            f"accuracy {100 * self.accuracy:.1f} % (95 % interval {_percent(self.interval)}, noise and sampling; "
            f"noise alone {_percent(self.noise_interval)})"
        ]
        auc, both, alone = self.auc, self.auc_interval, self.auc_noise_interval
        if auc is not None and both is not None and alone is not None:
            parts.append(
                f"AUC {auc:.3f} ({both[0]:.3f} to {both[1]:.3f}; noise alone {alone[0]:.3f} to {alone[1]:.3f})"
            )
        elif self.histograms is not None:
            parts.append("no AUC: the noise hides one of the classes")
        if self.silent > max(_SURELY * self.silent_std, 0.5):
            of += f"; about {self.silent:,.0f} of them could not be evaluated, and count as half right"
        return f"{', '.join(parts)}, on {self.samples:,} samples of {machines} {of}"

    @property
    def document(self) -> dict[str, Any]:
        """The figures as plain values."""
        intervals = self.interval, self.noise_interval, self.auc_interval, self.auc_noise_interval
        plain = [None if interval is None else list(interval) for interval in intervals]
        accuracy, alone, auc, auc_alone = plain
        values = (
            *(self.accuracy, accuracy, alone, self.auc, auc, auc_alone),
            *(self.samples, self.machines, self.held_out, self.noise_std, self.sentence),
        )
        return dict(zip(EVALUATION_FIGURES, values, strict=True))


def noisy_share_interval(share: float, samples: int, noise_std: float, z: float = Z_95) -> Interval:
    """Wilson's interval for a share with Gaussian noise, which may lie outside of 0 and 1.

    It has every p with (share - p)^2 <= z^2 (p (1 - p) / samples + noise_std^2), within 0 and 1. A share from outside
    counts as the nearest inside: that leaves no such p out, and what is left is never a single figure.
    """
    share, drawn = min(max(share, 0.0), 1.0), z * z / samples
    middle = share + drawn / 2.0
    reach = math.sqrt(middle * middle - (1.0 + drawn) * (share * share - (z * noise_std) ** 2))
    return _within((middle - reach) / (1.0 + drawn), (middle + reach) / (1.0 + drawn))


def noisy_auc(histograms: NDArray[np.float64], noise_std: float, z: float = Z_95) -> tuple[float, float, float] | None:
    """The area under the ROC curve of scores in bins, with noise of one standard deviation on every count.

    Parameters
    ----------
    histograms : ndarray of shape (2, B)
        Counts of class 0 and class 1, from the lowest scores on.
    z : float
        Standard deviations of its noise that a class's count must exceed.

    Returns
    -------
    tuple of float or None
        The area, the standard deviation of its noise, and an upper bound on that of the sampling; None where the noise
        hides a class.
    """
    zeros, ones = np.asarray(histograms, dtype=np.float64)
    total_zeros, total_ones = float(zeros.sum()), float(ones.sum())
    bins = len(zeros)
    if min(total_zeros, total_ones) <= max(z * noise_std * math.sqrt(bins), 0.5):
        return None
    below = np.cumsum(zeros) - zeros / 2.0
    above = total_ones - (np.cumsum(ones) - ones / 2.0)
    pairs = total_zeros * total_ones
    area = float(ones @ below) / pairs
    slopes = np.concatenate([below / pairs - area / total_ones, above / pairs - area / total_zeros])
    # Of the products of two noises in the numerator: B (B - 1) / 2 of weight 1 and B of weight 1/2.
    products = noise_std**2 * math.sqrt(bins * (bins - 1) / 2.0 + bins / 4.0) / pairs
    noise = math.hypot(noise_std * float(np.linalg.norm(slopes)), products)
    within = min(max(area, 0.0), 1.0)
    return area, noise, math.sqrt(within * (1.0 - within) / min(total_zeros, total_ones))


def _around(value: float, std: float) -> Interval:
    value = min(max(value, 0.0), 1.0)  # noise carries it out; an interval there would be a single figure
    return _within(value - Z_95 * std, value + Z_95 * std)


def _within(low: float, high: float) -> Interval:
    return min(max(low, 0.0), 1.0), min(max(high, 0.0), 1.0)


def _percent(interval: Interval) -> str:
    return f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f} %"


_ROUNDING = 1e-9


class NotEvaluatedError(MurmurflError):
    """No machine has evaluated the model."""


@dataclass(frozen=True)
class EvaluationState:
    """The model that is evaluated, shape (d,), and the sum of the machines' rows; zeros before the round."""

    model: Vector
    total: Vector


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationOptions(OneAnswerOptions):
    """What :class:`PrivateEvaluation` takes."""

    bins: int = 0
    scores_share: float = SCORES_SHARE
    of_updates: bool = False


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
    of = protocol.OF_EVALUATION

    options: EvaluationOptions

    @takes(EvaluationOptions)
    def __init__(self, **options: Any) -> None:
        self.rows = EvaluationRows(self.options.bins, self.options.scores_share)
        if self.options.of_updates:
            self.message_type_of_queries = MessageType.TRAIN  # type: ignore[misc]
        super().__init__(**options)

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


@dataclass(frozen=True, kw_only=True, eq=False)
class TrustedEvaluationOptions(OneSumOptions, EvaluationOptions):
    """What :class:`TrustedPrivateEvaluation` takes."""


class TrustedPrivateEvaluation(TrustedStrategy, PrivateEvaluation):
    """An evaluation with a trusted server.

    Parameters
    ----------
    policy : PrivacyPolicy
        The :func:`~murmurfl.privacy.evaluation_policy` that all machines were configured with.
    noise_keys : NoiseKeys, optional
        See :class:`~murmurfl.strategies.aggregation.noisy.TrustedOptions`.
    **options
        See :class:`PrivateEvaluation`.

    Notes
    -----
    **Formal guarantees.** The figures are mu-GDP for replacement of one sample of one machine, against everybody but
    the server itself, under the conditions of :class:`~murmurfl.strategies.aggregation.noisy.TrustedStrategy`.
    Proof: docs/proofs/sensitivities.md.
    """

    options: TrustedEvaluationOptions  # type: ignore[assignment]

    @takes(TrustedEvaluationOptions)
    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "aggregator": one_sum(type(self), self.options, "evaluation_policy")})
