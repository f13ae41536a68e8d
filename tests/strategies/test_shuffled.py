"""The server's half of shuffled gradients: means of ends, the regulariser once an epoch, epochs of its own."""

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError
from murmurfl.strategies import PublicEpochs, ShuffledAvg, ShuffledState

from tests.harness.errors import raises
from tests.harness.rules import stepped

rng = np.random.Generator(np.random.Philox(key=91))


def strategy(**changes):
    options = {"num_clients": 4, "clients_per_round": 2, "learning_rate": 0.1, "steps_per_epoch": 5, "session": "s"}
    return ShuffledAvg(**{**options, **changes})


def test_the_model_is_the_mean_of_the_ends_and_the_regulariser_follows():
    x, releases = rng.normal(size=3), rng.normal(size=(2, 3))
    ends = x - 0.1 * releases
    step = stepped(strategy(regularizer="l2", strength=0.4), ShuffledState(x), releases.sum(axis=0), 1)
    assert step.x == pytest.approx(ends.mean(axis=0) / (1 + 0.1 * 5 * 0.4))
    assert stepped(strategy(), ShuffledState(x), releases.sum(axis=0), 1).x == pytest.approx(ends.mean(axis=0))


def test_an_epoch_nobody_answered_changes_nothing():
    x = rng.normal(size=3)
    assert (stepped(strategy(regularizer="l2", strength=0.4), ShuffledState(x), np.zeros(3), 1).x == x).all()


def test_an_epoch_on_public_samples_asks_nobody_and_is_shuffled_gradient_descent():
    x, targets = rng.normal(size=3), rng.normal(size=(5, 3))
    public = PublicEpochs(lambda point, i: point - targets[i], 5, 100.0)
    server = strategy(rounds=range(2, 4), public=public)
    z = x.copy()
    for target in targets:
        z = z - 0.1 * (z - target)
    assert stepped(server, ShuffledState(x), np.zeros(3), 1).x == pytest.approx(z)
    assert stepped(server, ShuffledState(x), np.zeros(3), 2).x == pytest.approx(x)
    server.clients.restore(["0", "1", "2", "3"])
    server.state = ShuffledState(x)
    asked = [len(server._plan_round(r, None).acks) for r in (1, 2, 3, 4)]
    assert asked == [0, 2, 2, 0]
    with raises(ConfigurationError, "missing", match="public samples"):
        stepped(strategy(rounds=range(2, 4)), ShuffledState(x), np.zeros(3), 1)


def test_settings_that_mean_nothing_are_refused():
    for changes in ({"learning_rate": 0.0}, {"steps_per_epoch": 0}, {"regularizer": "l2"}, {"regularizer": "huber"}):
        with pytest.raises(ConfigurationError, match="Expected"):
            strategy(**changes)
