r"""The papers' baselines, the server's halves: noisy SGD, ISRL-DP and delayed momentum, each with an untrusted server.

With g_t the sum of the releases divided by m, the number asked, and Project_K onto the ball of diameter D:

**Noisy SGD** (reshef-levy-2025, inspired by Abadi et al. 2016; ALGORITHMS 2.5): fresh noise, no momentum.
    w_{t+1} = Project_K(w_t - eta g_t); published is the last iterate.

**ISRL-DP** minibatch SGD (Lowy and Razaviyayn 2023, whose machines draw every batch anew; here batches are dealt)
    ``minibatch`` (their algorithm 1, equal weights): w_r = Project_K(w_{r-1} - eta g_r) with g_r asked for at w_{r-1};
    published is the average of w_1 .. w_r.
    ``accelerated`` (their algorithm 2 without strong convexity: AC-SA of Lan 2012): with a_r = 2 / (r + 1), g_r is
    asked for at (1 - a_r) v_{r-1} + a_r w_{r-1}, w_r = Project_K(w_{r-1} - r eta g_r), and
    v_r = (1 - a_r) v_{r-1} + a_r w_r is published.

**Delayed momentum** (reshef-levy-2025, alternative 1 and appendix G). Every machine keeps a momentum q_i of its own,
corrected against the query point of its own last participation (eq. 12), and the server has no momentum but theirs:
    q_t = (1 / m) sum of q_{t,i} over the machines of round t,    w_{t+1} = Project_K(w_t - eta q_t),
    x_{t+1} = (1 - a) x_t + a w_{t+1},    a = 2 / (t + 2).
A correction reaches back to the last participation, M / m rounds and more, so the error of q_i and the sensitivity grow
with the delay. Appendix G has E ||q_t - t grad f(x_t)||^2 larger than that of mu^2-SGD by M / m for a delay that is
always M / m; for machines drawn uniformly the delay is geometric and it is 2 M / m - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from ..privacy import ConfigurationError
from .mu2 import ProjectedOptions, ProjectedStrategy, project_to_ball
from .rounds.options import takes
from .rounds.replies import Vector
from .rounds.sampling import LateAnswers


@dataclass(frozen=True)
class NoisySGDState:
    """State of noisy SGD: centre of the ball K and iterate, each of shape (d,)."""

    start: Vector
    w: Vector


def noisy_sgd_step(
    state: NoisySGDState, release_sum: Vector, *, clients_per_round: int, learning_rate: float, diameter: float
) -> NoisySGDState:
    """One projected step: a pure function; parameters as in :func:`~murmurfl.strategies.mu2_step`."""
    w = state.w - learning_rate / clients_per_round * release_sum
    return NoisySGDState(state.start, project_to_ball(w, state.start, diameter / 2))


class NoisySGD(ProjectedStrategy[NoisySGDState]):
    """Noisy SGD with an untrusted server, for :class:`~murmurfl.clients.NoisySGDClient`.

    Parameters
    ----------
    **options
        See :class:`~murmurfl.strategies.mu2.ProjectedStrategy`.
    """

    state_type: ClassVar[type[NoisySGDState]] = NoisySGDState

    def initial_state(self, start: Vector) -> NoisySGDState:
        return NoisySGDState(start, start)

    def query_points(self, state: NoisySGDState) -> tuple[Vector, ...]:
        return (state.w,)

    def step(self, state: NoisySGDState, release_sum: Vector, server_round: int) -> NoisySGDState:
        return noisy_sgd_step(state, release_sum, **self.step_options)

    def model(self, state: NoisySGDState) -> Vector:
        return state.w


Variant = Literal["minibatch", "accelerated"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)


@dataclass(frozen=True)
class IsrlDpState:
    """State after a round: centre of the ball K, iterate w, published model v and query point, each of shape (d,)."""

    start: Vector
    w: Vector
    average: Vector
    query: Vector


def isrl_dp_step(
    state: IsrlDpState,
    release_sum: Vector,
    server_round: int,
    *,
    variant: Variant,
    clients_per_round: int,
    learning_rate: float,
    diameter: float,
) -> IsrlDpState:
    """One round: a pure function; parameters as in :func:`~murmurfl.strategies.mu2_step`."""
    r, accelerated = server_round, variant == "accelerated"
    step = learning_rate * (r if accelerated else 1) / clients_per_round
    w = project_to_ball(state.w - step * release_sum, state.start, diameter / 2)
    weight = 2.0 / (r + 1) if accelerated else 1.0 / r
    average = (1.0 - weight) * state.average + weight * w
    following = 2.0 / (r + 2)
    query = (1.0 - following) * average + following * w if accelerated else w
    return IsrlDpState(state.start, w, average, query)


@dataclass(frozen=True, kw_only=True, eq=False)
class IsrlDpOptions(ProjectedOptions):
    """What :class:`IsrlDp` takes."""

    variant: Variant = "minibatch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in VARIANTS:
            raise ConfigurationError(f"Expected variant one of {VARIANTS}, got {self.variant!r}.")


class IsrlDp(ProjectedStrategy[IsrlDpState]):
    """ISRL-DP minibatch SGD with an untrusted server, for :class:`~murmurfl.clients.IsrlDpClient`.

    Parameters
    ----------
    variant : {"minibatch", "accelerated"}
        The accelerated variant's step grows with the round: r eta.
    **options
        See :class:`~murmurfl.strategies.mu2.ProjectedStrategy`.
    """

    state_type: ClassVar[type[IsrlDpState]] = IsrlDpState

    options: IsrlDpOptions  # type: ignore[assignment]

    @takes(IsrlDpOptions)
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    def initial_state(self, start: Vector) -> IsrlDpState:
        return IsrlDpState(start, start, start, start)

    def query_points(self, state: IsrlDpState) -> tuple[Vector, ...]:
        return (state.query,)

    def step(self, state: IsrlDpState, release_sum: Vector, server_round: int) -> IsrlDpState:
        return isrl_dp_step(state, release_sum, server_round, variant=self.options.variant, **self.step_options)

    def model(self, state: IsrlDpState) -> Vector:
        return state.average


@dataclass(frozen=True)
class DelayedMomentumState:
    """State after round t: centre of the ball K, w_{t+1}, x_{t+1} and q_t, each of shape (d,)."""

    start: Vector
    w: Vector
    x: Vector
    q: Vector


def delayed_momentum_step(
    state: DelayedMomentumState,
    release_sum: Vector,
    server_round: int,
    *,
    clients_per_round: int,
    learning_rate: float,
    diameter: float,
) -> DelayedMomentumState:
    """One round: a pure function of the sum of momenta; parameters as in :func:`~murmurfl.strategies.mu2_step`."""
    q = release_sum / clients_per_round
    w = project_to_ball(state.w - learning_rate * q, state.start, diameter / 2)
    a = 2.0 / (server_round + 2)
    return DelayedMomentumState(state.start, w, (1.0 - a) * state.x + a * w, q)


class DelayedMomentum(ProjectedStrategy[DelayedMomentumState]):
    """Delayed momentum with an untrusted server, for :class:`~murmurfl.clients.DelayedMomentumClient`.

    Parameters
    ----------
    **options
        See :class:`~murmurfl.strategies.mu2.ProjectedStrategy`.

    Notes
    -----
    No release is ever acknowledged, so each is P_k - P_0, the machine's whole noisy momentum. A missing reply counts as
    zero in q_t.
    """

    state_type: ClassVar[type[DelayedMomentumState]] = DelayedMomentumState
    acknowledges: ClassVar[bool] = False
    late_answers: ClassVar[LateAnswers] = "dropped"  # the machine's next has all of it again

    def initial_state(self, start: Vector) -> DelayedMomentumState:
        return DelayedMomentumState(start, start, start, np.zeros_like(start))

    def query_points(self, state: DelayedMomentumState) -> tuple[Vector, ...]:
        return (state.x,)

    def step(self, state: DelayedMomentumState, release_sum: Vector, server_round: int) -> DelayedMomentumState:
        return delayed_momentum_step(state, release_sum, server_round, **self.step_options)

    def model(self, state: DelayedMomentumState) -> Vector:
        return state.x
