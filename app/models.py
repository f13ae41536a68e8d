"""Models: per-sample gradients for the machines, loss and accuracy for the central evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..clients import TorchGradients
from ..privacy import ConfigurationError, derived_seed

Parameters = Sequence[NDArray[Any]]
Batch = tuple[NDArray[Any], NDArray[Any]]


class Model(ABC):
    """A classifier with a cross-entropy loss.

    Parameters
    ----------
    num_features, num_classes : int
        Inputs are rows of num_features values; labels are 0 .. num_classes - 1.
    """

    def __init__(self, num_features: int, num_classes: int) -> None:
        self.num_features = num_features
        self.num_classes = num_classes
        self.shapes: list[tuple[int, ...]] = []
        self.names: list[str] = []

    @property
    def num_parameters(self) -> int:
        """D."""
        return sum(int(np.prod(shape)) for shape in self.shapes)

    @abstractmethod
    def initial_parameters(self, seed: int) -> list[NDArray[Any]]:
        """Where training starts; public."""

    @abstractmethod
    def __call__(self, parameters: Parameters, samples: Batch) -> NDArray[np.floating]:
        """Per-sample gradients of the loss, shape (b, d)."""

    @abstractmethod
    def logits(self, parameters: Parameters, features: NDArray[Any]) -> NDArray[np.floating]:
        """Scores, shape (samples, num_classes)."""

    def evaluate(self, parameters: Parameters, samples: Batch) -> tuple[float, float]:
        """Mean cross-entropy loss and accuracy."""
        features, labels = samples
        scores = np.asarray(self.logits(parameters, features), dtype=np.float64)
        scores -= scores.max(axis=1, keepdims=True)
        losses = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(labels)), labels]
        return float(losses.mean()), float((scores.argmax(axis=1) == labels).mean())


class OuterProducts:
    """Per-sample gradients of a linear layer with bias, [r x^T, r] for a sample's r and x, not written out.

    Parameters
    ----------
    residuals : ndarray of shape (samples, classes), float64
    features : ndarray of shape (samples, features), float64
    """

    def __init__(self, residuals: NDArray[np.float64], features: NDArray[np.float64]) -> None:
        self._residuals = residuals
        self._features = features
        self._split = residuals.shape[1] * features.shape[1]
        self._shape = (residuals.shape[1], features.shape[1])

    def norms(self) -> NDArray[np.float64]:
        """||[r x^T, r]|| = ||r|| sqrt(||x||^2 + 1)."""
        with np.errstate(all="ignore"):
            squares = np.einsum("ij,ij->i", self._features, self._features) + 1.0
            return np.sqrt(np.einsum("ij,ij->i", self._residuals, self._residuals) * squares)

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        """Write ``scale`` times a row."""
        residual = self._residuals[row] * scale
        np.multiply(residual[:, None], self._features[row], out=out[: self._split].reshape(self._shape))
        out[self._split :] = residual


class SoftmaxRegression(Model):
    """Softmax regression with bias, in closed form and float64; starts at zero (the papers' model)."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__(num_features, num_classes)
        self.shapes = [(num_classes, num_features), (num_classes,)]
        self.names = ["weight", "bias"]

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
        gradients[:, split:] = residuals
        return gradients

    def stacked(self, points: Sequence[Parameters], weights: Sequence[float], samples: Batch) -> OuterProducts:
        """Weighted sums of a sample's gradients at several points: all of them outer products with its features."""
        features = np.asarray(samples[0], dtype=np.float64)
        residuals = np.zeros((len(features), self.num_classes))
        for point, weight in zip(points, weights, strict=True):
            if weight:
                residuals += weight * self._residuals(point, features, samples[1])
        return OuterProducts(residuals, features)

    def _residuals(self, parameters: Parameters, features: NDArray[np.float64], labels: NDArray[Any]) -> NDArray[Any]:
        """Softmax minus one-hot label, shape (samples, classes)."""
        residuals = features @ np.asarray(parameters[0], dtype=np.float64).T
        residuals += parameters[1]
        residuals -= residuals.max(axis=1, keepdims=True)
        np.exp(residuals, out=residuals)
        residuals /= residuals.sum(axis=1, keepdims=True)
        residuals[np.arange(len(labels)), labels] -= 1.0
        return residuals

    def logits(self, parameters: Parameters, features: NDArray[Any]) -> NDArray[np.floating]:
        weight, bias = (np.asarray(values, dtype=features.dtype) for values in parameters)
        return features @ weight.T + bias


class MultilayerPerceptron(Model):
    """A small MLP with one hidden layer of tanh units, in PyTorch; not convex.

    Parameters
    ----------
    num_hidden : int
        Hidden units.
    """

    def __init__(self, num_features: int, num_classes: int, num_hidden: int = 32) -> None:
        import torch

        super().__init__(num_features, num_classes)
        torch.set_num_threads(1)
        layers = (torch.nn.Linear(num_features, num_hidden), torch.nn.Tanh(), torch.nn.Linear(num_hidden, num_classes))
        self.module = torch.nn.Sequential(*layers)
        self._gradients = TorchGradients(self.module, torch.nn.functional.cross_entropy)
        self.shapes = list(self._gradients.shapes)
        self.names = [name for name, _ in self.module.named_parameters()]

    def initial_parameters(self, seed: int) -> list[NDArray[np.float32]]:
        generator = np.random.Generator(np.random.Philox(key=derived_seed("initial parameters", seed)))
        fan_in = 1
        parameters = []
        for shape in self.shapes:
            fan_in = shape[1] if len(shape) == 2 else fan_in
            bound = 1.0 / np.sqrt(fan_in)
            parameters.append(generator.uniform(-bound, bound, size=shape).astype(np.float32))
        return parameters

    def __call__(self, parameters: Parameters, samples: Batch) -> NDArray[np.float64]:
        features, labels = samples
        return self._gradients(parameters, (np.asarray(features, dtype=np.float32), np.asarray(labels, dtype=np.int64)))

    def logits(self, parameters: Parameters, features: NDArray[Any]) -> NDArray[np.floating]:
        hidden_weight, hidden_bias, weight, bias = (np.asarray(values, dtype=np.float32) for values in parameters)
        return np.tanh(features.astype(np.float32) @ hidden_weight.T + hidden_bias) @ weight.T + bias


@lru_cache(maxsize=8)
def make_model(name: str, num_features: int, num_classes: int) -> Model:
    """The model of a run configuration, ``softmax`` or ``mlp``."""
    if name == "softmax":
        return SoftmaxRegression(num_features, num_classes)
    if name == "mlp":
        return MultilayerPerceptron(num_features, num_classes)
    raise ConfigurationError(f"Expected model 'softmax' or 'mlp', got {name!r}.")
