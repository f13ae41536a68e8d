"""Whole trainings on the path of a GPU, on PyTorch's CPU backend, beside the same ones in NumPy."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from murmurfl.app.engines.device.device_block import machines_on
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError

SMALL = {"task": "synthetic", "synthetic_samples": 240, "synthetic_features": 9, "num_clients": 6, "batch_size": 2}
"""d = 100."""


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("flwr").setLevel(logging.ERROR)


def configuration(**settings):
    settings = {**SMALL, "clients_per_round": 6, "noise_quality": "fast", **settings}
    return RunConfig(**settings)


def on_device(config, device="torch-cpu"):
    return run_experiment(machines_on(prepare(config), device), config, engine="cohort")


def flat(result):
    return np.concatenate([values.ravel() for values in result.parameters])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch_size": 5},
        {"clients_per_round": 3, "sampling": "balanced"},
        {"synthetic_samples": 250},
        {"lost_replies": 0.3},
        {"clipping": "automatic"},
        {"strategy": "noisy-sgd"},
        {"model": "mlp"},
    ],
    ids=lambda settings: " ".join(f"{key}={value}" for key, value in settings.items()) or "as it comes",
)
def test_without_noise_the_model_is_numpys(settings):
    """Within the rounding of float64, of which a unit of the grid may be what is left, and of float32 for modules."""
    config = configuration(mechanism="none", **settings)
    ours, theirs = on_device(config), run_cohort(config)
    assert flat(ours) == pytest.approx(flat(theirs), abs=1e-4 if config.model == "mlp" else 1e-7)
    assert [vars(report) for report in ours.strategy.history] == [vars(report) for report in theirs.strategy.history]
    assert ours.statements == theirs.statements


@pytest.mark.parametrize("trust", ["trusted-server", "secure-aggregation"])
def test_every_trust_model_trains(trust):
    config = configuration(trust=trust)
    ours, theirs = on_device(config), run_cohort(config)
    assert ours.statements == theirs.statements
    assert ours.guarantee.sentence == theirs.guarantee.sentence
    if trust == "trusted-server":  # whose noise is the server's
        assert flat(ours) == pytest.approx(flat(theirs), abs=1e-7)


@pytest.mark.long
def test_digits_are_learnt_as_well_as_with_numpy():
    """Accuracies of ten seeds differ by less than five standard errors of the difference (a false alarm in 2e6)."""
    settings = {"mechanism": "cancelling", "mu": 2.0, "noise_quality": "fast", "evaluate_every": 100}
    configs = [RunConfig(seed=seed, **settings) for seed in range(1, 11)]
    ours, theirs = ([run(config).accuracy for config in configs] for run in (on_device, run_cohort))
    error = np.sqrt((np.var(ours, ddof=1) + np.var(theirs, ddof=1)) / len(configs))
    assert abs(np.mean(ours) - np.mean(theirs)) < 5 * error
    assert np.mean(ours) > 0.7


@pytest.mark.parametrize("mechanism", ["cancelling", "decay"])
def test_noise_moves_the_model_as_far_as_numpys_does(mechanism):
    """d = 100 values of two models: root mean squares of so many normals differ by more than 0.6 once in 1e6."""
    quiet, loud = configuration(mechanism="none"), configuration(mechanism=mechanism, mu=0.5)
    still = flat(run_cohort(quiet))
    ours, theirs = (np.linalg.norm(flat(run(loud)) - still) for run in (on_device, run_cohort))
    assert 0.6 < ours / theirs < 1 / 0.6


def test_a_seed_determines_the_model():
    first, again, other = (flat(on_device(configuration(seed=seed))) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_the_model_does_not_depend_on_how_many_machines_are_computed_together(monkeypatch):
    """But for the last digits of products of matrices of another shape; the noise is the same to the last bit."""
    config = configuration(mechanism="decay")
    whole = flat(on_device(config))
    machines = machines_on(prepare(config), "torch-cpu")
    machines.cohort.block_values = 2 * config.batch_size * 100
    assert flat(run_experiment(machines, config)) == pytest.approx(whole, abs=1e-6)


def test_of_a_round_one_sum_comes_back(monkeypatch):
    """Beside the norms of the samples; and of releases that a server wants by themselves each one."""
    came, right = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda values: came.append(values.numel()) or right(values))
    config = configuration(num_rounds=3, max_participations=3)
    on_device(config)
    assert sorted(came) == [6 * 2] * 3 + [100] * 3
    came.clear()
    on_device(replace(config, strategy="isrl-dp"))
    assert came.count(100) in (3, 3 * 6)


REFUSED = {
    "noise_quality": ({"noise_quality": "exact"}, "Expected noise-quality = 'fast' on a device, got 'exact'"),
    "mechanism": ({"mechanism": "tree"}, r"Expected a mechanism .*\(cancelling, decay, bisr, .* got 'tree'"),
    "centring": ({"centring": "private"}, "got one with centring.* Set centring=none"),
    "evaluation": ({"private_evaluation": 0.1}, "got one with private-evaluation.* Set private-evaluation=0"),
    "online": ({"strategy": "online"}, "got 'online': its machines compute by themselves"),
    "full batches": ({"strategy": "full-batch", "batch_size": 8}, "Expected machines that release the mean of a batch"),
    "delayed momentum": (
        {"strategy": "delayed-momentum"},
        "got 'delayed-momentum': its machines compute by themselves",
    ),
}


@pytest.mark.parametrize(("settings", "why"), REFUSED.values(), ids=REFUSED)
def test_what_a_device_cannot_compute_is_refused_before_anything_starts(settings, why):
    with pytest.raises(ConfigurationError, match=why):
        machines_on(prepare(configuration(**settings)), "torch-cpu")


def test_a_gpu_that_is_not_there_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match=r"Expected a GPU for device 'cuda', got PyTorch .*, which finds none"):
        machines_on(prepare(configuration()), "cuda")


def test_without_noise_the_quality_of_noise_does_not_matter():
    machines_on(prepare(configuration(mechanism="none", noise_quality="exact")), "torch-cpu")


def test_a_run_is_looked_at_before_the_device_is_opened():
    """A device may take seconds to open."""
    with pytest.raises(ConfigurationError, match="noise-quality"):
        machines_on(prepare(configuration(noise_quality="exact")), "cuda:7")
