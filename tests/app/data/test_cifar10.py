"""CIFAR-10 in each of the layouts that are read."""

import numpy as np
import pytest
from murmurfl.app.data.built_in_tasks import read_cifar10
from murmurfl.app.data.loading import load_dataset
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError

from tests.harness.errors import raises

RANDOM = np.random.Generator(np.random.Philox(key=5))
IMAGES = RANDOM.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
LABELS = np.arange(40, dtype=np.uint8) % 10


def binary(root):
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    planes = IMAGES.transpose(0, 3, 1, 2).reshape(40, -1)
    records = np.concatenate([LABELS[:, None], planes], axis=1)
    for number, start in enumerate((0, 10, 20), start=1):
        (folder / f"data_batch_{number}.bin").write_bytes(records[start : start + 10].tobytes())
    (folder / "test_batch.bin").write_bytes(records[30:].tobytes())


def arrays(root):
    parts = {"x_train": IMAGES[:30], "y_train": LABELS[:30, None], "x_test": IMAGES[30:], "y_test": LABELS[30:, None]}
    np.savez(root / "cifar10.npz", **parts)


def folders(root):
    image = pytest.importorskip("PIL.Image")
    for number, (pixels, label) in enumerate(zip(IMAGES, LABELS, strict=True)):
        folder = root / "cifar10" / ("train" if number < 30 else "test") / f"class-{label}"
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray(pixels).save(folder / f"{number:02}.png")


@pytest.mark.parametrize("layout", [binary, arrays, folders])
def test_layouts_hold_the_same_images(tmp_path, layout):
    layout(tmp_path)
    found = read_cifar10(str(tmp_path))
    order = np.argsort(found.train_labels, kind="stable")
    expected = np.argsort(LABELS[:30], kind="stable")
    assert np.array_equal(found.train[order], IMAGES[:30][expected])
    assert np.array_equal(found.train_labels[order], LABELS[:30][expected])
    assert len(found.test) == 10


def test_images_without_a_test_set_are_split_within_each_class(tmp_path):
    (tmp_path / "cifar10").mkdir()
    np.savez(tmp_path / "cifar10" / "part.npz", images=IMAGES, labels=LABELS.astype(np.int64))
    found = read_cifar10(str(tmp_path))
    assert np.bincount(found.test_labels, minlength=10).tolist() == [1] * 10
    config = RunConfig(task="cifar10", data_root=str(tmp_path), features="colour", num_clients=2, clients_per_round=2)
    assert load_dataset(config).train_features.shape == (30, 385)


def test_pickles_are_not_read_and_other_files_are_refused(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    with raises(ConfigurationError, "not-found", "data-root"):
        read_cifar10(str(tmp_path))
    np.savez(tmp_path / "cifar10.npz", x_train=IMAGES, y_train=LABELS + 1, x_test=IMAGES, y_test=LABELS)
    with raises(ConfigurationError, "wrong-shape", "data-root"):
        read_cifar10(str(tmp_path))
    np.savez(tmp_path / "cifar10.npz", x_train=np.array([object()]), y_train=LABELS)
    with raises(ConfigurationError, "malformed", "data-root"):
        read_cifar10(str(tmp_path))
