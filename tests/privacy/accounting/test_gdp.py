"""The GDP curve against published values, closed forms and an independent accountant."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from hypothesis import given
from hypothesis import strategies as st
from murmurfl.privacy import ConfigurationError, compose_gdp, gdp_best_guess, gdp_delta, gdp_epsilon, gdp_mu

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


def test_the_best_guess_is_what_delta_at_epsilon_zero_allows_and_no_better():
    """(1 + delta(0)) / 2 for equal odds; an attacker with the likelihood ratio attains it (seed 1, four errors)."""
    assert gdp_best_guess(0) == 0.5
    assert gdp_best_guess(math.inf) == 1
    for mu in PUBLISHED:
        assert gdp_best_guess(mu) == pytest.approx((1 + gdp_delta(mu, 0)) / 2)
    normals = np.random.Generator(np.random.Philox(key=1)).normal(size=200_000)
    replaced = np.arange(len(normals)) % 2 == 1
    right = ((normals + replaced > 0.5) == replaced).mean()
    assert right == pytest.approx(gdp_best_guess(1.0), abs=4 * 0.5 / len(normals) ** 0.5)
