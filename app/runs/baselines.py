"""Models without privacy that a table's private model is compared with: trained to convergence on all training rows.

A data scientist would use these: a linear model, an additive one with a piecewise linear curve for each column, and
boosted trees. They depend on the rows, their split and the schema alone, not on epsilon, trust or rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy.noise import derived_seed
from ..data.task import Dataset
from ..models.fitted_linear import ridge
from ..models.model import area_under_curve
from .outcome import Baselines, ReliabilityBin, Scores
from .simulated_figures import NOTE

MOST_ROWS = 20_000
"""Rows that baselines are trained on: of a larger table as many, drawn at random."""
_MOST_TRIED, _FOLDS = 2_000, 3
"""Rows on which penalties are compared, and folds of their cross-validation."""
_STRENGTHS = (0.01, 0.1, 1.0, 10.0)
"""Inverse penalties (scikit-learn's C), for columns of variance one."""
_KNOTS, _FEWEST_VALUES, _MOST_COLUMNS = 8, 10, 300
_TREES, _STOPPED_FROM = 200, 500
"""Boosted trees at most, and training rows from which they stop early."""
_LARGE, _LARGE_STEP, _SMALL_STEP = 5_000, 0.2, 0.1
"""Training rows from which trees take larger steps, which costs nothing there and is as good, and both steps."""
_TWO, _MOST_SITES, _TENTHS = 2, 20, 10

Predict = Callable[[NDArray[Any]], NDArray[np.float64]]


def baselines(data: Dataset) -> Baselines | None:
    """Return the scores of three models on a data set's test rows; None if its training rows are of one class.

    Each model is trained on all training rows, or on :data:`MOST_ROWS` of them. A missing value is NaN: linear models
    put the mean in its place, and trees choose a side for it. Penalties are the best of four by cross-validation on
    training rows. Of more than 300 columns, as texts and images become, only the linear one is made.
    """
    from threadpoolctl import threadpool_limits

    numbers = np.arange(len(data.train_labels))
    if len(numbers) > MOST_ROWS:
        generator = np.random.Generator(np.random.Philox(key=derived_seed("rows of baselines", len(numbers))))
        numbers = np.sort(generator.permutation(numbers)[:MOST_ROWS])
    rows, labels, classes = data.train_features[numbers], data.train_labels[numbers], data.num_classes
    if classes > 1 and len(np.unique(labels)) == 1:
        return None
    with threadpool_limits(limits=1):
        wide = rows.shape[1] > _MOST_COLUMNS
        made = (
            {"linear": _best_linear(_scaled_alike(rows), rows, labels, classes)}
            if wide
            else {
                "linear": _best_linear(_standardised(rows), rows, labels, classes),
                "additive": _best_linear(_standardised(rows, _curves(rows)), rows, labels, classes),
                "boosted": _boosted(rows, labels, classes),
            }
        )
        found = {name: scores_of(predict(data.test_features), data.test_labels) for name, predict in made.items()}
    return Baselines(note=NOTE, rows=len(labels), **found)  # type: ignore[arg-type]


def scores_of(predicted: NDArray[Any], labels: NDArray[Any]) -> Scores:
    """Return the scores of predictions, shape (rows, classes), or (rows, 1) for numbers."""
    if predicted.shape[1] == 1:
        loss, variance = float(np.square(predicted[:, 0] - labels).mean()), float(np.var(labels))
        return Scores(loss=loss, r2=1.0 - loss / variance if variance else None, rows=len(labels))
    accuracy = float((predicted.argmax(axis=1) == labels).mean())
    return Scores(accuracy=accuracy, auc=one_against_others(predicted, labels), rows=len(labels))


def one_against_others(predicted: NDArray[Any], labels: NDArray[Any]) -> float | None:
    """Return the AUC of two classes; of more, the mean over classes of the AUC of one against all others.

    ``predicted`` has scores that are logarithms of probabilities up to a constant in each row. Returns None if no
    class has rows on both sides.
    """
    with np.errstate(invalid="ignore"):
        top = predicted.max(axis=1, keepdims=True)
        shares = np.exp(predicted - np.where(np.isfinite(top), top, 0.0))
        shares /= shares.sum(axis=1, keepdims=True)
    which = [1] if predicted.shape[1] == _TWO else range(predicted.shape[1])
    areas = [area_under_curve(shares[:, one], (labels == one).astype(np.int64)) for one in which]
    known = [area for area in areas if math.isfinite(area)]
    return float(np.mean(known)) if known else None


def reliability(scores: NDArray[Any], labels: NDArray[Any]) -> list[ReliabilityBin]:
    """Return how often predictions come true, by their probability in tenths; tenths without rows are left out.

    Parameters
    ----------
    scores : ndarray of shape (rows, classes)
        Logarithms of probabilities, up to a constant in each row.
    labels : ndarray of shape (rows,)
        Classes. Of two the probability is that of class 1, of more that of the most likely class.
    """
    finite = np.isfinite(scores).all(axis=1)
    scores, labels = np.asarray(scores[finite], dtype=np.float64), labels[finite]
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    of = np.ones(len(labels), np.int64) if shares.shape[1] == _TWO else shares.argmax(axis=1)
    predicted, right = shares[np.arange(len(labels)), of], labels == of
    tenth = np.minimum(predicted * _TENTHS, _TENTHS - 1).astype(np.int64)
    return [
        ReliabilityBin(
            predicted=float(predicted[tenth == one].mean()),
            observed=float(right[tenth == one].mean()),
            rows=int((tenth == one).sum()),
        )
        for one in np.unique(tenth).tolist()
    ]


def _standardised(rows: NDArray[Any], expand: Predict = np.asarray) -> Predict:
    """Return a map of rows to columns of mean zero and variance one on these rows; missing values become the mean."""
    expanded = np.ma.masked_invalid(expand(rows).astype(np.float64))
    mean, scale = expanded.mean(axis=0).filled(0.0), expanded.std(axis=0).filled(0.0)
    scale[scale < 1e-9 * (1.0 + np.abs(mean))] = np.inf  # a constant column says nothing
    return lambda seen: np.nan_to_num((expand(seen) - mean) / scale)


def _scaled_alike(rows: NDArray[Any]) -> Predict:
    """Return a map of rows to columns of mean zero and variance one on average, each on its own scale."""
    mean, scale = rows.mean(axis=0), float(rows.std(axis=0).mean()) or 1.0
    return lambda seen: (seen - mean) / scale


def _curves(rows: NDArray[Any]) -> Predict:
    """Return a map that expands columns with many values into piecewise linear curves on quantiles of these rows."""
    knots = [_knots(rows[:, column]) for column in range(rows.shape[1])]

    def expand(seen: NDArray[Any]) -> NDArray[np.float64]:
        made = []
        for column, at in enumerate(knots):
            values = seen[:, column].astype(np.float64)
            made += [np.interp(values, at, unit) for unit in np.eye(len(at))[1:]] if len(at) else [values]
        return np.stack(made, axis=1)

    return expand


def _knots(values: NDArray[Any]) -> NDArray[np.float64]:
    values = values[~np.isnan(values)]
    if len(np.unique(values)) < _FEWEST_VALUES:
        return np.empty(0)
    return np.unique(np.quantile(values.astype(np.float64), np.linspace(0.01, 0.99, _KNOTS)))


def _best_linear(seen: Predict, rows: NDArray[Any], labels: NDArray[Any], classes: int) -> Predict:
    """Return a linear model with the best of several penalties by cross-validation."""
    inputs = seen(rows)

    def fitted(chosen: Any, strength: float) -> Predict:
        if classes == 1:
            return ridge(inputs[chosen], labels[chosen], 1.0 / strength).scores
        return _logistic(inputs[chosen], labels[chosen], strength, classes)

    generator = np.random.Generator(np.random.Philox(key=derived_seed("folds of baselines", len(labels))))
    order = generator.permutation(len(labels))[:_MOST_TRIED]
    folds = np.array_split(order, _FOLDS)

    def loss(strength: float) -> float:
        total = 0.0
        for number, held in enumerate(folds):
            model = fitted(np.concatenate(folds[:number] + folds[number + 1 :]), strength)
            total += _mean_loss(model(inputs[held]), labels[held]) * len(held)
        return total

    best = _STRENGTHS[2] if len(order) < _FOLDS * _TWO else min(_STRENGTHS, key=loss)
    model = fitted(np.arange(len(labels)), best)
    return lambda given: model(seen(given))


def _logistic(inputs: NDArray[Any], labels: NDArray[Any], strength: float, classes: int) -> Predict:
    """Return scikit-learn's logistic regression; classes without a row have a score of minus infinity."""
    from sklearn.linear_model import LogisticRegression

    present = np.unique(labels)
    if len(present) == 1:
        return lambda given: np.where(np.arange(classes) == present[0], 0.0, -np.inf) + np.zeros((len(given), 1))
    few = len(present) == _TWO and inputs.shape[1] <= _MOST_COLUMNS
    solver = "newton-cholesky" if few else "lbfgs"  # of few columns the first is far faster
    model = LogisticRegression(C=strength, solver=solver, max_iter=300).fit(inputs, labels)

    def predict(given: NDArray[Any]) -> NDArray[np.float64]:
        made = np.full((len(given), classes), -np.inf)
        found = model.decision_function(given)
        made[:, model.classes_] = np.stack([np.zeros(len(given)), found], axis=1) if found.ndim == 1 else found
        return made

    return predict


def _mean_loss(scores: NDArray[np.float64], labels: NDArray[Any]) -> float:
    """Return the mean squared error of numbers, or the mean logistic loss; a class that was not seen costs much."""
    if scores.shape[1] == 1:
        return float(np.square(scores[:, 0] - labels).mean())
    top = scores.max(axis=1, keepdims=True)
    logs = scores - top - np.log(np.exp(scores - top).sum(axis=1, keepdims=True))
    return float(-np.maximum(logs[np.arange(len(labels)), labels], np.log(1e-9)).mean())


def _boosted(rows: NDArray[Any], labels: NDArray[Any], classes: int) -> Predict:
    """Return boosted trees of scikit-learn, which stop early where rows can be spared for that."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    # Rows that decide when to stop are drawn from each class.
    early = len(labels) >= _STOPPED_FROM and (classes == 1 or np.unique(labels, return_counts=True)[1].min() > 1)
    options: dict[str, Any] = {"max_iter": _TREES if early else _TREES // 2, "early_stopping": early}
    options["learning_rate"] = _LARGE_STEP if len(labels) >= _LARGE else _SMALL_STEP
    if classes == 1:
        numbers = HistGradientBoostingRegressor(random_state=0, **options).fit(rows, labels)
        return lambda given: numbers.predict(given)[:, None]
    model = HistGradientBoostingClassifier(random_state=0, **options).fit(rows, labels)

    def predict(given: NDArray[Any]) -> NDArray[np.float64]:
        made = np.full((len(given), classes), -np.inf)
        with np.errstate(divide="ignore"):
            made[:, model.classes_] = np.log(model.predict_proba(given))
        return made

    return predict


def sites_alone_on_own(data: Dataset, test_sites: NDArray[np.int64]) -> dict[int, Scores]:
    """Return what linear models of single sites reach on held-out rows of their own site, by the site's number.

    ``test_sites`` says which site each test row belongs to. Up to 20 sites are tried, spread evenly; a site whose rows
    are of one class has none.
    """
    from threadpoolctl import threadpool_limits

    sites = np.unique(test_sites) if data.client_of is not None else np.empty(0, np.int64)
    found: dict[int, Scores] = {}
    with threadpool_limits(limits=1):
        for site in sites[np.linspace(0, len(sites) - 1, min(len(sites), _MOST_SITES)).round().astype(int)].tolist():
            own = np.flatnonzero(data.client_of == site)[:_MOST_TRIED]
            rows, labels, test = data.train_features[own], data.train_labels[own], test_sites == site
            if not len(labels) or (data.num_classes > 1 and len(np.unique(labels)) == 1):
                continue
            predict = _best_linear(_standardised(rows), rows, labels, data.num_classes)
            found[site] = scores_of(predict(data.test_features[test]), data.test_labels[test])
    return found


def mean_scores(found: Collection[Scores]) -> Scores | None:
    """Return the means of several scores, each over those that have one; None of none."""
    if not found:
        return None
    means: dict[str, Any] = {}
    for name in ("accuracy", "auc", "loss", "r2"):
        known = [value for one in found if (value := getattr(one, name)) is not None]
        means[name] = float(np.mean(known)) if known else None
    return Scores(**means, rows=sum(one.rows for one in found))
