"""What a server says of a training before it begins, and of one that diverges."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from murmurfl.clients import CorrelatedNoiseMod, UpdatePolicy, private_client_app, trainable_arrays
from murmurfl.privacy import SumAssumption
from murmurfl.privacy.forecast_text import forecast_basis, forecast_sentence
from murmurfl.privacy.release.clipping import TrainingFigures
from murmurfl.strategies import CorrelatedFedAvg, FullBatch, SecureAggregation
from murmurfl.strategies.rounds import loop
from murmurfl.strategies.rounds.observed import ClippingWatch, DivergenceWatch

from tests.harness.grid import NodesGrid

pytestmark = pytest.mark.usefixtures("no_result_folder")

D, CLIENTS, ROUNDS, CLIP = 3000, 5, 4, 0.5
TOLERANCE = 0.1
"""The length of 3,000 normals deviates by 1.3 % of itself, so by 10 % with a probability below 1e-13."""


def standing_still(**options):
    """A training that learns nothing: what becomes of the model is noise alone."""
    app = ClientApp(mods=[CorrelatedNoiseMod(**options)])

    @app.train()
    def train(message, context):
        return Message(RecordDict({"arrays": message.content["arrays"], "m": MetricRecord({"n": 1})}), reply_to=message)

    return app


def trained(mu, *, rounds=ROUNDS, cap=ROUNDS, size=D, per_round=CLIENTS, **changes):
    policy = UpdatePolicy(clip_norm=CLIP, mu=mu, max_participations=cap, **changes)
    sums = policy.trust == "secure-aggregation"
    secure = SecureAggregation(min_cohort=policy.sums.min_cohort, helpers=1) if sums else None
    strategy = CorrelatedFedAvg(
        num_clients=CLIENTS, clients_per_round=per_round, seed=1, sampling="balanced", secure_aggregation=secure
    )
    grid = NodesGrid(standing_still(simulation=policy, helpers=1), CLIENTS + sums)
    start = ArrayRecord({"w": Array(np.zeros(size))})
    return strategy, strategy.start(grid, start, num_rounds=rounds).arrays.to_numpy_ndarrays()[0]


KINDS = {
    "all data of a client": {},
    "two passes": {"releases_per_pass": 2},
    "fewer rounds than the cap": {"cap": 2 * ROUNDS},
    "sums": {"trust": "secure-aggregation", "sums": SumAssumption(4, 5)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_in_the_model_is_as_long_as_the_forecast_says(kind):
    strategy, model = trained(2.0, **KINDS[kind])
    noise = np.linalg.norm(model) / (ROUNDS * CLIP)
    # Correlated noise in a part of the releases is taken to be that in all of them: never too little.
    least = 1 - TOLERANCE if strategy.forecast.alone else 0.3
    assert least < noise / strategy.forecast.ratio < 1 + TOLERANCE


def test_half_of_the_noise_would_be_noticed():
    strategy, model = trained(2.0)
    assert not 1 - TOLERANCE < np.linalg.norm(model / 2) / (ROUNDS * CLIP) / strategy.forecast.ratio < 1 + TOLERANCE


def test_a_model_of_noise_is_a_warning_before_the_first_round_that_nobody_misses(caplog):
    caplog.set_level(logging.INFO)
    strategy, _ = trained(0.5)
    assert strategy.forecast.verdict == "useless"
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    text = [record.getMessage() for record in said]
    assert sum("THIS MODEL IS LIKELY TO BE USELESS" in line for line in text) == 1
    assert any("clients like these" in line for line in text)
    assert max(map(len, text)) <= 64  # Flower writes 15 characters in front
    rounds = [record.created for record in caplog.records if record.getMessage().startswith("Round 1:")]
    assert max(record.created for record in said) <= rounds[0]


def test_much_noise_is_a_warning_too_and_little_noise_is_none(caplog):
    caplog.set_level(logging.INFO)
    strategy, _ = trained(20.0)
    assert strategy.forecast.verdict == "noisy"
    assert strategy.forecast.is_warning
    assert "MUCH OF THIS MODEL WILL BE NOISE" in caplog.text
    caplog.clear()
    strategy, _ = trained(8.0, size=4)
    assert strategy.forecast.verdict == "useful"
    said = [record.getMessage() for record in caplog.records if record.funcName == "log_forecast"]
    assert " ".join(said) == f"{forecast_sentence(strategy.forecast)} {forecast_basis(strategy.forecast)}"
    assert said[0].startswith("Forecast before the first round: useful.")
    assert max(map(len, said)) <= 64  # Flower writes 15 characters in front
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_clients_asked_in_half_of_the_rounds_leave_more_noise():
    """m = 4 of 5 in 5 rounds is 4 releases of each, of a cap of 4: as if all were asked in 4 rounds."""
    all_of_them, some = trained(2.0)[0].forecast, trained(2.0, per_round=4, rounds=5)[0].forecast
    assert some.ratio == pytest.approx(all_of_them.ratio, rel=1e-9)


def test_a_training_that_is_over_is_not_forecast_again(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    policy = UpdatePolicy(clip_norm=CLIP, mu=4.0, max_participations=2)
    grid = NodesGrid(standing_still(simulation=policy), 2)

    def run():
        made = CorrelatedFedAvg(num_clients=2, seed=1, session="s", checkpoint=tmp_path / "checkpoint.npz")
        made.start(grid, ArrayRecord({"w": Array(np.zeros(9))}), num_rounds=2)
        return made

    assert run().forecast is not None
    caplog.clear()
    assert run().forecast is None
    assert "Forecast" not in caplog.text


def test_clients_that_state_nothing_are_not_guessed_at(monkeypatch):
    monkeypatch.setattr(loop, "client_statements", lambda *_, **__: {"0": {"releases": 0}, "1": {}})
    strategy, model = trained(2.0)
    assert strategy.forecast is None
    assert math.isfinite(np.linalg.norm(model))


def test_where_simulated_clients_may_run_dry_a_hundred_of_many_are_asked():
    asked = []

    class Counting(NodesGrid):
        def handle(self, message, identifier):
            for config in message.content.config_records.values():
                asked.append(config.get("ask"))
            return super().handle(message, identifier)

    policy = UpdatePolicy(clip_norm=CLIP, mu=4.0, max_participations=1)
    app = standing_still(simulation=policy)
    strategy = CorrelatedFedAvg(num_clients=150, clients_per_round=1, seed=1, allow_exhaustion=True)
    # Real ones are all asked: who has made all releases is left in peace.
    strategy.start(Counting(app, 150), ArrayRecord({"w": Array(np.zeros(2))}), num_rounds=1, simulated=True)
    assert 50 <= asked.count("privacy") <= 100
    assert strategy.forecast.clients == 150


def made_up(context):
    """A client's share of three classes that overlap."""
    labels = np.arange(100) % 3
    random = np.random.Generator(np.random.Philox(key=int(context.node_config["partition-id"])))
    return (np.eye(3)[labels] + random.normal(size=(100, 3))).astype(np.float32), labels


def make_network():
    torch.manual_seed(5)
    sizes = zip((3, 20, 20), (20, 20, 20), strict=True)
    hidden = [layer for size in sizes for layer in (torch.nn.Linear(*size), torch.nn.ReLU())]
    return torch.nn.Sequential(*hidden, torch.nn.Linear(20, 3))


@pytest.mark.parametrize(("rate", "mu", "lines"), [(100.0, 30.0, 1), (10.0, 30.0, 0), (100.0, 0.01, 0)])
def test_a_learning_rate_that_is_far_too_high_is_named_once(rate, mu, lines, caplog):
    """A good one is not, and neither is one whose updates are noise, which carries the model as far."""
    app = private_client_app(make_network, samples=made_up, mu=mu, rounds=12, clip_norm=0.3)
    strategy = FullBatch(learning_rate=rate, momentum=0.9, num_clients=4, seed=1, session="s")
    strategy.start(NodesGrid(app, 4), trainable_arrays(make_network()), num_rounds=12)
    said = [message for message in caplog.messages if "diverges" in message and "noise included" in message]
    assert len(said) == lines
    assert all("Lower learning_rate" in message for message in said)


@pytest.mark.parametrize("size", [3, 100])
def test_noise_alone_is_never_called_divergence(size, caplog):
    """100 trainings of 50 rounds of noise, whose model grows: at 1e-6 a round, one in 200 runs of this test warns."""
    random = np.random.Generator(np.random.Philox(key=11))
    for _ in range(100):
        watch = DivergenceWatch("Lower it.")
        watch.begin(np.full(size, 1e-9))
        for server_round, total in enumerate(random.normal(size=(50, size)), 1):
            watch.take(server_round, total, 4, np.ones(size))
    assert not caplog.messages
    for server_round in range(51, 54):
        watch.take(server_round, np.full(size, 1e4), 4, np.ones(size))
    assert len(caplog.messages) == 1


def test_updates_that_shrink_while_the_model_grows_are_learning(caplog):
    watch = DivergenceWatch("Lower it.")
    watch.begin(np.zeros(100))
    for server_round in range(1, 20):
        watch.take(server_round, np.full(100, 1.0 / server_round), 4, np.full(100, float(server_round)))
    assert not caplog.messages


def test_a_clip_that_only_later_rounds_exceed_is_a_learning_rate_that_is_too_high(caplog):
    """In a simulation, where the lengths of gradients are known; a clip too short from the start is named as before."""
    for ratios, remedy in (([0.8, 5.0, 40.0], "lower learning_rate"), ([40.0], "raise clip_norm")):
        caplog.clear()
        watch = ClippingWatch()
        for server_round, ratio in enumerate(ratios, 1):
            figures = TrainingFigures(rows=10, clipped=10, median_ratio=ratio, largest_ratio=ratio)
            watch.take(server_round, {"0": figures})
        (said,) = caplog.messages
        assert remedy in said


def test_noise_that_drives_the_model_away_is_no_learning_rate_that_is_too_high(caplog):
    forecast = trained(0.05, rounds=1)[0].forecast
    assert forecast.verdict == "useless"
    caplog.clear()
    clipping, divergence = ClippingWatch(), DivergenceWatch("Lower it.")
    for server_round, ratio in enumerate([0.8, 40.0], 1):
        figures = TrainingFigures(
            rows=10, clipped=10, median_ratio=ratio, largest_ratio=ratio, not_finite=server_round - 1
        )
        clipping.take(server_round, {"0": figures}, forecast)
    divergence.begin(np.full(100, 1e-9))
    for server_round in range(1, 6):
        divergence.take(server_round, np.full(100, 10.0**server_round), 4, np.ones(100), forecast)
    assert len(caplog.messages) == 3
    assert all("forecast" in said and "ower " not in said for said in caplog.messages)


@pytest.mark.parametrize("first", [0.0, np.nan, np.inf, 1e200])
def test_no_reply_of_a_client_that_adds_no_noise_ends_a_training_in_the_watch(first, caplog):
    """All that came in the first round may be one hostile client's: zeros, or numbers beyond all."""
    watch = DivergenceWatch("Lower it.")
    watch.begin(np.zeros(20))
    for number in range(1, 7):
        watch.take(number, np.full(20, first if number == 1 else 5.0), 1, np.full(20, float(number)))
    assert "diverges" not in caplog.text
