"""Models: per-sample gradients for the machines, loss and accuracy for the central evaluation."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...clients import TorchGradients
from ...privacy import ConfigurationError, derived_seed
from ...privacy.clipping import clip_per_sample
from .convolution import ConvolutionalGradients

if TYPE_CHECKING:
    import torch

Parameters = Sequence[NDArray[Any]]
Batch = tuple[NDArray[Any], NDArray[Any]]


_SAMPLES_AT_A_TIME = 128


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

    def mean_gradient(self, parameters: Parameters, samples: Batch) -> NDArray[np.float64]:
        """The gradient of the mean loss over some samples, shape (d,); for simulations to look at."""
        features, labels = samples
        total = np.zeros(self.num_parameters)
        for start in range(0, len(labels), _SAMPLES_AT_A_TIME):
            chosen = slice(start, start + _SAMPLES_AT_A_TIME)
            total += np.asarray(self(parameters, (features[chosen], labels[chosen]))).sum(axis=0)
        return total / len(labels)

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
        residual = self._residuals[row : row + 1].T * scale
        # A matrix product of inner size one: the same products as broadcasting makes, in half the time.
        np.dot(residual, self._features[row : row + 1], out=out[: self._split].reshape(self._shape))
        out[self._split :] = residual[:, 0]


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
        return uniform_parameters(self.shapes, seed)

    def __call__(self, parameters: Parameters, samples: Batch) -> NDArray[np.float64]:
        return self._gradients(parameters, _as_torch_wants(samples))

    def logits(self, parameters: Parameters, features: NDArray[Any]) -> NDArray[np.floating]:
        hidden_weight, hidden_bias, weight, bias = (np.asarray(values, dtype=np.float32) for values in parameters)
        return np.tanh(features.astype(np.float32) @ hidden_weight.T + hidden_bias) @ weight.T + bias


class LinearModel(Model):
    """A loss of the margin <w, a> alone, without bias, in closed form and float64: convex and smooth.

    Parameters
    ----------
    num_features, num_classes : int
    feature_bound : float
        R, public: a sample's features are scaled down to this L2 norm wherever they are longer.

    Notes
    -----
    **Formal guarantees.** Declares itself convex and smooth for
    :class:`~murmurfl.clients.online.ConvexSmoothGradients`: the bound is enforced on every sample by itself, so the
    declaration holds whatever the data are. Features that are not finite count as zero.
    """

    clips_contractively = True

    def __init__(self, num_features: int, num_classes: int, feature_bound: float) -> None:
        super().__init__(num_features, num_classes)
        if not (math.isfinite(feature_bound) and feature_bound > 0):
            raise ConfigurationError(f"Expected feature-bound > 0 and finite, got {feature_bound!r}.")
        self.feature_bound = float(feature_bound)
        self.shapes = [(num_features,)]
        self.names = ["weight"]

    def initial_parameters(self, seed: int) -> list[NDArray[np.float64]]:
        return [np.zeros(self.num_features)]

    def __call__(self, parameters: Parameters, samples: Batch) -> NDArray[np.float64]:
        features = self.bounded(samples[0])
        return self.slopes(features @ np.asarray(parameters[0], np.float64), samples[1])[:, None] * features

    def at_points(self, points: NDArray[np.floating], samples: Batch) -> NDArray[np.float64]:
        """The gradient of sample i at point i."""
        features = self.bounded(samples[0])
        return self.slopes(np.einsum("ij,ij->i", features, points), samples[1])[:, None] * features

    def bounded(self, features: NDArray[Any]) -> NDArray[np.float64]:
        """Features as the model takes them: no longer than R."""
        features = np.asarray(features, dtype=np.float64)
        squares = np.einsum("ij,ij->i", features, features)
        if np.isfinite(squares).all() and squares.max(initial=0.0) <= self.feature_bound**2:
            return features
        return clip_per_sample(features, self.feature_bound)

    @property
    @abstractmethod
    def smoothness(self) -> float:
        """L, of every sample's loss."""

    @staticmethod
    @abstractmethod
    def losses(margins: NDArray[np.float64], labels: NDArray[Any]) -> NDArray[np.float64]:
        """The loss of a margin."""

    @staticmethod
    @abstractmethod
    def slopes(margins: NDArray[np.float64], labels: NDArray[Any]) -> NDArray[np.float64]:
        """The loss's derivative by the margin."""


class LogisticRegression(LinearModel):
    """Two-class logistic regression (zhang-2025, section V): R^2 / 4-smooth, gradients at most R long."""

    def __init__(self, num_features: int, feature_bound: float) -> None:
        super().__init__(num_features, 2, feature_bound)

    @property
    def smoothness(self) -> float:
        """L = R^2 / 4."""
        return self.feature_bound**2 / 4

    @property
    def gradient_bound(self) -> float:
        """R."""
        return self.feature_bound

    def logits(self, parameters: Parameters, features: NDArray[Any]) -> NDArray[np.float64]:
        margins = self.bounded(features) @ np.asarray(parameters[0], np.float64)
        return np.stack([np.zeros_like(margins), margins], axis=1)

    def loss_and_gradient(self, weight: NDArray[np.float64], samples: Batch) -> tuple[float, NDArray[np.float64]]:
        """The mean loss over some samples and its gradient, for computing optima."""
        features = self.bounded(samples[0])
        margins = features @ weight
        return float(self.losses(margins, samples[1]).mean()), self.slopes(margins, samples[1]) @ features / len(
            margins
        )

    @staticmethod
    def losses(margins: NDArray[np.float64], labels: NDArray[Any]) -> NDArray[np.float64]:
        return np.logaddexp(0.0, np.where(labels == 1, -margins, margins))

    @staticmethod
    def slopes(margins: NDArray[np.float64], labels: NDArray[Any]) -> NDArray[np.float64]:
        """The loss's derivative by the margin: sigmoid(margin) - label."""
        return 0.5 * (1.0 + np.tanh(0.5 * margins)) - labels


class NonconvexLogistic(LogisticRegression):
    r"""Two-class logistic regression with a regulariser that is not convex, lambda sum_j w_j^2 / (1 + w_j^2).

    A common test problem for methods that find stationary points (Antoniadis et al. 2011 have the penalty). Its
    derivatives are bounded: |psi'| <= 3 sqrt(3) / 8 and |psi''| <= 2, so a sample's gradient is at most R + lambda
    0.65 sqrt(d) long and (R^2 / 4 + 2 lambda)-smooth.
    """

    convex = False
    clips_contractively = False
    strength = 0.01
    """lambda; public."""

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

    @property
    def smoothness(self) -> float:
        """L = R^2 / 4 + 2 lambda."""
        return super().smoothness + 2 * self.strength

    @property
    def gradient_bound(self) -> float:
        """R + lambda 3 sqrt(3 d) / 8."""
        return self.feature_bound + self.strength * 3 * math.sqrt(3 * self.num_features) / 8

    def _penalty_gradient(self, weight: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.strength * 2 * weight / np.square(1 + np.square(weight))


class RidgeRegression(LinearModel):
    """Least squares (<w, a> - y)^2, the loss of jiang-2026's ridge regression: 2 R^2-smooth; no accuracy."""

    def __init__(self, num_features: int, feature_bound: float) -> None:
        super().__init__(num_features, 1, feature_bound)

    @property
    def smoothness(self) -> float:
        """L = 2 R^2."""
        return 2.0 * self.feature_bound**2

    @property
    def gradient_bound(self) -> float:
        """None."""
        return math.inf

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

    Notes
    -----
    **Formal guarantees.** Declares itself convex and 1-smooth. A clipped gradient is that of the Huber loss of the
    distance, which is convex and 1-smooth too. Features that are not finite count as zero.
    """

    clips_contractively = True
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
        """The gradient of sample i at point i."""
        features = np.asarray(samples[0], dtype=np.float64)
        finite = np.isfinite(features).all(axis=1, keepdims=True)
        return np.asarray(points - np.where(finite, features, 0.0), dtype=np.float64)

    def logits(self, parameters: Parameters, features: NDArray[Any]) -> NDArray[np.float64]:
        return -0.5 * np.square(features - np.asarray(parameters[0], np.float64)).sum(axis=1, keepdims=True)

    def evaluate(self, parameters: Parameters, samples: Batch) -> tuple[float, float]:
        """Mean loss; the accuracy is not a number."""
        return -float(self.logits(parameters, samples[0]).mean()), math.nan


class ConvolutionalNetwork(Model):
    """The CNN of zhang-2025, section V-B: two convolutions of 32 filters 3 x 3, each with ReLU and 2 x 2 max-pooling,
    then dense layers of 64, 32 and 10 with ReLU between them.

    The paper's words leave open whether there is one pooling layer or two; with two, d = 63,242 on 28 x 28 images.

    Parameters
    ----------
    num_features : int
        Pixels of a square grey image.
    """

    def __init__(self, num_features: int, num_classes: int) -> None:
        import torch

        super().__init__(num_features, num_classes)
        side = math.isqrt(num_features)
        if side * side != num_features or side < 10:
            raise ConfigurationError(
                f"Expected square images of at least 10 x 10 for model 'cnn', got {num_features} values a sample."
            )
        torch.set_num_threads(1)
        left = ((side - 2) // 2 - 2) // 2
        self.module = torch.nn.Sequential(
            torch.nn.Unflatten(1, (1, side, side)),
            torch.nn.Conv2d(1, 32, 3),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(32, 32, 3),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * left * left, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 32),
            torch.nn.ReLU(),
            torch.nn.Linear(32, num_classes),
        )
        self._side = side
        self._threads = threading.local()
        self.shapes = [tuple(parameter.shape) for parameter in self.module.parameters()]
        self.names = [name for name, _ in self.module.named_parameters()]

    def initial_parameters(self, seed: int) -> list[NDArray[np.float32]]:
        return uniform_parameters(self.shapes, seed)

    def __call__(self, parameters: Parameters, samples: Batch) -> NDArray[np.float64]:
        point = np.concatenate([np.asarray(values, np.float32).ravel() for values in parameters])
        return self.at_points(np.broadcast_to(point, (len(samples[0]), len(point))), samples)

    def at_points(self, points: NDArray[np.floating], samples: Batch) -> NDArray[np.float64]:
        """The gradient of sample i at point i."""
        features, labels = np.asarray(samples[0], dtype=np.float32), np.asarray(samples[1], dtype=np.int64)
        gradient = self._gradients_of_this_thread()
        rows = np.empty(points.shape)
        with np.errstate(all="ignore"):
            for i, row in enumerate(rows):
                gradient(np.asarray(points[i], dtype=np.float32), features[i], int(labels[i]), row)
        return rows

    def _gradients_of_this_thread(self) -> ConvolutionalGradients:
        if not hasattr(self._threads, "gradients"):
            self._threads.gradients = ConvolutionalGradients(self.shapes, self._side)
        return self._threads.gradients

    def mean_gradient(self, parameters: Parameters, samples: Batch) -> NDArray[np.float64]:
        import torch

        named = {
            name: torch.tensor(np.asarray(values, np.float32), requires_grad=True)
            for name, values in zip(self.names, parameters, strict=True)
        }
        features, labels = (torch.as_tensor(part) for part in _as_torch_wants(samples))
        for start in range(0, len(labels), _SAMPLES_AT_A_TIME):
            chosen = slice(start, start + _SAMPLES_AT_A_TIME)
            output = torch.func.functional_call(self.module, named, (features[chosen],))
            loss = torch.nn.functional.cross_entropy(output, labels[chosen], reduction="sum") / len(labels)
            loss.backward()
        return np.concatenate([_gradient_of(named[name]) for name in self.names])

    def logits(self, parameters: Parameters, features: NDArray[Any]) -> NDArray[np.floating]:
        import torch

        values = [torch.tensor(np.asarray(value, np.float32)) for value in parameters]
        with torch.no_grad():
            parts = [
                self._forward(values, torch.as_tensor(np.asarray(part, np.float32))).numpy()
                for part in np.array_split(features, max(len(features) // 100, 1))  # few enough for the cache
            ]
        return np.concatenate(parts)

    def _forward(self, parameters: Sequence[torch.Tensor], features: torch.Tensor) -> torch.Tensor:
        """What the module gives, in a third of its time: channels last in memory, and ReLU after pooling."""
        import torch

        functional = torch.nn.functional
        values = features.reshape(-1, 1, self._side, self._side)
        for weight, bias in zip(parameters[:4:2], parameters[1:4:2], strict=True):
            values = functional.conv2d(values, weight.contiguous(memory_format=torch.channels_last), bias)
            values = values.contiguous(memory_format=torch.channels_last)
            values = functional.max_pool2d(values, 2).relu_()
        values = values.contiguous().flatten(1)
        for weight, bias in zip(parameters[4:-2:2], parameters[5:-2:2], strict=True):
            values = functional.linear(values, weight, bias).relu_()
        return functional.linear(values, *parameters[-2:])


def _gradient_of(values: Any) -> NDArray[np.float64]:
    return values.grad.reshape(-1).double().numpy()


def _as_torch_wants(samples: Batch) -> Batch:
    return np.asarray(samples[0], dtype=np.float32), np.asarray(samples[1], dtype=np.int64)


def uniform_parameters(shapes: Sequence[tuple[int, ...]], seed: int) -> list[NDArray[np.float32]]:
    """Weights and biases uniform within 1 / sqrt(fan-in) of zero, as PyTorch's layers start."""
    generator = np.random.Generator(np.random.Philox(key=derived_seed("initial parameters", seed)))
    fan_in = 1
    parameters = []
    for shape in shapes:
        fan_in = math.prod(shape[1:]) if len(shape) > 1 else fan_in
        bound = 1.0 / math.sqrt(fan_in)
        parameters.append(generator.uniform(-bound, bound, size=shape).astype(np.float32))
    return parameters


@lru_cache(maxsize=8)
def make_model(name: str, num_features: int, num_classes: int, feature_bound: float = 0.0) -> Model:
    """The model of a run configuration, one of ``softmax``, ``mlp``, ``cnn``, ``logistic``,
    ``nonconvex-logistic``, ``ridge`` and ``mean``.

    Raises
    ------
    ConfigurationError
        If the name is unknown or the model does not fit the data.
    """
    if name == "softmax":
        return SoftmaxRegression(num_features, num_classes)
    if name == "mlp":
        return MultilayerPerceptron(num_features, num_classes)
    if name == "cnn":
        return ConvolutionalNetwork(num_features, num_classes)
    if name == "mean":
        return MeanEstimation(num_features)
    if name == "ridge":
        return RidgeRegression(num_features, feature_bound)
    if name in ("logistic", "nonconvex-logistic"):
        if num_classes != 2:
            raise ConfigurationError(f"Expected a task with two classes for model {name!r}, got {num_classes}.")
        kind = LogisticRegression if name == "logistic" else NonconvexLogistic
        return kind(num_features, feature_bound)
    known = "'softmax', 'mlp', 'cnn', 'logistic', 'nonconvex-logistic', 'ridge' or 'mean'"
    raise ConfigurationError(f"Expected model {known}, got {name!r}.")
