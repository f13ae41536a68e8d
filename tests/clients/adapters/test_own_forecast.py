"""What a machine says in its own log of its own noise."""

import logging
import re

import numpy as np
import pytest
from murmurfl.clients import NoisySGDClient
from murmurfl.clients.messages import own_forecast
from murmurfl.privacy import MemoryLedger, PrivacyPolicy, PrivateMachine, SimulatedKeys

from tests.harness.machines import DurableLedger, FixedNonces, normal_samples, point_request

D, K, MU = 400, 6, 0.5
POLICY = PrivacyPolicy(clip_norm=1.0, batch_size=1, max_participations=K, mu=MU, mechanism="independent")


class Linear:
    """Gradients of a linear function: the samples themselves."""

    shapes = ((D,),)

    def __call__(self, parameters, samples):
        return np.asarray(samples)


def machine(policy=POLICY):
    return PrivateMachine(policy, D, K, MemoryLedger(), SimulatedKeys(1, "0"))


def test_a_machine_forecasts_its_noise_and_the_machines_needed():
    """2 S / mu on each value of every release, sqrt(6) of them in all, over 6 S."""
    said = own_forecast(machine())
    alone = 2 / MU * np.sqrt(D) / np.sqrt(K)
    longest, machines = re.search(r"noise is (\S+) times .* over (\S+) machines", said).groups()
    assert float(longest) == pytest.approx(alone, rel=0.05)
    assert int(machines.replace(",", "")) == pytest.approx((alone / 0.15) ** 2, rel=0.1)
    assert "an estimate" in said


def test_a_machine_without_noise_has_nothing_to_say():
    assert own_forecast(machine(PrivacyPolicy(1.0, 1, K, 1.0, mechanism="none"))) == ""


def test_a_real_machine_says_it_once_with_its_first_release(caplog):
    caplog.set_level(logging.INFO)
    client = NoisySGDClient(Linear(), normal_samples("3", K, D), POLICY, DurableLedger(), FixedNonces(), name="clinic")
    for release in (1, 2, 3):
        client.fit(*point_request(np.zeros(D), release))
    said = [record.getMessage() for record in caplog.records if "By itself" in record.getMessage()]
    assert said == [f"Machine clinic: {own_forecast(client.machine)}"]
