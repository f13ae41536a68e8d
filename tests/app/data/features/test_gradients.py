"""Histograms of gradients: oriented, and soft."""

import numpy as np
import pytest
from murmurfl.app.data.features import FEATURES
from murmurfl.app.data.features.gradients import (
    ORIENTATIONS,
    oriented_gradients,
    pooled,
    sampled_blur,
    soft_gradients,
    stride_for,
)
from murmurfl.app.data.loading import load_dataset
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError

from tests.harness.errors import raises


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


def images(*shape, seed=1):
    return np.random.Generator(np.random.Philox(key=seed)).integers(0, 256, size=shape, dtype=np.uint8)


def by_definition(image):
    """One image, pixel by pixel, as the docstring has it."""
    height, width = image.shape
    stride = stride_for(min(height, width))
    padded = np.pad(image / 255, 1)
    maps = np.zeros((height, width, ORIENTATIONS))
    for row in range(height):
        for column in range(width):
            right = padded[row + 1, column + 2] - padded[row + 1, column]
            down = padded[row + 2, column + 1] - padded[row, column + 1]
            place = np.arctan2(down, right) / (2 * np.pi) * ORIENTATIONS % ORIENTATIONS
            lower, share = int(place), place - int(place)
            maps[row, column, lower % ORIENTATIONS] += np.hypot(right, down) * (1 - share)
            maps[row, column, (lower + 1) % ORIENTATIONS] += np.hypot(right, down) * share
    pooled = np.einsum(
        "rh,cw,hwo->rco", sampled_blur(height, stride).astype(float), sampled_blur(width, stride).astype(float), maps
    )
    rows = np.sqrt(pooled).ravel()
    return rows / np.linalg.norm(rows)


@pytest.mark.parametrize(
    ("shape", "width"),
    [((28, 28), 588), ((8, 8), 192), ((4, 4), 192), ((5, 9), 5 * 9 * 12), ((32, 32), 768), ((17, 30), 4 * 7 * 12)],
)
def test_images_of_any_size_give_rows_of_norm_one_that_are_never_negative(shape, width):
    some = images(6, *shape)
    some[2] = 200  # its frame is an edge
    rows = soft_gradients(some)
    assert rows.shape == (6, width)
    assert rows.dtype == np.float32
    assert rows.min() >= 0
    assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(6), abs=1e-6)
    assert rows[4] == pytest.approx(by_definition(some[4]), abs=1e-6)


def test_a_blank_image_gives_zeros_and_no_images_none():
    assert not soft_gradients(np.zeros((2, 28, 28), np.uint8)).any()
    assert soft_gradients(np.zeros((0, 28, 28), np.uint8)).shape == (0, 588)


def test_a_row_is_the_same_whatever_else_there_is():
    some = images(1200, 28, 28)  # more than one block
    rows = soft_gradients(some)
    for i in (0, 700, 1199):
        assert (soft_gradients(some[i : i + 1])[0] == rows[i]).all()


def test_how_bright_white_is_does_not_matter_to_a_row_of_norm_one():
    some = images(3, 8, 8) // 16
    assert soft_gradients(some, 16) == pytest.approx(soft_gradients(some, 255), abs=1e-6)


def test_a_shift_by_a_pixel_changes_less_than_it_does_to_hard_cells():
    from murmurfl.app.data.features.gradients import oriented_gradients

    image = np.zeros((1, 28, 28), np.uint8)
    image[0, 8:20, 8:20] = 255
    moved = np.roll(image, 1, axis=2)
    soft = np.linalg.norm(soft_gradients(image) - soft_gradients(moved))
    hard = np.linalg.norm(oriented_gradients(image, norm=1.0) - oriented_gradients(moved, norm=1.0))
    assert soft < 0.5 * hard


def test_they_are_features_of_any_task_with_images():
    features = FEATURES["soft-gradients"]
    assert (features.norm_bound, features.nonnegative) == (1.0, True)
    assert load_dataset(RunConfig(features="soft-gradients")).num_features == 192
    with raises(ConfigurationError, "conflict", "features"):
        RunConfig(task="synthetic", features="soft-gradients")


@pytest.mark.parametrize("name", [name for name, features in FEATURES.items() if features.nonnegative])
def test_what_says_that_it_is_never_negative_is_not(name):
    assert FEATURES[name](images(4, 28, 28), 255).min() >= 0
