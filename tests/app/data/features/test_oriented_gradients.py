"""Features: fixed maps of one image each."""

import numpy as np
import pytest
from murmurfl.app.data.features.gradients import oriented_gradients, pooled


def test_oriented_gradients_depend_on_their_image_alone_and_have_the_stated_norm():
    images = np.random.Generator(np.random.Philox(key=1)).integers(0, 256, size=(20, 28, 28), dtype=np.uint8)
    images[3] = 0
    features = oriented_gradients(images)
    assert features.shape == (20, 392)
    norms = np.linalg.norm(features, axis=1)
    assert norms[3] == 0
    assert np.delete(norms, 3) == pytest.approx(np.full(19, 4.0), rel=1e-5)
    for i in (0, 7, 19):
        assert (oriented_gradients(images[i : i + 1])[0] == features[i]).all()


def test_an_edge_votes_for_its_own_direction_in_its_own_cell():
    image = np.zeros((1, 28, 28), dtype=np.uint8)
    image[0, :, 14:] = 255  # a vertical edge: the gradient points right
    histogram = oriented_gradients(image).reshape(7, 7, 8)
    inside = histogram[1:-1, 2:5]
    assert inside[..., 0].sum() == pytest.approx(inside.sum())
    assert histogram[3, 3].sum() > 0
    assert histogram[3, 0].sum() == 0


def test_pooled_features_are_means_over_blocks():
    images = np.random.default_rng(5).integers(256, size=(3, 28, 28), dtype=np.uint8)
    features = pooled(images, 4)
    assert features.shape == (3, 49)
    assert features[1, 7 * 2 + 5] == pytest.approx(images[1, 8:12, 20:24].mean() / 255)
    assert pooled(images, 2)[2, 14 * 3 + 1] == pytest.approx(images[2, 6:8, 2:4].mean() / 255)
