"""Toeplitz mechanisms: the square root of the prefix sum, and bands."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, make_mechanism
from murmurfl.privacy.mechanisms import BandedNoise, BisrNoise, BltNoise, DecayNoise, SqrtToeplitzNoise, optimise_band

CASES = {
    "square root": lambda n: SqrtToeplitzNoise(n),
    "banded": lambda n: BandedNoise(n, bands=4),
    "banded, cut": lambda n: BandedNoise(n, bands=4, optimised=False),
    "banded, one band": lambda n: BandedNoise(n, bands=1),
    "banded, for a separation": lambda n: BandedNoise(n, min_separation=7),
    "banded, default": lambda n: BandedNoise(n),
    "decay": lambda n: DecayNoise(n),
    "decay, given": lambda n: DecayNoise(n, decay=0.4),
    "bisr": lambda n: BisrNoise(n, bands=5),
    "blt": lambda n: BltNoise(n, buffers=2),
    "blt, given": lambda n: BltNoise(n, theta=[0.0, 0.5, 0.97], omega=[0.1, 0.6, 0.3]),
}
every_case = pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())


@pytest.fixture(autouse=True)
def _no_files(monkeypatch, tmp_path):
    monkeypatch.setenv("MURMURFL_CACHE", str(tmp_path))


def rows_of_normals(n, size, dtype=np.float64):
    return np.random.Generator(np.random.Philox(key=31)).normal(size=(n, size)).astype(dtype)


def stream(mechanism, normals, scale=1.0):
    """Every increment of a stream, through all regenerations a stream without state needs."""
    state, rows = mechanism.initial_state(normals.shape[1]), []
    for k in range(1, len(normals) + 1):
        before = [array.copy() for array in state]
        increment = mechanism.increment(state, k, normals[k - 1].copy(), scale)
        assert all((old == now).all() for old, now in zip(before, state, strict=True)), "increment is pure"
        assert increment.removed is None
        rows.append(increment.added)
        state = increment.state
        if state is None:
            state = mechanism.state_after(k, lambda releases: normals[[k - 1 for k in releases]], scale)
    return np.array(rows)


@every_case
@pytest.mark.parametrize("n", [1, 2, 3, 12, 70])
def test_factors_multiply_to_the_identity_and_the_prefix_sum(make, n):
    mechanism = make(n)
    encoder = mechanism.materialize()
    assert mechanism.inverse() @ encoder == pytest.approx(np.eye(n), abs=1e-12)
    assert mechanism.decoder() @ encoder == pytest.approx(np.tri(n), abs=1e-12)
    assert (encoder >= 0).all()
    assert (np.diff(encoder[:, 0]) <= 0).all()
    for m in range(1, n, 5):
        assert (mechanism.materialize(m) == encoder[:m, :m]).all()


@every_case
@pytest.mark.parametrize("n", [1, 5, 32, 70])
def test_streamed_increments_are_the_dense_inverse_times_the_normals(make, n):
    mechanism = make(n)
    normals = rows_of_normals(n, 3)
    rows = stream(mechanism, normals, scale=2.5)
    assert rows == pytest.approx(2.5 * np.linalg.solve(mechanism.materialize(), normals), abs=1e-11)


@every_case
def test_rows_longer_than_a_block_are_the_same_values(make):
    mechanism = make(6)
    size = 2 * (1 << 14) + 5
    normals = rows_of_normals(6, size)
    some = [0, (1 << 14) - 1, 1 << 14, size - 1]
    assert (stream(mechanism, normals)[:, some] == stream(mechanism, normals[:, some])).all()


@every_case
def test_single_precision_normals_stay_in_single_precision(make):
    mechanism = make(9)
    normals = rows_of_normals(9, 4, np.float32)
    state = mechanism.initial_state(4)
    for k in range(1, 10):
        increment = mechanism.increment(state, k, normals[k - 1], scale=3.0)
        assert increment.added.dtype == np.float32
        state = increment.state or ()
        assert all(array.dtype == np.float32 for array in state)
    exact = stream(mechanism, normals.astype(np.float64), scale=3.0)
    assert stream(mechanism, normals, scale=3.0) == pytest.approx(exact, rel=1e-4, abs=1e-4)


@every_case
def test_what_a_stream_remembers_is_no_more_than_announced(make):
    mechanism = make(20)
    state = mechanism.initial_state(10)
    for k, normals in enumerate(rows_of_normals(20, 10), 1):
        state = mechanism.increment(state, k, normals).state
        if mechanism.memory == "state":
            assert sum(array.nbytes for array in state) <= mechanism.memory_bytes(10)
            assert all(array.shape == (10,) for array in state)
        state = state or ()


@every_case
def test_standard_deviations_and_bounds_are_those_of_the_dense_rows(make):
    n = 33
    mechanism = make(n)
    stds = np.linalg.norm(mechanism.decoder(), axis=1)
    assert [mechanism.row_std(k) for k in range(1, n + 1)] == pytest.approx(stds)
    assert mechanism.row_std_range() == pytest.approx((stds.min(), stds.max()))
    for k in (1, 2, 20, n):
        assert mechanism.increment_bound(k) == pytest.approx(np.abs(mechanism.inverse()[k - 1]).sum())


@every_case
@pytest.mark.parametrize("n", [1, 2, 7, 10])
def test_sensitivity_is_exact_over_every_allowed_pattern(make, n):
    mechanism = make(n)
    encoder = mechanism.materialize()
    gram = encoder.T @ encoder
    for separation in range(1, n + 2):
        worst = np.zeros(n + 1)
        for size in range(1, n + 1):
            for chosen in combinations(range(n), size):
                if all(b - a >= separation for a, b in pairwise(chosen)):
                    worst[size] = max(worst[size], np.sqrt(gram[np.ix_(chosen, chosen)].sum()))
        for participations in range(1, n + 1):
            assert mechanism.sensitivity(participations, separation) == pytest.approx(worst[: participations + 1].max())


@every_case
def test_sensitivity_of_long_streams_is_that_of_the_earliest_columns(make):
    mechanism = make(200)
    encoder = mechanism.materialize()
    for participations, separation in [(1, 1), (3, 50), (4, 66), (5, 50), (200, 1), (9, 17), (2, 10**9)]:
        earliest = encoder[:, np.arange(0, 200, separation)[:participations]]
        expected = np.linalg.norm(earliest.sum(axis=1))
        assert mechanism.sensitivity(participations, separation) == pytest.approx(expected, rel=1e-12)


def test_square_root_is_its_own_decoder_with_the_entries_of_the_paper():
    """ALGORITHMS 3 (iii), and its error at 2000 releases, 5 participations 400 apart."""
    mechanism = SqrtToeplitzNoise(2000)
    assert mechanism.encoder_column[:4] == pytest.approx([1, 1 / 2, 3 / 8, 5 / 16])
    assert (mechanism.decoder_column == mechanism.encoder_column).all()
    assert np.cumsum(mechanism.inverse_column) == pytest.approx(mechanism.encoder_column, abs=1e-12)
    assert mechanism.sensitivity(5, 400) * mechanism.row_std(2000) == pytest.approx(9.883, abs=5e-4)


def test_the_band_is_cut_from_the_square_root_or_better():
    cut = BandedNoise(1000, bands=16, optimised=False)
    best = BandedNoise(1000, bands=16)
    assert (cut.band == SqrtToeplitzNoise(1000).encoder_column[:16]).all()
    assert cut.sensitivity() * cut.row_std(1000) == pytest.approx(9.968, abs=5e-4)
    assert best.sensitivity() * best.row_std(1000) < 8.54
    assert (np.diff(best.band) < 0).all()
    assert best.band[-1] > 0


def test_the_optimised_band_cannot_be_improved_by_a_small_step():
    band = optimise_band(60, 6)

    def loss(band):
        column = np.concatenate((band, np.zeros(54)))
        encoder = np.array([[column[i - j] if i >= j else 0.0 for j in range(60)] for i in range(60)])
        return np.linalg.norm(band) * np.linalg.norm(np.linalg.solve(encoder, np.tri(60))[:, 0])

    for entry in range(1, 6):
        for step in (-1e-3, 1e-3):
            assert loss(band + step * (np.arange(6) == entry)) > loss(band)


def test_columns_that_do_not_overlap_count_by_the_root_of_their_number():
    mechanism = BandedNoise(100, min_separation=25)
    assert mechanism.bands == 25
    assert mechanism.sensitivity(4, 25) == pytest.approx(2 * mechanism.sensitivity())
    assert mechanism.sensitivity(4, 24) > 2 * mechanism.sensitivity()


def test_default_band_is_the_shortest_power_of_two_within_ten_percent():
    full = SqrtToeplitzNoise(300)
    errors = {}
    for bands in (64, 128, 256):
        cut = BandedNoise(300, bands=bands, optimised=False)
        errors[bands] = cut.sensitivity() * cut.row_std(300) / (full.sensitivity() * full.row_std(300))
    chosen = BandedNoise(300).bands
    assert errors[chosen] <= 1.1 < errors[chosen // 2]


@pytest.mark.parametrize(
    "options",
    [
        {"bands": 0},
        {"bands": 2.0},
        {"bands": True},
        {"min_separation": -1},
        {"bands": 2, "min_separation": 2},
        {"k": 1},
    ],
)
def test_impossible_bands_are_refused(options):
    with pytest.raises(ConfigurationError, match="Expected"):
        make_mechanism("banded", 9, **options)


def test_the_optimiser_refuses_a_band_longer_than_the_stream():
    with pytest.raises(ConfigurationError, match="Expected 1 <= bands <= num_releases = 5, got 6"):
        optimise_band(5, 6)


@pytest.mark.parametrize(("releases", "bands"), [(64, 64), (70, 70), (100, 65), (150, 100)])
def test_many_bands_are_summed_ahead_and_give_the_same_rows(releases, bands):
    mechanism = make_mechanism("banded", releases, bands=bands)
    normals = np.random.Generator(np.random.Philox(key=6)).normal(size=(releases, 3))
    expected = 1.5 * mechanism.inverse() @ normals
    state = mechanism.initial_state(3)
    for k in range(1, releases + 1):
        increment = mechanism.increment(state, k, normals[k - 1], 1.5)
        assert increment.added == pytest.approx(expected[k - 1], abs=1e-12)
        state = tuple(values.copy() for values in increment.state)  # as from a ledger
        assert sum(values.nbytes for values in state) <= mechanism.memory_bytes(3)
