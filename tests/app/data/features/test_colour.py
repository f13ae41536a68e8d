"""Features of colour images: a map of one image alone, made from procedural images."""

import numpy as np
import pytest
from murmurfl.app.data.features import FEATURES, register_images
from murmurfl.app.data.features.colour import (
    SIDE,
    THRESHOLD,
    colour_features,
    normal_patches,
    patch_averages,
    squared,
    usual_colours,
)
from murmurfl.app.data.features.feature_map import luminance
from murmurfl.app.data.features.own_features import FileFeatures, own_features, save_features
from murmurfl.app.methods.full_batch_method import FullBatchMethod
from murmurfl.app.models import make_model
from murmurfl.app.papers.strokes.procedural_images import colour_arrays, procedural_images
from murmurfl.app.papers.strokes.random_characters import keyed
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import Column
from murmurfl.privacy import ConfigurationError

from tests.harness.errors import raises


def images(*shape, seed=1):
    return np.random.Generator(np.random.Philox(key=seed)).integers(0, 256, size=shape, dtype=np.uint8)


@pytest.mark.parametrize("shape", [(16, 16, 3), (32, 32, 3), (28, 28), (224, 160, 3), (17, 200)])
def test_rows_have_norm_one_and_depend_on_their_image_alone(shape):
    some, others = images(3, *shape), images(3, *shape, seed=2)
    some[1] = 0
    others[2] = some[2]
    rows = colour_features(some)
    assert rows.shape == (3, 385)
    assert "385" in FEATURES["colour"].sentence
    assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(3), abs=1e-6)
    assert colour_features(others)[2] == pytest.approx(rows[2], abs=1e-5)
    assert colour_features(some[2:])[0] == pytest.approx(rows[2], abs=1e-5)
    assert colour_features(some[:0]).shape == (0, 385)


@pytest.mark.parametrize("few", [96, 24])
def test_fewer_directions_are_the_first_ones_scaled_anew(few):
    some = procedural_images(3, keyed("test"))
    rows, whole = FEATURES[f"colour-{few}"].of_any(some), colour_features(some)
    assert rows.shape == (3, few + 1)
    assert str(few + 1) in FEATURES[f"colour-{few}"].sentence
    first = whole[:, :few] / np.linalg.norm(whole[:, :few], axis=1, keepdims=True)
    assert rows[:, :few] / np.linalg.norm(rows[:, :few], axis=1, keepdims=True) == pytest.approx(first, abs=1e-5)
    assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(3), abs=1e-6)
    assert np.linalg.norm(whole[:, :few], axis=1).max() < 0.9  # so without scaling, noise would weigh more


def test_more_noise_leaves_fewer_directions():
    found = [usual_colours(1_000, 4, mu) for mu in (0.1, 0.3, 3.0)]
    assert found == ["colour-24", "colour-96", "colour"]


@pytest.mark.parametrize(("features", "travel"), [("colour", 4_800.0), ("soft-gradients", 90_000.0)])
def test_steps_without_noise_are_bounded_by_the_number_of_samples(features, travel):
    config = RunConfig(task="cifar10", features=features, strategy="full-batch", mechanism="none", centring="private")
    model = make_model("softmax", 385, 10, constant=True)
    found = FullBatchMethod().settled(config, 60, model, (160,) * 10)
    assert found.learning_rate * found.clip_norm * 60 / (1 - found.momentum) == pytest.approx(travel)


def test_image_and_its_mirror_image_have_the_same_features():
    some = procedural_images(4, keyed("test"))
    assert colour_features(some[:, :, ::-1]) == pytest.approx(colour_features(some), abs=1e-5)
    assert np.abs(colour_features(some[:, ::-1]) - colour_features(some)).max() > 0.01


def test_colour_and_brightness_are_both_seen():
    some = procedural_images(4, keyed("test"))
    grey = np.stack([luminance(some)] * 3, axis=3)
    assert np.abs(colour_features(grey) - colour_features(some)).max() > 0.01
    assert colour_features(luminance(some)) == pytest.approx(colour_features(grey), abs=1e-5)


def test_patch_averages_are_answers_of_filters_above_the_threshold():
    """By definition, at one filter and the mirror image of it."""
    values = squared(procedural_images(1, keyed("test")))
    random = np.random.Generator(np.random.Philox(key=4))
    one = random.standard_normal(108).astype(np.float32)
    both = np.stack([one, one.reshape(6, 6, 3)[:, ::-1].reshape(108)], axis=1)
    found = patch_averages(values, np.zeros(108, np.float32), both).reshape(2, 2, 2)  # sign, half of height, filter
    answers = (normal_patches(values) @ both).reshape(27, 27, 2)
    left = np.maximum(answers[:13, :13, 0] - THRESHOLD, 0).mean()
    right = np.maximum(answers[:13, 14:, 1] - THRESHOLD, 0).mean()
    assert found[0, 0, 0] == pytest.approx(left + right, rel=1e-4)


def test_image_is_cut_to_its_middle_square_and_resized_by_means():
    wide = np.zeros((1, 64, 128, 3), np.uint8)
    wide[:, :, 32:96] = 100
    assert squared(wide) == pytest.approx(np.full((1, SIDE, SIDE, 3), 100.0))
    some = images(1, 64, 64, 3)
    assert squared(some).mean() == pytest.approx(some.mean(), rel=0.01)
    assert squared(np.full((1, 8, 8), 16, np.uint8), white=16).max() == 255


def test_procedural_images_and_weights_follow_from_seeds():
    some = procedural_images(5, keyed("test"))
    assert np.array_equal(some, procedural_images(5, keyed("test")))
    assert some.std(axis=(1, 2, 3)).min() > 1
    made = colour_arrays(count=600)
    assert made["axes"].shape == (384, len(made["mean"]))
    assert made["filters"].shape == (200, 108)
    assert all(
        np.array_equal(array, other) for array, other in zip(made.values(), colour_arrays(600).values(), strict=True)
    )


def test_features_of_grey_images_read_the_luminance_of_colour():
    some = images(2, 28, 28, 3)
    for name in ("soft-gradients", "scattering"):
        assert np.array_equal(FEATURES[name].of_any(some), FEATURES[name](luminance(some), 255))
    assert FEATURES["pixels"].of_any(some).shape == (2, 28 * 28 * 3)


def test_images_of_a_column_are_encoded_by_any_features():
    width = register_images("soft-gradients")
    column = Column(kind="image", encoder="soft-gradients", dimension=width)
    for shape in ((32, 32, 3), (200, 90, 3), (12, 12)):
        assert np.linalg.norm(column.encode(images(*shape))) == pytest.approx(1.0, abs=1e-5)
    with raises(ConfigurationError, "conflict", "features", got="colour"):
        RunConfig(task="synthetic", features="colour")


def test_own_function_and_own_file_may_read_colour(tmp_path):
    def channels(values):
        return values.mean(axis=(1, 2))

    channels.reads_colour, channels.side = True, 12
    assert own_features(channels, "own").of_any(images(2, 12, 12, 3)).shape == (2, 3)
    torch = pytest.importorskip("torch")
    path = tmp_path / "net.pt"
    save_features(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1)), path)
    net = FileFeatures(str(path))
    assert net.of_any(images(2, 12, 12, 3)).shape == (2, 4)
    assert net.of_any(images(2, 12, 12)).shape == (2, 4)
