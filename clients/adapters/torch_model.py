"""A PyTorch module on a client: its trained parameters, its gradients and its predictions, sample by sample.

Trained, sent and released is what has ``requires_grad``, in the order of ``named_parameters`` and tied weights once.
Buffers and frozen layers are constants of the module that each client has installed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from ...privacy.accounting.gdp import check_count
from ...privacy.errors import OF_DATA, PUBLIC, ConfigurationError, InvalidRecordError, check_installed
from ...privacy.queries.evaluation import Measured
from ...privacy.release.clipping import DenseContributions, StackedContributions, squared_lengths
from .hugging_face import with_labels
from .keras_variables import is_keras, keras_arrays, load_keras
from .per_sample_gradients import (
    GRADIENT_MEMORY_MIB,
    MOST_TOGETHER,
    Need,
    check_memory,
    chunks,
    combined_gradients,
    in_chunks,
    unflatten,
    weights_of,
    wide_row_bytes,
)
from .replay_process import Program, ReplayProcess
from .summed_gradients import SummedGradients, has_factors, records_together, sum_of_batch
from .torch_graph import LEAST_SUMMED, RecordPrograms, leaves, looks_of, mapped, plain_setting

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def first_axis(values: Any) -> int:
    """Return the number of samples in a batch, whose parts must all have the same."""
    counts = {len(part) for part in leaves(values)}
    if len(counts) != 1:
        raise ConfigurationError(
            f"Expected inputs with one length along the first axis, got {sorted(counts)}.", kind="wrong-shape"
        )
    return counts.pop()


def picked(values: Any, chosen: Any) -> Any:
    """Return some samples of a batch."""
    return mapped(values, lambda part: part[chosen])


def with_batch_axis(sample: Any) -> Any:
    """One sample as a batch of one."""
    return mapped(sample, lambda part: part.unsqueeze(0))


def as_tensor(values: Any) -> torch.Tensor:
    """Return an array, a tensor or nested lists as a tensor, sharing memory where it can."""
    import torch

    if isinstance(values, torch.Tensor):
        return values.detach()
    try:
        array = np.asarray(values)
        # A tensor of a view that may not be written to warns, and a copy of a batch costs little.
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"Expected arrays or tensors of numbers, got {type(values).__name__}: give (inputs, targets) of them.",
            kind="wrong-type",
        ) from error


def as_array(values: Any) -> NDArray[Any]:
    """Return an array, a tensor or nested lists as an array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if str(values.dtype) == "torch.bfloat16" else values
    return np.asarray(values)


def as_inputs(values: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return inputs for a module: floating-point numbers in its own type, integers as they are."""

    def change(part: Any) -> torch.Tensor:
        tensor = as_tensor(part)
        return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)

    return mapped(values, change)


def as_targets(values: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Targets for PyTorch's losses: class numbers in int64, floating-point numbers in the module's type."""
    import torch

    def change(part: Any) -> torch.Tensor:
        tensor = as_tensor(part)
        if tensor.is_floating_point():
            return tensor.to(device, dtype)
        return tensor.to(device) if tensor.dtype == torch.bool else tensor.to(device, torch.int64)

    return mapped(values, change)


Loss = Callable[[Any, Any], Any]
"""``loss(output, target) -> scalar tensor``, as PyTorch's criteria."""

Augment = Callable[["torch.Tensor"], "torch.Tensor"]
"""Makes augmentations of one sample, along the first axis, from the sample as a batch of one."""

_ROWS_AT_A_TIME = 8
_WIDENED_VALUES = 1 << 20
"""Rows that are widened to float64 together: few enough for the processor's cache."""


def trainable_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters of a module by name and in order, tied ones once; refused if none, or complex."""
    found = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not found:
        raise ConfigurationError(
            "Expected a module with parameters to train, got none with requires_grad: leave it on for those.",
            kind="missing",
            setting="module",
        )
    complex_ones = [name for name, parameter in found.items() if not parameter.is_floating_point()]
    if complex_ones:
        raise ConfigurationError(
            f"Expected floating-point parameters, got complex ones in {', '.join(complex_ones)}.", kind="unsupported"
        )
    return found


def trainable_arrays(module: torch.nn.Module) -> ArrayRecord:
    """Return the parameters with ``requires_grad``: what a server starts from and clients train.

    Returns
    -------
    ArrayRecord
        By name and in the order of ``named_parameters``, tied weights once; float16 and bfloat16 as float32, which
        Flower can carry and in which small steps are not lost.

    Examples
    --------
    >>> import torch
    >>> list(trainable_arrays(torch.nn.Linear(4, 2)))
    ['weight', 'bias']
    """
    if is_keras(module):
        return keras_arrays(module)
    return ArrayRecord({name: Array(_as_numpy(values)) for name, values in trainable_parameters(module).items()})


def load_trainable(module: torch.nn.Module, arrays: ArrayRecord) -> torch.nn.Module:
    """Return the module, changed in place, with the arrays of a strategy's result (:func:`trainable_arrays`).

    Examples
    --------
    >>> import torch
    >>> from murmurfl.clients import trainable_arrays
    >>> arrays = trainable_arrays(torch.nn.Linear(4, 2))
    >>> load_trainable(torch.nn.Linear(4, 2), arrays)
    Linear(in_features=4, out_features=2, bias=True)
    """
    if is_keras(module):
        return load_keras(module, arrays)
    import torch

    expected = trainable_parameters(module)
    shapes = {name: tuple(parameter.shape) for name, parameter in expected.items()}
    if {name: tuple(array.shape) for name, array in arrays.items()} != shapes:
        raise ConfigurationError(
            f"Expected the arrays that trainable_arrays gives of this module, {_listed(shapes)}, got "
            f"{_listed({name: tuple(array.shape) for name, array in arrays.items()})}.",
            kind="mismatch",
            setting="arrays",
        )
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(torch.as_tensor(np.array(arrays[name].numpy())))
    return module


def _listed(shapes: Mapping[str, tuple[int, ...]], most: int = 4) -> str:
    named = [f"{name} {shape}" for name, shape in list(shapes.items())[:most]]
    return ", ".join([*named, *(["..."] if len(shapes) > most else [])]) + f" ({len(shapes)} in all)"


def _as_numpy(values: torch.Tensor) -> NDArray[Any]:
    import torch

    values = values.detach().cpu()
    return (values.float() if values.dtype in (torch.float16, torch.bfloat16) else values).contiguous().numpy().copy()


@dataclass(frozen=True)
class _Seen:
    """Shape and type of an array."""

    shape: tuple[int, ...]
    dtype: str


class _SampleGradients:
    """Gradients of a loss in parameters of a module, sample by sample, from captured programs, and their memory."""

    _converts = True
    """Whether floating-point numbers of a record are converted to the module's type, and integer targets to int64."""

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Loss,
        parameters: Mapping[str, torch.nn.Parameter],
        memory_mib: float,
        augment: Augment | None = None,
    ) -> None:
        import torch

        self.gradient_memory_mib = check_memory(memory_mib)
        self.module, self.loss = module, loss
        self.names = list(parameters)
        self.shapes: list[tuple[int, ...]] = [tuple(parameter.shape) for parameter in parameters.values()]
        self._kinds = [(parameter.dtype, parameter.device) for parameter in parameters.values()]
        self.dtype, self.device = self._kinds[0]
        self._needs: dict[str, Need] = {}
        self._together: dict[str, int] = {}
        self.together = True
        """Whether vmap can compute several samples of this module; if not, they are computed one by one."""
        self.process: ReplayProcess | None = None
        """The process in which a real client's records are computed; None in a simulation."""

        def gradient(held: Any, values: dict[str, Any], inputs: Any, target: Any) -> list[Any]:
            own, criterion = held
            trained = {name: values[name] for name in self.names}

            def sample_loss(trained: dict[str, torch.Tensor]) -> torch.Tensor:
                given, truth = with_batch_axis(inputs), with_batch_axis(target)
                if augment is not None:
                    given = augment(given)
                    truth = truth.expand(len(given), *truth.shape[1:])
                arguments, named = called_with(with_labels(criterion, given, truth))
                return criterion(torch.func.functional_call(own, {**values, **trained}, arguments, named), truth)

            return list(torch.func.grad(sample_loss)(trained).values())

        self._gradient = gradient
        self.captured = RecordPrograms(gradient, module, self.names, (module, loss), gradient=True)
        self.of_records = [self.captured]
        """Everything that is computed of a record: gradients, and an evaluation where there is one."""

    def eager(self, trained: Mapping[str, torch.Tensor], inputs: Any, target: Any) -> dict[str, torch.Tensor]:
        """Return the gradient of one sample by the model's own code, for trials on made-up records."""
        with plain_setting():
            return self._of_one(trained, inputs, target)

    def _of_one(self, trained: Mapping[str, torch.Tensor], inputs: Any, target: Any) -> dict[str, torch.Tensor]:
        made = self._gradient((self.module, self.loss), dict(trained), inputs, target)
        return dict(zip(self.names, made, strict=True))

    def program(self, inputs: Any, targets: Any) -> Program:
        """Return what is computed for records like one, a record of tensors; refused if it cannot be captured."""
        return self.captured.program(inputs, targets)

    def _prepare(self, inputs: Any, target: Any) -> None:
        """Make what is needed once for samples like one."""
        self.program(inputs, target)

    def of_one(self, trained: Mapping[str, torch.Tensor], inputs: Any, target: Any) -> dict[str, torch.Tensor]:
        """Return the gradient of one sample, without a batch axis; zero if it has an index out of range."""
        program = self.program(inputs, target).runnable
        records = [part[None] for part in leaves((inputs, target))]
        fits = bool(program.in_range(records)[0])
        if not fits:
            records = program.moved_into_range(records)
        made = program(*trained.values(), *(part[0].clone() for part in records))  # aligned as in another process
        return {n: one if fits else one.new_zeros(one.shape) for n, one in zip(self.names, made, strict=True)}

    def of_many(
        self, trained: Mapping[str, torch.Tensor], inputs: Any, targets: Any, *, at_points: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return the gradients of several samples, computed together; at a point each if the parameters are stacked.

        Those that fail are zero.
        """
        program = self.program(picked(inputs, 0), picked(targets, 0)).runnable
        made = self.replayed(program, trained, inputs, targets, at_points=at_points)
        return dict(zip(self.names, made, strict=True))

    def vmapped(self, trained: Mapping[str, torch.Tensor], inputs: Any, targets: Any) -> dict[str, torch.Tensor]:
        """Return the gradients of several samples by vmap, or raise what it raises, for trials."""
        import torch

        program, records = self.program(picked(inputs, 0), picked(targets, 0)).runnable, leaves((inputs, targets))
        dims = (*[None] * len(self.names), *[0] * len(records))
        made = torch.func.vmap(program, in_dims=dims)(*trained.values(), *records)
        return dict(zip(self.names, made, strict=True))

    def replayed(
        self, program: Any, trained: Mapping[str, torch.Tensor], inputs: Any, targets: Any, *, at_points: bool = False
    ) -> list[torch.Tensor]:
        """Return what a program makes of several samples, computed together; zeros for those that fail."""
        import torch

        records = leaves((inputs, targets))
        dims = [0 if at_points else None] * len(self.names) + [0] * len(records)
        fits = program.in_range(records)
        spoilt = not bool(fits.all())
        if spoilt:  # an index out of range would fail the others as well
            records = program.moved_into_range(records)
        made = self._mapped(program, tuple(dims), [*trained.values(), *records])
        if spoilt:
            made = [torch.where(fits.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0.0) for rows in made]
        return made

    def _mapped(self, program: Any, dims: tuple[int | None, ...], values: list[Any]) -> list[torch.Tensor]:
        """Return what a program makes of several samples; one by one, and zeros for those that fail, if one does.

        If all of them fail the error is raised.
        """
        import torch

        try:
            return torch.func.vmap(program, in_dims=dims)(*values)
        except (IndexError, RuntimeError):
            count = next(len(one) for one, dim in zip(values, dims, strict=True) if dim == 0)
            each = [self._alone(program, dims, values, number) for number in range(count)]
            found = next((one for one in each if one is not None), None)
            if found is None:
                raise
            logger.warning("Some samples of a batch could not be computed; they count as zero.", extra=OF_DATA)
            zeros = [one.new_zeros(one.shape) for one in found]
            return [torch.stack(parts) for parts in zip(*(zeros if one is None else one for one in each), strict=True)]

    @staticmethod
    def _alone(program: Any, dims: tuple[int | None, ...], values: list[Any], number: int) -> list[Any] | None:
        """Return what a program makes of one sample of several; None if it fails."""
        try:
            return program(
                *(one if dim is None else one[number].clone() for one, dim in zip(values, dims, strict=True))
            )
        except (IndexError, RuntimeError):
            return None

    def isolate(self) -> None:
        """Compute every sample in a process of its own from now on, in which no code of the project runs.

        Raises
        ------
        ConfigurationError
            If no program was captured before, or the process does not start.
        """
        if not self.captured.programs:
            raise ConfigurationError(
                f"Expected {type(self).__name__} that knows what a record looks like before a real client reads one, "
                "got none: give a made-up record as example=(inputs, targets), a batch of one.",
                kind="missing",
                setting="example",
            )
        if self.process is None:
            import torch

            self.process = ReplayProcess(torch.get_num_threads())
        for programs in self.of_records:
            for program in programs.programs:
                self.process.add(program, self.summed_together(program) if has_factors(program) else 1)
        self.process.check()
        logger.info("The model is computed in a process of its own: %s.", self.programs_used(), extra=PUBLIC)

    def programs_used(self) -> str:
        """Return which programs compute what, by their hashes: public, for they were captured from no record."""
        found = [(programs.what, one) for programs in self.of_records for one in programs.programs]
        with_factors = {True: " (with factors, for sums)", False: ""}
        return ", ".join(f"{what} {one.digest[:16]}{with_factors[has_factors(one)]}" for what, one in found)

    def summed_together(self, program: Program) -> int:
        """Return how many records of a program with factors are computed together; measured once."""
        if program.digest not in self._together:
            self._together[program.digest] = records_together(program, self.gradient_memory_mib)
        return self._together[program.digest]

    def isolated(self, programs: RecordPrograms, parameters: Sequence[NDArray[Any]], sample: Any) -> list[NDArray[Any]]:
        """Return what one of some programs makes of a batch of one sample, in the process of its own.

        Raises
        ------
        InvalidRecordError
            If the sample looks like none of those that programs were captured for, or it cannot be computed.
        """
        if self.process is None:
            raise RuntimeError("isolate() comes first")
        program, arrays = self._program_of(programs, sample)
        return self.process.compute(program, parameters, arrays)

    def _program_of(self, programs: RecordPrograms, sample: Any) -> tuple[Program, list[NDArray[Any]]]:
        """Return the program for a batch of one sample, and its arrays; InvalidRecordError if there is none."""
        inputs, targets = (mapped(part, lambda values: as_array(values)[0]) for part in sample)
        seen = mapped(inputs, lambda one: self._as_seen(one, "inputs")), mapped(targets, lambda one: self._as_seen(one))
        program = programs.known(looks_of(*seen))
        if program is None:
            raise InvalidRecordError("a record of another shape or type than the model was captured for")
        return program, leaves((inputs, targets))

    def _isolated_rows(self, parameters: Sequence[NDArray[Any]], samples: Any) -> NDArray[np.float64]:
        """Return the rows of a batch, computed one by one in the process of its own."""
        count = first_axis(samples[0])
        rows = np.empty((count, self._width))
        for i, row in enumerate(rows):
            sample = tuple(picked(part, slice(i, i + 1)) for part in samples)
            made = self.isolated(self.captured, parameters, sample)
            np.concatenate([values.reshape(-1) for values in made], out=row)
        return rows

    def _as_seen(self, array: NDArray[Any], part: str = "targets") -> _Seen:
        """Return shape and type that an array has once it is converted."""
        kind = array.dtype.name
        if self._converts and array.dtype.kind == "f":
            kind = str(self.dtype)
        elif self._converts and part == "targets" and kind != "bool":
            kind = "int64"
        return _Seen(array.shape, kind)

    @property
    def _width(self) -> int:
        return sum(map(math.prod, self.shapes))

    def trained(self, parameters: Sequence[NDArray[Any]]) -> dict[str, torch.Tensor]:
        """Return the module's parameters from a model's arrays."""
        import torch

        return {
            name: torch.tensor(np.asarray(values), dtype=kind, device=device)
            for name, values, (kind, device) in zip(self.names, parameters, self._kinds, strict=True)
        }

    def _need(self, compute: Callable[[Any, Any, slice], Any], inputs: Any, targets: Any, kind: str = "") -> Need:
        """Return what a sample of this shape needs; measured once for each kind of computation."""
        looks = repr((kind, [(tuple(part.shape[1:]), part.dtype) for part in leaves((inputs, targets))]))
        if looks not in self._needs:
            self._prepare(picked(inputs, 0), picked(targets, 0))  # which is no part of what a sample needs

            def of_some(count: int) -> Any:
                some = slice(0, count)
                return compute(picked(inputs, some), picked(targets, some), some)

            self._needs[looks] = Need.measured(of_some)
        return self._needs[looks]

    def _fill(self, rows: NDArray[np.floating], made: Mapping[str, torch.Tensor], count: int) -> None:
        """Fill rows with the gradients of ``count`` samples; those behind the rows are left out."""
        import torch

        start = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            stop = start + math.prod(shape)
            values = made[name].detach().reshape(count, stop - start)[: len(rows)].cpu()
            rows[:, start:stop] = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
            start = stop


class ModuleGradients(_SampleGradients):
    """Per-sample gradients of a PyTorch module's trained parameters, by ``torch.func``.

    Parameters
    ----------
    module : torch.nn.Module
        What has ``requires_grad`` is trained; nothing else in it may change while it computes.
    loss : callable
        ``loss(output, target) -> scalar tensor`` for a batch of one.
    chunk : int, optional
        The most samples that are computed together; default 128.
    gradient_memory_mib : float
        Memory for computing gradients, in MiB: as many samples are computed together as fit, and where the rows of all
        do not fit (:meth:`stacked`), they are computed in chunks, twice. A real client computes one sample at a time.

    Notes
    -----
    A batch is a pair (inputs, targets) with the samples along the first axis: arrays or tensors, and for a module of
    several inputs a tuple of them (``module(*inputs)``) or a mapping (``module(**inputs)``). Floating-point inputs and
    targets get the module's own type, integer targets int64.

    **Formal guarantees.** Row i depends on sample i alone: no code of module or loss ever meets a sample. What they
    compute for one is captured without values, checked and hashed (:mod:`.torch_graph`), and refused if an operator
    writes, draws, or is not PyTorch's own. A real client replays it in a process of its own (:meth:`isolate`), in which
    a sample that fails counts as zero and nothing else shows. Assumes that neither the module nor its capture read
    private data, and that PyTorch's operators are pure, as reviewed (:class:`~.replay.TorchProgram`).
    Proof: docs/proofs/records.md.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Loss,
        *,
        chunk: int | None = None,
        gradient_memory_mib: float = GRADIENT_MEMORY_MIB,
    ) -> None:
        check_installed("torch", "torch", "a PyTorch model")
        if chunk is not None:
            check_count("chunk", chunk)
        super().__init__(module, loss, trainable_parameters(module), gradient_memory_mib)
        self.chunk = chunk

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> NDArray[np.floating]:
        """Rows of shape (b, d): float64 if any trained parameter is, else float32."""
        return self._rows(parameters, samples, 0)

    def _rows(self, parameters: Sequence[NDArray[Any]], samples: Any, beside: int) -> NDArray[np.floating]:
        """Return the rows, computed in the memory less ``beside`` bytes."""
        if self.process is not None:
            return self._isolated_rows(parameters, samples).astype(self._row_type)
        trained = self.trained(parameters)
        inputs = as_inputs(samples[0], self.dtype, self.device)
        targets = as_targets(samples[1], self.dtype, self.device)
        count = first_axis(inputs)
        rows = np.empty((count, self._width), self._row_type)
        step = self._step(trained, inputs, targets, beside) if count > 1 else 1
        for kept, chosen in chunks(count, step):
            self._write(rows[kept], trained, picked(inputs, chosen), picked(targets, chosen))
        return rows

    def stacked(
        self,
        points: Sequence[Sequence[NDArray[Any]]],
        weights: Sequence[float | NDArray[np.float64]],
        samples: Any,
    ) -> StackedContributions:
        """Return the rows of :func:`.per_sample_gradients.combined_gradients`.

        At one point nothing is widened to float64.
        """
        weight = weights[0]
        narrow = len(points) == 1 and not isinstance(weight, np.ndarray)

        def made(chosen: slice, beside: int) -> StackedContributions:
            some = picked(samples[0], chosen), picked(samples[1], chosen)
            with np.errstate(all="ignore"):
                if narrow:
                    beside += 8 * self._width  # a row that is widened, later on
                    return _NarrowRows(np.asarray(self._rows(points[0], some, beside)), float(weight))  # type: ignore[arg-type]
                at = partial(self._rows, beside=beside)
                return DenseContributions(combined_gradients(at, points, weights_of(weights, chosen), some))  # type: ignore[arg-type]

        width, narrow_bytes = self._width, np.dtype(self._row_type).itemsize
        row_bytes = narrow_bytes * width if narrow else wide_row_bytes(len(points), width)
        return in_chunks(made, first_axis(samples[0]), row_bytes, self.gradient_memory_mib)

    @property
    def sums_unwritten(self) -> bool:
        """Whether sums of clipped gradients may be computed without any being written out (:meth:`summed`).

        It follows from the shapes of parameters and records alone.
        """
        import torch

        programs = self.captured.programs
        if self.process is not None or programs:
            is_one = self.process is None or len(programs) == 1
            return self.together and is_one and all(map(has_factors, programs))
        return self._width >= LEAST_SUMMED and all(kind == torch.float32 for kind, _ in self._kinds)

    def summed(
        self, points: Sequence[Sequence[NDArray[Any]]], weight: float, read: Callable[[int], Any], count: int
    ) -> SummedGradients | None:
        """Return the gradients of ``count`` samples at one point, times a weight, to be clipped and added up.

        ``read`` gives a sample by its place, as a batch of one, and may raise InvalidRecordError. None if the program
        for such samples has no factors, which can be so in a simulation alone.

        Notes
        -----
        **Formal guarantees.** What a sample adds to a sum depends on it alone, up to rounding that the enlarged norms
        cover, and is no longer than its bound (:class:`~.summed_gradients.SummedGradients`).
        """
        (point,) = points
        if self.process is None:
            inputs, targets = (
                picked(change(part, self.dtype, self.device), 0)
                for change, part in zip((as_inputs, as_targets), read(0), strict=True)
            )
            program = self.program(inputs, targets)
        else:
            (program,) = self.captured.programs
        if not has_factors(program):
            return None

        def record(place: int) -> list[NDArray[Any]]:
            own, arrays = self._program_of(self.captured, read(place))
            if own is not program:
                raise InvalidRecordError("a record of another shape or type than the model was captured for")
            return arrays

        def written(place: int) -> NDArray[np.floating]:
            return self._rows(point, read(place), 0)[0]

        if self.process is None:
            compute = sum_of_batch(program, list(self.trained(point).values()))
        else:
            compute = partial(self.process.sum_of_batch, program, point)
        together = self.summed_together(program)
        return SummedGradients(
            compute, record, written, count=count, together=together, width=self._width, weight=weight
        )

    def _step(self, trained: dict[str, torch.Tensor], inputs: Any, targets: Any, beside: int) -> int:
        """Return how many samples are computed together."""
        most = MOST_TOGETHER if self.chunk is None else self.chunk
        if not self.together:
            return most  # they are computed one by one in any case
        need = self._need(lambda some, their, _: self.of_many(trained, some, their), inputs, targets)
        return min(need.samples(self.gradient_memory_mib, beside), most)

    @property
    def _row_type(self) -> type[np.floating]:
        import torch

        return np.float64 if any(kind == torch.float64 for kind, _ in self._kinds) else np.float32

    def _write(self, rows: NDArray[np.floating], trained: dict[str, torch.Tensor], inputs: Any, targets: Any) -> None:
        """Write the gradients of some samples; of a single one, as on a real client, without vmap."""
        count = first_axis(inputs)  # more than there are rows, where the last one is computed again and again
        if not self.together and count > 1:
            for i in range(len(rows)):
                one = slice(i, i + 1)
                self._write(rows[one], trained, picked(inputs, one), picked(targets, one))
            return
        self._fill(rows, self._computed(trained, inputs, targets, count), count)

    def _computed(self, trained: dict[str, torch.Tensor], inputs: Any, targets: Any, count: int) -> dict[str, Any]:
        if count > 1:
            return self.of_many(trained, inputs, targets)
        return self.of_one(trained, picked(inputs, 0), picked(targets, 0))


class _NarrowRows:
    """Rows times a weight, in the type they were computed in; norms and sums are float64."""

    def __init__(self, rows: NDArray[np.floating], weight: float) -> None:
        self._rows, self._weight = rows, weight

    def norms(self) -> NDArray[np.float64]:
        squares = np.empty(len(self._rows))
        together = min(max(_WIDENED_VALUES // self._rows.shape[1], 1), _ROWS_AT_A_TIME)
        with np.errstate(all="ignore"):
            for start in range(0, len(self._rows), together):
                some = slice(start, start + together)
                wide = self._rows[some].astype(np.float64)
                squares[some] = squared_lengths(wide)
                del wide  # before the next ones are made
            return abs(self._weight) * np.sqrt(squares)

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        np.multiply(self._rows[row], self._weight * scale, out=out)

    def scaled_sum(self, scales: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of rows, each times its scale."""
        total = np.zeros(self._rows.shape[1])
        for start in range(0, len(self._rows), _ROWS_AT_A_TIME):
            some = slice(start, start + _ROWS_AT_A_TIME)
            total += (self._weight * scales[some]) @ self._rows[some].astype(np.float64)
        return total


def called_with(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a sample's inputs as the arguments of a module."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


class TorchGradients(_SampleGradients):
    """Per-sample gradients of a PyTorch module by ``torch.func``.

    Parameters
    ----------
    module : torch.nn.Module
        Without buffers: one such as batch norm's running mean mixes samples, which would break the guarantee.
    loss : callable
        ``loss(output, target) -> scalar tensor`` for a batch of one.
    gradient_memory_mib : float
        Memory for computing gradients, in MiB, beside the returned rows: as many samples are computed together as fit.
    example : tuple, optional
        A made-up batch of one sample, (inputs, target): what a sample looks like. Real clients need it; in a simulation
        the first samples show it.
    augment : callable, optional
        Function that makes K inputs of one, a batch of one, such as moved images. The row of a sample is then the
        gradient of the loss of all K, which have the sample's target. With a loss that is a mean over its batch this is
        the mean of their gradients.

    Notes
    -----
    A batch is a pair (inputs, targets) of arrays or tensors with the samples along the first axis.

    **Formal guarantees.** Row i depends on sample i alone, as of :class:`ModuleGradients`: what module and loss compute
    for a sample is captured without values, and a real client replays it in a process of its own. ``augment`` is
    captured with them. A client clips the row after augmentations are averaged, so they change no sensitivity.

    Examples
    --------
    >>> import torch
    >>> gradients = TorchGradients(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
    >>> list(map(tuple, gradients.shapes))
    [(2, 4), (2,)]
    """

    _converts = False

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        gradient_memory_mib: float = GRADIENT_MEMORY_MIB,
        example: tuple[Any, Any] | None = None,
        augment: Augment | None = None,
    ) -> None:
        check_installed("torch", "torch", "TorchGradients")
        if any(True for _ in module.buffers()):
            raise ConfigurationError(
                f"Expected a module without buffers, got {[name for name, _ in module.named_buffers()]}: "
                "they carry data from sample to sample. Replace batch norm by group or layer norm.",
                kind="unsupported",
                setting="module",
            )
        parameters = dict(module.named_parameters())
        if not parameters:
            raise ConfigurationError("Expected a module with parameters, got none.", kind="missing")
        super().__init__(module, loss, parameters, gradient_memory_mib, augment)
        if example is not None:
            self.capture_like(example)

    def capture_like(self, example: tuple[Any, Any]) -> None:
        """Capture what is computed for samples like a made-up one, a batch of one; refuse what cannot be captured."""
        import torch

        self.program(*(torch.as_tensor(part)[0] for part in example))

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> NDArray[np.float64]:
        if self.process is not None:
            return self._isolated_rows(parameters, samples)
        named = self.trained(parameters)
        return self._rows(samples, lambda inputs, targets, _: self.of_many(named, inputs, targets), "one point")

    def at_points(self, points: NDArray[np.floating], samples: Any) -> NDArray[np.float64]:
        """Return the gradient of sample i at point i, shape (b, d)."""
        if self.process is not None:
            parts = [tuple(picked(part, slice(i, i + 1)) for part in samples) for i in range(len(points))]
            points_of = [unflatten(point, self.shapes) for point in points]
            each = [self._isolated_rows(point, part)[0] for point, part in zip(points_of, parts, strict=True)]
            return np.stack(each) if each else np.empty(np.shape(points))

        def gradients(inputs: Any, targets: Any, chosen: slice | NDArray[np.intp]) -> dict[str, torch.Tensor]:
            return self.of_many(self._named(points[chosen]), inputs, targets, at_points=True)

        return self._rows(samples, gradients, "a point each")

    def _named(self, points: NDArray[np.floating]) -> dict[str, torch.Tensor]:
        """Return a copy of the parameters for each sample, in the module's types."""
        import torch

        named, start = {}, 0
        for name, shape, (kind, _) in zip(self.names, self.shapes, self._kinds, strict=True):
            size = math.prod(shape)
            values = np.ascontiguousarray(points[:, start : start + size])
            named[name] = torch.as_tensor(values, dtype=kind).reshape(len(points), *shape)
            start += size
        return named

    def _rows(
        self, samples: Any, gradients: Callable[[Any, Any, Any], dict[str, torch.Tensor]], kind: str
    ) -> NDArray[np.float64]:
        """Return the gradients of all samples, as many at a time as fit into memory."""
        import torch

        inputs, targets = (torch.as_tensor(part) for part in samples)
        count = len(inputs)
        rows, step = np.empty((count, self._width)), count
        if count > 1:
            need = self._need(gradients, inputs, targets, kind)
            # Points are copied in NumPy's types as well, which nobody counts.
            own = 16 * self._width if kind == "a point each" else 0
            step = Need(need.fixed, need.a_sample + own).samples(self.gradient_memory_mib)
        for kept, chosen in chunks(count, max(step, 1)):
            given = inputs[chosen]
            made = gradients(given, targets[chosen], chosen)
            self._fill(rows[kept], made, len(given))
            del made
        return rows


class ModuleScores:
    """Outputs of a module for samples that are arrays, each sample by itself, in the process of its gradients.

    Parameters
    ----------
    gradients : TorchGradients
    example : ndarray of shape (1, ...)
        A made-up batch of one sample.
    """

    def __init__(self, gradients: TorchGradients, example: NDArray[Any]) -> None:
        import torch

        def scores(module: Any, values: dict[str, Any], inputs: Any, _: Any) -> list[Any]:
            return [torch.func.functional_call(module, values, (inputs[None],))[0]]

        self._gradients = gradients
        self._captured = RecordPrograms(scores, gradients.module, gradients.names, gradients.module, "scores")
        gradients.of_records.append(self._captured)
        self._program = self._captured.program(torch.as_tensor(example)[0], ()).runnable

    def __call__(self, parameters: Sequence[NDArray[Any]], inputs: NDArray[Any]) -> NDArray[np.floating]:
        """Return the outputs, with the samples along the first axis."""
        import torch

        of = self._gradients
        if of.process is not None:
            return np.stack([of.isolated(self._captured, parameters, (one[None], ()))[0] for one in inputs])
        values = torch.as_tensor(inputs)
        with torch.no_grad():
            made = of.replayed(self._program, of.trained(parameters), values, ())
        return made[0].numpy()


_AT_A_TIME = 256
"""Samples that are measured together, in a simulation."""

_OF_PROBABILITIES = ("BCELoss", "binary_cross_entropy")


class ModuleMeasure:
    """Measure of which samples a module predicts right, and of its scores for class 1 of two.

    ``right(output, target)`` gives a value from 0 to 1 a sample. By default the largest of several outputs is the
    prediction; of a single one its sign, or with ``BCELoss``, which takes probabilities, whether it is above 1/2.

    Notes
    -----
    **Formal guarantees.** Row i depends on sample i alone: the measure of one sample, as a batch of one, is captured
    without values as the gradients are (:class:`ModuleGradients`), and a real client replays it in the same process.
    """

    def __init__(self, gradients: ModuleGradients, right: Callable[[Any, Any], Any] | None = None) -> None:
        loss = gradients.loss
        name = getattr(loss, "__name__", type(loss).__name__)
        self._of_probabilities = name in _OF_PROBABILITIES
        self._gradients, self._right = gradients, right
        held = gradients.module, right
        self.captured = RecordPrograms(self._compute, gradients.module, gradients.names, held, "evaluation")
        gradients.of_records.append(self.captured)

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> Measured:
        kind = self._gradients
        if kind.process is not None:
            count = first_axis(samples[0])
            each = [tuple(picked(part, slice(i, i + 1)) for part in samples) for i in range(count)]
            found = [kind.isolated(self.captured, parameters, one) for one in each]
            return Measured(*(np.array([float(part) for part in parts]) for parts in zip(*found, strict=True)))
        inputs = as_inputs(samples[0], kind.dtype, kind.device)
        targets = as_targets(samples[1], kind.dtype, kind.device)
        trained = kind.trained(parameters)
        count = first_axis(inputs)
        program = self.program(picked(inputs, 0), picked(targets, 0)).runnable
        parts = [
            kind.replayed(program, trained, picked(inputs, chosen), picked(targets, chosen))
            for chosen in (slice(start, start + _AT_A_TIME) for start in range(0, count, _AT_A_TIME))
        ]
        return Measured(*(np.concatenate([_as_float64(one) for one in each]) for each in zip(*parts, strict=True)))

    def eager(self, trained: dict[str, torch.Tensor], inputs: Any, target: Any) -> list[torch.Tensor]:
        """Return the measure of one sample by the model's own code, for trials on made-up records."""
        import torch

        with plain_setting(), torch.no_grad():
            return self._compute((self._gradients.module, self._right), trained, inputs, target)

    def program(self, inputs: Any, targets: Any) -> Program:
        """Return what is measured of records like one, a record of tensors; refused if it cannot be captured."""
        return self.captured.program(inputs, targets)

    def _compute(self, held: Any, values: dict[str, Any], inputs: Any, target: Any) -> list[Any]:
        """Return how right the module is about one sample, and perhaps a score and whether it is of class 1."""
        import torch

        module, right = held
        arguments, named = called_with(with_batch_axis(inputs))
        targets = with_batch_axis(target)
        output = torch.func.functional_call(module, values, arguments, named)
        output = getattr(output, "logits", output) if right is None else output
        if right is not None:
            return [_of_one_sample(right(output, targets))]
        if not isinstance(output, torch.Tensor) or not isinstance(targets, torch.Tensor):
            raise _unknown(output)
        if output.numel() == 1 and targets.numel() == 1:
            return self._of_one_output(output.reshape(()), targets.reshape(()))
        if output.ndim == 2 and targets.shape == (1,) and not targets.is_floating_point():
            return _of_scores(output, targets)
        raise _unknown(output)

    def _of_one_output(self, output: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        positive = (target > 0.5).double()  # classes 0 and 1, or -1 and 1 as losses of margins have them
        score = output.double() if self._of_probabilities else output.double().sigmoid()
        guess = (output > (0.5 if self._of_probabilities else 0.0)).double()
        return [(guess == positive).double(), score, positive]


def _of_one_sample(found: Any) -> torch.Tensor:
    import torch

    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise ConfigurationError(
            "Expected right(output, target) to give a tensor with a value from 0 to 1 for each sample of a batch, got "
            f"{type(found).__name__} of shape {tuple(getattr(found, 'shape', ()))} for a batch of one.",
            kind="wrong-type",
            setting="right",
        )
    return found.detach().double().reshape(())


def _of_scores(output: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    right = (output.argmax(dim=1) == targets).double().reshape(())
    if output.shape[1] != 2:
        return [right]
    score = (output[:, 1] - output[:, 0]).double().sigmoid().reshape(())
    return [right, score, targets.double().reshape(())]


def _as_float64(values: Any) -> NDArray[np.float64]:
    return values.detach().cpu().double().numpy()


def _unknown(output: Any) -> ConfigurationError:
    return ConfigurationError(
        "Expected one output a class and a class number as target, or a single output and 0 or 1, got outputs of "
        f"{tuple(getattr(output, 'shape', ()))}: say which predictions are right, with "
        "evaluation=EvaluationShare(right=lambda output, target: ...).",
        kind="missing",
        setting="evaluation",
    )
