"""Clipped counts of a block of machines are those that every machine computes for itself."""

import numpy as np
import pytest
import torch
from murmurfl.app.engines.device import device_gradients as counts_module
from murmurfl.app.engines.device.device_gradients import DeviceOuterProducts, DeviceRows, clipped_counts, marked
from murmurfl.privacy import ConfigurationError, Grid
from murmurfl.privacy.machine.clipping import RowBound, observing

GRID = Grid(2.0**-20)
MACHINES, B, CLASSES, FEATURES = 6, 3, 4, 9


def parts(spoil=None):
    generator = np.random.Generator(np.random.Philox(key=3))
    residuals = generator.normal(size=(MACHINES * B, CLASSES))
    features = generator.normal(size=(MACHINES * B, FEATURES))
    if spoil is not None:
        spoil(residuals, features)
    with np.errstate(all="ignore"):
        weight = (residuals[:, :, None] * features[:, None, :]).reshape(len(residuals), -1)
    return residuals, features, np.concatenate([weight, residuals], axis=1)


def by_themselves(rows, bound, grid=GRID):
    """Each machine by the code of a machine that releases alone."""
    return np.stack(
        [
            grid.counts(bound.rows(batch), scale=1 / B, bound=bound.clip_norm).sum(axis=0)
            for batch in rows.reshape(MACHINES, B, -1)
        ]
    )


def of_dense(rows, bound, grid=GRID):
    return clipped_counts(DeviceRows(torch.tensor(rows)), bound, grid, B).numpy()


def of_products(residuals, features, bound, grid=GRID):
    stack = DeviceOuterProducts(torch.tensor(residuals), torch.tensor(features), bias=True)
    return clipped_counts(stack, bound, grid, B).numpy()


BOUNDS = [
    RowBound(2.0),
    RowBound(1e3),
    RowBound(2.0, stability=0.01),
    RowBound(1.5, nonnegative=True),
    RowBound(2.0, observed=False),
]


@pytest.mark.parametrize("bound", BOUNDS, ids=["clipped", "within", "automatic", "nonnegative", "not observed"])
def test_counts_are_those_of_machines_by_themselves(bound):
    """Up to one count for each of the b rows where float64's last place decides; here that is nowhere."""
    residuals, features, rows = parts()
    expected = by_themselves(rows, bound)
    for made in (of_dense(rows, bound), of_products(residuals, features, bound)):
        assert made.dtype == np.int64
        assert np.abs(made - expected).max() <= B
        assert (made != expected).mean() < 1e-3


def _nan(residuals, _):
    residuals[4, 1] = np.nan


def _infinite(_, features):
    features[4, 2], features[10, 0] = np.inf, -np.inf


def _huge(residuals, _):
    residuals[4] = 1e200


def _tiny(residuals, _):
    residuals[4] *= 1e-200


def _zero(residuals, _):
    residuals[4] = 0.0


@pytest.mark.parametrize("bound", BOUNDS[:4], ids=["clipped", "within", "automatic", "nonnegative"])
@pytest.mark.parametrize("spoil", [_nan, _infinite, _huge, _tiny, _zero])
def test_rows_of_any_numbers_are_counted_as_by_a_machine_alone(spoil, bound):
    residuals, features, rows = parts(spoil)
    expected = by_themselves(rows, bound)
    assert np.abs(of_dense(rows, bound) - expected).max() <= B
    assert np.abs(of_products(residuals, features, bound) - expected).max() <= B


def test_a_row_that_is_not_finite_counts_as_zero_and_moves_nobody_else():
    *_, clean = parts()
    *_, spoiled = parts(_nan)
    ours, theirs = of_dense(clean, RowBound(2.0)), of_dense(spoiled, RowBound(2.0))
    assert (np.abs(ours - theirs).max(axis=1) > B).tolist() == [False, True, False, False, False, False]
    zeroed = np.where(np.arange(MACHINES * B)[:, None] == 4, 0.0, clean)
    assert np.abs(theirs - of_dense(zeroed, RowBound(2.0))).max() <= B


def test_a_careful_way_that_is_left_out_is_caught(monkeypatch):
    """The sibling of the test above: without it a row that is not finite is rounded to nonsense."""
    *_, rows = parts(_nan)
    monkeypatch.setattr(counts_module.np, "flatnonzero", lambda _: np.array([], dtype=np.int64))
    assert np.abs(of_dense(rows, RowBound(2.0)) - by_themselves(rows, RowBound(2.0))).max() > 1e6


def test_no_machine_is_longer_than_the_clip():
    """Of the numbers that leave, but for the rounding of each value to the grid, which is charged by itself."""
    bound = RowBound(2.0)
    for spoil in (None, _infinite, _huge):
        *_, rows = parts(spoil)
        lengths = np.linalg.norm(of_dense(1e3 * rows, bound) * GRID.spacing, axis=1)
        assert lengths.max() <= bound.clip_norm + B * GRID.charge(rows.shape[1])


def test_values_are_rounded_as_on_the_cpu_ties_to_even_and_all():
    values = np.concatenate([np.arange(-4, 4) + 0.5, [0.49999999999999994, 2.0**50 + 0.5, -(2.0**50) - 1.5]])
    assert (marked(torch.tensor(values)).numpy() == Grid(1.0).marked(values.copy())).all()


def test_a_grid_on_which_the_bound_does_not_fit_is_refused():
    *_, rows = parts()
    with pytest.raises(ConfigurationError, match=r"below 2\^51 grid spacings"):
        of_dense(rows, RowBound(2.0), Grid(2.0**-55))


def test_a_simulation_sees_what_clipping_did_as_with_numpy():
    *_, rows = parts(_nan)
    seen = []
    for count in (by_themselves, of_dense):
        with observing() as observer:
            count(rows, RowBound(2.0))
        seen.append(observer.figures())
    assert seen[0].rows == seen[1].rows == MACHINES * B
    assert seen[0].not_finite == seen[1].not_finite == 1
    assert seen[0].clipped == seen[1].clipped
    assert seen[0].median_ratio == pytest.approx(seen[1].median_ratio)
