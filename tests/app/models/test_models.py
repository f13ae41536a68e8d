"""What every model is held to."""

import numpy as np
import pytest
from murmurfl.app.models import make_model
from murmurfl.app.models.model import area_under_curve


@pytest.mark.parametrize("name", ["softmax", "mlp"])
def test_gradients_are_the_slopes_of_the_loss(name):
    model = make_model(name, 6, 3)
    generator = np.random.Generator(np.random.Philox(key=2))
    parameters = [generator.normal(size=shape) * 0.3 for shape in model.shapes]
    features, labels = generator.normal(size=(5, 6)).astype(np.float32), np.array([0, 2, 1, 1, 0])
    rows = model(parameters, (features, labels))
    assert rows.shape == (5, model.num_parameters)
    direction = [generator.normal(size=shape) for shape in model.shapes]
    flat = np.concatenate([d.ravel() for d in direction])
    step = 1e-2
    ahead = [p + step * d for p, d in zip(parameters, direction, strict=True)]
    behind = [p - step * d for p, d in zip(parameters, direction, strict=True)]
    for i in range(5):
        sample = (features[i : i + 1].astype(np.float64), labels[i : i + 1])
        slope = (model.evaluate(ahead, sample)[0] - model.evaluate(behind, sample)[0]) / (2 * step)
        assert rows[i] @ flat == pytest.approx(slope, rel=2e-2, abs=2e-3)
        alone = model(parameters, (features[i : i + 1], labels[i : i + 1]))[0]
        assert rows[i] == pytest.approx(alone, abs=1e-6)


def test_initial_parameters_are_functions_of_the_seed():
    model = make_model("mlp", 6, 3)
    first, again, other = (model.initial_parameters(seed) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any((a != b).any() for a, b in zip(first, other, strict=True))


def test_the_area_is_the_share_of_ordered_pairs():
    generator = np.random.Generator(np.random.Philox(key=7))
    scores, labels = generator.integers(5, size=60) / 4, generator.integers(2, size=60)
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[labels == 1] for b in scores[labels == 0]]
    assert area_under_curve(scores, labels) == pytest.approx(np.mean(pairs))
    assert np.isnan(area_under_curve(scores, np.ones(60)))
    assert np.isnan(area_under_curve(np.where(labels == 1, np.inf, scores), labels))


@pytest.mark.parametrize(("name", "classes"), [("softmax", 2), ("logistic", 2), ("softmax", 3), ("ridge", 1)])
def test_only_two_classes_have_an_area_under_the_curve(name, classes):
    model = make_model(name, 4, classes, 5.0)
    generator = np.random.Generator(np.random.Philox(key=8))
    weight = generator.normal(size=4)
    parameters = [np.zeros(shape) for shape in model.shapes]
    parameters[0][..., :] = weight if classes < 2 or name == "logistic" else np.outer(np.arange(classes), weight)
    features = generator.normal(size=(50, 4))
    auc = model.auc(parameters, (features, (features @ weight > 0).astype(np.int64)))
    assert auc == pytest.approx(1.0) if classes == 2 else np.isnan(auc)
