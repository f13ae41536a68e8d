"""Networks in PyTorch, which comes with ``pip install 'murmurfl[torch]'`` and is imported when a network is made.

A row of a network's gradients has the same bits whichever other rows are computed with it. PyTorch multiplies few rows
in another way than many, with other roundings, and a simulation computes many clients at once, grouped by how many
processes share the work. So networks are always asked for at least a few rows (:class:`SteadyRows`).

The small convolutional network has per-sample gradients in closed form (:class:`ConvolutionalGradients`). In online
federated learning every client has its own iterate, samples share no weights, and a batched convolution becomes a
grouped one, for which libraries have no fast path: ``torch.func.vmap`` takes 2 to 3 times as long as one sample after
the other, with intermediate values in the processor's cache.
"""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ...clients.adapters.per_sample_gradients import combined_gradients
from ...clients.adapters.torch_checks import check_layers
from ...clients.adapters.torch_model import ModuleScores, TorchGradients
from ...privacy.errors import ConfigurationError, check_installed
from ...privacy.noise import derived_seed
from ...privacy.release.clipping import DenseContributions
from ...privacy.release.tables import PRIVATE
from ...privacy.setting import refusal
from ..settings.run_keys import RunKeys
from .model import SAMPLES_AT_A_TIME, Batch, Model, ModelKind, Parameters, Recipe, uniform_parameters

if TYPE_CHECKING:
    import torch


Values = NDArray[np.float32]

_KERNEL = 3
_POOL = 2
_SLOTS = [(i, j) for i in range(_POOL) for j in range(_POOL)]


class PooledConvolution:
    """A 3 x 3 convolution of one image, then 2 x 2 max-pooling and ReLU; keeps what its gradient needs.

    Position (i, j) of the convolution lies at i x side + j, as in the image. The values between the rows are computed
    and never used: a few more products, but long runs of memory. Pooling drops an odd last row or column.
    """

    def __init__(self, channels: int, side: int, filters: int) -> None:
        self.pooled = (side - _KERNEL + 1) // _POOL
        width = _POOL * self.pooled
        self._side, self._length = side, (width - 1) * side + width
        self._image = np.empty((channels, side * side), np.float32)
        channel, value = self._image.strides
        self._moved = as_strided(
            self._image, (channels, _KERNEL, _KERNEL, self._length), (channel, side * value, value, value)
        )
        self._patches = np.empty(self._moved.shape, np.float32)
        self._matrix = self._patches.reshape(channels * _KERNEL**2, self._length)
        self._flat = np.empty((filters, self._length), np.float32)
        self._spread = np.zeros_like(self._flat)
        self._windows, self._targets = self._in_windows(self._flat), self._in_windows(self._spread)
        self._largest = np.empty((filters, self.pooled, self.pooled), np.float32)

    def _in_windows(self, values: Values) -> list[Values]:
        """Return views of the four values behind each pooled one, each of shape (filters, pooled, pooled)."""
        channel, value = values.strides
        shape = (len(values), self.pooled, self.pooled)
        strides = (channel, _POOL * self._side * value, _POOL * value)
        return [as_strided(values[:, i * self._side + j :], shape, strides) for i, j in _SLOTS]

    def forward(self, image: Values, weight: Values, bias: Values) -> Values:
        """Compute the output, shape (filters, pooled, pooled), from an image (channels, side, side).

        Weights must be contiguous.
        """
        self._image[:] = image.reshape(self._image.shape)
        np.copyto(self._patches, self._moved)
        np.matmul(weight.reshape(len(weight), -1), self._matrix, out=self._flat)
        first, second, third, fourth = self._windows
        self._largest = np.maximum(np.maximum(first, second), np.maximum(third, fourth))
        return np.maximum(self._largest + bias[:, None, None], 0.0)

    def backward(self, slopes: Values, output: Values, to_weight: Values, to_bias: Values) -> None:
        """Write the loss's derivatives by weight and bias, from those by the output."""
        slopes = np.where(output > 0.0, slopes, 0.0)
        to_bias[:] = slopes.sum(axis=(1, 2))
        untaken = np.ones(slopes.shape, bool)
        for target, values in zip(self._targets, self._windows, strict=True):
            chosen = (values == self._largest) & untaken
            np.multiply(slopes, chosen, out=target)
            untaken ^= chosen
        np.matmul(self._spread, self._matrix.T, out=to_weight.reshape(len(to_weight), -1))

    def to_image(self, weight: Values) -> Values:
        """Return the loss's derivative by the image, shape (channels, side, side), after :meth:`backward`."""
        moved = (weight.reshape(len(weight), -1).T @ self._spread).reshape(self._patches.shape)
        total = np.zeros_like(self._image)
        for i in range(_KERNEL):
            for j in range(_KERNEL):
                start = i * self._side + j
                total[:, start : start + self._length] += moved[:, i, j]
        return total.reshape(-1, self._side, self._side)


class ConvolutionalGradients:
    """Gradients of the cross-entropy of two pooled convolutions and three dense layers, with ReLU in between.

    ``shapes`` are those of weight and bias of each of the five layers, as in a PyTorch module; images are grey, of
    ``side`` by ``side`` pixels. In float32. If several values of a pooling window are largest, the first one gets the
    derivative, as in PyTorch. An object serves one thread at a time.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], side: int) -> None:
        self._shapes = list(shapes)
        self._ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
        self._first = PooledConvolution(1, side, shapes[0][0])
        self._second = PooledConvolution(shapes[0][0], self._first.pooled, shapes[2][0])
        self._image = (1, side, side)

    def __call__(self, point: Values, features: Values, label: int, out: NDArray[np.floating]) -> None:
        """Write the gradient of one sample at ``point``, shape (d,), to ``out``, shape (d,)."""
        gradient = np.empty(len(point), np.float32)
        parameters, slots = self._arrays(point), self._arrays(gradient)
        dense = range(4, len(parameters), 2)
        image = np.ascontiguousarray(features, np.float32).reshape(self._image)
        first = self._first.forward(image, parameters[0], parameters[1])
        second = self._second.forward(first, parameters[2], parameters[3])
        inputs: list[Values] = [second.reshape(-1)]
        for i in dense:
            values = parameters[i] @ inputs[-1] + parameters[i + 1]
            inputs.append(np.maximum(values, 0.0) if i + 2 < len(parameters) else values)
        slopes = np.exp(inputs[-1] - inputs[-1].max())
        slopes /= slopes.sum()
        slopes[label] -= 1.0
        for i, values in zip(reversed(dense), reversed(inputs[:-1]), strict=True):
            np.multiply(slopes[:, None], values, out=slots[i])
            slots[i + 1][:] = slopes
            slopes = slopes @ parameters[i]
            if i > 4:
                slopes = np.where(values > 0.0, slopes, 0.0)
        self._second.backward(slopes.reshape(second.shape), second, slots[2], slots[3])
        self._first.backward(self._second.to_image(parameters[2]), first, slots[0], slots[1])
        out[:] = gradient

    def _arrays(self, values: Any) -> list[Any]:
        starts = [0, *self._ends[:-1]]
        return [
            values[start:end].reshape(shape) for start, end, shape in zip(starts, self._ends, self._shapes, strict=True)
        ]


_FEWEST = 4
"""PyTorch multiplies up to three rows in another way than more."""
_FEW_VALUES = 1 << 21
"""Larger gradients stand alone anyway: a block of clients has no room for two of them."""


class SteadyRows:
    """A network's gradients, computed for at least four samples: missing ones are filled up and dropped again."""

    def __init__(
        self,
        gradients: Callable[[Sequence[NDArray[Any]], Any], NDArray[np.float64]],
        shapes: Sequence[tuple[int, ...]],
        num_parameters: int,
    ) -> None:
        self._gradients = gradients
        self._fewest = _FEWEST if num_parameters <= _FEW_VALUES else 1
        self.shapes = shapes

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> NDArray[np.float64]:
        count = len(samples[0])
        if not 0 < count < self._fewest:
            return self._gradients(parameters, samples)
        filled = np.resize(np.arange(count), self._fewest)
        return self._gradients(parameters, tuple(np.asarray(part)[filled] for part in samples))[:count]


class _BuiltInGradients(TorchGradients):
    """Gradients of a module of this file, by its own code: there is no code of a project to keep away from samples."""

    def of_one(self, trained: Mapping[str, torch.Tensor], inputs: Any, target: Any) -> dict[str, torch.Tensor]:
        return self._of_one(trained, inputs, target)

    def of_many(
        self, trained: Mapping[str, torch.Tensor], inputs: Any, targets: Any, *, at_points: bool = False
    ) -> dict[str, torch.Tensor]:
        import torch

        point = 0 if at_points else None
        return torch.func.vmap(self._of_one, in_dims=(point, 0, 0))(trained, inputs, targets)

    def _prepare(self, inputs: Any, target: Any) -> None:
        """Nothing is captured."""

    def isolate(self) -> None:
        """Nothing needs to be kept away from samples."""


_MOST_SAMPLES = 2000
"""Samples for a network's gradient norm: each costs a pass through it."""


class _InPyTorch(Model):
    """A model whose gradients PyTorch computes."""

    _gradients: TorchGradients

    @property
    def wrapped(self) -> TorchGradients:
        """Gradients that PyTorch computes."""
        return self._gradients

    def set_gradient_memory(self, memory_mib: float) -> None:
        super().set_gradient_memory(memory_mib)
        self._gradients.gradient_memory_mib = memory_mib


class MultilayerPerceptron(_InPyTorch):
    """A small MLP in PyTorch with one hidden layer of ``num_hidden`` tanh units; not convex."""

    most_samples = _MOST_SAMPLES
    rows_stand_alone = True

    def __init__(self, num_features: int, num_classes: int, num_hidden: int = 32) -> None:
        import torch

        super().__init__(num_features, num_classes)
        torch.set_num_threads(1)
        layers = (torch.nn.Linear(num_features, num_hidden), torch.nn.Tanh(), torch.nn.Linear(num_hidden, num_classes))
        self.module = torch.nn.Sequential(*layers)
        self._gradients = _BuiltInGradients(self.module, torch.nn.functional.cross_entropy)
        self.shapes = list(self._gradients.shapes)
        self.names = [name for name, _ in self.module.named_parameters()]

    def initial_parameters(self, seed: int) -> list[NDArray[np.float32]]:
        return uniform_parameters(self.shapes, seed)

    def __call__(self, parameters: Parameters, samples: Batch) -> NDArray[np.float64]:
        return self._gradients(parameters, _as_torch_wants(samples))

    def stacked(
        self, points: Sequence[Parameters], weights: Sequence[float | NDArray[np.float64]], samples: Batch
    ) -> DenseContributions:
        """Weighted sums of each sample's gradients, independent of the other samples."""
        steady = SteadyRows(self, self.shapes, self.num_parameters)
        with np.errstate(all="ignore"):
            return DenseContributions(combined_gradients(steady, points, weights, samples))

    def logits(self, parameters: Parameters, features: NDArray[Any]) -> NDArray[np.floating]:
        hidden_weight, hidden_bias, weight, bias = (np.asarray(values, dtype=np.float32) for values in parameters)
        return np.tanh(features.astype(np.float32) @ hidden_weight.T + hidden_bias) @ weight.T + bias


class ConvolutionalNetwork(Model):
    """The CNN of zhang-2025, section V-B, on square grey images.

    Two convolutions of 32 filters 3 x 3, each with ReLU and 2 x 2 max-pooling, then dense layers of 64, 32 and 10 with
    ReLU between them. The paper's words leave open whether there is one pooling layer or two; with two, d = 63,242 on
    28 x 28 images.
    """

    most_samples = _MOST_SAMPLES
    rows_stand_alone = True

    def __init__(self, num_features: int, num_classes: int) -> None:
        import torch

        super().__init__(num_features, num_classes)
        side = math.isqrt(num_features)
        if side * side != num_features or side < 10:
            raise ConfigurationError(
                f"Expected square images of at least 10 x 10 for model 'cnn', got {num_features} values a sample.",
                kind="conflict",
                setting="model",
                got=num_features,
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
        """Return the gradient of sample i at point i."""
        features, labels = np.asarray(samples[0], dtype=np.float32), np.asarray(samples[1], dtype=np.int64)
        if not hasattr(self._threads, "gradients"):
            self._threads.gradients = ConvolutionalGradients(self.shapes, self._side)
        gradient = self._threads.gradients
        rows = np.empty(points.shape)
        with np.errstate(all="ignore"):
            for i, row in enumerate(rows):
                gradient(np.asarray(points[i], dtype=np.float32), features[i], int(labels[i]), row)
        return rows

    def mean_gradient(self, parameters: Parameters, samples: Batch) -> NDArray[np.float64]:
        import torch

        named = {
            name: torch.tensor(np.asarray(values, np.float32), requires_grad=True)
            for name, values in zip(self.names, parameters, strict=True)
        }
        features, labels = (torch.as_tensor(part) for part in _as_torch_wants(samples))
        for start in range(0, len(labels), SAMPLES_AT_A_TIME):
            chosen = slice(start, start + SAMPLES_AT_A_TIME)
            output = torch.func.functional_call(self.module, named, (features[chosen],))
            loss = torch.nn.functional.cross_entropy(output, labels[chosen], reduction="sum") / len(labels)
            loss.backward()
        gradients: list[Any] = [named[name].grad for name in self.names]
        return np.concatenate([gradient.reshape(-1).double().numpy() for gradient in gradients])

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
        """Compute the module's output in a third of its time: channels last in memory, and ReLU after pooling."""
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


def _as_torch_wants(samples: Batch) -> Batch:
    return np.asarray(samples[0], dtype=np.float32), np.asarray(samples[1], dtype=np.int64)


class TorchModel(_InPyTorch):
    """A user's own module, with the cross-entropy of its scores; ``make`` makes another one.

    A gradient is the mean over ``augmentations`` of a sample (:func:`~.image_networks.augmented`).
    """

    most_samples = _MOST_SAMPLES

    def __init__(
        self,
        module: torch.nn.Module,
        num_features: int,
        num_classes: int,
        make: Callable[[], torch.nn.Module],
        augmentations: int = 1,
    ) -> None:
        import torch

        super().__init__(num_features, num_classes)
        torch.set_num_threads(1)  # a run's clients share the cores, and sums keep their order
        self.module = module
        self._make = make
        example = np.zeros((1, num_features), np.float32), np.zeros(1, np.int64)
        augment = None
        if augmentations > 1:
            from .image_networks import ImageShape, augmented

            ImageShape.of(num_features, setting="model.augmentations")
            augment = partial(augmented, number=augmentations)
        loss = torch.nn.functional.cross_entropy
        self._gradients = TorchGradients(module, loss, example=example, augment=augment)
        self._scores = ModuleScores(self._gradients, example[0])
        self.shapes = list(self._gradients.shapes)
        self.names = [name for name, _ in module.named_parameters()]

    def with_augmentations(self, number: int) -> Self:
        if number == 1:
            return self
        return type(self)(self.module, self.num_features, self.num_classes, self._make, number)

    def initial_parameters(self, seed: int) -> list[NDArray[Any]]:
        """Return the parameters of a new module, made with PyTorch's generator seeded."""
        import torch

        with torch.random.fork_rng(devices=[]):  # layers use the global generator; it is restored
            torch.default_generator.manual_seed(derived_seed("initial parameters", seed) % 2**63)
            module = self._make()
        return [parameter.detach().numpy().copy() for parameter in module.parameters()]

    def __call__(self, parameters: Parameters, samples: Batch) -> NDArray[np.float64]:
        return self._gradients(parameters, _as_torch_wants(samples))

    def at_points(self, points: NDArray[np.floating], samples: Batch) -> NDArray[np.float64]:
        """Return the gradient of sample i at point i."""
        return self._gradients.at_points(points, _as_torch_wants(samples))

    def logits(self, parameters: Parameters, features: NDArray[Any]) -> NDArray[np.floating]:
        values = np.asarray(features, np.float32)
        parts = np.array_split(values, max(len(values) // SAMPLES_AT_A_TIME, 1))
        return np.concatenate([self._scores(parameters, part) for part in parts])


class Network(ModelKind):
    """A built-in network in PyTorch."""

    keys = frozenset({"model.gradient-memory-mib"})

    def __init__(self, name: str, sentence: str, model: Callable[[int, int], Model]) -> None:
        self.name, self.sentence, self._model = name, sentence, model

    def make(self, num_features: int, num_classes: int, feature_bound: float) -> Model:
        check_installed("torch", "torch", f"model = {self.name!r}")
        return self._model(num_features, num_classes)


_CLIP, _MOMENTUM = 0.5, 0.9
_STRONGEST, _OF_ONE_ROUND, _FEWEST_ROUNDS = 14_400.0, 220.0, 20
_OF_DISTANCE, _LEAST_DISTANCE = 13.5, 110.0
"""Clip, rounds and length of all steps of a network for images, by samples times the mu of a sum (docs/tuning.md)."""


class ImageNetwork(Network):
    """A built-in network for square images whose gradients are captured as those of a user's module."""

    keys = Network.keys | {"model.augmentations"}
    reads_pixels = True

    def __init__(self, name: str, sentence: str) -> None:
        def model(num_features: int, num_classes: int) -> Model:
            from .image_networks import group_norm_network  # nodes without networks load as little as they can

            make = partial(group_norm_network, num_features, num_classes)
            return TorchModel(make(), num_features, num_classes, make)

        super().__init__(name, sentence, model)

    def check(self, config: RunKeys) -> None:
        super().check(config)
        if ":" not in config.features and config.features != "pixels":
            raise refusal("features", f"'pixels' with model = {self.name!r}, which reads images", config.features)
        if config.centring == PRIVATE:
            raise refusal("centring", f"'none' with model = {self.name!r}, which reads images", config.centring)

    def recipe(self, num_classes: int, strength: float) -> Recipe:
        strength = min(strength, _STRONGEST)
        rounds = max(round(strength / _OF_ONE_ROUND), _FEWEST_ROUNDS)
        distance = max(strength / _OF_DISTANCE, _LEAST_DISTANCE)
        return Recipe(rounds, _CLIP, travel=distance * (1.0 - _MOMENTUM) / rounds, momentum=_MOMENTUM)


NETWORKS = (
    Network("mlp", "a perceptron with one hidden layer of 32 tanh units, in PyTorch", MultilayerPerceptron),
    Network("cnn", "two convolutions and three dense layers, in PyTorch (zhang-2025)", ConvolutionalNetwork),
    ImageNetwork("group-norm-cnn", "two convolutions with group norm for images from 8 x 8"),
)


class FunctionKind(ModelKind):
    """Models made by a user's function, ``function(num_features, num_classes)``.

    Every guarantee needs row i of the gradients to depend on sample i alone. :class:`~murmurfl.clients.TorchGradients`
    ensures that for a module; for a Model it is the user's own promise.
    """

    keys = frozenset({"model.gradient-memory-mib", "model.augmentations"})

    def __init__(self, function: Callable[[int, int], Any], name: str) -> None:
        self.name = name
        self.sentence = "a model of your own"
        self._function = function

    def make(self, num_features: int, num_classes: int, feature_bound: float) -> Model:
        made = self._made(num_features, num_classes)
        if _is_module(made):
            check_layers(made)
            self._try_module(made, num_features)
            made = TorchModel(made, num_features, num_classes, lambda: self._made(num_features, num_classes))
        if not isinstance(made, Model):
            raise ConfigurationError(
                f"Expected model = {self.name!r} to give a Model or a torch.nn.Module, got {type(made).__name__}.",
                kind="wrong-type",
                setting="model",
            )
        self._check(made, num_features, num_classes)
        return made

    def _made(self, num_features: int, num_classes: int) -> Any:
        try:
            return self._function(num_features, num_classes)
        except ConfigurationError:
            raise
        except Exception as error:  # the user's own code
            raise ConfigurationError(
                f"Expected model = {self.name!r} to make a model of {num_features} features and {num_classes} classes, "
                f"got {type(error).__name__}: {error}.",
                kind="failed",
                setting="model",
            ) from error

    def _try_module(self, module: torch.nn.Module, num_features: int) -> None:
        """Refuse a module that fails on one sample of zeros, before it is captured, with what it raised itself."""
        import torch

        try:
            with torch.no_grad():
                module(torch.zeros(1, num_features))
        except Exception as error:  # the user's own code
            raise self._failed(num_features, error) from error

    def _failed(self, num_features: int, error: Exception) -> ConfigurationError:
        return ConfigurationError(
            f"Expected model = {self.name!r} to give scores and a gradient for one sample of {num_features} values, "
            f"got {type(error).__name__}: {error}.",
            kind="failed",
            setting="model",
        )

    def _check(self, model: Model, num_features: int, num_classes: int) -> None:
        """Try the model on one sample of zeros."""
        try:
            start = model.initial_parameters(1)
            shapes = [np.shape(values) for values in start]
            sample = np.zeros((1, num_features), np.float32), np.zeros(1, np.int64)
            gradients, scores = np.shape(model(start, sample)), np.shape(model.logits(start, sample[0]))
        except Exception as error:  # the user's own code
            raise self._failed(num_features, error) from error
        if not shapes or shapes != [tuple(shape) for shape in model.shapes] or len(set(model.names)) != len(shapes):
            raise ConfigurationError(
                f"Expected model = {self.name!r} to start from one named array for each of its shapes "
                f"{list(model.shapes)}, got names {list(model.names)} and arrays of shapes {shapes}.",
                kind="wrong-shape",
                setting="model",
            )
        if gradients != (1, model.num_parameters):
            raise ConfigurationError(
                f"Expected model = {self.name!r} to give a gradient of shape (1, {model.num_parameters}) for one "
                f"sample, got {gradients}.",
                kind="wrong-shape",
                setting="model",
            )
        if scores != (1, num_classes):
            raise ConfigurationError(
                f"Expected model = {self.name!r} to give scores of shape (1, {num_classes}) for one sample, got "
                f"{scores}.",
                kind="wrong-shape",
                setting="model",
            )


def own_model(found: Any, name: str) -> ModelKind:
    """Wrap a user's object that is no ModelKind as one.

    Raises ConfigurationError if it is neither a function nor a module of this process.
    """
    # One that was given in this process has its class's name; imported, each process would start from another.
    if _is_module(found) and name.startswith(f"{type(found).__module__}:{type(found).__qualname__}"):
        return FunctionKind(lambda *_: copy.deepcopy(found), name)
    if isinstance(found, type) or not callable(found) or _is_module(found):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        raise ConfigurationError(
            f"Expected model = {name!r} to be a function of the numbers of features and classes, which gives a Model "
            f"or a torch.nn.Module, got {kind}. scikit-learn's logistic regression is model 'softmax'; in a project "
            "of your own, private_client_app takes LinearEstimator(LogisticRegression(), ...).",
            kind="wrong-type",
            setting="model",
        )
    return FunctionKind(found, name)


def _is_module(found: Any) -> bool:
    torch = sys.modules.get("torch")  # whoever made a module has imported it
    return torch is not None and isinstance(found, torch.nn.Module)
