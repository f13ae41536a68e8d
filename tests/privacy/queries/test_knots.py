"""Private knots: rows that no record makes longer, quantiles that survive bad bounds, features of length at most 1."""

import math

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, CountedColumn, KnotRows, QuerySum, gdp_mu, statistics_policy
from murmurfl.privacy.queries.knots import FineColumn

from tests.harness.errors import raises

AGE, INCOME, CITY = (
    CountedColumn("age", bounds=(0.0, 120.0), whole=True),
    CountedColumn("income", bounds=(-1e6, 1e6)),
    CountedColumn("city", values=("a", "b", "other")),
)
ROWS = KnotRows((AGE, INCOME, CITY), knots=5, rank_share=0.3)


def generator(seed=1):
    return np.random.Generator(np.random.Philox(key=seed))


def values(count, seed=1):
    """Ages, long-tailed incomes of which a part is missing, and cities."""
    random = generator(seed)
    found = np.zeros((count, 7))
    found[:, 0] = random.integers(20, 90, count)
    found[:, 2] = random.lognormal(8.0, 1.0, count)
    found[:, 3] = random.random(count) < 0.2
    found[:, 4:] = np.eye(3)[random.integers(0, 3, count)]
    return found


STRANGE = np.array(
    [
        [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
        [120.0, 0.0, 1e6, 0.0, 0.0, 0.0, 1.0],
        [0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0],
        [1e300, 0.0, -1e300, 0.0, 1.0, 1.0, 1.0],
        [math.nan, 0.0, math.inf, 0.0, 0.0, 0.0, 0.0],
        [-5.0, 7.0, 3.0, -1.0, 0.0, 1.0, 0.0],
    ]
)
"""Records at the ends of what a schema allows, and arrays that no schema makes."""


def test_replacing_any_record_moves_the_sum_by_at_most_root_two():
    rows = ROWS.rows(np.concatenate([values(200), STRANGE]))
    assert np.isfinite(rows).all()
    assert rows.min() >= 0.0
    assert np.square(rows).sum(axis=1).max() <= 1.0 + 1e-12
    apart = np.linalg.norm(rows[:, None] - rows[None], axis=2)
    assert apart.max() <= math.sqrt(2.0) + 1e-12
    assert apart.max() > 1.2  # the bound is nearly attained


def test_a_row_depends_on_its_own_record_to_the_last_bit():
    together = ROWS.rows(np.concatenate([values(64), STRANGE]))
    features = ROWS.features(np.concatenate([values(64), STRANGE[:3]]), ROWS.even)
    for number in (0, 17, 63, 66):
        alone = np.concatenate([values(64), STRANGE])[number : number + 1]
        assert np.array_equal(ROWS.rows(alone)[0], together[number])
        assert np.array_equal(ROWS.features(alone, ROWS.even)[0], features[number])


def knots_of(query, given, std=0.0, seed=2):
    rows = query.rows(given)
    noise = generator(seed).normal(size=query.width) * std
    return query.read(QuerySum(rows.sum(axis=0) + noise, len(rows), 1, std))


def test_knots_without_noise_are_quantiles():
    given = values(4000)
    found = knots_of(ROWS, given)
    orders = np.linspace(0.01, 0.99, 5)
    assert found[1:6] == pytest.approx(np.quantile(given[:, 0], orders), abs=1.0)
    known = given[given[:, 3] == 0.0, 2]
    assert found[6:11] == pytest.approx(np.quantile(known, orders), rel=0.1)


@pytest.mark.parametrize("factor", [1.0, 10.0, 1000.0])
def test_knots_are_as_good_where_bounds_are_far_too_wide(factor):
    given = values(4000)[:, 2:4]
    query = KnotRows((CountedColumn("income", bounds=(0.0, factor * 1e5)),), knots=8)
    std = statistics_policy(mu=0.2).plan(query.width).noise_std
    found = knots_of(query, given, std)
    known = np.sort(given[given[:, 1] == 0.0, 0])
    ranks = np.searchsorted(known, found[1:]) / len(known)
    assert np.abs(ranks - np.linspace(0.01, 0.99, 8)).max() < 0.08


def test_a_value_that_many_records_have_is_one_knot_and_the_others_are_quantiles_of_the_rest():
    given = values(4000)[:, 2:4]
    given[:3000, 0], given[:3000, 1] = 0.0, 0.0
    query = KnotRows((CountedColumn("income", bounds=(0.0, 1e6)),), knots=8)
    found = knots_of(query, given)
    query.checked(found)
    rest = np.sort(given[(given[:, 1] == 0.0) & (given[:, 0] > 0.0), 0])
    assert found[1] == 0.0
    ranks = np.searchsorted(rest, found[2:]) / len(rest)
    assert ranks[:-1] == pytest.approx(np.arange(6) / 6.5, abs=0.1)  # plain quantiles would be two at most
    assert len(np.unique(found[1:])) == 8


def test_values_that_no_record_has_get_no_knots_from_noise():
    """Noise beside three frequent values gets knots if nothing is held against it: in 20 of 20 seeds."""
    query = KnotRows((CountedColumn("visits", bounds=(0.0, 20.0), whole=True),), knots=8)
    given = np.stack([np.repeat([1.0, 4.0, 9.0], [3000, 800, 400]), np.zeros(4200)], axis=1)
    std = statistics_policy(mu=0.2).plan(query.width).noise_std
    for seed in range(20):
        assert set(knots_of(query, given, std, seed)[1:]) <= {1.0, 4.0, 9.0}


def test_knots_span_the_bounds_where_values_have_no_spread_or_hide_in_noise():
    query = KnotRows((CountedColumn("x", bounds=(0.0, 10.0)),), knots=4)
    constant = knots_of(query, np.tile([10.0, 0.0], (50, 1)))
    assert constant[1:].tolist() == [0.0, 10.0, 10.0, 10.0]
    for given, std in ((np.tile([0.0, 1.0], (50, 1)), 0.0), (np.tile([5.0, 0.0], (50, 1)), 1e4)):
        found = knots_of(query, given, std)
        assert found[1:] == pytest.approx(np.linspace(0.1, 9.9, 4))
        query.checked(found)


def test_no_column_of_features_is_longer_than_one():
    random = generator(5)
    for share in (0.0, 0.3, 1.0):
        for trial in range(20):
            ages = np.sort(random.uniform(0.0, 120.0, 5))
            public = np.array([share, *ages, *np.sort(random.uniform(-1e6, 1e6, 5))])
            if trial % 2:
                public[3:6] = public[5]  # merged knots
            features = ROWS.features(np.concatenate([values(100, trial), STRANGE[:3]]), public)
            assert np.square(features[:, :7]).sum(axis=1).max() <= 1.0 + 1e-12
            assert np.square(features[:, 7:14]).sum(axis=1).max() <= 1.0 + 1e-12
            assert np.square(features[:, 14:]).sum(axis=1).max() <= 1.0 + 1e-12


def test_hats_and_rank_reproduce_what_is_linear_between_knots():
    query = KnotRows((CountedColumn("x", bounds=(0.0, 10.0)),), knots=3, rank_share=0.5)
    public = np.array([0.5, 0.0, 4.0, 10.0])
    features = query.features(
        np.array([[0.0, 0.0], [2.0, 0.0], [4.0, 0.0], [7.0, 0.0], [99.0, 0.0], [0.0, 1.0]]), public
    )
    hats = features[:5, :3] / math.sqrt(0.5) + np.array([0.25, 0.5, 0.25])
    assert hats == pytest.approx(np.array([[1, 0, 0], [0.5, 0.5, 0], [0, 1, 0], [0, 0.5, 0.5], [0, 0, 1]]))
    assert features[:5, 3] / math.sqrt(0.5) == pytest.approx([-1.0, -0.5, 0.0, 0.5, 1.0])
    assert features[5].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_knots_that_no_honest_server_sends_are_refused():
    good = ROWS.even
    ROWS.checked(good)
    for place, value in (
        (0, -0.1),
        (0, 1.1),
        (1, -1.0),
        (5, 121.0),
        (3, 200.0),
        (2, math.nan),
        (10, math.inf),
        (7, 9e5),
    ):
        wrong = good.copy()
        wrong[place] = value
        with raises(ConfigurationError, "malformed", "knots"):
            ROWS.checked(wrong)
    for wrong in (good[:-1], np.append(good, 1.0), np.repeat(good[:1], len(good))):
        with raises(ConfigurationError, "malformed", "knots"):
            ROWS.checked(wrong)


def test_an_owner_counts_once_however_many_records_it_has():
    rows = ROWS.rows(values(6)).reshape(2, 3, -1)
    present = np.array([[True, True, True], [True, False, False]])
    found = ROWS.rows_of_owners(rows, present)
    assert found[0] == pytest.approx(rows[0].mean(axis=0))
    assert found[1] == pytest.approx(rows[1, 0])
    assert np.square(found).sum(axis=1).max() <= 1.0 + 1e-12


def test_the_scale_of_a_label_is_from_its_quantiles():
    query = KnotRows((AGE,), knots=4, label=CountedColumn("price", bounds=(0.0, 1e6)))
    labels = generator(3).normal(20_000.0, 3_000.0, 3000)
    public = query.read(QuerySum(query.rows((values(3000)[:, :2], labels)).sum(axis=0), 3000, 1, 0.0))
    assert public[-2:] == pytest.approx(np.quantile(labels, [0.02, 0.98]), rel=0.06)
    scaled = query.scaled(np.append(labels, [1e9, -1e9]), public)
    assert np.abs(scaled).max() == 1.5
    assert query.unscaled(query.scaled(labels[:5], public), public) == pytest.approx(labels[:5])
    assert query.features(values(2)[:, :2], public)[:, -1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("noise", "error"), [(25.0, 0.4), (40.0, 0.5)])
def test_the_scale_of_a_label_bears_noise_that_hides_its_outer_quantiles(noise, error):
    """Both ends of 50 scales are off by less than a part of the scale; the 2 % quantile alone is off by more."""
    query = KnotRows((AGE,), knots=4, label=CountedColumn("price", bounds=(0.0, 1e5)))
    labels = np.clip(generator(3).normal(20_000.0, 3_000.0, 3000), 0.0, 1e5)
    total = query.rows((values(3000)[:, :2], labels)).sum(axis=0)
    exact = np.quantile(labels, [0.02, 0.98])
    allowed, off, plain = error * (exact[1] - exact[0]), [], []
    for seed in range(50):
        found = QuerySum(total + generator(seed).normal(0.0, noise, query.width), 3000, 1, noise)
        off.append(np.abs(query.read(found)[-2:] - exact).max())
        plain.append(np.abs(query._counts.read(found).columns[-1].places_of(np.array([0.02, 0.98])) - exact).max())
    assert max(off) < allowed < max(plain)


def test_the_scale_of_a_label_is_that_of_its_bounds_where_there_is_nothing_but_noise():
    query = KnotRows((AGE,), knots=4, label=CountedColumn("price", bounds=(0.0, 1e5)))
    total = query.rows((values(300)[:, :2], np.full(300, 5e4))).sum(axis=0)
    found = QuerySum(total + generator(1).normal(0.0, 60.0, query.width), 300, 1, 60.0)
    assert query.read(found)[-2:].tolist() == [0.0, 1e5]


def test_no_row_with_a_label_is_longer_than_one():
    query = KnotRows((AGE, INCOME, CITY), knots=5, label=CountedColumn("price", bounds=(0.0, 1e5)))
    rows = query.rows((STRANGE, np.array([0.0, 1e5, math.nan, 1e300, -math.inf, 3.0])))
    assert (rows >= 0.0).all()
    assert np.linalg.norm(rows, axis=1).max() <= 1.0 + 1e-12


def test_the_grid_has_equal_steps_and_equal_ratios():
    grid = FineColumn("income", bounds=(-10.0, 1e6)).grid
    assert grid[0] == -10.0
    assert grid[-1] == 1e6
    assert 0.0 in grid
    assert (np.diff(grid) > 0).all()
    assert np.diff(grid).max() <= 1.001 * (1e6 + 10.0) / 255
    positive = grid[grid >= 1e-2]
    assert (positive[1:] / positive[:-1]).max() < 1.1
    assert len(FineColumn("age", bounds=(0.0, 120.0), whole=True).grid) == 121


def test_a_table_without_numbers_is_refused_as_are_impossible_settings():
    with raises(ConfigurationError, "missing", "model"):
        KnotRows((CITY,))
    for knots in (1, 65, True, 2.5):
        with raises(ConfigurationError, "out-of-range", "model.knots"):
            KnotRows((AGE,), knots=knots)
    with raises(ConfigurationError, "out-of-range", "model.rank-share"):
        KnotRows((AGE,), rank_share=1.5)


def test_the_policy_of_the_release_has_the_mu_that_was_asked_for():
    mu = gdp_mu(0.5, 1e-5)
    owners = ROWS.policy(mu, samples_per_owner=3)
    assert owners.clip_unit == "sample", "a row of an owner is clipped, and nothing else is known of it"
    ROWS.check_policy(owners)
    assert owners.plan(ROWS.width).sensitivity == pytest.approx(2.0, rel=1e-3)
    plan = ROWS.policy(mu).plan(ROWS.width)
    assert plan.loss.mu <= mu * (1 + 1e-9)
    assert plan.sensitivity == pytest.approx(math.sqrt(2.0), rel=1e-3)
