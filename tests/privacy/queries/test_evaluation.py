"""An evaluation's release: what one sample can change of it, what that costs, and what is read from it.

A private count moves by one when one sample does, whatever says what holds, and is near the true one.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.privacy import (
    ConfigurationError,
    EvaluationRows,
    Measured,
    MemoryLedger,
    PrivacyPolicy,
    Privatizer,
    RefusedError,
    SimulatedKeys,
    SumAssumption,
    SystemKeys,
    evaluation_policy,
    protocol,
    row_bytes,
)
from murmurfl.privacy.queries.evaluation import counted, counting_policy, release_count
from murmurfl.privacy.release.clipping import SUMMING_ERROR

from tests.harness.errors import raises
from tests.privacy.clients import DATA, DurableLedger

RIGHT = (0.0, 1.0, 0.3, -2.0, 7.0, 1e300, math.nan, math.inf, -math.inf)
SCORES = (0.0, 0.49, 0.5, 1.0, 3.0, -1.0, 1e300, math.nan, math.inf)
CLASSES = (0, 1, 2, -1, 0.5, math.nan)
SAMPLES = np.array([*itertools.product(RIGHT, SCORES, CLASSES)])


def client(width, samples=3, *, mu=1.0, ledger=None, keys=None, **fields):
    policy = evaluation_policy(mu, **fields)
    ledger = MemoryLedger() if ledger is None else ledger
    return Privatizer(policy, width, samples, ledger, keys or SimulatedKeys(1, "a"), data=row_bytes(np.zeros(9)))


def sums_of(subject, rows_of):
    """The noiseless sum of every data set: one more sample beside two that stay, in counts of the grid."""
    still = np.eye(subject.num_parameters)[:2]
    sets = [np.vstack([still, row]) for row in rows_of]
    return np.array([subject._contribution_counts(rows.__getitem__, slice(0, 3)) for rows in sets])


def largest_move(subject, rows_of):
    """How far apart the sums of two neighbouring data sets are, at most: all pairs, exactly."""
    counts = np.unique(sums_of(subject, rows_of), axis=0).astype(object)
    squares = max(sum(value**2 for value in one - other) for one in counts for other in counts)
    return math.sqrt(squares) * subject.plan.grid.spacing


@pytest.mark.parametrize("rows", [EvaluationRows(), EvaluationRows(2), EvaluationRows(5, 0.9)], ids=str)
def test_replacing_a_sample_moves_the_sum_by_the_sensitivity(rows):
    made = rows.rows(Measured(*SAMPLES.T))
    charged = client(rows.width).plan.sensitivity
    assert charged >= math.sqrt(2) * (1 + SUMMING_ERROR)
    assert charged == pytest.approx(math.sqrt(2), rel=3e-3)
    moved = largest_move(client(rows.width, mechanism="none"), made)
    assert 0.999 * math.sqrt(2) < moved <= client(rows.width, mechanism="none").plan.sensitivity <= charged
    assert (made >= 0).all()
    assert (np.linalg.norm(made, axis=1) <= 1 + 1e-12).all()


def test_rows_that_somebody_else_made_are_bounded_as_well():
    """Nothing rests on how rows are made: the client sets negative values to zero and cuts long rows."""
    entries = (-3.0, -0.5, 0.0, 0.4, 1.0, 1e200, math.nan)
    hostile = np.array([*itertools.product(entries, repeat=3)])
    bounded = client(3, mechanism="none")
    assert largest_move(bounded, hostile) <= bounded.plan.sensitivity
    # The bug that would be: rows that may be negative, charged as if they were not.
    policy = PrivacyPolicy(1.0, 1, 1, 1.0, mechanism="none", batch_selection="full_batch", release_rule="paper")
    planted = Privatizer(policy, 3, 3, MemoryLedger(), SimulatedKeys(1, "a"))
    assert largest_move(planted, hostile) > client(3).plan.sensitivity


def test_a_failing_sample_moves_the_sum_by_the_sensitivity_at_most():
    def of(failing, chosen):
        if chosen.start == failing:
            raise ValueError("secret")
        return EvaluationRows(2).rows(Measured(np.ones(1), np.ones(1), np.ones(1)))

    made = []
    for failing in (None, 1):
        subject = client(6, ledger=DurableLedger(), keys=SystemKeys(b"k" * 32))
        asked = []
        made.append(
            subject._contribution_counts(
                lambda chosen, failing=failing, asked=asked: asked.append(chosen) or of(failing, chosen), slice(0, 3)
            )
        )
        assert asked == [slice(i, i + 1) for i in range(3)]
    moved = np.linalg.norm(made[0] - made[1]) * subject.plan.grid.spacing
    assert 0 < moved <= subject.plan.sensitivity


def test_each_evaluation_session_has_one_release_and_pays_anew():
    ledger, rows = MemoryLedger(), np.eye(2)[[0, 1, 0]]
    subject = client(2, ledger=ledger, mu=0.6, budget_mu=1.0)
    subject.release("first", 0, rows.__getitem__)
    for ack in (0, 1):
        with raises(RefusedError, "refused", code=protocol.CAP_REACHED):
            subject.release("first", ack, rows.__getitem__)
    subject.release("second", 0, rows.__getitem__)
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="budget"):
        subject.release("third", 0, rows.__getitem__)
    with ledger.exclusive() as page:
        assert page.account().spent.mu == pytest.approx(0.6 * math.sqrt(2), rel=1e-12)


@pytest.mark.parametrize("fields", [{}, {"trust": "secure-aggregation", "sums": SumAssumption(4, 5)}], ids=str)
def test_the_noise_is_that_of_its_sensitivity_and_its_mu(fields):
    for mu, width in itertools.product((0.02, 0.3, 2.0), (2, 34)):
        plan = evaluation_policy(mu, **fields).plan(width)
        share = math.sqrt(fields["sums"].min_honest if fields else 1)
        assert plan.mu == mu
        assert plan.loss.worst_case.mu == pytest.approx(mu * share, rel=1e-3)
        assert math.sqrt(2) / mu < plan.noise_std * share < 1.01 * math.sqrt(2) / mu


def test_what_is_read_without_noise_is_what_is_there():
    generator = np.random.Generator(np.random.Philox(key=1))
    right, positive = generator.random(500) < 0.7, generator.integers(0, 2, 500)
    score = generator.random(500)
    for rows in (EvaluationRows(), EvaluationRows(8), EvaluationRows(3, 0.2)):
        total = rows.rows(Measured(right, score, positive)).sum(axis=0)
        assert rows.right(total, 500) == pytest.approx(right.sum(), rel=1e-12)
        if rows.bins:
            expected = [np.histogram(score[positive == c], bins=rows.bins, range=(0, 1))[0] for c in (0, 1)]
            assert rows.histograms(total) == pytest.approx(np.array(expected), rel=1e-12)


def test_the_stated_deviations_are_those_of_the_noise():
    """The mean square of 900 draws is off by more than 25 % once in a hundred million times (chi-square)."""
    rows, draws = EvaluationRows(4), 900
    noise = 3.0 * np.random.Generator(np.random.Philox(key=2)).normal(size=(draws, rows.width))
    found = np.array([rows.right(one, 0) for one in noise])
    assert np.mean(found**2) == pytest.approx(rows.right_std(3.0) ** 2, rel=0.25)
    bins = np.array([rows.histograms(one)[0, 0] for one in noise])
    assert np.mean(bins**2) == pytest.approx(rows.histogram_std(3.0) ** 2, rel=0.25)
    # As if it were the only release, of the one number alone: Delta = 1, so 1 / mu. Nothing is lost by two of them.
    only = EvaluationRows()
    assert only.right_std(evaluation_policy(0.5).plan(2).noise_std) == pytest.approx(2.0, rel=1e-2)


def test_nan_counts_as_wrong_and_unknown_classes_have_no_bin():
    rows = EvaluationRows(2)
    made = rows.rows(Measured([math.nan, 1.0, 1.0, 1.0], [0.9, math.nan, 0.9, 0.9], [1, 1, 2, 1]))
    assert made[0, 0] == 0
    assert made[0, 1] == pytest.approx(math.sqrt(0.5))
    assert (made[1:3, 2:] == 0).all()
    assert made[3, 2:] == pytest.approx([0, 0, 0, math.sqrt(0.5)])


def test_numbers_that_make_no_sense_are_refused():
    for bins in (-1, 1, 2.0, True, 5000):
        with raises(ConfigurationError, "out-of-range", "bins"):
            EvaluationRows(bins)
    for share in (0.0, 1.0, math.nan):
        with raises(ConfigurationError, "out-of-range", "scores_share"):
            EvaluationRows(4, share)


def test_policies_of_an_evaluation_are_known_and_others_are_not():
    own = evaluation_policy(1.0)
    EvaluationRows().check_policy(evaluation_policy(1.0, budget_mu=2.0, noise_quality="fast"))
    EvaluationRows().check_policy(evaluation_policy(1.0, mechanism="none"))
    for changes in (
        {"clip_norm": 2.0},
        {"clip_unit": "sample"},
        {"max_participations": 2, "sample_participations": 2},
        {"batch_selection": "cyclic"},
        {"release_rule": "acknowledged"},
        {"mechanism": "cancelling"},
    ):
        with raises(ConfigurationError, "conflict", "policy", match="evaluation_policy"):
            EvaluationRows().check_policy(replace(own, **changes))


HOSTILE = [0.0, 1.0, 0.5, -7.0, 1e300, math.nan, math.inf, -math.inf]


def counter(mu=1.0, ledger=None, keys=None, **fields):
    ledger = DurableLedger() if ledger is None else ledger
    keys = SimulatedKeys(1, "m") if keys is None else keys
    return Privatizer(counting_policy(mu, **fields), 1, len(DATA), ledger, keys, data=row_bytes(DATA))


def count_of(holds, **options):
    return counted([release_count(counter(**options), "s", lambda samples: holds[samples])])[0]


def test_replacing_one_sample_moves_the_count_by_one():
    counts = []
    for value in HOSTILE:  # the same noise every time
        holds = np.zeros(len(DATA))
        holds[7] = value
        counts.append(count_of(holds))
    gaps = np.abs(np.subtract.outer(counts, counts))
    policy = counting_policy(1.0)
    assert gaps.max() <= policy.plan(1).sensitivity
    assert abs(counts[1] - counts[0]) == pytest.approx(1.0, abs=1e-4)
    # The bug that would be: 0 and 1 as rows cut to 1, whose bound would allow a sample to move them by 2.
    assert policy.sensitivity == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("keys", [None, SystemKeys(b"k" * 32)])
def test_a_count_is_near_the_true_one_and_says_of_how_many(keys):
    holds = DATA[:, 0] > 0
    count, samples = counted([release_count(counter(2.0, keys=keys), "s", lambda chosen: holds[chosen])])
    assert samples == len(DATA)
    assert abs(count - holds.sum()) < 5  # ten standard deviations


def test_the_counts_of_clients_are_added_up_as_they_are():
    clients = [counter(2.0, keys=SimulatedKeys(seed, "m")) for seed in (1, 2)]
    releases = [release_count(one, "s", lambda chosen: np.ones(chosen.stop - chosen.start)) for one in clients]
    alone = [counted([release])[0] for release in releases]
    assert counted(releases) == (sum(alone), 2 * len(DATA))
    assert counted([]) == (0.0, 0)


def test_a_count_has_its_place_in_the_budget():
    ledger = DurableLedger()
    holds = np.ones(len(DATA))
    for session in ("one", "two"):
        release_count(counter(1.0, ledger, budget_mu=1.5), session, lambda chosen: holds[chosen])
        if session == "one":
            with raises(RefusedError, "refused", code=protocol.CAP_REACHED):
                release_count(counter(1.0, ledger, budget_mu=1.5), session, lambda chosen: holds[chosen])
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="budget"):
        release_count(counter(1.0, ledger, budget_mu=1.5), "three", lambda chosen: holds[chosen])
