"""Simulations of many clients: what is made of each, and that nothing is made of those that nobody asks."""

import gc
import logging
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.data.task import Shard
from murmurfl.app.engines.cohort import CohortClients
from murmurfl.app.runs.client_statements import statement_groups
from murmurfl.app.runs.experiment import Experiment, prepare
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.settings.run_config import RunConfig

SMALL = RunConfig(num_clients=12, clients_per_round=5, num_rounds=4, batch_size=10, allow_exhaustion=True)
CONFIGURATIONS = {
    "alike": SMALL,
    "unequal, losses": replace(SMALL, partition="unequal", lost_replies=0.4),
    "sums": replace(SMALL, partition="unequal", trust="secure-aggregation", min_cohort=2, lost_replies=0.2),
    "no noise": replace(SMALL, mechanism="none"),
    "after a mean": replace(SMALL, centring="private", lost_replies=0.3, clients_per_round=12),
    "with an evaluation": replace(SMALL, private_evaluation=0.2),
    "trusted": replace(SMALL, strategy="trusted-mu2"),
    "passes": replace(SMALL, strategy="isrl-dp", passes=2),
    "a sum of all samples": replace(SMALL, strategy="full-batch", batch_size=8),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _silent(caplog):
    caplog.set_level(logging.ERROR, "flwr")


def ran(config):
    experiment = prepare(config)
    clients = CohortClients(experiment)
    return clients, run_experiment(clients, config, experiment=experiment, engine="cohort")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_clients_that_are_stated_together_say_what_each_says_by_itself(name):
    clients, result = ran(CONFIGURATIONS[name])
    session = result.strategy.session
    alone = {str(i): clients.cohort.client(str(i)).statement(session) for i in range(12)}
    assert dict(result.statements) == alone
    assert list(result.statements) == list(alone)
    assert dict(clients.statements(session, ["3", "7", "10"])) == {name: alone[name] for name in ("3", "7", "10")}
    distinct = {tuple(said.items()) for said in alone.values()}
    assert len(statement_groups(result.statements)) == len(distinct)


def test_clients_that_spent_something_elsewhere_are_told_apart():
    """A client that answered for the mean of the features, but never for the training."""
    clients, result = ran(CONFIGURATIONS["after a mean"])
    mean = result.experiment.query_session("mean")
    assert result.strategy.session != mean
    used = {name: said["samples-used"] for name, said in result.statements.items()}
    assert used == {name: clients.cohort.client(name).statement(mean)["samples-used"] for name in used}


def many(clients, **changes):
    return RunConfig(
        task="synthetic", synthetic_samples=2 * clients, synthetic_features=4, num_clients=clients,
        clients_per_round=20, batch_size=1, num_rounds=3, evaluate_every=3, sampling="balanced",
        noise_quality="fast", **changes,
    )  # fmt: skip


def test_of_fifty_thousand_clients_only_those_are_made_that_are_asked(monkeypatch):
    config, made, shards = many(50_000), [], []
    client, shard = Experiment.client, Shard.__init__
    monkeypatch.setattr(Experiment, "client", lambda *a, **k: made.append(a[1]) or client(*a, **k))
    monkeypatch.setattr(Shard, "__init__", lambda *a: shards.append(a) or shard(*a))
    prepare.cache_clear()
    gc.collect()
    before = len(gc.get_objects())
    clients, result = ran(config)
    gc.collect()
    assert len(made) < 10
    assert len(shards) <= 3 * 20 + 110  # those asked, and those that are asked beforehand how loud their noise is
    assert len(gc.get_objects()) - before < 20_000
    assert len(result.statements) == 50_000
    assert [group.count for group in statement_groups(result.statements)] == [50_000 - 60, 60]
    assert sum(said.count * said.statement["releases"] for said in statement_groups(result.statements)) == 60
    assert len(result.strategy.acks) == 60
    assert isinstance(clients.names()[-1], str)


def test_ten_thousand_clients_share_sums_of_those_that_a_round_asks():
    """What bounds a sum is its own clients: 20 here. No key is made where there are no messages."""
    _, result = ran(many(10_000, trust="secure-aggregation"))
    assert [report.aggregated for report in result.strategy.history] == [20] * 3
    assert (result.min_cohort, result.min_honest, result.num_clients) == (16, 10, 10_000)
    assert result.mu_local == pytest.approx(result.mu * 10**0.5)
    assert "roster" not in vars(result.experiment)


def test_before_the_first_round_a_hundred_clients_are_asked_at_most():
    asked = []

    class Recorded(CohortClients):
        def statements(self, session, names=None):
            asked.append(names)
            return super().statements(session, names)

    config = many(1_000)
    experiment = prepare(config)
    result = run_experiment(Recorded(experiment), config, experiment=experiment, engine="cohort")
    assert asked == [[str(i) for i in range(0, 1_000, 10)], None]
    assert result.forecast is not None


def test_block_and_list_rounds_are_equal():
    """The names of 3,000 clients, as they are not made, and as a list."""
    config = many(3_000)
    experiment = prepare(config)

    class Listed(CohortClients):
        def names(self):
            return list(super().names())[::-1]

    models = []
    for kind in (CohortClients, Listed):
        result = run_experiment(kind(experiment), config, experiment=experiment, engine="cohort")
        models.append(np.concatenate([values.ravel() for values in result.parameters]))
        assert [sorted(map(int, p.clients)) == list(map(int, p.clients)) for p in result.progress] == [True] * 3
    np.testing.assert_array_equal(*models)
