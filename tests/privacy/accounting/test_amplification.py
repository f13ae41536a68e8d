"""What a secret order is said to be worth: a bound where it is proved, elsewhere what is called an estimate."""

import math
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.privacy import Guarantee, PrivacyPolicy, gdp_epsilon, policy_guarantee
from murmurfl.privacy.accounting.amplification import (
    Amplification,
    _estimate,
    allocation_epsilon,
    amplification_of,
    amplification_of_all,
    zero_out_shift,
)

D = 50


def policy(**changes):
    common = {"clip_norm": 1.0, "batch_size": 4, "max_participations": 20, "mu": 1.0, "order": "secret"}
    return PrivacyPolicy(**{**common, "mechanism": "independent", **changes})


def amplified(**changes):
    made = policy(**changes)
    return amplification_of(made, made.plan(D))


def test_independent_noise_has_a_proof_and_its_figure_is_that_of_the_accountant():
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
    assert amplified(order="in-turn") is None
    assert amplified(mechanism="none", order="secret") is None
    assert amplified(mechanism="cancelling", max_participations=600) is None


def test_under_secure_aggregation_releases_must_stand_alone():
    sums = {"trust": "secure-aggregation", "min_honest": 4, "min_cohort": 5}
    alone = amplified(**sums, release_rule="paper")
    assert alone.proved
    assert alone.epsilon == pytest.approx(amplified().epsilon, rel=0.01)
    assert amplified(**sums) is None


def test_of_several_machines_the_one_with_the_fewest_releases_counts():
    policies = [policy(max_participations=slots) for slots in (20, 10, 40)]
    machines = [(one, one.plan(D)) for one in policies]
    found, alone = amplification_of_all(machines), amplification_of(*machines[1])
    assert found.slots == 10
    assert alone.epsilon <= found.epsilon < 1.001 * alone.epsilon
    turn = policy(order="in-turn")
    assert amplification_of_all([*machines, (turn, turn.plan(D))]) is None
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


def test_where_nothing_is_guaranteed_or_nobody_is_asked_no_order_is_worth_anything():
    known = Amplification(0.1, 5, proved=True)
    assert policy_guarantee(policy(mechanism="none"), math.inf, amplified=known).amplified is None
    assert policy_guarantee(policy(), 0.0, amplified=known).amplified is None
    assert Guarantee(1.0, 1e-5, "tree noise").document()["epsilon_amplified"] is None


def test_a_secret_order_costs_a_policy_no_noise():
    secret, turn = policy(), policy(order="in-turn")
    assert secret.plan(D).noise_std == pytest.approx(turn.plan(D).noise_std, rel=1e-6)
    assert secret.plan(D).mu == turn.plan(D).mu == 1.0
    assert replace(secret, order="in-turn") == turn
