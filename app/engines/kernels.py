"""Loops over the values of a block of releases: the same integers as NumPy's, in one pass where it takes nine.

Importing this file needs numba (the extra ``compiled``), which compiles the loops. :mod:`.native` keeps their native
code, and calls it without this file and without numba.

The loops work on contiguous memory: all arrays are pointers. Rows are clients, of whom there are ``rows``, each with
``size`` values. ``start`` is the first of the ``columns`` that a call is about, and ``made`` has the counts of all
values. ``normals`` are of these columns alone, ``width`` in a row. Nothing is compiled with ``fastmath``, so everything
is rounded as in NumPy, to which tests/app/engines/test_compiled.py holds it.
"""

# numba has no types of its own that a checker could read.
# pyright: reportMissingTypeStubs=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import cfunc, types
from numba.extending import intrinsic

from ...privacy.noise import MARK as _MARK
from ...privacy.noise import ROUNDER as _ROUNDER

MARK, ROUNDER = int(_MARK), float(_ROUNDER)


def _generated(_: Any, value: Any) -> Any:  # noqa: ARG001 - numba calls it with the types of its arguments
    """Return the bits of a float64 as an integer."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.int64))

    return types.int64(types.float64), generate


_bits: Any = intrinsic(_generated)


# Adding ROUNDER rounds to the nearest integer and leaves it in the low bits (`Grid.marked`), too large by MARK.


def cancelling(normals, width, rows, start, columns, size, factors, before, again, table, places, made):
    """Write what noise adds and removes.

    ``table`` has each client's last normals in row ``places``, if ``again`` says so, and then the new ones. ``factors``
    and ``before`` bring new and last normals to counts.
    """
    for row in range(rows):
        factor, factor_before = factors[row], before[row]
        fresh, out, last = row * width, row * size + start, places[row] * size + start
        if again[row] != 0:
            for i in range(columns):
                added = _bits(np.float64(normals[fresh + i]) * factor + ROUNDER)
                made[out + i] = added - _bits(np.float64(table[last + i]) * factor_before + ROUNDER)
                table[last + i] = normals[fresh + i]
        else:
            for i in range(columns):
                made[out + i] = _bits(np.float64(normals[fresh + i]) * factor + ROUNDER) - MARK
                table[last + i] = normals[fresh + i]


def decaying(normals, width, rows, start, columns, size, scale, weight, again, table, places, made):
    """Write noise to which the last row, times ``weight``, is added; the rest is as for :func:`cancelling`.

    ``scale`` and ``weight`` are of the normals' type, in which NumPy multiplies and adds them.
    """
    for row in range(rows):
        fresh, out, last = row * width, row * size + start, places[row] * size + start
        if again[row] != 0:
            for i in range(columns):
                value = normals[fresh + i] * scale + (table[last + i] * scale) * weight
                made[out + i] = _bits(np.float64(value) + ROUNDER) - MARK
                table[last + i] = normals[fresh + i]
        else:
            for i in range(columns):
                made[out + i] = _bits(np.float64(normals[fresh + i] * scale) + ROUNDER) - MARK
                table[last + i] = normals[fresh + i]


def independent(normals, width, rows, start, columns, size, factors, made):
    """Write noise that has nothing to do with earlier noise."""
    for row in range(rows):
        factor, fresh, out = factors[row], row * width, row * size + start
        for i in range(columns):
            made[out + i] = _bits(np.float64(normals[fresh + i]) * factor + ROUNDER) - MARK


def buffered(normals, start, columns, size, scale, buffers, omegas, thetas, states, after, values, made):
    """Write the BLT noise of one client.

    ``states`` points to its ``buffers``, and ``after`` has a row for each of the next ones. ``scale``, ``omegas`` and
    ``thetas`` are of the normals' type, and so are ``values``, which have room for a row.
    """
    for i in range(columns):
        values[i] = normals[i] * scale
    for k in range(buffers):
        state, omega = states[k], omegas[k]
        for i in range(columns):
            values[i] -= state[start + i] * omega
    for k in range(buffers):
        state, theta, then = states[k], thetas[k], k * size + start
        for i in range(columns):
            after[then + i] = state[start + i] * theta + values[i]
    for i in range(columns):
        made[start + i] = _bits(np.float64(values[i]) + ROUNDER) - MARK


def add_outer(residuals, classes, features, inputs, share, rows, start, columns, size, made, total):
    """Add outer products to counts, and the counts to ``total``; each client has ``share`` rows, one after the other.

    ``residuals`` are in units of the grid. Columns behind the products with the ``inputs`` of a row are the residuals
    themselves.
    """
    stop = start + columns
    for row in range(rows):
        out = row * size
        for sample in range(row * share, (row + 1) * share):
            for c in range(classes):
                first, residual = c * inputs, residuals[sample * classes + c]
                low, high = max(first, start), min(first + inputs, stop)
                values = sample * inputs + low - first
                for i in range(high - low):
                    made[out + low + i] += _bits(residual * features[values + i] + ROUNDER) - MARK
                i = classes * inputs + c
                if start <= i < stop:
                    made[out + i] += _bits(residual + ROUNDER) - MARK
        for i in range(start, stop):
            total[i] += made[out + i]


def add_dense(values, factors, share, rows, start, columns, size, made, total):
    """Add rows times their factors, which are of the rows' type, to counts; the rest is as for :func:`add_outer`."""
    for row in range(rows):
        out = row * size + start
        for sample in range(row * share, (row + 1) * share):
            factor, first = factors[sample], sample * size + start
            for i in range(columns):
                made[out + i] += _bits(np.float64(values[first + i] * factor) + ROUNDER) - MARK
        for i in range(columns):
            total[start + i] += made[out + i]


# Normals of ``fast`` quality (`fast_pairs`) in one pass instead of eleven. No standard says how a sine, a cosine and a
# logarithm of float32 are rounded. So these are the operations of NumPy's loops for x86 (numpy/_core/src/umath,
# loops_exponent_log and loops_trigonometric, BSD-3-Clause): the same constants, in the same order, with the same fused
# products. Where NumPy has other loops, `equals_numpy` finds it, and NumPy makes the normals.

_SINGLE, _TWO_SINGLES = types.float32, types.UniTuple(types.float32, 2)
_I32, _F32 = ir.IntType(32), ir.FloatType()


def _generated_fused(_: Any, a: Any, b: Any, c: Any) -> Any:  # noqa: ARG001 - as above
    """Return a b + c, rounded once."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return _SINGLE(_SINGLE, _SINGLE, _SINGLE), generate


def _generated_parts(_: Any, value: Any) -> Any:  # noqa: ARG001 - as above
    """Return the exponent and the mantissa, at least 1/2 and below 1, of a positive normal number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], _I32)
        exponent = builder.sitofp(builder.sub(builder.lshr(bits, _I32(23)), _I32(126)), _F32)
        mantissa = builder.bitcast(builder.or_(builder.and_(bits, _I32(0x7FFFFF)), _I32(126 << 23)), _F32)
        return context.make_tuple(builder, signature.return_type, (exponent, mantissa))

    return _TWO_SINGLES(_SINGLE), generate


def _generated_turned(_: Any, sine: Any, cosine: Any, quarters: Any) -> Any:  # noqa: ARG001 - as above
    """Return sine and cosine of an angle so many quarters of a turn further; their number is in the low bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sine, cosine, quarters = arguments
        first = builder.bitcast(quarters, _I32)
        turned = []
        for turn in (first, builder.add(first, _I32(1))):
            even = builder.icmp_signed("==", builder.and_(turn, _I32(1)), _I32(0))
            negative = builder.icmp_signed("!=", builder.and_(turn, _I32(2)), _I32(0))
            chosen = builder.select(even, sine, cosine)
            turned.append(builder.select(negative, builder.fsub(_F32(0.0), chosen), chosen))
        return context.make_tuple(builder, signature.return_type, turned)

    return _TWO_SINGLES(_SINGLE, _SINGLE, _SINGLE), generate


def _generated_root(_: Any, value: Any) -> Any:  # noqa: ARG001 - as above
    """Return the square root as an instruction, not as a call of the C library's."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.sqrt", [_F32]), arguments)

    return _SINGLE(_SINGLE), generate


_fused: Any = intrinsic(_generated_fused)
_root: Any = intrinsic(_generated_root)
_parts: Any = intrinsic(_generated_parts)
_turned: Any = intrinsic(_generated_turned)

_f = np.float32
_ZERO, _HALF, _ONE, _MINUS_TWO = _f(0.0), _f(0.5), _f(1.0), _f(-2.0)
_UNIT, _TURN = _f(2.0**-32), _f(2 * math.pi * 2.0**-32)
_ROOT_HALF, _LN_2, _TWO_OVER_PI = _f(math.sqrt(0.5)), _f(math.log(2.0)), _f(2.0 / math.pi)
# ln(1 + x) is a quotient of polynomials of degree 5.
_P1, _P2, _P3 = _f(1.0), _f(2.112677543073053063722), _f(1.480000633576506585156)
_P4, _P5 = _f(0.3808837741388407920751), _f(0.02589979117907922693523)
_Q1, _Q2, _Q3 = _f(2.612677543073109236779), _f(2.453006071784736363091), _f(0.9864942958519418960339)
_Q4, _Q5 = _f(0.1546476374983906719538), _f(0.005875095403124574342950)
# -pi / 2 in three parts, and the number whose low bits count quarters of a turn.
_HIGH, _MIDDLE, _LOW = (_f(float.fromhex(part)) for part in ("-0x1.921fb0p+0", "-0x1.5110b4p-22", "-0x1.846988p-48"))
_QUARTERS = _f(1.5 * 2.0**23)
_C2, _C4 = _f(-0.5), _f(float.fromhex("0x1.55553cp-5"))
_C6, _C8 = _f(float.fromhex("-0x1.6c06dcp-10")), _f(float.fromhex("0x1.98e616p-16"))
_S3, _S5 = _f(float.fromhex("-0x1.555556p-3")), _f(float.fromhex("0x1.11119ap-7"))
_S7, _S9 = _f(float.fromhex("-0x1.a06bbap-13")), _f(float.fromhex("0x1.7d3bbcp-19"))


def word_pairs(normals, words, rows, pairs):
    """Write the normals that `fast_pairs` makes of words of 32 bits; both have shape (rows, 2 pairs)."""
    for row in range(rows):
        cosines = 2 * row * pairs
        sines = cosines + pairs
        for i in range(pairs):
            exponent, x = _parts((_f(words[cosines + i]) + _HALF) * _UNIT)
            small = x <= _ROOT_HALF
            x = x + x if small else x
            exponent = exponent - _ONE if small else exponent
            x = x - _ONE
            above = _fused(_fused(_fused(_fused(_P5, x, _P4), x, _P3), x, _P2), x, _P1)
            below = _fused(_fused(_fused(_fused(_Q5, x, _Q4), x, _Q3), x, _Q2), x, _Q1)
            quotient = _fused(above, x, _ZERO) / _fused(below, x, _ONE)
            radius = _root(_fused(exponent, _LN_2, quotient) * _MINUS_TWO)
            angle = _f(words[sines + i]) * _TURN
            marked = _fused(angle, _TWO_OVER_PI, _QUARTERS)
            quarters = marked - _QUARTERS
            x = _fused(quarters, _LOW, _fused(quarters, _MIDDLE, _fused(quarters, _HIGH, angle)))
            square = x * x
            cosine = _fused(_fused(_fused(_fused(_C8, square, _C6), square, _C4), square, _C2), square, _ONE)
            sine = _fused(_fused(_fused(_fused(_S9, square, _S7), square, _S5), square, _S3), square, _ZERO)
            sine, cosine = _turned(_fused(sine, x, x), cosine, marked)
            normals[cosines + i] = cosine * radius
            normals[sines + i] = sine * radius


_TYPES = {"n": types.int64, "d": types.CPointer(types.float64), "q": types.CPointer(types.int64)}
_TYPES |= {"b": types.CPointer(types.uint8), "w": types.CPointer(types.uint32)}


def compiled(loop: str, letters: str, kind: str) -> Any:
    """Return a loop for values of type ``kind``, compiled; ``letters`` are those of :data:`.native.ARGUMENTS`."""
    real = types.float32 if kind == "float32" else types.float64
    kinds = {**_TYPES, "s": real, "r": types.CPointer(real), "p": types.CPointer(types.CPointer(real))}
    return cfunc(types.void(*map(kinds.__getitem__, letters)), error_model="numpy")(globals()[loop])


def native_code(compiled_loop: Any, name: str) -> bytes | None:
    """Return an object file for this computer with a compiled loop under a name; None if it needs other code."""
    module = binding.parse_assembly(compiled_loop.inspect_llvm())
    for function in module.functions:
        if function.name == compiled_loop.native_name:
            function.name = name
        elif not function.is_declaration:
            # What numba has around a loop is for errors: in one piece with it, it turns out that there are none.
            function.linkage = "internal"
            function.add_function_attribute("alwaysinline")
    processor, features = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    kind = binding.Target.from_default_triple()
    target = kind.create_target_machine(cpu=processor, features=features, opt=3, reloc="pic")
    builder = binding.create_pass_builder(target, binding.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    needed = {one.name for one in module.functions if one.is_declaration and not one.name.startswith("llvm.")}
    alone = needed <= {"memcpy", "memmove", "memset"} and sys.platform != "win32"  # which has other object files
    return target.emit_object(module) if alone else None
