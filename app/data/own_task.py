"""A user's own data: a function that returns them, and the checks that any data must pass.

``task = package.module:make_task`` names a :class:`~murmurfl.app.data.task.Task`, or a function. The function may take
the run configuration, and returns a :class:`~murmurfl.app.data.task.Dataset` or four arrays: training features and
labels, test features and labels. Every process that needs the data calls it, so it must return the same each time:
randomness in it comes from a seed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients.records.schema import Schema
from ...privacy import ConfigurationError, clip_per_sample
from ..settings.run_config import RunConfig
from .task import Dataset, Task

_ARRAYS = 4


class FunctionTask(Task):
    """A task made of a user's function, with one parameter, the run configuration, or none.

    An attribute ``feature_bound`` of the function declares R, as the run-config key does, and ``majority`` the most
    frequent class's share; ``schema``, a :class:`~murmurfl.clients.Schema`, both of them.
    """

    keys = frozenset({"feature-bound"})

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.name = name
        schema = getattr(function, "schema", None)
        if schema is not None and not isinstance(schema, Schema):
            raise ConfigurationError(f"Expected schema of task = {name!r} to be a Schema, got {type(schema).__name__}.")
        bound = 0.0 if schema is None or math.isinf(schema.norm_bound) else schema.norm_bound
        majority = 0.0 if schema is None else schema.label.majority or 0.0
        self.feature_bound = float(getattr(function, "feature_bound", bound))
        self.majority = float(getattr(function, "majority", majority))
        self.sentence = "data of your own"
        self._function = function

    def load(self, config: RunConfig, root: str) -> Dataset:
        setting = f"task = {self.name!r}"
        try:
            made = self._function(config) if _takes_config(self._function) else self._function()
        except ConfigurationError:
            raise
        except Exception as error:  # the user's own code
            raise ConfigurationError(
                f"Expected {setting} to give a data set, got {type(error).__name__}: {error}."
            ) from error
        if isinstance(made, Dataset):
            return made
        if not isinstance(made, tuple | list) or len(made) != _ARRAYS:
            got = f"{len(made)} values" if isinstance(made, tuple | list) else type(made).__name__
            raise ConfigurationError(
                f"Expected {setting} to give a Dataset or four arrays (train_features, train_labels, test_features, "
                f"test_labels), got {got}."
            )
        for part, features in (("train_features", made[0]), ("test_features", made[2])):
            _refuse_text(features, f"{part} of {setting}")
        train_features, train_labels, test_features, test_labels = map(np.asarray, made)
        return Dataset(train_features, train_labels, test_features, test_labels, _classes(train_labels, test_labels))


def own_task(found: Any, name: str) -> Task:
    """The task of a user's object that is no Task itself.

    Raises
    ------
    ConfigurationError
        If it is neither a function nor data.
    """
    if isinstance(found, Dataset | tuple | list):
        return FunctionTask(lambda: found, name)
    if isinstance(found, type) or not callable(found):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        raise ConfigurationError(
            f"Expected task = {name!r} to be a Task, a Dataset, four arrays, or a function that gives one, got {kind}: "
            "a table with a column of labels is for murmurfl.app.fit(table, label=...)."
        )
    return FunctionTask(found, name)


def checked(dataset: Dataset, setting: str) -> Dataset:
    """Return a data set in the types that models take, once its arrays fit each other.

    Parameters
    ----------
    setting : str
        What gave it, for the refusal.

    Raises
    ------
    ConfigurationError
        With the wrong array and its error; it reveals nothing of any one sample.
    """
    if not isinstance(dataset, Dataset):
        raise ConfigurationError(f"Expected {setting} to give a Dataset, got {type(dataset).__name__}.")
    classes = dataset.num_classes
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        raise ConfigurationError(f"Expected {setting} to have num_classes, an integer >= 1, got {classes!r}.")
    if (dataset.public_features is None) != (dataset.public_labels is None):
        raise ConfigurationError(f"Expected {setting} to have public features and public labels, got one of them.")
    parts: dict[str, tuple[Any, Any]] = {
        "train": (dataset.train_features, dataset.train_labels),
        "test": (dataset.test_features, dataset.test_labels),
    }
    if dataset.public_features is not None:
        parts["public"] = dataset.public_features, dataset.public_labels
    arrays = {}
    for part, (features, labels) in parts.items():
        arrays[f"{part}_features"] = _features(features, f"{part}_features of {setting}")
        arrays[f"{part}_labels"] = _labels(labels, len(features), classes, f"{part}_labels of {setting}")
        width = np.shape(dataset.train_features)[1]
        if np.shape(features)[1] != width:
            raise ConfigurationError(
                f"Expected {part}_features of {setting} to have {width} columns as train_features, got "
                f"{np.shape(features)[1]}."
            )
    count = len(dataset.train_labels)
    for name, whose in (("machine_of", dataset.machine_of), ("owner_of", dataset.owner_of)):
        if whose is not None and (np.shape(whose) != (count,) or np.asarray(whose).dtype.kind not in "iu"):
            raise ConfigurationError(
                f"Expected {name} of {setting} to be integers of shape ({count},), one a training sample, got "
                f"{np.asarray(whose).dtype} of shape {np.shape(whose)}."
            )
    return replace(dataset, **arrays)


def cut_to(dataset: Dataset, norm: float) -> Dataset:
    """A data set whose longer rows of features are scaled down to ``norm``, each by itself."""

    def cut(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        lengths = np.linalg.norm(rows, axis=1)
        return rows if (lengths <= norm).all() else clip_per_sample(rows, norm).astype(np.float32)

    parts = {
        name: cut(rows)
        for name in ("train_features", "test_features", "public_features")
        if (rows := getattr(dataset, name)) is not None
    }
    return replace(dataset, **parts)


def _takes_config(function: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # no signature
        return False
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return any(one.default is one.empty or one.name == "config" for one in positional)


def _classes(*labels: NDArray[Any]) -> int:
    """The largest label plus one if labels are integers, else 1: numbers to regress on."""
    if any(part.dtype.kind not in "iub" or not part.size for part in labels):
        return 1
    return int(max(part.max() for part in labels)) + 1


def _refuse_text(values: Any, what: str) -> None:
    """Refuse a pandas table with columns that are no numbers; the first of them is named."""
    if not hasattr(values, "select_dtypes"):
        return
    if text := list(values.select_dtypes(exclude=["number", "bool"]).columns):
        raise ConfigurationError(
            f"Expected {what} to be numbers, got others in column {text[0]!r}: encode it, or let `murmurfl fit FILE "
            "--label COLUMN` do so."
        )


def _features(values: Any, what: str) -> NDArray[np.float32]:
    _refuse_text(values, what)
    array = np.asarray(values)
    if array.ndim != 2 or array.dtype.kind not in "fiub" or not array.size:
        raise ConfigurationError(
            f"Expected {what} to be numbers of shape (samples, features), got {array.dtype} of shape {array.shape}."
        )
    return np.asarray(array, dtype=np.float32)


def _labels(values: Any, count: int, classes: int, what: str) -> NDArray[Any]:
    array = np.asarray(values)
    if array.shape != (count,) or array.dtype.kind not in "fiub":
        raise ConfigurationError(
            f"Expected {what} to be numbers of shape ({count},), one a sample, got {array.dtype} of shape "
            f"{array.shape}."
        )
    if classes == 1:
        return array  # numbers to regress on
    if array.dtype.kind == "f" or array.min() < 0 or array.max() >= classes:
        raise ConfigurationError(f"Expected {what} to be integers from 0 to {classes - 1}, got others.")
    return np.asarray(array, dtype=np.int64)
