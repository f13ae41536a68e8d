"""A multi-layer perceptron of scikit-learn as a client's model: gradients by the chain rule, and the estimator back.

Layer l has the activations a_l = f(a_{l-1} W_l + b_l), of the last layer f is the identity, and its outputs are the
scores z. With r_l the derivative of one sample's loss in what f is applied to, the gradient is a_{l-1}^T r_l in W_l and
r_l in b_l, where r_{l-1} = (r_l W_l^T) f'(a_{l-1}) and the last r is the loss's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from ...privacy.accounting.gdp import check_count
from ...privacy.errors import ConfigurationError
from ...privacy.queries.evaluation import Measured
from ..queries import Measure
from ..records.schema import Label, Part, Schema
from .client_model import ClientModel, measured_bound
from .per_sample_gradients import GRADIENT_MEMORY_MIB
from .sklearn_model import Residuals, check_settings, logistic, one_against_the_rest, same_records, softmax_residuals

Values = NDArray[np.float64]

_ACTIVATIONS: dict[str, tuple[Callable[[Values], Values], Callable[[Values], Values]]] = {
    "identity": (lambda values: values, np.ones_like),
    "logistic": (lambda values: 1.0 / (1.0 + np.exp(-values)), lambda found: found * (1.0 - found)),
    "tanh": (np.tanh, lambda found: 1.0 - found * found),
    "relu": (lambda values: np.maximum(values, 0.0), lambda found: (found > 0.0).astype(np.float64)),
}
"""scikit-learn's activations, and their derivatives as functions of what they give."""

_KEPT = (
    (
        "early_stopping",
        (False,),
        "every look at the data is released, a validation score too: choose the rounds before the training",
    ),
    (
        "warm_start",
        (False,),
        "set coefs_ and intercepts_ of the estimator to those of a model of public data, and clients start there",
    ),
    ("alpha", (0.0, 0, 1e-4), "the penalty needs no record: give it to the strategy, FullBatch(l2=...)"),
    ("loss", ("squared_error", "log_loss"), "give MLPRegressor(loss='squared_error')"),
)


@dataclass(frozen=True)
class MLPEstimator:
    """A multi-layer perceptron of scikit-learn with its features, and classes or bounds, which ``fit`` would learn.

    The same object stands on both sides: ``private_client_app(model, ...)`` on the clients,
    ``model.initial_arrays()`` and ``model.fitted(arrays)`` on the server.

    Parameters
    ----------
    estimator : sklearn.neural_network.MLPClassifier or MLPRegressor
        Its ``hidden_layer_sizes`` and ``activation`` are kept. Training starts at its ``coefs_`` and ``intercepts_``
        if it has some (of public data, say), else at values drawn from ``random_state`` as scikit-learn scales them.
    num_features : int
        Numbers of a record.
    classes : sequence, optional
        All labels there may be, for a classifier; kept sorted, as in scikit-learn.
    bounds : (float, float), optional
        Public bounds of the target of a regressor. A target outside of them counts as the nearer bound.

    Raises
    ------
    ConfigurationError
        If the estimator is another, or has a setting that cannot be kept.

    Notes
    -----
    **Formal guarantees.** A sample's gradient depends on that sample and the parameters alone. Features, classes and
    bounds are stated by whoever writes the project, not taken from private data. Solver, steps and stopping are the
    server's. The penalty ``alpha`` is left out: its default pulls a weight by less than 10^-6 of itself in a step.

    Examples
    --------
    >>> from sklearn.neural_network import MLPClassifier
    >>> model = MLPEstimator(MLPClassifier((16,), random_state=0), num_features=30, classes=[0, 1])
    >>> [array.shape for array in model.initial_arrays().values()]
    [(30, 16), (16, 1), (16,), (1,)]
    """

    estimator: Any
    num_features: int
    classes: Sequence[Hashable] | None = None
    bounds: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        kind = kind_of_mlp(self.estimator)
        check_count("num_features", self.num_features)
        check_settings(self.estimator, _KEPT)
        activation = self.estimator.get_params()["activation"]
        if activation not in _ACTIVATIONS:
            raise ConfigurationError(
                f"Expected activation one of {', '.join(_ACTIVATIONS)}, got {activation!r}.",
                kind="unknown-name",
                setting="activation",
                got=activation,
            )
        if (self.classes is None) == (kind == "MLPClassifier") or (self.bounds is None) == (kind == "MLPRegressor"):
            needed = "classes and no bounds" if kind == "MLPClassifier" else "bounds and no classes"
            raise ConfigurationError(
                f"Expected {needed} with {kind}, got classes={self.classes!r} and bounds={self.bounds!r}.",
                kind="conflict",
                setting="classes" if kind == "MLPClassifier" else "bounds",
            )
        if self.classes is not None:
            classes = tuple(np.unique(np.asarray(self.classes)).tolist())
            if len(classes) < 2:
                raise ConfigurationError(
                    f"Expected at least two classes, got {list(classes)!r}.", kind="out-of-range", setting="classes"
                )
            object.__setattr__(self, "classes", classes)

    @property
    def schema(self) -> Schema:
        """Schema of a record."""
        label = Label(bounds=self.bounds) if self.classes is None else Label(classes=cast(Any, tuple(self.classes)))
        return Schema(inputs=(Part(shape=(self.num_features,)),), label=label)

    @property
    def gradients(self) -> MLPGradients:
        """Per-sample gradients of the model."""
        hidden = np.atleast_1d(np.asarray(self.estimator.hidden_layer_sizes, dtype=int)).tolist()
        for size in hidden:
            check_count("hidden_layer_sizes", size)
        classes = 0 if self.classes is None else len(self.classes)
        sizes = [self.num_features, *hidden, classes if classes > 2 else 1]
        return MLPGradients(sizes, self.estimator.activation, num_classes=classes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its arrays: the weights of each layer, then the intercepts."""
        layers = range(len(self.gradients.sizes) - 1)
        return tuple(f"{kind}.{layer}" for kind in ("coefs_", "intercepts_") for layer in layers)

    def initial_arrays(self) -> ArrayRecord:
        """Return the arrays at which training starts, for a strategy's ``start``."""
        return ArrayRecord(dict(zip(self.names, map(Array, self._start()), strict=True)))

    def _start(self) -> list[Values]:
        shapes = self.gradients.shapes
        if hasattr(self.estimator, "coefs_"):
            given = [*self.estimator.coefs_, *self.estimator.intercepts_]
            found = [np.array(values, dtype=np.float64) for values in given]
            if [values.shape for values in found] != shapes:
                raise ConfigurationError(
                    f"Expected coefs_ and intercepts_ of shapes {shapes}, got {[values.shape for values in found]}.",
                    kind="wrong-shape",
                )
            return found
        seed = self.estimator.random_state
        key = seed if isinstance(seed, int) and seed >= 0 else 0
        random = np.random.Generator(np.random.Philox(key=key))
        factor = 2.0 if self.estimator.activation == "logistic" else 6.0
        limits = [math.sqrt(factor / (inputs + outputs)) for inputs, outputs in pairwise(self.gradients.sizes)]
        return [random.uniform(-limit, limit, size=size) for limit, size in zip(2 * limits, shapes, strict=True)]

    def fitted(self, arrays: ArrayRecord) -> Any:
        """Return a new estimator that predicts with the arrays of a strategy's result.

        Notes
        -----
        Post-processing: it is as private as the arrays are.
        """
        from sklearn.base import clone

        values = [np.array(array.numpy(), dtype=np.float64) for array in arrays.values()]
        if [one.shape for one in values] != self.gradients.shapes:
            raise ConfigurationError(
                f"Expected arrays of shapes {self.gradients.shapes}, got {[one.shape for one in values]}.",
                kind="wrong-shape",
            )
        made: Any = clone(self.estimator)
        made.set_params(solver="sgd")
        if self.classes is None:
            made.partial_fit(np.zeros((1, self.num_features)), np.zeros(1))
        else:  # one step on zeros, which sets all that scikit-learn predicts with, before the arrays replace the result
            labels = list(self.classes)
            made.partial_fit(np.zeros((len(labels), self.num_features)), labels, classes=labels)
        made.set_params(solver=self.estimator.solver)
        layers = len(values) // 2
        made.coefs_, made.intercepts_ = values[:layers], values[layers:]
        return made

    def client_model(self) -> ClientModel:
        """Return the client's model."""
        own, gradients, start = self.schema, self.gradients, self._start()

        def check(schema: Schema, measure: Measure | None) -> None:  # noqa: ARG001 - each row is computed by itself
            same_records(own, schema)
            if self.bounds is not None and schema.label.bounds is None:
                raise ConfigurationError(
                    "Expected a schema with a bounded label for a regressor, got one with classes.",
                    kind="mismatch",
                    setting="schema",
                )

        def bound(schema: Schema) -> float:
            return measured_bound(gradients, start, schema)

        norm = math.sqrt(sum(float((values * values).sum()) for values in start))
        measure = None if self.classes is None else self._measure
        return ClientModel(gradients, self.names, check, measure, bound, own, norm=norm, start=lambda: start)

    def _measure(self, right: Any) -> Measure:
        """Return the measure of a classifier: it predicts the class of the largest score, or by the sign of one."""
        if right is not None:
            raise ConfigurationError(
                "Expected no `right` beside a scikit-learn classifier, got one: its classes say it.",
                kind="conflict",
                setting="right",
            )

        def measured(parameters: Sequence[NDArray[Any]], samples: Any) -> Measured:
            with np.errstate(all="ignore"):
                scores = self.gradients.activations(parameters, np.asarray(samples[0], dtype=np.float64))[-1]
                if scores.shape[1] > 1:
                    return Measured(scores.argmax(axis=1) == samples[1])
                return Measured((scores[:, 0] > 0) == samples[1], 1.0 / (1.0 + np.exp(-scores[:, 0])), samples[1])

        return measured


def kind_of_mlp(estimator: Any) -> str:
    """Return the name of one of scikit-learn's two perceptrons; refuses another estimator."""
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    if type(estimator) not in (MLPClassifier, MLPRegressor):
        name = estimator.__name__ if isinstance(estimator, type) else type(estimator).__name__
        raise ConfigurationError(
            f"Expected MLPClassifier(...) or MLPRegressor(...) of scikit-learn, got {name}.",
            kind="wrong-type",
            setting="estimator",
        )
    return type(estimator).__name__


def _least_squares(scores: Values, labels: NDArray[Any]) -> Values:
    return scores - np.asarray(labels, dtype=np.float64)[:, None]


class MLPGradients:
    """Per-sample gradients of a perceptron.

    Parameters
    ----------
    sizes : sequence of int
        Numbers of features, of each hidden layer's units, and of scores.
    activation : {"identity", "logistic", "tanh", "relu"}
    num_classes : int
        0 for a regressor, whose loss is half the squared error.

    Notes
    -----
    A batch is a pair (features, labels), labels the numbers of classes; another label gives a row of NaN, which a
    client counts as zero.

    **Formal guarantees.** Row i depends on sample i and the point alone.
    """

    gradient_memory_mib = GRADIENT_MEMORY_MIB

    def __init__(self, sizes: Sequence[int], activation: str, *, num_classes: int) -> None:
        self.sizes = tuple(sizes)
        self.shapes: list[tuple[int, ...]] = [*pairwise(sizes), *((size,) for size in sizes[1:])]
        self._num_classes = num_classes
        self._apply, self._slope = _ACTIVATIONS[activation]
        self._residuals: Residuals = _least_squares
        if num_classes:
            self._residuals = softmax_residuals if num_classes > 2 else one_against_the_rest(logistic)

    def activations(self, parameters: Sequence[NDArray[Any]], features: Values) -> list[Values]:
        """Return what each layer gives, the features first and the scores last, shape (samples, units)."""
        found = [features]
        arrays, layers = [np.asarray(values, dtype=np.float64) for values in parameters], len(parameters) // 2
        for layer in range(layers):
            values = found[-1] @ arrays[layer] + arrays[layers + layer]
            found.append(self._apply(values) if layer < layers - 1 else values)
        return found

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> Values:
        features, labels = np.asarray(samples[0], dtype=np.float64), np.asarray(samples[1])
        rows = np.empty((len(features), sum(map(math.prod, self.shapes))))
        known = (labels >= 0) & (labels < self._num_classes) if self._num_classes else np.isfinite(labels)
        parts = np.split(rows, np.cumsum(list(map(math.prod, self.shapes)))[:-1], axis=1)
        layers = len(parts) // 2
        with np.errstate(all="ignore"):
            found = self.activations(parameters, features)
            residuals = self._residuals(found[-1], np.where(known, labels, 0))
            for layer in reversed(range(layers)):
                parts[layers + layer][:] = residuals
                parts[layer][:] = (found[layer][:, :, None] * residuals[:, None, :]).reshape(parts[layer].shape)
                if layer:
                    weights = np.asarray(parameters[layer], dtype=np.float64)
                    residuals = (residuals @ weights.T) * self._slope(found[layer])
        rows[~known] = np.nan
        return rows
