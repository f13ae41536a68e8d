"""Noisy SGD, the server's half: the baseline of reshef-levy-2025, inspired by Abadi et al. 2016 (ALGORITHMS 2.5).

    w_{t+1} = Project_K(w_t - eta g_t),    g_t = sum of the releases / m

with fresh noise in every release and no momentum. The published model is the last iterate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from .base import ReleaseStrategy
from .mu2 import check_step, project_to_ball
from .replies import Vector


@dataclass(frozen=True)
class NoisySGDState:
    """State of noisy SGD: centre of the ball K and iterate, each of shape (d,)."""

    start: Vector
    w: Vector


def noisy_sgd_step(
    state: NoisySGDState, release_sum: Vector, *, clients_per_round: int, learning_rate: float, diameter: float
) -> NoisySGDState:
    """One projected step: a pure function; parameters as in :func:`~murmurfl.strategies.mu2.mu2_step`."""
    w = state.w - learning_rate / clients_per_round * release_sum
    return NoisySGDState(state.start, project_to_ball(w, state.start, diameter / 2))


class NoisySGD(ReleaseStrategy[NoisySGDState]):
    """Noisy SGD with an untrusted server, for :class:`~murmurfl.clients.NoisySGDClient`.

    Parameters
    ----------
    num_clients, clients_per_round, seed, session, node_deadline_s, checkpoint, on_round
        See :class:`~murmurfl.strategies.base.ReleaseStrategy`.
    learning_rate : float
        eta > 0.
    diameter : float
        D > 0, diameter of the ball K around the initial model; default none.

    Notes
    -----
    **Formal guarantees.** As for :class:`~murmurfl.strategies.Mu2`: privacy is the machines'.
    """

    state_type: ClassVar[type[NoisySGDState]] = NoisySGDState

    def __init__(
        self,
        *,
        num_clients: int,
        clients_per_round: int,
        learning_rate: float,
        diameter: float = math.inf,
        **options: Any,
    ) -> None:
        super().__init__(num_clients=num_clients, clients_per_round=clients_per_round, **options)
        check_step(learning_rate, diameter)
        self.learning_rate = float(learning_rate)
        self.diameter = float(diameter)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "learning_rate": self.learning_rate, "diameter": self.diameter}

    def initial_state(self, start: Vector) -> NoisySGDState:
        return NoisySGDState(start, start)

    def query_points(self, state: NoisySGDState) -> tuple[Vector, ...]:
        return (state.w,)

    def step(self, state: NoisySGDState, release_sum: Vector, server_round: int) -> NoisySGDState:
        return noisy_sgd_step(
            state,
            release_sum,
            clients_per_round=self.clients_per_round,
            learning_rate=self.learning_rate,
            diameter=self.diameter,
        )

    def model(self, state: NoisySGDState) -> Vector:
        return state.w
