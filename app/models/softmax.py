"""Softmax regression, the papers' model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients.adapters.per_sample_gradients import OuterProducts
from .model import Batch, Model, ModelKind, Parameters


class SoftmaxRegression(Model):
    """Softmax regression in closed form and float64, starting at zero (the papers' model).

    Parameters
    ----------
    bias : bool
        False for features with a constant.
    """

    rows_unmixed = True

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
        """Softmax minus one-hot label, shape (samples, classes)."""
        residuals = features @ np.asarray(parameters[0], dtype=np.float64).T
        if self.bias:
            residuals += parameters[1]
        residuals -= np.maximum.reduce(residuals, axis=1, keepdims=True)
        np.exp(residuals, out=residuals)
        residuals /= np.add.reduce(residuals, axis=1, keepdims=True)
        residuals[np.arange(len(labels)), labels] -= 1.0
        return residuals

    def logits(self, parameters: Parameters, features: NDArray[Any]) -> NDArray[np.floating]:
        weight, *bias = (np.asarray(values, dtype=features.dtype) for values in parameters)
        return features @ weight.T + bias[0] if self.bias else features @ weight.T


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
