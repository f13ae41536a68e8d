"""Forecasts of murmurfl's own runs and of small projects, beside what became of them: sign and size.

What runs keep was within its bound for each of ten seeds of the noise.
"""

import logging
from itertools import pairwise

import numpy as np
import pytest
from murmurfl.app import simulate
from murmurfl.app.planning.deciding import noise_to_signal_of
from murmurfl.app.runs.outcome import Outcome
from murmurfl.app.runs.run_files import write_record
from murmurfl.app.runs.run_summary import summary_lines
from murmurfl.app.settings.layers import started_with
from murmurfl.privacy.accounting.noise_forecast import kept_share

from benchmarks.small_trainings import RATIOS, SAMPLES, UPDATES, UpdateTraining

FULL, _, DEFAULT, DELAYED, _ = SAMPLES
OFF = 0.25
"""How far what is kept may be from the forecast, of murmurfl's own runs."""


def test_a_default_run_with_a_small_mu_is_called_useless_and_is(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    document = write_record(simulate(started_with({"mu": 0.05})), tmp_path / "small")
    assert "THIS MODEL IS LIKELY TO BE USELESS" in caplog.text
    assert "useless: noise 4.6 times the longest update" in " ".join(
        summary_lines(Outcome.model_validate(document), tmp_path)
    )
    assert document["forecast"]["verdict"] == "useless"
    assert document["forecast"]["warning"]
    assert document["accuracy"] < 0.3


def test_a_run_without_noise_has_no_forecast():
    assert simulate(num_rounds=2, mechanism="none").forecast is None


@pytest.mark.parametrize("strategy", ["mu2", "delayed-momentum", "trusted-mu2"])
def test_the_forecast_of_dependent_releases_is_noise_to_signal(strategy):
    made = simulate(started_with({"strategy": strategy, "mu": 1.0, "num-clients": 10, "clients-per-round": 10}))
    assert made.forecast.ratio == pytest.approx(noise_to_signal_of(made.experiment), rel=1e-6)


@pytest.mark.parametrize("strategy", ["full-batch", "trusted-full-batch", "noisy-sgd"])
def test_where_releases_stand_alone_it_is_that_of_all_rounds_together(strategy):
    """The noise of one round over one gradient, and sqrt(T) less over T of them."""
    made = simulate(started_with({"strategy": strategy, "mu": 1.0, "num-clients": 10, "clients-per-round": 10}))
    one = noise_to_signal_of(made.experiment)
    assert made.forecast.ratio == pytest.approx(one / np.sqrt(made.experiment.num_rounds), rel=0.02)


def test_sums_of_a_run_have_less_noise():
    settings = {"strategy": "full-batch", "mu": 0.5, "num-clients": 10, "clients-per-round": 10, "num-rounds": 6}
    alone = simulate(settings).forecast
    summed = simulate({**settings, "trust": "secure-aggregation"}).forecast
    assert summed.ratio == pytest.approx(alone.ratio / np.sqrt(5), rel=0.01)
    assert alone.summed().ratio == pytest.approx(summed.ratio, rel=0.01)


@pytest.mark.parametrize(
    ("training", "ratio"),
    [(FULL, 0.3), (FULL, 3.0), (FULL, 12.0), (DEFAULT, 3.0), (DELAYED, 0.3), (DELAYED, 12.0)],
    ids=lambda given: getattr(given, "name", given),
)
def test_what_runs_keep_is_what_was_forecast(training, ratio):
    outcome = training.at(ratio)
    assert outcome.forecast.typical_ratio == pytest.approx(ratio, rel=0.06)
    assert outcome.kept == pytest.approx(kept_share(ratio), abs=OFF)
    assert outcome.forecast.verdict == ("useful" if ratio < 1 else "noisy" if ratio < 5 else "useless")


def test_a_forecast_that_forgot_the_number_of_machines_would_be_noticed():
    """Ten machines: sqrt(10) times the noise that there is, or less of it."""
    outcome = FULL.at(3.0)
    for wrong in (3.0 * np.sqrt(10), 3.0 / np.sqrt(10)):
        assert abs(outcome.kept - kept_share(wrong)) > OFF


def test_a_small_projects_forecast_comes_true():
    training = UpdateTraining("digits", machines=5, rounds=4, learning_rate=0.2)
    useful, useless = training.at(0.3), training.at(20.0)
    assert (useful.forecast.verdict, useless.forecast.verdict) == ("useful", "useless")
    assert useful.kept > 0.9
    assert useless.kept < 0.3


@pytest.mark.long
@pytest.mark.parametrize("training", [UPDATES[1], UPDATES[3], UPDATES[4]], ids=lambda training: training.name)
def test_projects_keep_what_was_forecast(training):
    """Updates of very different kinds, so with a wider bound; more noise never keeps more, and the signs are right."""
    kept = [np.mean([training.at(ratio, seed).kept for seed in (1, 2, 3)]) for ratio in RATIOS]
    assert all(more > less - 0.15 for more, less in pairwise(kept))
    assert all(abs(one - kept_share(ratio)) < 0.35 for one, ratio in zip(kept[:3], RATIOS[:3], strict=True))
    assert kept[0] > 0.8
    assert kept[-1] < 0.4
