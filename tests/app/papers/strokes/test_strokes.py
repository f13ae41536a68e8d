"""Random characters, the net that learns them, and that all of it follows from seeds."""

import hashlib

import numpy as np
import pytest
from murmurfl.app.data.features.learnt import frozen_net
from murmurfl.app.papers.strokes.random_characters import Alphabet, drawn, keyed
from murmurfl.app.papers.strokes.stroke_training import PretrainConfig, net_arrays, packed, pretrain, whitening

TINY = PretrainConfig(seed=7, classes=10, steps=6, batch=16, channels=(2, 3, 4), width=5, exact=True)
DIGEST = "d493d696cc8f78c8e89dff9b88b57a7157dfd0169db0aa25126f59e489117453"


def rounded_digest(arrays):
    """SHA-256 of arrays rounded to six decimals, which clients with different last digits agree on."""
    return hashlib.sha256(b"".join(np.round(one * 10**6).astype("<i8").tobytes() for one in arrays)).hexdigest()


def characters(count=40):
    hand = keyed("test")
    alphabet = Alphabet.random(20, hand)
    classes = hand.integers(20, size=count)
    return drawn(alphabet, classes, hand, np.float64), classes, alphabet


def test_characters_lie_as_those_they_stand_for():
    """Ink from 0 to 1, about the middle, with nothing at the edge."""
    images, _, _ = characters(200)
    assert images.shape == (200, 28, 28)
    assert images.min() == 0
    assert images.max() == 1
    centres = np.stack([(images.sum(axis) @ np.arange(28)) / images.sum((1, 2)) for axis in (1, 2)])
    assert np.abs(centres - 13.5).max() < 4
    assert images[:, 0].mean() < 0.01
    assert 0.05 < images.mean() < 0.25


def test_two_drawings_of_a_character_are_nearer_than_two_characters():
    images, classes, _ = characters(400)
    flat = images.reshape(400, -1)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    alike, same = flat @ flat.T, classes[:, None] == classes
    np.fill_diagonal(same, False)
    assert alike[same].mean() > alike[classes[:, None] != classes].mean() + 0.15


def test_characters_follow_from_their_seed():
    one, other = characters(10)[0], characters(10)[0]
    assert (one == other).all()
    assert rounded_digest([one]) == "fa19cfa5f9442b5ac7a7c49d138a0a7689b7221cb1e44c9e90e8ad67562d5dc4"


@pytest.fixture(scope="module")
def layers():
    pytest.importorskip("torch")
    return pretrain(TINY)


def test_a_tiny_net_is_learnt_to_the_same_weights_on_every_client(layers):
    assert rounded_digest(layers) == DIGEST


def test_the_digest_would_see_another_lesson(layers):
    changed = [values.copy() for values in layers]
    changed[0].ravel()[0] += 2e-6
    assert rounded_digest(changed) != DIGEST


def test_a_frozen_net_is_the_trained_one_with_its_running_means(layers):
    """Worked in: scale and shift of normalisation are part of weights and biases."""
    images = characters(4)[0].astype(np.float32)
    rows = frozen_net(images, [w.astype(np.float32) for w in layers[::2]], [b.astype(np.float32) for b in layers[1::2]])
    assert rows.shape == (4, 5)
    assert rows.min() >= 0
    assert np.ptp(rows, axis=0).max() > 0


def test_a_lesson_teaches(monkeypatch):
    """More right answers than guessing, which gives a third."""
    pytest.importorskip("torch")
    from murmurfl.app.papers.strokes import stroke_training as training

    seen = []
    monkeypatch.setattr(training, "_SAID_EVERY", 20)
    monkeypatch.setattr(training.logger, "info", lambda text, *values: seen.append(values[-1]))
    pretrain(PretrainConfig(seed=3, classes=3, steps=40, batch=16, rate=5e-3, channels=(4, 8, 8), width=16, exact=True))
    assert seen[-1] > 60


def test_a_weights_file_is_the_same_bytes_for_the_same_arrays(layers, monkeypatch):
    monkeypatch.setattr("murmurfl.app.papers.strokes.stroke_training._CENTRED_ON", (20, 500))
    assert packed(net_arrays(layers)) == packed(net_arrays(layers))


def test_whitening_makes_variances_alike():
    found = whitening(images=300, directions=(12, 8), kept=20)
    assert found["axes"].shape == (20, 96)
    assert found["axes"] @ found["axes"].T == pytest.approx(np.eye(20), abs=1e-9)
    assert (np.diff(found["variances"]) <= 0).all()
