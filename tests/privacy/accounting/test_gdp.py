"""The GDP curve against published values, closed forms and an independent accountant.

Privacy that is asked for as a mu or as an epsilon: exactly one of them, and never less private than was said.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from hypothesis import given
from hypothesis import strategies as st
from murmurfl.clients import UpdateNode, UpdatePolicy
from murmurfl.privacy import (
    ConfigurationError,
    PrivacyPolicy,
    centring_policy,
    compose_gdp,
    evaluation_policy,
    gdp_best_guess,
    gdp_delta,
    gdp_epsilon,
    gdp_mu,
)
from murmurfl.privacy.accounting.gdp import asked_mu
from murmurfl.privacy.queries.evaluation import counting_policy
from murmurfl.privacy.release.shuffled_privatizer import ShuffledPolicy

from tests.harness.errors import raises

# ALGORITHMS, section 1, at delta = 1e-5.
PUBLISHED = {0.25: 0.926, 0.5: 1.993, 1: 4.377, 2: 9.997, 4: 24.38, 8: 65.32, 12: 122.3, 16: 195.4}


@pytest.mark.parametrize(("mu", "epsilon"), PUBLISHED.items())
def test_epsilon_at_1e_5_is_the_published_one(mu, epsilon):
    assert gdp_epsilon(mu, 1e-5) == pytest.approx(epsilon, rel=5e-4)


@pytest.mark.parametrize("mu", [0.25, 1.0, 4.0])
def test_delta_agrees_with_the_privacy_loss_distribution_of_dp_accounting(mu):
    pld = privacy_loss_distribution.from_gaussian_mechanism(1 / mu, value_discretization_interval=1e-4)
    # Theirs is pessimistic by its discretisation.
    for epsilon in (0.1, 1.0, 5.0):
        assert gdp_delta(mu, epsilon) == pytest.approx(pld.get_delta_for_epsilon(epsilon), rel=2e-3, abs=1e-9)
        assert gdp_delta(mu, epsilon) <= pld.get_delta_for_epsilon(epsilon) * (1 + 1e-6)


def test_composition_agrees_with_dp_accounting():
    accountant = PLDAccountant()
    accountant.compose(dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(noise_multiplier=8.0), 16))
    assert gdp_epsilon(compose_gdp([1 / 8] * 16), 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


@given(st.floats(1e-3, 60), st.floats(1e-12, 0.5))
def test_epsilon_and_mu_are_inverse_and_err_on_the_safe_side(mu, delta):
    epsilon = gdp_epsilon(mu, delta)
    assert gdp_delta(mu, epsilon) <= delta
    if epsilon > 1e-6:
        assert gdp_mu(epsilon, delta) == pytest.approx(mu, rel=1e-6)


@given(st.floats(1e-3, 30), st.floats(1.001, 2), st.floats(1e-10, 0.3))
def test_epsilon_grows_with_mu_and_falls_with_delta(mu, factor, delta):
    assert gdp_epsilon(mu * factor, delta) >= gdp_epsilon(mu, delta)
    assert gdp_epsilon(mu, delta * factor) <= gdp_epsilon(mu, delta)


def test_exact_curve_is_below_the_papers_conversion():
    for mu in PUBLISHED:
        assert gdp_epsilon(mu, 1e-5) < mu**2 / 2 + mu * math.sqrt(2 * math.log(1e5))


def test_ends_of_the_curve():
    assert gdp_epsilon(0, 1e-5) == 0
    assert gdp_epsilon(math.inf, 1e-5) == math.inf
    assert gdp_delta(0, 0) == 0
    assert gdp_delta(math.inf, 3) == 1
    assert compose_gdp([]) == 0
    assert compose_gdp([3, 4]) == pytest.approx(5)


@pytest.mark.parametrize(
    "call",
    [
        lambda: gdp_epsilon(-1, 1e-5),
        lambda: gdp_epsilon(math.nan, 1e-5),
        lambda: gdp_epsilon(1, 0),
        lambda: gdp_epsilon(1, 1),
        lambda: gdp_delta(1, -0.1),
        lambda: gdp_mu(math.inf, 1e-5),
        lambda: compose_gdp([1, -1]),
        lambda: gdp_best_guess(-1),
    ],
)
def test_impossible_parameters_are_refused(call):
    with pytest.raises(ConfigurationError, match="Expected"):
        call()


def test_best_guess_equals_delta_at_epsilon_zero():
    """(1 + delta(0)) / 2 for equal odds; an attacker with the likelihood ratio attains it (seed 1, four errors)."""
    assert gdp_best_guess(0) == 0.5
    assert gdp_best_guess(math.inf) == 1
    for mu in PUBLISHED:
        assert gdp_best_guess(mu) == pytest.approx((1 + gdp_delta(mu, 0)) / 2)
    normals = np.random.Generator(np.random.Philox(key=1)).normal(size=200_000)
    replaced = np.arange(len(normals)) % 2 == 1
    right = ((normals + replaced > 0.5) == replaced).mean()
    assert right == pytest.approx(gdp_best_guess(1.0), abs=4 * 0.5 / len(normals) ** 0.5)


def of_samples(**asked):
    return PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, **asked)


def of_updates(**asked):
    return UpdatePolicy(clip_norm=1.0, max_participations=5, **asked)


def of_epochs(**asked):
    return ShuffledPolicy(clip_norm=1.0, batch_size=4, max_participations=5, **asked)


def of_a_mean(**asked):
    return centring_policy(1.0, nonnegative=True, **asked)


POLICIES = [of_samples, of_updates, of_epochs, of_a_mean, counting_policy, evaluation_policy]


@pytest.mark.parametrize("made", POLICIES)
@pytest.mark.parametrize("delta", [1e-5, 1e-8])
def test_every_policy_takes_an_epsilon_in_the_place_of_a_mu(made, delta):
    policy = made(epsilon=4.0, delta=delta)
    assert policy.mu == gdp_mu(4.0, delta)
    assert 4.0 * (1 - 1e-9) < gdp_epsilon(policy.mu, delta) <= 4.0
    assert made(mu=policy.mu, delta=delta) == policy


@pytest.mark.parametrize("made", POLICIES)
def test_both_are_refused_and_so_is_neither(made):
    with raises(ConfigurationError, "conflict", "mu", match="1.0, epsilon = 4.0"):
        made(mu=1.0, epsilon=4.0)
    with raises(ConfigurationError, "out-of-range", "mu", match=r"0\.0 and epsilon = None"):
        made()


@pytest.mark.parametrize("made", POLICIES)
def test_a_policy_is_altered_as_before(made):
    policy = made(epsilon=4.0)
    assert replace(policy) == policy
    assert replace(policy, delta=1e-6).mu == policy.mu  # what is kept is the mu
    assert replace(policy, mu=2.0, budget_mu=None).mu == 2.0
    assert replace(policy, mu=0.0, epsilon=1.0).mu == gdp_mu(1.0, 1e-5)
    with raises(ConfigurationError, "conflict", "mu"):
        replace(policy, epsilon=1.0)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"mu": -1.0}, "Expected mu > 0 and finite, got -1.0"),
        ({"mu": float("inf")}, "Expected mu > 0 and finite, got inf"),
        ({"mu": True}, "Expected mu > 0 and finite, got True"),
        ({"epsilon": 0.0}, "Expected epsilon > 0 and finite, got 0.0"),
        ({"epsilon": -4.0}, "Expected epsilon > 0 and finite, got -4.0"),
        ({"epsilon": float("nan")}, "Expected epsilon > 0 and finite, got nan"),
        ({"epsilon": "4"}, "Expected epsilon > 0 and finite, got '4'"),
        ({"epsilon": 4.0, "delta": 1.0}, "Expected delta > 0 and < 1"),
    ],
)
def test_what_is_no_amount_of_privacy_is_refused(asked, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        of_samples(**asked)


def test_an_epsilon_is_never_rounded_to_less_privacy():
    for epsilon in (0.01, 0.5, 1.0, 3.0, 10.0, 100.0):
        for delta in (1e-3, 1e-5, 1e-10):
            assert gdp_delta(asked_mu(0.0, epsilon, delta), epsilon) <= delta


def test_an_operators_epsilon_beside_a_mu_that_somebody_chose_is_refused():
    def node(stated, **asked):
        return UpdateNode(client="1", ledger="ledger.sqlite", updates=of_updates(**asked), epsilon=stated)

    assert node(3.0, epsilon=3.0).updates.mu == gdp_mu(3.0, 1e-5)
    assert node(0.0, mu=0.1).updates.mu == 0.1
    for asked in ({"mu": 0.1}, {"epsilon": 2.0}):
        with raises(ConfigurationError, "conflict", "mu", match="Expected mu or epsilon, got both"):
            node(24.0, **asked)
