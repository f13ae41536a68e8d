"""Reading arrays of strangers: what NumPy would read, or a ValueError.

The quick way through arrays: it writes what NumPy writes, and reads nothing that NumPy would not read so.
"""

from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from murmurfl.privacy import protocol as arrays
from murmurfl.privacy.protocol import dtype_name, read_array, write_array


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


SHAPE = (2, 3)
CLAIMS = [("float64", (2, 3)), ("float64", (3, 2)), ("int64", (2, 3))]


def damaged():
    """Every byte of a header as several others, headers cut short and made longer, and data cut and made longer."""
    good = saved(np.arange(6.0).reshape(SHAPE))
    header = len(good) - 48
    yield good
    for position in range(header):
        for byte in {0, 32, 39, good[position] ^ 1}:
            yield good[:position] + bytes([byte]) + good[position + 1 :]
        yield good[:position] + good[position + 1 :]
        yield good[:position] + b" " + good[position:]
    yield from (good[:-1], good[:-8], good + b"\0", good + good, good[:header], b"")


def accepted_wrongly(reader):
    """The damaged bytes that a reader reads although the careful one refuses them, or reads as something else."""
    found = []
    for data in damaged():
        for claim in CLAIMS:
            try:
                read = reader(*claim, data)
            except ValueError:
                continue
            try:
                careful = arrays._read_carefully(data)
            except ValueError:
                found.append(data)
                continue
            if read.dtype != careful.dtype or read.shape != careful.shape or read.tobytes() != careful.tobytes():
                found.append(data)
    return found


def reads_what_looks_right(dtype, shape, data):
    """The planted bug: a header that has the right words in it, wherever they stand."""
    offset = len(data) - 48
    header = data[:offset] if offset > 0 else b""
    if b"'<f8'" in header and b"'shape': " + str(shape).encode() in header and dtype == "float64":
        return np.frombuffer(data, dtype, offset=offset).reshape(shape)
    return read_array(dtype, shape, data)


def test_nothing_is_read_that_the_careful_reader_refuses_or_reads_otherwise():
    assert accepted_wrongly(read_array) == []


def test_a_reader_that_looks_for_words_in_a_header_would_be_caught():
    assert len(accepted_wrongly(reads_what_looks_right)) > 20


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 175), st.integers(0, 255)), min_size=1, max_size=4), st.sampled_from(CLAIMS))
def test_bytes_changed_anywhere_are_read_as_the_careful_reader_reads_them(changes, claim):
    data = bytearray(saved(np.arange(6.0).reshape(SHAPE)))
    for position, byte in changes:
        data[position] = byte
    outcomes = []
    for reader in (lambda: read_array(*claim, bytes(data)), lambda: arrays._read_carefully(bytes(data))):
        try:
            read = reader()
            outcomes.append((read.dtype, read.shape, read.tobytes()))
        except ValueError:
            outcomes.append("refused")
    assert outcomes[0] == outcomes[1]


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "uint64", "float16", ">f8", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 1, 4), (1,) * 9])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_written_as_numpy_writes_them(dtype, shape, order):
    values = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape), dtype=dtype, order=order)
    for given_values in (values, values[..., ::2] if values.ndim else values):
        assert write_array(given_values) == saved(given_values)
        assert dtype_name(given_values) == str(given_values.dtype)


def test_objects_are_not_written():
    with pytest.raises(ValueError, match="Object arrays"):
        write_array(np.array([{"a": 1}], dtype=object))


@pytest.mark.parametrize("shape", [(True, 3), [2, 3], (2.0, 3), (np.int64(2), 3), (2, -3), (2**60, 2**60)])
def test_what_is_no_plain_shape_is_left_to_the_careful_reader(shape):
    """True is 1 and prints otherwise: a remembered header of one would be taken for the other's."""
    assert arrays._expected("float64", shape) is None
    assert read_array("float64", shape, saved(np.zeros((2, 3)))).shape == (2, 3)


def test_bytes_in_another_buffer_are_read_carefully():
    assert read_array("float64", (2, 3), bytearray(saved(np.ones((2, 3))))).sum() == 6.0


def test_an_array_does_not_change_with_a_buffer_that_it_was_read_from():
    buffer = bytearray(write_array(np.arange(6.0)))
    values = read_array("float64", (6,), buffer)
    buffer[-8:] = bytes(8)
    assert (values == np.arange(6.0)).all()
