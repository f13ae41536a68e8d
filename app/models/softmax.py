"""Softmax regression, the papers' model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import Batch, Model, ModelKind, Parameters


class OuterProducts:
    """Per-sample gradients of a linear layer, [r x^T, r] for a sample's r and x, not written out.

    Parameters
    ----------
    residuals : ndarray of shape (samples, classes), float64
    features : ndarray of shape (samples, features), float64
    bias : bool
        Whether the layer has one; without it the gradients are r x^T.
    """

    def __init__(self, residuals: NDArray[np.float64], features: NDArray[np.float64], *, bias: bool = True) -> None:
        self._residuals = residuals
        self._bias = bias
        self._features = features
        self._split = residuals.shape[1] * features.shape[1]
        self._shape = (residuals.shape[1], features.shape[1])

    def norms(self) -> NDArray[np.float64]:
        """||[r x^T, r]|| = ||r|| sqrt(||x||^2 + 1), and ||r x^T|| = ||r|| ||x||."""
        with np.errstate(all="ignore"):
            squares = np.einsum("ij,ij->i", self._features, self._features) + (1.0 if self._bias else 0.0)
            return np.sqrt(np.einsum("ij,ij->i", self._residuals, self._residuals) * squares)

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        """Write ``scale`` times a row."""
        residual = self._residuals[row : row + 1].T * scale
        # A matrix product of inner size one: the same products as broadcasting makes, in half the time.
        np.dot(residual, self._features[row : row + 1], out=out[: self._split].reshape(self._shape))
        if self._bias:
            out[self._split :] = residual[:, 0]

    def scaled_sum(self, scales: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum of rows, each times its scale; one matrix product."""
        residuals = self._residuals * scales[:, None]
        weight = (residuals.T @ self._features).ravel()
        return np.concatenate([weight, residuals.sum(axis=0)]) if self._bias else weight


class SoftmaxRegression(Model):
    """Softmax regression, in closed form and float64; starts at zero (the papers' model).

    Parameters
    ----------
    num_features, num_classes : int
    bias : bool
        Whether there is one; features with a constant among them need none.
    """

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
        gradients = np.empty((len(residuals), self.num_parameters))
        split = self.num_classes * self.num_features
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
        """Weighted sums of a sample's gradients at several points: all of them outer products with its features."""
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
        residuals -= residuals.max(axis=1, keepdims=True)
        np.exp(residuals, out=residuals)
        residuals /= residuals.sum(axis=1, keepdims=True)
        residuals[np.arange(len(labels)), labels] -= 1.0
        return residuals

    def logits(self, parameters: Parameters, features: NDArray[Any]) -> NDArray[np.floating]:
        weight, *bias = (np.asarray(values, dtype=features.dtype) for values in parameters)
        return features @ weight.T + bias[0] if self.bias else features @ weight.T


class Softmax(ModelKind):
    """Softmax regression, with bias unless the features have a constant of their own."""

    name = "softmax"
    sentence = "softmax regression, the papers' model"
    paper_constants = True
    convex = True
    scores = True

    def make(self, num_features: int, num_classes: int, feature_bound: float) -> Model:
        return SoftmaxRegression(num_features, num_classes)

    def make_biasless(self, num_features: int, num_classes: int, feature_bound: float) -> Model:
        return SoftmaxRegression(num_features, num_classes, bias=False)
