"""Partitions: who gets which samples."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.data.loading import load_dataset, load_shards
from murmurfl.app.data.partition import PARTITIONS, Parts, Shards, shard_sizes
from murmurfl.app.data.task import Dataset, Shard
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError, derived_seed

from tests.harness.errors import raises


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "unequal", "classes", "power-law"])
def test_partitions_give_every_sample_to_exactly_one_client(partition):
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


@pytest.mark.parametrize("clients", [1, 7, 10])
def test_an_iid_partition_is_that_of_flwr_datasets(clients):
    """Up to each client's own order: its shares of the same shuffled data."""
    order = np.random.Generator(np.random.Philox(key=derived_seed("partition", 3))).permutation(1438)
    import datasets  # more than a second: not for every worker
    from flwr_datasets.partitioner import IidPartitioner

    partitioner = IidPartitioner(num_partitions=clients)
    partitioner.dataset = datasets.Dataset.from_dict({"index": order})
    task = load_dataset(RunConfig())
    shards = load_shards(RunConfig(num_clients=clients, clients_per_round=1, seed=3), task)
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


@pytest.mark.parametrize(("clients", "each"), [(10, 1), (10, 2), (25, 1), (7, 3), (4, 10)])
def test_clients_have_as_many_classes_as_they_should_and_classes_as_many_clients_as_others(clients, each):
    config = RunConfig(partition="classes", classes_per_client=each, num_clients=clients, clients_per_round=1)
    held = [set(shard[slice(0, len(shard))][1].tolist()) for shard in load_shards(config, load_dataset(config))]
    assert {len(one) for one in held} == {each}
    holders = np.bincount([label for one in held for label in one], minlength=10)
    assert holders.max() - holders.min() <= 1


def test_few_clients_of_few_classes_are_refused():
    config = RunConfig(partition="classes", classes_per_client=1, num_clients=9, clients_per_round=1)
    for changes in ({}, {"classes_per_client": 11}):
        with raises(ConfigurationError, "out-of-range", "partition.classes"):
            load_shards(replace(config, **changes), load_dataset(config))


def test_a_power_law_gives_few_clients_most_samples_and_everybody_one():
    config = RunConfig(partition="power-law", num_clients=200, clients_per_round=1)
    sizes = np.sort(load_shards(config, load_dataset(config)).sizes)[::-1]
    assert sizes.sum() == 1438
    assert sizes[-1] == 1
    assert (sizes <= 5).sum() > 100
    assert sizes[:10].sum() > sizes.sum() / 2


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
    with raises(ConfigurationError, "mismatch", "num-clients"):
        load_shards(RunConfig(strategy="online", partition="half-by-label", num_clients=5, clients_per_round=5), task)


def test_unequal_clients_differ_a_lot_and_each_has_some_samples():
    config = RunConfig(partition="unequal", num_clients=40, clients_per_round=40)
    task = load_dataset(config)
    sizes = sorted(len(shard) for shard in load_shards(config, task))
    assert sizes[0] >= 10
    assert sizes[-1] > 5 * sizes[len(sizes) // 2]
    assert sum(sizes) == len(task.train_labels)
    crowded = RunConfig(partition="unequal", num_clients=700, clients_per_round=700, batch_size=1)
    assert min(len(shard) for shard in load_shards(crowded, task)) >= 2  # fewer than ten each are there


def data(samples, client_of=None):
    features = np.arange(2 * samples, dtype=np.float32).reshape(samples, 2)
    return Dataset(features, np.arange(samples) % 10, features[:5], np.arange(5), 10, client_of)


def generator(seed):
    return np.random.Generator(np.random.Philox(key=derived_seed("partition", seed)))


def split_plainly(partition, clients, samples, seed, client_of=None):
    """One array for each client, shuffled one after the other."""
    own = generator(seed)
    if partition == "own":
        return [own.permutation(np.flatnonzero(client_of == i)) for i in range(clients)]
    order = own.permutation(samples)
    if partition == "iid":
        parts = np.array_split(order, clients)
    else:
        given = min(10, samples // clients)
        shares = own.lognormal(sigma=1.0, size=clients)
        ends = np.cumsum(shares) / shares.sum() * (samples - given * clients)
        parts = np.split(order, np.rint(ends[:-1]).astype(np.int64) + given * np.arange(1, clients))
    return [own.permutation(part) for part in parts]


@pytest.mark.parametrize("partition", ["iid", "unequal", "own"])
@pytest.mark.parametrize(
    ("clients", "samples"), [(1, 1), (1, 30), (3, 9), (7, 100), (100, 100), (100, 250), (333, 1000), (40, 5000)]
)
def test_clients_have_the_samples_that_a_plain_split_gives_them(partition, clients, samples):
    owner = np.random.default_rng(clients).integers(-1, clients + 1, size=samples)
    config = RunConfig(num_clients=clients, clients_per_round=1, batch_size=1, partition=partition, seed=3)
    parts = PARTITIONS[partition].parts(data(samples, owner), config)
    plain = split_plainly(partition, clients, samples, 3, owner)
    assert len(parts) == clients
    for part, expected in zip(parts, plain, strict=True):
        np.testing.assert_array_equal(part, expected)
        assert part.dtype == np.int64


def test_parts_are_made_from_arrays_of_their_own():
    arrays = [np.array([3, 1]), np.array([], np.int64), np.array([2])]
    parts = Parts.together(arrays)
    assert [part.tolist() for part in parts] == [[3, 1], [], [2]]
    assert [part.tolist() for part in parts[1:]] == [[], [2]]
    assert parts[-1].tolist() == [2]
    with pytest.raises(IndexError):
        parts[3]
    assert Parts.together(parts) is parts
    own, plain = generator(1), generator(1)
    assert [part.tolist() for part in parts.shuffled(own)] == [plain.permutation(part).tolist() for part in arrays]
    assert own.random() == plain.random()


def test_a_shard_is_made_when_it_is_asked_for():
    dataset = data(10)
    shards = Shards(dataset, Parts.even(np.arange(10)[::-1].copy(), 4))
    assert [len(shard) for shard in shards] == shard_sizes(shards) == [3, 3, 2, 2]
    assert shard_sizes(shards, lambda size: size - 1) == shard_sizes([range(2), range(2), range(1), range(1)])
    assert isinstance(shards[3], Shard)
    np.testing.assert_array_equal(shards[3][0:2][0], dataset.train_features[[1, 0]])
    assert [len(shard) for shard in shards[::2]] == [3, 2]
    features, labels = Shard.stack([(shards[0], slice(0, 1)), (shards[2], slice(0, 2))])
    assert labels.tolist() == [9, 3, 2]
    assert features.shape == (3, 2)


def test_many_clients_have_shards_without_an_object_for_each(monkeypatch):
    made = []
    monkeypatch.setattr(Shard, "__init__", lambda *arguments: made.append(arguments))
    clients = 50_000
    config = RunConfig(num_clients=clients, clients_per_round=10, batch_size=1)
    shards = load_shards(config, data(clients))
    sizes = shard_sizes(shards)
    assert sum(sizes) == len(shards) == clients
    assert made == []
    assert sys.getsizeof(shards) < 100
    arrays = [shards._parts.numbers, shards._parts.sizes, shards._parts._ends]
    assert sum(array.nbytes for array in arrays) == 24 * clients
