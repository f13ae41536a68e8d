"""Records of replies and ledgers: made from the last ones like them, so that Flower checks only what is new in them.

A machine's replies differ in a number or two, and so does what it remembers. Flower checks every key and every value of a record when it is put in,
which takes it longer than many a gradient; a copy of a record shares what was checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from numpy.typing import NDArray

from ..privacy import protocol
from ..privacy.arrays import dtype_name, write_array

RecordT = TypeVar("RecordT", ConfigRecord, MetricRecord)

_STYPE = "numpy.ndarray"  # how Flower calls the format of numpy.save
_MOST_KINDS = 32
_PLAIN = (int, float, str, bytes)
_known: dict[tuple[type, tuple[str, ...]], Any] = {}
"""The last record of each kind and with each list of names; replies of a program have few such lists."""


def entry_records(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a reply as records: numbers in a MetricRecord, the others in a ConfigRecord, if there are any."""
    numbers = {k: v for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    records: dict[str, Any] = {protocol.METRICS: _record(MetricRecord, numbers)}
    if len(numbers) < len(values):
        records[protocol.CONFIG] = _record(ConfigRecord, {k: v for k, v in values.items() if k not in numbers})
    return records


def array_record(names: Sequence[str], arrays: Sequence[NDArray[Any]]) -> ArrayRecord:
    """Arrays as Flower sends them."""
    # Put in one by one: a record made from a dictionary makes every array of it anew.
    record = ArrayRecord()
    for name, values in zip(names, arrays, strict=True):
        record[name] = Array(dtype_name(values), values.shape, _STYPE, write_array(values))
    return record


def record_like(last: RecordT, values: Mapping[str, Any]) -> RecordT:
    """A record with these values, from one with the same names, which stays as it is."""
    record = last.copy()
    for name, value in values.items():
        if not _is_same(value, last[name]):
            record[name] = value
    return record


def _record(kind: type[RecordT], values: Mapping[str, Any]) -> RecordT:
    """A record with these values."""
    names = tuple(values)
    last = _known.get((kind, names))
    record = kind(dict(values)) if last is None else record_like(last, values)
    if last is None and len(_known) >= _MOST_KINDS:
        _known.clear()
    _known[kind, names] = record.copy()  # whoever has the record may change it
    return record


def _is_same(value: Any, other: Any) -> bool:
    """Whether nobody could tell two plain values, or lists of them, apart."""
    if type(value) is not type(other):
        return False
    if type(value) is list:
        return len(value) == len(other) and all(map(_is_same, value, other))
    if type(value) not in _PLAIN or value != other:
        return False
    return type(value) is not float or value != 0.0  # which has two signs
