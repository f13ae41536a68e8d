"""A device by its name, the arithmetic of a block of clients on it, and whole runs."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from murmurfl.app.engines.device import device_block
from murmurfl.app.engines.device.backend import check_device_name
from murmurfl.app.engines.device.device_block import DeviceBlocks, clients_on, open_device
from murmurfl.app.engines.device.device_gradients import DeviceRows, clipped_counts
from murmurfl.app.engines.device.device_noise import standard_normal_rows
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError, PrivacyPolicy, Privatizer, SimulatedKeys, row_key
from murmurfl.privacy.ledger.ledger_records import BlockLedger
from murmurfl.privacy.release.clipping import DenseContributions
from murmurfl.privacy.release.privatizer_block import PrivatizerBlock

from tests.harness.errors import raises


def test_pytorchs_cpu_is_there_wherever_pytorch_is():
    assert open_device("torch-cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", "torch-cpu:0", "numpy"])
def test_what_is_no_device_is_refused(name):
    with raises(ConfigurationError, "unknown-name", "device", match=f"Expected device 'cuda', .* got {name!r}"):
        open_device(name)


@pytest.mark.parametrize("name", ["", "torch-cpu", "cuda", "cuda:3"])
def test_names_are_checked_without_the_device(name):
    check_device_name(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_without_a_gpu_the_refusal_says_what_was_found_and_what_to_do(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError) as refusal:
        open_device(name)
    assert f"Expected a GPU for device {name!r}, got PyTorch {torch.__version__}" in str(refusal.value)
    assert "leave the device empty to compute with NumPy" in str(refusal.value)


def test_a_gpu_too_many_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with raises(
        ConfigurationError,
        "not-found",
        "device",
        match=r"Expected device 'cuda:0' to cuda:1, got 'cuda:2': PyTorch .* finds 2",
    ):
        open_device("cuda:2")


def test_without_pytorch_the_refusal_says_what_to_install(monkeypatch):
    def missing(*_):
        raise ConfigurationError("Expected the package torch for device 'cuda'.")

    monkeypatch.setattr(device_block, "check_installed", missing)
    with raises(ConfigurationError, "invalid", match="Expected the package torch for device 'cuda'"):
        open_device("cuda")


CPU = torch.device("cpu")
D, CLIENTS, RELEASES = 23, 4, 7


def keys(row):
    return SimulatedKeys(1, str(row))


def block_of(mechanism, arithmetic=None):
    policy = PrivacyPolicy(
        mu=1.0, clip_norm=1.0, batch_size=1, max_participations=RELEASES, mechanism=mechanism, noise_quality="fast"
    )
    ledgers = BlockLedger(CLIENTS)
    privatizer = Privatizer(policy, D, RELEASES, ledgers.ledger(0), keys(0))
    return PrivatizerBlock(privatizer, ledgers, np.full(CLIENTS, RELEASES), keys, arithmetic=arithmetic)


def contributions(release):
    generator = np.random.Generator(np.random.Philox(key=release))
    return torch.tensor(generator.normal(size=(CLIENTS, D)))


def made_of(block, mechanism_acks):
    """Every release of a block, and what was acknowledged before each, by a list of acks for each release."""
    made = []
    for k, acks in enumerate(mechanism_acks, start=1):
        answer = block.release("s", range(CLIENTS), acks, lambda *_, k=k: DeviceRows(contributions(k)))
        assert not answer.refused
        made.append(np.stack([block.made(answer, i, i).counts for i in range(CLIENTS)]))
    return made


def last_row(block, release):
    """What is left of cancelling noise, as NumPy rounds it."""
    plan = block.plan
    rows = [row_key(keys(i).secret_key, keys(i).nonce("s", release)) for i in range(CLIENTS)]
    normals = standard_normal_rows(rows, D, CPU).double().numpy()
    return plan.grid.counts(normals * (plan.mechanism.sigmas[release - 1] * plan.noise_std))


def contributed(block, releases):
    policy, grid = block.policy, block.plan.grid
    return sum(clipped_counts(DeviceRows(contributions(k)), policy.bound, grid, 1).numpy() for k in releases)


# What each client was told before each of its releases: nothing is lost; each client loses others.
ALL = [[k] * CLIENTS for k in range(RELEASES)]
LOST = [
    [0, 0, 0, 0],
    [1, 0, 0, 0],
    [2, 2, 0, 0],
    [2, 2, 3, 0],
    [2, 4, 3, 1],
    [5, 5, 3, 1],
    [5, 6, 6, 1],
]


@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("limit", [0, 1 << 20])
@pytest.mark.parametrize("acks", [ALL, LOST], ids=["all arrive", "some are lost"])
def test_the_sum_of_what_was_aggregated_is_all_contributions_and_the_last_noise(acks, limit, own_rows):
    """Exactly, in integers: what is lost costs delay and leaves no noise behind."""
    block = block_of("cancelling", DeviceBlocks(CPU, limit, own_rows=own_rows))
    made = made_of(block, acks)
    for i in range(CLIENTS):
        chain = {*(told[i] for told in acks), RELEASES} - {0}
        total = sum(made[k - 1][i] for k in chain)
        assert (total == (contributed(block, range(1, RELEASES + 1)) + last_row(block, RELEASES))[i]).all()


def test_a_client_that_forgets_what_was_lost_is_caught():
    """The sibling: sums of single increments lack the lost ones."""
    made = made_of(block_of("cancelling", DeviceBlocks(CPU)), ALL)
    whole = contributed(block_of("cancelling"), range(1, RELEASES + 1)) + last_row(block_of("cancelling"), RELEASES)
    assert (sum(made[k - 1][3] for k in (1, RELEASES)) != whole[3]).any()


@pytest.mark.parametrize("mechanism", ["decay", "bisr", "independent"])
def test_sums_of_releases_do_not_depend_on_what_was_lost(mechanism):
    """For mechanisms that never take all noise out: the noise of the last prefix sum is the same."""
    sums = []
    for acks in (ALL, LOST):
        made = made_of(block_of(mechanism, DeviceBlocks(CPU)), acks)
        chains = [{*(told[i] for told in acks), RELEASES} - {0} for i in range(CLIENTS)]
        sums.append([sum(made[k - 1][i] for k in chain) for i, chain in enumerate(chains)])
    assert (np.stack(sums[0]) == np.stack(sums[1])).all()


def test_the_noise_is_remembered_by_the_same_nonces_as_numpys():
    for mechanism in ("cancelling", "decay", "bisr", "independent", "none"):
        theirs, ours = block_of(mechanism), block_of(mechanism, DeviceBlocks(CPU))
        for k in range(1, 4):
            answers = [
                block.release("s", range(CLIENTS), [k - 1] * CLIENTS, lambda *_, made=made: made)
                for block, made in (
                    (theirs, DenseContributions(contributions(k).numpy())),
                    (ours, DeviceRows(contributions(k))),
                )
            ]
            assert answers[0].streams.nonces == answers[1].streams.nonces
            assert answers[0].streams.noise_state == answers[1].streams.noise_state


def test_sums_are_those_of_the_releases():
    for own_rows in (False, True):
        block = block_of("cancelling", DeviceBlocks(CPU, own_rows=own_rows))
        answer = block.release("s", range(CLIENTS), [0] * CLIENTS, lambda *_: DeviceRows(contributions(1)))
        each = np.stack([block.made(answer, i, i).counts for i in range(CLIENTS)])
        for places in ([0, 1, 2, 3], [2], [3, 1]):
            total = block.total(answer, places)
            assert isinstance(total, np.ndarray)
            assert (total == each[places].sum(axis=0)).all()


def test_contributions_that_are_not_on_the_device_are_refused():
    block = block_of("cancelling", DeviceBlocks(CPU))
    rows = DenseContributions(np.zeros((CLIENTS, D)))
    with raises(
        ConfigurationError, "unsupported", match="Expected contributions on the device, got DenseContributions"
    ):
        block.release("s", range(CLIENTS), [0] * CLIENTS, lambda *_: rows)
    assert block.release("s", [0], [0], lambda *_: DeviceRows(contributions(1)[:1])).streams.release.tolist() == [1]


SMALL = {"task": "synthetic", "synthetic_samples": 240, "synthetic_features": 9, "num_clients": 6, "batch_size": 2}
"""d = 100."""


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("flwr").setLevel(logging.ERROR)


def configuration(**settings):
    settings = {**SMALL, "clients_per_round": 6, "noise_quality": "fast", **settings}
    return RunConfig(**settings)


def on_device(config, device="torch-cpu"):
    return run_experiment(clients_on(prepare(config), device), config, engine="cohort")


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


def test_the_model_does_not_depend_on_how_many_clients_are_computed_together(monkeypatch):
    """But for the last digits of products of matrices of another shape; the noise is the same to the last bit."""
    config = configuration(mechanism="decay")
    whole = flat(on_device(config))
    clients = clients_on(prepare(config), "torch-cpu")
    clients.cohort.block_values = 2 * config.batch_size * 100
    assert flat(run_experiment(clients, config)) == pytest.approx(whole, abs=1e-6)


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
    "evaluation": ({"private_evaluation": 0.1}, "got one with evaluation.share.* Set evaluation.share=0"),
    "online": ({"strategy": "online"}, "got 'online': its clients compute by themselves"),
    "full batches": ({"strategy": "full-batch", "batch_size": 8}, "Expected clients that release the mean of a batch"),
    "delayed momentum": (
        {"strategy": "delayed-momentum"},
        "got 'delayed-momentum': its clients compute by themselves",
    ),
}


@pytest.mark.parametrize(("settings", "why"), REFUSED.values(), ids=REFUSED)
def test_what_a_device_cannot_compute_is_refused_before_anything_starts(settings, why):
    with pytest.raises(ConfigurationError, match=why):
        clients_on(prepare(configuration(**settings)), "torch-cpu")


def test_a_gpu_that_is_not_there_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises(
        ConfigurationError,
        "not-found",
        "device",
        match=r"Expected a GPU for device 'cuda', got PyTorch .*, which finds none",
    ):
        clients_on(prepare(configuration()), "cuda")


def test_without_noise_the_quality_of_noise_does_not_matter():
    clients_on(prepare(configuration(mechanism="none", noise_quality="exact")), "torch-cpu")


def test_a_run_is_looked_at_before_the_device_is_opened():
    """A device may take seconds to open."""
    with raises(ConfigurationError, "conflict", "noise-quality"):
        clients_on(prepare(configuration(noise_quality="exact")), "cuda:7")
