"""Data are loaded once, checked, and may be one's own."""

import os
import textwrap

import numpy as np
import pytest
from murmurfl.app.data.loading import checked, load_dataset, load_shards
from murmurfl.app.data.task import Dataset
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError

from tests.harness.errors import raises

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
    with raises(ConfigurationError, "out-of-range", "training-samples"):
        load_dataset(RunConfig(training_samples=5000))


@needs_mnist
def test_parity_has_two_classes():
    task = load_dataset(RunConfig(task="mnist-parity", features="means-4x4", model="nonconvex-logistic"))
    assert task.num_classes == 2
    assert set(task.train_labels.tolist()) == {0, 1}
    assert task.num_features == 49


MINE = '''
import numpy as np
from murmurfl.app.data.task import Dataset, Images, ImageTask, Task
from murmurfl.app.data.partition import Partition


def arrays(seed=5, samples=120):
    generator = np.random.default_rng(seed)
    labels = generator.integers(3, size=samples)
    features = generator.normal(size=(samples, 4)) + 3 * np.eye(3, 4)[labels]
    return features, labels


def make_task(config):
    features, labels = arrays(config.seed)
    return Dataset(features[:90], labels[:90], features[90:], labels[90:], 3)


def four_arrays():
    features, labels = arrays()
    return features[:90], labels[:90], features[90:], labels[90:]


def whose():
    features, labels = arrays()
    return Dataset(features[:90], labels[:90], features[90:], labels[90:], 3, np.arange(90) % 2)


class Stripes(ImageTask):
    """Images of 4 x 6 pixels, black or with white columns."""

    name = "stripes"
    image_shape = (4, 6)
    partitions = ("iid",)
    reads = frozenset()

    def images(self, config, root):
        generator = np.random.default_rng(1)
        labels = generator.integers(2, size=100)
        images = np.zeros((100, 4, 6), np.uint8)
        images[..., ::2] = 200 * labels[:, None, None]
        images += generator.integers(50, size=images.shape, dtype=np.uint8)
        return Images(images[:80], labels[:80], images[80:], labels[80:], 2)


class Twice(Partition):
    name = "twice"

    def parts(self, dataset, config):
        return [np.arange(20) for _ in range(config.num_clients)]


def twice(images):
    assert images.dtype == np.float32 and images.ndim == 3
    assert 0 <= images.min() and images.max() <= 1
    return 2 * images.reshape(len(images), -1)


def half(images):
    return images.reshape(len(images), -1)[: len(images) // 2]


def centred(images):
    rows = images.reshape(len(images), -1)
    return rows - rows.mean(axis=0)


def flat(images):
    return images.sum(axis=(1, 2))


def fails(*anything):
    raise RuntimeError("this one never works")


def three():
    return four_arrays()[:3]


def nothing():
    return None


def cubes():
    features, labels = arrays()
    return features.reshape(-1, 2, 2)[:90], labels[:90], features[90:], labels[90:]


def narrow():
    features, labels = arrays()
    return features[:90], labels[:90], features[90:, :3], labels[90:]


def texts():
    features, labels = arrays()
    return features[:90].astype(str), labels[:90], features[90:], labels[90:]


def few_labels():
    features, labels = arrays()
    return features[:90], labels[:80], features[90:], labels[90:]


def beyond():
    features, labels = arrays()
    return Dataset(features[:90], labels[:90], features[90:], labels[90:], 2)


def below():
    features, labels = arrays()
    return features[:90], labels[:90] - 1, features[90:], labels[90:]


def crowded():
    return four_arrays()


crowded.majority = 0.3  # of three classes


def described():
    return four_arrays()


described.schema = {"norm": 1.0}


def no_classes():
    features, labels = arrays()
    return Dataset(features[:90], labels[:90], features[90:], labels[90:], 0)
'''


@pytest.fixture(autouse=True)
def _mine(tmp_path, monkeypatch):
    (tmp_path / "my_murmurfl_data.py").write_text(textwrap.dedent(MINE))
    monkeypatch.syspath_prepend(tmp_path)


def config(task="make_task", **changes):
    settings = {"num_clients": 2, "clients_per_round": 2, "batch_size": 5, "num_rounds": 6, "checkpoint": False}
    return RunConfig(task=f"my_murmurfl_data:{task}", **{**settings, **changes})


@pytest.mark.parametrize("task", ["make_task", "four_arrays", "Stripes"])
def test_a_task_of_ones_own_runs_on_every_engine_in_this_process(task):
    cohort, in_process = (
        run(config(task, mechanism="none", learning_rate=2.0)) for run in (run_cohort, run_in_process)
    )
    assert cohort.accuracy == in_process.accuracy > 0.7
    for one, two in zip(cohort.parameters, in_process.parameters, strict=True):
        assert one == pytest.approx(two)


def test_a_function_may_take_the_run_configuration():
    first, again, other = (load_dataset(config(seed=seed)) for seed in (1, 1, 2))
    assert (first.train_features == again.train_features).all()
    assert (first.train_features != other.train_features).any()
    assert first.train_features.dtype == np.float32
    assert first.train_labels.dtype == np.int64


def test_four_arrays_have_as_many_classes_as_labels_and_none_where_labels_are_no_integers():
    assert load_dataset(config("four_arrays")).num_classes == 3
    features = np.ones((4, 2), np.float32)
    numbers = checked(Dataset(features, np.full(4, 0.5), features, np.full(4, 0.5), 1), "a task")
    assert numbers.train_labels.tolist() == [0.5] * 4


def test_the_clients_that_ones_data_come_with_are_kept():
    shards = prepare(config("whose", partition="own")).shards
    assert [sorted(shard._indices) for shard in shards] == [list(range(0, 90, 2)), list(range(1, 90, 2))]
    with raises(ConfigurationError, "missing", "partition"):
        prepare(config("make_task", partition="own"))


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("three", "a Dataset or four arrays .* got 3 values"),
        ("nothing", "a Dataset or four arrays .* got NoneType"),
        ("fails", "RuntimeError: this one never works"),
        ("cubes", r"train_features .* \(samples, features\), got float64 of shape \(90, 2, 2\)"),
        ("narrow", "test_features .* 4 columns"),
        ("texts", "train_features .* numbers"),
        ("few_labels", r"train_labels .* \(90,\)"),
        ("beyond", "train_labels .* integers from 0 to 1"),
        ("below", "train_labels .* integers from 0"),
        ("no_classes", "num_classes"),
        ("crowded", "Expected majority .* the most frequent class's share, from 1/3 .* got 0.3"),
        ("described", "Expected schema of .* to be a Schema, got dict"),
    ],
)
def test_data_that_will_not_do_are_refused_with_what_is_wrong(task, words):
    with pytest.raises(ConfigurationError, match=words) as refused:
        run_cohort(config(task))
    assert f"task = 'my_murmurfl_data:{task}'" in str(refused.value)


def test_what_a_task_of_ones_own_says_of_itself_holds():
    with raises(ConfigurationError, "conflict", "partition"):
        config("Stripes", partition="half-by-label")
    assert load_dataset(config("Stripes", features="my_murmurfl_data:twice")).num_features == 24


@pytest.mark.parametrize("task", ["digits", "my_murmurfl_data:Stripes"])
def test_features_of_ones_own_run_on_every_engine_in_this_process(task):
    changes = {"task": task, "num_clients": 2, "clients_per_round": 2, "num_rounds": 5, "checkpoint": False}
    plain = load_dataset(RunConfig(**changes))
    doubled = RunConfig(**changes, features="my_murmurfl_data:twice")
    assert (load_dataset(doubled).train_features == 2 * plain.train_features).all()
    assert (load_dataset(doubled).test_features == 2 * plain.test_features).all()
    results = [run(doubled) for run in (run_cohort, run_in_process)]
    assert results[0].accuracy == results[1].accuracy
    assert results[0].parameters[0].shape[1] == plain.num_features


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ("half", r"shape \(\d+, k\), one row an image, got float32 of shape"),
        ("flat", r"shape \(\d+, k\), one row an image"),
        ("fails", "RuntimeError: this one never works"),
        ("centred", "each row from its own image alone"),
        ("Stripes", "to be a function of images"),
    ],
)
def test_features_that_will_not_do_are_refused_with_what_is_wrong(features, words):
    with pytest.raises(ConfigurationError, match=words) as refused:
        load_dataset(RunConfig(features=f"my_murmurfl_data:{features}"))
    assert f"features = 'my_murmurfl_data:{features}'" in str(refused.value)


def test_features_need_images_and_the_built_in_maps_those_of_mnist():
    with raises(ConfigurationError, "conflict", "features"):
        RunConfig(task="synthetic", features="my_murmurfl_data:twice")
    with raises(ConfigurationError, "conflict", "features"):
        RunConfig(task="digits", features="oriented-gradients")


def test_a_partition_that_gives_a_sample_to_two_clients_is_refused():
    whole = RunConfig(partition="my_murmurfl_data:Twice", batch_size=1)
    with raises(ConfigurationError, "duplicate"):
        load_shards(whole, load_dataset(whole))
