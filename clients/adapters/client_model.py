"""Interface between an app with per-sample gradients and a model of any library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy.errors import ConfigurationError
from ..queries import Measure
from ..records.places import TableRows
from ..records.schema import Schema
from .per_sample_gradients import PerSampleGradients


@dataclass(frozen=True)
class ClientModel:
    """Model of any library, as an app uses it."""

    gradients: PerSampleGradients
    names: tuple[str, ...]  # of the arrays that are trained, in order
    check_schema: Callable[[Schema, Measure | None], None]
    """Refuses a schema that the model cannot take, and a model, or measure, that does not treat each record by itself.
    Both are tried on records made up from the schema, and on no others."""
    measure: Callable[[Callable[..., Any] | None], Measure] | None = None
    """``measure(right)`` says which predictions are right, for a private evaluation; ``right`` is a project's own."""
    bound: Callable[[Schema], float] = field(default=lambda _: math.inf)
    """R of the presets: how long a record is with what stands beside it; infinite where nothing says so."""
    schema: Schema | None = None  # what a record is, where the model says it itself: for simulations
    norm: float = math.inf
    """Norm of the untrained parameters of a network, which bounds its steps; infinite where scores are linear in what
    is trained."""


def measured_bound(gradients: PerSampleGradients, start: Sequence[NDArray[Any]], schema: Schema) -> float:
    """R of a model of any kind, from its gradients at the public start for records made up from a schema.

    A linear score's gradient is R / sqrt(2) long where two classes are as likely, so it is sqrt(2) times their median;
    infinite if there is no gradient. No record of any client is looked at.
    """
    lengths = []
    for example in schema.examples():
        with suppress(Exception):  # of an extreme record, which a client's own may fail for as well
            lengths.append(float(np.linalg.norm(np.asarray(gradients(start, example), np.float64))))
    found = [length for length in lengths if math.isfinite(length) and length > 0]
    return math.sqrt(2) * float(np.median(found)) if found else math.inf


def statistics_model(schema: Schema) -> ClientModel:
    """Return the rows of a table's statistics in the place of an app's model."""

    def check_schema(found: Schema, measure: Measure | None) -> None:  # noqa: ARG001 - an app's interface
        if TableRows(found).rows != rows.rows:
            raise ConfigurationError(
                "Expected the columns that the app's statistics are of, got a schema with others: use one schema.toml.",
                kind="mismatch",
                setting="schema",
            )

    rows = TableRows(schema)
    return ClientModel(rows, ("statistics",), check_schema, schema=schema)
