"""The run configuration: typed, validated, one clear line."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.layers import parse_assignments
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError

ROOT = Path(__file__).parents[3]


def test_pyproject_states_every_key_with_its_default():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["config"] == RunConfig().to_mapping()


def test_a_configuration_survives_the_way_through_flower():
    config = RunConfig(mu=2.0, num_clients=20, task="mnist", features="oriented-gradients", lost_replies=0.1)
    assert RunConfig.from_mapping(config.to_mapping()) == config


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"mu": 0.0}, "mu"),
        ({"mu": -1}, "mu"),
        ({"mu": float("nan")}, "mu"),
        ({"mu": "4"}, "mu"),
        ({"mu": True}, "mu"),
        ({"delta": 1.0}, "delta"),
        ({"num-clients": 0}, "num-clients"),
        ({"num-clients": 2.5}, "num-clients"),
        ({"clients-per-round": 11}, "clients-per-round"),
        ({"batch-size": 0}, "batch-size"),
        ({"strategy": "fedavg"}, "strategy"),
        ({"schedule": "linear"}, "schedule"),
        ({"sampling": "random"}, "sampling"),
        ({"download": "yes"}, "download"),
        ({"seed": -1}, "seed"),
        ({"lost-replies": 1.0}, "lost-replies"),
        ({"features": "oriented-gradients"}, "features"),
        ({"model": "mlp", "preset": "paper"}, "preset"),
        ({"strategy": "delayed-momentum", "release-rule": "paper"}, "release-rule"),
        ({"strategy": "isrl-dp", "mechanism": "blt"}, "mechanism"),
        ({"epsilon": -3.0}, "epsilon"),
        ({"epsilon": 3.0, "mu": 2.0}, "mu or epsilon"),
        ({"bands": 3}, "banded"),
        ({"strategy": "noisy-sgd", "alpha": 0.2}, "tree-momentum"),
        ({"strategy": "mu22"}, "'mu2'"),
        ({"task": "minst"}, "'mnist'"),
        ({"model": "softmx"}, "'softmax'"),
        ({"mechanism": "bltt"}, "'blt'"),
        ({"synthetic-samples": 100}, "synthetic"),
        ({"feature-bound": 2.0}, "logistic"),
        ({"mechanism": "blt", "schedule": "paper"}, "cancelling"),
        ({"mu": [1.0]}, "mu"),
    ],
)
def test_bad_settings_are_refused_in_one_line_naming_the_key(values, expected):
    with pytest.raises(ConfigurationError) as refusal:
        RunConfig.from_mapping(values)
    assert expected in str(refusal.value)
    assert "Expected" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_clients": 2000, "clients_per_round": 1}, "num-clients"),
        ({"batch_size": 200}, "batch-size"),
        ({"max_participations": 100}, "max-participations"),
        ({"validation_samples": 5000}, "validation-samples"),
        ({"task": "mnist", "data_root": "/nowhere"}, "/nowhere"),
    ],
)
def test_what_the_data_do_not_allow_is_refused_before_the_first_round(changes, expected):
    with pytest.raises(ConfigurationError) as refusal:
        prepare(replace(RunConfig(), **changes))
    assert expected in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_value_of_another_type_is_refused_after_one_that_equals_it():
    assert RunConfig.from_mapping({"mu": 1, "num-clients": 12}).mu == 1.0
    for values in ({"mu": True, "num-clients": 12}, {"mu": 1, "num-clients": 12.0}):
        with pytest.raises(ConfigurationError):
            RunConfig.from_mapping(values)


def test_mnist_without_a_data_root_says_what_to_do(monkeypatch):
    monkeypatch.delenv("MURMURFL_DATA", raising=False)
    with pytest.raises(ConfigurationError, match="MURMURFL_DATA"):
        prepare(RunConfig(task="mnist"))


def test_assignments_are_read_as_their_keys_types():
    values = parse_assignments(["mu=2", "num-clients=20", "download=true", "schedule=paper", "run-name=3"])
    assert values == {"mu": 2.0, "num-clients": 20, "download": True, "schedule": "paper", "run-name": "3"}
    for bad in ("mu", "mu=two", "speed=3", "num-clients=2.5", "download=1"):
        with pytest.raises(ConfigurationError, match="Expected"):
            parse_assignments([bad])
