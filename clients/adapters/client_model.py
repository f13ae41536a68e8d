"""Interface between an app with per-sample gradients and a model of any library."""

from __future__ import annotations

import logging
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

logger = logging.getLogger("flwr")


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
    start: Callable[[], Sequence[NDArray[Any]]] | None = None
    """Public arrays that training begins with; None where a module has them, or nothing is trained."""

    def check(self, schema: Schema, measure: Measure | None) -> None:
        """Refuse a schema that the model cannot take, and a model that does not treat each record by itself.

        Also refuse a model from whose gradients nothing could be learnt (:func:`check_gradients`).
        """
        self.check_schema(schema, measure)
        start = self.begins()
        if start:
            check_gradients(self.gradients, start, schema)

    def begins(self) -> Sequence[NDArray[Any]]:
        """Return the public arrays that training begins with; none where nothing is trained."""
        if self.start is not None:
            return self.start()
        module = getattr(self.gradients, "module", None)
        trained = [] if module is None else [part for part in module.parameters() if part.requires_grad]
        return [part.detach().float().cpu().numpy() for part in trained]


_TRIED = 4
"""Made-up records whose gradients are compared."""
_SPENT = "Nothing was spent: every release would have been noise alone."


def check_gradients(gradients: PerSampleGradients, start: Sequence[NDArray[Any]], schema: Schema) -> None:
    """Refuse a model whose gradient at its public start is zero, ignores the record, or is not finite.

    Records are made up from the schema, so the verdict depends on no client's records.

    Raises
    ------
    ConfigurationError
        If all gradients are zero, all are alike though the records are not, or none is finite.
    """
    examples = schema.examples()[:_TRIED]
    rows = [np.asarray(gradients(start, example), np.float64).ravel() for example in examples]
    finite = [row for row in rows if np.isfinite(row).all()]
    if not finite:
        raise ConfigurationError(
            "Expected finite gradients of made-up records, got NaN or infinities for each. Look for logarithms and "
            "divisions of zero in the model and its loss, and give the schema the bounds of the numbers, so that "
            f"made-up records are like yours. {_SPENT}",
            kind="unsupported",
            setting="model",
        )
    if len(finite) < len(rows):
        logger.warning(
            "The gradients of %d of %d made-up records are not finite. Records like these count as zero: give the "
            "schema the bounds of your numbers, or keep the loss finite.",
            *(len(rows) - len(finite), len(rows)),
        )
    if not any(row.any() for row in finite):
        raise ConfigurationError(
            "Expected a gradient that is not zero for some made-up record, got zero for each. The loss does not depend "
            "on the parameters that are trained: the model computes with other arrays (layers of another framework, "
            "weights it held on to before), detaches its output, or starts where it cannot move, as a network of "
            f"zeros. {_SPENT}",
            kind="unsupported",
            setting="model",
        )
    if len(finite) > 1 and all((row == finite[0]).all() for row in finite) and _differ(examples):
        raise ConfigurationError(
            "Expected gradients that depend on the record, got the same for each of several made-up records. The loss "
            "uses neither inputs nor targets as they come: look for constants, argmax or rounding in the model and its "
            f"loss. {_SPENT}",
            kind="unsupported",
            setting="model",
        )


def _differ(examples: Sequence[Any]) -> bool:
    """Return True if both inputs and targets of some examples are not all the same."""
    return len({repr(inputs) for inputs, _ in examples}) > 1 and len({repr(target) for _, target in examples}) > 1


def measured_bound(gradients: PerSampleGradients, start: Sequence[NDArray[Any]], schema: Schema) -> float:
    """R of a model of any kind, from its gradients at the public start for records made up from a schema.

    A linear score's gradient is R / sqrt(2) long where two classes are as likely, so it is sqrt(2) times their median;
    infinite if there is no gradient. No record of any client is looked at.
    """
    return median_bound(gradients, start, schema.examples())


def median_bound(gradients: PerSampleGradients, start: Sequence[NDArray[Any]], examples: Sequence[Any]) -> float:
    """Return :func:`measured_bound` of given records, each a batch of one."""
    lengths = []
    for example in examples:
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
