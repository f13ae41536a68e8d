"""Records of replies and ledgers: made from the last ones like them, so that Flower checks only what is new in them.

A machine's replies differ in a number or two, and so does what it remembers. Flower checks every key and every value
of a record when it is put in, which takes it longer than many a gradient; a copy of a record shares what was checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from numpy.typing import NDArray

from ..privacy import protocol
from ..privacy.arrays import dtype_name, write_array

RecordT = TypeVar("RecordT", ConfigRecord, MetricRecord)

_STYPE = "numpy.ndarray"  # how Flower calls the format of numpy.save
_MOST_KINDS = 32
_PLAIN = (int, float, str, bytes)
_known: dict[tuple[type, tuple[str, ...]], tuple[dict[str, Any], Any]] = {}
"""The last values of each kind of record and list of names, and a record of them; a program has few such lists."""


def entry_records(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a reply as records: numbers in a MetricRecord, the others in a ConfigRecord, if there are any."""
    numbers: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in values.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        (numbers if is_number else others)[name] = value
    records: dict[str, Any] = {protocol.METRICS: _record(MetricRecord, numbers)}
    if others:
        records[protocol.CONFIG] = _record(ConfigRecord, others)
    return records


def array_record(names: Sequence[str], arrays: Sequence[NDArray[Any]]) -> ArrayRecord:
    """Arrays as Flower sends them."""
    # Put in one by one: a record made from a dictionary makes every array of it anew.
    record = ArrayRecord()
    for name, values in zip(names, arrays, strict=True):
        if isinstance(values, np.ndarray):
            record[name] = Array(dtype_name(values), values.shape, _STYPE, write_array(values))
        else:
            record[name] = Array(values)  # what else a client may return is Flower's to know
    return record


def record_like(last: RecordT, values: Mapping[str, Any]) -> RecordT:
    """A record with these values, from one with the same names, which stays as it is."""
    record = last.copy()
    for name, value in values.items():
        if not _is_same_or_list(value, last[name]):
            record[name] = value
    return record


def _record(kind: type[RecordT], values: dict[str, Any]) -> RecordT:
    """A record with these values, which are not changed any more."""
    place = kind, tuple(values)
    known = _known.get(place)
    if known is None:
        record, new = kind(dict(values)), True
        if len(_known) >= _MOST_KINDS:
            _known.clear()
    else:
        before, last = known
        record, new = last.copy(), False
        for (name, value), other in zip(values.items(), before.values(), strict=True):
            if not _is_same(value, other):
                record[name] = value
                new = True
    if new:
        _known[place] = values, record.copy()  # whoever has the record may change it
    return record


def _is_same(value: Any, other: Any) -> bool:
    """Whether nobody could tell two plain values apart."""
    kind = type(value)
    if kind is not type(other) or kind not in _PLAIN or value != other:
        return False
    return kind is not float or value != 0.0  # which has two signs


def _is_same_or_list(value: Any, other: Any) -> bool:
    """As :func:`_is_same`, of lists of plain values too."""
    if type(value) is not list or type(other) is not list:
        return _is_same(value, other)
    return len(value) == len(other) and all(map(_is_same, value, other))
