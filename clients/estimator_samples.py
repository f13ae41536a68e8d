"""A machine's samples for a linear model, as people of scikit-learn have them: X and y, arrays or data frames."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..privacy import ConfigurationError
from .gradients import Samples

_ADVICE = "give (X, y): X with a row a sample and a column a feature, y with its label"


class LabelledRows:
    """Rows of features and their labels, read when they are asked for: floats, and the numbers of the classes.

    Parameters
    ----------
    features, labels : arrays, data frames, or lists
    classes : sequence
        A label that is none of them has the number -1, and its sample counts as zero.
    """

    def __init__(self, features: Any, labels: Any, classes: Sequence[Hashable]) -> None:
        self._features, self._labels = features, labels
        self._numbers = {label: number for number, label in enumerate(classes)}

    def __len__(self) -> int:
        return _length(self._labels)

    def __getitem__(self, samples: slice, /) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
        rows = np.asarray(_some(self._features, samples), dtype=np.float64)
        labels = np.asarray(_some(self._labels, samples)).ravel().tolist()
        return rows, np.array([self._numbers.get(label, -1) for label in labels], dtype=np.intp)


class RowsInMemory:
    """Rows of features and the numbers of their classes.

    Parameters
    ----------
    features : ndarray of shape (samples, features)
    labels : ndarray of shape (samples,)
    """

    def __init__(self, features: NDArray[np.float64], labels: NDArray[np.intp]) -> None:
        self.features, self.labels = features, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, samples: slice, /) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
        return self.features[samples], self.labels[samples]


def estimator_samples(found: Any, num_features: int, classes: Sequence[Hashable], *, in_memory: bool) -> Samples:
    """What a project calls its samples, as a machine reads them.

    Parameters
    ----------
    found : pair of arrays, data frames or lists
        X and y.
    num_features : int
    classes : sequence
    in_memory : bool
        Whether they are read at once, and what is wrong with them is said: in a simulation. A real machine reads them
        one by one, because whether one can be read may depend on it.

    Raises
    ------
    ConfigurationError
        If they are no samples of this model.

    Notes
    -----
    **Formal guarantees.** None of its own: reads, and releases nothing. Without ``in_memory`` what is refused depends
    on the number of samples and the shape alone.
    """
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise ConfigurationError(f"Expected a pair of features and labels, got {type(found).__name__}: {_ADVICE}.")
    features, labels = found
    if hasattr(features, "toarray"):
        raise ConfigurationError("Expected features as a dense array, got a sparse matrix: give X.toarray().")
    if _length(features) != _length(labels) or not _length(labels):
        raise ConfigurationError(
            f"Expected as many labels as rows of features, at least one, got {_length(features)} and "
            f"{_length(labels)}: {_ADVICE}."
        )
    shape = getattr(features, "shape", None)  # of lists only each row has one, which on a real machine must not show
    if shape is None and in_memory:
        shape = np.shape(_some(features, slice(0, 1)))
    if shape is not None and tuple(shape[1:]) != (num_features,):
        raise ConfigurationError(
            f"Expected rows of {num_features} features, got an array of shape {(_length(features), *shape[1:])}: "
            f"{_ADVICE}."
        )
    rows = LabelledRows(features, labels, classes)
    return _read_at_once(rows, classes) if in_memory else rows


def _read_at_once(rows: LabelledRows, classes: Sequence[Hashable]) -> RowsInMemory:
    try:
        features, labels = rows[0 : len(rows)]
    except (TypeError, ValueError):
        raise ConfigurationError(
            "Expected features that are numbers, got some that are not: encode them, by a table that does not come "
            "from private data."
        ) from None
    if not np.isfinite(features).all():
        raise ConfigurationError(
            f"Expected features that are finite, got {int((~np.isfinite(features)).any(axis=1).sum())} samples of a "
            "simulated machine with missing or infinite ones: fill them in by constants that do not come from private "
            "data. On a real node such a sample counts as zero."
        )
    if (labels < 0).any():
        raise ConfigurationError(
            f"Expected labels among the classes {list(classes)}, got others for {int((labels < 0).sum())} samples of a "
            "simulated machine."
        )
    return RowsInMemory(features, labels)


def _length(values: Any) -> int:
    shape = getattr(values, "shape", None)
    return int(shape[0]) if shape else len(values)


def _some(values: Any, rows: slice) -> Any:
    """Rows by their place, of data frames too, whose brackets may mean names."""
    return values.iloc[rows] if hasattr(values, "iloc") else values[rows]
