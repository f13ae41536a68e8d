"""Models in closed form, alone and beside those that tests of clients use."""

import math

import numpy as np
import pytest
from murmurfl.app.models import make_model
from murmurfl.app.models.model import area_under_curve
from murmurfl.clients.online_client import declares_itself_convex
from murmurfl.privacy import ConfigurationError

from tests.harness.errors import raises
from tests.harness.models import Logistic, NonconvexLogistic, Ridge


def test_logistic_gradients_are_those_of_the_loss_on_bounded_features():
    model = make_model("logistic", 7, 2, 3.0)
    generator = np.random.Generator(np.random.Philox(key=41))
    weight, features = generator.normal(size=7), 3 * generator.normal(size=(20, 7))
    labels = generator.integers(2, size=20)
    bounded = features * np.minimum(1, 3.0 / np.linalg.norm(features, axis=1, keepdims=True))
    signs = 2 * labels - 1

    def loss(w):
        return np.log1p(np.exp(-signs * (bounded @ w)))

    rows = model([weight], (features, labels))
    for i in range(7):
        step = np.zeros(7)
        step[i] = 1e-6
        assert rows[:, i] == pytest.approx((loss(weight + step) - loss(weight - step)) / 2e-6, abs=1e-6)
    assert model.at_points(np.tile(weight, (20, 1)), (features, labels)) == pytest.approx(rows)
    value, gradient = model.loss_and_gradient(weight, (features, labels))
    assert (value, gradient) == (pytest.approx(loss(weight).mean()), pytest.approx(rows.mean(axis=0)))
    assert model.evaluate([weight], (features, labels))[0] == pytest.approx(loss(weight).mean())
    assert (np.linalg.norm(rows, axis=1) <= model.gradient_bound).all()
    assert np.linalg.norm(model([1e150 * weight], (features, labels)), axis=1).max() <= 3.0
    assert (model([weight], (np.full((1, 7), np.inf), labels[:1])) == 0).all()
    with raises(ConfigurationError, "conflict", "model"):
        make_model("logistic", 7, 10, 3.0)
    with raises(ConfigurationError, "out-of-range", "feature-bound"):
        make_model("logistic", 7, 2, -1.0)


def samples(count=40, features=7):
    rng = np.random.default_rng(1)
    return rng.normal(size=(count, features)), rng.integers(2, size=count)


def test_the_regularised_loss_has_the_gradient_and_the_bounds_it_declares():
    model, batch, rng = make_model("nonconvex-logistic", 7, 2, 1.5), samples(), np.random.default_rng(2)
    steepest = longest = 0.0
    for _ in range(200):
        w, direction = rng.normal(size=(2, 7)) * rng.choice([0.1, 1.0, 5.0])
        gradients = model([w], batch)
        assert model.mean_gradient([w], batch) == pytest.approx(gradients.mean(axis=0), abs=1e-12)
        ahead, behind = (model.evaluate([w + sign * 1e-5 * direction], batch)[0] for sign in (1, -1))
        assert (ahead - behind) / 2e-5 == pytest.approx(gradients.mean(axis=0) @ direction, abs=1e-5)
        longest = max(longest, np.linalg.norm(gradients, axis=1).max())
        moved = np.linalg.norm(model([w + 1e-4 * direction], batch) - gradients, axis=1).max()
        steepest = max(steepest, moved / (1e-4 * np.linalg.norm(direction)))
        assert model.at_points(np.tile(w, (40, 1)), batch) == pytest.approx(gradients)
    assert 0.5 * model.gradient_bound < longest <= model.gradient_bound
    assert 0.3 * model.smoothness < steepest <= model.smoothness
    assert not model.clips_contractively, "amplification and contractive clipping are for convex losses"


def test_ridge_and_mean_gradients_are_those_of_their_losses():
    rng = np.random.Generator(np.random.Philox(key=81))
    features, labels, point = rng.normal(size=(6, 4)), rng.normal(size=6), rng.normal(size=4)
    for name in ("ridge", "mean"):
        model = make_model(name, 4, 1, 3.0)
        rows = model([point], (features, labels))
        for i in range(6):
            one = features[i : i + 1], labels[i : i + 1]
            slope = [
                (model.evaluate([point + h], one)[0] - model.evaluate([point - h], one)[0]) / 2e-6
                for h in 1e-6 * np.eye(4)
            ]
            assert rows[i] == pytest.approx(slope, abs=1e-5)
        assert math.isnan(model.evaluate([point], (features, labels))[1])
        # Clipped steps at the largest step the declaration allows move no two points apart.
        far = point + rng.normal(size=4)
        for clip in (0.1, 1.0, 10.0):
            moved = []
            for x in (point, far):
                gradient = model([x], (features[:1], labels[:1]))[0]
                moved.append(x - 2 / model.smoothness * gradient * min(1, clip / np.linalg.norm(gradient)))
            assert np.linalg.norm(moved[0] - moved[1]) <= np.linalg.norm(point - far) * (1 + 1e-12)


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


KINDS = {"logistic": (Logistic, 2), "ridge": (Ridge, 1), "nonconvex-logistic": (NonconvexLogistic, 2)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0.5, 30.0], ids=["short features", "features that are bounded"])
def test_application_and_test_models_agree(kind, length):
    own, classes = KINDS[kind]
    model, other = make_model(kind, 4, classes, 2.0), own(4, 2.0)
    generator = np.random.Generator(np.random.Philox(key=12))
    features = generator.normal(size=(50, 4))
    features *= length / np.linalg.norm(features, axis=1, keepdims=True)
    batch = features, generator.integers(2, size=50)
    points = generator.normal(size=(50, 4))
    assert (model([points[0]], batch) == other([points[0]], batch)).all()
    assert (model.at_points(points, batch) == other.at_points(points, batch)).all()
    for name in ("smoothness", "gradient_bound", "clips_contractively"):
        assert getattr(model, name) == getattr(other, name)
    assert declares_itself_convex(model) == declares_itself_convex(other) == (kind != "nonconvex-logistic")


@pytest.mark.parametrize("kind", ["softmax", "additive"])
def test_class_weights_multiply_each_gradient_by_the_weight_of_its_own_class(kind):
    """The largest counts as 1, so no gradient grows; and gradients of several points are added up alike."""
    random = np.random.Generator(np.random.Philox(key=11))
    samples = random.normal(size=(6, 4)), np.array([0, 1, 2, 2, 1, 0])
    plain = make_model(kind, 4, 3, 1.0)
    weighted = plain.with_class_weights((1.0, 4.0, 2.0))
    point = [random.normal(size=shape) for shape in plain.shapes]
    factors = np.array([0.25, 1.0, 0.5])[samples[1]]
    assert np.allclose(weighted(point, samples), plain(point, samples) * factors[:, None], rtol=1e-12)
    rows = weighted.stacked([point, point], [0.5, 0.5], samples)
    assert np.allclose(rows.norms(), np.linalg.norm(weighted(point, samples), axis=1))
    assert (weighted.logits(point, samples[0]) == plain.logits(point, samples[0])).all()
    assert plain.class_weights is None, "a cached model stays as it is"
    assert plain.with_class_weights(()) is plain


def test_models_without_weighted_gradients_refuse_class_weights():
    with raises(ConfigurationError, "unsupported", "class_weights"):
        make_model("logistic", 4, 2, 1.0).with_class_weights((1.0, 2.0))
