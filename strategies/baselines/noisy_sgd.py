"""Noisy SGD, the server's half: the baseline of reshef-levy-2025, inspired by Abadi et al. 2016 (ALGORITHMS 2.5).

    w_{t+1} = Project_K(w_t - eta g_t),    g_t = sum of the releases / m

with fresh noise in every release and no momentum. The published model is the last iterate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..projected import ProjectedStrategy, project_to_ball
from ..rounds.layout import Vector


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
        See :class:`~murmurfl.strategies.projected.ProjectedStrategy`.
    """

    state_type: ClassVar[type[NoisySGDState]] = NoisySGDState

    def initial_state(self, start: Vector) -> NoisySGDState:
        return NoisySGDState(start, start)

    def query_points(self, state: NoisySGDState) -> tuple[Vector, ...]:
        return (state.w,)

    def step(self, state: NoisySGDState, release_sum: Vector, server_round: int) -> NoisySGDState:
        return noisy_sgd_step(state, release_sum, **self.step_options())

    def model(self, state: NoisySGDState) -> Vector:
        return state.w
