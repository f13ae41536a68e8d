"""What clipping did to a simulation's contributions: counted where somebody observes, and nowhere else."""

import numpy as np
import pytest
from murmurfl.privacy.machine.clipping import TrainingFigures, clip_contributions, clip_per_sample, observe, observing

ROWS = np.array([[3.0, 4.0], [0.0, 0.5], [np.nan, 1.0], [0.0, 0.0], [np.inf, 0.0], [0.0, 2000.0]])


def test_rows_are_counted_with_their_length_over_the_clip():
    with observing() as observer:
        clipped = clip_contributions(ROWS, 2.0)
    assert (clipped == clip_per_sample(ROWS, 2.0)).all()
    found = observer.figures()
    assert found == TrainingFigures(
        rows=6, not_finite=2, clipped=2, median_ratio=(0.25 + 2.5) / 2, largest_ratio=1000.0
    )
    assert found.worrying
    assert "2 of 6 contributions were not finite" in found.sentence
    assert observer.figures() is None


def test_nothing_is_counted_where_nobody_observes():
    clip_contributions(ROWS, 2.0)
    observe(np.ones(3), 1.0)
    with observing() as outer:
        clip_per_sample(ROWS, 2.0)  # of features, say
        with observing() as inner:
            clip_contributions(ROWS[:1], 2.0)
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
