"""What a secret order is worth: exact where it can be known, Monte Carlo and another accountant where it cannot.

What a secret order is said to be worth: a bound where it is proved, elsewhere what is called an estimate.
"""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from murmurfl.privacy import (
    ConfigurationError,
    Guarantee,
    PrivacyPolicy,
    SumAssumption,
    caption,
    gdp_delta,
    gdp_epsilon,
    policy_guarantee,
)
from murmurfl.privacy.accounting.amplification import (
    LARGEST_SHIFT,
    Amplification,
    _estimate,
    allocation_delta,
    allocation_epsilon,
    allocation_mu,
    amplification_of,
    amplification_of_all,
    likelihood_sum,
    zero_out_deltas,
    zero_out_shift,
)
from scipy.integrate import quad
from scipy.stats import norm

from tests.harness.errors import raises

# PLD_accounting 2.0 (PyPI), gaussian_allocation_epsilon_range(delta, sigma=1/shift, num_steps): upper, lower bound of
# both directions together, with its default accuracy of 5 %.
OTHERS = {
    (0.5, 2, 1e-5): (1.4909632, 1.4166519),
    (0.25, 100, 1e-5): (0.0783088, 0.0747480),
    (0.5, 100, 1e-5): (0.1776740, 0.1694594),
    (0.5, 100, 1e-8): (0.2654984, 0.2535022),
    (1.0, 10, 1e-5): (2.2089584, 2.1661684),
    (1.0, 100, 1e-5): (0.6356520, 0.6085096),
    (0.5, 1000, 1e-6): (0.0605478, 0.0582316),
    (2.0, 100, 1e-5): (5.4077555, 5.3843200),
}


def test_a_secret_order_hides_replacements_up_to_twice_the_largest_shift():
    mu = 1.5 * LARGEST_SHIFT
    assert allocation_delta(mu, 1000, mu * mu / 2) < 1e-9 < gdp_delta(mu, mu * mu / 2)


def zero_out_epsilon(shift, slots, delta):
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if max(zero_out_deltas(shift, slots, middle)) > delta else (low, middle)
    return high


def cases():
    """Some of them; all take long."""
    return [
        pytest.param(*one, marks=() if one[0][:2] in ((0.5, 2), (0.5, 100), (1.0, 10)) else pytest.mark.long)
        for one in OTHERS.items()
    ]


@pytest.mark.parametrize(("case", "bounds"), cases(), ids=str)
def test_zeroing_a_sample_out_agrees_with_pld_accounting(case, bounds):
    upper, lower = bounds
    assert lower < zero_out_epsilon(*case) < upper


@pytest.mark.parametrize("shift", [0.1, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 4.0])
def test_one_release_is_the_gaussian_mechanism_and_never_less(shift, epsilon):
    exact = gdp_delta(shift, epsilon)
    for delta in zero_out_deltas(shift, 1, epsilon):
        assert exact <= delta <= exact * 1.05 + 1e-13


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
def test_one_release_hides_nothing_by_its_order(mu, epsilon):
    assert allocation_delta(mu, 1, epsilon) == gdp_delta(mu, epsilon)


@pytest.mark.parametrize("shift", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("epsilon", [0.05, 0.5, 2.0])
def test_two_releases_are_what_quadrature_says_and_never_less(shift, epsilon):
    """Given the first likelihood ratio w, what is missing of 2 c is asked of one log-normal: Black and Scholes."""

    def one_more(strike, sign):  # E max(sign (W - strike), 0)
        if strike <= 0:
            return 1.0 - strike if sign > 0 else 0.0
        edge = math.log(strike) / shift
        return sign * (norm.cdf(sign * (shift / 2 - edge)) - strike * norm.cdf(-sign * (shift / 2 + edge)))

    def exact(factor, sign):
        def integrand(x):
            return one_more(2 * factor - math.exp(shift * x - shift**2 / 2), sign) * norm.pdf(x) / 2

        # In parts: where the first one alone reaches the strike there is a kink.
        kink = math.log(2 * factor) / shift + shift / 2
        edges = sorted({-9.0, min(max(kink, -9.0), 9.0 + shift), 9.0 + shift})
        return sum(quad(integrand, *part, epsabs=1e-13, limit=200)[0] for part in pairwise(edges))

    found = zero_out_deltas(shift, 2, epsilon)
    wanted = exact(math.exp(epsilon), 1), math.exp(epsilon) * exact(math.exp(-epsilon), -1)
    for delta, want in zip(found, wanted, strict=True):
        assert want - 1e-12 <= delta <= want * 1.03 + 1e-11


@pytest.mark.parametrize(("mu", "slots", "epsilon"), [(1.0, 20, 0.15), (2.0, 20, 0.5), (3.0, 8, 1.0)])
def test_drawing_from_the_pair_stays_below_within_its_error(mu, slots, epsilon):
    """Also a sample at +S against one at -S, directly: what is claimed of it is more. Fails for 1 seed in 10^4."""
    generator = np.random.Generator(np.random.Philox(key=slots))
    shift, draws = mu / 2, 60_000
    normals = generator.standard_normal((draws, slots))
    moved = normals.copy()
    moved[np.arange(draws), generator.integers(slots, size=draws)] += shift

    def loss(x, m):
        return np.log(np.mean(np.exp(m * x - m * m / 2), axis=1))

    losses = {
        "with": (loss(moved, shift), zero_out_deltas(shift, slots, epsilon)[0]),
        "without": (-loss(normals, shift), zero_out_deltas(shift, slots, epsilon)[1]),
        "replaced": (loss(moved, shift) - loss(moved, -shift), allocation_delta(mu, slots, epsilon)),
    }
    for name, (values, claimed) in losses.items():
        drawn = np.maximum(0.0, 1.0 - np.exp(np.minimum(epsilon - values, 0.0)))
        error = drawn.std() / math.sqrt(draws)
        assert drawn.mean() - 4 * error <= claimed, name
        if name != "replaced":
            assert claimed <= 1.02 * (drawn.mean() + 4 * error), name


def test_published_figures():
    # 100 releases at delta = 1e-5; a sample at +S against -S drawn 10^6 times gives 0.34 and 2.6.
    assert 0.34 < allocation_epsilon(1.0, 100, 1e-5) < 0.37
    assert 2.6 < allocation_epsilon(3.0, 100, 1e-5) < 3.6
    assert gdp_epsilon(1.0, 1e-5) == pytest.approx(4.377, abs=1e-3)


@settings(max_examples=4)
@given(st.floats(0.05, 8), st.integers(2, 40), st.floats(1e-9, 0.1))
def test_a_secret_order_never_costs_anything_and_delta_and_epsilon_agree(mu, slots, delta):
    epsilon = allocation_epsilon(mu, slots, delta)
    assert 0 <= epsilon <= gdp_epsilon(mu, delta)
    assert allocation_delta(mu, slots, epsilon) <= delta * (1 + 1e-6)


def test_more_releases_and_less_noise_do_what_they_must():
    by_slots = [allocation_epsilon(1.0, slots, 1e-5) for slots in (1, 2, 5, 20)]
    assert by_slots == sorted(by_slots, reverse=True)
    assert by_slots[0] == gdp_epsilon(1.0, 1e-5)
    by_mu = [allocation_epsilon(mu, 20, 1e-5) for mu in (0.1, 1.0, 2.0, 8.0)]
    assert by_mu == sorted(by_mu)
    assert allocation_epsilon(0.0, 20, 1e-5) == 0.0
    assert allocation_epsilon(3 * LARGEST_SHIFT, 20, 1e-5) == gdp_epsilon(3 * LARGEST_SHIFT, 1e-5)


@pytest.mark.parametrize(("mu", "delta"), [(27.0, 1e-3), (29.0, 1e-12), (45.0, 1e-5), (1e3, 1e-5)])
def test_beyond_the_range_of_numbers_nothing_is_gained_and_nothing_is_lost(mu, delta):
    epsilon = allocation_epsilon(mu, 3, delta)
    assert math.isfinite(epsilon)
    assert epsilon <= gdp_epsilon(mu, delta)
    assert epsilon == gdp_epsilon(mu, delta) or gdp_epsilon(mu, delta) < 600
    for found in (*zero_out_deltas(2.0, 3, 1e4), allocation_delta(4.0, 3, 1e4), allocation_delta(mu, 3, 20.0)):
        assert 0 <= found <= 1


def test_what_the_resolution_of_normals_tells_is_added():
    without, tiny = allocation_epsilon(1.0, 20, 1e-5), allocation_epsilon(1.0, 20, 1e-5, resolution_mu=1e-6)
    assert without < tiny < without * 1.001
    with_more = allocation_epsilon(1.0, 20, 1e-5, resolution_mu=0.01)
    assert with_more > without + gdp_epsilon(0.01, 1e-8)


def test_a_finer_grid_lowers_a_bound_and_hardly(monkeypatch):
    coarse = allocation_epsilon(1.0, 12, 1e-5)
    likelihood_sum.cache_clear()
    monkeypatch.setattr("murmurfl.privacy.accounting.amplification._FINENESS", 1 / 80)
    fine = allocation_epsilon(1.0, 12, 1e-5)
    likelihood_sum.cache_clear()
    assert 0.995 * coarse < fine <= coarse


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_rounded_sum_keeps_its_mass_and_its_mean(count):
    total = likelihood_sum(0.7, count)
    assert total.masses.sum() == pytest.approx(1.0, abs=1e-12)
    assert total.masses @ total.points + total.lost == pytest.approx(count, rel=1e-9)
    variance = total.masses @ (total.points - count) ** 2
    assert variance >= count * math.expm1(0.49) * (1 - 1e-6), "never too narrow"


@pytest.mark.parametrize(
    "arguments",
    [(0.0, 2, 0.1), (-1.0, 2, 0.1), (1.0, 0, 0.1), (1.0, 2.5, 0.1), (1.0, True, 0.1), (1.0, 2, -0.1), (26.0, 2, 1.0)],
)
def test_impossible_arguments_are_refused(arguments):
    with pytest.raises(ConfigurationError):
        zero_out_deltas(*arguments)


def test_a_resolution_beyond_mu_is_refused():
    with raises(ConfigurationError, "out-of-range", "resolution_mu"):
        allocation_epsilon(1.0, 2, 1e-5, resolution_mu=1.0)


D = 50


def policy(**changes):
    common = {"clip_norm": 1.0, "batch_size": 4, "max_participations": 20, "mu": 1.0, "batch_selection": "shuffled"}
    return PrivacyPolicy(**{**common, "mechanism": "independent", **changes})


def amplified(**changes):
    made = policy(**changes)
    return amplification_of(made, made.plan(D))


def test_independent_noise_is_proved_and_accounted():
    found = amplified()
    assert found.proved
    assert found.slots == 20
    assert found.error == 0.0
    exact = allocation_epsilon(1.0, 20, 1e-5)
    assert exact <= found.epsilon < exact * 1.005, "the grid and the normals' resolution are charged"
    fast = amplified(noise_quality="fast")
    assert fast.epsilon < found.epsilon


def test_zeroing_moves_half_and_pays_rounding_whole():
    made = policy()
    plan = made.plan(D)
    assert zero_out_shift(made, plan) == pytest.approx(plan.sensitivity / 2 / plan.noise_std, rel=1e-3)
    assert zero_out_shift(made, plan) > plan.sensitivity / 2 / plan.noise_std
    nonnegative = policy(clip_unit="nonnegative")
    plan = nonnegative.plan(D)
    # Two such rows are sqrt 2 S apart at most, and each of them S from nothing.
    assert zero_out_shift(nonnegative, plan) * plan.noise_std == pytest.approx(1 / 4, rel=1e-3)


@pytest.mark.parametrize(("mu", "slots"), [pytest.param(1.0, 20, marks=pytest.mark.long), (3.0, 8)])
def test_the_estimate_agrees_with_the_bound_where_there_is_one(mu, slots):
    """Within five of its standard errors, of which eight parts give one: fails for 1 seed in 500."""
    epsilon, error = _estimate(np.eye(slots).tobytes(), slots, mu / 2, 1e-5)
    exact = allocation_epsilon(mu, slots, 1e-5)
    assert abs(epsilon - exact) < 5 * error + 0.003 * exact
    assert error < 0.02 * exact


def test_correlated_noise_has_an_estimate_and_no_other_has_any():
    found = amplified(mechanism="cancelling", max_participations=10)
    assert not found.proved
    assert 0 < found.error < 0.05 * found.epsilon
    assert amplified(max_participations=10).epsilon < found.epsilon < gdp_epsilon(1.0, 1e-5)
    assert amplified(mechanism="tree", max_participations=10) is None
    assert amplified(batch_selection="once") is None
    assert amplified(mechanism="none", batch_selection="shuffled") is None
    assert amplified(mechanism="cancelling", max_participations=600) is None


def test_under_secure_aggregation_releases_must_stand_alone():
    sums = {"trust": "secure-aggregation", "sums": SumAssumption(4, 5)}
    alone = amplified(**sums, release_rule="paper")
    assert alone.proved
    assert alone.epsilon == pytest.approx(amplified().epsilon, rel=0.01)
    assert amplified(**sums) is None


def test_of_several_clients_the_one_with_the_fewest_releases_counts():
    policies = [policy(max_participations=slots) for slots in (20, 10, 40)]
    clients = [(one, one.plan(D)) for one in policies]
    found, alone = amplification_of_all(clients), amplification_of(*clients[1])
    assert found.slots == 10
    assert alone.epsilon <= found.epsilon < 1.001 * alone.epsilon
    turn = policy(batch_selection="once")
    assert amplification_of_all([*clients, (turn, turn.plan(D))]) is None
    assert amplification_of_all([]) is None


def test_an_estimate_is_never_the_epsilon_of_a_guarantee():
    for proved in (True, False):
        made = policy()
        guarantee = policy_guarantee(made, 1.0, amplified=Amplification(0.87654, 20, proved=proved, error=0.01))
        assert guarantee.epsilon == gdp_epsilon(1.0, 1e-5)
        document = guarantee.document()
        assert document["epsilon"] == guarantee.epsilon
        assert document["amplified_proved"] is proved
        assert document["epsilon_amplified"] == 0.87654
        assert "epsilon = 4.378 at delta = 1e-05, for replacement" in guarantee.sentence
        assert ("estimate" in guarantee.sentence) is not proved
        assert ("no guarantee" in guarantee.sentence) is not proved
        assert "0.8766" in guarantee.sentence
        assert "samples in a secret order" in guarantee.sentence
        assert "a sample" in guarantee.of_secret_order
        assert "an owner" in replace(guarantee, unit="owner").of_secret_order


def test_a_caption_says_what_a_secret_order_rests_on_and_what_it_is_without():
    hidden = policy_guarantee(policy(), 1.0, amplified=Amplification(0.3663, 100, proved=True))
    said = caption([("hidden", hidden), ("known", policy_guarantee(policy(batch_selection="once"), 0.1))])
    assert (
        "Of hidden: While nobody learns which of 100 releases a sample is in, epsilon = 0.3663 at the same delta, and "
        "4.378 for somebody who learns it." in said
    )
    assert "Of known" not in said


@pytest.mark.parametrize(("epsilon", "slots"), [(0.3407, 24), (0.37, 100), (1.0, 2), (4.0, 24)])
def test_the_mu_of_an_epsilon_in_a_secret_order_never_has_more(epsilon, slots):
    mu = allocation_mu(epsilon, slots, 1e-5)
    assert allocation_delta(mu, slots, epsilon) <= 1e-5
    assert allocation_delta(1.02 * mu, slots, epsilon) > 1e-5
    assert 0.97 * epsilon < allocation_epsilon(mu, slots, 1e-5) <= epsilon


def test_secret_order_adds_nothing_without_a_guarantee():
    known = Amplification(0.1, 5, proved=True)
    assert policy_guarantee(policy(mechanism="none"), math.inf, amplified=known).amplified is None
    assert policy_guarantee(policy(), 0.0, amplified=known).amplified is None
    assert Guarantee(1.0, 1e-5, "tree noise").document()["epsilon_amplified"] is None


def test_a_secret_order_costs_a_policy_no_noise():
    secret, turn = policy(), policy(batch_selection="once")
    assert secret.plan(D).noise_std == pytest.approx(turn.plan(D).noise_std, rel=1e-6)
    assert secret.plan(D).mu == turn.plan(D).mu == 1.0
    assert replace(secret, batch_selection="once") == turn
