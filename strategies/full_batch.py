r"""Full-batch gradient descent, the server's half (ALGORITHMS section 8): every sample in every one of few rounds.

With g_t the mean gradient over the samples whose sums came back, noise and all, taken at w_{t-1} + beta v_{t-1},

    v_t = beta v_{t-1} - eta (g_t + lambda (w_{t-1} + beta v_{t-1})),    w_t = w_{t-1} + v_t

which is Nesterov's momentum. Published is w_t, or the average of w_1 .. w_t with weights 1 .. t, for much noise.

A round's sum is divided by the samples that it is a sum of, so a machine that is lost leaves a mean over fewer samples
and nothing else; nothing is carried over, because a gradient at a model that is gone is no use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Required, TypedDict, Unpack, get_args

import numpy as np

from ..privacy import ConfigurationError
from .base import ReleaseStrategy
from .layout import Vector
from .options import ReleaseOptions
from .projected import check_step
from .replies import Reply, RoundReport

Average = Literal["last", "linear"]
AVERAGES: tuple[Average, ...] = get_args(Average)


class DescentOptions(TypedDict, total=False):
    """What the update rule is, beside its step: options of :class:`FullBatch`, where they are described."""

    momentum: float
    nesterov: bool
    average: Average
    l2: float


class FullBatchOptions(DescentOptions, ReleaseOptions, total=False):
    """Options of :class:`FullBatch`, where they are described."""

    learning_rate: Required[float]


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
    """

    w: Vector
    velocity: Vector
    average: Vector
    steps: Vector


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
    state : FullBatchState
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
    if not np.isfinite(w).all():
        raise ConfigurationError(
            "Expected a finite step, got one that overflows: lower learning_rate, or look for a broken machine "
            "(largest_value)."
        )
    steps = state.steps + 1.0
    average = state.average + (2.0 / (float(steps) + 1.0)) * (w - state.average)  # k is 2 / (k + 1) of 1 + .. + k
    return FullBatchState(w, velocity, average, np.asarray(steps))


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
    **options
        See :class:`~murmurfl.strategies.ReleaseStrategy`.

    Notes
    -----
    **Formal guarantees.** As for :class:`~murmurfl.strategies.Mu2`: privacy is the machines', whose releases stand
    alone. A reply that is lost, refused or malformed changes nothing but what that round's mean is over, and so the
    noise in it; a round in which nothing came changes nothing.

    How many samples a release is a sum over is public, and the machine's own word: a machine that lies about it spoils
    the model as one that lies about its gradients does, and nobody's privacy.
    """

    state_type: ClassVar[type[FullBatchState]] = FullBatchState

    def __init__(
        self,
        *,
        learning_rate: float,
        momentum: float = 0.0,
        nesterov: bool = True,
        average: Average = "last",
        l2: float = 0.0,
        **options: Unpack[ReleaseOptions],
    ) -> None:
        super().__init__(**options)
        check_step(learning_rate)
        if not 0 <= momentum < 1:
            raise ConfigurationError(f"Expected 0 <= momentum < 1, got {momentum!r}.")
        if not (math.isfinite(l2) and l2 >= 0):
            raise ConfigurationError(f"Expected l2 >= 0 and finite, got {l2!r}.")
        if average not in AVERAGES:
            raise ConfigurationError(f"Expected average one of {AVERAGES}, got {average!r}.")
        self.learning_rate = float(learning_rate)
        self.momentum = float(momentum)
        self.nesterov = bool(nesterov)
        self.average: Average = average
        self.l2 = float(l2)

    def settings(self) -> dict[str, Any]:
        own = {"learning_rate": self.learning_rate, "momentum": self.momentum, "nesterov": self.nesterov}
        return {**super().settings(), **own, "average": self.average, "l2": self.l2}

    def check_reply(self, reply: Reply) -> bool:
        return reply.samples > 0  # nothing can be divided by what it does not say

    def initial_state(self, start: Vector) -> FullBatchState:
        return full_batch_start(start)

    def query_points(self, state: FullBatchState) -> tuple[Vector, ...]:
        return (query_point(state, momentum=self.momentum, nesterov=self.nesterov),)

    def next_state(self, state: FullBatchState, release_sum: Vector, report: RoundReport) -> FullBatchState:
        if not report.samples:
            return state  # nothing came
        return self.step(state, release_sum / report.samples, report.server_round)

    def step(self, state: FullBatchState, release_sum: Vector, server_round: int) -> FullBatchState:
        """The step along what :meth:`next_state` makes of a round's sum: the mean gradient."""
        return full_batch_step(
            state,
            release_sum,
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            nesterov=self.nesterov,
            l2=self.l2,
        )

    def model(self, state: FullBatchState) -> Vector:
        return state.average if self.average == "linear" else state.w
