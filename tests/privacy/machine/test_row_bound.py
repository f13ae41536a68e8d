"""Bounds of rows: how far apart two of them, and two sums with one of them replaced, can be."""

import itertools
import math

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, PrivacyPolicy
from murmurfl.privacy.machine.clipping import BLOCK_ROWS, LEAST_STABILITY, SUMMING_ERROR, RowBound, blocks

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
    with pytest.raises(ConfigurationError, match="clip_stability >= 1e-100"):
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
        {"order": "all", "batch_size": 2},
        {"order": "all", "clip_unit": "update"},
        {"order": "all", "sample_participations": 3},
        {"order": "secret", "sample_participations": 2},
        {"order": "again", "sample_participations": 2},
        {"order": "sideways"},
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
    fields = {"clip_norm": 0.5, "batch_size": 1, "mu": 1.0, "mechanism": "independent", "order": "all"}
    for rounds, unit, distance in ((1, "sample", 1.0), (9, "sample", 1.0), (9, "nonnegative", math.sqrt(0.5))):
        policy = PrivacyPolicy(max_participations=rounds, clip_unit=unit, release_rule="paper", **fields)
        assert policy.sensitivity >= distance * (1 + SUMMING_ERROR)
        plan = policy.plan(6)
        assert plan.noise_std == pytest.approx(distance * math.sqrt(rounds), rel=1e-2)
        assert plan.mu == 1.0
