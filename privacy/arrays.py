"""Reading serialised arrays quickly: NumPy's own format, without parsing its header again for every message.

Flower stores an array as the bytes of ``numpy.save`` beside its dtype and shape. For the plain case (little-endian, C
order) those two say where the values are; anything else is left to NumPy.
"""

from __future__ import annotations

import math
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"\x93NUMPY"
_PLAIN = {"float64": b"'<f8'", "float32": b"'<f4'", "int64": b"'<i8'", "uint64": b"'<u8'"}


def read_array(dtype: str, shape: tuple[int, ...], data: bytes) -> NDArray[Any]:
    """The array serialised in ``data`` by ``numpy.save``; read-only.

    Parameters
    ----------
    dtype : str
        What the sender says its dtype is.
    shape : tuple of int
        What the sender says its shape is.
    data : bytes
        The serialised array, from a stranger.

    Raises
    ------
    ValueError
        If the bytes are no array (or would need unpickling).
    """
    descriptor = _PLAIN.get(dtype)
    if descriptor is not None and data[:6] == _MAGIC:
        offset = len(data) - math.prod(shape) * np.dtype(dtype).itemsize
        header = data[:offset] if 0 < offset <= 1024 else b""
        dimensions = str(tuple(int(size) for size in shape)).encode()
        if (
            b"'descr': " + descriptor in header
            and b"'fortran_order': False" in header
            and b"'shape': " + dimensions in header
            and header.endswith(b"\n")
        ):
            return np.frombuffer(data, dtype=dtype, offset=offset).reshape(shape)
    if data[:6] != _MAGIC:  # NumPy would also open an archive, which is no array
        raise ValueError("the bytes are no array")
    try:
        return np.load(BytesIO(data), allow_pickle=False)
    except Exception as error:  # NumPy raises many kinds on bytes that are no array; all mean the same.
        raise ValueError("the bytes are no array") from error
