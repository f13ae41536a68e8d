"""Tasks, partitions, features and models."""

import os

import numpy as np
import pytest
from datasets import Dataset
from flwr_datasets.partitioner import IidPartitioner
from murmurfl.app.config import RunConfig
from murmurfl.app.models.models import make_model
from murmurfl.app.tasks.features import oriented_gradients
from murmurfl.app.tasks.loading import load_shards, load_task
from murmurfl.privacy import derived_seed

needs_mnist = pytest.mark.skipif(not os.environ.get("MURMURFL_DATA"), reason="MURMURFL_DATA is not set: no MNIST")


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_partitions_give_every_sample_to_exactly_one_machine(partition):
    config = RunConfig(partition=partition, batch_size=1)
    task = load_task(config)
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
    task = load_task(RunConfig())
    shards = load_shards(RunConfig(num_clients=machines, clients_per_round=1, seed=3), task)
    for i, shard in enumerate(shards):
        assert sorted(shard._indices) == sorted(partitioner.load_partition(i)["index"])


def test_a_dirichlet_partition_is_skewed_and_an_iid_one_is_not():
    def largest_share(partition):
        config = RunConfig(partition=partition, dirichlet_alpha=0.3, batch_size=1)
        task = load_task(config)
        shares = []
        for shard in load_shards(config, task):
            _, labels = shard[slice(0, len(shard))]
            shares.append(np.bincount(labels, minlength=10).max() / len(shard))
        return np.mean(shares)

    assert largest_share("iid") < 0.2 < 0.35 < largest_share("dirichlet")


def test_validation_samples_come_from_the_training_set_and_leave_the_test_set_alone():
    whole = load_task(RunConfig())
    held = load_task(RunConfig(validation_samples=300))
    assert len(held.test_labels) == 300
    assert len(held.train_labels) + 300 == len(whole.train_labels)
    test_rows = {row.tobytes() for row in whole.test_features}
    train_rows = {row.tobytes() for row in whole.train_features}
    assert all(row.tobytes() in train_rows for row in held.test_features)
    assert not {row.tobytes() for row in held.train_features} & (test_rows - train_rows)


@needs_mnist
def test_mnist_is_the_whole_of_it():
    task = load_task(RunConfig(task="mnist"))
    assert task.train_features.shape == (60_000, 784)
    assert task.test_features.shape == (10_000, 784)
    assert task.train_features.min() == 0
    assert task.train_features.max() == 1
    assert np.bincount(task.train_labels)[:3].tolist() == [5923, 6742, 5958]


def test_oriented_gradients_depend_on_their_image_alone_and_have_the_stated_norm():
    images = np.random.Generator(np.random.Philox(key=1)).integers(0, 256, size=(20, 28, 28), dtype=np.uint8)
    images[3] = 0
    features = oriented_gradients(images)
    assert features.shape == (20, 392)
    norms = np.linalg.norm(features, axis=1)
    assert norms[3] == 0
    assert np.delete(norms, 3) == pytest.approx(np.full(19, 4.0), rel=1e-5)
    for i in (0, 7, 19):
        assert (oriented_gradients(images[i : i + 1])[0] == features[i]).all()


def test_an_edge_votes_for_its_own_direction_in_its_own_cell():
    image = np.zeros((1, 28, 28), dtype=np.uint8)
    image[0, :, 14:] = 255  # a vertical edge: the gradient points right
    histogram = oriented_gradients(image).reshape(7, 7, 8)
    inside = histogram[1:-1, 2:5]
    assert inside[..., 0].sum() == pytest.approx(inside.sum())
    assert histogram[3, 3].sum() > 0
    assert histogram[3, 0].sum() == 0


@pytest.mark.parametrize("name", ["softmax", "mlp"])
def test_gradients_are_the_slopes_of_the_loss(name):
    model = make_model(name, 6, 3)
    generator = np.random.Generator(np.random.Philox(key=2))
    parameters = [generator.normal(size=shape) * 0.3 for shape in model.shapes]
    features, labels = generator.normal(size=(5, 6)).astype(np.float32), np.array([0, 2, 1, 1, 0])
    rows = model(parameters, (features, labels))
    assert rows.shape == (5, model.num_parameters)
    direction = [generator.normal(size=shape) for shape in model.shapes]
    flat = np.concatenate([d.ravel() for d in direction])
    step = 1e-2
    ahead = [p + step * d for p, d in zip(parameters, direction, strict=True)]
    behind = [p - step * d for p, d in zip(parameters, direction, strict=True)]
    for i in range(5):
        sample = (features[i : i + 1].astype(np.float64), labels[i : i + 1])
        slope = (model.evaluate(ahead, sample)[0] - model.evaluate(behind, sample)[0]) / (2 * step)
        assert rows[i] @ flat == pytest.approx(slope, rel=2e-2, abs=2e-3)
        alone = model(parameters, (features[i : i + 1], labels[i : i + 1]))[0]
        assert rows[i] == pytest.approx(alone, abs=1e-6)


def test_initial_parameters_are_functions_of_the_seed():
    model = make_model("mlp", 6, 3)
    first, again, other = (model.initial_parameters(seed) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any((a != b).any() for a, b in zip(first, other, strict=True))
