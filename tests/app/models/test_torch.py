"""Networks in PyTorch."""

import numpy as np
import pytest
import torch
from murmurfl.app.models import make_model
from murmurfl.clients import TorchGradients
from murmurfl.privacy import ConfigurationError


def test_the_papers_cnn_has_the_papers_layers():
    model = make_model("cnn", 784, 10)
    assert [shape for shape in model.shapes if len(shape) > 1] == [
        (32, 1, 3, 3), (32, 32, 3, 3), (64, 800), (32, 64), (10, 32),
    ]  # fmt: skip
    assert model.num_parameters == 63_242
    generator = np.random.Generator(np.random.Philox(key=42))
    batch = generator.random((3, 784), dtype=np.float32), np.array([1, 5, 9])
    parameters = model.initial_parameters(1)
    flat = np.concatenate([values.ravel() for values in parameters])
    together = model.at_points(np.tile(flat, (3, 1)), batch)
    assert together == pytest.approx(model(parameters, batch), abs=1e-6)
    assert model.logits(parameters, batch[0]).shape == (3, 10)
    with pytest.raises(ConfigurationError, match="square"):
        make_model("cnn", 783, 10)


@pytest.mark.parametrize("side", [10, 13, 28])
def test_the_cnns_scores_are_its_modules(side):
    model = make_model("cnn", side * side, 10)
    parameters = [values * 3 for values in model.initial_parameters(5)]
    images = np.random.Generator(np.random.Philox(key=44)).standard_normal((230, side * side), dtype=np.float32)
    named = dict(zip(model.names, map(torch.as_tensor, parameters), strict=True))
    expected = torch.func.functional_call(model.module, named, (torch.as_tensor(images),)).detach().numpy()
    assert np.ptp(expected) > 1
    assert model.logits(parameters, images) == pytest.approx(expected, rel=1e-5, abs=1e-4)  # of values around 50


@pytest.mark.parametrize("side", [10, 13, 28])
def test_the_cnns_closed_form_is_what_pytorch_derives(side):
    model = make_model("cnn", side * side, 10)
    reference = TorchGradients(model.module, torch.nn.functional.cross_entropy)
    generator = np.random.Generator(np.random.Philox(key=43))
    images = generator.random((4, side, side), dtype=np.float32)
    images[:, : side // 2] = 0.0  # black and white areas: many values of a pooling window are the same
    images[:, -side // 4 :] = 1.0
    batch = images.reshape(4, -1), np.array([0, 3, 3, 9])
    starts = [model.initial_parameters(seed) for seed in range(4)]
    points = np.stack([np.concatenate([values.ravel() for values in start]) for start in starts]).astype(np.float64)
    rows = model.at_points(points, batch)
    assert rows == pytest.approx(reference.at_points(points, batch), abs=1e-6)
    assert model(starts[2], batch)[2] == pytest.approx(rows[2], abs=1e-6)
    # A sample that is not finite spoils its own row and no other.
    batch[0][1, 5] = np.nan
    again = model.at_points(points, batch)
    assert not np.isfinite(again[1]).all()
    assert np.array_equal(again[[0, 2, 3]], rows[[0, 2, 3]])


@pytest.mark.parametrize(("name", "features"), [("mlp", 6), ("cnn", 196)])
def test_a_networks_mean_gradient_is_the_mean_of_its_samples(name, features):
    model = make_model(name, features, 10)
    rng = np.random.default_rng(3)
    batch = rng.random(size=(150, features)).astype(np.float32), rng.integers(10, size=150)
    parameters = model.initial_parameters(1)
    assert model.mean_gradient(parameters, batch) == pytest.approx(model(parameters, batch).mean(axis=0), abs=1e-6)
