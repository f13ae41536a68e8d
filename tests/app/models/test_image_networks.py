"""A network for images and augmentations: rows of one sample, averaged before the clip."""

import numpy as np
import pytest
import torch
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.models import make_model
from murmurfl.app.models.image_networks import augmented
from murmurfl.app.models.torch_networks import own_model
from murmurfl.app.settings.layers import with_defaults
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients.adapters.per_sample_gradients import stacked_gradients
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.release.clipping import RowBound

from tests.harness.errors import raises

NETWORK = "group-norm-cnn"
CLIP = 0.7


def images(count, width, key=11):
    return np.random.Generator(np.random.Philox(key=key)).random((count, width), dtype=np.float32)


def trained(model, key=3):
    """Parameters away from the start, where the head is zero and convolutions have no gradient."""
    generator = np.random.Generator(np.random.Philox(key=key))
    return [
        values + 0.3 * generator.standard_normal(values.shape, np.float32) for values in model.initial_parameters(1)
    ]


@pytest.mark.parametrize(("width", "classes"), [(64, 10), (192, 4), (784, 10), (3 * 32 * 32, 10), (100 * 100, 2)])
def test_network_reads_square_images_of_any_size_and_starts_undecided(width, classes):
    model = make_model(NETWORK, width, classes)
    assert 1_000 < model.num_parameters < 12_000
    start = model.initial_parameters(1)
    assert not model.logits(start, images(3, width)).any()
    assert not np.array_equal(start[0], model.initial_parameters(2)[0])
    rows = model(trained(model), (images(3, width), np.array([0, 1, 1])))
    assert rows.shape == (3, model.num_parameters)
    assert (np.linalg.norm(rows, axis=1) > 0.1).all()


@pytest.mark.parametrize("width", [49, 3 * 49, 2 * 64, 65])
def test_network_refuses_what_is_no_square_image_of_eight_pixels(width):
    with raises(ConfigurationError, "conflict", "model"):
        make_model(NETWORK, width, 10)


def moved(image, down, right):
    """An image of shape (side, side, channels), moved with its edge repeated; written without the code under test."""
    side = len(image)
    rows, columns = (np.clip(np.arange(side) - shift, 0, side - 1) for shift in (down, right))
    return image[rows][:, columns]


def test_augmentations_are_the_image_moved_and_in_colour_mirrored():
    grey = images(2, 81).reshape(2, 9, 9, 1)
    made = augmented(torch.as_tensor(grey.reshape(2, -1)), 17).reshape(2, 17, 9, 9, 1).numpy()
    shifts = [(0, 0), (0, 1), (1, 0), (0, -1), (-1, 0), (1, 1), (-1, -1), (1, -1), (-1, 1)]
    shifts += [(0, 2), (2, 0), (0, -2), (-2, 0), (2, 2), (-2, -2), (2, -2), (-2, 2)]
    for image, own in zip(grey, made, strict=True):
        assert all(np.array_equal(one, moved(image, *shift)) for one, shift in zip(own, shifts, strict=True))
    colour = images(1, 3 * 64).reshape(8, 8, 3)
    made = augmented(torch.as_tensor(colour.reshape(1, -1)), 4).reshape(4, 8, 8, 3).numpy()
    expected = [colour, colour[:, ::-1], moved(colour, 0, 1), moved(colour, 0, 1)[:, ::-1]]
    assert np.array_equal(made, np.stack(expected))


@pytest.mark.parametrize("number", [2, 5])
def test_gradient_is_the_mean_over_augmentations_and_scores_are_the_images_own(number):
    plain, averaged = (make_model(NETWORK, 64, 10, augmentations=one) for one in (1, number))
    point, rows, labels = trained(plain), images(6, 64), np.arange(6)
    each = augmented(torch.as_tensor(rows), number).reshape(6, number, 64).numpy()
    expected = np.mean([plain(point, (each[:, place], labels)) for place in range(number)], axis=0)
    found = averaged(point, (rows, labels))
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(found - plain(point, (rows, labels))).max() > 1e-2
    assert np.array_equal(averaged.logits(point, rows), plain.logits(point, rows))


def clipped_sum(model, point, batch):
    rows = stacked_gradients(model, [point], [1.0], batch)
    return RowBound(CLIP, observed=False).total(rows, model.num_parameters)


def clipped_before_the_mean(model, point, batch, number):
    """The planted bug: each augmentation is clipped as a row of its own, and their sum is not divided."""
    features, labels = batch
    each = augmented(torch.as_tensor(features), number).numpy()
    return clipped_sum(model, point, (each, np.repeat(labels, number)))


@pytest.mark.parametrize("number", [1, 4])
def test_one_record_moves_a_sum_by_two_clips_at_most_and_no_other_row(number):
    model, plain = (make_model(NETWORK, 64, 10, augmentations=one) for one in (number, 1))
    point, features, labels = trained(plain), images(8, 64), np.arange(8)
    others, moves, planted = np.arange(8) != 3, [], []
    kept = model(point, (features, labels))[others]
    before = clipped_sum(model, point, (features, labels))
    if number > 1:
        spoilt = clipped_before_the_mean(plain, point, (features, labels), number)
    for strange in (np.zeros(64), np.ones(64), -1e6 * np.ones(64), np.full(64, np.nan), 1 - features[3]):
        changed, classes = features.copy(), labels.copy()
        changed[3], classes[3] = strange, 9
        assert np.array_equal(model(point, (changed, classes))[others], kept)
        moves.append(np.linalg.norm(clipped_sum(model, point, (changed, classes)) - before))
        if number > 1:
            after = clipped_before_the_mean(plain, point, (changed, classes), number)
            planted.append(np.linalg.norm(after - spoilt))
    assert 0.2 * CLIP < max(moves) <= 2 * CLIP
    assert number == 1 or max(planted) > 2 * CLIP


def test_a_real_clients_process_computes_the_same_means():
    model = make_model.__wrapped__(NETWORK, 64, 10, augmentations=3)
    point, batch = trained(model), (images(3, 64), np.array([1, 5, 9]))
    simulated = model(point, batch)
    model.wrapped.isolate()
    try:
        assert np.abs(model(point, batch) - simulated).max() < 1e-5
    finally:
        model.wrapped.process.close()


def test_a_module_of_ones_own_has_augmentations_where_its_inputs_are_square_images():
    def own(width):
        return own_model(lambda features, classes: torch.nn.Linear(features, classes), "mine:make").make(width, 3, 1.0)

    point, batch = trained(own(25)), (images(2, 25), np.array([0, 2]))
    assert np.abs(own(25).with_augmentations(4)(point, batch) - own(25)(point, batch)).max() > 1e-2
    with raises(ConfigurationError, "conflict", "model.augmentations"):
        own(26).with_augmentations(4)
    with raises(ConfigurationError, "unsupported", "model.augmentations"):
        make_model("cnn", 196, 3, augmentations=4)


def test_a_run_with_the_network_reads_pixels_unless_it_says_otherwise():
    assert "features" not in with_defaults({"model": NETWORK})
    assert with_defaults({})["features"] == "soft-gradients"
    with raises(ConfigurationError, "conflict", "features"):
        RunConfig(model=NETWORK, features="soft-gradients")
    with raises(ConfigurationError, "conflict", "centring"):
        RunConfig(model=NETWORK, centring="private")
    with raises(ConfigurationError, "conflict", "model.augmentations"):
        RunConfig(model="softmax", augmentations=2)


@pytest.mark.parametrize(
    ("strategy", "own"),
    [
        ("full-batch", {"trust": "untrusted-server"}),
        ("mu2", {"trust": "untrusted-server", "batch_size": 2}),
        ("trusted-sgd", {"trust": "trusted-server", "batch_size": 8, "batch_selection": "poisson"}),
    ],
)
def test_network_trains_under_every_kind_of_step(strategy, own):
    few = {"num_clients": 3, "clients_per_round": 3, "training_samples": 150}
    result = run_cohort(
        RunConfig(model=NETWORK, task="digits", strategy=strategy, epsilon=50.0, noise_quality="fast", **few, **own)
    )
    assert result.accuracy > 0.25
