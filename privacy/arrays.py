"""Arrays as they travel: NumPy's own format, without making and parsing its header again for every message.

Flower stores an array as the bytes of ``numpy.save`` beside its dtype and shape. For the plain case (little-endian, C
order) those two say to the byte which header ``numpy.save`` writes. Bytes that begin with that very header, and have
the length it asks for, are read where they are; anything else is left to NumPy.
"""

from __future__ import annotations

import math
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from numpy.lib import format as numpy_format
from numpy.typing import NDArray

_MAGIC = b"\x93NUMPY"
_PLAIN = {"float64": "<f8", "float32": "<f4", "int64": "<i8", "uint64": "<u8"}
_NAMES = {descriptor: name for name, descriptor in _PLAIN.items()}
_MOST_DIMENSIONS = 8
_LARGEST_DIMENSION = 2**48


def read_array(dtype: str, shape: tuple[int, ...], data: bytes) -> NDArray[Any]:
    """The array that ``numpy.save`` serialised into ``data``; read-only where it is read quickly.

    A sender states ``dtype`` and ``shape``, and may lie. Bytes that are no array, or would need unpickling, are a
    ValueError.
    """
    expected = _expected(dtype, shape)
    if expected is not None and type(data) is bytes:
        header, size, read_as = expected
        if len(data) == len(header) + size and data.startswith(header):
            return np.frombuffer(data, read_as, offset=len(header)).reshape(shape)
    return _read_carefully(data)


def write_array(values: NDArray[Any]) -> bytes:
    """The bytes that ``numpy.save`` makes of an array of numbers."""
    expected = _expected(_NAMES.get(values.dtype.str, ""), values.shape)
    if expected is not None and values.flags.c_contiguous:
        return b"".join((expected[0], values.data))
    buffer = BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return buffer.getvalue()


def dtype_name(values: NDArray[Any]) -> str:
    """The name Flower has for an array's dtype: ``str(values.dtype)``, which takes NumPy longer."""
    return _NAMES.get(values.dtype.str) or str(values.dtype)


def _read_carefully(data: bytes) -> NDArray[Any]:
    if data[:6] != _MAGIC:  # NumPy would also open an archive, which is no array
        raise ValueError("the bytes are no array")
    try:
        return np.load(BytesIO(data), allow_pickle=False)
    except Exception as error:  # NumPy raises many kinds on bytes that are no array; all mean the same.
        raise ValueError("the bytes are no array") from error


def _expected(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, int, np.dtype[Any]] | None:
    """The header of a plain array, the number of bytes behind it, and their dtype; None for any other array.

    What a sender states decides what is looked for, never what is believed; only small headers are remembered.
    """
    descriptor = _PLAIN.get(dtype)
    # A shape of anything but plain integers may be equal to one and yet print differently: True is 1.
    if descriptor is None or type(shape) is not tuple or len(shape) > _MOST_DIMENSIONS:
        return None
    for size in shape:
        if type(size) is not int or not 0 <= size < _LARGEST_DIMENSION:
            return None
    return _header(descriptor, shape)


@lru_cache(maxsize=256)
def _header(descriptor: str, shape: tuple[int, ...]) -> tuple[bytes, int, np.dtype[Any]]:
    buffer, dtype = BytesIO(), np.dtype(descriptor)
    numpy_format.write_array_header_1_0(buffer, {"descr": descriptor, "fortran_order": False, "shape": shape})
    return buffer.getvalue(), math.prod(shape) * dtype.itemsize, dtype
