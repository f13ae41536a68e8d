"""The mean of features: what one sample can change of it, what that costs, and that a centre tells nothing more."""

import itertools
import math

import numpy as np
import pytest
from murmurfl.privacy import (
    ConfigurationError,
    MemoryLedger,
    Privatizer,
    RefusedError,
    SimulatedKeys,
    centred,
    centring_policy,
    compose_gdp,
    divided_mu,
    protocol,
)
from murmurfl.privacy.release.clipping import SUMMING_ERROR

from tests.harness.errors import raises

S = 1.0
ENTRIES = (-2.0, -1.0, -0.5, 0.0, 0.25, 0.6, 0.8, 1.0, 3.0, 1e200)
# Every row of two such values, and those that nobody's features have.
ROWS = np.array([*itertools.product(ENTRIES, repeat=2), (math.nan, 1.0), (math.inf, 0.5), (-math.inf, math.nan)])


def client(rows, *, nonnegative=True, ledger=None, budget=1.0, mu=1.0, mechanism=""):
    policy = centring_policy(S, nonnegative=nonnegative, mu=mu, budget_mu=budget, mechanism=mechanism)
    ledger = MemoryLedger() if ledger is None else ledger
    return Privatizer(policy, rows.shape[1], len(rows), ledger, SimulatedKeys(1, "a"))


def sums(subject, of):
    """The noiseless sum of every data set: a row of ``of`` beside two that stay."""
    still = np.array([[0.6, 0.8], [-1.0, 0.3]])
    sets = [np.vstack([still, row]) for row in of]
    return np.array([subject._contribution_counts(rows.__getitem__, slice(0, 3)) for rows in sets])


def largest_move(subject, of=ROWS):
    """How far apart the sums of two neighbouring data sets are, at most: all pairs, in counts of the grid, exactly."""
    counts = sums(subject, of)
    gaps = counts[:, None] - counts[None]
    squares = [sum(int(value) ** 2 for value in gap) for gap in gaps.reshape(-1, gaps.shape[-1])]
    return math.sqrt(max(squares)) * subject.plan.grid.spacing


@pytest.mark.parametrize(("nonnegative", "distance"), [(True, math.sqrt(2)), (False, 2.0)])
def test_replacing_a_sample_moves_the_mean_by_the_sensitivity(nonnegative, distance):
    subject = client(ROWS[:3], nonnegative=nonnegative, mechanism="none")
    charged = client(ROWS[:3], nonnegative=nonnegative).plan
    assert charged.sensitivity == pytest.approx(distance * S, rel=2e-3)
    assert charged.sensitivity >= distance * S * (1 + SUMMING_ERROR)
    moved = largest_move(subject)
    assert 0.999 * distance * S < moved <= subject.plan.sensitivity


def test_a_mean_is_made_of_all_samples_of_a_client():
    rows = np.array([[0.6, 0.8], [-1.0, 0.3], [0.2, 0.0]])
    subject = client(rows, nonnegative=False, mechanism="none")
    release = subject.release("s", 0, rows.__getitem__)
    assert release.samples == 3
    assert release.values == pytest.approx(subject.policy.bound.rows(rows).sum(axis=0), rel=1e-5)


def test_root_of_two_needs_nonnegative_entries():
    """The bug that would be: rows that may be negative, charged as if they were not."""
    planted = client(ROWS[:3], nonnegative=False, mechanism="none")
    assert largest_move(planted) > client(ROWS[:3]).plan.sensitivity


def test_a_mean_s_noise_is_that_of_its_sensitivity_and_its_mu():
    for mu, nonnegative, distance in itertools.product((0.02, 0.1, 1.0), (True, False), (0.5, 4.0)):
        policy = centring_policy(distance, nonnegative=nonnegative, mu=mu)
        plan = policy.plan(588)
        length = distance * (math.sqrt(2) if nonnegative else 2)
        assert plan.mu == mu
        assert length / mu < plan.noise_std < 1.01 * length / mu


def test_each_mean_session_has_one_release_and_pays_anew():
    mean, rest = divided_mu(1.0, 0.05)
    rows, ledger = ROWS[:3], MemoryLedger()
    subject = client(rows, ledger=ledger, mu=mean, budget=1.0)
    subject.release("first", 0, lambda chosen: rows[chosen])
    with raises(RefusedError, "refused", code=protocol.CAP_REACHED):
        subject.release("first", 0, lambda chosen: rows[chosen])
    with raises(RefusedError, "refused", code=protocol.CAP_REACHED):
        subject.release("first", 1, lambda chosen: rows[chosen])
    other = client(rows, ledger=ledger, mu=rest, budget=1.0)
    other.release("second", 0, lambda chosen: rows[chosen])
    with ledger.exclusive() as page:
        assert page.account().spent.mu == pytest.approx(1.0, rel=1e-12)
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="budget"):
        subject.release("third", 0, lambda chosen: rows[chosen])


@pytest.mark.parametrize("mu", [1e-3, 0.25, 1.0, 7.3, 40.0])
@pytest.mark.parametrize("share", [1e-6, 0.05, 0.5, 0.999])
def test_the_mean_and_the_rest_are_together_what_was_wanted(mu, share):
    mean, rest = divided_mu(mu, share)
    assert mean**2 == pytest.approx(share * mu**2, rel=1e-12)
    assert compose_gdp([mean, rest]) == pytest.approx(mu, rel=1e-12)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, math.nan])
def test_a_share_that_leaves_nothing_is_refused(share):
    with raises(ConfigurationError, "out-of-range", "share"):
        divided_mu(1.0, share)


# What is seen from a centre.

FINITE = ROWS[np.isfinite(ROWS).all(axis=1) & (np.abs(ROWS).max(axis=1) < 1e100)]
CENTRES = [
    np.zeros(2),
    np.array([0.3, -0.2]),
    np.array([3.4e38, -3.4e38]),
    np.array([1e-45, 0.0]),
    np.array([0.6, 0.8]),
]


@pytest.mark.parametrize("centre", CENTRES, ids=str)
def test_centred_features_have_norm_1_and_stand_alone(centre):
    seen = centred(FINITE, centre, 0.3)
    assert seen.dtype == np.float32
    assert np.linalg.norm(seen.astype(np.float64), axis=1) == pytest.approx(np.ones(len(FINITE)), rel=1e-6)
    for i, row in enumerate(FINITE):
        assert np.array_equal(centred(row[None], centre, 0.3)[0], seen[i])
    offset = FINITE - centre
    lengths = np.linalg.norm(offset, axis=1)
    expected = np.column_stack([offset / np.where(lengths > 0, lengths, 1)[:, None], np.full(len(FINITE), 0.3)])
    expected /= np.linalg.norm(expected, axis=1)[:, None]
    assert seen == pytest.approx(expected, abs=1e-6)


def test_a_row_that_is_not_finite_is_nan_and_changes_no_other():
    seen = centred(ROWS, np.array([0.1, 0.2]), 0.3)
    finite = np.isfinite(ROWS).all(axis=1) & (np.abs(ROWS).max(axis=1) < 1e100)
    assert np.isnan(seen[-3:]).all()
    assert np.array_equal(seen[finite], centred(FINITE, np.array([0.1, 0.2]), 0.3))
