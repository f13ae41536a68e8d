"""Independent noise by shares of the budget: what each release spends, and that all of them together spend mu."""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from murmurfl.privacy import SHARES, ConfigurationError, PrivacyPolicy, SumAssumption, make_mechanism

from tests.harness.errors import raises

ALL = {
    "batch_selection": "full_batch",
    "batch_size": 1,
    "mechanism": "independent",
    "release_rule": "paper",
    "clip_norm": 1.0,
}


def policy(shares, releases, **changes):
    options = {"mechanism_options": {"shares": shares}, "max_participations": releases, "mu": 1.0, **changes}
    return PrivacyPolicy(**{**ALL, **options})


@pytest.mark.parametrize("shares", SHARES)
def test_all_releases_together_spend_mu_whatever_the_shares(shares):
    plan = policy(shares, 12).plan(650)
    stds = plan.noise_std * np.array([plan.mechanism.increment_bound(k) for k in range(1, 13)])
    assert math.sqrt(np.sum((plan.sensitivity / stds) ** 2)) <= plan.mu
    assert math.sqrt(np.sum((plan.sensitivity / stds) ** 2)) == pytest.approx(plan.mu, rel=1e-3)
    assert plan.mechanism.sensitivity(12, 1, pattern="epochs") == pytest.approx(math.sqrt(12))


@pytest.mark.parametrize(
    ("shares", "weights"),
    [
        ("early", [4, 3, 2, 1]),
        ("linear", [1, 2, 3, 4]),
        ("late", [1, 4, 9, 16]),
        ("average", [10, 9, 7, 4]),  # of gradient k in 1 w_1 + .. + 4 w_4: k + .. + 4
        ("uniform", [1, 1, 1, 1]),
    ],
)
def test_each_release_spends_its_share(shares, weights):
    encoder = np.diag(make_mechanism("independent", 4, shares=shares).materialize())
    assert encoder**2 == pytest.approx(4 * np.array(weights) / sum(weights))


def test_shares_by_weight_leave_the_least_noise_in_a_weighted_sum():
    """ALGORITHMS section 8: sum a_k z_k / c_k with sum c_k^2 = K is least for c_k^2 ~ |a_k|; checked by perturbing."""
    weights = np.array([10.0, 9.0, 7.0, 4.0])
    encoder = np.diag(make_mechanism("independent", 4, shares="average").materialize())
    least = np.sum((weights / encoder) ** 2)
    assert least == pytest.approx(weights.sum() ** 2 / 4)  # Delta sum |a_k| / mu in these units
    generator = np.random.Generator(np.random.Philox(key=2))
    for other in generator.uniform(0.1, 1, size=(200, 4)):
        assert np.sum(weights**2 / (4 * other / other.sum())) >= least


@pytest.mark.parametrize("shares", [name for name in SHARES if name != "uniform"])
def test_a_pattern_is_charged_the_sum_of_its_shares(shares):
    mechanism = make_mechanism("independent", 7, shares=shares)
    squares = np.diag(mechanism.materialize()) ** 2
    for participations, separation in ((1, 1), (2, 1), (3, 2), (7, 1), (2, 4)):
        allowed = [
            chosen
            for size in range(1, participations + 1)
            for chosen in combinations(range(7), size)
            if all(b - a >= separation for a, b in pairwise(chosen))
        ]
        bound = mechanism.sensitivity_bound(participations, separation)
        assert bound.exact
        assert bound.value**2 == pytest.approx(max(squares[list(chosen)].sum() for chosen in allowed))


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("pattern", [(0, 1, "separated"), (0, 1, "epochs"), (2, 0, "epochs"), (2, 1, "daily")])
def test_a_pattern_that_no_sample_has_is_refused_whatever_the_shares(shares, pattern):
    participations, separation, name = pattern
    with raises(ConfigurationError, "out-of-range", "num_participations"):
        make_mechanism("independent", 7, shares=shares).sensitivity(participations, separation, pattern=name)


def test_unknown_shares_and_unshared_clients_are_refused():
    with raises(ConfigurationError, "unknown-name", "shares"):
        policy("all at once", 4)
    sums = {"trust": "secure-aggregation", "sums": SumAssumption(2, 3)}
    assert policy("uniform", 4, **sums).plan(10).mu == 1.0
    with raises(ConfigurationError, "conflict", "shares"):
        policy("late", 4, **sums)
