"""What is tested of clients with models of the tests' own is true of the application's: they are the same."""

import numpy as np
import pytest
from murmurfl.app.models import make_model
from murmurfl.clients.online_client import declares_itself_convex

from tests.harness.models import Logistic, NonconvexLogistic, Ridge

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
