"""Regret of online federated learning."""

import numpy as np
import pytest
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.simulated_figures import OnlineLosses
from murmurfl.app.settings.run_config import RunConfig

LOGISTIC = {
    "strategy": "online", "task": "synthetic-logistic", "partition": "own", "model": "logistic", "num-clients": 4,
    "clients-per-round": 4, "batch-size": 5, "synthetic-samples": 400, "synthetic-features": 12,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MURMURFL_CACHE", str(tmp_path / "cache"))


def test_regret_is_against_the_best_of_each_round_and_the_best_of_all():
    experiment = prepare(RunConfig.from_mapping(LOGISTIC))
    model, shards = experiment.model, experiment.shards
    losses = OnlineLosses(model, shards, 5, 20, "test")
    generator = np.random.Generator(np.random.Philox(key=43))
    points = generator.normal(size=(20, 12))
    for r, point in enumerate(points):
        losses.record(r, [point])
    losses.record(20, [points[0]])
    document = losses.document()
    rounds = [
        tuple(np.concatenate(c) for c in zip(*(s[5 * r : 5 * r + 5] for s in shards), strict=True)) for r in range(20)
    ]
    own = [model.evaluate([point], batch)[0] for point, batch in zip(points, rounds, strict=True)]
    assert document["rounds"] == list(range(1, 21))
    assert document["cumulative-loss"] == pytest.approx(5 * np.cumsum(own))
    # No fixed point and no guess for a round beats the optima that were subtracted.
    best = min(np.sum([model.evaluate([c * p], batch)[0] for batch in rounds]) for p in points for c in (0.1, 1, 5))
    assert document["cumulative-loss"][-1] - document["static-regret"][-1] <= 5 * best + 1e-6
    assert document["dynamic-regret"][-1] >= document["static-regret"][-1]
    assert document["dynamic-regret"][-1] <= document["cumulative-loss"][-1] + 1e-9
    del losses.losses[3]
    assert losses.document() is None
