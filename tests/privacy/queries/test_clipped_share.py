"""How many gradients are clipped, as a part of a release: how long rows are, and what their sum says."""

import math

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.queries.clipped_share import CountedRows

from tests.harness.errors import raises

NORMS = np.array([0.0, 1e-200, 0.3, 0.7, 0.7000001, 5.0, 1e150])
CLIPS = [1e-100, 1e-3, 0.7, 3.0, 1e12, 1e300]


@pytest.mark.parametrize("share", [1e-6, 0.02, 0.5, 0.99])
@pytest.mark.parametrize("clip", CLIPS)
def test_no_row_is_longer_than_one_and_some_are_as_long(share, clip):
    rows = CountedRows(share)
    lengths = np.hypot(rows.scales(NORMS, clip) * NORMS, rows.marks(NORMS, clip))
    assert (lengths <= 1.0 + 1e-12).all()
    beyond = clip < NORMS
    assert lengths[beyond] == pytest.approx(1.0)


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_marks_take_their_share_of_the_squared_distance_of_rows(share):
    rows, norms = CountedRows(share), np.array([0.7, 2.0])  # within, and beyond
    marks = rows.marks(norms, 0.7)
    apart = rows.scales(norms, 0.7) @ norms  # of opposite gradients
    assert (marks[0] - marks[1]) ** 2 == pytest.approx(share * 4)
    assert apart**2 + (marks[0] - marks[1]) ** 2 == pytest.approx(4.0)


def test_mean_row_gives_mean_gradient_and_share_within():
    gradients = np.random.Generator(np.random.Philox(key=6)).normal(size=(50, 3))
    norms = np.linalg.norm(gradients, axis=1)
    rows = CountedRows(0.1)
    made = np.column_stack([rows.scales(norms, 1.5)[:, None] * gradients, rows.marks(norms, 1.5)])
    mean, within = rows.read(made.mean(axis=0), 1.5)
    assert mean == pytest.approx((gradients * np.minimum(1.0, 1.5 / norms)[:, None]).mean(axis=0))
    assert within == pytest.approx((norms <= 1.5).mean())
    for noise, expected in ((9.0, 1.0), (-9.0, 0.0)):
        assert rows.read(np.array([0.0, noise]), 1.5)[1] == expected


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_gradient_of_unknown_length_makes_a_row_of_nan(norm):
    assert math.isnan(CountedRows(0.1).scales(np.array([norm]), 1.0)[0])


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, math.nan, True])
def test_impossible_shares_are_refused(share):
    with raises(ConfigurationError, "out-of-range", "share"):
        CountedRows(share)
