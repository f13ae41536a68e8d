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
    """What an app needs of a model, whatever library it is of.

    Parameters
    ----------
    names : tuple of str
        Of the arrays that are trained, in order.
    check_schema : callable
        ``check_schema(schema, measure)`` refuses a schema of records that the model cannot take, and a model that does
        not treat each record by itself: it is tried, and ``measure`` with it where there is an evaluation, on records
        that are made up from the schema, and on no others.
    measure : callable, optional
        ``measure(right)``: which predictions are right, for a private evaluation; ``right`` is a project's own word.
    schema : Schema, optional
        What a record is, where the model says it itself: for simulations.
    """

    gradients: PerSampleGradients
    names: tuple[str, ...]
    check_schema: Callable[[Schema, Measure | None], None]
    measure: Callable[[Callable[..., Any] | None], Measure] | None = None
    schema: Schema | None = None
