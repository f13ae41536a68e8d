"""Reading arrays of strangers: what NumPy would read, or a ValueError."""

from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from murmurfl.privacy.protocol import read_array


def saved(values):
    buffer = BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "float16", ">f8", "uint8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 1, 4)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_read_as_numpy_reads_them(dtype, shape, order):
    values = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape), dtype=dtype, order=order)
    read = read_array(str(values.dtype), values.shape, saved(values))
    assert read.dtype == values.dtype
    assert read.shape == values.shape
    assert (read == values).all()


@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 255))
def test_damaged_bytes_are_an_array_or_a_value_error(noise, position, byte):
    good = bytearray(saved(np.arange(6.0).reshape(2, 3)))
    good[position % len(good)] = byte
    for data in (bytes(good), noise, b"\x93NUMPY" + noise):
        for shape in ((2, 3), (6,), (10**9, 10**9), (-1,)):
            try:
                read_array("float64", shape, data)
            except ValueError:
                continue


def test_what_the_sender_says_does_not_override_what_the_bytes_say():
    """A claimed shape that does not match leaves it to NumPy, whose shape the callers then check."""
    assert read_array("float64", (3, 2), saved(np.zeros((2, 3)))).shape == (2, 3)
    assert read_array("float32", (2, 3), saved(np.zeros((2, 3)))).dtype == np.float64


def test_objects_are_never_unpickled():
    buffer = BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="no array"):
        read_array("object", (1,), buffer.getvalue())
