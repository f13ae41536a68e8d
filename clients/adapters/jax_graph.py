"""Programs of JAX functions: what one computes for a record, captured on abstract values as a module of StableHLO.

A function is traced by ``jax.make_jaxpr`` for shapes and types alone. What it would compute becomes a module of
StableHLO, a list of operations with a specification, in which loops, branches and functions called are part of the
text. So the whole module is checked (:data:`.replay.PURE_STABLEHLO`), and what is checked is what XLA compiles: there
is no interpreter of ours, and no object of JAX's to be rebuilt from a file, as a list of JAX's primitives would need.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy.errors import ConfigurationError
from .replay import check_module
from .replay_process import Program
from .torch_graph import CaptureError

_OUTSIDE = "calls code outside of the program: compute with JAX's own functions"
_UNFIT = {
    "pure_callback": _OUTSIDE,
    "io_callback": _OUTSIDE,
    "debug_callback": "shows values of records: leave jax.debug out",
    "debug_print": "shows values of records: leave jax.debug out",
    "ffi_call": _OUTSIDE,
    "while": "runs for as long as a record's values say: use jax.lax.scan, or fori_loop with fixed bounds",
}
"""Primitives of JAX that are refused with a remedy; all others by the operations that they become."""
REMEDY = (
    "Compute with jax.numpy and jax.lax, with jax.numpy.where or jax.lax.cond in the place of an `if` on values; or "
    "release whole updates with CorrelatedNoiseMod, with every sample in every release"
)

Compute = Callable[[list[Any], list[Any]], list[Any]]
"""A function of parameters and the arrays of one record that returns arrays."""


def jax_module() -> Any:
    """Return JAX."""
    import jax  # pyright: ignore[reportMissingImports]  # of an extra

    return jax


def refusal(error: CaptureError, what: str = "model and loss") -> ConfigurationError:
    """Return the refusal of what could not be captured."""
    return ConfigurationError(
        f"Expected a {what} that can be captured as pure operations, got {error}. {REMEDY}.", kind="unsupported"
    )


@dataclass(frozen=True)
class Captured:
    """A function for records of one shape and type.

    Notes
    -----
    **Formal guarantees.** Both parts compute a record from the parameters and itself alone: they are made of the same
    steps, which :func:`captured` checked.
    """

    program: Program
    together: Callable[..., list[Any]]
    """The same for several records, stacked, in this process: for simulations."""


def captured(compute: Compute, parameters: Sequence[Any], record: Sequence[Any]) -> Captured:
    """Return what a function computes for one record, from shapes and types alone.

    Parameters
    ----------
    compute : callable
        ``compute(parameters, record)`` gives a list of arrays; traced anew for each of two captures.
    parameters, record : sequence
        Anything with a shape and a type, of which no value is looked at.

    Raises
    ------
    CaptureError
        If steps depend on values, an operation is not pure, or a second capture gives another program.

    Notes
    -----
    **Formal guarantees.** No value of a record reaches the function's code, here or later. Other things that the code
    sees while it is traced may become constants of the program, as a key of ``jax.random`` does: then what is drawn is
    the same for every record. That none of them is private is the author's promise.
    """
    first, second = (_captured(compute, parameters, record) for _ in range(2))
    if first.program.digest != second.program.digest:
        raise CaptureError("another list the second time: it draws at random, or remembers that it was called")
    return first


def as_traced(compute: Compute, parameters: Sequence[Any], record: Sequence[Any]) -> list[Any]:
    """Return what a function's captured steps make of one made-up record, step by step as its own code would."""
    jax = jax_module()
    count = len(parameters)
    inputs = [*parameters, *record]
    traced = _traced(lambda *arrays: compute(list(arrays[:count]), list(arrays[count:])), list(map(_abstract, inputs)))
    return jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *inputs)


def _captured(compute: Compute, parameters: Sequence[Any], record: Sequence[Any]) -> Captured:
    jax = jax_module()
    inputs = [_abstract(one) for one in (*parameters, *record)]
    count = len(parameters)
    traced = _traced(lambda *arrays: compute(list(arrays[:count]), list(arrays[count:])), inputs)
    for name in _primitives(traced.jaxpr):
        if name in _UNFIT:
            raise CaptureError(f"JAX's {name}, which {_UNFIT[name]}")
    if traced.effects:
        raise CaptureError(f"effects, which only values may have: {', '.join(sorted(map(str, traced.effects)))}")
    constants = {f"constant{number}": _plain(value) for number, value in enumerate(traced.consts)}
    inputs += [_abstract(value) for value in traced.consts]
    end = len(inputs) - len(traced.consts)

    def with_constants(*arrays: Any) -> list[Any]:
        return jax.core.eval_jaxpr(traced.jaxpr, arrays[end:], *arrays[:end])

    def of_record(*arrays: Any) -> list[Any]:
        return jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *arrays)

    platform = jax.default_backend()
    content = {
        "inputs": [_described(one) for one in inputs],
        "parameters": count,
        "record": len(record),
        "results": [_described(one) for one in traced.out_avals],
        "platform": platform,
        "module": _module(with_constants, inputs, platform),
    }
    shapes = [(tuple(one.shape), _result_name(one.dtype)) for one in traced.out_avals]
    together = jax.jit(jax.vmap(of_record, in_axes=(None,) * count + (0,) * len(record)))
    return Captured(Program("jax", content, constants, tuple(shapes), None), together)


def _traced(function: Callable[..., list[Any]], inputs: Sequence[Any]) -> Any:
    jax = jax_module()
    try:
        return jax.make_jaxpr(function)(*inputs)
    except (CaptureError, ConfigurationError):
        raise
    except Exception as error:  # a model raises what it likes
        raise CaptureError(_reason(error)) from error


def _module(function: Callable[..., list[Any]], inputs: Sequence[Any], platform: str) -> str:
    """Return the text of a function's module, without places in files; refuse what is not pure."""
    jax = jax_module()
    export = importlib.import_module("jax.export")
    try:
        made = export.export(jax.jit(function, keep_unused=True), platforms=[platform])(*inputs)
        lowered = jax.jit(made.call, keep_unused=True).lower(*inputs)
        check_module(lowered.compiler_ir("stablehlo"))
        return lowered.as_text()
    except Exception as error:  # an operation for which JAX has no code on this platform, or an object of the project's
        outside = re.search(r"custom_call @([\w.]+)", str(error))
        raise CaptureError(f"a call of {outside[1]}" if outside else _reason(error)) from error


def _primitives(jaxpr: Any) -> Iterator[str]:
    """Yield the names of the primitives of a traced function, and of those that it calls."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from _primitives(inner)


def _reason(error: Exception) -> str:
    message = (str(error).strip().splitlines() or [""])[0][:200]
    kind = type(error).__name__
    if kind.startswith(("Tracer", "Concretization", "NonConcrete")):
        return f"one whose steps depend on a record's values, as data-dependent control flow has it ({kind})"
    return f"{kind}: {message}"


def _abstract(found: Any) -> Any:
    jax = jax_module()
    return jax.ShapeDtypeStruct(tuple(np.shape(found)), found.dtype)


def _described(found: Any) -> list[Any]:
    return [list(found.shape), np.dtype(found.dtype).name]


def _result_name(kind: Any) -> str:
    return np.dtype(kind).name if np.dtype(kind).kind in "fiub" else "float32"


def _plain(value: Any) -> NDArray[Any]:
    """Return a constant's values as an array; types that NumPy lacks as integers of their width."""
    try:
        array = np.asarray(value)
    except Exception as error:
        kind = getattr(value, "dtype", type(value).__name__)
        raise CaptureError(f"a constant of the type {kind}: make keys of jax.random within the function") from error
    return np.array(array if array.dtype.kind in "fiubc" else array.view(f"uint{8 * array.dtype.itemsize}"))
