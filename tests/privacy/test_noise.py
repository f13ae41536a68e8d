"""Keyed noise: reproducible, Gaussian, without overlap, and safe to add where it matters.

Statistical tests have fixed keys, so they pass or fail for good; the false-alarm rate named is that of a fresh key.

Normals for the grid: what an observer of both halves of a pair can refute, the tail, the bits, and what is charged.

The observer knows everything but the key: the algorithm, the grid, and what it suspects was added to. Under a wrong
suspicion it takes the wrong thing away, and what is left of a pair may be no pair the algorithm can make.
The fixed grid: exact, independent of order, and loud where it would overflow.
"""

import math

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from murmurfl.privacy import (
    ConfigurationError,
    Grid,
    MemoryLedger,
    PrivacyPolicy,
    Privatizer,
    SimulatedKeys,
    SystemKeys,
    noise,
    policy_guarantee,
    row_bytes,
    row_key,
    standard_normals,
)
from murmurfl.privacy.noise import (
    FINEST_GRID,
    LARGEST_NORMAL,
    LARGEST_RADIUS,
    NOISE_QUALITIES,
    _tail_words,
    each_normal_row,
    exact_pairs,
    ideal_mu,
    largest_shift,
    power_of_two_at_most,
    range_problem,
    resolution_mu,
    standard_normal_rows,
)
from scipy import stats

from benchmarks.noise import version_1_pairs
from tests.harness.errors import raises
from tests.privacy.clients import DurableLedger

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
    """A client regenerates noise it drew before an upgrade; another stream would leave that noise in the model."""
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


@pytest.mark.parametrize(
    ("secret", "nonce", "setting"), [(b"short", bytes(16), "secret_key"), (KEY, b"short", "nonce")]
)
def test_keys_and_nonces_of_the_wrong_length_are_refused(secret, nonce, setting):
    with raises(ConfigurationError, "wrong-shape", setting):
        row_key(secret, nonce)


def test_unknown_quality_is_refused():
    with raises(ConfigurationError, "unknown-name", "quality"):
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


class FirstKeyCipher(Cipher):
    """Ciphers of a library that keeps the key that it was given first."""

    def __init__(self, algorithm, mode):
        super().__init__(algorithm, mode)
        self._first = algorithm

    def encryptor(self):
        return Cipher(self._first, self.mode).encryptor()


def test_a_library_whose_ciphers_keep_their_first_key_gives_the_same_rows(monkeypatch):
    keys = [row_key(bytes(32), bytes([i]) * 16) for i in range(3)]
    rows = standard_normal_rows(keys, 5, "exact")
    monkeypatch.setattr(noise, "Cipher", FirstKeyCipher)
    noise._takes_another_key.cache_clear()
    try:
        assert not noise._takes_another_key()
        assert np.array_equal(standard_normal_rows(keys, 5, "exact"), rows)
    finally:
        noise._takes_another_key.cache_clear()


CIPHER_KEY = row_key(bytes(range(32)), bytes(16))

# What murmurfl 0.1 chose: TrustedMu2 with d = 7850, T = 100, mu = 1, and a client with d = 1e6, K = 100, mu = 0.001.
OLD_GRIDS = [2.0**-33.8, 2.0**-30.8]


def random_words(shape, key=1):
    return np.random.Generator(np.random.Philox(key=key)).integers(0, 2**64, shape, dtype=np.uint64)


def no_tail(row, pair):
    raise AssertionError("these words do not reach into the tail")


def random_tail(key=2):
    generator = np.random.Generator(np.random.Philox(key=key))
    return lambda row, pair: generator.integers(0, 2**64, 3, dtype=np.uint64)


def pairs_of(radius_words, angle_words, tail=None):
    """Both halves, shape (2, pairs)."""
    halves = np.empty((2, len(radius_words)))
    exact_pairs(radius_words[None], angle_words[None], tail or random_tail(), halves[:1], halves[1:])
    return halves


def old_pairs_of(radius_words, angle_words):
    halves = np.empty((2, len(radius_words)))
    version_1_pairs(radius_words, angle_words, halves[0], halves[1])
    return halves


# The observer.


def circles_in_a_cell(halves, grid, version):
    """How many radii the algorithm could have drawn for each pair, as the observer sees it: rounded to the grid.

    Below 1 the number is whether there is one: 0 refutes.
    """
    near = np.abs(np.rint(halves / grid)) * grid
    slack = near * 2.0**-49  # of the algorithm's own rounding
    inner = np.maximum(near - grid / 2 - slack, 0.0)
    outer = near + grid / 2 + slack
    low, high = (0.5 * (side**2).sum(axis=0) for side in (inner, outer))  # -ln U at the cell's corners
    # U near 1 is counted from 1, where float64 is fine enough to say which multiples lie in between.
    from_one = high < 0.5
    with np.errstate(under="ignore"):
        first = np.where(from_one, -np.expm1(-low), np.exp(-high))
        last = np.where(from_one, -np.expm1(-high), np.exp(-low))
    spacing = np.full(first.shape, 2.0**-53)
    if version == 2:
        # 53 bits of U in the tail, and of 1 - U next to one.
        spacing = np.where(first < 2.0**-11, np.maximum(first, 2.0**-267) * 2.0**-52, 2.0**-53)
    width = (last - first) / spacing
    numbers = np.floor(last / spacing - 0.5) - np.ceil(first / spacing - 0.5) + 1
    return np.where(width < 2.0**20, numbers if version == 1 else np.floor(width), width)


def chosen_grids():
    """In standard deviations of a row's noise: what policies with these sizes really choose."""
    grids = set()
    for size in (7850, 10**6, 10**7):
        for mu in (0.001, 0.01, 0.1, 0.25, 1.0, 4.0):
            for mechanism, cap in (("cancelling", 1), ("cancelling", 10), ("cancelling", 100), ("independent", 100)):
                policy = PrivacyPolicy(clip_norm=1.0, batch_size=8, max_participations=cap, mu=mu, mechanism=mechanism)
                try:
                    plan = policy.plan(size)
                except ConfigurationError:
                    assert (size, mu, cap) == (10**7, 0.001, 100)
                    continue
                grids.add(plan.grid.spacing / (plan.noise_std * plan.mechanism.rounded_std()[1]))
    return sorted(grids)


def edge_words(values):
    """The pairs of so many values whose circles may show, as two words each and their tails: those near U = 0 or 1.

    Of all other pairs a cell holds thousands of circles (test_between_tail_and_centre_a_cell_is_full_of_circles).
    """
    block, found = 1 << 20, []
    zeros, stream = memoryview(bytes(16 * block)), np.empty(16 * block + 16, np.uint8)
    for start in range(0, values // 2, block):
        key = row_key(CIPHER_KEY, start.to_bytes(16, "big"))
        Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update_into(zeros, stream.data)
        words = stream[:-16].view("<u8").reshape(2, block)
        chosen = np.flatnonzero(words[0] + np.uint64(1 << 48) < np.uint64(1 << 49))
        found.append((words[:, chosen].copy(), [(key, int(pair)) for pair in chosen]))
    return np.concatenate([words for words, _ in found], axis=1), [name for _, names in found for name in names]


@pytest.fixture(scope="module")
def a_billion_values():
    return edge_words(10**9)


@pytest.mark.long
def test_the_observer_learns_nothing_from_a_billion_values(a_billion_values):
    words, names = a_billion_values
    halves = pairs_of(*words, lambda row, pair: _tail_words(*names[pair]))
    assert len(chosen_grids()) > 20
    for grid in chosen_grids():
        assert grid >= FINEST_GRID / 2
        for shift in (0.0, 1e-3, 0.25, 4.0):
            assert circles_in_a_cell(halves + np.array([[shift], [0.0]]), grid, 2).min() >= 2


@pytest.mark.parametrize("grid", OLD_GRIDS)
def test_the_observer_refutes_the_wrong_data_set_under_53_bit_noise(a_billion_values, grid):
    """The planted bug: murmurfl 0.1's noise at the grids it chose. No false world survives a billion values."""
    words, _ = a_billion_values
    halves = old_pairs_of(*words)
    true, false = (circles_in_a_cell(halves + np.array([[shift], [0.0]]), grid, 1) for shift in (0.0, 1e-3))
    assert true.min() >= 1
    assert (false == 0).sum() >= 1


def test_the_observer_refutes_53_bit_noise_on_any_grid():
    """By forcing the uniforms: what happens once in 2^45 pairs happens in every one."""
    words = random_words((2, 10_000)) >> np.array([[45], [0]], np.uint64)
    shifted = np.array([[0.5], [0.0]])
    assert (circles_in_a_cell(old_pairs_of(*words) + shifted, 2.0**-20, 1) == 0).mean() > 0.5
    assert circles_in_a_cell(pairs_of(*words) + shifted, 2.0**-20, 2).min() >= 2.0**20


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("depth", [*range(1, 64, 3), 64])
def test_between_tail_and_centre_a_cell_is_full_of_circles(depth):
    """Every stratum of U, forced: 2^-depth and 1 - 2^-depth, at the finest grid a policy chooses."""
    words = random_words((2, 2000), depth)
    radius = words[0] >> np.uint64(depth) if depth < 64 else np.zeros(2000, np.uint64)
    for forced in (radius, ~radius):
        for shift in (0.0, 0.01, 1.0):
            halves = pairs_of(forced, words[1]) + np.array([[shift], [0.0]])
            assert circles_in_a_cell(halves, FINEST_GRID, 2).min() >= 2


# The tail, by forcing the uniforms, against exact probabilities: P[R > r] = exp(-r^2 / 2).


def forced_tail(depth, size=20_000, make=pairs_of):
    """Pairs with U < 2^-depth."""
    words = random_words((2, size), 100 + depth)
    if depth < 64:
        return make(words[0] >> np.uint64(depth), words[1])
    below = random_words((size, 3), 200 + depth)
    below[:, 0] >>= np.uint64(depth - 64 - 11)
    halves = np.empty((2, size))
    left_over = words[1] & ~np.uint64(2047)
    exact_pairs(np.zeros((1, size), np.uint64), left_over[None], lambda row, pair: below[pair], halves[:1], halves[1:])
    return halves


@pytest.mark.parametrize("depth", [1, 11, 30, 47, 53, 60, 75, 100, 130])
def test_the_tail_has_the_exact_distribution(depth):
    """Given U < 2^-depth, R^2 / 2 - depth ln 2 is exponential; depth 47 is beyond 8 standard deviations.

    False alarm of a fresh seed: 2e-6 a depth.
    """
    halves = forced_tail(depth)
    beyond = 0.5 * (halves**2).sum(axis=0) - depth * math.log(2.0)
    assert beyond.min() >= -1e-9
    assert stats.kstest(beyond, "expon").pvalue > FALSE_ALARM
    angle = np.arctan2(halves[1], halves[0]) / (2 * math.pi) % 1.0
    assert stats.kstest(angle, "uniform").pvalue > FALSE_ALARM


@pytest.mark.long
def test_one_half_beyond_eight_standard_deviations_has_the_exact_probability():
    """P[X > x] for x = 8, 9, 10 from pairs with U < 2^-46, R > 7.98. False alarm: 3 x 6e-7 (5 standard errors)."""
    halves = forced_tail(46, 400_000)
    for x in (8.0, 9.0, 10.0):
        expected = 2 * stats.norm.sf(x) / 2.0**-46 * halves.shape[1]
        found = (np.abs(halves) > x).sum() / 2
        assert abs(found - expected) < 5 * math.sqrt(expected) + 1


def test_the_tail_test_catches_53_bit_noise():
    halves = forced_tail(50, make=old_pairs_of)
    beyond = 0.5 * (halves**2).sum(axis=0) - 50 * math.log(2.0)
    assert stats.kstest(beyond, "expon").pvalue < FALSE_ALARM


def test_the_largest_normal_is_the_one_of_all_zero_bits():
    zeros = np.zeros((1, 1), np.uint64)
    halves = np.empty((2, 1))
    exact_pairs(zeros, zeros, lambda row, pair: np.zeros(3, np.uint64), halves[:1], halves[1:])
    assert math.hypot(*halves[:, 0]) == pytest.approx(LARGEST_RADIUS, rel=1e-15)
    assert LARGEST_RADIUS * (1 + 1e-12) < LARGEST_NORMAL
    exact_pairs(~zeros, zeros, no_tail, halves[:1], halves[1:])
    assert 0 < math.hypot(*halves[:, 0]) < 2.0**-31  # U = 1 - 2^-76 or so: not zero


def test_a_row_takes_its_tail_words_from_where_no_row_reaches():
    """The same whatever block they are drawn in, other ones for other pairs and keys."""
    words = [_tail_words(key, pair).tobytes() for key in (CIPHER_KEY, bytes(32)) for pair in (0, 1, 2, 10**7)]
    assert len(set(words)) == len(words)
    overlapping = [words[0][16:], words[1][:8]]
    assert overlapping[0] != overlapping[1]
    whole = Cipher(algorithms.AES256(CIPHER_KEY), modes.CTR(bytes(16))).encryptor().update(bytes(1 << 16))
    assert _tail_words(CIPHER_KEY, 0).tobytes() not in whole


# The bits of the uniforms, recovered from the normals.


def recovered(halves):
    """The uniforms behind pairs: U of the radius, and the angle in turns."""
    return np.exp(-0.5 * (halves**2).sum(axis=0)), np.arctan2(halves[1], halves[0]) / (2 * math.pi) % 1.0


def share_of_a_unit(uniforms, bits):
    """What of a uniform is below its first ``bits`` bits, as a share of the last of them: uniform, if it has more."""
    return np.ldexp(uniforms, bits) % 1.0


def pairs_of_rows(size=1 << 19, rows=4):
    """As they are drawn: within a block, all cosines before all sines."""
    blocks = [
        standard_normals(row_key(CIPHER_KEY, bytes([n]) * 16), size, "exact").reshape(-1, 2, 1 << 14)
        for n in range(rows)
    ]
    return np.concatenate(blocks).transpose(1, 0, 2).reshape(2, -1)


def test_uniforms_have_all_their_bits():
    """Of rows as they are drawn: 50 bits of U where it is small enough for float64 to give them back, 46 of the angle.

    False alarm of a fresh key: 2e-6.
    """
    halves = pairs_of_rows()
    uniforms, angles = recovered(halves)
    small = (uniforms > 2.0**-13) & (uniforms < 2.0**-8)
    assert small.sum() > 3000
    assert stats.kstest(share_of_a_unit(uniforms[small], 50), "uniform").pvalue > FALSE_ALARM
    assert stats.kstest(share_of_a_unit(angles[angles < 2.0**-6], 46), "uniform").pvalue > FALSE_ALARM


@pytest.mark.parametrize(("bits", "caught_in"), [(44, ("radius", "angle")), (48, ("radius",))])
def test_the_bits_test_catches_uniforms_with_fewer(bits, caught_in):
    words = random_words((2, 1 << 20), 5) >> np.uint64(64 - bits) << np.uint64(64 - bits)
    uniforms, angles = recovered(pairs_of(*words))
    small = (uniforms > 2.0**-13) & (uniforms < 2.0**-8)
    assert stats.kstest(share_of_a_unit(uniforms[small], 50), "uniform").pvalue < FALSE_ALARM
    if "angle" in caught_in:
        assert stats.kstest(share_of_a_unit(angles[angles < 2.0**-6], 46), "uniform").pvalue < FALSE_ALARM


@pytest.mark.parametrize("depth", [11, 20, 30])
def test_small_uniforms_have_more_than_53_bits(depth):
    """Forced below 2^-depth, U has bits beyond the 53rd place; 53-bit uniforms have none there."""
    words = random_words((2, 20_000), 300 + depth) >> np.array([[depth], [0]], np.uint64)
    place = 46 + depth
    for make, uniform in ((pairs_of, True), (old_pairs_of, place < 52)):
        pvalue = stats.kstest(share_of_a_unit(recovered(make(*words))[0], place), "uniform").pvalue
        assert (pvalue > FALSE_ALARM) == uniform


# What is charged.


@pytest.mark.long
def test_a_counts_low_bit_is_a_fair_coin():
    """2^24 values at the finest grid. A hint of mu_n would move the count by less than a standard error; so it does.

    False alarm: 1e-6 (4.9 standard errors).
    """
    values = standard_normals(CIPHER_KEY, 1 << 24, "exact")
    counts = np.rint(values / FINEST_GRID).astype(np.int64)
    odd = int((counts & 1).sum())
    assert abs(odd - values.size / 2) < 4.9 * math.sqrt(values.size) / 2
    assert resolution_mu(values.size, FINEST_GRID) < 1e-3


def test_a_cell_of_the_grid_holds_the_floats_the_charge_counts():
    """The derivation's step 2, exactly: cells of the finest grid hold 2^-25 / ulp floats, one more or less."""
    for x in (0.26, 0.7, 1.0 - 2.0**-20, 1.7, 3.1):
        centre = round(x / FINEST_GRID)
        edges = [math.ldexp(centre + side, -25) for side in (-0.5, 0.5)]
        floats = (edges[1] - edges[0]) / np.spacing(edges[0])
        inclusive = floats + (1 if centre % 2 == 0 else -1)  # ties go to the even cell
        assert abs(inclusive / floats - 1.0) <= 2 * 2.0**-53 * x / FINEST_GRID * (1 + 1e-9)


def test_ideal_mu_and_the_resolution_add_up_in_squares():
    for mu, values, grid in ((1.0, 7850 * 100, 2.0**-20), (0.01, 10**8, 2.0**-24), (0.001, 10**7, 2.0**-25)):
        ideal = ideal_mu(mu, values, grid)
        # Noise for the smaller ideal mu is larger, so that the same grid is finer against it.
        assert math.hypot(ideal, resolution_mu(values, grid * ideal / mu)) == pytest.approx(mu, rel=1e-12)
        assert ideal < mu
    assert math.isnan(ideal_mu(1e-6, 10**9, 2.0**-25))


def test_shifts_beyond_the_range_are_refused():
    """What the range costs, by the exact probability of the pair: exp(-(R_max - s)^2 / 2) for each value moved by s."""
    for delta, mu in ((1e-5, 4.0), (1e-9, 9.0), (1e-5, 12.0)):
        most = largest_shift(delta, 1.0)
        assert math.exp(-((LARGEST_RADIUS - most) ** 2) / 2) <= delta * 2.0**-20
        assert range_problem(min(mu, most), 10**9, delta, min(mu, most)) == ""
        assert range_problem(most + 0.1, 10**9, delta, most + 0.1).startswith("Expected mu <=")
    assert range_problem(1.0, 10**9, 1e-70, 1.0).startswith("Expected delta >=")


def served(**changes):
    common = {"clip_norm": 1.0, "batch_size": 8, "max_participations": 10, "mu": 1.0, "mechanism": "independent"}
    return PrivacyPolicy(**{**common, **changes})


def number_in(error):
    return float(str(error).split("= ")[1].split()[0].rstrip(","))


@pytest.mark.parametrize(
    ("changes", "size", "key"),
    [
        ({"mu": 40.0}, 7850, "mu"),  # one sample would move a value by 40 standard deviations
        ({"mu": 400.0, "mechanism": "cancelling"}, 7850, "mu"),
        ({"mu": 1e-4, "max_participations": 100, "mechanism": "cancelling"}, 10**7, "mu"),  # grid finer than the noise
        ({"delta": 1e-80, "mu": 0.1}, 7850, "delta"),
    ],
)
def test_a_policy_the_noise_cannot_serve_is_refused_with_the_number_it_could(changes, size, key):
    def client(**changes):
        return Privatizer(served(**changes), size, 800, DurableLedger(), SystemKeys(bytes(32)), data=row_bytes([0]))

    with pytest.raises(ConfigurationError, match=f"Expected {key} [<>]=") as refused:
        client(**changes)
    number = number_in(refused.value)
    assert 0 < client(**{**changes, key: number}).plan.mu <= served(**{**changes, key: number}).mu
    with pytest.raises(ConfigurationError, match=f"Expected {key}"):
        client(**{**changes, key: number * (1.1 if changes[key] > number else 0.9)})


def test_in_simulation_a_mu_beyond_the_noise_is_said_to_guarantee_nothing():
    policy = served(mu=400.0, mechanism="cancelling")
    subject = Privatizer(policy, 3, 80, MemoryLedger(), SimulatedKeys(1, "a"))
    subject.release("s", 0, lambda samples: np.zeros((8, 3)))
    statement = subject.statement("s")
    assert math.isinf(subject.plan.mu)
    assert math.isinf(statement.guaranteed.mu)
    assert math.isinf(statement.mu_spent)
    assert "Nothing is guaranteed" in policy_guarantee(policy, subject.plan.mu).sentence
    assert "mu = 400" in policy_guarantee(policy, subject.plan.mu).sentence


def test_what_is_charged_costs_next_to_nothing_where_models_can_be_learnt():
    """d up to a million, mu from 0.1: the noise is at most 0.4 % above that of ideal normals on no grid at all."""
    for size in (650, 7850, 10**6):
        for mu in (0.1, 1.0, 4.0):
            plan = served(mu=mu).plan(size)
            assert 1.0 <= plan.noise_std / (0.25 / mu) < 1.004
            assert plan.mu == pytest.approx(mu, rel=1e-9)


@pytest.mark.parametrize(
    ("mechanism", "options"),
    [
        ("cancelling", {"schedule": "harmonic"}),
        ("cancelling", {"schedule": "paper"}),
        ("cancelling", {"schedule": "uniform"}),
        ("independent", {}),
        ("tree", {}),
        ("blt", {}),
        ("optimal", {}),
    ],
)
def test_the_hints_of_all_rows_are_charged_each_with_its_own_noise(mechanism, options):
    """A row with more noise has coarser floats: sum over releases and values of (2^-51 std / spacing)^2, exactly."""
    size, cap = 10**7, 60
    plan = served(mechanism=mechanism, max_participations=cap, mu=0.05, **options).plan(size)
    factor = plan.mechanism
    rows = factor.decoder() if factor.removes_last else factor.inverse()
    stds = np.linalg.norm(rows, axis=1) * plan.noise_std
    hint = math.sqrt(size * ((2.0**-51 * stds / plan.grid.spacing) ** 2).sum())
    assert plan.resolution_mu == pytest.approx(hint, rel=1e-9)
    noise = plan.sensitivity * factor.sensitivity() / plan.noise_std
    assert math.hypot(noise, hint) <= plan.mu * (1 + 1e-9)
    assert plan.mu <= 0.05
    assert plan.grid.spacing >= 2.0**-26 * stds.max()
    assert plan.spent_mu(cap) == plan.mu
    assert 0 < plan.spent_mu(1) <= plan.spent_mu(2) <= plan.mu


@pytest.mark.parametrize("mu", [1e80, 1e-160, 1e-308])
def test_absurd_mus_end_in_a_refusal_or_in_nothing_guaranteed(mu):
    try:
        plan = served(mu=mu).plan(100)
    except ConfigurationError:
        return
    assert math.isinf(plan.mu)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20), st.integers(-30, 0))
def test_rounding_moves_a_value_by_at_most_half_a_spacing(values, exponent):
    grid = Grid(2.0**exponent)
    values = np.array(values)
    assert (np.abs(grid.values(grid.counts(values)) - values) <= grid.spacing / 2).all()


def test_sums_of_counts_do_not_depend_on_their_order():
    generator = np.random.Generator(np.random.Philox(key=1))
    values = generator.normal(size=(500, 7)) * 10.0 ** generator.integers(-6, 4, size=(500, 1))
    grid = Grid(2.0**-30)
    counts = grid.counts(values)
    shuffled = counts[generator.permutation(500)]
    assert (counts.sum(axis=0) == shuffled.sum(axis=0)).all()
    # As float64, in any order, because every partial sum is a multiple of the spacing below 2^53 of them.
    assert (grid.values(counts).sum(axis=0) == grid.values(shuffled).sum(axis=0)).all()


@pytest.mark.parametrize("spacing", [0.0, -1.0, 0.3, np.inf, np.nan])
def test_a_spacing_that_is_no_power_of_two_is_refused(spacing):
    with raises(ConfigurationError, "out-of-range", "spacing"):
        Grid(spacing)


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0**60])
def test_values_that_do_not_fit_are_refused_and_never_wrapped(value):
    with raises(ConfigurationError, "out-of-range", match="2\\^51"):
        Grid(1.0).counts(np.array([0.0, value]))


@given(st.floats(1e-300, 1e300))
def test_power_of_two_at_most(value):
    power = power_of_two_at_most(value)
    assert power <= value < 2 * power


@given(st.lists(st.integers(-(2**52), 2**52).map(lambda n: n / 2), min_size=1))
def test_rounding_is_to_the_nearest_and_ties_go_to_even(values):
    values = np.array(values)[np.abs(values) < 2.0**51]
    assert (Grid(1.0).counts(values) == np.rint(values).astype(np.int64)).all()
    assert (Grid(1.0).counts(values, bound=2.0**50) == np.rint(values).astype(np.int64)).all()


def test_a_bound_that_does_not_fit_is_refused():
    with raises(ConfigurationError, "out-of-range", match="2\\^51"):
        Grid(1.0).counts(np.zeros(2), bound=2.0**51)
