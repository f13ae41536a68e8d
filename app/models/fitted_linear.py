"""Linear models fitted without noise to rows at hand: what private trainings are compared with.

They are scikit-learn's ``LogisticRegression``, ``LinearDiscriminantAnalysis`` (least squares, Ledoit and Wolf's
shrinkage) and ``Ridge``, on NumPy and SciPy alone: importing scikit-learn takes longer than a short training.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_factor, cho_solve
from scipy.special import log_softmax

_TWO = 2


class FittedLinear(NamedTuple):
    """Scores of rows: a column for each class, or one with the predicted numbers."""

    weights: NDArray[np.float64]
    intercepts: NDArray[np.float64]

    def scores(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        """Scores of shape (rows, classes): logarithms of probabilities up to a constant in each row, or numbers."""
        return rows @ self.weights + self.intercepts


def ridge(rows: NDArray[Any], numbers: NDArray[Any], penalty: float) -> FittedLinear:
    """Least squares with ``penalty`` times the squared norm of the weights; the intercept is free."""
    mean, middle = rows.mean(axis=0, dtype=np.float64), np.mean(numbers, dtype=np.float64)
    seen = rows - mean
    weights = np.linalg.solve(seen.T @ seen + penalty * np.eye(len(mean)), seen.T @ (numbers - middle))
    return FittedLinear(weights[:, None], np.array([middle - mean @ weights]))


def logistic(rows: NDArray[Any], labels: NDArray[np.int64], strength: float, num_classes: int) -> FittedLinear:
    """Logistic regression whose mean loss has the squared norm of its weights over 2 ``strength`` rows beside it.

    Classes without a row have a score of minus infinity.
    """
    present = np.unique(labels)
    weights, intercepts = np.zeros((rows.shape[1], num_classes)), np.full(num_classes, -np.inf)
    intercepts[present] = 0.0
    if len(present) == 1:
        return FittedLinear(weights, intercepts)
    rows, is_class = rows.astype(np.float64), np.eye(num_classes)[labels][:, present]
    free = slice(1, None) if len(present) == _TWO else slice(None)  # of two classes the first one's score is zero
    shape, shrink = (rows.shape[1] + 1, is_class[:, free].shape[1]), 1.0 / (strength * len(rows))

    def loss(values: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        *_, slopes = every = values.reshape(shape)
        scores = np.zeros(is_class.shape)
        scores[:, free] = rows @ every[:-1] + slopes
        logs = log_softmax(scores, axis=1)
        miss = (np.exp(logs) - is_class)[:, free] / len(rows)
        gradient = np.vstack([rows.T @ miss + shrink * every[:-1], miss.sum(axis=0)])
        return -np.sum(logs * is_class) / len(rows) + shrink / 2 * np.square(every[:-1]).sum(), gradient.ravel()

    from scipy.optimize import minimize  # here: it takes a third of a second to import

    options = {"maxiter": 300, "gtol": 1e-3, "maxls": 50}
    found = minimize(loss, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B", options=options).x.reshape(shape)
    weights[:, present[free]], intercepts[present[free]] = found[:-1], found[-1]
    return FittedLinear(weights, intercepts)


def discriminant(rows: NDArray[Any], labels: NDArray[np.int64], num_classes: int) -> FittedLinear:
    """Linear discriminant analysis; classes without a row have a score of minus infinity."""
    present, counts = np.unique(labels, return_counts=True)
    parts = [rows[labels == one].astype(np.float64) for one in present]
    means = np.stack([part.mean(axis=0) for part in parts])
    covariance = np.sum([len(part) / len(rows) * _shrunk_covariance(part) for part in parts], axis=0)
    weights, intercepts = np.zeros((rows.shape[1], num_classes)), np.full(num_classes, -np.inf)
    weights[:, present] = _solved(covariance, means.T)
    intercepts[present] = np.log(counts / len(rows)) - 0.5 * np.sum(means.T * weights[:, present], axis=0)
    return FittedLinear(weights, intercepts)


def _solved(covariance: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.floating]:
    """Return the least-squares solution; by Cholesky's factor where it is far from singular, many times as fast."""
    try:
        factor = cho_factor(covariance, check_finite=False)
    except LinAlgError:
        return np.linalg.lstsq(covariance, right, rcond=None)[0]
    diagonal = np.diag(factor[0])
    if diagonal.min() < _SINGULAR * diagonal.max():
        return np.linalg.lstsq(covariance, right, rcond=None)[0]
    return cho_solve(factor, right, check_finite=False)


_SINGULAR = 1e-5
"""Ratio of a factor's diagonal below which a covariance counts as singular: of the covariance it is the square."""


def _shrunk_covariance(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the covariance of columns, shrunk at variance one towards a multiple of the identity, and scaled back."""
    count, width = rows.shape
    scale = rows.std(axis=0)
    scale[scale == 0.0] = 1.0
    seen = (rows - rows.mean(axis=0)) / scale
    covariance = seen.T @ seen / count
    mean = np.trace(covariance) / width
    far = np.square(covariance).sum() - mean**2 * width
    error = (np.square(np.square(seen).sum(axis=1)).sum() / count - np.square(covariance).sum()) / count
    share = min(error / far, 1.0) if error > 0.0 < far else 0.0
    shrunk = (1.0 - share) * covariance + share * mean * np.eye(width)
    return scale[:, None] * shrunk * scale
