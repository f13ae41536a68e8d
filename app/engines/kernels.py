"""Compiled loops over the values of a block of releases: the same integers as NumPy's, in one pass where it takes nine.

Importing this file needs numba (the extra ``compiled``). Native code is kept beside the file, or in the user's cache
folder, and read by later processes; where neither can be written it is compiled in every process.

All arrays are contiguous. Rows are clients. ``start`` is the first of the columns that a call is about, and ``made``
their counts from there on, shape (rows, columns), with int64 entries. Nothing is compiled with ``fastmath``, so
everything is rounded as in NumPy, to which tests/app/engines/test_compiled.py holds it.
"""

# numba has no types of its own that a checker could read.
# pyright: reportMissingTypeStubs=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ...privacy.noise import MARK as _MARK
from ...privacy.noise import ROUNDER as _ROUNDER
from ...privacy.noise import fast_pairs

MARK, ROUNDER = int(_MARK), float(_ROUNDER)


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a function at its first call, or read its native code from the cache."""
    try:
        return njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # no folder for the cache
        return njit(error_model="numpy")(function)


def _generated(_: Any, value: Any) -> Any:  # noqa: ARG001 - numba calls it with the types of its arguments
    """Return the bits of a float64 as an integer."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.int64))

    return types.int64(types.float64), generate


_bits: Any = intrinsic(_generated)


# Adding ROUNDER rounds to the nearest integer and leaves it in the low bits (`Grid.marked`), too large by MARK.


@compiled
def cancelling(normals, start, factors, before, again, table, places, made):
    """Write what noise adds and removes.

    ``table`` has each client's last normals in row ``places``, if ``again`` says so, and then the new ones. ``factors``
    and ``before`` bring new and last normals to counts.
    """
    for row in range(made.shape[0]):
        factor, factor_before = factors[row], before[row]
        fresh, out = normals[row], made[row]
        last = table[places[row], start : start + out.size]
        if again[row]:
            for i in range(out.size):
                added = _bits(np.float64(fresh[i]) * factor + ROUNDER)
                out[i] = added - _bits(np.float64(last[i]) * factor_before + ROUNDER)
                last[i] = fresh[i]
        else:
            for i in range(out.size):
                out[i] = _bits(np.float64(fresh[i]) * factor + ROUNDER) - MARK
                last[i] = fresh[i]


@compiled
def decaying(normals, start, scale, weight, again, table, places, made):
    """Write noise to which the last row, times ``weight``, is added; the rest is as for :func:`cancelling`.

    ``scale`` and ``weight`` are of the normals' type, in which NumPy multiplies and adds them.
    """
    for row in range(made.shape[0]):
        fresh, out = normals[row], made[row]
        last = table[places[row], start : start + out.size]
        if again[row]:
            for i in range(out.size):
                value = fresh[i] * scale + (last[i] * scale) * weight
                out[i] = _bits(np.float64(value) + ROUNDER) - MARK
                last[i] = fresh[i]
        else:
            for i in range(out.size):
                out[i] = _bits(np.float64(fresh[i] * scale) + ROUNDER) - MARK
                last[i] = fresh[i]


@compiled
def independent(normals, factors, made):
    """Write noise that has nothing to do with earlier noise."""
    for row in range(made.shape[0]):
        factor, fresh, out = factors[row], normals[row], made[row]
        for i in range(out.size):
            out[i] = _bits(np.float64(fresh[i]) * factor + ROUNDER) - MARK


@compiled
def buffered(normals, start, scale, omegas, thetas, states, after, made):
    """Write the BLT noise of one client: ``normals`` and ``made`` have one row.

    ``states`` is a tuple of its buffers, and ``after`` has a row for each of the next ones. ``scale``, ``omegas`` and
    ``thetas`` are of the normals' type.
    """
    fresh, out = normals[0], made[0]
    values = np.empty(out.size, normals.dtype)
    for i in range(out.size):
        values[i] = fresh[i] * scale
    for k in range(len(states)):
        state, omega = states[k][start : start + out.size], omegas[k]
        for i in range(out.size):
            values[i] -= state[i] * omega
    for k in range(len(states)):
        state, theta, then = states[k][start : start + out.size], thetas[k], after[k, start : start + out.size]
        for i in range(out.size):
            then[i] = state[i] * theta + values[i]
    for i in range(out.size):
        out[i] = _bits(np.float64(values[i]) + ROUNDER) - MARK


@compiled
def add_outer(residuals, features, start, made, total):
    """Add outer products to counts, and the counts to ``total``; clients have equally many rows, one after the other.

    ``residuals`` are in units of the grid. Columns behind the products are the residuals themselves.
    """
    classes, size = residuals.shape[1], features.shape[1]
    share = residuals.shape[0] // made.shape[0]
    stop = start + made.shape[1]
    for row in range(made.shape[0]):
        out = made[row]
        for sample in range(row * share, (row + 1) * share):
            values = features[sample]
            for c in range(classes):
                first, residual = c * size, residuals[sample, c]
                low, high = max(first, start), min(first + size, stop)
                if low < high:
                    there, factors = out[low - start : high - start], values[low - first : high - first]
                    for i in range(there.size):
                        there[i] += _bits(residual * factors[i] + ROUNDER) - MARK
                i = classes * size + c
                if start <= i < stop:
                    out[i - start] += _bits(residual + ROUNDER) - MARK
        for i in range(out.size):
            total[i] += out[i]


@compiled
def add_dense(rows, factors, start, made, total):
    """Add rows times their factors, which are of the rows' type, to counts; the rest is as for :func:`add_outer`."""
    share, stop = rows.shape[0] // made.shape[0], start + made.shape[1]
    for row in range(made.shape[0]):
        out = made[row]
        for sample in range(row * share, (row + 1) * share):
            factor, values = factors[sample], rows[sample, start:stop]
            for i in range(out.size):
                out[i] += _bits(np.float64(values[i] * factor) + ROUNDER) - MARK
        for i in range(out.size):
            total[i] += out[i]


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


_fused: Any = intrinsic(_generated_fused)
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


@compiled
def word_pairs(words, normals):
    """Write the normals that `fast_pairs` makes of words of 32 bits; both have shape (rows, 2 pairs)."""
    pairs = words.shape[1] // 2
    for row in range(words.shape[0]):
        radius_words, angle_words = words[row, :pairs], words[row, pairs:]
        cosines, sines = normals[row, :pairs], normals[row, pairs:]
        for i in range(pairs):
            exponent, x = _parts((_f(radius_words[i]) + _HALF) * _UNIT)
            small = x <= _ROOT_HALF
            x = x + x if small else x
            exponent = exponent - _ONE if small else exponent
            x = x - _ONE
            above = _fused(_fused(_fused(_fused(_P5, x, _P4), x, _P3), x, _P2), x, _P1)
            below = _fused(_fused(_fused(_fused(_Q5, x, _Q4), x, _Q3), x, _Q2), x, _Q1)
            quotient = _fused(above, x, _ZERO) / _fused(below, x, _ONE)
            radius = np.sqrt(_fused(exponent, _LN_2, quotient) * _MINUS_TWO)
            angle = _f(angle_words[i]) * _TURN
            marked = _fused(angle, _TWO_OVER_PI, _QUARTERS)
            quarters = marked - _QUARTERS
            x = _fused(quarters, _LOW, _fused(quarters, _MIDDLE, _fused(quarters, _HIGH, angle)))
            square = x * x
            cosine = _fused(_fused(_fused(_fused(_C8, square, _C6), square, _C4), square, _C2), square, _ONE)
            sine = _fused(_fused(_fused(_fused(_S9, square, _S7), square, _S5), square, _S3), square, _ZERO)
            sine, cosine = _turned(_fused(sine, x, x), cosine, marked)
            cosines[i] = cosine * radius
            sines[i] = sine * radius


def equals_numpy() -> bool:
    """Return True if :func:`word_pairs` makes NumPy's normals on this computer, as 3 x 2^15 words tell.

    They are evenly spread, and some are those at which a quarter of a turn ends. Two ways to approximate a logarithm
    or a sine differ in the last bit of a tenth of all values or more.
    """
    steps = np.arange(1 << 15, dtype=np.uint32)
    even, half = steps << np.uint32(17), len(steps) // 2
    words = np.stack([even, even[::-1], even + steps * np.uint32(3)])
    made, expected = np.empty(words.shape, np.float32), np.empty(words.shape, np.float32)
    word_pairs(words, made)
    fast_pairs(words[:, :half], words[:, half:], lambda *_: words[0], expected[:, :half], expected[:, half:])
    return made.tobytes() == expected.tobytes()
