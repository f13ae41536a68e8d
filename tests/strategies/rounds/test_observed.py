"""What a server says of a training before it begins."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from murmurfl.clients import CorrelatedNoiseMod, UpdatePolicy
from murmurfl.privacy import SumAssumption
from murmurfl.privacy.forecast_text import forecast_basis, forecast_sentence
from murmurfl.strategies import CorrelatedFedAvg, SecureAggregation
from murmurfl.strategies.rounds import loop

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


def test_much_noise_is_a_warning_too_and_little_noise_is_a_line(caplog):
    caplog.set_level(logging.INFO)
    strategy, _ = trained(20.0)
    assert strategy.forecast.verdict == "noisy"
    assert strategy.forecast.is_warning
    assert "MUCH OF THIS MODEL WILL BE NOISE" in caplog.text
    caplog.clear()
    strategy, _ = trained(8.0, size=4)
    assert strategy.forecast.verdict == "useful"
    assert [r.getMessage() for r in caplog.records if "Forecast" in r.getMessage()] == [
        f"{forecast_sentence(strategy.forecast)} {forecast_basis(strategy.forecast)}"
    ]
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
