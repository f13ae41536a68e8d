"""One shot's server: least squares where there is no noise, ridge where there is, and the arrays of a model."""

import math

import numpy as np
import pytest
from flwr.app import ArrayRecord
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.release.clipping import Moments
from murmurfl.strategies import OneShot, ridge_scores
from murmurfl.strategies.rounds.rule import Turn

from tests.harness.errors import raises

N, K, C, S = 500, 5, 3, 2.0
generator = np.random.Generator(np.random.Philox(key=31))
FEATURES = generator.normal(size=(N, K)) / 4
LABELS = (FEATURES @ generator.normal(size=(K, C)) + 0.2).argmax(axis=1)


def pretrain(arrays, features=FEATURES, labels=LABELS, classes=C, samples=N, clients=10, noise=0.0, **options):
    """The model that a strategy makes of the moments of samples, without a client."""
    options = {"clip_norm": S, "num_clients": clients, "clients_per_round": clients, **options}
    strategy = OneShot(**options)
    state = strategy._ensure_state(ArrayRecord([np.zeros(shape) for shape in arrays]))
    total = Moments(classes).sum(features, np.eye(classes)[labels], S)
    total += noise * np.random.Generator(np.random.Philox(key=4)).normal(size=len(total))
    assert strategy.release_layout[0][1] == total.shape
    state = strategy.rule.update(state, total, Turn(1, clients, clients, samples, strategy._layout))
    return strategy._record(strategy.rule.model(state)).to_numpy_ndarrays()


def test_without_noise_it_is_least_squares_on_the_classes():
    (weight,) = pretrain([(C, K)])
    targets = np.eye(C)[LABELS] - 1 / C
    expected = np.linalg.solve(FEATURES.T @ FEATURES, FEATURES.T @ targets)
    assert weight == pytest.approx(C * expected.T, abs=1e-9)


def test_a_bias_is_the_weight_of_the_constant():
    with_constant = np.concatenate([FEATURES, np.full((N, 1), 0.5)], axis=1)
    weight, bias = pretrain([(C, K), (C,)], with_constant, constant=0.5)
    (whole,) = pretrain([(C, K + 1)], with_constant)
    assert weight == pytest.approx(whole[:, :K])
    assert bias == pytest.approx(0.5 * whole[:, K])
    predictions = (FEATURES @ weight.T + bias).argmax(axis=1)
    assert (predictions == LABELS).mean() > 0.9


def test_two_classes_may_share_one_weight():
    two = (LABELS > 0).astype(int)
    (both,) = pretrain([(2, K)], labels=two, classes=2)
    (one,) = pretrain([(K,)], labels=two, classes=2)
    assert one == pytest.approx(both[1] - both[0])


def test_the_floor_is_in_units_of_the_noise_on_the_sum():
    """Whatever the release had in directions below it, nothing there is longer than the targets over the floor."""
    clients, std, ridge = 9, 0.5, 4.0
    floor = ridge * std * math.sqrt(clients)
    (weight,) = pretrain([(C, K)], clients=clients, noise_std=std, ridge=ridge)
    gram, targets = FEATURES.T @ FEATURES, FEATURES.T @ (np.eye(C)[LABELS] - 1 / C)
    values, vectors = np.linalg.eigh(gram)
    assert values.min() > floor / 10  # of five directions none is lost, and one is shortened at least
    expected = vectors @ np.diag(1 / np.maximum(values, floor)) @ vectors.T @ targets
    assert weight == pytest.approx(C * expected.T, rel=1e-6)


def test_a_gram_matrix_that_noise_made_indefinite_still_gives_finite_scores():
    gram = np.diag([4.0, -1.0])
    scores = ridge_scores(gram, np.array([[1.0], [1.0]]), 0.5)
    assert scores[:, 0] == pytest.approx([1 / 4, 1 / 0.5])
    noisy = pretrain([(C, K)], noise=5.0, noise_std=5.0 / math.sqrt(10))[0]
    assert np.isfinite(noisy).all()
    assert np.linalg.norm(noisy) < np.linalg.norm(pretrain([(C, K)])[0])


def test_the_model_stays_what_it_was_if_nothing_came():
    strategy = OneShot(clip_norm=S, num_clients=2, clients_per_round=2)
    state = strategy._ensure_state(ArrayRecord([np.full((C, K), 0.5)]))
    state = strategy.rule.update(state, np.zeros(Moments(C).num_values(K)), Turn(1, 2))
    assert (strategy.rule.model(state) == 0.5).all()
    assert strategy.rule.points(state) == ()
    with raises(ConfigurationError, "exhausted"):
        strategy.rule.update(state, np.zeros(Moments(C).num_values(K)), Turn(2, 2, 2))


@pytest.mark.parametrize(
    ("arrays", "constant"),
    [([(C, K), (C,)], 0.0), ([(C, K)], 0.5), ([(K,)], 0.5), ([(C, K), (C + 1,)], 0.5), ([(2, 2, 2)], 0.0)],
)
def test_a_model_that_is_not_linear_is_refused(arrays, constant):
    with raises(ConfigurationError, "wrong-shape", match="weight"):
        pretrain(arrays, constant=constant)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.0},
        {"ridge": 0.0},
        {"ridge": math.inf},
        {"noise_std": -1.0},
        {"constant": math.nan},
        {"class_weight": 2.0},
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(ConfigurationError, match="Expected"):
        OneShot(**{"clip_norm": S, "num_clients": 2, "clients_per_round": 2, **options})
