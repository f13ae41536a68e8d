"""The interface of a model: per-sample gradients for the clients, loss and accuracy for the central evaluation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ...clients.adapters.per_sample_gradients import GRADIENT_MEMORY_MIB
from ...privacy.errors import ConfigurationError
from ...privacy.noise import derived_seed
from ..settings.registry import Named, registry
from ..settings.run_keys import RunKeys

Parameters = Sequence[NDArray[Any]]
Batch = tuple[NDArray[Any], NDArray[Any]]

CENTRE_ARRAY, CONSTANT_ARRAY = "centring.centre", "centring.constant"
"""Names of the centre and the constant in a saved model (:func:`murmurfl.privacy.centred`)."""
KNOTS_ARRAY = "additive.knots"
"""Name of the rank share and the knots in a saved model (:meth:`murmurfl.privacy.KnotRows.read`)."""
TEMPERATURE_ARRAY = "temperature"
"""Name of the temperature in a saved model, where it is not 1 (:attr:`Model.temperature`)."""

SAMPLES_AT_A_TIME = 128
"""Samples whose gradients are in memory at a time, when all are averaged."""


class Model(ABC):
    """A classifier with a cross-entropy loss.

    Parameters
    ----------
    num_features, num_classes : int
        Inputs are rows of num_features values; labels are 0 .. num_classes - 1.

    Attributes
    ----------
    shapes : list of tuple of int
        Of the parameter arrays, in order.
    names : list of str
        Of the parameter arrays.
    most_samples : int, optional
        Samples from which a simulation computes the norm of the mean gradient; None for all.
    gradient_memory_mib : float
        Memory for gradients of several samples at a time, in MiB.
    rows_stand_alone : bool
        Whether a row of gradients has the same bits whichever other rows are computed with it (:mod:`.torch_networks`).
        Workers then compute those of their own clients only.
    rows_unmixed : bool
        Whether a row of gradients depends on its own sample and on how many others are beside it alone, to the last
        bit, and computing it never fails (:func:`~murmurfl.clients.adapters.per_sample_gradients.rows_unmixed`).
    weighs_classes : bool
        Whether gradients can be weighted by class.
    class_weights : ndarray of shape (num_classes,), optional
        Public factors, at most 1, of the gradients of each class's samples; None for equal ones.
    temperature : float
        Public number by which scores are divided before they are read as logarithms of probabilities. Gradients do not
        depend on it.
    """

    most_samples: int | None = None
    gradient_memory_mib: float = GRADIENT_MEMORY_MIB
    rows_stand_alone: bool = False
    rows_unmixed: bool = False
    temperature: float = 1.0
    weighs_classes: bool = False
    class_weights: NDArray[np.float64] | None = None

    def __init__(self, num_features: int, num_classes: int) -> None:
        self.num_features = num_features
        self.num_classes = num_classes
        self.shapes: list[tuple[int, ...]] = []
        self.names: list[str] = []

    @property
    def num_parameters(self) -> int:
        """D."""
        return sum(math.prod(shape) for shape in self.shapes)

    def set_gradient_memory(self, memory_mib: float) -> None:
        """Set the memory for gradients of several samples, in MiB."""
        self.gradient_memory_mib = memory_mib

    def with_temperature(self, temperature: float) -> Self:
        """Return this model with another temperature; the model itself, which may be cached, if it has that one."""
        if temperature == self.temperature:
            return self
        made = copy(self)
        made.temperature = temperature
        return made

    def with_class_weights(self, weights: Sequence[float]) -> Self:
        """Return this model with gradients that are weighted by class, the largest weight as 1; itself without weights.

        Raises ConfigurationError if this model has no such gradients.
        """
        if not weights:
            return self
        if not self.weighs_classes:
            raise ConfigurationError(
                "Expected a schema without class_weights for this model, got some: model = 'additive' and 'softmax' "
                "have them.",
                kind="unsupported",
                setting="class_weights",
            )
        made = copy(self)
        made.class_weights = np.array(weights, dtype=np.float64) / max(weights)
        return made

    def with_augmentations(self, number: int) -> Self:
        """Return this model with gradients that are means over so many augmentations of a sample.

        Scores are those of the sample itself. Raises ConfigurationError if this model has no such gradients.
        """
        if number == 1:
            return self
        raise ConfigurationError(
            f"Expected model.augmentations to be 0 or 1 for a model whose gradients are its own, got {number}. A "
            "torch.nn.Module, or model = 'group-norm-cnn', has augmentations.",
            kind="unsupported",
            setting="model.augmentations",
            got=number,
        )

    @abstractmethod
    def initial_parameters(self, seed: int) -> list[NDArray[Any]]:
        """Public starting point of a training."""

    @abstractmethod
    def __call__(self, parameters: Parameters, samples: Batch) -> NDArray[np.floating]:
        """Per-sample gradients of the loss, shape (b, d)."""

    @abstractmethod
    def logits(self, parameters: Parameters, features: NDArray[Any]) -> NDArray[np.floating]:
        """Scores, shape (samples, num_classes)."""

    def mean_gradient(self, parameters: Parameters, samples: Batch) -> NDArray[np.float64]:
        """Return the gradient of the mean loss over some samples, shape (d,); for simulations."""
        features, labels = samples
        total = np.zeros(self.num_parameters)
        for start in range(0, len(labels), SAMPLES_AT_A_TIME):
            chosen = slice(start, start + SAMPLES_AT_A_TIME)
            total += np.asarray(self(parameters, (features[chosen], labels[chosen]))).sum(axis=0)
        return total / len(labels)

    def evaluate(self, parameters: Parameters, samples: Batch) -> tuple[float, float]:
        """Mean cross-entropy loss and accuracy."""
        features, labels = samples
        scores = np.asarray(self.logits(parameters, features), dtype=np.float64)
        scores -= scores.max(axis=1, keepdims=True)
        losses = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(labels)), labels]
        return float(losses.mean()), float((scores.argmax(axis=1) == labels).mean())

    def auc(self, parameters: Parameters, samples: Batch) -> float:
        """Area under the ROC curve; NaN unless there are two classes, and samples of both."""
        features, labels = samples
        if self.num_classes != 2:
            return math.nan
        scores = np.asarray(self.logits(parameters, features), dtype=np.float64)
        return area_under_curve(scores[:, 1] - scores[:, 0], labels)


def area_under_curve(scores: NDArray[np.floating], labels: NDArray[Any]) -> float:
    """Return how often a sample of class 1 scores higher than one of class 0; equal scores count half.

    NaN if a class has no sample, or a score is not finite.
    """
    positive = np.asarray(labels) == 1
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not ones or not zeros or not np.isfinite(scores).all():
        return math.nan
    from scipy.stats import rankdata  # here, because workers import this file without needing it

    return float((rankdata(scores)[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


class Recipe(NamedTuple):
    """Constants of full batches without dimension, for models that have some of their own (docs/tuning.md)."""

    rounds: int
    clip: float
    """S / R."""
    travel: float
    """eta S R of one round."""
    momentum: float
    steepest: float = math.inf
    """Largest eta, whatever R is."""
    temperature: float = 1.0
    """Temperature of a model that these constants trained (:attr:`Model.temperature`)."""
    fewest_rounds: int = 1
    """Rounds from which the temperature holds."""
    average: str = "last"
    """Model that is published (:class:`~murmurfl.strategies.FullBatch`)."""

    @property
    def distance(self) -> float:
        """Return eta S R of all rounds together, momentum included: how far clipped gradients that agree lead."""
        return self.travel * self.rounds / (1.0 - self.momentum)


class ModelKind(Named, ABC):
    """A model before its size is known, which is when the data are loaded.

    Attributes
    ----------
    paper_constants : bool
        Whether the papers give clip and step for it, so that ``preset = paper`` is possible.
    convex : bool
        Whether its loss is known to be convex.
    scores : bool
        Whether its predictions follow linear scores of the features, one a class.
    predicts_numbers : bool
        Whether its predictions are one linear score of the features, a number.
    takes_knots : bool
        Whether it is trained on additive features of a table's columns (:class:`murmurfl.privacy.KnotRows`).
    reads_pixels : bool
        Whether its inputs are the pixels of images, so that a run which sets no features has these.
    augmentations : int
        Augmentations of each sample over which a gradient is averaged, if nothing else is set.
    """

    paper_constants: bool = False
    convex: bool = False
    scores: bool = False
    predicts_numbers: bool = False
    takes_knots: bool = False
    reads_pixels: bool = False
    augmentations: int = 1

    def recipe(self, num_classes: int, strength: float) -> Recipe | None:
        """Return constants of its own for full batches; None for those that follow from the noise.

        ``strength`` is samples times the mu of a sum, over the root of the columns.
        """
        return None

    def check(self, config: RunKeys) -> None:
        """Raise if this model cannot serve a run configuration."""
        if config.preset == "paper" and not self.paper_constants:
            with_constants = [repr(name) for name, kind in registry("model").items() if kind.paper_constants]
            raise ConfigurationError(
                f"Expected preset to be 'practical' unless model = {' or '.join(with_constants)}: the paper's are for "
                f"it, got {config.preset!r}.",
                kind="conflict",
                setting="preset",
                got=config.preset,
            )

    def sweeps(self, config: RunKeys) -> bool:
        """Whether epochs of many runs with this model can be computed together (:mod:`murmurfl.app.papers.sweep`)."""
        return False

    @abstractmethod
    def make(self, num_features: int, num_classes: int, feature_bound: float) -> Model:
        """Make the model for data of this size.

        Parameters
        ----------
        feature_bound : float
            R of the linear models.

        Raises
        ------
        ConfigurationError
            If it does not fit the data, or needs a package that is missing.
        """

    def make_biasless(self, num_features: int, num_classes: int, feature_bound: float) -> Model:
        """Make the model without a bias, for features with a constant; by default the one of :meth:`make`."""
        return self.make(num_features, num_classes, feature_bound)

    def declared_smoothness(self, num_features: int, feature_bound: float) -> float | None:
        """L, if the model itself bounds it for any data; else None."""
        return None

    def smoothness(self, num_features: int, squared_norm: float, feature_bound: float) -> float:
        """L: the gradient of one sample's loss changes by at most L times the change of the parameters.

        Parameters
        ----------
        num_features : int
            Values of one sample, without the bias.
        squared_norm : float
            Largest possible squared L2 norm of a sample's features.
        feature_bound : float
            R of the linear models, which scale longer features down to it.

        Notes
        -----
        L comes from constants only: a step that depended on a client's longest sample would reveal something about it.

        Softmax regression has L = (||x||^2 + 1) / 2: the Hessian of the loss in the scores has no eigenvalue above 1/2,
        and the bias is one more feature that is always 1. Linear models declare their own L. Networks are not smooth in
        this sense; they get the softmax regression's L on the same features, which is a rule of thumb and no bound.
        """
        declared = self.declared_smoothness(num_features, feature_bound)
        return (squared_norm + 1) / 2 if declared is None else declared


def uniform_parameters(shapes: Sequence[tuple[int, ...]], seed: int) -> list[NDArray[np.float32]]:
    """Weights and biases uniform within 1 / sqrt(fan-in) of zero, like PyTorch's layers."""
    generator = np.random.Generator(np.random.Philox(key=derived_seed("initial parameters", seed)))
    fan_in = 1
    parameters = []
    for shape in shapes:
        fan_in = math.prod(shape[1:]) if len(shape) > 1 else fan_in
        bound = 1.0 / math.sqrt(fan_in)
        parameters.append(generator.uniform(-bound, bound, size=shape).astype(np.float32))
    return parameters
