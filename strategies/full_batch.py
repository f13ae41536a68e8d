r"""Full-batch gradient descent, the server's half (ALGORITHMS section 8): every sample in every one of few rounds.

With g_t the mean gradient over the samples whose sums came back, noise and all, taken at w_{t-1} + beta v_{t-1},

    v_t = beta v_{t-1} - eta (g_t + lambda (w_{t-1} + beta v_{t-1})),    w_t = w_{t-1} + v_t

which is Nesterov's momentum. Published is w_t, or the average of w_1 .. w_t with weights 1 .. t, for much noise.

A round's sum is divided by the samples that it is a sum of, so a machine that is lost leaves a mean over fewer samples
and nothing else; nothing is carried over, because a gradient at a model that is gone is no use.

With a target quantile the clip moves as well: machines say beside each gradient whether it was clipped, with the same
noise (:mod:`murmurfl.privacy.queries.clipped_share`), and the next round's clip follows from how many were.

With a trusted server machines send the sums of their clipped gradients without noise. One sample changes the sum of all
machines by at most Delta = 2 S in each of T rounds, so noise of sigma = Delta sqrt(T) / mu, fresh and once a round,
makes all published models together mu-GDP. With shares s_t of the budget it is sigma_t = Delta sqrt(sum s / s_t) / mu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from flwr.app import ArrayRecord

from ..privacy import ConfigurationError
from ..privacy.accounting.gdp import check_positive
from ..privacy.queries.clipped_share import QUANTILE_SHARE, CountedRows
from .aggregation.noisy import FreshNoise, TrustedOptions, TrustedStrategy
from .mu2 import check_finite
from .rounds.options import StepOptions, takes
from .rounds.replies import Layout, Reply, RoundReport, Vector, array_record
from .rounds.sampling import LateAnswers
from .rounds.strategy import ReleaseStrategy

Average = Literal["last", "linear"]
AVERAGES: tuple[Average, ...] = get_args(Average)
QUANTILE_RATE = 4.0
"""How fast a clip follows in the first round. There are few rounds, so it must find its place in the first ones, and
then stay near it: gradients become shorter as a model learns, and a clip that followed them would stop it."""
_SLOWING = 1.5
"""The t-th step of a clip's logarithm is 1 / t^1.5 of the first: together they reach e^3 times a clip that is too short
for any gradient at a quantile of 0.3, and e^-7 times one that is too long."""
_FARTHEST = 1e6
"""How many times the first clip a clip may become, and its inverse: noise alone must not lead it to 0 or infinity."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FullBatchOptions(StepOptions):
    """What :class:`FullBatch` takes: the update rule's options, and those of the moving clip."""

    momentum: float = 0.0
    nesterov: bool = True
    average: Average = "last"
    l2: float = 0.0

    quantile: float = 0.0
    quantile_share: float = QUANTILE_SHARE
    quantile_rate: float = QUANTILE_RATE
    first_clip: float = 0.0
    relative_steps: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(f"Expected 0 <= momentum < 1, got {self.momentum!r}.")
        if not (math.isfinite(self.l2) and self.l2 >= 0):
            raise ConfigurationError(f"Expected l2 >= 0 and finite, got {self.l2!r}.")
        if self.average not in AVERAGES:
            raise ConfigurationError(f"Expected average one of {AVERAGES}, got {self.average!r}.")
        if not 0 <= self.quantile < 1:
            raise ConfigurationError(f"Expected quantile above 0 and below 1, or 0 for none, got {self.quantile!r}.")
        check_positive("quantile_rate", self.quantile_rate)
        if not math.isfinite(self.first_clip) or (self.first_clip > 0) != (self.quantile > 0):
            expected = "> 0 and finite with a quantile" if self.quantile else "left at 0 without a quantile"
            raise ConfigurationError(f"Expected first_clip {expected}, got {self.first_clip!r}.")


@dataclass(frozen=True)
class FullBatchState:
    """State after a round.

    Parameters
    ----------
    w, velocity : ndarray of shape (d,)
        Iterate, and its last change.
    average : ndarray of shape (d,)
        Of the iterates so far, with weights 1, 2, and so on.
    steps : ndarray of shape ()
        How many steps were taken: rounds in which something came.
    clip : ndarray of shape ()
        C of the next round, where it follows the gradients; else 0.
    """

    w: Vector
    velocity: Vector
    average: Vector
    steps: Vector
    clip: Vector = field(default_factory=lambda: np.zeros(()))


def full_batch_start(start: Vector) -> FullBatchState:
    """w_0, at rest."""
    return FullBatchState(start, np.zeros_like(start), start, np.zeros(()))


def query_point(state: FullBatchState, *, momentum: float, nesterov: bool = True) -> Vector:
    """Where the next gradient is taken: w + beta v, or w without Nesterov's look ahead."""
    return state.w + momentum * state.velocity if nesterov else state.w


def full_batch_step(
    state: FullBatchState,
    gradient: Vector,
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = True,
    l2: float = 0.0,
) -> FullBatchState:
    """One step: a pure function.

    Parameters
    ----------
    gradient : ndarray of shape (d,)
        The mean over samples, taken at :func:`query_point`.
    learning_rate, momentum, l2 : float
        eta, beta and lambda.
    nesterov : bool
        Whether the gradient was taken ahead of w.
    """
    point = query_point(state, momentum=momentum, nesterov=nesterov)
    with np.errstate(over="ignore", invalid="ignore"):  # looked at below
        velocity = momentum * state.velocity - learning_rate * (gradient + l2 * point)
        w = state.w + velocity
    check_finite(w)
    steps = state.steps + 1.0
    average = state.average + (2.0 / (float(steps) + 1.0)) * (w - state.average)  # k is 2 / (k + 1) of 1 + .. + k
    return replace(state, w=w, velocity=velocity, average=average, steps=np.asarray(steps))


def next_clip(clip: float, within: float, *, quantile: float, rate: float) -> float:
    """The clip after one at which the share ``within`` was not cut, where it should be ``quantile``: pure."""
    return clip * math.exp(-rate * (within - quantile))


class FullBatch(ReleaseStrategy[FullBatchState]):
    """Full batches with an untrusted server, for :class:`~murmurfl.clients.FullBatchClient`.

    Parameters
    ----------
    learning_rate : float
        eta > 0, the step along the mean gradient.
    momentum : float
        beta, 0 <= beta < 1.
    nesterov : bool
        Whether gradients are taken at w + beta v; else at w (heavy ball).
    average : {"last", "linear"}
        Which model is published: the last iterate, or the average of all with weights 1 .. t.
    l2 : float
        lambda >= 0: lambda ||w||^2 / 2 is added to the loss, here and not on the machines.
    quantile : float
        Share of gradients that is not to be clipped, 0 < quantile < 1, for machines with
        :class:`~murmurfl.clients.CountedGradients`; 0 where the machines' clip stays.
    quantile_share : float
        Share of mu^2 spent on counting clipped gradients, as on the machines.
    quantile_rate : float
        How fast the clip follows, > 0: in the t-th round in which something came, rate / t^1.5.
    first_clip : float
        C of the first round, > 0 with a quantile.
    relative_steps : bool
        Whether eta C, and so the noise in a step, stays what it is at the first clip, which is then the longest; else
        eta stays.
    **options
        See :class:`~murmurfl.strategies.ReleaseStrategy`.

    Notes
    -----
    A reply that is lost, refused or malformed leaves a mean over fewer samples, with more noise; a round in which
    nothing came changes nothing.

    The clip of a query point follows from earlier releases. No machine's privacy rests on it: a machine bounds what it
    releases whatever clip it is sent. The number of samples in a release is public, and the machine's own account: a
    lie about it spoils the model, as one about gradients does, and nobody's privacy.
    """

    state_type: ClassVar[type[FullBatchState]] = FullBatchState
    late_answers: ClassVar[LateAnswers] = "dropped"  # a gradient at a model that is gone

    options: FullBatchOptions

    @takes(FullBatchOptions)
    def __init__(self, **options: Any) -> None:
        super().__init__(self.options, aggregator=options.get("aggregator"))
        self.counted = CountedRows(self.options.quantile_share)

    def settings(self) -> dict[str, Any]:
        own = self.options.own
        if not self.options.quantile:
            own = {name: own[name] for name in ("learning_rate", "momentum", "nesterov", "average", "l2")}
        return {**super().settings(), **own}

    @property
    def release_layout(self) -> Layout:
        model = super().release_layout
        return [*model, ("clip", (1,), np.dtype(np.float64))] if self.options.quantile else model

    def _asked_at(self, point: Vector) -> ArrayRecord:
        return array_record(point, self.release_layout)

    def check_reply(self, reply: Reply) -> bool:
        return reply.samples > 0  # nothing can be divided by what it does not say

    def initial_state(self, start: Vector) -> FullBatchState:
        return replace(full_batch_start(start), clip=np.asarray(self.options.first_clip))

    def query_points(self, state: FullBatchState) -> tuple[Vector, ...]:
        point = query_point(state, momentum=self.options.momentum, nesterov=self.options.nesterov)
        return (np.append(point, state.clip),) if self.options.quantile else (point,)

    def next_state(self, state: FullBatchState, release_sum: Vector, report: RoundReport) -> FullBatchState:
        if not report.samples:
            return state  # nothing came
        return self.step(state, release_sum / report.samples, report.server_round)

    def step(self, state: FullBatchState, release_sum: Vector, server_round: int) -> FullBatchState:
        """The step along the mean gradient, or the mean of counted rows, which :meth:`next_state` makes of the sum."""
        if self.options.quantile:
            clip = float(state.clip)
            release_sum, within = self.counted.read(release_sum, clip)
            rate = self.options.quantile_rate / (1.0 + float(state.steps)) ** _SLOWING
            following = next_clip(clip, within, quantile=self.options.quantile, rate=rate)
            farthest = 1.0 if self.options.relative_steps else _FARTHEST
            following = min(max(following, self.options.first_clip / _FARTHEST), self.options.first_clip * farthest)
            # A clip that was too long let in more noise than there need be: the step is as short as the next one says.
            release_sum *= self.options.first_clip / clip if self.options.relative_steps else min(1.0, following / clip)
            state = replace(state, clip=np.asarray(following))
        return full_batch_step(
            state,
            release_sum,
            learning_rate=self.options.learning_rate,
            momentum=self.options.momentum,
            nesterov=self.options.nesterov,
            l2=self.options.l2,
        )

    def model(self, state: FullBatchState) -> Vector:
        return state.average if self.options.average == "linear" else state.w


@dataclass(frozen=True, kw_only=True, eq=False)
class TrustedFullBatchOptions(TrustedOptions, FullBatchOptions):
    """What :class:`TrustedFullBatch` takes."""

    shares: str = "uniform"


class TrustedFullBatch(TrustedStrategy, FullBatch):
    """Full batches with a trusted server.

    Parameters
    ----------
    policy, num_rounds, noise_keys
        See :class:`~murmurfl.strategies.aggregation.noisy.TrustedOptions`. The policy has ``order="all"``.
    shares : str
        How mu^2 is shared among rounds (:class:`~murmurfl.privacy.mechanisms.IndependentNoise`).
    **options
        See :class:`FullBatch`.

    Notes
    -----
    **Formal guarantees.** The sequence of published models is mu-GDP for replacement of one sample of one machine,
    against everybody but the server itself, under the conditions of
    :class:`~murmurfl.strategies.aggregation.noisy.TrustedStrategy`. A sample is in at most one sum a round, for a
    machine's reply counts once, and every round in which something came has noise of its own. How many samples a sum is
    over is public. Proof: docs/proofs/returning-samples.md.
    """

    options: TrustedFullBatchOptions  # type: ignore[assignment]

    @takes(TrustedFullBatchOptions)
    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "aggregator": FreshNoise(self.options, shares=self.options.shares)})
        policy = self.options.policy
        if policy.order != "all" or policy.release_rule != "paper":
            raise ConfigurationError(
                "Expected a policy with order 'all' and release_rule 'paper' for TrustedFullBatch, got "
                f"{policy.order!r} and {policy.release_rule!r}: the noise is for sums over all samples, each "
                "of which stands alone."
            )
        if self.options.quantile:
            raise ConfigurationError(
                f"Expected quantile 0 for TrustedFullBatch, got {self.options.quantile:g}: its noise is for gradients "
                "alone."
            )

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "shares": self.options.shares}
