"""A linear estimator of scikit-learn as a client's model: gradients in closed form, and the fitted estimator back.

A setting that gradients of single samples cannot keep is refused by its name, with what takes its place. Settings of
scikit-learn's search for the model (``solver``, ``max_iter``, ``tol``, ``random_state`` ...) are not looked at: rounds
and steps are the strategy's.

A linear model gives a sample x the scores z = W x + b. Its gradient is the outer product of x and the residual
r = dloss/dz. Scores and residuals are arrays of shape (samples, scores); a label is the number of its class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from ...privacy.accounting.gdp import check_count
from ...privacy.errors import ConfigurationError
from ...privacy.queries.evaluation import Measured
from ...privacy.release.clipping import DenseContributions, StackedContributions
from ..queries import Measure
from ..records.schema import Label, Part, Schema
from .client_model import ClientModel
from .per_sample_gradients import OuterProducts, PulledOuterProducts, combined_gradients

Scores = NDArray[np.float64]
Labels = NDArray[np.intp]
Residuals = Callable[[Scores, Labels], Scores]
"""The residuals of samples with these scores and labels; a row depends on its own sample alone."""
Slope = Callable[[Scores, Scores], Scores]
"""The derivative of a loss of two classes in the score, at scores and targets of -1 or 1."""


def softmax_residuals(scores: Scores, labels: Labels) -> Scores:
    """Residuals of the cross-entropy: probabilities minus the one-hot label."""
    found = scores - scores.max(axis=1, keepdims=True)
    np.exp(found, out=found)
    found /= found.sum(axis=1, keepdims=True)
    found[np.arange(len(labels)), labels] -= 1.0
    return found


def one_against_the_rest(slope: Slope) -> Residuals:
    """Residuals of a two-class problem a score: its class against all others, or with one score the second class."""

    def residuals(scores: Scores, labels: Labels) -> Scores:
        classes = np.arange(scores.shape[1]) if scores.shape[1] > 1 else np.ones(1)
        return slope(scores, np.where(labels[:, None] == classes, 1.0, -1.0))

    return residuals


def logistic(scores: Scores, targets: Scores) -> Scores:
    """Return the derivative of log(1 + exp(-y z)), -y / (1 + exp(y z)), without an overflow."""
    small = np.exp(-np.abs(scores))
    return -targets * np.where(targets * scores > 0, small, 1.0) / (1.0 + small)


def _hinge(scores: Scores, targets: Scores) -> Scores:
    return np.where(targets * scores <= 1.0, -targets, 0.0)


def _perceptron(scores: Scores, targets: Scores) -> Scores:
    return np.where(targets * scores <= 0.0, -targets, 0.0)


def _squared_hinge(scores: Scores, targets: Scores) -> Scores:
    return -2.0 * targets * np.maximum(1.0 - targets * scores, 0.0)


def _modified_huber(scores: Scores, targets: Scores) -> Scores:
    margins = targets * scores
    return np.where(margins >= -1.0, _squared_hinge(scores, targets), -4.0 * targets)


def _squared_error(scores: Scores, targets: Scores) -> Scores:
    return scores - targets


def slopes(epsilon: float) -> Mapping[str, Slope]:
    """Return derivatives of the losses of scikit-learn's ``SGDClassifier``, by its names for them."""

    def huber(scores: Scores, targets: Scores) -> Scores:
        return np.clip(scores - targets, -epsilon, epsilon)

    def epsilon_insensitive(scores: Scores, targets: Scores) -> Scores:
        return np.where(np.abs(scores - targets) > epsilon, np.sign(scores - targets), 0.0)

    def squared_epsilon_insensitive(scores: Scores, targets: Scores) -> Scores:
        return 2.0 * np.sign(scores - targets) * np.maximum(np.abs(scores - targets) - epsilon, 0.0)

    return {
        "hinge": _hinge,
        "log_loss": logistic,
        "modified_huber": _modified_huber,
        "squared_hinge": _squared_hinge,
        "perceptron": _perceptron,
        "squared_error": _squared_error,
        "huber": huber,
        "epsilon_insensitive": epsilon_insensitive,
        "squared_epsilon_insensitive": squared_epsilon_insensitive,
    }


_RELEASED = "every look at the data is released"
_WEIGHTS = (
    "class_weight",
    (None,),
    "weights of classes follow from private labels, or change how much a sample may count: leave it out, and move "
    "intercept_ of the fitted model, or where predict_proba is cut, by what is publicly known of the classes",
)
_WARM = (
    "warm_start",
    (False,),
    "set coef_ and intercept_ of the estimator to those of a model of public data, and clients start there",
)
_OF_LOGISTIC = (
    _WEIGHTS,
    _WARM,
    ("dual", (False,), "it is the same model, found in another way"),
    (
        "multi_class",
        ("deprecated", "auto", "warn", "multinomial"),
        "give SGDClassifier(loss='log_loss'), whose classes are each against the rest",
    ),
)
_OF_SGD = (
    _WEIGHTS,
    _WARM,
    (
        "early_stopping",
        (False,),
        f"{_RELEASED}, a validation score too: choose the rounds before the training, and evaluate on public data or "
        "privately",
    ),
    ("average", (False,), "the server averages: FullBatch(average='linear'), or Mu2"),
    (
        "learning_rate",
        ("optimal",),
        "steps are the server's: the strategy's own learning_rate, such as FullBatch(learning_rate=...)",
    ),
)
_PENALTIES = (
    "l2 or no penalty: a penalty with l1 is no sum over samples; to have few features choose them without the data"
)


def closed_form(estimator: Any, num_classes: int, num_samples: int | None) -> tuple[Residuals, float, int]:
    """Return the residuals of an estimator's loss, its l2 penalty and its number of scores.

    Refuses what cannot be kept.

    The loss is a mean over the ``num_samples`` of all clients, plus pull / 2 ||W||^2; intercepts are not pulled.
    """
    from sklearn.linear_model import LogisticRegression, SGDClassifier

    if isinstance(estimator, type):
        name = estimator.__name__
        raise ConfigurationError(f"Expected an estimator, got the class {name}: write {name}().", kind="wrong-type")
    if type(estimator) is LogisticRegression:
        residuals = one_against_the_rest(logistic) if num_classes == 2 else softmax_residuals
        return residuals, _pull_of_logistic(estimator, num_samples), _scores(num_classes)
    if type(estimator) is SGDClassifier:
        check_settings(estimator, _OF_SGD)
        settings = estimator.get_params()
        known = slopes(float(settings["epsilon"]))
        if settings["loss"] not in known:
            raise ConfigurationError(
                f"Expected loss one of {', '.join(known)}, got {settings['loss']!r}.",
                kind="unknown-name",
                setting="loss",
                got=settings["loss"],
            )
        penalised = _is_l2(estimator, settings["penalty"], settings)
        return one_against_the_rest(known[settings["loss"]]), settings["alpha"] * penalised, _scores(num_classes)
    raise ConfigurationError(_other(estimator), kind="unsupported")


def _scores(num_classes: int) -> int:
    return num_classes if num_classes > 2 else 1


def _pull_of_logistic(estimator: Any, num_samples: int | None) -> float:
    check_settings(estimator, _OF_LOGISTIC)
    settings = estimator.get_params()
    if settings["solver"] == "liblinear":
        raise ConfigurationError(
            "Expected a solver that puts no penalty on the intercept, got LogisticRegression(solver='liblinear'): "
            "leave solver out, which is otherwise not looked at.",
            kind="unsupported",
            setting="solver",
        )
    penalty = settings.get("penalty", "deprecated")  # until scikit-learn 1.7 it is said here, and since 1.8 by l1_ratio
    if penalty == "deprecated":
        penalty = "elasticnet" if settings["l1_ratio"] else "l2"
    if not _is_l2(estimator, penalty, settings) or settings["C"] == float("inf"):
        return 0.0
    if num_samples is None:
        raise ConfigurationError(
            f"Expected num_samples with LogisticRegression(C={settings['C']:g}), got none: C weighs against the sum of "
            "all losses, so say how many samples all clients have together, or give C=numpy.inf and no penalty.",
            kind="missing",
            setting="num_samples",
        )
    return 1.0 / (settings["C"] * num_samples)


def _is_l2(estimator: Any, penalty: Any, settings: Mapping[str, Any]) -> bool:
    """Return True if there is a penalty, which is then l2."""
    if penalty is None:
        return False
    ratio = settings.get("l1_ratio") or 0.0
    if penalty == "l2" or (penalty == "elasticnet" and ratio == 0.0):
        return True
    raise ConfigurationError(
        f"Expected {_PENALTIES}; got {type(estimator).__name__} with penalty {penalty!r} and l1_ratio {ratio:g}.",
        kind="unsupported",
    )


def check_settings(estimator: Any, kept: tuple[tuple[str, tuple[Any, ...], str], ...]) -> None:
    """Refuse an estimator with a setting beside those that can be kept, and say what takes its place."""
    settings = estimator.get_params()
    for name, allowed, instead in kept:
        value = settings.get(name, allowed[0])
        if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
            raise ConfigurationError(
                f"Expected {type(estimator).__name__} without {name} = {value!r}, which cannot be kept: {instead}.",
                kind="conflict",
            )


def _other(estimator: Any) -> str:
    name = type(estimator).__name__
    expected = f"Expected LogisticRegression or SGDClassifier of scikit-learn, got {name}: "
    if name in ("MLPClassifier", "MLPRegressor"):
        return f"{expected}give MLPEstimator({name}(...), num_features=30, classes=[0, 1]), or bounds=(low, high)."
    if name in ("LinearRegression", "Ridge", "SGDRegressor", "HuberRegressor"):
        return (
            f"{expected}give a Schema of the table, whose statistics make the model in one release, or "
            "MLPEstimator(MLPRegressor(hidden_layer_sizes=()), num_features=30, bounds=(low, high))."
        )
    if hasattr(estimator, "steps"):
        return (
            f"{expected}give the last step alone, and apply the others where samples are made, with constants that do "
            "not come from private data (a scaler's mean would be of them)"
        )
    if name == "LogisticRegressionCV" or hasattr(estimator, "cv"):
        return f"{expected}{_RELEASED}, so every value that is tried costs privacy: choose C before, on public data."
    if hasattr(estimator, "feature_importances_") or "Tree" in name or "Forest" in name or "Boost" in name:
        return f"{expected}trees have no gradient to add noise to. A linear model of more features may come near."
    return (
        f"{expected}only of those a sample's gradient is known in closed form. A PyTorch module can be anything else."
    )


_NAMES = "coef_", "intercept_"


@dataclass(frozen=True)
class LinearEstimator:
    """A linear classifier of scikit-learn with its classes and features, which ``fit`` would learn from all data.

    The same object stands on both sides: ``private_client_app(model, ...)`` on the clients,
    ``model.initial_arrays()`` and ``model.fitted(arrays)`` on the server.

    Parameters
    ----------
    estimator : sklearn.linear_model.LogisticRegression or SGDClassifier
        With l2 or no penalty. Training starts at its ``coef_`` and ``intercept_`` (of public data, say), else at zero.
    classes : sequence
        All labels there may be, at least two; kept sorted, as in scikit-learn.
    num_samples : int, optional
        Samples of all clients together, needed only for the ``C`` of ``LogisticRegression``.

    Raises
    ------
    ConfigurationError
        If the estimator is another, or has a setting that cannot be kept.

    Notes
    -----
    Features and classes are said by whoever writes the project, not taken from private data. A penalty pulls on every
    sample's gradient alike, before that is clipped.

    Examples
    --------
    >>> from sklearn.linear_model import LogisticRegression
    >>> estimator = LinearEstimator(LogisticRegression(), num_features=30, classes=[0, 1], num_samples=1000)
    >>> estimator.num_features
    30
    """

    estimator: Any
    num_features: int
    classes: Sequence[Hashable]
    num_samples: int | None = None

    def __post_init__(self) -> None:
        check_count("num_features", self.num_features)
        if self.num_samples is not None:
            check_count("num_samples", self.num_samples)
        classes = list(np.unique(np.asarray(self.classes)).tolist())
        if len(classes) < 2:
            raise ConfigurationError(
                f"Expected at least two classes, got {classes!r}.", kind="out-of-range", setting="classes", got=classes
            )
        object.__setattr__(self, "classes", tuple(classes))
        _ = self.gradients  # refuses what cannot be kept

    @property
    def fit_intercept(self) -> bool:
        """Whether the model has intercepts."""
        return bool(self.estimator.fit_intercept)

    @property
    def gradients(self) -> LinearGradients:
        """Per-sample gradients of the model."""
        residuals, pull, scores = closed_form(self.estimator, len(self.classes), self.num_samples)
        return LinearGradients(residuals, (scores, self.num_features), pull=pull, bias=self.fit_intercept)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its arrays, as in scikit-learn."""
        return _NAMES if self.fit_intercept else _NAMES[:1]

    def initial_arrays(self) -> ArrayRecord:
        """Return the arrays at which training starts, for a strategy's ``start``."""
        found = {}
        for name, shape in zip(self.names, self.gradients.shapes, strict=True):
            values = np.array(getattr(self.estimator, name, np.zeros(shape)), dtype=np.float64)
            if values.shape != shape:
                raise ConfigurationError(f"Expected {name} of shape {shape}, got {values.shape}.", kind="wrong-shape")
            found[name] = Array(values)
        return ArrayRecord(found)

    def fitted(self, arrays: ArrayRecord) -> Any:
        """Return a new estimator that predicts with the arrays of a strategy's result; see :func:`fitted`."""
        return fitted(self.estimator, arrays, self.classes)


def estimator_model(model: Any, loss: Any = None) -> ClientModel:
    """Return the client's model of a :class:`LinearEstimator`.

    Or of an estimator that has ``coef_`` and ``classes_``.
    """
    if loss is not None:
        raise ConfigurationError(
            f"Expected no loss beside a scikit-learn estimator, which has its own, got {loss!r}.",
            kind="conflict",
            setting="loss",
        )
    if hasattr(model, "client_model"):  # an MLPEstimator, whose module needs this one
        return model.client_model()
    made = model if isinstance(model, LinearEstimator) else _with_its_own_arrays(model)

    own = Schema(inputs=(Part(shape=(made.num_features,)),), label=Label(classes=tuple(made.classes)))  # type: ignore[arg-type]

    def check(schema: Schema, measure: Measure | None) -> None:  # noqa: ARG001 - it is of closed form
        same_records(own, schema)

    def bound(schema: Schema) -> float:
        return math.hypot(schema.norm_bound, made.fit_intercept)

    def start() -> list[NDArray[Any]]:
        return [np.asarray(array.numpy(), np.float64) for array in made.initial_arrays().values()]

    return ClientModel(made.gradients, made.names, check, partial(_measure, made), bound, own, start=start)


def same_records(own: Schema, schema: Schema) -> None:
    """Refuse a schema of other features or classes than an estimator's."""
    got = schema.num_features, schema.label.names
    if got != (own.num_features, own.label.names):
        raise ConfigurationError(
            f"Expected a schema of {own.num_features} features and the classes {', '.join(own.label.names) or 'none'} "
            f"in this order, as the estimator has them, got {got[0]} and {', '.join(got[1]) or 'none'}.",
            kind="mismatch",
            setting="schema",
        )


def _measure(model: LinearEstimator, right: Any) -> Measure:
    """Return the measure of a linear classifier: it predicts the class of the largest score, or by the sign of one."""
    if right is not None:
        raise ConfigurationError(
            "Expected no `right` beside a scikit-learn classifier, got one: its classes say it.",
            kind="conflict",
            setting="right",
        )

    def measured(parameters: Sequence[NDArray[Any]], samples: Any) -> Measured:
        with np.errstate(all="ignore"):
            scores = np.asarray(samples[0], dtype=np.float64) @ np.asarray(parameters[0]).T
            scores = scores + np.asarray(parameters[1]) if model.fit_intercept else scores
            if scores.shape[1] > 1:
                return Measured(scores.argmax(axis=1) == samples[1])
            margin = scores[:, 0]
            return Measured((margin > 0) == samples[1], 1.0 / (1.0 + np.exp(-margin)), samples[1])

    return measured


def _with_its_own_arrays(estimator: Any) -> LinearEstimator:
    closed_form(estimator, 2, 1)  # refuses another estimator first
    if not (hasattr(estimator, "coef_") and hasattr(estimator, "classes_")):
        name = type(estimator).__name__
        raise ConfigurationError(
            f"Expected the number of features and the classes beside {name}, which nobody sees in all data here: give "
            f"LinearEstimator({name}(...), num_features=30, classes=[0, 1]).",
            kind="missing",
        )
    return LinearEstimator(estimator, np.shape(estimator.coef_)[1], estimator.classes_.tolist())


def is_estimator(model: Any) -> bool:
    """Return True if something is a scikit-learn estimator, or one with what is known of the data; imports nothing."""
    kinds = type(model).__mro__
    return (
        isinstance(model, LinearEstimator)
        or kinds[0].__name__ == "MLPEstimator"
        or any(kind.__name__ == "BaseEstimator" and kind.__module__ == "sklearn.base" for kind in kinds)
    )


def fitted(estimator: Any, arrays: ArrayRecord, classes: Iterable[Hashable]) -> Any:
    """Return a clone of an estimator with the arrays of a training, which predicts as if it had been fitted.

    Parameters
    ----------
    estimator : sklearn.linear_model.LogisticRegression or SGDClassifier
    arrays : ArrayRecord
        ``coef_`` and, with an intercept, ``intercept_``.
    classes : iterable
        All labels there may be.

    Notes
    -----
    Post-processing: it is as private as the arrays are.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from sklearn.linear_model import LogisticRegression
    >>> arrays = ArrayRecord([np.array([[1.0, -1.0]]), np.array([0.0])])  # such as the result of a training
    >>> model = fitted(LogisticRegression(), arrays, classes=["no", "yes"])
    >>> model.predict([[2.0, 0.5], [0.5, 2.0]]).tolist()
    ['yes', 'no']
    """
    from sklearn.base import clone

    labels = np.unique(np.asarray(list(classes)))
    names = _NAMES if estimator.fit_intercept else _NAMES[:1]
    scores = len(labels) if len(labels) > 2 else 1
    values = [np.array(array.numpy(), dtype=np.float64) for array in arrays.values()]
    if len(values) != len(names) or values[0].ndim != 2 or any(len(one) != scores for one in values):
        raise ConfigurationError(
            f"Expected the arrays {' and '.join(names)} with {scores} rows, got {[one.shape for one in values]}.",
            kind="wrong-shape",
        )
    made: Any = clone(estimator)
    made.coef_, made.intercept_ = values[0], values[1] if len(values) > 1 else np.zeros(scores)
    made.classes_, made.n_features_in_ = labels, values[0].shape[1]
    return made


class LinearGradients:
    """Per-sample gradients of a linear model with a loss in closed form.

    Parameters
    ----------
    residuals : callable
        dloss/dscores (:mod:`~murmurfl.clients.adapters.sklearn_model`).
    shape : (int, int)
        Scores and features.
    pull : float
        lambda >= 0 of the penalty lambda / 2 ||W||^2, whose gradient is added to every sample's.
    bias : bool
        Whether there are intercepts, which have no penalty.

    Notes
    -----
    A batch is a pair (features, labels), labels the numbers of classes; another label gives a row of NaN, which a
    client counts as zero.

    **Formal guarantees.** Row i depends on sample i and the point alone.
    """

    def __init__(self, residuals: Any, shape: tuple[int, int], *, pull: float = 0.0, bias: bool = True) -> None:
        self.shapes: list[tuple[int, ...]] = [shape, (shape[0],)] if bias else [shape]
        self._residuals = residuals
        self._pull = float(pull)
        self._bias = bias

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> NDArray[np.float64]:
        made = self._stacked([parameters], [1.0], samples)
        rows = np.empty((len(samples[1]), sum(map(math.prod, self.shapes))))
        with np.errstate(all="ignore"):
            for i, row in enumerate(rows):
                made.write(i, 1.0, row)
        return rows

    def stacked(
        self,
        points: Sequence[Sequence[NDArray[Any]]],
        weights: Sequence[float | NDArray[np.float64]],
        samples: Any,
    ) -> StackedContributions:
        """Return :func:`~murmurfl.clients.adapters.per_sample_gradients.combined_gradients`, not written out."""
        if any(isinstance(weight, np.ndarray) for weight in weights):
            with np.errstate(all="ignore"):
                return DenseContributions(combined_gradients(self, points, weights, samples))
        return self._stacked(points, [float(weight) for weight in weights], samples)

    def _stacked(
        self, points: Sequence[Sequence[NDArray[Any]]], weights: Sequence[float], samples: Any
    ) -> OuterProducts:
        features, labels = np.asarray(samples[0], dtype=np.float64), np.asarray(samples[1])
        shape = self.shapes[0]
        residuals, pull = np.zeros((len(features), shape[0])), np.zeros(shape)
        known = (labels >= 0) & (labels < max(shape[0], 2))
        with np.errstate(all="ignore"):
            for point, weight in zip(points, weights, strict=True):
                if not weight:
                    continue
                matrix = np.asarray(point[0], dtype=np.float64)
                scores = features @ matrix.T
                if self._bias:
                    scores += point[1]
                residuals += weight * self._residuals(scores, np.where(known, labels, 0))
                pull += weight * self._pull * matrix
            residuals[~known] = np.nan
            if self._pull:
                return PulledOuterProducts(residuals, features, pull, bias=self._bias)
        return OuterProducts(residuals, features, bias=self._bias)
