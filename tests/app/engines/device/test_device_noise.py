"""Words, normals and noise of a device: known answers, the same bits on every backend, the law of NumPy's."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from murmurfl.app.engines.device import device_noise
from murmurfl.app.engines.device.device_noise import (
    KNOWN_ANSWERS,
    WORD_MASK,
    DeviceNoise,
    RowTable,
    check_known_answers,
    check_mechanism_on_device,
    factors_of,
    philox_words,
    standard_normal_rows,
)
from murmurfl.privacy import ConfigurationError, PrivacyPolicy, row_key, standard_normals
from murmurfl.privacy.mechanisms import MECHANISMS, make_mechanism
from scipy import stats

from tests.harness.errors import raises

DEVICE = torch.device(os.environ.get("MURMURFL_TEST_DEVICE", "cpu"))
"""``cuda`` where there is a GPU to test."""


def words(counter, key):
    tensors = [torch.tensor([value], device=DEVICE) for value in (*counter, *key)]
    return tuple(int(word) for word in philox_words(tensors[:4], tensors[4:]))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_words_are_those_that_were_published(counter, key, expected):
    assert words(counter, key) == expected


def by_hand(counter, key):
    """The definition, in Python's unbounded integers."""
    x, k = list(counter), list(key)
    for _ in range(10):
        low, high = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(high >> 32) ^ x[1] ^ k[0], high & WORD_MASK, (low >> 32) ^ x[3] ^ k[1], low & WORD_MASK]
        k = [(k[0] + 0x9E3779B9) & WORD_MASK, (k[1] + 0xBB67AE85) & WORD_MASK]
    return tuple(x)


def test_words_of_any_counter_and_key_are_those_of_the_definition():
    inputs = np.random.default_rng(1).integers(0, 2**32, size=(200, 6))
    given = torch.tensor(inputs.T, device=DEVICE)
    made = torch.stack(philox_words(given[:4].unbind(), given[4:].unbind()), dim=1)
    assert made.tolist() == [list(by_hand(row[:4], row[4:])) for row in inputs.tolist()]


def test_counters_and_keys_that_broadcast_give_the_words_of_each_pair():
    numbers, keys = torch.arange(5, device=DEVICE), torch.tensor([[7], [9]], device=DEVICE)
    zero = torch.zeros((2, 1), dtype=torch.int64, device=DEVICE)
    made = philox_words((numbers, zero, zero, keys), (keys, zero))
    assert [tuple(int(word[i, j]) for word in made) for i in range(2) for j in range(5)] == [
        by_hand((j, 0, 0, key), (key, 0)) for key in (7, 9) for j in range(5)
    ]


def test_a_backend_with_the_published_words_is_taken():
    check_known_answers(DEVICE)


@pytest.mark.parametrize(("name", "value"), [("ROUNDS", 9), ("_WEYL", (0x9E3779B9, 0)), ("WORD_BITS", 31)])
def test_a_backend_with_other_words_is_refused(monkeypatch, name, value):
    monkeypatch.setattr(device_noise, name, value)
    with raises(ConfigurationError, "unsupported", "device"):
        check_known_answers(DEVICE)


"""``cuda`` where there is a GPU to test."""
FALSE_ALARM = 1e-6
ROWS, SIZE = 32, 1 << 15


def key(number, secret=bytes(range(32))):
    return row_key(secret, number.to_bytes(16, "little"))


@pytest.fixture(autouse=True)
def _one_core():
    torch.set_num_threads(1)


def rows(keys, size, **options):
    return standard_normal_rows(keys, size, DEVICE, **options).cpu().numpy()


@pytest.fixture(scope="module")
def drawn():
    """A million normals, float64."""
    return rows([key(i) for i in range(ROWS)], SIZE).astype(np.float64)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 1037])
def test_a_rows_bits_depend_on_nothing_beside_it(size):
    keys = [key(i) for i in range(5)]
    together = rows(keys, size)
    assert together.shape == (5, size)
    assert together.dtype == np.float32
    for cut in (37, 100, 1 << 20):
        assert rows(keys, size, blocks_together=cut).tobytes() == together.tobytes()
    for i, one in enumerate(keys):
        assert rows([one], size).tobytes() == together[i].tobytes()


def test_rows_of_no_client_are_no_rows():
    assert rows([], 12).shape == (0, 12)


def test_rows_are_what_they_were_when_this_was_written():
    """Single sums, products, quotients and roots, each rounded as NumPy rounds it: these bits are a GPU's too."""
    assert [float.hex(value) for value in rows([key(1)], 6)[0].tolist()] == [
        "-0x1.a6c1060000000p-3",
        "-0x1.431bd80000000p+0",
        "-0x1.d3b2b80000000p-1",
        "-0x1.bf84ea0000000p-3",
        "-0x1.1b3a100000000p-1",
        "0x1.8a2ffc0000000p-3",
    ]


@pytest.mark.long
def test_rows_have_the_same_bits_on_every_set_of_instructions():
    """The backend's kernels without vectors, in a process of their own, and the best that this processor has."""
    program = (
        "import hashlib, torch; from murmurfl.app.engines.device.device_noise import standard_normal_rows as rows; "
        "print(hashlib.sha256(rows([bytes([i]) * 32 for i in range(5)], 7851, torch.device('cpu')).contiguous()"
        ".numpy().tobytes()).hexdigest())"
    )
    made = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
        check=True, capture_output=True, text=True, timeout=100,
    ).stdout  # fmt: skip
    here = rows([bytes([i]) * 32 for i in range(5)], 7851)
    assert made.strip() == hashlib.sha256(here.tobytes()).hexdigest()


def test_rows_are_not_those_of_the_cpus_noise():
    assert np.abs(rows([key(1)], 1000)[0] - standard_normals(key(1), 1000, "fast")).mean() > 0.5


def test_another_bit_of_any_word_of_a_key_is_another_row():
    base = rows([bytes(32)], 1000)[0]
    for byte in range(20):
        other = rows([bytes(byte) + b"\x01" + bytes(31 - byte)], 1000)[0]
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.16  # 5 standard errors


def test_a_key_of_another_length_is_refused():
    with raises(ConfigurationError, "wrong-shape", "keys", match="Expected keys of 32 bytes, got one of 31"):
        rows([bytes(32), bytes(31)], 4)


@pytest.mark.parametrize("size", [-4, 1 << 35])
def test_a_size_that_no_counter_numbers_is_refused(size):
    with raises(ConfigurationError, "out-of-range", "size"):
        standard_normal_rows([bytes(32)], size, torch.device("meta"))


def moments_are_those_of_a_normal(values):
    """Whether the first four moments are within 5 standard errors: a false alarm in 4 x 6e-7."""
    count = values.size
    expected = {1: (0.0, 1.0), 2: (1.0, 2.0), 3: (0.0, 15.0), 4: (3.0, 96.0)}
    return all(
        abs(np.mean(values**power) - mean) < 5 * math.sqrt(variance / count)
        for power, (mean, variance) in expected.items()
    )


def test_values_are_standard_normal(drawn):
    assert moments_are_those_of_a_normal(drawn)
    assert stats.kstest(drawn[:4].ravel(), "norm").pvalue > FALSE_ALARM
    assert stats.kstest(drawn[:4].ravel() ** 2, "chi2", args=(1,)).pvalue > FALSE_ALARM


@pytest.mark.parametrize(
    "spoiled",
    [
        lambda values: 1.01 * values,
        lambda values: values + 0.01,
        lambda values: np.clip(values, -3.0, 3.0),
        lambda values: np.where(values > 0, values, 1.01 * values),
    ],
    ids=["too wide", "moved", "without tails", "skewed"],
)
def test_the_moments_catch_noise_that_is_slightly_wrong(drawn, spoiled):
    assert not moments_are_those_of_a_normal(spoiled(drawn))


def every_quarter_is_normal(values):
    """Whether each of the four places in a block of Philox is normal by itself."""
    return all(stats.kstest(part.ravel(), "norm").pvalue > FALSE_ALARM for part in np.split(values[:4], 4, axis=1))


def test_every_place_of_a_block_is_normal(drawn):
    assert every_quarter_is_normal(drawn)


def test_a_place_that_is_never_small_is_caught(monkeypatch):
    """A cosine of less than an eighth of a turn is never small: without the swap the first places would be wrong."""
    monkeypatch.setattr(device_noise, "_SWAP", 0)
    assert not every_quarter_is_normal(rows([key(i) for i in range(4)], SIZE).astype(np.float64))


def test_angles_go_all_around(drawn):
    """By chi-squared over 64 sectors, with false alarms of 1e-6; and without the sign it would be half of them."""
    first, second = np.split(drawn, 4, axis=1)[:2]
    sectors = np.floor(np.arctan2(second, first) / math.tau * 64).astype(int).ravel() % 64
    assert stats.chisquare(np.bincount(sectors, minlength=64)).pvalue > FALSE_ALARM
    half = np.floor(np.arctan2(second, np.abs(first)) / math.tau * 64).astype(int).ravel() % 64
    assert stats.chisquare(np.bincount(half, minlength=64)).pvalue < FALSE_ALARM


def uncorrelated(first, second):
    """Whether values and their squares are uncorrelated, each within 5 standard errors: a false alarm in 2 x 6e-7."""
    return all(
        abs(np.corrcoef(first.ravel() ** power, second.ravel() ** power)[0, 1]) < 5 / math.sqrt(first.size)
        for power in (1, 2)
    )


def test_places_of_a_block_are_independent(drawn):
    parts = np.split(drawn, 4, axis=1)
    assert all(uncorrelated(parts[i], parts[j]) for i in range(4) for j in range(i))


def test_rows_and_neighbours_within_rows_are_independent(drawn):
    assert uncorrelated(drawn[:-1], drawn[1:])
    assert all(uncorrelated(drawn[:, lag:], drawn[:, :-lag]) for lag in (1, 2, 4))


def test_rows_of_different_secret_keys_are_independent():
    ours, theirs = (rows([key(i, secret) for i in range(4)], SIZE) for secret in (bytes(32), bytes(31) + b"\x01"))
    assert uncorrelated(ours, theirs)


def test_a_key_of_which_a_word_is_lost_is_caught(monkeypatch):
    """Two rows whose keys differ in one lost word alone would be the same."""
    first, second = bytes(32), bytes(16) + b"\x01" + bytes(15)
    assert uncorrelated(rows([first], SIZE), rows([second], SIZE))
    right = device_noise._key_words
    monkeypatch.setattr(
        device_noise,
        "_key_words",
        lambda *given: right(*given) * torch.tensor([[1], [1], [1], [1], [0]], device=DEVICE),
    )
    assert not uncorrelated(rows([first], SIZE), rows([second], SIZE))


def test_tails_are_those_of_a_normal_as_far_as_float32_words_reach(drawn):
    """Counts beyond 3, 4 and 4.5, each within what a Poisson count would be 1 - 1e-6 of the time."""
    for beyond in (3.0, 4.0, 4.5):
        expected = drawn.size * 2 * stats.norm.sf(beyond)
        low, high = stats.poisson.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], expected)
        assert low <= (np.abs(drawn) > beyond).sum() <= high


def test_the_smallest_and_the_largest_words_give_the_largest_normal_and_zero():
    radius = device_noise._minus_twice_logarithm(torch.tensor([2.0**-33, 1.0], dtype=torch.float32)).sqrt()
    assert float(radius[0]) == pytest.approx(math.sqrt(66 * math.log(2)), rel=1e-6)
    assert float(radius[1]) == 0.0


def test_roots_are_rounded_as_numpys_are():
    values = np.random.default_rng(1).random(200_000, dtype=np.float32) * np.float32(46)
    assert np.array_equal(device_noise._root(torch.from_numpy(values)).numpy(), np.sqrt(values))


def test_the_logarithm_is_right_to_three_units_in_the_last_place():
    values = torch.tensor(np.random.default_rng(1).random(50_000) ** 4 + 2.0**-33, dtype=torch.float32).clamp(max=1.0)
    values = torch.cat([values, 1.0 - torch.arange(1, 2000) * 2.0**-24, torch.logspace(-33, -1, 2000, base=2.0)])
    exact = -2.0 * torch.log(values.double())
    made = device_noise._minus_twice_logarithm(values.clone()).double()
    assert float(((made - exact).abs() / exact.clamp(min=1e-30)).max()) < 3 * 2.0**-23


def test_pairs_are_those_of_box_and_muller():
    """Against float64's own functions, from the same words."""
    words = torch.tensor(np.random.default_rng(1).integers(0, 2**32, size=(2, 50_000)))
    made = torch.empty((2, 50_000))
    device_noise._write_pairs(words[0], words[1], made[0], made[1])
    radius = torch.sqrt(-2.0 * torch.log((words[0].double() + 0.5) * 2.0**-32))
    assert torch.allclose(made.double().square().sum(dim=0).sqrt(), radius, rtol=1e-6, atol=4e-4)  # U near 1 is coarse
    angle = ((words[1] & (2**30 - 1)).double() + 0.5) * 2.0**-30 * math.pi / 2 - math.pi / 4
    swapped, sign = (words[1] >> 31) == 1, 1.0 - 2.0 * ((words[1] >> 30) & 1).double()
    cosine, sine = sign * radius * torch.cos(angle), sign * radius * torch.sin(angle)
    assert torch.allclose(made[0].double(), torch.where(swapped, sine, cosine), rtol=1e-5, atol=4e-4)
    assert torch.allclose(made[1].double(), torch.where(swapped, cosine, sine), rtol=1e-5, atol=4e-4)


CPU = torch.device("cpu")
D, CLIENTS, RELEASES = 37, 5, 6
ON_DEVICE = ["cancelling", "decay", "bisr", "independent"]
KEYS = [bytes([i]) * 32 for i in range(CLIENTS)]
MANY = 1000


def nonce(release):
    return release.to_bytes(16, "little")


def plan_of(name, **options):
    policy = PrivacyPolicy(mu=1.0, clip_norm=1.0, batch_size=1, max_participations=RELEASES, mechanism=name, **options)
    return policy.plan(D)


def stream(name, kept=MANY, clients=range(CLIENTS), **options):
    """The noise of every release of some clients, shape (releases, clients, d)."""
    noise = DeviceNoise(plan_of(name, **options), D, CPU, RowTable(D, kept, CPU))
    made = []
    for release in range(1, RELEASES + 1):
        counts = torch.zeros((len(clients), D), dtype=torch.int64)
        earlier = b"".join(nonce(j) for j in range(1, release))
        one = [nonce(release)] * len(clients)
        noise.add_to(counts, [release] * len(clients), [KEYS[i] for i in clients], one, [earlier] * len(clients))
        made.append(counts.numpy())
    return np.stack(made)


def normals():
    """Shape (releases, clients, d)."""
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
    plan, right = plan_of("cancelling"), device_noise._plus
    monkeypatch.setattr(device_noise, "_plus", lambda total, rows, factor: right(total, rows, factor * (1 + 1e-6)))
    last = plan.grid.counts(normals()[-1] * (plan.mechanism.sigmas[-1] * plan.noise_std))
    assert (stream("cancelling").sum(axis=0) != last).any()


@pytest.mark.parametrize("name", ON_DEVICE)
@pytest.mark.parametrize("kept", [0, 1, 3, 7])
def test_noise_does_not_depend_on_what_is_kept(name, kept):
    assert (stream(name, kept) == stream(name)).all()


@pytest.mark.parametrize("name", ON_DEVICE)
def test_noise_does_not_depend_on_who_is_in_a_block(name):
    together = stream(name)
    for i in range(CLIENTS):
        assert (stream(name, clients=[i])[:, 0] == together[:, i]).all()


def test_clients_that_are_at_other_releases_share_a_block():
    """As with random sampling: each gets the noise of its own release."""
    expected = stream("decay")
    noise = DeviceNoise(plan_of("decay"), D, CPU, RowTable(D, MANY, CPU))
    releases = [1, 3, 2, 3, 1]
    counts = torch.full((CLIENTS, D), 7, dtype=torch.int64)
    earlier = [nonce(release - 1) if release > 1 else b"" for release in releases]
    noise.add_to(counts, releases, KEYS, [nonce(release) for release in releases], earlier)
    assert all((counts[i].numpy() == 7 + expected[release - 1, i]).all() for i, release in enumerate(releases))


def test_a_client_without_noise_adds_none():
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
    with raises(
        ConfigurationError,
        "conflict",
        "mechanism",
        match=rf"Expected a mechanism .*cancelling, decay, bisr, .* got '{name}'",
    ):
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
