r"""One shot, the server's half: ridge regression on the classes from one noisy release of second moments.

With A the noisy sum of x x^T and B that of x (onehot(y) - 1 / C)^T, of N samples,

    W = A_floor^-1 B,    floor = ridge x sqrt(m) sigma,

where A_floor is A with every eigenvalue below the floor raised to it, and sigma the noise on a value of each of m
releases. The floor is public, so choosing it costs nothing; it does not grow with the number of features, though noise
alone has eigenvalues of up to sqrt(2 k m) sigma, because classes lie in few directions. W x are least squares' scores.
Published are C W x, which predict the same and are as long as a linear discriminant's logits where classes are hard to
tell apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..privacy import ConfigurationError
from ..privacy.accounting.gdp import check_positive
from ..privacy.machine.clipping import Moments
from .rounds.options import RoundOptions, takes
from .rounds.replies import Layout, RoundReport, Vector
from .rounds.sampling import LateAnswers
from .rounds.strategy import ReleaseStrategy

LEAST_RIDGE = 1e-6
"""The floor without noise, for a sample and relative to the clip's square."""


@dataclass(frozen=True)
class OneShotState:
    """The model, shape (d,): the initial one before the release."""

    model: Vector


def ridge_scores(gram: NDArray[np.float64], targets: NDArray[np.float64], floor: float) -> NDArray[np.float64]:
    """A_floor^-1 B, shape (k, C), of A = ``gram`` (k, k) and B = ``targets`` (k, C): a pure function."""
    values, vectors = np.linalg.eigh(gram)
    return (vectors / np.maximum(values, floor)) @ (vectors.T @ targets)


@dataclass(frozen=True, kw_only=True, eq=False)
class OneShotOptions(RoundOptions):
    """What :class:`OneShot` takes."""

    clip_norm: float
    class_weight: float = 1.0
    noise_std: float = 0.0
    ridge: float = 11.0
    constant: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("clip_norm", self.clip_norm)
        check_positive("ridge", self.ridge)
        for name, value in (("noise_std", self.noise_std), ("constant", self.constant)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(f"Expected {name} >= 0 and finite, got {value!r}.")
        Moments(2, self.class_weight)


class OneShot(ReleaseStrategy[OneShotState]):
    """One release of second moments of each machine, and a linear model from their sum, for
    :class:`~murmurfl.clients.OneShotClient`.

    Parameters
    ----------
    clip_norm : float
        S, the machines' bound on features.
    class_weight : float
        A, the weight of classes in their releases.
    noise_std : float
        Sigma of the noise on each value of one machine's release; 0 without noise.
    ridge : float
        The floor, in units of the noise on a value of the sum; > 0.
    constant : float
        Value that machines append to features, where the model has a bias; 0 for none.
    **options
        See :class:`~murmurfl.strategies.ReleaseStrategy`. The model is a weight, of shape (C, k) or for two classes
        (k,), and where machines append a constant a bias of shape (C,) behind it.
    """

    state_type: ClassVar[type[OneShotState]] = OneShotState
    late_answers: ClassVar[LateAnswers] = "refused"  # there is one round

    options: OneShotOptions

    @takes(OneShotOptions)
    def __init__(self, **options: Any) -> None:
        super().__init__(self.options)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), **self.options.own}

    @property
    def release_layout(self) -> Layout:
        return [("moments", (self._moments.num_values(self._width),), np.dtype(np.float64))]

    def initial_state(self, start: Vector) -> OneShotState:
        self._check_layout()
        return OneShotState(start)

    def query_points(self, state: OneShotState) -> tuple[Vector, ...]:
        return ()

    def step(self, state: OneShotState, release_sum: Vector, server_round: int) -> OneShotState:
        raise NotImplementedError("The model depends on how many releases there are: see next_state.")

    def next_state(self, state: OneShotState, release_sum: Vector, report: RoundReport) -> OneShotState:
        if report.server_round > 1:
            raise ConfigurationError(f"Expected one round of one shot, got round {report.server_round}.")
        if not report.aggregated:
            return state  # nothing came: the initial model
        gram, targets = self._moments.read(release_sum, self.options.clip_norm)
        noise = math.sqrt(report.aggregated) * self.options.noise_std
        floor = max(self.options.ridge * noise, LEAST_RIDGE * self.options.clip_norm**2 * max(report.samples, 1))
        return OneShotState(self._arranged(self._moments.classes * ridge_scores(gram, targets, floor)))

    def model(self, state: OneShotState) -> Vector:
        return state.model

    def _arranged(self, scores: NDArray[np.float64]) -> Vector:
        """Scores of shape (k, C) as the model's values."""
        if self.options.constant:
            return np.concatenate([scores[:-1].T.ravel(), self.options.constant * scores[-1]])
        if len(self._layout[0][1]) == 1:
            return scores[:, 1] - scores[:, 0]
        return scores.T.ravel()

    @property
    def _moments(self) -> Moments:
        shape = self._layout[0][1]
        return Moments(shape[0] if len(shape) == 2 else 2, self.options.class_weight)

    @property
    def _width(self) -> int:
        """Features of a sample, the constant among them."""
        return self._layout[0][1][-1] + (self.options.constant > 0)

    def _check_layout(self) -> None:
        shapes = [shape for _, shape, _ in self._layout]
        weight = shapes[0]
        expected = [weight, (weight[0],)] if self.options.constant else [weight]
        if shapes != expected or not (len(weight) == 2 or (len(weight) == 1 and not self.options.constant)):
            raise ConfigurationError(
                "Expected a model of a weight of shape (C, k), with a bias of shape (C,) if there is a constant, or of "
                f"shape (k,) for two classes without one, got shapes {shapes} and constant {self.options.constant:g}."
            )
