"""What an evaluation's noisy sum says: figures are those of the counts, and intervals have what they promise."""

import math

import numpy as np
import pytest
from murmurfl.strategies import EvaluationResult
from murmurfl.strategies.side.private_evaluation import EVALUATION_FIGURES, noisy_auc, noisy_share_interval
from scipy.stats import rankdata

DRAWS = 4000


def generator(key):
    return np.random.Generator(np.random.Philox(key=key))


def counted(scores, positive, bins):
    return np.array([np.histogram(scores[positive == c], bins=bins, range=(0, 1))[0] for c in (False, True)], float)


def area(scores, positive):
    ones, zeros = positive.sum(), (~positive).sum()
    return (rankdata(scores)[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros)


@pytest.mark.parametrize("p", [0.5, 0.93, 0.99])
@pytest.mark.parametrize("std", [0.0, 0.005, 0.05, 0.3])
def test_the_interval_of_an_accuracy_has_it_in_95_of_100_cases(p, std):
    """Wilson's interval has 93 % at p = 0.99 without noise, for counts are whole; 92 % of 4000 draws is far below."""
    samples, draw = 400, generator(3)
    shares = draw.binomial(samples, p, DRAWS) / samples + std * draw.normal(size=DRAWS)
    within = [low <= p <= high for low, high in (noisy_share_interval(share, samples, std) for share in shares)]
    assert 0.92 < np.mean(within) <= 0.99


def test_an_interval_that_leaves_the_noise_out_is_caught():
    """The bug that would be: Wilson's interval, as if the count had no noise."""
    draw, p = generator(4), 0.9
    shares = draw.binomial(400, p, DRAWS) / 400 + 0.05 * draw.normal(size=DRAWS)
    planted = [low <= p <= high for low, high in (noisy_share_interval(share, 400, 0.0) for share in shares)]
    assert np.mean(planted) < 0.6


def test_without_noise_it_is_wilson_s():
    low, high = noisy_share_interval(0.9, 100, 0.0)
    assert (low, high) == (pytest.approx(0.8256, abs=1e-4), pytest.approx(0.9448, abs=1e-4))
    assert noisy_share_interval(1.4, 10, 0.0) == (1.0, 1.0)
    assert noisy_share_interval(-3.0, 10, 0.01) == (0.0, 0.0)


def test_machines_that_differ_make_no_interval_too_short():
    """Strata: each machine's samples have an accuracy of their own."""
    draw, shares = generator(5), np.linspace(0.6, 1.0, 20)
    found = draw.binomial(20, shares, (DRAWS, 20)).sum(axis=1) / 400 + 0.02 * draw.normal(size=DRAWS)
    within = [low <= 0.8 <= high for low, high in (noisy_share_interval(share, 400, 0.02) for share in found)]
    assert np.mean(within) > 0.93


def test_the_area_without_noise_is_that_of_the_binned_scores():
    draw = generator(6)
    positive = draw.random(800) < 0.4
    scores = np.clip(draw.normal(0.4 + 0.2 * positive, 0.2), 0, 1)
    found, noise, sampling = noisy_auc(counted(scores, positive, 16), 0.0)
    binned = np.minimum(np.floor(scores * 16), 15)
    assert found == pytest.approx(area(binned, positive), rel=1e-12)
    assert found == pytest.approx(area(scores, positive), abs=0.01)
    assert noise == 0.0
    assert sampling > 0


def test_the_noise_of_an_area_is_what_is_said_of_it():
    """4000 draws miss their deviation by 12 % or more once in a hundred million times; the rest is curvature."""
    draw = generator(7)
    positive = draw.random(3000) < 0.3
    counts = counted(np.clip(draw.normal(0.4 + 0.2 * positive, 0.2), 0, 1), positive, 12)
    for std in (2.0, 15.0):
        found = [noisy_auc(counts + std * draw.normal(size=counts.shape), std) for _ in range(DRAWS)]
        areas, stated = np.array([one[0] for one in found]), np.median([one[1] for one in found])
        assert np.std(areas) == pytest.approx(stated, rel=0.15)


def test_the_area_interval_covers_95_percent():
    draw, std, bins = generator(8), 4.0, 12
    many = draw.random(200_000) < 0.4
    scores = np.clip(draw.normal(0.4 + 0.2 * many, 0.2), 0, 1)
    truth = area(np.minimum(np.floor(scores * bins), bins - 1), many)
    within = []
    for _ in range(600):
        chosen = draw.integers(0, len(many), 500)
        counts = counted(scores[chosen], many[chosen], bins) + std * draw.normal(size=(2, bins))
        low, high = EvaluationResult(0, 0, 500, 1, histograms=counts, histogram_std=std).auc_interval
        within.append(low <= truth <= high)
    assert np.mean(within) > 0.93


def test_a_class_that_noise_hides_has_no_area():
    counts = np.array([[5.0, 3.0], [100.0, 80.0]])
    assert noisy_auc(counts, 10.0) is None
    assert noisy_auc(counts, 0.1) is not None
    assert noisy_auc(np.array([[0.0, 0.0], [1.0, 2.0]]), 0.0) is None
    hidden = EvaluationResult(90.0, 1.0, 100, 4, histograms=counts, histogram_std=10.0)
    assert (hidden.auc, hidden.auc_interval) == (None, None)
    assert "no AUC: the noise hides one of the classes" in hidden.sentence


def test_the_sentence_says_what_each_interval_counts_and_whose_samples_they_are():
    found = EvaluationResult(934.0, 5.0, 1000, 12, held_out=True)
    assert found.sentence == (
        "accuracy 93.4 % (95 % interval 91.4 to 95.1 %, noise and sampling; noise alone 92.4 to 94.4 %), on 1,000 "
        "samples of 12 machines that were held out"
    )
    assert EvaluationResult(934.0, 5.0, 1000, 1).sentence.endswith("of 1 machine that it was trained on")
    assert tuple(found.document) == EVALUATION_FIGURES
    assert found.document["interval"] == list(found.interval)
    assert EvaluationResult(1200.0, 500.0, 1000, 1).accuracy == 1.0
    assert math.isclose(found.noise_std, 0.005)
