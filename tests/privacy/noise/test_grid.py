"""The fixed grid: exact, independent of order, and loud where it would overflow."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from murmurfl.privacy import ConfigurationError, Grid
from murmurfl.privacy.noise import power_of_two_at_most


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20), st.integers(-30, 0))
def test_rounding_moves_a_value_by_at_most_half_a_spacing(values, exponent):
    grid = Grid(2.0**exponent)
    values = np.array(values)
    assert (np.abs(grid.values(grid.counts(values)) - values) <= grid.spacing / 2).all()


def test_sums_of_counts_do_not_depend_on_their_order():
    generator = np.random.Generator(np.random.Philox(key=1))
    values = generator.normal(size=(500, 7)) * 10.0 ** generator.integers(-6, 4, size=(500, 1))
    grid = Grid(2.0**-30)
    counts = grid.counts(values)
    shuffled = counts[generator.permutation(500)]
    assert (counts.sum(axis=0) == shuffled.sum(axis=0)).all()
    # As float64, in any order, because every partial sum is a multiple of the spacing below 2^53 of them.
    assert (grid.values(counts).sum(axis=0) == grid.values(shuffled).sum(axis=0)).all()


@pytest.mark.parametrize("spacing", [0.0, -1.0, 0.3, np.inf, np.nan])
def test_a_spacing_that_is_no_power_of_two_is_refused(spacing):
    with pytest.raises(ConfigurationError, match="power of two"):
        Grid(spacing)


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0**60])
def test_values_that_do_not_fit_are_refused_and_never_wrapped(value):
    with pytest.raises(ConfigurationError, match="2\\^51"):
        Grid(1.0).counts(np.array([0.0, value]))


@given(st.floats(1e-300, 1e300))
def test_power_of_two_at_most(value):
    power = power_of_two_at_most(value)
    assert power <= value < 2 * power


@given(st.lists(st.integers(-(2**52), 2**52).map(lambda n: n / 2), min_size=1))
def test_rounding_is_to_the_nearest_and_ties_go_to_even(values):
    values = np.array(values)[np.abs(values) < 2.0**51]
    assert (Grid(1.0).counts(values) == np.rint(values).astype(np.int64)).all()
    assert (Grid(1.0).counts(values, bound=2.0**50) == np.rint(values).astype(np.int64)).all()


def test_a_bound_that_does_not_fit_is_refused():
    with pytest.raises(ConfigurationError, match="2\\^51"):
        Grid(1.0).counts(np.zeros(2), bound=2.0**51)
