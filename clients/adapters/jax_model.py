"""A JAX function on a client: its parameters, its gradients and its predictions, record by record.

The same object stands on both sides, as a :class:`~murmurfl.clients.LinearEstimator` does. Its functions are traced for
shapes and types (:mod:`.jax_graph`) and see no record.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from ...privacy.accounting.gdp import check_count
from ...privacy.errors import PUBLIC, ConfigurationError, InvalidRecordError, check_installed
from ...privacy.queries.evaluation import Measured
from ..queries import Measure
from ..records.schema import Schema
from .client_model import ClientModel, measured_bound
from .jax_graph import Captured, as_traced, captured, jax_module, refusal
from .per_sample_gradients import GRADIENT_MEMORY_MIB, MOST_TOGETHER, check_memory
from .replay import exact
from .replay_process import ReplayProcess
from .torch_graph import CaptureError, leaves, looks_of, mapped

logger = logging.getLogger(__name__)
Compute = Callable[[Any, Any, Any], list[Any]]
"""``compute(parameters, inputs, targets)`` of a batch of one record, with parameters as the project has them."""

_ORDINARY = 4
"""Made-up records that must have a gradient."""
_COLLECTIONS = ("batch_stats", "cache", "intermediates")
"""Collections of flax's variables that are no parameters."""


@dataclass(frozen=True, eq=False)
class JaxModel:
    """A function of JAX's with its parameters, for any library that makes one: flax, equinox, haiku, plain JAX.

    The same object stands on both sides: ``private_client_app(model, loss, ...)`` on the clients,
    ``model.initial_arrays()`` and ``model.fitted(arrays)`` on the server.

    Parameters
    ----------
    apply : callable
        ``apply(parameters, inputs)`` gives the outputs of a batch; several inputs come as further arguments, and a
        mapping of them as keywords.
    parameters : pytree of arrays
        What is trained, and where a training starts. They are floating-point arrays, sent in the order of
        ``jax.tree_util.tree_leaves`` under the names of their places, such as ``params/Dense_0/kernel``. What is frozen
        belongs into ``apply``, as a constant.

    Raises
    ------
    ConfigurationError
        If JAX is not installed, there is no parameter, or one has another type.

    Notes
    -----
    The loss is ``loss(outputs, targets)`` for a batch of one record, with one value; by default the cross-entropy.
    Floating-point numbers of a record get the type of the first parameter; integers stay integers.

    **Formal guarantees.** What a client computes for a record is a function of parameters and this record alone:
    ``apply`` and loss are captured for shapes and types, checked and hashed, and a real client replays them in a
    process of its own (:class:`JaxGradients`).

    Examples
    --------
    >>> import numpy as np
    >>> model = JaxModel(lambda parameters, inputs: inputs @ parameters["w"], {"w": np.zeros((4, 2), np.float32)})
    >>> model.names
    ('w',)
    """

    apply: Callable[..., Any]
    parameters: Any
    names: tuple[str, ...] = field(init=False)
    """Names of the parameters, in order."""

    def __post_init__(self) -> None:
        check_installed("jax", "jax", "JaxModel")
        if not callable(self.apply):
            raise ConfigurationError(
                f"Expected apply(parameters, inputs), got {type(self.apply).__name__}: for flax give module.apply.",
                kind="wrong-type",
                setting="apply",
            )
        if isinstance(self.parameters, Mapping) and (found := [c for c in _COLLECTIONS if c in self.parameters]):
            raise ConfigurationError(
                f"Expected parameters to train, got the collection {found[0]!r} among them: give "
                f"{{'params': variables['params']}}, and {found[0]} within apply as a constant, as in "
                "lambda p, x: module.apply({**p, 'batch_stats': kept}, x, use_running_average=True).",
                kind="unsupported",
                setting="parameters",
            )
        paths, _ = _tree().tree_flatten_with_path(self.parameters)
        object.__setattr__(self, "names", tuple(_name(path) or "parameters" for path, _ in paths))
        wrong = [name for name, (_, leaf) in zip(self.names, paths, strict=True) if not _is_floating(leaf)]
        if wrong or not paths:
            raise ConfigurationError(
                "Expected parameters that are floating-point arrays, got "
                f"{', '.join(wrong[:4]) + ', which are not' if wrong else 'none'}: keep what is not trained within "
                "apply, as a constant.",
                kind="wrong-type" if wrong else "missing",
                setting="parameters",
            )

    @property
    def leaves(self) -> list[Any]:
        """The parameters in order."""
        return _tree().tree_leaves(self.parameters)

    def initial_arrays(self) -> ArrayRecord:
        """Return the arrays at which training starts, for a strategy's ``start``; 16-bit ones as float32."""
        found = zip(self.names, self.leaves, strict=True)
        return ArrayRecord({name: Array(np.array(_for_flower(leaf))) for name, leaf in found})

    def fitted(self, arrays: ArrayRecord) -> Any:
        """Return the parameters of a strategy's result, in the structure and types of ``parameters``."""
        values = [np.array(array.numpy()) for array in arrays.values()]
        shapes = [np.shape(leaf) for leaf in self.leaves]
        if [one.shape for one in values] != shapes:
            raise ConfigurationError(
                f"Expected the arrays that initial_arrays gives, of shapes {shapes}, got "
                f"{[one.shape for one in values]}.",
                kind="mismatch",
                setting="arrays",
            )
        jax = jax_module()
        return self.unflattened(
            [jax.numpy.asarray(one, dtype=leaf.dtype) for one, leaf in zip(values, self.leaves, strict=True)]
        )

    def unflattened(self, found: Sequence[Any]) -> Any:
        """Return parameters in the structure of ``parameters`` from a list in order."""
        return _tree().tree_unflatten(_tree().tree_structure(self.parameters), list(found))


def _tree() -> Any:
    jax = jax_module()
    return jax.tree_util


def _name(path: Any) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def _is_floating(leaf: Any) -> bool:
    jax = jax_module()
    return hasattr(leaf, "dtype") and bool(jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating))


def _for_flower(leaf: Any) -> NDArray[Any]:
    array = np.asarray(leaf)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


@dataclass(frozen=True)
class _Seen:
    """Shape and type of an array of one record."""

    shape: tuple[int, ...]
    dtype: str


class JaxGradients:
    """Per-record gradients of a loss in the parameters of a :class:`JaxModel`.

    Parameters
    ----------
    model : JaxModel
    loss : callable
        ``loss(outputs, targets)`` for a batch of one record.
    chunk : int, optional
        The most records that are computed together in a simulation; default 128.
    gradient_memory_mib : float
        Memory for computing gradients in a simulation, in MiB.

    Notes
    -----
    **Formal guarantees.** Row i depends on record i alone: no code of model or loss ever meets a record. What they
    compute for one is traced for shapes and types, checked operation by operation (:mod:`.jax_graph`), and refused if
    it calls anything outside of it. A real client replays it in a process of its own (:meth:`isolate`), in which a
    record that fails counts as zero and nothing else shows. Assumes that neither model nor tracing read private data,
    and that XLA computes what StableHLO specifies (:class:`~.replay.JaxProgram`).
    Proof: docs/proofs/records.md.
    """

    def __init__(
        self,
        model: JaxModel,
        loss: Callable[[Any, Any], Any],
        *,
        chunk: int | None = None,
        gradient_memory_mib: float = GRADIENT_MEMORY_MIB,
    ) -> None:
        if chunk is not None:
            check_count("chunk", chunk)
        self.gradient_memory_mib = check_memory(gradient_memory_mib)
        self.model, self.loss = model, loss
        self.shapes: list[tuple[int, ...]] = [tuple(np.shape(leaf)) for leaf in model.leaves]
        self._chunk = chunk or MOST_TOGETHER
        jax = jax_module()

        def value(parameters: Any, inputs: Any, targets: Any) -> Any:
            arguments, named = _called_with(inputs)
            return _one_value(loss(model.apply(parameters, *arguments, **named), targets))

        def gradient(parameters: Any, inputs: Any, targets: Any) -> list[Any]:
            return _tree().tree_leaves(jax.grad(value)(parameters, inputs, targets))

        self.value = RecordFunction(model, lambda *given: [value(*given)], "loss")
        """The loss itself, for trials on made-up records."""
        self.gradient = RecordFunction(model, gradient, "gradient")
        self.of_records = [self.gradient]
        """Everything that is computed of a record: gradients, and an evaluation where there is one."""
        self.process: ReplayProcess | None = None
        """The process in which a real client's records are computed; None in a simulation."""

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> NDArray[np.floating]:
        """Rows of shape (b, d): float64 if any parameter is, else float32."""
        width = sum(map(math.prod, self.shapes))
        made = self.computed(self.gradient, parameters, samples)
        kind = np.float64 if any(one.dtype == np.float64 for one in made) else np.float32
        rows = np.empty((len(made[0]), width), kind)
        np.concatenate([one.reshape(len(one), -1) for one in made], axis=1, out=rows)
        return rows

    def computed(self, of: RecordFunction, parameters: Sequence[NDArray[Any]], samples: Any) -> list[NDArray[Any]]:
        """Return what a function makes of a batch of records, with the records along the first axis.

        On a real client record by record, in the process of its own; InvalidRecordError if one cannot be computed.
        """
        if self.process is None:
            together = min(self._chunk, self._fitting)
            return of.together(parameters, samples, together)
        count = len(leaves(samples)[0])
        each = [self._isolated(of, parameters, mapped(samples, lambda part, i=i: part[i])) for i in range(count)]
        return [np.stack(parts) for parts in zip(*each, strict=True)]

    def _isolated(self, of: RecordFunction, parameters: Sequence[NDArray[Any]], record: Any) -> list[NDArray[Any]]:
        if self.process is None:
            raise RuntimeError("isolate() comes first")
        found = of.known(record)
        if found is None:
            raise InvalidRecordError("a record of another shape or type than the model was captured for")
        return self.process.compute(found.program, parameters, [np.asarray(part) for part in leaves(record)])

    @property
    def _fitting(self) -> int:
        """Number of rows that take a quarter of the memory; what computes them has the rest."""
        return max(int(self.gradient_memory_mib * 2**18) // (8 * sum(map(math.prod, self.shapes))), 1)

    def isolate(self) -> None:
        """Compute every record in a process of its own from now on, in which no code of the project runs.

        Raises
        ------
        ConfigurationError
            If the process does not start, or refuses a program.
        """
        if not self.gradient.programs:
            raise RuntimeError("a schema comes first, from which records are made up")
        if self.process is None:
            self.process = ReplayProcess()
        for function in self.of_records:
            for one in function.programs:
                self.process.add(one.program)
        self.process.check()
        logger.info("The model is computed in a process of its own: %s.", self.programs_used(), extra=PUBLIC)

    def programs_used(self) -> str:
        """Return which programs compute what, by their hashes: public, for they were captured from no record."""
        found = [(of.what, one.program.digest) for of in self.of_records for one in of.programs]
        return ", ".join(f"{what} {digest[:16]}" for what, digest in found)


class RecordFunction:
    """A function of parameters and one record, captured for the shapes and types of records; ``what`` says of what."""

    def __init__(self, model: JaxModel, compute: Compute, what: str) -> None:
        self._model, self._compute, self.what = model, compute, what
        self._captured: dict[Hashable, Captured] = {}
        self._compiled: dict[tuple[Hashable, int], Any] = {}

    @property
    def programs(self) -> list[Captured]:
        """Everything that was captured so far."""
        return list(self._captured.values())

    def known(self, record: Any) -> Captured | None:
        """Return what is computed for records that look like one; None if it was not captured."""
        return self._captured.get(self._looks(record))

    def captured(self, record: Any) -> Captured:
        """Return what is computed for records like one, of which only shapes and types are looked at.

        Raises
        ------
        CaptureError
            If it cannot be captured.
        """
        looks = self._looks(record)
        if looks not in self._captured:
            parts = leaves(mapped(record, self._seen))
            blanks = [_blank(part) for part in parts]
            self._captured[looks] = captured(partial(self._of_lists, record), self._model.leaves, blanks)
        return self._captured[looks]

    def tried(self, record: Any) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
        """Return what the model's own code makes of a made-up record, and what its captured steps do."""
        jax = jax_module()
        kinds = [_blank(part).dtype for part in leaves(mapped(record, self._seen))]
        arrays = [exact(np.asarray(part), kind) for part, kind in zip(leaves(record), kinds, strict=True)]
        given = self._model.leaves, [jax.numpy.asarray(one) for one in arrays]
        compute = partial(self._of_lists, record)
        return [_for_flower(one) for one in compute(*given)], [_for_flower(one) for one in as_traced(compute, *given)]

    def together(self, parameters: Sequence[NDArray[Any]], samples: Any, most: int) -> list[NDArray[Any]]:
        """Return what is made of several records, computed together; zeros for those with an integer too large."""
        arrays = [np.asarray(part) for part in leaves(samples)]
        record = mapped(samples, lambda part: part[0])
        try:
            found = self.captured(record)
        except CaptureError as error:
            raise refusal(error) from error
        kinds = [_blank(part).dtype for part in leaves(mapped(record, self._seen))]
        point = [np.asarray(one).astype(leaf.dtype) for one, leaf in zip(parameters, self._model.leaves, strict=True)]
        with np.errstate(all="ignore"):
            given = [array.astype(kind) for array, kind in zip(arrays, kinds, strict=True)]
        count, parts = len(arrays[0]), []
        for start in range(0, count, most):
            some = [one[start : start + most] for one in given]
            parts.append(self._padded(found, point, some, min(most, count - start)))
        made = [np.concatenate(each) for each in zip(*parts, strict=True)]
        spoilt = _changed(arrays, given)
        for one in made:
            one[spoilt] = 0.0
        return made

    def _padded(self, found: Captured, point: list[Any], some: list[Any], count: int) -> list[NDArray[Any]]:
        """Return results for a batch that is filled up to a power of two, so that XLA compiles few sizes."""
        size = 1 << max(count - 1, 0).bit_length()
        filled = [np.concatenate([one, one[-1:].repeat(size - count, axis=0)]) for one in some]
        return [_for_flower(one)[:count].copy() for one in found.together(*point, *filled)]

    def _of_lists(self, like: Any, parameters: list[Any], record: list[Any]) -> list[Any]:
        parts = iter(record)
        inputs, targets = mapped(like, lambda _: next(parts)[None])
        return self._compute(self._model.unflattened(parameters), inputs, targets)

    def _looks(self, record: Any) -> Hashable:
        return looks_of(*mapped(record, self._seen))

    def _seen(self, array: Any) -> _Seen:
        """Return shape and type that an array of a record has in a program."""
        array = np.asarray(array)
        kind: Any = array.dtype
        if kind.kind == "f":
            kind = self._model.leaves[0].dtype
        elif kind.kind in "iu":
            jax = jax_module()
            kind = jax.dtypes.canonicalize_dtype(kind)
        return _Seen(array.shape, np.dtype(kind).name)


def _blank(part: _Seen) -> Any:
    jax = jax_module()
    return jax.ShapeDtypeStruct(part.shape, jax.numpy.dtype(part.dtype))


def _changed(arrays: Sequence[NDArray[Any]], given: Sequence[NDArray[Any]]) -> NDArray[np.bool_]:
    """Return which records have an integer that its type cannot hold."""
    found = np.zeros(len(arrays[0]), bool)
    for before, after in zip(arrays, given, strict=True):
        if before.dtype.kind in "iu" and before.dtype != after.dtype:
            found |= (before != after).reshape(len(before), -1).any(axis=1)
    return found


def _called_with(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _one_value(found: Any) -> Any:
    if not hasattr(found, "shape") or math.prod(found.shape) != 1:
        raise ConfigurationError(
            "Expected loss(outputs, targets) to give one value for a batch of one record, got "
            f"{type(found).__name__} of shape {tuple(getattr(found, 'shape', ()))}: take its mean.",
            kind="wrong-type",
            setting="loss",
        )
    return found.reshape(())


def cross_entropy(outputs: Any, targets: Any) -> Any:
    """Return the mean cross-entropy of scores of classes, for class numbers."""
    jax = jax_module()
    chosen = jax.nn.one_hot(targets, outputs.shape[-1])
    return -(jax.nn.log_softmax(outputs) * chosen).sum(-1).mean()


class JaxMeasure:
    """Measure of which records a model predicts right, and of its scores for class 1 of two.

    ``right(outputs, targets)`` gives a value from 0 to 1 a record. By default the largest of several outputs is the
    prediction; of a single one its sign, or with a loss called ``binary_cross_entropy``, which takes probabilities,
    whether it is above 1/2.

    Notes
    -----
    **Formal guarantees.** Row i depends on record i alone: the measure of one record, as a batch of one, is captured
    as the gradients are (:class:`JaxGradients`), and a real client replays it in the same process.
    """

    def __init__(self, gradients: JaxGradients, right: Callable[[Any, Any], Any] | None = None) -> None:
        self._gradients, self._right = gradients, right
        self._of_probabilities = getattr(gradients.loss, "__name__", "") == "binary_cross_entropy"
        self.function = RecordFunction(gradients.model, self._compute, "evaluation")
        gradients.of_records.append(self.function)

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> Measured:
        made = self._gradients.computed(self.function, parameters, samples)
        return Measured(*(one.astype(np.float64) for one in made))

    def _compute(self, parameters: Any, inputs: Any, targets: Any) -> list[Any]:
        """Return how right the model is about one record, and perhaps a score and whether it is of class 1."""
        jax = jax_module()
        arguments, named = _called_with(inputs)
        outputs = self._gradients.model.apply(parameters, *arguments, **named)
        if self._right is not None:
            return [_one_value(self._right(outputs, targets)).astype(np.float32)]
        if hasattr(outputs, "shape") and hasattr(targets, "shape") and targets.size == 1:
            target = targets.reshape(())
            if outputs.size == 1:
                positive = (target > 0.5).astype(np.float32)
                score = outputs.reshape(()).astype(np.float32)
                above = score > (0.5 if self._of_probabilities else 0.0)
                score = score if self._of_probabilities else jax.nn.sigmoid(score)
                return [(above == (positive > 0)).astype(np.float32), score, positive]
            if outputs.ndim == 2 and targets.dtype.kind in "iu":
                scores = outputs[0].astype(np.float32)
                hit = (scores.argmax() == target).astype(np.float32)
                if scores.size != 2:
                    return [hit]
                return [hit, jax.nn.sigmoid(scores[1] - scores[0]), target.astype(np.float32)]
        raise ConfigurationError(
            "Expected one output a class and a class number as target, or a single output and 0 or 1, got outputs of "
            f"{tuple(getattr(outputs, 'shape', ()))}: say which predictions are right, with "
            "evaluation=EvaluationShare(right=lambda outputs, targets: ...).",
            kind="missing",
            setting="evaluation",
        )


class _Trials:
    """Captures a model and tries it on made-up records: no verdict depends on a record of a client.

    A program takes the same steps for every record. A model that does not, and hides it, gives another gradient than
    its program on some record. It is a mistake and no leak: a program is a function of one record in any case.
    """

    def __init__(self, gradients: JaxGradients) -> None:
        self._gradients = gradients

    def __call__(self, examples: Sequence[Any], measure: JaxMeasure | None) -> None:
        kind = self._gradients
        functions = [(kind.gradient, kind.value, "model and loss")]
        if measure is not None:
            functions.append((measure.function, measure.function, "model, and a right(outputs, targets),"))
        for number, example in enumerate(examples):
            record = mapped(example, lambda part: np.asarray(part)[0])
            for function, value, what in functions:
                try:
                    function.captured(record)
                except CaptureError as error:
                    raise refusal(error, what) from error
                if number < _ORDINARY:
                    self._compare(value, record)

    def _compare(self, function: RecordFunction, record: Any) -> None:
        try:
            with np.errstate(all="ignore"):
                by_code, as_captured = function.tried(record)
        except ConfigurationError:
            raise
        except Exception as error:  # a model raises what it likes
            raise _other_steps(f"{type(error).__name__}: {error}") from error
        if not all(map(_agree, by_code, as_captured)):
            raise _other_steps("another result")


def _agree(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Return True if arrays are the same but for rounding."""
    finite = np.isfinite(one)
    if one.shape != other.shape or not np.array_equal(finite, np.isfinite(other)):
        return False
    tolerance = 1e-6 if one.dtype == np.float64 else 1e-3
    apart = float(np.abs(one[finite] - other[finite]).max(initial=0.0))
    return apart <= tolerance * max(float(np.abs(one[finite]).max(initial=0.0)), 1e-3)


def _other_steps(got: str) -> ConfigurationError:
    return ConfigurationError(
        "Expected a model that takes the same steps for every record, got one whose captured steps differ from its own "
        f"code on a made-up record ({got}): it looks whether it is traced, or remembers. Use jax.numpy.where in the "
        "place of an `if`, and compute everything anew in every call.",
        kind="unsupported",
    )


def jax_client_model(
    model: JaxModel,
    loss: Callable[[Any, Any], Any] | None,
    *,
    chunk: int | None = None,
    gradient_memory_mib: float = GRADIENT_MEMORY_MIB,
) -> ClientModel:
    """Return the client's model of a :class:`JaxModel`, by default with the cross-entropy."""
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        raise ConfigurationError(
            f"Expected loss(outputs, targets), a function, got {loss!r}.", kind="wrong-type", setting="loss"
        )
    gradients = JaxGradients(model, loss or cross_entropy, chunk=chunk, gradient_memory_mib=gradient_memory_mib)
    trials, tried = _Trials(gradients), set()

    def check(schema: Schema, measure: Measure | None) -> None:
        if (schema.digest, measure is None) not in tried:
            trials(schema.examples(), measure if isinstance(measure, JaxMeasure) else None)
            tried.add((schema.digest, measure is None))

    def start() -> list[NDArray[Any]]:
        return [_for_flower(leaf) for leaf in model.leaves]

    def bound(schema: Schema) -> float:
        return measured_bound(gradients, start(), schema)

    return ClientModel(
        gradients, model.names, check, partial(JaxMeasure, gradients), bound, norm=_network_norm(start()), start=start
    )


def _network_norm(arrays: Sequence[NDArray[Any]]) -> float:
    """Return the norm of a network's parameters; infinite for a model of one weight matrix, whose scores are linear."""
    if sum(one.ndim > 1 for one in arrays) < 2:
        return math.inf
    return math.sqrt(sum(float(np.square(one, dtype=np.float64).sum()) for one in arrays)) or math.inf
