"""Gradients and clipped counts of a device are those of this side."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from murmurfl.app.data.task import Dataset, Shard
from murmurfl.app.engines.device import device_gradients as counts_module
from murmurfl.app.engines.device.device_gradients import (
    DeviceGradients,
    DeviceOuterProducts,
    DeviceRows,
    DeviceShard,
    clipped_counts,
    gradients_on,
    marked,
)
from murmurfl.app.models import make_model
from murmurfl.app.models.linear import SoftmaxRegression
from murmurfl.app.models.model import Model
from murmurfl.clients.adapters.per_sample_gradients import combined_gradients
from murmurfl.privacy import ConfigurationError, Grid
from murmurfl.privacy.release.clipping import RowBound, observing

from tests.harness.errors import raises

CPU = torch.device("cpu")
SAMPLES = 12
CLOSED_FORMS = [
    ("softmax", 20, 3),
    ("softmax-without-bias", 20, 3),
    ("logistic", 20, 2),
    ("nonconvex-logistic", 20, 2),
    ("ridge", 20, 1),
    ("mean", 20, 1),
]
MODULES = [("mlp", 20, 3), ("cnn", 144, 10)]


def problem(name, features, classes):
    """A model, two points and some samples."""
    model = make_model(name.removesuffix("-without-bias"), features, classes, 4.0, constant=name.endswith("bias"))
    generator = np.random.Generator(np.random.Philox(key=5))
    points = [[0.3 * generator.normal(size=shape) for shape in model.shapes] for _ in range(2)]
    inputs = generator.normal(size=(SAMPLES, features)).astype(np.float32)
    return model, points, (inputs, generator.integers(classes, size=SAMPLES))


def on_device(model, points, weights, samples):
    gradients = gradients_on(model, CPU)
    batch = gradients.samples(*samples).batch(np.arange(SAMPLES))
    return gradients.stacked(points, weights, batch)


def written(stack):
    return stack.scaled(slice(None), torch.ones(SAMPLES, dtype=torch.float64)).numpy()


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("weights", [(3.0, -2.0), (0.0, 1.5)])
@pytest.mark.parametrize(("name", "features", "classes"), CLOSED_FORMS + MODULES)
def test_weighted_gradients_are_numpys(name, features, classes, weights):
    """Closed forms within 1e-12 of the longest row, modules within float32's 2e-6."""
    model, points, samples = problem(name, features, classes)
    expected = combined_gradients(model, points, weights, samples)
    stack = on_device(model, points, weights, samples)
    tolerance = 2e-6 if (name, features, classes) in MODULES else 1e-12
    assert np.abs(written(stack) - expected).max() < tolerance * np.linalg.norm(expected, axis=1).max()
    assert stack.norms() == pytest.approx(np.linalg.norm(expected, axis=1), rel=10 * tolerance)


@pytest.mark.parametrize(("name", "features", "classes"), CLOSED_FORMS + MODULES[:1])
def test_a_point_that_has_no_weight_for_a_sample_adds_nothing_to_it(name, features, classes):
    """Not even where its gradient is no number."""
    model, points, samples = problem(name, features, classes)
    points[1] = [np.where(np.arange(values.size).reshape(values.shape) == 0, np.inf, values) for values in points[1]]
    weights = (2.0, np.zeros(SAMPLES))
    expected = combined_gradients(model, points[:1], weights[:1], samples)
    stack = on_device(model, points, (2.0, weights[1]), samples)
    assert written(stack) == pytest.approx(expected, abs=1e-5)
    some = np.where(np.arange(SAMPLES) < 3, -1.0, 0.0)
    finite = problem(name, features, classes)[1]
    expected = combined_gradients(model, finite, (2.0, some), samples)
    assert written(on_device(model, finite, (2.0, some), samples)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("name", "features", "classes"), [*CLOSED_FORMS, MODULES[0]])
def test_a_client_that_is_asked_alone_gets_the_same(name, features, classes):
    model, points, samples = problem(name, features, classes)
    gradients = gradients_on(model, CPU)
    batch = gradients.samples(*samples).batch(np.arange(SAMPLES))
    assert gradients(points[0], batch) == pytest.approx(np.asarray(model(points[0], samples)), abs=1e-5)
    assert list(gradients.shapes) == list(model.shapes)


def test_rows_are_multiplied_and_picked():
    model, points, samples = problem("softmax", 20, 3)
    stack = on_device(model, points, (1.0, 1.0), samples)
    factors = torch.tensor([2.0, 3.0, 0.5, 1.0], dtype=torch.float64)
    picked = stack.scaled(slice(1, None, 3), factors).numpy()
    assert picked == pytest.approx(written(stack)[1::3] * factors.numpy()[:, None])
    row = np.empty(model.num_parameters)
    stack.write(4, 3.0, row)
    assert (row == picked[1]).all()


@pytest.mark.parametrize(("name", "features", "classes"), CLOSED_FORMS)
def test_some_rows_are_those_of_some_samples(name, features, classes):
    model, points, samples = problem(name, features, classes)
    stack, rows = on_device(model, points, (1.0, 1.0), samples), np.array([1, 4, 5])
    ones = torch.ones(3, dtype=torch.float64)
    assert (stack.chosen(rows).scaled(slice(None), ones).numpy() == written(stack)[rows]).all()
    assert (stack.chosen(rows).norms() == stack.norms()[rows]).all()


def test_points_are_sent_once_for_all_blocks_of_a_round():
    model, points, samples = problem("softmax", 20, 3)
    gradients = gradients_on(model, CPU)
    sent = []
    right = gradients._sent
    gradients._sent = lambda point: sent.append(1) or right(point)
    batch = gradients.samples(*samples).batch(np.arange(SAMPLES))
    for _ in range(3):
        gradients.stacked(points, (1.0, 1.0), batch)
    assert len(sent) == 2
    gradients.stacked([*points], (1.0, 1.0), batch)
    assert len(sent) == 4


def test_a_linear_model_bounds_features_by_its_own_rule():
    """Longer ones are scaled down and those that are not finite count as zero, as on the CPU."""
    model, points, (inputs, labels) = problem("logistic", 20, 2)
    inputs[3], inputs[4, 5] = 10.0, np.nan
    expected = combined_gradients(model, points, (1.0, 1.0), (inputs, labels))
    assert written(on_device(model, points, (1.0, 1.0), (inputs, labels))) == pytest.approx(expected, abs=1e-12)
    assert (expected[4] == 0).all()


def test_a_batch_of_several_clients_has_their_samples_one_after_the_other():
    generator = np.random.Generator(np.random.Philox(key=6))
    features, labels = generator.normal(size=(30, 4)).astype(np.float32), generator.integers(3, size=30)
    data = Dataset(features, labels, features[:0], labels[:0], 3)
    shards = [Shard(data, generator.permutation(30)[:10]) for _ in range(3)]
    sent = gradients_on(make_model("softmax", 4, 3), CPU).samples(features, labels)
    parts = [(shard, slice(i, i + 2)) for i, shard in enumerate(shards)]
    expected = Shard.stack(parts)
    batch = DeviceShard.stack([(DeviceShard(shard, sent), chosen) for shard, chosen in parts])
    assert (batch.features.numpy() == expected[0]).all()
    assert (batch.labels.numpy() == expected[1]).all()
    alone = DeviceShard(shards[0], sent)
    assert len(alone) == 10
    assert (alone[2:5].features.numpy() == shards[0][2:5][0]).all()


class OwnSoftmax(SoftmaxRegression):
    """Another loss, perhaps."""


@pytest.mark.parametrize("made", [OwnSoftmax, lambda *sizes: type("Own", (OwnSoftmax,), {})(*sizes)])
def test_a_model_that_is_not_known_is_refused(made):
    with raises(ConfigurationError, "unsupported", "model"):
        gradients_on(made(4, 3), CPU)


def test_every_model_that_is_named_is_known():
    for name, features, classes in CLOSED_FORMS + MODULES:
        model = problem(name, features, classes)[0]
        assert isinstance(model, Model)
        assert isinstance(gradients_on(model, CPU), DeviceGradients)


GRID = Grid(2.0**-20)
CLIENTS, B, CLASSES, FEATURES = 6, 3, 4, 9


def parts(spoil=None):
    generator = np.random.Generator(np.random.Philox(key=3))
    residuals = generator.normal(size=(CLIENTS * B, CLASSES))
    features = generator.normal(size=(CLIENTS * B, FEATURES))
    if spoil is not None:
        spoil(residuals, features)
    with np.errstate(all="ignore"):
        weight = (residuals[:, :, None] * features[:, None, :]).reshape(len(residuals), -1)
    return residuals, features, np.concatenate([weight, residuals], axis=1)


def by_themselves(rows, bound, grid=GRID):
    """Each client by the code of a client that releases alone."""
    return np.stack(
        [
            grid.counts(bound.rows(batch), scale=1 / B, bound=bound.clip_norm).sum(axis=0)
            for batch in rows.reshape(CLIENTS, B, -1)
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
def test_counts_are_those_of_clients_by_themselves(bound):
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
def test_rows_of_any_numbers_are_counted_as_by_a_client_alone(spoil, bound):
    residuals, features, rows = parts(spoil)
    expected = by_themselves(rows, bound)
    assert np.abs(of_dense(rows, bound) - expected).max() <= B
    assert np.abs(of_products(residuals, features, bound) - expected).max() <= B


def test_a_row_that_is_not_finite_counts_as_zero_and_moves_nobody_else():
    *_, clean = parts()
    *_, spoiled = parts(_nan)
    ours, theirs = of_dense(clean, RowBound(2.0)), of_dense(spoiled, RowBound(2.0))
    assert (np.abs(ours - theirs).max(axis=1) > B).tolist() == [False, True, False, False, False, False]
    zeroed = np.where(np.arange(CLIENTS * B)[:, None] == 4, 0.0, clean)
    assert np.abs(theirs - of_dense(zeroed, RowBound(2.0))).max() <= B


def test_a_careful_way_that_is_left_out_is_caught(monkeypatch):
    """The sibling of the test above: without it a row that is not finite is rounded to nonsense."""
    *_, rows = parts(_nan)
    monkeypatch.setattr(counts_module.np, "flatnonzero", lambda _: np.array([], dtype=np.int64))
    assert np.abs(of_dense(rows, RowBound(2.0)) - by_themselves(rows, RowBound(2.0))).max() > 1e6


def test_no_client_is_longer_than_the_clip():
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
    with raises(ConfigurationError, "out-of-range", match=r"below 2\^51 grid spacings"):
        of_dense(rows, RowBound(2.0), Grid(2.0**-55))


def test_a_simulation_sees_what_clipping_did_as_with_numpy():
    *_, rows = parts(_nan)
    seen = []
    for count in (by_themselves, of_dense):
        with observing() as observer:
            count(rows, RowBound(2.0))
        seen.append(observer.figures())
    assert seen[0].rows == seen[1].rows == CLIENTS * B
    assert seen[0].not_finite == seen[1].not_finite == 1
    assert seen[0].clipped == seen[1].clipped
    assert seen[0].median_ratio == pytest.approx(seen[1].median_ratio)
