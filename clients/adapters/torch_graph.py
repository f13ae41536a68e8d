"""Programs of PyTorch's own operators: what a model computes for one record, captured without values.

The model's code runs on tensors without values. It cannot keep what it never sees. What it would compute is a list of
operators, checked one by one (:data:`.replay.PURE`); only this list ever meets a record.
"""

from __future__ import annotations

import copy
import math
import operator
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...privacy.errors import ConfigurationError
from .replay import PURE
from .replay_process import Program

if TYPE_CHECKING:
    import torch

_ZEROS = {
    "empty": ("zeros", 1),
    "empty_like": ("zeros_like", 1),
    "new_empty": ("new_zeros", 2),
    "empty_strided": ("zeros", 1),
    "new_empty_strided": ("new_zeros", 2),
    "empty_permuted": ("zeros", 1),
}
"""Operators of memory that nobody wrote to, by the one of zeros in their place and how many arguments it keeps."""

_OF_DEFAULT_TYPE = "arange eye full linspace logspace ones scalar_tensor tril_indices triu_indices zeros"
_FACTORIES = frozenset(_OF_DEFAULT_TYPE.split())
"""Operators whose result has the process's default type unless they name one."""

_SAVED: dict[str, tuple[str, dict[int, int], dict[int, int]]] = {
    "max_pool2d_with_indices_backward": ("max_pool2d_with_indices", {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 5}, {7: 1}),
    "max_pool3d_with_indices_backward": ("max_pool3d_with_indices", {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 5}, {7: 1}),
    "adaptive_max_pool2d_backward": ("adaptive_max_pool2d", {1: 0}, {2: 1}),
    "native_layer_norm_backward": ("native_layer_norm", {1: 0, 2: 1, 5: 2}, {3: 1, 4: 2}),
    "native_group_norm_backward": ("native_group_norm", {1: 0, 4: 1, 5: 3, 6: 4, 7: 5, 8: 6}, {2: 1, 3: 2}),
    "native_batch_norm_backward": ("native_batch_norm", {1: 0, 2: 1, 3: 3, 4: 4, 7: 5}, {5: 1, 6: 2}),
    "_fused_rms_norm_backward": ("_fused_rms_norm", {1: 0, 2: 1, 4: 2}, {3: 1}),
    "nll_loss_backward": ("nll_loss_forward", {1: 0, 2: 1, 4: 3, 5: 4}, {6: 1}),
    "nll_loss2d_backward": ("nll_loss2d_forward", {1: 0, 2: 1, 4: 3, 5: 4}, {6: 1}),
    "_weight_norm_interface_backward": ("_weight_norm_interface", {1: 0, 2: 1, 4: 2}, {3: 1}),
}
"""Backward operators that trust what their forward one saved, whose sizes they do not check: the forward operator,
arguments that both have, and arguments that are results of the forward one. With others they could read memory that is
not theirs."""

_UNCHECKED_SIZES = """
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _log_softmax_backward_data _softmax_backward_data
    _weight_norm_interface avg_pool2d_backward avg_pool3d_backward reflection_pad1d_backward reflection_pad2d_backward
    reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
    unfold_backward
"""
_UNCHECKED = frozenset(_UNCHECKED_SIZES.split())
"""Operators that read or write as much memory as one argument says, where another one may have less.

PyTorch does not check all of their sizes. Found by calls with wrong sizes, next to memory that may not be touched
(tests/clients/adapters/test_fresh_attacks.py has one of each).
"""

_MOVES = """
    _to_copy _unsafe_view alias clone detach expand lift_fresh_copy permute select slice split squeeze t transpose
    unbind unsqueeze view
"""
_SAME_VALUES = frozenset(_MOVES.split())
"""Operators whose results have values of their first argument alone: an index stays an index."""

Path = Callable[..., Any]


class CaptureError(Exception):
    """A model that cannot be captured, or whose program is not pure: the reason, as a part of a sentence."""


INSTEAD_OF_DROPOUT = "leave it out (p=0, or .eval()): clipping and noise keep a model from learning samples by heart"

REMEDY = (
    "Compute with PyTorch's functions on tensors, with torch.where in the place of an `if` on values; or release whole "
    "updates with CorrelatedNoiseMod, with every sample in every release"
)


def captured(
    compute: Path,
    parameters: Sequence[torch.Tensor],
    fixed: Sequence[torch.Tensor],
    record: Sequence[torch.Tensor],
    *,
    gradient: bool = False,
) -> Program:
    """Return ``compute(parameters, fixed, record)`` as a program, from shapes and types of a record alone.

    Parameters
    ----------
    compute : callable
        Function of three lists of tensors, which returns a list of tensors. It is called anew for each of two captures.
    parameters : sequence of Tensor
        What a program is given at each call, before the record.
    fixed : sequence of Tensor
        Frozen parameters and buffers: constants of the program, as they are now.
    record : sequence of Tensor
        The arrays of one record, of which no value is looked at.
    gradient : bool
        Whether results are gradients of the parameters, in order: then those of large models have factors as well
        (:class:`.replay.SummedBatch`).

    Raises
    ------
    CaptureError
        If the steps depend on values, an operator is not pure, or a second capture gives another program.

    Notes
    -----
    **Formal guarantees.** No value of a record reaches the model's code, here or later. Other things that the code sees
    while it is captured may become constants of the program: that none of them is private is the author's promise.
    """
    first, second = (_program(compute, parameters, fixed, record, gradient=gradient) for _ in range(2))
    if first.digest != second.digest:
        raise CaptureError("another list the second time: it draws at random, or remembers that it was called")
    return first


def _program(
    compute: Path, parameters: Sequence[Any], fixed: Sequence[Any], record: Sequence[Any], *, gradient: bool
) -> Program:
    import torch

    for tensor in [*parameters, *fixed, *record]:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout != torch.strided:
            raise CaptureError(f"a parameter or buffer of the type {type(tensor).__name__}")
    blanks = [torch.empty_like(tensor) for tensor in record]  # so that not even a constant can be a record's value
    flat = [tensor.detach() for tensor in [*parameters, *fixed]] + blanks
    middle, end = len(parameters), len(parameters) + len(fixed)

    def call(*tensors: Any) -> list[Any]:
        return compute(list(tensors[:middle]), list(tensors[middle:end]), list(tensors[end:]))

    return _Reading(_traced(call, flat), len(parameters), [one.detach() for one in fixed]).program(gradient=gradient)


def _traced(call: Path, tensors: Sequence[Any]) -> Any:
    """Return the graph of a function, in which every write has become a value or is a write to what was there before.

    Inputs have no values, and neither has anything that is computed from them.
    """
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with plain_setting(captured=True):
            seen = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
            pure = torch.func.functionalize(seen)
            return make_fx(pure, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
    except (CaptureError, ConfigurationError):
        raise
    except Exception as error:  # a model raises what it likes
        raise CaptureError(_reason(error)) from error


@contextmanager
def plain_setting(*, captured: bool = False) -> Iterator[None]:
    """Have PyTorch take the routes whose operators are pure, and transformers none that branches on values.

    What is ``captured`` is split further, into the steps of recurrent layers.
    """
    import torch

    exporting = torch.compiler._is_exporting_flag
    torch.compiler._is_exporting_flag = True  # transformers asks before it looks whether a mask hides anything
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.callback(setattr, torch.compiler, "_is_exporting_flag", exporting)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(_without_looks())
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        if "torch._dynamo" in sys.modules:  # a module that was compiled is captured as it was before
            stack.enter_context(torch._dynamo.config.patch(error_on_nested_fx_trace=False))
        stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
        if captured:
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))  # an LSTM becomes plain steps
        yield


def _reason(error: Exception) -> str:
    message = (str(error).strip().splitlines() or [""])[0][:200].rstrip(".")
    kind = type(error).__name__
    if any(word in f"{kind} {error}" for word in ("DataDependent", "DynamicOutputShape", "control flow", ".item()")):
        return _BRANCHES
    return f"{kind}: {message}"


def _without_looks() -> Any:
    """Return a mode in which ``one_hot`` of a given number of classes does not look at values first."""
    import torch
    from torch.overrides import TorchFunctionMode

    class WithoutLooks(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
            if func is torch.nn.functional.one_hot and classes > 0:
                numbers = args[0] if args else kwargs["tensor"]
                return (numbers.unsqueeze(-1) == torch.arange(classes, device=numbers.device)).to(torch.int64)
            return func(*args, **kwargs)

    return WithoutLooks()


_BRANCHES = "one whose steps depend on a record's values: data-dependent control flow, .item(), or a mask as an index"


class _Reading:
    """Reads a traced graph as a program, and refuses what is not pure."""

    def __init__(self, traced: Any, parameters: int, fixed: Sequence[Any]) -> None:
        traced.graph.eliminate_dead_code()
        self._traced, self._parameters, self._fixed = traced, parameters, fixed
        self._steps: list[list[Any]] = []
        self._at: dict[Any, int] = {}
        self._inputs: list[list[Any]] = []
        self._constants: dict[str, NDArray[Any]] = {}
        self._bounds: dict[int, list[Any]] = {}
        self._memory = 0
        self._placeholders = 0

    def program(self, *, gradient: bool) -> Program:
        """Return the program, with factors of its results if these are gradients of many parameters."""
        results: list[Any] = []
        for node in self._traced.graph.nodes:
            if node.op == "output":
                results = list(node.args[0])
                break
            self._at[node] = len(self._steps)
            self._read(node)
        # Inputs come first, as values of the same numbers.
        content = {
            "inputs": self._inputs,
            "parameters": self._parameters,
            "bounds": {str(number): found for number, found in sorted(self._bounds.items())},
            "steps": [*self._steps, ["results", [self._argument(one) for one in results]]],
        }
        factors = _factors(results, self._at, self._steps) if gradient else None
        if factors is not None:
            content["factors"] = factors
        shapes = [(tuple(one.meta["val"].shape), _plain_name(one.meta["val"].dtype)) for one in results]
        memory = None if any(device != "cpu" for _, _, device in self._inputs) else self._memory
        return Program("torch", content, self._constants, tuple(shapes), memory)

    def _read(self, node: Any) -> None:
        if node.op == "placeholder":
            self._read_input(node)
        elif node.op == "get_attr":
            constant = getattr(self._traced, node.target)
            self._steps.append(self._constant(node.target, constant))
        elif node.target is operator.getitem:
            self._steps.append(["item", {"n": self._at[node.args[0]]}, node.args[1]])
        else:
            self._steps.append(self._call(node))
        self._count(node)

    def _read_input(self, node: Any) -> None:
        """Read a parameter or an array of a record as an input, and a frozen tensor as a constant."""
        number, value = self._placeholders, node.meta["val"]
        self._placeholders += 1
        frozen = number - self._parameters
        if 0 <= frozen < len(self._fixed):
            self._steps.append(self._constant(f"fixed{frozen}", self._fixed[frozen]))
            return
        self._steps.append(["input", len(self._inputs)])
        self._inputs.append([list(value.shape), str(value.dtype), str(value.device)])

    def _constant(self, name: str, tensor: Any) -> list[Any]:
        import torch

        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise CaptureError("a constant that was made while it was captured, and has no values")
        self._constants[name] = _plain_array(tensor)
        return ["constant", name, str(tensor.dtype), str(tensor.device)]

    def _call(self, node: Any) -> list[Any]:
        import torch

        overload, arguments, named = node.target, list(node.args), dict(node.kwargs)
        if not isinstance(overload, torch._ops.OpOverload) or overload.namespace != "aten":
            raise CaptureError(f"the operator {overload}, which is not PyTorch's own")
        name = overload._schema.name.split("::")[1]
        if name in _ZEROS:
            name, kept = _ZEROS[name]
            overload, arguments = getattr(torch.ops.aten, name).default, arguments[:kept]
            named.pop("memory_format", None)
        if overload._schema.is_mutable:
            raise CaptureError(f"the operator {overload}, which writes to {_written(node)}")
        if torch.Tag.nondeterministic_seeded in overload.tags:
            raise CaptureError(f"the operator {overload}, which draws at random: {INSTEAD_OF_DROPOUT}")
        if name == "_local_scalar_dense":
            raise CaptureError(_BRANCHES)
        if name not in PURE:
            raise CaptureError(f"the operator {overload}, which is not among the pure ones")
        if name in _FACTORIES:
            value = node.meta["val"]
            named |= {"dtype": value.dtype, "device": value.device}
        _check_call(node, name)
        self._note_bounds(node, name)
        own = {one: self._argument(value) for one, value in named.items()}
        return ["call", name, overload._overloadname, [self._argument(one) for one in arguments], own]

    def _argument(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.fx.Node):
            return {"n": self._at[value]}
        if isinstance(value, list | tuple):
            return [self._argument(one) for one in value]
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return {"t": str(value)}
        if isinstance(value, torch.device):
            return {"d": str(value)}
        if isinstance(value, float):
            return {"f": value.hex()}
        if value is None or isinstance(value, bool | int | str):
            return value
        raise CaptureError(f"an argument of the type {type(value).__name__}")

    def _note_bounds(self, node: Any, name: str) -> None:
        """Note the range of a record's array that an operator uses as an index."""
        for index, low, high, other in _indices(node, name):
            number = self._record_array(index)
            if number is None:
                continue
            known = self._bounds.get(number, [low, high, other])
            others = {known[2], other}
            self._bounds[number] = [
                max(known[0], low),
                min(known[1], high),
                others.pop() if len(others) == 1 else None,
            ]

    def _record_array(self, node: Any) -> int | None:
        """Return which of a record's arrays a value consists of, if it is of one."""
        while node.op != "placeholder":
            if node.target is operator.getitem:
                node = node.args[0]
                continue
            overload = getattr(node.target, "_schema", None)
            if (
                overload is None
                or overload.name.split("::")[1] not in _SAME_VALUES
                or overload.overload_name == "dtype"
            ):
                return None
            node = node.args[0]
            if node.meta["val"].dtype.is_floating_point:  # whose conversion to an index rounds
                return None
        step = self._steps[self._at[node]]
        number = step[1] - self._parameters if step[0] == "input" else -1
        return number if number >= 0 else None

    def _count(self, node: Any) -> None:
        for value in _tensors(node.meta.get("val")):
            self._memory += value.numel() * value.element_size()


LEAST_SUMMED = 1 << 19
"""Models of fewer parameters have no factors: their gradients are written out, and summed with the bits they had."""

_MOST_TERMS = 1 << 12
"""The most rows of factors of one record."""


def _factors(results: Sequence[Any], at: Mapping[Any, int], steps: Sequence[list[Any]]) -> dict[str, Any] | None:
    """Return how the gradients of a large model are made of factors; None where factors save nothing.

    It follows from shapes and operators alone. A gradient is taken apart where it is a product of matrices (of a linear
    layer), a sum into rows (of an embedding) or a convolution of patches, or a sum of these as for tied weights, and
    its factors have fewer values than itself.
    """
    import torch

    values = [one.meta["val"] for one in results]
    if sum(one.numel() for one in values) < LEAST_SUMMED or any(one.dtype != torch.float32 for one in values):
        return None
    used: list[Any] = []
    replaced: dict[str, list[Any]] = {}

    def number(node: Any) -> Any:
        if not hasattr(node, "op"):
            return node
        if node not in used:
            used.append(node)
        return used.index(node)

    gradients: list[list[Any]] = []
    most = 0
    for node, value in zip(results, values, strict=True):
        terms = _terms(node, turned=False) or []
        rows, kept = sum(term.rows for term in terms), sum(term.rows * term.size for term in terms)
        if not terms or kept >= value.numel() or rows > _MOST_TERMS:
            gradients.append(["written", number(node)])
            continue
        most = max(most, rows)
        gradients.append(["product", list(value.shape), [[term.kind, *map(number, term.how)] for term in terms]])
        for call in (term.call for term in terms if term.call is not None):
            replaced[str(at[call])] = _without_weight(steps[at[call]])
    if most == 0:
        return None
    return {
        "gradients": gradients, "values": [{"n": at[node]} for node in used], "replaced": replaced, "rows": most,
    }  # fmt: skip


class _Term(NamedTuple):
    """A product that is a part of a gradient: a sum over rows of two factors, of which ``size`` is the values in both.

    ``how`` are the nodes and constants that :class:`.replay.SummedBatch` makes factors from.
    """

    kind: str
    how: list[Any]
    rows: int
    size: int
    call: Any = None
    """The step that computes the product, where it computes more than that."""


def _terms(node: Any, *, turned: bool) -> list[_Term] | None:
    """Return the products that a gradient is a sum of; None if it is made in another way."""
    import torch

    node, turned = _unturned(node, turned)
    target, arguments = node.target, node.args
    if target is torch.ops.aten.add.Tensor and not node.kwargs and all(hasattr(one, "op") for one in arguments):
        parts = [_terms(one, turned=turned) for one in arguments]
        is_sum = len({one.meta["val"].shape for one in arguments}) == 1  # of two matrices, and nothing is repeated
        return [term for part in parts for term in part or ()] if is_sum and all(parts) else None
    if target is torch.ops.aten.mm.default:
        (left, right), (high, rows), wide = arguments, arguments[0].meta["val"].shape, arguments[1].meta["val"].shape[1]
        # W = X Y has the factors X^T and Y, and its transpose Y^T X^T those of Y and X^T.
        how = [right, False, left, True] if turned else [left, True, right, False]
        return [_Term("matrix", how, rows, high + wide)]
    if target is torch.ops.aten.embedding_dense_backward.default and not turned and not arguments[4]:
        gradient, indices = (argument.meta["val"] for argument in arguments[:2])
        how = [arguments[1], arguments[0], arguments[3]]
        return [_Term("indices", how, indices.numel(), 1 + gradient.shape[-1])]
    return None if turned else _patches(node)


def _patches(node: Any) -> list[_Term] | None:
    """Return the gradient of an ordinary convolution's weight as a product; None for anything else."""
    import torch

    if node.target is not operator.getitem or node.args[1] != 1:
        return None
    call = node.args[0]
    if call.target is not torch.ops.aten.convolution_backward.default:
        return None
    gradient, inputs, weight, _, stride, padding, dilation, is_transposed, _, groups, _ = call.args
    made, given, shape = (one.meta["val"].shape for one in (gradient, inputs, weight))
    if is_transposed or groups != 1 or len(given) != 4:
        return None
    how = [gradient, inputs, list(shape[2:]), list(dilation), list(padding), list(stride)]
    return [_Term("patches", how, made[0] * math.prod(made[2:]), shape[0] + math.prod(shape[1:]), call)]


def _without_weight(step: list[Any]) -> list[Any]:
    """Return a step that computes the gradients of a convolution without that of its weight."""
    what, name, overload, arguments, named = step
    of_inputs, _, of_bias = arguments[-1]
    return [what, name, overload, [*arguments[:-1], [of_inputs, False, of_bias]], named]


def _unturned(node: Any, turned: bool) -> tuple[Any, bool]:
    """Return what a matrix has its values from, and whether it is turned over on the way."""
    import torch

    aten = torch.ops.aten
    same = (aten.detach.default, aten.alias.default, aten.clone.default)
    while node.op == "call_function":
        value = node.meta["val"]
        target, arguments = node.target, node.args
        reshaped = target in (aten.view.default, aten._unsafe_view.default)
        if target in same or (reshaped and value.shape == arguments[0].meta["val"].shape):
            node = arguments[0]
        elif isinstance(value, torch.Tensor) and value.ndim == 2 and _turns(target, arguments):
            node, turned = arguments[0], not turned
        else:
            break
    return node, turned


def _turns(target: Any, arguments: Sequence[Any]) -> bool:
    """Return True if an operator turns a matrix over."""
    import torch

    aten = torch.ops.aten
    if target is aten.transpose.int:
        return {one % 2 for one in arguments[1:]} == {0, 1}
    return target is aten.t.default or (target is aten.permute.default and [one % 2 for one in arguments[1]] == [1, 0])


def _tensors(value: Any) -> list[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    return [one for part in value for one in _tensors(part)] if isinstance(value, list | tuple) else []


def _check_call(node: Any, name: str) -> None:
    """Refuse pure operators with arguments that make them read or write more than they should."""
    import torch

    if name == "native_batch_norm":
        values, *others, training = node.args[:6]
        if training and others[2] is not None:
            raise CaptureError("batch normalisation that writes its statistics: call .eval(), or use GroupNorm")
        sizes = {tuple(one.meta["val"].shape) for one in others if one is not None}
        if sizes - {(values.meta["val"].shape[1],)}:
            raise CaptureError("batch normalisation with statistics of another size than its channels")
    if name in ("index", "index_put"):
        for one in node.args[1]:
            if one is not None and one.meta["val"].dtype not in (torch.int64, torch.int32):
                raise CaptureError(_BRANCHES)
    if name == "embedding_dense_backward" and node.args[4]:
        raise CaptureError(f"the operator {name} with scale_grad_by_freq, which counts at any index that it is given")
    if name in _SAVED:
        _check_saved(node, name)
    if name in _UNCHECKED:
        _check_sizes(node, name)


def _check_sizes(node: Any, name: str) -> None:
    """Refuse an operator of which an argument has another size than the others say."""
    import torch
    from torch.fx.node import map_arg

    first, second, *rest = map_arg(node.args, lambda one: one.meta["val"])
    aten, place = torch.ops.aten, 0
    if name == "_weight_norm_interface":
        expected, place = torch.norm_except_dim(first, 2, *rest).shape, 1
    elif name in ("_log_softmax_backward_data", "_softmax_backward_data"):
        expected = second.shape
    elif name == "unfold_backward":
        expected = first.new_empty(second).unfold(*rest).shape
    elif name.startswith("_adaptive_avg_pool"):
        kept = second.ndim - (2 if "2d" in name else 3)
        expected = second.shape[:kept] + first.shape[kept:]
    else:
        expected = getattr(aten, name.removesuffix("_backward"))(second, *rest).shape
    found = (first, second)[place].shape
    if found != expected:
        raise CaptureError(f"the operator {name} with an argument of {tuple(found)} in the place of {tuple(expected)}")


def _check_saved(node: Any, name: str) -> None:
    """Refuse a backward operator that does not belong to its forward one."""
    forward_name, common, saved = _SAVED[name]
    wrong = CaptureError(f"the operator {name} with other arguments than {forward_name} gives it")
    forward = None
    for place, item in saved.items():
        found = node.args[place]
        if found is None:
            continue
        found = _undetached(found)
        if found.target is not operator.getitem or found.args[1] != item:
            raise wrong
        if forward is not None and forward is not found.args[0]:
            raise wrong
        forward = found.args[0]
    schema = getattr(getattr(forward, "target", None), "_schema", None)
    if forward is None or schema is None or schema.name != f"aten::{forward_name}":
        raise wrong
    for place, other in common.items():
        defaults = schema.arguments[other].default_value
        theirs = forward.args[other] if len(forward.args) > other else defaults
        if not _is_same(node.args[place], theirs):
            raise wrong
    if node.args[0].meta["val"].shape != forward.meta["val"][0].shape:
        raise wrong


def _undetached(node: Any) -> Any:
    while node.op == "call_function" and str(node.target) in ("aten.detach.default", "aten.alias.default"):
        node = node.args[0]
    return node


def _is_same(one: Any, other: Any) -> bool:
    if hasattr(one, "op") and hasattr(other, "op"):
        return _undetached(one) is _undetached(other)
    return one == other if not isinstance(one, list | tuple) else list(one) == list(other)


def _indices(node: Any, name: str) -> Iterator[tuple[Any, int, int, int | None]]:
    """Yield what an operator uses as an index: the lowest value, the first too large one, and one that is ignored."""
    arguments = node.args
    if name in ("nll_loss_forward", "nll_loss2d_forward"):
        yield arguments[1], 0, arguments[0].meta["val"].shape[-1 if name == "nll_loss_forward" else 1], arguments[4]
    elif name == "embedding":
        yield arguments[1], 0, arguments[0].meta["val"].shape[0], None
    elif name == "embedding_dense_backward":
        yield arguments[1], 0, arguments[2], None
    elif name in ("gather", "scatter", "scatter_add", "scatter_reduce", "index_select"):
        value = arguments[0].meta["val"]
        yield arguments[2], 0, value.shape[arguments[1]] if value.ndim else 1, None
    elif name in ("index", "index_put"):
        for place, one in enumerate(arguments[1]):
            if one is not None:
                size = arguments[0].meta["val"].shape[place]
                yield one, -size, size, None


def _written(node: Any) -> str:
    target = _undetached(node.args[0]) if node.args and hasattr(node.args[0], "op") else None
    if target is None or target.op == "get_attr":
        return "a tensor of its own"
    return "its parameters, buffers or the record" if target.op == "placeholder" else "a tensor"


def _plain_name(kind: Any) -> str:
    """Return the name of NumPy's type of results."""
    name = str(kind).removeprefix("torch.")
    return "float32" if name == "bfloat16" else name


def _plain_array(tensor: Any) -> NDArray[Any]:
    """Return a tensor's values as an array; bfloat16 as integers of its width."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    return np.array((tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy())


class RecordPrograms:
    """Programs of one function of a module, by the shapes and types of a record.

    Parameters
    ----------
    compute : callable
        ``compute(held, parameters, inputs, targets)`` returns a list of tensors from parameters, trained and fixed, by
        name, and one record; ``held`` is a copy of ``held`` for each capture.
    module : Module
    trained : sequence of str
        Names of the parameters that a program is given.
    held : object
        Everything that the function calls: the module, and a loss or something else.
    what : str
        Its name: "gradient", say.
    gradient : bool
        Whether it returns gradients of the parameters that a program is given, in their order.
    """

    def __init__(
        self,
        compute: Callable[[Any, dict[str, Any], Any, Any], list[Any]],
        module: torch.nn.Module,
        trained: Sequence[str],
        held: Any,
        what: str = "gradient",
        *,
        gradient: bool = False,
    ) -> None:
        self.what, self._gradient = what, gradient
        self._compute, self._module, self._trained, self._held = compute, module, list(trained), held
        self._programs: dict[Hashable, Program] = {}

    @property
    def programs(self) -> list[Program]:
        """The programs so far."""
        return list(self._programs.values())

    def known(self, looks: Hashable) -> Program | None:
        """Return the program for records of some looks (:func:`looks_of`); None if none was captured."""
        return self._programs.get(looks)

    def program(self, inputs: Any, targets: Any) -> Program:
        """Return the program for records like one, of whose tensors only shapes and types are looked at.

        Raises
        ------
        ConfigurationError
            If it cannot be captured.
        """
        looks = looks_of(inputs, targets)
        if looks not in self._programs:
            try:
                self._programs[looks] = self._captured(inputs, targets)
            except CaptureError as error:
                raise _refusal(error, self.what) from error
        return self._programs[looks]

    def _captured(self, inputs: Any, targets: Any) -> Program:
        named = dict([*self._module.named_parameters(), *self._module.named_buffers()])
        fixed = [name for name in named if name not in self._trained]

        def compute(parameters: list[Any], constants: list[Any], record: list[Any]) -> list[Any]:
            values = dict(zip([*self._trained, *fixed], [*parameters, *constants], strict=True))
            parts = iter(record)
            own_inputs, own_targets = (mapped(one, lambda _: next(parts)) for one in (inputs, targets))
            return self._compute(copied(self._held), values, own_inputs, own_targets)

        trained = [named[name] for name in self._trained]
        constants, record = [named[name] for name in fixed], leaves((inputs, targets))
        return captured(compute, trained, constants, record, gradient=self._gradient)


def _refusal(error: CaptureError, what: str) -> ConfigurationError:
    """Return the refusal of what could not be captured."""
    return ConfigurationError(
        f"Expected a model whose {what} can be captured as a list of PyTorch's pure operators, got {error}. {REMEDY}.",
        kind="unsupported",
    )


def looks_of(inputs: Any, targets: Any) -> Hashable:
    """Return what one record of tensors or arrays looks like: its structure, shapes and types."""

    def look(found: Any) -> Hashable:
        if isinstance(found, Mapping):
            return tuple((name, look(part)) for name, part in found.items())
        if isinstance(found, tuple | list):
            return tuple(map(look, found))
        return tuple(found.shape), str(found.dtype).removeprefix("torch.")

    return look((inputs, targets))


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


def copied(found: Any) -> Any:
    """Return a copy of a module and what goes with it, so that a capture changes neither; itself if it has none."""
    try:
        return copy.deepcopy(found)
    except Exception:  # a user's object raises what it likes; then the second capture sees what the first one left
        return found
