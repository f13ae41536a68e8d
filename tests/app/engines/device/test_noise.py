"""The noise of a block of machines is what their mechanism says, cancels to the last bit, and needs no memory."""

import numpy as np
import pytest
import torch
from murmurfl.app.engines.device import device_noise as noise_module
from murmurfl.app.engines.device.device_noise import (
    DeviceNoise,
    RowTable,
    check_mechanism_on_device,
    factors_of,
    standard_normal_rows,
)
from murmurfl.privacy import ConfigurationError, PrivacyPolicy, row_key
from murmurfl.privacy.mechanisms import MECHANISMS, make_mechanism

CPU = torch.device("cpu")
D, MACHINES, RELEASES = 37, 5, 6
ON_DEVICE = ["cancelling", "decay", "bisr", "independent"]
KEYS = [bytes([i]) * 32 for i in range(MACHINES)]
MANY = 1000


def nonce(release):
    return release.to_bytes(16, "little")


def plan_of(name, **options):
    policy = PrivacyPolicy(mu=1.0, clip_norm=1.0, batch_size=1, max_participations=RELEASES, mechanism=name, **options)
    return policy.plan(D)


def stream(name, kept=MANY, machines=range(MACHINES), **options):
    """The noise of every release of some machines, shape (releases, machines, d)."""
    noise = DeviceNoise(plan_of(name, **options), D, CPU, RowTable(D, kept, CPU))
    made = []
    for release in range(1, RELEASES + 1):
        counts = torch.zeros((len(machines), D), dtype=torch.int64)
        earlier = b"".join(nonce(j) for j in range(1, release))
        one = [nonce(release)] * len(machines)
        noise.add_to(counts, [release] * len(machines), [KEYS[i] for i in machines], one, [earlier] * len(machines))
        made.append(counts.numpy())
    return np.stack(made)


def normals():
    """Shape (releases, machines, d)."""
    rows = [standard_normal_rows([row_key(key, nonce(k)) for key in KEYS], D, CPU) for k in range(1, RELEASES + 1)]
    return torch.stack(rows).double().numpy()


@pytest.mark.parametrize("name", ON_DEVICE)
def test_increments_are_the_rows_of_the_mechanisms_matrix(name):
    """Within one count for what is added and one for what is removed."""
    plan = plan_of(name)
    expected = np.einsum("kj,jmd->kmd", plan.mechanism.inverse(), normals()) * plan.noise_std / plan.grid.spacing
    assert np.abs(stream(name) - expected).max() <= 1.0


@pytest.mark.parametrize("name", ON_DEVICE)
def test_factors_are_those_of_the_mechanisms_matrix(name):
    mechanism = plan_of(name).mechanism
    matrix = mechanism.inverse()
    for release in range(1, RELEASES + 1):
        added, removed = factors_of(mechanism, release, 2.0)
        total = added if removed is None else added - removed
        assert total == pytest.approx(2.0 * matrix[release - 1, release - len(total) : release][::-1])


@pytest.mark.parametrize("schedule", ["uniform", "harmonic", "paper"])
def test_what_a_release_adds_the_next_removes_to_the_last_bit(schedule):
    """Sums of cancelling noise are the last row alone, the same integers as NumPy would round it to."""
    plan = plan_of("cancelling", schedule=schedule)
    sums = np.cumsum(stream("cancelling", schedule=schedule), axis=0)
    for k, (total, row) in enumerate(zip(sums, normals(), strict=True)):
        assert (total == plan.grid.counts(row * (plan.mechanism.sigmas[k] * plan.noise_std))).all()


def test_a_removed_row_that_is_rounded_otherwise_is_caught(monkeypatch):
    """The sibling: of noise that is removed a little off, something is left."""
    plan, right = plan_of("cancelling"), noise_module._plus
    monkeypatch.setattr(noise_module, "_plus", lambda total, rows, factor: right(total, rows, factor * (1 + 1e-6)))
    last = plan.grid.counts(normals()[-1] * (plan.mechanism.sigmas[-1] * plan.noise_std))
    assert (stream("cancelling").sum(axis=0) != last).any()


@pytest.mark.parametrize("name", ON_DEVICE)
@pytest.mark.parametrize("kept", [0, 1, 3, 7])
def test_noise_does_not_depend_on_what_is_kept(name, kept):
    assert (stream(name, kept) == stream(name)).all()


@pytest.mark.parametrize("name", ON_DEVICE)
def test_noise_does_not_depend_on_who_is_in_a_block(name):
    together = stream(name)
    for i in range(MACHINES):
        assert (stream(name, machines=[i])[:, 0] == together[:, i]).all()


def test_machines_that_are_at_other_releases_share_a_block():
    """As with random sampling: each gets the noise of its own release."""
    expected = stream("decay")
    noise = DeviceNoise(plan_of("decay"), D, CPU, RowTable(D, MANY, CPU))
    releases = [1, 3, 2, 3, 1]
    counts = torch.full((MACHINES, D), 7, dtype=torch.int64)
    earlier = [nonce(release - 1) if release > 1 else b"" for release in releases]
    noise.add_to(counts, releases, KEYS, [nonce(release) for release in releases], earlier)
    assert all((counts[i].numpy() == 7 + expected[release - 1, i]).all() for i, release in enumerate(releases))


def test_a_machine_without_noise_adds_none():
    noise = DeviceNoise(plan_of("none"), D, CPU, RowTable(D, MANY, CPU))
    counts = torch.full((1, D), 7, dtype=torch.int64)
    noise.add_to(counts, [1], KEYS[:1], [nonce(1)], [b""])
    assert (counts == 7).all()


def test_only_rows_that_are_needed_are_kept():
    for name, most in (("independent", 0), ("cancelling", 1), ("decay", 1), ("bisr", RELEASES)):
        noise = DeviceNoise(plan_of(name), D, CPU, RowTable(D, MANY, CPU))
        for release in range(1, RELEASES + 1):
            counts = torch.zeros((1, D), dtype=torch.int64)
            earlier = b"".join(nonce(j) for j in range(1, release))
            noise.add_to(counts, [release], KEYS[:1], [nonce(release)], [earlier])
            assert len(noise._rows) <= most


@pytest.mark.parametrize("name", sorted(set(MECHANISMS) - set(ON_DEVICE)))
def test_a_mechanism_with_a_longer_memory_is_refused(name):
    with pytest.raises(ConfigurationError, match=rf"Expected a mechanism .*cancelling, decay, bisr, .* got '{name}'"):
        check_mechanism_on_device(make_mechanism(name, 40))


@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_mechanism_of_few_rows_is_taken(name):
    check_mechanism_on_device(make_mechanism(name, 40))


def test_a_table_has_room_for_the_newest_rows():
    table, made = RowTable(3, 2, CPU), []

    def make(names):
        made.extend(names)
        return torch.tensor([[float(name[1][0])] * 3 for name in names])

    names = [(b"key", bytes([i])) for i in range(4)]
    table.keep(names[:3], make(names[:3]))
    made.clear()
    assert table.get(names, make)[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert made == [names[0], names[3]]
    table.forget(names[:2])
    assert len(table) == 1
    table.keep(names[3:], make(names[3:]))
    made.clear()
    assert table.get(names[2:], make)[:, 0].tolist() == [2.0, 3.0]
    assert made == []
