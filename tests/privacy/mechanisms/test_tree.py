"""Tree aggregation: the nodes, both decoders, and what the better one gains."""

import numpy as np
import pytest
from murmurfl.privacy import make_mechanism


def test_nodes_are_dyadic_intervals_in_order_of_completion():
    encoder = make_mechanism("tree", 6).materialize()
    intervals = [tuple(np.flatnonzero(row) + 1) for row in encoder]
    assert intervals == [(1,), (2,), (1, 2), (3,), (4,), (3, 4), (1, 2, 3, 4), (5,), (6,), (5, 6)]
    assert [make_mechanism("tree", 8).draws(k) for k in range(1, 9)] == [1, 2, 1, 3, 1, 2, 1, 4]


def test_the_papers_example_of_four_releases():
    """zhang-2025, equation 5, with the nodes in the order they complete: 1st, 3rd, 3rd and 4th, 7th node."""
    decoder = make_mechanism("tree", 4, decoder="dyadic").decoder()
    assert decoder.astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("height", range(6))
def test_the_estimates_variance_is_the_least_unbiased_one(height):
    """2^h / (2^{h+1} - 1): the least variance of any combination of the nodes inside a complete subtree."""
    n = 2**height
    mechanism = make_mechanism("tree", n)
    assert mechanism.row_std(n) ** 2 == pytest.approx(n / (2 * n - 1))
    encoder = mechanism.materialize()
    best = np.linalg.lstsq(encoder.T, np.ones(n))[0]  # the shortest row with (row) C = (1 ... 1)
    assert mechanism.row_std(n) == pytest.approx(np.linalg.norm(best))
    assert mechanism.decoder()[-1] == pytest.approx(best)


@pytest.mark.parametrize("n", [1, 2, 3, 31, 32, 33, 100])
def test_least_squares_is_never_worse_than_dyadic(n):
    ours, plain = make_mechanism("tree", n), make_mechanism("tree", n, decoder="dyadic")
    assert all(ours.row_std(k) <= plain.row_std(k) for k in range(1, n + 1))
    assert plain.row_std(n) ** 2 == pytest.approx(n.bit_count())
    assert ours.sensitivity() == plain.sensitivity() == pytest.approx(np.sqrt(n.bit_length()))


def test_the_range_of_rows_is_found_without_looking_at_all_of_them():
    for n in [1, 2, 5, 6, 7, 8, 100, 127, 128, 1000]:
        for decoder in ("dyadic", "least-squares"):
            mechanism = make_mechanism("tree", n, decoder=decoder)
            stds = [mechanism.row_std(k) for k in range(1, n + 1)]
            assert mechanism.row_std_range() == pytest.approx((min(stds), max(stds)))


def test_a_long_stream_keeps_one_array_a_height():
    mechanism = make_mechanism("tree", 1000)
    state = mechanism.initial_state(2)
    for k in range(1, 1001):
        state = mechanism.increment(state, k, np.ones(2 * mechanism.draws(k))).state
        assert len(state) == k.bit_count()
    assert mechanism.memory_bytes(10**6) == 8 * 10**6 * 10


@pytest.mark.parametrize("n", [1, 2, 7, 12, 13, 64, 100])
def test_overlaps_are_counted_without_writing_the_encoder_out(n):
    mechanism = make_mechanism("tree", 100)
    encoder = mechanism.materialize(n)
    some = np.arange(n)[::-2]
    assert (mechanism._gram(n)(some) == (encoder.T @ encoder)[np.ix_(some, some)]).all()


def test_the_sensitivity_of_ten_thousand_releases_needs_no_dense_encoder(monkeypatch):
    mechanism = make_mechanism("tree", 10_000)
    monkeypatch.setattr(mechanism, "materialize", None)
    assert mechanism.sensitivity() == pytest.approx(np.sqrt(14))
    found = mechanism.sensitivity_bound(5, 2000, pattern="epochs")
    assert found.exact
    assert found.value == pytest.approx(10.0), "what the dense search finds in 43 s"
