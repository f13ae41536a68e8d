"""The rows of private statistics: what one record can change of their sum, and what is read from it."""

import itertools
import math

import numpy as np
import pytest
from murmurfl.privacy import (
    ConfigurationError,
    CountedColumn,
    MemoryLedger,
    Privatizer,
    RefusedError,
    SimulatedKeys,
    StatisticsRows,
    SumAssumption,
    protocol,
    row_bytes,
    statistics_policy,
)
from murmurfl.privacy.queries import statistics
from murmurfl.privacy.release.clipping import SUMMING_ERROR

from tests.harness.errors import raises

AGE, WARD = CountedColumn("age", (0.0, 3.0), whole=True), CountedColumn("ward", values=("a", "b", "other"))
HEIGHT = CountedColumn("height", (-1.0, 1.0))
PLACES = (0.0, 0.4, 0.999, 1.0, 2.5, 3.0, 4.0, -1.0, 1e308, math.nan, math.inf, -math.inf)
ROOT_OF_TWO = math.sqrt(2)


def client(width, records=3, *, mu=1.0, ledger=None, **fields):
    ledger = MemoryLedger() if ledger is None else ledger
    return Privatizer(
        statistics_policy(mu, **fields), width, records, ledger, SimulatedKeys(1, "a"), data=row_bytes(np.zeros(9))
    )


def largest_move(subject, rows):
    """How far apart the sums of two neighbouring data sets are, at most: all pairs of records, exactly."""
    still = np.eye(subject.num_parameters)[:2]
    sums = [subject._contribution_counts(np.vstack([still, row]).__getitem__, slice(0, 3)) for row in rows]
    counts = np.unique(np.array(sums), axis=0).astype(object)
    squares = max(sum(value**2 for value in one - other) for one in counts for other in counts)
    return math.sqrt(squares) * subject.plan.grid.spacing


@pytest.mark.parametrize(
    ("columns", "share"), [((WARD,), 0.0), ((AGE,), 0.4), ((AGE, WARD), 0.0), ((AGE, WARD), 0.7)], ids=str
)
def test_replacing_a_record_moves_the_sum_by_the_sensitivity(columns, share):
    rows = StatisticsRows(columns, last_share=share)
    made = rows.rows(np.array([*itertools.product(PLACES, repeat=len(columns))]))
    noiseless = client(rows.width, mechanism="none")
    moved = largest_move(noiseless, made)
    assert 0.999 * ROOT_OF_TWO < moved <= noiseless.plan.sensitivity <= client(rows.width).plan.sensitivity
    assert client(rows.width).plan.sensitivity == pytest.approx(ROOT_OF_TWO * (1 + SUMMING_ERROR), rel=3e-3)
    assert (made >= 0).all()
    assert np.linalg.norm(made, axis=1).max() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("fields", [{}, {"trust": "secure-aggregation", "sums": SumAssumption(4, 5)}], ids=str)
@pytest.mark.parametrize("mu", [0.02, 0.3, 2.0])
def test_the_noise_is_that_of_its_sensitivity_and_its_mu(mu, fields):
    plan = statistics_policy(mu, **fields).plan(257)
    share = math.sqrt(fields["sums"].min_honest if fields else 1)
    assert plan.mu == mu
    assert plan.loss.worst_case.mu == pytest.approx(mu * share, rel=1e-3)
    assert ROOT_OF_TWO / mu < plan.noise_std * share < 1.01 * ROOT_OF_TWO / mu


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6])
def test_a_record_at_places_of_its_own_has_a_row_of_length_one(share):
    rows = StatisticsRows((HEIGHT, AGE, WARD), last_share=share)
    every = np.array([*itertools.product(range(0, 256, 17), range(4), (0, 1, 2, math.nan))])
    assert np.linalg.norm(rows.rows(every), axis=1) == pytest.approx(1.0, abs=1e-12)


def test_a_last_column_with_more_of_a_row_has_less_noise_and_the_others_have_more():
    rows = StatisticsRows((AGE, WARD), last_share=0.8)
    age, ward = rows.counts(rows.rows(np.array([[1.0, 2.0], [3.0, math.nan]])).sum(axis=0), 2, 1.0)
    assert ward.counts == pytest.approx([0, 0, 1, 1], abs=1e-9)
    assert age.counts == pytest.approx([0, 1, 0, 1, 0], abs=1e-9)
    equal = StatisticsRows((AGE, WARD)).counts(np.zeros(rows.width), 2, 1.0)
    assert ward.covariance[0, 0] / equal[1].covariance[0, 0] == pytest.approx(0.5 / 0.8)
    assert age.covariance[0, 0] / equal[0].covariance[0, 0] == pytest.approx(0.5 / 0.2)
    assert rows.settings() != StatisticsRows((AGE, WARD)).settings()
    for share in (-0.1, 1.0, math.nan):
        with raises(ConfigurationError, "out-of-range", "last_share"):
            StatisticsRows((AGE, WARD), last_share=share)


def test_parts_that_each_had_all_of_the_length_are_cut():
    """The planted bug: without the share of 1 / sqrt(d) two columns would move a sum by 2; the client bounds rows."""

    class Longer(StatisticsRows):
        weights = (1.0, 1.0)

    made = Longer((WARD, AGE)).rows(np.array([*itertools.product((0.0, 1.0, 2.0, math.nan), repeat=2)]))
    assert max(np.linalg.norm(one - other) for one in made for other in made) == pytest.approx(2.0)
    subject = client(made.shape[1], mechanism="none")
    assert largest_move(subject, made) <= subject.plan.sensitivity


def test_what_is_read_without_noise_is_what_was_counted():
    rows = StatisticsRows((HEIGHT, AGE, WARD))
    draw = np.random.Generator(np.random.Philox(key=2))
    places = np.stack([draw.uniform(0, 255, 500), draw.integers(0, 4, 500), draw.integers(0, 3, 500)], axis=1)
    places[:40, 0], places[100:110, 2] = math.nan, 7.0
    height, age, ward = rows.counts(rows.rows(places).sum(axis=0), 500, 0.0)
    assert age.counts[:-1] == pytest.approx(np.bincount(places[:, 1].astype(int)), abs=1e-8)
    assert (age.counts[-1], height.counts[-1], ward.counts[-1]) == pytest.approx((0, 40, 10), abs=1e-8)
    assert height.counts[:-1] @ np.arange(256) == pytest.approx(places[40:, 0].sum(), rel=1e-12)
    assert not height.covariance.any()


@pytest.mark.parametrize("places", [16, 64, 256])
def test_a_prefix_and_a_mean_have_the_noise_that_the_docstring_says(places, monkeypatch):
    monkeypatch.setattr(statistics, "STATISTICS_PLACES", places)
    (line,) = (one for one in statistics.__doc__.splitlines() if one.strip().startswith("prefix, largest"))
    (mean,) = (one for one in statistics.__doc__.splitlines() if one.strip().startswith("mean, with"))
    rows = StatisticsRows((CountedColumn("x", (0.0, 1.0)),))
    (found,) = rows.counts(np.zeros(rows.width), places, 1.0)
    spread, at = found.covariance[:-1, :-1], {16: 0, 64: 1, 128: 2, 256: 3}[places]
    below = np.tril(np.ones((places, places)))[:-1] - np.arange(1, places)[:, None] / places
    prefix = math.sqrt(np.einsum("ij,jk,ik->i", below, spread, below).max())
    assert prefix == pytest.approx(float(line.split()[-4:][at]), abs=0.01)
    middle = np.linspace(0, 1, places) - 0.5
    assert math.sqrt(middle @ spread @ middle) == pytest.approx(float(mean.split()[-4:][at]), abs=0.01)
    assert prefix < math.sqrt(places) / 2  # one-hot rows


def spread_of_draws(rows, std, draws=400):
    """Sample variances of counts and prefixes over draws of noise with this standard deviation."""
    random = np.random.Generator(np.random.Philox(key=11))
    totals = random.normal(scale=std, size=(draws, rows.width)) + rows.rows(np.zeros((1, 1)))[0] * 100
    counts = np.array([rows.counts(total, 100, 1.0)[0].counts for total in totals])
    return np.concatenate([counts.var(axis=0, ddof=1), np.cumsum(counts, axis=1)[:, :-1].var(axis=0, ddof=1)])


def covariance_holds(std):
    """Whether variances agree with the covariance that is stated: 9 ratios of chi-square, each within 5 deviations.

    By chance it says no once in a hundred thousand times.
    """
    rows = StatisticsRows((AGE,))
    (found,) = rows.counts(np.zeros(rows.width), 100, 1.0)
    below = np.tril(np.ones((5, 5)))[:-1]
    stated = np.concatenate([np.diag(found.covariance), np.einsum("ij,jk,ik->i", below, found.covariance, below)])
    return (np.abs(spread_of_draws(rows, std) / stated - 1) < 5 * math.sqrt(2 / 400)).all()


def test_the_covariance_is_that_of_the_noise():
    assert covariance_holds(1.0)
    assert not covariance_holds(1.3)  # the planted bug


def test_each_session_has_one_release_and_pays_anew():
    ledger, rows = MemoryLedger(), np.eye(4)
    subject = client(4, ledger=ledger, mu=0.6, budget_mu=1.0)
    subject.release("first", 0, rows.__getitem__)
    with raises(RefusedError, "refused", code=protocol.CAP_REACHED):
        subject.release("first", 1, rows.__getitem__)
    subject.release("second", 0, rows.__getitem__)
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="budget"):
        subject.release("third", 0, rows.__getitem__)


def test_statistics_without_noise_have_none():
    assert statistics_policy(1.0, mechanism="none").plan(4).noise_std == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CountedColumn("x"), "bounds or values"),
        (lambda: CountedColumn("x", (0, 1), values=("a",)), "one of them"),
        (lambda: CountedColumn("x", (1.0, 1.0)), "lowest and highest"),
        (lambda: CountedColumn("x", (0.0, math.inf)), "lowest and highest"),
        (lambda: StatisticsRows(()), "at least one column"),
        (lambda: StatisticsRows((AGE, AGE)), "a name twice"),
        (lambda: StatisticsRows(tuple(CountedColumn(str(i), (0.0, 1.0)) for i in range(4200))), "at most 1,048,576"),
    ],
)
def test_columns_that_cannot_be_counted_are_refused(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()
