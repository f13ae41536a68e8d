"""Second moments: how far apart two samples' rows can be, whatever a machine is handed, and what their sums are."""

import itertools
import math

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, PrivacyPolicy
from murmurfl.privacy.machine.clipping import BLOCK_ROWS, SUMMING_ERROR, Moments, RowBound, _simplex

from tests.privacy.machines import machine

S = 1.5
CASES = [(2, 0.5), (2, 1.0), (3, 1.0), (10, 1.0), (10, math.sqrt(2))]
cases = pytest.mark.parametrize(("classes", "weight"), CASES)
ALL = {"order": "all", "batch_size": 1, "max_participations": 1, "mechanism": "independent", "release_rule": "paper"}


def bound_of(classes=3, weight=1.0):
    return RowBound(S, moments=Moments(classes, weight))


def row_of(bound, features, marks):
    """The row of one sample, as a release has it."""
    d = bound.moments.num_values(len(features))
    return bound.total(np.concatenate([features, marks])[None], d)


def circle(classes):
    """Samples at many angles and lengths, of two classes and of none."""
    marks = [*np.eye(classes)[:2], np.zeros(classes)]
    angles = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    for angle, length, mark in itertools.product(angles, (0.0, 0.4, 0.8, 1.0, 3.0), marks):
        yield S * length * np.array([math.cos(angle), math.sin(angle)]), mark


@cases
def test_the_row_distance_is_a_tight_bound(classes, weight):
    bound = bound_of(classes, weight)
    rows = np.array([row_of(bound, *sample) for sample in circle(classes)])
    squares = (rows**2).sum(axis=1)
    gaps = np.sqrt((squares[:, None] + squares - 2 * rows @ rows.T).max())
    assert gaps <= bound.distance * (1 + 1e-12)
    assert gaps > 0.999 * bound.distance
    assert np.sqrt(squares.max()) == pytest.approx(bound.longest, rel=1e-6)
    # The bug that would be: both parts' own sensitivities for samples at right angles, added in squares.
    if weight >= 1:
        assert gaps > 1.05 * S**2 * math.sqrt(2 + 2 * weight**2)


def test_in_many_dimensions_no_pair_found_by_climbing_is_further_apart():
    generator, bound = np.random.Generator(np.random.Philox(key=7)), bound_of(4)
    best = 0.0
    for start in range(4):
        pair = generator.normal(size=(2, 5))
        marks = np.eye(4)[[0, start % 2]]
        step, found = 1.0, 0.0
        for _ in range(250):
            tried = pair + step * generator.normal(size=pair.shape)
            gap = np.linalg.norm(row_of(bound, tried[0], marks[0]) - row_of(bound, tried[1], marks[1]))
            if gap > found:
                pair, found = tried, gap
            else:
                step *= 0.98
        best = max(best, found)
    assert 0.97 * bound.distance < best <= bound.distance


HOSTILE = [
    (np.full(2, math.nan), np.eye(3)[0]),
    (np.array([math.inf, 0.0]), np.eye(3)[0]),
    (np.array([1e300, -1e300]), np.eye(3)[1]),
    (np.array([1.0, 1.0]), np.array([1.0, 1.0, 0.0])),
    (np.array([1.0, 1.0]), np.array([1e6, 0.0, 0.0])),
    (np.array([1.0, 1.0]), np.array([1.0, -1.0, 0.0])),
    (np.array([1.0, 1.0]), np.array([1.0, math.nan, 0.0])),
    (np.array([1.0, 1.0]), np.array([1.0, 1e-300, 0.0])),
]


@pytest.mark.parametrize("sample", HOSTILE, ids=str)
def test_whatever_a_client_hands_over_its_row_is_one_of_a_sample(sample):
    bound, far = bound_of(), row_of(bound_of(), np.array([-9.0, -9.0]), np.eye(3)[0])
    row = row_of(bound, *sample)
    assert np.isfinite(row).all()
    assert np.linalg.norm(row - far) <= bound.distance
    if not (sample[1] == np.eye(3)[1]).all():
        assert not row[3:].any()  # no class counts, or no features do


def test_marks_that_were_believed_would_move_a_release_further():
    moments, features = Moments(3), np.array([[S, 0.0]])
    two = np.array([[5.0, 0.0, 0.0]])
    products = moments.sum(features, np.zeros((1, 3)), S)[:3]
    planted = np.concatenate([products, (S * features.T @ two @ _simplex(3)).ravel()])
    other = moments.sum(-features, np.eye(3)[:1], S)
    assert np.linalg.norm(planted - other) > 1.5 * moments.distance(S)


@cases
def test_a_sum_has_the_moments_of_all_samples_in_it(classes, weight):
    generator, bound = np.random.Generator(np.random.Philox(key=8)), bound_of(classes, weight)
    features = generator.normal(size=(40, 5)) * generator.choice([0.1, 1.0], size=(40, 1))
    labels, weights = generator.integers(0, classes, 40), generator.integers(0, 2, 40).astype(float)
    marks = np.eye(classes)[labels]
    for chosen in (None, weights):
        d = bound.moments.num_values(5)
        total = bound.total(np.concatenate([features, marks], axis=1), d, chosen)
        scale = np.ones(40) if chosen is None else chosen
        rows = sum(scale[i] * row_of(bound, features[i], marks[i]) for i in range(40))
        assert total == pytest.approx(rows, rel=1e-12, abs=1e-12)
        kept = bound.rows(features)
        gram, by_class = bound.moments.read(total, S)
        assert gram == pytest.approx(kept.T @ (kept * scale[:, None]), abs=1e-9)
        assert by_class == pytest.approx(kept.T @ ((marks - 1 / classes) * scale[:, None]), abs=1e-9)
    assert np.linalg.norm(rows[:15]) == pytest.approx(np.linalg.norm(gram))  # as long as the matrix is


def test_a_block_with_one_sample_replaced_moves_by_no_more_than_is_charged():
    generator, bound = np.random.Generator(np.random.Philox(key=9)), bound_of(2)
    worst = 0.0
    for _ in range(10):
        features = generator.normal(size=(BLOCK_ROWS, 3)) * 10.0 ** generator.integers(-3, 3, size=(BLOCK_ROWS, 1))
        samples = np.concatenate([features, np.eye(2)[generator.integers(0, 2, BLOCK_ROWS)]], axis=1)
        first = bound.total(samples, bound.moments.num_values(3))
        samples[17, :3] = generator.normal(size=3) * 1e3
        worst = max(worst, float(np.linalg.norm(bound.total(samples, bound.moments.num_values(3)) - first)))
    assert worst <= bound.distance * (1 + SUMMING_ERROR)


def test_the_numbers_of_features_and_of_values_belong_together():
    for classes, features in itertools.product((2, 10, 100), (1, 2, 57, 897)):
        assert Moments(classes).num_features(Moments(classes).num_values(features)) == features
        with pytest.raises(ConfigurationError, match="values"):
            Moments(classes).num_features(Moments(classes).num_values(features) + 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"order": "in-turn"},
        {"clip_unit": "sample"},
        {"classes": 1},
        {"class_weight": 0.0},
        {"class_weight": 1.5},
        {"clipping": "automatic"},
    ],
    ids=str,
)
def test_a_policy_refuses_moments_that_are_not_all_there_is(changes):
    with pytest.raises(ConfigurationError):
        PrivacyPolicy(**{"clip_norm": S, "mu": 1.0, "clip_unit": "moments", "classes": 3, **ALL, **changes})


def test_a_plan_has_the_noise_of_the_distance():
    policy = PrivacyPolicy(clip_norm=S, mu=0.5, clip_unit="moments", classes=3, **ALL)
    plan = policy.plan(Moments(3).num_values(7))
    assert plan.mu == 0.5
    assert plan.sensitivity >= S**2 * math.sqrt(4.5) * (1 + SUMMING_ERROR)
    assert plan.noise_std == pytest.approx(S**2 * math.sqrt(4.5) / 0.5, rel=1e-3)


def test_a_policys_fingerprint_knows_its_classes_and_only_where_it_has_some():
    fields = {"clip_norm": S, "mu": 0.5, "clip_unit": "moments", **ALL}
    # Of three features and three classes, or of two and four... what matters is that no two policies pass for one.
    marks = {PrivacyPolicy(classes=3, class_weight=weight, **fields).plan(12).fingerprint for weight in (0.9, 1.0)}
    assert len(marks) == 2
    assert "class" not in PrivacyPolicy(**{**fields, "clip_unit": "sample"}).terms(12)


def test_a_machine_makes_the_rows_itself_and_refuses_what_cannot_be_samples():
    subject = machine(clip_unit="moments", classes=2, **ALL)  # d = 6: two features have 5 values, and three have 9
    with pytest.raises(ConfigurationError, match="values"):
        subject.release("s", 0, lambda samples: np.zeros((samples.stop - samples.start, 6)))
