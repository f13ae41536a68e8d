"""A model of whatever library, as an app with per-sample gradients needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..records.schema import Schema
from ..side.evaluation_client import Measure
from .per_sample_gradients import PerSampleGradients


@dataclass(frozen=True)
class MachineModel:
    """What an app needs of a model, whatever library it is of."""

    gradients: PerSampleGradients
    names: tuple[str, ...]  # of the arrays that are trained, in order
    check_schema: Callable[[Schema, Measure | None], None]
    """Refuses a schema that the model cannot take, and a model, or measure, that does not treat each record by itself.
    Both are tried on records made up from the schema, and on no others."""
    measure: Callable[[Callable[..., Any] | None], Measure] | None = None
    """``measure(right)`` says which predictions are right, for a private evaluation; ``right`` is a project's own."""
    schema: Schema | None = None  # what a record is, where the model says it itself: for simulations
