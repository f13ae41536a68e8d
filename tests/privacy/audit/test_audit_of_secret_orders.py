"""What an audit sees of samples in a secret order: no more than is claimed, and more of an order that is no secret.

Every audit has confidence 95 %, so an honest machine would be accused in at most one of 20 seeds; seeds are fixed.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, MemoryLedger, PrivacyPolicy, PrivateMachine, SimulatedKeys, gdp_epsilon
from murmurfl.privacy.accounting.amplification import amplification_of
from murmurfl.privacy.audit import audit_secret_order
from murmurfl.privacy.machine.known_samples import slots_of

SLOTS, BATCH, RUNS = 8, 2, 2000
DIRECTION = np.array([0.6, 0.8])
POLICY = PrivacyPolicy(
    clip_norm=1.0,
    batch_size=BATCH,
    max_participations=SLOTS,
    mu=3.0,
    delta=0.2,
    mechanism="independent",
    order="secret",
)


def independent(key, samples):
    """As machines draw it."""
    return slots_of(key, bytes(16), samples, SLOTS)


def known(key, samples):
    """From a seed that anybody knows: the same for every key."""
    return np.random.Generator(np.random.Philox(key=7)).integers(1, SLOTS + 1, size=samples)


def permuted(key, samples):
    """As many samples in every release: the others fill a sample's hole."""
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:8], "little")))
    return generator.permutation(samples) // BATCH + 1


def data(canary, others):
    """Samples at one place; the first one at -S or, with the canary, at +S."""
    places = np.full(SLOTS * BATCH, others)
    places[0] = 1.0 if canary else -1.0
    return places


def arithmetic(order, others=-1.0):
    """What machines with this order would send, without their other parts; with independent noise."""
    noise_std = POLICY.plan(2).noise_std

    def start(canary, runs):
        keys = [SimulatedKeys(run, f"canary {canary}").secret_key for run in runs]
        slots = np.array([order(key, SLOTS * BATCH) for key in keys])
        generator = np.random.Generator(np.random.Philox(key=[runs.start, bool(canary)]))
        noise = noise_std * generator.standard_normal((SLOTS, len(keys), 2))

        def answers(k, acks):
            sums = (slots == k) @ data(canary, others) / BATCH
            return [SimpleNamespace(values=row) for row in np.outer(sums, DIRECTION) + noise[k - 1]]

        return answers

    return start


class KnownOrder(PrivateMachine):
    def _weights(self, admission):
        return (known(b"", self.num_samples) == admission.release).astype(float)


class Permutation(PrivateMachine):
    def _weights(self, admission):
        return (permuted(self._keys.secret_key, self.num_samples) == admission.release).astype(float)


def machines(kind, policy=POLICY, others=-1.0):
    """Machines themselves."""

    def start(canary, runs):
        rows = np.outer(data(canary, others), DIRECTION)
        keys = [SimulatedKeys(run, f"canary {canary}") for run in runs]
        made = [kind(policy, 2, len(rows), MemoryLedger(), key) for key in keys]
        return lambda k, acks: [
            machine.release("s", ack, lambda samples: rows[samples]) for machine, ack in zip(made, acks, strict=True)
        ]

    return start


def audit(streams, policy=POLICY, runs=RUNS):
    found = amplification_of(policy, policy.plan(2))
    epsilon = found.epsilon if found.proved else gdp_epsilon(policy.mu, policy.delta)
    return audit_secret_order(policy, streams, 2.0 * DIRECTION / BATCH, claimed_epsilon=epsilon, runs=runs)


@pytest.mark.parametrize("others", [-1.0, 0.0])
def test_an_independent_order_shows_no_more_than_is_claimed(others):
    result = audit(arithmetic(independent, others))
    assert not result.violated
    assert result.claimed_epsilon < 0.35 * gdp_epsilon(3.0, 0.2)
    if others == 0.0:  # nothing else hides it: the measure is not empty
        assert result.measured_epsilon > 0.3 * result.claimed_epsilon


def test_an_order_from_a_public_seed_is_caught():
    result = audit(arithmetic(known))
    assert result.violated
    assert result.measured_epsilon > 1.5 * result.claimed_epsilon
    assert result.statistic == f"release {known(b'', SLOTS * BATCH)[0]} moved"
    assert result.measured_mu <= result.claimed_mu  # which holds whoever knows the order


def test_a_permutation_with_as_many_samples_in_every_release_is_caught():
    result = audit(arithmetic(permuted))
    assert result.violated
    assert result.measured_epsilon > 1.3 * result.claimed_epsilon
    assert result.statistic == "any release moved"
    assert not audit(arithmetic(permuted, 0.0)).violated  # it takes others at the opposite to see it


@pytest.mark.long
def test_machines_themselves_show_no_more_and_with_either_bug_more():
    assert not audit(machines(PrivateMachine), runs=1000).violated
    assert not audit(machines(PrivateMachine, others=0.0), runs=1000).violated
    assert audit(machines(KnownOrder), runs=1000).violated
    assert audit(machines(Permutation), runs=1000).violated


@pytest.mark.long
@pytest.mark.parametrize("mechanism", ["cancelling", "sqrt_toeplitz"])
def test_in_correlated_noise_an_order_shows_less_than_when_it_is_known(mechanism):
    policy = replace(POLICY, mechanism=mechanism)
    result = audit(machines(PrivateMachine, policy, others=0.0), policy, runs=1000)
    assert 0 < result.measured_epsilon < result.claimed_epsilon


def test_what_is_no_secret_order_is_refused():
    with pytest.raises(ConfigurationError, match="order 'secret'"):
        audit_secret_order(replace(POLICY, order="in-turn"), machines(PrivateMachine), DIRECTION, claimed_epsilon=1.0)
    with pytest.raises(ConfigurationError, match="runs >= 20"):
        audit_secret_order(POLICY, machines(PrivateMachine), DIRECTION, claimed_epsilon=1.0, runs=3)
