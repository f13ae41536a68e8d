"""Partitions: who gets which samples."""

import numpy as np
import pytest
from datasets import Dataset
from flwr_datasets.partitioner import IidPartitioner
from murmurfl.app.data.loading import load_dataset, load_shards
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError, derived_seed


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "unequal"])
def test_partitions_give_every_sample_to_exactly_one_machine(partition):
    config = RunConfig(partition=partition, batch_size=1)
    task = load_dataset(config)
    shards = load_shards(config, task)
    assert len(shards) == 10
    indices = np.concatenate([shard._indices for shard in shards])
    assert sorted(indices) == list(range(len(task.train_labels)))
    again = load_shards(RunConfig(partition=partition, batch_size=1, mu=1.0), task)
    assert all((a._indices == b._indices).all() for a, b in zip(shards, again, strict=True))
    other = load_shards(RunConfig(partition=partition, batch_size=1, seed=2), task)
    assert any(len(a) != len(b) or (a._indices != b._indices).any() for a, b in zip(shards, other, strict=True))


@pytest.mark.parametrize("machines", [1, 7, 10])
def test_an_iid_partition_is_that_of_flwr_datasets(machines):
    """Up to each machine's own order: its shares of the same shuffled data."""
    order = np.random.Generator(np.random.Philox(key=derived_seed("partition", 3))).permutation(1438)
    partitioner = IidPartitioner(num_partitions=machines)
    partitioner.dataset = Dataset.from_dict({"index": order})
    task = load_dataset(RunConfig())
    shards = load_shards(RunConfig(num_clients=machines, clients_per_round=1, seed=3), task)
    for i, shard in enumerate(shards):
        assert sorted(shard._indices) == sorted(partitioner.load_partition(i)["index"])


def test_a_dirichlet_partition_is_skewed_and_an_iid_one_is_not():
    def largest_share(partition):
        alpha = 0.3 if partition == "dirichlet" else 0.5  # which the other does not read
        config = RunConfig(partition=partition, dirichlet_alpha=alpha, batch_size=1)
        task = load_dataset(config)
        shares = []
        for shard in load_shards(config, task):
            _, labels = shard[slice(0, len(shard))]
            shares.append(np.bincount(labels, minlength=10).max() / len(shard))
        return np.mean(shares)

    assert largest_share("iid") < 0.2 < 0.35 < largest_share("dirichlet")


def test_half_of_the_digits_are_spread_and_half_go_by_label():
    settings = RunConfig(strategy="online", partition="half-by-label", batch_size=5)
    task = load_dataset(settings)
    shards = load_shards(settings, task)
    for digit, shard in enumerate(shards):
        labels = shard[:][1]
        share = (labels == digit).mean()
        assert 0.4 < share < 0.7
        assert len(np.unique(labels)) >= 9
    assert sum(len(shard) for shard in shards) == len(task.train_labels)
    with pytest.raises(ConfigurationError, match="one a class"):
        load_shards(RunConfig(strategy="online", partition="half-by-label", num_clients=5, clients_per_round=5), task)


def test_unequal_machines_differ_a_lot_and_each_has_some_samples():
    config = RunConfig(partition="unequal", num_clients=40, clients_per_round=40)
    task = load_dataset(config)
    sizes = sorted(len(shard) for shard in load_shards(config, task))
    assert sizes[0] >= 10
    assert sizes[-1] > 5 * sizes[len(sizes) // 2]
    assert sum(sizes) == len(task.train_labels)
    crowded = RunConfig(partition="unequal", num_clients=700, clients_per_round=700, batch_size=1)
    assert min(len(shard) for shard in load_shards(crowded, task)) >= 2  # fewer than ten each are there
