"""What every model is held to."""

import numpy as np
import pytest
from murmurfl.app.models import make_model


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
