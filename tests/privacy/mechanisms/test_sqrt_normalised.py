"""The square root of the prefix sum with columns of norm 1."""

import numpy as np
import pytest
from murmurfl.privacy import make_mechanism


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
