"""Gradients on a device are NumPy's, up to the rounding of sums."""

import numpy as np
import pytest
import torch
from murmurfl.app.data.task import Dataset, Shard
from murmurfl.app.engines.device.device_gradients import DeviceGradients, DeviceShard, gradients_on
from murmurfl.app.models import make_model
from murmurfl.app.models.linear import SoftmaxRegression
from murmurfl.app.models.model import Model
from murmurfl.clients.adapters.per_sample_gradients import combined_gradients
from murmurfl.privacy import ConfigurationError

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
def test_a_machine_that_is_asked_alone_gets_the_same(name, features, classes):
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


def test_a_batch_of_several_machines_has_their_samples_one_after_the_other():
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
    with pytest.raises(ConfigurationError, match=r"Expected a model whose gradients a device can compute .* got Own"):
        gradients_on(made(4, 3), CPU)


def test_every_model_that_is_named_is_known():
    for name, features, classes in CLOSED_FORMS + MODULES:
        model = problem(name, features, classes)[0]
        assert isinstance(model, Model)
        assert isinstance(gradients_on(model, CPU), DeviceGradients)
