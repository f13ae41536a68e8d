r"""Second moments: all that a linear model needs of a sample, as one row, so that one release is enough.

A sample is its features x, no longer than S, and its class c of C. Its row is

    the upper triangle of x x^T, off the diagonal times sqrt(2);    a S (x outer u_c),

with u_1 .. u_C the corners of a regular simplex around zero in C - 1 dimensions, each of length 1; a sample without a
class has none. The sum of the rows is X^T X and a S X^T U, from which least squares on the classes is solved. Only
differences between classes are sent: a value added to all classes alike would change no prediction.

Two rows are at most S^2 sqrt(2 + 2 a^2 + a^4 / 2) apart, for a^2 <= 2. The machine itself makes rows from features and
class, so this structure is there whatever it is handed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError

MOST_CLASS_WEIGHT = math.sqrt(2.0)


@dataclass(frozen=True)
class Moments:
    """The second moments of samples with C = ``classes`` >= 2 classes.

    ``class_weight`` is a, above 0 and at most sqrt(2): how much of the release is about classes. More of it makes them
    clearer, and all of the noise larger.

    Notes
    -----
    **Formal guarantees.** For any two samples with features of at most S, and any classes or none, their rows are at
    most :meth:`distance` apart in L2. With r = ||x||, r' = ||x'|| and t = <x, x'>, and S = 1: the first parts differ by
    r^4 + r'^4 - 2 t^2 in squares. The second by a^2 (r^2 + r'^2 - 2 t) if the classes are the same, by a^2 (r^2 + r'^2
    + 2 t / (C - 1)) if they are not, and by no more than a^2 (r^2 + r'^2) if one has none. Over t, -2 t^2 + 2 |t| a^2
    is at most a^4 / 2.
    Proof: docs/proofs/sensitivities.md.
    """

    classes: int
    class_weight: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.classes, bool) or not isinstance(self.classes, int) or self.classes < 2:
            raise ConfigurationError(f"Expected classes to be an integer >= 2, got {self.classes!r}.")
        weight = self.class_weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= MOST_CLASS_WEIGHT:
            raise ConfigurationError(f"Expected class_weight > 0 and at most sqrt(2), got {weight!r}.")

    def distance(self, clip_norm: float) -> float:
        """The L2 distance that two rows can be apart at most, with features of at most ``clip_norm``."""
        squared = self.class_weight**2
        return math.nextafter(clip_norm**2 * math.sqrt(2.0 + 2.0 * squared + squared**2 / 2.0), math.inf)

    def longest(self, clip_norm: float) -> float:
        """The L2 norm of a row at most."""
        return clip_norm**2 * math.sqrt(1.0 + self.class_weight**2)

    def num_values(self, num_features: int) -> int:
        """Values of a row, d = k (k + 1) / 2 + k (C - 1)."""
        return num_features * (num_features + 1) // 2 + num_features * (self.classes - 1)

    def num_features(self, num_values: int) -> int:
        """The number of features, k, of samples whose rows have ``num_values`` values."""
        half = self.classes - 0.5
        features = round(math.sqrt(half**2 + 2.0 * num_values) - half)
        if features < 1 or self.num_values(features) != num_values:
            raise ConfigurationError(
                f"Expected k (k + 1) / 2 + k (C - 1) values for k features and C = {self.classes} classes, got "
                f"{num_values}."
            )
        return features

    def sum(
        self,
        features: NDArray[np.float64],
        marks: NDArray[np.floating],
        clip_norm: float,
        weights: NDArray[np.float64] | None = None,
    ) -> NDArray[np.float64]:
        """The sum of the rows of some samples, shape (d,), without a row being written.

        Parameters
        ----------
        features : ndarray of shape (samples, k)
            Of at most ``clip_norm`` each.
        marks : ndarray of shape (samples, C)
            1 at the class and 0 elsewhere; a sample with any other marks has no class.
        weights : ndarray of shape (samples,), optional
        """
        weighted = features if weights is None else features * weights[:, None]
        products = (features.T @ weighted)[_upper(features.shape[1])]
        products *= _factors(features.shape[1])
        corners = _one_class(marks) @ _simplex(self.classes)
        by_class = weighted.T @ corners
        by_class *= self.class_weight * clip_norm
        return np.concatenate([products, by_class.ravel()])

    def read(self, total: NDArray[np.float64], clip_norm: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """X^T X, shape (k, k), and X^T (Y - 1 / C), shape (k, C), from a sum of rows with whatever noise is in it."""
        features = self.num_features(len(total))
        split = features * (features + 1) // 2
        half = np.zeros((features, features))
        half[_upper(features)] = total[:split] / _factors(features)
        gram = half + half.T
        gram[np.diag_indices(features)] /= 2.0
        corners = total[split:].reshape(features, self.classes - 1) / (self.class_weight * clip_norm)
        return gram, corners @ _simplex(self.classes).T * ((self.classes - 1) / self.classes)


def _one_class(marks: NDArray[np.floating]) -> NDArray[np.float64]:
    """The marks of rows with exactly one class, a single 1; zeros for all other rows."""
    chosen = np.asarray(marks) == 1.0
    clear = (chosen.sum(axis=1) == 1) & ((np.asarray(marks) == 0.0) | chosen).all(axis=1)
    return (chosen & clear[:, None]).astype(np.float64)


@lru_cache(maxsize=8)
def _upper(features: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    return np.triu_indices(features)


@lru_cache(maxsize=8)
def _factors(features: int) -> NDArray[np.float64]:
    """The factors of products: an entry off the diagonal stands for two of x x^T."""
    rows, columns = _upper(features)
    return np.where(rows == columns, 1.0, math.sqrt(2.0))


@lru_cache(maxsize=32)
def _simplex(classes: int) -> NDArray[np.float64]:
    """The corners, shape (C, C - 1): each of length 1, each pair with the product -1 / (C - 1)."""
    corners = np.zeros((classes, classes - 1))
    for i in range(classes - 1):
        # Corner i is settled but for its last coordinate, those after it have the same one there.
        corners[i, i] = math.sqrt(1.0 - corners[i, :i] @ corners[i, :i])
        corners[i + 1 :, i] = (-1.0 / (classes - 1) - corners[i + 1, :i] @ corners[i, :i]) / corners[i, i]
    return corners
