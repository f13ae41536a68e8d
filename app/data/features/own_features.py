"""A user's own features: a function, ``features = package.module:function``.

It takes images of shape (samples, height, width), float32 in [0, 1], and returns an array of shape (samples, k), each
row made from its own image alone. The function may have two attributes: ``norm_bound``, the largest L2 norm of a row,
which bounds steps; and ``nonnegative``, whether no value is ever below zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....privacy import ConfigurationError
from .feature_map import Features, OfImages, in_unit_range

_ROWS_ALONE = 3
"""Images that a user's function gets once more, one by one: a normalisation over all of them shows at once."""


class FunctionFeatures(OfImages):
    """A user's function.

    Notes
    -----
    That row i depends on image i alone is the function's own promise. A trial on a few images finds a normalisation
    over all of them, and proves nothing.
    """

    def __init__(self, function: Callable[[NDArray[np.float32]], Any], name: str) -> None:
        self.name = name
        self.sentence = "features of your own"
        self.norm_bound = getattr(function, "norm_bound", None)
        self.nonnegative = getattr(function, "nonnegative", False) is True
        self._function = function

    def __call__(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        values = in_unit_range(images, white)
        rows = self._rows(values)
        for i in range(min(_ROWS_ALONE, len(values))):
            alone = self._rows(values[i : i + 1])[0]
            if alone.shape != rows[i].shape or not np.allclose(alone, rows[i], rtol=1e-3, atol=1e-4, equal_nan=True):
                raise ConfigurationError(
                    f"Expected features = {self.name!r} to make each row from its own image alone, got another row "
                    "for an image among others than for the same one by itself: privacy is counted sample by sample."
                )
        return rows

    def _rows(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        try:
            rows = np.asarray(self._function(values.copy()))
        except Exception as error:  # the user's own code
            raise ConfigurationError(
                f"Expected features = {self.name!r} to give an array, got {type(error).__name__}: {error}."
            ) from error
        if rows.ndim != 2 or len(rows) != len(values) or rows.dtype.kind not in "fiub" or not rows.shape[1]:
            raise ConfigurationError(
                f"Expected features = {self.name!r} to give numbers of shape ({len(values)}, k), one row an image, got "
                f"{rows.dtype} of shape {rows.shape}."
            )
        return np.asarray(rows, dtype=np.float32)


def own_features(found: Any, name: str) -> Features:
    """The map of a user's object that is no Features itself.

    Raises
    ------
    ConfigurationError
        If it is no function.
    """
    if isinstance(found, type) or not callable(found):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        raise ConfigurationError(f"Expected features = {name!r} to be a function of images, got {kind}.")
    return FunctionFeatures(found, name)
