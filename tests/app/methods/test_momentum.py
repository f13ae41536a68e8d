"""The application around private momentum: presets, policies, and what it takes from the model."""

import math

import pytest
from murmurfl.app.engines import run_cohort
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError


def test_tree_momentum_runs_over_many_passes_with_one_epoch_for_all_machines():
    config = RunConfig(strategy="tree-momentum", passes=5, checkpoint=False)
    experiment = prepare(config)
    policies = {experiment.policy(i) for i in range(10)}
    assert len(policies) == 1
    assert len({len(shard) // config.batch_size for shard in experiment.shards}) == 2, "though shards differ"
    result = run_cohort(config)
    assert result.accuracy > 0.8
    assert result.mu == config.mu
    assert result.strategy.trust._keys.simulated
    assert not experiment.strategy(deployed=True).trust._keys.simulated, (
        "on real machines noise is the operating system's"
    )
    assert all(statement["releases"] == experiment.num_rounds for statement in result.statements.values())
    with pytest.raises(ConfigurationError, match="clients-per-round"):
        RunConfig(strategy="tree-momentum", clients_per_round=5)


def test_reduced_tree_momentum_takes_the_smoothness_from_the_model():
    config = RunConfig(
        strategy="reduced-tree-momentum",
        task="synthetic-logistic",
        partition="iid",
        model="nonconvex-logistic",
        feature_bound=1.0,
        synthetic_samples=400,
        synthetic_features=8,
        num_clients=2,
        clients_per_round=2,
        batch_size=20,
        passes=5,
        clip_norm=1.1,
        learning_rate=0.1,
        checkpoint=False,
    )
    result = run_cohort(config)
    assert result.strategy.trust.smoothness == result.experiment.model.smoothness
    assert result.mu == config.mu
    unknown = prepare(RunConfig(strategy="reduced-tree-momentum", passes=2)).strategy()
    assert math.isinf(unknown.trust.smoothness), "softmax regression does not declare any"
    with pytest.raises(ConfigurationError, match="lost-replies"):
        RunConfig(strategy="reduced-tree-momentum", lost_replies=0.1)


def test_correlated_momentum_and_dp_sgd_run_with_machines_that_add_no_noise():
    base = {"passes": 5, "checkpoint": False}
    for settings in ({"strategy": "correlated-momentum"}, {"strategy": "trusted-sgd"}):
        result = run_cohort(RunConfig(**base, **settings))
        assert result.accuracy > 0.8
        assert result.mu == 4.0
        assert math.isinf(result.experiment.plans()[0].mu), "the machines add no noise"
    with pytest.raises(ConfigurationError, match="mechanism"):
        RunConfig(strategy="correlated-momentum", mechanism="tree")
    with pytest.raises(ConfigurationError, match="mechanism"):
        RunConfig(strategy="trusted-sgd", mechanism="blt")
