"""Every mechanism against dense linear algebra: one suite, one table."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, make_mechanism
from murmurfl.privacy.mechanisms import worst_pattern

CASES = {
    "independent": ("independent", {}),
    "uniform": ("cancelling", {"schedule": "uniform"}),
    "harmonic": ("cancelling", {"schedule": "harmonic"}),
    "paper": ("cancelling", {"schedule": "paper"}),
    "paper, more rounds than releases": ("cancelling", {"schedule": "paper", "num_rounds": 100}),
}
mechanisms = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def make(case, releases):
    name, options = case
    return make_mechanism(name, releases, **options)


@mechanisms
@pytest.mark.parametrize("n", [1, 2, 5, 12, 33])
def test_decoder_times_encoder_is_the_prefix_sum(case, n):
    mechanism = make(case, n)
    assert mechanism.decoder() @ mechanism.materialize() == pytest.approx(np.tri(n))
    assert mechanism.decoder() == pytest.approx(np.tril(mechanism.decoder())), "row k may use only noise up to k"


@mechanisms
@pytest.mark.parametrize("n", [1, 7, 20])
def test_streamed_increments_add_up_to_the_rows_of_dense_b_z(case, n):
    mechanism = make(case, n)
    normals = np.random.Generator(np.random.Philox(key=5)).normal(size=(n, 11))
    dense = mechanism.decoder() @ normals
    state, row = mechanism.initial_state(11), np.zeros(11)
    for k in range(1, n + 1):
        increment = mechanism.increment(state, k, normals[k - 1])
        row = row + increment.added - (0 if increment.removed is None else increment.removed)
        assert row == pytest.approx(dense[k - 1])
        assert mechanism.row_std(k) == pytest.approx(np.linalg.norm(mechanism.decoder()[k - 1]))
        state = increment.state


@mechanisms
def test_the_state_of_a_stream_can_be_regenerated_to_the_last_bit(case):
    mechanism = make(case, 40)
    if mechanism.memory == "state":
        pytest.skip("its state is kept")
    normals = np.random.Generator(np.random.Philox(key=6)).normal(size=(40, 3))
    state = mechanism.initial_state(3)
    for k in range(1, 41):
        state = mechanism.increment(state, k, normals[k - 1]).state
        again = mechanism.state_after(k, lambda releases: normals[np.array(releases) - 1])
        state = again if state is None else state
        assert len(state) == len(again)
        assert all((a == b).all() for a, b in zip(state, again, strict=True))


@mechanisms
@pytest.mark.parametrize("n", [1, 3, 8, 12])
def test_sensitivity_is_exact_over_every_allowed_pattern(case, n):
    """Brute force over all subsets: C is non-negative, so the worst signs are all equal."""
    mechanism = make(case, n)
    encoder = mechanism.materialize()
    assert (encoder.T @ encoder >= 0).all()
    for participations in range(1, n + 1):
        for separation in range(1, n + 1):
            worst = 0.0
            for size in range(1, participations + 1):
                for chosen in combinations(range(n), size):
                    if all(b - a >= separation for a, b in pairwise(chosen)):
                        worst = max(worst, float(np.linalg.norm(encoder[:, chosen].sum(axis=1))))
            assert mechanism.sensitivity(participations, separation) == pytest.approx(worst)


@mechanisms
def test_sensitivity_of_the_first_releases_is_that_of_the_leading_block(case):
    mechanism = make(case, 9)
    for n in range(1, 10):
        assert mechanism.sensitivity(n=n) == pytest.approx(
            np.linalg.norm(mechanism.materialize()[:n, :n], axis=0).max()
        )
        assert (mechanism.materialize(n) == mechanism.materialize()[:n, :n]).all()


def test_the_plain_search_agrees_with_the_closed_formula():
    mechanism = make_mechanism("cancelling", 10, schedule="harmonic")
    gram = mechanism.materialize().T @ mechanism.materialize()
    for participations, separation in [(2, 1), (3, 2), (4, 3), (9, 5)]:
        assert np.sqrt(worst_pattern(gram, participations, separation)) == pytest.approx(
            mechanism.sensitivity(participations, separation)
        )


def test_schedules_are_those_of_the_papers():
    """ALGORITHMS 2.2, in units of Delta / mu."""
    k = np.arange(1, 51)
    assert make_mechanism("cancelling", 50, schedule="uniform").sigmas ** 2 == pytest.approx(np.full(50, 50.0))
    assert make_mechanism("cancelling", 50, schedule="harmonic").sigmas ** 2 == pytest.approx((1 / k).sum() * k)
    paper = make_mechanism("cancelling", 50, schedule="paper", num_rounds=1200)
    assert paper.sigmas**2 == pytest.approx((1 + np.log(1200)) * k)
    assert paper.sensitivity() == pytest.approx(np.sqrt((1 / k).sum() / (1 + np.log(1200))))
    assert paper.sensitivity() < 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("cancelled", 4, {}),
        ("cancelling", 0, {}),
        ("cancelling", 2.5, {}),
        ("cancelling", 4, {"schedule": "linear"}),
        ("cancelling", 4, {"schedule": "uniform", "num_rounds": 9}),
        ("cancelling", 4, {"schedule": "paper", "num_rounds": 3}),
        ("independent", 4, {"schedule": "uniform"}),
    ],
)
def test_unknown_names_and_impossible_options_are_refused(arguments):
    name, releases, options = arguments
    with pytest.raises(ConfigurationError, match="Expected"):
        make_mechanism(name, releases, **options)


def test_releases_out_of_range_are_refused():
    mechanism = make_mechanism("cancelling", 3)
    for call in (
        lambda: mechanism.increment((), 4, np.zeros(2)),
        lambda: mechanism.materialize(4),
        lambda: mechanism.sensitivity(0),
        lambda: mechanism.sensitivity(n=0),
    ):
        with pytest.raises(ConfigurationError, match="Expected"):
            call()
