"""A forecast in words: lines that fit, what would help, and figures in two digits."""

import math
from dataclasses import replace

import pytest
from murmurfl.privacy import Forecast, gdp_mu
from murmurfl.privacy.forecast_text import (
    change_words,
    forecast_advice,
    forecast_banner,
    forecast_basis,
    forecast_document,
    forecast_lines,
    rounded_count,
    shortest,
)

UPDATES = Forecast(ratio=2.0, num_parameters=2500, clients=40, per_round=40, rounds=8, mu=gdp_mu(4.0, 1e-5), delta=1e-5)
GRADIENTS = replace(UPDATES, clip_unit="sample", unit="sample")


@pytest.mark.parametrize("width", [64, 80])
@pytest.mark.parametrize("kind", [UPDATES, GRADIENTS, replace(GRADIENTS, rehearsed=(0.1, 0.3))])
@pytest.mark.parametrize("ratio", [1e-3, 0.4, 3.0, 1e6])
def test_every_line_fits_and_names_verdict_and_estimate(width, kind, ratio):
    found = replace(kind, ratio=ratio)
    lines = forecast_banner(found, width) if found.is_warning else forecast_lines(found, width)
    assert max(map(len, lines)) <= width
    text = " ".join(lines)
    assert found.verdict in text
    assert "estimate" in text
    assert ("What would help" in text) == (found.verdict != "useful")
    assert bool(forecast_document(found)["changes"]) == bool(found.verdict != "useful" and found.changes())


def test_useful_forecast_of_gradients_says_what_it_does_not_know():
    gradients, updates = replace(GRADIENTS, ratio=0.01), replace(UPDATES, ratio=0.01)
    assert gradients.verdict == updates.verdict == "useful"
    assert "without noise it cannot know" in " ".join(forecast_lines(gradients))
    assert forecast_advice(updates) == []


def test_basis_shows_mu_with_its_epsilon_where_one_exists():
    assert "mu = 0.93 (epsilon = 4 at delta = 1e-05) to protect all samples of one client" in forecast_basis(UPDATES)
    assert "epsilon" not in forecast_basis(replace(UPDATES, mu=math.inf))


def test_each_change_is_named_with_its_amount():
    words = {one.kind: change_words(UPDATES, one) for one in UPDATES.changes()}
    assert list(words) == ["sample", "sums", "both", "clients", "parameters", "epsilon"]
    assert words["sample"] == "privacy for one sample instead, 100 a client"
    assert words["clients"] == "330 clients like these"  # 40 x (2 / 0.7)^2 = 326.5
    assert words["parameters"] == "300 values to train (frozen features)"  # 2500 / (2 / 0.7)^2 = 306
    assert words["epsilon"].startswith("epsilon = ")
    (samples,) = (one for one in GRADIENTS.changes() if one.kind == "samples")
    assert change_words(GRADIENTS, samples) == "14 times as many samples on each client"  # 2 / 0.15 = 13.3
    correlated = replace(UPDATES, alone=False)
    (sums,) = (one for one in correlated.changes() if one.kind == "sums")
    assert change_words(correlated, sums).endswith("at best")


def test_figures_are_short_and_counts_rounded_away_from_too_few():
    assert [shortest(x) for x in (0, 5e-324, 0.00123, 0.999, 9.96, 10.4, 54321.0, math.inf)] == [
        *("0", "4.94066e-324", "0.0012", "1", "10", "10", "54,000", "inf")
    ]
    assert [rounded_count(x) for x in (1, 9, 101, 54321)] == ["1", "9", "110", "55,000"]
    assert rounded_count(199, up=False) == "190"
