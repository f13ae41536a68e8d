"""A strategy of one's own: heavy-ball momentum over the machines' releases.

v_t = beta v_{t-1} + (1 / m) sum of the releases,    x_{t+1} = x_t - eta v_t
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from murmurfl.strategies import ReleaseStrategy


@dataclass(frozen=True)
class MomentumState:
    """Model and velocity, each of shape (d,): what a checkpoint keeps."""

    x: np.ndarray
    velocity: np.ndarray


def momentum_step(state: MomentumState, mean: np.ndarray, *, learning_rate: float, momentum: float) -> MomentumState:
    """One round: a pure function."""
    velocity = momentum * state.velocity + mean
    return MomentumState(state.x - learning_rate * velocity, velocity)


class HeavyBall(ReleaseStrategy[MomentumState]):
    """Sampling, messages, losses, refusals and checkpoints are inherited; this is the rule."""

    state_type = MomentumState

    def __init__(self, *, learning_rate: float, momentum: float = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self.learning_rate, self.momentum = learning_rate, momentum

    def settings(self) -> dict[str, Any]:
        """What a checkpoint must agree on."""
        return {**super().settings(), "learning_rate": self.learning_rate, "momentum": self.momentum}

    def initial_state(self, start: np.ndarray) -> MomentumState:
        """Before the first round."""
        return MomentumState(start, np.zeros_like(start))

    def query_points(self, state: MomentumState) -> tuple[np.ndarray]:
        """Where machines compute their gradients."""
        return (state.x,)

    def step(self, state: MomentumState, release_sum: np.ndarray, server_round: int) -> MomentumState:
        """The next state."""
        mean = release_sum / self.clients_per_round
        return momentum_step(state, mean, learning_rate=self.learning_rate, momentum=self.momentum)

    def model(self, state: MomentumState) -> np.ndarray:
        """The model to publish."""
        return state.x
