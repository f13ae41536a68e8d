"""Per-sample clipping: the bound holds for every input a model or an attacker can produce."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from murmurfl.privacy import ConfigurationError, clip_per_sample
from murmurfl.privacy.machine.clipping import squared_lengths


@given(
    arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 6)), elements=st.floats(allow_nan=True)),
    st.floats(1e-3, 1e6),
)
def test_no_row_is_longer_than_the_bound_whatever_comes_in(rows, clip_norm):
    clipped = clip_per_sample(rows, clip_norm)
    assert np.isfinite(clipped).all()
    # In exact arithmetic, so measured with integers large enough to be exact.
    for row in clipped:
        from fractions import Fraction

        assert sum(Fraction(float(value)) ** 2 for value in row) <= Fraction(clip_norm) ** 2


def test_a_row_whose_squares_vanish_is_clipped_beside_a_long_one():
    clipped = clip_per_sample(np.array([[1e-160, 0.0], [1.0, 0.0]]), 1e-180)
    assert (clipped[:, 0] > 0).all()
    assert (clipped[:, 0] <= 1e-180).all()


def test_a_row_is_as_long_alone_as_among_others():
    rows = np.random.default_rng(0).normal(size=(3, 10_007))
    assert [squared_lengths(rows[i : i + 1])[0] for i in range(3)] == list(squared_lengths(rows))


def test_short_rows_are_left_alone_and_long_ones_keep_their_direction():
    rows = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    clipped = clip_per_sample(rows, 1.0)
    assert clipped[0] == pytest.approx([0.6, 0.8])
    assert clipped[1] == pytest.approx([0.3, 0.4], rel=1e-15)
    assert (clipped[2] == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_becomes_zero_and_still_counts(bad):
    clipped = clip_per_sample([[1.0, bad], [3.0, 4.0]], 5.0)
    assert clipped.shape == (2, 2)
    assert (clipped[0] == 0).all()
    assert clipped[1] == pytest.approx([3.0, 4.0])


def test_huge_finite_rows_do_not_overflow():
    assert np.linalg.norm(clip_per_sample([[1e300, -1e300]], 2.0)) == pytest.approx(2.0)
    assert np.linalg.norm(clip_per_sample(np.float32([[3e38, 3e38]]), 2.0)) == pytest.approx(2.0)


def test_the_input_is_not_changed():
    rows = np.array([[30.0, 40.0]])
    clip_per_sample(rows, 1.0)
    assert (rows == [[30.0, 40.0]]).all()


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, np.nan, np.inf])
def test_a_bound_that_is_no_bound_is_refused(clip_norm):
    with pytest.raises(ConfigurationError, match="clip_norm"):
        clip_per_sample([[1.0]], clip_norm)
