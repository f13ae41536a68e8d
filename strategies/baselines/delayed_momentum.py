r"""Delayed momentum, the server's half: alternative 1 and appendix G of reshef-levy-2025, untrusted server.

Every machine keeps a momentum q_i of its own, corrected against the query point of its own last participation (eq. 12),
and the server has no momentum but theirs: with the machines M_t of round t

    q_t     = (1 / m) sum of q_{t,i} over M_t
    w_{t+1} = Project_K(w_t - eta q_t)
    x_{t+1} = (1 - a) x_t + a w_{t+1},    a = 2 / (t + 2)

A baseline: a correction reaches back to the last participation, M / m rounds and more, so the error of q_i and
the sensitivity grow with the delay. Appendix G has E ||q_t - t grad f(x_t)||^2 larger than that of mu^2-SGD by M / m
for a delay that is always M / m; for machines drawn uniformly the delay is geometric and it is 2 M / m - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..projected import ProjectedStrategy, project_to_ball
from ..rounds.attendance import LateAnswers
from ..rounds.layout import Vector


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
        See :class:`~murmurfl.strategies.projected.ProjectedStrategy`.

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
        return delayed_momentum_step(state, release_sum, server_round, **self.step_options())

    def model(self, state: DelayedMomentumState) -> Vector:
        return state.x
