"""Models in closed form: softmax regression, losses of one margin <w, a>, and the distance to a sample."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients.adapters.per_sample_gradients import OuterProducts
from ...privacy.errors import ConfigurationError
from ...privacy.release.clipping import clip_per_sample
from ..settings.run_keys import RunKeys
from .model import Batch, Model, ModelKind, Parameters, Recipe

_LARGEST_RATE_TOGETHER = 0.5


class SoftmaxRegression(Model):
    """Softmax regression in closed form and float64, starting at zero (the papers' model).

    Without ``bias`` for features with a constant.
    """

    rows_unmixed = True
    weighs_classes = True

    def __init__(self, num_features: int, num_classes: int, *, bias: bool = True) -> None:
        super().__init__(num_features, num_classes)
        self.bias = bias
        self.shapes = [(num_classes, num_features), (num_classes,)] if bias else [(num_classes, num_features)]
        self.names = ["weight", "bias"] if bias else ["weight"]

    def initial_parameters(self, seed: int) -> list[NDArray[np.float64]]:
        return [np.zeros(shape) for shape in self.shapes]

    def __call__(self, parameters: Parameters, samples: Batch) -> NDArray[np.float64]:
        features = np.asarray(samples[0], dtype=np.float64)
        residuals = self._residuals(parameters, features, samples[1])
        split = self.num_classes * self.num_features
        gradients = np.empty((len(residuals), split + self.num_classes * self.bias))
        np.multiply(
            residuals[:, :, None],
            features[:, None, :],
            out=gradients[:, :split].reshape(len(residuals), self.num_classes, self.num_features),
        )
        if self.bias:
            gradients[:, split:] = residuals
        return gradients

    def stacked(
        self, points: Sequence[Parameters], weights: Sequence[float | NDArray[np.float64]], samples: Batch
    ) -> OuterProducts:
        """Weighted sums of each sample's gradients at several points, as outer products with its features."""
        features = np.asarray(samples[0], dtype=np.float64)
        residuals = np.zeros((len(features), self.num_classes))
        for point, weight in zip(points, weights, strict=True):
            if isinstance(weight, np.ndarray):
                chosen = np.flatnonzero(weight)
                there = self._residuals(point, features[chosen], samples[1][chosen])
                residuals[chosen] += weight[chosen, None] * there
            elif weight:
                residuals += weight * self._residuals(point, features, samples[1])
        return OuterProducts(residuals, features, bias=self.bias)

    def _residuals(self, parameters: Parameters, features: NDArray[np.float64], labels: NDArray[Any]) -> NDArray[Any]:
        """Softmax minus one-hot label, times the weight of that class, shape (samples, classes)."""
        residuals = features @ np.asarray(parameters[0], dtype=np.float64).T
        if self.bias:
            residuals += parameters[1]
        residuals -= np.maximum.reduce(residuals, axis=1, keepdims=True)
        np.exp(residuals, out=residuals)
        residuals /= np.add.reduce(residuals, axis=1, keepdims=True)
        residuals[np.arange(len(labels)), labels] -= 1.0
        if self.class_weights is not None:
            residuals *= self.class_weights[labels, None]
        return residuals

    def logits(self, parameters: Parameters, features: NDArray[Any]) -> NDArray[np.floating]:
        weight, *bias = (np.asarray(values, dtype=features.dtype) for values in parameters)
        scores = features @ weight.T + bias[0] if self.bias else features @ weight.T
        return scores if self.temperature == 1.0 else scores / self.temperature


class Softmax(ModelKind):
    """Softmax regression, with bias unless the features have a constant."""

    name = "softmax"
    sentence = "softmax regression, the papers' model"
    paper_constants = True
    convex = True
    scores = True

    def make(self, num_features: int, num_classes: int, feature_bound: float) -> Model:
        return SoftmaxRegression(num_features, num_classes)

    def make_biasless(self, num_features: int, num_classes: int, feature_bound: float) -> Model:
        return SoftmaxRegression(num_features, num_classes, bias=False)


class LinearModel(Model):
    """A loss of the margin <w, a> without bias, in closed form and float64: convex and smooth.

    Parameters
    ----------
    feature_bound : float
        R, public: longer features are scaled down to this L2 norm.

    Notes
    -----
    Declares itself convex and smooth for :class:`~murmurfl.clients.online_client.ConvexSmoothGradients`: every sample
    is bounded by itself, so the declaration holds for any data. Features that are not finite count as zero.
    """

    clips_contractively = True

    def __init__(self, num_features: int, num_classes: int, feature_bound: float) -> None:
        super().__init__(num_features, num_classes)
        if not (math.isfinite(feature_bound) and feature_bound > 0):
            raise ConfigurationError(
                f"Expected feature-bound > 0 and finite, got {feature_bound!r}.",
                kind="out-of-range",
                setting="feature-bound",
                got=feature_bound,
            )
        self.feature_bound = float(feature_bound)
        self.smoothness = self.gradient_bound = math.inf  # of every sample's loss; a subclass knows better
        self.shapes = [(num_features,)]
        self.names = ["weight"]

    def initial_parameters(self, seed: int) -> list[NDArray[np.float64]]:
        return [np.zeros(self.num_features)]

    def __call__(self, parameters: Parameters, samples: Batch) -> NDArray[np.float64]:
        features = self.bounded(samples[0])
        return self.slopes(features @ np.asarray(parameters[0], np.float64), samples[1])[:, None] * features

    def at_points(self, points: NDArray[np.floating], samples: Batch) -> NDArray[np.float64]:
        """Return the gradient of sample i at point i."""
        features = self.bounded(samples[0])
        return self.slopes(np.einsum("ij,ij->i", features, points), samples[1])[:, None] * features

    def bounded(self, features: NDArray[Any]) -> NDArray[np.float64]:
        """Features with L2 norm at most R."""
        features = np.asarray(features, dtype=np.float64)
        squares = np.einsum("ij,ij->i", features, features)
        within = squares <= self.feature_bound**2  # NaN is not
        if within.all():
            return features
        return np.where(within[:, None], features, clip_per_sample(features, self.feature_bound))

    @staticmethod
    @abstractmethod
    def losses(margins: NDArray[np.float64], labels: NDArray[Any]) -> NDArray[np.float64]:
        """Return the loss of each margin and label."""

    @staticmethod
    @abstractmethod
    def slopes(margins: NDArray[np.float64], labels: NDArray[Any]) -> NDArray[np.float64]:
        """Return the loss's derivative by the margin."""


class LogisticRegression(LinearModel):
    """Two-class logistic regression (zhang-2025, section V): R^2 / 4-smooth, gradients at most R long."""

    rows_unmixed = True

    def __init__(self, num_features: int, feature_bound: float) -> None:
        super().__init__(num_features, 2, feature_bound)
        self.smoothness, self.gradient_bound = self.feature_bound**2 / 4, self.feature_bound

    def logits(self, parameters: Parameters, features: NDArray[Any]) -> NDArray[np.float64]:
        margins = self.bounded(features) @ np.asarray(parameters[0], np.float64)
        return np.stack([np.zeros_like(margins), margins], axis=1)

    def loss_and_gradient(self, weight: NDArray[np.float64], samples: Batch) -> tuple[float, NDArray[np.float64]]:
        """Return the mean loss over some samples and its gradient, for computing optima."""
        features = self.bounded(samples[0])
        margins = features @ weight
        gradient = self.slopes(margins, samples[1]) @ features / len(margins)
        return float(self.losses(margins, samples[1]).mean()), gradient

    @staticmethod
    def losses(margins: NDArray[np.float64], labels: NDArray[Any]) -> NDArray[np.float64]:
        return np.logaddexp(0.0, np.where(labels == 1, -margins, margins))

    @staticmethod
    def slopes(margins: NDArray[np.float64], labels: NDArray[Any]) -> NDArray[np.float64]:
        """Return the loss's derivative by the margin: sigmoid(margin) - label."""
        return 0.5 * (1.0 + np.tanh(0.5 * margins)) - labels


class NonconvexLogistic(LogisticRegression):
    """Two-class logistic regression with the nonconvex regulariser lambda sum_j w_j^2 / (1 + w_j^2).

    A common test problem for methods that find stationary points (the penalty is in Antoniadis et al. 2011). Its
    derivatives are bounded, |psi'| <= 3 sqrt(3) / 8 and |psi''| <= 2, so a sample's gradient is at most
    R + lambda 0.65 sqrt(d) long and (R^2 / 4 + 2 lambda)-smooth.
    """

    convex = False
    clips_contractively = False
    strength = 0.01  # lambda; public

    def __init__(self, num_features: int, feature_bound: float) -> None:
        super().__init__(num_features, feature_bound)
        self.smoothness += 2 * self.strength
        self.gradient_bound += self.strength * 3 * math.sqrt(3 * num_features) / 8

    def __call__(self, parameters: Parameters, samples: Batch) -> NDArray[np.float64]:
        return super().__call__(parameters, samples) + self._penalty_gradient(np.asarray(parameters[0], np.float64))

    def at_points(self, points: NDArray[np.floating], samples: Batch) -> NDArray[np.float64]:
        return super().at_points(points, samples) + self._penalty_gradient(np.asarray(points, np.float64))

    def mean_gradient(self, parameters: Parameters, samples: Batch) -> NDArray[np.float64]:
        weight = np.asarray(parameters[0], np.float64)
        return super().loss_and_gradient(weight, samples)[1] + self._penalty_gradient(weight)

    def evaluate(self, parameters: Parameters, samples: Batch) -> tuple[float, float]:
        """Mean loss with the regulariser, and accuracy."""
        loss, accuracy = super().evaluate(parameters, samples)
        squares = np.square(np.asarray(parameters[0], np.float64))
        return loss + self.strength * float((squares / (1 + squares)).sum()), accuracy

    def _penalty_gradient(self, weight: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.strength * 2 * weight / np.square(1 + np.square(weight))


class RidgeRegression(LinearModel):
    """Least squares (<w, a> - y)^2, as in jiang-2026's ridge regression: 2 R^2-smooth; no accuracy."""

    rows_unmixed = True

    def __init__(self, num_features: int, feature_bound: float) -> None:
        super().__init__(num_features, 1, feature_bound)
        self.smoothness = 2.0 * self.feature_bound**2

    def logits(self, parameters: Parameters, features: NDArray[Any]) -> NDArray[np.float64]:
        return (self.bounded(features) @ np.asarray(parameters[0], np.float64))[:, None]

    def evaluate(self, parameters: Parameters, samples: Batch) -> tuple[float, float]:
        """Mean squared error; the accuracy is not a number."""
        return float(self.losses(self.logits(parameters, samples[0])[:, 0], samples[1]).mean()), math.nan

    @staticmethod
    def losses(margins: NDArray[np.float64], labels: NDArray[Any]) -> NDArray[np.float64]:
        return np.square(margins - labels)

    @staticmethod
    def slopes(margins: NDArray[np.float64], labels: NDArray[Any]) -> NDArray[np.float64]:
        return 2.0 * (margins - labels)


class MeanEstimation(Model):
    """Half the squared distance to a sample, ||w - a||^2 / 2, whose minimum is the mean (jiang-2026); no accuracy.

    Declares itself convex and 1-smooth. A clipped gradient is that of the Huber loss of the distance, which is convex
    and 1-smooth too. Features that are not finite count as zero.
    """

    clips_contractively = True
    rows_stand_alone = True
    smoothness = 1.0
    gradient_bound = math.inf

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features, 1)
        self.shapes = [(num_features,)]
        self.names = ["mean"]

    def initial_parameters(self, seed: int) -> list[NDArray[np.float64]]:
        return [np.zeros(self.num_features)]

    def __call__(self, parameters: Parameters, samples: Batch) -> NDArray[np.float64]:
        return self.at_points(np.asarray(parameters[0], np.float64)[None], samples)

    def at_points(self, points: NDArray[np.floating], samples: Batch) -> NDArray[np.float64]:
        """Return the gradient of sample i at point i."""
        features = np.asarray(samples[0], dtype=np.float64)
        finite = np.isfinite(features).all(axis=1, keepdims=True)
        return np.asarray(points - np.where(finite, features, 0.0), dtype=np.float64)

    def logits(self, parameters: Parameters, features: NDArray[Any]) -> NDArray[np.float64]:
        return -0.5 * np.square(features - np.asarray(parameters[0], np.float64)).sum(axis=1, keepdims=True)

    def evaluate(self, parameters: Parameters, samples: Batch) -> tuple[float, float]:
        """Mean loss; the accuracy is not a number."""
        return -float(self.logits(parameters, samples[0]).mean()), math.nan


class LinearKind(ModelKind):
    """Models of one margin, of numbers or, with ``scores``, of two classes."""

    keys = frozenset({"feature-bound"})

    def __init__(
        self,
        name: str,
        sentence: str,
        model: Callable[[int, float], Model],
        *,
        scores: bool = False,
        convex: bool = True,
    ) -> None:
        self.name, self.sentence, self.scores, self.convex, self._model = name, sentence, scores, convex, model

    def sweeps(self, config: RunKeys) -> bool:
        return self.convex

    def make(self, num_features: int, num_classes: int, feature_bound: float) -> Model:
        if self.scores and num_classes != 2:
            raise ConfigurationError(
                f"Expected a task with two classes for model {self.name!r}, got {num_classes}.",
                kind="conflict",
                setting="model",
                got=num_classes,
            )
        return self._model(num_features, feature_bound)

    def declared_smoothness(self, num_features: int, feature_bound: float) -> float:
        made: Any = self._model(num_features, feature_bound)
        return made.smoothness


class Ridge(LinearKind):
    """Ridge regression, whose predictions are numbers."""

    predicts_numbers = True


class Mean(LinearKind):
    """The mean of the samples."""

    keys = frozenset()

    def sweeps(self, config: RunKeys) -> bool:
        return config.learning_rate <= _LARGEST_RATE_TOGETHER  # products of 1 - eta are divisors


_FEWEST_ROUNDS, _USUAL_ROUNDS, _MOST_ROUNDS = 8.0, 24.0, 48.0
_TEMPERATURE = 2.0
_PUBLISHED = "last-two"
"""Model that is published where there is less noise: iterates alternate along steep directions."""
_STEEPEST_OF_NUMBERS = 0.6
"""Step at which a constant of its own, whose second moment is 1, does not yet swing."""
_OF_NUMBERS, _FEWEST_OF_NUMBERS, _MOST_OF_NUMBERS = 3.0, 12.0, 64.0
RANK_ALONE, MOSTLY_RANK = 120.0, 500.0
"""Samples times mu, over the root of the columns, below which the rank is all, or most, of an additive model."""
FAR_FROM_NOISE = 600.0
"""Samples times mu, over the root of the columns, from which classes are trained with longer gradients."""


class Additive(ModelKind):
    """One curve for each column of a table: a linear model of additive features, whose knots are private quantiles.

    Its constants for full batches were chosen on the tables of docs/tuning.md. The classes' are those of a logistic
    regression with S = R / 10 to R / 5, and steps of 15 / (S R), written for the two scores of a softmax. Numbers
    are trained by steps of 2 / R^2. Nesterov's momentum allows these for a squared error if no direction has more
    than 0.35 R^2 of the features' second moment; gradients that are cut allow more.
    """

    name = "additive"
    sentence = "one curve for each column of a table, a generalised additive model"
    keys = frozenset({"model.knots", "model.knots-share", "model.rank-share"})
    convex = True
    takes_knots = True

    def make(self, num_features: int, num_classes: int, feature_bound: float) -> Model:
        if num_classes == 1:
            return RidgeRegression(num_features, feature_bound)
        return SoftmaxRegression(num_features, num_classes)

    def recipe(self, num_classes: int, strength: float) -> Recipe:
        # Where noise is large, fewer rounds go less far, and go astray less; and the last iterate has come farthest.
        average = _PUBLISHED if strength >= RANK_ALONE else "last"
        if num_classes == 1:
            rounds = round(min(max(strength / _OF_NUMBERS, _FEWEST_OF_NUMBERS), _MOST_OF_NUMBERS))
            clip = 0.15 if strength < RANK_ALONE else 0.3 if strength < MOSTLY_RANK else 0.6
            return Recipe(
                rounds, clip=clip, travel=2.0 * clip, momentum=0.8, steepest=_STEEPEST_OF_NUMBERS, average=_PUBLISHED
            )
        # Clipping cuts the gradients of rows that the model is unsure of, so that scores grow too large.
        calibrated = {"temperature": _TEMPERATURE, "fewest_rounds": int(_FEWEST_ROUNDS), "average": average}
        if strength < RANK_ALONE:
            rounds = round(min(max(strength / 5.0, _FEWEST_ROUNDS), _USUAL_ROUNDS))
            return Recipe(rounds, clip=0.1 * math.sqrt(2.0), travel=15.0 / math.sqrt(2.0), momentum=0.5, **calibrated)
        rounds = round(min(max(strength / 14.0, _USUAL_ROUNDS), _MOST_ROUNDS))
        clip, momentum = (0.2, 0.65) if strength < FAR_FROM_NOISE else (0.28, 0.8)
        return Recipe(rounds, clip=clip, travel=15.0 / math.sqrt(2.0), momentum=momentum, **calibrated)


_NONCONVEX = "logistic regression with a regulariser that is not convex, sum_j w_j^2 / (1 + w_j^2)"
LINEAR = (
    Additive(),
    LinearKind("logistic", "logistic regression of two classes without bias", LogisticRegression, scores=True),
    LinearKind("nonconvex-logistic", _NONCONVEX, NonconvexLogistic, scores=True, convex=False),
    Ridge("ridge", "least squares, (<w, a> - y)^2", RidgeRegression),
    Mean("mean", "the mean of the samples, half the squared distance to each", lambda size, _: MeanEstimation(size)),
)
