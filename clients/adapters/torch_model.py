"""A PyTorch module on a client: its trained parameters, its gradients and its predictions, sample by sample.

Trained, sent and released is what has ``requires_grad``, in the order of ``named_parameters`` and tied weights once.
Buffers and frozen layers are constants of the module that each client has installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from ...privacy.accounting.gdp import check_count
from ...privacy.errors import ConfigurationError, check_installed
from ...privacy.queries.evaluation import Measured
from ...privacy.release.clipping import DenseContributions, StackedContributions, squared_lengths
from .per_sample_gradients import (
    GRADIENT_MEMORY_MIB,
    MOST_TOGETHER,
    Need,
    check_memory,
    chunks,
    combined_gradients,
    in_chunks,
    weights_of,
    wide_row_bytes,
)
from .torch_state import ModuleState

if TYPE_CHECKING:
    import torch


def mapped(values: Any, change: Callable[[Any], Any]) -> Any:
    """Return a structure with every array or tensor in it changed."""
    if isinstance(values, Mapping):
        return {name: mapped(part, change) for name, part in values.items()}
    if isinstance(values, tuple | list):
        return tuple(mapped(part, change) for part in values)
    return change(values)


def leaves(values: Any) -> list[Any]:
    """Return the arrays or tensors of a structure, in order."""
    found: list[Any] = []
    mapped(values, found.append)
    return found


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


class _SampleGradients:
    """Gradients of a loss in parameters of a module, sample by sample by ``torch.func``, and the memory they need."""

    def __init__(
        self, module: torch.nn.Module, loss: Loss, parameters: Mapping[str, torch.nn.Parameter], memory_mib: float
    ) -> None:
        import torch

        self.gradient_memory_mib = check_memory(memory_mib)
        self.module, self.loss = module, loss
        self.names = list(parameters)
        self.shapes: list[tuple[int, ...]] = [tuple(parameter.shape) for parameter in parameters.values()]
        self._kinds = [(parameter.dtype, parameter.device) for parameter in parameters.values()]
        self._needs: dict[str, Need] = {}
        self.state = ModuleState(module, loss)

        def sample_loss(trained: dict[str, torch.Tensor], inputs: Any, target: Any) -> torch.Tensor:
            arguments, named = called_with(with_batch_axis(inputs))
            output = torch.func.functional_call(module, trained, arguments, named)
            return loss(output, with_batch_axis(target))

        self.of_one = torch.func.grad(sample_loss)
        self.of_many = torch.func.vmap(self.of_one, in_dims=(None, 0, 0))

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

    **Formal guarantees.** Row i depends on sample i alone: each sample goes through the module as a batch of one
    (``torch.func.vmap``), with the same buffers and frozen parameters. A module that changes them would carry one
    sample's data to the next. That is an error, and samples that come one by one, as a real client's, meet the module
    as it was before the first of them, attributes of it and of the loss too, as far as :class:`ModuleState` finds them:
    what it does not is listed there, and a model that keeps a sample in it has no guarantee.
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
        self.together = True
        """Whether vmap can compute several samples of this module."""
        self.dtype, self.device = self._kinds[0]

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> NDArray[np.floating]:
        """Rows of shape (b, d): float64 if any trained parameter is, else float32."""
        return self._rows(parameters, samples, 0)

    def _rows(self, parameters: Sequence[NDArray[Any]], samples: Any, beside: int) -> NDArray[np.floating]:
        """Return the rows, computed in the memory less ``beside`` bytes."""
        trained = self.trained(parameters)
        inputs = as_inputs(samples[0], self.dtype, self.device)
        targets = as_targets(samples[1], self.dtype, self.device)
        count = first_axis(inputs)
        if count == 1:
            self.forget(values=False)
        rows = np.empty((count, self._width), self._row_type)
        step = self._step(trained, inputs, targets, beside) if count > 1 else 1
        for kept, chosen in chunks(count, step):
            self._write(rows[kept], trained, picked(inputs, chosen), picked(targets, chosen))
        self.check_constants()
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
        if count == 1:
            made = self.of_one(trained, picked(inputs, 0), picked(targets, 0))
        else:
            made = self.of_many(trained, inputs, targets)
        self._fill(rows, made, count)

    def forget(self, *, values: bool) -> None:
        """Put the module back as it was before any sample (:meth:`ModuleState.restore`)."""
        self.state.restore(values=values)

    def check_constants(self) -> None:
        """Refuse a module that wrote to buffers or frozen parameters: the next sample would see this one's data."""
        changed = self.state.written_constants()
        if changed is not None:
            raise ConfigurationError(
                f"Expected buffers and frozen parameters to stay as they are, got a module that writes to "
                f"{', '.join(changed) or 'new ones'}: one sample's data would reach the next. Call module.eval(), or "
                "leave such layers out.",
                kind="unsupported",
                setting="module",
            )


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

    Notes
    -----
    A batch is a pair (inputs, targets) of arrays or tensors with the samples along the first axis. Each sample is
    passed through the module alone, as a batch of one (``torch.func.vmap``), so rows cannot depend on each other. What
    module and loss remember is put back before samples that come one by one, as a real client's, as far as it is found
    (:class:`~murmurfl.clients.adapters.torch_state.ModuleState`).

    Examples
    --------
    >>> import torch
    >>> gradients = TorchGradients(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
    >>> list(map(tuple, gradients.shapes))
    [(2, 4), (2,)]
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        gradient_memory_mib: float = GRADIENT_MEMORY_MIB,
    ) -> None:
        check_installed("torch", "torch", "TorchGradients")
        import torch

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
        super().__init__(module, loss, parameters, gradient_memory_mib)
        self._of_many_at = torch.func.vmap(self.of_one, in_dims=(0, 0, 0))

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> NDArray[np.float64]:
        named = self.trained(parameters)
        return self._rows(samples, lambda inputs, targets, _: self.of_many(named, inputs, targets), "one point")

    def at_points(self, points: NDArray[np.floating], samples: Any) -> NDArray[np.float64]:
        """Return the gradient of sample i at point i, shape (b, d)."""

        def gradients(inputs: Any, targets: Any, chosen: slice | NDArray[np.intp]) -> dict[str, torch.Tensor]:
            return self._of_many_at(self._named(points[chosen]), inputs, targets)

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
        if count == 1:  # as a real client asks: whatever another sample has left behind is put back
            self.state.restore(values=False)
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


_AT_A_TIME = 256
"""Samples that go through the module together, in a simulation."""

_OF_PROBABILITIES = ("BCELoss", "binary_cross_entropy")


class ModuleMeasure:
    """Measure of which samples a module predicts right, and of its scores for class 1 of two.

    ``right(output, target)`` gives a value from 0 to 1 a sample. By default the largest of several outputs is the
    prediction; of a single one its sign, or with ``BCELoss``, which takes probabilities, whether it is above 1/2.

    Row i depends on sample i alone for a module that mixes no samples, as those that ``private_client_app`` accepts; a
    real client computes one sample at a time, whatever the module does.
    """

    def __init__(self, gradients: ModuleGradients, right: Callable[[Any, Any], Any] | None = None) -> None:
        self._gradients = gradients
        self._right = right
        gradients.state.add("right", right)
        loss = gradients.loss
        name = getattr(loss, "__name__", type(loss).__name__)
        self._of_probabilities = name in _OF_PROBABILITIES

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> Measured:
        kind = self._gradients
        inputs = as_inputs(samples[0], kind.dtype, kind.device)
        targets = as_targets(samples[1], kind.dtype, kind.device)
        trained = kind.trained(parameters)
        count = first_axis(inputs)
        if count == 1:
            kind.forget(values=True)
        parts = [
            self._measured(trained, picked(inputs, chosen), picked(targets, chosen))
            for chosen in (slice(start, start + _AT_A_TIME) for start in range(0, count, _AT_A_TIME))
        ]
        kind.check_constants()
        return _joined(parts)

    def _measured(self, trained: dict[str, torch.Tensor], inputs: Any, targets: Any) -> Measured:
        import torch

        with torch.no_grad():
            arguments, named = called_with(inputs)
            output = torch.func.functional_call(self._gradients.module, trained, arguments, named)
            if self._right is not None:
                return Measured(_as_float64(self._right(output, targets)))
            if not isinstance(output, torch.Tensor) or not isinstance(targets, torch.Tensor):
                raise _unknown(output)
            count = len(targets)
            if output.numel() == count and targets.numel() == count:
                return self._of_one_output(output.reshape(count), targets.reshape(count))
            if output.ndim == 2 and targets.shape == (count,) and not targets.is_floating_point():
                return _of_scores(output, targets)
        raise _unknown(output)

    def _of_one_output(self, output: torch.Tensor, targets: torch.Tensor) -> Measured:
        positive = (targets > 0.5).double()  # classes 0 and 1, or -1 and 1 as losses of margins have them
        score = output.double() if self._of_probabilities else output.double().sigmoid()
        guess = (output > (0.5 if self._of_probabilities else 0.0)).double()
        return Measured(_as_float64(guess == positive), _as_float64(score), _as_float64(positive))


def _of_scores(output: torch.Tensor, targets: torch.Tensor) -> Measured:
    right = _as_float64(output.argmax(dim=1) == targets)
    if output.shape[1] != 2:
        return Measured(right)
    return Measured(right, _as_float64((output[:, 1] - output[:, 0]).double().sigmoid()), _as_float64(targets))


def _as_float64(values: Any) -> NDArray[np.float64]:
    return values.detach().cpu().double().numpy()


def _joined(parts: Sequence[Measured]) -> Measured:
    if len(parts) == 1:
        return parts[0]
    right = np.concatenate([part.right for part in parts])
    scores = [part.score for part in parts if part.score is not None]
    classes = [part.positive for part in parts if part.positive is not None]
    return Measured(right, np.concatenate(scores) if scores else None, np.concatenate(classes) if classes else None)


def _unknown(output: Any) -> ConfigurationError:
    return ConfigurationError(
        "Expected one output a class and a class number as target, or a single output and 0 or 1, got outputs of "
        f"{tuple(getattr(output, 'shape', ()))}: say which predictions are right, with "
        "evaluation=EvaluationShare(right=lambda output, target: ...).",
        kind="missing",
        setting="evaluation",
    )
