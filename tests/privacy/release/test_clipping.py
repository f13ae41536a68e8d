"""Per-sample clipping: the bound holds for every input a model or an attacker can produce.

Bounds of rows: how far apart two of them, and two sums with one of them replaced, can be.
Second moments: how far apart two samples' rows can be, whatever a client is handed, and what their sums are.
What clipping did to a simulation's contributions: counted where somebody observes, and nowhere else.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from murmurfl.privacy import ConfigurationError, PrivacyPolicy
from murmurfl.privacy.release.clipping import (
    BLOCK_ROWS,
    LEAST_CLIP,
    LEAST_STABILITY,
    SUMMING_ERROR,
    Moments,
    RowBound,
    TrainingFigures,
    _simplex,
    blocks,
    clip_contributions,
    clip_per_sample,
    observe,
    observing,
    squared_lengths,
)

from tests.harness.errors import raises
from tests.privacy.clients import client


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


def test_a_row_of_tiny_entries_is_clipped_beside_a_long_one():
    clipped = clip_per_sample(np.array([[9e-151] * 4, [1.0, 0.0, 0.0, 0.0]]), LEAST_CLIP)
    assert np.linalg.norm(clipped * 1e150, axis=1) == pytest.approx([1.0, 1.0])
    assert (np.linalg.norm(clipped * 1e150, axis=1) <= 1.0).all()


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
    with raises(ConfigurationError, "out-of-range", "clip_norm"):
        clip_per_sample([[1.0]], clip_norm)


BOUNDS = {
    "clip": RowBound(0.7),
    "automatic": RowBound(0.7, stability=0.01),
    "nonnegative": RowBound(0.7, nonnegative=True),
}
ROWS = np.array(
    [
        *itertools.product((-1e200, -3.0, -1e-3, 0.0, 0.5, 0.7, 1e160), repeat=2),
        (math.nan, 1.0),
        (math.inf, -1.0),
    ]
)
bounds = pytest.mark.parametrize("bound", BOUNDS.values(), ids=list(BOUNDS))


class Unwritten:
    """Rows of a matrix as a model without closed form gives them."""

    def __init__(self, rows):
        self._rows = rows

    def norms(self):
        with np.errstate(all="ignore"):
            return np.linalg.norm(self._rows, axis=1)

    def write(self, row, scale, out):
        np.multiply(self._rows[row], scale, out=out)


class InClosedForm(Unwritten):
    def scaled_sum(self, scales):
        return scales @ self._rows


@bounds
def test_two_bounded_rows_are_never_further_apart_than_the_distance(bound):
    rows = bound.rows(ROWS)
    gaps = np.linalg.norm(rows[:, None] - rows[None], axis=2)
    assert gaps.max() <= bound.distance
    assert gaps.max() > 0.9 * bound.distance
    assert np.isfinite(rows).all()
    assert not rows[-2:].any()


def test_automatic_clipping_bounds_rows_whose_norm_is_lost_to_rounding_too():
    rows, shortest = 10.0 ** np.arange(-310.0, 300.0)[:, None] * np.ones(3), RowBound(0.7, stability=LEAST_STABILITY)
    with np.errstate(all="ignore"):
        assert np.linalg.norm(rows[30]) == 0, "a row that is not zero, and whose norm is"
        scales = shortest.scales(np.linalg.norm(rows, axis=1))
    assert np.linalg.norm(shortest.rows(rows), axis=1).max() <= 0.7
    finite = np.isfinite(scales)
    assert np.linalg.norm(rows[finite] * scales[finite, None], axis=1).max() <= 0.7
    # The bug that would be: at a smaller stability the same row is many times as long as the clip.
    assert 0.7 / (0.0 + 1e-300) * rows[30, 0] > 1e9
    policy = {"clip_norm": 0.7, "batch_size": 1, "max_participations": 1, "mu": 1.0, "clipping": "automatic"}
    with raises(ConfigurationError, "out-of-range", "clip_stability", match="clip_stability >= 1e-100"):
        PrivacyPolicy(**policy, clip_stability=1e-300)


def test_nonnegative_rows_are_root_two_apart_at_most():
    bound, rows = BOUNDS["nonnegative"], np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    kept = bound.rows(rows)
    assert np.linalg.norm(kept[0] - kept[1]) == pytest.approx(math.sqrt(2) * 0.7, rel=1e-9)
    assert not kept[2].any()
    # The bug that would be: the same distance for rows that may be negative.
    planted = RowBound(0.7).rows(rows)
    assert np.linalg.norm(planted[0] - planted[2]) > bound.distance


def test_automatic_clipping_gives_every_row_nearly_the_same_length():
    rows = BOUNDS["automatic"].rows(np.array([[1e-6, 0.0], [0.1, 0.0], [3.0, 0.0], [1e200, 0.0]]))
    lengths = np.linalg.norm(rows, axis=1)
    assert lengths == pytest.approx([0.7 * 1e-6 / 0.010001, 0.7 * 0.1 / 0.11, 0.7 * 3 / 3.01, 0.7], rel=1e-9)
    assert (lengths <= 0.7).all()


@bounds
@pytest.mark.parametrize("kind", [np.asarray, Unwritten, InClosedForm])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_sum_is_that_of_the_bounded_rows_however_they_come(bound, kind, weighted):
    for rows in (ROWS, ROWS[(np.abs(ROWS) < 10).all(axis=1)]):  # only the second are added up in closed form
        weights = np.arange(len(rows)) % 2.0 if weighted else None
        expected = (bound.rows(rows) * (1 if weights is None else weights[:, None])).sum(axis=0)
        assert bound.total(kind(rows), 2, weights) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@bounds
def test_a_block_with_one_row_replaced_moves_by_no_more_than_is_charged(bound):
    generator = np.random.Generator(np.random.Philox(key=5))
    worst = 0.0
    for _ in range(20):
        rows = generator.normal(size=(BLOCK_ROWS, 3)) * 10.0 ** generator.integers(-3, 3, size=(BLOCK_ROWS, 1))
        first = bound.total(InClosedForm(rows), 3)
        rows[17] = -rows[17]
        worst = max(worst, float(np.linalg.norm(bound.total(InClosedForm(rows), 3) - first)))
    assert worst <= bound.distance * (1 + SUMMING_ERROR)


def test_blocks_are_the_same_whoever_asks():
    assert [(block.start, block.stop) for block in blocks(slice(0, 2500))] == [(0, 1024), (1024, 2048), (2048, 2500)]


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_selection": "full_batch", "batch_size": 2},
        {"batch_selection": "full_batch", "clip_unit": "update"},
        {"batch_selection": "full_batch", "sample_participations": 3},
        {"batch_selection": "shuffled", "sample_participations": 2},
        {"batch_selection": "cyclic", "sample_participations": 2},
        {"batch_selection": "sideways"},
        {"clipping": "automatic", "clip_unit": "update"},
        {"clipping": "soft"},
        {"clip_stability": 0.0},
    ],
)
def test_a_policy_refuses_orders_and_clippings_that_contradict_the_rest(changes):
    fields = {"clip_norm": 1.0, "batch_size": 1, "max_participations": 4, "mu": 1.0, "mechanism": "independent"}
    with pytest.raises(ConfigurationError):
        PrivacyPolicy(**{**fields, **changes})


def test_full_batches_cost_root_rounds_times_row_distance():
    fields = {"clip_norm": 0.5, "batch_size": 1, "mu": 1.0, "mechanism": "independent", "batch_selection": "full_batch"}
    for rounds, unit, distance in ((1, "sample", 1.0), (9, "sample", 1.0), (9, "nonnegative", math.sqrt(0.5))):
        policy = PrivacyPolicy(max_participations=rounds, clip_unit=unit, release_rule="paper", **fields)
        assert policy.sensitivity >= distance * (1 + SUMMING_ERROR)
        plan = policy.plan(6)
        assert plan.noise_std == pytest.approx(distance * math.sqrt(rounds), rel=1e-2)
        assert plan.mu == 1.0


S = 1.5
CASES = [(2, 0.5), (2, 1.0), (3, 1.0), (10, 1.0), (10, math.sqrt(2))]
cases = pytest.mark.parametrize(("classes", "weight"), CASES)
ALL = {
    "batch_selection": "full_batch",
    "batch_size": 1,
    "max_participations": 1,
    "mechanism": "independent",
    "release_rule": "paper",
}


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
        with raises(ConfigurationError, "wrong-shape", "num_values"):
            Moments(classes).num_features(Moments(classes).num_values(features) + 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_selection": "once"},
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


def test_a_client_makes_the_rows_itself_and_refuses_what_cannot_be_samples():
    subject = client(clip_unit="moments", classes=2, **ALL)  # d = 6: two features have 5 values, and three have 9
    with raises(ConfigurationError, "wrong-shape", "num_values"):
        subject.release("s", 0, lambda samples: np.zeros((samples.stop - samples.start, 6)))


OBSERVED = np.array([[3.0, 4.0], [0.0, 0.5], [np.nan, 1.0], [0.0, 0.0], [np.inf, 0.0], [0.0, 2000.0]])


def test_rows_are_counted_with_their_length_over_the_clip():
    with observing() as observer:
        clipped = clip_contributions(OBSERVED, 2.0)
    assert (clipped == clip_per_sample(OBSERVED, 2.0)).all()
    found = observer.figures()
    assert found == TrainingFigures(
        rows=6, not_finite=2, clipped=2, median_ratio=(0.25 + 2.5) / 2, largest_ratio=1000.0
    )
    assert found.worrying
    assert "2 of 6 contributions were not finite" in found.sentence
    assert observer.figures() is None


def test_nothing_is_counted_where_nobody_observes():
    clip_contributions(OBSERVED, 2.0)
    observe(np.ones(3), 1.0)
    with observing() as outer:
        clip_per_sample(OBSERVED, 2.0)  # of features, say
        with observing() as inner:
            clip_contributions(OBSERVED[:1], 2.0)
    assert outer.figures() is None
    assert inner.figures().rows == 1


def test_rows_too_long_to_square_are_finite():
    with observing() as observer:
        clip_contributions([[1e200, 0.0], [1e308, 1e308]], 1e-5)
    found = observer.figures()
    assert (found.not_finite, found.clipped) == (0, 2)
    assert 1e204 < found.median_ratio <= found.largest_ratio == 1e300


def test_the_median_is_over_releases():
    with observing() as observer:
        for scale in (1.0, 2.0, 90.0):
            observe(scale * np.array([1.0, 2.0, 3.0]), 1.0)
    assert observer.figures().median_ratio == 4.0


def test_nothing_but_rows_that_are_not_finite_is_worth_a_warning():
    with observing() as observer:
        clip_contributions([[np.nan]], 1.0)
    found = observer.figures()
    assert found == TrainingFigures(1, 1, 0, 0.0, 0.0)
    assert found.worrying


@pytest.mark.parametrize(("ratio", "worrying"), [(10.0, False), (10.1, True)])
def test_half_of_the_rows_beyond_ten_clips_are_worth_a_warning(ratio, worrying):
    assert TrainingFigures(4, 0, 4, ratio, 1e3).worrying == worrying


def test_figures_are_read_back_from_a_reply():
    figures = TrainingFigures(7, 1, 3, 2.5, 9.0)
    entries = figures.entries()
    assert TrainingFigures.read({**entries, "release": 3}) == figures
    for name in entries:
        assert TrainingFigures.read({**entries, name: "x"}) is None
        assert TrainingFigures.read({**entries, name: float("nan")}) is None
    assert TrainingFigures.read({}) is None


def test_several_are_taken_together():
    one, other = TrainingFigures(7, 1, 3, 2.5, 9.0), TrainingFigures(3, 0, 1, 0.5, 1.5)
    assert TrainingFigures.together([one, other]) == TrainingFigures(10, 1, 4, 1.5, 9.0)
    assert TrainingFigures.together([]) == TrainingFigures()


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, 3.0, 1e307, np.inf, np.nan])
def test_a_single_row_is_counted_as_one_among_arrays(norm):
    with observing() as observer:
        observe(np.array([norm]), 0.5)
        alone = observer.figures()
        observe(np.array([norm]), 0.5)
        observe(np.array([]), 0.5)  # which leaves it to the arrays
        assert repr(alone) == repr(observer.figures())
