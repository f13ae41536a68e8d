"""A strategy of our own: both halves, and the method that joins them."""

from dataclasses import dataclass

import numpy as np
from murmurfl.app.methods import Method
from murmurfl.clients import PrivateClient
from murmurfl.strategies import ReleaseStrategy, RoundOptions, Rule


@dataclass(frozen=True)
class AveragedState:
    """Iterate and running mean, each of shape (d,)."""

    w: np.ndarray
    mean: np.ndarray


@dataclass(frozen=True)
class AveragedRule(Rule[AveragedState]):
    """A step along the mean of releases, and the mean of all iterates; pure functions."""

    state_type = AveragedState

    learning_rate: float

    def init(self, start, layout):
        return AveragedState(start, start)

    def points(self, state):
        return (state.w,)

    def update(self, state, total, turn):
        w = state.w - self.learning_rate / turn.clients_per_round * total
        return AveragedState(w, state.mean + (w - state.mean) / turn.number)

    def model(self, state):
        return state.mean


class AveragedSGD(ReleaseStrategy[AveragedState]):
    """Noisy SGD that publishes the mean of its iterates."""

    def __init__(self, *, learning_rate, **options):
        super().__init__(RoundOptions(**options), AveragedRule(learning_rate))


class GradientClient(PrivateClient):
    """A client that is asked at one point."""

    def point_weights(self, server_round):
        return (1.0,)  # one gradient, at the one point


class Averaged(Method):
    """Averaged SGD, as the application sees it."""

    name = "averaged"
    sentence = "Noisy SGD that publishes the mean of its iterates."
    default_mechanism = "independent"
    client_type = GradientClient
    strategy_type = AveragedSGD
