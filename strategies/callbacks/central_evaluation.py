"""Central evaluation of a model with the function that Flower's ``Strategy.start`` takes."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import ArrayRecord, MetricRecord

from .callback import Callback, Training

EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]
"""Central evaluation of a round's published model, on data that is not private."""


class CentralEvaluation(Callback):
    """Evaluation of the published model by a function, on data that are not private."""

    def __init__(self, function: EvaluateFunction) -> None:
        self._function = function

    def evaluate(self, training: Training, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        return self._function(server_round, arrays)
