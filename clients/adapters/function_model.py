"""A project's own gradient: a function of parameters and one record in NumPy, or in anything that returns arrays."""

from __future__ import annotations

import hashlib
import logging
import math
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy.errors import PUBLIC, ConfigurationError, InvalidRecordError
from ..queries import Measure
from ..records.schema import Schema
from .client_model import ClientModel, measured_bound
from .per_sample_gradients import check_rows_alone
from .replay import gradient_arrays
from .replay_process import Program, ReplayProcess
from .torch_graph import leaves, looks_of, mapped

logger = logging.getLogger(__name__)
Gradient = Callable[[Any, Any, Any], Any]
"""``gradients(parameters, inputs, target)`` of one record, in the structure of the parameters."""


class FunctionGradients:
    """Per-record gradients by a project's own function, called record by record.

    Parameters
    ----------
    function : callable
        ``function(parameters, inputs, target)`` returns the gradient for one record, without a batch axis, as a mapping
        or a list like ``start``.
    start : mapping of str to array, or sequence of arrays
        Public parameters with which training begins.

    Notes
    -----
    **Formal guarantees.** A real client calls the function in a process of its own (:meth:`isolate`), copied anew for
    each record, so what a record leaves in memory is gone before the next (:class:`~.replay.FunctionProgram`). A record
    for which it fails counts as zero, and nothing else shows. Unlike captured models, the function itself sees records:
    that it reads and changes no files, other processes or devices is the promise of its author and of the operator who
    installed it. On a system that cannot copy a process, they promise as well that it keeps nothing in memory.
    """

    def __init__(self, function: Gradient, start: Any) -> None:
        self._function = function
        self.names = list(start) if isinstance(start, Mapping) else None
        arrays = list(start.values()) if isinstance(start, Mapping) else list(start)
        self.start = [np.asarray(array, dtype=np.float64) for array in arrays]
        self.shapes: list[tuple[int, ...]] = [array.shape for array in self.start]
        self.process: ReplayProcess | None = None
        """The process in which a real client's records are computed; None in a simulation."""
        self._examples: dict[Hashable, Any] = {}
        self._programs: dict[Hashable, Program] = {}

    def show(self, examples: Sequence[Any]) -> None:
        """Say what records look like, by made-up ones in batches of one."""
        for example in examples:
            record = mapped(example, lambda part: np.asarray(part)[0])
            self._examples.setdefault(looks_of(*record), record)

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> NDArray[np.float64]:
        """Rows of shape (b, d); in a simulation one that fails is not finite, and counts as zero as well."""
        count = len(leaves(samples)[0])
        rows = np.full((count, sum(map(math.prod, self.shapes))), np.nan)
        for i, row in enumerate(rows):
            record = mapped(samples, lambda part, i=i: np.asarray(part)[i])
            if self.process is not None:
                made = self._isolated(parameters, record)
            elif (made := self._own(parameters, record)) is None:
                continue
            np.concatenate([one.reshape(-1) for one in made], out=row)
        return rows

    def _own(self, parameters: Sequence[NDArray[Any]], record: Any) -> list[NDArray[Any]] | None:
        try:
            return self.computed(parameters, record)
        except Exception as error:  # a project's function raises what it likes
            logger.debug("A gradient failed: %s", error)
            return None

    def computed(self, parameters: Sequence[NDArray[Any]], record: Any) -> list[NDArray[Any]]:
        """Return the gradient of one record in this process, or raise whatever the function does."""
        values: Any = [np.array(one) for one in parameters]
        values = values if self.names is None else dict(zip(self.names, values, strict=True))
        inputs, target = mapped(record, np.array)
        with np.errstate(all="ignore"):
            return gradient_arrays(self._function(values, inputs, target), self.names, self.shapes)

    def _isolated(self, parameters: Sequence[NDArray[Any]], record: Any) -> list[NDArray[Any]]:
        program = self._programs.get(looks_of(*record))
        if self.process is None or program is None:
            raise InvalidRecordError("a record of another shape or type than those that were made up")
        return self.process.compute(program, parameters, leaves(record))

    def isolate(self) -> None:
        """Call the function in a process of its own from now on.

        Raises
        ------
        ConfigurationError
            If the function cannot be imported there, or fails for a made-up record.
        """
        if not self._examples:
            raise RuntimeError("a schema comes first, from which records are made up")
        if self.process is None:
            self.process = ReplayProcess()
        where = _place_of(self._function)
        for looks, record in self._examples.items():
            content = {
                **where,
                "names": self.names,
                "like": [_structure(part) for part in record],
                "results": [list(shape) for shape in self.shapes],
            }
            arrays = [*self.start, *(np.asarray(part) for part in leaves(record))]
            constants = {str(number): array for number, array in enumerate(arrays)}
            results = tuple((shape, "float64") for shape in self.shapes)
            self._programs[looks] = Program("function", content, constants, results, None)
            self.process.add(self._programs[looks])
        self.process.check()
        logger.info("Gradients are computed in a process of their own: %s.", self.programs_used(), extra=PUBLIC)

    @property
    def programs(self) -> list[Program]:
        """The programs that the process runs, for each shape and type of a record."""
        return list(self._programs.values())

    def programs_used(self) -> str:
        """Return the hash of each program: of the function's file, and of no module that it imports."""
        return ", ".join(f"gradient {program.digest[:16]}" for program in self.programs)


def _structure(found: Any) -> Any:
    if isinstance(found, Mapping):
        return {name: _structure(part) for name, part in found.items()}
    return [_structure(part) for part in found] if isinstance(found, tuple | list) else None


def _place_of(function: Any) -> dict[str, Any]:
    """Return where another process finds a function; refused if it is not at the top of a module."""
    module = sys.modules.get(getattr(function, "__module__", "") or "")
    name = getattr(function, "__qualname__", "")
    file = getattr(module, "__file__", None)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if module is None or file is None or found is not function:
        raise ConfigurationError(
            f"Expected gradients that are a function at the top of a file, which a process of its own can import, got "
            f"{name or type(function).__name__}: write `def gradient(parameters, inputs, target)` in a module.",
            kind="unsupported",
            setting="gradients",
        )
    source = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    path = [str(Path(one).resolve()) for one in sys.path]
    return {"module": module.__name__, "name": name, "file": str(Path(file).resolve()), "path": path, "source": source}


def function_client_model(gradients: Gradient, start: Any, loss: Any = None) -> ClientModel:
    """Return the client's model of a function of parameters and one record, and of public parameters."""
    if loss is not None:
        raise ConfigurationError(
            "Expected no loss beside gradients, which are its derivative, got one: leave it out.",
            kind="conflict",
            setting="loss",
        )
    if not callable(gradients):
        raise ConfigurationError(
            f"Expected gradients(parameters, inputs, target), a function, got {type(gradients).__name__}.",
            kind="wrong-type",
            setting="gradients",
        )
    arrays = list(start.values()) if isinstance(start, Mapping) else start
    if not isinstance(arrays, list | tuple) or not arrays or not all(map(_is_numeric, arrays)):
        raise ConfigurationError(
            "Expected model to be the public parameters with which training begins, arrays by name or in a list, got "
            f"{type(start).__name__}: write private_client_app({{'weights': np.zeros(30)}}, gradients=...).",
            kind="wrong-type",
            setting="model",
        )
    made = FunctionGradients(gradients, start)

    def check(schema: Schema, measure: Measure | None) -> None:  # noqa: ARG001 - it has no predictions
        examples = schema.examples()
        made.show(examples)
        try:
            made.computed(made.start, mapped(examples[0], lambda part: np.asarray(part)[0]))
        except Exception as error:  # a project's function raises what it likes, and this record is made up
            raise ConfigurationError(
                "Expected gradients(parameters, inputs, target) of a made-up record without a batch axis, got "
                f"{type(error).__name__}: {error}.",
                kind="failed",
                setting="gradients",
            ) from error
        check_rows_alone(made, examples)

    def bound(schema: Schema) -> float:
        return measured_bound(made, made.start, schema)

    names = tuple(made.names or map(str, range(len(made.start))))
    return ClientModel(made, names, check, None, bound, start=lambda: made.start)


def _is_numeric(found: Any) -> bool:
    return np.asarray(found).dtype.kind in "fiu"
