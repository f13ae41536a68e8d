"""Keyed normals on a device: the same bits however they are asked for, and the law of a standard normal.

Statistical tests have fixed keys, so they pass or fail for good; the false-alarm rate named is that of a fresh key.
"""

import hashlib
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from murmurfl.app.engines.device import device_noise as normals
from murmurfl.app.engines.device.device_noise import standard_normal_rows
from murmurfl.privacy import ConfigurationError, row_key, standard_normals
from scipy import stats

DEVICE = torch.device(os.environ.get("MURMURFL_TEST_DEVICE", "cpu"))
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


def test_rows_of_no_machine_are_no_rows():
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
    with pytest.raises(ConfigurationError, match="Expected keys of 32 bytes, got one of 31"):
        rows([bytes(32), bytes(31)], 4)


@pytest.mark.parametrize("size", [-4, 1 << 35])
def test_a_size_that_no_counter_numbers_is_refused(size):
    with pytest.raises(ConfigurationError, match="Expected size from 0 to"):
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
    monkeypatch.setattr(normals, "_SWAP", 0)
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
    right = normals._key_words
    monkeypatch.setattr(
        normals, "_key_words", lambda *given: right(*given) * torch.tensor([[1], [1], [1], [1], [0]], device=DEVICE)
    )
    assert not uncorrelated(rows([first], SIZE), rows([second], SIZE))


def test_tails_are_those_of_a_normal_as_far_as_float32_words_reach(drawn):
    """Counts beyond 3, 4 and 4.5, each within what a Poisson count would be 1 - 1e-6 of the time."""
    for beyond in (3.0, 4.0, 4.5):
        expected = drawn.size * 2 * stats.norm.sf(beyond)
        low, high = stats.poisson.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], expected)
        assert low <= (np.abs(drawn) > beyond).sum() <= high


def test_the_smallest_and_the_largest_words_give_the_largest_normal_and_zero():
    radius = normals._minus_twice_logarithm(torch.tensor([2.0**-33, 1.0], dtype=torch.float32)).sqrt()
    assert float(radius[0]) == pytest.approx(math.sqrt(66 * math.log(2)), rel=1e-6)
    assert float(radius[1]) == 0.0


def test_roots_are_rounded_as_numpys_are():
    values = np.random.default_rng(1).random(200_000, dtype=np.float32) * np.float32(46)
    assert np.array_equal(normals._root(torch.from_numpy(values)).numpy(), np.sqrt(values))


def test_the_logarithm_is_right_to_three_units_in_the_last_place():
    values = torch.tensor(np.random.default_rng(1).random(50_000) ** 4 + 2.0**-33, dtype=torch.float32).clamp(max=1.0)
    values = torch.cat([values, 1.0 - torch.arange(1, 2000) * 2.0**-24, torch.logspace(-33, -1, 2000, base=2.0)])
    exact = -2.0 * torch.log(values.double())
    made = normals._minus_twice_logarithm(values.clone()).double()
    assert float(((made - exact).abs() / exact.clamp(min=1e-30)).max()) < 3 * 2.0**-23


def test_pairs_are_those_of_box_and_muller():
    """Against float64's own functions, from the same words."""
    words = torch.tensor(np.random.default_rng(1).integers(0, 2**32, size=(2, 50_000)))
    made = torch.empty((2, 50_000))
    normals._write_pairs(words[0], words[1], made[0], made[1])
    radius = torch.sqrt(-2.0 * torch.log((words[0].double() + 0.5) * 2.0**-32))
    assert torch.allclose(made.double().square().sum(dim=0).sqrt(), radius, rtol=1e-6, atol=4e-4)  # U near 1 is coarse
    angle = ((words[1] & (2**30 - 1)).double() + 0.5) * 2.0**-30 * math.pi / 2 - math.pi / 4
    swapped, sign = (words[1] >> 31) == 1, 1.0 - 2.0 * ((words[1] >> 30) & 1).double()
    cosine, sine = sign * radius * torch.cos(angle), sign * radius * torch.sin(angle)
    assert torch.allclose(made[0].double(), torch.where(swapped, sine, cosine), rtol=1e-5, atol=4e-4)
    assert torch.allclose(made[1].double(), torch.where(swapped, cosine, sine), rtol=1e-5, atol=4e-4)
