"""Replies in Flower's records, as Flower makes them, and what a client says in its own log of its noise."""

import logging
import re

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, MetricRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from murmurfl.clients import NoisySGDClient
from murmurfl.clients import messages as reply_records
from murmurfl.clients.messages import array_record, entry_records, own_forecast
from murmurfl.privacy import MemoryLedger, PrivacyPolicy, Privatizer, SimulatedKeys, protocol

from tests.harness.clients import DurableLedger, FixedNonces, normal_samples, point_request

NUMBERS = st.one_of(st.sampled_from([0, 1, 0.0, -0.0, 1.0, 2]), st.floats(allow_nan=False), st.integers(-3, 3))
OTHERS = st.one_of(st.text(max_size=2), st.binary(max_size=2), st.booleans(), st.lists(st.integers(0, 1), max_size=2))
REPLIES = st.lists(
    st.fixed_dictionaries({"release": NUMBERS, "ack": NUMBERS}, optional={"client": OTHERS, "seals": OTHERS}),
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


@pytest.mark.parametrize("values", [{"release": True}, {"release": np.float64(1.5)}, {"client": "a", "seals": [b"x"]}])
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
    values = {"release": 1, "ack": 0, "client": "7", "seals": [b"a"]}
    for _ in range(3):
        records = entry_records({**values, "seals": list(values["seals"])})
        records[protocol.METRICS]["release"] = 99
        records[protocol.CONFIG]["client"] = "8"
        records[protocol.CONFIG]["seals"].append(b"b")
        del records[protocol.METRICS]["ack"]
    assert here(values) == by_flower(values)


def test_arrays_are_sent_as_flower_would_send_them():
    values = [np.arange(6.0).reshape(2, 3), np.arange(3)[::2], torch.ones(2)]
    record = array_record(["a", "b", "c"], values)
    for array, expected in zip(record.to_numpy_ndarrays(), values, strict=True):
        assert (array == np.asarray(expected)).all()
        assert array.dtype == np.asarray(expected).dtype


D, K, MU = 400, 6, 0.5
POLICY = PrivacyPolicy(clip_norm=1.0, batch_size=1, max_participations=K, mu=MU, mechanism="independent")


class Linear:
    """Gradients of a linear function: the samples themselves."""

    shapes = ((D,),)

    def __call__(self, parameters, samples):
        return np.asarray(samples)


def client(policy=POLICY):
    return Privatizer(policy, D, K, MemoryLedger(), SimulatedKeys(1, "0"))


def test_a_client_forecasts_its_noise_and_the_clients_needed():
    """2 S / mu on each value of every release, sqrt(6) of them in all, over 6 S."""
    said = own_forecast(client())
    alone = 2 / MU * np.sqrt(D) / np.sqrt(K)
    longest, clients = re.search(r"noise is (\S+) times .* over (\S+) clients", said).groups()
    assert float(longest) == pytest.approx(alone, rel=0.05)
    assert int(clients.replace(",", "")) == pytest.approx((alone / 0.15) ** 2, rel=0.1)
    assert "an estimate" in said


def test_a_client_without_noise_has_nothing_to_say():
    assert own_forecast(client(PrivacyPolicy(1.0, 1, K, 1.0, mechanism="none"))) == ""


def test_a_real_client_says_it_once_with_its_first_release(caplog):
    caplog.set_level(logging.INFO)
    client = NoisySGDClient(Linear(), normal_samples("3", K, D), POLICY, DurableLedger(), FixedNonces(), name="clinic")
    for release in (1, 2, 3):
        client.fit(*point_request(np.zeros(D), release))
    said = [record.getMessage() for record in caplog.records if "By itself" in record.getMessage()]
    assert said == [f"Client clinic: {own_forecast(client.privatizer)}"]
