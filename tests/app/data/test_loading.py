"""Data of a run configuration: loaded once, held out, reduced."""

import os

import numpy as np
import pytest
from murmurfl.app.data.loading import load_dataset
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError

needs_mnist = pytest.mark.skipif(not os.environ.get("MURMURFL_DATA"), reason="MURMURFL_DATA is not set: no MNIST")


def test_validation_samples_come_from_the_training_set_and_leave_the_test_set_alone():
    whole = load_dataset(RunConfig())
    held = load_dataset(RunConfig(validation_samples=300))
    assert len(held.test_labels) == 300
    assert len(held.train_labels) + 300 == len(whole.train_labels)
    test_rows = {row.tobytes() for row in whole.test_features}
    train_rows = {row.tobytes() for row in whole.train_features}
    assert all(row.tobytes() in train_rows for row in held.test_features)
    assert not {row.tobytes() for row in held.train_features} & (test_rows - train_rows)


@needs_mnist
def test_mnist_is_the_whole_of_it():
    task = load_dataset(RunConfig(task="mnist"))
    assert task.train_features.shape == (60_000, 784)
    assert task.test_features.shape == (10_000, 784)
    assert task.train_features.min() == 0
    assert task.train_features.max() == 1
    assert np.bincount(task.train_labels)[:3].tolist() == [5923, 6742, 5958]


def test_training_samples_are_the_same_ones_in_every_run_and_never_test_samples():
    whole, fewer = load_dataset(RunConfig()), load_dataset(RunConfig(training_samples=300, seed=4))
    assert len(fewer.train_labels) == 300
    assert (fewer.test_features == whole.test_features).all()
    assert (load_dataset(RunConfig(training_samples=300)).train_features == fewer.train_features).all()
    assert {row.tobytes() for row in fewer.train_features} <= {row.tobytes() for row in whole.train_features}
    with pytest.raises(ConfigurationError, match="training-samples"):
        load_dataset(RunConfig(training_samples=5000))


@needs_mnist
def test_parity_has_two_classes():
    task = load_dataset(RunConfig(task="mnist-parity", features="means-4x4", model="nonconvex-logistic"))
    assert task.num_classes == 2
    assert set(task.train_labels.tolist()) == {0, 1}
    assert task.num_features == 49
