"""Losses: two sides that stay apart, whose composition is exact for Gaussians and never optimistic for curves."""

import doctest
import itertools
import math

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, Curve, Gaussian, Loss, allocation_profile, gdp_delta, gdp_epsilon
from murmurfl.privacy.accounting import loss
from murmurfl.privacy.accounting.loss import NO_LOSS, as_loss, compose_profiles, total_loss, weakest_loss

from tests.harness.errors import raises

DELTAS = (1e-9, 1e-5, 0.01, 0.3)
EPSILONS = (0.0, 0.3, 1.0, 4.0)
LOSSES = [Loss.of(0.3), Loss.of(1.0, 3.0), Loss.of(0.7, 0.7), Loss.of(2.0, math.inf), NO_LOSS]
triples = pytest.mark.parametrize("parts", itertools.combinations(LOSSES, 3))


def both(found):
    return found.assumed.mu, found.worst_case.mu


def without_mu(mu):
    """A Gaussian's curve, as if nobody knew that it is one."""
    return Curve(lambda epsilon: gdp_delta(mu, epsilon))


def test_the_examples_of_the_documentation_hold():
    found = doctest.testmod(loss)
    assert found.attempted >= 1
    assert not found.failed


@triples
def test_composition_is_commutative_and_associative_to_rounding(parts):
    one, two, three = parts
    together = one.compose(two, three)
    for other in (three.compose(two, one), one.compose(two).compose(three), one.compose(two.compose(three))):
        assert both(other) == pytest.approx(both(together), rel=1e-15)
        assert other.conditional == together.conditional


@triples
def test_each_side_is_the_root_of_its_own_sum_of_squares(parts):
    found = NO_LOSS.compose(*parts)
    assert found.assumed.mu == pytest.approx(math.sqrt(sum(one.assumed.mu**2 for one in parts)), rel=1e-15)
    assert found.worst_case.mu == pytest.approx(math.sqrt(sum(one.worst_case.mu**2 for one in parts)), rel=1e-15)
    assert both(total_loss(parts)) == pytest.approx(both(found), rel=1e-15)
    assert both(weakest_loss(parts)) == tuple(max(mus) for mus in zip(*map(both, parts), strict=True))


@pytest.mark.parametrize("budget", [Loss.of(3.0), Loss.of(3.0, 5.0)])
@pytest.mark.parametrize("spent", [NO_LOSS, Loss.of(1.0), Loss.of(1.0, 2.0), Loss.of(2.9, 2.99)])
def test_what_is_spent_and_left_is_the_budget(budget, spent):
    together = budget.left_of(spent).compose(spent)
    assert both(together) == pytest.approx(both(budget), rel=1e-12)


@pytest.mark.parametrize(
    ("spent", "left"),
    [(Loss.of(4.0), (0.0, 0.0)), (Loss.of(2.0, 9.0), (math.sqrt(5.0), 0.0)), (LOSSES[3], (5**0.5, 0))],
)
def test_nothing_is_left_of_a_side_that_is_overspent(spent, left):
    assert both(Loss.of(3.0).left_of(spent)) == pytest.approx(left)


def test_a_loss_without_assumption_has_one_figure_on_both_sides():
    plain, sums = Loss.of(2.0), Loss.of(2.0, 2.0)
    assert (plain.conditional, plain.mus, both(plain)) == (False, (2.0, None), (2.0, 2.0))
    assert (sums.conditional, sums.mus) == (True, (2.0, 2.0))
    assert as_loss(2.0) == plain
    assert as_loss(sums) is sums
    assert Loss.of(1.0, 2.0).unconditional() == plain


def test_what_holds_in_the_worst_case_holds():
    assert Loss.of(3.0, 2.0).tightened() == Loss.of(2.0, 2.0)
    assert Loss.of(1.0, 2.0).tightened() == Loss.of(1.0, 2.0)
    assert Loss.of(1.0, 2.0).under_weaker(1.5) == Loss.of(1.5, 2.0)
    assert Loss.of(1.0, 2.0).under_weaker(5.0) == Loss.of(2.0, 2.0)
    assert Loss.of(1.0, 2.0).times(3.0) == Loss.of(3.0, 6.0)


@pytest.mark.parametrize("made", [Loss.of(1.0), Loss.of(1.0, 4.0), Loss.of(1.0, 1.0)])
def test_entries_are_read_as_they_were_written(made):
    assert Loss.stated(made.statement()) == made
    assert Loss.of(*made.mus) == made


def test_a_document_has_null_for_no_bound_and_for_no_assumption():
    assert Loss.of(1.0).document(1e-5) == {
        "mu": 1.0,
        "epsilon": gdp_epsilon(1.0, 1e-5),
        "mu_local": None,
        "epsilon_local": None,
    }
    summed = Loss.of(1.0, 2.0).document(1e-5)
    assert (summed["mu_local"], summed["epsilon_local"]) == (2.0, gdp_epsilon(2.0, 1e-5))
    assert set(Loss.of(math.inf, math.inf).document(1e-5).values()) == {None}


def test_the_weakest_of_nothing_is_refused():
    with raises(ConfigurationError, "out-of-range", "losses"):
        weakest_loss([])


def test_gaussians_compose_exactly():
    assert compose_profiles([Gaussian(3.0), Gaussian(4.0)]) == Gaussian(5.0)
    assert compose_profiles([]) == Gaussian(0.0)
    assert Gaussian(1.0).epsilon(1e-5) == gdp_epsilon(1.0, 1e-5)
    assert Gaussian(1.0).delta(2.0) == gdp_delta(1.0, 2.0)


@pytest.mark.parametrize("delta", DELTAS)
def test_a_curve_has_the_epsilon_of_what_it_is_the_curve_of(delta):
    found = without_mu(1.3).epsilon(delta)
    assert gdp_delta(1.3, found) <= delta, "an upper bound"
    assert found == pytest.approx(gdp_epsilon(1.3, delta), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mus", [(0.5, 1.2), (0.1, 0.1, 0.1), (2.0, 0.0)])
def test_composed_curves_are_never_optimistic(mus):
    """Their truth is known: the composition of the Gaussians that they are the curves of."""
    truth = math.hypot(*mus)
    for profiles in (map(without_mu, mus), [Gaussian(mus[0]), *map(without_mu, mus[1:])]):
        found = compose_profiles(profiles)
        assert math.isinf(found.mu), "nobody knows a mu of it"
        assert all(found.epsilon(delta) >= gdp_epsilon(truth, delta) for delta in DELTAS)
        assert all(found.delta(epsilon) >= gdp_delta(truth, epsilon) for epsilon in EPSILONS)


def test_composed_curves_do_not_depend_on_their_order():
    parts = [without_mu(0.4), Gaussian(1.0), allocation_profile(1.0, 50), Gaussian(0.2)]
    values = [[compose_profiles(order).epsilon(delta) for delta in DELTAS] for order in itertools.permutations(parts)]
    nested = compose_profiles([compose_profiles(parts[:2]), compose_profiles(parts[2:])])
    np.testing.assert_allclose(values, [values[0]] * len(values), rtol=1e-12)
    np.testing.assert_allclose([nested.epsilon(delta) for delta in DELTAS], values[0], rtol=1e-12)


def test_a_secret_order_is_booked_as_a_curve_and_never_above_its_mu():
    hidden = allocation_profile(1.0, 100)
    assert hidden.epsilon(1e-5) < 0.4 < gdp_epsilon(1.0, 1e-5)
    assert hidden.mu == 1.0
    two = compose_profiles([hidden, hidden])
    assert hidden.epsilon(1e-5) < two.epsilon(1e-5) <= gdp_epsilon(math.sqrt(2.0), 1e-5)
    assert two.delta(two.epsilon(1e-5)) <= 1e-5 * (1 + 1e-9)


def test_a_curve_that_bounds_nothing_has_no_epsilon():
    nothing = Curve(lambda epsilon: 1.0)
    assert nothing.epsilon(1e-5) == math.inf
    assert nothing.delta(3.0) == 1.0
    assert compose_profiles([nothing, Gaussian(1.0)]).delta(3.0) == 1.0


def test_what_ledgers_count_of_a_curve_without_mu_is_everything():
    session = Loss(Curve(lambda epsilon: 0.0), Gaussian(1.0))
    assert both(total_loss([session])) == (math.inf, 1.0)
    assert both(Loss.of(3.0, 3.0).left_of(session)) == (0.0, pytest.approx(math.sqrt(8.0)))


def test_a_curve_is_not_given_up_for_a_worst_case_without_a_mu_either():
    curve = without_mu(1.0)
    assert Loss(curve, Gaussian(math.inf)).tightened().assumed is curve
    assert both(Loss(curve, Gaussian(2.0)).tightened()) == (2.0, 2.0)


def test_each_operation_keeps_the_sides_apart():
    """A false guarantee, if assumed and worst case were exchanged or one of them were lost on the way."""
    one, other = Loss.of(1.0, 10.0), Loss.of(2.0, 20.0)
    for found in (one.compose(other), total_loss([one, other]), weakest_loss([one, other]), one.times(2.0)):
        assert found.conditional
        assert found.worst_case.mu == pytest.approx(10 * found.assumed.mu)
    assert both(one.compose(Loss.of(3.0))) == pytest.approx((math.hypot(1, 3), math.hypot(10, 3)))


@pytest.mark.parametrize("together", [total_loss, weakest_loss, lambda losses: NO_LOSS.compose(*losses)])
def test_one_assumption_makes_the_whole_conditional_and_none_leaves_it_so(together):
    mixed = together([Loss.of(3.0), Loss.of(1.0, 10.0)])
    assert mixed.conditional
    assert mixed.worst_case.mu >= 10.0, "the worst case is not dropped"
    assert not together([Loss.of(3.0), Loss.of(1.0)]).conditional
