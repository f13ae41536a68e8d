"""Records made from the last ones like them: what Flower makes of the same values, and nobody else's."""

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, MetricRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from murmurfl.clients import messages as reply_records
from murmurfl.clients.messages import array_record, entry_records
from murmurfl.privacy import protocol

NUMBERS = st.one_of(st.sampled_from([0, 1, 0.0, -0.0, 1.0, 2]), st.floats(allow_nan=False), st.integers(-3, 3))
OTHERS = st.one_of(st.text(max_size=2), st.binary(max_size=2), st.booleans(), st.lists(st.integers(0, 1), max_size=2))
REPLIES = st.lists(
    st.fixed_dictionaries({"release": NUMBERS, "ack": NUMBERS}, optional={"machine": OTHERS, "seals": OTHERS}),
    min_size=1,
    max_size=4,
)


def plain(record):
    return [(name, type(value), repr(value)) for name, value in record.items()]


def by_flower(values):
    numbers = {k: v for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    others = {k: v for k, v in values.items() if k not in numbers}
    return plain(MetricRecord(numbers)), plain(ConfigRecord(others)) if others else None


def here(values):
    records = entry_records(values)
    config = records.get(protocol.CONFIG)
    return plain(records[protocol.METRICS]), None if config is None else plain(config)


@settings(max_examples=40)
@given(REPLIES)
def test_the_records_of_a_reply_are_those_flower_makes_of_its_entries(replies):
    for values in replies:
        assert here(values) == by_flower(values)


@pytest.mark.parametrize("values", [{"release": True}, {"release": np.float64(1.5)}, {"machine": "a", "seals": [b"x"]}])
def test_values_of_other_types_are_left_to_flower(values):
    assert here(values) == by_flower(values)


@pytest.mark.parametrize("values", [{"note": {"a": 1}}, {"note": None}, {"note": [1, "a"]}, {1: "a"}, {1: 1}])
def test_what_flower_refuses_is_refused(values, monkeypatch):
    with pytest.raises(TypeError):
        entry_records({"release": 1, **values})
    monkeypatch.setattr(reply_records, "_record", lambda kind, values: reply_records._put(kind(), values))
    entry_records({"release": 1, **values})  # the planted bug, that nobody looks, is seen


def test_a_flower_that_keeps_values_elsewhere_gets_them_too():
    class Elsewhere(dict):
        pass

    assert reply_records._put(Elsewhere(), {"a": 1}) == {"a": 1}


def test_whoever_changes_a_record_changes_nobody_elses():
    values = {"release": 1, "ack": 0, "machine": "7", "seals": [b"a"]}
    for _ in range(3):
        records = entry_records({**values, "seals": list(values["seals"])})
        records[protocol.METRICS]["release"] = 99
        records[protocol.CONFIG]["machine"] = "8"
        records[protocol.CONFIG]["seals"].append(b"b")
        del records[protocol.METRICS]["ack"]
    assert here(values) == by_flower(values)


def test_arrays_are_sent_as_flower_would_send_them():
    values = [np.arange(6.0).reshape(2, 3), np.arange(3)[::2], torch.ones(2)]
    record = array_record(["a", "b", "c"], values)
    for array, expected in zip(record.to_numpy_ndarrays(), values, strict=True):
        assert (array == np.asarray(expected)).all()
        assert array.dtype == np.asarray(expected).dtype
