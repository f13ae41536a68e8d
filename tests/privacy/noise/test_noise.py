"""Keyed noise: reproducible, Gaussian, without overlap, and safe to add where it matters.

Statistical tests have fixed keys, so they pass or fail for good; the false-alarm rate named is that of a fresh key.
"""

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, Grid, SimulatedKeys, SystemKeys, row_key, standard_normals
from murmurfl.privacy.noise import NOISE_QUALITIES, each_normal_row, standard_normal_rows
from scipy import stats

KEY = bytes(range(32))
FALSE_ALARM = 1e-6


def key(number):
    return row_key(KEY, number.to_bytes(16, "little"))


@pytest.mark.parametrize("quality", NOISE_QUALITIES)
@pytest.mark.parametrize("size", [0, 1, 2, 785, 7850, 40_001])
def test_a_row_is_regenerated_bit_for_bit(quality, size):
    first, second = (standard_normals(key(1), size, quality) for _ in range(2))
    assert first.shape == (size,)
    assert first.tobytes() == second.tobytes()


def test_rows_are_what_they_were_when_this_was_written():
    """A machine regenerates noise it drew before an upgrade; another stream would leave that noise in the model."""
    exact = standard_normals(key(1), 4, "exact")
    fast = standard_normals(key(1), 4, "fast")
    assert exact.dtype == np.float64
    assert fast.dtype == np.float32
    assert exact == pytest.approx(GOLDEN["exact"], rel=1e-12)
    assert fast == pytest.approx(GOLDEN["fast"], rel=1e-5)


GOLDEN = {
    "exact": [-1.21138263759497, -0.152689925966479, -0.704910185018752, 1.54998409128448],
    "fast": [-0.854843, -0.4107574, -0.9536566, 1.340009],
}


@pytest.mark.parametrize("quality", NOISE_QUALITIES)
def test_values_are_standard_normal(quality):
    values = np.concatenate([standard_normals(key(n), 20_000, quality) for n in range(10)]).astype(np.float64)
    assert stats.kstest(values, "norm").pvalue > FALSE_ALARM
    assert np.var(values) == pytest.approx(1.0, abs=0.01)  # 3 standard errors: 0.0095
    assert stats.kstest(values**2, "chi2", args=(1,)).pvalue > FALSE_ALARM


@pytest.mark.parametrize("quality", NOISE_QUALITIES)
def test_the_normality_test_catches_noise_that_is_off_by_two_percent(quality):
    values = np.concatenate([standard_normals(key(n), 20_000, quality) for n in range(10)]).astype(np.float64)
    assert np.var(1.02 * values) != pytest.approx(1.0, abs=0.01)
    assert stats.kstest(np.clip(values, -2, 2), "norm").pvalue < FALSE_ALARM


@pytest.mark.parametrize("quality", NOISE_QUALITIES)
def test_rows_of_neighbouring_nonces_do_not_overlap_shifted_or_not(quality):
    """A bare counter as the cipher's IV would give the same row shifted by a block of 16 bytes."""
    one, two = (standard_normals(key(n), 4096, quality).astype(np.float64) for n in (7, 8))
    spectrum = np.fft.ifft(np.fft.fft(one) * np.conj(np.fft.fft(two))).real / len(one)
    assert np.abs(spectrum).max() < 6 / np.sqrt(len(one))  # false alarm: 4096 x 2e-9


def test_the_overlap_test_catches_a_shifted_row():
    one = standard_normals(key(7), 4096, "exact")
    two = np.roll(one, 2)
    spectrum = np.fft.ifft(np.fft.fft(one) * np.conj(np.fft.fft(two))).real / len(one)
    assert np.abs(spectrum).max() > 6 / np.sqrt(len(one))


def test_real_keys_are_fresh_and_simulated_keys_follow_names():
    real = SystemKeys.generate()
    assert len({real.nonce("s", 1) for _ in range(50)}) == 50
    assert real.secret_key != SystemKeys.generate().secret_key
    assert real.secret_key.hex() not in repr(real)
    simulated = SimulatedKeys(1, "3")
    assert simulated.nonce("s", 1) == SimulatedKeys(1, "3").nonce("s", 1)
    others = [SimulatedKeys(2, "3"), SimulatedKeys(1, "4")]
    assert len({keys.secret_key for keys in [simulated, *others]}) == 3
    assert len({simulated.nonce(session, k) for session in ("a", "b", "a1") for k in (1, 11, 2)}) == 9


@pytest.mark.parametrize(("secret", "nonce"), [(b"short", bytes(16)), (KEY, b"short")])
def test_keys_and_nonces_of_the_wrong_length_are_refused(secret, nonce):
    with pytest.raises(ConfigurationError, match="Expected"):
        row_key(secret, nonce)


def test_unknown_quality_is_refused():
    with pytest.raises(ConfigurationError, match="quality"):
        standard_normals(key(1), 3, "float16")


# Mironov (2012): who knows the noise's number format can tell which of two inputs a floating-point sum came from,
# because only some sums can be written as input + representable noise.


def float32_observer(released, candidate):
    """Whether every released value can be candidate + (a float32 the fast generator can produce)."""
    noise = released.astype(np.float64) - np.float64(candidate)
    return bool((noise.astype(np.float32).astype(np.float64) == noise).all())


def test_an_observer_who_knows_the_format_tells_inputs_apart_under_float32_noise():
    """The planted bug: float32 noise of standard deviation 1 on float32 values 0 and 1/3."""
    caught = 0
    for n in range(20):
        noise = standard_normals(key(n), 7850, "fast")
        released = noise + np.float32(0.0)
        assert float32_observer(released, 0.0)
        caught += not float32_observer(released, float(np.float32(1 / 3)))
    assert caught == 20


def test_the_same_observer_learns_nothing_from_exact_noise_on_the_grid():
    """Both inputs are on the grid, so is all noise: every release is possible under either, and as likely to fit."""
    grid = Grid(2.0**-20)
    inputs = grid.counts(np.array([0.0, 1 / 3]))
    for n in range(20):
        counts = inputs[0] + grid.counts(standard_normals(key(n), 7850, "exact"))
        for candidate in inputs:
            noise = grid.values(counts - candidate)
            assert (noise == np.rint(noise / grid.spacing) * grid.spacing).all()
        # Not even the low bits say which: parity of what remains is that of a fair coin under both.
        for candidate in inputs:
            odd = int(((counts - candidate) & 1).sum())
            assert abs(odd - 7850 / 2) < 5.5 * np.sqrt(7850) / 2  # false alarm: 40 x 4e-8


@pytest.mark.parametrize("quality", NOISE_QUALITIES)
@pytest.mark.parametrize("size", [1, 7850, 2 * 40_000 + 1])
def test_rows_drawn_together_are_the_rows_drawn_alone(quality, size):
    keys = [row_key(bytes(32), bytes([i]) * 16) for i in range(3)]
    rows = standard_normal_rows(keys, size, quality)
    assert rows.shape == (3, size)
    assert all((row == standard_normals(key, size, quality)).all() for row, key in zip(rows, keys, strict=True))
    one_by_one = list(each_normal_row(keys * 3, size, quality))  # more than are drawn at a time
    assert len(one_by_one) == 9
    assert all((row == rows[i % 3]).all() for i, row in enumerate(one_by_one))
