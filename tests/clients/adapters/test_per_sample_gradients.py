"""Rows of a linear model that are not written out: as long, and in sums as precise, as clipping counts on."""

import numpy as np
import pytest
from murmurfl.clients.adapters.per_sample_gradients import OuterProducts, PulledOuterProducts
from murmurfl.privacy.release.clipping import SUMMING_ERROR, DenseContributions, RowBound


def parts(seed, samples=40, classes=3, features=7):
    generator = np.random.default_rng(seed)
    residuals, rows = generator.normal(size=(samples, classes)), generator.normal(size=(samples, features))
    return residuals, rows, generator.normal(size=(classes, features))


def written(stacked, samples, width):
    rows = np.empty((samples, width))
    for row in range(samples):
        stacked.write(row, 1.0, rows[row])
    return rows


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("length", [0.0, 1e-9, 1.0, 1e6])
def test_a_pull_is_in_every_row_and_in_norms_and_sums(bias, length):
    residuals, features, pull = parts(1)
    pulled = PulledOuterProducts(residuals, features, length * pull, bias=bias)
    dense = residuals[:, :, None] * features[:, None, :] + length * pull
    dense = np.concatenate([dense.reshape(40, -1), *([residuals] if bias else [])], axis=1)
    assert written(pulled, 40, dense.shape[1]) == pytest.approx(dense, rel=1e-12, abs=1e-12)
    assert pulled.norms() == pytest.approx(np.linalg.norm(dense, axis=1), rel=1e-9)
    scales = np.random.default_rng(2).uniform(size=40)
    assert pulled.scaled_sum(scales) == pytest.approx(scales @ dense, rel=1e-9, abs=1e-9 * max(length, 1.0))


@pytest.mark.parametrize("bias", [False, True])
def test_of_no_samples_there_is_no_length_and_a_sum_of_nothing(bias):
    residuals, features, pull = parts(1, samples=0)
    for made in (
        OuterProducts(residuals, features, bias=bias),
        PulledOuterProducts(residuals, features, pull, bias=bias),
    ):
        assert made.norms().shape == (0,)
        assert not made.scaled_sum(np.zeros(0)).any()


def test_without_a_pull_nothing_is_other_than_without_one():
    residuals, features, pull = parts(3)
    plain, pulled = OuterProducts(residuals, features), PulledOuterProducts(residuals, features, 0.0 * pull)
    assert pulled.norms() == pytest.approx(plain.norms(), rel=1e-12)
    assert np.array_equal(written(pulled, 40, 24), written(plain, 40, 24))


@pytest.mark.parametrize("bias", [True, False])
def test_chosen_rows_are_those_of_all_to_the_last_bit(bias):
    generator = np.random.Generator(np.random.Philox(key=3))
    residuals, features, pull = (generator.normal(size=size) for size in ((6, 3), (6, 20), (3, 20)))
    rows = np.array([4, 0, 5])
    for kind, more in ((OuterProducts, ()), (PulledOuterProducts, (pull,))):
        everything = kind(residuals, features, *more, bias=bias)
        some = everything.chosen(rows)
        assert some.norms().tobytes() == everything.norms()[rows].tobytes()
        for place, row in enumerate(rows):
            one, other = np.empty((2, 60 + 3 * bias))
            some.write(place, 0.7, one)
            everything.write(row, 0.7, other)
            assert one.tobytes() == other.tobytes()


class MeasuresWhatIsLeft(PulledOuterProducts):
    """Bug: the square of a norm by its three parts alone, whatever is lost when they cancel."""

    def __init__(self, residuals, features, pull, *, bias=True):
        super().__init__(residuals, features, pull, bias=bias)
        squares = OuterProducts(residuals, features, bias=bias).norms() ** 2
        squares += 2 * np.einsum("ij,ij->i", residuals, features @ pull.T) + (pull * pull).sum()
        self._norms, self._cancels = np.sqrt(np.maximum(squares, 0.0)), np.zeros(len(residuals), dtype=bool)


def hostile(kind, size, seed=4):
    """Samples whose gradients a server's V nearly takes away: each row is about as long as the clip, its parts are not.

    Returns rows in closed form and the same written out.
    """
    generator = np.random.default_rng(seed)
    features = np.tile(generator.normal(size=(1, 30)), (20, 1))
    residuals = np.full((20, 1), size)
    features += generator.normal(size=features.shape) / size
    stacked = kind(residuals, features, -size * features[:1], bias=False)
    return stacked, residuals * features - size * features[:1]


def farthest(kind, size):
    """How much longer than the clip a bounded row is, and how far a bounded sum is from the sum of bounded rows."""
    stacked, rows = hostile(kind, size)
    bound = RowBound(1.0)
    scales = bound.scales(stacked.norms())
    longest = np.linalg.norm(scales[:, None] * rows, axis=1).max()
    total = bound.total(stacked, 30)
    return longest - 1.0, np.linalg.norm(total - bound.total(DenseContributions(rows), 30))


@pytest.mark.parametrize("size", [1e3, 1e7, 1e12, 1e15])
def test_a_cancelling_server_gets_no_row_beyond_the_clip(size):
    beyond, apart = farthest(PulledOuterProducts, size)
    assert beyond <= 1e-12
    assert apart <= SUMMING_ERROR
    beyond, apart = farthest(MeasuresWhatIsLeft, 1e12)
    assert beyond > 0.1 or apart > SUMMING_ERROR


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e200])
@pytest.mark.parametrize("residual", [0.0, 1.0, np.nan])
def test_a_row_that_cannot_be_measured_is_bounded_by_itself(value, residual):
    residuals, features, pull = parts(5)
    features[3], residuals[3] = value, residual
    bound = RowBound(1.0)
    total = bound.total(PulledOuterProducts(residuals, features, pull), 24)
    kept = np.arange(40) != 3
    others = bound.total(PulledOuterProducts(residuals[kept], features[kept], pull), 24)
    assert np.linalg.norm(total - others) <= 1.0 + 1e-9


@pytest.mark.parametrize("bias", [False, True])
def test_rows_of_tiny_and_huge_factors_keep_their_length(bias):
    """The squares of the tiny one lose their digits, or are zero: a norm made of them would be too short."""
    for tiny, huge in ((1e-170, 1e154), (3e-161, 2e150), (1e-162, 1e153), (0.0, 1e150), (1e-150, 1e140)):
        residuals, features = np.array([[tiny, 0.3 * tiny], [1.0, 2.0]]), np.array([[huge, 0.7 * huge], [3.0, 4.0]])
        for stack in (OuterProducts(residuals, features, bias=bias), OuterProducts(features, residuals, bias=bias)):
            rows = written(stack, 2, 4 + 2 * bias)
            told = stack.norms()
            with np.errstate(all="ignore"):
                length = np.abs(rows).max(axis=1)
                length *= np.linalg.norm(rows / np.where(length, length, 1.0)[:, None], axis=1)
            known = np.isfinite(told)
            assert known[1]
            assert np.allclose(told[known], length[known], rtol=1e-12, atol=0.0)
