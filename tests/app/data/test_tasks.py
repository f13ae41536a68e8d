"""The registries of tasks, features and partitions."""

import sys
from dataclasses import replace

import pytest
from murmurfl.app.data import TASKS
from murmurfl.app.data.loading import _loaded, load_dataset, load_shards
from murmurfl.app.settings.registry import registry
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError

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
    with pytest.raises(ConfigurationError, match=r"partition = 'dirichlet'.*pip install 'murmurfl\[partitions\]'"):
        load_shards(config, load_dataset(config))
    monkeypatch.undo()
    assert len(load_shards(config, load_dataset(config))) == config.num_clients


def test_without_torchvision_mnist_is_refused_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ConfigurationError, match=r"task = 'mnist-parity'.*pip install 'murmurfl\[torch\]'"):
        load_dataset(RunConfig(task="mnist-parity", data_root=str(tmp_path)))
