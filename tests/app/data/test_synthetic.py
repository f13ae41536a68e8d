"""Data made up on the spot."""

import numpy as np
import pytest
from murmurfl.app.data.loading import load_dataset, load_shards
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError

LOGISTIC = {
    "strategy": "online", "task": "synthetic-logistic", "partition": "own", "model": "logistic", "num-clients": 4,
    "clients-per-round": 4, "batch-size": 5, "synthetic-features": 12,
}  # fmt: skip


def config(**changes):
    return RunConfig.from_mapping({**LOGISTIC, **{key.replace("_", "-"): value for key, value in changes.items()}})


def test_every_machine_of_the_synthetic_data_has_its_own_rule():
    task = load_dataset(config(synthetic_samples=4000))
    shards = load_shards(config(synthetic_samples=4000), task)
    assert [len(shard) for shard in shards] == [1000] * 4
    assert task.num_classes == 2
    centres = np.array([shard[:][0].mean(axis=0) for shard in shards])
    spread = np.array([shard[:][0].std(axis=0) for shard in shards])
    assert spread == pytest.approx(np.tile(np.arange(1, 13) ** -0.6, (4, 1)), rel=0.15)
    assert np.linalg.norm(centres[0] - centres[1]) > 1
    other = load_dataset(config(synthetic_samples=4000, seed=2))
    assert not np.allclose(other.train_features[:5], task.train_features[:5])
    pooled = load_shards(config(synthetic_samples=4000, partition="iid"), task)
    assert not np.allclose(pooled[0][:][0].mean(axis=0), centres[0], atol=0.5)
    with pytest.raises(ConfigurationError, match="'own' or 'iid'"):
        config(partition="dirichlet")
    with pytest.raises(ConfigurationError, match="'own'"):
        prepare(RunConfig(partition="own"))
