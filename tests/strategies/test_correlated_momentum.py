"""Momentum of gradients under any mechanism, and noisy SGD: the rule, the noise, and its calibration."""

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, SimulatedKeys, row_key, standard_normals
from murmurfl.strategies import MOMENTUM_MECHANISMS, CorrelatedMomentum

from tests.harness import momentum as harness
from tests.harness.errors import raises
from tests.harness.rules import begun, stepped

CLIENTS, ROUNDS, EPOCH, D = harness.CLIENTS, 70, 10, 5


def policy(**changes):
    options = {"clip_norm": 1.0, "batch_size": 2, "max_participations": ROUNDS}
    returning = {"sample_participations": ROUNDS // EPOCH, "min_separation": EPOCH}
    return harness.policy(**{**options, **returning, **changes})


def strategy(**changes):
    return harness.strategy(CorrelatedMomentum, **{"policy": policy(), "num_rounds": ROUNDS, **changes})


@pytest.mark.parametrize("mechanism", MOMENTUM_MECHANISMS)
def test_the_momentum_is_that_of_gradients_with_the_mechanisms_noise(mechanism):
    """The stream against the dense C^{-1}, over more rounds than a block of regenerated noise has."""
    subject, keys, rng = strategy(mechanism=mechanism), SimulatedKeys(5, "server"), np.random.default_rng(2)
    normals = np.array(
        [standard_normals(row_key(keys.secret_key, keys.nonce("s", t)), D, "exact") for t in range(1, ROUNDS + 1)]
    )
    noise = subject.aggregator.stream.noise_std(D) * (subject.aggregator.stream.mechanism.inverse() @ normals)
    state, w, momentum = begun(subject, np.ones(D)), np.ones(D), np.zeros(D)
    for t in range(1, ROUNDS + 1):
        gradients = rng.normal(size=D)
        state = stepped(subject, state, gradients, t)
        momentum = 0.7 * momentum + 0.3 * (gradients / CLIENTS + noise[t - 1])
        w = w - 0.05 * momentum / np.linalg.norm(momentum)
        assert state.momentum == pytest.approx(momentum, rel=1e-4, abs=1e-4)
    assert state.w == pytest.approx(w, abs=1e-3)
    with raises(ConfigurationError, "exhausted", "num_rounds"):
        stepped(subject, state, np.zeros(D), ROUNDS + 1)


def test_without_momentum_and_normalisation_it_is_noisy_sgd():
    subject = strategy(alpha=1.0, normalised=False, policy=policy(mu=1e6))
    state = stepped(subject, begun(subject, np.ones(D)), np.full(D, 6.0), 1)
    assert state.w == pytest.approx(1 - 0.05 * 6 / CLIENTS, abs=1e-4)


@pytest.mark.parametrize(
    "mechanism", ["independent", "decay", "sqrt_toeplitz", "sqrt_normalised", "bisr", "banded", "blt"]
)
def test_a_sample_that_returns_every_epoch_costs_exactly_mu(mechanism):
    """From C itself: the sum of a sample's columns, in units of the noise. One participation would cost less."""
    subject = strategy(mechanism=mechanism)
    encoder, change = (
        subject.aggregator.stream.mechanism.materialize(),
        subject.aggregator.policy.plan(D).sensitivity / CLIENTS,
    )
    std = subject.aggregator.stream.noise_std(D)
    spent = [change * np.linalg.norm(encoder[:, place::EPOCH].sum(axis=1)) / std for place in range(EPOCH)]
    assert max(spent) == pytest.approx(subject.aggregator.mu, rel=1e-5)
    assert change * np.linalg.norm(encoder, axis=0).max() / std < 0.9 * subject.aggregator.mu


@pytest.mark.parametrize("mechanism", ["tree", "cancelling"])
def test_mechanisms_that_are_not_for_it_are_refused(mechanism):
    with raises(ConfigurationError, "unknown-name", "mechanism"):
        strategy(mechanism=mechanism)
