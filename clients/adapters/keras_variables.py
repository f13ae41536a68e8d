"""Trained variables of a Keras 3 model, and how one is recognised."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from ...privacy.errors import ConfigurationError, check_installed


def is_keras(found: Any) -> bool:
    """Return True if something is a layer or a model of Keras 3; imports nothing."""
    return any(kind.__module__.startswith("keras.") and kind.__name__ == "Layer" for kind in type(found).__mro__)


def keras_arrays(model: Any) -> ArrayRecord:
    """Return the trained variables in order, under their numbers, since Keras's names depend on the process."""
    check_built(model)
    return ArrayRecord({str(i): Array(_plain(one)) for i, one in enumerate(model.trainable_variables)})


def load_keras(model: Any, arrays: ArrayRecord) -> Any:
    """Return the model, changed in place, with the arrays of a strategy's result."""
    check_built(model)
    shapes = [tuple(one.shape) for one in model.trainable_variables]
    values = [np.array(array.numpy()) for array in arrays.values()]
    if [one.shape for one in values] != shapes:
        raise ConfigurationError(
            f"Expected the arrays that trainable_arrays gives of this model, of shapes {shapes}, got "
            f"{[one.shape for one in values]}.",
            kind="mismatch",
            setting="arrays",
        )
    for variable, value in zip(model.trainable_variables, values, strict=True):
        variable.assign(value)
    return model


def keras_module() -> Any:
    """Return Keras; refused if it is not installed."""
    check_installed("keras", "keras", "a Keras model")
    import keras  # pyright: ignore[reportMissingImports]  # of an extra

    return keras


def check_built(model: Any) -> None:
    """Refuse a model without variables to train."""
    if not model.built or not model.trainable_variables:
        raise ConfigurationError(
            "Expected a Keras model with variables to train, got one that "
            f"{'has none' if model.built else 'is not built'}: give it a keras.Input of the shape of a record.",
            kind="missing",
            setting="model",
        )


def _plain(variable: Any) -> Any:
    keras = keras_module()
    found = keras.ops.convert_to_numpy(variable.value)
    return np.array(found if found.dtype in (np.float32, np.float64) else found.astype(np.float32))
