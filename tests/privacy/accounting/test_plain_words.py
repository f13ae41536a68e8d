"""The plain meaning of mu: true of the best test there is, rounded up, and silent where nothing is guaranteed."""

import doctest
import math

import numpy as np
import pytest
from murmurfl.privacy import Guarantee, gdp_best_guess
from murmurfl.privacy.accounting import guarantee
from murmurfl.privacy.accounting.guarantee import plain_meaning


def percent(text):
    return float(text.partition("at most ")[2].partition(" %")[0])


def test_the_examples_of_the_documentation_hold():
    found = doctest.testmod(guarantee)
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize("mu", [0.0, 0.02, 0.5, 1.0, 4.0, 12.0])
def test_the_percentage_is_that_of_the_best_guess_rounded_up_to_a_tenth(mu):
    said, exact = percent(plain_meaning(mu)), 100 * gdp_best_guess(mu)
    assert exact - 1e-6 <= said < exact + 0.1


def test_the_best_guesser_is_right_as_often_as_it_says():
    """The likelihood ratio test of N(0, 1) and N(1, 1), each half of the time; false alarm 1 in 10,000."""
    draws = np.random.default_rng(7).standard_normal(100_000)
    used = np.arange(len(draws)) % 2
    right = np.mean((draws + used > 0.5) == used)
    assert right == pytest.approx(percent(plain_meaning(1.0)) / 100, abs=3.9 * 0.5 / math.sqrt(len(draws)) + 1e-3)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "holds for the server and everybody else, even if they know every other sample."),
        ({"trust": "trusted-server"}, "holds for everybody but the trusted server, even if they know every other"),
        ({"unit": "machine"}, "whether the samples of one machine were used, or any others in their place,"),
    ],
)
def test_it_says_what_is_guessed_and_by_whom(parts, words):
    guarantee = Guarantee(1.0, 1e-5, "tree noise", **parts)
    assert words in guarantee.meaning
    assert guarantee.document()["meaning"] == guarantee.meaning


def test_under_secure_aggregation_it_says_what_it_rests_on_and_what_holds_without():
    sums = {"trust": "secure-aggregation", "min_honest": 50}
    said = Guarantee(1.0, 1e-5, "tree noise", mu_local=7.1, **sums).meaning
    assert "if one helper and 50 machines of each sum are honest; if not, at most 100 %." in said
    said = Guarantee(1.0, 1e-5, "tree noise", mu_local=math.inf, **sums).meaning
    assert said.endswith("are honest; if not, nothing is promised.")


def test_where_nothing_is_guaranteed_it_says_nothing():
    assert Guarantee(math.inf, 1e-5, "no noise").meaning == ""
