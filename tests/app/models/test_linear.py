"""Linear models and the mean: gradients, bounds and smoothness as declared."""

import math

import numpy as np
import pytest
from murmurfl.app.models import make_model
from murmurfl.privacy import ConfigurationError


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
    with pytest.raises(ConfigurationError, match="two classes"):
        make_model("logistic", 7, 10, 3.0)
    with pytest.raises(ConfigurationError, match="feature-bound"):
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
