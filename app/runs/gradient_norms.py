"""How near a run came to a stationary point: the norm of the training loss's gradient (tran-cutkosky-2022).

The paper bounds the mean over the iterates of ||grad F(w_t)||, F the mean loss over the training samples. Only a
simulation can compute it. It is no release: where the samples are somebody's, it may not leave the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..models.model import Model
from ..data.task import Dataset


class GradientNorms:
    """The norms of the gradient of a run's training loss.

    Parameters
    ----------
    model : Model
    dataset : Dataset
        Whose training samples are used; for a network the first 2,000 of them.
    """

    def __init__(self, model: Model, dataset: Dataset) -> None:
        count = model.most_samples
        self._model = model
        self._samples = dataset.train_features[:count], dataset.train_labels[:count]
        self._norms: dict[int, float] = {}

    def record(self, server_round: int, parameters: Sequence[NDArray[Any]]) -> None:
        """Take note of the model after a round."""
        self._norms[server_round] = float(np.linalg.norm(self._model.mean_gradient(parameters, self._samples)))

    def document(self) -> dict[str, Any]:
        """``rounds`` and ``values``, as plain values."""
        return {"rounds": list(self._norms), "values": list(self._norms.values())}
