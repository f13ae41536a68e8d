"""Programs that compute one record at a time, and the process that runs nothing else.

A model's code sees no record. What it computes for one record is captured beforehand as a *program*: JSON and plain
arrays, checked, with a hash of both (:mod:`.torch_graph` for PyTorch, :mod:`.jax_graph` for JAX). Simulations run a
program in their own process. A real client runs it in a process that never imported the project's code: this file,
started as ``python -I -B replay.py PARENT THREADS`` by :class:`.replay_process.ReplayProcess`. The file
therefore imports nothing of ours.

**Protocol.** Messages go over standard input and output. A message is the length of a header (8 bytes, little endian),
the header (JSON), and the bytes of its arrays, whose types and shapes the header lists under ``arrays``. Types are
NumPy's names. What NumPy has no type for travels as integers of its width (bfloat16 as ``uint16``).

========================================================  ===================================================
request                                                   reply
========================================================  ===================================================
``{"do": "load", "name", "kind", "program", "names",      ``{"ok": true}``, or ``{"ok": false, "why"}``. It
"memory"}`` and the constants, by ``names``               comes before any record and depends on none.
``{"do": "point", "slot"}`` and the parameters            none
``{"do": "compute", "name", "slot", "ticket"}`` and the   ``{"ok": true, "ticket"}`` and the results, or
arrays of one record                                      ``{"ok": false, "ticket"}`` without a reason,
                                                          whatever went wrong
``{"do": "norms", "name", "slot"}`` and the stacked       the same, with the norms of the records' gradients,
arrays of a batch of records                              of which the process keeps the factors
``{"do": "sum"}`` and a factor for each record of that    the same, with the sum of the gradients, each times
batch                                                     its factor; the factors are kept no longer
========================================================  ===================================================

A **kind** of program is a class in :data:`KINDS`: ``Kind(program, constants)`` reads a program and refuses what it does
not know, ``point(arrays)`` prepares parameters, ``compute(point, record)`` returns arrays of which shapes and types
follow from the program alone. It imports its framework itself, and nothing else. One for another framework needs an
entry there, and a function that captures its programs as a :class:`.replay_process.Program`. One kind is no list of
operations: :class:`FunctionProgram` calls a project's own gradient, each time in a copy of the process.

The process ends when standard input ends or its parent is gone. It writes no file and no core dump, its address space
is limited to what was asked for with ``load``, and its error output is closed: messages of libraries may quote records.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

Arrays = list[NDArray[Any]]

_PURE = """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    _euclidean_dist _fused_rms_norm _fused_rms_norm_backward _log_softmax _log_softmax_backward_data _prelu_kernel
    _prelu_kernel_backward _safe_softmax _softmax _softmax_backward_data _to_copy _unsafe_view
    _weight_norm_interface _weight_norm_interface_backward abs acos acosh adaptive_max_pool2d
    adaptive_max_pool2d_backward add addbmm addcdiv addcmul addmm addmv addr alias all amax amin aminmax angle any
    arange argmax argmin argsort asin asinh atan atan2 atanh avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d
    avg_pool3d_backward baddbmm binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits
    bitwise_and bitwise_not bitwise_or bitwise_xor bmm cat ceil celu clamp clamp_max clamp_min clone col2im
    constant_pad_nd convolution convolution_backward copy copysign cos cosh count_nonzero cummax cummin cumprod
    cumsum deg2rad detach diag_embed diagonal diagonal_backward diagonal_scatter digamma div dot elu elu_backward
    embedding embedding_dense_backward eq erf erfc erfinv exp exp2 expand expm1 eye fill flip floor floor_divide
    fmax fmin fmod frac full full_like gather ge gelu gelu_backward glu glu_backward gt hardshrink
    hardshrink_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward
    heaviside huber_loss huber_loss_backward hypot im2col imag index index_add index_fill index_put index_select
    isfinite isinf isnan isneginf isposinf kthvalue le leaky_relu leaky_relu_backward lerp lgamma lift_fresh_copy
    linalg_vector_norm linspace log log10 log1p log2 log_sigmoid_backward log_sigmoid_forward logaddexp logaddexp2
    logcumsumexp logical_and logical_not logical_or logical_xor logit logit_backward logspace logsumexp lt
    masked_fill max max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices
    max_pool3d_with_indices_backward maximum mean median min minimum mish mish_backward mm mse_loss
    mse_loss_backward mul mv nan_to_num nanmedian nansum native_batch_norm native_batch_norm_backward
    native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward ne neg new_full
    new_ones new_zeros nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward norm ones ones_like
    permute pixel_shuffle pixel_unshuffle polygamma pow prod rad2deg real reciprocal reflection_pad1d
    reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward reflection_pad3d reflection_pad3d_backward
    relu remainder repeat replication_pad1d replication_pad1d_backward replication_pad2d replication_pad2d_backward
    replication_pad3d replication_pad3d_backward roll rot90 round rsqrt rsub scalar_tensor scatter scatter_add
    scatter_reduce select select_backward select_scatter sgn sigmoid sigmoid_backward sign signbit silu
    silu_backward sin sinc sinh slice slice_backward slice_scatter smooth_l1_loss smooth_l1_loss_backward
    soft_margin_loss soft_margin_loss_backward softplus softplus_backward softshrink softshrink_backward sort split
    split_with_sizes sqrt square squeeze stack std sub sum t tan tanh tanh_backward threshold threshold_backward
    topk trace transpose tril tril_indices triu triu_indices trunc unbind unfold unfold_backward unsafe_chunk
    unsafe_split unsafe_split_with_sizes unsqueeze upsample_bicubic2d upsample_bicubic2d_backward
    upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d upsample_linear1d_backward upsample_nearest1d
    upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward upsample_nearest3d
    upsample_nearest3d_backward var var_mean view where xlogy zero zeros zeros_like
"""
PURE = frozenset(_PURE.split())
"""PyTorch's operators that a program may call: functions of their arguments alone, to the last bit of what they return.

Left out are draws at random, operators that write, what leaves or reads memory that nobody wrote to (``empty``,
``as_strided``, ``_embedding_bag``, ``_ctc_loss``, ``mkldnn_rnn_layer``), what trusts its arguments to stay within it
(``_unsafe_index``, ``_fft_c2r``, ``grid_sampler_2d``), shapes that depend on values (``nonzero``, ``masked_select``),
assertions, and custom operators of any library. Reviewed for PyTorch 2.14.
"""

_VIEWS = {("view", "default"), ("_unsafe_view", "default")}
"""Operators that fail where memory lies in another order than it did without values: ``reshape`` copies it there."""


class UnfitRecordError(Exception):
    """A record of another shape, type or range than a program was captured for."""


class TorchProgram:
    """A list of calls of PyTorch's own operators, replayed without the code that it was captured from.

    Parameters
    ----------
    program : mapping
        ``inputs``: shape, type and device of each parameter, then of each array of a record; ``parameters``: how many
        of them are parameters; ``bounds``: for arrays of a record that are indices, the lowest and the first too large
        value, and one that is allowed in addition, or null; ``steps``: constants, calls, items and the results.
    constants : mapping of str to ndarray

    Raises
    ------
    ValueError
        If a step is none of these, or calls an operator that is not among the pure ones.

    Notes
    -----
    **Formal guarantees.** What :meth:`compute` returns is a function of the program, its constants, the parameters and
    one record: the operators are PyTorch's and among :data:`PURE`, none writes to what it is given, and nothing is kept
    from one call to the next. Assumes that PyTorch's operators are as pure as reviewed, and, for what an earlier record
    could change, a process in which nobody has changed PyTorch. Proof: docs/proofs/records.md.
    """

    def __init__(self, program: Mapping[str, Any], constants: Mapping[str, NDArray[Any]]) -> None:
        import torch

        kinds = torch.dtype | torch.layout | torch.memory_format
        self._named = {str(value): value for value in vars(torch).values() if isinstance(value, kinds)}
        self._inputs: list[tuple[list[int], Any, str]] = [
            (list(shape), self._named[kind], device) for shape, kind, device in program["inputs"]
        ]
        self._count = len(self._inputs)
        self.on_device = any(device != "cpu" for _, _, device in self._inputs)
        self._parameters: int = program["parameters"]
        self._bounds: dict[int, list[Any]] = {int(number): found for number, found in program["bounds"].items()}
        steps: list[list[Any]] = program["steps"]
        self._calls = {number: self._call(step, constants) for number, step in enumerate(steps[:-1])}
        """A function for each step, of the inputs followed by the values of all earlier steps."""
        self._whole = self._plan(steps, steps[-1][1])
        factors: Mapping[str, Any] | None = program.get("factors")
        self._gradients: list[list[Any]] | None = None
        if factors is not None:
            replaced = {int(number): step for number, step in factors["replaced"].items()}
            own = [replaced.get(number, step) for number, step in enumerate(steps)]
            calls = self._calls | {number: self._call(step, constants) for number, step in replaced.items()}
            self._gradients, self._factored = factors["gradients"], self._plan(own, factors["values"], calls)

    def _call(self, step: list[Any], constants: Mapping[str, NDArray[Any]]) -> Callable[[list[Any]], Any]:
        """Return a function of inputs and earlier values that computes a step."""
        import torch

        what, first, *rest = step
        if what == "constant":
            made = self._tensor(constants[first], self._named[rest[0]], rest[1])
            return lambda values: made  # noqa: ARG005 - one interface for all steps
        if what == "item":
            number, item = self._count + first["n"], rest[0]
            return lambda values: values[number][item]
        if what == "input":
            return lambda values: values[first]
        if what != "call" or first not in PURE:
            raise ValueError(f"a step that is none of a program: {what} {first}")
        overload, arguments, named = rest
        replayed = "reshape" if (first, overload) in _VIEWS else first
        operator = getattr(getattr(torch.ops.aten, replayed), overload)
        if operator._schema.is_mutable:
            raise ValueError(f"an operator that writes: {first}")
        of_arguments = [self._getter(one) for one in arguments]
        of_named = [(name, self._getter(one)) for name, one in named.items()]
        return lambda values: operator(
            *(get(values) for get in of_arguments), **{name: get(values) for name, get in of_named}
        )

    def _getter(self, found: Any) -> Callable[[list[Any]], Any]:
        """Return a function of inputs and earlier values that gives an argument."""
        import torch

        if isinstance(found, list):
            parts = [self._getter(one) for one in found]
            if not _has_values(found):
                fixed = [part([]) for part in parts]
                return lambda values: fixed  # noqa: ARG005
            return lambda values: [part(values) for part in parts]
        if not isinstance(found, dict):
            return lambda values: found  # noqa: ARG005
        ((kind, value),) = found.items()
        if kind == "n":
            number = self._count + value
            return lambda values: values[number]
        made = {"t": self._named.get, "d": torch.device, "f": float.fromhex}[kind](value)
        return lambda values: made  # noqa: ARG005

    def _plan(
        self, steps: list[list[Any]], results: list[Any], calls: Mapping[int, Callable[[list[Any]], Any]] | None = None
    ) -> _Plan:
        """Return which steps results need, and after which of them a value is needed no more."""
        kept = set(_values_in(results))
        needed, last = set(kept), {}
        for number in reversed(range(len(steps) - 1)):
            if number in needed:
                for value in _values_in(steps[number]):
                    needed.add(value)
                    last.setdefault(value, number)
        unused: dict[int, list[int]] = {}
        for value, number in last.items():
            if value not in kept:
                unused.setdefault(number, []).append(self._count + value)
        calls = self._calls if calls is None else calls
        return _Plan([(n, calls[n], unused.get(n, [])) for n in sorted(needed)], [one["n"] for one in results])

    @staticmethod
    def _tensor(array: NDArray[Any], kind: Any, device: str) -> Any:
        """Return a plain array as a tensor of a type; types that NumPy lacks come as integers of their width."""
        import torch

        # A copy in PyTorch's own memory: routines of the linear algebra round by how memory is aligned.
        tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape)).clone()
        if kind == torch.bfloat16 and array.dtype == np.uint16:
            return tensor.view(kind).to(device)
        return tensor.to(device, kind)

    def __call__(self, *inputs: Any) -> list[Any]:
        """Return the results as tensors, from tensors: parameters, then one record; may be mapped over by vmap."""
        for tensor, (shape, kind, _) in zip(inputs, self._inputs, strict=True):
            if list(tensor.shape) != shape or tensor.dtype != kind:
                raise UnfitRecordError("another shape or type than captured")
        return self._run(self._whole, inputs)

    def _run(self, plan: _Plan, inputs: Sequence[Any]) -> list[Any]:
        values: list[Any] = [*inputs, *[None] * len(self._calls)]
        for number, call, unused in plan.steps:
            values[self._count + number] = call(values)
            for one in unused:
                values[one] = None
        return [values[self._count + number] for number in plan.results]

    def batch(self, point: list[Any], records: Sequence[Any]) -> SummedBatch:
        """Return the gradients of a batch of records, stacked as tensors, that can be summed without being written out.

        Records with an index out of range have gradients that are not finite.

        Raises
        ------
        UnfitRecordError
            If records have another shape than captured, or another kind of numbers.
        """
        import torch

        if self._gradients is None:
            raise UnfitRecordError("a program without factors")
        for tensor, (shape, kind, _) in zip(records, self._inputs[self._parameters :], strict=True):
            if list(tensor.shape[1:]) != shape or tensor.dtype != kind:
                raise UnfitRecordError("another shape or type than captured")
        fits = self.in_range(records)
        records = self.moved_into_range(records)
        dims = (*[None] * len(point), *[0] * len(records))
        with torch.no_grad():
            mapped = torch.func.vmap(lambda *inputs: self._run(self._factored, inputs), in_dims=dims)
            return SummedBatch(self._gradients, mapped(*point, *records), fits)

    def made_up(self, count: int) -> tuple[list[Any], list[Any]]:
        """Return parameters and records of zeros, or of the lowest indices, of the captured shapes and types."""
        import torch

        shapes = [torch.zeros(shape, dtype=kind, device=device) for shape, kind, device in self._inputs]
        records = [one.expand(count, *one.shape).clone() for one in shapes[self._parameters :]]
        return shapes[: self._parameters], self.moved_into_range(records)

    def stacked(self, records: Sequence[NDArray[Any]]) -> list[Any]:
        """Return the arrays of several records as tensors of the captured types."""
        kinds = self._inputs[self._parameters :]
        for array, (_, kind, _) in zip(records, kinds, strict=True):
            if (array.dtype.kind == "f") != kind.is_floating_point:
                raise UnfitRecordError("another type than captured")
        return [self._tensor(array, kind, device) for array, (_, kind, device) in zip(records, kinds, strict=True)]

    def point(self, arrays: Sequence[NDArray[Any]]) -> list[Any]:
        """Return parameters as tensors of the captured types."""
        kinds = self._inputs[: self._parameters]
        return [self._tensor(array, kind, device) for array, (_, kind, device) in zip(arrays, kinds, strict=True)]

    def compute(self, point: list[Any], record: Sequence[NDArray[Any]]) -> Arrays:
        """Return the results for one record.

        Raises
        ------
        UnfitRecordError
            If the record has another shape than captured, another kind of numbers, or an index out of range.
        """
        import torch

        tensors = []
        for array, (shape, kind, device) in zip(record, self._inputs[self._parameters :], strict=True):
            if list(array.shape) != shape or (array.dtype.kind == "f") != kind.is_floating_point:
                raise UnfitRecordError("another shape or type than captured")
            tensors.append(self._tensor(array, kind, device))
        if not bool(self.in_range([tensor[None] for tensor in tensors])[0]):
            raise UnfitRecordError("an index out of range")
        with torch.no_grad():
            return [_plain(tensor) for tensor in self(*point, *tensors)]

    def in_range(self, records: Sequence[Any]) -> Any:
        """Return which of many records have indices in range only, from their arrays stacked as tensors."""
        import torch

        found = torch.ones(len(records[0]), dtype=torch.bool, device=records[0].device)
        for number in self._bounds:
            allowed = self._allowed(number, records[number])
            found &= allowed.reshape(len(allowed), math.prod(allowed.shape[1:])).all(dim=1)
        return found

    def moved_into_range(self, records: Sequence[Any]) -> list[Any]:
        """Return records with indices out of range replaced, so that the others can be computed together with them."""
        made = list(records)
        for number, (low, _, _) in self._bounds.items():
            values = records[number]
            made[number] = values.where(self._allowed(number, values), values.new_full((), low))
        return made

    def _allowed(self, number: int, values: Any) -> Any:
        low, high, other = self._bounds[number]
        allowed = (values >= low) & (values < high)
        return allowed if other is None else allowed | (values == other)


class _Plan(NamedTuple):
    """Some steps of a program, in order: number, function, and the values that are used no more after it."""

    steps: list[tuple[int, Callable[[list[Any]], Any], list[int]]]
    results: list[int]


MOST_ROWS_TOGETHER = 1 << 14
"""The most rows of factors that are added up in one product, over all records of a batch."""
_ENLARGED = 1.0 + 2.0**-17
_MOST_CANCELLED = 2.0**10
_UNIT = 2.0**-52
_WIDENED_VALUES = 1 << 19
"""Values of factors that are widened to float64 together."""


class SummedBatch:
    """Gradients of a batch of records, of which large ones are factors: their norms, and sums of scaled ones.

    A gradient is either written out, or G = sum over rows t of l_t r_t^T for the rows of two factors, L^T R. Then
    ||G||^2 = sum over s and t of (l_s l_t) (r_s r_t), and a sum over records of c G is one product of matrices, of all
    rows of all records. This is ghost clipping (Li, Tramer, Liang and Hashimoto 2022, section 4), with book-keeping in
    place of a second backward pass (Bu, Wang, Zha and Karypis 2023).

    Parameters
    ----------
    gradients : list
        For each parameter ``["written", value]`` or ``["product", shape, terms]``, where a term is ``["matrix", value,
        is it transposed, value, is it transposed]``, ``["indices", value, value, ignored index]``, or ``["patches",
        value, value, kernel, dilation, padding, stride]``.
    values : list of Tensor
        With records along the first axis.
    fits : Tensor
        Whether each record counts; others have the norm NaN.

    Notes
    -----
    **Formal guarantees.** :meth:`norms` are at least 1 + 2^-17 times the true norms of the gradients that the values
    stand for, in exact arithmetic, and at least 2^-10 times M, the root of the sum over parameters of (sum over t of
    ||l_t|| ||r_t||)^2. Therefore a gradient whose norm times its scale is at most S is no longer than S / (1 + 2^-17)
    once it is scaled, and a sum of up to 1024 of them is off by less than 2^-18.9 S. A record's
    norm is finite if and only if its values are, and depends on no other record's values.
    Proof: docs/proofs/sensitivities.md.
    """

    def __init__(self, gradients: list[list[Any]], values: list[Any], fits: Any) -> None:
        self._gradients, self._values, self._fits = gradients, values, fits

    def norms(self) -> NDArray[np.float64]:
        """Return norms of the records' gradients, shape (records,), enlarged; not finite where a gradient is not."""
        import torch

        count = len(self._fits)
        squares, spreads = self._values[0].new_zeros((2, count), dtype=torch.float64)
        for kind, first, *rest in self._gradients:
            if kind == "written":
                written = self._values[first].reshape(count, -1)
                found = torch.stack([one.double().square().sum() for one in written])
                squares += found * (1.0 + _UNIT * written.shape[1])
                spreads += found
                continue
            for some in self._slices(rest[0], torch.arange(count, device=squares.device)):
                square, spread = self._square(first, [self._sides(term, some) for term in rest[0]])
                squares[some] += square
                spreads[some] += spread
        norms = torch.maximum(squares.sqrt() * _ENLARGED, spreads.sqrt() / _MOST_CANCELLED)
        norms = torch.where(torch.isfinite(squares) & self._fits, norms, torch.nan)
        return norms.cpu().numpy()

    @staticmethod
    def _square(shape: list[int], sides: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Return the squared norms of products, enlarged by what rounding may have taken, and what M^2 is a sum of."""
        square = spread = sides[0][1].new_zeros(len(sides[0][1]))
        rows = sum(right.shape[1] for _, right in sides)
        for i, (left, right) in enumerate(sides):
            of_left, of_right = _products(left, left), right @ right.mT
            square = square + (of_left * of_right).sum((1, 2))
            lengths = of_left.diagonal(dim1=1, dim2=2).sqrt() * of_right.diagonal(dim1=1, dim2=2).sqrt()
            spread = spread + lengths.sum(1)
            for other, other_right in sides[:i]:
                square = square + 2.0 * (_products(left, other) * (right @ other_right.mT)).sum((1, 2))
        spread = spread * spread
        lost = _UNIT * (shape[0] + math.prod(shape[1:]) + rows * rows + 16) * spread
        return square.clamp(min=0.0) + lost, spread

    def scaled_sum(self, scales: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum over records of scale times gradient, shape (d,); records of scale 0 are left out."""
        import torch

        device = self._values[0].device
        factors = torch.from_numpy(np.ascontiguousarray(scales)).to(device)
        chosen = torch.from_numpy(np.flatnonzero(scales)).to(device)
        shapes = [one[1] if one[0] == "product" else self._values[one[1]].shape[1:] for one in self._gradients]
        total = factors.new_zeros(sum(map(math.prod, shapes)))
        parts = total.split([math.prod(shape) for shape in shapes])
        for part, shape, (kind, first, *rest) in zip(parts, shapes, self._gradients, strict=True):
            if kind == "written":
                written = self._values[first].reshape(len(scales), -1)
                for i in chosen.tolist():
                    part.add_(written[i].double(), alpha=float(scales[i]))
                continue
            matrix = part.reshape(shape[0], -1)
            for some in self._slices(rest[0], chosen):
                for term in rest[0]:
                    _add_products(matrix, *self._sides(term, some), factors[some])
        return total.cpu().numpy()

    def _slices(self, terms: list[list[Any]], chosen: Any) -> list[Any]:
        """Return some records a few at a time, so that few factors are in float64 together."""
        largest = max(max(map(self._size, term[1:4:2] if term[0] == "matrix" else term[1:3])) for term in terms)
        step = max(_WIDENED_VALUES * len(self._fits) // max(largest, 1), 1)
        if len(chosen) == len(self._fits):  # all of them, without a copy
            return [slice(start, start + step) for start in range(0, len(chosen), step)]
        return list(chosen.split(step)) if len(chosen) else []

    def _size(self, value: int) -> int:
        return self._values[value].numel()

    def _sides(self, term: list[Any], some: Any) -> tuple[Any, Any]:
        """Return both factors of some records, (records, rows, values); on the left perhaps indices of rows."""
        import torch

        kind, *how = term
        if kind == "matrix":
            left, right = self._values[how[0]][some].double(), self._values[how[2]][some].double()
            return left.mT if how[1] else left, right.mT if how[3] else right
        left, right = self._values[how[0]][some], self._values[how[1]][some]
        count = len(left)
        if kind == "indices":
            left = left.reshape(count, -1)
            right = right.double().reshape(count, left.shape[1], -1)
            return left, torch.where((left == how[2])[..., None], 0.0, right)
        kernel, dilation, padding, stride = how[2:]
        inner = right.shape[1]
        patches = torch.ops.aten.im2col(right.double().flatten(0, 1), kernel, dilation, padding, stride)
        patches = patches.unflatten(0, (count, inner)).mT.flatten(1, 2)
        return left.double().flatten(3).mT.flatten(1, 2), patches


def _products(left: Any, other: Any) -> Any:
    """Return the products of rows of two left factors of each record; of two indices, whether they are the same."""
    if left.is_floating_point() and other.is_floating_point():
        return left @ other.mT
    if left.is_floating_point():
        return left.gather(2, other[:, None, :].expand(-1, left.shape[1], -1))
    if other.is_floating_point():
        return _products(other, left).mT
    return (left[:, :, None] == other[:, None, :]).double()


def _add_products(total: Any, left: Any, right: Any, scales: Any) -> None:
    """Add the products of some records to a sum, each times its scale."""
    right = right.flatten(0, 1)
    if left.is_floating_point():
        total.addmm_((left * scales[:, None, None]).flatten(0, 1).mT, right)
        return
    total.index_add_(0, left.flatten(), right * scales.repeat_interleave(left.shape[1])[:, None])


def _has_values(found: Any) -> bool:
    return any(True for _ in _values_in(found))


def _values_in(found: Any) -> list[int]:
    """Return the numbers of the values that a step or an argument uses."""
    if isinstance(found, dict):
        return [found["n"]] if "n" in found else [one for part in found.values() for one in _values_in(part)]
    if isinstance(found, list):
        return [one for part in found for one in _values_in(part)]
    return []


def _plain(tensor: Any) -> NDArray[Any]:
    """Return a tensor as an array: of float32 where NumPy lacks its type."""
    import torch

    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()


_PURE_STABLEHLO = """
    abs add and atan2 batch_norm_grad batch_norm_inference batch_norm_training bitcast_convert broadcast
    broadcast_in_dim case cbrt ceil cholesky clamp compare complex composite concatenate constant convert convolution
    cosine count_leading_zeros divide dot dot_general dynamic_slice dynamic_update_slice exponential
    exponential_minus_one fft floor gather get_tuple_element if imag iota is_finite log log_plus_one logistic map
    maximum minimum multiply negate not optimization_barrier or pad popcnt power real reduce reduce_precision
    reduce_window remainder reshape return reverse rng_bit_generator round_nearest_afz round_nearest_even rsqrt scatter
    select select_and_scatter shift_left shift_right_arithmetic shift_right_logical sign sine slice sort sqrt subtract
    tan tanh torch_index_select transpose triangular_solve tuple while xor
"""
PURE_STABLEHLO = frozenset(
    {"builtin.module", "func.func", "func.call", "func.return"} | {f"stablehlo.{n}" for n in _PURE_STABLEHLO.split()}
)
"""Operations of StableHLO, by their specification functions of their arguments alone, that a program may consist of.

Left out are calls of code outside of the module (``custom_call``), what exchanges values with a host or another device
(``infeed``, ``outfeed``, ``send``, ``recv``, collective operations, tokens), draws at random (``rng``; a
``rng_bit_generator`` is a function of its state) and shapes that depend on values. There is no memory that nobody wrote
to, and an index out of range is moved into it or ignored. Reviewed for StableHLO 1.17, as of JAX 0.10.
"""


class JaxProgram:
    """A module of StableHLO, checked operation by operation and compiled by XLA, without the code it was captured from.

    Parameters
    ----------
    program : mapping
        ``inputs``: shape and type of each parameter, then of each array of a record, then of each constant;
        ``parameters`` and ``record``: how many of them are these; ``results``: shapes and types; ``platform``: JAX's
        name of the kind of device; ``module``: the text of the module, whose entry takes the inputs.
    constants : mapping of str to ndarray
        In the order of the inputs.

    Raises
    ------
    ValueError
        If an operation is not among :data:`PURE_STABLEHLO`.

    Notes
    -----
    **Formal guarantees.** What :meth:`compute` returns is a function of the program, its constants, the parameters and
    one record. What is checked is the module that is compiled next, after JAX has put it together. Assumes that XLA
    computes StableHLO as specified. Proof: docs/proofs/records.md.
    """

    def __init__(self, program: Mapping[str, Any], constants: Mapping[str, NDArray[Any]]) -> None:
        if "jax" not in sys.modules:  # in a process of its own: no other device is looked for
            os.environ["JAX_PLATFORMS"] = program["platform"]
        jax: Any = importlib.import_module("jax")
        self._jax = jax
        self._inputs = [(tuple(shape), jax.numpy.dtype(kind)) for shape, kind in program["inputs"]]
        self.on_device = program["platform"] != "cpu"
        self._parameters: int = program["parameters"]
        self._end = self._parameters + program["record"]
        results = [(tuple(shape), jax.numpy.dtype(kind)) for shape, kind in program["results"]]
        self._is_wide = any(kind.itemsize == 8 for _, kind in [*self._inputs, *results])
        with self._types():
            arrays = [
                _as_type(array, kind)
                for array, (_, kind) in zip(constants.values(), self._inputs[self._end :], strict=True)
            ]
            self._constants = [jax.device_put(array) for array in arrays]
            lowered = self._lowered(program["module"], results, program["platform"])
            check_module(lowered.compiler_ir("stablehlo"))
            self._compiled = lowered.compile()

    def _lowered(self, module: str, results: list[tuple[tuple[int, ...], Any]], platform: str) -> Any:
        """Return the module as JAX will compile it."""
        jax, export = self._jax, importlib.import_module("jax.export")
        stablehlo = importlib.import_module("jaxlib.mlir.dialects.stablehlo")
        inputs = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in self._inputs]

        def zeros(*_: Any) -> list[Any]:
            return [jax.numpy.zeros(shape, kind) for shape, kind in results]

        # Another function of these types, with the module in the place of its own: no format but a text is read.
        made = export.export(jax.jit(zeros, keep_unused=True), platforms=[platform])(*inputs)
        portable = stablehlo.serialize_portable_artifact_str(module, stablehlo.get_current_version())
        made = replace(made, mlir_module_serialized=portable)
        return jax.jit(made.call, keep_unused=True).lower(*inputs)

    def _types(self) -> Any:
        """Return a context in which JAX has types of 64 bits if the program has any."""
        if hasattr(self._jax, "enable_x64"):
            return self._jax.enable_x64(self._is_wide)
        return importlib.import_module("jax.experimental").enable_x64(self._is_wide)

    def point(self, arrays: Sequence[NDArray[Any]]) -> list[Any]:
        """Return parameters as arrays of the captured types."""
        kinds = self._inputs[: self._parameters]
        with self._types():
            return [
                self._jax.device_put(np.asarray(array).astype(kind))
                for array, (_, kind) in zip(arrays, kinds, strict=True)
            ]

    def compute(self, point: list[Any], record: Sequence[NDArray[Any]]) -> Arrays:
        """Return the results for one record.

        Raises
        ------
        UnfitRecordError
            If the record has another shape than captured, or another kind of numbers.
        """
        made = []
        for array, (shape, kind) in zip(record, self._inputs[self._parameters : self._end], strict=True):
            if array.shape != shape:
                raise UnfitRecordError("another shape than captured")
            made.append(exact(array, kind))
        with self._types():
            return [_plain_result(one) for one in self._compiled(*point, *made, *self._constants)]


def check_module(module: Any) -> None:
    """Refuse a module of StableHLO with an operation that is not among the pure ones; ValueError names it."""
    todo = [module.operation]
    while todo:
        operation = todo.pop()
        if operation.name not in PURE_STABLEHLO:
            attributes = operation.attributes
            named = attributes["call_target_name"] if "call_target_name" in attributes else ""  # noqa: SIM401
            raise ValueError(f"the operation {operation.name} {named}".rstrip())
        if operation.name == "stablehlo.while" and not _counts(operation):
            raise ValueError(
                "the operation stablehlo.while without a fixed number of rounds, which runs for as long as a record's "
                "values say"
            )
        for region in operation.regions:
            for block in region:
                todo.extend(one.operation for one in block)


def _counts(loop: Any) -> bool:
    """Return True if a loop counts by one from a constant to another, as ``scan`` does: none may run for good."""
    condition, body = (region.blocks[0] for region in loop.regions)
    end = list(condition.operations)[-1]
    compare = _maker(end.operands[0])
    if _name(compare) != "stablehlo.compare" or " LT" not in str(compare.attributes["comparison_direction"]):
        return False
    counter, limit = compare.operands
    if counter not in list(condition.arguments) or _name(_maker(limit)) != "stablehlo.constant":
        return False
    number = list(condition.arguments).index(counter)
    add = _maker(list(body.operations)[-1].operands[number])
    if _name(_maker(loop.operands[number])) != "stablehlo.constant" or _name(add) != "stablehlo.add":
        return False
    before, step = add.operands
    one = _maker(step)
    is_one = _name(one) == "stablehlo.constant" and str(one.attributes["value"]) in _ONE
    return is_one and before == list(body.arguments)[number]


_ONE = ("dense<1> : tensor<i32>", "dense<1> : tensor<i64>")


def _maker(value: Any) -> Any:
    """Return the operation of which a value is a result, or the block whose argument it is."""
    return getattr(value.owner, "operation", value.owner)


def _name(found: Any) -> str:
    return getattr(found, "name", "")


def exact(array: NDArray[Any], kind: Any) -> NDArray[Any]:
    """Return an array of a record in a program's type.

    Floating-point numbers may be rounded; integers must stay what they are, or UnfitRecordError is raised.
    """
    whole = kind.kind in "iu"
    if array.dtype.kind not in ("iu" if whole else "b" if kind.kind == "b" else "f"):
        raise UnfitRecordError("another type than captured")
    with np.errstate(all="ignore"):
        made = array.astype(kind)
    if whole and not np.array_equal(made, array):
        raise UnfitRecordError("an integer too large for the type")
    return made


def _as_type(array: NDArray[Any], kind: Any) -> NDArray[Any]:
    """Return a constant of a type that NumPy may lack, which came as integers of its width."""
    return array.view(kind) if array.dtype != kind and array.dtype.itemsize == kind.itemsize else array


def _plain_result(found: Any) -> NDArray[Any]:
    made = np.asarray(found)
    return made if made.dtype.kind in "fiub" else made.astype(np.float32)


class FunctionProgram:
    """A project's own function of parameters and one record, called for each record in a copy of this process.

    The process is copied (``fork``) before each record, which only the copy reads, and the copy ends with it. What the
    function leaves in memory is gone with the copy, and so is what reading the record leaves there. A copy can open no
    file and no connection, nor make a file longer.

    Parameters
    ----------
    program : mapping
        ``module``, ``name``, ``path`` and ``file``: where the function is, and what Python's path is; ``source``: the
        SHA-256 of its file; ``names``: what its parameters are called, or null for a list; ``like``: the structure of
        a record; ``results``: shapes of what it returns.
    constants : mapping of str to ndarray
        Public parameters, and a made-up record, with which the function is called once before any record is read.

    Notes
    -----
    **Formal guarantees.** What :meth:`compute` returns is a function of parameters and one record if the function reads
    and changes nothing outside of the copy's memory. That is the promise of its author and of the operator: it could
    still rename or remove files, or signal other processes. Where a system cannot copy a process, the promise covers
    memory as well; where it does not list a process's memory, as Linux does, memory that copies share.
    """

    def __init__(self, program: Mapping[str, Any], constants: Mapping[str, NDArray[Any]]) -> None:
        self._names: list[str] | None = program["names"]
        self._like = program["like"]
        self._results = [tuple(shape) for shape in program["results"]]
        self._function = _function_of(program)
        arrays = list(constants.values())
        count = len(self._results)
        self._made(arrays[:count], arrays[count:])  # imports what it imports when it is called
        if shared := _shared_memory():
            raise ValueError(
                f"memory that is shared with other processes ({shared}): leave out mmap, and values and arrays of "
                "multiprocessing"
            )

    def point(self, arrays: Sequence[NDArray[Any]]) -> Arrays:
        """Return parameters as they are."""
        return list(arrays)

    def compute(self, point: Arrays, record: Sequence[NDArray[Any]]) -> Arrays:
        """Return the results for one record, or raise whatever went wrong."""
        return self._made(point, record)

    def _made(self, point: Arrays, record: Sequence[NDArray[Any]]) -> Arrays:
        parts = iter(np.array(one) for one in record)
        values = [np.array(one) for one in point]
        parameters: Any = values if self._names is None else dict(zip(self._names, values, strict=True))
        inputs, targets = _as_like(self._like, parts)
        with np.errstate(all="ignore"):
            return gradient_arrays(self._function(parameters, inputs, targets), self._names, self._results)


def gradient_arrays(found: Any, names: Sequence[str] | None, shapes: Sequence[tuple[int, ...]]) -> Arrays:
    """Return what a project's function returned as arrays in order; ValueError if it is no gradient."""
    if names is not None:
        if not isinstance(found, Mapping) or set(found) != set(names):
            raise ValueError(f"a gradient that is no mapping of {', '.join(names)}")
        found = [found[name] for name in names]
    made = [np.asarray(one) for one in found]
    if [one.shape for one in made] != list(shapes) or any(one.dtype.kind not in "fiu" for one in made):
        raise ValueError(f"gradients of shapes {[one.shape for one in made]} for parameters of {list(shapes)}")
    return [one.astype(np.float64) for one in made]


def _as_like(like: Any, parts: Iterator[NDArray[Any]]) -> Any:
    """Return arrays in a structure: of lists, of mappings, or one of them."""
    if isinstance(like, dict):
        return {name: _as_like(part, parts) for name, part in like.items()}
    return tuple(_as_like(part, parts) for part in like) if isinstance(like, list) else next(parts)


def _function_of(program: Mapping[str, Any]) -> Callable[..., Any]:
    import hashlib
    import importlib.util

    with open(program["file"], "rb") as file:  # noqa: PTH123 - before pathlib is needed
        if hashlib.sha256(file.read()).hexdigest() != program["source"]:
            raise ValueError(f"another file {program['file']} than when it was imported")
    sys.path[:] = [*program["path"], *(one for one in sys.path if one not in program["path"])]
    if program["module"] == "__main__":  # a script
        spec = importlib.util.spec_from_file_location("murmurfl_own_gradient", program["file"])
        if spec is None or spec.loader is None:
            raise ValueError(f"no code in {program['file']}")
        found: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    else:
        found = importlib.import_module(program["module"])
    for name in program["name"].split("."):
        found = getattr(found, name)
    return found


def _shared_memory() -> str:
    """Return what memory copies of this process could write to for one another; empty if there is none known."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            parts = [line.split(maxsplit=5) for line in file]
    except OSError:
        return ""
    return next((" ".join(one[5:]).strip() or "no name" for one in parts if one[1][1] == "w" and one[1][3] == "s"), "")


def _open_nothing() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


KINDS: dict[str, Callable[[Mapping[str, Any], Mapping[str, NDArray[Any]]], Any]] = {
    "torch": TorchProgram,
    "jax": JaxProgram,
    "function": FunctionProgram,
}
"""Kinds of programs by name."""


def write_message(stream: BinaryIO, header: Mapping[str, Any], arrays: Sequence[NDArray[Any]] = ()) -> None:
    """Write one message."""
    arrays = [np.asarray(array) for array in arrays]  # in the processor's order of bytes, of which names say nothing
    arrays = [np.ascontiguousarray(one, one.dtype.newbyteorder("=")).reshape(one.shape) for one in arrays]
    described = [[array.dtype.name, list(array.shape)] for array in arrays]
    text = json.dumps({**header, "arrays": described}).encode()
    stream.write(struct.pack("<Q", len(text)) + text)
    for array in arrays:
        stream.write(array.reshape(-1).view(np.uint8).data)
    stream.flush()


def read_message(stream: BinaryIO) -> tuple[dict[str, Any], Arrays]:
    """Read one message.

    Raises
    ------
    EOFError
        If the stream ends.
    """
    header = read_header(stream)
    return header, read_arrays(stream, header)


def read_header(stream: BinaryIO) -> dict[str, Any]:
    """Read a message up to its arrays; EOFError if the stream ends."""
    (length,) = struct.unpack("<Q", _read(stream, 8))
    if length > _LONGEST_HEADER:
        raise ValueError("a header that is too long")
    return json.loads(_read(stream, length))


def read_arrays(stream: BinaryIO, header: dict[str, Any]) -> Arrays:
    """Read the arrays of a message, after its header; EOFError if the stream ends."""
    arrays = []
    for kind, shape in header.pop("arrays"):
        array = np.empty(shape, dtype=kind)
        _fill(stream, array.reshape(-1).view(np.uint8).data)
        arrays.append(array)
    return arrays


def _read(stream: BinaryIO, length: int) -> bytes:
    found = bytearray(length)
    _fill(stream, memoryview(found))
    return bytes(found)


def _fill(stream: BinaryIO, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = stream.readinto(into[done:])  # type: ignore[attr-defined]
        if not count:
            raise EOFError
        done += count


_LONGEST_HEADER = 1 << 30
_READ, _BEGUN, _REPLIED = b"r", b"b", b"a"
"""Progress of a copy of the process: it has read a record, begins to reply, has replied."""


class Serving:
    """The loop of the process: programs and parameters that it holds, and its limit of memory."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._programs: dict[str, Any] = {}
        self._kinds: dict[str, Any] = {}
        self._points: dict[tuple[int, str], Any] = {}
        self._arrays: dict[int, Arrays] = {}
        self._batch: SummedBatch | None = None
        self._memory = 0
        self._base = 0

    def answer(self, header: Mapping[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays] | None:
        """Return the reply to a message; None if it has none."""
        if header["do"] == "load":
            return self._load(header, arrays), []
        if header["do"] == "point":
            slot: int = header["slot"]
            self._arrays[slot] = arrays
            self._points = {key: made for key, made in self._points.items() if key[0] != slot}
            return None
        own = {key: header[key] for key in ("ticket",) if key in header}
        try:
            return {"ok": True, **own}, self._DOES[header["do"]](self, header, arrays)
        except UnfitRecordError:
            return {"ok": False, **own}, []
        except BaseException:  # whatever it is, and whatever it says: it may depend on the record
            if any(getattr(program, "on_device", False) for program in self._programs.values()):
                os._exit(1)  # a device that failed once may answer every later record with the same error
            return {"ok": False, **own}, []

    def needs_copy(self, header: Mapping[str, Any]) -> bool:
        """Return True if no record of a request may reach this process, only a copy of it."""
        computes = header["do"] == "compute" and hasattr(os, "fork")
        return computes and isinstance(self._programs[header["name"]], FunctionProgram)

    def answered_by_copy(self, header: dict[str, Any], requests: BinaryIO, replies: BinaryIO) -> bool:
        """Have a copy of this process read a record and reply; False if it stopped halfway: no message can follow."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            self._answer_in_copy(header, requests, replies, writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as stream:
            done = stream.read()
        os.waitpid(child, 0)
        if done == _READ:  # it ended on the way
            write_message(replies, {"ok": False, "ticket": header.get("ticket")})
        return done in (_READ, _READ + _BEGUN + _REPLIED)

    def _answer_in_copy(self, header: dict[str, Any], requests: BinaryIO, replies: BinaryIO, writing: int) -> None:
        """Read a record, reply, and end this copy of the process; say how far it came."""
        try:
            record = read_arrays(requests, header)
            own_replies, progress = os.dup(replies.fileno()), os.dup(writing)
            os.dup2(own_replies, 3)
            os.dup2(progress, 4)
            os.closerange(5, os.sysconf("SC_OPEN_MAX"))
            _open_nothing()
            os.write(4, _READ)
            reply = self.answer(header, record)
            if reply is not None:
                os.write(4, _BEGUN)
                with os.fdopen(3, "wb", closefd=False) as stream:
                    write_message(stream, *reply)
                os.write(4, _REPLIED)
        finally:
            os._exit(0)

    def _load(self, header: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        try:
            kind = KINDS[header["kind"]]
            constants = dict(zip(header["names"], arrays, strict=True))
            self._unlimited()
            self._programs[header["name"]] = kind(header["program"], constants)
            self._set_threads()
            self._limit(header["memory"])
        except BaseException as error:  # before any record
            return {"ok": False, "why": f"{type(error).__name__}: {error}"}
        return {"ok": True}

    def _compute(self, header: Mapping[str, Any], record: Arrays) -> Arrays:
        return self._programs[header["name"]].compute(self._point(header), record)

    def _norms(self, header: Mapping[str, Any], records: Arrays) -> Arrays:
        self._batch = None  # before the next one is made
        program = self._programs[header["name"]]
        batch = program.batch(self._point(header), program.stacked(records))
        self._batch = batch
        return [batch.norms()]

    def _sum(self, header: Mapping[str, Any], scales: Arrays) -> Arrays:
        batch, self._batch = self._batch, None
        if batch is None:
            raise ValueError("a sum of no batch")
        return [batch.scaled_sum(scales[0])]

    def _point(self, header: Mapping[str, Any]) -> Any:
        """Return the parameters of a request as the program has them."""
        key = (header["slot"], header["name"])
        if key not in self._points:
            self._points[key] = self._programs[header["name"]].point(self._arrays[header["slot"]])
        return self._points[key]

    _DOES: ClassVar[Mapping[str, Callable[..., Arrays]]] = {"compute": _compute, "norms": _norms, "sum": _sum}

    def _set_threads(self) -> None:
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(self._threads)

    def _unlimited(self) -> None:
        """Lift the limit while a program is loaded, which may import its framework."""
        if self._base:
            _set_soft_limit(None)

    def _limit(self, memory: int | None) -> None:
        """Limit the address space to what the process has by now and what its programs asked for; None for no limit."""
        self._base = self._base or _address_space()
        self._memory = -1 if memory is None or self._memory < 0 else self._memory + memory
        if self._base and self._memory >= 0:
            _set_soft_limit(self._base + self._memory)


def _address_space() -> int:
    """Return the size of this process's address space in bytes; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - before pathlib is needed
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _set_soft_limit(size: int | None) -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = hard if size is None else size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, even while it computes."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Answer messages until there are no more."""
    parent, threads = map(int, sys.argv[1:])
    _end_with(parent)
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, OSError):
        pass  # a system without core dumps, or one that allows none already
    # Without a buffer, so that a record stays in the pipe until a copy of this process reads it.
    requests, replies = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # what libraries print is no message, and goes nowhere
        os.dup2(nothing, number)
    serving = Serving(threads)
    while True:
        try:
            header = read_header(requests)
            if serving.needs_copy(header):
                if not serving.answered_by_copy(header, requests, replies):
                    return
                continue
            arrays = read_arrays(requests, header)
        except EOFError:
            return
        reply = serving.answer(header, arrays)
        if reply is not None:
            write_message(replies, *reply)


if __name__ == "__main__":
    main()
