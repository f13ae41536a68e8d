"""Values that nobody listed are named above a threshold: exact probabilities, and what the ledger books of them."""

import itertools
import math

import numpy as np
import pytest
from murmurfl.privacy import (
    ConfigurationError,
    MemoryLedger,
    RefusedError,
    SimulatedKeys,
    SQLiteLedger,
    gdp_delta,
    gdp_epsilon,
    gdp_mu,
    protocol,
    read_ledger,
)
from murmurfl.privacy.errors import InvalidRecordError
from murmurfl.privacy.release.named_values import MOST_NAMED, NamedValues, value_threshold
from scipy.stats import norm

from tests.harness.errors import raises

SMALL = {"delta": 0.5, "budget_mu": 3.0}
"""A ledger whose delta is so large that what it admits is seen in a few hundred releases."""


def names(columns, records, *, mu=1.0, added=0.2, seed=0, ledger=None, **terms):
    made = NamedValues(
        columns, mu, added, records, ledger or MemoryLedger(), SimulatedKeys(seed, "1"), **{**SMALL, **terms}
    )
    assert made.plan.loss.added_delta == added
    return made


def named_probability(one, count):
    """The probability that a value with this count is named, but for the grid."""
    return float(norm.sf((one.threshold - count) / one.plan.noise_std))


@pytest.mark.parametrize("columns", [1, 3])
def test_a_value_of_one_record_is_named_as_rarely_as_is_charged(columns):
    records, runs, added = 30, 600, 0.3
    rows = [["common"] * columns for _ in range(records - 1)] + [[f"own {i}" for i in range(columns)]]
    found = 0
    for seed in range(runs):
        one = names(columns, records, added=added, seed=seed)
        found += sum("own" in value for of in one.release("s", rows.__getitem__) for value in of)
    q = added / (2 * columns)
    expected, std = runs * columns * q, math.sqrt(runs * columns * q * (1 - q))
    assert abs(found - expected) < 4.5 * std  # false alarms: 7e-6; half or twice of q would be 8 deviations away


def law(one, counts, values):
    """Probabilities of every set of values that may be named, for exact counts: column by column, then all."""
    made = {}
    chances = [named_probability(one, counts[value]) if counts.get(value) else 0.0 for value in values]
    for outcome in itertools.product([False, True], repeat=len(values)):
        made[outcome] = math.prod(p if is_named else 1.0 - p for is_named, p in zip(outcome, chances, strict=True))
    return made


def divergence(left, right, epsilon):
    return sum(max(left[one] - math.exp(epsilon) * right[one], 0.0) for one in left)


NEIGHBOURS = [
    # the replaced record has a value of its own in each column, before, after, or both
    ({("a", i): 1 for i in range(3)}, {("b", i): 1 for i in range(3)}),
    ({("c", i): 4 for i in range(3)}, {("c", i): 3 for i in range(3)} | {("b", i): 1 for i in range(3)}),
    ({("c", 0): 5, ("a", 1): 1, ("c", 2): 2}, {("c", 0): 4, ("b", 0): 1, ("c", 1): 1, ("b", 2): 1, ("c", 2): 1}),
]


def exceeds(one, added, mu):
    """Whether any pair of neighbours is further apart than mu and the added delta allow, at any of some epsilons."""
    for before, after in NEIGHBOURS:
        values = sorted({*before, *after})
        laws = law(one, before, values), law(one, after, values)
        for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0, 4.0):
            for left, right in (laws, laws[::-1]):
                if divergence(left, right, epsilon) > gdp_delta(mu, epsilon) + added:
                    return True
    return False


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.5])
@pytest.mark.parametrize("added", [1e-6, 0.01, 0.3])
def test_neighbours_are_no_further_apart_than_mu_and_the_added_delta(mu, added):
    one = names(3, 12, mu=mu, added=added)
    assert not exceeds(one, added, mu)


@pytest.mark.parametrize("added", [1e-6, 0.01])
def test_a_threshold_for_one_column_or_without_noise_would_be_caught(added):
    one = names(3, 12, mu=0.05, added=added)
    std, spacing = one.plan.noise_std, one.plan.grid.spacing
    one.threshold = value_threshold(std, spacing, 1, 2.0 * added)  # a single column, and one value of the two
    assert exceeds(one, added, 0.05)
    one.threshold = value_threshold(0.0, spacing, 3, added)
    assert exceeds(one, added, 0.05)


def test_a_value_that_occurs_nowhere_is_never_named_and_missing_ones_are_not_counted():
    rows = [["a"], [None], ["a"], [7], ["b"]]
    for seed in range(200):
        found = names(1, 5, added=0.49, seed=seed).release("s", rows.__getitem__)
        assert set(found[0]) <= {"a", "b"}


def test_frequent_values_are_named_the_most_frequent_first_and_only_so_many():
    counts = {f"v{i}": 4000 - 50 * i for i in range(MOST_NAMED + 10)}
    values = [value for value, count in counts.items() for _ in range(count)]
    random = np.random.Generator(np.random.Philox(key=1))
    random.shuffle(values)
    (found,) = names(1, len(values), added=1e-6).release("s", lambda record: [values[record]])
    assert found == tuple(sorted(counts, key=lambda value: -counts[value])[:MOST_NAMED])


def test_a_record_that_cannot_be_read_counts_as_none_and_shows_nowhere():
    def texts(record):
        if record == 3:
            raise InvalidRecordError("a record that is not to be seen")
        if record == 4:
            raise ZeroDivisionError
        return ["a"]

    assert names(1, 60, added=1e-3).release("s", texts) == [("a",)]


def test_a_session_is_released_once_and_booked_with_its_added_delta(tmp_path):
    path = tmp_path / "a.ledger"
    budget = gdp_mu(1.0, 1e-5)
    ledger = SQLiteLedger.create(path, budget_mu=budget, delta=1e-5)
    terms = {"delta": 1e-5, "budget_mu": budget, "data": lambda record: b"%d" % record}
    mu = gdp_mu(0.6, 9e-6)
    one = NamedValues(1, mu, 1e-6, 100, ledger, ledger.keys(), **terms)
    one.release("s", lambda record: ["a"])
    with raises(RefusedError, "refused", code=protocol.CAP_REACHED):
        one.release("s", lambda record: ["a"])
    summary = read_ledger(path)
    assert (summary.spent.mu, summary.spent.added_delta) == (pytest.approx(mu), 1e-6)
    assert summary.spent.assumed.epsilon(1e-5) == pytest.approx(0.6) == pytest.approx(gdp_epsilon(mu, 9e-6))
    assert summary.spent.assumed.epsilon(1e-6) == math.inf  # less than what is booked says nothing
    second = NamedValues(1, mu, 1e-6, 100, ledger, ledger.keys(), **terms)
    second.release("t", lambda record: ["a"])
    assert read_ledger(path).spent.added_delta == 2e-6
    assert read_ledger(path).spent.assumed.epsilon(1e-5) <= 1.0
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED):
        second.release("u", lambda record: ["a"])


def test_a_budget_covers_epsilon_with_the_added_delta_and_not_mu_alone(tmp_path):
    budget = gdp_mu(1.0, 1e-5)
    terms = {"delta": 1e-5, "budget_mu": budget, "data": lambda record: b"%d" % record}
    for number, (mu, fits) in enumerate(
        [(budget, False), (gdp_mu(1.0, 9e-6) * 1.001, False), (gdp_mu(1.0, 9e-6), True)]
    ):
        path = tmp_path / f"{number}.ledger"
        ledger = SQLiteLedger.create(path, budget_mu=budget, delta=1e-5)
        one = NamedValues(1, mu, 1e-6, 100, ledger, ledger.keys(), **terms)
        if fits:
            assert one.release("s", lambda record: ["a"]) == [("a",)]
            assert read_ledger(path).left.mu == pytest.approx(0.0, abs=1e-4)
            continue
        with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED):
            one.release("s", lambda record: ["a"])
        assert read_ledger(path).spent.mu == 0.0


def test_an_added_delta_that_is_all_of_delta_is_refused():
    for added in (0.0, 0.5, 0.6, math.nan):
        with raises(ConfigurationError, "out-of-range", "added_delta"):
            NamedValues(1, 1.0, added, 10, MemoryLedger(), SimulatedKeys(1, "1"), **SMALL)
