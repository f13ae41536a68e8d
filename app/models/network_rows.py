"""Networks' gradients of which a row is the same to the last bit, whichever other rows are computed with it.

PyTorch chooses how to multiply by how many rows there are, and each way rounds differently. A simulation computes the
gradients of many machines at once, and which machines stand together depends on how many processes share the work. So
networks are never asked for fewer than a few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FEWEST = 4
"""PyTorch multiplies up to three rows in another way than more of them."""
_FEW_VALUES = 1 << 21
"""Gradients of more values stand alone: a block of machines has no room for two of them."""


class SteadyRows:
    """A network's gradients, of a few samples at least: what is missing is filled up and taken away again.

    Parameters
    ----------
    gradients : callable
        As :class:`~murmurfl.clients.PerSampleGradients`; a batch is a pair of arrays.
    shapes : sequence of tuple of int
    num_parameters : int
        d.
    """

    def __init__(
        self,
        gradients: Callable[[Sequence[NDArray[Any]], Any], NDArray[np.float64]],
        shapes: Sequence[tuple[int, ...]],
        num_parameters: int,
    ) -> None:
        self._gradients = gradients
        self._fewest = _FEWEST if num_parameters <= _FEW_VALUES else 1
        self.shapes = shapes

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> NDArray[np.float64]:
        """One row a sample."""
        count = len(samples[0])
        if not 0 < count < self._fewest:
            return self._gradients(parameters, samples)
        filled = np.resize(np.arange(count), self._fewest)
        return self._gradients(parameters, tuple(np.asarray(part)[filled] for part in samples))[:count]
