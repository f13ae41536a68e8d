"""Toeplitz mechanisms: the square root of the prefix sum, and bands.

The square root of the prefix sum with columns of norm 1.
Noise that takes out a part of the last: decay and bisr, whose C^{-1} has few diagonals.
"""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, MemoryLedger, SumAssumption, make_mechanism
from murmurfl.privacy.mechanisms import (
    WORKLOADS,
    BandedNoise,
    BisrNoise,
    BltNoise,
    DecayNoise,
    SqrtToeplitzNoise,
    best_decay,
    optimise_band,
)
from scipy.optimize import minimize_scalar

from tests.harness.errors import raises
from tests.privacy.clients import client, contribution

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


@pytest.mark.few_cases(6)
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


@pytest.mark.few_cases(6)
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
    with raises(ConfigurationError, "out-of-range", "bands", match="5, got 6"):
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


def error(mechanism):
    stds = [mechanism.row_std(k) for k in range(1, mechanism.num_releases + 1)]
    return np.sqrt(np.mean(np.square(stds))) * mechanism.sensitivity()


@pytest.mark.parametrize("n", [1, 2, 50, 300])
def test_its_columns_are_those_of_the_square_root_with_norm_one(n):
    encoder, root = make_mechanism("sqrt_normalised", n).materialize(), make_mechanism("sqrt_toeplitz", n).materialize()
    assert encoder == pytest.approx(root / np.linalg.norm(root, axis=0))
    assert np.linalg.norm(encoder, axis=0) == pytest.approx(np.ones(n), abs=1e-12)


def test_error_at_1024_releases_is_the_papers():
    assert error(make_mechanism("sqrt_normalised", 1024)) == pytest.approx(2.991, abs=0.001)
    assert error(make_mechanism("sqrt_toeplitz", 1024)) == pytest.approx(3.110, abs=0.001)


@pytest.mark.long
def test_at_1024_releases_the_optimum_is_one_percent_better():
    assert error(make_mechanism("optimal", 1024)) == pytest.approx(2.956, abs=0.001)


def test_rows_of_long_streams_are_those_of_b():
    """They are added up a part at a time."""
    mechanism = make_mechanism("sqrt_normalised", 600)
    assert [mechanism.row_std(k) for k in (1, 256, 257, 600)] == pytest.approx(
        np.linalg.norm(mechanism.decoder(), axis=1)[[0, 255, 256, 599]]
    )


def test_fewer_releases_are_charged_their_longest_column():
    mechanism = make_mechanism("sqrt_normalised", 40)
    for n in (1, 5, 39, 40):
        norms = np.linalg.norm(mechanism.materialize(n), axis=0)
        found = mechanism.sensitivity_bound(n=n)
        assert (found.value, found.exact, found.method) == (pytest.approx(norms.max()), True, "formula")
    assert mechanism.sensitivity(n=5) < 1


@pytest.mark.parametrize(("participations", "separation"), [(2, 1), (3, 20), (5, 9), (7, 30)])
def test_where_samples_return_the_worst_chain_counts(participations, separation):
    mechanism = make_mechanism("sqrt_normalised", 200)
    encoder = mechanism.materialize()
    chains = [encoder[:, start::separation][:, :participations].sum(axis=1) for start in range(200)]
    found = mechanism.sensitivity_bound(participations, separation, pattern="epochs")
    assert found.exact
    assert found.value == pytest.approx(np.linalg.norm(chains, axis=1).max())


def released_error(mechanism, workload="mu2"):
    """Root mean square noise of what is released, summed once more for mu2, at a fixed mu."""
    rows = mechanism.decoder() if workload == "prefix-sum" else np.cumsum(mechanism.decoder(), axis=0)
    return np.linalg.norm(rows) / math.sqrt(len(rows)) * mechanism.sensitivity()


@pytest.mark.parametrize("n", [16, 64, pytest.param(256, marks=pytest.mark.long)])
def test_decay_is_nearly_optimal_for_mu2(n):
    made = released_error(make_mechanism("decay", n))
    assert 0.130 <= 1 - made / released_error(make_mechanism("cancelling", n)) <= 0.1425
    assert 1.0 < made / released_error(make_mechanism("optimal", n, workload="mu2")) <= 1.012


@pytest.mark.parametrize("n", [16, 64, 256])
def test_decay_leaves_less_noise_in_the_output_of_mu2(n):
    """x is the mean of w_1, w_2, ... with weights 1, 2, ...: w_1 without noise, each other a sum of prefix sums."""

    def noises(name):
        mechanism = make_mechanism(name, n)
        points = np.cumsum(mechanism.decoder(), axis=0) * mechanism.sensitivity()
        output = np.arange(2, n + 2) @ points / ((n + 1) * (n + 2) / 2)
        return np.linalg.norm(output), np.linalg.norm(points[-1])

    output, last = (ours / theirs for ours, theirs in zip(noises("decay"), noises("cancelling"), strict=True))
    assert 0.07 <= 1 - output <= 0.08
    assert 1.03 <= last <= 1.05


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("n", [2, 3, 5, 9, 17, 40, 100, 333])
def test_the_default_decay_is_within_a_thousandth_of_the_best(n, workload):
    found = minimize_scalar(
        lambda decay: released_error(make_mechanism("decay", n, decay=float(decay)), workload),
        bounds=(0, 1),
        method="bounded",
    )
    assert released_error(make_mechanism("decay", n, workload=workload), workload) <= 1.001 * found.fun


def test_every_client_finds_the_same_decay():
    """Digits that clients with other versions of the libraries must find as well, to share sums."""
    assert [best_decay(n) for n in (1, 10, 14, 100, 600, 10_000, 10**6)] == [
        0.0, 0.81, 0.86, 0.978, 0.9963, 0.99978, 0.9999978,
    ]  # fmt: skip
    assert [best_decay(n, "prefix-sum") for n in (1, 10, 100, 10_000)] == [0.0, 0.63, 0.87, 0.986]
    policies = [client(mechanism="decay", **changes).policy for changes in ({}, {"decay": best_decay(20)})]
    assert policies[0].plan(6).mechanism.identity() == policies[1].plan(6).mechanism.identity()
    assert policies[0].plan(6).noise_std == policies[1].plan(6).noise_std


def test_another_decay_shares_neither_sum_nor_session():
    summed = {"trust": "secure-aggregation", "sums": SumAssumption(3, 4), "mechanism": "decay"}
    policies = [client(**summed, **changes).policy for changes in ({}, {"decay": 0.5}, {"workload": "prefix-sum"})]
    assert len({policy.shared_terms(6) for policy in policies}) == 3
    assert len({policy.plan(6).fingerprint for policy in policies}) == 3


@pytest.mark.parametrize(("decay", "other"), [(0, "independent"), (1, "cancelling")])
@pytest.mark.parametrize("pattern", [{}, {"num_participations": 3, "min_separation": 4}])
def test_its_ends_are_independent_and_uniform_cancelling_noise(decay, other, pattern):
    ours, theirs = make_mechanism("decay", 12, decay=decay), make_mechanism(other, 12)
    noise = [one.noise_std(0.5, 2.0, **pattern) * one.decoder() for one in (ours, theirs)]
    assert noise[0] == pytest.approx(noise[1])


def test_the_sensitivity_of_decay_is_a_geometric_sum():
    assert make_mechanism("decay", 5, decay=0.5).sensitivity() == pytest.approx(math.sqrt(341 / 256))
    twice = make_mechanism("decay", 3, decay=0.5).sensitivity(2, 1)  # columns 1, 1/2, 1/4 and 0, 1, 1/2
    assert twice == pytest.approx(math.sqrt(1 + 1.5**2 + 0.75**2))


def test_bisr_is_the_square_roots_inverse_with_fewer_diagonals():
    whole = make_mechanism("sqrt_toeplitz", 20)
    for bands in (1, 2, 7, 20, 50):
        mechanism = make_mechanism("bisr", 20, bands=bands)
        kept = min(bands, 20)
        assert mechanism.inverse_column[:kept] == pytest.approx(whole.inverse_column[:kept])
        assert not mechanism.inverse_column[kept:].any()
        ratios = mechanism.inverse_column[1:kept] / mechanism.inverse_column[: kept - 1]
        assert ratios == pytest.approx(1 - 1.5 / np.arange(1, kept))
    assert make_mechanism("bisr", 20, bands=50).encoder_column == pytest.approx(whole.encoder_column)


@pytest.mark.parametrize("n", [60, 400])
def test_the_first_column_of_bisr_never_rises(n):
    for bands in (1, 2, 3, 5, 8, 16, 17, 40):
        column = make_mechanism("bisr", n, bands=bands).encoder_column
        assert (column >= 0).all()
        assert (np.diff(column) <= 1e-15).all()


def test_at_1024_releases_16_bands_have_the_papers_error():
    assert released_error(make_mechanism("bisr", 1024), "prefix-sum") == pytest.approx(5.10, abs=0.005)


@pytest.mark.parametrize(("options", "nonces"), [({"mechanism": "decay"}, 1), ({"mechanism": "bisr", "bands": 4}, 3)])
def test_a_client_keeps_the_nonces_of_the_last_releases_and_no_more(options, nonces):
    ledger = MemoryLedger()
    subject = client(ledger, **options)
    for k in range(1, 9):
        subject.release("s", 0, contribution)
        stream = ledger.stream("s")
        assert len(stream.nonces) == 16 * min(k, nonces)
        assert not stream.noise_state


def test_a_state_is_made_from_the_last_rows_alone():
    mechanism, asked = make_mechanism("bisr", 30, bands=5), []
    mechanism.state_after(20, lambda releases: asked.append(releases) or np.zeros((len(releases), 2)))
    assert asked == [range(17, 21)]


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_bands_must_be_a_number_of_diagonals(value):
    with raises(ConfigurationError, "out-of-range", "bands"):
        make_mechanism("bisr", 4, bands=value)
