"""Losses of linear models in closed form: what a sample's loss changes by where its scores change.

A linear model gives a sample x the scores z = W x + b. Its gradient is then the outer product of x and the residual
r = dloss/dz, whatever the loss is. Scores and residuals are arrays of shape (samples, scores); a label is the number of
its class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
Labels = NDArray[np.intp]
Residuals = Callable[[Scores, Labels], Scores]
"""The residuals of samples with these scores and labels; a row depends on its own sample alone."""
Slope = Callable[[Scores, Scores], Scores]
"""The derivative of a loss of two classes in the score, at scores and targets of -1 or 1."""


def softmax_residuals(scores: Scores, labels: Labels) -> Scores:
    """Of the cross-entropy with a score a class: probabilities minus what they should be."""
    found = scores - scores.max(axis=1, keepdims=True)
    np.exp(found, out=found)
    found /= found.sum(axis=1, keepdims=True)
    found[np.arange(len(labels)), labels] -= 1.0
    return found


def one_against_the_rest(slope: Slope) -> Residuals:
    """Of one problem of two classes for each score: its class against all others, or the second class with one score.

    Parameters
    ----------
    slope : callable
    """

    def residuals(scores: Scores, labels: Labels) -> Scores:
        classes = np.arange(scores.shape[1]) if scores.shape[1] > 1 else np.ones(1)
        return slope(scores, np.where(labels[:, None] == classes, 1.0, -1.0))

    return residuals


def logistic(scores: Scores, targets: Scores) -> Scores:
    """Of log(1 + exp(-y z)): -y / (1 + exp(y z)), without an overflow."""
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
    """The losses of scikit-learn's ``SGDClassifier``, by its names for them.

    Parameters
    ----------
    epsilon : float
        Of those that are flat or steep within it.
    """

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
