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

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from ...privacy.noise import MARK as _MARK
from ...privacy.noise import ROUNDER as _ROUNDER

MARK, ROUNDER = int(_MARK), float(_ROUNDER)


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a function at its first call, or read its native code from the cache."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # no folder for the cache
        return njit(function)


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
