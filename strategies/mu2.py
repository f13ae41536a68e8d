r"""DP-mu^2-FL, the server's half for an untrusted server (reshef-levy-2025, algorithm 1; ALGORITHMS section 2).

mu^2-SGD: anytime averaging with corrected momentum, weights alpha_t = t. With s_t the sum of what came back divided by
m, the number asked,

    q_t     = q_{t-1} + s_t
    w_{t+1} = Project_K(w_t - eta q_t)
    x_{t+1} = (1 - a) x_t + a w_{t+1},    a = alpha_{t+1} / alpha_{1:t+1} = 2 / (t + 2)

K is the ball of diameter D around the start. Always dividing by m, also when replies are lost, is what makes q the same
again once a machine is heard that carries over what was missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .projected import ProjectedStrategy, project_to_ball
from .rounds.layout import Vector


@dataclass(frozen=True)
class Mu2State:
    """State of mu^2-SGD after a round.

    Parameters
    ----------
    start : ndarray of shape (d,)
        Centre of the ball K.
    w, x, x_previous : ndarray of shape (d,)
        Iterate, query point and the query point before.
    release_sum : ndarray of shape (d,)
        m q: the sum of all releases aggregated, exact multiples of the machines' grid.
    """

    start: Vector
    w: Vector
    x: Vector
    x_previous: Vector
    release_sum: Vector


def mu2_start(start: Vector) -> Mu2State:
    """w_1 = x_1 = x_0, q_0 = 0."""
    return Mu2State(start=start, w=start, x=start, x_previous=start, release_sum=np.zeros_like(start))


def mu2_step(
    state: Mu2State,
    release_sum: Vector,
    server_round: int,
    *,
    clients_per_round: int,
    learning_rate: float,
    diameter: float,
    noise: Vector | float = 0.0,
) -> Mu2State:
    """One round of mu^2-SGD: a pure function.

    Parameters
    ----------
    state : Mu2State
        After round t - 1.
    release_sum : ndarray of shape (d,)
        Sum of the releases aggregated in round t.
    server_round : int
        t, from 1.
    clients_per_round : int
        m, machines asked.
    learning_rate : float
        eta.
    diameter : float
        D, diameter of the ball K around the start; infinite for no constraint.
    noise : ndarray of shape (d,), optional
        m Y_t of a trusted server: used in this step and not accumulated.

    Returns
    -------
    Mu2State
        After round t.
    """
    total = state.release_sum + release_sum
    q = (total + noise) / clients_per_round
    w = project_to_ball(state.w - learning_rate * q, state.start, diameter / 2)
    a = 2.0 / (server_round + 2)
    return Mu2State(state.start, w, (1.0 - a) * state.x + a * w, state.x, total)


class Mu2(ProjectedStrategy[Mu2State]):
    """DP-mu^2-FL with an untrusted server: the machines' noise cancels itself.

    Parameters
    ----------
    **options
        See :class:`~murmurfl.strategies.projected.ProjectedStrategy`.

    Notes
    -----
    The server adds no noise and is not trusted: everything it sees is covered by each machine's own guarantee
    (:class:`~murmurfl.clients.Mu2Client`), and so is everything computed here, as post-processing.

    The published model after round t is x_{t+1}. The papers output x_T, which leaves the replies of the last round
    unused though their privacy is spent; the analysis is the same for either.
    """

    state_type: ClassVar[type[Mu2State]] = Mu2State

    def initial_state(self, start: Vector) -> Mu2State:
        return mu2_start(start)

    def query_points(self, state: Mu2State) -> tuple[Vector, ...]:
        return state.x, state.x_previous

    def step(self, state: Mu2State, release_sum: Vector, server_round: int) -> Mu2State:
        return mu2_step(state, release_sum, server_round, **self.step_options())

    def model(self, state: Mu2State) -> Vector:
        return state.x
