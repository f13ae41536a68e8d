"""A model as named arrays, and as one vector of float64 values for update rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from ...privacy import ConfigurationError
from ...privacy.protocol import dtype_name, write_array

Vector = NDArray[np.float64]
Layout = Sequence[tuple[str, tuple[int, ...], np.dtype[Any]]]
"""Name, shape and dtype of each of the model's arrays, in order."""

_MOST_NAMED = 3
_STYPE = "numpy.ndarray"  # Flower's name of the format of numpy.save

_WHOLE_STATE = (
    ": it cannot be trained. Of a PyTorch module send what is trained, trainable_arrays(module), in place of its "
    "state_dict."
)


def model_vector(arrays: ArrayRecord) -> tuple[Layout, Vector]:
    """The layout of a model and its values as one vector, shape (d,); refuses arrays that are not finite floats."""
    values = {name: array.numpy() for name, array in arrays.items()}
    if not values or all(value.dtype.kind in "iub" for value in values.values()):
        got = ", ".join(f"{value.dtype} in {name!r}" for name, value in list(values.items())[:_MOST_NAMED])
        raise ConfigurationError(
            "Expected a model with floating-point arrays, to which noise can be added, got "
            f"{got or 'an empty ArrayRecord'}. Trees (XGBoost, LightGBM, random forests) and models that travel as "
            "bytes have none. Train a model with weights on the same features, such as LogisticRegression or a small "
            "network (private_client_app takes both); or grow the trees on public data and train their leaf values "
            "alone, as one array of floats."
        )
    for name, value in values.items():
        if value.dtype.kind != "f" or not np.isfinite(value).all():
            raise ConfigurationError(
                f"Expected finite floating-point initial arrays, got {value.dtype} in {name!r}"
                f"{_WHOLE_STATE if value.dtype.kind != 'f' else ' with values that are not finite.'}"
            )
    layout = [(name, value.shape, value.dtype) for name, value in values.items()]
    return layout, np.concatenate([np.asarray(value, dtype=np.float64).ravel() for value in values.values()])


def array_record(vector: Vector, layout: Layout) -> ArrayRecord:
    """The arrays of a model from its vector, each cast to its own dtype."""
    record, start = ArrayRecord(), 0
    for name, shape, dtype in layout:
        size = math.prod(shape)
        values = np.asarray(vector[start : start + size].reshape(shape), dtype=dtype)
        record[name] = Array(dtype_name(values), values.shape, _STYPE, write_array(values))
        start += size
    return record


def vector_size(layout: Layout) -> int:
    """d, the number of values in all arrays."""
    return sum(math.prod(shape) for _, shape, _ in layout)
