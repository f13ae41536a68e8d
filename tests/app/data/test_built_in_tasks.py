"""The built-in tasks: digits, MNIST, synthetic data, tables of people, and those with public samples."""

import csv
import gzip
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.data import TASKS
from murmurfl.app.data.built_in_tasks import read_mnist, unit_rows
from murmurfl.app.data.loading import _loaded, load_dataset, load_shards
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.methods.gradient_methods import regularization
from murmurfl.app.papers.jiang_2026 import SIZES as PAPER_SIZES
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.outcome import Outcome
from murmurfl.app.runs.run_summary import shown_accuracy
from murmurfl.app.settings.registry import registry
from murmurfl.app.settings.run_config import RunConfig, run_keys
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.errors import install_command
from murmurfl.privacy.setting import by_key

from tests.harness.errors import raises

needs_data = pytest.mark.skipif(
    not (Path(os.environ.get("MURMURFL_DATA", "/nowhere")) / "compas").is_dir(), reason="no data root in MURMURFL_DATA"
)
SIZES = {"credit-default": (24_000, 6_000, 45), "recidivism": (5_700, 1_514, 12)}
FILES = {"credit-default": "uci/UCI_Credit_Card.csv.gz", "recidivism": "compas/compas-two-years.csv.gz"}


@needs_data
@pytest.mark.parametrize("task", SIZES)
def test_everybody_is_in_one_part_and_every_row_has_length_one(task):
    data = load_dataset(RunConfig(task=task))
    assert (len(data.train_labels), len(data.test_labels), data.num_features) == SIZES[task]
    norms = np.linalg.norm(np.concatenate([data.train_features, data.test_features]), axis=1)
    assert norms == pytest.approx(1, abs=1e-5)
    assert (data.train_features[:, -1] > 0).all()  # the constant
    assert data.train_labels.mean() == pytest.approx(data.test_labels.mean(), abs=0.02)


@needs_data
@pytest.mark.parametrize("task", SIZES)
def test_a_row_depends_on_its_own_person_alone(task, tmp_path):
    """A table of the first fifty people gives the same rows: nothing is scaled by statistics."""
    name = FILES[task]
    with gzip.open(f"{os.environ['MURMURFL_DATA']}/{name}", "rt") as file:
        few = list(csv.reader(file))[:51]
    path = tmp_path / name
    path.parent.mkdir()
    with gzip.open(path, "wt", newline="") as file:
        csv.writer(file).writerows(few)
    kind = RunConfig(task=task)
    from murmurfl.app.data import TASKS

    values, labels = TASKS[kind.task].rows(os.environ["MURMURFL_DATA"])
    some, their_labels = TASKS[kind.task].rows(str(tmp_path))
    assert (some == values[:50]).all()
    assert (their_labels == labels[:50]).all()


def test_rows_are_scaled_one_by_one():
    values = np.array([[3.0, 4.0], [0.0, 0.0]])
    assert unit_rows(values)[0] == pytest.approx(np.array([3, 4, 0.7]) / np.linalg.norm([3, 4, 0.7]))
    assert unit_rows(values)[1].tolist() == [0, 0, 1]


@pytest.mark.parametrize("task", SIZES)
def test_without_its_file_a_table_is_refused_with_its_name(task, tmp_path):
    with raises(ConfigurationError, "not-found", "data-root", match=FILES[task]):
        load_dataset(RunConfig(task=task, data_root=str(tmp_path)))


@needs_data
def test_a_run_with_two_classes_says_its_area_under_the_curve():
    config = RunConfig(task="recidivism", num_clients=20, clients_per_round=20, batch_size=57, mu=16.0)
    document = run_cohort(config).outcome.document()
    assert document["auc"] > 0.65
    assert document["per_round"][-1]["auc"] == document["auc"]
    assert f"AUC {document['auc']:.3f}" in shown_accuracy(Outcome.model_validate(document))
    assert run_cohort(RunConfig()).outcome.document()["auc"] is None


KINDS = ("task", "features", "partition", "model")


@pytest.mark.parametrize("key", KINDS)
def test_every_thing_has_its_name_a_sentence_and_keys_that_there_are(key):
    known = RunConfig().to_mapping()
    for name, thing in registry(key).items():
        assert thing.name == name
        assert thing.sentence
        assert not thing.sentence.endswith(".")
        assert set(thing.keys) <= set(known)


@pytest.mark.parametrize(
    ("key", "name", "near"),
    [
        ("task", "digit", "digits"),
        ("features", "orientated-gradients", "oriented-gradients"),
        ("partition", "dirichelet", "dirichlet"),
        ("model", "sofmax", "softmax"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(key, name, near):
    with pytest.raises(ConfigurationError, match=f"Expected {key} to be a known name, got '{name}'; .*'{near}'"):
        RunConfig.from_mapping({key: name})


@pytest.mark.parametrize("key", KINDS)
@pytest.mark.parametrize("name", ["nowhere.at_all:thing", "math:nothing", "math:pi"])
def test_a_name_of_nothing_that_will_do_is_refused_with_its_key(key, name):
    with pytest.raises(ConfigurationError, match=f"Expected {key} = '{name}' to "):
        RunConfig.from_mapping({key: name})


def test_what_a_task_reads_is_all_that_its_data_depend_on():
    """Runs that differ in anything else share one data set in memory; those that differ in it do not."""
    base = RunConfig(task="synthetic-logistic", partition="own", synthetic_samples=40, synthetic_features=3)
    first = _of(base)
    assert _of(replace(base, mu=1.0, num_rounds=2, batch_size=2)) is first
    for changes in ({"seed": 2}, {"num_clients": 5, "clients_per_round": 5}, {"synthetic_alpha": 3.0}):
        assert _of(replace(base, **changes)) is not first
    assert _of(RunConfig(seed=7)) is _of(RunConfig())


def _of(config):
    """What lies in the cache: features without a copy."""
    return load_dataset(config).train_features


def test_a_message_of_a_simulation_loads_no_data_again():
    config = RunConfig(num_clients=4, clients_per_round=4)
    load_shards(config, load_dataset(config))
    misses = _loaded.cache_info().misses
    for _ in range(5):
        load_shards(config, load_dataset(config))
    assert _loaded.cache_info().misses == misses


def test_constants_that_were_tuned_stand_on_the_task_they_were_tuned_for():
    tuned = {(name, features) for name, task in TASKS.items() for features in task.tuned}
    of_norm_one = ("soft-gradients", "strokes", "scattering", "scattering+strokes")
    assert tuned == {
        *(("digits", features) for features in ("pixels", "soft-gradients")),
        *(("mnist", features) for features in ("pixels", "oriented-gradients", *of_norm_one)),
        *((task, "pixels") for task in ("credit-default", "recidivism")),
    }


def test_without_flwr_datasets_a_dirichlet_partition_is_refused_with_its_extra(monkeypatch):
    config = RunConfig(partition="dirichlet", batch_size=1, seed=77)
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with raises(
        ConfigurationError,
        "not-installed",
        "flwr_datasets",
        match="partition = 'dirichlet'.*" + re.escape(install_command("partitions")),
    ):
        load_shards(config, load_dataset(config))
    monkeypatch.undo()
    assert len(load_shards(config, load_dataset(config))) == config.num_clients


def test_without_torchvision_mnist_is_not_fetched_and_refused_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with raises(
        ConfigurationError,
        "not-installed",
        "torchvision",
        match="task = 'mnist-parity'.*" + re.escape(install_command("torch")),
    ):
        load_dataset(RunConfig(task="mnist-parity", data_root=str(tmp_path), download=True))


def test_idx_files_are_read_plain_and_packed(tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    images = np.arange(2 * 28 * 28).astype(np.uint8).reshape(2, 28, 28)
    for part in ("train", "t10k"):
        for kind, values in (("images-idx3", images), ("labels-idx1", np.array([3, 7], np.uint8))):
            content = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes() + values.tobytes()
            if part == "train":
                (folder / f"{part}-{kind}-ubyte").write_bytes(content)
            else:
                (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))
    found = read_mnist(str(tmp_path), download=False, setting="")
    assert (found.train == images).all()
    assert (found.test == images).all()
    assert found.train_labels.tolist() == found.test_labels.tolist() == [3, 7]


@needs_data
@pytest.mark.parametrize("task", PAPER_SIZES)
def test_the_papers_data_have_the_papers_sizes_and_the_declared_bounds(task):
    data = load_dataset(RunConfig(strategy="shuffled", task=task, model=TASKS[task].models[0]))
    assert data.train_features.shape == data.public_features.shape == PAPER_SIZES[task]
    norms = np.linalg.norm(np.concatenate([data.train_features, data.public_features]).astype(float), axis=1)
    assert (norms <= TASKS[task].feature_bound * (1 + 1e-6)).mean() > 0.98
    assert (data.test_labels == data.train_labels).all()
    if task == "credit-card":
        assert (data.train_labels.mean(), data.public_labels.mean()) == (0.5, 0.05)
    assert regularization(RunConfig(strategy="shuffled", task=task, model=TASKS[task].models[0])) == (
        TASKS[task].regularizer,
        TASKS[task].regularizer_strength,
    )


LOGISTIC = {
    "strategy": "online", "task": "synthetic-logistic", "partition": "own", "model": "logistic", "num-clients": 4,
    "clients-per-round": 4, "batch-size": 5, "task.features": 12,
}  # fmt: skip


def config(**changes):
    return RunConfig.from_mapping({**LOGISTIC, **by_key(changes, run_keys())})


def test_every_client_of_the_synthetic_data_has_its_own_rule():
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
    with raises(ConfigurationError, "conflict", "partition", match="'own' or 'iid'"):
        config(partition="dirichlet")
    with raises(ConfigurationError, "missing", "partition"):
        prepare(RunConfig(partition="own"))
