"""Anytime steps of mu2: no horizon, clients that weigh by the round they are told, and who reads the settings."""

import math
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.methods.mu2_methods import Mu2Method
from murmurfl.app.models import make_model
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import Mu2Client
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.release import clipping
from murmurfl.strategies import Mu2

from tests.app.plain import simulate
from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("no_forecast")

STREAM = {"num-clients": 6, "clients-per-round": 6, "batch-size": 20, "mu": 2.0}
ANYTIME = {"strategy.steps": "anytime"}
WINDOW = {**ANYTIME, "strategy.window": 3, "mechanism": "decay", "mechanism.decay": 0.6}


def losses(rounds, settings):
    """Of the model after each round of one stream; independent noise is the same however many rounds there are."""
    noise = {"mechanism": "independent", "learning-rate": 0.1}
    return [one.loss for one in simulate({**STREAM, "num-rounds": rounds, **noise, **settings}).progress]


@pytest.mark.parametrize("settings", [ANYTIME, {**ANYTIME, "strategy.window": 3}])
def test_a_run_that_ends_early_publishes_what_a_longer_one_published_then(settings):
    whole = losses(8, settings)
    assert len(set(whole)) == 8
    for rounds in (1, 2, 5):
        assert losses(rounds, settings) == whole[:rounds], "to the last bit"


def test_the_papers_steps_know_the_end():
    """The sibling: the test above fails for steps that depend on the number of rounds, as the preset's do."""
    assert losses(5, {"learning-rate": 0.0}) != losses(8, {"learning-rate": 0.0})[:5]


@pytest.mark.parametrize("engine", ["cohort", "inprocess"])
def test_clients_weigh_as_in_the_last_round_of_the_window(engine, monkeypatch):
    told = []
    weights = Mu2Client.point_weights

    def point_weights(self, server_round):
        told.append(server_round)
        return weights(self, server_round)

    monkeypatch.setattr(Mu2Client, "point_weights", point_weights)
    simulate({**STREAM, "num-rounds": 6, **WINDOW}, engine=engine)
    assert list(dict.fromkeys(told)) == [1, 2, 3]
    told.clear()
    simulate({**STREAM, "num-rounds": 6, **ANYTIME}, engine=engine)
    assert list(dict.fromkeys(told)) == [1, 2, 3, 4, 5, 6]


def test_noise_and_guarantee_are_those_of_the_papers_steps(monkeypatch):
    """With a clip at which gradients underflow a release is its noise: the sums are equal to the last bit."""
    monkeypatch.setattr(clipping, "LEAST_CLIP", 0.0)  # such a clip is refused
    same = {**STREAM, "num-rounds": 6, "clip-norm": 1e-300, "mechanism": "decay", "mechanism.decay": 0.6}
    papers, anytime = simulate({**same, "learning-rate": 1.0}), simulate({**same, **ANYTIME})
    windowed = simulate({**same, **WINDOW})
    assert np.array_equal(papers.strategy.state.release_sum, anytime.strategy.state.release_sum)
    assert papers.statements == anytime.statements == windowed.statements
    assert papers.mu == anytime.mu == windowed.mu


class Own(Mu2):
    """Somebody's own strategy, whose steps nobody else's may replace."""


class OwnMethod(Mu2Method):
    """Its method."""

    strategy_type = Own


def test_a_strategy_of_ones_own_keeps_its_steps():
    with raises(ConfigurationError, "conflict", "strategy.steps", match="'constant' with a strategy of your own"):
        simulate({**STREAM, "num-rounds": 2, **ANYTIME, "strategy": f"{__name__}:OwnMethod"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy.window": 4}, "window"),
        ({**ANYTIME, "preset": "paper"}, "steps"),
        ({**ANYTIME, "strategy.window": 1}, "window"),
        ({**ANYTIME, "strategy": "noisy-sgd"}, "steps"),
        ({**ANYTIME, "strategy": "trusted-mu2"}, "steps"),
        ({**ANYTIME, "strategy": "delayed-momentum"}, "steps"),
    ],
)
def test_settings_that_nothing_reads_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=rf"Expected (strategy\.)?{message}"):
        simulate({**STREAM, "num-rounds": 2, **settings})


@pytest.mark.parametrize(("rounds", "bound", "shorter"), [(8, 0.0, 0.55), (9, 0.0, 1.0), (8, 3.0, 1.0)])
def test_few_rounds_are_for_rows_as_they_usually_are_where_no_norm_is_declared(rounds, bound, shorter):
    model = make_model("softmax", 8, 3)
    config = replace(RunConfig(strategy="mu2", steps="anytime"), task=f"{__name__}:undeclared", feature_bound=bound)
    values = Mu2Method().preset(config, rounds, model)
    longest = math.hypot(bound or math.sqrt(8), 1.0)  # with the bias
    assert values.clip_norm == pytest.approx(0.3 * shorter * longest)
    assert values.learning_rate == pytest.approx(0.5 / (shorter * longest * model.num_parameters**0.125))


def undeclared(config):
    return np.zeros((9, 8)), np.arange(9) % 3, np.zeros((3, 8)), np.arange(3)
