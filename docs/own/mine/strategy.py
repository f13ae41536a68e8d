"""A strategy of our own: both halves, and the method that joins them."""

from dataclasses import dataclass

import numpy as np
from murmurfl.app.methods import Method
from murmurfl.clients import PrivateClient
from murmurfl.strategies import ReleaseStrategy, RoundOptions


@dataclass(frozen=True)
class AveragedState:
    """Iterate and running mean, each of shape (d,)."""

    w: np.ndarray
    mean: np.ndarray


class AveragedSGD(ReleaseStrategy[AveragedState]):
    """Noisy SGD that publishes the mean of its iterates."""

    state_type = AveragedState

    def __init__(self, *, learning_rate, **options):
        super().__init__(RoundOptions(**options))
        self.learning_rate = learning_rate

    def settings(self):
        return {**super().settings(), "learning_rate": self.learning_rate}

    def initial_state(self, start):
        return AveragedState(start, start)

    def query_points(self, state):
        return (state.w,)

    def step(self, state, release_sum, server_round):
        w = state.w - self.learning_rate / self.clients_per_round * release_sum
        return AveragedState(w, state.mean + (w - state.mean) / server_round)

    def model(self, state):
        return state.mean


class GradientClient(PrivateClient):
    """A machine that is asked at one point."""

    def point_weights(self, server_round):
        return (1.0,)  # one gradient, at the one point


class Averaged(Method):
    """Averaged SGD, as the application sees it."""

    name = "averaged"
    sentence = "Noisy SGD that publishes the mean of its iterates."
    default_mechanism = "independent"
    client_type = GradientClient
    strategy_type = AveragedSGD
